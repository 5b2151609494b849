/* SPDX-License-Identifier: MIT */
/* Gradients of attention on Hopper cards, without atomics: two runs give the same bits.
 *
 *   backward        lists of tokens: one pass over inverted lists makes dk, dv and a part of dq for each row
 * and block (cl/attention_backward_wgmma.cl) backward-tile   lists of query blocks, or all keys: the same pass
 * without dq, and one over the lists for dq (cl/attention_backward_tile.cl), which multiplies 7 times instead
 * of 5 and keeps no parts */

#include "config.h"

#include "opencl_nvidia.h"

#define ROW_FILES NVIDIA_HOPPER_FILES "attention_backward_rows.cl+"
static const char FILES[] = ROW_FILES "attention_backward_wgmma.cl";
static const char TILE_FILES[] = ROW_FILES "attention_backward_tile.cl";

/* Rows of a block that one work-group adds up: its sums are 64 (dim + dim_v) floats for each warpgroup. */
enum { ROWS = 4096, TILE_ROWS = 16384, WARPGROUPS = 2 };

struct sums {
    cl_mem delta, dq, dk, dv;
};

static int padded(int dim)
{
    return (dim + 15) / 16 * 16;
}

/* Blocks that a query may list. */
static int64_t topk_of(const struct problem *problem, const clattn_blocks *blocks)
{
    if (!blocks) {
        int64_t most = nvidia_blocks(problem->kv_len_max), window = problem->options.window;
        if (!nvidia_has_window(problem)) return most;
        return MIN(most, ceil_div((problem->causal ? window : 2 * window - 1) - 1, NVIDIA_LEAF) + 1);
    }
    return blocks->topk * (blocks->block / NVIDIA_LEAF);
}

/* ---- does it apply ---- */

static bool fits(const clattn_context *context, const struct backward_job *job, enum nvidia_path path)
{
    const struct opencl_device *device = &opencl_of(context)->device;
    const struct problem *problem = job->problem;
    double pairs = (double)problem->q_len_max * (double)topk_of(problem, job->blocks);
    double rows = pairs * problem->group;
    double tiles = (double)ceil_div(problem->kv_len_max, NVIDIA_LEAF) +
                   rows / (path == NVIDIA_BACKWARD ? ROWS : TILE_ROWS) + 1;
    double dq = path == NVIDIA_BACKWARD ? problem->kv_heads * rows * ((problem->dim + 31) / 32 * 32) * 2 : 0;
    double dk =
        problem->kv_heads * tiles * WARPGROUPS * NVIDIA_LEAF * padded(MAX(problem->dim, problem->dim_v)) * 4.0;
    double lists = problem->kv_heads * pairs * sizeof(cl_uint);
    return MAX(MAX(dq, dk), lists) <= (double)device->alloc_max &&
           dq + 2 * dk + 2 * lists <= (double)device->memory_bytes / 3 && pairs < INT32_MAX / 2 &&
           (path == NVIDIA_BACKWARD_TILE || rows < INT32_MAX / 2);
}

/* The path for such lists, of those of one key head each or, of query blocks, for all; -1: none. */
static int path_for(const struct problem *problem, const clattn_blocks *blocks)
{
    if (!blocks) return NVIDIA_BACKWARD_TILE;
    if (blocks->mask || blocks->starts) return -1;
    bool own_lists = blocks->heads == problem->kv_heads, has_halves = blocks->block == 2 * NVIDIA_LEAF;
    if (blocks->q_block == 1) return own_lists && blocks->block == NVIDIA_LEAF ? NVIDIA_BACKWARD : -1;
    return (own_lists || blocks->heads == 1) && (blocks->block == NVIDIA_LEAF || has_halves)
               ? NVIDIA_BACKWARD_TILE
               : -1;
}

static bool takes(const clattn_context *context, const struct backward_job *job)
{
    clattn_dtype dtype = job->q->dtype;
    if (!nvidia_takes_forward(context, job->problem, dtype) || job->problem->options.softcap > 0 ||
        job->neighborhood)
        return false;
    if (!job->dq || !job->dk || !job->dv || job->dbias || job->accumulate || job->compensation != 0)
        return false;
    if (job->out->dtype != dtype || job->dout->dtype != dtype || job->dq->dtype != dtype ||
        job->dk->dtype != dtype || job->dv->dtype != dtype)
        return false;
    for (int64_t s = 0; s < job->problem->count;
         s++) /* keys or queries without the others get zeros elsewhere */
        if ((job->problem->sequences[s].q_len == 0) != (job->problem->sequences[s].kv_len == 0)) return false;
    return job->lse && nvidia_is_plain_lse(job->lse) && nvidia_is_plain_lse(job->dlse);
}

