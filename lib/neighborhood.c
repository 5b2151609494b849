/* SPDX-License-Identifier: MIT */
/* Neighborhood attention: plans, permutation, forward and backward pass.
 *
 * The reference computes on the layout as it is. Every other backend permutes tokens into tiles, attends over
 * block lists and permutes back. */

#include "neighborhood.h"
#include "stage.h"

#include <stdlib.h>

/* ---- plan ---- */

static clattn_status index_store(clattn_context *context, struct storage *storage, const int64_t *index,
                                 int64_t count)
{
    size_t bytes = (size_t)count * sizeof *index;
    clattn_status status = context->backend->storage_create(context, MAX(bytes, sizeof *index), storage);
    return status || !bytes ? status : context->backend->storage_write(context, storage, index, bytes);
}

/* Keys and extra keys one behind the other. */
static clattn_status concat_make(clattn_context *context, clattn_neighborhood *plan)
{
    int64_t count = plan->tokens + plan->extra_len, *index = malloc((size_t)count * sizeof *index);
    if (!index) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %lld rows", (long long)count);
    for (int64_t n = 0; n < count; n++)
        index[n] = n;
    clattn_status status = index_store(context, &plan->concat_index, index, count);
    free(index);
    return status;
}

/* Tables that move rows: into tile order, back, and the places of extra keys in every class. */
static clattn_status indices_make(clattn_context *context, clattn_neighborhood *plan)
{
    int64_t extras = plan->extra_len * plan->classes, row = 0;
    int64_t *kv_index = malloc((size_t)plan->kv_rows * sizeof *kv_index);
    int64_t *inverse = malloc((size_t)plan->tokens * sizeof *inverse);
    int64_t *extra = malloc((size_t)(extras + 1) * sizeof *extra);
    clattn_status status = CLATTN_OUT_OF_MEMORY;
    if (!kv_index || !inverse || !extra) {
        fail(context, status, "no memory for %lld rows", (long long)plan->kv_rows);
        goto done;
    }
    for (int64_t n = 0; n < plan->q.rows; n++)
        if (plan->q.token[n] >= 0) inverse[plan->q.token[n]] = n;
    status = index_store(context, &plan->q_index, plan->q.token, plan->q.rows);
    if (!status) status = index_store(context, &plan->q_inverse, inverse, plan->tokens);
    for (int64_t c = 0; c < plan->classes; c++) {
        for (int64_t n = plan->kv.class_row[c]; n < plan->kv.class_row[c + 1]; n++, row++) {
            kv_index[row] = plan->kv.token[n];
            if (plan->kv.token[n] >= 0) inverse[plan->kv.token[n]] = row;
        }
        for (int64_t n = 0; n < plan->extra_len; n++, row++) {
            kv_index[row] = plan->tokens + n;
            extra[n * plan->classes + c] = row;
        }
    }
    if (!status) status = index_store(context, &plan->kv_index, kv_index, plan->kv_rows);
    if (!status) status = index_store(context, &plan->kv_inverse, inverse, plan->tokens);
    if (!status) status = index_store(context, &plan->extra_inverse, extra, extras);
    if (!status && context->backend->knows_neighborhoods) status = concat_make(context, plan);
done:
    free(kv_index);
    free(inverse);
    free(extra);
    return status;
}

/* Tiles as given, or the best ones. */
static clattn_status tiles_choose(clattn_context *context, clattn_neighborhood_desc *desc)
{
    clattn_neighborhood_analysis analysis = {.size = sizeof analysis};
    clattn_status status = clattn_neighborhood_analyse(desc, &analysis);
    if (status) return fail(context, status, "the layout cannot be analysed");
    for (int a = 0; a < AXES; a++) {
        desc->q_tile[a] = analysis.q_tile[a];
        desc->kv_tile[a] = analysis.kv_tile[a];
    }
    return CLATTN_SUCCESS;
}

