/* SPDX-License-Identifier: MIT */
/* Selection of many query rows at once: the scores of one level after the other. What a batch is, and how the
 * levels differ, is said in select_batch_simd.h. Included by select_simd.h. */

#include "select_batch_simd.h"
#include "select_sums_simd.h"

/* NaN ranks as -infinity. */
static void scores_rank_nan(struct walk *walk)
{
    for (int64_t n = 0; n < walk->scored_count; n++)
        if (isnan(walk->score[n])) walk->score[n] = -INFINITY;
}

/* ---- inner levels: one row's nodes, two children each ---- */

enum { PAIRS_MAX = RUN_ROWS / 2 }; /* nodes that are scored at once */

/* Adds one vector's part to the scores of at most PAIRS_MAX nodes; z [2 * count][WIDTH]. Of `children` nodes
 * below, the last one may be alone. */
static void pairs_add_scores(clattn_selector selector, const int64_t *nodes, int64_t count, int64_t children,
                             const float *z, int64_t heads, double *score)
{
    int64_t full = count;
    if (2 * nodes[count - 1] + 1 == children) full--;
    for (int64_t n = 0; n < full && selector == CLATTN_SELECT_PISA2; n++)
        score[n] += vector_score(selector, z + 2 * n * WIDTH, 2, heads);
    for (int64_t n = 0; n < full && selector != CLATTN_SELECT_PISA2; n += DOUBLES)
        pairs_add(z + 2 * n * WIDTH, MIN(DOUBLES, full - n), heads, score + n);
    if (full < count) score[full] += vector_score(selector, z + 2 * full * WIDTH, 1, heads);
}

/* Scores of nodes, in ascending order, for the row of `walk`. */
static void score_pairs(const struct batch *batch, const struct walk *walk,
                        const struct walk_children *children, const int64_t *nodes, int64_t all, double *score)
{
    const struct problem *problem = batch->job->problem;
    clattn_selector selector = batch->job->select->selector;
    const float *q = row_need(batch, (int32_t)(walk - batch->walk)), *pair[PAIRS_MAX];
    float scale = score_scale(selector, problem->scale);
    for (int64_t first = 0; first < all; first += PAIRS_MAX) {
        int64_t count = MIN(PAIRS_MAX, all - first);
        for (int64_t n = 0; n < count; n++) {
            pair[n] = walk->means + (children->base + 2 * nodes[first + n]) * problem->dim;
            score[first + n] = 0;
        }
        for (int v = 0, vectors; v < batch->vectors; v += vectors) {
            const float *query[2] = {q + v * problem->dim * WIDTH, q + (v + 1) * problem->dim * WIDTH};
            vectors = MIN(2, batch->vectors - v);
            dot_pairs(query, vectors, problem->dim, pair, count, scale, batch->logits, RUN_ROWS);
            for (int u = 0; u < vectors; u++)
                pairs_add_scores(selector, nodes + first, count, children->rows,
                                 batch->logits + u * RUN_ROWS * WIDTH,
                                 MIN(WIDTH, problem->group - (v + u) * WIDTH), score + first);
        }
    }
}

#include "select_rough_levels_simd.h"

/* Keeps the best nodes of a row at an inner level. */
static void row_choose(struct batch *batch, struct walk *walk, const struct walk_children *children, int level)
{
    if (!rough_pairs_score(batch, walk, children, level))
        score_pairs(batch, walk, children, walk->scored, walk->scored_count, walk->score);
    scores_rank_nan(walk);
    walk_choose(walk, level);
}

