/* SPDX-License-Identifier: MIT */
/* The key pyramid as an object: sizes of levels, creation, reading. The means themselves are the backends'
 * work. */

#include "stage.h"

#include <stdlib.h>

int64_t level_nodes(int64_t kv_len, int32_t leaf, int level)
{
    int64_t nodes = ceil_div(kv_len, leaf);
    for (int l = 1; l < level; l++) {
        if (nodes <= 1) return 0;
        nodes = ceil_div(nodes, 2);
    }
    return nodes;
}

int64_t level_first(int64_t kv_len, int32_t leaf, int level)
{
    int64_t first = 0;
    for (int l = 1; l < level; l++)
        first += level_nodes(kv_len, leaf, l);
    return first;
}

int level_count(int64_t kv_len, int32_t leaf)
{
    int levels = 0;
    while (level_nodes(kv_len, leaf, levels + 1) > 0)
        levels++;
    return levels;
}

int64_t pyramid_nodes(int64_t kv_len, int32_t leaf)
{
    return level_first(kv_len, leaf, level_count(kv_len, leaf) + 1);
}

bool pyramid_fits(const clattn_pyramid *pyramid, const struct problem *problem, int32_t leaf)
{
    if (pyramid->leaf != leaf || pyramid->dim != problem->dim || pyramid->kv_heads != problem->kv_heads ||
        pyramid->count != problem->count)
        return false;
    for (int64_t s = 0; s < problem->count; s++)
        if (pyramid->kv_len[s] != problem->sequences[s].kv_len) return false;
    return true;
}

bool pyramid_has_bounds(const clattn_pyramid *pyramid)
{
    return pyramid->bounds.bytes > 0;
}

static clattn_status bounds_new(clattn_context *context, clattn_pyramid *pyramid)
{
    size_t row = (size_t)pyramid->dim * sizeof(float);
    clattn_status status =
        context->backend->storage_create(context, MAX((size_t)pyramid->nodes, 1) * 2 * row, &pyramid->bounds);
    if (status) return status;
    return context->backend->storage_create(context, MAX((size_t)pyramid->leaves, 1) * LEAF_PARTS * 3 * row,
                                            &pyramid->parts);
}

clattn_status pyramid_new(clattn_context *context, const struct problem *problem, int32_t leaf,
                          bool has_bounds, clattn_pyramid **result)
{
    clattn_status status = CLATTN_OUT_OF_MEMORY;
    size_t count = (size_t)problem->count;
    clattn_pyramid *pyramid = calloc(1, sizeof *pyramid);
    if (!pyramid) return fail(context, status, "no memory for a pyramid");
    pyramid->leaf = leaf;
    pyramid->dim = problem->dim;
    pyramid->kv_heads = problem->kv_heads;
    pyramid->count = problem->count;
    pyramid->kv_len = malloc((count + 1) * sizeof *pyramid->kv_len);
    pyramid->first = malloc((count + 1) * sizeof *pyramid->first);
    pyramid->first_leaf = malloc((count + 1) * sizeof *pyramid->first_leaf);
    if (!pyramid->kv_len || !pyramid->first || !pyramid->first_leaf) {
        fail(context, status, "no memory for a pyramid of %lld sequences", (long long)problem->count);
        goto failed;
    }
    for (int64_t s = 0; s < problem->count; s++) {
        pyramid->kv_len[s] = problem->sequences[s].kv_len;
        pyramid->first[s] = pyramid->nodes;
        pyramid->first_leaf[s] = pyramid->leaves;
        pyramid->nodes += pyramid_nodes(pyramid->kv_len[s], leaf) * problem->kv_heads;
        pyramid->leaves += level_nodes(pyramid->kv_len[s], leaf, 1) * problem->kv_heads;
    }
    size_t bytes = (size_t)pyramid->nodes * (size_t)problem->dim * sizeof(float);
    status = context->backend->storage_create(context, MAX(bytes, sizeof(float)), &pyramid->means);
    if (!status && has_bounds) status = bounds_new(context, pyramid);
    if (status) goto failed;
    *result = pyramid;
    return CLATTN_SUCCESS;
failed:
    clattn_pyramid_release(context, pyramid);
    return status;
}

