/* SPDX-License-Identifier: MIT */
/* Gradients in one walk: each (query row, key block) pair is visited once, for five matrix products, where a
 * walk over the rows for dq and one over the blocks for dk and dv take seven, and every exponential twice.
 *
 * The query rows of a key head are cut into chunks. A chunk goes through all key blocks in order and gives to
 * each what those of its rows give that list it. Its own rows of dq are its alone; dk and dv of a block are
 * added up in the order of the chunks (turns.h), whatever the number of threads. The sums are the caller's
 * tensors, so these must be float32. */

#include "config.h"

#include "backward_once.h"
#include "turns.h"

#include <stdlib.h>
#include <string.h>

enum {
    PACKS = 4,         /* packs of rows that a block should get from a chunk, so that it is worth transposing */
    PACK_ROWS = 64,    /* rows x heads of a pack */
    CHUNKS_MAX = 64,   /* of a key head */
    CHUNKS_LEAST = 16, /* of all: below, too few threads would have work */
};

struct once {
    const struct backward_job *job;
    const struct cpu_kernels *kernels;
    const struct inverse *inverse;
    const float *delta;
    const int64_t *delta_base;
    int32_t pack;
    int64_t *chunk_base; /* [sequences + 1] chunks of the sequences before, of all key heads */
    int64_t *turn_base;  /* [sequences] first turn of key head 0; head h begins h * blocks later */
    int64_t *turns;
    int64_t next;
};

/* ---- chunks ---- */

static int64_t list_rows_of(const struct backward_job *job, int64_t s)
{
    return ceil_div(job->problem->sequences[s].q_len, job->blocks->q_block);
}

/* Chunks of one key head: as many as leave PACKS packs a block. */
static int64_t chunks_of(const struct backward_job *job, int64_t s)
{
    const clattn_blocks *blocks = job->blocks;
    const struct sequence *sequence = &job->problem->sequences[s];
    int64_t key_blocks = MAX(key_blocks_listed(blocks, sequence).count, 1), rows = list_rows_of(job, s);
    int64_t listed = MIN(blocks->topk, key_blocks); /* at most */
    int64_t pairs = sequence->q_len * job->problem->group * listed;
    return MAX(MIN(MIN(pairs / (key_blocks * PACK_ROWS * PACKS), CHUNKS_MAX), rows), 1);
}

bool backward_once_wanted(const struct cpu_kernels *kernels, const struct backward_job *job)
{
    const struct problem *problem = job->problem;
    int64_t chunks = 0;
    if (!kernels->backward_key || !job->blocks || job->blocks->starts || job->blocks->mask) return false;
    if (job->q->dtype != CLATTN_FLOAT32 || problem->options.bias || job->compensation != 0) return false;
    for (int64_t s = 0; s < problem->count; s++)
        chunks += chunks_of(job, s) * problem->kv_heads;
    return chunks >= CHUNKS_LEAST;
}

/* ---- one chunk ---- */

struct chunk {
    int64_t s, number;
    int32_t kv_head;
    int64_t first, end; /* list rows */
};

static struct chunk chunk_at(const struct once *once, int64_t n)
{
    int64_t s = 0;
    while (n >= once->chunk_base[s + 1])
        s++;
    int64_t chunks = chunks_of(once->job, s), rows = list_rows_of(once->job, s), at = n - once->chunk_base[s];
    struct chunk chunk = {.s = s, .number = at % chunks, .kv_head = (int32_t)(at / chunks)};
    chunk.first = rows * chunk.number / chunks;
    chunk.end = rows * (chunk.number + 1) / chunks;
    return chunk;
}

static void chunk_clear(const struct once *once, const struct chunk *chunk)
{
    const struct problem *problem = once->job->problem;
    const struct sequence *sequence = &problem->sequences[chunk->s];
    int64_t q_block = once->job->blocks->q_block, end = MIN(chunk->end * q_block, sequence->q_len);
    for (int64_t i = chunk->first * q_block; i < end; i++)
        for (int32_t g = 0; g < problem->group; g++)
            memset(tensor_row(once->job->dq, sequence->batch, sequence->q_row + i,
                              chunk->kv_head * problem->group + g),
                   0, (size_t)problem->dim * sizeof(float));
}

/* The first of ascending rows [count] that is at least `row`. */
static int64_t rows_find(const int32_t *rows, int64_t count, int64_t row)
{
    int64_t low = 0;
    while (low < count) {
        int64_t middle = low + (count - low) / 2;
        if (rows[middle] < row)
            low = middle + 1;
        else
            count = middle;
    }
    return low;
}

/* The chunk's rows that list a block, by list head; returns how many parts have any. */
static int32_t chunk_parts(const struct once *once, const struct chunk *chunk, int64_t block,
                           struct key_part *parts)
{
    const struct problem *problem = once->job->problem;
    const clattn_blocks *blocks = once->job->blocks;
    int32_t heads = blocks->heads == problem->q_heads ? 1 : problem->group, count = 0;
    for (int32_t n = 0; n < problem->group / heads; n++) {
        int32_t head = chunk->kv_head * problem->group + n * heads;
        int32_t list_head = (int32_t)((int64_t)head * blocks->heads / problem->q_heads);
        int64_t bin = inverse_bin(once->inverse, problem, blocks, chunk->s, list_head, block);
        const int32_t *rows = once->inverse->rows + once->inverse->first[bin];
        int64_t all = once->inverse->first[bin + 1] - once->inverse->first[bin];
        int64_t first = rows_find(rows, all, chunk->first), end = rows_find(rows, all, chunk->end);
        if (end > first) parts[count++] = (struct key_part){head, heads, rows + first, 0, end - first};
    }
    return count;
}

