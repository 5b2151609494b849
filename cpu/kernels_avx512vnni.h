/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_KERNELS_AVX512VNNI_H
#define CLATTN_KERNELS_AVX512VNNI_H

/* Kernels that the variant "avx512vnni" adds to those of "avx512". */

#include "cpu.h"

forward_tile_function forward_tile_avx512vnni;
size_t forward_scratch_avx512vnni(const struct forward_job *job, int32_t rows, int32_t heads);

#endif
