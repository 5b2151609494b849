/* SPDX-License-Identifier: MIT */
/* How much neighbouring queries' lists overlap: a sample, from which a backend chooses how to compute. */

#include "internal.h"

#include <stdlib.h>
#include <string.h>

enum { SAMPLES = 16, QUERIES_MAX = 32, TOPK_MAX = 512 };

static int compare_indices(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Blocks in the union of `rows` list rows from `row` on. */
static int64_t union_size(const clattn_blocks *blocks, const int32_t *indices, int64_t row, int rows, int head,
                          int32_t *room)
{
    int64_t count = 0, size = 0;
    for (int r = 0; r < rows; r++) {
        memcpy(room + count, indices + ((row + r) * blocks->heads + head) * blocks->topk,
               (size_t)blocks->topk * sizeof *room);
        count += blocks->topk;
    }
    qsort(room, (size_t)count, sizeof *room, compare_indices);
    for (int64_t i = 0; i < count; i++)
        size += room[i] >= 0 && (i == 0 || room[i] != room[i - 1]);
    return size;
}

void blocks_sample(clattn_blocks *blocks, const int32_t *indices)
{
    static const int queries[BLOCKS_UNIONS] = {4, 8, 16, 32};
    for (int n = 0; n < BLOCKS_UNIONS; n++)
        blocks->union_blocks[n] = (float)queries[n] * (float)blocks->topk;
    if (blocks->q_block > 1 || blocks->topk > TOPK_MAX || blocks->rows < 1) return;
    int32_t *room = malloc((size_t)QUERIES_MAX * (size_t)blocks->topk * sizeof *room);
    for (int n = 0; room && n < BLOCKS_UNIONS; n++) {
        int rows = (int)MIN(queries[n], blocks->rows);
        int64_t tiles = blocks->rows / rows, samples = MIN(tiles, SAMPLES), sum = 0;
        for (int64_t s = 0; s < samples; s++) /* the middle of each of as many equal parts */
            sum += union_size(blocks, indices, (2 * s + 1) * tiles / (2 * samples) * rows, rows,
                              (int)(s % blocks->heads), room);
        blocks->union_blocks[n] = (float)sum / (float)samples;
    }
    free(room);
}