clattn_status nvidia_backward(clattn_context *context, const struct backward_job *job, bool *done)
{
    const struct problem *problem = job->problem;
    int path = path_for(problem, job->blocks);
    *done = false;
    if (path < 0 || !takes(context, job) || !fits(context, job, path)) return CLATTN_SUCCESS;
    const clattn_tensor *const tensors[] = {job->q,    job->k,  job->v,  job->out,
                                            job->dout, job->dq, job->dk, job->dv};
    struct nvidia_shape shape = {.dtype = job->q->dtype,
                                 .dim = problem->dim,
                                 .dim_v = problem->dim_v,
                                 .group = problem->group,
                                 .causal = problem->causal,
                                 .window = nvidia_has_window(problem),
                                 .aligned = true};
    for (int i = 0; i < 8; i++)
        shape.aligned = shape.aligned && nvidia_is_aligned(tensors[i]);
    *done = nvidia_has(context, path, &shape) && nvidia_works(context, path, &shape);
    if (!*done) return CLATTN_SUCCESS;
    log_line(context, CLATTN_LOG_DEBUG, "gradients by path %s", nvidia_path_name(path));
    return nvidia_backward_run(context, job, &shape, path);
}

/* ---- launches ---- */

static void run_delta(struct opencl_launch *launch, const struct backward_job *job,
                      const struct sequence *sequence, const char *options, cl_mem delta)
{
    int32_t heads = job->problem->q_heads;
    opencl_launch_kernel(launch, FILES, "backward_delta", options);
    nvidia_arg_rows(launch, job->dout, sequence->batch, sequence->q_row);
    nvidia_arg_rows(launch, job->out, sequence->batch, sequence->q_row);
    opencl_arg_tensor(launch, job->dlse);
    opencl_arg_long(launch, nvidia_first(job->dlse, sequence->batch, sequence->q_row));
    opencl_arg_mem(launch, delta);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, heads);
    nvidia_run(launch, ceil_div(sequence->q_len * heads, 8), 1, 1, 128);
}

/* What both kernels of gradients read: q, k, v, dout, lse, delta. */
static void arg_inputs(struct opencl_launch *launch, const struct backward_job *job,
                       const struct sequence *sequence, cl_mem delta)
{
    nvidia_arg_rows(launch, job->q, sequence->batch, sequence->q_row);
    nvidia_arg_rows(launch, job->k, sequence->batch, sequence->k_row);
    nvidia_arg_rows(launch, job->v, sequence->batch, sequence->k_row);
    nvidia_arg_rows(launch, job->dout, sequence->batch, sequence->q_row);
    opencl_arg_tensor(launch, job->lse);
    opencl_arg_long(launch, nvidia_first(job->lse, sequence->batch, sequence->q_row));
    opencl_arg_mem(launch, delta);
}

static void run_blocks(struct opencl_launch *launch, const struct backward_job *job,
                       const struct sequence *sequence, const char *options, int32_t topk,
                       const struct nvidia_inverse *inverse, const struct sums *sums)
{
    const struct problem *problem = job->problem;
    opencl_launch_kernel(launch, FILES, "backward_block", options);
    arg_inputs(launch, job, sequence, sums->delta);
    opencl_arg_mem(launch, inverse->pairs);
    opencl_arg_mem(launch, inverse->offset);
    opencl_arg_mem(launch, inverse->tile_offset);
    opencl_arg_mem(launch, sums->dq);
    opencl_arg_mem(launch, sums->dk);
    opencl_arg_mem(launch, sums->dv);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, topk);
    opencl_arg_int(launch, (int32_t)inverse->n_blocks);
    opencl_arg_int(launch, (int32_t)inverse->tiles);
    nvidia_arg_scale(launch, problem);
    nvidia_run(launch, inverse->tiles, problem->kv_heads, 1, 128 * WARPGROUPS);
}

/* dk or dv: the sums of a block's tiles, times factor. */
static void run_keys(struct opencl_launch *launch, const struct backward_job *job,
                     const struct sequence *sequence, const char *options, const struct nvidia_inverse *inverse,
                     cl_mem partial, const clattn_tensor *to, float factor)
{
    int32_t dim = (int32_t)to->dim;
    opencl_launch_kernel(launch, FILES, "backward_keys", options);
    opencl_arg_mem(launch, partial);
    opencl_arg_mem(launch, inverse->tile_offset);
    nvidia_arg_rows(launch, to, sequence->batch, sequence->k_row);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, (int32_t)inverse->n_blocks);
    opencl_arg_int(launch, (int32_t)inverse->tiles);
    opencl_arg_int(launch, dim);
    opencl_arg_int(launch, padded(dim));
    opencl_arg_float(launch, factor);
    nvidia_run(launch, inverse->n_blocks, job->problem->kv_heads, ceil_div(NVIDIA_LEAF * padded(dim) / 2, 128),
               128);
}

/* dq: the parts of a row's blocks. */
static void run_queries(struct opencl_launch *launch, const struct backward_job *job,
                        const struct sequence *sequence, const char *options,
                        const struct nvidia_token_lists *lists, cl_mem partial)
{
    const struct problem *problem = job->problem;
    opencl_launch_kernel(launch, FILES, "backward_queries", options);
    opencl_arg_mem(launch, partial);
    opencl_arg_mem(launch, lists->list);
    opencl_arg_long(launch, lists->base);
    nvidia_arg_rows(launch, job->dq, sequence->batch, sequence->q_row);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, problem->kv_heads);
    opencl_arg_int(launch, lists->topk);
    int64_t items = sequence->q_len * problem->q_heads * ((problem->dim + 31) / 32 * 4);
    nvidia_run(launch, ceil_div(items, 256), 1, 1, 256);
}

