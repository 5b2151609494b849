/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_ROWS_SIMD_H
#define CLATTN_ROWS_SIMD_H

/* Rows of tensors as float32 for the kernels of all variants. Included after a vector layer (simd_*.h). */

#include "cpu.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Hides from the compiler where a pointer comes from. */
#define KEEP_POINTER(P) __asm__("" : "+r"(P))

static inline int64_t round_up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* ---- the types in memory ---- */

static inline int64_t element_bytes(clattn_dtype dtype)
{
    return dtype == CLATTN_FLOAT32 ? 4 : dtype == CLATTN_INT8 ? 1 : 2;
}

ALWAYS_INLINE vec vec_load_as(const void *row, clattn_dtype dtype, int64_t i)
{
    if (dtype == CLATTN_INT8) return vec_load_int8((const int8_t *)row + i);
    if (dtype == CLATTN_FLOAT16) return vec_load_float16((const uint16_t *)row + i);
    if (dtype == CLATTN_BFLOAT16) return vec_load_bfloat16((const uint16_t *)row + i);
    return vec_load((const float *)row + i);
}

#if defined(SIMD_BFLOAT16_PAIRS)
/* Vector `half` (0 or 1) of PAIR elements that stand together. Of BFLOAT16 these are the even and the odd ones,
 * which takes half the work of vec_load_bfloat16. */
enum { PAIR = 2 * WIDTH };

ALWAYS_INLINE vec vec_load_half(const void *pair, clattn_dtype dtype, const int half)
{
    if (dtype == CLATTN_BFLOAT16) return half ? vec_load_bfloat16_odd(pair) : vec_load_bfloat16_even(pair);
    return vec_load_as(pair, dtype, half * WIDTH);
}

/* Distance of a vector's elements, and the first of the second vector. */
ALWAYS_INLINE int64_t half_step(clattn_dtype dtype)
{
    return dtype == CLATTN_BFLOAT16 ? 2 : 1;
}

ALWAYS_INLINE int64_t half_first(clattn_dtype dtype)
{
    return dtype == CLATTN_BFLOAT16 ? 1 : WIDTH;
}
#endif

ALWAYS_INLINE void vec_store_as(void *row, clattn_dtype dtype, int64_t i, vec a)
{
    if (dtype == CLATTN_FLOAT16)
        vec_store_float16((uint16_t *)row + i, a);
    else if (dtype == CLATTN_BFLOAT16)
        vec_store_bfloat16((uint16_t *)row + i, a);
    else
        vec_store((float *)row + i, a);
}

/* Multiplies row j by scale[j]. */
static inline void panel_scale(const float *scale, int64_t count, int32_t columns, float *rows, int64_t stride)
{
    for (int64_t j = 0; j < count; j++)
        for (int32_t d = 0; d < columns; d++)
            rows[j * stride + d] *= scale[j];
}

ALWAYS_INLINE void panel_to_float_of(const void *rows, clattn_dtype dtype, int64_t stride, int64_t count,
                                     int32_t columns, float *to, int64_t to_stride)
{
    enum { STEP = 4 * WIDTH };
    for (int64_t j = 0; j < count; j++, to += to_stride) {
        int32_t d = 0;
        for (; d + STEP <= columns; d += STEP) {
            UNROLL for (int n = 0; n < STEP; n += WIDTH)
                vec_store(to + d + n, vec_load_as(rows, dtype, j * stride + d + n));
        }
        for (; d + WIDTH <= columns; d += WIDTH)
            vec_store(to + d, vec_load_as(rows, dtype, j * stride + d));
        for (; d < columns; d++)
            to[d] = load_element(rows, dtype, j * stride + d);
    }
}

/* to [count][to_stride] = the first columns of `count` rows as float32 */
static inline void panel_to_float(const void *rows, clattn_dtype dtype, int64_t stride, int64_t count,
                                  int32_t columns, float *to, int64_t to_stride)
{
    if (dtype == CLATTN_FLOAT16 && columns == 2 * WIDTH &&
        to_stride == columns) /* the panel of a tile, without loops */
        panel_to_float_of(rows, CLATTN_FLOAT16, stride, count, 2 * WIDTH, to, 2 * WIDTH);
    else if (dtype == CLATTN_BFLOAT16 && columns == 2 * WIDTH && to_stride == columns)
        panel_to_float_of(rows, CLATTN_BFLOAT16, stride, count, 2 * WIDTH, to, 2 * WIDTH);
    else if (dtype == CLATTN_FLOAT16)
        panel_to_float_of(rows, CLATTN_FLOAT16, stride, count, columns, to, to_stride);
    else if (dtype == CLATTN_BFLOAT16)
        panel_to_float_of(rows, CLATTN_BFLOAT16, stride, count, columns, to, to_stride);
    else if (dtype == CLATTN_INT8)
        panel_to_float_of(rows, CLATTN_INT8, stride, count, columns, to, to_stride);
    else
        panel_to_float_of(rows, CLATTN_FLOAT32, stride, count, columns, to, to_stride);
}

