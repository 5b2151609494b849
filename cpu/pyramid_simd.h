/* SPDX-License-Identifier: MIT */
/* Key pyramid, vectorised. Sums are double and run in the order of the keys, as in pyramid_ref.c: the same
 * bits, and still faster than the keys come from memory. Included by pyramid_<variant>.c after a vector layer.
 */

#include "doubles_simd.h"

enum {
    SUM_VECTORS =
        SIMD_SUM_VECTORS, /* of keys that one pass over the leaf adds up: their sums fill the registers */
    SUM_AHEAD = 4096      /* bytes ahead that are asked for: the leaves follow each other */
};

ALWAYS_INLINE void leaf_columns(const void *keys, clattn_dtype dtype, int64_t len_stride, int64_t count,
                                int32_t d, float *mean, const int vectors)
{
    doubles low[SUM_VECTORS], high[SUM_VECTORS], a, b;
    UNROLL for (int n = 0; n < vectors; n++) low[n] = high[n] = (doubles){0};
    for (int64_t j = 0; j < count; j++) {
        uintptr_t ahead =
            (uintptr_t)keys + (uintptr_t)((j * len_stride + d) * element_bytes(dtype)) + SUM_AHEAD;
        UNROLL for (int n = 0; n < vectors; n++)
        {
            if (n * WIDTH * (dtype == CLATTN_FLOAT32 ? 4 : 2) % LINE == 0)
                prefetch_line((const void *)(ahead + (uintptr_t)(n * WIDTH * element_bytes(dtype))));
            int64_t at = j * len_stride + d + n * WIDTH;
            if (dtype == CLATTN_FLOAT32) {
                a = doubles_load((const float *)keys + at);
                b = doubles_load((const float *)keys + at + DOUBLES);
            } else {
                doubles_halves(vec_load_as(keys, dtype, at), &a, &b);
            }
            low[n] += a;
            high[n] += b;
        }
    }
    doubles divisor = (doubles){0} + (double)count;
    UNROLL for (int n = 0; n < vectors; n++)
    {
        half_vec half[2] = {__builtin_convertvector(low[n] / divisor, half_vec),
                            __builtin_convertvector(high[n] / divisor, half_vec)};
        memcpy(mean + d + n * WIDTH, half, sizeof half);
    }
}

ALWAYS_INLINE void leaf_of(const void *keys, clattn_dtype dtype, int64_t len_stride, int64_t count, int32_t dim,
                           float *mean)
{
    int32_t d = 0;
    for (; d + SUM_VECTORS * WIDTH <= dim; d += SUM_VECTORS * WIDTH)
        leaf_columns(keys, dtype, len_stride, count, d, mean, SUM_VECTORS);
    for (; d + WIDTH <= dim; d += WIDTH)
        leaf_columns(keys, dtype, len_stride, count, d, mean, 1);
    for (; d < dim; d++) {
        double sum = 0;
        for (int64_t j = 0; j < count; j++)
            sum += (double)load_element(keys, dtype, j * len_stride + d);
        mean[d] = (float)(sum / (double)count);
    }
}

static void pyramid_leaf_simd(const void *keys, clattn_dtype dtype, int64_t len_stride, int64_t count,
                              int32_t dim, float *mean)
{
    if (dtype == CLATTN_FLOAT16)
        leaf_of(keys, CLATTN_FLOAT16, len_stride, count, dim, mean);
    else if (dtype == CLATTN_BFLOAT16)
        leaf_of(keys, CLATTN_BFLOAT16, len_stride, count, dim, mean);
    else
        leaf_of(keys, CLATTN_FLOAT32, len_stride, count, dim, mean);
}

static void pyramid_join_simd(const float *left, const float *right, int32_t dim, float *mean)
{
    for (int32_t d = 0; d < dim; d++)
        mean[d] = right ? (float)(((double)left[d] + (double)right[d]) / 2) : left[d];
}
