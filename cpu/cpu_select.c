/* SPDX-License-Identifier: MIT */
/* Selection driver: runs of query rows of one sequence and key head in parallel. */

#include "config.h"

#include "cpu.h"

/* Every thread gets as many runs as the others, and few rows still give every thread some. */
static int32_t rows_at_once(const struct cpu_kernels *kernels, const struct select_job *job, int threads)
{
    int64_t lists = 0;
    for (int64_t s = 0; s < job->problem->count; s++)
        lists += job->problem->sequences[s].q_len * job->problem->kv_heads;
    int64_t share = MAX(1, ceil_div(lists, threads));
    return (int32_t)ceil_div(share, ceil_div(share, kernels->select_rows_max(job)));
}

clattn_status cpu_select(clattn_context *context, const struct select_job *given)
{
    struct select_job own = *given, *job = &own;
    const struct cpu_kernels *kernels = cpu_kernels_of(context);
    const struct problem *problem = job->problem;
    clattn_blocks *blocks = job->blocks;
    struct cpu_team team = cpu_team(context);
    int threads = team.threads, failed = 0;
    job->cache_bytes = ((const struct cpu_state *)context->state)->machine.cache_bytes;
    int32_t most = rows_at_once(kernels, job, threads);
    size_t bytes = kernels->select_scratch(job, most);

#pragma omp parallel num_threads(threads)
    {
        struct cpu_binding *binding = cpu_team_enter(&team);
        void *scratch = cpu_scratch_take(context, bytes);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
        for (int64_t s = 0; s < problem->count; s++) {
            const struct sequence *sequence = &problem->sequences[s];
            int64_t parts = ceil_div(sequence->q_len, most);
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t n = 0; n < parts * problem->kv_heads; n++) {
                int32_t kv_head = (int32_t)(n / parts);
                int64_t i = n % parts * most, list = (sequence->list_row + i) * blocks->heads + kv_head;
                struct select_lists lists = {(int32_t *)blocks->indices.host + list * blocks->topk,
                                             (int32_t *)blocks->counts.host + list,
                                             (int64_t)blocks->heads * blocks->topk, blocks->heads};
                if (scratch)
                    kernels->select_rows(job, s, kv_head, i, (int32_t)MIN(most, sequence->q_len - i), scratch,
                                         &lists);
            }
        }
        cpu_scratch_give(context, scratch);
        cpu_team_leave(&team, binding);
    }
    if (failed) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes a thread", bytes);
    return CLATTN_SUCCESS;
}
