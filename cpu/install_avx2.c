/* SPDX-License-Identifier: MIT */
/* Kernels of the variant "avx2": AVX2, FMA and F16C. */

#include "kernels_avx2.h"

void cpu_install_avx2(struct cpu_kernels *kernels)
{
    kernels->pyramid_leaf = pyramid_leaf_avx2;
    kernels->pyramid_join = pyramid_join_avx2;
    kernels->select_rows = select_rows_avx2;
    kernels->select_scratch = select_scratch_avx2;
    kernels->select_rows_max = select_rows_max_avx2;
    kernels->forward_tile = forward_tile_avx2;
    kernels->forward_scratch = forward_scratch_avx2;
    kernels->backward_query = backward_query_avx2;
    kernels->backward_query_scratch = backward_query_scratch_avx2;
    kernels->backward_key = backward_key_avx2;
    kernels->backward_key_scratch = backward_key_scratch_avx2;
    kernels->forward_rows = 64;
    kernels->union_rows = 8;
}
