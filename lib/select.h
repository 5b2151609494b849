/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_LIB_SELECT_H
#define CLATTN_LIB_SELECT_H

#include "internal.h"

/* *blocks as it is when it has the selection's shape, or a new list in *made. */
clattn_status blocks_place(clattn_context *context, const struct problem *problem,
                           const clattn_select_desc *select, clattn_blocks **blocks, clattn_blocks **made);

/* Selection with everything checked and staged; makes the pyramid when none is given. */
clattn_status select_run(clattn_context *context, const struct problem *problem,
                         const clattn_select_desc *select, const clattn_attention_desc *attention,
                         const clattn_tensor *q, const clattn_tensor *k, const clattn_pyramid *pyramid,
                         clattn_blocks *blocks, const clattn_sync *sync);

#endif
