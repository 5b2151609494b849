/* SPDX-License-Identifier: MIT */
/* Key pyramid: NEON of 64-bit ARM processors. */

#include "simd_neon.h"

#include "kernels_neon.h"
#include "pyramid_simd.h"

void pyramid_leaf_neon(const void *keys, clattn_dtype dtype, int64_t len_stride, int64_t count, int32_t dim,
                       float *mean)
{
    pyramid_leaf_simd(keys, dtype, len_stride, count, dim, mean);
}

void pyramid_join_neon(const float *left, const float *right, int32_t dim, float *mean)
{
    pyramid_join_simd(left, right, dim, mean);
}
