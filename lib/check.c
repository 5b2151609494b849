/* SPDX-License-Identifier: MIT */
/* Argument checks at the public boundary: descriptors, tensors, and tensors against each other. */

#include "internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DIM_MAX = 256 };
#define LENGTH_MAX ((int64_t)INT32_MAX * 16) /* block indices are 32-bit, blocks have at least 16 tokens */
#define ELEMENTS_MAX (INT64_C(1) << 58)      /* bytes stay below 63 bits */

clattn_status desc_copy(clattn_context *context, const char *name, void *copy, size_t copy_bytes,
                        const void *desc)
{
    size_t size;
    memcpy(&size, desc, sizeof size);
    if (size < sizeof size)
        return fail(context, CLATTN_INVALID_ARGUMENT, "%s.size is %zu; use the initialiser of the type", name,
                    size);
    for (size_t i = copy_bytes; i < size; i++)
        if (((const unsigned char *)desc)[i])
            return fail(context, CLATTN_INVALID_ARGUMENT,
                        "%s.size is %zu and it uses fields that this library of size %zu does not know", name,
                        size, copy_bytes);
    memcpy(copy, desc, MIN(size, copy_bytes));
    return CLATTN_SUCCESS;
}

clattn_status check_leaf(clattn_context *context, const char *name, int64_t leaf)
{
    if (leaf == 16 || leaf == 32 || leaf == 64 || leaf == 128) return CLATTN_SUCCESS;
    return fail(context, CLATTN_INVALID_ARGUMENT, "%s is %lld; 16, 32, 64 or 128 is needed", name,
                (long long)leaf);
}

clattn_status check_select(clattn_context *context, const clattn_select_desc *desc, clattn_select_desc *checked)
{
    *checked = (clattn_select_desc)CLATTN_SELECT_DESC_INIT;
    clattn_status status = desc ? desc_copy(context, "select", checked, sizeof *checked, desc) : CLATTN_SUCCESS;
    if (!status) status = check_leaf(context, "select.leaf", checked->leaf);
    if (status) return status;
    if ((unsigned)checked->selector > CLATTN_SELECT_DENSE)
        return fail(context, CLATTN_INVALID_ARGUMENT, "select.selector is %d; 0 to %d are known",
                    checked->selector, CLATTN_SELECT_DENSE);
    if (checked->topk < 1 || checked->topk > CLATTN_TOPK_MAX)
        return fail(context, CLATTN_INVALID_ARGUMENT, "select.topk is %d; 1 to %d is needed", checked->topk,
                    CLATTN_TOPK_MAX);
    if (checked->forced_first < 0 || checked->forced_last < 0)
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "select.forced_first is %d, forced_last %d; 0 or more is needed", checked->forced_first,
                    checked->forced_last);
    return CLATTN_SUCCESS;
}

clattn_status check_sync(clattn_context *context, const clattn_sync *sync, clattn_sync *copy)
{
    *copy = (clattn_sync)CLATTN_SYNC_INIT;
    if (!sync) return CLATTN_SUCCESS;
    clattn_status status = desc_copy(context, "sync", copy, sizeof *copy, sync);
    if (status) return status;
    if (context->backend->host_memory)
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "sync is given; a context without OpenCL takes NULL only");
    if ((copy->wait_count > 0) != (copy->wait_list != NULL))
        return fail(context, CLATTN_INVALID_ARGUMENT, "sync.wait_count is %u but sync.wait_list is %s",
                    (unsigned)copy->wait_count, copy->wait_list ? "given" : "NULL");
    return CLATTN_SUCCESS;
}

/* An output must not overlap itself: sorted by stride, each dimension steps past everything inside of it. */
static bool overlaps_itself(const clattn_tensor *tensor)
{
    int64_t size[3] = {tensor->batch, tensor->len, tensor->heads};
    int64_t stride[3] = {tensor->batch_stride, tensor->len_stride, tensor->head_stride};
    int64_t extent = tensor->dim;
    for (int pass = 0; pass < 3; pass++) {
        int best = -1;
        for (int i = 0; i < 3; i++)
            if (size[i] > 1 && (best < 0 || stride[i] < stride[best])) best = i;
        if (best < 0) break;
        if (stride[best] < extent) return true;
        extent += (size[best] - 1) * stride[best];
        size[best] = 1;
    }
    return false;
}

