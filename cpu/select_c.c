/* SPDX-License-Identifier: MIT */
/* Selection scores: plain C, any architecture. */

#include "simd_c.h"

#include "kernels_c.h"
#include "select_simd.h"

size_t select_scratch_c(const struct select_job *job)
{
    return select_scratch_simd(job);
}

int32_t select_row_c(const struct select_job *job, int64_t sequence, int32_t kv_head, int64_t i, void *scratch,
                     int32_t *indices)
{
    return select_row_simd(job, sequence, kv_head, i, scratch, indices);
}
