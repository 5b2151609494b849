/* SPDX-License-Identifier: MIT */
/* Selection and pyramid of every CPU variant against the reference. Lists must be equal wherever the deciding
 * gap, the smallest difference between a score that was kept and one that was dropped, exceeds the error of the
 * scores. */

#include "config.h"

#include "cpu_cases.h"

#include <float.h>

struct shape {
    int batch, q_len, kv_len, kv_heads, group, dim, leaf, topk, first, last;
    bool causal;
};

static const clattn_dtype dtypes[] = {CLATTN_FLOAT32, CLATTN_FLOAT16, CLATTN_BFLOAT16};

struct inputs {
    const struct shape *shape;
    clattn_tensor q, k;
    clattn_attention_desc attention;
    clattn_select_desc select;
    clattn_pyramid *pyramid; /* of the reference */
};

static void inputs_make(const struct shape *s, clattn_dtype dtype, int layout, struct inputs *in)
{
    *in = (struct inputs){.shape = s};
    in->q = tensor_make(layout, dtype, s->batch, s->q_len, s->kv_heads * s->group, s->dim);
    in->k = tensor_make(layout, dtype, s->batch, s->kv_len, s->kv_heads, s->dim);
    tensor_fill(&in->q, 1);
    tensor_fill(&in->k, 1);
    in->attention = (clattn_attention_desc)CLATTN_ATTENTION_DESC_INIT;
    in->attention.causal = s->causal;
    in->select = (clattn_select_desc)CLATTN_SELECT_DESC_INIT;
    in->select.topk = s->topk;
    in->select.leaf = s->leaf;
    in->select.forced_first = s->first;
    in->select.forced_last = s->last;
}

static void inputs_free(struct inputs *in)
{
    clattn_pyramid_release(reference, in->pyramid);
    tensor_free(&in->q);
    tensor_free(&in->k);
}

/* ---- the deciding gap, from the lists of the reference ---- */

/* Score of one node by the definition (clattn_selector in clattn.h): the sum over the group's heads. */
static double node_score(const struct inputs *in, int64_t b, int64_t i, int h, int level, int64_t node,
                         double *error)
{
    const struct shape *s = in->shape;
    bool own = in->select.selector == CLATTN_SELECT_FLAT_MEAN;
    int64_t width = own          ? 1
                    : level == 1 ? s->leaf
                                 : 2,
            score_level = own ? level : level - 1, existing = s->kv_len;
    float *means = NULL;
    if (score_level >= 1) {
        clattn_pyramid_read(reference, in->pyramid, b, h, (int)score_level, NULL, &existing);
        means = malloc((size_t)(existing * s->dim) * sizeof *means);
        clattn_pyramid_read(reference, in->pyramid, b, h, (int)score_level, means, NULL);
    }
    double total = 0;
    for (int g = 0; g < s->group; g++) {
        double z[128], most = -INFINITY, sum = 0, mean = 0, variance = 0;
        int64_t count = MIN(width, existing - node * width);
        for (int64_t c = 0; c < count; c++) {
            double dot = 0, size = 0;
            for (int64_t d = 0; d < s->dim; d++) {
                double key = means ? means[(node * width + c) * s->dim + d]
                                   : tensor_get(&in->k, b, node * width + c, h, d);
                double term = key * tensor_get(&in->q, b, i, (int64_t)h * s->group + g, d);
                dot += term;
                size += fabs(term);
            }
            z[c] = dot / sqrt(s->dim);
            most = fmax(most, z[c]);
            mean += z[c] / (double)count;
            *error += 4 * FLT_EPSILON * size / sqrt(s->dim);
        }
        for (int64_t c = 0; c < count; c++) {
            sum += exp(z[c] - most);
            variance += (z[c] - mean) * (z[c] - mean) / (double)count;
        }
        switch (in->select.selector) {
        case CLATTN_SELECT_PISA1:
        case CLATTN_SELECT_FLAT_MEAN:
            total += mean;
            break;
        case CLATTN_SELECT_PISA2:
            total += mean + variance / 2;
            break;
        default:
            total += most + log(sum);
        }
    }
    free(means);
    return total;
}

/* May these two lists of one query both be right? At the level where the walks part, the nodes that only one of
 * them kept must have nearly equal scores. The leaves of a list show which nodes it kept. */
