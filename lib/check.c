/* SPDX-License-Identifier: MIT */
/* Argument checks at the public boundary: descriptors and single tensors. */

#include "internal.h"

#include <string.h>

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
    memcpy(copy, &copy_bytes, sizeof copy_bytes); /* the copy's own size: it may be passed on */
    return CLATTN_SUCCESS;
}

clattn_status check_leaf(clattn_context *context, const char *name, int64_t leaf)
{
    if (leaf == 16 || leaf == 32 || leaf == 64 || leaf == 128) return CLATTN_SUCCESS;
    return fail(context, CLATTN_INVALID_ARGUMENT, "%s is %lld; 16, 32, 64 or 128 is needed", name,
                (long long)leaf);
}

static clattn_status check_robust(clattn_context *context, const clattn_select_desc *desc)
{
    if (desc->beam < 1 || desc->beam > CLATTN_TOPK_MAX || desc->prefilter < 0 ||
        desc->prefilter > CLATTN_TOPK_MAX)
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "select.beam is %d, prefilter %d; 1 to %d and 0 to %d are needed", desc->beam,
                    desc->prefilter, CLATTN_TOPK_MAX, CLATTN_TOPK_MAX);
    if ((unsigned)desc->score > CLATTN_SCORE_AHEAD)
        return fail(context, CLATTN_INVALID_ARGUMENT, "select.score is %d; 0 to %d are known", desc->score,
                    CLATTN_SCORE_AHEAD);
    if (desc->parts != 1 && desc->parts != LEAF_PARTS)
        return fail(context, CLATTN_INVALID_ARGUMENT, "select.parts is %d; 1 or %d is needed", desc->parts,
                    LEAF_PARTS);
    return CLATTN_SUCCESS;
}

clattn_status check_select(clattn_context *context, const clattn_select_desc *desc, clattn_select_desc *checked)
{
    *checked = (clattn_select_desc)CLATTN_SELECT_DESC_INIT;
    clattn_status status = desc ? desc_copy(context, "select", checked, sizeof *checked, desc) : CLATTN_SUCCESS;
    if (!status) status = check_leaf(context, "select.leaf", checked->leaf);
    if (status) return status;
    if ((unsigned)checked->selector > CLATTN_SELECT_ROBUST)
        return fail(context, CLATTN_INVALID_ARGUMENT, "select.selector is %d; 0 to %d are known",
                    checked->selector, CLATTN_SELECT_ROBUST);
    if (checked->topk < 1 || checked->topk > CLATTN_TOPK_MAX)
        return fail(context, CLATTN_INVALID_ARGUMENT, "select.topk is %d; 1 to %d is needed", checked->topk,
                    CLATTN_TOPK_MAX);
    if (checked->forced_first < 0 || checked->forced_last < 0)
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "select.forced_first is %d, forced_last %d; 0 or more is needed", checked->forced_first,
                    checked->forced_last);
    return check_robust(context, checked);
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
    if (tensor->len == 0) return false; /* no elements, and strides of contiguous memory may be 0 */
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
