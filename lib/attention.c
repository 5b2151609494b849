/* SPDX-License-Identifier: MIT */
/* The public operations: select, attend, and the call that does everything. */

#include "internal.h"

#include <stdlib.h>

static bool needs_pyramid(clattn_selector selector)
{
    return selector != CLATTN_SELECT_FLAT_LSE;
}

/* Selection with everything checked and staged; makes the pyramid when none is given. */
static clattn_status select_run(clattn_context *context, const struct problem *problem,
                                const clattn_select_desc *select, const clattn_attention_desc *attention,
                                const clattn_tensor *q, const clattn_tensor *k, const clattn_pyramid *pyramid,
                                clattn_blocks *blocks, const clattn_sync *sync)
{
    clattn_pyramid *own = NULL;
    clattn_status status = CLATTN_SUCCESS;
    if (!pyramid && needs_pyramid(select->selector)) {
        /* The caller's wait list comes before the first command and its event after the last one. */
        clattn_sync first = sync ? *sync : (clattn_sync)CLATTN_SYNC_INIT;
        first.event = NULL;
        status = clattn_pyramid_build(context, attention, select->leaf, k, &own, sync ? &first : NULL);
        pyramid = own;
    }
    struct select_job job = {problem, select, q, k, pyramid, blocks, sync};
    if (!status) status = context->backend->select(context, &job);
    clattn_pyramid_release(context, own);
    return status;
}

/* *blocks as it is when it has the selection's shape, or a new list in *made. */
static clattn_status blocks_place(clattn_context *context, const struct problem *problem,
                                  const clattn_select_desc *select, clattn_blocks **blocks,
                                  clattn_blocks **made)
{
    clattn_blocks_desc desc = {sizeof desc,        select->leaf,      1,
                               problem->list_rows, problem->kv_heads, select->topk};
    const clattn_blocks *have = *blocks;
    if (!have) return blocks_new(context, &desc, made);
    if (have->block != desc.block || have->q_block != 1 || have->rows != desc.rows ||
        have->heads != desc.heads || have->topk != desc.topk)
        return fail(context, CLATTN_INVALID_BLOCKS,
                    "blocks is [%lld][%d][%d] of %d keys; the selection needs [%lld][%d][%d] of %d keys",
                    (long long)have->rows, have->heads, have->topk, have->block, (long long)desc.rows,
                    desc.heads, desc.topk, desc.block);
    free((*blocks)->row_max); /* the indices will be the selector's own */
    (*blocks)->row_max = NULL;
    return CLATTN_SUCCESS;
}

clattn_status clattn_select(clattn_context *context, const clattn_attention_desc *attention,
                            const clattn_select_desc *select, const clattn_tensor *q, const clattn_tensor *k,
                            const clattn_pyramid *pyramid, clattn_blocks **blocks, const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!blocks)
        return fail(context, CLATTN_INVALID_ARGUMENT, "blocks is NULL; a place for the result is needed");
    if (!q) return fail(context, CLATTN_INVALID_ARGUMENT, "q is NULL");
    struct problem problem;
    clattn_select_desc checked;
    clattn_sync sync_copy;
    clattn_status status = check_sync(context, sync, &sync_copy);
    if (!status) status = check_select(context, select, &checked);
    if (!status && checked.selector == CLATTN_SELECT_DENSE)
        status = fail(context, CLATTN_INVALID_ARGUMENT,
                      "select.selector is DENSE, which has no list; pass blocks NULL");
    if (!status) status = problem_init(context, attention, &(struct tensors){.q = q, .k = k}, 1, &problem);
    if (status) return status;

    struct staged queries = {0}, keys = {0};
    clattn_blocks *made = NULL;
    if (pyramid && !pyramid_fits(pyramid, &problem, checked.leaf)) {
        status = fail(context, CLATTN_INVALID_SHAPE, "pyramid was built for another shape or leaf than k has");
        goto done;
    }
    if ((status = stage_in(context, q, &queries))) goto done;
    if ((status = stage_in(context, k, &keys))) goto done;
    if ((status = blocks_place(context, &problem, &checked, blocks, &made))) goto done;
    status = select_run(context, &problem, &checked, attention, &queries.device, &keys.device, pyramid,
                        made ? made : *blocks, sync ? &sync_copy : NULL);
    if (!status && made) {
        *blocks = made;
        made = NULL;
    }
done:
    clattn_blocks_release(context, made);
    stage_release(context, &queries);
    stage_release(context, &keys);
    problem_release(&problem);
    return status;
}

/* All tensors of attention where the backend computes. */
struct stage {
    struct staged q, k, v, out, lse;
};

static clattn_status stage_all(clattn_context *context, const struct tensors *t, struct stage *stage)
{
    clattn_status status = stage_in(context, t->q, &stage->q);
    if (!status) status = stage_in(context, t->k, &stage->k);
    if (!status) status = stage_in(context, t->v, &stage->v);
    if (!status) status = stage_out(context, t->out, &stage->out);
    if (!status) status = stage_out(context, t->lse, &stage->lse);
    return status;
}

static void stage_all_release(clattn_context *context, struct stage *stage)
{
    stage_release(context, &stage->q);
    stage_release(context, &stage->k);
    stage_release(context, &stage->v);
    stage_release(context, &stage->out);
    stage_release(context, &stage->lse);
}

static clattn_status check_present(clattn_context *context, const struct tensors *t)
{
    const char *missing = !t->q ? "q" : !t->k ? "k" : !t->v ? "v" : !t->out ? "out" : NULL;
    return missing ? fail(context, CLATTN_INVALID_ARGUMENT, "%s is NULL", missing) : CLATTN_SUCCESS;
}

/* The last step of a call. When an output has to be copied back to host memory, it waits for the work first. */
static clattn_status forward_run(clattn_context *context, const struct problem *problem,
                                 const clattn_blocks *blocks, struct stage *stage, bool has_lse,
                                 const clattn_sync *sync)
{
    struct forward_job job = {problem,
                              &stage->q.device,
                              &stage->k.device,
                              &stage->v.device,
                              blocks,
                              &stage->out.device,
                              has_lse ? &stage->lse.device : NULL,
                              sync};
    clattn_status status = context->backend->forward(context, &job);
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
    if (blocks) status = blocks_check(context, blocks, &problem);
    if (!status) status = stage_all(context, &tensors, &stage);
    if (!status) status = forward_run(context, &problem, blocks, &stage, lse != NULL, sync ? &sync_copy : NULL);
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
    if ((status = stage_all(context, &tensors, &stage))) goto done;
    if (checked.selector != CLATTN_SELECT_DENSE) {
        clattn_sync first = sync_copy;
        first.event = NULL;
        if ((status = blocks_place(context, &problem, &checked, &none, &blocks))) goto done;
        status = select_run(context, &problem, &checked, attention, &stage.q.device, &stage.k.device, NULL,
                            blocks, sync ? &first : NULL);
        if (status) goto done;
    }
    status = forward_run(context, &problem, blocks, &stage, lse != NULL, sync ? &sync_copy : NULL);
done:
    clattn_blocks_release(context, blocks);
    stage_all_release(context, &stage);
    problem_release(&problem);
    return status;
}