static bool nearly_tied(const struct inputs *in, int64_t b, int64_t i, int h, const int32_t *x,
                        const int32_t *y)
{
    int levels = 1;
    bool flat = in->select.selector == CLATTN_SELECT_FLAT_MEAN || in->select.selector == CLATTN_SELECT_FLAT_LSE;
    while (!flat && (ceil_div(in->shape->kv_len, in->shape->leaf) >> levels) > 0)
        levels++;
    for (int level = levels; level >= 1; level--) {
        double lowest[2] = {INFINITY, INFINITY}, error = 0;
        bool differ = false;
        for (int side = 0; side < 2; side++) {
            const int32_t *mine = side ? y : x, *other = side ? x : y;
            for (int n = 0; n < in->shape->topk && mine[n] >= 0; n++) {
                bool common = false;
                for (int m = 0; m < in->shape->topk && other[m] >= 0; m++)
                    common = common || mine[n] >> (level - 1) == other[m] >> (level - 1);
                if (common) continue;
                differ = true;
                lowest[side] =
                    fmin(lowest[side], node_score(in, b, i, h, level, mine[n] >> (level - 1), &error));
            }
        }
        if (differ) return fabs(lowest[0] - lowest[1]) <= error;
    }
    return true;
}

/* ---- comparison ---- */

static int32_t *select_lists(clattn_context *context, const struct inputs *in, bool flat_lse)
{
    clattn_blocks *blocks = NULL;
    clattn_pyramid *pyramid = NULL;
    clattn_blocks_desc desc = {.size = sizeof desc};
    if (!flat_lse)
        assert_int_equal(clattn_pyramid_build(context, &in->attention, in->select.leaf, &in->k, &pyramid, NULL),
                         CLATTN_SUCCESS);
    assert_int_equal(
        clattn_select(context, &in->attention, &in->select, &in->q, &in->k, pyramid, &blocks, NULL),
        CLATTN_SUCCESS);
    clattn_blocks_describe(blocks, &desc);
    size_t lists = (size_t)(desc.rows * desc.heads);
    int32_t *indices = malloc(lists * (size_t)desc.topk * sizeof *indices),
            *counts = malloc(lists * sizeof *counts);
    assert_int_equal(clattn_blocks_read(context, blocks, indices, counts), CLATTN_SUCCESS);
    for (size_t n = 0; n < lists; n++)
        for (int c = 0; c < desc.topk; c++)
            assert_int_equal(indices[n * (size_t)desc.topk + (size_t)c] >= 0, c < counts[n]);
    free(counts);
    clattn_blocks_release(context, blocks);
    clattn_pyramid_release(context, pyramid);
    return indices;
}

static void compare_lists(const char *variant, const struct inputs *in, const int32_t *got,
                          const int32_t *expected, bool exactly)
{
    const struct shape *s = in->shape;
    for (int64_t row = 0; row < (int64_t)s->batch * s->q_len; row++)
        for (int h = 0; h < s->kv_heads; h++) {
            int64_t list = (row * s->kv_heads + h) * s->topk;
            if (memcmp(got + list, expected + list, (size_t)s->topk * sizeof *got) == 0) continue;
            if (!exactly && nearly_tied(in, row / s->q_len, row % s->q_len, h, got + list, expected + list))
                continue;
            for (int n = 0; n < s->topk; n++)
                if (got[list + n] != expected[list + n])
                    fail_msg("%s: selector %d, query %lld, head %d: entry %d is %d, expected %d", variant,
                             in->select.selector, (long long)row, h, n, got[list + n], expected[list + n]);
        }
}

static void check_selectors(struct inputs *in, bool exactly)
{
    clattn_pyramid_release(reference, in->pyramid);
    in->pyramid = NULL;
    assert_int_equal(
        clattn_pyramid_build(reference, &in->attention, in->select.leaf, &in->k, &in->pyramid, NULL),
        CLATTN_SUCCESS);
    for (int selector = CLATTN_SELECT_PISA; selector <= CLATTN_SELECT_FLAT_LSE; selector++) {
        in->select.selector = (clattn_selector)selector;
        int32_t *expected = select_lists(reference, in, selector == CLATTN_SELECT_FLAT_LSE);
        for (int n = 0; n < variant_count; n++) {
            int32_t *got = select_lists(variants[n].context, in, selector == CLATTN_SELECT_FLAT_LSE);
            compare_lists(variants[n].name, in, got, expected, exactly);
            free(got);
        }
        free(expected);
    }
}

