/* SPDX-License-Identifier: MIT */
/* Selection scores, vectorised: all heads of the group at once, as lanes.
 *
 *   logit[c][h] = scale * q_h . child_c          for the children of a node: keys at level 1, else means
 *   score       = sum over h of  logsumexp_c | mean_c | mean_c + variance_c / 2
 *
 * Nodes that follow each other have their children in one piece; such a run is scored at once.
 * The sum over heads of log(sum_c exp(..)) is the logarithm of a product, taken in double once a lane group: a
 * sum is at most 128 and a lane group has at most 32 heads, so the product stays below 2^224.
 *
 * Included by select_<variant>.c after a vector layer; mirrors select_ref.c. */

#include "dot_simd.h"
#include "exp_simd.h"
#include "select_walk.h"

#include <math.h>

enum { RUN_ROWS = 128 }; /* rows scored at once: at least the greatest leaf */

struct score_state {
    float *q;      /* [lane group][dim][lanes] */
    float *logits; /* [RUN_ROWS][lanes] */
    float *key;    /* [RUN_ROWS] packed rows */
};

static size_t query_bytes(const struct select_job *job)
{
    int64_t lanes = round_up(job->problem->group, LANES_MAX);
    return (size_t)round_up(lanes * job->problem->dim, 16) * sizeof(float);
}

static size_t score_bytes(const struct select_job *job)
{
    return query_bytes(job) + RUN_ROWS * (LANES_MAX + (size_t)packed_stride(job->problem->dim)) * sizeof(float);
}

static struct score_state score_state_of(const struct walk *walk)
{
    struct score_state state = {.q = walk->score_scratch};
    state.logits = (float *)((char *)walk->score_scratch + query_bytes(walk->job));
    state.key = state.logits + RUN_ROWS * LANES_MAX;
    return state;
}

static void score_begin(const struct walk *walk)
{
    const struct problem *problem = walk->job->problem;
    const clattn_tensor *q = walk->job->q;
    struct score_state state = score_state_of(walk);
    for (int32_t first = 0; first < problem->group; first += LANES_MAX) {
        int64_t left = MIN(problem->group - first, LANES_MAX), lanes = lane_vectors(left) * WIDTH;
        float *group = state.q + (int64_t)first * problem->dim;
        for (int64_t lane = 0; lane < left; lane++)
            query_pack(tensor_row(q, walk->sequence->batch, walk->sequence->q_row + walk->row,
                                  walk->kv_head * problem->group + first + lane),
                       q->dtype, problem->dim, group, lanes, lane);
        query_pad(problem->dim, group, lanes, left);
    }
}

/* ---- one node: z [count][lanes] are the logits of its children ---- */

/* Sum over the first `heads` lanes of logsumexp; NaN when a logit is NaN. A head whose greatest logit is
 * infinite counts as that. */
static double lse_lanes(const float *z, int64_t count, int vectors, int64_t heads)
{
    float most[LANES_MAX], sum[LANES_MAX];
    int64_t lanes = vectors * WIDTH;
    for (int n = 0; n < vectors; n++, z += WIDTH) {
        vec row_max = vec_set(-INFINITY), row_sum = vec_zero();
        for (int64_t c = 0; c < count; c++)
            row_max = vec_max(vec_load(z + c * lanes), row_max);
        vec shift = vec_where_less(vec_set(-INFINITY), row_max, row_max, vec_zero());
        shift = vec_where_less(row_max, vec_set(INFINITY), shift, vec_zero());
        for (int64_t c = 0; c < count; c++)
            row_sum = vec_add(row_sum, vec_exp(vec_sub(vec_load(z + c * lanes), shift)));
        vec_store(most + n * WIDTH, row_max);
        vec_store(sum + n * WIDTH, row_sum);
    }
    double total = 0, product = 1;
    for (int64_t h = 0; h < heads; h++) {
        total += (double)most[h];
        product *= isinf(most[h]) && !isnan(sum[h]) ? 1 : (double)sum[h];
    }
    return total + log(product);
}

