/* SPDX-License-Identifier: MIT */
/* Forward driver: cuts the query rows of each list into tiles and hands them out to threads. */

#include "config.h"

#include "cpu_forward_split.h"

#include <stdlib.h>

clattn_status cpu_forward(clattn_context *context, const struct forward_job *job)
{
    const struct cpu_kernels *kernels = cpu_kernels_of(context);
    const struct problem *problem = job->problem;
    struct tiling tiling = tiling_of(context->state, problem, job->blocks);
    struct cpu_team team = cpu_team(context);
    int failed = 0;
    size_t bytes = kernels->forward_scratch(job, tiling.rows_most, tiling.heads);
    if (cpu_forward_splits(kernels, job, &tiling)) return cpu_forward_split(context, job, &tiling);

#pragma omp parallel num_threads(team.threads)
    {
        struct cpu_binding *binding = cpu_team_enter(&team);
        void *scratch = cpu_scratch(bytes);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
        for (int64_t s = 0; s < problem->count; s++) {
            int64_t tiles = tiling_tiles(&tiling, problem, job->blocks, s);
#pragma omp for schedule(dynamic, 4) nowait
            for (int64_t n = 0; n < tiles; n++) {
                struct forward_tile tile, next;
                if (!scratch || !tile_of(problem, job->blocks, &tiling, s, n, &tile)) continue;
                if (n + 1 < tiles && tile_of(problem, job->blocks, &tiling, s, n + 1, &next)) tile.next = &next;
                kernels->forward_tile(job, &tile, scratch);
            }
        }
        free(scratch);
        cpu_team_leave(&team, binding);
    }
    if (failed) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes a thread", bytes);
    return CLATTN_SUCCESS;
}
