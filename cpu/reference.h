/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_REFERENCE_H
#define CLATTN_REFERENCE_H

/* Kernels of the reference: double precision, one loop nest per formula. */

#include "cpu.h"

pyramid_leaf_function pyramid_leaf_ref;
pyramid_join_function pyramid_join_ref;
select_row_function select_row_ref;
size_t select_scratch_ref(const struct select_job *job);
forward_tile_function forward_tile_ref;
size_t forward_scratch_ref(const struct forward_job *job, int32_t rows, int32_t heads);

#endif
