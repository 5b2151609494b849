/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_KERNELS_C_H
#define CLATTN_KERNELS_C_H

/* Kernels of the variant "c". */

#include "cpu.h"

pyramid_leaf_function pyramid_leaf_c;
pyramid_join_function pyramid_join_c;
select_rows_function select_rows_c;
size_t select_scratch_c(const struct select_job *job, int32_t rows);
int32_t select_rows_max_c(const struct select_job *job);
forward_tile_function forward_tile_c;
size_t forward_scratch_c(const struct forward_job *job, int32_t rows, int32_t heads);
backward_query_function backward_query_c;
size_t backward_query_scratch_c(const struct backward_job *job, int32_t rows, int32_t heads);
backward_key_function backward_key_c;
size_t backward_key_scratch_c(const struct backward_job *job);
void exp_c(const float *x, float *result, int64_t count); /* count: whole vectors; for tests */
void exp_below_c(const float *x, float *result, int64_t count);
void exp2_below_c(const float *x, float *result, int64_t count);

#endif
