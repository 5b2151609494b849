/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_DOT_SIMD_H
#define CLATTN_DOT_SIMD_H

/* Logits, for attention and selection. Included after a vector layer (simd_*.h).
 *
 * Query rows stand in the lanes of vectors ("lane groups" of one or two vectors), packed once as
 * q [dim][lanes]. Keys stay as they are, [row][dim], and are broadcast element by element:
 *
 *                  lanes ->
 *     d    q      [dim][lanes]
 *     row  key    [row][dim]     (broadcast)
 *     row  logits [row][lanes]   = scale * sum_d q key
 *
 * Each logit is one chain of additions in the order of d, whatever the size of its tile: equal inputs give
 * equal bits. */

#include "rows_simd.h"

enum { LANES_MAX = 2 * WIDTH }; /* of a lane group */

/* Rows that are packed as lane groups: all full but the last, which may have one vector. */
static inline int lane_vectors(int64_t rows_left)
{
    return rows_left > WIDTH ? 2 : 1;
}

/* ---- queries ---- */

/* Row `lane` of a lane group: q [dim][lanes] gets its elements. */
static inline void query_pack(const void *row, clattn_dtype dtype, int32_t dim, float *q, int64_t lanes,
                              int64_t lane)
{
    float values[256];
    panel_to_float(row, dtype, 0, 1, dim, values, 0);
    for (int32_t d = 0; d < dim; d++)
        q[d * lanes + lane] = values[d];
}

/* Lanes without a row are zero. */
static inline void query_pad(int32_t dim, float *q, int64_t lanes, int64_t from)
{
    for (int32_t d = 0; d < dim; d++)
        for (int64_t lane = from; lane < lanes; lane++)
            q[d * lanes + lane] = 0;
}

/* Rows row[0] .. row[count - 1] become a lane group: q [dim][lanes], lanes = vectors * WIDTH. */
static inline void queries_pack(const void *const *row, int64_t count, clattn_dtype dtype, int32_t dim,
                                float *q, int vectors)
{
    for (int n = 0; n < vectors; n++, q += WIDTH) {
        int64_t left = MIN(count - n * WIDTH, WIDTH), lanes = vectors * WIDTH;
        int32_t d = 0;
        for (; d + WIDTH <= dim; d += WIDTH) {
            vec square[WIDTH];
            UNROLL for (int i = 0; i < WIDTH; i++) square[i] =
                i < left ? vec_load_as(row[n * WIDTH + i], dtype, d) : vec_zero();
            vec_transpose(square);
            UNROLL for (int i = 0; i < WIDTH; i++) vec_store(q + (d + i) * lanes, square[i]);
        }
        for (; d < dim; d++)
            for (int64_t i = 0; i < WIDTH; i++)
                q[d * lanes + i] = i < left ? load_element(row[n * WIDTH + i], dtype, d) : 0;
    }
}

/* ---- logits ---- */

/* AHEAD_STEPS steps of d prefetch one line of the next AHEAD_STEPS rows: a float32 row has a line every 16
 * steps. */
enum { AHEAD_STEPS = 16 };

/* Steps of d without a branch. */
enum { DOT_STEPS = 4 };

/* One step of d: sum [row][vector] += key [row] * q [vector], and the pointers move on. Each pointer stays a
 * register of its own: left to themselves compilers derive some from others and run out of registers. */
#define DOT_STEP()                                                                                             \
    do {                                                                                                       \
        vec query[2];                                                                                          \
        UNROLL for (int n = 0; n < vectors; n++) query[n] = vec_load(q + n * WIDTH);                           \
        q += vectors * WIDTH;                                                                                  \
        KEEP_POINTER(q);                                                                                       \
        UNROLL for (int a = 0; a < rows; a++)                                                                  \
        {                                                                                                      \
            vec element = vec_set(base[a / 3][a % 3 * stride]);                                                \
            UNROLL for (int n = 0; n < vectors; n++) sum[a][n] = vec_fma(element, query[n], sum[a][n]);        \
        }                                                                                                      \
        UNROLL for (int a = 0; a < rows; a += 3)                                                               \
        {                                                                                                      \
            base[a / 3]++;                                                                                     \
            KEEP_POINTER(base[a / 3]);                                                                         \
        }                                                                                                      \
    } while (0)

