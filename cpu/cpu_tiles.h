/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_TILES_H
#define CLATTN_CPU_TILES_H

/* Cutting the query rows of each list into tiles, for the forward pass and the gradient of the queries, and the
 * rows that list a key block into packs, for the gradients of the keys. Sizes come from the cache of a core;
 * results do not depend on them by a bit. */

#include "cpu.h"

/* How rows and heads are cut. Heads that share a list and a key head form one tile. */
struct tiling {
    int32_t heads;      /* query heads of a tile */
    int32_t rows;       /* query rows of a tile */
    int32_t rows_most;  /* of the last tile of a list, which has what would be too little for one more */
    int32_t lists;      /* list rows of a tile; with more than one it has them whole */
    int64_t list_tiles; /* tiles of one list row and head */
};

/* blocks NULL: all keys. */
struct tiling tiling_of(const struct cpu_state *state, const struct problem *problem,
                        const clattn_blocks *blocks);

/* Number of tiles of a sequence; some may have no row. */
int64_t tiling_tiles(const struct tiling *tiling, const struct problem *problem, const clattn_blocks *blocks,
                     int64_t s);

/* Tile n of sequence s, or false when its rows lie past the end. */
bool tile_of(const struct problem *problem, const clattn_blocks *blocks, const struct tiling *tiling, int64_t s,
             int64_t n, struct forward_tile *tile);

/* ---- sizes ---- */

/* Query rows x heads of a tile, `suited`, twice or half as many: of `rows` in all, each with a state of
 * row_bytes, for a core that has cache_bytes (0: not known). */
int32_t tile_rows_of(int64_t cache_bytes, int64_t row_bytes, int64_t rows, int32_t suited);

/* Query rows x heads of a pack: PACK_ROWS_MAX, or half as many where those do not fit beside block_bytes. */
int32_t pack_rows_of(int64_t cache_bytes, int64_t row_bytes, int64_t block_bytes);

/* The latter for a job. */
int32_t pack_rows(const struct cpu_state *state, const struct backward_job *job);

#endif
