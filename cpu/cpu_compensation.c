/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "compensation.h"
#include "turns.h"

#include <stdlib.h>
#include <string.h>

/* A query row of a block's lists, by the block that it reaches. */
struct entry {
    int32_t reach;
    int32_t part; /* list head of the key head */
    int32_t row;
};

/* Rows in order of `reach`, then as they were. */
struct buckets {
    int64_t count;
    struct entry *entries; /* [count] */
    int64_t *first;        /* [blocks + 1] rows that reach a block */
    int32_t *rows;         /* [count] in order */
    int32_t *parts;        /* [count] their list heads */
};

/* One key head of one sequence. */
struct head_work {
    const struct backward_job *job;
    const struct cpu_kernels *kernels;
    const struct inverse *inverse;
    const struct sequence *sequence;
    const float *delta;
    int32_t pack; /* rows x heads */
    int64_t s, blocks, floats;
    int32_t kv_head, heads, part_count; /* query heads of a part */
    float *sums;                        /* [blocks][floats] */
    int64_t *turns;                     /* [blocks] source blocks that have added to a block */
    int64_t next;                       /* the next source block */
};

/* What a thread needs: room for all rows of a block. */
struct own {
    struct buckets whole, cut; /* blocks that rows see as a whole, and in part */
    struct key_part *parts;    /* [part_count] */
    float *running, *single;   /* [floats] */
    void *scratch;
};

static int32_t list_head_of(const struct head_work *work, int32_t part)
{
    const struct problem *problem = work->job->problem;
    int64_t head = (int64_t)work->kv_head * problem->group + part * work->heads;
    return (int32_t)(head * work->job->blocks->heads / problem->q_heads);
}

/* ---- who reaches what ---- */

/* The block that the list has next after `block`, or `blocks`. */
static int64_t next_listed(const struct head_work *work, int32_t list_head, int64_t list_row, int64_t block)
{
    const clattn_blocks *blocks = work->job->blocks;
    int64_t list = (work->sequence->list_row + list_row) * blocks->heads + list_head;
    const int32_t *indices = (const int32_t *)blocks->indices.host + list * blocks->topk;
    int32_t count = ((const int32_t *)blocks->counts.host)[list];
    for (int32_t n = 0; n < count; n++)
        if (indices[n] > block) return MIN(indices[n], work->blocks);
    return work->blocks;
}

static void bucket_add(struct buckets *buckets, int64_t reach, int32_t part, int64_t row)
{
    buckets->entries[buckets->count++] = (struct entry){(int32_t)reach, part, (int32_t)row};
}

/* Counting sort. */
static void buckets_sort(struct buckets *buckets, int64_t blocks)
{
    memset(buckets->first, 0, (size_t)(blocks + 1) * sizeof *buckets->first);
    for (int64_t n = 0; n < buckets->count; n++)
        buckets->first[buckets->entries[n].reach + 1]++;
    for (int64_t b = 0; b < blocks; b++)
        buckets->first[b + 1] += buckets->first[b];
    for (int64_t n = 0; n < buckets->count; n++) {
        const struct entry *entry = &buckets->entries[n];
        int64_t place = buckets->first[entry->reach]++;
        buckets->rows[place] = entry->row;
        buckets->parts[place] = entry->part;
    }
    for (int64_t b = blocks; b > 0; b--)
        buckets->first[b] = buckets->first[b - 1];
    buckets->first[0] = 0;
}

/* Rows that list block a, by the last block that they see as a whole, and by the one that they see in part. */
static void reaches_fill(const struct head_work *work, int64_t a, struct own *own)
{
    const struct problem *problem = work->job->problem;
    const clattn_blocks *blocks = work->job->blocks;
    own->whole.count = own->cut.count = 0;
    for (int32_t part = 0; part < work->part_count; part++) {
        int32_t list_head = list_head_of(work, part);
        int64_t bin = inverse_bin(work->inverse, problem, blocks, work->s, list_head, a);
        for (int64_t n = work->inverse->first[bin]; n < work->inverse->first[bin + 1]; n++) {
            int64_t list_row = work->inverse->rows[n], row = list_row * blocks->q_block;
            int64_t last = next_listed(work, list_head, list_row, a) - 1;
            for (int64_t i = row; i < MIN(row + blocks->q_block, work->sequence->q_len); i++) {
                int64_t end = visible_keys(problem, work->sequence, i), whole = end / blocks->block;
                if (end == work->sequence->kv_len) whole = work->blocks;
                if (MIN(whole - 1, last) > a) bucket_add(&own->whole, MIN(whole - 1, last), part, i);
                if (whole > a && whole <= last && end > whole * blocks->block)
                    bucket_add(&own->cut, whole, part, i);
            }
        }
    }
    buckets_sort(&own->whole, work->blocks);
    buckets_sort(&own->cut, work->blocks);
}

