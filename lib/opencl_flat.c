/* SPDX-License-Identifier: MIT */
/* Flat selection by means through one matrix product of CLBlast; see cl/flat.cl. */

#include "config.h"

#include "opencl_tile.h"

#include <stdlib.h>
#include <string.h>

#ifdef HAVE_CLBLAST
#include <clblast_c.h>

enum { TOPK_MAX = 64, GROUP_ITEMS = 32 };
#define SCORE_BYTES (INT64_C(64) << 20)

struct flat {
    const struct select_job *job;
    const struct sequence *sequence;
    struct opencl_launch *launch;
    int64_t means_first; /* float of the sequence's and head's first leaf */
    int32_t kv_head;
    cl_mem sums, scores;
};

static void group_sums(const struct flat *flat, int64_t i, int64_t rows)
{
    const struct problem *problem = flat->job->problem;
    const clattn_tensor *q = flat->job->q;
    const struct sequence *sequence = flat->sequence;
    struct opencl_launch *launch = flat->launch;
    struct opencl_options options = {""};
    size_t columns = (size_t)ceil_div(problem->dim, GROUP_ITEMS) * GROUP_ITEMS;
    opencl_option(&options, "DTYPE", (int)q->dtype);
    opencl_launch_kernel(launch, "flat.cl", "flat_sum", options.text);
    opencl_arg_tensor(launch, q);
    opencl_arg_mem(launch, flat->sums);
    opencl_arg_long(launch, q->offset + sequence->batch * q->batch_stride +
                                (sequence->q_row + i) * q->len_stride +
                                (int64_t)flat->kv_head * problem->group * q->head_stride);
    opencl_arg_long(launch, q->len_stride);
    opencl_arg_long(launch, q->head_stride);
    opencl_arg_int(launch, problem->dim);
    opencl_arg_int(launch, problem->group);
    opencl_launch_run(launch, 2, (size_t[]){columns, (size_t)rows}, (size_t[]){GROUP_ITEMS, 1});
}

static void best_lists(const struct flat *flat, int64_t i, int64_t rows)
{
    const struct problem *problem = flat->job->problem;
    const clattn_select_desc *select = flat->job->select;
    const clattn_blocks *blocks = flat->job->blocks;
    const struct sequence *sequence = flat->sequence;
    struct opencl_launch *launch = flat->launch;
    struct opencl_options options = {""};
    opencl_option(&options, "TOPK", select->topk);
    opencl_option(&options, "ITEMS", GROUP_ITEMS);
    opencl_launch_kernel(launch, "flat.cl", "flat_best", options.text);
    opencl_arg_mem(launch, flat->scores);
    opencl_arg_storage(launch, &blocks->indices);
    opencl_arg_storage(launch, &blocks->counts);
    opencl_arg_int(launch, (int32_t)rows);
    opencl_arg_long(launch, query_position(sequence, i));
    opencl_arg_long(launch, sequence->kv_len);
    opencl_arg_int(launch, problem->causal);
    opencl_arg_int(launch, select->leaf);
    opencl_arg_int(launch, select->forced_first);
    opencl_arg_int(launch, select->forced_last);
    opencl_arg_long(launch, (sequence->list_row + i) * blocks->heads + flat->kv_head);
    opencl_arg_long(launch, blocks->heads);
    opencl_launch_run(launch, 1, (size_t[]){(size_t)ceil_div(rows, GROUP_ITEMS) * GROUP_ITEMS},
                      (size_t[]){GROUP_ITEMS});
}

