/* SPDX-License-Identifier: MIT */
/* The key pyramid on NVIDIA cards: all keys in one launch, then five levels a launch; see cl/pyramid_mma.cl. */

#include "config.h"

#include "opencl_nvidia.h"

enum { LEVELS_AT_ONCE = 5, NODES = 32 };

clattn_status nvidia_pyramid(clattn_context *context, const struct pyramid_job *job, bool *done)
{
    const struct problem *problem = job->problem;
    *done = false;
    if (job->pyramid->leaf != NVIDIA_LEAF || pyramid_has_bounds(job->pyramid) ||
        !nvidia_takes(context, problem, job->k->dtype))
        return CLATTN_SUCCESS;
    struct nvidia_shape shape = {
        .dtype = job->k->dtype, .dim = problem->dim, .aligned = nvidia_is_aligned(job->k)};
    *done = nvidia_has(context, NVIDIA_PYRAMID, &shape) && nvidia_works(context, NVIDIA_PYRAMID, &shape);
    if (!*done) return CLATTN_SUCCESS;
    log_line(context, CLATTN_LOG_DEBUG, "pyramid by path %s", nvidia_path_name(NVIDIA_PYRAMID));
    return nvidia_pyramid_run(context, job, &shape);
}

static void run_leaves(struct opencl_launch *launch, const struct pyramid_job *job, int64_t s,
                       const char *options)
{
    const struct problem *problem = job->problem;
    const struct sequence *sequence = &problem->sequences[s];
    int64_t leaves = ceil_div(sequence->kv_len, NVIDIA_LEAF), row = (problem->dim + 31) / 32 * 32;
    opencl_launch_kernel(launch, "mma_nvidia.cl+pyramid_mma.cl", "pyramid_leaves", options);
    nvidia_arg_rows(launch, job->k, sequence->batch, sequence->k_row);
    opencl_arg_storage(launch, &job->pyramid->means);
    opencl_arg_long(launch, job->pyramid->first[s]);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, (int32_t)pyramid_nodes(sequence->kv_len, NVIDIA_LEAF));
    opencl_arg_int(launch, (int32_t)leaves);
    nvidia_run(launch, ceil_div(leaves * (row / 2), 256), problem->kv_heads, 1, 256);
}

static void run_upper(struct opencl_launch *launch, const struct pyramid_job *job, int64_t s, int level,
                      const char *options)
{
    const struct problem *problem = job->problem;
    int64_t kv_len = problem->sequences[s].kv_len;
    opencl_launch_kernel(launch, "mma_nvidia.cl+pyramid_mma.cl", "pyramid_upper", options);
    opencl_arg_storage(launch, &job->pyramid->means);
    opencl_arg_long(launch, job->pyramid->first[s]);
    opencl_arg_int(launch, level);
    opencl_arg_int(launch, (int32_t)ceil_div(kv_len, NVIDIA_LEAF));
    opencl_arg_int(launch, (int32_t)pyramid_nodes(kv_len, NVIDIA_LEAF));
    nvidia_run(launch, ceil_div(level_nodes(kv_len, NVIDIA_LEAF, level), NODES), problem->kv_heads, 1, 256);
}

clattn_status nvidia_pyramid_run(clattn_context *context, const struct pyramid_job *job,
                                 const struct nvidia_shape *shape)
{
    const struct problem *problem = job->problem;
    struct opencl_options options = {""};
    struct opencl_launch launch;
    opencl_option(&options, "DTYPE", shape->dtype == CLATTN_FLOAT16);
    opencl_option(&options, "DIM", shape->dim);
    opencl_option(&options, "ALIGNED", shape->aligned);
    opencl_launch_begin(context, job->sync, &launch);
    for (int64_t s = 0; s < problem->count && !launch.status; s++) {
        int64_t kv_len = problem->sequences[s].kv_len;
        if (kv_len == 0) continue;
        run_leaves(&launch, job, s, options.text);
        for (int l = 1; level_nodes(kv_len, NVIDIA_LEAF, l) > 1; l += LEVELS_AT_ONCE)
            run_upper(&launch, job, s, l, options.text);
    }
    return opencl_launch_end(&launch);
}