/* dq: tiles of rows over their lists. */
static void run_tiles(struct opencl_launch *launch, const struct backward_job *job,
                      const struct sequence *sequence, const char *options,
                      const struct nvidia_tile_lists *lists, cl_mem delta)
{
    const struct problem *problem = job->problem;
    int64_t tiles_per_list = ceil_div(lists->q_block * problem->group, 64 * WARPGROUPS);
    opencl_launch_kernel(launch, TILE_FILES, "backward_tile", options);
    arg_inputs(launch, job, sequence, delta);
    opencl_arg_mem(launch, lists->list);
    opencl_arg_long(launch, lists->base);
    opencl_arg_int(launch, (int32_t)lists->stride);
    opencl_arg_int(launch, (int32_t)lists->head_stride);
    nvidia_arg_rows(launch, job->dq, sequence->batch, sequence->q_row);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, (int32_t)lists->length);
    opencl_arg_int(launch, (int32_t)lists->q_block);
    opencl_arg_int(launch, (int32_t)tiles_per_list);
    nvidia_arg_scale(launch, problem);
    nvidia_run(launch, lists->count * tiles_per_list, problem->kv_heads, 1, 128 * WARPGROUPS);
}

static struct sums sums_begin(struct opencl_launch *launch, const struct problem *problem, int64_t topk,
                              const struct nvidia_inverse *inverse, enum nvidia_path path)
{
    size_t rows = (size_t)problem->q_len_max * (size_t)problem->q_heads;
    size_t tiles = (size_t)(nvidia_inverse_entries(inverse, problem, (int32_t)topk) +
                            problem->q_len_max * topk * problem->group / inverse->rows);
    size_t tile_rows = (size_t)problem->kv_heads * tiles * WARPGROUPS * NVIDIA_LEAF;
    struct sums sums;
    sums.delta = opencl_launch_temporary(launch, rows * sizeof(float));
    sums.dq = sums.delta; /* not written */
    if (path == NVIDIA_BACKWARD)
        sums.dq =
            opencl_launch_temporary(launch, rows * (size_t)topk * (size_t)((problem->dim + 31) / 32 * 32) * 2);
    sums.dk = opencl_launch_temporary(launch, tile_rows * (size_t)padded(problem->dim) * sizeof(float));
    sums.dv = opencl_launch_temporary(launch, tile_rows * (size_t)padded(problem->dim_v) * sizeof(float));
    return sums;
}

clattn_status nvidia_backward_run(clattn_context *context, const struct backward_job *job,
                                  const struct nvidia_shape *shape, enum nvidia_path path)
{
    const struct problem *problem = job->problem;
    int64_t topk = topk_of(problem, job->blocks);
    bool is_tile = path == NVIDIA_BACKWARD_TILE;
    struct nvidia_inverse inverse = {.rows = is_tile ? TILE_ROWS : ROWS, .is_whole = true};
    struct opencl_options options = nvidia_options(shape), block_options = options;
    struct nvidia_tile_lists tile_lists = {0};
    struct opencl_launch launch;
    cl_mem list = NULL;
    opencl_option(&block_options, "ROWS", inverse.rows);
    opencl_option(&block_options, "DQ", !is_tile);
    opencl_launch_begin(context, job->sync, &launch);
    nvidia_inverse_begin(&launch, &inverse, problem, (int32_t)topk);
    if (is_tile) {
        tile_lists = nvidia_tile_lists_begin(&launch, problem, job->blocks, path);
        size_t entries = (size_t)(problem->q_len_max * problem->kv_heads * topk);
        list = opencl_launch_temporary(&launch, entries * sizeof(cl_int));
    }
    struct sums sums = sums_begin(&launch, problem, topk, &inverse, path);
    for (int64_t s = 0; s < problem->count && !launch.status; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        if (sequence->q_len == 0) continue;
        struct nvidia_token_lists lists;
        if (is_tile) {
            nvidia_tile_lists_run(&launch, problem, job->blocks, sequence, path, &tile_lists);
            lists = nvidia_token_lists_run(&launch, problem, sequence, job->blocks ? &tile_lists : NULL, topk,
                                           list);
        } else {
            lists = nvidia_token_lists_of(job->blocks, sequence);
        }
        nvidia_inverse_run(&launch, &inverse, problem, sequence, &lists, shape);
        run_delta(&launch, job, sequence, block_options.text, sums.delta);
        run_blocks(&launch, job, sequence, block_options.text, lists.topk, &inverse, &sums);
        run_keys(&launch, job, sequence, block_options.text, &inverse, sums.dk, job->dk, problem->scale);
        run_keys(&launch, job, sequence, block_options.text, &inverse, sums.dv, job->dv, 1);
        if (is_tile)
            run_tiles(&launch, job, sequence, options.text, &tile_lists, sums.delta);
        else
            run_queries(&launch, job, sequence, block_options.text, &lists, sums.dq);
    }
    return opencl_launch_end(&launch);
}
