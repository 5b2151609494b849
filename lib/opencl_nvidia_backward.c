/* SPDX-License-Identifier: MIT */
/* Gradients of attention on Hopper cards, over inverted lists of tokens, without atomics: two runs give the
 * same bits; see cl/attention_backward_wgmma.cl. */

#include "config.h"

#include "opencl_nvidia.h"

static const char FILES[] = NVIDIA_HOPPER_FILES "attention_backward_wgmma.cl";

enum { ROWS = 4096, WARPGROUPS = 2 };

struct sums {
    cl_mem delta, dq, dk, dv;
};

static int padded(int dim)
{
    return (dim + 15) / 16 * 16;
}

/* ---- does it apply ---- */

static bool fits(const clattn_context *context, const struct backward_job *job)
{
    const struct opencl_device *device = &opencl_of(context)->device;
    const struct problem *problem = job->problem;
    double rows = (double)problem->q_len_max * problem->q_heads * job->blocks->topk;
    double tiles = (double)ceil_div(problem->kv_len_max, NVIDIA_LEAF) + rows / problem->kv_heads / ROWS + 1;
    double dq = rows * ((problem->dim + 31) / 32 * 32) * 2;
    double dk =
        problem->kv_heads * tiles * WARPGROUPS * NVIDIA_LEAF * padded(MAX(problem->dim, problem->dim_v)) * 4.0;
    return MAX(dq, dk) <= (double)device->alloc_max && dq + 2 * dk <= (double)device->memory_bytes / 3 &&
           rows / problem->kv_heads < INT32_MAX / 2;
}

static bool takes(const clattn_context *context, const struct backward_job *job)
{
    const clattn_blocks *blocks = job->blocks;
    clattn_dtype dtype = job->q->dtype;
    if (!nvidia_takes(context, job->problem, dtype) || !blocks || job->neighborhood) return false;
    if (blocks->block != NVIDIA_LEAF || blocks->q_block != 1 || blocks->heads != job->problem->kv_heads ||
        blocks->mask || blocks->starts)
        return false;
    if (!job->dq || !job->dk || !job->dv || job->dsink || job->dbias || job->accumulate ||
        job->compensation != 0)
        return false;
    if (job->out->dtype != dtype || job->dout->dtype != dtype || job->dq->dtype != dtype ||
        job->dk->dtype != dtype || job->dv->dtype != dtype)
        return false;
    for (int64_t s = 0; s < job->problem->count; s++) /* keys without queries get zeros elsewhere */
        if (job->problem->sequences[s].q_len == 0 && job->problem->sequences[s].kv_len > 0) return false;
    return job->lse && nvidia_is_plain_lse(job->lse) && nvidia_is_plain_lse(job->dlse) && fits(context, job);
}