/* Goes to `level` and brings the means nearer that will be scored there, unless all of them stay near. */
static void row_enter(const struct batch *batch, struct walk *walk, const struct walk_children *children,
                      int level)
{
    enum { NEAR_BYTES = 1 << 18 };
    int64_t pair = 2 * batch->job->problem->dim, line = LINE / (int64_t)sizeof(float);
    if (level > walk->top || !walk_enter(walk, level)) walk->scored_count = 0;
    if (rough_prefetch(batch, walk, level)) return;
    if (level == 1 || children->rows * pair / 2 * (int64_t)sizeof(float) <= NEAR_BYTES) return;
    for (int64_t n = 0; n < walk->scored_count; n++) {
        const float *means = walk->means + children->base * pair / 2 + walk->scored[n] * pair;
        for (int64_t d = 0; d < pair; d += line)
            prefetch_line(means + d);
    }
}

/* Takes the rows down to level 1, a few side by side: while one is scored, the means of the others arrive, and
 * all their queries stay near. Meanwhile those of the rows after these arrive, too. */
static void batch_inner_levels(struct batch *batch, int top)
{
    enum { LEVELS_MAX = 64 };
    struct walk_children children[LEVELS_MAX + 1];
    for (int level = top; level >= 1; level--)
        children[level] = walk_children(batch->walk, level);
    rough_means(batch, top);
    for (int32_t first = 0; first < batch->rows; first += SIDE_ROWS) {
        int32_t end = MIN(first + SIDE_ROWS, batch->rows);
        for (int32_t r = first; r < end; r++) {
            if (top == 1) prefetch_queries(batch, r + 1, 0, 1);
            if (!is_flat_mean(batch->job)) row_begin(batch, r);
            row_enter(batch, &batch->walk[r], &children[top], top);
        }
        for (int level = top; level > 1; level--)
            for (int32_t r = first; r < end; r++) {
                struct walk *walk = &batch->walk[r];
                prefetch_queries(batch, r + SIDE_ROWS, top - level, top - 1);
                if (walk->scored_count) row_choose(batch, walk, &children[level], level);
                row_enter(batch, walk, &children[level - 1], level - 1);
            }
    }
}

/* ---- level 1: leaf by leaf ---- */

/* Heads of `count` rows side by side in the lanes of `joined`; returns the vectors. */
static int join_rows(const struct batch *batch, const struct visit *visit, int64_t count)
{
    int64_t dim = batch->job->problem->dim, group = batch->job->problem->group, lane = 0;
    int64_t vectors = ceil_div(count * group, WIDTH);
    for (int64_t m = 0; m < count; m++) {
        const float *q = row_queries(batch, visit[m].row);
        if (batch->rough) row_pack(batch, visit[m].row);
        for (int64_t h = 0; h < group; h++, lane++) {
            const float *from = q + h / WIDTH * dim * WIDTH + h % WIDTH;
            float *to = batch->joined + lane / WIDTH * dim * WIDTH + lane % WIDTH;
            for (int64_t d = 0; d < dim; d++)
                to[d * WIDTH] = from[d * WIDTH];
        }
    }
    for (; lane < vectors * WIDTH; lane++)
        for (int64_t d = 0; d < dim; d++)
            batch->joined[lane / WIDTH * dim * WIDTH + lane % WIDTH + d * WIDTH] = 0;
    return (int)vectors;
}

/* Scores of rows that share the lanes. */
static void joined_scores(const struct batch *batch, const struct visit *visit, int64_t count, int64_t keys)
{
    clattn_selector selector = batch->job->select->selector;
    int64_t group = batch->job->problem->group;
    struct lane_sums sums;
    for (int v = 0; v < ceil_div(count * group, WIDTH); v++) {
        vec most, sum;
        vector_sums(selector, batch->logits + v * RUN_ROWS * WIDTH, keys, &most, &sum);
        vec_store(sums.most + v * WIDTH, most);
        vec_store(sums.sum + v * WIDTH, sum);
    }
    for (int64_t m = 0; m < count; m++) {
        double total = 0, product = 1;
        for (int64_t h = m * group; h < (m + 1) * group; h++) {
            total += (double)sums.most[h];
            product *= (double)sums.sum[h];
        }
        *visit_score(batch, &visit[m]) =
            selector == CLATTN_SELECT_PISA2
                ? total
                : heads_score(total, product, batch->logits, RUN_ROWS, keys, m * group, group);
    }
}

