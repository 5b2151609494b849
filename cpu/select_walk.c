/* SPDX-License-Identifier: MIT */
/* The walk of the selection: candidates, forced ancestors, the best K.
 *
 * Start at the lowest level that has at most K nodes. At each level: drop what is neither forced nor eligible;
 * when more than K candidates remain, keep the forced ones and the best of the rest; their children are the
 * next candidates. Levels are those of the keys that the query sees: later keys must not matter. */

#include "select_walk.h"

#include <math.h>
#include <string.h>

/* By priority the query's own leaf, those before it, then the first ones; at most topk in all. */
static void forced_leaves(struct walk *walk)
{
    const clattn_select_desc *select = walk->job->select;
    int64_t current = (walk->seen - 1) / walk->leaf;
    if (!walk->job->problem->causal) return;
    int64_t last = MIN(MIN(select->forced_last, current + 1), walk->topk);
    int64_t others = MAX(current + 1 - select->forced_last, 0);
    walk->last_first = current + 1 - last;
    walk->last_end = current + 1;
    walk->first_end = MIN(MIN(select->forced_first, others), walk->topk - last);
}

/* The forced nodes of a level: those up to `head`, and from .. to. */
struct forced {
    int64_t head, from, to;
};

static struct forced forced_at(const struct walk *walk, int level)
{
    bool none = walk->last_first >= walk->last_end;
    return (struct forced){(walk->first_end - 1) >> (level - 1),
                           none ? INT64_MAX : walk->last_first >> (level - 1),
                           (walk->last_end - 1) >> (level - 1)};
}

static bool is_forced(const struct forced *forced, int64_t node)
{
    return (node <= forced->head) | ((node >= forced->from) & (node <= forced->to));
}

/* Nodes below this one are eligible when they are not forced. */
static int64_t eligible_end(const struct walk *walk, int level)
{
    return walk->job->problem->causal ? walk->seen / ((int64_t)walk->leaf << (level - 1)) : INT64_MAX;
}

struct walk_children walk_children(const struct walk *walk, int level)
{
    int64_t kv_len = walk->sequence->kv_len;
    bool own_mean = walk->job->select->selector == CLATTN_SELECT_FLAT_MEAN;
    if (level == 1 && !own_mean) return (struct walk_children){true, walk->leaf, kv_len, 0};
    int child_level = own_mean ? level : level - 1;
    return (struct walk_children){false, own_mean ? 1 : 2, level_nodes(kv_len, walk->leaf, child_level),
                                  level_first(walk->room, walk->leaf, child_level)};
}

/* ---- the best K: a heap with the worst of them on top ---- */

/* Does a rank below b? Lower score; equal scores, higher index. */
static bool is_worse(const double *score, int32_t a, int32_t b)
{
    return score[a] < score[b] || (score[a] == score[b] && a > b);
}

static void sift_down(const double *score, int32_t *heap, int32_t count, int32_t i)
{
    for (;;) {
        int32_t child = 2 * i + 1;
        if (child >= count) return;
        if (child + 1 < count && is_worse(score, heap[child + 1], heap[child])) child++;
        if (!is_worse(score, heap[child], heap[i])) return;
        int32_t worse = heap[child];
        heap[child] = heap[i];
        heap[i] = worse;
        i = child;
    }
}

/* Few scores: each counts those that rank above it. No branch depends on a score, and all loops have one
 * length. */
static void mark_few(const double *score, int32_t count, int32_t room, bool *keep)
{
    for (int32_t i = 0; i < count; i++) {
        int32_t above = 0;
        for (int32_t j = 0; j < count; j++)
            above += (score[j] > score[i]) | ((score[j] == score[i]) & (j < i));
        keep[i] = above < room;
    }
}

/* The best `room` > 0 of the scores, the worst of them on top. */
static void heap_fill(const double *score, int32_t count, int32_t room, int32_t *heap)
{
    for (int32_t i = 0; i < room; i++)
        heap[i] = i;
    for (int32_t i = room / 2 - 1; i >= 0; i--)
        sift_down(score, heap, room, i);
    for (int32_t i = room; i < count; i++)
        if (is_worse(score, heap[0], i)) {
            heap[0] = i;
            sift_down(score, heap, room, 0);
        }
}