/* The last element's offset, or false when it exceeds 63 bits. */
static bool last_element(const clattn_tensor *tensor, int64_t *last)
{
    int64_t size[3] = {tensor->batch, tensor->len, tensor->heads};
    int64_t stride[3] = {tensor->batch_stride, tensor->len_stride, tensor->head_stride};
    int64_t total = tensor->dim;
    if (__builtin_add_overflow(total, tensor->offset, &total)) return false;
    for (int i = 0; i < 3; i++) {
        int64_t span;
        if (!multiply(MAX(size[i] - 1, 0), stride[i], &span) || __builtin_add_overflow(total, span, &total))
            return false;
    }
    *last = total - 1;
    return total <= ELEMENTS_MAX;
}

clattn_status check_tensor(clattn_context *context, const char *name, const clattn_tensor *tensor,
                           bool is_output)
{
    int64_t elements, last;
    if (!tensor) return fail(context, CLATTN_INVALID_ARGUMENT, "%s is NULL", name);
    if (!dtype_bytes(tensor->dtype))
        return fail(context, CLATTN_INVALID_DTYPE, "%s.dtype is %d; FLOAT32, FLOAT16 or BFLOAT16 is needed",
                    name, tensor->dtype);
    if (tensor->batch < 1 || tensor->len < 0 || tensor->heads < 1 || tensor->dim < 1)
        return fail(context, CLATTN_INVALID_SHAPE,
                    "%s is [%lld][%lld][%lld][%lld]; positive sizes are needed (len may be 0)", name,
                    (long long)tensor->batch, (long long)tensor->len, (long long)tensor->heads,
                    (long long)tensor->dim);
    if (tensor->len > LENGTH_MAX || tensor->heads > INT32_MAX || tensor->batch > INT32_MAX ||
        !multiply(tensor->batch, tensor->len, &elements) || !multiply(elements, tensor->heads, &elements) ||
        !multiply(elements, tensor->dim, &elements) || elements > ELEMENTS_MAX)
        return fail(context, CLATTN_SIZE_OVERFLOW, "%s is [%lld][%lld][%lld][%lld], too large", name,
                    (long long)tensor->batch, (long long)tensor->len, (long long)tensor->heads,
                    (long long)tensor->dim);
    if (tensor->batch_stride < 0 || tensor->len_stride < 0 || tensor->head_stride < 0 || tensor->offset < 0)
        return fail(context, CLATTN_INVALID_STRIDE,
                    "%s has strides %lld, %lld, %lld and offset %lld; none may be negative", name,
                    (long long)tensor->batch_stride, (long long)tensor->len_stride,
                    (long long)tensor->head_stride, (long long)tensor->offset);
    if (!last_element(tensor, &last))
        return fail(context, CLATTN_SIZE_OVERFLOW, "%s reaches beyond 2^58 elements", name);
    if (is_output && overlaps_itself(tensor))
        return fail(context, CLATTN_INVALID_STRIDE,
                    "%s has strides %lld, %lld, %lld, so that its elements overlap", name,
                    (long long)tensor->batch_stride, (long long)tensor->len_stride,
                    (long long)tensor->head_stride);
    if (!tensor->data && tensor->len > 0)
        return fail(context, CLATTN_INVALID_ARGUMENT, "%s.data is NULL", name);
    if ((unsigned)tensor->memory > CLATTN_MEMORY_SVM ||
        (context->backend->host_memory && tensor->memory != CLATTN_MEMORY_HOST))
        return fail(context, CLATTN_INVALID_MEMORY, "%s.memory is %d; this context can use %s", name,
                    tensor->memory,
                    context->backend->host_memory ? "host memory (0) only" : "host memory, cl_mem and SVM");
    return CLATTN_SUCCESS;
}

static clattn_status check_same(clattn_context *context, const char *what, int64_t value, const char *other,
                                int64_t expected)
{
    if (value == expected) return CLATTN_SUCCESS;
    return fail(context, CLATTN_INVALID_SHAPE, "%s is %lld; %s is %lld and they must be equal", what,
                (long long)value, other, (long long)expected);
}

