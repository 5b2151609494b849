/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_OPENCL_TUNING_H
#define CLATTN_OPENCL_TUNING_H

/* Tuned parameters of the portable tier's kernels: what `clattn tune` found, read from JSON when a context
 * opens.
 *
 *   order   clattn_context_desc.tuning alone; else the file that CLATTN_TUNING names, the user's
 *           (XDG_DATA_HOME/clattn/tuning.json, else HOME/.local/share/...), the system's
 * (SYSCONFDIR/clattn/tuning.json), cl/tuning.json, which is a part of the library. The first record for device,
 * kernel, dim and dtype counts format  man/clattn-tune.1
 *
 * A record changes tiles, never results; values out of range are left out, and what a device cannot run shrinks
 * as the default tiles do. Without jansson there are no records. */

#include "internal.h"

struct opencl_device;

enum tuning_kernel {
    TUNING_FORWARD_TOKEN, /* lists of single tokens */
    TUNING_FORWARD_BLOCK, /* lists of several tokens, or none */
    TUNING_SELECT,
    TUNING_BACKWARD_Q,
    TUNING_BACKWARD_KV,
    TUNING_KERNELS
};

enum tuning_parameter {
    TUNING_ROWS,      /* of a tile, at most: a power of two */
    TUNING_KEYS,      /* of a tile, at most: a power of two */
    TUNING_LANES,     /* rows in a vector, at most */
    TUNING_ITEM_KEYS, /* keys of a work-item */
    TUNING_ITEM_DIMS, /* value dimensions of a work-item, at most */
    TUNING_LOAD,      /* elements of a load, at most */
    TUNING_PAD,       /* floats after a row of local memory */
    TUNING_LOCAL_KIB, /* local memory, at most */
    TUNING_ITEMS,     /* of a work-group, at most */
    TUNING_PARAMETERS
};

struct tuning_record {
    enum tuning_kernel kernel;
    int32_t dim;
    clattn_dtype dtype;
    clattn_tuning source;
    int value[TUNING_PARAMETERS]; /* -1: the default */
};

struct tuning_table {
    struct tuning_record *records; /* those of this device, the first that fits counts */
    int count;
};

/* Reads the records of a device. text: clattn_context_desc.tuning. Nothing fails: what cannot be read is
 * logged. */
void opencl_tuning_load(clattn_context *context, const struct opencl_device *device, const char *text,
                        struct tuning_table *table);
void opencl_tuning_free(struct tuning_table *table);

/* The record for a kernel, counted in the context's statistics; NULL: there is none. */
const struct tuning_record *opencl_tuning_find(clattn_context *context, enum tuning_kernel kernel, int32_t dim,
                                               clattn_dtype dtype);

#endif
