/* SPDX-License-Identifier: MIT */
/* Options of attention in every CPU variant against the reference, forward and backward: soft cap, window,
 * sinks, biases, int8 keys and values, block boundaries of the caller, and tiles that join the lists of several
 * tokens. */

#include "config.h"

#include "cpu_cases.h"

#include <float.h>

enum { CAP = 1, WINDOW = 2, SINK = 4, BIAS = 8, INT8 = 16, STARTS = 32, ALL = CAP | WINDOW | SINK | BIAS };

enum lists { DENSE, PER_TOKEN, PER_QUERY_HEAD, SAME_FOR_ALL };

struct shape {
    int batch, q_len, kv_len, kv_heads, group, dim, dim_v, block, topk, q_block;
    enum lists lists;
    bool causal;
};

static const struct shape shapes[] = {
    /* batch, q, kv, kv_heads, group, dim, dim_v, block, topk, q_block, lists, causal */
    {2, 71, 150, 2, 3, 40, 33, 64, 1, 1, DENSE, true},
    {1, 97, 90, 1, 2, 64, 64, 64, 1, 1, DENSE, false},
    {1, 45, 300, 1, 16, 64, 80, 64, 4, 1, PER_TOKEN, true},
    {1, 45, 300, 2, 1, 96, 128, 32, 5, 1, PER_TOKEN, true}, /* many tokens a tile */
    {2, 50, 130, 1, 3, 20, 19, 16, 6, 1, PER_TOKEN, false},
    {1, 37, 200, 2, 4, 128, 16, 64, 3, 1, PER_QUERY_HEAD, true},
    {1, 61, 200, 1, 2, 32, 64, 16, 6, 2, PER_TOKEN, true}, /* two tokens a list, several lists a tile */
    {1, 131, 300, 2, 3, 120, 48, 128, 3, 64, SAME_FOR_ALL, true},
    {1, 60, 300, 1, 40, 16, 16, 32, 4, 16, PER_TOKEN, true},
    {1, 100, 1100, 1, 2, 24, 16, 64, 1, 1, DENSE, true}, /* many blocks that give to the same rows */
    /* SPLIT and on: few rows and many keys, which are cut into parts */
    {2, 1, 9001, 2, 3, 40, 33, 64, 1, 1, DENSE, true},
    {1, 3, 12289, 1, 2, 16, 16, 64, 1, 1, DENSE, false},
    {1, 1, 9000, 2, 1, 64, 96, 64, 1, 1, DENSE, true}, /* fewer heads than a quarter of the lanes */
    {2, 1, 8330, 1, 2, 160, 32, 64, 1, 1, DENSE, true},
};

enum { SHAPES = sizeof shapes / sizeof *shapes, SPLIT = SHAPES - 4 };

struct inputs {
    const struct shape *shape;
    int options;
    clattn_tensor q, k, v, magnitudes, sink, bias, k_scale, v_scale, dout;
    clattn_attention_desc attention;
    clattn_blocks_desc desc;
    int32_t *indices;
    int64_t starts[512];
};

/* Blocks of 1 to 150 keys. */
static int64_t starts_make(struct inputs *in)
{
    int64_t count = 0;
    for (int64_t at = 0; at < in->shape->kv_len; at += 1 + random_below(random_below(3) ? 30 : 150))
        in->starts[count++] = at;
    return count;
}

static void lists_make(struct inputs *in)
{
    const struct shape *s = in->shape;
    int64_t starts = in->options & STARTS ? starts_make(in) : 0;
    int64_t blocks = starts ? starts : ceil_div(s->kv_len, s->block);
    int64_t rows = (int64_t)s->batch * ceil_div(s->q_len, s->q_block);
    int heads = s->lists == PER_QUERY_HEAD ? s->kv_heads * s->group
                : s->lists == SAME_FOR_ALL ? 1
                                           : s->kv_heads;
    in->desc = (clattn_blocks_desc){sizeof in->desc, s->block, s->q_block, rows, heads, s->topk, NULL, 0};
    if (starts) {
        in->desc.starts = in->starts;
        in->desc.start_count = starts;
    }
    in->indices = malloc((size_t)(rows * heads * s->topk) * sizeof *in->indices);
    for (int64_t i = 0; i < rows * heads * s->topk; i++)
        in->indices[i] = random_below(4) ? (int32_t)random_below(blocks) : -1;
    /* Where every row lists a single block dbias is 0 but for rounding, which compares with nothing. */
    for (int32_t n = 0; n < 2 && in->options & BIAS; n++)
        in->indices[n] = n;
}