clattn_status nvidia_backward(clattn_context *context, const struct backward_job *job, bool *done)
{
    const struct problem *problem = job->problem;
    *done = false;
    if (!takes(context, job)) return CLATTN_SUCCESS;
    const clattn_tensor *const tensors[] = {job->q,    job->k,  job->v,  job->out,
                                            job->dout, job->dq, job->dk, job->dv};
    struct nvidia_shape shape = {.dtype = job->q->dtype,
                                 .dim = problem->dim,
                                 .dim_v = problem->dim_v,
                                 .group = problem->group,
                                 .causal = problem->causal,
                                 .aligned = true};
    for (int i = 0; i < 8; i++)
        shape.aligned = shape.aligned && nvidia_is_aligned(tensors[i]);
    *done = nvidia_has(context, NVIDIA_BACKWARD, &shape) && nvidia_works(context, NVIDIA_BACKWARD, &shape);
    if (!*done) return CLATTN_SUCCESS;
    log_line(context, CLATTN_LOG_DEBUG, "gradients by path %s", nvidia_path_name(NVIDIA_BACKWARD));
    return nvidia_backward_run(context, job, &shape);
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

static void run_blocks(struct opencl_launch *launch, const struct backward_job *job,
                       const struct sequence *sequence, const char *options,
                       const struct nvidia_inverse *inverse, const struct sums *sums)
{
    const struct problem *problem = job->problem;
    opencl_launch_kernel(launch, FILES, "backward_block", options);
    nvidia_arg_rows(launch, job->q, sequence->batch, sequence->q_row);
    nvidia_arg_rows(launch, job->k, sequence->batch, sequence->k_row);
    nvidia_arg_rows(launch, job->v, sequence->batch, sequence->k_row);
    nvidia_arg_rows(launch, job->dout, sequence->batch, sequence->q_row);
    opencl_arg_tensor(launch, job->lse);
    opencl_arg_long(launch, nvidia_first(job->lse, sequence->batch, sequence->q_row));
    opencl_arg_mem(launch, sums->delta);
    opencl_arg_mem(launch, inverse->pairs);
    opencl_arg_mem(launch, inverse->offset);
    opencl_arg_mem(launch, inverse->tile_offset);
    opencl_arg_mem(launch, sums->dq);
    opencl_arg_mem(launch, sums->dk);
    opencl_arg_mem(launch, sums->dv);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, job->blocks->topk);
    opencl_arg_int(launch, (int32_t)inverse->n_blocks);
    opencl_arg_int(launch, (int32_t)inverse->tiles);
    opencl_arg_float(launch, nvidia_scale(problem));
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

static void run_queries(struct opencl_launch *launch, const struct backward_job *job,
                        const struct sequence *sequence, const char *options, cl_mem partial)
{
    const struct problem *problem = job->problem;
    opencl_launch_kernel(launch, FILES, "backward_queries", options);
    opencl_arg_mem(launch, partial);
    opencl_arg_storage(launch, &job->blocks->indices);
    opencl_arg_long(launch, sequence->list_row * job->blocks->heads * job->blocks->topk);
    nvidia_arg_rows(launch, job->dq, sequence->batch, sequence->q_row);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, problem->kv_heads);
    opencl_arg_int(launch, job->blocks->topk);
    int64_t items = sequence->q_len * problem->q_heads * ((problem->dim + 31) / 32 * 4);
    nvidia_run(launch, ceil_div(items, 256), 1, 1, 256);
}

static struct sums sums_begin(struct opencl_launch *launch, const struct backward_job *job,
                              const struct nvidia_inverse *inverse)
{
    const struct problem *problem = job->problem;
    size_t rows = (size_t)problem->q_len_max * (size_t)problem->q_heads, topk = (size_t)job->blocks->topk;
    size_t tiles = (size_t)(nvidia_inverse_entries(inverse, problem, job->blocks->topk) +
                            problem->q_len_max * job->blocks->topk * problem->group / ROWS);
    size_t tile_rows = (size_t)problem->kv_heads * tiles * WARPGROUPS * NVIDIA_LEAF;
    struct sums sums;
    sums.delta = opencl_launch_temporary(launch, rows * sizeof(float));
    sums.dq = opencl_launch_temporary(launch, rows * topk * (size_t)((problem->dim + 31) / 32 * 32) * 2);
    sums.dk = opencl_launch_temporary(launch, tile_rows * (size_t)padded(problem->dim) * sizeof(float));
    sums.dv = opencl_launch_temporary(launch, tile_rows * (size_t)padded(problem->dim_v) * sizeof(float));
    return sums;
}

clattn_status nvidia_backward_run(clattn_context *context, const struct backward_job *job,
                                  const struct nvidia_shape *shape)
{
    const struct problem *problem = job->problem;
    struct opencl_options options = nvidia_options(shape);
    struct opencl_launch launch;
    struct nvidia_inverse inverse = {.rows = ROWS, .is_whole = true};
    opencl_option(&options, "ROWS", ROWS);
    opencl_launch_begin(context, job->sync, &launch);
    nvidia_inverse_begin(&launch, &inverse, problem, job->blocks->topk);
    struct sums sums = sums_begin(&launch, job, &inverse);
    for (int64_t s = 0; s < problem->count && !launch.status; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        if (sequence->q_len == 0) continue;
        nvidia_inverse_run(&launch, &inverse, problem, sequence, job->blocks, shape);
        run_delta(&launch, job, sequence, options.text, sums.delta);
        run_blocks(&launch, job, sequence, options.text, &inverse, &sums);
        run_keys(&launch, job, sequence, options.text, &inverse, sums.dk, job->dk, problem->scale);
        run_keys(&launch, job, sequence, options.text, &inverse, sums.dv, job->dv, 1);
        run_queries(&launch, job, sequence, options.text, sums.dq);
    }
    return opencl_launch_end(&launch);
}
