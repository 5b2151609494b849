/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_OPENCL_NVIDIA_H
#define CLATTN_OPENCL_NVIDIA_H

/* The matrix tier of NVIDIA cards.
 *
 *   opencl_nvidia.c           which tier a card has: canary programs that must compute rightly
 *   opencl_nvidia_selftest.c  each path against the reference before its first use, for each shape
 *   opencl_nvidia_lists.c     block lists turned around: the queries of each block
 *   opencl_nvidia_forward.c   which path serves an attention job; inverted lists
 *   opencl_nvidia_tile.c      tiles of queries over one list, queries one by one
 *   opencl_nvidia_flat.c      selection by the exact scores of all leaves
 *   opencl_nvidia_select.c, opencl_nvidia_pyramid.c, opencl_nvidia_backward.c, opencl_nvidia_decode.c
 *
 * An operation of the portable tier asks nvidia_forward() and so on first; what these do not take (`*done`
 * false) stays with the portable kernels. The choice and its measurements are in doc/nvidia.md. */

#include "opencl_tile.h"

struct opencl_pages; /* opencl_decode.h */

enum nvidia_tier { NVIDIA_NONE, NVIDIA_MMA, NVIDIA_HOPPER };

/* A way to compute something. */
enum nvidia_path {
    NVIDIA_INVERTED,        /* lists of tokens, a block at a time, mma.sync */
    NVIDIA_INVERTED_HOPPER, /* the same, wgmma */
    NVIDIA_UNION,           /* lists of tokens, tiles of neighbouring queries, wgmma */
    NVIDIA_TILE,            /* lists of query blocks, or all keys, wgmma */
    NVIDIA_TOKEN,           /* any list, a warp a query, mma.sync */
    NVIDIA_PYRAMID,
    NVIDIA_SELECT,
    NVIDIA_FLAT,          /* selection by the exact scores of all leaves, mma.sync */
    NVIDIA_FLAT_HOPPER,   /* the same, wgmma */
    NVIDIA_BACKWARD,      /* lists of tokens, wgmma */
    NVIDIA_BACKWARD_TILE, /* lists of query blocks, or all keys, wgmma */
    NVIDIA_DECODE,        /* selection and attention on a decode cache */
    NVIDIA_PATHS
};

/* What the programs of a path are built for. */
struct nvidia_shape {
    clattn_dtype dtype;
    int32_t dim, dim_v, group, topk;
    bool causal;
    bool aligned;               /* every row starts on 16 bytes */
    bool window, softcap, sink; /* options of attention that are on */
};

struct nvidia_verdict {
    struct nvidia_verdict *next;
    enum nvidia_path path;
    struct nvidia_shape shape;
    bool works;
};

struct nvidia {
    enum nvidia_tier tier;
    pthread_mutex_t lock;
    struct nvidia_verdict *verdicts;
};

enum { NVIDIA_LEAF = 64, NVIDIA_VENDOR = 0x10de };

/* ---- tiers ---- */

/* The tiers that the card's generation has; NVIDIA_NONE for other vendors. */
enum nvidia_tier nvidia_generation(const struct opencl_device *device);

/* Finds the best tier up to `highest` whose canaries compute rightly, and keeps it in opencl.nvidia. */
clattn_status nvidia_open(clattn_context *context, enum nvidia_tier highest);
void nvidia_close(struct opencl *state);

/* ---- paths ---- */

/* Did the path, built for this shape, agree with the reference? Tested at the first question; a path that fails
 * is logged and not used again. */
bool nvidia_works(clattn_context *context, enum nvidia_path path, const struct nvidia_shape *shape);
clattn_status nvidia_selftest(clattn_context *context, enum nvidia_path path, const struct nvidia_shape *shape);
const char *nvidia_path_name(enum nvidia_path path);

/* Takes the job when a path serves it. */
clattn_status nvidia_forward(clattn_context *context, const struct forward_job *job, bool *done);
bool nvidia_prefers_parts(const clattn_context *context, const struct forward_job *job); /* struct backend */
struct nvidia_shape nvidia_select_shape(const struct select_job *job); /* of every path of selection */
clattn_status nvidia_select(clattn_context *context, const struct select_job *job, bool *done);
clattn_status nvidia_flat(clattn_context *context, const struct select_job *job, bool *done);
clattn_status nvidia_pyramid(clattn_context *context, const struct pyramid_job *job, bool *done);
clattn_status nvidia_backward(clattn_context *context, const struct backward_job *job,
                              bool *done); /* no dsink */
clattn_status nvidia_decode(clattn_context *context, const struct decode_job *job,
                            const struct opencl_pages *pages, bool *done);

/* Runs one path, whatever else would be chosen. */
clattn_status nvidia_forward_run(clattn_context *context, const struct forward_job *job,
                                 const struct nvidia_shape *shape, enum nvidia_path path);
clattn_status nvidia_tile_run(clattn_context *context, const struct forward_job *job,
                              const struct nvidia_shape *shape, enum nvidia_path path);
clattn_status nvidia_select_run(clattn_context *context, const struct select_job *job,
                                const struct nvidia_shape *shape);
clattn_status nvidia_flat_run(clattn_context *context, const struct select_job *job,
                              const struct nvidia_shape *shape, enum nvidia_path path);
clattn_status nvidia_pyramid_run(clattn_context *context, const struct pyramid_job *job,
                                 const struct nvidia_shape *shape);
clattn_status nvidia_decode_run(clattn_context *context, const struct decode_job *job,
                                const struct opencl_pages *pages, const struct nvidia_shape *shape);
