/* SPDX-License-Identifier: MIT */
/* Problems: tensors checked against each other, sequences, options. */

#include "internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { DIM_MAX = 256 };

static clattn_status check_same(clattn_context *context, const char *what, int64_t value, const char *other,
                                int64_t expected)
{
    if (value == expected) return CLATTN_SUCCESS;
    return fail(context, CLATTN_INVALID_SHAPE, "%s is %lld; %s is %lld and they must be equal", what,
                (long long)value, other, (long long)expected);
}

static clattn_status check_inputs(clattn_context *context, const struct tensors *t)
{
    clattn_status status = CLATTN_SUCCESS;
    if (t->q) status = check_tensor(context, "q", t->q, false);
    if (!status) status = check_tensor(context, "k", t->k, false);
    if (!status && t->v) status = check_tensor(context, "v", t->v, false);
    if (status) return status;
    if (t->k->dim > DIM_MAX)
        return fail(context, CLATTN_INVALID_SHAPE, "k.dim is %lld; at most %d", (long long)t->k->dim, DIM_MAX);
    if (t->q) {
        if ((status = check_same(context, "q.dim", t->q->dim, "k.dim", t->k->dim))) return status;
        if ((status = check_same(context, "q.batch", t->q->batch, "k.batch", t->k->batch))) return status;
        if (t->q->heads % t->k->heads)
            return fail(context, CLATTN_INVALID_SHAPE, "q.heads is %lld; a multiple of k.heads %lld is needed",
                        (long long)t->q->heads, (long long)t->k->heads);
        if (t->q->dtype == CLATTN_INT8)
            return fail(context, CLATTN_INVALID_DTYPE, "q.dtype is int8; only keys and values may be");
        if (t->q->dtype != t->k->dtype && t->k->dtype != CLATTN_INT8)
            return fail(context, CLATTN_INVALID_DTYPE, "q.dtype is %s; k.dtype is %s and they must be equal",
                        dtype_name(t->q->dtype), dtype_name(t->k->dtype));
    }
    if (!t->v) return CLATTN_SUCCESS;
    if (t->v->dim > DIM_MAX)
        return fail(context, CLATTN_INVALID_SHAPE, "v.dim is %lld; at most %d", (long long)t->v->dim, DIM_MAX);
    if ((status = check_same(context, "v.batch", t->v->batch, "k.batch", t->k->batch))) return status;
    if ((status = check_same(context, "v.len", t->v->len, "k.len", t->k->len))) return status;
    if ((status = check_same(context, "v.heads", t->v->heads, "k.heads", t->k->heads))) return status;
    if (t->v->dtype != t->k->dtype)
        return fail(context, CLATTN_INVALID_DTYPE, "v.dtype is %s; k.dtype is %s and they must be equal",
                    dtype_name(t->v->dtype), dtype_name(t->k->dtype));
    return CLATTN_SUCCESS;
}

static clattn_status check_output(clattn_context *context, const char *name, const clattn_tensor *tensor,
                                  const clattn_tensor *q, int64_t dim)
{
    const char *const fields[] = {"batch", "len", "heads", "dim"};
    clattn_status status = check_tensor(context, name, tensor, true);
    if (status) return status;
    int64_t have[] = {tensor->batch, tensor->len, tensor->heads, tensor->dim},
            want[] = {q->batch, q->len, q->heads, dim};
    for (int i = 0; i < 4; i++)
        if (have[i] != want[i])
            return fail(context, CLATTN_INVALID_SHAPE, "%s.%s is %lld; %lld is needed", name, fields[i],
                        (long long)have[i], (long long)want[i]);
    return CLATTN_SUCCESS;
}

static clattn_status check_outputs(clattn_context *context, const struct tensors *t)
{
    clattn_status status = CLATTN_SUCCESS;
    if (t->out) status = check_output(context, "out", t->out, t->q, t->v->dim);
    if (!status && t->out && t->out->dtype != t->q->dtype && t->out->dtype != CLATTN_FLOAT32)
        status = fail(context, CLATTN_INVALID_DTYPE, "out.dtype is %s; %s or float32 is needed",
                      dtype_name(t->out->dtype), dtype_name(t->q->dtype));
    if (!status && t->lse) status = check_output(context, "lse", t->lse, t->q, 1);
    if (!status && t->lse && t->lse->dtype != CLATTN_FLOAT32)
        status = fail(context, CLATTN_INVALID_DTYPE, "lse.dtype is %s; float32 is needed",
                      dtype_name(t->lse->dtype));
    return status;
}

