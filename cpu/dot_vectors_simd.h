/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_DOT_VECTORS_SIMD_H
#define CLATTN_DOT_VECTORS_SIMD_H

/* Logits for selection, where vectors of queries come from anywhere and share the rows of a leaf, and pairs of
 * rows come from anywhere and share the queries. Included after a vector layer.
 *
 *                  lanes ->
 *     d    q      [vector][dim][WIDTH]   each vector where its pointer says
 *     row  key    [row][dim]             float32, broadcast
 *     row  logits [vector][capacity][WIDTH] = scale * sum_d q key
 *
 * Like those of dot_simd.h, each logit is one chain of additions in the order of d, whatever its tile. */

#include "dot_simd.h"

enum {
    VECTORS_MAX = 3,
    /* rows of a tile of one, two and three vectors: as many sums as the registers hold */
    TILE_ROWS_1 = DOT_ROWS_1,
    TILE_ROWS_2 = DOT_ROWS_2,
    TILE_ROWS_3 = DOT_ROWS_2 * 2 / 3,
    STEPS = 4 /* of d at once */
};

/* rows pair[n] and pair[n] + dim, or rows `stride` apart from key on */
struct tile_rows {
    const float *key;
    int64_t stride;
    const float *const *pair;
};

/* Lines of rows that are prefetched one after the other, `burst` of them every STEPS steps of d. */
struct line_walk {
    const char *at;
    int64_t left, lines; /* of the current row and of each */
    int64_t skip;        /* bytes from the end of a row's last line to the next row */
    int64_t all;         /* lines that remain */
    int32_t burst;
};

static inline struct line_walk line_walk_of(const struct rows *rows)
{
    int64_t lines = row_lines(rows);
    return (struct line_walk){.at = rows->data,
                              .left = lines,
                              .lines = lines,
                              .skip = stride_bytes(rows) - lines * LINE,
                              .all = lines * rows->count};
}

/* One step of d. */
#define DOT_STEP(D)                                                                                            \
    do {                                                                                                       \
        vec query[VECTORS_MAX];                                                                                \
        UNROLL for (int n = 0; n < vectors; n++) query[n] = vec_load(at[n] + (D)*WIDTH);                       \
        UNROLL for (int a = 0; a < rows; a++)                                                                  \
        {                                                                                                      \
            vec element =                                                                                      \
                vec_set(pairs ? base[a / 2][(D) + a % 2 * stride] : base[a / 3][(D) + a % 3 * stride]);        \
            UNROLL for (int n = 0; n < vectors; n++) sum[a][n] = vec_fma(element, query[n], sum[a][n]);        \
        }                                                                                                      \
    } while (0)

ALWAYS_INLINE void vectors_tile(const float *const *q, int32_t dim, struct tile_rows from, float scale,
                                float *logits, int64_t capacity, struct line_walk *ahead, const bool pairs,
                                const int rows, const int vectors)
{
    vec sum[16][VECTORS_MAX];
    const float *base[8], *at[VECTORS_MAX];
    int64_t stride = pairs ? dim : from.stride;
    UNROLL for (int n = 0; n < vectors; n++) at[n] = q[n];
    UNROLL for (int a = 0; a < rows; a++)
    {
        if (pairs && a % 2 == 0) base[a / 2] = from.pair[a / 2];
        if (!pairs && a % 3 == 0) base[a / 3] = from.key + a * stride;
        UNROLL for (int n = 0; n < vectors; n++) sum[a][n] = vec_zero();
    }
    struct line_walk line;
    int32_t d = 0;
    if (!pairs) line = *ahead;
    for (; d + STEPS <= dim; d += STEPS) {
        for (int32_t n = 0; !pairs && n < line.burst; n++) {
            prefetch_line(line.at);
            line.at += LINE;
            if (--line.left > 0) continue;
            line.at += line.skip;
            line.left = line.lines;
        }
        UNROLL for (int step = 0; step < STEPS; step++) DOT_STEP(d + step);
    }
    for (; d < dim; d++)
        DOT_STEP(d);
    if (!pairs) *ahead = line;
    UNROLL for (int a = 0; a < rows; a++)
    {
        UNROLL for (int n = 0; n < vectors; n++)
            vec_store(logits + (n * capacity + a) * WIDTH, vec_mul(sum[a][n], vec_set(scale)));
    }
}

#undef DOT_STEP

/* ---- rows of a leaf ---- */

#define VECTORS_ROWS(NAME, ROWS, VECTORS)                                                                      \
    static void NAME(const float *const *q, int32_t dim, const float *key, int64_t stride, float scale,        \
                     float *logits, int64_t capacity, struct line_walk *ahead)                                 \
    {                                                                                                          \
        struct tile_rows from = {key, stride, NULL};                                                           \
        vectors_tile(q, dim, from, scale, logits, capacity, ahead, false, ROWS, VECTORS);                      \
    }

