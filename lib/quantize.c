/* SPDX-License-Identifier: MIT */
/* Quantising keys and values to int8. */

#include "stage.h"

static clattn_status check_desc(clattn_context *context, const clattn_quantize_desc *desc,
                                clattn_quantize_desc *copy)
{
    *copy = (clattn_quantize_desc)CLATTN_QUANTIZE_DESC_INIT;
    clattn_status status = desc ? desc_copy(context, "desc", copy, sizeof *copy, desc) : CLATTN_SUCCESS;
    if (status) return status;
    if (copy->scale_block < 1 || copy->far_group < 1 || copy->near_first < 0 || copy->near_last < 0)
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "desc has scale_block %d, far_group %d, near_first %d, near_last %d; the first two are at "
                    "least 1, the others 0",
                    copy->scale_block, copy->far_group, copy->near_first, copy->near_last);
    return CLATTN_SUCCESS;
}

static clattn_status check_shape(clattn_context *context, const char *name, const clattn_tensor *tensor,
                                 const clattn_tensor *of, int64_t len, int64_t dim, clattn_dtype dtype)
{
    clattn_status status = check_tensor(context, name, tensor, true);
    if (status) return status;
    if (tensor->dtype != dtype)
        return fail(context, CLATTN_INVALID_DTYPE, "%s.dtype is %s; %s is needed", name,
                    dtype_name(tensor->dtype), dtype_name(dtype));
    if (tensor->batch == of->batch && tensor->len == len && tensor->heads == of->heads && tensor->dim == dim)
        return CLATTN_SUCCESS;
    return fail(
        context, CLATTN_INVALID_SHAPE, "%s is [%lld][%lld][%lld][%lld]; [%lld][%lld][%lld][%lld] is needed",
        name, (long long)tensor->batch, (long long)tensor->len, (long long)tensor->heads,
        (long long)tensor->dim, (long long)of->batch, (long long)len, (long long)of->heads, (long long)dim);
}

clattn_status clattn_quantize(clattn_context *context, const clattn_quantize_desc *desc, const clattn_tensor *x,
                              clattn_tensor *codes, clattn_tensor *scales, const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    clattn_quantize_desc copy;
    clattn_sync sync_copy;
    struct staged from = {{0}, NULL}, to = {{0}, NULL}, to_scales = {{0}, NULL};
    clattn_status status = check_desc(context, desc, &copy);
    if (!status) status = check_tensor(context, "x", x, false);
    if (!status && x->dtype == CLATTN_INT8)
        status = fail(context, CLATTN_INVALID_DTYPE, "x.dtype is int8; a floating type is needed");
    if (!status) status = check_shape(context, "codes", codes, x, x->len, x->dim, CLATTN_INT8);
    if (!status)
        status =
            check_shape(context, "scales", scales, x, ceil_div(x->len, copy.scale_block), 1, CLATTN_FLOAT32);
    if (!status) status = check_sync(context, sync, &sync_copy);
    if (!status) status = stage_in(context, x, &from);
    if (!status) status = stage_out(context, codes, &to);
    if (!status) status = stage_out(context, scales, &to_scales);
    struct quantize_job job = {.x = &from.device,
                               .codes = &to.device,
                               .scales = &to_scales.device,
                               .scale_block = copy.scale_block,
                               .far_group = copy.far_group,
                               .sync = sync ? &sync_copy : NULL};
    if (!status) {
        job.leaves = scales->len;
        job.far_begin = MIN(copy.near_first, job.leaves);
        job.far_end = MAX(job.far_begin, job.leaves - copy.near_last);
        status = context->backend->quantize(context, &job);
    }
    if (!status && sync && (to.host || to_scales.host)) status = context->backend->finish(context, &sync_copy);
    if (!status) status = stage_finish(context, &to);
    if (!status) status = stage_finish(context, &to_scales);
    stage_release(context, &from);
    stage_release(context, &to);
    stage_release(context, &to_scales);
    return status;
}
