/* SPDX-License-Identifier: MIT */
/* A path of the NVIDIA tier against the reference, before its first use with a shape: compilers of kernels make
 * mistakes (ptxas 13.0 gave away registers that were still in use, at one head dimension only).
 *
 * The case is small but has what kernels stumble over: rows without keys, rows without a list, a leaf that is
 * not full, lists of every length, two key heads, more than one level of the pyramid. */

#include "config.h"

#include "opencl_nvidia_selftest.h"
#include "select.h"

#include "half.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { Q_LEN = 150, KV_LEN = 130, LIST_QUERIES = 16, WINDOW = 40, SOFTCAP = 2 };

/* ---- tensors on both sides ---- */

static uint16_t narrow(clattn_dtype dtype, float value)
{
    return dtype == CLATTN_FLOAT16 ? float16_of_float(value) : bfloat16_of_float(value);
}

clattn_status selftest_twin_new(struct selftest *t, struct twin *twin, clattn_dtype dtype, int64_t len,
                                int heads, int dim, uint32_t seed)
{
    int64_t shift = t->shape->aligned || dtype == CLATTN_FLOAT32 ? 0 : 1;
    int64_t elements = len * heads * dim;
    twin->halves = malloc((size_t)(elements + 1) * dtype_bytes(dtype));
    if (!twin->halves) return fail(t->context, CLATTN_OUT_OF_MEMORY, "no memory for the self-test");
    memset(twin->halves, 0xff, (size_t)(elements + 1) * dtype_bytes(dtype));
    for (int64_t i = 0; seed && i < elements; i++) {
        seed = seed * 1664525u + 1013904223u;
        float value = ((float)(seed >> 25) - 64) / 64; /* exact in all types */
        if (dtype == CLATTN_FLOAT32)
            memcpy(&((float *)(void *)twin->halves)[i], &value, sizeof value);
        else
            twin->halves[i + shift] = narrow(dtype, value);
    }
    twin->host = clattn_tensor_bthd(twin->halves, dtype, 1, len, heads, dim);
    twin->host.offset = shift;
    clattn_tensor flat = clattn_tensor_bthd(twin->halves, dtype, 1, elements + shift, 1, 1);
    clattn_status status = clattn_tensor_create(t->context, dtype, 1, elements + shift, 1, 1, &twin->whole);
    if (!status) status = clattn_tensor_upload(t->context, &flat, &twin->whole);
    twin->device = twin->host;
    twin->device.data = twin->whole.data;
    twin->device.memory = twin->whole.memory;
    return status;
}

static void twin_free(struct selftest *t, struct twin *twin)
{
    free(twin->halves);
    if (twin->whole.data) clattn_tensor_release(t->context, &twin->whole);
}

static float value_of(const void *data, clattn_dtype dtype, int64_t i)
{
    if (dtype == CLATTN_FLOAT32) return ((const float *)data)[i];
    uint16_t half = ((const uint16_t *)data)[i];
    return dtype == CLATTN_FLOAT16 ? float_of_float16(half) : float_of_bfloat16(half);
}

clattn_status selftest_twin_compare(struct selftest *t, const char *name, struct twin *twin, float size)
{
    clattn_dtype dtype = twin->host.dtype;
    int64_t elements = twin->whole.len;
    void *have = malloc((size_t)elements * dtype_bytes(dtype));
    if (!have) return fail(t->context, CLATTN_OUT_OF_MEMORY, "no memory for the self-test");
    clattn_tensor flat = clattn_tensor_bthd(have, dtype, 1, elements, 1, 1);
    clattn_status status = clattn_tensor_download(t->context, &twin->whole, &flat);
    float allowed = dtype == CLATTN_FLOAT32 ? 2e-3f : dtype == CLATTN_FLOAT16 ? 1.0f / 256 : 1.0f / 32;
    for (int64_t i = twin->host.offset; i < elements && !status; i++) {
        float a = value_of(have, dtype, i), b = value_of(twin->halves, dtype, i);
        if (!(a == b || fabsf(a - b) <= allowed * (size + fabsf(b))))
            status = fail(t->context, CLATTN_NO_DEVICE, "%s[%lld] is %g, must be %g", name,
                          (long long)(i - twin->host.offset), (double)a, (double)b);
    }
    free(have);
    return status;
}

