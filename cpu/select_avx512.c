/* SPDX-License-Identifier: MIT */
/* Selection scores: AVX-512. */

#include "simd_avx512.h"

#include "rank_avx512.h"
#define SIMD_RANK rank_few

#include "kernels_avx512.h"
#include "select_simd.h"

size_t select_scratch_avx512(const struct select_job *job, int32_t rows)
{
    return select_scratch_simd(job, rows);
}

int32_t select_rows_max_avx512(const struct select_job *job)
{
    return select_rows_max_simd(job);
}

void select_rows_avx512(const struct select_job *job, int64_t sequence, int32_t kv_head, int64_t i,
                        int32_t rows, void *scratch, const struct select_lists *lists)
{
    select_rows_simd(job, sequence, kv_head, i, rows, scratch, lists);
}

void exp2_below_avx512(const float *x, float *result, int64_t count)
{
    for (int64_t i = 0; i < count; i += WIDTH)
        vec_store(result + i, vec_exp2_below(vec_load(x + i)));
}
