/* SPDX-License-Identifier: MIT */
/* Selection scores: AVX-512. */

#include "simd_avx512.h"

#include "kernels_avx512.h"
#include "select_simd.h"

size_t select_scratch_avx512(const struct select_job *job)
{
    return select_scratch_simd(job);
}

int32_t select_row_avx512(const struct select_job *job, int64_t sequence, int32_t kv_head, int64_t i,
                          void *scratch, int32_t *indices)
{
    return select_row_simd(job, sequence, kv_head, i, scratch, indices);
}
