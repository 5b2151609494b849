/* SPDX-License-Identifier: MIT */
/* Attention over a block list, forward: AVX-512 with VNNI, which multiplies int8 keys as they are. All other
 * types go the way of AVX-512. */

#include "simd_avx512.h"

#define SIMD_BYTE_DOTS
#include "dot_bytes_avx512vnni.h"

#include "attention_forward_simd.h"
#include "kernels_avx512vnni.h"

size_t forward_scratch_avx512vnni(const struct forward_job *job, int32_t rows, int32_t heads)
{
    return forward_scratch_simd(job, rows, heads);
}

void forward_tile_avx512vnni(const struct forward_job *job, const struct forward_tile *tile, void *scratch)
{
    forward_tile_simd(job, tile, scratch);
}

void exp_avx512vnni(const float *x, float *result, int64_t count)
{
    for (int64_t i = 0; i < count; i += WIDTH)
        vec_store(result + i, vec_exp(vec_load(x + i)));
}

void exp_below_avx512vnni(const float *x, float *result, int64_t count)
{
    for (int64_t i = 0; i < count; i += WIDTH)
        vec_store(result + i, vec_exp_below(vec_load(x + i)));
}

void exp2_below_avx512vnni(const float *x, float *result, int64_t count)
{
    for (int64_t i = 0; i < count; i += WIDTH)
        vec_store(result + i, vec_exp2_below(vec_load(x + i)));
}
