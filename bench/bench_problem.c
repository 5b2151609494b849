/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "bench.h"

#include "inputs.h"
#include "program.h"
#include "sixteen.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SEED 20260101

/* ---- inputs ---- */

static float value_of(const struct tensor_file *file, size_t n)
{
    switch (file->type) {
    case ELEMENT_FLOAT16:
        return half_to_float(((const uint16_t *)file->data)[n]);
    case ELEMENT_BFLOAT16:
        return bfloat16_to_float(((const uint16_t *)file->data)[n]);
    default:
        return ((const float *)file->data)[n];
    }
}

/* A file's numbers, and a copy of its elements. */
static bool read_elements(const struct tensor_file *file, float *values, void **data)
{
    size_t count = (size_t)file->elements, bytes = count * (file->type == ELEMENT_FLOAT32 ? 4 : 2);
    *data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!*data || !values) return false;
    memcpy(*data, file->data, bytes);
    for (size_t n = 0; n < count; n++)
        values[n] = value_of(file, n);
    return true;
}

static bool make_from_files(struct bench_problem *problem, size_t q_count, size_t k_count)
{
    const struct bench_files *files = problem->shape->files;
    size_t bytes = problem->shape->dtype == CLATTN_FLOAT32 ? 4 : 2;
    problem->q_values = malloc(q_count * sizeof(float));
    problem->k_values = malloc(k_count * sizeof(float));
    problem->v_data = calloc(k_count, bytes); /* a selection looks at no value */
    problem->v_abs_data = calloc(k_count, bytes);
    return problem->v_data && problem->v_abs_data &&
           read_elements(&files->q, problem->q_values, &problem->q_data) &&
           read_elements(&files->k, problem->k_values, &problem->k_data);
}

static bool make_elements(float *values, size_t count, clattn_dtype dtype, uint64_t *state, void **data)
{
    if (!values) return false;
    for (size_t i = 0; i < count; i++)
        values[i] = inputs_normal(state);
    *data = inputs_encode(values, count, dtype);
    return *data != NULL;
}

static bool make_inputs(struct bench_problem *problem)
{
    const struct bench_case *s = problem->shape;
    uint64_t state = SEED;
    size_t q_count = (size_t)(s->q_len * s->q_heads * s->dim),
           k_count = (size_t)(s->kv_len * s->kv_heads * s->dim);
    if (s->files) return make_from_files(problem, q_count, k_count);
    float *v = malloc(k_count * sizeof *v);
    problem->q_values = malloc(q_count * sizeof(float));
    problem->k_values = malloc(k_count * sizeof(float));
    problem->out = malloc(q_count * sizeof(float));
    problem->lse = malloc((size_t)(s->q_len * s->q_heads) * sizeof(float));
    bool good = make_elements(problem->q_values, q_count, s->dtype, &state, &problem->q_data) &&
                make_elements(problem->k_values, k_count, s->dtype, &state, &problem->k_data) &&
                make_elements(v, k_count, s->dtype, &state, &problem->v_data) && problem->out && problem->lse;
    for (size_t i = 0; good && i < k_count; i++)
        v[i] = fabsf(v[i]);
    problem->v_abs_data = good ? inputs_encode(v, k_count, s->dtype) : NULL;
    free(v);
    return problem->v_abs_data != NULL;
}

/* Gradients that arrive: at the sampled rows, or at all. */
static bool make_dout(struct bench_problem *problem, bool everywhere)
{
    const struct bench_case *s = problem->shape;
    size_t width = (size_t)(s->q_heads * s->dim);
    uint64_t state = SEED + 1;
    if (!problem->dout_data) problem->dout_data = calloc((size_t)s->q_len * width, sizeof(float));
    float *dout = problem->dout_data;
    if (!dout) return false;
    for (int64_t row = 0, n = 0; row < s->q_len; row++) {
        bool sampled = n < problem->sampled_count && problem->sampled[n] == row;
        n += sampled;
        for (size_t d = 0; (sampled || everywhere) && d < width; d++)
            dout[(size_t)row * width + d] = inputs_normal(&state);
    }
    return true;
}

