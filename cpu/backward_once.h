/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_BACKWARD_ONCE_H
#define CLATTN_CPU_BACKWARD_ONCE_H

#include "backward.h"
#include "inverse.h"

/* Gradients of queries, keys and values in one walk over the pairs (cpu_backward_once.c), where that is
 * possible and there is enough work for threads. Does not depend on which of them are wanted, nor on the number
 * of threads: the bits are the same. */
bool backward_once_wanted(const struct cpu_kernels *kernels, const struct backward_job *job);

/* False: no memory. delta, delta_base: D as in struct key_tile, of sequence s from delta_base[s] on. */
bool backward_once(const struct cpu_kernels *kernels, const struct backward_job *job,
                   const struct inverse *inverse, const float *delta, const int64_t *delta_base, int32_t pack, const struct cpu_team *team);

#endif
