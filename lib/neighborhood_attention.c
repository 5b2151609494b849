/* SPDX-License-Identifier: MIT */
/* Neighborhood attention, forward and backward: permute, attend, permute back. */

#include "neighborhood.h"
#include "stage.h"

#include <math.h>
#include <stdlib.h>

/* One call. Tensors of the caller where the backend computes, and their permuted copies. */
struct call {
    clattn_context *context;
    const clattn_neighborhood *plan;
    const clattn_sync *sync; /* NULL, or without an event: of every step but the last */
    struct problem problem;  /* over the permuted tensors */
    bool direct;             /* the backend takes the layout as it is */
    struct stage stage;
    struct staged extra_k, extra_v;
    clattn_tensor q, k, v, out, lse; /* as attended to; owned but for q, out and lse when direct */
};

static clattn_status check_call(clattn_context *context, const clattn_neighborhood *plan, float scale,
                                const struct tensors *t, const clattn_tensor *extra_k,
                                const clattn_tensor *extra_v)
{
    clattn_status status = check_present(context, t);
    if (status) return status;
    if (!plan) return fail(context, CLATTN_INVALID_ARGUMENT, "neighborhood is NULL");
    if (!isfinite(scale) && scale != CLATTN_SCALE_DEFAULT)
        return fail(context, CLATTN_INVALID_ARGUMENT, "scale is %g; a finite number is needed", scale);
    if ((plan->extra_len > 0) != (extra_k != NULL) || (extra_k != NULL) != (extra_v != NULL))
        return fail(context, CLATTN_INVALID_ARGUMENT, "extra_k is %s, extra_v %s; the plan has %lld extra keys",
                    extra_k ? "given" : "NULL", extra_v ? "given" : "NULL", (long long)plan->extra_len);
    if (t->q->len != plan->tokens || t->k->len != plan->tokens)
        return fail(context, CLATTN_INVALID_SHAPE, "q.len is %lld, k.len %lld; the layout has %lld tokens",
                    (long long)t->q->len, (long long)t->k->len, (long long)plan->tokens);
    return CLATTN_SUCCESS;
}

static clattn_status check_extra(clattn_context *context, const char *name, const clattn_tensor *extra,
                                 const clattn_tensor *of, int64_t len, bool is_output)
{
    if (!extra) return CLATTN_SUCCESS;
    clattn_status status = check_tensor(context, name, extra, is_output);
    if (status) return status;
    if (extra->batch != of->batch || extra->len != len || extra->heads != of->heads || extra->dim != of->dim ||
        extra->dtype != of->dtype)
        return fail(context, CLATTN_INVALID_SHAPE,
                    "%s must have the shape of the keys or values with len %lld, and their dtype", name,
                    (long long)len);
    return CLATTN_SUCCESS;
}

/* A tensor of `like` with other rows, filled by gathering. */
static clattn_status gathered(struct call *call, const clattn_tensor *from, const clattn_tensor *more,
                              int64_t rows, const struct storage *index, clattn_tensor *to)
{
    clattn_status status =
        clattn_tensor_create(call->context, from->dtype, from->batch, rows, from->heads, from->dim, to);
    return status ? status : gather_rows(call->context, from, more, to, index, 1, call->sync);
}