/* Marks the best `room` of the scores. */
static void mark_best(const struct walk *walk, int32_t room)
{
    int32_t count = (int32_t)walk->scored_count;
    if (count <= RANK_MAX) {
        (walk->rank ? walk->rank : mark_few)(walk->score, count, room, walk->keep);
        return;
    }
    memset(walk->keep, 0, (size_t)count * sizeof *walk->keep);
    if (room == 0) return;
    heap_fill(walk->score, count, room, walk->heap);
    for (int32_t i = 0; i < room; i++)
        walk->keep[walk->heap[i]] = true;
}

/* Candidates that may be kept. */
static int32_t room_at(const struct walk *walk, int level, enum stage stage)
{
    const clattn_select_desc *select = walk->job->select;
    if (select->selector != CLATTN_SELECT_ROBUST) return walk->topk;
    if (stage == STAGE_PREFILTER) return MAX(select->prefilter, walk->topk);
    return level > 1 ? MAX(select->beam, walk->topk) : walk->topk;
}

int32_t walk_room(const struct walk *walk, int level)
{
    return room_at(walk, level, walk->stage) - (int32_t)(walk->count - walk->scored_count);
}

/* Finds the candidates that need a score, when not all may be kept. */
static bool must_choose(struct walk *walk, int level, enum stage stage)
{
    walk->stage = stage;
    if (walk->count <= room_at(walk, level, stage)) return false;
    struct forced forced = forced_at(walk, level);
    walk->scored_count = 0;
    for (int64_t i = 0; i < walk->count;
         i++) { /* without a branch, which nobody could predict: likewise below */
        walk->scored[walk->scored_count] = walk->node[i];
        walk->scored_count += !is_forced(&forced, walk->node[i]);
    }
    return true;
}

/* Among bound [count], the one that has `room` - 1 greater ones. */
static double bound_at(const struct walk *walk, int32_t room)
{
    heap_fill(walk->bound, (int32_t)walk->scored_count, room, walk->heap);
    return walk->bound[walk->heap[0]];
}

static void bounds_fill(struct walk *walk, double sign)
{
    for (int64_t i = 0; i < walk->scored_count; i++)
        walk->bound[i] = walk->score[i] + sign * (double)walk->error[i];
}

/* A node is dropped when `room` others are better even at their worst, and kept when fewer than that may be as
 * good at their best. So there are at most `room` that are kept, and at least that many are not dropped. */
void walk_decide(struct walk *walk, int level)
{
    int32_t room = walk_room(walk, level);
    double least = INFINITY, most = INFINITY;
    if (room > 0) {
        bounds_fill(walk, -1);
        least = bound_at(walk, room);
        bounds_fill(walk, 1);
        most = bound_at(walk, room + 1);
    }
    for (int64_t i = 0; i < walk->scored_count; i++) {
        double score = walk->score[i], error = (double)walk->error[i];
        bool dropped = room <= 0 || score + error < least, kept = !dropped && score - error > most;
        if (dropped || kept) walk->score[i] = kept ? INFINITY : -INFINITY;
        walk->open[i] = !dropped && !kept && error > 0;
    }
}

/* Keeps the forced candidates and the best of the rest, in ascending order. */
void walk_choose(struct walk *walk, int level)
{
    int64_t kept = 0, next = 0;
    if (!walk->chosen) mark_best(walk, walk_room(walk, level));
    walk->chosen = false;
    walk->scored[walk->scored_count] = -1; /* there is room for one more */
    walk->keep[walk->scored_count] = false;
    for (int64_t i = 0; i < walk->count; i++) {
        bool is_scored = walk->scored[next] == walk->node[i];
        walk->node[kept] = walk->node[i];
        kept += !is_scored | walk->keep[next];
        next += is_scored;
    }
    walk->count = kept;
}

/* ---- the walk ---- */

/* The existing children of the candidates, from the last to the first so that none is overwritten. */
static void descend(struct walk *walk, int64_t nodes)
{
    int64_t children = 2 * walk->count;
    for (int64_t p = walk->count - 1; p >= 0; p--) {
        walk->node[2 * p + 1] = 2 * walk->node[p] + 1;
        walk->node[2 * p] = 2 * walk->node[p];
    }
    while (children > 0 && walk->node[children - 1] >= nodes)
        children--;
    walk->count = children;
}

static void drop_ineligible(struct walk *walk, int level)
{
    struct forced forced = forced_at(walk, level);
    int64_t allowed = 0, end = eligible_end(walk, level);
    for (int64_t i = 0; i < walk->count; i++) {
        walk->node[allowed] = walk->node[i];
        allowed += (walk->node[i] < end) | is_forced(&forced, walk->node[i]);
    }
    walk->count = allowed;
}

