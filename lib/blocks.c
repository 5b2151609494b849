/* SPDX-License-Identifier: MIT */
/* Block lists: the only thing that passes between choosing and attending. */

#include "internal.h"

#include <stdlib.h>
#include <string.h>

clattn_status blocks_new(clattn_context *context, const clattn_blocks_desc *desc, clattn_blocks **result)
{
    int64_t lists, entries, bytes;
    if (!multiply(desc->rows, desc->heads, &lists) || !multiply(lists, desc->topk, &entries) ||
        !multiply(entries, sizeof(int32_t), &bytes))
        return fail(context, CLATTN_SIZE_OVERFLOW, "block list of %lld rows, %d heads, topk %d exceeds 63 bits",
                    (long long)desc->rows, desc->heads, desc->topk);
    clattn_blocks *blocks = calloc(1, sizeof *blocks);
    if (!blocks) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a block list");
    blocks->block = desc->block;
    blocks->q_block = desc->q_block;
    blocks->rows = desc->rows;
    blocks->heads = desc->heads;
    blocks->topk = desc->topk;
    clattn_status status =
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

static clattn_status blocks_desc_check(clattn_context *context, const clattn_blocks_desc *desc,
                                       clattn_blocks_desc *copy)
{
    *copy = (clattn_blocks_desc)CLATTN_BLOCKS_DESC_INIT;
    if (!desc) return fail(context, CLATTN_INVALID_ARGUMENT, "desc is NULL");
    clattn_status status = desc_copy(context, "desc", copy, sizeof *copy, desc);
    if (!status) status = check_leaf(context, "desc.block", copy->block);
    if (status) return status;
    if (copy->q_block < 1)
        return fail(context, CLATTN_INVALID_ARGUMENT, "desc.q_block is %d; at least 1 is needed",
                    copy->q_block);
    if (copy->rows < 0 || copy->heads < 1 || copy->topk < 1)
        return fail(context, CLATTN_INVALID_SHAPE,
                    "desc has rows %lld, heads %d, topk %d; rows >= 0 and the others >= 1 are needed",
                    (long long)copy->rows, copy->heads, copy->topk);
    return CLATTN_SUCCESS;
}

clattn_status clattn_blocks_create(clattn_context *context, const clattn_blocks_desc *desc,
                                   const int32_t *indices, clattn_blocks **result)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!result || !indices)
        return fail(context, CLATTN_INVALID_ARGUMENT, "%s is NULL", result ? "indices" : "blocks");
    clattn_blocks_desc copy;
    clattn_blocks *blocks = NULL;
    clattn_status status = blocks_desc_check(context, desc, &copy);
    if (!status) status = blocks_new(context, &copy, &blocks);
    if (status) return status;

    int64_t lists = copy.rows * copy.heads;
    size_t bytes = (size_t)(lists * copy.topk) * sizeof(int32_t);
    int32_t *sorted = malloc(MAX(bytes, 1)), *counts = malloc((size_t)MAX(lists, 1) * sizeof *counts);
    blocks->row_max = malloc((size_t)MAX(copy.rows, 1) * sizeof *blocks->row_max);
    if (!sorted || !counts || !blocks->row_max) {
        status = fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a block list of %zu bytes", bytes);
        goto done;
    }
    memcpy(sorted, indices, bytes);
    for (int64_t row = 0; row < copy.rows; row++)
        blocks->row_max[row] = -1;
    for (int64_t i = 0; i < lists; i++) {
        int32_t *list = sorted + i * copy.topk;
        counts[i] = list_normalise(list, copy.topk);
        for (int32_t j = 0; j < copy.topk; j++)
            if (indices[i * copy.topk + j] < -1) {
                status = fail(
                    context, CLATTN_INVALID_BLOCKS, "indices[%lld][%lld][%d] is %d; -1 or more is needed",
                    (long long)(i / copy.heads), (long long)(i % copy.heads), j, indices[i * copy.topk + j]);
                goto done;
            }
        int32_t *row_max = &blocks->row_max[i / copy.heads];
        if (counts[i] > 0) *row_max = MAX(*row_max, list[counts[i] - 1]);
    }
    if (bytes) status = context->backend->storage_write(context, &blocks->indices, sorted, bytes);
    if (bytes && !status)
        status =
            context->backend->storage_write(context, &blocks->counts, counts, (size_t)lists * sizeof *counts);
done:
    free(sorted);
    free(counts);
    if (status)
        clattn_blocks_release(context, blocks);
    else
        *result = blocks;
    return status;
}

/* Does the bias, if any, have a value for every block? */
static clattn_status bias_check(clattn_context *context, int32_t block, const struct problem *problem)
{
    const clattn_tensor *bias = problem->options.bias;
    int64_t available = ceil_div(problem->kv_len_max, block);
    if (!bias || bias->len >= available) return CLATTN_SUCCESS;
    return fail(context, CLATTN_INVALID_SHAPE, "bias.len is %lld; the keys have %lld blocks of %d",
                (long long)bias->len, (long long)available, block);
}

/* Does the list (NULL: all keys) fit the problem: rows, heads, and no index past the keys of its sequence? */
clattn_status blocks_check(clattn_context *context, const clattn_blocks *blocks, const struct problem *problem)
{
    clattn_status status = bias_check(context, blocks ? blocks->block : DENSE_BLOCK, problem);
    if (status || !blocks) return status;
    if (blocks->rows != problem->list_rows)
        return fail(context, CLATTN_INVALID_BLOCKS,
                    "blocks has %lld rows; q needs %lld (one per %d query rows)", (long long)blocks->rows,
                    (long long)problem->list_rows, blocks->q_block);
    if (blocks->heads != 1 && blocks->heads != problem->kv_heads && blocks->heads != problem->q_heads)
        return fail(context, CLATTN_INVALID_BLOCKS,
                    "blocks has %d heads; 1, kv_heads %d or q_heads %d are possible", blocks->heads,
                    problem->kv_heads, problem->q_heads);
    for (int64_t s = 0; blocks->row_max && s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        int64_t available = ceil_div(sequence->kv_len, blocks->block);
        for (int64_t row = 0; row < ceil_div(sequence->q_len, blocks->q_block); row++) {
            int32_t greatest = blocks->row_max[sequence->list_row + row];
            if (greatest >= available)
                return fail(context, CLATTN_INVALID_BLOCKS,
                            "blocks row %lld lists block %d; sequence %lld has %lld blocks of %d keys",
                            (long long)(sequence->list_row + row), greatest, (long long)s, (long long)available,
                            blocks->block);
        }
    }
    return CLATTN_SUCCESS;
}

clattn_status clattn_blocks_describe(const clattn_blocks *blocks, clattn_blocks_desc *desc)
{
    if (!blocks || !desc || desc->size < sizeof(size_t)) return CLATTN_INVALID_ARGUMENT;
    clattn_blocks_desc full = {sizeof full,  blocks->block, blocks->q_block,
                               blocks->rows, blocks->heads, blocks->topk};
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
    free(blocks->mask);
    free(blocks->row_max);
    free(blocks);
}
