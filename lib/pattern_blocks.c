/* SPDX-License-Identifier: MIT */
/* Block lists of a pattern, and one list of it. */

#include "pattern.h"

#include <stdlib.h>
#include <string.h>

/* The longest list, and with `indices` [rows][heads][topk] and `counts` [rows][heads] the lists themselves. */
static bool lists_make(const struct pattern_problem *problem, struct pattern_lister *lister, int32_t *indices,
                       int32_t *counts, int64_t topk, int64_t *longest)
{
    int32_t heads = problem->shape.heads, distinct = pattern_has_heads(lister->pattern) ? heads : 1;
    for (int64_t s = 0; s < problem->count; s++) {
        struct pattern_sequence sequence = pattern_sequence_of(problem, s);
        struct key_blocks keys = pattern_keys(problem, &sequence);
        int64_t rows = problem->list_row[s + 1] - problem->list_row[s];
        for (int32_t h = 0; h < (indices ? heads : distinct); h++)
            for (int64_t r = 0; r < rows; r++) {
                struct pattern_row row = pattern_row_of(problem, &sequence, &keys, r);
                if (!pattern_list(lister, &keys, &row, distinct == 1 ? 0 : h)) return false;
                *longest = MAX(*longest, lister->count);
                if (!indices) continue;
                int64_t list = (sequence.list_row + r) * heads + h;
                if (lister->count)
                    memcpy(indices + list * topk, lister->list, (size_t)lister->count * sizeof *indices);
                memset(indices + list * topk + lister->count, -1,
                       (size_t)(topk - lister->count) * sizeof *indices);
                counts[list] = (int32_t)lister->count;
            }
    }
    return true;
}

static clattn_status blocks_make(clattn_context *context, const struct pattern_problem *problem,
                                 struct pattern_lister *lister, clattn_blocks **result)
{
    int64_t longest = 1, lists, entries, bytes, rows = problem->list_row[problem->count];
    if (!lists_make(problem, lister, NULL, NULL, 0, &longest))
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a list of a pattern");
    if (!multiply(rows, problem->shape.heads, &lists) || !multiply(lists, longest, &entries) ||
        !multiply(entries, sizeof(int32_t), &bytes))
        return fail(context, CLATTN_SIZE_OVERFLOW, "lists of %lld rows, %d heads, topk %lld exceed 63 bits",
                    (long long)rows, problem->shape.heads, (long long)longest);
    int32_t *indices = malloc((size_t)MAX(bytes, 1)), *counts = malloc((size_t)MAX(lists, 1) * sizeof *counts);
    clattn_status status;
    if (!indices || !counts || !lists_make(problem, lister, indices, counts, longest, &longest)) {
        status = fail(context, CLATTN_OUT_OF_MEMORY,
                      "no memory for lists of %lld bytes (%lld rows, %d heads, topk %lld)", (long long)bytes,
                      (long long)rows, problem->shape.heads, (long long)longest);
    } else {
        clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
        desc.block = problem->shape.block;
        desc.q_block = problem->shape.q_block;
        desc.rows = rows;
        desc.heads = problem->shape.heads;
        desc.topk = (int32_t)longest;
        desc.starts = problem->shape.starts;
        desc.start_count = problem->shape.start_count;
        status = blocks_from_lists(context, &desc, indices, counts, result);
    }
    free(indices);
    free(counts);
    return status;
}

clattn_status clattn_pattern_blocks(clattn_context *context, const clattn_pattern *pattern,
                                    const clattn_attention_desc *attention, const clattn_pattern_shape *shape,
                                    clattn_blocks **blocks)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!pattern || !blocks)
        return fail(context, CLATTN_INVALID_ARGUMENT, "%s is NULL", pattern ? "blocks" : "pattern");
    struct pattern_problem problem;
    struct pattern_lister lister = {0};
    clattn_status status = pattern_problem_init(pattern, attention, shape, &problem);
    if (!status) status = pattern_lister_init(pattern, &problem, &lister);
    if (status) {
        char text[sizeof pattern->error];
        clattn_pattern_error(pattern, text, sizeof text);
        fail(context, status, "%s", text);
    } else {
        status = blocks_make(context, &problem, &lister, blocks);
    }
    pattern_lister_release(&lister);
    pattern_problem_release(&problem);
    return status;
}

/* The sequence that holds a list row. */
static int64_t sequence_at(const struct pattern_problem *problem, int64_t row)
{
    return starts_find(problem->list_row, problem->count + 1, row + 1) - 1;
}

clattn_status clattn_pattern_list(const clattn_pattern *pattern, const clattn_attention_desc *attention,
                                  const clattn_pattern_shape *shape, int64_t row, int32_t head,
                                  int32_t *indices, int64_t capacity, int64_t *count)
{
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    if (indices && capacity < 0)
        return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT, "capacity is %lld", (long long)capacity);
    struct pattern_problem problem;
    struct pattern_lister lister = {0};
    clattn_status status = pattern_problem_init(pattern, attention, shape, &problem);
    if (status) return status;
    if (row < 0 || row >= problem.list_row[problem.count] || head < 0 || head >= problem.shape.heads)
        status =
            pattern_fail(pattern, CLATTN_INVALID_ARGUMENT, "row is %lld and head %d; there are %lld and %d",
                         (long long)row, head, (long long)problem.list_row[problem.count], problem.shape.heads);
    if (!status) status = pattern_lister_init(pattern, &problem, &lister);
    if (!status) {
        struct pattern_sequence sequence = pattern_sequence_of(&problem, sequence_at(&problem, row));
        struct key_blocks keys = pattern_keys(&problem, &sequence);
        struct pattern_row place = pattern_row_of(&problem, &sequence, &keys, row - sequence.list_row);
        if (!pattern_list(&lister, &keys, &place, head))
            status = pattern_fail(pattern, CLATTN_OUT_OF_MEMORY, "no memory for a list of a pattern");
    }
    if (!status && indices && lister.count)
        memcpy(indices, lister.list, (size_t)MIN(lister.count, capacity) * sizeof *indices);
    if (!status && count) *count = lister.count;
    pattern_lister_release(&lister);
    pattern_problem_release(&problem);
    return status;
}
