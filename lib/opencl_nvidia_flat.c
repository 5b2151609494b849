/* SPDX-License-Identifier: MIT */
/* Flat selection by exact scores on NVIDIA cards: all leaves' scores by the matrix unit, then the best of each
 * query; see cl/select_flat.cl. */

#include "config.h"

#include "opencl_nvidia.h"

enum { TOPK_MAX = 32, GROUP_MAX = 16, WARPS = 4, WARPGROUPS = 2, TILE_QUERIES = 128 };
#define FLAT_FILES "select_rank.cl+select_flat.cl"

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
    *done = false;
    if (!takes(context, job)) return CLATTN_SUCCESS;
    struct nvidia_shape shape = nvidia_select_shape(job);
    static const enum nvidia_path paths[] = {NVIDIA_FLAT_HOPPER, NVIDIA_FLAT};
    for (int i = 0; i < 2; i++) {
        *done = nvidia_has(context, paths[i], &shape) && nvidia_works(context, paths[i], &shape);
        if (!*done) continue;
        log_line(context, CLATTN_LOG_DEBUG, "selection by path %s", nvidia_path_name(paths[i]));
        return nvidia_flat_run(context, job, &shape, paths[i]);
    }
    return CLATTN_SUCCESS;
}

/* ---- launches ---- */

/* What a job's launches share; core NULL: by mma.sync. */
struct flat {
    const struct select_job *job;
    const struct nvidia_shape *shape;
    cl_mem scores, core;
};

/* Queries of a work-group: so many slabs of 16 rows. */
static int32_t tile_queries(const struct flat *flat)
{
    int32_t group = flat->shape->group, heads = group > 8 ? 16 : group > 4 ? 8 : group > 2 ? 4 : group;
    int32_t slabs = flat->core ? 4 * WARPGROUPS : WARPS * (flat->shape->dim > 128 ? 1 : 2);
    return slabs * 16 / heads;
}

static void run_keys(struct opencl_launch *launch, const struct flat *flat, const struct sequence *sequence)
{
    struct opencl_options options = {""};
    opencl_option(&options, "DIM", flat->shape->dim);
    opencl_option(&options, "DIM_V", flat->shape->dim_v);
    opencl_launch_kernel(launch, NVIDIA_BLOCK_FILES "pack_cores.cl", "pack_key_cores", options.text);
    nvidia_arg_rows(launch, flat->job->k, sequence->batch, sequence->k_row);
    opencl_arg_mem(launch, flat->core);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    nvidia_run(launch, ceil_div(sequence->kv_len, NVIDIA_LEAF), flat->job->problem->kv_heads, 1, 256);
}

static void run_scores(struct opencl_launch *launch, const struct flat *flat, const struct sequence *sequence,
                       int64_t first, int64_t rows)
{
    const struct select_job *job = flat->job;
    struct nvidia_shape own = *flat->shape;
    own.topk = 0;
    struct opencl_options options = nvidia_options(&own);
    opencl_launch_kernel(launch,
                         flat->core ? NVIDIA_HOPPER_FILES FLAT_FILES "+select_flat_wgmma.cl"
                                    : NVIDIA_BLOCK_FILES FLAT_FILES "+select_flat_mma.cl",
                         "flat_scores", options.text);
    nvidia_arg_rows(launch, job->q, sequence->batch, sequence->q_row);
    if (flat->core)
        opencl_arg_mem(launch, flat->core);
    else
        nvidia_arg_rows(launch, job->k, sequence->batch, sequence->k_row);
    opencl_arg_mem(launch, flat->scores);
    opencl_arg_int(launch, (int32_t)first);
    opencl_arg_int(launch, (int32_t)rows);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, (int32_t)ceil_div(sequence->kv_len, NVIDIA_LEAF));
    opencl_arg_float(launch, nvidia_scale(job->problem));
    nvidia_run(launch, ceil_div(rows, tile_queries(flat)), job->problem->kv_heads, 1,
               flat->core ? 128 * WARPGROUPS : 32 * WARPS);
}

static void run_best(struct opencl_launch *launch, const struct flat *flat, const struct sequence *sequence,
                     int64_t first, int64_t rows)
{
    const struct select_job *job = flat->job;
    const clattn_select_desc *select = job->select;
    struct opencl_options options = nvidia_options(flat->shape);
    opencl_option(&options, "TOPK", flat->shape->topk);
    opencl_launch_kernel(launch, NVIDIA_BLOCK_FILES FLAT_FILES, "flat_best", options.text);
    opencl_arg_mem(launch, flat->scores);
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

clattn_status nvidia_flat_run(clattn_context *context, const struct select_job *job,
                              const struct nvidia_shape *shape, enum nvidia_path path)
{
    const struct problem *problem = job->problem;
    int64_t leaves = ceil_div(problem->kv_len_max, NVIDIA_LEAF), row = (shape->dim + 31) / 32 * 32;
    int64_t row_bytes = problem->kv_heads * leaves * (int64_t)sizeof(float);
    int64_t most = MAX(SCORE_BYTES / row_bytes / TILE_QUERIES, 1) * TILE_QUERIES;
    most = MIN(most, MAX(problem->q_len_max, 1));
    struct opencl_launch launch;
    struct flat flat = {.job = job, .shape = shape};
    opencl_launch_begin(context, job->sync, &launch);
    flat.scores = opencl_launch_temporary(&launch, (size_t)(most * row_bytes));
    if (path == NVIDIA_FLAT_HOPPER)
        flat.core =
            opencl_launch_temporary(&launch, (size_t)(problem->kv_heads * leaves * NVIDIA_LEAF * row * 2));
    for (int64_t s = 0; s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        if (flat.core && sequence->q_len > 0) run_keys(&launch, &flat, sequence);
        for (int64_t first = 0; first < sequence->q_len && !launch.status; first += most) {
            int64_t rows = MIN(most, sequence->q_len - first);
            run_scores(&launch, &flat, sequence, first, rows);
            run_best(&launch, &flat, sequence, first, rows);
        }
    }
    return opencl_launch_end(&launch);
}
