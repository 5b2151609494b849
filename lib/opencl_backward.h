/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_OPENCL_BACKWARD_H
#define CLATTN_OPENCL_BACKWARD_H

/* The backward pass on OpenCL.
 *
 *   opencl_backward.c        the table, D, dsink, and the order of the rest
 *   opencl_backward_q.c      dq
 *   opencl_backward_kv.c     dk, dv, dbias
 *   opencl_inverse.c         the lists the other way round
 *
 * Kernels: cl/attention_backward_*.cl, cl/inverse.cl. Nothing is read back: what depends on the lists is
 * launched for the most that it can be. */

#include "opencl_tile.h"

/* ---- table: TENSOR_..., FIELD_... in common.cl ---- */

enum backward_tensor {
    BACKWARD_Q,
    BACKWARD_K,
    BACKWARD_V,
    BACKWARD_OUT,
    BACKWARD_LSE,
    BACKWARD_DOUT,
    BACKWARD_DLSE,
    BACKWARD_DQ,
    BACKWARD_DK,
    BACKWARD_DV,
    BACKWARD_BIAS,
    BACKWARD_TENSORS
};

/* Behind a sequence's first elements. */
enum backward_field {
    BACKWARD_Q_LEN = BACKWARD_TENSORS,
    BACKWARD_KV_LEN,
    BACKWARD_LIST_ROW,
    BACKWARD_DELTA,
    BACKWARD_BIN,
    BACKWARD_UNIT_ROWS,
    BACKWARD_UNIT_Q,
    BACKWARD_Q_ROW,
    BACKWARD_K_ROW,
    BACKWARD_BATCH,
    BACKWARD_BLOCKS,
    BACKWARD_START,
    BACKWARD_FIELDS
};

static inline cl_long *backward_fields(cl_long *table, int64_t s)
{
    return table + 2 * BACKWARD_TENSORS + s * BACKWARD_FIELDS;
}

/* ---- one call ---- */

/* How lists and heads go together. */
struct backward_lists {
    int block;      /* with boundaries of the caller: what tiles of keys divide */
    int list_heads; /* list heads as the kernels see them: kv_heads without lists */
    int list_group; /* query heads of a group that have lists of their own: 1 or the group */
    int list_kv;    /* key heads that share a list */
    int64_t bins;   /* key blocks of all sequences and list heads (those of a group together) */
};

struct backward_tile {
    struct opencl_tile tile; /* rows: of lanes; keys, item_keys: streamed ones */
    int tokens, heads;       /* of the kernel of dq */
    int columns, columns_v;  /* dimensions of an item */
};

/* Where the entries of bins are; see cl/inverse.cl. */
struct backward_bins {
    cl_mem starts, entries; /* NULL without lists */
    int64_t chunks, virtual_rows;
};

struct backward_run {
    const struct backward_job *job;
    clattn_context *context;
    struct opencl_taste taste;
    struct backward_lists lists;
    struct opencl_launch launch;
    struct opencl_options q_options, kv_options;
    struct backward_tile q_tile, kv_tile;
    cl_mem table, delta;
    cl_mem block_starts; /* the caller's block boundaries, or NULL */
    int64_t row_units, q_units;
    bool has_dq; /* an earlier round added to dq, before a later kernel was refused */
};

/* Chooses tiles and builds; before the launch begins. */
clattn_status backward_q_prepare(struct backward_run *run);
clattn_status backward_kv_prepare(struct backward_run *run);

/* Enqueue; errors stick to run->launch. */
void backward_q_run(struct backward_run *run);
void backward_kv_run(struct backward_run *run);
struct backward_bins backward_inverse(struct backward_run *run);

/* Options that both tile kernels have. */
void backward_tile_options(struct opencl_options *options, const struct backward_run *run,
                           const struct backward_tile *shape);

/* Floats of a tile's row that hold `dim` columns of items. */
int backward_item_columns(const struct opencl_tile *tile, int dim);

#endif
