/* SPDX-License-Identifier: MIT */
/* Kernels of the variant "avx512": AVX-512. */

#include "kernels_avx512.h"

void cpu_install_avx512(struct cpu_kernels *kernels)
{
    kernels->pyramid_leaf = pyramid_leaf_avx512;
    kernels->pyramid_join = pyramid_join_avx512;
    kernels->select_rows = select_rows_avx512;
    kernels->select_scratch = select_scratch_avx512;
    kernels->select_rows_max = select_rows_max_avx512;
    kernels->forward_tile = forward_tile_avx512;
    kernels->forward_scratch = forward_scratch_avx512;
    kernels->backward_query = backward_query_avx512;
    kernels->backward_query_scratch = backward_query_scratch_avx512;
    kernels->backward_key = backward_key_avx512;
    kernels->backward_key_scratch = backward_key_scratch_avx512;
    kernels->forward_rows = 64;
    kernels->union_rows = 16;
}
