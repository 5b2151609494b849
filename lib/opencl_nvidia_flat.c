/* SPDX-License-Identifier: MIT */
/* Flat selection by exact scores on NVIDIA cards: all leaves' scores by the matrix unit, then the best of each query; see
 * cl/select_flat_mma.cl. */

#include "config.h"

#include "opencl_nvidia.h"

enum { TOPK_MAX = 32, GROUP_MAX = 16, WARPS = 4, TILE_QUERIES = 128 };
static const char FILES[] = NVIDIA_BLOCK_FILES "select_rank.cl+select_flat_mma.cl";

/* Scores in memory at a time. */
#define SCORE_BYTES (INT64_C(512) << 20)

static bool takes(const clattn_context *context, const struct select_job *job)
{
    const clattn_select_desc *select = job->select;
    return nvidia_takes(context, job->problem, job->q->dtype) && select->selector == CLATTN_SELECT_FLAT_LSE &&
           select->leaf == NVIDIA_LEAF && select->topk <= TOPK_MAX && job->problem->group <= GROUP_MAX;
}

clattn_status nvidia_flat(clattn_context *context, const struct select_job *job, bool *done)
{
    const struct problem *problem = job->problem;
    *done = false;
    if (!takes(context, job)) return CLATTN_SUCCESS;
    struct nvidia_shape shape = {.dtype = job->q->dtype,
                                 .dim = problem->dim,
                                 .dim_v = problem->dim,
                                 .group = problem->group,
                                 .topk = job->select->topk,
                                 .causal = problem->causal,
                                 .aligned = nvidia_is_aligned(job->q) && nvidia_is_aligned(job->k)};
    *done = nvidia_has(context, NVIDIA_FLAT, &shape) && nvidia_works(context, NVIDIA_FLAT, &shape);
    if (!*done) return CLATTN_SUCCESS;
    log_line(context, CLATTN_LOG_DEBUG, "selection by path %s", nvidia_path_name(NVIDIA_FLAT));
    return nvidia_flat_run(context, job, &shape);
}

/* ---- launches ---- */

/* Queries of a work-group. */
static int32_t tile_queries(const struct nvidia_shape *shape)
{
    int32_t heads = shape->group > 8 ? 16 : shape->group > 4 ? 8 : shape->group > 2 ? 4 : shape->group;
    return WARPS * (shape->dim > 128 ? 1 : 2) * 16 / heads;
}

static void run_scores(struct opencl_launch *launch, const struct select_job *job, const struct nvidia_shape *shape,
                       const struct sequence *sequence, int64_t first, int64_t rows, cl_mem scores)
{
    struct nvidia_shape own = *shape;
    own.topk = 0;
    struct opencl_options options = nvidia_options(&own);
    opencl_launch_kernel(launch, FILES, "flat_scores", options.text);
    nvidia_arg_rows(launch, job->q, sequence->batch, sequence->q_row);
    nvidia_arg_rows(launch, job->k, sequence->batch, sequence->k_row);
    opencl_arg_mem(launch, scores);
    opencl_arg_int(launch, (int32_t)first);
    opencl_arg_int(launch, (int32_t)rows);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, (int32_t)ceil_div(sequence->kv_len, NVIDIA_LEAF));
    opencl_arg_float(launch, nvidia_scale(job->problem));
    nvidia_run(launch, ceil_div(rows, tile_queries(shape)), job->problem->kv_heads, 1, 32 * WARPS);
}

static void run_best(struct opencl_launch *launch, const struct select_job *job, const struct nvidia_shape *shape,
                     const struct sequence *sequence, int64_t first, int64_t rows, cl_mem scores)
{
    const clattn_select_desc *select = job->select;
    struct opencl_options options = nvidia_options(shape);
    opencl_option(&options, "TOPK", shape->topk);
    opencl_launch_kernel(launch, FILES, "flat_best", options.text);
    opencl_arg_mem(launch, scores);
    opencl_arg_storage(launch, &job->blocks->indices);
    opencl_arg_storage(launch, &job->blocks->counts);
    opencl_arg_long(launch, sequence->list_row);
    opencl_arg_int(launch, (int32_t)first);
    opencl_arg_int(launch, (int32_t)rows);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, (int32_t)ceil_div(sequence->kv_len, NVIDIA_LEAF));
    opencl_arg_int(launch, MIN(select->forced_first, select->topk)); /* more than topk cannot be kept */
    opencl_arg_int(launch, MIN(select->forced_last, select->topk));
    nvidia_run(launch, ceil_div(rows, WARPS), job->problem->kv_heads, 1, 32 * WARPS);
}

clattn_status nvidia_flat_run(clattn_context *context, const struct select_job *job, const struct nvidia_shape *shape)
{
    const struct problem *problem = job->problem;
    int64_t row_bytes = problem->kv_heads * ceil_div(problem->kv_len_max, NVIDIA_LEAF) * (int64_t)sizeof(float);
    int64_t most = MAX(SCORE_BYTES / row_bytes / TILE_QUERIES, 1) * TILE_QUERIES;
    most = MIN(most, MAX(problem->q_len_max, 1));
    struct opencl_launch launch;
    opencl_launch_begin(context, job->sync, &launch);
    cl_mem scores = opencl_launch_temporary(&launch, (size_t)(most * row_bytes));
    for (int64_t s = 0; s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        for (int64_t first = 0; first < sequence->q_len && !launch.status; first += most) {
            int64_t rows = MIN(most, sequence->q_len - first);
            run_scores(&launch, job, shape, sequence, first, rows, scores);
            run_best(&launch, job, shape, sequence, first, rows, scores);
        }
    }
    return opencl_launch_end(&launch);
}
