/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "job.h"

#include "device.h"
#include "program.h"

#include <string.h>

const char *const job_step_names[JOB_STEPS] = {"transfer", "pyramid", "select", "attend"};

static clattn_stats read_stats(clattn_context *context)
{
    clattn_stats stats = {.size = sizeof stats};
    clattn_context_stats(context, &stats);
    return stats;
}

static clattn_status stage(clattn_context *context, const clattn_tensor *host, clattn_tensor *device)
{
    clattn_status status =
        clattn_tensor_create(context, host->dtype, host->batch, host->len, host->heads, host->dim, device);
    return status == CLATTN_SUCCESS ? clattn_tensor_upload(context, host, device) : status;
}

/* An OpenCL device gets copies, made here so that they are timed apart; the CPU backends read the files' pages.
 */
static clattn_status upload(struct job *job)
{
    clattn_device_info info = {.size = sizeof info};
    clattn_status status = clattn_context_device(job->context, &info);
    const clattn_tensor *q = &job->q;
    if (status != CLATTN_SUCCESS) return status;

    job->staged = info.backend == CLATTN_BACKEND_OPENCL;
    if (!job->staged) {
        job->device_q = job->q;
        job->device_k = job->k;
        job->device_v = job->v;
        job->device_extra_k = job->extra_k;
        job->device_extra_v = job->extra_v;
        job->device_out = clattn_tensor_bthd(job->out, CLATTN_FLOAT32, q->batch, q->len, q->heads, job->v.dim);
        job->device_lse = clattn_tensor_bthd(job->lse, CLATTN_FLOAT32, q->batch, q->len, q->heads, 1);
        return CLATTN_SUCCESS;
    }
    if ((status = stage(job->context, &job->q, &job->device_q)) != CLATTN_SUCCESS ||
        (status = stage(job->context, &job->k, &job->device_k)) != CLATTN_SUCCESS ||
        (status = stage(job->context, &job->v, &job->device_v)) != CLATTN_SUCCESS ||
        (job->extra_k.len > 0 &&
         ((status = stage(job->context, &job->extra_k, &job->device_extra_k)) != CLATTN_SUCCESS ||
          (status = stage(job->context, &job->extra_v, &job->device_extra_v)) != CLATTN_SUCCESS)) ||
        (status = clattn_tensor_create(job->context, CLATTN_FLOAT32, q->batch, q->len, q->heads, job->v.dim,
                                       &job->device_out)) != CLATTN_SUCCESS)
        return status;
    return clattn_tensor_create(job->context, CLATTN_FLOAT32, q->batch, q->len, q->heads, 1, &job->device_lse);
}

static clattn_status download(struct job *job)
{
    const clattn_tensor *q = &job->q;
    if (!job->staged) return CLATTN_SUCCESS;
    clattn_tensor out = clattn_tensor_bthd(job->out, CLATTN_FLOAT32, q->batch, q->len, q->heads, job->v.dim);
    clattn_tensor lse = clattn_tensor_bthd(job->lse, CLATTN_FLOAT32, q->batch, q->len, q->heads, 1);
    clattn_status status = clattn_tensor_download(job->context, &job->device_out, &out);
    return status == CLATTN_SUCCESS ? clattn_tensor_download(job->context, &job->device_lse, &lse) : status;
}

static clattn_status build_pyramid(struct job *job)
{
    clattn_selector selector = job->select.selector;
    if (job->neighborhood || (job->pattern && !job->join)) return CLATTN_SUCCESS;
    if (job->blocks || selector == CLATTN_SELECT_DENSE || selector == CLATTN_SELECT_FLAT_LSE)
        return CLATTN_SUCCESS;
    return clattn_pyramid_build_for(job->context, &job->attention, &job->select, &job->device_k, &job->pyramid,
                                    NULL);
}