/* Sum over the lanes of the mean, or of the mean plus half the population variance. */
static double mean_lanes(const float *z, int64_t count, int vectors, int64_t heads, bool with_variance)
{
    float score[LANES_MAX];
    int64_t lanes = vectors * WIDTH;
    vec share = vec_set(1.0f / (float)count);
    for (int n = 0; n < vectors; n++, z += WIDTH) {
        vec mean = vec_zero(), variance = vec_zero();
        for (int64_t c = 0; c < count; c++)
            mean = vec_add(mean, vec_load(z + c * lanes));
        mean = vec_mul(mean, share);
        for (int64_t c = 0; c < count && with_variance; c++) {
            vec difference = vec_sub(vec_load(z + c * lanes), mean);
            variance = vec_fma(difference, difference, variance);
        }
        vec_store(score + n * WIDTH, vec_fma(vec_mul(variance, share), vec_set(0.5f), mean));
    }
    double total = 0;
    for (int64_t h = 0; h < heads; h++)
        total += (double)score[h];
    return total;
}

static double node_lanes(clattn_selector selector, const float *z, int64_t count, int vectors, int64_t heads)
{
    switch (selector) {
    case CLATTN_SELECT_PISA1:
    case CLATTN_SELECT_FLAT_MEAN:
        return mean_lanes(z, count, vectors, heads, false);
    case CLATTN_SELECT_PISA2:
        return mean_lanes(z, count, vectors, heads, true);
    default:
        return lse_lanes(z, count, vectors, heads);
    }
}

/* ---- runs of nodes ---- */

/* Scores of nodes node .. node + count - 1; their children are `rows` rows of row. */
static void score_run(const struct walk *walk, const struct score_state *state, struct float_rows row,
                      int64_t rows, int64_t width, int64_t count, double *score)
{
    const struct problem *problem = walk->job->problem;
    for (int64_t n = 0; n < count; n++)
        score[n] = 0;
    for (int64_t first = 0; first < problem->group; first += LANES_MAX) {
        int64_t heads = MIN(problem->group - first, LANES_MAX), lanes;
        int vectors = lane_vectors(heads);
        lanes = vectors * WIDTH;
        for (int64_t j = 0; j < rows;)
            j += dot_rows(state->q + first * problem->dim, problem->dim, vectors, row.data + j * row.stride,
                          row.stride, rows - j, problem->scale, state->logits + j * lanes);
        for (int64_t n = 0; n < count; n++)
            score[n] += node_lanes(walk->job->select->selector, state->logits + n * width * lanes,
                                   MIN(width, rows - n * width), vectors, heads);
    }
    for (int64_t n = 0; n < count; n++)
        if (isnan(score[n])) score[n] = -INFINITY;
}

static const char *key_of(const struct walk *walk, int64_t j)
{
    const struct sequence *sequence = walk->sequence;
    return tensor_row(walk->job->k, sequence->batch, sequence->k_row + j, walk->kv_head);
}

static void score_nodes(const struct walk *walk, int level, const int64_t *nodes, int64_t count, double *score)
{
    const clattn_tensor *k = walk->job->k;
    int32_t dim = walk->job->problem->dim;
    struct walk_children children = walk_children(walk, level);
    int64_t run_max = RUN_ROWS / children.width, run, bytes = (int64_t)dtype_bytes(k->dtype);
    struct score_state state = score_state_of(walk);
    for (int64_t n = 0; n < count; n += run) {
        int64_t first = nodes[n] * children.width;
        run = 1;
        while (n + run < count && run < run_max && nodes[n + run] == nodes[n] + run)
            run++;
        int64_t rows = MIN(run * children.width, children.rows - first);
        struct float_rows row = {walk->means + (children.base + first) * dim, dim};
        if (children.keys) {
            if (n + run < count)
                prefetch_rows(key_of(walk, nodes[n + run] * children.width), k->len_stride * bytes, 0,
                              MIN(children.width, children.rows - nodes[n + run] * children.width),
                              dim * bytes);
            row = key_rows(key_of(walk, first), k->dtype, k->len_stride, rows, dim, state.key);
        }
        score_run(walk, &state, row, rows, children.width, run, score + n);
    }
}

static size_t select_scratch_simd(const struct select_job *job)
{
    return select_walk_scratch(job) + score_bytes(job);
}

static int32_t select_row_simd(const struct select_job *job, int64_t s, int32_t kv_head, int64_t i,
                               void *scratch, int32_t *indices)
{
    return select_walk(job, s, kv_head, i, score_begin, score_nodes, scratch, indices);
}
