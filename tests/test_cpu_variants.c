/* SPDX-License-Identifier: MIT */
/* Forward attention and pyramid of every CPU variant against the reference. */

#include "config.h"

#include "cpu_cases.h"

#include <float.h>

/* Lists: all keys; per token; per block of queries; one list a query head. */
enum lists { DENSE, PER_TOKEN, PER_QUERY_HEAD };

struct shape {
    int batch, q_len, kv_len, kv_heads, group, dim, dim_v, block, topk, q_block;
    enum lists lists;
    bool causal;
};

struct inputs {
    clattn_tensor q, k, v, v_magnitude;
    clattn_attention_desc attention;
    int32_t *indices;
    clattn_blocks_desc desc;
};

static const clattn_dtype dtypes[] = {CLATTN_FLOAT32, CLATTN_FLOAT16, CLATTN_BFLOAT16};

static void inputs_make(const struct shape *s, clattn_dtype dtype, int layout, struct inputs *in)
{
    int q_heads = s->kv_heads * s->group;
    in->q = tensor_make(layout, dtype, s->batch, s->q_len, q_heads, s->dim);
    in->k = tensor_make(layout, dtype, s->batch, s->kv_len, s->kv_heads, s->dim);
    in->v = tensor_make(layout, dtype, s->batch, s->kv_len, s->kv_heads, s->dim_v);
    in->v_magnitude = tensor_make(0, CLATTN_FLOAT32, s->batch, s->kv_len, s->kv_heads, s->dim_v);
    tensor_fill(&in->q, 1);
    tensor_fill(&in->k, 1);
    tensor_fill(&in->v, 1);
    in->attention = (clattn_attention_desc)CLATTN_ATTENTION_DESC_INIT;
    in->attention.causal = s->causal;
    in->indices = NULL;
    if (s->lists == DENSE) return;
    int heads = s->lists == PER_QUERY_HEAD ? q_heads : s->kv_heads;
    int64_t rows = (int64_t)s->batch * ceil_div(s->q_len, s->q_block);
    in->desc = (clattn_blocks_desc){.size = sizeof in->desc,
                                    .block = s->block,
                                    .q_block = s->q_block,
                                    .rows = rows,
                                    .heads = heads,
                                    .topk = s->topk};
    in->indices = malloc((size_t)(rows * heads * s->topk) * sizeof *in->indices);
    for (int64_t i = 0; i < rows * heads * s->topk; i++) /* some empty entries and, by chance, empty lists */
        in->indices[i] = random_below(4) ? (int32_t)random_below(ceil_div(s->kv_len, s->block)) : -1;
}

static void inputs_free(struct inputs *in)
{
    tensor_free(&in->q);
    tensor_free(&in->k);
    tensor_free(&in->v);
    tensor_free(&in->v_magnitude);
    free(in->indices);
}

struct outputs {
    clattn_tensor out, lse;
};

static struct outputs forward(clattn_context *context, const struct inputs *in, const clattn_tensor *v,
                              int layout, clattn_dtype dtype)
{
    const clattn_tensor *q = &in->q;
    struct outputs result = {tensor_make(layout, dtype, q->batch, q->len, q->heads, v->dim),
                             tensor_make(layout, CLATTN_FLOAT32, q->batch, q->len, q->heads, 1)};
    clattn_blocks *blocks = NULL;
    if (in->indices)
        assert_int_equal(clattn_blocks_create(context, &in->desc, in->indices, &blocks), CLATTN_SUCCESS);
    assert_int_equal(
        clattn_attention_forward(context, &in->attention, q, &in->k, v, blocks, &result.out, &result.lse, NULL),
        CLATTN_SUCCESS);
    clattn_blocks_release(context, blocks);
    return result;
}

static void outputs_free(struct outputs *outputs)
{
    tensor_free(&outputs->out);
    tensor_free(&outputs->lse);
}

/* Half a unit in the last place of a type, relative. */
static double rounding(clattn_dtype dtype)
{
    return dtype == CLATTN_FLOAT32 ? 0 : dtype == CLATTN_FLOAT16 ? 0x1p-11 : 0x1p-8;
}