/* Rows in the caller's memory: `stride` elements apart, 0 .. count - 1. */
struct rows {
    const char *data;
    clattn_dtype dtype;
    int64_t stride, count;
    int32_t dim;
    const float *scale; /* [count] factors of INT8 rows; NULL: none */
};

static inline int64_t stride_bytes(const struct rows *rows)
{
    return rows->stride * element_bytes(rows->dtype);
}

/* Do the rows follow each other without gaps? */
static inline bool rows_contiguous(const struct rows *rows)
{
    return rows->stride == rows->dim;
}

/* x [count][lanes]: row j times scale[j]. */
static inline void rows_scale(const float *scale, int64_t count, float *x, int64_t lanes)
{
    for (int64_t j = 0; j < count; j++, x += lanes)
        for (int64_t lane = 0; lane < lanes; lane += WIDTH)
            vec_store(x + lane, vec_mul(vec_load(x + lane), vec_set(scale[j])));
}

/* Is every element finite? */
static inline bool rows_finite(const struct rows *rows)
{
    vec zero = vec_zero();
    float sum[WIDTH], rest = 0;
    for (int64_t j = 0; j < rows->count; j++) {
        const char *row = rows->data + j * stride_bytes(rows);
        int32_t d = 0;
        for (; d + WIDTH <= rows->dim && rows->dtype != CLATTN_INT8; d += WIDTH)
            zero = vec_fma(vec_load_as(row, rows->dtype, d), vec_zero(), zero);
        for (; d < rows->dim && rows->dtype != CLATTN_INT8; d++)
            rest += 0 * load_element(row, rows->dtype, d);
        if (rows->scale) rest += 0 * rows->scale[j];
    }
    vec_store(sum, zero);
    for (int n = 0; n < WIDTH; n++)
        rest += sum[n];
    return rest == 0; /* 0 times infinity or NaN is NaN */
}

/* Rows as the tiles want them. */
struct float_rows {
    const float *data;
    int64_t stride;
};

/* Distance of packed rows: whole vectors, and one cache line more so that rows do not compete for the same
 * sets. */
static inline int64_t packed_stride(int32_t dim)
{
    return round_up(dim, WIDTH) + 16;
}

/* rows [count][dim] as float32 in `to` [count][packed_stride(dim)], padded by zeros to whole vectors. */
static inline struct float_rows rows_pack(const void *rows, clattn_dtype dtype, int64_t stride, int64_t count,
                                          int32_t dim, float *to)
{
    int64_t distance = packed_stride(dim);
    panel_to_float(rows, dtype, stride, count, dim, to, distance);
    for (int64_t j = 0; j < count; j++)
        for (int64_t d = dim; d < round_up(dim, WIDTH); d++)
            to[j * distance + d] = 0;
    return (struct float_rows){to, distance};
}

/* Rows of whole vectors for weighted sums: packed where they are not already. */
static inline struct float_rows vector_rows(const void *rows, clattn_dtype dtype, int64_t stride, int64_t count,
                                            int32_t dim, float *to)
{
    bool conflicts = stride % 256 == 0;
    if (dtype == CLATTN_FLOAT32 && dim % WIDTH == 0 && !conflicts) return (struct float_rows){rows, stride};
    return rows_pack(rows, dtype, stride, count, dim, to);
}

/* Rows for dot_rows, which reads them element by element: only 16-bit types are packed, and rows that would all
 * fall into the same cache set. */
static inline struct float_rows key_rows(const void *rows, clattn_dtype dtype, int64_t stride, int64_t count,
                                         int32_t dim, float *to)
{
    bool conflicts = stride != 0 && stride % 1024 == 0;
    if (dtype == CLATTN_FLOAT32 && !conflicts) return (struct float_rows){rows, stride};
    return rows_pack(rows, dtype, stride, count, dim, to);
}

/* Rows of keys first .. end - 1; empty when end <= first. */
struct key_range {
    int64_t first, end;
};

enum { LINE = 64 }; /* bytes of a cache line */

static inline int64_t row_lines(const struct rows *rows)
{
    return ceil_div(rows->dim * element_bytes(rows->dtype), LINE);
}

/* Brings lines from .. to - 1 of all rows nearer. */
static inline void prefetch_lines(const struct rows *rows, int64_t from, int64_t to)
{
    for (int64_t j = 0; j < rows->count && from < to; j++)
        for (int64_t line = from; line < to; line++)
            prefetch_line(rows->data + j * stride_bytes(rows) + line * LINE);
}

/* What a tile prefetches while it computes, one line a step, so that the requests never queue up: from `at` on,
 * every `stride` bytes. Without anything to do: the same line over and over. */
struct ahead {
    const char *at;
    int64_t stride;
};

#endif