/* Rows i .. i + rows - 1 of one sequence and key head; returns CLBlast's status. */
static int chunk(const struct flat *flat, int64_t i, int64_t rows)
{
    const struct problem *problem = flat->job->problem;
    size_t leaves = (size_t)ceil_div(flat->sequence->kv_len, flat->job->select->leaf),
           dim = (size_t)problem->dim;
    group_sums(flat, i, rows);
    if (flat->launch->status) return 0;
    int code =
        CLBlastSgemm(CLBlastLayoutRowMajor, CLBlastTransposeNo, CLBlastTransposeYes, leaves, (size_t)rows, dim,
                     problem->scale, flat->job->pyramid->means.mem, (size_t)flat->means_first, dim, flat->sums,
                     0, dim, 0, flat->scores, 0, (size_t)rows, &flat->launch->queue, NULL);
    if (!code) best_lists(flat, i, rows);
    return code;
}

static int run_heads(struct flat *flat, int64_t most_rows)
{
    const struct problem *problem = flat->job->problem;
    const clattn_pyramid *pyramid = flat->job->pyramid;
    for (int64_t s = 0; s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        flat->sequence = sequence;
        for (flat->kv_head = 0; flat->kv_head < problem->kv_heads; flat->kv_head++) {
            int64_t node = pyramid->first[s] + flat->kv_head * pyramid_nodes(sequence->kv_len, pyramid->leaf);
            flat->means_first = node * pyramid->dim; /* level 1 comes first */
            for (int64_t i = 0; i < sequence->q_len; i += most_rows) {
                int code = chunk(flat, i, MIN(most_rows, sequence->q_len - i));
                if (code || flat->launch->status) return code;
            }
        }
    }
    return 0;
}

/* As for dense attention (opencl_dense.c); GPUs take the product for many scores. */
bool opencl_flat_wanted(clattn_context *context, const struct select_job *job)
{
    const struct opencl *state = opencl_of(context);
    const struct problem *problem = job->problem;
    const char *choice = getenv("CLATTN_DENSE");
    bool possible =
        job->select->selector == CLATTN_SELECT_FLAT_MEAN && job->select->topk <= TOPK_MAX && job->pyramid;
    for (int64_t s = 0; s < problem->count; s++)
        possible = possible && (problem->sequences[s].kv_len > 0 || problem->sequences[s].q_len == 0);
    if (choice && strcmp(choice, "clblast") == 0) return possible;
    if (choice && strcmp(choice, "tiles") == 0) return false;
    return possible && state->device.local_is_real &&
           (double)problem->q_len_max * (double)problem->kv_len_max / job->select->leaf >= 1 << 20;
}

clattn_status opencl_flat(clattn_context *context, const struct select_job *job, bool *done)
{
    const struct problem *problem = job->problem;
    struct opencl_launch launch;
    struct flat flat = {.job = job, .launch = &launch};
    int64_t leaves = MAX(ceil_div(problem->kv_len_max, job->select->leaf), 1);
    int64_t rows = MAX(MIN(SCORE_BYTES / (leaves * (int64_t)sizeof(float)), problem->q_len_max), 1);
    int code = -1;
    clattn_sync steps;
    opencl_launch_begin(context, job->sync, &launch);
    if (!launch.status && !launch.out_of_order) {
        flat.sums = opencl_launch_temporary(&launch, (size_t)(rows * problem->dim) * sizeof(float));
        flat.scores = opencl_launch_temporary(&launch, (size_t)(rows * leaves) * sizeof(float));
        opencl_of(context)->used_clblast = true;
        code = launch.status ? 0 : run_heads(&flat, rows);
    }
    *done = code == 0 && !launch.status;
    if (!*done) {
        launch.sync = sync_without_event(job->sync, &steps); /* the portable kernel gives it */
        log_line(context, CLATTN_LOG_WARNING, "CLBlast is not used for flat selection: %s (code %d)",
                 launch.out_of_order ? "the queue is out of order" : "a product failed", code);
    }
    return opencl_launch_end(&launch);
}
#else
bool opencl_flat_wanted(clattn_context *context, const struct select_job *job)
{
    (void)context;
    (void)job;
    return false;
}

clattn_status opencl_flat(clattn_context *context, const struct select_job *job, bool *done)
{
    (void)job;
    *done = false;
    return fail(context, CLATTN_INTERNAL, "CLBlast is not built in");
}
#endif
