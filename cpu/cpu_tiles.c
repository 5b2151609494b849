/* SPDX-License-Identifier: MIT */
/* A tile of R rows keeps R states in the level-2 cache: queries, sums and the logits of a block. Keys and
 * values stream by, once a tile, so that each product of a row with a key moves 8 dim / R bytes from further
 * away; a state that does not fit is read and written once a block instead, which is as much for any R. So as
 * many rows as fit, in two thirds of the cache: the rest is for the blocks that stream. Simulated (cachegrind,
 * dim 128, lines read from beyond the cache for 256 rows and 1024 keys):
 *
 *     rows      16       32       64      128
 *     128 KiB   326000   195000   165000   165000
 *     256 KiB   317000   185000   120000    91000
 *     512 KiB   312000   181000   115000    82000
 *
 * More than twice what suits the kernel leaves little to save, and less for threads to share. The level-1 cache
 * holds what register tiles work on, whose size the number of registers decides. */

#include "cpu_tiles.h"

#include "backward.h"

enum {
    TAIL_ROWS = 4,      /* rows x heads that are no tile of their own: kernels treat so few in another way */
    TILES_ENOUGH = 256, /* of large tiles, so that every thread has some */
};

static int64_t near_bytes(int64_t cache_bytes)
{
    return cache_bytes / 3 * 2;
}

int32_t tile_rows_of(int64_t cache_bytes, int64_t row_bytes, int64_t rows, int32_t suited)
{
    int64_t fit = near_bytes(cache_bytes) / row_bytes;
    if (!cache_bytes || suited < 2) return suited;
    if (fit >= 2 * suited && rows >= 2 * suited * (int64_t)TILES_ENOUGH) return 2 * suited;
    return fit >= suited ? suited : suited / 2;
}

int32_t pack_rows_of(int64_t cache_bytes, int64_t row_bytes, int64_t block_bytes)
{
    bool fits = block_bytes + PACK_ROWS_MAX * row_bytes <= near_bytes(cache_bytes);
    return !cache_bytes || fits ? PACK_ROWS_MAX : PACK_ROWS_MAX / 2;
}

int32_t pack_rows(const struct cpu_state *state, const struct backward_job *job)
{
    int64_t dims = job->problem->dim + job->problem->dim_v, block = backward_block(job);
    int64_t row = dims + 3 * block;                                       /* q, dout; logits, dp and dx */
    int64_t all = block * (2 * dims + (job->dq ? job->problem->dim : 0)); /* k, v, dk, dv; k again for dq */
    return pack_rows_of(state->machine.cache_bytes, row * (int64_t)sizeof(float), all * (int64_t)sizeof(float));
}

static int32_t tile_rows(const struct cpu_state *state, const struct problem *problem,
                         const clattn_blocks *blocks)
{
    int32_t suited = state->kernels.forward_rows;
    int64_t floats = problem->dim + problem->dim_v + (blocks ? blocks->block : DENSE_BLOCK), rows = 0;
    /* Windows and the caller's boundaries: a tile's first row decides where its pieces of blocks begin. */
    if (blocks && blocks->starts) return suited;
    for (int64_t s = 0; s < problem->count; s++)
        rows += problem->sequences[s].q_len * problem->q_heads;
    return tile_rows_of(state->machine.cache_bytes, floats * (int64_t)sizeof(float), rows, suited);
}

/* Lists whose rows are fewer than the lanes of a vector leave most of them idle: such a tile takes several list
 * rows and walks over the union of their lists. */
static int32_t tile_lists(const clattn_blocks *blocks, int32_t heads, int32_t union_rows)
{
    if (!blocks || blocks->mask) return 1;
    return MAX(1, MIN(TILE_LISTS_MAX, union_rows / heads / blocks->q_block));
}

struct tiling tiling_of(const struct cpu_state *state, const struct problem *problem,
                        const clattn_blocks *blocks)
{
    bool per_query_head = blocks && blocks->heads == problem->q_heads;
    int32_t heads = per_query_head ? 1 : problem->group;
    int32_t lists = tile_lists(blocks, heads, state->kernels.union_rows);
    int64_t list_rows = blocks ? blocks->q_block : MAX(problem->q_len_max, 1);
    int64_t rows = MIN(MAX(1, tile_rows(state, problem, blocks) / heads), list_rows);
    if (lists > 1) rows = list_rows;
    int64_t most = MIN(rows + TAIL_ROWS / heads, list_rows);
    return (struct tiling){heads, (int32_t)rows * lists, (int32_t)most * lists, lists,
                           ceil_div(list_rows, rows)};
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
    int64_t row = list_row * list_rows + part * tiling->rows, end = row + tiling->rows;
    int64_t last = MIN((list_row + tiling->lists) * list_rows, sequence->q_len),
            tail = TAIL_ROWS / tiling->heads;
    if (row >= last || (part > 0 && last - row <= tail)) return false; /* the tile before has the tail */
    if (last - end <= tail) end = last;
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
