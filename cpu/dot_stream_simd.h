/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_DOT_STREAM_SIMD_H
#define CLATTN_DOT_STREAM_SIMD_H

/* Logits of one vector of query rows: while a chunk of keys is multiplied the next one becomes float32, one
 * vector a step, so that neither conversions nor the caches make the products wait. Included after dot_simd.h,
 * for vector layers that define SIMD_STREAM_ROWS.
 *
 *     q       [dim][WIDTH]
 *     chunk   [STREAM_ROWS][STREAM_STRIDE]   two of them; a constant distance costs no instructions
 *     logits  [key][WIDTH]
 *
 * Elements of a chunk stand in the order of vec_load_half, in which q is read. */

#include "dot_simd.h"

enum {
    STREAM_ROWS = SIMD_STREAM_ROWS,
    STREAM_STRIDE = 256 + WIDTH, /* a line more than the longest row: rows in different sets */
    STREAM_FLOATS = 2 * STREAM_ROWS * STREAM_STRIDE
};

static inline bool dot_stream_fits(int64_t query_rows, const struct rows *keys)
{
    return query_rows <= WIDTH && keys->dim % PAIR == 0 && keys->count % STREAM_ROWS == 0;
}

/* What goes on beside the products: rows of `from` become float32 in `to`, and lines are prefetched. */
struct stream_beside {
    const char *from; /* NULL: nothing */
    int64_t from_stride;
    float *to;
    struct ahead ahead;
    int64_t ahead_bytes; /* for each vector of elements */
};

/* One vector of elements of a chunk. Each pointer stays a register of its own: see DOT_STEP. */
ALWAYS_INLINE void stream_half(const float *q, const float *key, const struct stream_beside *beside,
                               clattn_dtype dtype, vec sum[STREAM_ROWS], const int half)
{
    const int64_t step = WIDTH * half_step(dtype);
    const char *from = beside->from, *line = beside->ahead.at;
    float *to = beside->to;
    for (int row = 0; row < STREAM_ROWS; row += DOT_STEPS) {
        UNROLL for (int n = 0; n < DOT_STEPS; n++)
        {
            vec query = vec_load(q + n * step);
            prefetch_line(line);
            line += beside->ahead.stride;
            KEEP_POINTER(line);
            if (from) {
                vec_store(to + n * STREAM_STRIDE, vec_load_half(from, dtype, half));
                from += beside->from_stride;
                KEEP_POINTER(from);
            }
            UNROLL for (int a = 0; a < STREAM_ROWS; a++) sum[a] =
                vec_fma(vec_set(key[a * STREAM_STRIDE + n]), query, sum[a]);
        }
        q += DOT_STEPS * step;
        key += DOT_STEPS;
        to += DOT_STEPS * STREAM_STRIDE;
        KEEP_POINTER(q);
        KEEP_POINTER(key);
        KEEP_POINTER(to);
    }
}

ALWAYS_INLINE void stream_tile(const float *q, int32_t dim, const float *key, struct stream_beside beside,
                               clattn_dtype dtype, float scale, float *logits)
{
    vec sum[STREAM_ROWS];
    UNROLL for (int a = 0; a < STREAM_ROWS; a++) sum[a] = vec_zero();
    for (int32_t d = 0; d < dim; d += PAIR) {
        stream_half(q, key, &beside, dtype, sum, 0);
        beside.ahead.at += beside.ahead_bytes;
        beside.to += WIDTH;
        stream_half(q + half_first(dtype) * WIDTH, key + WIDTH, &beside, dtype, sum, 1);
        beside.ahead.at += beside.ahead_bytes;
        beside.to += WIDTH;
        if (beside.from) beside.from += PAIR * element_bytes(dtype);
        q += PAIR * WIDTH;
        key += PAIR;
    }
    UNROLL for (int a = 0; a < STREAM_ROWS; a++) vec_store(logits + a * WIDTH, vec_mul(sum[a], vec_set(scale)));
}

/* The first chunk. */
ALWAYS_INLINE void stream_pack(const char *from, int64_t stride, clattn_dtype dtype, int32_t dim, float *to)
{
    for (int a = 0; a < STREAM_ROWS; a++, from += stride, to += STREAM_STRIDE)
        for (int32_t d = 0; d < dim; d += PAIR) {
            vec_store(to + d, vec_load_half(from + d * element_bytes(dtype), dtype, 0));
            vec_store(to + d + WIDTH, vec_load_half(from + d * element_bytes(dtype), dtype, 1));
        }
}

ALWAYS_INLINE void dot_stream_of(const float *q, const struct rows *keys, clattn_dtype dtype, float scale,
                                 float *logits, float *chunk, const struct rows *next, struct ahead ahead,
                                 int64_t ahead_bytes)
{
    int64_t stride = stride_bytes(keys);
    const char *from = keys->data;
    float *then = chunk + STREAM_ROWS * STREAM_STRIDE;
    stream_pack(from, stride, dtype, keys->dim, chunk);
    for (int64_t j = 0; j < keys->count; j += STREAM_ROWS, logits += STREAM_ROWS * WIDTH) {
        struct stream_beside beside = {NULL, stride, then, ahead, ahead_bytes};
        float *done = chunk;
        if (j + STREAM_ROWS < keys->count) {
            beside.from = from += STREAM_ROWS * stride;
            stream_tile(q, keys->dim, chunk, beside, dtype, scale, logits);
        } else {
            beside.from = NULL;
            stream_tile(q, keys->dim, chunk, beside, dtype, scale, logits);
        }
        ahead.at += STREAM_ROWS * stride_bytes(next);
        chunk = then;
        then = done;
    }
}

/* As dot_keys_seen for keys that fit, all of which are needed; chunks [STREAM_FLOATS]; next has as many rows.
 */
static void dot_stream(const float *q, const struct rows *keys, float scale, float *logits, float *chunks,
                       const struct rows *next)
{
    struct ahead ahead = {next->data, stride_bytes(next)};
    int64_t ahead_bytes = AHEAD_STEPS * element_bytes(next->dtype);
    if (rows_contiguous(next)) { /* in the order of addresses, which the machine's own prefetchers see */
        ahead.stride = ahead_bytes;
        ahead_bytes *= AHEAD_STEPS;
    }
    prefetch_lines(next, ceil_div(keys->dim * element_bytes(next->dtype), LINE), row_lines(next));
    if (keys->dtype == CLATTN_FLOAT16)
        dot_stream_of(q, keys, CLATTN_FLOAT16, scale, logits, chunks, next, ahead, ahead_bytes);
    else if (keys->dtype == CLATTN_BFLOAT16)
        dot_stream_of(q, keys, CLATTN_BFLOAT16, scale, logits, chunks, next, ahead, ahead_bytes);
    else if (keys->dtype == CLATTN_INT8)
        dot_stream_of(q, keys, CLATTN_INT8, scale, logits, chunks, next, ahead, ahead_bytes);
    else
        dot_stream_of(q, keys, CLATTN_FLOAT32, scale, logits, chunks, next, ahead, ahead_bytes);
}

#endif
