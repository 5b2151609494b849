/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_OPENCL_DECODE_H
#define CLATTN_OPENCL_DECODE_H

/* The decode cache on OpenCL.
 *
 *   opencl_decode.c         what is appended, cut and copied; the block table on the device
 *   opencl_decode_step.c    a step: selection and attention on the cache, from launches of opencl_select.c and
 *                           opencl_forward.c that know its pages
 *   opencl_nvidia_decode.c  the same in one launch, on NVIDIA cards
 *
 * What the host does for a step depends on the number of sequences, not on their lengths, and nothing waits. */

#include "cache.h"
#include "opencl_tile.h"

/* How kernels find rows and nodes of a cache: CACHE_ARGUMENTS of cl/key_rows.cl. */
struct opencl_pages {
    const clattn_cache *cache;
    cl_mem table;                   /* [sequences][table_entries] int32, on the device */
    const struct cache_span *spans; /* [count] the sequence of the cache for each of the problem */
};

/* The block table on the device; enqueues what has changed of it for the sequences of the spans. grows: their
 * tokens are being appended. NULL after an error. */
cl_mem opencl_cache_table(struct opencl_launch *launch, clattn_cache *cache, const struct cache_span *spans,
                          int64_t count, bool grows);

void opencl_arg_pages(struct opencl_launch *launch, const struct opencl_pages *pages);

/* Fills SEQUENCE_PAGES of a table of sequences; pages NULL: nothing. */
void opencl_table_pages(const struct opencl_pages *pages, int64_t count, cl_long *table);

/* The portable kernels; pages NULL: k and v are tensors. */
clattn_status opencl_select_portable(clattn_context *context, const struct select_job *job,
                                     const struct opencl_pages *pages);
clattn_status opencl_forward_portable(clattn_context *context, const struct forward_job *job,
                                      const struct opencl_pages *pages);

#endif
