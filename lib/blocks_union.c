/* SPDX-License-Identifier: MIT */
/* The union of two block lists, also of different query granularity and head counts. */

#include "internal.h"

#include <stdlib.h>
#include <string.h>

/* One of the two lists on the host. */
struct side {
    const clattn_blocks *blocks;
    int32_t *indices; /* [rows][heads][topk] */
    int32_t *counts;  /* [rows][heads] */
    int64_t row;      /* first list row of the current sequence */
};

static clattn_status side_read(clattn_context *context, const clattn_blocks *blocks, struct side *side)
{
    size_t lists = (size_t)blocks->rows * (size_t)blocks->heads;
    *side = (struct side){.blocks = blocks};
    side->indices = malloc(MAX(lists * (size_t)blocks->topk, 1) * sizeof *side->indices);
    side->counts = malloc(MAX(lists, 1) * sizeof *side->counts);
    if (!side->indices || !side->counts)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu lists of %d blocks", lists, blocks->topk);
    return clattn_blocks_read(context, blocks, side->indices, side->counts);
}

static void side_release(struct side *side)
{
    free(side->indices);
    free(side->counts);
}

/* Merges the lists of both sides for query row i of the current sequence and list head h; returns the count.
 * `merged` NULL: only counts. Blocks of side `without` are left out; -1: none. */
static int32_t merge(const struct side sides[2], int without, int32_t heads, int64_t i, int32_t h,
                     int32_t *merged)
{
    const int32_t *list[2], *end[2];
    int32_t count = 0;
    for (int n = 0; n < 2; n++) {
        const clattn_blocks *blocks = sides[n].blocks;
        int64_t at = (sides[n].row + i / blocks->q_block) * blocks->heads + (int64_t)h * blocks->heads / heads;
        list[n] = sides[n].indices + at * blocks->topk;
        end[n] = list[n] + sides[n].counts[at];
    }
    while (list[0] < end[0] || list[1] < end[1]) {
        int64_t head[2];
        for (int n = 0; n < 2; n++)
            head[n] = list[n] < end[n] ? *list[n] : INT64_MAX;
        int64_t least = MIN(head[0], head[1]);
        if (without < 0 || head[without] != least) {
            if (merged) merged[count] = (int32_t)least;
            count++;
        }
        for (int n = 0; n < 2; n++)
            if (head[n] == least) list[n]++;
    }
    return count;
}

/* What the result is made for. */
struct plan {
    clattn_attention_desc attention;
    int64_t count, q_len; /* sequences; query rows of each unless packed */
    clattn_blocks_desc desc;
};

static int64_t plan_q_len(const struct plan *plan, int64_t s)
{
    const int32_t *cu = plan->attention.cu_seqlens_q;
    return plan->attention.sequences ? cu[s + 1] - cu[s] : plan->q_len;
}

/* How long lists are. */
struct extent {
    int32_t longest; /* at least 1 */
    int64_t total;
};

/* With `indices` and `counts` also writes the lists. `without`: see merge. */
static struct extent merge_all(const struct plan *plan, struct side sides[2], int without, int32_t *indices,
                               int32_t *counts)
{
    const clattn_blocks_desc *desc = &plan->desc;
    struct extent extent = {.longest = 1};
    int64_t list = 0;
    sides[0].row = sides[1].row = 0;
    for (int64_t s = 0; s < plan->count; s++) {
        int64_t q_len = plan_q_len(plan, s);
        for (int64_t i = 0; i < q_len; i += desc->q_block)
            for (int32_t h = 0; h < desc->heads; h++, list++) {
                int32_t *merged = indices ? indices + list * desc->topk : NULL;
                int32_t count = merge(sides, without, desc->heads, i, h, merged);
                extent.longest = MAX(extent.longest, count);
                extent.total += count;
                if (!indices) continue;
                counts[list] = count;
                memset(merged + count, -1, (size_t)(desc->topk - count) * sizeof *merged);
            }
        for (int n = 0; n < 2; n++)
            sides[n].row += ceil_div(q_len, sides[n].blocks->q_block);
    }
    return extent;
}

/* A new list of what both sides have, or one has `without` the other. */
static clattn_status lists_make(clattn_context *context, const struct plan *plan, struct side sides[2],
                                int without, int64_t *total, clattn_blocks **result)
{
    struct plan own = *plan;
    clattn_blocks_desc *desc = &own.desc;
    struct extent extent = merge_all(&own, sides, without, NULL, NULL);
    desc->topk = extent.longest;
    *total = extent.total;
    int64_t lists, entries, bytes;
    if (!multiply(desc->rows, desc->heads, &lists) || !multiply(lists, desc->topk, &entries) ||
        !multiply(entries, sizeof(int32_t), &bytes))
        return fail(context, CLATTN_SIZE_OVERFLOW,
                    "the union has %lld rows, %d heads, topk %d and exceeds 63 bits", (long long)desc->rows,
                    desc->heads, desc->topk);
    clattn_status status;
    int32_t *indices = malloc((size_t)MAX(bytes, 1)), *counts = malloc((size_t)MAX(lists, 1) * sizeof *counts);
    if (!indices || !counts) {
        status = fail(context, CLATTN_OUT_OF_MEMORY, "no memory for lists of %lld bytes", (long long)bytes);
    } else {
        merge_all(&own, sides, without, indices, counts);
        status = blocks_from_lists(context, desc, indices, counts, result);
    }
    free(indices);
    free(counts);
    return status;
}

/* A list of TILE_ROWS query rows or more is for whole tiles of the kernels; one of fewer than LIST_ROWS is not.
 */
enum { TILE_ROWS = 16, LIST_ROWS = 8 };

