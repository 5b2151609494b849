/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_OPENCL_SUBGROUP_H
#define CLATTN_OPENCL_SUBGROUP_H

/* The subgroup tier: cl/subgroup.cl and the kernels that are written with it.
 *
 * GPUs but NVIDIA's use it by themselves; CPUs, where a lane is a part of a vector register already, and NVIDIA's cards,
 * which have their own tiers, when they are asked to. What it does not take stays with the portable kernels. */

#include "opencl_tile.h"

/* As SG_KIND in cl/subgroup.cl. */
enum subgroup_kind { SUBGROUP_NONE, SUBGROUP_KHR, SUBGROUP_INTEL, SUBGROUP_AMD, SUBGROUP_NVIDIA };

/* What the device offers; `size` 0 with SUBGROUP_KHR: the canary's kernel tells. */
struct subgroup subgroup_of_device(const struct opencl_device *device);
bool subgroup_is_default(const struct opencl_device *device);

/* Uses the tier when the canary and the self-test pass; otherwise it is logged why not, and the tier stays as it is. */
clattn_status subgroup_open(clattn_context *context);

/* ---- what the tier's programs have in common ---- */

#define SUBGROUP_FILES "common.cl+subgroup.cl+"

/* -DSG_KIND, -DSG and, where the functions need it, a newer version of OpenCL C. */
void subgroup_options(struct opencl_options *options, const struct subgroup *subgroup);

/* Heads of a group that a subgroup takes at once, so that their sums are in registers; 0: even one does not fit. */
int subgroup_heads(const struct subgroup *subgroup, int group, int dim_v);

/* Elements of a load: a power of two that divides dim. */
int subgroup_load(const struct subgroup *subgroup, int dim);

#endif
