/* SPDX-License-Identifier: MIT
 *
 * Numbers to compute with. */
#ifndef CLATTN_BENCH_INPUTS_H
#define CLATTN_BENCH_INPUTS_H

#include <clattn.h>
#include <stddef.h>
#include <stdint.h>

/* splitmix64 (Steele, Lea, Flood 2014): the same numbers on every machine. */
uint64_t inputs_random(uint64_t *state);

/* Nearly normal: four uniform numbers in sum, variance 1. */
float inputs_normal(uint64_t *state);

/* Stores the values as `dtype`, and in `values` what is left of them. NULL: out of memory. */
void *inputs_encode(float *values, size_t count, clattn_dtype dtype);

#endif
