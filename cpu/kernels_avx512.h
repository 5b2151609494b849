/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_KERNELS_AVX512_H
#define CLATTN_KERNELS_AVX512_H

/* Kernels of the variant "avx512". */

#include "cpu.h"

pyramid_leaf_function pyramid_leaf_avx512;
pyramid_join_function pyramid_join_avx512;
select_rows_function select_rows_avx512;
size_t select_scratch_avx512(const struct select_job *job, int32_t rows);
int32_t select_rows_max_avx512(const struct select_job *job);
forward_tile_function forward_tile_avx512;
size_t forward_scratch_avx512(const struct forward_job *job, int32_t rows, int32_t heads);
backward_query_function backward_query_avx512;
size_t backward_query_scratch_avx512(const struct backward_job *job, int32_t rows, int32_t heads);
backward_key_function backward_key_avx512;
size_t backward_key_scratch_avx512(const struct backward_job *job);
void exp_avx512(const float *x, float *result, int64_t count); /* count: whole vectors; for tests */
void exp_below_avx512(const float *x, float *result, int64_t count);
void exp2_below_avx512(const float *x, float *result, int64_t count);

#endif
