/* SPDX-License-Identifier: MIT
 *
 * How clearly a selection was decided: one query's walk down the pyramid in double precision, written from the
 * definition and only used where two backends disagree. Where the smallest difference between the worst kept
 * and the best dropped node is below the rounding error of such scores, either answer is right. */
#include "config.h"

#include "check.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

struct query_place check_problem_place(const struct check_problem *problem, int64_t b, int64_t i)
{
    const struct check_case *s = problem->shape;
    struct query_place place = {i + s->kv_len - s->q_len, s->kv_len, b * s->kv_len};
    for (int32_t n = 0; n < s->sequences; n++) {
        if (i < s->cu_q[n] || i >= s->cu_q[n + 1]) continue;
        place.keys = s->cu_k[n + 1] - s->cu_k[n];
        place.key_base = s->cu_k[n];
        place.position = i - s->cu_q[n] + place.keys - (s->cu_q[n + 1] - s->cu_q[n]);
    }
    return place;
}

struct walk {
    const struct check_problem *problem;
    struct query_place place;
    int64_t first_query; /* row of q of the group's first head */
    int64_t kv_head;
    double **means; /* [level][node][dim]; level 0 is the keys */
    int64_t *nodes; /* [level] */
    int levels;     /* the top level */
    double scale, scale_error;
};

struct scored {
    int64_t node;
    double score;
    bool forced;
};

static const float *key_row(const struct walk *walk, int64_t key)
{
    const struct check_case *s = walk->problem->shape;
    return walk->problem->k + ((walk->place.key_base + key) * s->kv_heads + walk->kv_head) * s->dim;
}

static int64_t children(const struct walk *walk, int level)
{
    return level == 1 ? walk->problem->shape->leaf : 2;
}

static bool build_means(struct walk *walk)
{
    const int32_t dim = walk->problem->shape->dim;
    int64_t below = walk->place.keys;
    for (int level = 0; level < 64; level++) {
        int64_t fan = level ? children(walk, level) : 1, count = level ? (below + fan - 1) / fan : below;
        double *means = calloc((size_t)(count * dim), sizeof *means);
        if (!means) return false;
        walk->means[level] = means;
        walk->nodes[level] = count;
        walk->levels = level;
        for (int64_t c = 0; c < below; c++)
            for (int32_t d = 0; d < dim; d++)
                means[c / fan * dim + d] += level ? walk->means[level - 1][c * dim + d] : key_row(walk, c)[d];
        for (int64_t i = 0; level && i < count; i++) {
            int64_t members = (i + 1) * fan > below ? below - i * fan : fan;
            for (int32_t d = 0; d < dim; d++)
                means[i * dim + d] /= (double)members;
        }
        below = count;
        if (level > 0 && count == 1) return true;
    }
    return false;
}

/* The score of one head for the children begin..end of a level; raises the error bound. */
static double head_score(struct walk *walk, const float *q, int level, int64_t begin, int64_t end)
{
    const int32_t dim = walk->problem->shape->dim;
    double top = -INFINITY, sum = 0, mean = 0, square = 0, members = (double)(end - begin);
    double logits[128];
    for (int64_t c = begin; c < end; c++) {
        double dot = 0, spread = 0;
        for (int32_t d = 0; d < dim; d++) {
            double product = walk->scale * q[d] * walk->means[level][c * dim + d];
            dot += product;
            spread += fabs(product);
        }
        /* A float32 sum of dim products in any order. */
        walk->scale_error = fmax(walk->scale_error, (dim + 8) * (double)FLT_EPSILON * spread);
        logits[c - begin] = dot;
        top = fmax(top, dot);
        mean += dot / members;
    }
    for (int64_t c = 0; c < end - begin; c++) {
        sum += exp(logits[c] - top);
        square += (logits[c] - mean) * (logits[c] - mean) / members;
    }
    switch (walk->problem->shape->selector) {
    case CLATTN_SELECT_PISA1:
        return mean;
    case CLATTN_SELECT_PISA2:
        return mean + square / 2;
    default:
        return top + log(sum);
    }
}

static double node_score(struct walk *walk, int level, int64_t node)
{
    const struct check_case *s = walk->problem->shape;
    bool flat_mean = s->selector == CLATTN_SELECT_FLAT_MEAN;
    int64_t fan = flat_mean ? 1 : children(walk, level), below = flat_mean ? level : level - 1;
    int64_t begin = node * fan, end = begin + fan;
    double score = 0;
    if (end > walk->nodes[below]) end = walk->nodes[below];
    for (int32_t h = 0; h < s->q_heads / s->kv_heads; h++)
        score += head_score(walk, walk->problem->q + (walk->first_query + h) * s->dim, below, begin, end);
    return score;
}