/* ---- sums ---- */

/* Adds to `sums` what the rows that reach block t give to block a; keys are seen as if they stood in block
 * `as`. */
static void rows_add(const struct head_work *work, const struct buckets *buckets, int64_t t, int64_t a,
                     int64_t as, struct own *own, float *sums)
{
    const struct backward_job *job = work->job;
    int32_t block = job->blocks->block, count = 0;
    for (int64_t n = buckets->first[t], end; n < buckets->first[t + 1]; n = end) {
        int32_t head = work->kv_head * job->problem->group + buckets->parts[n] * work->heads;
        for (end = n; end < buckets->first[t + 1] && buckets->parts[end] == buckets->parts[n];)
            end++;
        own->parts[count++] = (struct key_part){head, work->heads, buckets->rows + n, 0, end - n};
    }
    struct key_tile tile = {.sequence = work->sequence,
                            .kv_head = work->kv_head,
                            .block = a,
                            .first = a * block,
                            .count = block,
                            .shift = (as - a) * block,
                            .q_block = 1,
                            .pack = work->pack,
                            .parts = own->parts,
                            .part_count = count,
                            .delta = work->delta,
                            .dk = sums,
                            .dv = sums + block * gradient_stride(job->problem->dim)};
    work->kernels->backward_key(job, &tile, own->scratch);
}

static void block_add(float *to, const float *sums, int64_t floats)
{
    for (int64_t n = 0; n < floats; n++)
        to[n] += sums[n];
}

/* What the rows of block a give to the blocks on its right. */
static void source_run(const struct head_work *work, int64_t a, struct own *own)
{
    bool has_whole = false;
    size_t bytes = (size_t)work->floats * sizeof(float);
    reaches_fill(work, a, own);
    memset(own->running, 0, bytes);
    for (int64_t t = work->blocks - 1; t > a; t--) {
        bool has_cut = own->cut.first[t + 1] > own->cut.first[t];
        if (own->whole.first[t + 1] > own->whole.first[t]) {
            rows_add(work, &own->whole, t, a, a, own, own->running);
            has_whole = true;
        }
        if (has_cut) {
            memset(own->single, 0, bytes);
            rows_add(work, &own->cut, t, a, t, own, own->single);
        }
        turn_wait(&work->turns[t], a);
        if (has_whole) block_add(work->sums + t * work->floats, own->running, work->floats);
        if (has_cut) block_add(work->sums + t * work->floats, own->single, work->floats);
        turn_pass(&work->turns[t], a);
    }
}

/* ---- memory and threads ---- */

static void *cut(char **memory, int64_t bytes)
{
    void *start = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return start;
}

/* Lays out a thread's memory; returns its size. */
static size_t own_layout(const struct head_work *work, int64_t rows, char *memory, struct own *own)
{
    char *start = memory;
    for (int side = 0; side < 2; side++) {
        struct buckets *buckets = side ? &own->cut : &own->whole;
        buckets->entries = cut(&memory, rows * (int64_t)sizeof *buckets->entries);
        buckets->first = cut(&memory, (work->blocks + 1) * (int64_t)sizeof *buckets->first);
        buckets->rows = cut(&memory, rows * (int64_t)sizeof *buckets->rows);
        buckets->parts = cut(&memory, rows * (int64_t)sizeof *buckets->parts);
    }
    own->parts = cut(&memory, work->part_count * (int64_t)sizeof *own->parts);
    own->running = cut(&memory, work->floats * (int64_t)sizeof(float));
    own->single = cut(&memory, work->floats * (int64_t)sizeof(float));
    own->scratch = cut(&memory, (int64_t)work->kernels->backward_key_scratch(work->job));
    return (size_t)(memory - start);
}