/* A leaf, and what is prefetched meanwhile. */
struct leaf_pass {
    const struct batch *batch;
    struct float_rows key;
    int64_t keys;
    struct line_walk ahead;
    int64_t passes; /* over the leaf that remain */
};

static void leaf_dots(struct leaf_pass *leaf, const float *const *q, int vectors)
{
    const struct batch *batch = leaf->batch;
    const struct problem *problem = batch->job->problem;
    dot_vectors(q, vectors, problem->dim, leaf->key.data, leaf->key.stride, leaf->keys,
                score_scale(batch->job->select->selector, problem->scale), batch->logits, RUN_ROWS,
                &leaf->ahead, leaf->passes--);
}

/* Rows with vectors of their own: all these vectors, a few at a time. */
static void score_leaf_vectors(struct leaf_pass *leaf, const struct visit *visit, int64_t visits)
{
    const struct batch *batch = leaf->batch;
    int64_t all = visits * batch->vectors, size = (int64_t)batch->job->problem->dim * WIDTH;
    leaf->passes = ceil_div(all, VECTORS_MAX);
    for (int64_t n = 0, vectors; n < all; n += vectors) {
        const float *q[VECTORS_MAX];
        vectors = ceil_div(all - n, leaf->passes);
        for (int64_t v = 0; v < vectors; v++)
            q[v] = vector_queries(batch, visit[(n + v) / batch->vectors].row,
                                  (int32_t)((n + v) % batch->vectors), batch->joined + v * size);
        leaf_dots(leaf, q, (int)vectors);
        for (int64_t v = 0; v < vectors; v++) {
            const struct visit *own = &visit[(n + v) / batch->vectors];
            int64_t first = (n + v) % batch->vectors * WIDTH;
            double *score = visit_score(batch, own);
            *score = (first ? *score : 0) + vector_score(batch->job->select->selector,
                                                         batch->logits + v * RUN_ROWS * WIDTH, leaf->keys,
                                                         MIN(WIDTH, batch->job->problem->group - first));
        }
    }
}

/* Keys of a leaf that lie in one piece with its first. */
static struct rows leaf_piece(const struct batch *batch, const struct walk_children *children, int64_t leaf)
{
    int64_t first = leaf * children->width;
    return keys_at(batch->walk, first, MIN(children->width, children->rows - first));
}

/* All keys of a leaf as float32. */
static struct float_rows leaf_keys(const struct batch *batch, const struct walk_children *children,
                                   int64_t leaf, int64_t count)
{
    struct rows keys = leaf_piece(batch, children, leaf);
    int64_t stride = packed_stride(keys.dim);
    if (keys.count == count && !keys.scale)
        return key_rows(keys.data, keys.dtype, keys.stride, count, keys.dim, batch->leaf);
    for (int64_t at = 0; at < count; at += keys.count) {
        if (at > 0) keys = keys_at(batch->walk, leaf * children->width + at, count - at);
        rows_pack(keys.data, keys.dtype, keys.stride, keys.count, keys.dim, batch->leaf + at * stride);
        if (keys.scale) panel_scale(keys.scale, keys.count, keys.dim, batch->leaf + at * stride, stride);
    }
    return (struct float_rows){batch->leaf, stride};
}

/* All visits of a leaf: see leaf_function. */
static void score_leaf(const struct batch *batch, const struct walk_children *children,
                       const struct visit *visit, int64_t visits, int64_t next, int64_t after)
{
    (void)after;
    struct leaf_pass leaf = {.batch = batch};
    leaf.keys = MIN(children->width, children->rows - visit->node * children->width);
    leaf.key = leaf_keys(batch, children, visit->node, leaf.keys);
    int64_t together = batch->together, count;
    if (next >= 0) {
        struct rows ahead = leaf_piece(batch, children, next);
        leaf.ahead = line_walk_of(&ahead);
    }
    if (together == 1) {
        score_leaf_vectors(&leaf, visit, visits);
        return;
    }
    leaf.passes = ceil_div(visits, together);
    for (; visits > 0; visit += count, visits -= count) {
        count = MIN(together, visits);
        int64_t size = (int64_t)batch->job->problem->dim * WIDTH;
        const float *q[VECTORS_MAX] = {batch->joined, batch->joined + size, batch->joined + 2 * size};
        leaf_dots(&leaf, q, join_rows(batch, visit, count));
        joined_scores(batch, visit, count, leaf.keys);
    }
}

