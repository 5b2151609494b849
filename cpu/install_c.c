/* SPDX-License-Identifier: MIT */
/* Kernels of the variant "c": plain C, any architecture. */

#include "kernels_c.h"

void cpu_install_c(struct cpu_kernels *kernels)
{
    kernels->pyramid_leaf = pyramid_leaf_c;
    kernels->pyramid_join = pyramid_join_c;
    kernels->select_rows = select_rows_c;
    kernels->select_scratch = select_scratch_c;
    kernels->select_rows_max = select_rows_max_c;
    kernels->forward_tile = forward_tile_c;
    kernels->forward_scratch = forward_scratch_c;
    kernels->backward_query = backward_query_c;
    kernels->backward_query_scratch = backward_query_scratch_c;
    kernels->backward_key = backward_key_c;
    kernels->backward_key_scratch = backward_key_scratch_c;
    kernels->forward_rows = 64;
    kernels->union_rows = 4;
}
