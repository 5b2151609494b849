/* SPDX-License-Identifier: MIT */
/* Dense attention by matrix products of CLBlast: the baseline that sparse attention is compared with.
 *
 * For each sequence, key head and chunk of query rows: S = scale Q K^T, softmax of its rows (cl/dense.cl), out
 * = P V, all in float32. The chunk is cut so that S takes SCORE_BYTES at most: memory is linear in the number
 * of keys. */

#include "config.h"

#include "opencl_tile.h"

#include <stdlib.h>
#include <string.h>

#ifdef HAVE_CLBLAST
#include <clblast_c.h>

enum { SOFTMAX_ITEMS = 64, GROUP_ITEMS = 32 };
#define SCORE_BYTES (INT64_C(64) << 20)

/* One sequence and key head. */
struct dense {
    clattn_context *context;
    const struct forward_job *job;
    const struct sequence *sequence;
    struct opencl_launch *launch;
    int32_t kv_head;
    int64_t rows; /* of a chunk */
    cl_mem q, k, v, scores, out;
};

static int64_t first_element(const clattn_tensor *tensor, int64_t batch, int64_t row, int64_t head)
{
    return tensor->offset + batch * tensor->batch_stride + row * tensor->len_stride +
           head * tensor->head_stride;
}

/* dense_widen or dense_store over rows first .. first + len - 1 and `heads` heads. */
static void copy_rows(const struct dense *dense, const char *kernel, const clattn_tensor *tensor, int64_t row,
                      int64_t head, int64_t len, int64_t heads, cl_mem floats)
{
    struct opencl_launch *launch = dense->launch;
    struct opencl_options options = {""};
    size_t columns = (size_t)ceil_div(tensor->dim, GROUP_ITEMS) * GROUP_ITEMS;
    bool is_store = strcmp(kernel, "dense_store") == 0;
    opencl_option(&options, "DTYPE", (int)tensor->dtype);
    opencl_launch_kernel(launch, "dense.cl", kernel, options.text);
    if (is_store) opencl_arg_mem(launch, floats);
    opencl_arg_tensor(launch, tensor);
    if (!is_store) opencl_arg_mem(launch, floats);
    opencl_arg_long(launch, first_element(tensor, dense->sequence->batch, row, head));
    opencl_arg_long(launch, tensor->len_stride);
    opencl_arg_long(launch, tensor->head_stride);
    opencl_arg_int(launch, (int32_t)tensor->dim);
    opencl_arg_int(launch, (int32_t)len);
    opencl_launch_run(launch, 3, (size_t[]){columns, (size_t)len, (size_t)heads},
                      (size_t[]){GROUP_ITEMS, 1, 1});
}

static void softmax(const struct dense *dense, int64_t i, int64_t rows, int64_t keys)
{
    const struct problem *problem = dense->job->problem;
    const clattn_tensor *lse = dense->job->lse;
    struct opencl_launch *launch = dense->launch;
    int64_t head = (int64_t)dense->kv_head * problem->group;
    opencl_launch_kernel(launch, "dense.cl", "dense_softmax", "-DITEMS=64");
    opencl_arg_mem(launch, dense->scores);
    opencl_arg_tensor(launch, lse);
    opencl_arg_int(launch, (int32_t)keys);
    opencl_arg_long(launch, query_position(dense->sequence, i));
    opencl_arg_int(launch, problem->causal);
    opencl_arg_long(launch,
                    lse ? first_element(lse, dense->sequence->batch, dense->sequence->q_row + i, head) : 0);
    opencl_arg_long(launch, lse ? lse->len_stride : 0);
    opencl_arg_long(launch, lse ? lse->head_stride : 0);
    opencl_arg_int(launch, lse != NULL);
    opencl_launch_run(launch, 3, (size_t[]){SOFTMAX_ITEMS, (size_t)rows, (size_t)problem->group},
                      (size_t[]){SOFTMAX_ITEMS, 1, 1});
}

/* c [group][rows][columns] = alpha a [group][rows][inner] * b, which the heads share. */
static int product(const struct dense *dense, CLBlastTranspose b_order, int64_t rows, int64_t columns,
                   int64_t inner, float alpha, cl_mem a, cl_mem b, int64_t b_ld, cl_mem c)
{
    if (dense->launch->status) return 0;
    return CLBlastSgemmStridedBatched(
        CLBlastLayoutRowMajor, CLBlastTransposeNo, b_order, (size_t)rows, (size_t)columns, (size_t)inner, alpha,
        a, 0, (size_t)inner, (size_t)(rows * inner), b, 0, (size_t)b_ld, 0, 0, c, 0, (size_t)columns,
        (size_t)(rows * columns), (size_t)dense->job->problem->group, &dense->launch->queue, NULL);
}