/* Every class of every batch entry is a sequence of the permuted tensors; they share the list rows. */
static clattn_status split_classes(struct call *call)
{
    const clattn_neighborhood *plan = call->plan;
    struct problem *problem = &call->problem;
    int64_t batch = problem->count, count = batch * plan->classes;
    struct sequence *sequences = malloc((size_t)count * sizeof *sequences);
    if (!sequences)
        return fail(call->context, CLATTN_OUT_OF_MEMORY, "no memory for %lld sequences", (long long)count);
    problem->q_len_max = problem->kv_len_max = 0;
    for (int64_t s = 0; s < count; s++) {
        int64_t c = s % plan->classes;
        sequences[s] =
            (struct sequence){.batch = s / plan->classes,
                              .q_row = plan->q.class_row[c],
                              .q_len = plan->q.class_row[c + 1] - plan->q.class_row[c],
                              .k_row = plan->kv.class_row[c] + c * plan->extra_len,
                              .kv_len = plan->kv.class_row[c + 1] - plan->kv.class_row[c] + plan->extra_len,
                              .list_row = plan->q.class_row[c] / plan->q.tile_tokens};
        problem->q_len_max = MAX(problem->q_len_max, sequences[s].q_len);
        problem->kv_len_max = MAX(problem->kv_len_max, sequences[s].kv_len);
    }
    free(problem->sequences);
    problem->sequences = sequences;
    problem->count = count;
    problem->q_block = plan->q.tile_tokens;
    problem->list_rows = plan->blocks->rows;
    return CLATTN_SUCCESS;
}

/* Checks, stages and permutes q, k and v. */
static clattn_status call_begin(struct call *call, float scale, const struct tensors *t,
                                const clattn_tensor *extra_k, const clattn_tensor *extra_v, bool is_backward)
{
    clattn_context *context = call->context;
    const clattn_neighborhood *plan = call->plan;
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_status status = check_call(context, plan, scale, t, extra_k, extra_v);
    attention.scale = scale;
    attention.causal = 0;
    if (!status) status = problem_init(context, &attention, t, 1, &call->problem);
    if (!status) status = check_extra(context, "extra_k", extra_k, t->k, plan->extra_len, false);
    if (!status) status = check_extra(context, "extra_v", extra_v, t->v, plan->extra_len, false);
    if (!status) status = (is_backward ? stage_inputs : stage_all)(context, t, &call->problem, &call->stage);
    if (!status) status = stage_in(context, extra_k, &call->extra_k);
    if (!status) status = stage_in(context, extra_v, &call->extra_v);
    if (status) return status;

    call->direct = context->backend->knows_neighborhoods;
    int64_t kv_rows = call->direct ? plan->tokens + plan->extra_len : plan->kv_rows;
    const struct storage *kv_index = call->direct ? &plan->concat_index : &plan->kv_index;
    const clattn_tensor *more_k = extra_k ? &call->extra_k.device : NULL,
                        *more_v = extra_v ? &call->extra_v.device : NULL;
    status = gathered(call, &call->stage.k.device, more_k, kv_rows, kv_index, &call->k);
    if (!status) status = gathered(call, &call->stage.v.device, more_v, kv_rows, kv_index, &call->v);
    if (status) return status;
    if (call->direct) {
        call->q = call->stage.q.device;
        call->out = call->stage.out.device;
        call->lse = call->stage.lse.device;
        for (int64_t s = 0; s < call->problem.count; s++)
            call->problem.sequences[s].kv_len = kv_rows;
        call->problem.kv_len_max = kv_rows;
        return CLATTN_SUCCESS;
    }
    status = gathered(call, &call->stage.q.device, NULL, plan->q.rows, &plan->q_index, &call->q);
    return status ? status : split_classes(call);
}

static void call_end(struct call *call)
{
    clattn_tensor *const own[] = {&call->k, &call->v, &call->q, &call->out, &call->lse};
    for (size_t i = 0; i < (call->direct ? 2 : sizeof own / sizeof *own); i++)
        clattn_tensor_release(call->context, own[i]);
    stage_release(call->context, &call->extra_k);
    stage_release(call->context, &call->extra_v);
    stage_all_release(call->context, &call->stage);
    problem_release(&call->problem);
}

