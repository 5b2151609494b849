/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_LIB_STAGE_H
#define CLATTN_LIB_STAGE_H

/* Staging of host tensors for backends that cannot read them. On the CPU, and for tensors in OpenCL memory, the
 * staged tensor is the caller's own. */

#include "internal.h"

struct staged {
    clattn_tensor device;      /* where the backend computes */
    const clattn_tensor *host; /* NULL: the caller's tensor is used as it is */
};

clattn_status stage_in(clattn_context *context, const clattn_tensor *tensor, struct staged *staged);
clattn_status stage_out(clattn_context *context, const clattn_tensor *tensor, struct staged *staged);
clattn_status stage_finish(clattn_context *context, struct staged *staged); /* downloads an output */
void stage_release(clattn_context *context, struct staged *staged);

/* All tensors of attention where the backend computes. */
struct stage {
    struct staged q, k, v, out, lse, sink, bias, k_scale, v_scale;
};

/* Of the forward pass: out and lse are written. Tensors of the options in `problem` are replaced by staged
 * ones. */
clattn_status stage_all(clattn_context *context, const struct tensors *tensors, struct problem *problem,
                        struct stage *stage);
/* Of the backward pass: out and lse are read. */
clattn_status stage_inputs(clattn_context *context, const struct tensors *tensors, struct problem *problem,
                           struct stage *stage);
void stage_all_release(clattn_context *context, struct stage *stage);

#endif