/* Small integers and factors, as a quantised cache has them. */
static clattn_tensor int8_make(const struct shape *s, int64_t dim, clattn_tensor *scale)
{
    int64_t leaves = ceil_div(s->kv_len, 48);
    size_t bytes = (size_t)(s->batch * s->kv_len * s->kv_heads * dim);
    char *memory = malloc(bytes + 2 * GUARD);
    for (size_t i = 0; i < bytes; i++)
        memory[GUARD + i] = (char)(random_below(255) - 127);
    *scale = tensor_make(0, CLATTN_FLOAT32, s->batch, leaves, s->kv_heads, 1);
    for (int64_t i = 0; i < s->batch * leaves * s->kv_heads; i++)
        ((float *)scale->data)[i] = 0.01f + 0.0001f * (float)random_below(100);
    return clattn_tensor_bthd(memory + GUARD, CLATTN_INT8, s->batch, s->kv_len, s->kv_heads, dim);
}

static void options_make(struct inputs *in)
{
    const struct shape *s = in->shape;
    int heads = s->kv_heads * s->group;
    in->attention = (clattn_attention_desc)CLATTN_ATTENTION_DESC_INIT;
    in->attention.causal = s->causal;
    if (in->options & CAP) in->attention.softcap = 1.5f;
    if (in->options & WINDOW) in->attention.window = 53;
    if (in->options & SINK) {
        in->sink = tensor_make(0, CLATTN_FLOAT32, 1, 1, heads, 1);
        tensor_fill(&in->sink, 2);
        in->attention.sink = &in->sink;
    }
    if (in->options & BIAS) { /* of one batch entry for all, or of each */
        in->bias = tensor_make(0, CLATTN_FLOAT32, s->kv_heads > 1 ? s->batch : 1, 512, heads, 1);
        tensor_fill(&in->bias, 1);
        in->attention.bias = &in->bias;
    }
    if (in->options & INT8) {
        tensor_free(&in->k);
        tensor_free(&in->v);
        in->k = int8_make(s, s->dim, &in->k_scale);
        in->v = int8_make(s, s->dim_v, &in->v_scale);
        in->attention.k_scale = &in->k_scale;
        in->attention.v_scale = &in->v_scale;
        in->attention.scale_block = 48;
    }
}

static void inputs_make(const struct shape *s, int options, clattn_dtype dtype, int layout, struct inputs *in)
{
    int heads = s->kv_heads * s->group;
    memset(in, 0, sizeof *in);
    in->shape = s;
    in->options = options;
    in->q = tensor_make(layout, dtype, s->batch, s->q_len, heads, s->dim);
    in->k = tensor_make(layout, dtype, s->batch, s->kv_len, s->kv_heads, s->dim);
    in->v = tensor_make(layout, dtype, s->batch, s->kv_len, s->kv_heads, s->dim_v);
    in->dout = tensor_make(layout, CLATTN_FLOAT32, s->batch, s->q_len, heads, s->dim_v);
    tensor_fill(&in->q, 1);
    tensor_fill(&in->k, 1);
    tensor_fill(&in->v, 1);
    tensor_fill(&in->dout, 1);
    options_make(in);
    if (s->lists != DENSE) lists_make(in);
}

static void inputs_free(struct inputs *in)
{
    clattn_tensor *const all[] = {&in->q,    &in->k,       &in->v,       &in->sink,
                                  &in->bias, &in->k_scale, &in->v_scale, &in->dout};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        tensor_free(all[i]);
    free(in->indices);
}

static clattn_blocks *blocks_of(clattn_context *context, const struct inputs *in)
{
    clattn_blocks *blocks = NULL;
    if (in->indices)
        assert_int_equal(clattn_blocks_create(context, &in->desc, in->indices, &blocks), CLATTN_SUCCESS);
    return blocks;
}