/* The two parts of a union of a list for tiles with a finer one; `total` blocks are in the lists of the union.
 */
static clattn_status parts_make(clattn_context *context, const struct plan *plan, struct side sides[2],
                                int64_t total, clattn_blocks *result)
{
    int64_t rest = 0;
    int coarse = sides[1].blocks->q_block > sides[0].blocks->q_block;
    const clattn_blocks *from = sides[coarse].blocks, *fine = sides[!coarse].blocks;
    if (from->q_block < TILE_ROWS || fine->q_block >= LIST_ROWS || from->q_block % fine->q_block)
        return CLATTN_SUCCESS;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_status status = clattn_blocks_describe(from, &desc);
    if (!status)
        status =
            blocks_from_lists(context, &desc, sides[coarse].indices, sides[coarse].counts, &result->coarse);
    if (!status) status = lists_make(context, plan, sides, coarse, &rest, &result->rest);
    result->parts_saved = (float)(total - rest) / (float)MAX(result->rows * result->heads, 1);
    return status;
}

static clattn_status union_make(clattn_context *context, const struct plan *plan, struct side sides[2],
                                clattn_blocks **result)
{
    clattn_blocks *blocks = NULL;
    int64_t total;
    clattn_status status = lists_make(context, plan, sides, -1, &total, &blocks);
    if (!status) status = parts_make(context, plan, sides, total, blocks);
    if (status)
        clattn_blocks_release(context, blocks);
    else
        *result = blocks;
    return status;
}

static int32_t common_divisor(int32_t a, int32_t b)
{
    while (b) {
        int32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static clattn_status check_pair(clattn_context *context, const clattn_blocks *a, const clattn_blocks *b)
{
    bool same_starts =
        a->start_count == b->start_count &&
        (!a->starts || memcmp(a->starts, b->starts, (size_t)a->start_count * sizeof *a->starts) == 0);
    if (a->block != b->block || !a->starts != !b->starts || !same_starts)
        return fail(context, CLATTN_INVALID_BLOCKS,
                    "a has %d keys a block and b %d (0: boundaries of the caller); equal blocks are needed",
                    a->block, b->block);
    if (MAX(a->heads, b->heads) % MIN(a->heads, b->heads))
        return fail(context, CLATTN_INVALID_BLOCKS,
                    "a has %d heads and b %d; one must be a multiple of the other", a->heads, b->heads);
    return CLATTN_SUCCESS;
}

/* Fills the plan and checks that both lists have the rows that its sequences need. */
static clattn_status plan_init(clattn_context *context, const clattn_attention_desc *attention, int64_t batch,
                               int64_t q_len, const clattn_blocks *a, const clattn_blocks *b, struct plan *plan)
{
    *plan = (struct plan){CLATTN_ATTENTION_DESC_INIT, batch, q_len, CLATTN_BLOCKS_DESC_INIT};
    clattn_attention_desc *copy = &plan->attention;
    clattn_status status =
        attention ? desc_copy(context, "attention", copy, sizeof *copy, attention) : CLATTN_SUCCESS;
    if (status) return status;
    if (copy->sequences < 0 || (copy->sequences && !copy->cu_seqlens_q))
        return fail(context, CLATTN_INVALID_SEQLENS, "attention.sequences is %lld and cu_seqlens_q is %s",
                    (long long)copy->sequences, copy->cu_seqlens_q ? "given" : "NULL");
    if (copy->sequences) plan->count = copy->sequences;
    if (!copy->sequences && (batch < 1 || q_len < 0))
        return fail(context, CLATTN_INVALID_SHAPE, "batch is %lld and q_len %lld", (long long)batch,
                    (long long)q_len);
    plan->desc.q_block = common_divisor(a->q_block, b->q_block);
    plan->desc.block = a->block;
    plan->desc.heads = MAX(a->heads, b->heads);
    plan->desc.starts = a->starts;
    plan->desc.start_count = a->start_count;

    int64_t rows_a = 0, rows_b = 0;
    for (int64_t s = 0; s < plan->count; s++) {
        int64_t rows = plan_q_len(plan, s);
        if (rows < 0)
            return fail(context, CLATTN_INVALID_SEQLENS, "cu_seqlens_q[%lld] is less than the one before it",
                        (long long)s + 1);
        rows_a += ceil_div(rows, a->q_block);
        rows_b += ceil_div(rows, b->q_block);
        plan->desc.rows += ceil_div(rows, plan->desc.q_block);
        if (rows_a > a->rows || rows_b > b->rows) break;
    }
    if (rows_a != a->rows || rows_b != b->rows)
        return fail(context, CLATTN_INVALID_BLOCKS,
                    "a has %lld list rows and b %lld; these sequences need at least %lld and %lld",
                    (long long)a->rows, (long long)b->rows, (long long)rows_a, (long long)rows_b);
    return CLATTN_SUCCESS;
}

clattn_status clattn_blocks_union(clattn_context *context, const clattn_attention_desc *attention,
                                  int64_t batch, int64_t q_len, const clattn_blocks *a, const clattn_blocks *b,
                                  clattn_blocks **result)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!a || !b || !result)
        return fail(context, CLATTN_INVALID_ARGUMENT, "%s is NULL", !a ? "a" : !b ? "b" : "result");
    struct plan plan;
    struct side sides[2] = {{0}, {0}};
    clattn_status status = check_pair(context, a, b);
    if (!status) status = plan_init(context, attention, batch, q_len, a, b, &plan);
    if (!status) status = side_read(context, a, &sides[0]);
    if (!status) status = side_read(context, b, &sides[1]);
    if (!status) status = union_make(context, &plan, sides, result);
    side_release(&sides[0]);
    side_release(&sides[1]);
    return status;
}
