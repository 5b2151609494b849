/* SPDX-License-Identifier: MIT */
/* Rough scores of leaves: no further from the exact ones than their bounds say, bounds that are of use, and
 * lists that are those of the exact way, to the bit. */

#include "config.h"

#include "cpu_cases.h"
#include "kernels_avx512vnni.h"

#ifdef HAVE_CPU_AVX512VNNI

enum { KEYS_MAX = 128, DIM_MAX = 256, HEADS = 16 };

static float q[HEADS * DIM_MAX], k[KEYS_MAX * DIM_MAX];

/* ---- one leaf ---- */

/* The score by the definition, and sum over heads of scale |q| max |k|. */
static double exact_score(int heads, int count, int dim, double scale, double *size)
{
    double total = 0;
    *size = 0;
    for (int h = 0; h < heads; h++) {
        double z[KEYS_MAX], most = -INFINITY, sum = 0, q_square = 0, k_most = 0;
        for (int d = 0; d < dim; d++)
            q_square += (double)q[h * dim + d] * (double)q[h * dim + d];
        for (int c = 0; c < count; c++) {
            double dot = 0, square = 0;
            for (int d = 0; d < dim; d++) {
                dot += (double)q[h * dim + d] * (double)k[c * dim + d];
                square += (double)k[c * dim + d] * (double)k[c * dim + d];
            }
            z[c] = scale * dot;
            most = fmax(most, z[c]);
            k_most = fmax(k_most, square);
        }
        for (int c = 0; c < count; c++)
            sum += exp(z[c] - most);
        total += most + log(sum);
        *size += fabs(scale) * sqrt(q_square * k_most);
    }
    return total;
}

/* Returns how much of the bound the error takes. centered: near the mean of the keys. */
static double check_bound(const char *what, int heads, int count, int dim, float scale, bool centered)
{
    float center[DIM_MAX] = {0};
    for (int n = 0; n < count * dim; n++)
        center[n % dim] += k[n] / (float)count;
    double score = NAN, bound = NAN, size;
    if (!rough_score_avx512vnni(q, heads, k, count, dim, scale, centered ? center : NULL, &score, &bound))
        fail_msg("%s: %d heads, %d keys, dim %d: not usable", what, heads, count, dim);
    double error = fabs(score - exact_score(heads, count, dim, (double)scale, &size));
    if (!(error <= bound))
        fail_msg("%s: %d heads, %d keys, dim %d: off by %g, bound %g", what, heads, count, dim, error, bound);
    if (!(bound <= 1e-3 * size + 2e-4 * heads))
        fail_msg("%s: %d heads, %d keys, dim %d: bound %g, logits up to %g", what, heads, count, dim, bound,
                 size);
    return error / bound;
}

static const int dims[] = {1, 2, 3, 16, 31, 33, 64, 80, 96, 128, 200, 255, 256};

enum kind { NORMAL, OUTLIERS, MAGNITUDES, SPARSE, ZERO_QUERY, ZERO_KEYS, SAME, LARGE, TINY, KINDS };

static float element(enum kind kind, int row, int d, bool is_key)
{
    float x = random_normal();
    x += x < 0 ? -0.1f : 0.1f;
    switch (kind) {
    case OUTLIERS: /* channels far above the others */
        return d % 50 == 1 ? 30 + x : x;
    case MAGNITUDES:
        return ldexpf(x, (int)random_below(40) - 20);
    case SPARSE: /* all the norm in one element: words of the greatest magnitude */
        return d == 0 ? (row % 2 ? -3.0f : 3.0f) : 0;
    case ZERO_QUERY:
        return is_key || row % 2 ? x : 0;
    case ZERO_KEYS:
        return is_key ? 0 : x;
    case SAME:
        return 0.3f;
    case LARGE:
        return is_key ? x * 1e12f : x * 1e-6f;
    case TINY:
        return is_key ? x * 1e-6f : x * 1e6f;
    default:
        return x;
    }
}

