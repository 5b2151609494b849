/* SPDX-License-Identifier: MIT */
/* Counts of a pattern, list by list, without keeping the lists. */

#include "pattern.h"

#include <string.h>

/* sum over t = first .. last of min(max(t + 1 - a, 0), size): keys of a block [a, a + size) that rows at t see.
 */
static int64_t visible_pairs(int64_t first, int64_t last, int64_t a, int64_t size)
{
    int64_t grow = MAX(first, a), full = MAX(first, a + size - 1); /* one more key a row; all keys */
    int64_t grow_end = MIN(last + 1, a + size - 1), pairs = 0;
    if (grow < grow_end) pairs += (grow - a + 1 + grow_end - a) * (grow_end - grow) / 2;
    if (full <= last) pairs += (last - full + 1) * size;
    return pairs;
}

/* Adds one list, `times` times. */
static void count_list(const struct pattern_problem *problem, const struct pattern_sequence *sequence,
                       const struct key_blocks *keys, const struct pattern_row *row,
                       const struct pattern_lister *lister, int64_t times, clattn_pattern_stats *stats)
{
    int64_t rows = row->end - row->row, connections = 0, pairs = 0, first = row->t, last = row->t + rows - 1;
    for (int64_t i = 0; i < lister->count; i++) {
        int64_t a = key_block_first(keys, lister->list[i]), size = key_block_end(keys, lister->list[i]) - a;
        connections += problem->causal ? visible_pairs(first, last, a, size) : rows * size;
    }
    pairs = problem->causal ? visible_pairs(first, last, 0, sequence->kv_len) : rows * sequence->kv_len;

    /* Rows that see keys: all from position 0 on; rows that see listed ones: from the first listed key on. */
    int64_t see = !sequence->kv_len ? 0 : problem->causal ? MAX(last + 1 - MAX(first, 0), 0) : rows;
    int64_t a = lister->count ? key_block_first(keys, lister->list[0]) : last + 1;
    int64_t connected = !lister->count ? 0 : problem->causal ? MAX(last + 1 - MAX(first, a), 0) : rows;

    stats->lists += times;
    stats->blocks += times * lister->count;
    stats->blocks_min = MIN(stats->blocks_min, lister->count);
    stats->blocks_max = MAX(stats->blocks_max, lister->count);
    stats->blocks_all += times * (row->last < row->first ? 0 : problem->causal ? row->last + 1 : keys->count);
    stats->connections += times * connections;
    stats->pairs += times * pairs;
    stats->unconnected += times * (see - connected);
}

static bool count_all(const struct pattern_problem *problem, struct pattern_lister *lister,
                      clattn_pattern_stats *stats)
{
    bool per_head = pattern_has_heads(lister->pattern);
    bool alike =
        !problem->cu_q && !problem->used_q && !problem->used_k; /* so every batch entry has the same lists */
    for (int64_t s = 0; s < (alike ? 1 : problem->count); s++) {
        struct pattern_sequence sequence = pattern_sequence_of(problem, s);
        struct key_blocks keys = pattern_keys(problem, &sequence);
        int64_t rows = problem->list_row[s + 1] - problem->list_row[s];
        int64_t times = (alike ? problem->count : 1) * (per_head ? 1 : problem->shape.heads);
        for (int32_t h = 0; h < (per_head ? problem->shape.heads : 1); h++)
            for (int64_t r = 0; r < rows; r++) {
                struct pattern_row row = pattern_row_of(problem, &sequence, &keys, r);
                if (row.row == row.end) break; /* padding */
                if (!pattern_list(lister, &keys, &row, h)) return false;
                count_list(problem, &sequence, &keys, &row, lister, times, stats);
            }
    }
    return true;
}

clattn_status clattn_pattern_count(const clattn_pattern *pattern, const clattn_attention_desc *attention,
                                   const clattn_pattern_shape *shape, clattn_pattern_stats *stats)
{
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    if (!stats || stats->size < sizeof stats->size)
        return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT, "stats is NULL or its size is not set");
    struct pattern_problem problem;
    struct pattern_lister lister = {0};
    clattn_pattern_stats sum = {.size = MIN(stats->size, sizeof sum), .blocks_min = INT64_MAX};
    clattn_status status = pattern_problem_init(pattern, attention, shape, &problem);
    if (!status) status = pattern_lister_init(pattern, &problem, &lister);
    if (!status && !count_all(&problem, &lister, &sum))
        status = pattern_fail(pattern, CLATTN_OUT_OF_MEMORY, "no memory for a list of a pattern");
    if (!status) {
        if (sum.lists == 0) sum.blocks_min = 0;
        sum.blocks_mean = sum.lists ? (double)sum.blocks / (double)sum.lists : 0;
        sum.density = sum.pairs ? (double)sum.connections / (double)sum.pairs : 0;
        memcpy(stats, &sum, sum.size);
    }
    pattern_lister_release(&lister);
    pattern_problem_release(&problem);
    return status;
}
