/* SPDX-License-Identifier: MIT */
/* Kernels of the variant "avx512vnni": AVX-512 with VNNI. */

#include "kernels_avx512vnni.h"

void cpu_install_avx512vnni(struct cpu_kernels *kernels)
{
    kernels->select_rows = select_rows_avx512vnni;
    kernels->select_scratch = select_scratch_avx512vnni;
    kernels->select_rows_max = select_rows_max_avx512vnni;
    kernels->forward_tile = forward_tile_avx512vnni;
    kernels->forward_scratch = forward_scratch_avx512vnni;
}
