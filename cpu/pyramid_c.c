/* SPDX-License-Identifier: MIT */
/* Key pyramid: plain C, any architecture. */

#include "simd_c.h"

#include "kernels_c.h"
#include "pyramid_simd.h"

void pyramid_leaf_c(const void *keys, clattn_dtype dtype, int64_t len_stride, int64_t count, int32_t dim,
                    float *mean)
{
    pyramid_leaf_simd(keys, dtype, len_stride, count, dim, mean);
}

void pyramid_join_c(const float *left, const float *right, int32_t dim, float *mean)
{
    pyramid_join_simd(left, right, dim, mean);
}
