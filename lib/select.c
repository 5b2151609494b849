/* SPDX-License-Identifier: MIT */
/* Selection: from queries and keys to a block list. */

#include "select.h"
#include "stage.h"

static bool needs_pyramid(clattn_selector selector)
{
    return selector != CLATTN_SELECT_FLAT_LSE;
}

/* Lists of query rows that are not used (seqused_q) are empty. In the order of the queue: work that is enqueued
 * already may still read the list. */
static clattn_status empty_unused(clattn_context *context, const struct problem *problem, clattn_blocks *blocks,
                                  const clattn_sync *sync)
{
    int64_t used = 0;
    for (int64_t s = 0; s < problem->count; s++)
        used += problem->sequences[s].q_len;
    if (used == problem->list_rows) return CLATTN_SUCCESS;
    size_t lists = (size_t)(blocks->rows * blocks->heads), entries = lists * (size_t)blocks->topk;
    clattn_status status = context->backend->storage_fill(context, &blocks->indices, -1, entries, sync);
    return status ? status : context->backend->storage_fill(context, &blocks->counts, 0, lists, sync);
}

clattn_status select_run(clattn_context *context, const struct problem *problem,
                         const clattn_select_desc *select, const clattn_attention_desc *attention,
                         const clattn_tensor *q, const clattn_tensor *k, const clattn_pyramid *pyramid,
                         clattn_blocks *blocks, const clattn_sync *sync)
{
    clattn_pyramid *own = NULL;
    clattn_status status = CLATTN_SUCCESS;
    clattn_sync steps; /* the caller's wait list comes before the first command, its event after the last one */
    const clattn_sync *before = sync_without_event(sync, &steps);
    if (!pyramid && needs_pyramid(select->selector)) {
        status = clattn_pyramid_build_for(context, attention, select, k, &own, before);
        pyramid = own;
    }
    struct select_job job = {problem, select, q, k, pyramid, blocks, sync, NULL, 0};
    if (!status) status = empty_unused(context, problem, blocks, before);
    if (!status) status = context->backend->select(context, &job);
    clattn_pyramid_release(context, own);
    return status;
}

clattn_status blocks_place(clattn_context *context, const struct problem *problem,
                           const clattn_select_desc *select, clattn_blocks **blocks, clattn_blocks **made)
{
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    desc.block = select->leaf;
    desc.rows = problem->list_rows;
    desc.heads = problem->kv_heads;
    desc.topk = select->topk;
    const clattn_blocks *have = *blocks;
    if (!have) return blocks_new(context, &desc, made);
    if (have->block != desc.block || have->q_block != 1 || have->rows != desc.rows ||
        have->heads != desc.heads || have->topk != desc.topk)
        return fail(context, CLATTN_INVALID_BLOCKS,
                    "blocks is [%lld][%d][%d] of %d keys; the selection needs [%lld][%d][%d] of %d keys",
                    (long long)have->rows, have->heads, have->topk, have->block, (long long)desc.rows,
                    desc.heads, desc.topk, desc.block);
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

    if (checked.selector == CLATTN_SELECT_ROBUST && pyramid && !pyramid_has_bounds(pyramid)) {
        problem_release(&problem);
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "pyramid has no bounds; robust selection needs one from clattn_pyramid_build_for");
    }
    struct staged queries = {0}, keys = {0};
    clattn_blocks *made = NULL;
    problem.options = (struct options){0}; /* selection knows none */
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
    if (!status) blocks_selected(context, *blocks);
done:
    clattn_blocks_release(context, made);
    stage_release(context, &queries);
    stage_release(context, &keys);
    problem_release(&problem);
    return status;
}