static void test_bound(void **state)
{
    (void)state;
    for (int kind = 0; kind < KINDS; kind++)
        for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
            for (int r = 0; r < 12; r++) {
                int dim = dims[i], count = 1 + (int)random_below(KEYS_MAX),
                    heads = 1 + (int)random_below(HEADS);
                float scale = (r % 4 == 3 ? -1.0f : 1.0f) / sqrtf((float)dim);
                for (int n = 0; n < heads * dim; n++)
                    q[n] = element((enum kind)kind, n / dim, n % dim, false);
                for (int n = 0; n < count * dim; n++)
                    k[n] = element((enum kind)kind, n / dim, n % dim, true);
                if (kind == MAGNITUDES) scale *= 1e-11f;
                if (kind == LARGE) scale *= 1e-6f;
                check_bound("random", heads, count, dim, scale, r % 3 == 2);
            }
}

/* Keys that lie halfway between two words in every element, all to one side, and queries that point there: the
 * inequality of Cauchy-Schwarz becomes an equality, and nearly all of the bound is needed. */
static void test_bound_aligned(void **state)
{
    (void)state;
    enum { COUNT = 64, DIM = 128 };
    double greatest = 0;
    for (int r = 0; r < 50; r++) {
        double norm = 0;
        for (int d = 0; d < DIM; d++) {
            k[d] = d < 2 ? 32500 : 0; /* whole numbers: this key makes the step 1 */
            norm += (double)k[d] * (double)k[d];
        }
        double step = sqrt(norm) / 46000;
        for (int n = DIM; n < COUNT * DIM; n++)
            k[n] = (float)(((double)(int)random_below(2000) + 0.499) * step);
        for (int n = 0; n < HEADS * DIM; n++)
            q[n] = 1;
        greatest = fmax(greatest, check_bound("aligned", HEADS, COUNT, DIM, 1e-5f * (float)(1 + r), false));
    }
    assert_true(greatest > 0.5);
}

static void test_not_usable(void **state)
{
    (void)state;
    static const float bad[] = {NAN, INFINITY, -INFINITY, 1e20f, 1e-20f};
    enum { COUNT = 64, DIM = 80 };
    double score, bound;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        for (int side = 0; side < 2; side++) {
            bool tiny = fabsf(bad[i]) < 1;
            for (int n = 0; n < HEADS * DIM; n++)
                q[n] = side == 0 && (tiny || n == 5 * DIM + 77) ? bad[i] : random_normal();
            for (int n = 0; n < COUNT * DIM; n++)
                k[n] = side == 1 && (tiny || n == 9 * DIM + 79) ? bad[i] : random_normal();
            assert_false(rough_score_avx512vnni(q, HEADS, k, COUNT, DIM, 0.1f, NULL, &score, &bound));
        }
}

/* ---- lists ---- */

struct shape {
    int q_len, kv_len, group, dim, leaf, topk;
    clattn_selector selector;
    bool causal;
};

static int32_t *lists_of(const char *variant, int threads, const struct shape *s, const clattn_tensor *queries,
                         const clattn_tensor *keys)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_context *context = NULL;
    clattn_pyramid *pyramid = NULL;
    clattn_blocks *blocks = NULL;
    int32_t *indices = malloc((size_t)s->q_len * (size_t)s->topk * sizeof *indices);
    desc.backend = CLATTN_BACKEND_CPU;
    desc.variant = variant;
    desc.threads = threads;
    attention.causal = s->causal;
    select.selector = s->selector;
    select.topk = s->topk;
    select.leaf = s->leaf;
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
    assert_int_equal(clattn_pyramid_build(context, &attention, s->leaf, keys, &pyramid, NULL), CLATTN_SUCCESS);
    assert_int_equal(clattn_select(context, &attention, &select, queries, keys, pyramid, &blocks, NULL),
                     CLATTN_SUCCESS);
    assert_int_equal(clattn_blocks_read(context, blocks, indices, NULL), CLATTN_SUCCESS);
    clattn_blocks_release(context, blocks);
    clattn_pyramid_release(context, pyramid);
    clattn_context_release(context);
    return indices;
}