static clattn_status forward_tiles(struct call *call, bool has_lse, const clattn_sync *last)
{
    const clattn_neighborhood *plan = call->plan;
    const clattn_tensor *out = &call->stage.out.device;
    clattn_status status = clattn_tensor_create(call->context, out->dtype, out->batch, plan->q.rows, out->heads,
                                                out->dim, &call->out);
    if (!status && has_lse)
        status = clattn_tensor_create(call->context, CLATTN_FLOAT32, out->batch, plan->q.rows, out->heads, 1,
                                      &call->lse);
    struct forward_job job = {.problem = &call->problem,
                              .q = &call->q,
                              .k = &call->k,
                              .v = &call->v,
                              .blocks = plan->blocks,
                              .out = &call->out,
                              .lse = has_lse ? &call->lse : NULL,
                              .sync = call->sync};
    if (!status) status = call->context->backend->forward(call->context, &job);
    if (!status && has_lse)
        status = gather_rows(call->context, &call->lse, NULL, &call->stage.lse.device, &plan->q_inverse, 1,
                             call->sync);
    return status ? status : gather_rows(call->context, &call->out, NULL, out, &plan->q_inverse, 1, last);
}

static clattn_status forward_direct(struct call *call, bool has_lse)
{
    struct forward_job job = {.problem = &call->problem,
                              .q = &call->q,
                              .k = &call->k,
                              .v = &call->v,
                              .out = &call->out,
                              .lse = has_lse ? &call->lse : NULL,
                              .neighborhood = call->plan};
    return call->context->backend->forward(call->context, &job);
}

clattn_status clattn_neighborhood_forward(clattn_context *context, const clattn_neighborhood *plan, float scale,
                                          const clattn_tensor *q, const clattn_tensor *k,
                                          const clattn_tensor *v, const clattn_tensor *extra_k,
                                          const clattn_tensor *extra_v, clattn_tensor *out, clattn_tensor *lse,
                                          const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    clattn_sync last, steps;
    struct tensors tensors = {q, k, v, out, lse};
    struct call call = {.context = context, .plan = plan};
    clattn_status status = check_sync(context, sync, &last);
    call.sync = sync_without_event(sync ? &last : NULL, &steps);
    if (!status) status = call_begin(&call, scale, &tensors, extra_k, extra_v, false);
    if (!status)
        status = call.direct ? forward_direct(&call, lse != NULL)
                             : forward_tiles(&call, lse != NULL, sync ? &last : NULL);
    if (!status && sync && (call.stage.out.host || call.stage.lse.host))
        status = context->backend->finish(context, &last);
    if (!status) status = stage_finish(context, &call.stage.out);
    if (!status) status = stage_finish(context, &call.stage.lse);
    call_end(&call);
    return status;
}

/* ---- backward ---- */

/* Gradients of one call: the caller's, staged, and those over the permuted or concatenated tensors. */
struct gradients_call {
    struct staged dout, dlse, dq, dk, dv, dextra_k, dextra_v;
    clattn_tensor q, k, v, out, lse; /* of dq, dk, dv, dout, dlse */
};

static clattn_status check_results(struct call *call, const clattn_gradients *g, clattn_tensor *dextra_k,
                                   clattn_tensor *dextra_v, const struct tensors *t)
{
    clattn_context *context = call->context;
    if (!g->dq || !g->dk || !g->dv)
        return fail(context, CLATTN_INVALID_ARGUMENT, "gradients.dq, dk or dv is NULL; all three are needed");
    if (g->accumulate || g->compensation != 0 || g->dsink || g->dbias)
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "gradients: accumulate, compensation, dsink and dbias must be 0");
    if ((call->plan->extra_len > 0) != (dextra_k != NULL) || (dextra_k != NULL) != (dextra_v != NULL))
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "dextra_k and dextra_v must be given exactly when there are extra keys");
    clattn_status status = check_gradients(context, &call->problem, t, g);
    if (!status) status = check_extra(context, "dextra_k", dextra_k, g->dk, call->plan->extra_len, true);
    return status ? status : check_extra(context, "dextra_v", dextra_v, g->dv, call->plan->extra_len, true);
}

