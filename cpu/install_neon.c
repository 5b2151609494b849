/* SPDX-License-Identifier: MIT */
/* Kernels of the variant "neon": NEON of 64-bit ARM processors. */

#include "kernels_neon.h"

void cpu_install_neon(struct cpu_kernels *kernels)
{
    kernels->pyramid_leaf = pyramid_leaf_neon;
    kernels->pyramid_join = pyramid_join_neon;
    kernels->select_rows = select_rows_neon;
    kernels->select_scratch = select_scratch_neon;
    kernels->select_rows_max = select_rows_max_neon;
    kernels->forward_tile = forward_tile_neon;
    kernels->forward_scratch = forward_scratch_neon;
    kernels->backward_query = backward_query_neon;
    kernels->backward_query_scratch = backward_query_scratch_neon;
    kernels->backward_key = backward_key_neon;
    kernels->backward_key_scratch = backward_key_scratch_neon;
    kernels->forward_rows = 64;
    kernels->union_rows = 4;
}
