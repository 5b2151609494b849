/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_KERNELS_AVX512VNNI_H
#define CLATTN_KERNELS_AVX512VNNI_H

/* Kernels that the variant "avx512vnni" adds to those of "avx512". */

#include "cpu.h"

select_rows_function select_rows_avx512vnni;
size_t select_scratch_avx512vnni(const struct select_job *job, int32_t rows);
int32_t select_rows_max_avx512vnni(const struct select_job *job);
forward_tile_function forward_tile_avx512vnni;
size_t forward_scratch_avx512vnni(const struct forward_job *job, int32_t rows, int32_t heads);

void exp_avx512vnni(const float *x, float *result, int64_t count); /* count: whole vectors; for tests */
void exp_below_avx512vnni(const float *x, float *result, int64_t count);
void exp2_below_avx512vnni(const float *x, float *result, int64_t count);

/* The rough score of one row and one leaf, and the bound of its error, for tests: q [heads][dim], at most 16 of
 * them, k [count][dim], at most 128, center [dim] or NULL. false: there is none. */
bool rough_score_avx512vnni(const float *q, int32_t heads, const float *k, int64_t count, int32_t dim,
                            float scale, const float *center, double *score, double *error);

#endif
