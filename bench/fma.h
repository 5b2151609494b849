/* SPDX-License-Identifier: MIT
 *
 * The multiply-add rate of one core: independent chains in registers. */
#ifndef CLATTN_BENCH_FMA_H
#define CLATTN_BENCH_FMA_H

/* Runs `rounds` rounds with the instructions of `variant` (c, avx2, avx512). Returns the operations that were
 * done, two a multiply-add; *sum is a result, so that nothing is left out. */
double fma_run(const char *variant, int rounds, float *sum);

#endif
