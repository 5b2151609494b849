/* SPDX-License-Identifier: MIT */
#include "cpu_tiles.h"

#include "key_blocks.h"

struct tiling tiling_of(const struct problem *problem, const clattn_blocks *blocks, int32_t tile_rows)
{
    bool per_query_head = blocks && blocks->heads == problem->q_heads;
    int32_t heads = per_query_head ? 1 : problem->group;
    int64_t rows = MAX(1, tile_rows / heads);
    int64_t list_rows = blocks ? blocks->q_block : MAX(problem->q_len_max, 1);
    rows = MIN(rows, list_rows);
    return (struct tiling){heads, (int32_t)rows, ceil_div(list_rows, rows)};
}

int64_t tiling_tiles(const struct tiling *tiling, const struct problem *problem, const clattn_blocks *blocks,
                     int64_t s)
{
    int64_t q_len = problem->sequences[s].q_len,
            lists = blocks ? ceil_div(q_len, blocks->q_block) : MIN(q_len, 1);
    return lists * (problem->q_heads / tiling->heads) * tiling->list_tiles;
}

bool tile_of(const struct problem *problem, const clattn_blocks *blocks, const struct tiling *tiling, int64_t s,
             int64_t n, struct forward_tile *tile)
{
    const struct sequence *sequence = &problem->sequences[s];
    int32_t head_tiles = problem->q_heads / tiling->heads;
    int64_t list_rows = blocks ? blocks->q_block : sequence->q_len;
    int64_t part = n % tiling->list_tiles, head = n / tiling->list_tiles % head_tiles;
    int64_t list_row = n / tiling->list_tiles / head_tiles;
    int64_t row = list_row * list_rows + part * tiling->rows;
    int64_t end = MIN(MIN(row + tiling->rows, (list_row + 1) * list_rows), sequence->q_len);
    if (row >= end) return false;
    *tile = (struct forward_tile){.sequence = sequence,
                                  .row = row,
                                  .rows = (int32_t)(end - row),
                                  .head = (int32_t)head * tiling->heads,
                                  .heads = tiling->heads};
    if (blocks) {
        int64_t list_head = (int64_t)tile->head * blocks->heads / problem->q_heads;
        int64_t list = (sequence->list_row + list_row) * blocks->heads + list_head;
        tile->indices = (const int32_t *)blocks->indices.host + list * blocks->topk;
        tile->count = ((const int32_t *)blocks->counts.host)[list];
        if (blocks->mask) tile->cut = (const unsigned char *)blocks->mask->cut.host + list * blocks->topk;
        int64_t available = key_blocks_listed(blocks, sequence).count;
        while (tile->count > 0 && tile->indices[tile->count - 1] >= available)
            tile->count--; /* a list that was selected on more keys than these */
    }
    return true;
}