clattn_status nvidia_backward_run(clattn_context *context, const struct backward_job *job,
                                  const struct nvidia_shape *shape, enum nvidia_path path);

/* ---- what the launches share ---- */

/* Does the card's tier have the path for the shape at all? */
bool nvidia_has(const clattn_context *context, enum nvidia_path path, const struct nvidia_shape *shape);

/* What every path asks of a problem: 16-bit types, plain attention, a scale of 0 or above, not too many
 * sequences, all with keys. Forward attention takes a window, softcap and sink too, and sequences without keys.
 */
bool nvidia_takes(const clattn_context *context, const struct problem *problem, clattn_dtype dtype);
bool nvidia_takes_forward(const clattn_context *context, const struct problem *problem, clattn_dtype dtype);

bool nvidia_is_aligned(const clattn_tensor *tensor); /* do all rows start on 16 bytes? NULL: yes */
bool nvidia_is_plain_lse(const clattn_tensor *lse);  /* [len][heads] without gaps? NULL: yes */
struct opencl_options nvidia_options(const struct nvidia_shape *shape);
bool nvidia_has_window(const struct problem *problem); /* that hides a key from any row */
float nvidia_scale(const struct problem *problem);     /* > 0: the kernels need it */

/* Blocks of a sequence; one, of which no row sees anything, when it has no keys. */
static inline int64_t nvidia_blocks(int64_t kv_len)
{
    return MAX(ceil_div(kv_len, NVIDIA_LEAF), 1);
}

static inline int64_t nvidia_first(const clattn_tensor *tensor, int64_t batch, int64_t row)
{
    return tensor ? tensor->offset + batch * tensor->batch_stride + row * tensor->len_stride : 0;
}

/* A tensor's rows of one sequence: memory, first element, strides of rows and heads; NULL: none of it. */
void nvidia_arg_rows(struct opencl_launch *launch, const clattn_tensor *tensor, int64_t batch, int64_t row);

/* The arguments of the options, whether they are on or not: scale, cap_scale, window; the sink's memory and
 * strides. */
void nvidia_arg_scale(struct opencl_launch *launch, const struct problem *problem);
void nvidia_arg_sink(struct opencl_launch *launch, const struct problem *problem);

/* Work-groups of `items` items. */
void nvidia_run(struct opencl_launch *launch, int64_t x, int64_t y, int64_t z, int items);

/* Keys and values of a sequence into the blocks that the Hopper kernels copy, [kv_heads][blocks]. */
void nvidia_pack_cores(struct opencl_launch *launch, const struct forward_job *job,
                       const struct nvidia_shape *shape, const struct sequence *sequence, cl_mem core);

/* ---- lists that serve many rows ---- */

/* As the kernels read them: list `entry` of a head at base + entry * stride + head * head_stride. */
struct nvidia_tile_lists {
    cl_mem list, mask;
    int64_t base, stride, head_stride;
    int64_t length, q_block, count; /* entries, queries of a list, lists of the sequence at hand */
};

/* Memory for any sequence of the problem, then the lists of one. blocks NULL: all keys. */
struct nvidia_tile_lists nvidia_tile_lists_begin(struct opencl_launch *launch, const struct problem *problem,
                                                 const clattn_blocks *blocks, enum nvidia_path path);
void nvidia_tile_lists_run(struct opencl_launch *launch, const struct problem *problem,
                           const clattn_blocks *blocks, const struct sequence *sequence, enum nvidia_path path,
                           struct nvidia_tile_lists *lists);

/* ---- inverted lists: cl/list_invert.cl ---- */

/* Lists of tokens, [q_len][kv_heads][topk] from `base` on. */
struct nvidia_token_lists {
    cl_mem list;
    int64_t base;
    int32_t topk;
};
struct nvidia_token_lists nvidia_token_lists_of(const clattn_blocks *blocks, const struct sequence *sequence);

/* Those of a sequence, from lists of query blocks of topk entries, or, where lists are NULL, of the keys that a
 * query sees, in topk blocks at most; list [q_len][kv_heads][topk]. */
struct nvidia_token_lists nvidia_token_lists_run(struct opencl_launch *launch, const struct problem *problem,
                                                 const struct sequence *sequence,
                                                 const struct nvidia_tile_lists *lists, int64_t topk,
                                                 cl_mem list);

struct nvidia_inverse {
    int rows;      /* of a tile */
    bool is_whole; /* one span, so that each block has one list */
    cl_mem counts, totals, offset, tile_offset, pairs;
    int64_t n_blocks, chunks, chunks_per_span, spans, entries, tiles; /* of the sequence at hand */
};

/* Memory for any sequence of the problem, then the lists of one. */
void nvidia_inverse_begin(struct opencl_launch *launch, struct nvidia_inverse *inverse,
                          const struct problem *problem, int32_t topk);
void nvidia_inverse_run(struct opencl_launch *launch, struct nvidia_inverse *inverse,
                        const struct problem *problem, const struct sequence *sequence,
                        const struct nvidia_token_lists *lists, const struct nvidia_shape *shape);
int64_t nvidia_inverse_entries(const struct nvidia_inverse *inverse, const struct problem *problem,
                               int32_t topk);

#define NVIDIA_BLOCK_FILES "mma_nvidia.cl+attention_tile.cl+"
#define NVIDIA_HOPPER_FILES NVIDIA_BLOCK_FILES "wgmma_nvidia.cl+"

#endif
