/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_OPENCL_SELECT_H
#define CLATTN_OPENCL_SELECT_H

/* What the selections of opencl_select.c and opencl_robust.c share, as their kernels share cl/select_query.cl.
 * pages NULL: keys and pyramid are not those of a decode cache. */

#include "opencl_decode.h"

struct opencl_options select_options(const struct opencl_taste *taste, const struct select_job *job, int capacity,
                                     const struct opencl_tile *tile, const struct opencl_pages *pages);

/* The table of sequences (free it; NULL: out of memory) and its bytes; the units, query rows x key heads. */
cl_long *select_table(const struct select_job *job, const struct opencl_pages *pages, size_t *bytes,
                      int64_t *units);

/* From the lists on to the number of key heads; the fifth of them, the first unit, is 0. */
void select_arg_query(struct opencl_launch *launch, const struct select_job *job, cl_mem table);

/* Scales of int8 keys in a cache; none without. */
void select_arg_scales(struct opencl_launch *launch, const struct select_job *job);

/* CLATTN_SELECT_ROBUST; called by opencl_select_portable. */
clattn_status opencl_robust(clattn_context *context, const struct select_job *job,
                            const struct opencl_pages *pages);

#endif
