/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_KERNELS_NEON_H
#define CLATTN_KERNELS_NEON_H

/* Kernels of the variant "neon". */

#include "cpu.h"

pyramid_leaf_function pyramid_leaf_neon;
pyramid_join_function pyramid_join_neon;
select_rows_function select_rows_neon;
size_t select_scratch_neon(const struct select_job *job, int32_t rows);
int32_t select_rows_max_neon(const struct select_job *job);
forward_tile_function forward_tile_neon;
size_t forward_scratch_neon(const struct forward_job *job, int32_t rows, int32_t heads);
backward_query_function backward_query_neon;
size_t backward_query_scratch_neon(const struct backward_job *job, int32_t rows, int32_t heads);
backward_key_function backward_key_neon;
size_t backward_key_scratch_neon(const struct backward_job *job);
void exp_neon(const float *x, float *result, int64_t count); /* count: whole vectors; for tests */
void exp_below_neon(const float *x, float *result, int64_t count);
void exp2_below_neon(const float *x, float *result, int64_t count);

#endif
