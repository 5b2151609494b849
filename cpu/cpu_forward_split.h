/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_FORWARD_SPLIT_H
#define CLATTN_CPU_FORWARD_SPLIT_H

#include "cpu_tiles.h"

/* Are there so few tiles, and so many keys, that threads share the keys? Depends on the shape alone. */
bool cpu_forward_splits(const struct cpu_kernels *kernels, const struct forward_job *job,
                        const struct tiling *tiling);

clattn_status cpu_forward_split(clattn_context *context, const struct forward_job *job,
                                const struct tiling *tiling);

#endif
