/* SPDX-License-Identifier: MIT */
/* Selection, vectorised. Here the scores of one row, all heads of its group as lanes: for rows that stand
 * alone, for robust selection, and for scores that are linear in the queries. Most selectors take many rows at
 * once: select_batch_simd.h.
 *
 *   logit[c][h] = scale * q_h . child_c          for the children of a node: keys at level 1, else means
 *   score       = sum over h of  logsumexp_c | mean_c + variance_c / 2 | mean_c (see linear_scores)
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
    float *logits; /* [lane group][RUN_ROWS][lanes] */
    float *key;    /* packed keys: see dot_keys */
    float *means;  /* [RUN_ROWS][packed_stride(dim)] of nodes that do not follow each other */
};

static struct score_state score_state_of(const struct walk *walk)
{
    int64_t lanes = round_up(walk->job->problem->group, LANES_MAX);
    struct score_state state = {.q = walk->score_scratch};
    state.logits = state.q + lanes * walk->job->problem->dim;
    state.key = state.logits + lanes * RUN_ROWS;
    state.means = state.key + CHUNK_ROWS_MAX * packed_stride(walk->job->problem->dim);
    return state;
}

static size_t score_bytes(const struct select_job *job)
{
    int64_t lanes = round_up(job->problem->group, LANES_MAX), dim = job->problem->dim;
    int64_t packed = (CHUNK_ROWS_MAX + RUN_ROWS) * packed_stride((int32_t)dim);
    return (size_t)(lanes * (dim + RUN_ROWS) + packed) * sizeof(float);
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

/* When a greatest logit is infinite, its head counts as that, unless there is also a NaN. */
static double lse_infinite(const float *most, const float *sum, int64_t heads)
{
    double total = 0;
    for (int64_t h = 0; h < heads; h++)
        total += isinf(most[h]) && !isnan(sum[h]) ? (double)most[h] : (double)most[h] + log((double)sum[h]);
    return total;
}

/* logsumexp of each lane: result [lanes]; NaN when a logit is NaN. */
static void head_lse(const float *z, int64_t count, int vectors, float *result)
{
    int64_t lanes = vectors * WIDTH;
    if (count == 1) {
        memcpy(result, z, (size_t)lanes * sizeof *result);
        return;
    }
    for (int n = 0; n < vectors; n++, z += WIDTH) {
        float most[WIDTH], sum[WIDTH];
        vec row_max = vec_set(-INFINITY), row_sum = vec_zero();
        for (int64_t c = 0; c < count; c++)
            row_max = vec_max(vec_load(z + c * lanes), row_max);
        vec shift = vec_where_less(vec_set(-INFINITY), row_max, row_max, vec_zero());
        shift = vec_where_less(row_max, vec_set(INFINITY), shift, vec_zero());
        for (int64_t c = 0; c < count; c++)
            row_sum = vec_add(row_sum, vec_exp(vec_sub(vec_load(z + c * lanes), shift)));
        vec_store(most, row_max);
        vec_store(sum, row_sum);
        for (int lane = 0; lane < WIDTH; lane++)
            result[n * WIDTH + lane] =
                isinf(most[lane]) && !isnan(sum[lane]) ? most[lane] : most[lane] + logf(sum[lane]);
    }
}

/* Sum over the first `heads` lanes of logsumexp; NaN when a logit is NaN. */
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
    double total[2] = {0, 0}, product[2] = {1, 1}; /* two chains: the additions wait for each other */
    for (int64_t h = 0; h < heads; h++) {
        total[h & 1] += (double)most[h];
        product[h & 1] *= (double)sum[h];
    }
    if (!isfinite(total[0] + total[1])) return lse_infinite(most, sum, heads);
    return total[0] + total[1] + log(product[0] * product[1]);
}