/* Query rows i .. i + rows - 1; returns CLBlast's status. */
static int chunk(const struct dense *dense, int64_t i, int64_t rows)
{
    const struct problem *problem = dense->job->problem;
    const struct sequence *sequence = dense->sequence;
    int64_t head = (int64_t)dense->kv_head * problem->group;
    int64_t keys = MAX(MIN(visible_keys(problem, sequence, i + rows - 1), sequence->kv_len), 1);
    copy_rows(dense, "dense_widen", dense->job->q, sequence->q_row + i, head, rows, problem->group, dense->q);
    int code = product(dense, CLBlastTransposeYes, rows, keys, problem->dim, problem->scale, dense->q, dense->k,
                       problem->dim, dense->scores);
    if (code) return code;
    softmax(dense, i, rows, keys);
    code = product(dense, CLBlastTransposeNo, rows, problem->dim_v, keys, 1, dense->scores, dense->v,
                   problem->dim_v, dense->out);
    if (!code)
        copy_rows(dense, "dense_store", dense->job->out, sequence->q_row + i, head, rows, problem->group,
                  dense->out);
    return code;
}

/* Rows of a chunk whose scores fit. */
static int64_t chunk_rows(const struct problem *problem)
{
    int64_t row_bytes = (int64_t)problem->group * problem->kv_len_max * (int64_t)sizeof(float);
    return MAX(MIN(SCORE_BYTES / row_bytes, problem->q_len_max), 1);
}

static int run_heads(struct dense *dense)
{
    const struct problem *problem = dense->job->problem;
    for (int64_t s = 0; s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        dense->sequence = sequence;
        for (dense->kv_head = 0; dense->kv_head < problem->kv_heads && sequence->q_len > 0; dense->kv_head++) {
            copy_rows(dense, "dense_widen", dense->job->k, sequence->k_row, dense->kv_head, sequence->kv_len, 1,
                      dense->k);
            copy_rows(dense, "dense_widen", dense->job->v, sequence->k_row, dense->kv_head, sequence->kv_len, 1,
                      dense->v);
            for (int64_t i = 0; i < sequence->q_len; i += dense->rows) {
                int code = chunk(dense, i, MIN(dense->rows, sequence->q_len - i));
                if (code || dense->launch->status) return code;
            }
        }
    }
    return 0;
}

/* CLATTN_DENSE=clblast|tiles decides; without it GPUs that have no tuned tiles take CLBlast for long sequences.
 */
bool opencl_dense_wanted(clattn_context *context, const struct forward_job *job)
{
    const struct opencl *state = opencl_of(context);
    const char *choice = getenv("CLATTN_DENSE");
    bool possible = !job->blocks && !has_options(&job->problem->options);
    for (int64_t s = 0; s < job->problem->count; s++) /* every sequence has keys to multiply with */
        possible = possible && (job->problem->sequences[s].kv_len > 0 || job->problem->sequences[s].q_len == 0);
    if (choice && strcmp(choice, "clblast") == 0) return possible;
    if (choice && strcmp(choice, "tiles") == 0) return false;
    return possible && state->device.local_is_real && job->problem->kv_len_max >= 2048;
}

clattn_status opencl_dense(clattn_context *context, const struct forward_job *job, bool *done)
{
    const struct problem *problem = job->problem;
    struct opencl_launch launch;
    struct dense dense = {.context = context, .job = job, .launch = &launch, .rows = chunk_rows(problem)};
    size_t rows = (size_t)(dense.rows * problem->group), keys = (size_t)problem->kv_len_max;
    clattn_sync steps;
    *done = false;
    opencl_launch_begin(context, job->sync, &launch);
    int code = -1;
    if (!launch.status && !launch.out_of_order) {
        dense.q = opencl_launch_temporary(&launch, rows * (size_t)problem->dim * sizeof(float));
        dense.k = opencl_launch_temporary(&launch, keys * (size_t)problem->dim * sizeof(float));
        dense.v = opencl_launch_temporary(&launch, keys * (size_t)problem->dim_v * sizeof(float));
        dense.scores = opencl_launch_temporary(&launch, rows * keys * sizeof(float));
        dense.out = opencl_launch_temporary(&launch, rows * (size_t)problem->dim_v * sizeof(float));
        opencl_of(context)->used_clblast = true;
        code = launch.status ? 0 : run_heads(&dense);
    }
    *done = code == 0 && !launch.status;
    if (!*done) {
        launch.sync = sync_without_event(job->sync, &steps); /* the tiles give it */
        log_line(context, CLATTN_LOG_WARNING, "CLBlast is not used for dense attention: %s (code %d)",
                 launch.out_of_order ? "the queue is out of order" : "a product failed", code);
    }
    return opencl_launch_end(&launch);
}

void opencl_dense_forget(const struct opencl *state)
{
    if (state->used_clblast) CLBlastClearCache(); /* its programs are kept by the address of the context */
}
#else
bool opencl_dense_wanted(clattn_context *context, const struct forward_job *job)
{
    (void)context;
    (void)job;
    return false;
}

clattn_status opencl_dense(clattn_context *context, const struct forward_job *job, bool *done)
{
    (void)job;
    *done = false;
    return fail(context, CLATTN_INTERNAL, "CLBlast is not built in");
}

void opencl_dense_forget(const struct opencl *state)
{
    (void)state;
}
#endif