static const struct shape shapes[] = {
    /* batch, q, kv, kv_heads, group, dim, leaf, topk, first, last, causal */
    {1, 63, 63, 1, 16, 64, 64, 8, 1, 2, true},    {2, 40, 1025, 1, 16, 128, 64, 4, 1, 2, true},
    {1, 300, 300, 2, 3, 60, 16, 3, 1, 2, true},   {1, 40, 2000, 1, 1, 64, 16, 8, 1, 2, true},
    {1, 30, 781, 2, 5, 100, 16, 5, 0, 1, true},   {1, 20, 781, 2, 7, 80, 32, 6, 1, 2, false},
    {1, 10, 4095, 1, 12, 96, 64, 8, 3, 4, true},  {1, 90, 40, 1, 2, 16, 16, 2, 1, 2, true},
    {1, 50, 700, 1, 40, 33, 32, 1, 1, 2, true},   {1, 20, 1500, 1, 2, 256, 128, 3, 1, 2, true},
    {1, 30, 3000, 1, 2, 1, 16, 70, 20, 10, true}, {1, 50, 333, 3, 4, 64, 16, 4, 100, 100, true},
};

static void test_selectors(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct inputs in;
        inputs_make(&shapes[i], dtypes[i % 3], (int)i / 3 % 3, &in);
        check_selectors(&in, false);
        inputs_free(&in);
    }
}

/* Equal scores: the lower index wins, everywhere. */
static void test_constant_keys(void **state)
{
    (void)state;
    static const struct shape s = {1, 40, 2048, 1, 3, 64, 64, 5, 1, 2, true};
    for (int type = 0; type < 3; type++) {
        struct inputs in;
        inputs_make(&s, dtypes[type], 0, &in);
        for (int64_t i = 0; i < in.k.len; i++)
            for (int64_t d = 0; d < in.k.dim; d++)
                tensor_set(&in.k, 0, i, 0, d, 0.5f);
        check_selectors(&in, true);
        inputs_free(&in);
    }
}

/* Leaves with a NaN rank last, infinite logits as they compare. */
static void test_special_keys(void **state)
{
    (void)state;
    static const struct shape s = {1, 40, 1024, 1, 3, 64, 16, 40, 1, 2, true};
    static const float special[] = {NAN, INFINITY, -INFINITY, 1e30f};
    for (int n = 0; n < 4; n++) {
        struct inputs in;
        inputs_make(&s, CLATTN_FLOAT32, 0, &in);
        for (int g = 0; g < s.group;
             g++) /* one sign, so that an infinite key gives infinite logits of one sign */
            for (int64_t i = 0; i < in.q.len; i++)
                tensor_set(&in.q, 0, i, g, 5, 1);
        tensor_set(&in.k, 0, 100, 0, 5, special[n]);
        tensor_set(&in.k, 0, 700, 0, 5, special[n]);
        check_selectors(&in, false);
        inputs_free(&in);
    }
}

static void test_pyramid(void **state)
{
    (void)state;
    for (size_t i = 0; i < 3 * sizeof shapes / sizeof *shapes; i++) {
        const struct shape *s = &shapes[i / 3];
        struct inputs in;
        inputs_make(s, dtypes[i % 3], (int)i % 3, &in);
        clattn_pyramid *expected = NULL, *got = NULL;
        clattn_pyramid_build(reference, &in.attention, s->leaf, &in.k, &expected, NULL);
        int64_t nodes = 0;
        float *right = malloc((size_t)s->kv_len * (size_t)s->dim * sizeof *right);
        float *means = malloc((size_t)s->kv_len * (size_t)s->dim * sizeof *means);
        for (int n = 0; n < variant_count; n++) {
            assert_int_equal(
                clattn_pyramid_build(variants[n].context, &in.attention, s->leaf, &in.k, &got, NULL),
                CLATTN_SUCCESS);
            for (int level = 1; level <= level_count(s->kv_len, s->leaf); level++) {
                clattn_pyramid_read(reference, expected, s->batch - 1, s->kv_heads - 1, level, right, &nodes);
                clattn_pyramid_read(variants[n].context, got, s->batch - 1, s->kv_heads - 1, level, means,
                                    NULL);
                for (int64_t e = 0; e < nodes * s->dim; e++)
                    if (means[e] != right[e])
                        fail_msg("%s: level %d, mean [%lld][%lld] is %.9g, expected %.9g", variants[n].name,
                                 level, (long long)(e / s->dim), (long long)(e % s->dim), (double)means[e],
                                 (double)right[e]);
            }
            clattn_pyramid_release(variants[n].context, got);
            got = NULL;
        }
        free(right);
        free(means);
        clattn_pyramid_release(reference, expected);
        inputs_free(&in);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pyramid),
        cmocka_unit_test(test_selectors),
        cmocka_unit_test(test_constant_keys),
        cmocka_unit_test(test_special_keys),
    };
    random_seed();
    contexts_open();
    int failed = cmocka_run_group_tests_name("cpu_select", tests, NULL, NULL);
    contexts_close();
    return failed;
}
