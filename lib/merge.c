/* SPDX-License-Identifier: MIT */
/* Merging results of attention over disjoint keys. */

#include "stage.h"

/* Every tensor has out0's shape, the lse tensors with dim 1. */
static clattn_status check_shape(clattn_context *context, const char *name, const clattn_tensor *tensor,
                                 const clattn_tensor *of, int64_t dim, bool is_output)
{
    clattn_status status = check_tensor(context, name, tensor, is_output);
    if (status) return status;
    if (tensor->batch == of->batch && tensor->len == of->len && tensor->heads == of->heads &&
        tensor->dim == dim)
        return CLATTN_SUCCESS;
    return fail(
        context, CLATTN_INVALID_SHAPE, "%s is [%lld][%lld][%lld][%lld]; [%lld][%lld][%lld][%lld] is needed",
        name, (long long)tensor->batch, (long long)tensor->len, (long long)tensor->heads,
        (long long)tensor->dim, (long long)of->batch, (long long)of->len, (long long)of->heads, (long long)dim);
}

static clattn_status check_float32(clattn_context *context, const char *name, const clattn_tensor *tensor)
{
    if (tensor->dtype == CLATTN_FLOAT32) return CLATTN_SUCCESS;
    return fail(context, CLATTN_INVALID_DTYPE, "%s.dtype is %s; float32 is needed", name,
                dtype_name(tensor->dtype));
}

static clattn_status check_merge(clattn_context *context, const struct merge_job *job)
{
    const clattn_tensor *of = job->out0;
    clattn_status status = check_tensor(context, "out0", of, false);
    if (!status) status = check_shape(context, "out1", job->out1, of, of->dim, false);
    if (!status) status = check_shape(context, "out", job->out, of, of->dim, true);
    if (!status) status = check_shape(context, "lse0", job->lse0, of, 1, false);
    if (!status) status = check_shape(context, "lse1", job->lse1, of, 1, false);
    if (!status && job->lse) status = check_shape(context, "lse", job->lse, of, 1, true);
    if (!status) status = check_float32(context, "lse0", job->lse0);
    if (!status) status = check_float32(context, "lse1", job->lse1);
    if (!status && job->lse) status = check_float32(context, "lse", job->lse);
    if (status) return status;
    if (of->dtype == CLATTN_INT8 || of->dtype != job->out1->dtype)
        return fail(context, CLATTN_INVALID_DTYPE, "out0.dtype is %s, out1.dtype %s; equal floats are needed",
                    dtype_name(of->dtype), dtype_name(job->out1->dtype));
    if (job->out->dtype != of->dtype && job->out->dtype != CLATTN_FLOAT32)
        return fail(context, CLATTN_INVALID_DTYPE, "out.dtype is %s; %s or float32 is needed",
                    dtype_name(job->out->dtype), dtype_name(of->dtype));
    return CLATTN_SUCCESS;
}

clattn_status clattn_attention_merge(clattn_context *context, const clattn_tensor *out0,
                                     const clattn_tensor *lse0, const clattn_tensor *out1,
                                     const clattn_tensor *lse1, clattn_tensor *out, clattn_tensor *lse,
                                     const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    clattn_sync sync_copy;
    struct merge_job job = {out0, lse0, out1, lse1, out, lse, NULL};
    struct staged in[4] = {{{0}, NULL}}, to[2] = {{{0}, NULL}};
    const clattn_tensor *const from[4] = {out0, lse0, out1, lse1};
    clattn_status status = check_merge(context, &job);
    if (!status) status = check_sync(context, sync, &sync_copy);
    for (int i = 0; i < 4 && !status; i++)
        status = stage_in(context, from[i], &in[i]);
    if (!status) status = stage_out(context, out, &to[0]);
    if (!status) status = stage_out(context, lse, &to[1]);
    job = (struct merge_job){&in[0].device,           &in[1].device, &in[2].device,
                             &in[3].device,           &to[0].device, lse ? &to[1].device : NULL,
                             sync ? &sync_copy : NULL};
    if (!status) status = context->backend->merge(context, &job);
    if (!status && sync && (to[0].host || to[1].host)) status = context->backend->finish(context, &sync_copy);
    for (int i = 0; i < 2 && !status; i++)
        status = stage_finish(context, &to[i]);
    for (int i = 0; i < 4; i++)
        stage_release(context, &in[i]);
    for (int i = 0; i < 2; i++)
        stage_release(context, &to[i]);
    return status;
}
