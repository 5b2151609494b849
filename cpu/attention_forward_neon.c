/* SPDX-License-Identifier: MIT */
/* Attention over a block list, forward: NEON of 64-bit ARM processors. */

#include "simd_neon.h"

#include "attention_forward_simd.h"
#include "kernels_neon.h"

size_t forward_scratch_neon(const struct forward_job *job, int32_t rows, int32_t heads)
{
    return forward_scratch_simd(job, rows, heads);
}

void forward_tile_neon(const struct forward_job *job, const struct forward_tile *tile, void *scratch)
{
    forward_tile_simd(job, tile, scratch);
}

void exp_neon(const float *x, float *result, int64_t count)
{
    for (int64_t i = 0; i < count; i += WIDTH)
        vec_store(result + i, vec_exp(vec_load(x + i)));
}

void exp_below_neon(const float *x, float *result, int64_t count)
{
    for (int64_t i = 0; i < count; i += WIDTH)
        vec_store(result + i, vec_exp_below(vec_load(x + i)));
}
