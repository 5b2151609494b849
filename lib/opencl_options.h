/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_OPENCL_OPTIONS_H
#define CLATTN_OPENCL_OPTIONS_H

/* The host's side of cl/attention.cl: what attention means beyond scaled products. */

#include "opencl_tile.h"

/* Does a kernel have OPTION_ARGUMENTS? */
bool opencl_has_options(const struct problem *problem, const clattn_blocks *blocks);

/* Defines BLOCK, and those of the options that are not 0. keys: of a step of the kernel. */
void opencl_attention_options(struct opencl_options *options, const struct problem *problem,
                              const clattn_blocks *blocks, int keys);

/* The arguments, behind the kernel's own; none without options. Status: launch->status. */
void opencl_option_arguments(struct opencl_launch *launch, const struct problem *problem,
                             const clattn_blocks *blocks);

#endif