/* Forced leaves, the default three, in the order in which they win a place. */
static int forced_leaves(const struct walk *walk, int64_t forced[3])
{
    const struct check_case *s = walk->problem->shape;
    int64_t current = walk->place.position / s->leaf, order[3] = {current, current - 1, 0};
    int count = 0;
    if (!s->causal) return 0;
    for (int i = 0; i < 3 && count < s->topk; i++)
        if (order[i] >= 0 && (i < 2 || current > 1)) forced[count++] = order[i];
    return count;
}

static int by_score(const void *a, const void *b)
{
    const struct scored *x = a, *y = b;
    if (x->forced != y->forced) return x->forced ? -1 : 1;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->node < y->node ? -1 : x->node > y->node;
}

/* Turns the nodes kept one level up (or, at the start, every node) into the kept ones of this level. */
static int64_t keep(struct walk *walk, int level, struct scored *list, int64_t count, struct select_gap *gap)
{
    const struct check_case *s = walk->problem->shape;
    int64_t forced[3] = {0}, kept = 0, span = (int64_t)s->leaf << (level - 1);
    int forced_count = forced_leaves(walk, forced);
    for (int64_t i = 0; i < count; i++) {
        bool is_forced = false;
        for (int f = 0; f < forced_count; f++)
            is_forced |= forced[f] >> (level - 1) == list[i].node;
        bool eligible = !s->causal || (list[i].node + 1) * span <= walk->place.position + 1;
        if (!is_forced && !eligible) continue;
        list[kept++] = (struct scored){list[i].node, 0, is_forced};
    }
    if (kept <= s->topk) return kept;
    walk->scale_error = 0;
    for (int64_t i = 0; i < kept; i++)
        if (!list[i].forced) list[i].score = node_score(walk, level, list[i].node);
    qsort(list, (size_t)kept, sizeof *list, by_score);
    if (!list[s->topk - 1].forced) {
        double group = s->q_heads / s->kv_heads, size = fabs(list[s->topk - 1].score);
        double difference = list[s->topk - 1].score - list[s->topk].score;
        /* Half the variance doubles the error of its logits, times their distance from the mean. */
        double error = group * walk->scale_error + 8 * (double)FLT_EPSILON * size;
        if (s->selector == CLATTN_SELECT_PISA2) error *= 1 + sqrt(2 * size);
        if (difference - 2 * error < gap->gap - gap->error) *gap = (struct select_gap){difference, 2 * error};
    }
    return s->topk;
}

static void descend(struct walk *walk, struct scored *list, struct select_gap *gap)
{
    const struct check_case *s = walk->problem->shape;
    bool flat = s->selector == CLATTN_SELECT_FLAT_MEAN || s->selector == CLATTN_SELECT_FLAT_LSE;
    int level = 1;
    while (!flat && level < walk->levels && walk->nodes[level] > s->topk)
        level++;
    int64_t count = walk->nodes[level];
    for (int64_t i = 0; i < count; i++)
        list[i].node = i;
    for (count = keep(walk, level, list, count, gap); level > 1; count = keep(walk, level, list, count, gap)) {
        level--;
        for (int64_t i = count - 1; i >= 0; i--) {
            int64_t node = list[i].node;
            list[2 * i].node = 2 * node;
            list[2 * i + 1].node = 2 * node + 1;
        }
        /* The last node of a level may have one child only. */
        int64_t there = 0;
        for (int64_t i = 0; i < 2 * count; i++)
            if (list[i].node < walk->nodes[level]) list[there++].node = list[i].node;
        count = there;
    }
}

struct select_gap select_gap(const struct check_problem *problem, int64_t b, int64_t i, int64_t kv_head)
{
    const struct check_case *s = problem->shape;
    const int32_t group = s->q_heads / s->kv_heads;
    double *means[64] = {0};
    int64_t nodes[64];
    struct walk walk = {problem,
                        check_problem_place(problem, b, i),
                        (b * s->q_len + i) * s->q_heads + kv_head * group,
                        kv_head,
                        means,
                        nodes,
                        0,
                        1 / sqrt((double)s->dim),
                        0};
    struct select_gap gap = {INFINITY, 0};
    if (walk.place.keys < 1 || (s->causal && walk.place.position < 0)) return gap;
    bool built = build_means(&walk);
    struct scored *list = built ? calloc((size_t)(nodes[1] + 2 * s->topk), sizeof *list) : NULL;
    if (list) descend(&walk, list, &gap);
    free(list);
    for (int level = 0; level < 64; level++)
        free(means[level]);
    return gap;
}
