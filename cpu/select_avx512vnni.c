/* SPDX-License-Identifier: MIT */
/* Selection scores: AVX-512 with VNNI, which multiplies words for rough scores of leaves. */

#include "simd_avx512.h"

#include "rank_avx512.h"
#define SIMD_RANK rank_few

#define SIMD_WORD_DOTS
#include "kernels_avx512vnni.h"
#include "select_simd.h"

size_t select_scratch_avx512vnni(const struct select_job *job, int32_t rows)
{
    return select_scratch_simd(job, rows);
}

int32_t select_rows_max_avx512vnni(const struct select_job *job)
{
    return select_rows_max_simd(job);
}

void select_rows_avx512vnni(const struct select_job *job, int64_t sequence, int32_t kv_head, int64_t i,
                            int32_t rows, void *scratch, const struct select_lists *lists)
{
    select_rows_simd(job, sequence, kv_head, i, rows, scratch, lists);
}

bool rough_score_avx512vnni(const float *q, int32_t heads, const float *k, int64_t count, int32_t dim,
                            float scale, const float *center, double *score, double *error)
{
    return rough_score_of(q, heads, k, count, dim, scale, center, score, error);
}
