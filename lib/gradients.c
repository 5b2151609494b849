/* SPDX-License-Identifier: MIT */
/* Attention over a block list, backward. */

#include "stage.h"

/* The gradients of a call where the backend computes. */
struct gradient_stage {
    struct staged dout, dlse, dq, dk, dv, dsink, dbias;
};

/* Results are uploaded first when they are added to, or when some rows belong to no sequence and must come back
 * as they were. */
static clattn_status stage_result(clattn_context *context, const clattn_tensor *tensor, bool keep,
                                  struct staged *staged)
{
    return keep ? stage_in(context, tensor, staged) : stage_out(context, tensor, staged);
}

static clattn_status stage_gradients(clattn_context *context, const struct problem *problem,
                                     const struct tensors *t, const clattn_gradients *g,
                                     struct gradient_stage *stage)
{
    int64_t q_rows = t->q->batch * t->q->len, k_rows = t->k->batch * t->k->len;
    for (int64_t s = 0; s < problem->count; s++) {
        q_rows -= problem->sequences[s].q_len;
        k_rows -= problem->sequences[s].kv_len;
    }
    bool adds = g->accumulate != 0, keep_q = adds || q_rows, keep_k = adds || k_rows;
    clattn_status status = stage_in(context, g->dout, &stage->dout);
    if (!status) status = stage_in(context, g->dlse, &stage->dlse);
    if (!status) status = stage_result(context, g->dq, keep_q, &stage->dq);
    if (!status) status = stage_result(context, g->dk, keep_k, &stage->dk);
    if (!status) status = stage_result(context, g->dv, keep_k, &stage->dv);
    if (!status) status = stage_result(context, g->dsink, adds, &stage->dsink);
    if (!status) status = stage_result(context, g->dbias, adds, &stage->dbias);
    return status;
}

static clattn_status stage_gradients_finish(clattn_context *context, struct gradient_stage *stage)
{
    struct staged *const results[] = {&stage->dq, &stage->dk, &stage->dv, &stage->dsink, &stage->dbias};
    clattn_status status = CLATTN_SUCCESS;
    for (size_t i = 0; i < sizeof results / sizeof *results && !status; i++)
        status = stage_finish(context, results[i]);
    return status;
}

static void stage_gradients_release(clattn_context *context, struct gradient_stage *stage)
{
    struct staged *const all[] = {&stage->dout, &stage->dlse,  &stage->dq,   &stage->dk,
                                  &stage->dv,   &stage->dsink, &stage->dbias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        stage_release(context, all[i]);
}

static const clattn_tensor *given(const clattn_tensor *tensor, const struct staged *staged)
{
    return tensor ? &staged->device : NULL;
}

static clattn_status backward_run(clattn_context *context, const struct problem *problem,
                                  const clattn_blocks *blocks, struct stage *stage, const clattn_gradients *g,
                                  struct gradient_stage *gradients, const clattn_sync *sync)
{
    struct backward_job job = {.problem = problem,
                               .q = &stage->q.device,
                               .k = &stage->k.device,
                               .v = &stage->v.device,
                               .blocks = blocks,
                               .out = &stage->out.device,
                               .lse = &stage->lse.device,
                               .dout = &gradients->dout.device,
                               .dlse = given(g->dlse, &gradients->dlse),
                               .dq = given(g->dq, &gradients->dq),
                               .dk = given(g->dk, &gradients->dk),
                               .dv = given(g->dv, &gradients->dv),
                               .dsink = given(g->dsink, &gradients->dsink),
                               .dbias = given(g->dbias, &gradients->dbias),
                               .accumulate = g->accumulate != 0,
                               .compensation = g->compensation,
                               .sync = sync};
    bool copies_back = gradients->dq.host || gradients->dk.host || gradients->dv.host ||
                       gradients->dsink.host || gradients->dbias.host;
    clattn_status status = context->backend->backward(context, &job);
    if (!status && sync && copies_back) status = context->backend->finish(context, sync);
    return status ? status : stage_gradients_finish(context, gradients);
}

clattn_status clattn_attention_backward(clattn_context *context, const clattn_attention_desc *attention,
                                        const clattn_tensor *q, const clattn_tensor *k, const clattn_tensor *v,
                                        const clattn_blocks *blocks, const clattn_tensor *out,
                                        const clattn_tensor *lse, const clattn_gradients *gradients,
                                        const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    struct tensors tensors = {q, k, v, out, lse};
    struct problem problem;
    clattn_sync sync_copy;
    clattn_gradients g = CLATTN_GRADIENTS_INIT;
    clattn_status status = check_present(context, &tensors);
    if (!status && !lse)
        status = fail(context, CLATTN_INVALID_ARGUMENT, "lse is NULL; the backward pass needs it");
    if (!status && !gradients) status = fail(context, CLATTN_INVALID_ARGUMENT, "gradients is NULL");
    if (!status) status = desc_copy(context, "gradients", &g, sizeof g, gradients);
    if (!status) status = check_sync(context, sync, &sync_copy);
    if (!status) status = problem_init(context, attention, &tensors, blocks ? blocks->q_block : 1, &problem);
    if (status) return status;
    if (!context->backend->backward) {
        problem_release(&problem);
        return fail(context, CLATTN_INVALID_ARGUMENT, "this backend has no backward pass");
    }
    struct stage stage = {0};
    struct gradient_stage gradient_stage = {0};
    status = check_gradients(context, &problem, &tensors, &g);
    if (!status) status = blocks_check(context, blocks, &problem);
    if (!status && blocks && blocks->starts && g.compensation != 0)
        status = fail(context, CLATTN_INVALID_ARGUMENT,
                      "gradients.compensation is %g; lists with boundaries of the caller (starts) need 0",
                      g.compensation);
    if (!status) status = stage_inputs(context, &tensors, &problem, &stage);
    if (!status) status = stage_gradients(context, &problem, &tensors, &g, &gradient_stage);
    if (!status)
        status = backward_run(context, &problem, blocks, &stage, &g, &gradient_stage, sync ? &sync_copy : NULL);
    stage_gradients_release(context, &gradient_stage);
    stage_all_release(context, &stage);
    problem_release(&problem);
    return status;
}