/* Sum over the lanes of the mean plus half the population variance. */
static double mean_lanes(const float *z, int64_t count, int vectors, int64_t heads)
{
    float score[LANES_MAX];
    int64_t lanes = vectors * WIDTH;
    vec share = vec_set(1.0f / (float)count);
    for (int n = 0; n < vectors; n++, z += WIDTH) {
        vec mean = vec_zero(), variance = vec_zero();
        for (int64_t c = 0; c < count; c++)
            mean = vec_add(mean, vec_load(z + c * lanes));
        mean = vec_mul(mean, share);
        for (int64_t c = 0; c < count; c++) {
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
    case CLATTN_SELECT_PISA2:
        return mean_lanes(z, count, vectors, heads);
    default:
        return lse_lanes(z, count, vectors, heads);
    }
}

/* ---- runs of nodes ---- */

/* Nodes that follow each other, and their children. */
struct node_run {
    int64_t nodes, first, rows; /* number of nodes; first child, number of them */
    struct rows child;          /* those that lie in one piece with the first */
};

/* Keys from `first` on, at most `count`, as far as they lie in one piece. */
static struct rows keys_at(const struct walk *walk, int64_t first, int64_t count)
{
    const struct sequence *sequence = walk->sequence;
    const struct options *options = &walk->job->problem->options;
    const clattn_tensor *k = walk->job->k;
    const void *scale =
        options->k_scale ? sequence_row(options->k_scale, sequence, first, walk->kv_head) : NULL;
    return (struct rows){sequence_row(k, sequence, first, walk->kv_head),
                         k->dtype,
                         k->len_stride,
                         MIN(count, sequence_row_run(sequence, first)),
                         walk->job->problem->dim,
                         scale};
}

/* Where the logits of a run of leaves go: to those that are kept, if they can be. */
static float *run_place(const struct walk *walk, const struct node_run *run)
{
    struct kept_logits *kept = walk->job->kept;
    int32_t group = walk->job->problem->group;
    if (!kept || group > LANES_MAX || kept->count + run->nodes > kept->capacity)
        return score_state_of(walk).logits;
    float *place = kept->logits + kept->count * walk->leaf * lane_vectors(group) * WIDTH;
    for (int64_t n = 0; n < run->nodes; n++)
        kept->leaves[kept->count++] = run->first / walk->leaf + n;
    return place;
}

/* logits [row][lanes] of the run's children; meanwhile `next` is prefetched. */
static void run_logits(const struct walk *walk, const struct node_run *run, const struct rows *next,
                       float *logits)
{
    const struct problem *problem = walk->job->problem;
    struct score_state state = score_state_of(walk);
    struct rows child = run->child;
    for (int64_t at = 0; at < run->rows; at += child.count) {
        if (at > 0) child = keys_at(walk, run->first + at, run->rows - at);
        bool is_last = at + child.count == run->rows;
        dot_keys_at(state.q, problem->group, &child, problem->scale, logits, RUN_ROWS, at, state.key,
                    is_last ? next : NULL);
    }
}

/* Scores of the nodes of a run, which have `width` children each. */
static void score_run(const struct walk *walk, const struct node_run *run, int64_t width,
                      const struct rows *next, float *logits, double *score)
{
    const struct problem *problem = walk->job->problem;
    run_logits(walk, run, next, logits);
    for (int64_t n = 0; n < run->nodes; n++) {
        score[n] = 0;
        for (int64_t first = 0; first < problem->group; first += LANES_MAX) {
            int64_t heads = MIN(problem->group - first, LANES_MAX);
            int vectors = lane_vectors(heads);
            score[n] +=
                node_lanes(walk->job->select->selector, logits + first * RUN_ROWS + n * width * vectors * WIDTH,
                           MIN(width, run->rows - n * width), vectors, heads);
        }
        if (isnan(score[n])) score[n] = -INFINITY;
    }
}

/* The run of leaves that follow each other from nodes[n] on. */
static struct node_run run_at(const struct walk *walk, const struct walk_children *children,
                              const int64_t *nodes, int64_t n, int64_t count)
{
    struct node_run run = {.nodes = 1, .first = nodes[n] * children->width};
    while (n + run.nodes < count && run.nodes < RUN_ROWS / children->width &&
           nodes[n + run.nodes] == nodes[n] + run.nodes)
        run.nodes++;
    run.rows = MIN(run.nodes * children->width, children->rows - run.first);
    run.child = keys_at(walk, run.first, run.rows);
    return run;
}

/* Nodes whose children are means, at most RUN_ROWS of these. A dot product alone waits for itself: children
 * that do not follow each other are brought together first. */
static struct node_run means_at(const struct walk *walk, const struct walk_children *children,
                                const int64_t *nodes, int64_t count)
{
    int32_t dim = walk->job->problem->dim;
    int64_t stride = packed_stride(dim), width = children->width, base = children->base;
    struct node_run run = {.nodes = MIN(count, RUN_ROWS / width), .first = nodes[0] * width};
    int64_t last = nodes[run.nodes - 1];
    run.rows = (run.nodes - 1) * width + MIN(width, children->rows - last * width);
    const float *means = walk->means + (base + run.first) * dim;
    run.child = (struct rows){(const char *)means, CLATTN_FLOAT32, dim, run.rows, dim, NULL};
    if (last - nodes[0] + 1 == run.nodes) return run;
    float *to = score_state_of(walk).means;
    for (int64_t n = 0; n < run.nodes; n++)
        for (int64_t c = 0; c < MIN(width, run.rows - n * width); c++, to += stride)
            memcpy(to, walk->means + (base + nodes[n] * width + c) * dim, (size_t)dim * sizeof *to);
    run.child.data = (const char *)score_state_of(walk).means;
    run.child.stride = stride;
    return run;
}

static void score_nodes(const struct walk *walk, int level, const int64_t *nodes, int64_t count, double *score)
{
    struct walk_children children = walk_children(walk, level);
    struct node_run run;
    for (int64_t n = 0; n < count && !children.keys; n += run.nodes) {
        run = means_at(walk, &children, nodes + n, count - n);
        score_run(walk, &run, children.width, NULL, score_state_of(walk).logits, score + n);
    }
    if (!children.keys) return;
    struct node_run next = run_at(walk, &children, nodes, 0, count);
    for (int64_t n = 0; n < count; n += run.nodes) {
        run = next;
        bool more = n + run.nodes < count;
        if (more) next = run_at(walk, &children, nodes, n + run.nodes, count);
        score_run(walk, &run, children.width, more ? &next.child : NULL, run_place(walk, &run), score + n);
    }
}

/* ---- scores that are linear in the queries ----
 *
 * The sum over heads of the mean over the children's logits is scale * (sum of q_h) . (the node's own mean):
 * one product a node, and no key is read. */

static bool is_linear(clattn_selector selector)
{
    return selector == CLATTN_SELECT_PISA1 || selector == CLATTN_SELECT_FLAT_MEAN;
}

/* sum [dim]: of the queries of one row's group. */
static void query_sum(const struct select_job *job, const struct sequence *sequence, int32_t kv_head,
                      int64_t row, float *sum)
{
    const struct problem *problem = job->problem;
    float values[256];
    memset(sum, 0, (size_t)problem->dim * sizeof *sum);
    for (int32_t h = 0; h < problem->group; h++) {
        panel_to_float(tensor_row(job->q, sequence->batch, sequence->q_row + row, kv_head * problem->group + h),
                       job->q->dtype, 0, 1, problem->dim, values, 0);
        for (int32_t d = 0; d < problem->dim; d++)
            sum[d] += values[d];
    }
}

static void linear_begin(const struct walk *walk)
{
    query_sum(walk->job, walk->sequence, walk->kv_head, walk->row, score_state_of(walk).q);
}

static float linear_dot(const float *q, const float *mean, int32_t dim)
{
    float part[WIDTH];
    vec sum = vec_zero();
    int32_t d = 0;
    for (; d + WIDTH <= dim; d += WIDTH)
        sum = vec_fma(vec_load(q + d), vec_load(mean + d), sum);
    vec_store(part, sum);
    UNROLL for (int half = WIDTH / 2; half > 0; half /= 2)
    {
        UNROLL for (int n = 0; n < half; n++) part[n] += part[n + half];
    }
    for (; d < dim; d++)
        part[0] += q[d] * mean[d];
    return part[0];
}

static void linear_scores(const struct walk *walk, int level, const int64_t *nodes, int64_t count,
                          double *score)
{
    const struct problem *problem = walk->job->problem;
    const float *q = score_state_of(walk).q;
    const float *means = walk->means + level_first(walk->room, walk->leaf, level) * problem->dim;
    for (int64_t n = 0; n < count; n++) {
        score[n] =
            (double)problem->scale * (double)linear_dot(q, means + nodes[n] * problem->dim, problem->dim);
        if (isnan(score[n])) score[n] = -INFINITY;
    }
}

#include "select_levels_simd.h"
#include "select_robust_simd.h"

/* ---- rows one after the other, or many at once ---- */

/* A single row that keeps its logits has nothing to share. */
static bool in_batches(const struct select_job *job)
{
    return !job->kept && job->select->selector != CLATTN_SELECT_ROBUST &&
           job->select->selector != CLATTN_SELECT_PISA1;
}

static size_t select_scratch_simd(const struct select_job *job, int32_t rows)
{
    struct batch batch = {0};
    size_t row = select_walk_scratch(job) + score_bytes(job) + robust_bytes(job);
    return in_batches(job) ? MAX(row, batch_layout(job, rows, NULL, &batch)) : row;
}

static int32_t select_rows_max_simd(const struct select_job *job)
{
    return in_batches(job) ? batch_rows(job) : 16;
}

static void select_begin(const struct walk *walk)
{
    if (is_linear(walk->job->select->selector)) {
        linear_begin(walk);
        return;
    }
    score_begin(walk);
    if (walk->job->select->selector == CLATTN_SELECT_ROBUST) robust_begin(walk);
}

static void select_rows_simd(const struct select_job *job, int64_t s, int32_t kv_head, int64_t i, int32_t rows,
                             void *scratch, const struct select_lists *lists)
{
    clattn_selector selector = job->select->selector;
    select_score_function *score = selector == CLATTN_SELECT_ROBUST ? robust_scores
                                   : is_linear(selector)            ? linear_scores
                                                                    : score_nodes;
    if (in_batches(job)) {
        select_batch(job, s, kv_head, i, rows, scratch, lists);
        return;
    }
    for (int32_t n = 0; n < rows; n++)
        lists->counts[n * lists->count_step] = select_walk(job, s, kv_head, i + n, select_begin, score, scratch,
                                                           lists->indices + n * lists->index_step);
}
