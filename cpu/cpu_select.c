/* SPDX-License-Identifier: MIT */
/* Selection driver: query rows of one sequence and key head in parallel. */

#include "config.h"

#include "cpu.h"

#include <stdlib.h>

clattn_status cpu_select(clattn_context *context, const struct select_job *job)
{
    const struct cpu_kernels *kernels = cpu_kernels_of(context);
    const struct problem *problem = job->problem;
    clattn_blocks *blocks = job->blocks;
    int32_t *indices = blocks->indices.host, *counts = blocks->counts.host;
    int threads = cpu_threads(context), failed = 0;
    size_t bytes = kernels->select_scratch(job);
    (void)threads;

#pragma omp parallel num_threads(threads)
    {
        void *scratch = cpu_scratch(bytes);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
        for (int64_t s = 0; s < problem->count; s++) {
            const struct sequence *sequence = &problem->sequences[s];
            int64_t lists = sequence->q_len * problem->kv_heads;
#pragma omp for schedule(dynamic, 16) nowait
            for (int64_t n = 0; n < lists; n++) {
                int32_t kv_head = (int32_t)(n / sequence->q_len);
                int64_t i = n % sequence->q_len;
                int64_t list = (sequence->list_row + i) * blocks->heads + kv_head;
                if (scratch)
                    counts[list] =
                        kernels->select_row(job, s, kv_head, i, scratch, indices + list * blocks->topk);
            }
        }
        free(scratch);
    }
    if (failed) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes a thread", bytes);
    return CLATTN_SUCCESS;
}
