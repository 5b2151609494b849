/* SPDX-License-Identifier: MIT */
/* Gradients of attention over a block list, reference: double, key heads in parallel, rows in order.
 *
 *   P = exp(z - lse),  D = sum_d dout*out - dlse,  dS = P (dout . v_j - D),  dx = dS * slope
 *   dv_j += P dout,  dq += scale dx k_j,  dk_j += scale dx q,  dbias += dS,  dsink -= exp(sink - lse) D */

#include "config.h"

#include "reference.h"

#include <math.h>
#include <stdlib.h>

/* What one thread works with: one key head. */
struct work {
    struct row_keys keys;
    double *dk, *dv;        /* [kv_len][dim], [kv_len][dim_v] of the sequence */
    double *dq;             /* [dim] */
    double *row_p, *row_dx; /* [keys] of the row */
    double *dsink, *dbias;  /* [batch][row][head] of all threads, each of which has heads of its own */
};

static size_t work_bytes(const struct backward_job *job)
{
    const struct problem *problem = job->problem;
    size_t most = (size_t)row_keys_max(problem, job->blocks), dims = (size_t)(problem->dim + problem->dim_v);
    return most * (ROW_KEY_BYTES + 2 * sizeof(double)) +
           ((size_t)problem->kv_len_max * dims + (size_t)problem->dim) * sizeof(double);
}

static void work_place(const struct backward_job *job, void *memory, struct work *work)
{
    const struct problem *problem = job->problem;
    int64_t most = row_keys_max(problem, job->blocks);
    work->dk = memory;
    work->dv = work->dk + problem->kv_len_max * problem->dim;
    work->dq = work->dv + problem->kv_len_max * problem->dim_v;
    work->row_p = work->dq + problem->dim;
    work->row_dx = work->row_p + most;
    work->keys.z = work->row_dx + most;
    work->keys.slope = work->keys.z + most;
    work->keys.index = (int64_t *)(work->keys.slope + most);
}

static double element(const clattn_tensor *tensor, const struct sequence *sequence, int64_t row, int32_t head,
                      int32_t d)
{
    return load_element(tensor_row(tensor, sequence->batch, row, head), tensor->dtype, d);
}

/* Writes or adds a gradient. */
static void emit(const struct backward_job *job, const clattn_tensor *tensor, int64_t batch, int64_t row,
                 int32_t head, int32_t d, double value)
{
    void *place = tensor_row(tensor, batch, row, head);
    if (job->accumulate) value += load_element(place, tensor->dtype, d);
    store_element(place, tensor->dtype, d, (float)value);
}

/* Adds to an option's gradient. */
static void add_option(const clattn_tensor *tensor, double *sums, const struct sequence *sequence, int64_t row,
                       int32_t head, double value)
{
    int64_t batch = tensor->batch == 1 ? 0 : sequence->batch;
    sums[(batch * tensor->len + row) * tensor->heads + head] += value;
}

/* What a row gives to key j: also to the keys at the same place of the unlisted blocks on its right, up to the
 * next listed one. */
static void give(const struct backward_job *job, const struct row_job *row, int64_t j, double p, double dx,
                 struct work *work)
{
    const struct problem *problem = job->problem;
    const struct sequence *sequence = row->sequence;
    int64_t end = visible_keys(problem, sequence, row->i);
    double factor = 1;
    for (int64_t to = j; to < end; to += row->key_blocks.block, factor = job->compensation) {
        for (int32_t n = 0; n < row->count && to > j; n++)
            if (row->indices[n] == key_block_at(&row->key_blocks, to)) return;
        for (int32_t d = 0; d < problem->dim_v; d++)
            work->dv[to * problem->dim_v + d] +=
                factor * p * element(job->dout, sequence, sequence->q_row + row->i, row->head, d);
        for (int32_t d = 0; d < problem->dim; d++)
            work->dk[to * problem->dim + d] +=
                factor * dx * element(job->q, sequence, sequence->q_row + row->i, row->head, d);
        if (job->compensation == 0 || !row->indices) return;
    }
}