/* One block's rows of dk or dv: the first chunk begins the sums. */
static void rows_add(const clattn_tensor *tensor, const struct key_tile *tile, const float *sums, bool begins)
{
    for (int64_t j = 0; j < tile->count; j++) {
        float *to =
            tensor_row(tensor, tile->sequence->batch, tile->sequence->k_row + tile->first + j, tile->kv_head);
        const float *from = sums + j * gradient_stride((int32_t)tensor->dim);
        for (int64_t d = 0; d < tensor->dim; d++)
            to[d] = begins ? from[d] : to[d] + from[d];
    }
}

static void chunk_run(const struct once *once, const struct chunk *chunk, struct key_part *parts, float *sums,
                      void *scratch)
{
    const struct backward_job *job = once->job;
    const struct problem *problem = job->problem;
    const struct sequence *sequence = &problem->sequences[chunk->s];
    struct key_blocks keys = key_blocks_listed(job->blocks, sequence);
    int64_t *turns = once->turns + once->turn_base[chunk->s] + chunk->kv_head * keys.count;
    int64_t dk_floats = job->blocks->block * gradient_stride(problem->dim);
    size_t bytes = (size_t)(dk_floats + job->blocks->block * gradient_stride(problem->dim_v)) * sizeof *sums;
    bool begins = chunk->number == 0 && !job->accumulate;
    if (job->dq && !job->accumulate) chunk_clear(once, chunk);
    for (int64_t b = 0; b < keys.count; b++) {
        struct key_tile tile = {.sequence = sequence,
                                .kv_head = chunk->kv_head,
                                .block = b,
                                .first = key_block_first(&keys, b),
                                .q_block = job->blocks->q_block,
                                .pack = once->pack,
                                .has_dq = job->dq != NULL,
                                .parts = parts,
                                .part_count = chunk_parts(once, chunk, b, parts),
                                .delta = once->delta + once->delta_base[chunk->s],
                                .dk = sums,
                                .dv = sums + dk_floats};
        tile.count = key_block_end(&keys, b) - tile.first;
        if (job->dk && (tile.part_count || begins)) memset(sums, 0, bytes);
        if (tile.part_count) once->kernels->backward_key(job, &tile, scratch);
        if (!job->dk) continue;
        turn_wait(&turns[b], chunk->number);
        if (tile.part_count || begins) {
            rows_add(job->dk, &tile, tile.dk, begins);
            rows_add(job->dv, &tile, tile.dv, begins);
        }
        turn_pass(&turns[b], chunk->number);
    }
}

/* ---- all ---- */

static bool bases_make(struct once *once)
{
    const struct problem *problem = once->job->problem;
    int64_t turns = 0;
    once->chunk_base = calloc((size_t)problem->count + 1, sizeof *once->chunk_base);
    once->turn_base = calloc((size_t)problem->count + 1, sizeof *once->turn_base);
    if (!once->chunk_base || !once->turn_base) return false;
    for (int64_t s = 0; s < problem->count; s++) {
        once->chunk_base[s + 1] = once->chunk_base[s] + chunks_of(once->job, s) * problem->kv_heads;
        once->turn_base[s] = turns;
        turns += key_blocks_listed(once->job->blocks, &problem->sequences[s]).count * problem->kv_heads;
    }
    once->turns = calloc((size_t)turns + 1, sizeof *once->turns);
    return once->turns != NULL;
}

bool backward_once(const struct cpu_kernels *kernels, const struct backward_job *job,
                   const struct inverse *inverse, const float *delta, const int64_t *delta_base, int32_t pack,
                   const struct cpu_team *team)
{
    const struct problem *problem = job->problem;
    struct once once = {job, kernels, inverse, delta, delta_base, pack, NULL, NULL, NULL, 0};
    size_t floats =
        (size_t)(job->blocks->block * (gradient_stride(problem->dim) + gradient_stride(problem->dim_v)));
    size_t bytes = kernels->backward_key_scratch(job);
    int running = 0;
    if (bases_make(&once)) {
#pragma omp parallel num_threads(team->threads)
        {
            struct cpu_binding *binding = cpu_team_enter(team);
            void *scratch = cpu_scratch(bytes);
            float *sums = cpu_scratch(floats * sizeof *sums);
            struct key_part *parts = malloc((size_t)problem->group * sizeof *parts);
            if (scratch && sums && parts) {
#pragma omp atomic write
                running = 1;
                for (int64_t n; (n = turn_next(&once.next)) < once.chunk_base[problem->count];) {
                    struct chunk chunk = chunk_at(&once, n);
                    chunk_run(&once, &chunk, parts, sums, scratch);
                }
            }
            free(scratch);
            free(sums);
            free(parts);
            cpu_team_leave(team, binding);
        }
    }
    free(once.chunk_base);
    free(once.turn_base);
    free(once.turns);
    return running;
}