/* ---- set-up ---- */

clattn_status selftest_begin(struct selftest *t, int q_len, int kv_len)
{
    const struct nvidia_shape *shape = t->shape;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    t->kv_heads = shape->group >= 8 ? 1 : 2;
    t->q_heads = t->kv_heads * MAX(shape->group, 1);
    t->attention = (clattn_attention_desc)CLATTN_ATTENTION_DESC_INIT;
    t->attention.causal = shape->causal;
    t->attention.scale = 3 / sqrtf((float)shape->dim); /* so that weights differ much */
    t->attention.window = shape->window ? WINDOW : 0;
    t->attention.softcap = shape->softcap ? SOFTCAP : 0;
    clattn_status status = clattn_context_create(&desc, &t->reference);
    if (!status) status = selftest_twin_new(t, &t->q, shape->dtype, q_len, t->q_heads, shape->dim, 1);
    if (!status) status = selftest_twin_new(t, &t->k, shape->dtype, kv_len, t->kv_heads, shape->dim, 2);
    return status;
}

static void end(struct selftest *t)
{
    struct twin *const twins[] = {&t->q,    &t->k,    &t->v,  &t->out, &t->lse,
                                  &t->sink, &t->dout, &t->dq, &t->dk,  &t->dv};
    for (int i = 0; i < 10; i++)
        twin_free(t, twins[i]);
    clattn_context_release(t->reference);
}

/* Lists of 0, 1, 2 ... of the three blocks. */
static clattn_status lists_new(struct selftest *t, clattn_context *context, enum nvidia_path path,
                               clattn_blocks **blocks)
{
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    desc.q_block =
        path == NVIDIA_TILE || path == NVIDIA_TOKEN || path == NVIDIA_BACKWARD_TILE ? LIST_QUERIES : 1;
    desc.rows = ceil_div(Q_LEN, desc.q_block);
    desc.heads = t->kv_heads;
    desc.topk = t->shape->topk ? t->shape->topk : 3;
    int32_t *indices = malloc((size_t)desc.rows * (size_t)(desc.heads * desc.topk) * sizeof *indices);
    if (!indices) return fail(t->context, CLATTN_OUT_OF_MEMORY, "no memory for the self-test");
    for (int64_t i = 0; i < desc.rows * desc.heads * desc.topk; i++) {
        int64_t list = i / desc.topk, entry = i % desc.topk;
        bool is_listed = entry < 3 && ((5 * list + 7) >> entry & 1);
        indices[i] = is_listed ? (int32_t)entry : -1;
    }
    clattn_status status = clattn_blocks_create(context, &desc, indices, blocks);
    free(indices);
    return status;
}

/* ---- attention ---- */

clattn_status selftest_sink_new(struct selftest *t)
{
    t->attention.sink = &t->sink.host;
    return selftest_twin_new(t, &t->sink, CLATTN_FLOAT32, 1, t->q_heads, 1, 5);
}

static clattn_status forward_tensors(struct selftest *t)
{
    const struct nvidia_shape *shape = t->shape;
    clattn_status status = selftest_begin(t, Q_LEN, KV_LEN);
    if (!status) status = selftest_twin_new(t, &t->v, shape->dtype, KV_LEN, t->kv_heads, shape->dim_v, 3);
    if (!status) status = selftest_twin_new(t, &t->out, shape->dtype, Q_LEN, t->q_heads, shape->dim_v, 0);
    if (!status) status = selftest_twin_new(t, &t->lse, CLATTN_FLOAT32, Q_LEN, t->q_heads, 1, 0);
    if (!status && shape->sink) status = selftest_sink_new(t);
    return status;
}

static clattn_status forward_reference(struct selftest *t, const clattn_blocks *blocks)
{
    return clattn_attention_forward(t->reference, &t->attention, &t->q.host, &t->k.host, &t->v.host, blocks,
                                    &t->out.host, &t->lse.host, NULL);
}

