/* SPDX-License-Identifier: MIT */
/* Block lists: the only thing that passes between choosing and attending. */

#include "key_blocks.h"

#include <stdlib.h>
#include <string.h>

static clattn_status starts_copy(clattn_context *context, clattn_blocks *blocks, const clattn_blocks_desc *desc)
{
    if (!desc->starts) return CLATTN_SUCCESS;
    size_t bytes = (size_t)desc->start_count * sizeof *blocks->starts;
    blocks->starts = malloc(bytes);
    if (!blocks->starts)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for block starts of %zu bytes", bytes);
    memcpy(blocks->starts, desc->starts, bytes);
    blocks->start_count = desc->start_count;
    return CLATTN_SUCCESS;
}

clattn_status blocks_new(clattn_context *context, const clattn_blocks_desc *desc, clattn_blocks **result)
{
    int64_t lists, entries, bytes;
    if (!multiply(desc->rows, desc->heads, &lists) || !multiply(lists, desc->topk, &entries) ||
        !multiply(entries, sizeof(int32_t), &bytes))
        return fail(context, CLATTN_SIZE_OVERFLOW, "block list of %lld rows, %d heads, topk %d exceeds 63 bits",
                    (long long)desc->rows, desc->heads, desc->topk);
    clattn_blocks *blocks = calloc(1, sizeof *blocks);
    if (!blocks) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a block list");
    blocks->block = desc->starts ? 0 : desc->block;
    blocks->q_block = desc->q_block;
    blocks->rows = desc->rows;
    blocks->heads = desc->heads;
    blocks->topk = desc->topk;
    clattn_status status = starts_copy(context, blocks, desc);
    if (!status)
        status =
            context->backend->storage_create(context, MAX((size_t)bytes, sizeof(int32_t)), &blocks->indices);
    if (!status)
        status =
            context->backend->storage_create(context, MAX((size_t)lists, 1) * sizeof(int32_t), &blocks->counts);
    if (status) {
        clattn_blocks_release(context, blocks);
        return status;
    }
    *result = blocks;
    return CLATTN_SUCCESS;
}

static int compare_indices(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Sorts one list ascending, removes duplicates and padding, pads with -1; returns the count. */
static int32_t list_normalise(int32_t *list, int32_t topk)
{
    int32_t count = 0;
    qsort(list, (size_t)topk, sizeof *list, compare_indices);
    for (int32_t i = 0; i < topk; i++)
        if (list[i] >= 0 && (count == 0 || list[count - 1] != list[i])) list[count++] = list[i];
    for (int32_t i = count; i < topk; i++)
        list[i] = -1;
    return count;
}

const char *starts_error(const int64_t *starts, int64_t count)
{
    if (count < 1) return "is given with start_count 0";
    if (count > INT32_MAX) return "has more than 2^31 - 1 entries";
    if (starts[0] != 0) return "does not begin with 0";
    for (int64_t i = 1; i < count; i++)
        if (starts[i] <= starts[i - 1]) return "is not ascending";
    return NULL;
}

static clattn_status blocks_desc_check(clattn_context *context, const clattn_blocks_desc *desc,
                                       clattn_blocks_desc *copy)
{
    *copy = (clattn_blocks_desc)CLATTN_BLOCKS_DESC_INIT;
    if (!desc) return fail(context, CLATTN_INVALID_ARGUMENT, "desc is NULL");
    clattn_status status = desc_copy(context, "desc", copy, sizeof *copy, desc);
    if (!status && !copy->starts) status = check_leaf(context, "desc.block", copy->block);
    if (status) return status;
    const char *wrong = copy->starts ? starts_error(copy->starts, copy->start_count) : NULL;
    if (wrong) return fail(context, CLATTN_INVALID_BLOCKS, "desc.starts %s", wrong);
    if (copy->q_block < 1)
        return fail(context, CLATTN_INVALID_ARGUMENT, "desc.q_block is %d; at least 1 is needed",
                    copy->q_block);
    if (copy->rows < 0 || copy->heads < 1 || copy->topk < 1)
        return fail(context, CLATTN_INVALID_SHAPE,
                    "desc has rows %lld, heads %d, topk %d; rows >= 0 and the others >= 1 are needed",
                    (long long)copy->rows, copy->heads, copy->topk);
    return CLATTN_SUCCESS;
}

clattn_status blocks_from_lists(clattn_context *context, const clattn_blocks_desc *desc, const int32_t *indices,
                                const int32_t *counts, clattn_blocks **result)
{
    clattn_blocks *blocks = NULL;
    clattn_status status = blocks_new(context, desc, &blocks);
    if (status) return status;
    int64_t lists = desc->rows * desc->heads;
    size_t bytes = (size_t)(lists * desc->topk) * sizeof *indices;
    blocks->row_max = malloc((size_t)MAX(desc->rows, 1) * sizeof *blocks->row_max);
    if (!blocks->row_max) {
        clattn_blocks_release(context, blocks);
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a block list of %lld rows",
                    (long long)desc->rows);
    }
    for (int64_t row = 0; row < desc->rows; row++)
        blocks->row_max[row] = -1;
    for (int64_t i = 0; i < lists; i++) {
        int32_t *row_max = &blocks->row_max[i / desc->heads];
        if (counts[i] > 0) *row_max = MAX(*row_max, indices[i * desc->topk + counts[i] - 1]);
    }
    blocks_sample(blocks, indices);
    if (bytes) status = context->backend->storage_write(context, &blocks->indices, indices, bytes);
    if (bytes && !status)
        status =
            context->backend->storage_write(context, &blocks->counts, counts, (size_t)lists * sizeof *counts);
    if (status)
        clattn_blocks_release(context, blocks);
    else
        *result = blocks;
    return status;
}

