/* SPDX-License-Identifier: MIT */
/* PISA selection on NVIDIA cards: keys packed for the matrix unit, means as two 16-bit parts, then a warp a
 * query; see cl/select_mma.cl. */

#include "config.h"

#include "opencl_nvidia.h"

enum { TOPK_MAX = 16, GROUP_MAX = 16, WARPS = 4 };

static bool takes(const clattn_context *context, const struct select_job *job)
{
    const struct problem *problem = job->problem;
    const clattn_select_desc *select = job->select;
    if (!nvidia_takes(context, problem, job->q->dtype) || select->selector != CLATTN_SELECT_PISA) return false;
    /* What the kernel forces: the first leaf, the query's own and the one before it. */
    return job->pyramid && select->leaf == NVIDIA_LEAF && select->topk <= TOPK_MAX &&
           problem->group <= GROUP_MAX && select->forced_first == 1 && select->forced_last == 2;
}

struct nvidia_shape nvidia_select_shape(const struct select_job *job)
{
    const struct problem *problem = job->problem;
    return (struct nvidia_shape){.dtype = job->q->dtype,
                                 .dim = problem->dim,
                                 .dim_v = problem->dim,
                                 .group = problem->group,
                                 .topk = job->select->topk,
                                 .causal = problem->causal,
                                 .aligned = nvidia_is_aligned(job->q) && nvidia_is_aligned(job->k)};
}

clattn_status nvidia_select(clattn_context *context, const struct select_job *job, bool *done)
{
    *done = false;
    if (!takes(context, job)) return CLATTN_SUCCESS;
    struct nvidia_shape shape = nvidia_select_shape(job);
    *done = nvidia_has(context, NVIDIA_SELECT, &shape) && nvidia_works(context, NVIDIA_SELECT, &shape);
    if (!*done) return CLATTN_SUCCESS;
    log_line(context, CLATTN_LOG_DEBUG, "selection by path %s", nvidia_path_name(NVIDIA_SELECT));
    return nvidia_select_run(context, job, &shape);
}

/* ---- launches ---- */

static void run_keys(struct opencl_launch *launch, const struct select_job *job,
                     const struct nvidia_shape *shape, const struct sequence *sequence, cl_mem packed)
{
    struct opencl_options options = nvidia_options(shape);
    opencl_launch_kernel(launch, NVIDIA_BLOCK_FILES "pack_blocks.cl", "pack_keys", options.text);
    nvidia_arg_rows(launch, job->k, sequence->batch, sequence->k_row);
    opencl_arg_mem(launch, packed);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    nvidia_run(launch, ceil_div(sequence->kv_len, NVIDIA_LEAF), job->problem->kv_heads, 1, 256);
}

static void run_split(struct opencl_launch *launch, const struct select_job *job,
                      const struct nvidia_shape *shape, int64_t s, cl_mem split)
{
    struct opencl_options options = {""};
    int64_t nodes = pyramid_nodes(job->problem->sequences[s].kv_len, NVIDIA_LEAF);
    int32_t row = (shape->dim + 31) / 32 * 32;
    opencl_option(&options, "DTYPE", shape->dtype == CLATTN_FLOAT16);
    opencl_option(&options, "DIM", shape->dim);
    opencl_option(&options, "ALIGNED", shape->aligned);
    opencl_launch_kernel(launch, "mma_nvidia.cl+pyramid_mma.cl", "pyramid_split", options.text);
    opencl_arg_storage(launch, &job->pyramid->means);
    opencl_arg_long(launch, job->pyramid->first[s]);
    opencl_arg_mem(launch, split);
    opencl_arg_int(launch, (int32_t)nodes);
    nvidia_run(launch, ceil_div(nodes * (row / 2), 256), job->problem->kv_heads, 1, 256);
}

static void run_select(struct opencl_launch *launch, const struct select_job *job,
                       const struct nvidia_shape *shape, int64_t s, cl_mem packed, cl_mem split)
{
    const struct problem *problem = job->problem;
    const struct sequence *sequence = &problem->sequences[s];
    struct opencl_options options = nvidia_options(shape);
    opencl_option(&options, "TOPK", shape->topk);
    opencl_launch_kernel(launch, NVIDIA_BLOCK_FILES "select_rank.cl+select_mma.cl", "select_pisa",
                         options.text);
    nvidia_arg_rows(launch, job->q, sequence->batch, sequence->q_row);
    opencl_arg_mem(launch, packed);
    opencl_arg_mem(launch, split);
    opencl_arg_storage(launch, &job->blocks->indices);
    opencl_arg_storage(launch, &job->blocks->counts);
    opencl_arg_long(launch, sequence->list_row);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, (int32_t)ceil_div(sequence->kv_len, NVIDIA_LEAF));
    opencl_arg_int(launch, (int32_t)pyramid_nodes(sequence->kv_len, NVIDIA_LEAF));
    opencl_arg_float(launch, nvidia_scale(problem));
    nvidia_run(launch, ceil_div(sequence->q_len, WARPS), problem->kv_heads, 1, 32 * WARPS);
}

clattn_status nvidia_select_run(clattn_context *context, const struct select_job *job,
                                const struct nvidia_shape *shape)
{
    const struct problem *problem = job->problem;
    int64_t row = (shape->dim + 31) / 32 * 32, leaves = ceil_div(problem->kv_len_max, NVIDIA_LEAF);
    struct opencl_launch launch;
    opencl_launch_begin(context, job->sync, &launch);
    cl_mem packed =
        opencl_launch_temporary(&launch, (size_t)(problem->kv_heads * leaves * NVIDIA_LEAF * row * 2));
    cl_mem split = opencl_launch_temporary(
        &launch, (size_t)(problem->kv_heads * pyramid_nodes(problem->kv_len_max, NVIDIA_LEAF) * row * 4));
    for (int64_t s = 0; s < problem->count && !launch.status; s++) {
        if (problem->sequences[s].q_len == 0) continue;
        run_keys(&launch, job, shape, &problem->sequences[s], packed);
        run_split(&launch, job, shape, s, split);
        run_select(&launch, job, shape, s, packed, split);
    }
    return opencl_launch_end(&launch);
}
