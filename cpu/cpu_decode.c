/* SPDX-License-Identifier: MIT */
/* A decode step on the CPU: selection and attention as ever, on views of the cache's memory. */

#include "config.h"

#include "cache.h"
#include "cpu.h"

#include <stdlib.h>

/* The cache's statistics as the pyramid of the step's sequences. numbers: [3 * count]. */
static clattn_pyramid pyramid_view(const struct decode_job *job, int64_t *numbers)
{
    const clattn_cache *cache = job->cache;
    const clattn_cache_desc *desc = &cache->desc;
    int64_t count = job->problem->count;
    clattn_pyramid view = {.leaf = desc->leaf,
                           .dim = desc->dim,
                           .kv_heads = desc->kv_heads,
                           .count = count,
                           .kv_len = numbers,
                           .room = desc->tokens,
                           .first = numbers + count,
                           .first_leaf = numbers + 2 * count};
    for (int64_t s = 0; s < count; s++) {
        int64_t head = cache_head(cache, job->spans[s].sequence, 0);
        view.kv_len[s] = job->problem->sequences[s].kv_len;
        view.first[s] = head * cache->nodes;
        view.first_leaf[s] = head * cache->leaves;
    }
    view.means.host = cache_memory(cache, cache->layout.means);
    if (!desc->bounds) return view;
    view.bounds = (struct storage){.host = cache_memory(cache, cache->layout.bounds), .bytes = 1};
    view.parts = (struct storage){.host = cache_memory(cache, cache->layout.parts), .bytes = 1};
    return view;
}

clattn_status cpu_decode(clattn_context *context, const struct decode_job *job)
{
    clattn_tensor keys = cache_tensor(job->cache, CACHE_KEYS), values = cache_tensor(job->cache, CACHE_VALUES);
    clattn_status status = CLATTN_SUCCESS;
    if (job->blocks) {
        size_t bytes = 3 * (size_t)job->problem->count * sizeof(int64_t);
        int64_t *numbers = malloc(bytes);
        if (!numbers) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes", bytes);
        clattn_pyramid pyramid = pyramid_view(job, numbers);
        struct select_job select = {.problem = job->problem,
                                    .select = job->select,
                                    .q = job->q,
                                    .k = &keys,
                                    .pyramid = &pyramid,
                                    .blocks = job->blocks};
        status = cpu_select(context, &select);
        free(numbers);
    }
    struct forward_job forward = {.problem = job->problem,
                                  .q = job->q,
                                  .k = &keys,
                                  .v = &values,
                                  .blocks = job->blocks,
                                  .out = job->out,
                                  .lse = job->lse};
    return status ? status : cpu_forward(context, &forward);
}
