/* SPDX-License-Identifier: MIT */
/* Selection, reference: the rule as it is written, scores in double.
 *
 * Start at the lowest level that has at most K nodes. At each level: drop what is neither forced nor eligible;
 * when more than K candidates remain, keep the forced ones and the best of the rest; their children are the
 * next candidates. */

#include "select_ref.h"

#include <math.h>

/* Forced leaves by priority: the query's own, those before it, then the first ones. At most topk. */
static void forced_leaves(struct ref_walk *walk)
{
    const clattn_select_desc *select = walk->job->select;
    int64_t current = (walk->seen - 1) / walk->leaf;
    walk->forced_count = 0;
    if (!walk->job->problem->causal) return;
    for (int64_t i = current; i > current - select->forced_last && i >= 0; i--)
        if (walk->forced_count < walk->topk) walk->forced[walk->forced_count++] = i;
    for (int64_t i = 0; i < select->forced_first && i <= current; i++) {
        bool is_new = i <= current - select->forced_last;
        if (is_new && walk->forced_count < walk->topk) walk->forced[walk->forced_count++] = i;
    }
}

static bool is_forced(const struct ref_walk *walk, int level, int64_t node)
{
    for (int32_t i = 0; i < walk->forced_count; i++)
        if (walk->forced[i] >> (level - 1) == node) return true;
    return false;
}

/* Not causal: every node is eligible. Causal: its whole span lies at or before the query. */
static bool is_eligible(const struct ref_walk *walk, int level, int64_t node)
{
    int64_t span = (int64_t)walk->leaf << (level - 1);
    return !walk->job->problem->causal || (node + 1) * span <= walk->seen;
}

/* Score of the logits of a node's children for one head. */
static double head_score(clattn_selector selector, const double *logit, int64_t count)
{
    double most = -INFINITY, sum = 0, variance = 0;
    for (int64_t c = 0; c < count; c++) {
        if (isnan(logit[c])) return NAN;
        most = fmax(most, logit[c]);
        sum += logit[c];
    }
    double mean = sum / (double)count;
    if (selector == CLATTN_SELECT_PISA1 || selector == CLATTN_SELECT_FLAT_MEAN) return mean;
    if (selector == CLATTN_SELECT_PISA2) {
        for (int64_t c = 0; c < count; c++)
            variance += (logit[c] - mean) * (logit[c] - mean) / (double)count;
        return mean + variance / 2;
    }
    if (most == -INFINITY || most == INFINITY) return most;
    double total = 0;
    for (int64_t c = 0; c < count; c++)
        total += exp(logit[c] - most);
    return most + log(total);
}

double ref_logit(const struct ref_walk *walk, int32_t g, const void *row, clattn_dtype dtype)
{
    const struct problem *problem = walk->job->problem;
    const clattn_tensor *q = walk->job->q;
    const void *query = tensor_row(q, walk->sequence->batch, walk->sequence->q_row + walk->row,
                                   walk->kv_head * problem->group + g);
    double dot = 0;
    for (int32_t d = 0; d < problem->dim; d++)
        dot += (double)load_element(query, q->dtype, d) * (double)load_element(row, dtype, d);
    return (double)problem->scale * dot;
}

double ref_key_logit(const struct ref_walk *walk, int32_t g, int64_t j)
{
    const struct options *options = &walk->job->problem->options;
    const clattn_tensor *k = walk->job->k;
    double logit = ref_logit(walk, g, sequence_row(k, walk->sequence, j, walk->kv_head), k->dtype);
    if (!options->k_scale) return logit;
    return logit * (double)sequence_scale(options, options->k_scale, walk->sequence, j, walk->kv_head);
}

int64_t ref_level_first(const struct ref_walk *walk, int level)
{
    return level_first(pyramid_room(walk->job->pyramid, walk->sequence_index), walk->leaf, level);
}

double ref_logsumexp(const double *logit, int64_t count)
{
    return head_score(CLATTN_SELECT_FLAT_LSE, logit, count);
}

/* Group score of a node: its children are keys at level 1, else means one level below. FLAT_MEAN scores by the
 * node's own mean. */
static double node_score(const struct ref_walk *walk, int level, int64_t node)
{
    const struct problem *problem = walk->job->problem;
    const struct sequence *sequence = walk->sequence;
    bool own_mean = walk->job->select->selector == CLATTN_SELECT_FLAT_MEAN;
    bool from_keys = level == 1 && !own_mean;
    int child_level = own_mean ? level : level - 1;
    int64_t width = own_mean ? 1 : level == 1 ? walk->leaf : 2;
    int64_t existing = from_keys ? sequence->kv_len : level_nodes(sequence->kv_len, walk->leaf, child_level);
    int64_t first = node * width, count = MIN(width, existing - first);
    int64_t base = from_keys ? 0 : ref_level_first(walk, child_level);
    double logit[128], score = 0;

    for (int32_t g = 0; g < problem->group; g++) {
        for (int64_t c = 0; c < count; c++)
            logit[c] =
                from_keys ? ref_key_logit(walk, g, first + c)
                          : ref_logit(walk, g, walk->means + (base + first + c) * problem->dim, CLATTN_FLOAT32);
        score += head_score(walk->job->select->selector, logit, count);
    }
    return isnan(score) ? -INFINITY : score;
}

/* Where a choice stands: at level 1, robust selection chooses twice. */
enum stage { STAGE_LEVEL, STAGE_PREFILTER };