/* max(8 (1+n) eps |ref|, eps sum_j p_j |v_j|) with n keys, plus what the rounding of the logits themselves
 * does: a logit is a sum of dim rounded terms, off by about eps sqrt(dim) / 2, which moves every p_j by that
 * factor. A 16-bit output is rounded once more; in float16 below 2^-14 to a multiple of 2^-24. */
static double tolerance(double ref, double magnitude, double keys, double dim, clattn_dtype dtype)
{
    double bound = fmax(8 * (1 + keys) * FLT_EPSILON * fabs(ref), FLT_EPSILON * magnitude);
    bound += sqrt(dim) / 2 * FLT_EPSILON * magnitude;
    double half_unit = rounding(dtype) * (fabs(ref) + bound);
    return bound + (dtype == CLATTN_FLOAT16 ? fmax(half_unit, 0x1p-25) : half_unit);
}

static bool agree(double value, double ref, double bound)
{
    if (isnan(ref)) return isnan(value);
    return value == ref || fabs(value - ref) <= bound;
}

static void compare(const char *variant, const struct shape *s, const struct outputs *got,
                    const struct outputs *ref, const struct outputs *magnitude)
{
    int64_t listed = s->lists == DENSE ? s->kv_len : MIN(s->kv_len, s->topk * s->block);
    const clattn_tensor *out = &got->out;
    for (int64_t b = 0; b < out->batch; b++)
        for (int64_t i = 0; i < out->len; i++)
            for (int64_t h = 0; h < out->heads; h++) {
                int64_t seen = s->causal ? MAX(i + s->kv_len - s->q_len + 1, 0) : s->kv_len;
                double lse = tensor_get(&got->lse, b, i, h, 0), expected = tensor_get(&ref->lse, b, i, h, 0);
                if (!agree(lse, expected, 8 * FLT_EPSILON * (1 + fabs(expected))))
                    fail_msg("%s: lse [%lld][%lld][%lld] is %.9g, expected %.9g", variant, (long long)b,
                             (long long)i, (long long)h, lse, expected);
                for (int64_t d = 0; d < out->dim; d++) {
                    double value = tensor_get(out, b, i, h, d), right = tensor_get(&ref->out, b, i, h, d);
                    double bound = tolerance(right, tensor_get(&magnitude->out, b, i, h, d),
                                             (double)MIN(seen, listed), s->dim, out->dtype);
                    if (!agree(value, right, bound))
                        fail_msg("%s: out [%lld][%lld][%lld][%lld] is %.9g, expected %.9g within %.3g", variant,
                                 (long long)b, (long long)i, (long long)h, (long long)d, value, right, bound);
                }
            }
}

static void check_shape(const struct shape *s, clattn_dtype dtype, int layout, bool float_out)
{
    struct inputs in;
    clattn_dtype out_dtype = float_out ? CLATTN_FLOAT32 : dtype;
    inputs_make(s, dtype, layout, &in);
    for (int64_t b = 0; b < in.v.batch; b++)
        for (int64_t i = 0; i < in.v.len; i++)
            for (int64_t h = 0; h < in.v.heads; h++)
                for (int64_t d = 0; d < in.v.dim; d++)
                    tensor_set(&in.v_magnitude, b, i, h, d, fabsf(tensor_get(&in.v, b, i, h, d)));
    struct outputs ref = forward(reference, &in, &in.v, 0, CLATTN_FLOAT32);
    /* sum_j p_j |v_j|: |v| in the type of v, which is exact */
    clattn_tensor magnitudes = tensor_make(0, dtype, s->batch, s->kv_len, s->kv_heads, s->dim_v);
    for (int64_t i = 0; i < magnitudes.batch * magnitudes.batch_stride; i++) {
        clattn_tensor flat = clattn_tensor_bthd(magnitudes.data, dtype, 1, 1, 1, 1), from = in.v_magnitude;
        tensor_set(&flat, 0, 0, 0, i, ((float *)from.data)[i]);
    }
    struct outputs magnitude = forward(reference, &in, &magnitudes, 0, CLATTN_FLOAT32);
    for (int n = 0; n < variant_count; n++) {
        struct outputs got = forward(variants[n].context, &in, &in.v, layout, out_dtype);
        compare(variants[n].name, s, &got, &ref, &magnitude);
        assert_true(tensor_guards_hold(&got.out));
        assert_true(tensor_guards_hold(&got.lse));
        outputs_free(&got);
    }
    outputs_free(&ref);
    outputs_free(&magnitude);
    tensor_free(&magnitudes);
    inputs_free(&in);
}