static clattn_status check_inputs(clattn_context *context, const struct tensors *t)
{
    clattn_status status = CLATTN_SUCCESS;
    if (t->q) status = check_tensor(context, "q", t->q, false);
    if (!status) status = check_tensor(context, "k", t->k, false);
    if (!status && t->v) status = check_tensor(context, "v", t->v, false);
    if (status) return status;
    if (t->k->dim > DIM_MAX)
        return fail(context, CLATTN_INVALID_SHAPE, "k.dim is %lld; at most %d", (long long)t->k->dim, DIM_MAX);
    if (t->q) {
        if ((status = check_same(context, "q.dim", t->q->dim, "k.dim", t->k->dim))) return status;
        if ((status = check_same(context, "q.batch", t->q->batch, "k.batch", t->k->batch))) return status;
        if (t->q->heads % t->k->heads)
            return fail(context, CLATTN_INVALID_SHAPE, "q.heads is %lld; a multiple of k.heads %lld is needed",
                        (long long)t->q->heads, (long long)t->k->heads);
        if (t->q->dtype != t->k->dtype)
            return fail(context, CLATTN_INVALID_DTYPE, "q.dtype is %s; k.dtype is %s and they must be equal",
                        dtype_name(t->q->dtype), dtype_name(t->k->dtype));
    }
    if (!t->v) return CLATTN_SUCCESS;
    if (t->v->dim > DIM_MAX)
        return fail(context, CLATTN_INVALID_SHAPE, "v.dim is %lld; at most %d", (long long)t->v->dim, DIM_MAX);
    if ((status = check_same(context, "v.batch", t->v->batch, "k.batch", t->k->batch))) return status;
    if ((status = check_same(context, "v.len", t->v->len, "k.len", t->k->len))) return status;
    if ((status = check_same(context, "v.heads", t->v->heads, "k.heads", t->k->heads))) return status;
    if (t->v->dtype != t->k->dtype)
        return fail(context, CLATTN_INVALID_DTYPE, "v.dtype is %s; k.dtype is %s and they must be equal",
                    dtype_name(t->v->dtype), dtype_name(t->k->dtype));
    return CLATTN_SUCCESS;
}

static clattn_status check_output(clattn_context *context, const char *name, const clattn_tensor *tensor,
                                  const clattn_tensor *q, int64_t dim)
{
    char field[32];
    const char *const fields[] = {"batch", "len", "heads", "dim"};
    clattn_status status = check_tensor(context, name, tensor, true);
    if (status) return status;
    int64_t have[] = {tensor->batch, tensor->len, tensor->heads, tensor->dim},
            want[] = {q->batch, q->len, q->heads, dim};
    for (int i = 0; i < 4 && !status; i++) {
        size_t end = strlen(name);
        memcpy(field, name, end);
        field[end] = '.';
        strcpy(field + end + 1, fields[i]);
        if (have[i] != want[i])
            status = fail(context, CLATTN_INVALID_SHAPE, "%s is %lld; %lld is needed", field,
                          (long long)have[i], (long long)want[i]);
    }
    return status;
}

static clattn_status check_outputs(clattn_context *context, const struct tensors *t)
{
    clattn_status status = CLATTN_SUCCESS;
    if (t->out) status = check_output(context, "out", t->out, t->q, t->v->dim);
    if (!status && t->out && t->out->dtype != t->q->dtype && t->out->dtype != CLATTN_FLOAT32)
        status = fail(context, CLATTN_INVALID_DTYPE, "out.dtype is %s; %s or float32 is needed",
                      dtype_name(t->out->dtype), dtype_name(t->q->dtype));
    if (!status && t->lse) status = check_output(context, "lse", t->lse, t->q, 1);
    if (!status && t->lse && t->lse->dtype != CLATTN_FLOAT32)
        status = fail(context, CLATTN_INVALID_DTYPE, "lse.dtype is %s; float32 is needed",
                      dtype_name(t->lse->dtype));
    return status;
}

static clattn_status check_cu_seqlens(clattn_context *context, const char *name, const int32_t *cu,
                                      int64_t count, int64_t len)
{
    if (!cu)
        return fail(context, CLATTN_INVALID_SEQLENS, "%s is NULL but sequences is %lld", name,
                    (long long)count);
    if (cu[0] != 0) return fail(context, CLATTN_INVALID_SEQLENS, "%s[0] is %d; it must be 0", name, cu[0]);
    for (int64_t s = 0; s < count; s++)
        if (cu[s + 1] < cu[s])
            return fail(context, CLATTN_INVALID_SEQLENS, "%s[%lld] is %d, less than the %d before it", name,
                        (long long)s + 1, cu[s + 1], cu[s]);
    if (cu[count] != len)
        return fail(context, CLATTN_INVALID_SEQLENS, "%s[%lld] is %d; it must be the length %lld", name,
                    (long long)count, cu[count], (long long)len);
    return CLATTN_SUCCESS;
}

