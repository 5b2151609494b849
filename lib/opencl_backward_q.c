/* SPDX-License-Identifier: MIT */
/* Gradient of the queries on OpenCL: chooses the tile, builds, launches; see cl/attention_backward_q.cl. */

#include "config.h"

#include "opencl_backward.h"

/* As for the forward pass; the second lane tile halves what fits. */
enum { ROWS_OWN_LIST = 16, ROWS_SHARED_LIST = 32, KEYS_MAX = 32, SHRINK_MAX = 4 };

static size_t local_bytes(const struct backward_run *run, const struct backward_tile *shape)
{
    const struct problem *problem = run->job->problem;
    int rows = shape->tile.rows, keys = shape->tile.keys, groups = keys / shape->tile.item_keys;
    int q = MAX((problem->dim + 3) / 4 * 4, groups * shape->columns), dout = (problem->dim_v + 3) / 4 * 4;
    size_t floats = (size_t)(rows * (q + dout)) + (size_t)(keys * (MAX(q, dout) + run->taste.pad)) +
                    (size_t)(keys * rows) + (size_t)(14 * rows + 2 * shape->tokens + 1);
    return floats * sizeof(float);
}

/* The tile for at most so many rows and keys. */
static struct backward_tile tile_for(const struct backward_run *run, int rows, int keys)
{
    const struct problem *problem = run->job->problem;
    const struct opencl_taste *taste = &run->taste;
    struct backward_tile shape;
    int parts = (problem->group + rows - 1) / rows; /* tiles that share a group */
    shape.heads = run->lists.list_group > 1 ? 1 : (problem->group + parts - 1) / parts;
    shape.tokens = 1;
    while (shape.tokens < problem->q_len_max && 2 * shape.tokens * shape.heads <= rows)
        shape.tokens *= 2;
    if (problem->q_len_max >= rows) shape.tokens = rows / shape.heads; /* 3 or 5 heads fill more so */
    shape.tile = opencl_tile_of(taste, shape.tokens * shape.heads, keys);
    while (backward_item_columns(&shape.tile, problem->dim) > taste->item_dims && shape.tile.item_keys > 1 &&
           2 * opencl_tile_items(&shape.tile) <= taste->items)
        shape.tile.item_keys /= 2;
    opencl_tile_limit(&shape.tile, taste);
    shape.columns = backward_item_columns(&shape.tile, problem->dim);
    /* Single elements have an address each, which takes registers as well. */
    bool is_odd = opencl_load_width(taste, problem->dim) == 1;
    opencl_tile_narrow(&shape.tile, taste, shape.columns + is_odd);
    return shape;
}

/* The largest tile whose local memory fits; `shrink` halves its rows and keys in turn. */
static struct backward_tile tile_fitting(const struct backward_run *run, int shrink)
{
    const clattn_blocks *blocks = run->job->blocks;
    bool shared = !blocks || blocks->q_block > 1;
    int rows = opencl_limit(run->taste.rows, shared ? ROWS_SHARED_LIST : ROWS_OWN_LIST) >> shrink / 2;
    int keys = MIN(run->lists.block, opencl_limit(run->taste.keys, KEYS_MAX)) >> (shrink + 1) / 2;
    struct backward_tile shape = tile_for(run, MAX(rows, 1), MAX(keys, 4));
    while (local_bytes(run, &shape) > run->taste.local_bytes && (rows > 4 || keys > 8)) {
        if (keys > 16 || rows <= 4)
            keys /= 2;
        else
            rows /= 2;
        shape = tile_for(run, rows, keys);
    }
    return shape;
}

clattn_status backward_q_prepare(struct backward_run *run)
{
    clattn_status status = CLATTN_SUCCESS;
    run->taste = opencl_taste_of(run->context, TUNING_BACKWARD_Q, run->job->problem->dim, run->job->q->dtype);
    for (int shrink = 0; shrink <= SHRINK_MAX; shrink++) { /* the ladder of tiles */
        struct backward_tile *shape = &run->q_tile;
        *shape = tile_fitting(run, shrink);
        run->q_options = (struct opencl_options){""};
        backward_tile_options(&run->q_options, run, shape);
        opencl_option(&run->q_options, "DQ_DTYPE", (int)run->job->dq->dtype);
        opencl_option(&run->q_options, "TOKENS", shape->tokens);
        opencl_option(&run->q_options, "HEADS", shape->heads);
        opencl_option(&run->q_options, "ITEM_COLUMNS", shape->columns);
        status = opencl_kernel_try(run->context, "attention_backward_q.cl", "attention_backward_q",
                                   run->q_options.text);
        if (status != CLATTN_DEVICE_LIMIT) break;
    }
    return status;
}

static double unit_flops(const struct backward_run *run)
{
    const struct problem *problem = run->job->problem;
    const clattn_blocks *blocks = run->job->blocks;
    double keys = (double)problem->kv_len_max;
    if (blocks)
        keys =
            MIN(keys, (double)blocks->topk * run->lists.block * ceil_div(run->q_tile.tokens, blocks->q_block));
    return 2.0 * (2 * problem->dim + problem->dim_v) * run->q_tile.tile.rows * keys;
}

void backward_q_run(struct backward_run *run)
{
    enum { ARG_UNIT_FIRST = 16 };
    const struct backward_job *job = run->job;
    const struct problem *problem = job->problem;
    const clattn_blocks *blocks = job->blocks;
    const struct element_mask *mask = blocks ? blocks->mask : NULL;
    struct opencl_launch *launch = &run->launch;
    const clattn_tensor *const inputs[] = {job->q, job->k, job->v, job->dout, job->lse};
    opencl_launch_kernel(launch, "attention_backward_q.cl", "attention_backward_q", run->q_options.text);
    for (int i = 0; i < 5; i++)
        opencl_arg_tensor(launch, inputs[i]);
    opencl_arg_mem(launch, run->delta);
    opencl_arg_tensor(launch, job->dq);
    opencl_arg_storage(launch, blocks ? &blocks->indices : NULL);
    opencl_arg_storage(launch, blocks ? &blocks->counts : NULL);
    opencl_arg_mem(launch, run->table);
    opencl_arg_tensor(launch, problem->options.bias);
    opencl_arg_storage(launch, mask ? &mask->cut : NULL);
    opencl_arg_storage(launch, mask ? &mask->window : NULL);
    opencl_arg_storage(launch, mask ? &mask->coordinate : NULL);
    opencl_arg_mem(launch, run->block_starts);
    opencl_arg_int(launch, (int32_t)problem->count);
    opencl_arg_long(launch, 0);
    opencl_arg_float(launch, problem->scale);
    opencl_arg_float(launch, problem->options.softcap);
    opencl_arg_long(launch, problem->options.window);
    opencl_arg_int(launch, problem->causal);
    opencl_arg_int(launch, job->accumulate);
    opencl_arg_int(launch, blocks != NULL);
    opencl_arg_int(launch, blocks ? blocks->heads : 1);
    opencl_arg_int(launch, problem->q_block);
    opencl_arg_int(launch, blocks ? blocks->topk : 1);
    opencl_arg_int(launch, problem->kv_heads);
    opencl_run_units(launch, ARG_UNIT_FIRST, run->q_units, unit_flops(run),
                     opencl_tile_items(&run->q_tile.tile));
}