static clattn_status results_stage(struct call *call, const clattn_gradients *g, const clattn_tensor *dextra_k,
                                   const clattn_tensor *dextra_v, struct gradients_call *r)
{
    clattn_context *context = call->context;
    clattn_status status = stage_in(context, g->dout, &r->dout);
    if (!status) status = stage_in(context, g->dlse, &r->dlse);
    if (!status) status = stage_out(context, g->dq, &r->dq);
    if (!status) status = stage_out(context, g->dk, &r->dk);
    if (!status) status = stage_out(context, g->dv, &r->dv);
    if (!status) status = stage_out(context, dextra_k, &r->dextra_k);
    return status ? status : stage_out(context, dextra_v, &r->dextra_v);
}

/* Gradients over the permuted tensors; float32 for keys, whose extra rows are summed over the classes. */
static clattn_status results_create(struct call *call, const clattn_gradients *g, struct gradients_call *r)
{
    clattn_context *context = call->context;
    const clattn_neighborhood *plan = call->plan;
    clattn_status status = clattn_tensor_create(context, CLATTN_FLOAT32, call->k.batch, call->k.len,
                                                call->k.heads, call->k.dim, &r->k);
    if (!status)
        status = clattn_tensor_create(context, CLATTN_FLOAT32, call->v.batch, call->v.len, call->v.heads,
                                      call->v.dim, &r->v);
    if (status || call->direct) return status;
    status = clattn_tensor_create(context, g->dq->dtype, call->q.batch, call->q.len, call->q.heads, call->q.dim,
                                  &r->q);
    if (!status) status = gathered(call, &r->dout.device, NULL, plan->q.rows, &plan->q_index, &r->out);
    if (!status && g->dlse)
        status = gathered(call, &r->dlse.device, NULL, plan->q.rows, &plan->q_index, &r->lse);
    if (!status)
        status = gathered(call, &call->stage.out.device, NULL, plan->q.rows, &plan->q_index, &call->out);
    return status ? status
                  : gathered(call, &call->stage.lse.device, NULL, plan->q.rows, &plan->q_index, &call->lse);
}

static clattn_status backward_call(struct call *call, const clattn_gradients *g, struct gradients_call *r)
{
    bool direct = call->direct;
    struct backward_job job = {.problem = &call->problem,
                               .q = &call->q,
                               .k = &call->k,
                               .v = &call->v,
                               .blocks = direct ? NULL : call->plan->blocks,
                               .out = &call->out,
                               .lse = &call->lse,
                               .dout = direct ? &r->dout.device : &r->out,
                               .dlse = !g->dlse ? NULL
                                       : direct ? &r->dlse.device
                                                : &r->lse,
                               .dq = direct ? &r->dq.device : &r->q,
                               .dk = &r->k,
                               .dv = &r->v,
                               .neighborhood = direct ? call->plan : NULL,
                               .sync = call->sync};
    if (call->context->backend->host_memory) return call->context->backend->backward(call->context, &job);
    /* The classes of one batch entry at a time, since batch entries share their list rows and a device inverts
     * lists of which each belongs to one sequence. */
    clattn_status status = CLATTN_SUCCESS;
    struct problem part = call->problem;
    part.count = call->plan->classes;
    job.problem = &part;
    for (int64_t s = 0; s < call->problem.count && !status; s += part.count) {
        part.sequences = call->problem.sequences + s;
        status = call->context->backend->backward(call->context, &job);
    }
    return status;
}

