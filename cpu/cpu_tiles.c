/* SPDX-License-Identifier: MIT */
#include "cpu_tiles.h"

/* Lists whose rows are fewer than the lanes of a vector leave most of them idle: such a tile takes several list
 * rows and walks over the union of their lists. */
static int32_t tile_lists(const clattn_blocks *blocks, int32_t heads, int32_t union_rows)
{
    if (!blocks || blocks->mask) return 1;
    return MAX(1, MIN(TILE_LISTS_MAX, union_rows / heads / blocks->q_block));
}

struct tiling tiling_of(const struct problem *problem, const clattn_blocks *blocks, int32_t tile_rows,
                        int32_t union_rows)
{
    bool per_query_head = blocks && blocks->heads == problem->q_heads;
    int32_t heads = per_query_head ? 1 : problem->group, lists = tile_lists(blocks, heads, union_rows);
    int64_t list_rows = blocks ? blocks->q_block : MAX(problem->q_len_max, 1);
    int64_t rows = lists > 1 ? list_rows : MIN(MAX(1, tile_rows / heads), list_rows);
    return (struct tiling){heads, (int32_t)rows * lists, lists, ceil_div(list_rows, rows)};
}

int64_t tiling_tiles(const struct tiling *tiling, const struct problem *problem, const clattn_blocks *blocks,
                     int64_t s)
{
    int64_t q_len = problem->sequences[s].q_len,
            lists = blocks ? ceil_div(q_len, blocks->q_block) : MIN(q_len, 1);
    return ceil_div(lists, tiling->lists) * (problem->q_heads / tiling->heads) * tiling->list_tiles;
}

bool tile_of(const struct problem *problem, const clattn_blocks *blocks, const struct tiling *tiling, int64_t s,
             int64_t n, struct forward_tile *tile)
{
    const struct sequence *sequence = &problem->sequences[s];
    int32_t head_tiles = problem->q_heads / tiling->heads;
    int64_t list_rows = blocks ? blocks->q_block : sequence->q_len;
    int64_t part = n % tiling->list_tiles, head = n / tiling->list_tiles % head_tiles;
    int64_t list_row = n / tiling->list_tiles / head_tiles * tiling->lists;
    int64_t row = list_row * list_rows + part * tiling->rows;
    int64_t end = MIN(MIN(row + tiling->rows, (list_row + tiling->lists) * list_rows), sequence->q_len);
    if (row >= end) return false;
    *tile = (struct forward_tile){.sequence = sequence,
                                  .row = row,
                                  .rows = (int32_t)(end - row),
                                  .head = (int32_t)head * tiling->heads,
                                  .heads = tiling->heads,
                                  .lists = 1,
                                  .list_rows = (int32_t)(end - row)};
    if (!blocks) return true;
    if (tiling->lists > 1) {
        tile->lists = (int32_t)ceil_div(end - row, list_rows);
        tile->list_rows = (int32_t)list_rows;
    }
    int64_t list_head = (int64_t)tile->head * blocks->heads / problem->q_heads;
    int64_t list = (sequence->list_row + list_row) * blocks->heads + list_head;
    tile->indices = (const int32_t *)blocks->indices.host + list * blocks->topk;
    tile->counts = (const int32_t *)blocks->counts.host + list;
    tile->list_step = (int64_t)blocks->heads * blocks->topk;
    tile->count_step = blocks->heads;
    if (blocks->mask) tile->cut = (const unsigned char *)blocks->mask->cut.host + list * blocks->topk;
    return true;
}
