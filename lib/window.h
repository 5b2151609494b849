/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_LIB_WINDOW_H
#define CLATTN_LIB_WINDOW_H

/* Window arithmetic of neighborhood attention in one dimension (Generalized Neighborhood Attention; NATTEN).
 *
 * A coordinate x of a dimension of length L with dilation d belongs to the residue class r = x mod d and stands
 * there at i = x / d among (L - r + d - 1) / d coordinates. Windows are ranges [lo, hi) of such class
 * coordinates. */

#include "clattn.h"

#include <stdbool.h>

struct window_axis {
    int32_t length, window, stride, dilation;
    bool causal;
};

struct range {
    int32_t lo, hi; /* lo <= x < hi */
};

static inline struct window_axis window_axis_of(const clattn_neighborhood_desc *desc, int axis)
{
    return (struct window_axis){desc->length[axis], desc->window[axis], desc->stride[axis],
                                desc->dilation[axis], desc->causal[axis] != 0};
}

/* Number of coordinates of residue class r. */
static inline int32_t class_length(const struct window_axis *axis, int32_t r)
{
    return (int32_t)(((int64_t)axis->length - r + axis->dilation - 1) / axis->dilation);
}

/* Keys that class coordinate i of class r sees. */
struct range window_keys(const struct window_axis *axis, int32_t r, int32_t i);

/* Queries of class r that see class coordinate j; empty when lo == hi. */
struct range window_queries(const struct window_axis *axis, int32_t r, int32_t j);

#endif
