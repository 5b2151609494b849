/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "check.h"

#include "device.h"
#include "inputs.h"
#include "program.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void fill(enum input_kind kind, char which, float *values, size_t rows, size_t dim, uint64_t *state)
{
    for (size_t i = 0; i < rows * dim; i++)
        values[i] = inputs_normal(state);
    if (kind == INPUT_LARGE && which != 'v')
        for (size_t i = 0; i < rows * dim; i++)
            values[i] *= 20;
    if (kind == INPUT_CONSTANT && which == 'k')
        for (size_t i = dim; i < rows * dim; i++)
            values[i] = values[i % dim];
    if (kind == INPUT_ZERO_Q && which == 'q') memset(values, 0, rows * dim * sizeof *values);
    if (kind == INPUT_ZERO_Q && which == 'v') /* small integers: sums are exact */
        for (size_t i = 0; i < rows * dim; i++)
            values[i] = (float)(int)(inputs_random(state) % 17) - 8;
}

static bool make_inputs(struct check_problem *problem, uint64_t seed)
{
    const struct check_case *s = problem->shape;
    size_t q_rows = (size_t)s->batch * (size_t)s->q_len * (size_t)s->q_heads;
    size_t k_rows = (size_t)s->batch * (size_t)s->kv_len * (size_t)s->kv_heads;
    size_t dim = (size_t)s->dim, dim_v = (size_t)s->dim_v;
    problem->q = malloc(q_rows * dim * sizeof(float));
    problem->k = malloc(k_rows * dim * sizeof(float));
    float *v = malloc(k_rows * dim_v * sizeof(float));
    if (problem->q && problem->k && v) {
        fill(s->kind, 'q', problem->q, q_rows, dim, &seed);
        fill(s->kind, 'k', problem->k, k_rows, dim, &seed);
        fill(s->kind, 'v', v, k_rows, dim_v, &seed);
        problem->q_data = inputs_encode(problem->q, q_rows * dim, problem->dtype);
        problem->k_data = inputs_encode(problem->k, k_rows * dim, problem->dtype);
        problem->v_data = inputs_encode(v, k_rows * dim_v, problem->dtype);
        for (size_t i = 0; i < k_rows * dim_v; i++)
            v[i] = fabsf(v[i]);
        problem->v_abs_data = inputs_encode(v, k_rows * dim_v, problem->dtype);
    }
    free(v);
    return problem->q_data && problem->k_data && problem->v_data && problem->v_abs_data;
}

bool check_problem_job(const struct check_problem *problem, clattn_context *context, struct job *job)
{
    const struct check_case *s = problem->shape;
    memset(job, 0, sizeof *job);
    job->context = context;
    job->attention = (clattn_attention_desc)CLATTN_ATTENTION_DESC_INIT;
    job->attention.causal = s->causal;
    job->attention.sequences = s->sequences;
    job->attention.cu_seqlens_q = s->cu_q;
    job->attention.cu_seqlens_k = s->cu_k;
    job->select = (clattn_select_desc)CLATTN_SELECT_DESC_INIT;
    job->select.selector = s->selector;
    job->select.topk = s->topk;
    job->select.leaf = s->leaf;
    job->q = clattn_tensor_bthd(problem->q_data, problem->dtype, s->batch, s->q_len, s->q_heads, s->dim);
    job->k = clattn_tensor_bthd(problem->k_data, problem->dtype, s->batch, s->kv_len, s->kv_heads, s->dim);
    job->v = clattn_tensor_bthd(problem->v_data, problem->dtype, s->batch, s->kv_len, s->kv_heads, s->dim_v);
    size_t rows = (size_t)s->batch * (size_t)s->q_len * (size_t)s->q_heads;
    job->out = malloc(rows * (size_t)s->dim_v * sizeof(float));
    job->lse = malloc(rows * sizeof(float));
    if (!job->out || !job->lse) return false;
    /* Whoever writes too little is found out. */
    memset(job->out, 0xff, rows * (size_t)s->dim_v * sizeof(float));
    memset(job->lse, 0xff, rows * sizeof(float));
    return true;
}

static bool read_lists(struct check_problem *problem)
{
    const struct check_case *s = problem->shape;
    if (s->selector == CLATTN_SELECT_DENSE) return true;
    size_t entries = (size_t)s->batch * (size_t)s->q_len * (size_t)s->kv_heads * (size_t)s->topk;
    problem->lists = malloc(entries * sizeof *problem->lists);
    return problem->lists && clattn_blocks_read(problem->reference.context, problem->reference.blocks,
                                                problem->lists, NULL) == CLATTN_SUCCESS;
}

/* The second run of the reference, over |v|, gives the scale of each element's rounding errors. */
int check_problem_make(struct check_problem *problem, const struct check_case *shape, clattn_dtype dtype,
                       uint64_t seed, clattn_context *reference)
{
    memset(problem, 0, sizeof *problem);
    problem->shape = shape;
    problem->dtype = dtype;
    struct job spread = {0};
    bool ready = make_inputs(problem, seed) && check_problem_job(problem, reference, &problem->reference);
    int status = ready ? job_run(&problem->reference) : STATUS_FAILED;
    if (status == STATUS_OK) {
        ready = read_lists(problem) && check_problem_job(problem, reference, &spread);
        spread.v.data = problem->v_abs_data;
        spread.blocks = problem->reference.blocks;
        status = ready ? job_run(&spread) : STATUS_FAILED;
        spread.blocks = NULL;
        problem->abs_out = spread.out;
        free(spread.lse);
        job_release(&spread);
    }
    if (!ready) program_error("out of memory");
    return status;
}

void check_problem_release(struct check_problem *problem)
{
    job_release(&problem->reference);
    free(problem->reference.out);
    free(problem->reference.lse);
    free(problem->abs_out);
    free(problem->lists);
    free(problem->q);
    free(problem->k);
    free(problem->q_data);
    free(problem->k_data);
    free(problem->v_data);
    free(problem->v_abs_data);
}
