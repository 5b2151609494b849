/* SPDX-License-Identifier: MIT
 *
 * The multiply-add rate of one core: independent chains in registers; and plain reading of memory. */
#ifndef CLATTN_BENCH_FMA_H
#define CLATTN_BENCH_FMA_H

#include <stdint.h>

/* Runs `rounds` rounds with the instructions of `variant` (c, avx2, avx512...). Returns the operations that
 * were done, two a multiply-add; *sum is a result, so that nothing is left out. */
double fma_run(const char *variant, int rounds, float *sum);

/* Reads `count` floats once, as fast as the variant's loads can; returns their sum. */
float read_run(const char *variant, const float *data, int64_t count);

#endif