/* The first, the last and some rows between. */
static void sample_rows(struct bench_problem *problem)
{
    const int most = (int)(sizeof problem->sampled / sizeof *problem->sampled);
    int64_t rows = problem->shape->q_len;
    uint64_t state = SEED + 2;
    for (int n = 0; n < most; n++) {
        /* One from each part, so that they ascend. */
        int64_t begin = rows * n / most, end = rows * (n + 1) / most;
        int64_t row = n == 0 ? 0 : n == most - 1 ? rows - 1 : begin;
        if (n > 0 && n < most - 1 && end > begin)
            row += (int64_t)(inputs_random(&state) % (uint64_t)(end - begin));
        if (problem->sampled_count == 0 || row > problem->sampled[problem->sampled_count - 1])
            problem->sampled[problem->sampled_count++] = row;
    }
}

/* ---- on the device ---- */

static clattn_status stage(struct bench_problem *problem, const clattn_tensor *host, clattn_tensor *device)
{
    clattn_context *context = problem->device->context;
    if (!problem->is_staged) {
        *device = *host;
        return CLATTN_SUCCESS;
    }
    clattn_status status =
        clattn_tensor_create(context, host->dtype, host->batch, host->len, host->heads, host->dim, device);
    return status ? status : clattn_tensor_upload(context, host, device);
}

static clattn_status make_results(struct bench_problem *problem)
{
    const struct bench_case *s = problem->shape;
    clattn_context *context = problem->device->context;
    struct {
        clattn_tensor *tensor;
        int64_t len, heads, dim;
    } results[] = {{&problem->device_out, s->q_len, s->q_heads, s->dim},
                   {&problem->device_lse, s->q_len, s->q_heads, 1},
                   {&problem->device_dq, s->q_len, s->q_heads, s->dim},
                   {&problem->device_dk, s->kv_len, s->kv_heads, s->dim},
                   {&problem->device_dv, s->kv_len, s->kv_heads, s->dim}};
    int count = s->operation == BENCH_BACKWARD ? 5 : 2;
    clattn_status status = CLATTN_SUCCESS;
    for (int i = 0; i < count && !status; i++)
        status = clattn_tensor_create(context, CLATTN_FLOAT32, 1, results[i].len, results[i].heads,
                                      results[i].dim, results[i].tensor);
    return status;
}

static clattn_status make_pattern(struct bench_problem *problem)
{
    const struct bench_case *s = problem->shape;
    clattn_pattern *pattern = NULL;
    clattn_pattern_shape shape = CLATTN_PATTERN_SHAPE_INIT;
    shape.q_len = s->q_len;
    shape.kv_len = s->kv_len;
    shape.block = shape.q_block = s->leaf;
    clattn_status status = clattn_pattern_parse(s->pattern, &pattern, NULL, 0);
    if (!status)
        status = clattn_pattern_blocks(problem->device->context, pattern, &problem->attention, &shape,
                                       &problem->blocks);
    clattn_pattern_release(pattern);
    return status;
}

static clattn_status select_lists(struct bench_problem *problem, const clattn_sync *sync)
{
    return clattn_select(problem->device->context, &problem->attention, &problem->select, &problem->device_q,
                         &problem->device_k, problem->pyramid, &problem->blocks, sync);
}

static clattn_status attend(struct bench_problem *problem, const clattn_sync *sync)
{
    return clattn_attention_forward(problem->device->context, &problem->attention, &problem->device_q,
                                    &problem->device_k, &problem->device_v, problem->blocks,
                                    &problem->device_out, &problem->device_lse, sync);
}

static clattn_status build_pyramid(struct bench_problem *problem, const clattn_sync *sync)
{
    return clattn_pyramid_build_for(problem->device->context, &problem->attention, &problem->select,
                                    &problem->device_k, &problem->pyramid, sync);
}

/* ---- decoding ---- */

enum { DECODE_ROOM = 512 }; /* steps before the cache is cut back */

static clattn_tensor rows_of(const clattn_tensor *tensor, int64_t first, int64_t count)
{
    clattn_tensor rows = *tensor;
    rows.offset += first * tensor->len_stride;
    rows.len = count;
    return rows;
}

/* A cache with all keys but the last. */
static clattn_status make_cache(struct bench_problem *problem)
{
    const struct bench_case *s = problem->shape;
    clattn_context *context = problem->device->context;
    clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
    const int32_t sequence = 0, len = (int32_t)(s->kv_len - 1);
    desc.tokens = s->kv_len + DECODE_ROOM;
    desc.kv_heads = s->kv_heads;
    desc.dim = desc.dim_v = s->dim;
    desc.dtype = s->dtype;
    desc.leaf = s->leaf;
    clattn_status status = clattn_cache_create(context, &desc, &problem->cache);
    if (status || len == 0) return status;
    clattn_tensor k = rows_of(&problem->device_k, 0, len), v = rows_of(&problem->device_v, 0, len);
    return clattn_cache_append(context, problem->cache, 1, &sequence, &len, &k, &v, NULL);
}

