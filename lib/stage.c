/* SPDX-License-Identifier: MIT */
/* Staging: host tensors are copied to where the backend computes, results back. */

#include "stage.h"

clattn_status stage_out(clattn_context *context, const clattn_tensor *tensor, struct staged *staged)
{
    *staged = (struct staged){0};
    if (!tensor) return CLATTN_SUCCESS;
    if (context->backend->host_memory || tensor->memory != CLATTN_MEMORY_HOST) {
        staged->device = *tensor;
        /* Now, for no command of the call may be enqueued when one of its tensors is wrong. */
        bool is_host = tensor->memory == CLATTN_MEMORY_HOST || tensor->len == 0;
        return is_host ? CLATTN_SUCCESS : context->backend->tensor_check(context, tensor);
    }
    clattn_status status = clattn_tensor_create(context, tensor->dtype, tensor->batch, tensor->len,
                                                tensor->heads, tensor->dim, &staged->device);
    if (!status) staged->host = tensor;
    return status;
}

clattn_status stage_in(clattn_context *context, const clattn_tensor *tensor, struct staged *staged)
{
    clattn_status status = stage_out(context, tensor, staged);
    if (status || !staged->host || tensor->len == 0) return status;
    return context->backend->tensor_upload(context, tensor, &staged->device);
}

clattn_status stage_finish(clattn_context *context, struct staged *staged)
{
    if (!staged->host || staged->host->len == 0) return CLATTN_SUCCESS;
    return context->backend->tensor_download(context, &staged->device, staged->host);
}

void stage_release(clattn_context *context, struct staged *staged)
{
    if (staged->host) clattn_tensor_release(context, &staged->device);
    *staged = (struct staged){0};
}

/* Stages a tensor of the options and puts the staged one in its place. */
static clattn_status stage_option(clattn_context *context, const clattn_tensor **option, struct staged *staged)
{
    if (!*option) return CLATTN_SUCCESS;
    clattn_status status = stage_in(context, *option, staged);
    *option = &staged->device;
    return status;
}

static clattn_status stage_options(clattn_context *context, struct options *options, struct stage *stage)
{
    clattn_status status = stage_option(context, &options->sink, &stage->sink);
    if (!status) status = stage_option(context, &options->bias, &stage->bias);
    if (!status) status = stage_option(context, &options->k_scale, &stage->k_scale);
    if (!status) status = stage_option(context, &options->v_scale, &stage->v_scale);
    return status;
}

clattn_status stage_inputs(clattn_context *context, const struct tensors *t, struct problem *problem,
                           struct stage *stage)
{
    clattn_status status = stage_in(context, t->q, &stage->q);
    if (!status) status = stage_in(context, t->k, &stage->k);
    if (!status) status = stage_in(context, t->v, &stage->v);
    if (!status) status = stage_in(context, t->out, &stage->out);
    if (!status) status = stage_in(context, t->lse, &stage->lse);
    if (!status) status = stage_options(context, &problem->options, stage);
    return status;
}

clattn_status stage_all(clattn_context *context, const struct tensors *t, struct problem *problem,
                        struct stage *stage)
{
    clattn_status status = stage_in(context, t->q, &stage->q);
    if (!status) status = stage_in(context, t->k, &stage->k);
    if (!status) status = stage_in(context, t->v, &stage->v);
    bool all = all_rows_used(problem, t->q); /* others must come back as they were */
    if (!status) status = (all ? stage_out : stage_in)(context, t->out, &stage->out);
    if (!status) status = (all ? stage_out : stage_in)(context, t->lse, &stage->lse);
    if (!status) status = stage_options(context, &problem->options, stage);
    return status;
}

void stage_all_release(clattn_context *context, struct stage *stage)
{
    stage_release(context, &stage->q);
    stage_release(context, &stage->k);
    stage_release(context, &stage->v);
    stage_release(context, &stage->out);
    stage_release(context, &stage->lse);
    stage_release(context, &stage->sink);
    stage_release(context, &stage->bias);
    stage_release(context, &stage->k_scale);
    stage_release(context, &stage->v_scale);
}
