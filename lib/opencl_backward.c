/* SPDX-License-Identifier: MIT */
/* Backward attention on OpenCL: the table, D and dsink; see opencl_backward.h. */

#include "config.h"

#include "opencl_backward.h"
#include "opencl_nvidia.h"

#include "key_blocks.h"

#include <stdlib.h>

enum {
    ROW_ITEMS = 64,    /* of the kernels of D and dsink */
    ROW_LOAD = 4,      /* elements of a load there */
    KEYS_UNEQUAL = 64, /* taken for the size of blocks with boundaries of the caller */
};
static const char *const delta_file = "attention_backward_delta.cl";

int backward_item_columns(const struct opencl_tile *tile, int dim)
{
    int groups = tile->keys / tile->item_keys;
    return (dim + 4 * groups - 1) / (4 * groups) * 4;
}

void backward_tile_options(struct opencl_options *options, const struct backward_run *run,
                           const struct backward_tile *shape)
{
    const struct backward_job *job = run->job;
    const struct problem *problem = job->problem;
    opencl_option(options, "DTYPE", (int)job->q->dtype);
    opencl_option(options, "DOUT_DTYPE", (int)job->dout->dtype);
    opencl_option(options, "DIM", problem->dim);
    opencl_option(options, "DIM_V", problem->dim_v);
    opencl_option(options, "GROUP", problem->group);
    opencl_option(options, "BLOCK", run->lists.block);
    opencl_option(options, "LANES", shape->tile.lanes);
    opencl_option(options, "LANE_ROWS", shape->tile.rows);
    opencl_option(options, "STREAM", shape->tile.keys);
    opencl_option(options, "ITEM_STREAM", shape->tile.item_keys);
    opencl_option(options, "LOAD_K", opencl_load_width(&run->taste, problem->dim));
    opencl_option(options, "LOAD_V", opencl_load_width(&run->taste, problem->dim_v));
    opencl_option(options, "PAD", run->taste.pad);
    opencl_option(options, "SOFTCAP", problem->options.softcap != 0);
    opencl_option(options, "BIAS", problem->options.bias != NULL);
    opencl_option(options, "MASK", job->blocks && job->blocks->mask);
    opencl_option(options, "STARTS", job->blocks && job->blocks->starts);
}

/* ---- table ---- */

static struct backward_lists lists_of(const struct backward_job *job)
{
    const struct problem *problem = job->problem;
    int list_heads = job->blocks ? job->blocks->heads : problem->kv_heads;
    bool by_query_head = list_heads == problem->q_heads && problem->group > 1;
    struct backward_lists lists = {
        .block = !job->blocks          ? DENSE_BLOCK
                 : job->blocks->starts ? KEYS_UNEQUAL
                                       : job->blocks->block,
        .list_heads = list_heads,
        .list_group = by_query_head ? problem->group : 1,
        .list_kv = by_query_head ? 1 : problem->kv_heads / list_heads,
    };
    for (int64_t s = 0; s < problem->count; s++)
        lists.bins +=
            key_blocks_listed(job->blocks, &problem->sequences[s]).count * (list_heads / lists.list_group);
    return lists;
}