/* The first step is that of the last key; later ones append it again, as a text would grow. */
static clattn_status decode(struct bench_problem *problem, const clattn_sync *sync)
{
    const struct bench_case *s = problem->shape;
    clattn_context *context = problem->device->context;
    const int32_t sequence = 0, len = 1;
    clattn_tensor k = rows_of(&problem->device_k, s->kv_len - 1, 1),
                  v = rows_of(&problem->device_v, s->kv_len - 1, 1);
    clattn_status status = CLATTN_SUCCESS;
    if (clattn_cache_length(problem->cache, 0) == s->kv_len + DECODE_ROOM)
        status = clattn_cache_truncate(context, problem->cache, 0, s->kv_len - 1, sync);
    return status ? status
                  : clattn_decode(context, problem->cache, &problem->attention, &problem->select, 1, &sequence,
                                  &len, &problem->device_q, &k, &v, &problem->device_out, &problem->device_lse,
                                  s->selector == CLATTN_SELECT_DENSE ? NULL : &problem->blocks, sync);
}

/* What the timed call needs beside the tensors. */
static clattn_status set_up(struct bench_problem *problem)
{
    const struct bench_case *s = problem->shape;
    clattn_status status = CLATTN_SUCCESS;
    if (s->operation == BENCH_NEIGHBORHOOD)
        return clattn_neighborhood_create(problem->device->context, &s->neighborhood, 0, &problem->plan);
    if (s->operation == BENCH_PYRAMID) return CLATTN_SUCCESS;
    if (s->operation == BENCH_DECODE) return make_cache(problem);
    bool selects = !s->pattern && s->selector != CLATTN_SELECT_DENSE;
    if (s->pattern) status = make_pattern(problem);
    if (selects && s->selector != CLATTN_SELECT_FLAT_LSE) status = build_pyramid(problem, NULL);
    if (status || s->operation == BENCH_SELECT) return status;
    if (selects) status = select_lists(problem, NULL);
    return status || s->operation != BENCH_BACKWARD ? status : attend(problem, NULL);
}

clattn_status bench_problem_make(struct bench_problem *problem, const struct bench_case *s,
                                 struct bench_device *device, double *transfer)
{
    *problem = (struct bench_problem){.shape = s, .device = device};
    problem->is_staged = device->info.backend == CLATTN_BACKEND_OPENCL;
    problem->attention = (clattn_attention_desc)CLATTN_ATTENTION_DESC_INIT;
    problem->attention.causal = s->causal;
    problem->select = (clattn_select_desc)CLATTN_SELECT_DESC_INIT;
    problem->select.selector = s->selector;
    problem->select.topk = s->topk;
    problem->select.leaf = s->leaf;
    sample_rows(problem);
    if (!make_inputs(problem) || (s->operation == BENCH_BACKWARD && !make_dout(problem, false)))
        return CLATTN_OUT_OF_MEMORY;
    problem->q = clattn_tensor_bthd(problem->q_data, s->dtype, 1, s->q_len, s->q_heads, s->dim);
    problem->k = clattn_tensor_bthd(problem->k_data, s->dtype, 1, s->kv_len, s->kv_heads, s->dim);
    problem->v = clattn_tensor_bthd(problem->v_data, s->dtype, 1, s->kv_len, s->kv_heads, s->dim);
    problem->dout = clattn_tensor_bthd(problem->dout_data, CLATTN_FLOAT32, 1, s->q_len, s->q_heads, s->dim);
    double start = program_seconds();
    clattn_status status = stage(problem, &problem->q, &problem->device_q);
    if (!status) status = stage(problem, &problem->k, &problem->device_k);
    if (!status) status = stage(problem, &problem->v, &problem->device_v);
    *transfer = problem->is_staged ? program_seconds() - start : 0;
    if (!status && s->operation == BENCH_BACKWARD)
        status = stage(problem, &problem->dout, &problem->device_dout);
    if (!status) status = make_results(problem);
    return status ? status : set_up(problem);
}

