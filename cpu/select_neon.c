/* SPDX-License-Identifier: MIT */
/* Selection scores: NEON of 64-bit ARM processors. */

#include "simd_neon.h"

#include "kernels_neon.h"
#include "select_simd.h"

size_t select_scratch_neon(const struct select_job *job, int32_t rows)
{
    return select_scratch_simd(job, rows);
}

int32_t select_rows_max_neon(const struct select_job *job)
{
    return select_rows_max_simd(job);
}

void select_rows_neon(const struct select_job *job, int64_t sequence, int32_t kv_head, int64_t i, int32_t rows,
                      void *scratch, const struct select_lists *lists)
{
    select_rows_simd(job, sequence, kv_head, i, rows, scratch, lists);
}

void exp2_below_neon(const float *x, float *result, int64_t count)
{
    for (int64_t i = 0; i < count; i += WIDTH)
        vec_store(result + i, vec_exp2_below(vec_load(x + i)));
}