/* From the permuted gradients to the caller's. */
static clattn_status results_return(struct call *call, bool has_extra, struct gradients_call *r,
                                    const clattn_sync *last)
{
    clattn_context *context = call->context;
    const clattn_neighborhood *plan = call->plan;
    const struct storage *inverse = call->direct ? &plan->concat_index : &plan->kv_inverse;
    clattn_status status = CLATTN_SUCCESS;
    if (!call->direct)
        status = gather_rows(context, &r->q, NULL, &r->dq.device, &plan->q_inverse, 1, call->sync);
    if (!status && has_extra) {
        /* Directly, the extra rows follow the layout's; in tiles every class has its own copy, and they are
         * added up. */
        clattn_tensor tail_k = r->k, tail_v = r->v;
        if (call->direct) {
            tail_k.offset += plan->tokens * tail_k.len_stride;
            tail_v.offset += plan->tokens * tail_v.len_stride;
            tail_k.len = tail_v.len = plan->extra_len;
        }
        const struct storage *index = call->direct ? &plan->concat_index : &plan->extra_inverse;
        int64_t terms = call->direct ? 1 : plan->classes;
        status = gather_rows(context, &tail_k, NULL, &r->dextra_k.device, index, terms, call->sync);
        if (!status)
            status = gather_rows(context, &tail_v, NULL, &r->dextra_v.device, index, terms, call->sync);
    }
    if (!status) status = gather_rows(context, &r->k, NULL, &r->dk.device, inverse, 1, call->sync);
    return status ? status : gather_rows(context, &r->v, NULL, &r->dv.device, inverse, 1, last);
}

static clattn_status results_finish(clattn_context *context, struct gradients_call *r, const clattn_sync *sync)
{
    struct staged *const results[] = {&r->dq, &r->dk, &r->dv, &r->dextra_k, &r->dextra_v};
    clattn_status status = CLATTN_SUCCESS;
    bool copies = false;
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        copies = copies || results[i]->host;
    if (sync && copies) status = context->backend->finish(context, sync);
    for (size_t i = 0; i < sizeof results / sizeof *results && !status; i++)
        status = stage_finish(context, results[i]);
    return status;
}

static void results_release(struct call *call, struct gradients_call *r)
{
    clattn_tensor *const own[] = {&r->k, &r->v, &r->q, &r->out, &r->lse};
    struct staged *const staged[] = {&r->dout, &r->dlse, &r->dq, &r->dk, &r->dv, &r->dextra_k, &r->dextra_v};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        clattn_tensor_release(call->context, own[i]);
    for (size_t i = 0; i < sizeof staged / sizeof *staged; i++)
        stage_release(call->context, staged[i]);
}

clattn_status clattn_neighborhood_backward(clattn_context *context, const clattn_neighborhood *plan,
                                           float scale, const clattn_tensor *q, const clattn_tensor *k,
                                           const clattn_tensor *v, const clattn_tensor *extra_k,
                                           const clattn_tensor *extra_v, const clattn_tensor *out,
                                           const clattn_tensor *lse, const clattn_gradients *gradients,
                                           clattn_tensor *dextra_k, clattn_tensor *dextra_v,
                                           const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    clattn_sync last, steps;
    clattn_gradients g = CLATTN_GRADIENTS_INIT;
    struct tensors tensors = {q, k, v, out, lse};
    struct call call = {.context = context, .plan = plan};
    struct gradients_call results = {0};
    clattn_status status = check_sync(context, sync, &last);
    if (!status && !lse)
        status = fail(context, CLATTN_INVALID_ARGUMENT, "lse is NULL; the backward pass needs it");
    if (!status && !gradients) status = fail(context, CLATTN_INVALID_ARGUMENT, "gradients is NULL");
    if (!status) status = desc_copy(context, "gradients", &g, sizeof g, gradients);
    call.sync = sync_without_event(sync ? &last : NULL, &steps);
    if (!status) status = call_begin(&call, scale, &tensors, extra_k, extra_v, true);
    if (!status) status = check_results(&call, &g, dextra_k, dextra_v, &tensors);
    if (!status) status = results_stage(&call, &g, dextra_k, dextra_v, &results);
    if (!status) status = results_create(&call, &g, &results);
    if (!status) status = backward_call(&call, &g, &results);
    if (!status) status = results_return(&call, extra_k != NULL, &results, sync ? &last : NULL);
    if (!status) status = results_finish(context, &results, sync ? &last : NULL);
    results_release(&call, &results);
    call_end(&call);
    return status;
}