ALWAYS_INLINE void dot_tile(const float *q, int32_t dim, const float *key, int64_t stride, float scale,
                            float *logits, struct ahead ahead, int64_t ahead_bytes, const int rows,
                            const int vectors)
{
    vec sum[16][2];
    const float *base[6]; /* every third row; the two after it are reached by the stride */
    UNROLL for (int a = 0; a < rows; a++)
    {
        if (a % 3 == 0) base[a / 3] = key + a * stride;
        UNROLL for (int n = 0; n < vectors; n++) sum[a][n] = vec_zero();
    }
    int32_t d = 0;
    for (; d + AHEAD_STEPS <= dim; d += AHEAD_STEPS, ahead.at += ahead_bytes) {
        const char *line = ahead.at;
        for (int32_t n = 0; n < AHEAD_STEPS; n += DOT_STEPS) {
            UNROLL for (int step = 0; step < DOT_STEPS; step++)
            {
                if (rows > 1) prefetch_line(line);
                line += ahead.stride;
                KEEP_POINTER(line);
                DOT_STEP();
            }
        }
    }
    for (; d < dim; d++)
        DOT_STEP();
    UNROLL for (int a = 0; a < rows; a++)
    {
        UNROLL for (int n = 0; n < vectors; n++)
            vec_store(logits + (a * vectors + n) * WIDTH, vec_mul(sum[a][n], vec_set(scale)));
    }
}

#undef DOT_STEP
#undef DOT_STEP

static void dot_tile_full_1(const float *q, int32_t dim, const float *key, int64_t stride, float scale,
                            float *logits, struct ahead ahead, int64_t ahead_bytes)
{
    dot_tile(q, dim, key, stride, scale, logits, ahead, ahead_bytes, DOT_ROWS_1, 1);
}

static void dot_tile_full_2(const float *q, int32_t dim, const float *key, int64_t stride, float scale,
                            float *logits, struct ahead ahead, int64_t ahead_bytes)
{
    dot_tile(q, dim, key, stride, scale, logits, ahead, ahead_bytes, DOT_ROWS_2, 2);
}

/* Tiles of fewer rows: 4 or 1. Returns the rows done. */
static int32_t dot_tile_rest(const float *q, int32_t dim, int vectors, const float *key, int64_t stride,
                             int64_t left, float scale, float *logits)
{
    struct ahead none = {(const char *)key, 0};
    if (left >= 4) {
        if (vectors == 2)
            dot_tile(q, dim, key, stride, scale, logits, none, 0, 4, 2);
        else
            dot_tile(q, dim, key, stride, scale, logits, none, 0, 4, 1);
        return 4;
    }
    if (vectors == 2)
        dot_tile(q, dim, key, stride, scale, logits, none, 0, 1, 2);
    else
        dot_tile(q, dim, key, stride, scale, logits, none, 0, 1, 1);
    return 1;
}

/* The next tile of `left` rows; returns how many it did. Meanwhile as many rows from `ahead` on are prefetched,
 * ahead_bytes for every AHEAD_STEPS steps of d.
 * logits [row][lanes] = scale * sum_d q [dim][lanes] * key [row][dim],  lanes = vectors * WIDTH */
static inline int32_t dot_rows_ahead(const float *q, int32_t dim, int vectors, const float *key, int64_t stride,
                                     int64_t left, float scale, float *logits, struct ahead ahead,
                                     int64_t ahead_bytes)
{
    if (vectors == 2 && left >= DOT_ROWS_2) {
        dot_tile_full_2(q, dim, key, stride, scale, logits, ahead, ahead_bytes);
        return DOT_ROWS_2;
    }
    if (vectors == 1 && left >= DOT_ROWS_1) {
        dot_tile_full_1(q, dim, key, stride, scale, logits, ahead, ahead_bytes);
        return DOT_ROWS_1;
    }
    return dot_tile_rest(q, dim, vectors, key, stride, left, scale, logits);
}

