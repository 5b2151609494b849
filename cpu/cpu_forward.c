/* SPDX-License-Identifier: MIT */
/* Forward driver: cuts the query rows of each list into tiles and hands them out to threads. */

#include "config.h"

#include "cpu.h"

#include "key_blocks.h"

#include <stdlib.h>

/* How rows and heads are cut. Heads that share a list and a key head form one tile. */
struct tiling {
    int32_t heads;      /* query heads of a tile */
    int32_t rows;       /* query rows of a tile */
    int64_t list_tiles; /* tiles of one list row and head */
};

static struct tiling tiling_of(const struct cpu_kernels *kernels, const struct forward_job *job)
{
    const struct problem *problem = job->problem;
    bool per_query_head = job->blocks && job->blocks->heads == problem->q_heads;
    int32_t heads = per_query_head ? 1 : problem->group;
    int64_t rows = MAX(1, kernels->forward_rows / heads);
    int64_t list_rows = job->blocks ? job->blocks->q_block : MAX(problem->q_len_max, 1);
    rows = MIN(rows, list_rows);
    return (struct tiling){heads, (int32_t)rows, ceil_div(list_rows, rows)};
}

/* Tile n of sequence s, or false when its rows lie past the end. */
static bool tile_of(const struct forward_job *job, const struct tiling *tiling, int64_t s, int64_t n,
                    struct forward_tile *tile)
{
    const struct problem *problem = job->problem;
    const struct sequence *sequence = &problem->sequences[s];
    const clattn_blocks *blocks = job->blocks;
    int32_t head_tiles = problem->q_heads / tiling->heads;
    int64_t list_rows = blocks ? blocks->q_block : sequence->q_len;
    int64_t part = n % tiling->list_tiles, head = n / tiling->list_tiles % head_tiles;
    int64_t list_row = n / tiling->list_tiles / head_tiles;
    int64_t row = list_row * list_rows + part * tiling->rows;
    int64_t end = MIN(MIN(row + tiling->rows, (list_row + 1) * list_rows), sequence->q_len);
    if (row >= end) return false;
    *tile = (struct forward_tile){.sequence = sequence,
                                  .row = row,
                                  .rows = (int32_t)(end - row),
                                  .head = (int32_t)head * tiling->heads,
                                  .heads = tiling->heads};
    if (blocks) {
        int64_t list_head = (int64_t)tile->head * blocks->heads / problem->q_heads;
        int64_t list = (sequence->list_row + list_row) * blocks->heads + list_head;
        tile->indices = (const int32_t *)blocks->indices.host + list * blocks->topk;
        tile->count = ((const int32_t *)blocks->counts.host)[list];
        if (blocks->mask) tile->cut = (const unsigned char *)blocks->mask->cut.host + list * blocks->topk;
        int64_t available = key_blocks_listed(blocks, sequence).count;
        while (tile->count > 0 && tile->indices[tile->count - 1] >= available)
            tile->count--; /* a list that was selected on more keys than these */
    }
    return true;
}

/* The kernels of this job. Options, element masks and block boundaries of the caller are the reference's alone.
 */
static struct cpu_kernels kernels_for(clattn_context *context, const struct forward_job *job)
{
    struct cpu_kernels kernels = *cpu_kernels_of(context);
    if (has_options(&job->problem->options) || (job->blocks && (job->blocks->mask || job->blocks->starts)))
        cpu_install_ref(&kernels);
    return kernels;
}

clattn_status cpu_forward(clattn_context *context, const struct forward_job *job)
{
    const struct cpu_kernels chosen = kernels_for(context, job), *kernels = &chosen;
    const struct problem *problem = job->problem;
    struct tiling tiling = tiling_of(kernels, job);
    int threads = cpu_threads(context), failed = 0;
    size_t bytes = kernels->forward_scratch(job, tiling.rows, tiling.heads);
    (void)threads;

#pragma omp parallel num_threads(threads)
    {
        void *scratch = cpu_scratch(bytes);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
        for (int64_t s = 0; s < problem->count; s++) {
            int64_t lists = job->blocks ? ceil_div(problem->sequences[s].q_len, job->blocks->q_block)
                                        : MIN(problem->sequences[s].q_len, 1);
            int64_t tiles = lists * (problem->q_heads / tiling.heads) * tiling.list_tiles;
#pragma omp for schedule(dynamic, 4) nowait
            for (int64_t n = 0; n < tiles; n++) {
                struct forward_tile tile;
                if (scratch && tile_of(job, &tiling, s, n, &tile)) kernels->forward_tile(job, &tile, scratch);
            }
        }
        free(scratch);
    }
    if (failed) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes a thread", bytes);
    return CLATTN_SUCCESS;
}