#include "select_rough_simd.h"

/* visits in ascending order of their nodes, rows in order within a node. */
static void visits_sort(struct batch *batch, int64_t count, int64_t nodes)
{
    enum { BITS = 11 };
    for (int shift = 0; (nodes - 1) >> shift > 0; shift += BITS) {
        int32_t first[(1 << BITS) + 1] = {0};
        for (int64_t n = 0; n < count; n++)
            first[(batch->visits[n].node >> shift & ((1 << BITS) - 1)) + 1]++;
        for (int i = 0; i < 1 << BITS; i++)
            first[i + 1] += first[i];
        for (int64_t n = 0; n < count; n++)
            batch->unsorted[first[batch->visits[n].node >> shift & ((1 << BITS) - 1)]++] = batch->visits[n];
        struct visit *sorted = batch->unsorted;
        batch->unsorted = batch->visits;
        batch->visits = sorted;
    }
}

/* Scores all visits of a leaf; meanwhile the leaf `next` is prefetched (-1: none). `after` visits of other
 * leaves follow. */
typedef void leaf_function(const struct batch *batch, const struct walk_children *children,
                           const struct visit *visit, int64_t visits, int64_t next, int64_t after);

/* All open entries. */
static void score_visits(struct batch *batch, const struct walk_children *children, leaf_function *leaf)
{
    int64_t count = 0, n = 0, end;
    for (int32_t r = 0; r < batch->rows; r++)
        for (int64_t i = 0; i < batch->walk[r].scored_count; i++) {
            batch->visits[count] = (struct visit){(int32_t)batch->walk[r].scored[i], r, (int32_t)i};
            count += batch->walk[r].open[i];
        }
    visits_sort(batch, count, ceil_div(children->rows, children->width));
    for (; n < count; n = end) {
        for (end = n + 1; end < count && batch->visits[end].node == batch->visits[n].node;)
            end++;
        leaf(batch, children, batch->visits + n, end - n, end < count ? batch->visits[end].node : -1,
             count - end);
    }
}

/* A row's next open entry from `i` on, and its node, or more than any. */
static int64_t next_open(const struct walk *walk, int64_t *i)
{
    while (*i < walk->scored_count && !walk->open[*i])
        ++*i;
    return *i < walk->scored_count ? walk->scored[*i] : INT64_MAX;
}

/* Flat: nearly all rows visit nearly all leaves; nothing is sorted. */
static void score_all_leaves(struct batch *batch, const struct walk_children *children, leaf_function *leaf)
{
    int64_t next = INT64_MAX;
    for (int32_t r = 0; r < batch->rows; r++) {
        batch->cursor[r] = 0;
        next = MIN(next, next_open(&batch->walk[r], &batch->cursor[r]));
    }
    for (int64_t node = next; node < INT64_MAX; node = next) {
        int64_t visits = 0;
        next = INT64_MAX;
        for (int32_t r = 0; r < batch->rows; r++) {
            int64_t *i = &batch->cursor[r], own = next_open(&batch->walk[r], i);
            if (own == node) {
                batch->visits[visits++] = (struct visit){(int32_t)node, r, (int32_t)(*i)++};
                own = next_open(&batch->walk[r], i);
            }
            next = MIN(next, own);
        }
        leaf(batch, children, batch->visits, visits, next < INT64_MAX ? next : -1, 0);
    }
}

