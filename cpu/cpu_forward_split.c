/* SPDX-License-Identifier: MIT */
/* Dense attention of few query rows over many keys, as in decoding: the keys are cut into parts, which threads
 * share, and the parts' results are merged.
 *
 *     keys   | part 0 | part 1 | part 2 |..      SPLIT_KEYS each
 *     lse = log sum over parts exp lse_p,   out = sum over parts exp(lse_p - lse) out_p
 *
 * The cut depends on the shape alone, and parts are merged in order, in double: the number of threads changes
 * no bit. */

#include "config.h"

#include "cpu_forward_split.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    SPLIT_KEYS = 4096, /* enough that the merge is nothing beside them */
    SPLIT_TILES = 16   /* so many tiles are work for all threads already */
};

/* Tiles x parts of one sequence: results [part][row][head][dim_v], then lse [part][row][head]. */
struct split {
    const struct sequence *sequence;
    int64_t tiles, parts;
    int64_t first; /* of its units among those of all sequences */
    float *out, *lse;
};

static bool can_split(const struct problem *problem, const struct sequence *sequence)
{
    bool whole_pages = !sequence->pages || SPLIT_KEYS % sequence->page_size == 0;
    return whole_pages && (!problem->causal || sequence->q_len <= 1);
}

bool cpu_forward_splits(const struct cpu_kernels *kernels, const struct forward_job *job,
                        const struct tiling *tiling)
{
    const struct problem *problem = job->problem;
    const struct options *options = &problem->options;
    int64_t tiles = 0;
    if (job->blocks || job->neighborhood || problem->kv_len_max < 2 * SPLIT_KEYS) return false;
    if (options->window || options->sink || options->bias || strcmp(kernels->variant, "ref") == 0) return false;
    for (int64_t s = 0; s < problem->count; s++) {
        if (!can_split(problem, &problem->sequences[s])) return false;
        tiles += tiling_tiles(tiling, problem, NULL, s);
    }
    return tiles < SPLIT_TILES;
}

/* A tensor whose rows of `sequence` begin at `data`. */
static clattn_tensor rows_of(const struct sequence *sequence, float *data, int64_t heads, int64_t dim)
{
    clattn_tensor tensor =
        clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, sequence->q_row + sequence->q_len, heads, dim);
    tensor.batch_stride = 0;
    tensor.offset = -sequence->q_row * tensor.len_stride;
    return tensor;
}

/* One tile over one part of the keys. */
static void split_unit(const struct cpu_kernels *kernels, const struct forward_job *job,
                       const struct tiling *tiling, const struct split *split, int64_t unit, void *scratch)
{
    struct problem problem = *job->problem;
    struct sequence keys = *split->sequence;
    struct forward_tile tile;
    int64_t part = unit / split->tiles, first = part * SPLIT_KEYS;
    int64_t results = part * keys.q_len * problem.q_heads;
    clattn_tensor out = rows_of(&keys, split->out + results * problem.dim_v, problem.q_heads, problem.dim_v);
    clattn_tensor lse = rows_of(&keys, split->lse + results, problem.q_heads, 1);
    struct forward_job part_job = *job;
    if (!tile_of(&problem, NULL, tiling, split->sequence - problem.sequences, unit % split->tiles, &tile))
        return;
    problem.causal = false; /* a single query row, if any, sees all keys */
    keys.k_row += first;
    keys.kv_len = MIN(SPLIT_KEYS, keys.kv_len - first);
    if (keys.pages) keys.pages += first / keys.page_size;
    tile.sequence = &keys;
    part_job.problem = &problem;
    part_job.out = &out;
    part_job.lse = &lse;
    kernels->forward_tile(&part_job, &tile, scratch);
}