static void succeed(clattn_context *context, clattn_status status)
{
    char text[512];
    if (!status) return;
    clattn_context_error(context, text, sizeof text);
    fail_msg("%s", text);
}

/* ---- forward ---- */

struct outputs {
    clattn_tensor out, lse;
};

static struct outputs forward(clattn_context *context, const struct inputs *in, const clattn_tensor *v)
{
    const clattn_tensor *q = &in->q;
    struct outputs result = {tensor_make(0, CLATTN_FLOAT32, q->batch, q->len, q->heads, v->dim),
                             tensor_make(0, CLATTN_FLOAT32, q->batch, q->len, q->heads, 1)};
    clattn_blocks *blocks = blocks_of(context, in);
    succeed(context, clattn_attention_forward(context, &in->attention, q, &in->k, v, blocks, &result.out,
                                              &result.lse, NULL));
    clattn_blocks_release(context, blocks);
    return result;
}

static void outputs_free(struct outputs *outputs)
{
    tensor_free(&outputs->out);
    tensor_free(&outputs->lse);
}

/* Absolute values, to weigh the error of sum p v by sum p |v|. */
static clattn_tensor magnitudes_make(const struct inputs *in)
{
    const clattn_tensor *v = &in->v;
    if (in->options & INT8) {
        clattn_tensor scale, copy = int8_make(in->shape, v->dim, &scale);
        tensor_free(&scale);
        for (int64_t i = 0; i < v->batch * v->batch_stride; i++)
            ((int8_t *)copy.data)[i] = (int8_t)abs(((int8_t *)v->data)[i]);
        return copy;
    }
    clattn_tensor copy = tensor_make(0, v->dtype, v->batch, v->len, v->heads, v->dim);
    for (int64_t b = 0; b < v->batch; b++)
        for (int64_t j = 0; j < v->len; j++)
            for (int64_t h = 0; h < v->heads; h++)
                for (int64_t d = 0; d < v->dim; d++)
                    tensor_set(&copy, b, j, h, d, fabsf(tensor_get(v, b, j, h, d)));
    return copy;
}

/* A logit is off by the rounding of dim products and by a few units of its own last place (|z| < 8 here); that
 * moves a weight, and so out in proportion to sum p |v|. */
static void forward_compare(const char *variant, const struct inputs *in, const struct outputs *got,
                            const struct outputs *ref, const struct outputs *magnitude)
{
    const clattn_tensor *out = &got->out;
    double factor = FLT_EPSILON * (8 + 4 * 8 + sqrt(in->shape->dim) / 2);
    for (int64_t n = 0; n < out->batch * out->len * out->heads; n++) {
        double lse = ((float *)got->lse.data)[n], expected = ((float *)ref->lse.data)[n];
        if (lse != expected && !(fabs(lse - expected) <= factor))
            fail_msg("%s, shape %d, options %d: lse %lld is %.9g, expected %.9g", variant,
                     (int)(in->shape - shapes), in->options, (long long)n, lse, expected);
        for (int64_t d = 0; d < out->dim; d++) {
            double value = ((float *)out->data)[n * out->dim + d],
                   right = ((float *)ref->out.data)[n * out->dim + d];
            double size = ((float *)magnitude->out.data)[n * out->dim + d];
            if (!(fabs(value - right) <= factor * size))
                fail_msg("%s, shape %d, options %d: out row %lld, element %lld is %.9g, expected %.9g", variant,
                         (int)(in->shape - shapes), in->options, (long long)n, (long long)d, value, right);
        }
    }
    assert_true(tensor_guards_hold(&got->out));
    assert_true(tensor_guards_hold(&got->lse));
}