static void table_fill(struct backward_run *run, cl_long *table)
{
    const struct backward_job *job = run->job;
    const struct problem *problem = job->problem;
    const clattn_tensor *const tensors[BACKWARD_TENSORS] = {job->q,
                                                            job->k,
                                                            job->v,
                                                            job->out,
                                                            job->lse,
                                                            job->dout,
                                                            job->dlse,
                                                            job->dq,
                                                            job->dk,
                                                            job->dv,
                                                            problem->options.bias};
    int64_t delta = 0, bins = 0;
    for (int t = 0; t < BACKWARD_TENSORS; t++) {
        table[2 * t] = tensors[t] ? tensors[t]->len_stride : 0;
        table[2 * t + 1] = tensors[t] ? tensors[t]->head_stride : 0;
    }
    for (int64_t s = 0; s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        const struct key_blocks keys = key_blocks_listed(job->blocks, sequence);
        cl_long *fields = backward_fields(table, s);
        for (int t = 0; t < BACKWARD_TENSORS; t++) {
            const clattn_tensor *tensor = tensors[t];
            bool has_keys = t == BACKWARD_K || t == BACKWARD_V || t == BACKWARD_DK || t == BACKWARD_DV;
            int64_t row = t == BACKWARD_BIAS ? 0 : has_keys ? sequence->k_row : sequence->q_row;
            fields[t] = 0;
            if (!tensor) continue;
            int64_t batch = t == BACKWARD_BIAS && tensor->batch == 1 ? 0 : sequence->batch;
            fields[t] = tensor->offset + batch * tensor->batch_stride + row * tensor->len_stride;
        }
        fields[BACKWARD_Q_LEN] = sequence->q_len;
        fields[BACKWARD_KV_LEN] = sequence->kv_len;
        fields[BACKWARD_LIST_ROW] = sequence->list_row;
        fields[BACKWARD_DELTA] = delta;
        fields[BACKWARD_BIN] = bins;
        fields[BACKWARD_UNIT_ROWS] = run->row_units;
        fields[BACKWARD_UNIT_Q] = run->q_units;
        fields[BACKWARD_Q_ROW] = sequence->q_row;
        fields[BACKWARD_K_ROW] = sequence->k_row;
        fields[BACKWARD_BATCH] = sequence->batch;
        fields[BACKWARD_BLOCKS] = keys.count;
        fields[BACKWARD_START] = keys.starts ? keys.starts - job->blocks->starts : 0;
        delta += sequence->q_len * problem->q_heads;
        bins += keys.count * (run->lists.list_heads / run->lists.list_group);
        run->row_units += ceil_div(sequence->q_len * problem->q_heads, ROW_ITEMS);
        if (job->dq)
            run->q_units += ceil_div(sequence->q_len, run->q_tile.tokens) * problem->kv_heads *
                            ceil_div(problem->group, run->q_tile.heads);
    }
}

/* ---- D and dsink ---- */

static struct opencl_options delta_options(const struct backward_run *run)
{
    const struct backward_job *job = run->job;
    struct opencl_options options = {""};
    opencl_option(&options, "OUT_DTYPE", (int)job->out->dtype);
    opencl_option(&options, "DOUT_DTYPE", (int)job->dout->dtype);
    /* Not as tuned for the tile kernels: D must have the same bits whichever gradients are asked for. */
    struct opencl_taste taste = {.load = ROW_LOAD};
    opencl_option(&options, "LOAD_V", opencl_load_width(&taste, job->problem->dim_v));
    opencl_option(&options, "ITEMS", ROW_ITEMS);
    return options;
}

static void delta_run(struct backward_run *run, const char *options)
{
    const struct backward_job *job = run->job;
    struct opencl_launch *launch = &run->launch;
    opencl_launch_kernel(launch, delta_file, "attention_backward_delta", options);
    opencl_arg_tensor(launch, job->out);
    opencl_arg_tensor(launch, job->dout);
    opencl_arg_tensor(launch, job->dlse);
    opencl_arg_mem(launch, run->delta);
    opencl_arg_mem(launch, run->table);
    opencl_arg_int(launch, (int32_t)job->problem->count);
    opencl_arg_long(launch, 0);
    opencl_arg_int(launch, job->problem->q_heads);
    opencl_arg_int(launch, job->problem->dim_v);
    opencl_arg_int(launch, job->dlse != NULL);
    opencl_run_units(launch, 6, run->row_units, 2.0 * ROW_ITEMS * job->problem->dim_v, ROW_ITEMS);
}

