/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Gradients arrive only at the sampled rows (bench_problem.c), so the gradients of keys and values are sums
 * over these rows alone, which the reference adds up one after another. */
struct oracle {
    const struct bench_problem *problem;
    clattn_context *reference;
    float *dk, *dv; /* as k and v, summed */
    float *dq;      /* [sampled][q_heads][dim] */
};

static size_t element_bytes(const struct bench_case *s)
{
    return s->dtype == CLATTN_FLOAT32 ? 4 : 2;
}

static clattn_tensor part(const void *data, clattn_dtype dtype, int64_t len, int32_t heads, int32_t dim)
{
    return clattn_tensor_bthd((void *)(uintptr_t)data, dtype, 1, len, heads, dim);
}

static clattn_status make_blocks(const struct oracle *oracle, int64_t row, int64_t keys, clattn_blocks **blocks)
{
    clattn_blocks_desc desc = oracle->problem->list, one = CLATTN_BLOCKS_DESC_INIT;
    int32_t *lists = malloc((size_t)desc.heads * (size_t)desc.topk * sizeof *lists);
    if (!lists) return CLATTN_OUT_OF_MEMORY;
    for (int32_t h = 0; h < desc.heads; h++)
        bench_list(oracle->problem, row, h, (keys + desc.block - 1) / desc.block, lists + h * desc.topk);
    one.block = desc.block;
    one.rows = 1;
    one.heads = desc.heads;
    one.topk = desc.topk;
    clattn_status status = clattn_blocks_create(oracle->reference, &one, lists, blocks);
    free(lists);
    return status;
}

static clattn_status add_row(struct oracle *oracle, int n, float *out, float *lse)
{
    const struct bench_problem *problem = oracle->problem;
    const struct bench_case *s = problem->shape;
    int64_t row = problem->sampled[n], at = row * s->q_heads * s->dim, width = (int64_t)s->q_heads * s->dim;
    int64_t keys = s->causal ? row + s->kv_len - s->q_len + 1 : s->kv_len;
    clattn_blocks *blocks = NULL;
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    clattn_tensor q =
        part((char *)problem->q_data + (size_t)at * element_bytes(s), s->dtype, 1, s->q_heads, s->dim);
    clattn_tensor k = part(problem->k_data, s->dtype, keys, s->kv_heads, s->dim);
    clattn_tensor v = part(problem->v_data, s->dtype, keys, s->kv_heads, s->dim);
    clattn_tensor o = part(out, CLATTN_FLOAT32, 1, s->q_heads, s->dim),
                  l = part(lse, CLATTN_FLOAT32, 1, s->q_heads, 1);
    clattn_tensor dout = part((float *)problem->dout_data + at, CLATTN_FLOAT32, 1, s->q_heads, s->dim);
    clattn_tensor dq = part(oracle->dq + n * width, CLATTN_FLOAT32, 1, s->q_heads, s->dim);
    clattn_tensor dk = part(oracle->dk, CLATTN_FLOAT32, keys, s->kv_heads, s->dim);
    clattn_tensor dv = part(oracle->dv, CLATTN_FLOAT32, keys, s->kv_heads, s->dim);
    attention.causal = 0; /* later keys are cut off */
    gradients.dout = &dout;
    gradients.dq = &dq;
    gradients.dk = &dk;
    gradients.dv = &dv;
    gradients.accumulate = 1;
    clattn_status status = problem->indices ? make_blocks(oracle, row, keys, &blocks) : CLATTN_SUCCESS;
    if (!status)
        status = clattn_attention_forward(oracle->reference, &attention, &q, &k, &v, blocks, &o, &l, NULL);
    if (!status)
        status = clattn_attention_backward(oracle->reference, &attention, &q, &k, &v, blocks, &o, &l,
                                           &gradients, NULL);
    clattn_blocks_release(oracle->reference, blocks);
    return status;
}

/* Squares of the differences and of the oracle, summed. */
struct squares {
    double difference, size;
};

static void compare(struct squares *sum, double *worst, const float *got, const float *oracle, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        double difference = fabs((double)got[i] - oracle[i]);
        sum->difference += difference * difference;
        sum->size += (double)oracle[i] * oracle[i];
        if (!(difference <= *worst)) *worst = difference;
    }
}

/* Relative root mean square of a tensor. */
static void judge(const struct bench_case *s, struct squares sum, struct bench_verdict *verdict)
{
    double relative = sqrt(sum.difference / sum.size) / (s->dtype == CLATTN_FLOAT32 ? 1e-5 : 5e-3);
    if (!(relative <= verdict->tolerated)) verdict->tolerated = relative;
}

static clattn_status compare_all(const struct oracle *oracle, struct bench_verdict *verdict)
{
    const struct bench_problem *problem = oracle->problem;
    const struct bench_case *s = problem->shape;
    clattn_context *context = problem->device->context;
    size_t width = (size_t)s->q_heads * (size_t)s->dim,
           keys = (size_t)s->kv_len * (size_t)s->kv_heads * (size_t)s->dim;
    size_t queries = (size_t)s->q_len * width;
    float *got = malloc((keys > queries ? keys : queries) * sizeof *got);
    if (!got) return CLATTN_OUT_OF_MEMORY;
    clattn_tensor as_q = part(got, CLATTN_FLOAT32, s->q_len, s->q_heads, s->dim);
    clattn_tensor as_k = part(got, CLATTN_FLOAT32, s->kv_len, s->kv_heads, s->dim);
    struct squares dq = {0, 0}, dk = {0, 0}, dv = {0, 0};
    clattn_status status = clattn_tensor_download(context, &problem->device_dq, &as_q);
    for (int n = 0; n < problem->sampled_count && !status; n++)
        compare(&dq, &verdict->error, got + (size_t)problem->sampled[n] * width, oracle->dq + (size_t)n * width,
                width);
    if (!status) status = clattn_tensor_download(context, &problem->device_dk, &as_k);
    if (!status) compare(&dk, &verdict->error, got, oracle->dk, keys);
    if (!status) status = clattn_tensor_download(context, &problem->device_dv, &as_k);
    if (!status) compare(&dv, &verdict->error, got, oracle->dv, keys);
    judge(s, dq, verdict);
    judge(s, dk, verdict);
    judge(s, dv, verdict);
    free(got);
    return status;
}

clattn_status bench_verify_gradients(struct bench_problem *problem, clattn_context *reference,
                                     struct bench_verdict *verdict)
{
    const struct bench_case *s = problem->shape;
    size_t width = (size_t)s->q_heads * (size_t)s->dim,
           keys = (size_t)s->kv_len * (size_t)s->kv_heads * (size_t)s->dim;
    struct oracle oracle = {problem, reference, calloc(keys, sizeof(float)), calloc(keys, sizeof(float)),
                            calloc((size_t)problem->sampled_count * width, sizeof(float))};
    float *out = malloc((width + (size_t)s->q_heads) * sizeof *out);
    clattn_status status = oracle.dk && oracle.dv && oracle.dq && out ? CLATTN_SUCCESS : CLATTN_OUT_OF_MEMORY;
    for (int n = 0; n < problem->sampled_count && !status; n++, verdict->rows++)
        status = add_row(&oracle, n, out, out + width);
    if (!status) status = compare_all(&oracle, verdict);
    free(oracle.dk);
    free(oracle.dv);
    free(oracle.dq);
    free(out);
    return status;
}