/* Flat mean: logits [lane group of rows][node of a run][lanes]; what a row does not score is passed over. */
static void score_means(struct batch *batch, const struct walk_children *children)
{
    const struct problem *problem = batch->job->problem;
    memset(batch->cursor, 0, (size_t)batch->rows * sizeof *batch->cursor);
    for (int64_t first = 0; first < children->rows; first += RUN_ROWS) {
        const float *data = batch->walk->means + (children->base + first) * problem->dim;
        int64_t count = MIN(RUN_ROWS, children->rows - first);
        struct rows means = {(const char *)data, CLATTN_FLOAT32, problem->dim, count, problem->dim, NULL};
        dot_keys(batch->q, batch->rows, &means, problem->scale, batch->logits, RUN_ROWS, batch->leaf, NULL);
        for (int32_t r = 0; r < batch->rows; r++) {
            struct walk *walk = &batch->walk[r];
            int32_t group = r / LANES_MAX * LANES_MAX;
            int64_t lanes = lane_vectors(batch->rows - group) * WIDTH, i = batch->cursor[r];
            const float *logit = batch->logits + group * RUN_ROWS + (r - group);
            for (; i < walk->scored_count && walk->scored[i] < first + count; i++)
                walk->score[i] = (double)logit[(walk->scored[i] - first) * lanes];
            batch->cursor[r] = i;
        }
    }
}

static void score_open(struct batch *batch, const struct walk_children *children, leaf_function *leaf)
{
    if (batch->job->select->selector == CLATTN_SELECT_FLAT_LSE)
        score_all_leaves(batch, children, leaf);
    else
        score_visits(batch, children, leaf);
    for (int32_t r = 0; r < batch->rows; r++)
        scores_rank_nan(&batch->walk[r]);
}

static void batch_leaf_level(struct batch *batch)
{
    struct walk_children children = walk_children(batch->walk, 1);
    for (int32_t r = 0; r < batch->rows; r++)
        memset(batch->walk[r].open, true, (size_t)batch->walk[r].scored_count * sizeof(bool));
#if defined(SIMD_WORD_DOTS)
    if (batch->rough && !rough_fails(batch)) {
        score_open(batch, &children, rough_leaf);
        for (int32_t r = 0; r < batch->rows; r++)
            if (batch->walk[r].scored_count) rough_decide(&batch->walk[r], 1);
        if (!batch->flat && rough_ask_first(batch)) {
            score_open(batch, &children, score_leaf);
            rough_decide_again(batch);
        }
    }
#endif
    if (is_flat_mean(batch->job))
        score_means(batch, &children);
    else
        score_open(batch, &children, score_leaf);
    for (int32_t r = 0; r < batch->rows; r++) {
        scores_rank_nan(&batch->walk[r]);
        if (batch->walk[r].scored_count) walk_choose(&batch->walk[r], 1);
    }
}

/* ---- the batch ---- */

static void select_batch(const struct select_job *job, int64_t s, int32_t kv_head, int64_t i, int32_t rows,
                         void *scratch, const struct select_lists *lists)
{
    struct batch batch = {
        .job = job, .sequence = &job->problem->sequences[s], .row = i, .kv_head = kv_head, .rows = rows};
    int top = 0;
    batch_layout(job, rows, scratch, &batch);
    for (int32_t r = 0; r < rows; r++) {
        walk_begin(job, s, kv_head, i + r, batch.walk_memory + r * batch.walk_bytes, &batch.walk[r]);
        batch.walk[r].rank = SIMD_RANK;
        top = MAX(top, batch.walk[r].top);
    }
    if (is_flat_mean(job)) batch_query_sums(&batch);
    if (top) {
        batch_inner_levels(&batch, top);
        batch_leaf_level(&batch);
    }
    for (int32_t r = 0; r < rows; r++)
        lists->counts[r * lists->count_step] = walk_end(&batch.walk[r], lists->indices + r * lists->index_step);
}