static const struct shape shapes[] = {
    {200, 4000, 16, 128, 64, 8, CLATTN_SELECT_PISA, true},
    {100, 2100, 16, 64, 64, 4, CLATTN_SELECT_FLAT_LSE, true},
    {150, 1999, 3, 60, 32, 5, CLATTN_SELECT_PISA, true},
    {60, 1500, 40, 33, 16, 8, CLATTN_SELECT_PISA, false},
    {40, 3000, 12, 80, 16, 40, CLATTN_SELECT_FLAT_LSE, true},
    {80, 2048, 32, 96, 128, 3, CLATTN_SELECT_PISA, true},
    {16, 700, 1, 1, 16, 2, CLATTN_SELECT_PISA, true},
    {300, 300, 16, 256, 16, 4, CLATTN_SELECT_PISA, true},
};

/* What makes deciding hard: equal scores, scores that nearly are, keys without a bound. */
static void disturb(int kind, const clattn_tensor *keys)
{
    for (int64_t i = 0; i < keys->len; i++)
        for (int64_t d = 0; d < keys->dim; d++) {
            float x = tensor_get(keys, 0, i, 0, d);
            if (kind == 1) x = 0.5f;
            if (kind == 2) x = tensor_get(keys, 0, i % 128, 0, d) + (i % 3 ? 0 : 1e-4f * x);
            if (kind == 3 && i % 777 == 5 && d == 0) x = i % 2 ? NAN : INFINITY;
            if (kind == 4 && d == keys->dim / 2) x += 40;
            if (kind == 5) x *= i / 50 % 3 == 0 ? 1e-12f : i / 50 % 3 == 1 ? 100.0f : 0;
            tensor_set(keys, 0, i, 0, d, x);
        }
}

static void test_lists(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int kind = 0; kind <= 5; kind++) {
            const struct shape *s = &shapes[i];
            clattn_dtype dtype = kind == 0 && i % 2 ? CLATTN_BFLOAT16 : CLATTN_FLOAT32;
            clattn_tensor queries = tensor_make(0, dtype, 1, s->q_len, s->group, s->dim),
                          keys = tensor_make(0, dtype, 1, s->kv_len, 1, s->dim);
            tensor_fill(&queries, 1);
            tensor_fill(&keys, 1);
            disturb(kind, &keys);
            if (kind == 3) tensor_set(&queries, 0, 7, 0, 0, NAN);
            int32_t *expected = lists_of("avx512", 1, s, &queries, &keys);
            for (int threads = 1; threads <= 3; threads++) {
                int32_t *got = lists_of("avx512vnni", threads, s, &queries, &keys);
                for (int n = 0; n < s->q_len * s->topk; n++)
                    if (got[n] != expected[n])
                        fail_msg("shape %zu, kind %d, %d threads: query %d, entry %d is %d, expected %d", i,
                                 kind, threads, n / s->topk, n % s->topk, got[n], expected[n]);
                free(got);
            }
            free(expected);
            tensor_free(&queries);
            tensor_free(&keys);
        }
}

#endif

int main(void)
{
    random_seed();
    contexts_open();
    int failed = 77;
#ifdef HAVE_CPU_AVX512VNNI
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bound),
        cmocka_unit_test(test_bound_aligned),
        cmocka_unit_test(test_not_usable),
        cmocka_unit_test(test_lists),
    };
    for (int n = 0; n < variant_count; n++)
        if (strcmp(variants[n].name, "avx512vnni") == 0)
            failed = cmocka_run_group_tests_name("cpu_rough", tests, NULL, NULL);
#endif
    if (failed == 77) puts("no AVX-512 VNNI: nothing to test");
    contexts_close();
    return failed;
}