static clattn_status build(clattn_context *context, const clattn_attention_desc *attention, int32_t leaf,
                           bool has_bounds, const clattn_tensor *k, clattn_pyramid **pyramid,
                           const clattn_sync *sync)
{
    if (!pyramid)
        return fail(context, CLATTN_INVALID_ARGUMENT, "pyramid is NULL; a place for the result is needed");
    struct problem problem;
    clattn_sync sync_copy;
    clattn_status status = check_sync(context, sync, &sync_copy);
    if (!status) status = check_leaf(context, "leaf", leaf);
    if (status) return status;
    status = problem_init(context, attention, &(struct tensors){.k = k}, 1, &problem);
    if (status) return status;
    struct staged keys = {0};
    clattn_pyramid *made = NULL;
    if (*pyramid && (!pyramid_fits(*pyramid, &problem, leaf) || pyramid_has_bounds(*pyramid) != has_bounds)) {
        status = fail(context, CLATTN_INVALID_SHAPE,
                      "pyramid was made for another shape; pass NULL to make a new one");
        goto done;
    }
    if (!*pyramid && (status = pyramid_new(context, &problem, leaf, has_bounds, &made))) goto done;
    if ((status = stage_in(context, k, &keys))) goto done;
    struct pyramid_job job = {&problem, &keys.device, made ? made : *pyramid, sync ? &sync_copy : NULL};
    status = context->backend->pyramid_build(context, &job);
    if (!status && made) {
        *pyramid = made;
        made = NULL;
    }
done:
    stage_release(context, &keys);
    clattn_pyramid_release(context, made);
    problem_release(&problem);
    return status;
}

clattn_status clattn_pyramid_build(clattn_context *context, const clattn_attention_desc *attention,
                                   int32_t leaf, const clattn_tensor *k, clattn_pyramid **pyramid,
                                   const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    return build(context, attention, leaf, false, k, pyramid, sync);
}

clattn_status clattn_pyramid_build_for(clattn_context *context, const clattn_attention_desc *attention,
                                       const clattn_select_desc *select, const clattn_tensor *k,
                                       clattn_pyramid **pyramid, const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    clattn_select_desc checked;
    clattn_status status = check_select(context, select, &checked);
    if (status) return status;
    return build(context, attention, checked.leaf, checked.selector == CLATTN_SELECT_ROBUST, k, pyramid, sync);
}

clattn_status clattn_pyramid_read(clattn_context *context, const clattn_pyramid *pyramid, int64_t sequence,
                                  int64_t kv_head, int level, float *means, int64_t *nodes)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!pyramid) return fail(context, CLATTN_INVALID_ARGUMENT, "pyramid is NULL");
    if (sequence < 0 || sequence >= pyramid->count)
        return fail(context, CLATTN_INVALID_ARGUMENT, "sequence is %lld; the pyramid has %lld",
                    (long long)sequence, (long long)pyramid->count);
    if (kv_head < 0 || kv_head >= pyramid->kv_heads)
        return fail(context, CLATTN_INVALID_ARGUMENT, "kv_head is %lld; the pyramid has %d", (long long)kv_head,
                    pyramid->kv_heads);
    int64_t kv_len = pyramid->kv_len[sequence];
    if (level < 1 || level > level_count(kv_len, pyramid->leaf))
        return fail(context, CLATTN_INVALID_ARGUMENT, "level is %d; this sequence has levels 1 to %d", level,
                    level_count(kv_len, pyramid->leaf));
    int64_t count = level_nodes(kv_len, pyramid->leaf, level);
    if (nodes) *nodes = count;
    if (!means) return CLATTN_SUCCESS;
    int64_t node = pyramid->first[sequence] + kv_head * pyramid_nodes(kv_len, pyramid->leaf) +
                   level_first(kv_len, pyramid->leaf, level);
    size_t row = (size_t)pyramid->dim * sizeof(float);
    return context->backend->storage_read(context, &pyramid->means, (size_t)node * row, means,
                                          (size_t)count * row);
}

void clattn_pyramid_release(clattn_context *context, clattn_pyramid *pyramid)
{
    if (!context || !pyramid) return;
    context->backend->storage_release(context, &pyramid->means);
    context->backend->storage_release(context, &pyramid->bounds);
    context->backend->storage_release(context, &pyramid->parts);
    free(pyramid->first_leaf);
    free(pyramid->kv_len);
    free(pyramid->first);
    free(pyramid);
}
