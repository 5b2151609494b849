/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_OPENCL_TILE_H
#define CLATTN_OPENCL_TILE_H

/* What the kernels of the portable tier share on the host: shapes of tiles, build options, the table of
 * sequences, and launches that are cut into parts. The kernels' side of it is cl/common.cl. */

#include "opencl.h"

/* ---- shapes ---- */

/* What suits a device. */
struct opencl_taste {
    int lanes;     /* rows in a vector, at most */
    int item_keys; /* keys of a work-item */
    int item_dims; /* value dimensions of a work-item, at most */
    int sums;      /* floats of running sums of a work-item, at most: they are in registers */
    int load;      /* elements of a load, at most */
    int pad;       /* floats after a row of local memory, against bank conflicts */
    size_t local_bytes;
    int items;      /* of a work-group, at most */
    int rows, keys; /* of a tile, at most; 0: as the kernel's rule says */
};

/* With the tuning record for a kernel of the context's device, if there is one. */
struct opencl_taste opencl_taste_of(clattn_context *context, enum tuning_kernel kernel, int32_t dim,
                                    clattn_dtype dtype);

/* A tile's limit: the tuned one, or that of the rule. */
static inline int opencl_limit(int tuned, int rule)
{
    return tuned > 0 ? tuned : rule;
}

/* Rows are vectors of lanes; a work-group has rows / lanes x keys / item_keys items. */
struct opencl_tile {
    int lanes, rows, keys, item_keys;
};

/* The tile for so many rows and keys. */
struct opencl_tile opencl_tile_of(const struct opencl_taste *taste, int rows, int keys);

static inline int opencl_tile_items(const struct opencl_tile *tile)
{
    return tile->rows / tile->lanes * (tile->keys / tile->item_keys);
}

/* No more items than the taste allows: items take more keys, then rows more lanes. A device that allows so few
 * that even this is too much refuses the kernel, and the ladder of tiles goes on. */
void opencl_tile_limit(struct opencl_tile *tile, const struct opencl_taste *taste);

/* Halves the lanes until an item's sums, `dims` a lane, fit. */
void opencl_tile_narrow(struct opencl_tile *tile, const struct opencl_taste *taste, int dims);

int opencl_load_width(const struct opencl_taste *taste, int dim); /* a power of two that divides dim */

/* ---- build options ---- */

struct opencl_options {
    char text[512];
};

void opencl_option(struct opencl_options *options, const char *name, int value); /* -DNAME=VALUE */
void opencl_tile_option(struct opencl_options *options, const struct opencl_tile *tile);

/* ---- table of sequences: SEQUENCE_... in common.cl ---- */

enum opencl_sequence_field {
    OPENCL_SEQUENCE_Q,
    OPENCL_SEQUENCE_K,
    OPENCL_SEQUENCE_V,
    OPENCL_SEQUENCE_OUT,
    OPENCL_SEQUENCE_LSE,
    OPENCL_SEQUENCE_Q_LEN,
    OPENCL_SEQUENCE_KV_LEN,
    OPENCL_SEQUENCE_LIST_ROW,
    OPENCL_SEQUENCE_NODE,
    OPENCL_SEQUENCE_NODES,
    OPENCL_SEQUENCE_UNIT,
    OPENCL_SEQUENCE_LEAF,
    OPENCL_SEQUENCE_PAGES,
    OPENCL_SEQUENCE_FIELDS
};

/* Fills table [count][FIELDS] but for UNIT; tensors and pyramid that an operation does not have are NULL. */
void opencl_table_fill(const struct problem *problem, const struct tensors *tensors,
                       const clattn_pyramid *pyramid, cl_long *table);

/* ---- launches in parts ---- */

/* DEVICE_LIMIT for sequences that the kernels' 32-bit row numbers cannot address. */
clattn_status opencl_check_lengths(clattn_context *context, const struct problem *problem);

/* Runs the kernel for units 0 .. units - 1 (a work-group each) in launches of limited work, since drivers kill
 * kernels that run long. Argument `first_arg` of the kernel is the launch's first unit. unit_flops: of one
 * unit. */
void opencl_run_units(struct opencl_launch *launch, cl_uint first_arg, int64_t units, double unit_flops,
                      int items);
/* The same with at most `most` units a launch. */
void opencl_run_units_most(struct opencl_launch *launch, cl_uint first_arg, int64_t units, int64_t most,
                           double unit_flops, int items);

#endif