static clattn_status forward_device(struct selftest *t, enum nvidia_path path, const clattn_blocks *blocks)
{
    struct problem problem;
    struct tensors tensors = {&t->q.device, &t->k.device, &t->v.device, &t->out.device, &t->lse.device};
    clattn_attention_desc attention = t->attention;
    if (attention.sink) attention.sink = &t->sink.device;
    clattn_status status =
        problem_init(t->context, &attention, &tensors, blocks ? blocks->q_block : 1, &problem);
    if (status) return status;
    struct forward_job job = {.problem = &problem,
                              .q = tensors.q,
                              .k = tensors.k,
                              .v = tensors.v,
                              .out = tensors.out,
                              .lse = tensors.lse,
                              .blocks = blocks};
    status = nvidia_forward_run(t->context, &job, t->shape, path);
    problem_release(&problem);
    return status;
}

static clattn_status test_forward(struct selftest *t, enum nvidia_path path)
{
    clattn_blocks *host_blocks = NULL, *blocks = NULL;
    bool has_dense = path == NVIDIA_TILE || path == NVIDIA_TOKEN;
    clattn_status status = forward_tensors(t);
    if (!status) status = lists_new(t, t->reference, path, &host_blocks);
    if (!status) status = lists_new(t, t->context, path, &blocks);
    for (int dense = 0; dense <= has_dense && !status; dense++) {
        status = forward_reference(t, dense ? NULL : host_blocks);
        if (!status) status = forward_device(t, path, dense ? NULL : blocks);
        if (!status) status = selftest_twin_compare(t, dense ? "dense out" : "out", &t->out, 1);
        if (!status) status = selftest_twin_compare(t, dense ? "dense lse" : "lse", &t->lse, 1);
    }
    clattn_blocks_release(t->reference, host_blocks);
    clattn_blocks_release(t->context, blocks);
    return status;
}

/* ---- gradients ---- */

static clattn_status backward_device(struct selftest *t, enum nvidia_path path, const clattn_blocks *blocks)
{
    struct problem problem;
    struct tensors tensors = {&t->q.device, &t->k.device, &t->v.device, &t->out.device, &t->lse.device};
    clattn_status status =
        problem_init(t->context, &t->attention, &tensors, blocks ? blocks->q_block : 1, &problem);
    if (status) return status;
    struct backward_job job = {.problem = &problem,
                               .q = tensors.q,
                               .k = tensors.k,
                               .v = tensors.v,
                               .blocks = blocks,
                               .out = tensors.out,
                               .lse = tensors.lse,
                               .dout = &t->dout.device,
                               .dq = &t->dq.device,
                               .dk = &t->dk.device,
                               .dv = &t->dv.device};
    status = nvidia_backward_run(t->context, &job, t->shape, path);
    problem_release(&problem);
    return status;
}

/* What the host's gradients are compared with: four times their root mean square, since sums of large terms
 * that cancel are as wrong as those that do not. */
static float sum_size(const struct twin *twin)
{
    int64_t elements = twin->whole.len - twin->host.offset;
    float sum = 0;
    for (int64_t i = 0; i < elements; i++) {
        float value = value_of(twin->halves, twin->host.dtype, twin->host.offset + i);
        sum += value * value;
    }
    return 4 * sqrtf(sum / (float)elements);
}

static clattn_status upload(struct selftest *t, struct twin *twin)
{
    clattn_tensor flat = clattn_tensor_bthd(twin->halves, twin->host.dtype, 1, twin->whole.len, 1, 1);
    return clattn_tensor_upload(t->context, &flat, &twin->whole);
}

/* From the forward results to the gradients, with these lists on both sides. */
static clattn_status backward_compare(struct selftest *t, enum nvidia_path path,
                                      const clattn_blocks *host_blocks, const clattn_blocks *blocks)
{
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    clattn_status status = forward_reference(t, host_blocks);
    if (!status) status = upload(t, &t->out);
    if (!status) status = upload(t, &t->lse);
    gradients.dout = &t->dout.host;
    gradients.dq = &t->dq.host;
    gradients.dk = &t->dk.host;
    gradients.dv = &t->dv.host;
    if (!status)
        status = clattn_attention_backward(t->reference, &t->attention, &t->q.host, &t->k.host, &t->v.host,
                                           host_blocks, &t->out.host, &t->lse.host, &gradients, NULL);
    if (!status) status = backward_device(t, path, blocks);
    if (!status) status = selftest_twin_compare(t, blocks ? "dq" : "dense dq", &t->dq, sum_size(&t->dq));
    if (!status) status = selftest_twin_compare(t, blocks ? "dk" : "dense dk", &t->dk, sum_size(&t->dk));
    if (!status) status = selftest_twin_compare(t, blocks ? "dv" : "dense dv", &t->dv, sum_size(&t->dv));
    return status;
}

