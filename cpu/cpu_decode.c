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

/* ---- a few tokens a sequence ---- */

/* Up to so many tokens of a sequence, on average, each attends with the logits of its selection; longer steps
 * share tiles among tokens instead. */
enum { SHORT_STEP = 8, KEPT_LEAVES_MAX = 64 };

/* Memory of a thread. */
struct decode_scratch {
    void *select, *forward;
    struct kept_logits kept;
    double select_seconds, attend_seconds;
};

static bool scratch_new(const struct cpu_kernels *kernels, const struct select_job *select,
                        const struct forward_job *forward, struct decode_scratch *scratch)
{
    int64_t leaves = MIN(2 * (int64_t)select->select->topk, KEPT_LEAVES_MAX), leaf = select->select->leaf;
    *scratch = (struct decode_scratch){.kept.capacity = leaves};
    scratch->select = cpu_scratch(kernels->select_scratch(select, 1));
    scratch->forward = cpu_scratch(kernels->forward_scratch(forward, 1, select->problem->group));
    scratch->kept.logits = cpu_scratch((size_t)(leaves * leaf * KEPT_LANES_MAX) * sizeof(float));
    scratch->kept.leaves = cpu_scratch((size_t)leaves * sizeof(int64_t));
    return scratch->select && scratch->forward && scratch->kept.logits && scratch->kept.leaves;
}

static void scratch_free(struct decode_scratch *scratch)
{
    free(scratch->select);
    free(scratch->forward);
    free(scratch->kept.logits);
    free(scratch->kept.leaves);
}

/* Selects and attends for row i of sequence s, with the heads of one key head. */
static void decode_row(const struct cpu_kernels *kernels, const struct select_job *select,
                       const struct forward_job *forward, int64_t s, int64_t i, int32_t kv_head,
                       struct decode_scratch *scratch)
{
    const struct problem *problem = select->problem;
    clattn_blocks *blocks = select->blocks;
    int64_t list = (problem->sequences[s].list_row + i) * blocks->heads + kv_head;
    int32_t *indices = (int32_t *)blocks->indices.host + list * blocks->topk;
    int32_t *count = (int32_t *)blocks->counts.host + list;
    struct select_job job = *select;
    job.kept = &scratch->kept;
    scratch->kept.count = 0;
    double start = seconds_now();
    kernels->select_rows(&job, s, kv_head, i, 1, scratch->select,
                         &(struct select_lists){indices, count, blocks->topk, 1});
    double selected = seconds_now();
    scratch->select_seconds += selected - start;
    struct forward_tile tile = {.sequence = &problem->sequences[s],
                                .row = i,
                                .rows = 1,
                                .head = kv_head * problem->group,
                                .heads = problem->group,
                                .lists = 1,
                                .list_rows = 1,
                                .indices = indices,
                                .counts = count,
                                .list_step = blocks->topk,
                                .count_step = 1,
                                .kept = &scratch->kept};
    kernels->forward_tile(forward, &tile, scratch->forward);
    scratch->attend_seconds += seconds_now() - selected;
}

static clattn_status decode_rows(clattn_context *context, clattn_cache *cache, const struct select_job *select,
                                 const struct forward_job *forward)
{
    const struct cpu_kernels *kernels = cpu_kernels_of(context);
    int32_t kv_heads = select->problem->kv_heads;
    const struct problem *problem = select->problem;
    int threads = (int)MIN(cpu_threads(context), problem->list_rows * kv_heads), failed = 0;
    double select_seconds = 0, attend_seconds = 0;
    (void)threads;
#pragma omp parallel num_threads(threads) reduction(+ : select_seconds, attend_seconds)
    {
        struct decode_scratch scratch;
        bool ready = scratch_new(kernels, select, forward, &scratch);
        if (!ready) {
#pragma omp atomic write
            failed = 1;
        }
        for (int64_t s = 0; s < problem->count; s++) {
            int64_t units = problem->sequences[s].q_len * kv_heads;
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t n = 0; n < units; n++)
                if (ready)
                    decode_row(kernels, select, forward, s, n / kv_heads, (int32_t)(n % kv_heads), &scratch);
        }
        select_seconds = scratch.select_seconds;
        attend_seconds = scratch.attend_seconds;
        scratch_free(&scratch);
    }
    cache->select_seconds += select_seconds;
    cache->attend_seconds += attend_seconds;
    return failed ? fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a step") : CLATTN_SUCCESS;
}

/* ---- any step ---- */

static clattn_status decode_chunk(clattn_context *context, clattn_cache *cache, const struct select_job *select,
                                  const struct forward_job *forward)
{
    double start = seconds_now();
    clattn_status status = cpu_select(context, select);
    double selected = seconds_now();
    if (!status) status = cpu_forward(context, forward);
    cache->select_seconds += selected - start;
    cache->attend_seconds += seconds_now() - selected;
    return status;
}

clattn_status cpu_decode(clattn_context *context, const struct decode_job *job)
{
    clattn_tensor keys = cache_tensor(job->cache, CACHE_KEYS), values = cache_tensor(job->cache, CACHE_VALUES);
    struct forward_job forward = {.problem = job->problem,
                                  .q = job->q,
                                  .k = &keys,
                                  .v = &values,
                                  .blocks = job->blocks,
                                  .out = job->out,
                                  .lse = job->lse};
    if (!job->blocks) return cpu_forward(context, &forward);
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
    bool is_short = job->problem->list_rows > 0 && job->problem->list_rows <= SHORT_STEP * job->problem->count;
    clattn_status status = (is_short ? decode_rows : decode_chunk)(context, job->cache, &select, &forward);
    free(numbers);
    return status;
}
