/* SPDX-License-Identifier: MIT */
/* Scores of robust selection where keys are infinite: the vectorised bound multiplies the part of the query
 * that is 0 by infinity, and the NaN that comes of it says nothing. Head by head in double, as the reference. */

#include "config.h"

#include "select_walk.h"

#include <math.h>

/* factor * (q.mean + bound), or one of them alone; mean or bounds NULL: without. bounds: minimum, maximum. */
static double row_logit(const struct walk *walk, int32_t head, const float *mean, const float *bounds)
{
    const struct problem *problem = walk->job->problem;
    const clattn_tensor *q = walk->job->q;
    const void *query = tensor_row(q, walk->sequence->batch, walk->sequence->q_row + walk->row,
                                   walk->kv_head * problem->group + head);
    double dot = 0, bound = 0;
    for (int32_t d = 0; d < problem->dim; d++) {
        double x = (double)problem->scale * (double)load_element(query, q->dtype, d);
        if (mean) dot += x * (double)mean[d];
        if (bounds) bound += fmax(x * (double)bounds[d], x * (double)bounds[problem->dim + d]);
    }
    return mean && bounds ? (dot + bound) / 2 : mean ? dot : bound;
}

static double logsumexp(const double *z, int64_t count)
{
    double most = -INFINITY, sum = 0;
    for (int64_t c = 0; c < count; c++)
        most = fmax(most, z[c]);
    for (int64_t c = 0; c < count; c++)
        sum += isinf(most) && !isnan(z[c]) ? 0 : exp(z[c] - most);
    return isinf(most) && !isnan(sum) ? most : most + log(sum);
}

double robust_score_exact(const struct walk *walk, int32_t head, int level, int64_t node)
{
    const struct select_job *job = walk->job;
    int64_t dim = job->problem->dim, kv_len = walk->sequence->kv_len, count = 0;
    clattn_node_score kind = job->select->score;
    double z[LEAF_PARTS];
    bool prefilter = walk->stage == STAGE_PREFILTER;
    int64_t own = level_first(walk->room, walk->leaf, level) + node;
    const float *own_bounds = walk->bounds + own * 2 * dim;
    if (prefilter && job->select->parts == 1) return row_logit(walk, head, walk->means + own * dim, own_bounds);
    if (prefilter) {
        const float *part = walk->parts + node * LEAF_PARTS * 3 * dim;
        for (; count < LEAF_PARTS && node * walk->leaf + count * walk->leaf / LEAF_PARTS < kv_len;
             part += 3 * dim)
            z[count++] = row_logit(walk, head, part, part + dim);
        return logsumexp(z, count);
    }
    if (kind == CLATTN_SCORE_BOUND) return row_logit(walk, head, NULL, own_bounds);
    int64_t below = level_first(walk->room, walk->leaf, level - 1),
            existing = level_nodes(kv_len, walk->leaf, level - 1);
    for (; count < 2 && 2 * node + count < existing; count++) {
        int64_t child = below + 2 * node + count;
        z[count] = row_logit(walk, head, walk->means + child * dim,
                             kind == CLATTN_SCORE_AHEAD ? walk->bounds + child * 2 * dim : NULL);
    }
    double lse = logsumexp(z, count);
    return kind == CLATTN_SCORE_BLEND ? (lse + row_logit(walk, head, NULL, own_bounds)) / 2 : lse;
}
