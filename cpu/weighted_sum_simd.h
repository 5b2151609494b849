/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_WEIGHTED_SUM_SIMD_H
#define CLATTN_WEIGHTED_SUM_SIMD_H

/* Weighted sums of values, in register tiles. Included after a vector layer (simd_*.h).
 *
 *                 dim_v ->
 *     key   p    [key][lanes]   (broadcast: one lane is one query row)
 *     key   v    [key][dim_v]
 *     lane  out  [lane][dim_v]  = out * correction + sum over keys of p v */

#include "rows_simd.h"

ALWAYS_INLINE void weighted_sum_tile(const float *p, int64_t lanes, struct float_rows v, int64_t keys,
                                     const float *correction, float *out, int64_t out_stride,
                                     struct ahead ahead, const int rows, const int vectors)
{
    vec sum[8][2];
    UNROLL for (int r = 0; r < rows; r++)
    {
        vec factor = vec_set(correction[r]);
        UNROLL for (int n = 0; n < vectors; n++) sum[r][n] =
            vec_mul(vec_load(out + r * out_stride + n * WIDTH), factor);
    }
    const float *value_row = v.data;
    for (int64_t j = 0; j < keys; j++, p += lanes, value_row += v.stride) {
        vec value[2];
        prefetch_line(ahead.at);
        ahead.at += ahead.stride;
        UNROLL for (int n = 0; n < vectors; n++) value[n] = vec_load(value_row + n * WIDTH);
        UNROLL for (int r = 0; r < rows; r++)
        {
            vec weight = vec_set(p[r]);
            UNROLL for (int n = 0; n < vectors; n++) sum[r][n] = vec_fma(weight, value[n], sum[r][n]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
    {
        UNROLL for (int n = 0; n < vectors; n++) vec_store(out + r * out_stride + n * WIDTH, sum[r][n]);
    }
}

#if defined(SIMD_TALL_ROWS)
/* The same for SIMD_TALL_ROWS rows and one vector of values in the caller's type, which is read once and
 * becomes float32 in a register. v [keys][stride bytes] */
ALWAYS_INLINE void weighted_sum_tall_of(const float *p, const char *v, clattn_dtype dtype, int64_t stride,
                                        int64_t keys, const float *correction, float *out, int64_t out_stride,
                                        struct ahead ahead, const int half)
{
    vec sum[SIMD_TALL_ROWS];
    UNROLL for (int r = 0; r < SIMD_TALL_ROWS; r++) sum[r] =
        vec_mul(vec_load(out + r * out_stride), vec_set(correction[r]));
    for (int64_t j = 0; j < keys; j++, p += SIMD_TALL_ROWS, v += stride) {
        vec value = half < 0 ? vec_load_as(v, dtype, 0) : vec_load_half(v, dtype, half);
        prefetch_line(ahead.at);
        ahead.at += ahead.stride;
        UNROLL for (int r = 0; r < SIMD_TALL_ROWS; r++) sum[r] = vec_fma(vec_set(p[r]), value, sum[r]);
    }
    UNROLL for (int r = 0; r < SIMD_TALL_ROWS; r++) vec_store(out + r * out_stride, sum[r]);
}

/* half: of the PAIR at v, -1: of single vectors. */
static inline void weighted_sum_tall(const float *p, const char *v, clattn_dtype dtype, int64_t stride,
                                     int64_t keys, const float *correction, float *out, int64_t out_stride,
                                     struct ahead ahead, int half)
{
    if (dtype == CLATTN_BFLOAT16 && half == 0)
        weighted_sum_tall_of(p, v, CLATTN_BFLOAT16, stride, keys, correction, out, out_stride, ahead, 0);
    else if (dtype == CLATTN_BFLOAT16 && half == 1)
        weighted_sum_tall_of(p, v, CLATTN_BFLOAT16, stride, keys, correction, out, out_stride, ahead, 1);
    else if (dtype == CLATTN_FLOAT16)
        weighted_sum_tall_of(p, v, CLATTN_FLOAT16, stride, keys, correction, out, out_stride, ahead, -1);
    else if (dtype == CLATTN_BFLOAT16)
        weighted_sum_tall_of(p, v, CLATTN_BFLOAT16, stride, keys, correction, out, out_stride, ahead, -1);
    else
        weighted_sum_tall_of(p, v, CLATTN_INT8, stride, keys, correction, out, out_stride, ahead, -1);
}
#endif

#define WEIGHTED_SUM_CASE(ROWS)                                                                                \
    case ROWS:                                                                                                 \
        if (vectors == 2)                                                                                      \
            weighted_sum_tile(p, lanes, v, keys, correction, out, out_stride, ahead, ROWS, 2);                 \
        else                                                                                                   \
            weighted_sum_tile(p, lanes, v, keys, correction, out, out_stride, ahead, ROWS, 1);                 \
        return;

/* out [rows][vectors * WIDTH] = out * correction [rows] + sum over keys of p [key][lanes] * v [key][...], rows
 * at most PV_ROWS, vectors 1 or 2. Meanwhile one line a key is prefetched. */
static void weighted_sum_ahead(const float *p, int64_t lanes, struct float_rows v, int64_t keys,
                               const float *correction, float *out, int64_t out_stride, struct ahead ahead,
                               int rows, int vectors)
{
    switch (rows) {
        WEIGHTED_SUM_CASE(1)
        WEIGHTED_SUM_CASE(2)
        WEIGHTED_SUM_CASE(3)
        WEIGHTED_SUM_CASE(4)
        WEIGHTED_SUM_CASE(5)
        WEIGHTED_SUM_CASE(6)
#if defined(SIMD_PV_ROWS_8)
        WEIGHTED_SUM_CASE(7)
        WEIGHTED_SUM_CASE(8)
#endif
    }
}

static inline void weighted_sum(const float *p, int64_t lanes, struct float_rows v, int64_t keys,
                                const float *correction, float *out, int64_t out_stride, int rows, int vectors)
{
    struct ahead none = {(const char *)out, 0};
    weighted_sum_ahead(p, lanes, v, keys, correction, out, out_stride, none, rows, vectors);
}

#endif
