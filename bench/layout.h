/* SPDX-License-Identifier: MIT
 *
 * Neighborhoods from the command line: --layout-dims 30x48x80 --window 18x24x24 ... */
#ifndef CLATTN_BENCH_LAYOUT_H
#define CLATTN_BENCH_LAYOUT_H

#include <clattn.h>
#include <stddef.h>

#define LAYOUT_AXES 3

/* The options' texts: a number an axis, joined by x, or one number for all axes. NULL: not given. */
struct layout_text {
    const char *layout, *window;
    const char *stride, *dilation, *causal; /* defaults 1, 1, 0 */
    const char *q_tile, *kv_tile;           /* both or none */
};

/* What the options' tables say about them. */
#define LAYOUT_ARGUMENT "AxBxC"
#define LAYOUT_DIMS_HELP "lengths of the layout's one to three axes, the slowest first"
#define LAYOUT_STRIDE_HELP "queries that share a window, along each axis (default 1)"
#define LAYOUT_DILATION_HELP "tokens from one key of a window to the next (default 1)"
#define LAYOUT_CAUSAL_HELP "1 for each causal axis, as 1x0x0 (default 0)"

/* Reads the texts into a descriptor and checks the rules. Returns STATUS_OK, or STATUS_USAGE after a message
 * that names the option and the rule. */
int layout_parse(const struct layout_text *text, clattn_neighborhood_desc *desc);

/* "4x8x8" */
const char *layout_join(const int32_t *numbers, int axes, char *text, size_t size);

#endif
