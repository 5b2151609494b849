/* SPDX-License-Identifier: MIT */
/* Which list rows see other keys than before, after sequences grew or were cut. */

#include "pattern.h"

#include <string.h>

/* One of the two problems at the list row in question. */
struct side {
    const struct pattern_problem *problem;
    struct pattern_sequence sequence;
    struct key_blocks keys;
    struct pattern_lister lister;
};

/* The runs of keys below `end` that a list connects, one after the other; false when there is no more. */
struct runs {
    const struct side *side;
    int64_t next, end;
};

static bool runs_next(struct runs *runs, int64_t *first, int64_t *last)
{
    const struct pattern_lister *lister = &runs->side->lister;
    const struct key_blocks *keys = &runs->side->keys;
    if (runs->next >= lister->count) return false;
    *first = key_block_first(keys, lister->list[runs->next]);
    *last = key_block_end(keys, lister->list[runs->next++]);
    while (runs->next < lister->count && key_block_first(keys, lister->list[runs->next]) == *last)
        *last = key_block_end(keys, lister->list[runs->next++]);
    *last = MIN(*last, runs->end);
    return *first < *last;
}

/* Do the query rows of a list row see the same keys on both sides? end: the query row after its last one. */
static bool same_keys(const struct side *before, const struct side *after, int64_t end)
{
    int64_t position_end = end + after->sequence.kv_len - after->sequence.q_len;
    bool causal = after->problem->causal;
    struct runs a = {before, 0, causal ? position_end : before->sequence.kv_len};
    struct runs b = {after, 0, causal ? position_end : after->sequence.kv_len};
    int64_t first_a = 0, first_b = 0, last_a = 0, last_b = 0;
    for (;;) {
        bool more = runs_next(&a, &first_a, &last_a);
        if (more != runs_next(&b, &first_b, &last_b)) return false;
        if (!more) return true;
        if (first_a != first_b || last_a != last_b) return false;
    }
}

/* List row r of the current sequence: 1 changed, 0 not, -1 out of memory. stable: lists of the same key blocks
 * c are the same before and after. */
static int row_changed(struct side *before, struct side *after, int64_t r, bool stable)
{
    struct pattern_row now = pattern_row_of(after->problem, &after->sequence, &after->keys, r);
    struct pattern_row then = pattern_row_of(before->problem, &before->sequence, &before->keys, r);
    if (now.row == now.end) return 0; /* padding */
    if (now.end > before->sequence.q_len) return 1;
    if (stable && now.first == then.first && now.last == then.last) return 0;
    int32_t heads = pattern_has_heads(after->lister.pattern) ? after->problem->shape.heads : 1;
    for (int32_t h = 0; h < heads; h++) {
        if (!pattern_list(&before->lister, &before->keys, &then, h) ||
            !pattern_list(&after->lister, &after->keys, &now, h))
            return -1;
        if (!same_keys(before, after, now.end)) return 1;
    }
    return 0;
}

static clattn_status sides_check(const clattn_pattern *pattern, const struct pattern_problem *before,
                                 const struct pattern_problem *after)
{
    const clattn_pattern_shape *a = &before->shape, *b = &after->shape;
    if (before->count != after->count || a->heads != b->heads || a->q_block != b->q_block ||
        before->causal != after->causal || !a->starts != !b->starts || (!a->starts && a->block != b->block))
        return pattern_fail(
            pattern, CLATTN_INVALID_SHAPE,
            "before and after differ in the number of sequences, heads, block, q_block or causal");
    for (int64_t s = 0; s < after->count; s++) {
        struct pattern_sequence then = pattern_sequence_of(before, s), now = pattern_sequence_of(after, s);
        if (then.kv_len - then.q_len != now.kv_len - now.q_len)
            return pattern_fail(
                pattern, CLATTN_INVALID_SHAPE,
                "kv_len - q_len of sequence %lld was %lld and is %lld; it must stay, so that query "
                "rows keep their positions",
                (long long)s, (long long)(then.kv_len - then.q_len), (long long)(now.kv_len - now.q_len));
    }
    return CLATTN_SUCCESS;
}

static clattn_status changed_all(const clattn_pattern *pattern, struct side *before, struct side *after,
                                 uint8_t *changed, int64_t *count)
{
    const struct pattern_problem *problem = after->problem;
    bool stable = problem->causal && !problem->shape.starts && !pattern_has_ends(pattern);
    for (int pass = changed ? 0 : 1; pass < 2;
         pass++) /* nothing is written before everything is known to work */
        for (int64_t s = *count = 0; s < problem->count; s++) {
            before->sequence = pattern_sequence_of(before->problem, s);
            before->keys = pattern_keys(before->problem, &before->sequence);
            after->sequence = pattern_sequence_of(problem, s);
            after->keys = pattern_keys(problem, &after->sequence);
            for (int64_t r = 0; r < problem->list_row[s + 1] - problem->list_row[s]; r++) {
                int is_changed = row_changed(before, after, r, stable);
                if (is_changed < 0)
                    return pattern_fail(pattern, CLATTN_OUT_OF_MEMORY, "no memory for a list of a pattern");
                if (pass && changed) changed[problem->list_row[s] + r] = (uint8_t)is_changed;
                *count += is_changed;
            }
        }
    return CLATTN_SUCCESS;
}

clattn_status clattn_pattern_changed(const clattn_pattern *pattern,
                                     const clattn_attention_desc *attention_before,
                                     const clattn_pattern_shape *before,
                                     const clattn_attention_desc *attention_after,
                                     const clattn_pattern_shape *after, uint8_t *changed, int64_t *count)
{
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    struct pattern_problem then = {0}, now = {0};
    struct side side_then = {.problem = &then}, side_now = {.problem = &now};
    int64_t sum = 0;
    clattn_status status = pattern_problem_init(pattern, attention_before, before, &then);
    if (!status) status = pattern_problem_init(pattern, attention_after, after, &now);
    if (!status) status = sides_check(pattern, &then, &now);
    if (!status) status = pattern_lister_init(pattern, &then, &side_then.lister);
    if (!status) status = pattern_lister_init(pattern, &now, &side_now.lister);
    if (!status) status = changed_all(pattern, &side_then, &side_now, changed, &sum);
    if (!status && count) *count = sum;
    pattern_lister_release(&side_then.lister);
    pattern_lister_release(&side_now.lister);
    pattern_problem_release(&then);
    pattern_problem_release(&now);
    return status;
}
