/* SPDX-License-Identifier: MIT */
/* Key pyramid: AVX2, FMA and F16C. */

#include "simd_avx2.h"

#include "kernels_avx2.h"
#include "pyramid_simd.h"

void pyramid_leaf_avx2(const void *keys, clattn_dtype dtype, int64_t len_stride, int64_t count, int32_t dim,
                       float *mean)
{
    pyramid_leaf_simd(keys, dtype, len_stride, count, dim, mean);
}

void pyramid_join_avx2(const float *left, const float *right, int32_t dim, float *mean)
{
    pyramid_join_simd(left, right, dim, mean);
}