static clattn_status check_gradient(clattn_context *context, const char *name, const clattn_tensor *gradient,
                                    const clattn_tensor *of, clattn_dtype dtype)
{
    if (!gradient) return CLATTN_SUCCESS;
    clattn_status status = check_output(context, name, gradient, of, of->dim);
    if (!status && gradient->dtype != dtype && gradient->dtype != CLATTN_FLOAT32)
        status = fail(context, CLATTN_INVALID_DTYPE, "%s.dtype is %s; %s or float32 is needed", name,
                      dtype_name(gradient->dtype), dtype_name(dtype));
    return status;
}

clattn_status check_gradients(clattn_context *context, const struct problem *problem, const struct tensors *t,
                              const clattn_gradients *g)
{
    clattn_dtype dtype = t->q->dtype;
    if (t->k->dtype == CLATTN_INT8)
        return fail(context, CLATTN_INVALID_DTYPE, "k.dtype is int8; quantised keys have no gradient");
    if (!g->dout) return fail(context, CLATTN_INVALID_ARGUMENT, "gradients.dout is NULL");
    if ((g->dk == NULL) != (g->dv == NULL))
        return fail(context, CLATTN_INVALID_ARGUMENT, "gradients.%s is NULL; dk and dv go together",
                    g->dk ? "dv" : "dk");
    if (!isfinite(g->compensation))
        return fail(context, CLATTN_INVALID_ARGUMENT, "gradients.compensation is %g; a finite number is needed",
                    g->compensation);
    if ((g->dsink && !problem->options.sink) || (g->dbias && !problem->options.bias))
        return fail(context, CLATTN_INVALID_ARGUMENT, "gradients.%s is given but attention.%s is NULL",
                    g->dsink && !problem->options.sink ? "dsink" : "dbias",
                    g->dsink && !problem->options.sink ? "sink" : "bias");
    clattn_status status = check_gradient(context, "dout", g->dout, t->out, dtype);
    if (!status) status = check_gradient(context, "dlse", g->dlse, t->lse, CLATTN_FLOAT32);
    if (!status) status = check_gradient(context, "dq", g->dq, t->q, dtype);
    if (!status) status = check_gradient(context, "dk", g->dk, t->k, dtype);
    if (!status) status = check_gradient(context, "dv", g->dv, t->v, dtype);
    if (!status) status = check_gradient(context, "dsink", g->dsink, problem->options.sink, CLATTN_FLOAT32);
    if (!status) status = check_gradient(context, "dbias", g->dbias, problem->options.bias, CLATTN_FLOAT32);
    return status;
}

static clattn_status check_cu_seqlens(clattn_context *context, const char *name, const int32_t *cu,
                                      int64_t count, int64_t len)
{
    if (!cu)
        return fail(context, CLATTN_INVALID_SEQLENS, "%s is NULL but sequences is %lld", name,
                    (long long)count);
    if (cu[0] != 0) return fail(context, CLATTN_INVALID_SEQLENS, "%s[0] is %d; it must be 0", name, cu[0]);
    for (int64_t s = 0; s < count; s++)
        if (cu[s + 1] < cu[s])
            return fail(context, CLATTN_INVALID_SEQLENS, "%s[%lld] is %d, less than the %d before it", name,
                        (long long)s + 1, cu[s + 1], cu[s]);
    if (cu[count] != len)
        return fail(context, CLATTN_INVALID_SEQLENS, "%s[%lld] is %d; it must be the length %lld", name,
                    (long long)count, cu[count], (long long)len);
    return CLATTN_SUCCESS;
}

static clattn_status check_seqused(clattn_context *context, const char *name, const int32_t *used,
                                   int64_t batch, int64_t len)
{
    for (int64_t b = 0; used && b < batch; b++)
        if (used[b] < 0 || used[b] > len)
            return fail(context, CLATTN_INVALID_SEQLENS, "%s[%lld] is %d; 0 to %lld is needed", name,
                        (long long)b, used[b], (long long)len);
    return CLATTN_SUCCESS;
}

