/* SPDX-License-Identifier: MIT */
/* Gradients of attention over a block list: NEON of 64-bit ARM processors. */

#include "simd_neon.h"

#include "attention_backward_key_simd.h"
#include "attention_backward_query_simd.h"
#include "kernels_neon.h"

size_t backward_query_scratch_neon(const struct backward_job *job, int32_t rows, int32_t heads)
{
    return backward_query_scratch_simd(job, rows, heads);
}

void backward_query_neon(const struct backward_job *job, const struct forward_tile *tile, const float *delta,
                         void *scratch)
{
    backward_query_simd(job, tile, delta, scratch);
}

size_t backward_key_scratch_neon(const struct backward_job *job)
{
    return backward_key_scratch_simd(job);
}

void backward_key_neon(const struct backward_job *job, const struct key_tile *tile, void *scratch)
{
    backward_key_simd(job, tile, scratch);
}