static void test_forward(void **state)
{
    (void)state;
    static const struct shape shapes[] = {
        /* batch, q, kv, kv_heads, group, dim, dim_v, block, topk, q_block, lists, causal */
        {1, 63, 63, 1, 16, 64, 64, 64, 8, 1, DENSE, true},
        {2, 100, 100, 2, 1, 128, 128, 64, 8, 1, DENSE, true},
        {1, 113, 203, 1, 3, 60, 33, 64, 8, 1, DENSE, false},
        {1, 97, 41, 1, 5, 100, 256, 64, 8, 1, DENSE, true}, /* the first rows see nothing */
        {1, 40, 300, 1, 16, 128, 128, 64, 4, 1, PER_TOKEN, true},
        {1, 40, 300, 1, 16, 64, 80, 64, 4, 1, PER_TOKEN, false},
        {2, 25, 507, 1, 7, 96, 64, 32, 5, 1, PER_TOKEN, true},
        {1, 33, 781, 2, 12, 80, 120, 16, 9, 1, PER_TOKEN, true},
        {1, 30, 260, 1, 40, 16, 16, 128, 2, 1, PER_TOKEN, true}, /* more heads than a lane group */
        {1, 50, 200, 2, 4, 192, 1, 64, 3, 1, PER_QUERY_HEAD, true},
        {1, 50, 65, 1, 2, 1, 7, 16, 3, 1, PER_TOKEN, true},
        {1, 130, 130, 1, 2, 256, 256, 64, 3, 16, PER_TOKEN, true},
        {1, 131, 300, 2, 3, 120, 48, 64, 4, 64, PER_TOKEN, true},
        {1, 131, 300, 2, 3, 128, 128, 32, 4, 64, PER_QUERY_HEAD, false},
        {1, 1, 1, 1, 1, 64, 64, 64, 1, 1, PER_TOKEN, true},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int type = 0; type < 3; type++) {
            int layout = (int)((i + (size_t)type) % 3);
            check_shape(&shapes[i], dtypes[type], layout, type && i % 2);
        }
}

/* Rows of keys that would all fall into one cache set take another way through the kernels. */
static void test_forward_large_stride(void **state)
{
    (void)state;
    static const struct shape wide = {1, 20, 130, 16, 9, 64, 64, 64, 2, 1, PER_TOKEN, true};
    check_shape(&wide, CLATTN_FLOAT32, 0, true);
}

/* ---- special values ---- */

/* Values and keys that no row of a list sees must not matter, whatever they hold. */
static void test_unseen_keys(void **state)
{
    (void)state;
    static const struct shape s = {1, 70, 70, 1, 2, 64, 64, 64, 8, 1, DENSE, true};
    struct inputs in;
    inputs_make(&s, CLATTN_FLOAT32, 0, &in);
    for (int n = 0; n < variant_count; n++) {
        struct outputs clean = forward(variants[n].context, &in, &in.v, 0, CLATTN_FLOAT32);
        float *last_k = (float *)in.k.data + 69 * 64, *last_v = (float *)in.v.data + 69 * 64, keep[128];
        memcpy(keep, last_k, 64 * sizeof(float));
        memcpy(keep + 64, last_v, 64 * sizeof(float));
        for (int d = 0; d < 64; d++) {
            last_k[d] = NAN;
            last_v[d] = INFINITY;
        }
        struct outputs spoiled = forward(variants[n].context, &in, &in.v, 0, CLATTN_FLOAT32);
        assert_memory_equal(clean.out.data, spoiled.out.data, 69 * 2 * 64 * sizeof(float));
        assert_memory_equal(clean.lse.data, spoiled.lse.data, 69 * 2 * sizeof(float));
        memcpy(last_k, keep, 64 * sizeof(float));
        memcpy(last_v, keep + 64, 64 * sizeof(float));
        outputs_free(&clean);
        outputs_free(&spoiled);
    }
    inputs_free(&in);
}