clattn_status bench_problem_run(struct bench_problem *problem, const clattn_sync *sync)
{
    clattn_context *context = problem->device->context;
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    switch (problem->shape->operation) {
    case BENCH_PYRAMID:
        return build_pyramid(problem, sync);
    case BENCH_SELECT:
        return select_lists(problem, sync);
    case BENCH_FORWARD:
        return attend(problem, sync);
    case BENCH_BACKWARD:
        gradients.dout = &problem->device_dout;
        gradients.dq = &problem->device_dq;
        gradients.dk = &problem->device_dk;
        gradients.dv = &problem->device_dv;
        return clattn_attention_backward(context, &problem->attention, &problem->device_q, &problem->device_k,
                                         &problem->device_v, problem->blocks, &problem->device_out,
                                         &problem->device_lse, &gradients, sync);
    case BENCH_DECODE:
        return decode(problem, sync);
    case BENCH_NEIGHBORHOOD:
        return clattn_neighborhood_forward(context, problem->plan, CLATTN_SCALE_DEFAULT, &problem->device_q,
                                           &problem->device_k, &problem->device_v, NULL, NULL,
                                           &problem->device_out, &problem->device_lse, sync);
    }
    return CLATTN_INTERNAL;
}

static clattn_status fetch_lists(struct bench_problem *problem)
{
    problem->list = (clattn_blocks_desc){.size = sizeof problem->list};
    clattn_status status = clattn_blocks_describe(problem->blocks, &problem->list);
    if (status) return status;
    size_t entries = (size_t)(problem->list.rows * problem->list.heads * problem->list.topk);
    problem->indices = malloc((entries + 1) * sizeof *problem->indices);
    if (!problem->indices) return CLATTN_OUT_OF_MEMORY;
    return clattn_blocks_read(problem->device->context, problem->blocks, problem->indices, NULL);
}

clattn_status bench_problem_fetch(struct bench_problem *problem)
{
    const struct bench_case *s = problem->shape;
    clattn_context *context = problem->device->context;
    clattn_tensor out = clattn_tensor_bthd(problem->out, CLATTN_FLOAT32, 1, s->q_len, s->q_heads, s->dim);
    clattn_tensor lse = clattn_tensor_bthd(problem->lse, CLATTN_FLOAT32, 1, s->q_len, s->q_heads, 1);
    clattn_status status = problem->blocks ? fetch_lists(problem) : CLATTN_SUCCESS;
    if (s->operation != BENCH_FORWARD && s->operation != BENCH_NEIGHBORHOOD && s->operation != BENCH_DECODE)
        return status;
    if (!status) status = clattn_tensor_download(context, &problem->device_out, &out);
    return status ? status : clattn_tensor_download(context, &problem->device_lse, &lse);
}

clattn_status bench_problem_densify(struct bench_problem *problem)
{
    if (problem->shape->operation != BENCH_BACKWARD) return CLATTN_SUCCESS;
    if (!make_dout(problem, true)) return CLATTN_OUT_OF_MEMORY;
    return problem->is_staged
               ? clattn_tensor_upload(problem->device->context, &problem->dout, &problem->device_dout)
               : CLATTN_SUCCESS;
}

void bench_problem_release(struct bench_problem *problem)
{
    clattn_context *context = problem->device->context;
    clattn_tensor *inputs[] = {&problem->device_q, &problem->device_k, &problem->device_v,
                               &problem->device_dout};
    clattn_tensor *results[] = {&problem->device_out, &problem->device_lse, &problem->device_dq,
                                &problem->device_dk, &problem->device_dv};
    clattn_neighborhood_release(context, problem->plan);
    clattn_cache_release(context, problem->cache);
    clattn_blocks_release(context, problem->blocks);
    clattn_pyramid_release(context, problem->pyramid);
    for (int i = 0; i < 4 && problem->is_staged; i++)
        if (inputs[i]->data) clattn_tensor_release(context, inputs[i]);
    for (int i = 0; i < 5; i++)
        if (results[i]->data) clattn_tensor_release(context, results[i]);
    void *const memory[] = {problem->q_values, problem->k_values,   problem->q_data,    problem->k_data,
                            problem->v_data,   problem->v_abs_data, problem->dout_data, problem->out,
                            problem->lse,      problem->indices};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        free(memory[i]);
    *problem = (struct bench_problem){0};
}