static void sink_run(struct backward_run *run, const char *options)
{
    const struct backward_job *job = run->job;
    const clattn_tensor *sink = job->problem->options.sink, *dsink = job->dsink;
    struct opencl_launch *launch = &run->launch;
    opencl_launch_kernel(launch, delta_file, "attention_backward_sink", options);
    opencl_arg_tensor(launch, sink);
    opencl_arg_tensor(launch, job->lse);
    opencl_arg_mem(launch, run->delta);
    opencl_arg_tensor(launch, dsink);
    opencl_arg_mem(launch, run->table);
    opencl_arg_int(launch, (int32_t)job->problem->count);
    opencl_arg_long(launch, 0);
    opencl_arg_int(launch, job->problem->q_heads);
    opencl_arg_long(launch, sink->offset);
    opencl_arg_long(launch, sink->head_stride);
    opencl_arg_long(launch, dsink->offset);
    opencl_arg_long(launch, dsink->head_stride);
    opencl_arg_int(launch, job->accumulate);
    opencl_run_units(launch, 6, job->problem->q_heads, 100.0 * (double)run->row_units, ROW_ITEMS);
}

/* ---- the call ---- */

static clattn_status run_all(struct backward_run *run)
{
    const struct backward_job *job = run->job;
    const struct problem *problem = job->problem;
    struct opencl_launch *launch = &run->launch;
    size_t longs = (size_t)(2 * BACKWARD_TENSORS + problem->count * BACKWARD_FIELDS);
    cl_long *table = malloc(longs * sizeof *table);
    if (!table)
        return fail(run->context, CLATTN_OUT_OF_MEMORY, "no memory for a table of %lld sequences",
                    (long long)problem->count);
    run->row_units = run->q_units = 0;
    table_fill(run, table);
    struct opencl_options options = delta_options(run);
    int64_t rows = 0;
    for (int64_t s = 0; s < problem->count; s++)
        rows += problem->sequences[s].q_len;
    opencl_launch_begin(run->context, job->sync, launch);
    run->table = opencl_launch_table(launch, table, longs * sizeof *table);
    run->delta = opencl_launch_temporary(launch, (size_t)MAX(rows * problem->q_heads, 1) * sizeof(float));
    if (job->blocks && job->blocks->starts)
        run->block_starts = opencl_launch_table(launch, job->blocks->starts,
                                                (size_t)job->blocks->start_count * sizeof *job->blocks->starts);
    free(table);
    delta_run(run, options.text);
    if (job->dq && !run->has_dq) backward_q_run(run);
    run->has_dq = job->accumulate && !launch->status;
    if (job->dk || job->dbias) backward_kv_run(run);
    if (job->dsink) sink_run(run, options.text);
    return opencl_launch_end(launch);
}

static clattn_status run_portable(clattn_context *context, const struct backward_job *job)
{
    struct backward_run run = {.job = job, .context = context};
    clattn_status status;
    run.lists = lists_of(job);
    do { /* the ladders go on when a launch is refused */
        status = job->dq ? backward_q_prepare(&run) : CLATTN_SUCCESS;
        if (!status && (job->dk || job->dbias)) status = backward_kv_prepare(&run);
        run.launch.is_refused = false;
        if (!status) status = run_all(&run);
    } while (run.launch.is_refused);
    return status;
}

clattn_status opencl_backward(clattn_context *context, const struct backward_job *job)
{
    struct backward_job matrix = *job, sink = *job;
    clattn_sync first;
    bool done = false;
    clattn_status status = opencl_check_lengths(context, job->problem);
    if (job->sync && job->dsink) { /* the call ends with dsink */
        first = *job->sync;
        first.event = NULL;
        matrix.sync = &first;
    }
    matrix.dsink = NULL;
    if (!status) status = nvidia_backward(context, &matrix, &done);
    if (status || (done && !job->dsink)) return status;
    if (!done) return run_portable(context, job);
    sink.dq = sink.dk = sink.dv = NULL;
    return run_portable(context, &sink);
}