static clattn_status test_backward(struct selftest *t, enum nvidia_path path)
{
    const struct nvidia_shape *shape = t->shape;
    clattn_blocks *host_blocks = NULL, *blocks = NULL;
    clattn_status status = forward_tensors(t);
    if (!status) status = selftest_twin_new(t, &t->dout, shape->dtype, Q_LEN, t->q_heads, shape->dim_v, 4);
    if (!status) status = selftest_twin_new(t, &t->dq, shape->dtype, Q_LEN, t->q_heads, shape->dim, 0);
    if (!status) status = selftest_twin_new(t, &t->dk, shape->dtype, KV_LEN, t->kv_heads, shape->dim, 0);
    if (!status) status = selftest_twin_new(t, &t->dv, shape->dtype, KV_LEN, t->kv_heads, shape->dim_v, 0);
    if (!status) status = lists_new(t, t->reference, path, &host_blocks);
    if (!status) status = lists_new(t, t->context, path, &blocks);
    if (!status) status = backward_compare(t, path, host_blocks, blocks);
    if (!status && path == NVIDIA_BACKWARD_TILE) status = backward_compare(t, path, NULL, NULL);
    clattn_blocks_release(t->reference, host_blocks);
    clattn_blocks_release(t->context, blocks);
    return status;
}

/* ---- pyramid and selection ---- */

static clattn_status pyramid_device(struct selftest *t, clattn_pyramid *pyramid)
{
    struct problem problem;
    clattn_status status =
        problem_init(t->context, &t->attention, &(struct tensors){.k = &t->k.device}, 1, &problem);
    if (status) return status;
    struct pyramid_job job = {.problem = &problem, .k = &t->k.device, .pyramid = pyramid};
    status = nvidia_pyramid_run(t->context, &job, t->shape);
    problem_release(&problem);
    return status;
}

/* Both pyramids in host memory, [2][nodes][dim]. */
static clattn_status compare_means(struct selftest *t, const clattn_pyramid *want, const clattn_pyramid *have)
{
    size_t count = (size_t)want->nodes * (size_t)want->dim, bytes = count * sizeof(float);
    float *means = malloc(2 * bytes);
    if (!means) return fail(t->context, CLATTN_OUT_OF_MEMORY, "no memory for the self-test");
    clattn_status status = t->reference->backend->storage_read(t->reference, &want->means, 0, means, bytes);
    if (!status) status = t->context->backend->storage_read(t->context, &have->means, 0, means + count, bytes);
    for (size_t i = 0; i < count && !status; i++)
        if (!(fabsf(means[count + i] - means[i]) <= 1e-5f))
            status = fail(t->context, CLATTN_NO_DEVICE, "means[%zu] is %g, must be %g", i,
                          (double)means[count + i], (double)means[i]);
    free(means);
    return status;
}

static clattn_status test_pyramid(struct selftest *t)
{
    struct nvidia_shape shape = *t->shape;
    clattn_pyramid *want = NULL, *have = NULL;
    shape.group = 1;
    t->shape = &shape;
    clattn_status status = selftest_begin(t, 1, SELECT_KV_LEN);
    if (!status) status = clattn_pyramid_build(t->reference, NULL, NVIDIA_LEAF, &t->k.host, &want, NULL);
    struct problem problem;
    if (!status) status = problem_init(t->context, NULL, &(struct tensors){.k = &t->k.device}, 1, &problem);
    if (!status) {
        status = pyramid_new(t->context, &problem, NVIDIA_LEAF, false, &have);
        problem_release(&problem);
    }
    if (!status) status = pyramid_device(t, have);
    if (!status) status = compare_means(t, want, have);
    clattn_pyramid_release(t->reference, want);
    clattn_pyramid_release(t->context, have);
    return status;
}