/* NaN where the reference has NaN, and nowhere else. One key only: two huge logits differ by less than float32
 * can tell. */
static void test_special_values(void **state)
{
    (void)state;
    static const struct shape s = {1, 60, 200, 1, 3, 64, 64, 64, 2, 1, PER_TOKEN, true};
    static const float special[] = {NAN, INFINITY, -INFINITY, 1e15f, -1e15f};
    for (int where = 0; where < 3; where++)
        for (size_t i = 0; i < sizeof special / sizeof *special; i++) {
            struct inputs in;
            inputs_make(&s, CLATTN_FLOAT32, 0, &in);
            const clattn_tensor *t = where == 0 ? &in.q : where == 1 ? &in.k : &in.v;
            for (int64_t row = 5; row < t->len; row += where == 1 ? t->len : 9)
                tensor_set(t, 0, row, 0, 7, special[i]);
            struct outputs ref = forward(reference, &in, &in.v, 0, CLATTN_FLOAT32);
            for (int n = 0; n < variant_count; n++) {
                struct outputs got = forward(variants[n].context, &in, &in.v, 0, CLATTN_FLOAT32);
                for (int64_t e = 0; e < s.q_len * s.group * s.dim_v; e++) {
                    float value = ((float *)got.out.data)[e], right = ((float *)ref.out.data)[e];
                    if (!agree(value, right, 1e-4 * (1 + fabs(right))))
                        fail_msg("%s: %g in tensor %d: out element %lld is %.9g, expected %.9g",
                                 variants[n].name, (double)special[i], where, (long long)e, (double)value,
                                 (double)right);
                }
                for (int64_t e = 0; e < s.q_len * s.group; e++)
                    assert_true(agree(((float *)got.lse.data)[e], ((float *)ref.lse.data)[e],
                                      1e-5 * (1 + fabs(((float *)ref.lse.data)[e]))));
                outputs_free(&got);
            }
            outputs_free(&ref);
            inputs_free(&in);
        }
}

/* The same bits for any number of threads. */
static void test_threads(void **state)
{
    (void)state;
    static const struct shape s = {1, 150, 500, 2, 3, 64, 64, 64, 4, 16, PER_TOKEN, true};
    struct inputs in;
    inputs_make(&s, CLATTN_FLOAT16, 0, &in);
    for (int n = 0; n < variant_count; n++) {
        struct outputs first = forward(variants[n].context, &in, &in.v, 0, CLATTN_FLOAT32);
        for (int threads = 1; threads <= 5; threads += 2) {
            clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
            clattn_context *context;
            desc.backend = CLATTN_BACKEND_CPU;
            desc.variant = variants[n].name;
            desc.threads = threads;
            assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
            struct outputs other = forward(context, &in, &in.v, 0, CLATTN_FLOAT32);
            assert_memory_equal(first.out.data, other.out.data, 150 * 6 * 64 * sizeof(float));
            assert_memory_equal(first.lse.data, other.lse.data, 150 * 6 * sizeof(float));
            outputs_free(&other);
            clattn_context_release(context);
        }
        outputs_free(&first);
    }
    inputs_free(&in);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),     cmocka_unit_test(test_forward_large_stride),
        cmocka_unit_test(test_unseen_keys), cmocka_unit_test(test_special_values),
        cmocka_unit_test(test_threads),
    };
    random_seed();
    contexts_open();
    int failed = cmocka_run_group_tests_name("cpu_variants", tests, NULL, NULL);
    contexts_close();
    return failed;
}