/* The parts of one row and head; share [parts]. */
static void merge_row(const struct forward_job *job, const struct split *split, int64_t i, int32_t head,
                      double *share)
{
    const struct sequence *sequence = split->sequence;
    int64_t step = sequence->q_len * job->problem->q_heads, row = i * job->problem->q_heads + head;
    int32_t dim_v = job->problem->dim_v;
    double most = -INFINITY, total = 0, lse = -INFINITY;
    for (int64_t p = 0; p < split->parts; p++) {
        double part = (double)split->lse[p * step + row];
        if (part > most || isnan(part)) most = part;
    }
    for (int64_t p = 0; p < split->parts; p++) {
        share[p] = most == -INFINITY ? 0 : exp((double)split->lse[p * step + row] - most);
        total += share[p];
    }
    if (total != 0) lse = most + log(total);
    void *to = tensor_row(job->out, sequence->batch, sequence->q_row + i, head);
    for (int32_t d = 0; d < dim_v; d++) {
        double sum = 0;
        for (int64_t p = 0; p < split->parts; p++)
            if (share[p] != 0) sum += share[p] * (double)split->out[(p * step + row) * dim_v + d];
        store_element(to, job->out->dtype, d, (float)(total != 0 ? sum / total : 0));
    }
    if (job->lse) *(float *)tensor_row(job->lse, sequence->batch, sequence->q_row + i, head) = (float)lse;
}

/* Fills splits [count] and gives them memory for results; returns the number of units, -1 without memory. */
static int64_t splits_new(const struct forward_job *job, const struct tiling *tiling, struct split *splits,
                          float **results, int64_t *parts_max)
{
    const struct problem *problem = job->problem;
    int64_t units = 0, floats = 0, room = problem->q_heads * (int64_t)(problem->dim_v + 1);
    *parts_max = 1;
    for (int64_t s = 0; s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        splits[s] = (struct split){.sequence = sequence,
                                   .tiles = tiling_tiles(tiling, problem, NULL, s),
                                   .parts = MAX(ceil_div(sequence->kv_len, SPLIT_KEYS), 1),
                                   .first = units};
        units += splits[s].tiles * splits[s].parts;
        floats += splits[s].parts * sequence->q_len * room;
        *parts_max = MAX(*parts_max, splits[s].parts);
    }
    float *next = *results = cpu_scratch((size_t)floats * sizeof(float));
    for (int64_t s = 0; s < problem->count && next; s++) {
        int64_t rows = splits[s].parts * splits[s].sequence->q_len * problem->q_heads;
        splits[s].out = next;
        splits[s].lse = next + rows * problem->dim_v;
        next += rows * (problem->dim_v + 1);
    }
    return next ? units : -1;
}

static const struct split *split_of(const struct split *splits, int64_t count, int64_t unit)
{
    int64_t s = count - 1;
    while (s > 0 && (splits[s].first > unit || splits[s].tiles == 0))
        s--;
    return &splits[s];
}

clattn_status cpu_forward_split(clattn_context *context, const struct forward_job *job,
                                const struct tiling *tiling)
{
    const struct cpu_kernels *kernels = cpu_kernels_of(context);
    const struct problem *problem = job->problem;
    struct split *splits = malloc((size_t)problem->count * sizeof *splits);
    float *results = NULL;
    int64_t parts_max = 0, units = splits ? splits_new(job, tiling, splits, &results, &parts_max) : -1;
    size_t bytes = kernels->forward_scratch(job, tiling->rows_most, tiling->heads);
    double *share = malloc((size_t)parts_max * sizeof *share);
    struct cpu_team team = cpu_team(context);
    int threads = (int)MIN(team.threads, MAX(units, 1)), failed = 0;
    const bool ready = units >= 0 && share;
    (void)threads;

#pragma omp parallel num_threads(threads) if (ready)
    {
        struct cpu_binding *binding = cpu_team_enter(&team);
        void *scratch = ready ? cpu_scratch(bytes) : NULL;
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < units; n++) {
            const struct split *split = split_of(splits, problem->count, n);
            if (scratch) split_unit(kernels, job, tiling, split, n - split->first, scratch);
        }
        free(scratch);
        cpu_team_leave(&team, binding);
    }
    for (int64_t s = 0; s < problem->count && !failed; s++)
        for (int64_t n = 0; n < problem->sequences[s].q_len * problem->q_heads; n++)
            merge_row(job, &splits[s], n / problem->q_heads, (int32_t)(n % problem->q_heads), share);
    free(share);
    free(results);
    free(splits);
    return failed ? fail(context, CLATTN_OUT_OF_MEMORY, "no memory for parts of the keys") : CLATTN_SUCCESS;
}