clattn_status clattn_blocks_create(clattn_context *context, const clattn_blocks_desc *desc,
                                   const int32_t *indices, clattn_blocks **result)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!result || !indices)
        return fail(context, CLATTN_INVALID_ARGUMENT, "%s is NULL", result ? "indices" : "blocks");
    clattn_blocks_desc copy;
    int64_t lists, entries, bytes;
    clattn_status status = blocks_desc_check(context, desc, &copy);
    if (status) return status;
    if (!multiply(copy.rows, copy.heads, &lists) || !multiply(lists, copy.topk, &entries) ||
        !multiply(entries, sizeof(int32_t), &bytes))
        return fail(context, CLATTN_SIZE_OVERFLOW, "block list of %lld rows, %d heads, topk %d exceeds 63 bits",
                    (long long)copy.rows, copy.heads, copy.topk);
    int32_t *sorted = malloc((size_t)MAX(bytes, 1)), *counts = malloc((size_t)MAX(lists, 1) * sizeof *counts);
    if (!sorted || !counts) {
        status =
            fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a block list of %lld bytes", (long long)bytes);
        goto done;
    }
    memcpy(sorted, indices, (size_t)bytes);
    for (int64_t i = 0; i < entries; i++)
        if (indices[i] < -1) {
            status =
                fail(context, CLATTN_INVALID_BLOCKS, "indices[%lld][%lld][%lld] is %d; -1 or more is needed",
                     (long long)(i / copy.topk / copy.heads), (long long)(i / copy.topk % copy.heads),
                     (long long)(i % copy.topk), indices[i]);
            goto done;
        }
    for (int64_t i = 0; i < lists; i++)
        counts[i] = list_normalise(sorted + i * copy.topk, copy.topk);
    status = blocks_from_lists(context, &copy, sorted, counts, result);
done:
    free(sorted);
    free(counts);
    return status;
}

/* Is every index within the keys of its sequence? */
static clattn_status blocks_check_indices(clattn_context *context, const clattn_blocks *blocks,
                                          const struct problem *problem)
{
    for (int64_t s = 0; (blocks->row_max || blocks->starts) && s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        struct key_blocks keys = key_blocks_listed(blocks, sequence);
        if (!key_blocks_fit(&keys))
            return fail(context, CLATTN_INVALID_BLOCKS,
                        "sequence %lld begins at row %lld of k, which is no start of blocks", (long long)s,
                        (long long)sequence->k_row);
        int64_t rows = blocks->row_max ? ceil_div(sequence->q_len, blocks->q_block) : 0;
        for (int64_t row = 0; row < rows; row++) {
            int32_t greatest = blocks->row_max[sequence->list_row + row];
            if (greatest >= keys.count)
                return fail(context, CLATTN_INVALID_BLOCKS,
                            "blocks row %lld lists block %d; sequence %lld has %lld blocks in its %lld keys",
                            (long long)(sequence->list_row + row), greatest, (long long)s,
                            (long long)keys.count, (long long)sequence->kv_len);
        }
    }
    return CLATTN_SUCCESS;
}