static bool is_flat(clattn_selector selector)
{
    return selector == CLATTN_SELECT_FLAT_MEAN || selector == CLATTN_SELECT_FLAT_LSE;
}

static int64_t candidates_max(const struct select_job *job)
{
    int64_t leaves = ceil_div(job->problem->kv_len_max, job->select->leaf);
    int64_t kept = job->select->topk;
    if (job->select->selector == CLATTN_SELECT_ROBUST) kept = MAX(kept, job->select->beam);
    return MAX(is_flat(job->select->selector) ? leaves : 0, 2 * kept) + 1; /* one for walk_choose */
}

size_t select_walk_scratch(const struct select_job *job)
{
    size_t max = (size_t)candidates_max(job);
    size_t bytes = max * (2 * sizeof(int64_t) + 2 * sizeof(double) + sizeof(int32_t) + sizeof(float));
    bytes += max * 2 * sizeof(bool);
    return (bytes + 63) / 64 * 64;
}

void walk_begin(const struct select_job *job, int64_t s, int32_t kv_head, int64_t i, void *scratch,
                struct walk *walk)
{
    const struct sequence *sequence = &job->problem->sequences[s];
    bool bounds = job->pyramid && pyramid_has_bounds(job->pyramid);
    int64_t max = candidates_max(job);
    *walk = (struct walk){.job = job,
                          .sequence = sequence,
                          .means = job->pyramid ? pyramid_head(job->pyramid, s, kv_head) : NULL,
                          .bounds = bounds ? pyramid_bounds_head(job->pyramid, s, kv_head) : NULL,
                          .parts = bounds ? pyramid_parts_head(job->pyramid, s, kv_head) : NULL,
                          .row = i,
                          .seen = visible_keys(job->problem, sequence, i),
                          .room = job->pyramid ? pyramid_room(job->pyramid, s) : 0,
                          .kv_head = kv_head,
                          .leaf = job->select->leaf,
                          .topk = job->select->topk,
                          .score_scratch = (char *)scratch + select_walk_scratch(job),
                          .node = scratch};
    walk->scored = walk->node + max;
    walk->score = (double *)(walk->scored + max);
    walk->bound = walk->score + max;
    walk->heap = (int32_t *)(walk->bound + max);
    walk->error = (float *)(walk->heap + max);
    walk->keep = (bool *)(walk->error + max);
    walk->open = walk->keep + max;
    if (walk->seen == 0) return;
    forced_leaves(walk);
    walk->top = 1;
    while (!is_flat(job->select->selector) &&
           level_nodes(walk->seen, walk->leaf, walk->top) > room_at(walk, walk->top, STAGE_LEVEL))
        walk->top++;
}

bool walk_enter(struct walk *walk, int level)
{
    int64_t nodes = level_nodes(walk->seen, walk->leaf, level);
    if (level == walk->top) {
        walk->count = nodes;
        for (int64_t n = 0; n < nodes; n++)
            walk->node[n] = n;
    } else {
        descend(walk, nodes);
    }
    drop_ineligible(walk, level);
    return must_choose(walk, level, STAGE_LEVEL);
}

int32_t walk_end(const struct walk *walk, int32_t *indices)
{
    int32_t count = walk->top ? (int32_t)walk->count : 0;
    for (int32_t n = 0; n < walk->topk; n++)
        indices[n] = n < count ? (int32_t)walk->node[n] : -1;
    return count;
}

int32_t select_walk(const struct select_job *job, int64_t s, int32_t kv_head, int64_t i,
                    void (*begin)(const struct walk *walk), select_score_function *score_nodes, void *scratch,
                    int32_t *indices)
{
    struct walk walk;
    bool begun = false,
         prefilters = job->select->selector == CLATTN_SELECT_ROBUST && job->select->prefilter > 0;
    walk_begin(job, s, kv_head, i, scratch, &walk);
    for (int level = walk.top; level >= 1; level--) {
        walk_enter(&walk, level);
        for (int stage = prefilters && level == 1 ? STAGE_PREFILTER : STAGE_LEVEL; stage >= STAGE_LEVEL;
             stage--) {
            if (!must_choose(&walk, level, (enum stage)stage)) continue;
            if (!begun) begin(&walk);
            begun = true;
            score_nodes(&walk, level, walk.scored, walk.scored_count, walk.score);
            walk_choose(&walk, level);
        }
    }
    return walk_end(&walk, indices);
}