static clattn_status check_sequences(clattn_context *context, const clattn_attention_desc *desc,
                                     const struct tensors *t)
{
    if (desc->sequences < 0)
        return fail(context, CLATTN_INVALID_SEQLENS, "sequences is %lld; 0 or more is needed",
                    (long long)desc->sequences);
    if (desc->sequences == 0) {
        clattn_status status = check_seqused(context, "seqused_k", desc->seqused_k, t->k->batch, t->k->len);
        if (!status && t->q)
            status = check_seqused(context, "seqused_q", desc->seqused_q, t->k->batch, t->q->len);
        return status;
    }
    if (desc->seqused_q || desc->seqused_k)
        return fail(context, CLATTN_INVALID_SEQLENS,
                    "seqused_q and seqused_k go with sequences = 0; it is %lld", (long long)desc->sequences);
    if (t->k->batch != 1)
        return fail(context, CLATTN_INVALID_SEQLENS, "k.batch is %lld; packed sequences need 1",
                    (long long)t->k->batch);
    clattn_status status =
        check_cu_seqlens(context, "cu_seqlens_k", desc->cu_seqlens_k, desc->sequences, t->k->len);
    if (!status && t->q)
        status = check_cu_seqlens(context, "cu_seqlens_q", desc->cu_seqlens_q, desc->sequences, t->q->len);
    return status;
}

/* A small float32 tensor of the descriptor: [batch][at least len][heads][1]. */
static clattn_status check_extra(clattn_context *context, const char *name, const clattn_tensor *tensor,
                                 int64_t batch, int64_t len, int64_t heads)
{
    clattn_status status = check_tensor(context, name, tensor, false);
    if (status) return status;
    if (tensor->dtype != CLATTN_FLOAT32)
        return fail(context, CLATTN_INVALID_DTYPE, "%s.dtype is %s; float32 is needed", name,
                    dtype_name(tensor->dtype));
    if ((tensor->batch != batch && tensor->batch != 1) || tensor->len < len || tensor->heads != heads ||
        tensor->dim != 1)
        return fail(context, CLATTN_INVALID_SHAPE,
                    "%s is [%lld][%lld][%lld][%lld]; [%lld][%lld][%lld][1] is needed", name,
                    (long long)tensor->batch, (long long)tensor->len, (long long)tensor->heads,
                    (long long)tensor->dim, (long long)batch, (long long)len, (long long)heads);
    return CLATTN_SUCCESS;
}

static clattn_status check_int8(clattn_context *context, const clattn_attention_desc *desc,
                                const struct tensors *t)
{
    if ((t->k->dtype == CLATTN_INT8) != (desc->k_scale != NULL) ||
        (desc->k_scale != NULL) != (desc->v_scale != NULL))
        return fail(context, CLATTN_INVALID_DTYPE,
                    "k.dtype is %s, k_scale %s, v_scale %s; int8 keys and values need both "
                    "scales, other types none",
                    dtype_name(t->k->dtype), desc->k_scale ? "given" : "NULL",
                    desc->v_scale ? "given" : "NULL");
    if (t->k->dtype != CLATTN_INT8) return CLATTN_SUCCESS;
    if (!t->v)
        return fail(context, CLATTN_INVALID_DTYPE,
                    "k.dtype is int8; pyramids and selection need the unquantised keys");
    if (desc->scale_block < 1)
        return fail(context, CLATTN_INVALID_ARGUMENT, "scale_block is %d; 1 or more is needed",
                    desc->scale_block);
    int64_t scales = ceil_div(t->k->len, desc->scale_block);
    clattn_status status = check_extra(context, "k_scale", desc->k_scale, t->k->batch, scales, t->k->heads);
    return status ? status : check_extra(context, "v_scale", desc->v_scale, t->k->batch, scales, t->k->heads);
}

static clattn_status check_options(clattn_context *context, const clattn_attention_desc *desc,
                                   const struct tensors *t)
{
    if (!(desc->softcap >= 0) || isinf(desc->softcap))
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "attention.softcap is %g; 0 or a positive number is needed", desc->softcap);
    if (desc->window < 0)
        return fail(context, CLATTN_INVALID_ARGUMENT, "attention.window is %lld; 0 or more is needed",
                    (long long)desc->window);
    clattn_status status = check_int8(context, desc, t);
    if (!status && desc->sink && t->q) status = check_extra(context, "sink", desc->sink, 1, 1, t->q->heads);
    if (!status && desc->bias && t->q)
        status = check_extra(context, "bias", desc->bias, t->q->batch, 0, t->q->heads);
    return status;
}