clattn_status clattn_neighborhood_create(clattn_context *context, const clattn_neighborhood_desc *desc,
                                         int64_t extra_len, clattn_neighborhood **neighborhood)
{
    clattn_neighborhood_desc full;
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!neighborhood) return fail(context, CLATTN_INVALID_ARGUMENT, "neighborhood is NULL");
    if (extra_len < 0 || extra_len > INT32_MAX)
        return fail(context, CLATTN_INVALID_ARGUMENT, "extra_len is %lld; 0 to 2^31 - 1 is needed",
                    (long long)extra_len);
    clattn_status status = neighborhood_check(context, desc, &full);
    if (!status) status = tiles_choose(context, &full);
    if (status) return status;
    clattn_neighborhood *plan = calloc(1, sizeof *plan);
    if (!plan) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a plan");
    plan->desc = full;
    plan->extra_len = extra_len;
    plan->tokens = plan->classes = 1;
    for (int a = 0; a < AXES; a++) {
        plan->axis[a] = window_axis_of(&full, a);
        plan->tokens *= full.length[a];
        plan->classes *= full.dilation[a];
    }
    status = tile_order_make(context, plan, full.q_tile, &plan->q);
    if (!status) status = tile_order_make(context, plan, full.kv_tile, &plan->kv);
    plan->kv_rows = plan->kv.rows + plan->classes * extra_len;
    if (!status) status = indices_make(context, plan);
    if (!status && !context->backend->knows_neighborhoods) status = neighborhood_blocks(context, plan);
    if (status)
        clattn_neighborhood_release(context, plan);
    else
        *neighborhood = plan;
    return status;
}

void clattn_neighborhood_release(clattn_context *context, clattn_neighborhood *plan)
{
    if (!context || !plan) return;
    struct storage *const tables[] = {&plan->q_index,    &plan->q_inverse,     &plan->kv_index,
                                      &plan->kv_inverse, &plan->extra_inverse, &plan->concat_index};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        context->backend->storage_release(context, tables[i]);
    clattn_blocks_release(context, plan->blocks);
    tile_order_free(&plan->q);
    tile_order_free(&plan->kv);
    free(plan);
}

int64_t clattn_neighborhood_rows(const clattn_neighborhood *plan, clattn_tiles tiles)
{
    return !plan ? 0 : tiles == CLATTN_TILES_Q ? plan->q.rows : plan->kv_rows;
}

/* ---- permutation ---- */

clattn_status gather_rows(clattn_context *context, const clattn_tensor *from, const clattn_tensor *more,
                          const clattn_tensor *to, const struct storage *index, int64_t terms,
                          const clattn_sync *sync)
{
    struct gather_job job = {from, more, to, index, (int32_t)terms, sync};
    return context->backend->gather(context, &job);
}

static clattn_status check_rows(clattn_context *context, const char *name, const clattn_tensor *tensor,
                                int64_t rows, bool is_output)
{
    clattn_status status = check_tensor(context, name, tensor, is_output);
    if (status || tensor->len == rows) return status;
    return fail(context, CLATTN_INVALID_SHAPE, "%s.len is %lld; %lld is needed", name, (long long)tensor->len,
                (long long)rows);
}

static clattn_status move_rows(clattn_context *context, const clattn_tensor *from, int64_t from_rows,
                               clattn_tensor *to, int64_t to_rows, const struct storage *index,
                               const clattn_sync *sync)
{
    clattn_sync sync_copy;
    struct staged source = {0}, target = {0};
    clattn_status status = check_rows(context, "from", from, from_rows, false);
    if (!status) status = check_rows(context, "to", to, to_rows, true);
    if (!status) status = check_sync(context, sync, &sync_copy);
    if (status) return status;
    if (from->batch != to->batch || from->heads != to->heads || from->dim != to->dim ||
        from->dtype != to->dtype)
        return fail(context, CLATTN_INVALID_SHAPE, "from and to differ in batch, heads, dim or dtype");
    status = stage_in(context, from, &source);
    if (!status) status = stage_out(context, to, &target);
    if (!status)
        status = gather_rows(context, &source.device, NULL, &target.device, index, 1, sync ? &sync_copy : NULL);
    if (!status && sync && target.host) status = context->backend->finish(context, &sync_copy);
    if (!status) status = stage_finish(context, &target);
    stage_release(context, &source);
    stage_release(context, &target);
    return status;
}

clattn_status clattn_neighborhood_permute(clattn_context *context, const clattn_neighborhood *plan,
                                          clattn_tiles tiles, const clattn_tensor *from, clattn_tensor *to,
                                          const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!plan) return fail(context, CLATTN_INVALID_ARGUMENT, "neighborhood is NULL");
    bool is_q = tiles == CLATTN_TILES_Q;
    return move_rows(context, from, plan->tokens, to, clattn_neighborhood_rows(plan, tiles),
                     is_q ? &plan->q_index : &plan->kv_index, sync);
}

clattn_status clattn_neighborhood_unpermute(clattn_context *context, const clattn_neighborhood *plan,
                                            clattn_tiles tiles, const clattn_tensor *from, clattn_tensor *to,
                                            const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!plan) return fail(context, CLATTN_INVALID_ARGUMENT, "neighborhood is NULL");
    return move_rows(context, from, clattn_neighborhood_rows(plan, tiles), to, plan->tokens,
                     tiles == CLATTN_TILES_Q ? &plan->q_inverse : &plan->kv_inverse, sync);
}