/* Most query rows, of all list heads of the key head, that list one block. */
static int64_t rows_most(const struct head_work *work)
{
    const clattn_blocks *blocks = work->job->blocks;
    int64_t most = 0;
    for (int64_t b = 0; b < work->blocks; b++) {
        int64_t rows = 0;
        for (int32_t part = 0; part < work->part_count; part++) {
            int64_t bin =
                inverse_bin(work->inverse, work->job->problem, blocks, work->s, list_head_of(work, part), b);
            rows += work->inverse->first[bin + 1] - work->inverse->first[bin];
        }
        most = MAX(most, rows * blocks->q_block);
    }
    return most;
}

/* False: no memory for any thread. */
static bool head_run(struct head_work *work, const struct cpu_team *team)
{
    int64_t rows = rows_most(work);
    struct own none;
    size_t bytes = own_layout(work, rows, NULL, &none);
    int running = 0;
    memset(work->turns, 0, (size_t)work->blocks * sizeof *work->turns);
    work->next = 0;
#pragma omp parallel num_threads(team->threads)
    {
        struct cpu_binding *binding = cpu_team_enter(team);
        struct own own;
        char *memory = cpu_scratch(bytes);
        if (memory) {
            own_layout(work, rows, memory, &own);
#pragma omp atomic write
            running = 1;
            for (int64_t a; (a = turn_next(&work->next)) < work->blocks;)
                source_run(work, a, &own);
        }
        free(memory);
        cpu_team_leave(team, binding);
    }
    return running;
}

static bool sums_make(const struct backward_job *job, struct compensation *result, int64_t *blocks_most)
{
    const struct problem *problem = job->problem;
    int64_t blocks = 0;
    *blocks_most = 0;
    result->floats = job->blocks->block * (gradient_stride(problem->dim) + gradient_stride(problem->dim_v));
    result->first = malloc((size_t)(problem->count + 1) * sizeof *result->first);
    if (!result->first) return false;
    for (int64_t s = 0; s < problem->count; s++) {
        int64_t count = key_blocks_listed(job->blocks, &problem->sequences[s]).count;
        result->first[s] = blocks;
        blocks += count * problem->kv_heads;
        *blocks_most = MAX(*blocks_most, count);
    }
    result->sums = calloc((size_t)(blocks * result->floats) + 1, sizeof *result->sums);
    return result->sums != NULL;
}

clattn_status compensation_make(clattn_context *context, const struct backward_job *job,
                                const struct inverse *inverse, const float *delta, const int64_t *delta_base,
                                int32_t pack, struct compensation *result)
{
    const struct problem *problem = job->problem;
    bool per_query_head = job->blocks->heads == problem->q_heads;
    int32_t heads = per_query_head ? 1 : problem->group;
    int64_t blocks_most;
    struct cpu_team team = cpu_team(context);
    bool done = sums_make(job, result, &blocks_most);
    int64_t *turns = malloc((size_t)(blocks_most + 1) * sizeof *turns);
    for (int64_t s = 0; s < problem->count && done && turns; s++)
        for (int32_t h = 0; h < problem->kv_heads && done; h++) {
            int64_t blocks = key_blocks_listed(job->blocks, &problem->sequences[s]).count;
            struct head_work work = {.job = job,
                                     .kernels = cpu_kernels_of(context),
                                     .inverse = inverse,
                                     .sequence = &problem->sequences[s],
                                     .delta = delta + delta_base[s],
                                     .pack = pack,
                                     .s = s,
                                     .blocks = blocks,
                                     .floats = result->floats,
                                     .kv_head = h,
                                     .heads = heads,
                                     .part_count = problem->group / heads,
                                     .sums = result->sums + (result->first[s] + h * blocks) * result->floats,
                                     .turns = turns};
            done = head_run(&work, &team);
        }
    done = done && turns;
    free(turns);
    return done ? CLATTN_SUCCESS : fail(context, CLATTN_OUT_OF_MEMORY, "no memory for gradient compensation");
}

void compensation_add(const struct compensation *compensation, const struct backward_job *job, int64_t s,
                      int32_t kv_head, int64_t block, float *sums)
{
    int64_t blocks = key_blocks_listed(job->blocks, &job->problem->sequences[s]).count;
    const float *from =
        compensation->sums + (compensation->first[s] + kv_head * blocks + block) * compensation->floats;
    for (int64_t n = 0; n < compensation->floats; n++)
        sums[n] += job->compensation * from[n];
}

void compensation_free(struct compensation *compensation)
{
    free(compensation->first);
    free(compensation->sums);
}