VECTORS_ROWS(vectors_rows_1, TILE_ROWS_1, 1)
VECTORS_ROWS(vectors_rows_2, TILE_ROWS_2, 2)
VECTORS_ROWS(vectors_rows_3, TILE_ROWS_3, 3)
VECTORS_ROWS(vectors_four_1, 4, 1)
VECTORS_ROWS(vectors_four_2, 4, 2)
VECTORS_ROWS(vectors_single_1, 1, 1)
VECTORS_ROWS(vectors_single_2, 1, 2)
VECTORS_ROWS(vectors_single_3, 1, 3)

typedef void vectors_rows_function(const float *const *q, int32_t dim, const float *key, int64_t stride,
                                   float scale, float *logits, int64_t capacity, struct line_walk *ahead);

static const struct {
    int full, less; /* rows of the three functions: full, less, 1 */
    vectors_rows_function *tile, *rest, *single;
} vectors_tiles[VECTORS_MAX] = {
    {TILE_ROWS_1, 4, vectors_rows_1, vectors_four_1, vectors_single_1},
    {TILE_ROWS_2, 4, vectors_rows_2, vectors_four_2, vectors_single_2},
    {TILE_ROWS_3, TILE_ROWS_3, vectors_rows_3, vectors_rows_3, vectors_single_3},
};

/* logits [vector][capacity][WIDTH] of `count` rows. Meanwhile a share of the lines `ahead` is prefetched: one
 * `passes`th of those that remain. */
static inline void dot_vectors(const float *const *q, int vectors, int32_t dim, const float *key,
                               int64_t stride, int64_t count, float scale, float *logits, int64_t capacity,
                               struct line_walk *ahead, int64_t passes)
{
    int full = vectors_tiles[vectors - 1].full, less = vectors_tiles[vectors - 1].less;
    int64_t steps = MAX(dim / STEPS, 1), share = ceil_div(ahead->all, passes);
    for (int64_t done = 0, rows; done < count; done += rows) {
        vectors_rows_function *tile = vectors_tiles[vectors - 1].tile;
        rows = full;
        if (count - done < full) {
            tile = count - done >= less ? vectors_tiles[vectors - 1].rest : vectors_tiles[vectors - 1].single;
            rows = count - done >= less ? less : 1;
        }
        ahead->burst = (int32_t)MIN(ceil_div(share, ceil_div(count - done, full) * steps), ahead->all / steps);
        share -= ahead->burst * steps;
        ahead->all -= ahead->burst * steps;
        tile(q, dim, key + done * stride, stride, scale, logits + done * WIDTH, capacity, ahead);
    }
}

/* ---- pairs of rows ---- */

#define PAIRS_CASE(PAIRS, VECTORS)                                                                             \
    case PAIRS:                                                                                                \
        vectors_tile(q, dim, from, scale, logits, capacity, NULL, true, 2 * PAIRS, VECTORS);                   \
        return;

static void pairs_one(const float *const *q, int32_t dim, struct tile_rows from, int64_t pairs, float scale,
                      float *logits, int64_t capacity)
{
    switch (pairs) {
        PAIRS_CASE(1, 1)
        PAIRS_CASE(2, 1)
        PAIRS_CASE(3, 1)
        PAIRS_CASE(4, 1)
#if defined(SIMD_PAIRS_6)
        PAIRS_CASE(5, 1)
        PAIRS_CASE(6, 1)
#endif
#if defined(SIMD_PAIRS_8)
        PAIRS_CASE(7, 1)
        PAIRS_CASE(8, 1)
#endif
    }
}

static void pairs_two(const float *const *q, int32_t dim, struct tile_rows from, int64_t pairs, float scale,
                      float *logits, int64_t capacity)
{
    switch (pairs) {
        PAIRS_CASE(1, 2)
        PAIRS_CASE(2, 2)
        PAIRS_CASE(3, 2)
#if defined(SIMD_PAIRS_8)
        PAIRS_CASE(4, 2)
        PAIRS_CASE(5, 2)
        PAIRS_CASE(6, 2)
#endif
    }
}

/* logits [vector][capacity][WIDTH] of 2 * count rows, for one or two vectors. Tiles of nearly equal size: a
 * small last one would wait for its own additions. */
static inline void dot_pairs(const float *const *q, int vectors, int32_t dim, const float *const *pair,
                             int64_t count, float scale, float *logits, int64_t capacity)
{
    int64_t most = (vectors == 2 ? TILE_ROWS_2 : TILE_ROWS_1) / 2, tiles = ceil_div(count, most);
    for (int64_t done = 0; done < count; tiles--) {
        int64_t pairs = ceil_div(count - done, tiles);
        struct tile_rows from = {NULL, 0, pair + done};
        if (vectors == 2)
            pairs_two(q, dim, from, pairs, scale, logits + 2 * done * WIDTH, capacity);
        else
            pairs_one(q, dim, from, pairs, scale, logits + 2 * done * WIDTH, capacity);
        done += pairs;
    }
}

#endif
