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

/* ---- one token a sequence ---- */

enum { KEPT_LEAVES_MAX = 64 };

/* Memory of a thread. */
struct decode_scratch {
    void *select, *forward;
    struct kept_logits kept;
};

static bool scratch_new(const struct cpu_kernels *kernels, const struct select_job *select,
                        const struct forward_job *forward, struct decode_scratch *scratch)
{
    int64_t leaves = MIN(2 * (int64_t)select->select->topk, KEPT_LEAVES_MAX), leaf = select->select->leaf;
    *scratch = (struct decode_scratch){.kept.capacity = leaves};
    scratch->select = cpu_scratch(kernels->select_scratch(select));
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

/* Selects and attends for the only row of sequence s, with the heads of one key head. */
static void decode_row(const struct cpu_kernels *kernels, const struct select_job *select,
                       const struct forward_job *forward, int64_t s, int32_t kv_head,
                       struct decode_scratch *scratch)
{
    const struct problem *problem = select->problem;
    clattn_blocks *blocks = select->blocks;
    int64_t list = problem->sequences[s].list_row * blocks->heads + kv_head;
    int32_t *indices = (int32_t *)blocks->indices.host + list * blocks->topk;
    int32_t *count = (int32_t *)blocks->counts.host + list;
    struct select_job job = *select;
    job.kept = &scratch->kept;
    scratch->kept.count = 0;
    *count = kernels->select_row(&job, s, kv_head, 0, scratch->select, indices);
    struct forward_tile tile = {.sequence = &problem->sequences[s],
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
}

static clattn_status decode_rows(clattn_context *context, const struct select_job *select,
                                 const struct forward_job *forward)
{
    const struct cpu_kernels *kernels = cpu_kernels_of(context);
    int32_t kv_heads = select->problem->kv_heads;
    int64_t units = select->problem->count * kv_heads;
    int threads = (int)MIN(cpu_threads(context), units), failed = 0;
    (void)threads;
#pragma omp parallel num_threads(threads)
    {
        struct decode_scratch scratch;
        bool ready = scratch_new(kernels, select, forward, &scratch);
        if (!ready) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t n = 0; n < units; n++)
            if (ready) decode_row(kernels, select, forward, n / kv_heads, (int32_t)(n % kv_heads), &scratch);
        scratch_free(&scratch);
    }
    return failed ? fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a step") : CLATTN_SUCCESS;
}

/* ---- any step ---- */

static bool is_one_token_each(const struct problem *problem)
{
    for (int64_t s = 0; s < problem->count; s++)
        if (problem->sequences[s].q_len != 1) return false;
    return true;
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
    clattn_status status;
    if (is_one_token_each(job->problem)) {
        status = decode_rows(context, &select, &forward);
    } else {
        status = cpu_select(context, &select);
        if (!status) status = cpu_forward(context, &forward);
    }
    free(numbers);
    return status;
}