static clattn_status check_sequences(clattn_context *context, const clattn_attention_desc *desc,
                                     const struct tensors *t)
{
    if (desc->sequences < 0)
        return fail(context, CLATTN_INVALID_SEQLENS, "sequences is %lld; 0 or more is needed",
                    (long long)desc->sequences);
    if (desc->sequences == 0) return CLATTN_SUCCESS;
    if (t->k->batch != 1)
        return fail(context, CLATTN_INVALID_SEQLENS, "k.batch is %lld; packed sequences need 1",
                    (long long)t->k->batch);
    clattn_status status =
        check_cu_seqlens(context, "cu_seqlens_k", desc->cu_seqlens_k, desc->sequences, t->k->len);
    if (!status && t->q)
        status = check_cu_seqlens(context, "cu_seqlens_q", desc->cu_seqlens_q, desc->sequences, t->q->len);
    return status;
}

static void sequences_fill(const clattn_attention_desc *desc, const struct tensors *t, struct problem *problem)
{
    for (int64_t s = 0; s < problem->count; s++) {
        struct sequence *sequence = &problem->sequences[s];
        if (desc->sequences) {
            *sequence = (struct sequence){.k_row = desc->cu_seqlens_k[s],
                                          .kv_len = desc->cu_seqlens_k[s + 1] - desc->cu_seqlens_k[s]};
            if (t->q) {
                sequence->q_row = desc->cu_seqlens_q[s];
                sequence->q_len = desc->cu_seqlens_q[s + 1] - desc->cu_seqlens_q[s];
            }
        } else {
            *sequence = (struct sequence){.batch = s, .q_len = t->q ? t->q->len : 0, .kv_len = t->k->len};
        }
        sequence->list_row = problem->list_rows;
        problem->list_rows += ceil_div(sequence->q_len, problem->q_block);
        problem->q_len_max = MAX(problem->q_len_max, sequence->q_len);
        problem->kv_len_max = MAX(problem->kv_len_max, sequence->kv_len);
    }
}

clattn_status problem_init(clattn_context *context, const clattn_attention_desc *attention,
                           const struct tensors *tensors, int32_t q_block, struct problem *problem)
{
    clattn_attention_desc desc = CLATTN_ATTENTION_DESC_INIT;
    *problem = (struct problem){0};
    clattn_status status =
        attention ? desc_copy(context, "attention", &desc, sizeof desc, attention) : CLATTN_SUCCESS;
    if (!status) status = check_inputs(context, tensors);
    if (!status) status = check_outputs(context, tensors);
    if (!status) status = check_sequences(context, &desc, tensors);
    if (status) return status;
    bool is_default = desc.scale == CLATTN_SCALE_DEFAULT;
    if (!is_default && !isfinite(desc.scale))
        return fail(context, CLATTN_INVALID_ARGUMENT, "attention.scale is %g; a finite number is needed",
                    desc.scale);

    problem->count = desc.sequences ? desc.sequences : tensors->k->batch;
    problem->sequences = malloc((size_t)problem->count * sizeof *problem->sequences);
    if (!problem->sequences)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %lld sequences", (long long)problem->count);
    problem->q_block = q_block;
    problem->kv_heads = (int32_t)tensors->k->heads;
    problem->q_heads = tensors->q ? (int32_t)tensors->q->heads : problem->kv_heads;
    problem->group = problem->q_heads / problem->kv_heads;
    problem->dim = (int32_t)tensors->k->dim;
    problem->dim_v = tensors->v ? (int32_t)tensors->v->dim : 0;
    problem->scale = is_default ? (float)(1.0 / sqrt((double)problem->dim)) : desc.scale;
    problem->causal = desc.causal != 0;
    sequences_fill(&desc, tensors, problem);
    return CLATTN_SUCCESS;
}

void problem_release(struct problem *problem)
{
    free(problem->sequences);
    problem->sequences = NULL;
}
