/* SPDX-License-Identifier: MIT */
/* A decode step on OpenCL: selection in one launch, attention in one or two, on views of the cache's memory. */

#include "config.h"

#include "opencl_decode.h"
#include "opencl_nvidia.h"

#include <stdlib.h>

/* The cache's statistics as the pyramid of the step's sequences. numbers: [3 * count]. */
static clattn_pyramid pyramid_view(const struct decode_job *job, int64_t *numbers)
{
    const clattn_cache *cache = job->cache;
    int64_t count = job->problem->count;
    clattn_pyramid view = {.leaf = cache->desc.leaf,
                           .dim = cache->desc.dim,
                           .kv_heads = cache->desc.kv_heads,
                           .count = count,
                           .kv_len = numbers,
                           .room = cache->desc.tokens,
                           .first = numbers + count,
                           .first_leaf = numbers + 2 * count};
    for (int64_t s = 0; s < count; s++) {
        view.kv_len[s] = job->problem->sequences[s].kv_len;
        view.first[s] = cache_head(cache, job->spans[s].sequence, 0) * cache->nodes;
        view.first_leaf[s] = cache_head(cache, job->spans[s].sequence, 0) * cache->leaves;
    }
    view.means = view.bounds = view.parts = cache->memory;
    return view;
}

static clattn_status run_select(clattn_context *context, const struct decode_job *job,
                                const struct opencl_pages *pages, const clattn_tensor *keys,
                                const clattn_sync *sync)
{
    size_t bytes = 3 * (size_t)job->problem->count * sizeof(int64_t);
    int64_t *numbers = malloc(bytes);
    if (!numbers) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes", bytes);
    clattn_pyramid pyramid = pyramid_view(job, numbers);
    struct select_job select = {.problem = job->problem,
                                .select = job->select,
                                .q = job->q,
                                .k = keys,
                                .pyramid = &pyramid,
                                .blocks = job->blocks,
                                .sync = sync};
    clattn_status status = opencl_select_portable(context, &select, pages);
    free(numbers);
    return status;
}

clattn_status opencl_decode(clattn_context *context, const struct decode_job *job)
{
    clattn_tensor keys = cache_tensor(job->cache, CACHE_KEYS), values = cache_tensor(job->cache, CACHE_VALUES);
    struct opencl_launch launch;
    clattn_sync first = job->sync ? *job->sync : (clattn_sync)CLATTN_SYNC_INIT;
    const clattn_sync *before = job->sync ? &first : NULL; /* of all launches but the last */
    bool done = false;
    first.event = NULL;
    opencl_launch_begin(context, before, &launch);
    struct opencl_pages pages = {
        job->cache, opencl_cache_table(&launch, job->cache, job->spans, job->problem->count, false),
        job->spans};
    clattn_status status = opencl_launch_end(&launch);
    if (!status) status = nvidia_decode(context, job, &pages, &done);
    if (status || done) return status;
    if (job->blocks) status = run_select(context, job, &pages, &keys, before);
    struct forward_job forward = {.problem = job->problem,
                                  .q = job->q,
                                  .k = &keys,
                                  .v = &values,
                                  .blocks = job->blocks,
                                  .out = job->out,
                                  .lse = job->lse,
                                  .sync = job->sync};
    return status ? status : opencl_forward_portable(context, &forward, &pages);
}