/* Candidates that may be kept. */
static int32_t room(const struct ref_walk *walk, int level, enum stage stage)
{
    const clattn_select_desc *select = walk->job->select;
    if (select->selector != CLATTN_SELECT_ROBUST) return walk->topk;
    if (stage == STAGE_PREFILTER) return MAX(select->prefilter, walk->topk);
    return level > 1 ? MAX(select->beam, walk->topk) : walk->topk;
}

/* Keeps the forced candidates and the best of the rest, in ascending order; returns how many. */
static int32_t keep_best(const struct ref_walk *walk, int level, enum stage stage, int64_t *candidates,
                         int64_t count, double *score, bool *keep)
{
    int32_t kept = 0;
    for (int64_t c = 0; c < count; c++) {
        keep[c] = is_forced(walk, level, candidates[c]);
        kept += keep[c];
    }
    if (walk->job->select->selector == CLATTN_SELECT_ROBUST)
        robust_scores_ref(walk, level, stage == STAGE_PREFILTER, candidates, count, keep, score);
    else
        for (int64_t c = 0; c < count; c++)
            score[c] = keep[c] ? 0 : node_score(walk, level, candidates[c]);
    for (; kept < room(walk, level, stage); kept++) {
        int64_t best = -1;
        for (int64_t c = 0; c < count; c++)
            if (!keep[c] && (best < 0 || score[c] > score[best])) best = c;
        keep[best] = true;
    }
    int32_t n = 0;
    for (int64_t c = 0; c < count; c++)
        if (keep[c]) candidates[n++] = candidates[c];
    return n;
}

static bool is_flat(clattn_selector selector)
{
    return selector == CLATTN_SELECT_FLAT_MEAN || selector == CLATTN_SELECT_FLAT_LSE;
}

static int64_t candidates_max(const struct select_job *job)
{
    int64_t leaves = ceil_div(job->problem->kv_len_max, job->select->leaf);
    if (job->select->selector == CLATTN_SELECT_ROBUST)
        return 2 * (int64_t)MAX(job->select->beam, job->select->topk);
    return is_flat(job->select->selector) ? leaves : 2 * (int64_t)job->select->topk;
}

size_t select_scratch_ref(const struct select_job *job, int32_t rows)
{
    (void)rows;
    return (size_t)candidates_max(job) * (sizeof(int64_t) + sizeof(double) + sizeof(bool));
}

static int32_t select_row_ref(const struct select_job *job, int64_t s, int32_t kv_head, int64_t i,
                              void *scratch, int32_t *indices)
{
    const struct sequence *sequence = &job->problem->sequences[s];
    struct ref_walk walk = {.job = job,
                            .sequence = sequence,
                            .sequence_index = s,
                            .means = job->pyramid ? pyramid_head(job->pyramid, s, kv_head) : NULL,
                            .row = i,
                            .seen = visible_keys(job->problem, sequence, i),
                            .kv_head = kv_head,
                            .leaf = job->select->leaf,
                            .topk = job->select->topk};
    int64_t *candidates = scratch, count = 0;
    double *score = (double *)(candidates + candidates_max(job));
    bool *keep = (bool *)(score + candidates_max(job));

    for (int32_t n = 0; n < walk.topk; n++)
        indices[n] = -1;
    if (walk.seen == 0) return 0;
    forced_leaves(&walk);

    /* Levels of the keys that the query sees: later keys must not matter. */
    int top = 1;
    while (!is_flat(job->select->selector) &&
           level_nodes(walk.seen, walk.leaf, top) > room(&walk, top, STAGE_LEVEL))
        top++;
    for (int64_t n = 0; n < level_nodes(walk.seen, walk.leaf, top); n++)
        candidates[count++] = n;
    for (int level = top; level >= 1; level--) {
        if (level <
            top) { /* the children of what was kept, from the last to the first so that none is overwritten */
            int64_t nodes = level_nodes(walk.seen, walk.leaf, level), parents = count;
            count = 0;
            for (int64_t p = parents - 1; p >= 0; p--) {
                int64_t child = 2 * candidates[p];
                candidates[2 * p + 1] = child + 1 < nodes ? child + 1 : -1;
                candidates[2 * p] = child;
            }
            for (int64_t c = 0; c < 2 * parents; c++)
                if (candidates[c] >= 0) candidates[count++] = candidates[c];
        }
        int64_t allowed = 0;
        for (int64_t c = 0; c < count; c++)
            if (is_forced(&walk, level, candidates[c]) || is_eligible(&walk, level, candidates[c]))
                candidates[allowed++] = candidates[c];
        count = allowed;
        bool prefilter =
            level == 1 && job->select->selector == CLATTN_SELECT_ROBUST && job->select->prefilter > 0;
        if (prefilter && count > room(&walk, level, STAGE_PREFILTER))
            count = keep_best(&walk, level, STAGE_PREFILTER, candidates, count, score, keep);
        if (count > room(&walk, level, STAGE_LEVEL))
            count = keep_best(&walk, level, STAGE_LEVEL, candidates, count, score, keep);
    }
    for (int64_t n = 0; n < count; n++)
        indices[n] = (int32_t)candidates[n];
    return (int32_t)count;
}

int32_t select_rows_max_ref(const struct select_job *job)
{
    (void)job;
    return 16;
}

void select_rows_ref(const struct select_job *job, int64_t sequence, int32_t kv_head, int64_t i, int32_t rows,
                     void *scratch, const struct select_lists *lists)
{
    for (int32_t n = 0; n < rows; n++)
        lists->counts[n * lists->count_step] =
            select_row_ref(job, sequence, kv_head, i + n, scratch, lists->indices + n * lists->index_step);
}
