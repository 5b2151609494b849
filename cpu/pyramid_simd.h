/* SPDX-License-Identifier: MIT */
/* Key pyramid, vectorised. Sums are double and run in the order of the keys, as in pyramid_ref.c: the same
 * bits, and still faster than the keys come from memory. Included by pyramid_<variant>.c after a vector layer.
 */

#include "rows_simd.h"

enum { SUM_VECTORS = 4 }; /* of keys that one pass over the leaf adds up */

ALWAYS_INLINE void leaf_columns(const void *keys, clattn_dtype dtype, int64_t len_stride, int64_t count,
                                int32_t d, float *mean, const int vectors)
{
    double sum[SUM_VECTORS * WIDTH] = {0};
    for (int64_t j = 0; j < count; j++) {
        UNROLL for (int n = 0; n < vectors; n++)
            vec_add_to_double(sum + n * WIDTH, vec_load_as(keys, dtype, j * len_stride + d + n * WIDTH));
    }
    for (int i = 0; i < vectors * WIDTH; i++)
        mean[d + i] = (float)(sum[i] / (double)count);
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