static void backward_row(const struct backward_job *job, const struct row_job *row, struct work *work)
{
    const struct problem *problem = job->problem;
    const struct options *options = &problem->options;
    const struct sequence *sequence = row->sequence;
    int64_t q_row = sequence->q_row + row->i;
    int32_t kv_head = row->head / problem->group;
    double lse = element(job->lse, sequence, q_row, row->head, 0), delta = 0;

    row_scores(row, &work->keys);
    for (int32_t d = 0; d < problem->dim_v; d++)
        delta += element(job->dout, sequence, q_row, row->head, d) *
                 element(job->out, sequence, q_row, row->head, d);
    if (job->dlse) delta -= element(job->dlse, sequence, q_row, row->head, 0);
    for (int32_t d = 0; d < problem->dim; d++)
        work->dq[d] = 0;
    for (int64_t n = 0; n < work->keys.count && lse != -INFINITY; n++) {
        int64_t j = work->keys.index[n];
        double p = exp(work->keys.z[n] - lse), dp = 0;
        for (int32_t d = 0; d < problem->dim_v; d++)
            dp += element(job->dout, sequence, q_row, row->head, d) *
                  element(job->v, sequence, sequence->k_row + j, kv_head, d);
        double ds = p * (dp - delta), dx = (double)problem->scale * ds * work->keys.slope[n];
        for (int32_t d = 0; d < problem->dim; d++)
            work->dq[d] += dx * element(job->k, sequence, sequence->k_row + j, kv_head, d);
        if (job->dk) give(job, row, j, p, dx, work);
        if (job->dbias)
            add_option(job->dbias, work->dbias, sequence, key_block_at(&row->key_blocks, j), row->head, ds);
    }
    if (job->dsink && lse != -INFINITY)
        add_option(job->dsink, work->dsink, sequence, 0, row->head,
                   -exp(option_element(options->sink, sequence, 0, row->head) - lse) * delta);
    for (int32_t d = 0; d < problem->dim && job->dq; d++)
        emit(job, job->dq, sequence->batch, q_row, row->head, d, work->dq[d]);
}

/* All rows of one sequence that read one key head. */
static void backward_head(const struct backward_job *job, const struct sequence *sequence, int32_t kv_head,
                          struct work *work)
{
    const struct problem *problem = job->problem;
    const clattn_blocks *blocks = job->blocks;
    struct row_job row = {.problem = problem,
                          .sequence = sequence,
                          .q = job->q,
                          .k = job->k,
                          .key_blocks = key_blocks_listed(blocks, sequence),
                          .neighborhood = job->neighborhood};
    for (int64_t n = 0; n < sequence->kv_len * problem->dim; n++)
        work->dk[n] = 0;
    for (int64_t n = 0; n < sequence->kv_len * problem->dim_v; n++)
        work->dv[n] = 0;
    for (row.i = 0; row.i < sequence->q_len; row.i++)
        for (row.head = kv_head * problem->group; row.head < (kv_head + 1) * problem->group; row.head++) {
            if (blocks) {
                int64_t list_head = (int64_t)row.head * blocks->heads / problem->q_heads;
                int64_t list = (sequence->list_row + row.i / blocks->q_block) * blocks->heads + list_head;
                row.indices = (const int32_t *)blocks->indices.host + list * blocks->topk;
                row.count = ((const int32_t *)blocks->counts.host)[list];
                row.mask = blocks->mask;
                if (blocks->mask) row.cut = (const unsigned char *)blocks->mask->cut.host + list * blocks->topk;
            }
            backward_row(job, &row, work);
        }
    for (int64_t j = 0; job->dk && j < sequence->kv_len; j++) {
        for (int32_t d = 0; d < problem->dim; d++)
            emit(job, job->dk, sequence->batch, sequence->k_row + j, kv_head, d,
                 work->dk[j * problem->dim + d]);
        for (int32_t d = 0; d < problem->dim_v; d++)
            emit(job, job->dv, sequence->batch, sequence->k_row + j, kv_head, d,
                 work->dv[j * problem->dim_v + d]);
    }
}

/* ---- gradients of options ---- */

static size_t option_elements(const clattn_tensor *tensor)
{
    return tensor ? (size_t)(tensor->batch * tensor->len * tensor->heads) : 0;
}

static void options_write(const struct backward_job *job, const clattn_tensor *tensor, const double *sums)
{
    for (int64_t b = 0; tensor && b < tensor->batch; b++)
        for (int64_t i = 0; i < tensor->len; i++)
            for (int32_t h = 0; h < tensor->heads; h++)
                emit(job, tensor, b, i, h, 0, sums[(b * tensor->len + i) * tensor->heads + h]);
}

clattn_status backward_ref(clattn_context *context, const struct backward_job *job)
{
    const struct problem *problem = job->problem;
    int threads = cpu_threads(context), failed = 0;
    size_t sinks = option_elements(job->dsink), biases = option_elements(job->dbias);
    double *options = calloc(sinks + biases + 1, sizeof *options);
    (void)threads;
    if (!options) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for gradients of %zu biases", biases);
#pragma omp parallel num_threads(threads)
    {
        struct work work = {.dsink = options, .dbias = options + sinks};
        void *memory = cpu_scratch(work_bytes(job));
        if (memory)
            work_place(job, memory, &work);
        else {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int32_t h = 0; h < problem->kv_heads; h++)
            for (int64_t s = 0; memory && s < problem->count; s++)
                backward_head(job, &problem->sequences[s], h, &work);
        free(memory);
    }
    if (!failed) {
        options_write(job, job->dsink, options);
        options_write(job, job->dbias, options + sinks);
    }
    free(options);
    if (failed) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes a thread", work_bytes(job));
    return CLATTN_SUCCESS;
}
