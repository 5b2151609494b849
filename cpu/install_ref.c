/* SPDX-License-Identifier: MIT */
/* The reference's kernels. */

#include "reference.h"

void cpu_install_ref(struct cpu_kernels *kernels)
{
    kernels->pyramid_leaf = pyramid_leaf_ref;
    kernels->pyramid_join = pyramid_join_ref;
    kernels->select_rows = select_rows_ref;
    kernels->select_scratch = select_scratch_ref;
    kernels->select_rows_max = select_rows_max_ref;
    kernels->forward_tile = forward_tile_ref;
    kernels->forward_scratch = forward_scratch_ref;
    kernels->forward_rows = 1;
    kernels->union_rows = 1;
}