/* Lists of the pattern, one for as many queries as a leaf has keys. */
static clattn_status list_pattern(struct job *job, clattn_blocks **blocks)
{
    clattn_pattern_shape shape = CLATTN_PATTERN_SHAPE_INIT;
    shape.batch = job->q.batch;
    shape.q_len = job->q.len;
    shape.kv_len = job->k.len;
    shape.heads = job->pattern_heads;
    shape.block = shape.q_block = job->select.leaf;
    return clattn_pattern_blocks(job->context, job->pattern, &job->attention, &shape, blocks);
}

static clattn_status join(struct job *job)
{
    clattn_blocks *selected = NULL, *listed = NULL;
    clattn_status status = clattn_select(job->context, &job->attention, &job->select, &job->device_q,
                                         &job->device_k, job->pyramid, &selected, NULL);
    if (status == CLATTN_SUCCESS) status = list_pattern(job, &listed);
    if (status == CLATTN_SUCCESS)
        status = clattn_blocks_union(job->context, &job->attention, job->q.batch, job->q.len, selected, listed,
                                     &job->blocks);
    clattn_blocks_release(job->context, selected);
    clattn_blocks_release(job->context, listed);
    return status;
}

static clattn_status choose(struct job *job)
{
    if (job->neighborhood)
        return clattn_neighborhood_create(job->context, job->neighborhood, job->extra_k.len, &job->plan);
    if (job->blocks || (job->select.selector == CLATTN_SELECT_DENSE && !job->pattern)) return CLATTN_SUCCESS;
    if (job->pattern) return job->join ? join(job) : list_pattern(job, &job->blocks);
    return clattn_select(job->context, &job->attention, &job->select, &job->device_q, &job->device_k,
                         job->pyramid, &job->blocks, NULL);
}

static clattn_status attend(struct job *job)
{
    bool has_extra = job->extra_k.len > 0;
    if (job->neighborhood)
        return clattn_neighborhood_forward(
            job->context, job->plan, job->attention.scale, &job->device_q, &job->device_k, &job->device_v,
            has_extra ? &job->device_extra_k : NULL, has_extra ? &job->device_extra_v : NULL, &job->device_out,
            &job->device_lse, NULL);
    return clattn_attention_forward(job->context, &job->attention, &job->device_q, &job->device_k,
                                    &job->device_v, job->blocks, &job->device_out, &job->device_lse, NULL);
}

int job_run(struct job *job)
{
    static const struct {
        clattn_status (*run)(struct job *job);
        enum job_step step;
    } steps[] = {{upload, JOB_TRANSFER},
                 {build_pyramid, JOB_PYRAMID},
                 {choose, JOB_SELECT},
                 {attend, JOB_ATTEND},
                 {download, JOB_TRANSFER}};
    double begin = program_seconds();
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        if (job->progress) job->progress(job_step_names[steps[i].step]);
        clattn_stats before = read_stats(job->context);
        double start = program_seconds();
        clattn_status status = steps[i].run(job);
        double took = program_seconds() - start;
        clattn_stats after = read_stats(job->context);
        if (status != CLATTN_SUCCESS) {
            device_error(job->context, status, job_step_names[steps[i].step]);
            return STATUS_FAILED;
        }
        double build = after.build_seconds - before.build_seconds;
        job->build += build;
        job->seconds[steps[i].step] += took > build ? took - build : 0;
        job->programs_built += after.programs_built - before.programs_built;
        job->programs_loaded += after.programs_loaded - before.programs_loaded;
    }
    job->total = program_seconds() - begin;
    return STATUS_OK;
}

void job_release(struct job *job)
{
    if (!job->context) return;
    clattn_pyramid_release(job->context, job->pyramid);
    clattn_blocks_release(job->context, job->blocks);
    clattn_neighborhood_release(job->context, job->plan);
    job->plan = NULL;
    job->pyramid = NULL;
    job->blocks = NULL;
    if (!job->staged) return;
    clattn_tensor *tensors[] = {&job->device_q,   &job->device_k,       &job->device_v,      &job->device_out,
                                &job->device_lse, &job->device_extra_k, &job->device_extra_v};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        if (tensors[i]->data) clattn_tensor_release(job->context, tensors[i]);
    job->staged = false;
}