static inline int32_t dot_rows(const float *q, int32_t dim, int vectors, const float *key, int64_t stride,
                               int64_t left, float scale, float *logits)
{
    struct ahead none = {(const char *)key, 0};
    return dot_rows_ahead(q, dim, vectors, key, stride, left, scale, logits, none, 0);
}

/* Rows that are taken at once through all lane groups, small enough to stay in the nearest cache when packed.
 */
enum { CHUNK_ROWS_MAX = DOT_ROWS_1 > 2 * DOT_ROWS_2 ? DOT_ROWS_1 : 2 * DOT_ROWS_2 };

/* Logits of all lane groups:  q [lane group][dim][lanes], logits [lane group][capacity][lanes], of which the
 * rows from `at` on are written, capacity >= at + keys->count; pack [CHUNK_ROWS_MAX][packed_stride(dim)].
 * ranges [lane group]: the keys that a group needs (NULL: all). Meanwhile `next` (NULL: nothing) is prefetched.
 */
static inline void dot_keys_any(const float *q, int64_t query_rows, const struct rows *keys, float scale,
                                const struct key_range *ranges, float *logits, int64_t capacity, int64_t at,
                                float *pack, const struct rows *next)
{
    int32_t dim = keys->dim;
    int64_t tile = lane_vectors(query_rows) == 1 ? DOT_ROWS_1 : DOT_ROWS_2;
    int64_t chunk = query_rows > LANES_MAX ? 2 * DOT_ROWS_2 : tile;
    int64_t ahead_bytes = next ? AHEAD_STEPS * element_bytes(next->dtype) : 0, ahead_step = 0;
    if (next) ahead_step = stride_bytes(next);
    if (next &&
        rows_contiguous(next)) { /* in the order of addresses, which the machine's own prefetchers see */
        ahead_step = ahead_bytes;
        ahead_bytes *= AHEAD_STEPS;
    }
    if (next) prefetch_lines(next, ceil_div(dim * element_bytes(next->dtype), LINE), row_lines(next));
    for (int64_t j = 0; j < keys->count; j += chunk) {
        int64_t count = MIN(chunk, keys->count - j);
        struct float_rows key =
            key_rows(keys->data + j * stride_bytes(keys), keys->dtype, keys->stride, count, dim, pack);
        if (keys->scale) panel_scale(keys->scale + j, count, dim, pack, key.stride);
        for (int64_t first = 0; first < query_rows; first += LANES_MAX) {
            int vectors = lane_vectors(query_rows - first);
            float *to = logits + first * capacity + (at + j) * vectors * WIDTH;
            struct key_range range = ranges ? ranges[first / LANES_MAX] : (struct key_range){0, keys->count};
            int64_t end = MIN(range.end - j, count);
            for (int64_t done = MAX(range.first - j, 0); done < end;) {
                bool more = next && first == 0 && j + done < next->count;
                struct ahead ahead = {(const char *)key.data, 0};
                if (more) ahead = (struct ahead){next->data + (j + done) * stride_bytes(next), ahead_step};
                done += dot_rows_ahead(q + first * dim, dim, vectors, key.data + done * key.stride, key.stride,
                                       end - done, scale, to + done * vectors * WIDTH, ahead,
                                       more ? ahead_bytes : 0);
            }
        }
    }
}

static inline void dot_keys_seen(const float *q, int64_t query_rows, const struct rows *keys, float scale,
                                 const struct key_range *ranges, float *logits, int64_t capacity, float *pack,
                                 const struct rows *next)
{
    dot_keys_any(q, query_rows, keys, scale, ranges, logits, capacity, 0, pack, next);
}

static inline void dot_keys_at(const float *q, int64_t query_rows, const struct rows *keys, float scale,
                               float *logits, int64_t capacity, int64_t at, float *pack,
                               const struct rows *next)
{
    dot_keys_any(q, query_rows, keys, scale, NULL, logits, capacity, at, pack, next);
}

static inline void dot_keys(const float *q, int64_t query_rows, const struct rows *keys, float scale,
                            float *logits, int64_t capacity, float *pack, const struct rows *next)
{
    dot_keys_any(q, query_rows, keys, scale, NULL, logits, capacity, 0, pack, next);
}

#endif