static void check_forward(const struct shape *s, int options, clattn_dtype dtype, int layout)
{
    struct inputs in;
    inputs_make(s, options, dtype, layout, &in);
    clattn_tensor magnitudes = magnitudes_make(&in);
    struct outputs ref = forward(reference, &in, &in.v), magnitude = forward(reference, &in, &magnitudes);
    for (int n = 0; n < variant_count; n++) {
        struct outputs got = forward(variants[n].context, &in, &in.v);
        forward_compare(variants[n].name, &in, &got, &ref, &magnitude);
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
    static const clattn_dtype dtypes[] = {CLATTN_FLOAT32, CLATTN_FLOAT16, CLATTN_BFLOAT16};
    static const int sets[] = {CAP, WINDOW, SINK, BIAS, INT8, STARTS, ALL, ALL | STARTS, ALL | INT8 | STARTS,
                               0};
    int turn = 0;
    for (size_t i = 0; i < SPLIT; i++)
        for (size_t n = 0; n < sizeof sets / sizeof *sets; n++, turn++) {
            if (shapes[i].lists == DENSE && sets[n] & STARTS) continue;
            check_forward(&shapes[i], sets[n], dtypes[turn % 3], turn / 3 % 3);
        }
}

static void test_split(void **state)
{
    (void)state;
    static const clattn_dtype dtypes[] = {CLATTN_FLOAT32, CLATTN_FLOAT16, CLATTN_BFLOAT16};
    static const int sets[] = {0, CAP, INT8, CAP | INT8, WINDOW, SINK};
    for (int i = SPLIT; i < SHAPES; i++)
        for (int n = 0; n < (int)(sizeof sets / sizeof *sets); n++)
            check_forward(&shapes[i], sets[n], dtypes[(n + i) % 3], (n + i / 2) % 3);
}

/* Queries that a variant may not be able to cut into bytes for int8 keys, and some that it just can: all zero,
 * tiny, subnormal, one element far above the others, an infinite one, NaN. */
static void query_fill_special(const clattn_tensor *q, int kind)
{
    static const float factor[] = {0, 1e-36f, 1e-42f, 1e-3f, 1, 1};
    static const float first[] = {0, 1e-36f, 1e-42f, 40, INFINITY, NAN};
    tensor_fill(q, factor[kind]);
    for (int64_t i = 0; i < q->len; i += 3)
        for (int64_t h = 0; h < q->heads; h++)
            tensor_set(q, 0, i, h, i % q->dim, first[kind]);
}

/* What rounding a row of queries to 2^-24 of its greatest magnitude does to a logit, at most: |scale| k_scale
 * 2^-24 max |q| sum |k|, sum |k| below 127 dim. It moves lse as much, and out by twice that in proportion to
 * max |v|. */
static void test_int8_queries(void **state)
{
    (void)state;
    static const struct shape cases[] = {
        {1, 21, 150, 1, 16, 64, 64, 64, 2, 1, PER_TOKEN, true},
        {1, 13, 77, 1, 5, 50, 24, 32, 2, 1, PER_TOKEN, false}, /* nothing divides anything */
        {1, 40, 90, 1, 3, 7, 16, 64, 1, 1, DENSE, true},
        {1, 9, 40, 2, 1, 256, 16, 64, 1, 1, DENSE, false},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int kind = 0; kind < 6; kind++) {
            struct inputs in;
            inputs_make(&cases[c], INT8, CLATTN_FLOAT32, 0, &in);
            query_fill_special(&in.q, kind);
            struct outputs ref = forward(reference, &in, &in.v);
            double most = kind == 3 ? 40 : kind < 3 ? 1e-36 : 5, dim = cases[c].dim;
            double bound = 1 / sqrt(dim) * 0.02 * 0x1p-24 * most * 127 * dim, value_most = 127 * 0.02;
            for (int n = 0; n < variant_count; n++) {
                struct outputs got = forward(variants[n].context, &in, &in.v);
                const clattn_tensor *out = &got.out;
                for (int64_t i = 0; i < out->batch * out->len * out->heads * out->dim; i++) {
                    double a = ((float *)out->data)[i], b = ((float *)ref.out.data)[i];
                    double lse = ((float *)got.lse.data)[i / out->dim],
                           expected = ((float *)ref.lse.data)[i / out->dim];
                    if (kind >= 4 && !isfinite(b)) continue; /* what is not finite differs in kind, see below */
                    if (kind >= 4 && !isfinite(expected)) continue;
                    double logits = FLT_EPSILON * 8 * (1 + fabs(expected));
                    if (!(a == b || fabs(a - b) <= (2 * bound + 4 * logits) * value_most) ||
                        !(lse == expected || fabs(lse - expected) <= bound + logits))
                        fail_msg("%s, case %d, queries %d: element %lld is %.9g, expected %.9g; lse %.9g, "
                                 "expected %.9g",
                                 variants[n].name, (int)c, kind, (long long)i, a, b, lse, expected);
                }
                /* A row with NaN is NaN; its neighbours in the tile are as without it. */
                for (int64_t r = 0; r < out->len * out->heads && kind == 5; r++)
                    assert_int_equal(isnan(((float *)out->data)[r * out->dim]),
                                     isnan(((float *)ref.out.data)[r * out->dim]));
                outputs_free(&got);
            }
            outputs_free(&ref);
            inputs_free(&in);
        }
}

/* A row whose logits are all -infinity has the sink's lse; a row without keys stays empty. */
static void test_sink_alone(void **state)
{
    (void)state;
    static const struct shape s = {1, 40, 30, 1, 2, 16, 16, 64, 1, 1, DENSE, true};
    struct inputs in;
    inputs_make(&s, SINK | BIAS, CLATTN_FLOAT32, 0, &in);
    for (int64_t b = 0; b < in.bias.len; b++)
        for (int h = 0; h < 2; h++)
            tensor_set(&in.bias, 0, b, h, 0, -INFINITY);
    for (int n = 0; n < variant_count; n++) {
        struct outputs got = forward(variants[n].context, &in, &in.v);
        for (int64_t i = 0; i < s.q_len; i++)
            for (int h = 0; h < 2; h++) {
                float expected = i < 10 ? -INFINITY : tensor_get(&in.sink, 0, 0, h, 0);
                assert_true(tensor_get(&got.lse, 0, i, h, 0) == expected);
                for (int d = 0; d < 16; d++)
                    assert_true(tensor_get(&got.out, 0, i, h, d) == 0);
            }
        outputs_free(&got);
    }
    inputs_free(&in);
}

/* Does query row i, whose list row is `list`, see key j? */
static bool sees(const struct inputs *in, const clattn_blocks *blocks, int64_t i, int64_t j)
{
    const struct shape *s = in->shape;
    int64_t t = i + s->kv_len - s->q_len, window = in->attention.window;
    if (j > t || (window && j <= t - window)) return false;
    if (!blocks) return true;
    int64_t list = i / s->q_block;
    for (int n = 0; n < ((const int32_t *)blocks->counts.host)[list]; n++)
        if (((const int32_t *)blocks->indices.host)[list * s->topk + n] == j / s->block) return true;
    return false;
}

/* Rows that do not see a key do not see its value, whatever it holds, though they share a tile with rows that
 * do. */
static void test_unseen_values(void **state)
{
    (void)state;
    static const struct shape cases[] = {
        {1, 70, 70, 1, 2, 64, 64, 64, 1, 1, DENSE, true},
        {1, 60, 200, 1, 1, 32, 40, 16, 6, 1, PER_TOKEN, true},
        {1, 60, 200, 1, 2, 32, 40, 16, 6, 2, PER_TOKEN, true},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int options = 0; options <= WINDOW; options += WINDOW) {
            const struct shape *s = &cases[c];
            struct inputs in;
            inputs_make(s, options, CLATTN_FLOAT32, 0, &in);
            int64_t spoiled = s->kv_len - 20, bytes = s->dim_v * (int64_t)sizeof(float);
            for (int n = 0; n < variant_count; n++) {
                clattn_blocks *blocks = blocks_of(variants[n].context, &in);
                tensor_set(&in.v, 0, spoiled, 0, 3, 1);
                struct outputs clean = forward(variants[n].context, &in, &in.v);
                tensor_set(&in.v, 0, spoiled, 0, 3, NAN);
                struct outputs other = forward(variants[n].context, &in, &in.v);
                for (int64_t r = 0; r < s->q_len * s->group; r++) {
                    float *a = (float *)clean.out.data + r * s->dim_v,
                          *b = (float *)other.out.data + r * s->dim_v;
                    if (sees(&in, blocks, r / s->group, spoiled)) {
                        assert_true(isnan(b[3]));
                        b[3] = a[3];
                    }
                    assert_memory_equal(a, b, bytes);
                }
                outputs_free(&clean);
                outputs_free(&other);
                clattn_blocks_release(variants[n].context, blocks);
            }
            inputs_free(&in);
        }
}

/* ---- backward ---- */

enum { DQ, DK, DV, DSINK, DBIAS, GRADIENTS };

static const char *const gradient_names[GRADIENTS] = {"dq", "dk", "dv", "dsink", "dbias"};

struct results {
    clattn_tensor t[GRADIENTS];
};

static struct results backward(clattn_context *context, const struct inputs *in, const struct outputs *outputs,
                               float compensation, int accumulate)
{
    const clattn_tensor *const like[GRADIENTS] = {&in->q, &in->k, &in->v, &in->sink, &in->bias};
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    clattn_blocks *blocks = blocks_of(context, in);
    struct results results = {0};
    for (int n = 0; n < GRADIENTS; n++) {
        if (!like[n]->data) continue;
        results.t[n] =
            tensor_make(0, CLATTN_FLOAT32, like[n]->batch, like[n]->len, like[n]->heads, like[n]->dim);
        for (int64_t e = 0; e < like[n]->batch * like[n]->len * like[n]->heads * like[n]->dim && accumulate;
             e++)
            ((float *)results.t[n].data)[e] = 0.5;
    }
    gradients.dout = &in->dout;
    gradients.dq = &results.t[DQ];
    gradients.dk = &results.t[DK];
    gradients.dv = &results.t[DV];
    if (in->options & SINK) gradients.dsink = &results.t[DSINK];
    if (in->options & BIAS) gradients.dbias = &results.t[DBIAS];
    gradients.compensation = compensation;
    gradients.accumulate = accumulate;
    succeed(context, clattn_attention_backward(context, &in->attention, &in->q, &in->k, &in->v, blocks,
                                               &outputs->out, &outputs->lse, &gradients, NULL));
    clattn_blocks_release(context, blocks);
    return results;
}

static void results_free(struct results *results)
{
    for (int n = 0; n < GRADIENTS; n++)
        tensor_free(&results->t[n]);
}

/* Relative RMS of a tensor, and of each row against the larger of its own and the mean row's size. Rows that
 * are 0 are no rows: biases have more of them than there are blocks. */
static void backward_compare(const char *variant, const struct inputs *in, float compensation, int which,
                             const clattn_tensor *expected, const clattn_tensor *have)
{
    const double tolerance = 1e-5;
    const float *a = expected->data, *b = have->data;
    int64_t rows = expected->batch * expected->len * expected->heads, dim = expected->dim;
    double error = 0, size = 0;
    int64_t some = 0;
    for (int64_t e = 0; e < rows * dim; e++) {
        error += ((double)a[e] - (double)b[e]) * ((double)a[e] - (double)b[e]);
        size += (double)a[e] * (double)a[e];
        some += e % dim == 0 && a[e] != 0;
    }
    if (!(sqrt(error) <= tolerance * sqrt(size) + 1e-30))
        fail_msg("%s, shape %d, options %d, compensation %g: %s has relative RMS %.2g", variant,
                 (int)(in->shape - shapes), in->options, (double)compensation, gradient_names[which],
                 sqrt(error / size));
    double mean = sqrt(size / (double)MAX(some, 1));
    for (int64_t row = 0; row < rows; row++) {
        double row_error = 0, row_size = 0;
        for (int64_t e = row * dim; e < (row + 1) * dim; e++) {
            row_error += ((double)a[e] - (double)b[e]) * ((double)a[e] - (double)b[e]);
            row_size += (double)a[e] * (double)a[e];
        }
        if (!(sqrt(row_error) <= 4 * tolerance * fmax(sqrt(row_size), mean) + 1e-30))
            fail_msg("%s, shape %d, options %d: %s row %lld is off by %.2g, its size is %.2g", variant,
                     (int)(in->shape - shapes), in->options, gradient_names[which], (long long)row,
                     sqrt(row_error), sqrt(row_size));
    }
    assert_true(tensor_guards_hold(have));
}

static void check_backward(const struct shape *s, int options, clattn_dtype dtype, int layout,
                           float compensation)
{
    struct inputs in;
    inputs_make(s, options, dtype, layout, &in);
    struct outputs outputs = forward(reference, &in, &in.v);
    int accumulate = layout == 1;
    struct results ref = backward(reference, &in, &outputs, compensation, accumulate);
    for (int n = 0; n < variant_count; n++) {
        struct results got = backward(variants[n].context, &in, &outputs, compensation, accumulate);
        for (int g = 0; g < GRADIENTS; g++)
            if (got.t[g].data) backward_compare(variants[n].name, &in, compensation, g, &ref.t[g], &got.t[g]);
        results_free(&got);
    }
    results_free(&ref);
    outputs_free(&outputs);
    inputs_free(&in);
}

static void test_backward(void **state)
{
    (void)state;
    static const clattn_dtype dtypes[] = {CLATTN_FLOAT32, CLATTN_FLOAT16, CLATTN_BFLOAT16};
    static const int sets[] = {0, CAP, WINDOW, SINK, BIAS, STARTS, ALL, ALL | STARTS};
    int turn = 0;
    for (size_t i = 0; i < SPLIT; i++)
        for (size_t n = 0; n < sizeof sets / sizeof *sets; n++, turn++)
            if (shapes[i].lists != DENSE || !(sets[n] & STARTS))
                check_backward(&shapes[i], sets[n], dtypes[turn % 3], turn % 2, 0);
}

static void test_compensation(void **state)
{
    (void)state;
    for (size_t i = 2; i < SPLIT; i++) {
        check_backward(&shapes[i], 0, CLATTN_FLOAT32, 0, 0.3f);
        check_backward(&shapes[i], ALL, CLATTN_FLOAT32, 1, 0.3f);
    }
}

/* ---- the same bits for any number of threads ---- */

static void test_threads(void **state)
{
    (void)state;
    static const struct {
        int shape, options;
    } chosen[] = {{0, ALL}, {3, ALL | STARTS}, {3, ALL},       {5, CAP},        {6, ALL | STARTS},
                  {7, ALL}, {SPLIT, CAP},      {SPLIT - 1, 0}, {SPLIT - 1, ALL}};
    for (size_t c = 0; c < sizeof chosen / sizeof *chosen; c++) {
        struct inputs in;
        const int options = chosen[c].options;
        float compensation = options & STARTS || shapes[chosen[c].shape].lists == DENSE ? 0 : 0.3f;
        inputs_make(&shapes[chosen[c].shape], options, CLATTN_FLOAT32, 0, &in);
        for (int n = 0; n < variant_count; n++) {
            struct outputs first = forward(variants[n].context, &in, &in.v);
            struct results gradients = backward(variants[n].context, &in, &first, compensation, 0);
            for (int threads = 1; threads <= 3; threads++) {
                clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
                clattn_context *context;
                desc.backend = CLATTN_BACKEND_CPU;
                desc.variant = variants[n].name;
                desc.threads = threads;
                assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
                struct outputs other = forward(context, &in, &in.v);
                struct results again = backward(context, &in, &first, compensation, 0);
                assert_memory_equal(first.out.data, other.out.data,
                                    (size_t)(first.out.batch * first.out.batch_stride) * sizeof(float));
                for (int g = 0; g < GRADIENTS; g++) {
                    const clattn_tensor *t = &gradients.t[g];
                    if (t->data)
                        assert_memory_equal(t->data, again.t[g].data,
                                            (size_t)(t->batch * t->batch_stride) * sizeof(float));
                }
                outputs_free(&other);
                results_free(&again);
                clattn_context_release(context);
            }
            outputs_free(&first);
            results_free(&gradients);
        }
        inputs_free(&in);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),       cmocka_unit_test(test_sink_alone),
        cmocka_unit_test(test_unseen_values), cmocka_unit_test(test_backward),
        cmocka_unit_test(test_compensation),  cmocka_unit_test(test_threads),
        cmocka_unit_test(test_split),         cmocka_unit_test(test_int8_queries),
    };
    random_seed();
    contexts_open();
    int failed = cmocka_run_group_tests_name("cpu_options", tests, NULL, NULL);
    contexts_close();
    return failed;
}
