/* SPDX-License-Identifier: MIT */
/* Attention over a union of two lists in two parts: the kernels for query tiles take the list that whole tiles
 * share, those for single rows the rest, and the results are merged. */

#include "internal.h"

/* Results of one part. `out` has the caller's type, for which backends have their fastest kernels. */
struct part {
    clattn_tensor out, lse;
};

bool attends_in_parts(const clattn_context *context, const struct forward_job *job)
{
    const struct backend *backend = context->backend;
    /* A sink belongs to one denominator only, and to none where that part has no key. Rows of no sequence must
     * stay as they are, and a merge would write them. */
    return job->blocks && job->blocks->coarse && backend->prefers_parts && !job->problem->options.sink &&
           all_rows_used(job->problem, job->q) && backend->prefers_parts(context, job);
}

static clattn_status part_run(clattn_context *context, const clattn_attention_desc *attention,
                              const struct forward_job *job, const clattn_blocks *blocks,
                              const clattn_sync *sync, struct part *part)
{
    const clattn_tensor *out = job->out;
    struct tensors tensors = {.q = job->q, .k = job->k, .v = job->v};
    struct problem problem;
    clattn_status status = problem_init(context, attention, &tensors, blocks->q_block, &problem);
    if (status) return status;
    problem.options = job->problem->options; /* with the staged tensors */
    status = clattn_tensor_create(context, out->dtype, out->batch, out->len, out->heads, out->dim, &part->out);
    if (!status)
        status = clattn_tensor_create(context, CLATTN_FLOAT32, out->batch, out->len, out->heads, 1, &part->lse);
    struct forward_job own = *job;
    own.problem = &problem;
    own.blocks = blocks;
    own.out = &part->out;
    own.lse = &part->lse;
    own.sync = sync;
    if (!status) status = context->backend->forward(context, &own);
    problem_release(&problem);
    return status;
}

clattn_status forward_in_parts(clattn_context *context, const clattn_attention_desc *attention,
                               const struct forward_job *job)
{
    struct part coarse = {0}, rest = {0};
    clattn_sync steps; /* of all but the last */
    const clattn_sync *sync = sync_without_event(job->sync, &steps);
    clattn_status status = part_run(context, attention, job, job->blocks->coarse, sync, &coarse);
    if (!status) status = part_run(context, attention, job, job->blocks->rest, sync, &rest);
    struct merge_job merge = {&coarse.out, &coarse.lse, &rest.out, &rest.lse, job->out, job->lse, job->sync};
    if (!status) status = context->backend->merge(context, &merge);
    clattn_tensor *const own[] = {&coarse.out, &coarse.lse, &rest.out, &rest.lse};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        clattn_tensor_release(context, own[i]);
    return status;
}