static clattn_status select_device(struct selftest *t, enum nvidia_path path, const clattn_select_desc *select,
                                   clattn_blocks **blocks)
{
    struct problem problem;
    clattn_pyramid *pyramid = NULL;
    clattn_blocks *made = NULL;
    const struct tensors tensors = {.q = &t->q.device, .k = &t->k.device};
    clattn_status status = problem_init(t->context, &t->attention, &tensors, 1, &problem);
    if (status) return status;
    status = pyramid_new(t->context, &problem, NVIDIA_LEAF, false, &pyramid);
    /* The means as the reference has them: only the selection is tested. */
    clattn_pyramid *want = NULL;
    if (!status)
        status = clattn_pyramid_build(t->reference, &t->attention, NVIDIA_LEAF, &t->k.host, &want, NULL);
    if (!status) {
        size_t bytes = (size_t)want->nodes * (size_t)want->dim * sizeof(float);
        status = t->context->backend->storage_write(t->context, &pyramid->means, want->means.host, bytes);
    }
    if (!status) status = blocks_place(t->context, &problem, select, blocks, &made);
    if (!status) {
        struct select_job job = {.problem = &problem,
                                 .select = select,
                                 .q = tensors.q,
                                 .k = tensors.k,
                                 .pyramid = pyramid,
                                 .blocks = made};
        *blocks = made;
        status = path == NVIDIA_SELECT ? nvidia_select_run(t->context, &job, t->shape)
                                       : nvidia_flat_run(t->context, &job, t->shape, path);
    }
    clattn_pyramid_release(t->reference, want);
    clattn_pyramid_release(t->context, pyramid);
    problem_release(&problem);
    return status;
}

clattn_status selftest_compare_lists(struct selftest *t, const clattn_blocks *want, const clattn_blocks *have)
{
    int64_t lists = want->rows * want->heads, different = 0;
    size_t bytes = (size_t)(lists * (want->topk + 1)) * sizeof(int32_t);
    int32_t *a = malloc(bytes), *b = malloc(bytes);
    clattn_status status = CLATTN_SUCCESS;
    if (!a || !b) status = fail(t->context, CLATTN_OUT_OF_MEMORY, "no memory for the self-test");
    if (!status) status = clattn_blocks_read(t->reference, want, a, a + lists * want->topk);
    if (!status) status = clattn_blocks_read(t->context, have, b, b + lists * want->topk);
    for (int64_t i = 0; i < lists && !status; i++)
        different += memcmp(a + i * want->topk, b + i * want->topk, (size_t)want->topk * sizeof *a) != 0 ||
                     a[lists * want->topk + i] != b[lists * want->topk + i];
    if (!status && different > 1 + lists / 50)
        status = fail(t->context, CLATTN_NO_DEVICE, "%lld of %lld lists are wrong", (long long)different,
                      (long long)lists);
    free(a);
    free(b);
    return status;
}

static clattn_status test_select(struct selftest *t, enum nvidia_path path)
{
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_blocks *want = NULL, *have = NULL;
    select.selector = path == NVIDIA_SELECT ? CLATTN_SELECT_PISA : CLATTN_SELECT_FLAT_LSE;
    select.topk = t->shape->topk;
    clattn_status status = selftest_begin(t, SELECT_Q_LEN, SELECT_KV_LEN);
    if (!status)
        status = clattn_select(t->reference, &t->attention, &select, &t->q.host, &t->k.host, NULL, &want, NULL);
    if (!status) status = select_device(t, path, &select, &have);
    if (!status) status = selftest_compare_lists(t, want, have);
    clattn_blocks_release(t->reference, want);
    clattn_blocks_release(t->context, have);
    return status;
}

clattn_status nvidia_selftest(clattn_context *context, enum nvidia_path path, const struct nvidia_shape *shape)
{
    struct selftest t = {.context = context, .shape = shape};
    clattn_status status;
    if (path == NVIDIA_PYRAMID)
        status = test_pyramid(&t);
    else if (path == NVIDIA_SELECT || path == NVIDIA_FLAT || path == NVIDIA_FLAT_HOPPER)
        status = test_select(&t, path);
    else if (path == NVIDIA_BACKWARD || path == NVIDIA_BACKWARD_TILE)
        status = test_backward(&t, path);
    else if (path == NVIDIA_DECODE)
        status = selftest_decode(&t);
    else
        status = test_forward(&t, path);
    end(&t);
    return status;
}