static void sequences_fill(const clattn_attention_desc *desc, const struct tensors *t, struct problem *problem)
{
    for (int64_t s = 0; s < problem->count; s++) {
        struct sequence *sequence = &problem->sequences[s];
        int64_t q_rows; /* with those that are not used */
        if (desc->sequences) {
            *sequence = (struct sequence){.k_row = desc->cu_seqlens_k[s],
                                          .kv_len = desc->cu_seqlens_k[s + 1] - desc->cu_seqlens_k[s]};
            if (t->q) {
                sequence->q_row = desc->cu_seqlens_q[s];
                sequence->q_len = desc->cu_seqlens_q[s + 1] - desc->cu_seqlens_q[s];
            }
            q_rows = sequence->q_len;
        } else {
            q_rows = t->q ? t->q->len : 0;
            *sequence = (struct sequence){.batch = s, .q_len = q_rows, .kv_len = t->k->len};
            if (desc->seqused_q && t->q) sequence->q_len = desc->seqused_q[s];
            if (desc->seqused_k) sequence->kv_len = desc->seqused_k[s];
        }
        sequence->list_row = problem->list_rows;
        problem->list_rows += ceil_div(q_rows, problem->q_block);
        problem->q_len_max = MAX(problem->q_len_max, sequence->q_len);
        problem->kv_len_max = MAX(problem->kv_len_max, sequence->kv_len);
    }
}

static void options_fill(const clattn_attention_desc *desc, struct options *options)
{
    *options = (struct options){.softcap = desc->softcap,
                                .window = MIN(desc->window, INT64_C(1) << 48), /* positions stay below 2^36 */
                                .sink = desc->sink,
                                .bias = desc->bias,
                                .k_scale = desc->k_scale,
                                .v_scale = desc->v_scale,
                                .scale_block = desc->scale_block};
}

clattn_status problem_init(clattn_context *context, const clattn_attention_desc *attention,
                           const struct tensors *tensors, int32_t q_block, struct problem *problem)
{
    clattn_attention_desc desc = CLATTN_ATTENTION_DESC_INIT;
    *problem = (struct problem){0};
    clattn_status status =
        attention ? desc_copy(context, "attention", &desc, sizeof desc, attention) : CLATTN_SUCCESS;
    if (!status) status = check_inputs(context, tensors);
    if (!status) status = check_outputs(context, tensors);
    if (!status) status = check_sequences(context, &desc, tensors);
    if (!status) status = check_options(context, &desc, tensors);
    if (status) return status;
    bool is_default = desc.scale == CLATTN_SCALE_DEFAULT;
    if (!is_default && !isfinite(desc.scale))
        return fail(context, CLATTN_INVALID_ARGUMENT, "attention.scale is %g; a finite number is needed",
                    desc.scale);

    problem->count = desc.sequences ? desc.sequences : tensors->k->batch;
    problem->sequences = malloc((size_t)problem->count * sizeof *problem->sequences);
    if (!problem->sequences)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %lld sequences", (long long)problem->count);
    problem->q_block = q_block;
    problem->kv_heads = (int32_t)tensors->k->heads;
    problem->q_heads = tensors->q ? (int32_t)tensors->q->heads : problem->kv_heads;
    problem->group = problem->q_heads / problem->kv_heads;
    problem->dim = (int32_t)tensors->k->dim;
    problem->dim_v = tensors->v ? (int32_t)tensors->v->dim : 0;
    problem->scale = is_default ? (float)(1.0 / sqrt((double)problem->dim)) : desc.scale;
    problem->causal = desc.causal != 0;
    sequences_fill(&desc, tensors, problem);
    options_fill(&desc, &problem->options);
    return CLATTN_SUCCESS;
}

clattn_status check_present(clattn_context *context, const struct tensors *t)
{
    const char *missing = !t->q ? "q" : !t->k ? "k" : !t->v ? "v" : !t->out ? "out" : NULL;
    return missing ? fail(context, CLATTN_INVALID_ARGUMENT, "%s is NULL", missing) : CLATTN_SUCCESS;
}

bool all_rows_used(const struct problem *problem, const clattn_tensor *q)
{
    int64_t rows = 0;
    for (int64_t s = 0; s < problem->count; s++)
        rows += problem->sequences[s].q_len;
    return rows == q->batch * q->len;
}

void problem_release(struct problem *problem)
{
    free(problem->sequences);
    problem->sequences = NULL;
}