/* Does the bias, if any, have a value for every block? */
static clattn_status bias_check(clattn_context *context, const clattn_blocks *blocks,
                                const struct problem *problem)
{
    const clattn_tensor *bias = problem->options.bias;
    int64_t available = 0;
    for (int64_t s = 0; bias && s < problem->count; s++)
        available = MAX(available, key_blocks_listed(blocks, &problem->sequences[s]).count);
    if (!bias || bias->len >= available) return CLATTN_SUCCESS;
    return fail(context, CLATTN_INVALID_SHAPE, "bias.len is %lld; the keys have %lld blocks",
                (long long)bias->len, (long long)available);
}

clattn_status blocks_check(clattn_context *context, const clattn_blocks *blocks, const struct problem *problem)
{
    clattn_status status = bias_check(context, blocks, problem);
    if (status || !blocks) return status;
    if (blocks->rows != problem->list_rows)
        return fail(context, CLATTN_INVALID_BLOCKS,
                    "blocks has %lld rows; q needs %lld (one per %d query rows)", (long long)blocks->rows,
                    (long long)problem->list_rows, blocks->q_block);
    if (blocks->heads != 1 && blocks->heads != problem->kv_heads && blocks->heads != problem->q_heads)
        return fail(context, CLATTN_INVALID_BLOCKS,
                    "blocks has %d heads; 1, kv_heads %d or q_heads %d are possible", blocks->heads,
                    problem->kv_heads, problem->q_heads);
    return blocks_check_indices(context, blocks, problem);
}

clattn_status clattn_blocks_describe(const clattn_blocks *blocks, clattn_blocks_desc *desc)
{
    if (!blocks || !desc || desc->size < sizeof(size_t)) return CLATTN_INVALID_ARGUMENT;
    clattn_blocks_desc full = {sizeof full,   blocks->block, blocks->q_block, blocks->rows,
                               blocks->heads, blocks->topk,  blocks->starts,  blocks->start_count};
    size_t size = MIN(desc->size, sizeof full);
    memcpy(desc, &full, size);
    desc->size = size;
    return CLATTN_SUCCESS;
}

clattn_status clattn_blocks_read(clattn_context *context, const clattn_blocks *blocks, int32_t *indices,
                                 int32_t *counts)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!blocks) return fail(context, CLATTN_INVALID_ARGUMENT, "blocks is NULL");
    size_t lists = (size_t)(blocks->rows * blocks->heads);
    clattn_status status = CLATTN_SUCCESS;
    if (indices && lists)
        status = context->backend->storage_read(context, &blocks->indices, 0, indices,
                                                lists * (size_t)blocks->topk * sizeof *indices);
    if (!status && counts && lists)
        status = context->backend->storage_read(context, &blocks->counts, 0, counts, lists * sizeof *counts);
    return status;
}

void blocks_selected(clattn_context *context, clattn_blocks *blocks)
{
    clattn_blocks_release(context, blocks->coarse);
    clattn_blocks_release(context, blocks->rest);
    free(blocks->row_max);
    blocks->coarse = blocks->rest = NULL;
    blocks->row_max = NULL;
}

void clattn_blocks_release(clattn_context *context, clattn_blocks *blocks)
{
    if (!context || !blocks) return;
    context->backend->storage_release(context, &blocks->indices);
    context->backend->storage_release(context, &blocks->counts);
    if (blocks->mask) {
        context->backend->storage_release(context, &blocks->mask->cut);
        context->backend->storage_release(context, &blocks->mask->window);
        context->backend->storage_release(context, &blocks->mask->coordinate);
    }
    clattn_blocks_release(context, blocks->coarse);
    clattn_blocks_release(context, blocks->rest);
    free(blocks->mask);
    free(blocks->row_max);
    free(blocks->starts);
    free(blocks);
}
