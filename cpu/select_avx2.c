/* SPDX-License-Identifier: MIT */
/* Selection scores: AVX2, FMA and F16C. */

#include "simd_avx2.h"

#include "kernels_avx2.h"
#include "select_simd.h"

size_t select_scratch_avx2(const struct select_job *job)
{
    return select_scratch_simd(job);
}

int32_t select_row_avx2(const struct select_job *job, int64_t sequence, int32_t kv_head, int64_t i,
                        void *scratch, int32_t *indices)
{
    return select_row_simd(job, sequence, kv_head, i, scratch, indices);
}
