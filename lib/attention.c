/* SPDX-License-Identifier: MIT */
/* Attention over a block list, forward, and the call that does everything. */

#include "select.h"
#include "stage.h"

/* The last step of a call. When an output has to be copied back to host memory, it waits for the work first. */
static clattn_status forward_run(clattn_context *context, const clattn_attention_desc *attention,
                                 const struct problem *problem, const clattn_blocks *blocks,
                                 struct stage *stage, bool has_lse, const clattn_sync *sync)
{
    struct forward_job job = {.problem = problem,
                              .q = &stage->q.device,
                              .k = &stage->k.device,
                              .v = &stage->v.device,
                              .blocks = blocks,
                              .out = &stage->out.device,
                              .lse = has_lse ? &stage->lse.device : NULL,
                              .sync = sync};
    clattn_status status = attends_in_parts(context, &job) ? forward_in_parts(context, attention, &job)
                                                           : context->backend->forward(context, &job);
    if (!status && sync && (stage->out.host || stage->lse.host))
        status = context->backend->finish(context, sync);
    if (!status) status = stage_finish(context, &stage->out);
    return status ? status : stage_finish(context, &stage->lse);
}

clattn_status clattn_attention_forward(clattn_context *context, const clattn_attention_desc *attention,
                                       const clattn_tensor *q, const clattn_tensor *k, const clattn_tensor *v,
                                       const clattn_blocks *blocks, clattn_tensor *out, clattn_tensor *lse,
                                       const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    struct tensors tensors = {q, k, v, out, lse};
    struct problem problem;
    clattn_sync sync_copy;
    clattn_status status = check_present(context, &tensors);
    if (!status) status = check_sync(context, sync, &sync_copy);
    if (!status) status = problem_init(context, attention, &tensors, blocks ? blocks->q_block : 1, &problem);
    if (status) return status;
    struct stage stage = {0};
    status = blocks_check(context, blocks, &problem);
    if (!status) status = stage_all(context, &tensors, &problem, &stage);
    if (!status)
        status =
            forward_run(context, attention, &problem, blocks, &stage, lse != NULL, sync ? &sync_copy : NULL);
    stage_all_release(context, &stage);
    problem_release(&problem);
    return status;
}

clattn_status clattn_attention(clattn_context *context, const clattn_attention_desc *attention,
                               const clattn_select_desc *select, const clattn_tensor *q, const clattn_tensor *k,
                               const clattn_tensor *v, clattn_tensor *out, clattn_tensor *lse,
                               const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    struct tensors tensors = {q, k, v, out, lse};
    struct problem problem;
    clattn_select_desc checked;
    clattn_sync sync_copy;
    clattn_status status = check_present(context, &tensors);
    if (!status) status = check_sync(context, sync, &sync_copy);
    if (!status) status = check_select(context, select, &checked);
    if (!status) status = problem_init(context, attention, &tensors, 1, &problem);
    if (status) return status;

    struct stage stage = {0};
    clattn_blocks *none = NULL, *blocks = NULL;
    struct problem selection = problem; /* which knows no options */
    selection.options = (struct options){0};
    if (checked.selector != CLATTN_SELECT_DENSE && k->dtype == CLATTN_INT8) {
        status = fail(context, CLATTN_INVALID_DTYPE, "k.dtype is int8; selection needs the unquantised keys");
        goto done;
    }
    if ((status = stage_all(context, &tensors, &problem, &stage))) goto done;
    if (checked.selector != CLATTN_SELECT_DENSE) {
        clattn_sync first = sync_copy;
        first.event = NULL;
        if ((status = blocks_place(context, &selection, &checked, &none, &blocks))) goto done;
        if ((status = blocks_check(context, blocks, &problem))) goto done;
        status = select_run(context, &selection, &checked, attention, &stage.q.device, &stage.k.device, NULL,
                            blocks, sync ? &first : NULL);
        if (status) goto done;
    }
    status = forward_run(context, attention, &problem, blocks, &stage, lse != NULL, sync ? &sync_copy : NULL);
done:
    clattn_blocks_release(context, blocks);
    stage_all_release(context, &stage);
    problem_release(&problem);
    return status;
}
