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

static inline int64_t round_up(int64_t n, int64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* ---- float32, float16 and bfloat16 in memory ---- */

ALWAYS_INLINE vec vec_load_as(const void *row, clattn_dtype dtype, int64_t i)
{
    if (dtype == CLATTN_FLOAT16) return vec_load_float16((const uint16_t *)row + i);
    if (dtype == CLATTN_BFLOAT16) return vec_load_bfloat16((const uint16_t *)row + i);
    return vec_load((const float *)row + i);
}

ALWAYS_INLINE void vec_store_as(void *row, clattn_dtype dtype, int64_t i, vec a)
{
    if (dtype == CLATTN_FLOAT16)
        vec_store_float16((uint16_t *)row + i, a);
    else if (dtype == CLATTN_BFLOAT16)
        vec_store_bfloat16((uint16_t *)row + i, a);
    else
        vec_store((float *)row + i, a);
}

ALWAYS_INLINE void row_to_float_of(const void *row, clattn_dtype dtype, int32_t dim, float *to)
{
    int32_t d = 0;
    for (; d + WIDTH <= dim; d += WIDTH)
        vec_store(to + d, vec_load_as(row, dtype, d));
    for (; d < dim; d++)
        to[d] = load_element(row, dtype, d);
}

/* to [dim] = row as float32 */
static inline void row_to_float(const void *row, clattn_dtype dtype, int32_t dim, float *to)
{
    if (dtype == CLATTN_FLOAT16)
        row_to_float_of(row, CLATTN_FLOAT16, dim, to);
    else if (dtype == CLATTN_BFLOAT16)
        row_to_float_of(row, CLATTN_BFLOAT16, dim, to);
    else
        row_to_float_of(row, CLATTN_FLOAT32, dim, to);
}

/* Rows of a tensor as the tiles want them. */
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
    int64_t distance = packed_stride(dim), bytes = stride * (dtype == CLATTN_FLOAT32 ? 4 : 2);
    for (int64_t j = 0; j < count; j++) {
        float *row = to + j * distance;
        row_to_float((const char *)rows + j * bytes, dtype, dim, row);
        for (int64_t d = dim; d < round_up(dim, WIDTH); d++)
            row[d] = 0;
    }
    return (struct float_rows){to, distance};
}

/* Keys for dot_rows, which reads them element by element: only 16-bit types are packed, and rows that would all
 * fall into the same cache set. */
static inline struct float_rows key_rows(const void *rows, clattn_dtype dtype, int64_t stride, int64_t count,
                                         int32_t dim, float *to)
{
    if (dtype == CLATTN_FLOAT32 && (stride == 0 || stride % 1024 != 0))
        return (struct float_rows){rows, stride};
    return rows_pack(rows, dtype, stride, count, dim, to);
}

/* Brings rows [first, first + count) of `rows` nearer, one cache line after the other. */
static inline void prefetch_rows(const char *rows, int64_t stride_bytes, int64_t first, int64_t count,
                                 int64_t row_bytes)
{
    for (int64_t j = first; j < first + count; j++)
        for (int64_t b = 0; b < row_bytes; b += 64)
            prefetch_line(rows + j * stride_bytes + b);
}

#endif
