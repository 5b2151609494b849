/* SPDX-License-Identifier: MIT */
/* Scores of robust selection, reference: double, one node and head at a time.
 *
 *   bound(n) = sum_d max(scale q_d min_d, scale q_d max_d),   half(n) = (scale q . mean_n + bound(n)) / 2
 *
 *   inner levels   LSE over the children's means, bound, (LSE + bound) / 2, or LSE over the children's half
 *   prefilter      LSE over the parts' half
 *   level 1        LSE over the keys
 *   vote           sum over heads of the softmax over the scored candidates; else sum over heads */

#include "select_ref.h"

#include <math.h>

static double bound(const struct ref_walk *walk, int32_t g, const float *least, const float *most)
{
    const struct problem *problem = walk->job->problem;
    const clattn_tensor *q = walk->job->q;
    const void *query = tensor_row(q, walk->sequence->batch, walk->sequence->q_row + walk->row,
                                   walk->kv_head * problem->group + g);
    double sum = 0;
    for (int32_t d = 0; d < problem->dim; d++) {
        double x = (double)problem->scale * (double)load_element(query, q->dtype, d);
        sum += fmax(x * (double)least[d], x * (double)most[d]);
    }
    return sum;
}

static double node_bound(const struct ref_walk *walk, int32_t g, int level, int64_t node)
{
    int32_t dim = walk->job->problem->dim;
    const float *bounds = pyramid_bounds_head(walk->job->pyramid, walk->sequence_index, walk->kv_head);
    const float *own = bounds + (ref_level_first(walk, level) + node) * 2 * dim;
    return bound(walk, g, own, own + dim);
}

static double node_mean(const struct ref_walk *walk, int32_t g, int level, int64_t node)
{
    int64_t row = ref_level_first(walk, level) + node;
    return ref_logit(walk, g, walk->means + row * walk->job->problem->dim, CLATTN_FLOAT32);
}

static double inner_score(const struct ref_walk *walk, int32_t g, int level, int64_t node)
{
    clattn_node_score kind = walk->job->select->score;
    int64_t existing = level_nodes(walk->sequence->kv_len, walk->leaf, level - 1),
            count = MIN(2, existing - 2 * node);
    double child[2];
    if (kind == CLATTN_SCORE_BOUND) return node_bound(walk, g, level, node);
    for (int64_t c = 0; c < count; c++) {
        child[c] = node_mean(walk, g, level - 1, 2 * node + c);
        if (kind == CLATTN_SCORE_AHEAD)
            child[c] = (child[c] + node_bound(walk, g, level - 1, 2 * node + c)) / 2;
    }
    double lse = ref_logsumexp(child, count);
    return kind == CLATTN_SCORE_BLEND ? (lse + node_bound(walk, g, level, node)) / 2 : lse;
}

static double parts_score(const struct ref_walk *walk, int32_t g, int64_t leaf)
{
    int32_t dim = walk->job->problem->dim, size = walk->leaf / LEAF_PARTS;
    const float *part = pyramid_parts_head(walk->job->pyramid, walk->sequence_index, walk->kv_head);
    double half[LEAF_PARTS];
    int64_t count = MIN(LEAF_PARTS, ceil_div(walk->sequence->kv_len - leaf * walk->leaf, size));
    if (walk->job->select->parts == 1) return (node_mean(walk, g, 1, leaf) + node_bound(walk, g, 1, leaf)) / 2;
    part += leaf * LEAF_PARTS * 3 * dim;
    for (int64_t p = 0; p < count; p++, part += 3 * dim)
        half[p] = (ref_logit(walk, g, part, CLATTN_FLOAT32) + bound(walk, g, part + dim, part + 2 * dim)) / 2;
    return ref_logsumexp(half, count);
}

static double leaf_score(const struct ref_walk *walk, int32_t g, int64_t leaf)
{
    double logit[128];
    int64_t first = leaf * walk->leaf, count = MIN(walk->leaf, walk->sequence->kv_len - first);
    for (int64_t c = 0; c < count; c++)
        logit[c] = ref_key_logit(walk, g, first + c);
    return ref_logsumexp(logit, count);
}

static double head_score(const struct ref_walk *walk, int32_t g, int level, bool prefilter, int64_t node)
{
    double score = prefilter   ? parts_score(walk, g, node)
                   : level > 1 ? inner_score(walk, g, level, node)
                               : leaf_score(walk, g, node);
    return isnan(score) ? -INFINITY : score;
}

/* Turns one head's scores into its votes, which sum to 1. */
static void vote(int64_t count, const bool *keep, double *score)
{
    double most = -INFINITY, sum = 0;
    for (int64_t c = 0; c < count; c++)
        if (!keep[c]) most = fmax(most, score[c]);
    for (int64_t c = 0; c < count; c++) {
        score[c] = keep[c] || most == -INFINITY ? 0
                   : most == INFINITY           ? score[c] == INFINITY
                                                : exp(score[c] - most);
        sum += score[c];
    }
    for (int64_t c = 0; c < count && sum > 0; c++)
        score[c] /= sum;
}

void robust_scores_ref(const struct ref_walk *walk, int level, bool prefilter, const int64_t *nodes,
                       int64_t count, const bool *keep, double *score)
{
    double head[2 * CLATTN_TOPK_MAX];
    for (int64_t c = 0; c < count; c++)
        score[c] = 0;
    for (int32_t g = 0; g < walk->job->problem->group; g++) {
        for (int64_t c = 0; c < count; c++)
            head[c] = keep[c] ? 0 : head_score(walk, g, level, prefilter, nodes[c]);
        if (walk->job->select->vote) vote(count, keep, head);
        for (int64_t c = 0; c < count; c++)
            score[c] += head[c];
    }
    for (int64_t c = 0; c < count; c++)
        if (isnan(score[c])) score[c] = -INFINITY;
}
