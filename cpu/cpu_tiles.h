/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_TILES_H
#define CLATTN_CPU_TILES_H

/* Cutting the query rows of each list into tiles, for the forward pass and the gradient of the queries. */

#include "cpu.h"

/* How rows and heads are cut. Heads that share a list and a key head form one tile. */
struct tiling {
    int32_t heads;      /* query heads of a tile */
    int32_t rows;       /* query rows of a tile */
    int32_t lists;      /* list rows of a tile; with more than one it has them whole */
    int64_t list_tiles; /* tiles of one list row and head */
};

/* tile_rows: query rows x heads that suit the kernel; union_rows: those that tiles of several lists may have.
 * blocks NULL: all keys. */
struct tiling tiling_of(const struct problem *problem, const clattn_blocks *blocks, int32_t tile_rows,
                        int32_t union_rows);

/* Number of tiles of a sequence; some may have no row. */
int64_t tiling_tiles(const struct tiling *tiling, const struct problem *problem, const clattn_blocks *blocks,
                     int64_t s);

/* Tile n of sequence s, or false when its rows lie past the end. */
bool tile_of(const struct problem *problem, const clattn_blocks *blocks, const struct tiling *tiling, int64_t s,
             int64_t n, struct forward_tile *tile);

#endif
