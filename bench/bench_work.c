/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "bench.h"

#include "program.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- neighborhoods ---- */

int64_t *bench_neighbors(const clattn_neighborhood_desc *desc, int64_t row, int64_t *count)
{
    int32_t first[3] = {0, 0, 0}, end[3] = {1, 1, 1}, step[3] = {1, 1, 1}, x[3] = {0, 0, 0};
    int64_t length[3] = {1, 1, 1}, most = 1, n = 0;
    for (int a = desc->axes - 1; a >= 0; a--) {
        length[a] = desc->length[a];
        x[a] = (int32_t)(row % length[a]);
        row /= length[a];
        step[a] = desc->dilation[a];
        most *= desc->window[a];
        clattn_neighborhood_keys(desc, a, x[a], &first[a], &end[a]);
    }
    int64_t *tokens = malloc((size_t)most * sizeof *tokens);
    for (int32_t i = first[0]; i < end[0] && tokens; i += step[0])
        for (int32_t j = first[1]; j < end[1]; j += step[1])
            for (int32_t k = first[2]; k < end[2]; k += step[2])
                tokens[n++] = (i * length[1] + j) * length[2] + k;
    *count = n;
    return tokens;
}

/* ---- pairs ---- */

/* Pairs of a query and a key that dense attention would have, of one head. */
static double visible_pairs(const struct bench_case *s)
{
    double all = (double)s->q_len * (double)s->kv_len;
    return s->causal ? all - 0.5 * (double)s->q_len * (double)(s->q_len - 1) : all;
}

/* Of all query heads together: what the lists have, cut off at each query. */
static double listed_pairs(const struct bench_problem *problem)
{
    const struct bench_case *s = problem->shape;
    const clattn_blocks_desc *list = &problem->list;
    if (!problem->indices) return visible_pairs(s) * s->q_heads;
    double pairs = 0;
    for (int64_t row = 0; row < s->q_len; row++) {
        int64_t keys = s->causal ? row + s->kv_len - s->q_len + 1 : s->kv_len;
        const int32_t *entry = problem->indices + row / list->q_block * list->heads * list->topk;
        for (int64_t n = 0; n < (int64_t)list->heads * list->topk; n++) {
            int64_t begin = (int64_t)entry[n] * list->block, end = begin + list->block;
            if (end > keys) end = keys;
            if (entry[n] >= 0 && end > begin) pairs += (double)(end - begin);
        }
    }
    return pairs * s->q_heads / list->heads;
}

/* Dot products of a flat selection: one a leaf before the query's own, or one a key; none where all leaves fit.
 */
static double flat_dots(const struct bench_case *s)
{
    double dots = 0;
    for (int64_t row = 0; row < s->q_len; row++) {
        int64_t position = row + s->kv_len - s->q_len;
        if (position / s->leaf < s->topk) continue;
        dots += (double)(s->selector == CLATTN_SELECT_FLAT_MEAN ? position / s->leaf : position + 1);
    }
    return dots * s->q_heads;
}

static void count_neighborhood(const struct bench_case *s, struct bench_work *work)
{
    clattn_neighborhood_analysis analysis = {.size = sizeof analysis};
    if (clattn_neighborhood_analyse(&s->neighborhood, &analysis) != CLATTN_SUCCESS) return;
    work->flops = 4.0 * s->dim * analysis.connections * s->q_heads;
    work->bound = analysis.bound_speedup;
    work->ideal = analysis.ideal_speedup;
}

struct bench_work bench_work_count(const struct bench_problem *problem)
{
    const struct bench_case *s = problem->shape;
    const double size = s->dtype == CLATTN_FLOAT32 ? 4 : 2;
    const double q = (double)s->q_len * s->q_heads * s->dim, k = (double)s->kv_len * s->kv_heads * s->dim;
    const double lse = (double)s->q_len * s->q_heads;
    struct bench_work work = {0};
    switch (s->operation) {
    case BENCH_PYRAMID: /* an addition a number; the means are twice the leaves' together */
        work.flops = k;
        work.bytes = k * size + 2 * k / s->leaf * 4;
        break;
    case BENCH_SELECT: /* a walk's work depends on the data: not counted */
        if (s->selector != CLATTN_SELECT_FLAT_MEAN && s->selector != CLATTN_SELECT_FLAT_LSE) break;
        work.flops = 2.0 * s->dim * flat_dots(s);
        work.bytes = q * size + (s->selector == CLATTN_SELECT_FLAT_MEAN ? k / s->leaf * 4 : k * size);
        break;
    case BENCH_FORWARD:
    case BENCH_NEIGHBORHOOD: /* q.k and p v, two operations a number each */
        work.dense_flops = 4.0 * s->dim * visible_pairs(s) * s->q_heads;
        work.bytes = (q + 2 * k) * size + (q + lse) * 4;
        if (s->operation == BENCH_FORWARD)
            work.flops = 4.0 * s->dim * listed_pairs(problem);
        else
            count_neighborhood(s, &work);
        break;
    case BENCH_DECODE: /* the listed keys and values alone: how many the walk reads depends on the data */
        work.dense_flops = 4.0 * s->dim * visible_pairs(s) * s->q_heads;
        work.flops = 4.0 * s->dim * listed_pairs(problem);
        work.bytes = (q + 2 * k * work.flops / work.dense_flops) * size + (q + lse) * 4;
        break;
    case BENCH_BACKWARD: /* q.k again, dout.v, and three sums */
        work.dense_flops = 10.0 * s->dim * visible_pairs(s) * s->q_heads;
        work.flops = 10.0 * s->dim * listed_pairs(problem);
        work.bytes = (q + 2 * k) * size + (2 * q + lse) * 4 + (q + 2 * k) * 4;
        break;
    }
    return work;
}

double bench_row_roofline(const struct bench_row *row)
{
    if (row->work.bytes <= 0 || row->fma_rate <= 0 || row->copy_rate <= 0 || row->timing.median <= 0)
        return NAN;
    return fmax(row->work.flops / row->fma_rate, row->work.bytes / row->copy_rate) / row->timing.median;
}

double bench_row_speedup(const struct bench_row *row)
{
    /* The fastest of both: other programs on the machine disturb these least. */
    if (row->dense_rate <= 0 || row->work.dense_flops <= 0 || row->timing.p5 <= 0) return NAN;
    return row->work.dense_flops / row->dense_rate / row->timing.p5;
}
