/* SPDX-License-Identifier: MIT */
/* Key pyramid: AVX-512. */

#include "simd_avx512.h"

#include "kernels_avx512.h"
#include "pyramid_simd.h"

void pyramid_leaf_avx512(const void *keys, clattn_dtype dtype, int64_t len_stride, int64_t count, int32_t dim,
                         float *mean)
{
    pyramid_leaf_simd(keys, dtype, len_stride, count, dim, mean);
}

void pyramid_join_avx512(const float *left, const float *right, int32_t dim, float *mean)
{
    pyramid_join_simd(left, right, dim, mean);
}
