/* SPDX-License-Identifier: MIT */
/* Forward attention on OpenCL: chooses the tile, builds, launches; see cl/attention_forward.cl. */

#include "config.h"

#include "opencl_nvidia.h"
#include "opencl_options.h"
#include "opencl_subgroup.h"

#include <stdlib.h>

/* Rows of a tile. With a list for each token, a tile that holds one group reads each key block once for it;
 * rows that share a list share more. */
enum { ROWS_OWN_LIST = 16, ROWS_SHARED_LIST = 32, KEYS_MAX = 64, SHRINK_MAX = 4 };
enum { KEYS_UNEQUAL = 32 }; /* blocks of any length, which end inside of a step */

struct forward_tile_shape {
    struct opencl_tile tile;
    int tokens, heads; /* query rows and heads of a tile */
    int item_dims;     /* value dimensions of an item */
};

static bool heads_have_own_lists(const struct forward_job *job)
{
    const struct problem *problem = job->problem;
    return job->blocks && job->blocks->heads == problem->q_heads && problem->group > 1;
}

static enum tuning_kernel kernel_of(const struct forward_job *job)
{
    return !job->blocks || job->blocks->q_block > 1 ? TUNING_FORWARD_BLOCK : TUNING_FORWARD_TOKEN;
}

/* Local memory of the kernel. */
static size_t local_bytes(const struct opencl_taste *taste, const struct problem *problem,
                          const clattn_blocks *blocks, const struct forward_tile_shape *shape)
{
    const struct opencl_tile *tile = &shape->tile;
    int key_groups = tile->keys / tile->item_keys;
    int columns = (problem->dim + 3) / 4 * 4, columns_v = key_groups * shape->item_dims;
    int widest = MAX(columns, columns_v);
    size_t floats = (size_t)widest * (size_t)tile->rows + (size_t)(tile->keys * (widest + taste->pad)) +
                    (size_t)(tile->keys * tile->rows) + (size_t)(key_groups * tile->rows) +
                    (size_t)(3 * tile->rows + 2 * shape->tokens);
    if (opencl_has_options(problem, blocks)) floats += (size_t)(11 * tile->rows + 3 * tile->keys + 1);
    return floats * sizeof(float);
}

static int item_dims_of(const struct opencl_tile *tile, int dim_v)
{
    int key_groups = tile->keys / tile->item_keys;
    return (dim_v + 4 * key_groups - 1) / (4 * key_groups) * 4;
}

/* The tile for at most so many rows and keys. */
static struct forward_tile_shape shape_of(const struct opencl_taste *taste, const struct forward_job *job,
                                          int rows, int keys)
{
    const struct problem *problem = job->problem;
    struct forward_tile_shape shape;
    int parts = (problem->group + rows - 1) / rows; /* tiles that share a group */
    shape.heads = heads_have_own_lists(job) ? 1 : (problem->group + parts - 1) / parts;
    shape.tokens = 1;
    while (shape.tokens < problem->q_len_max && 2 * shape.tokens * shape.heads <= rows)
        shape.tokens *= 2;
    if (problem->q_len_max >= rows) shape.tokens = rows / shape.heads; /* 3 or 5 heads fill more so */
    shape.tile = opencl_tile_of(taste, shape.tokens * shape.heads, keys);
    shape.item_dims = item_dims_of(&shape.tile, problem->dim_v);
    while (shape.item_dims > taste->item_dims && shape.tile.item_keys > 1 &&
           2 * opencl_tile_items(&shape.tile) <= taste->items) {
        shape.tile.item_keys /= 2;
        shape.item_dims = item_dims_of(&shape.tile, problem->dim_v);
    }
    while (opencl_tile_items(&shape.tile) > taste->items) {
        shape.tile.item_keys *= 2;
        shape.item_dims = item_dims_of(&shape.tile, problem->dim_v);
    }
    opencl_tile_narrow(&shape.tile, taste, shape.item_dims);
    return shape;
}

/* The largest tile whose local memory fits; `shrink` halves its rows and keys in turn. */
static struct forward_tile_shape shape_fitting(const struct opencl_taste *taste, const struct forward_job *job,
                                               int shrink)
{
    bool shared = kernel_of(job) == TUNING_FORWARD_BLOCK;
    int rows = opencl_limit(taste->rows, shared ? ROWS_SHARED_LIST : ROWS_OWN_LIST) >> shrink / 2;
    int block = !job->blocks ? KEYS_MAX : job->blocks->starts ? KEYS_UNEQUAL : job->blocks->block;
    int keys = MIN(block, opencl_limit(taste->keys, KEYS_MAX)) >> (shrink + 1) / 2;
    struct forward_tile_shape shape = shape_of(taste, job, MAX(rows, 1), MAX(keys, 4));
    while (local_bytes(taste, job->problem, job->blocks, &shape) > taste->local_bytes &&
           (rows > 4 || keys > 8)) {
        if (keys > 16 || rows <= 4)
            keys /= 2;
        else
            rows /= 2;
        shape = shape_of(taste, job, rows, keys);
    }
    return shape;
}

static struct opencl_options options_of(const struct opencl_taste *taste, const struct forward_job *job,
                                        const struct forward_tile_shape *shape)
{
    const struct problem *problem = job->problem;
    struct opencl_options options = {""};
    opencl_option(&options, "DTYPE", (int)job->q->dtype);
    opencl_option(&options, "OUT_DTYPE", (int)job->out->dtype);
    opencl_option(&options, "DIM", problem->dim);
    opencl_option(&options, "DIM_V", problem->dim_v);
    opencl_option(&options, "GROUP", problem->group);
    opencl_option(&options, "HEADS", shape->heads);
    opencl_option(&options, "TOKENS", shape->tokens);
    opencl_tile_option(&options, &shape->tile);
    opencl_option(&options, "ITEM_DIMS", shape->item_dims);
    opencl_option(&options, "LOAD_K", opencl_load_width(taste, problem->dim));
    opencl_option(&options, "LOAD_V", opencl_load_width(taste, problem->dim_v));
    opencl_option(&options, "PAD", taste->pad);
    opencl_attention_options(&options, problem, job->blocks, shape->tile.keys);
    return options;
}

/* Fills the table; returns the units of all sequences. */
static int64_t units_fill(const struct forward_job *job, const struct forward_tile_shape *shape, cl_long *table)
{
    const struct problem *problem = job->problem;
    const struct tensors tensors = {.q = job->q, .k = job->k, .v = job->v, .out = job->out, .lse = job->lse};
    int64_t units = 0, head_tiles = problem->kv_heads * ceil_div(problem->group, shape->heads);
    opencl_table_fill(problem, &tensors, NULL, table);
    for (int64_t s = 0; s < problem->count; s++) {
        table[s * OPENCL_SEQUENCE_FIELDS + OPENCL_SEQUENCE_UNIT] = units;
        units += ceil_div(problem->sequences[s].q_len, shape->tokens) * head_tiles;
    }
    return units;
}

static double unit_flops(const struct forward_job *job, const struct forward_tile_shape *shape)
{
    const struct problem *problem = job->problem;
    const clattn_blocks *blocks = job->blocks;
    double keys = (double)problem->kv_len_max;
    if (blocks && !blocks->starts)
        keys = MIN(keys, (double)blocks->topk * blocks->block * ceil_div(shape->tokens, blocks->q_block));
    return 2.0 * (problem->dim + problem->dim_v) * shape->tile.rows * keys;
}

static void set_arguments(struct opencl_launch *launch, const struct forward_job *job, cl_mem table)
{
    const struct problem *problem = job->problem;
    const clattn_blocks *blocks = job->blocks;
    const clattn_tensor *const tensors[] = {job->q, job->k, job->v, job->out, job->lse};
    for (int i = 0; i < 5; i++)
        opencl_arg_tensor(launch, tensors[i]);
    opencl_arg_storage(launch, blocks ? &blocks->indices : NULL);
    opencl_arg_storage(launch, blocks ? &blocks->counts : NULL);
    opencl_arg_mem(launch, table);
    opencl_arg_int(launch, (int32_t)problem->count);
    opencl_arg_long(launch, 0); /* the first unit: opencl_run_units */
    for (int i = 0; i < 5; i++) {
        opencl_arg_long(launch, tensors[i] ? tensors[i]->len_stride : 0);
        opencl_arg_long(launch, tensors[i] ? tensors[i]->head_stride : 0);
    }
    opencl_arg_float(launch, problem->scale);
    opencl_arg_int(launch, problem->causal);
    opencl_arg_int(launch, job->lse != NULL);
    opencl_arg_int(launch, blocks != NULL);
    opencl_arg_int(launch, blocks ? blocks->heads : 1);
    opencl_arg_int(launch, blocks ? blocks->q_block : 1);
    opencl_arg_int(launch, blocks ? blocks->topk : 1);
    opencl_arg_int(launch, problem->kv_heads);
    opencl_option_arguments(launch, problem, blocks);
}

enum { ARG_UNIT_FIRST = 9 };

/* The program for a job. */
struct forward_choice {
    const char *files, *kernel;
    struct forward_tile_shape shape;
    struct opencl_options options;
    int items; /* of a work-group */
};

/* DEVICE_LIMIT: not in these registers or this local memory. */
static clattn_status choice_try(clattn_context *context, const struct forward_choice *choice)
{
    cl_kernel kernel = NULL;
    clattn_status status = opencl_kernel(context, choice->files, choice->kernel, choice->options.text, &kernel);
    if (kernel) clReleaseKernel(kernel);
    return status;
}

static clattn_status choose_tile(clattn_context *context, const struct forward_job *job,
                                 struct forward_choice *choice)
{
    const struct opencl_taste taste =
        opencl_taste_of(context, kernel_of(job), job->problem->dim, job->q->dtype);
    clattn_status status = CLATTN_SUCCESS;
    choice->files = "attention_forward.cl";
    choice->kernel = "attention_forward";
    for (int shrink = 0; shrink <= SHRINK_MAX; shrink++) { /* the ladder of tiles */
        choice->shape = shape_fitting(&taste, job, shrink);
        choice->options = options_of(&taste, job, &choice->shape);
        choice->items = opencl_tile_items(&choice->shape.tile);
        status = choice_try(context, choice);
        if (status != CLATTN_DEVICE_LIMIT) break;
    }
    return status;
}

/* A subgroup a query token, where each has a list of its own. */
static bool choose_subgroup(clattn_context *context, const struct forward_job *job,
                            struct forward_choice *choice)
{
    const struct problem *problem = job->problem;
    const struct subgroup *subgroup = &opencl_of(context)->subgroup;
    if (!subgroup->kind || !job->blocks || job->blocks->q_block > 1 || opencl_has_options(problem, job->blocks))
        return false;
    int heads = subgroup_heads(subgroup, heads_have_own_lists(job) ? 1 : problem->group, problem->dim_v);
    if (!heads) return false;
    choice->files = SUBGROUP_FILES "attention_subgroup.cl";
    choice->kernel = "attention_subgroup";
    choice->items = subgroup->size;
    choice->shape = (struct forward_tile_shape){
        .tile = {.lanes = 1, .rows = heads, .keys = 1, .item_keys = 1}, .tokens = 1, .heads = heads};
    choice->options = (struct opencl_options){""};
    subgroup_options(&choice->options, subgroup);
    opencl_option(&choice->options, "DTYPE", (int)job->q->dtype);
    opencl_option(&choice->options, "OUT_DTYPE", (int)job->out->dtype);
    opencl_option(&choice->options, "DIM", problem->dim);
    opencl_option(&choice->options, "DIM_V", problem->dim_v);
    opencl_option(&choice->options, "GROUP", problem->group);
    opencl_option(&choice->options, "HEADS", heads);
    opencl_option(&choice->options, "BLOCK", job->blocks->block);
    opencl_option(&choice->options, "LOAD_K", subgroup_load(subgroup, problem->dim));
    return choice_try(context, choice) == CLATTN_SUCCESS;
}

clattn_status opencl_forward(clattn_context *context, const struct forward_job *job)
{
    const struct problem *problem = job->problem;
    struct forward_choice choice;
    struct opencl_launch launch;
    bool done = false;
    clattn_status status = nvidia_forward(context, job, &done);
    if (status || done) return status;
    status = opencl_check_lengths(context, problem);
    if (!status && opencl_dense_wanted(context, job)) {
        status = opencl_dense(context, job, &done);
        if (status || done) return status;
    }
    if (!status && !choose_subgroup(context, job, &choice)) status = choose_tile(context, job, &choice);
    if (status) return status;

    size_t bytes = (size_t)problem->count * OPENCL_SEQUENCE_FIELDS * sizeof(cl_long);
    cl_long *table = malloc(MAX(bytes, 1));
    if (!table)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a table of %lld sequences",
                    (long long)problem->count);
    int64_t units = units_fill(job, &choice.shape, table);
    opencl_launch_begin(context, job->sync, &launch);
    if (units > 0) {
        opencl_launch_kernel(&launch, choice.files, choice.kernel, choice.options.text);
        set_arguments(&launch, job, opencl_launch_table(&launch, table, bytes));
        opencl_run_units(&launch, ARG_UNIT_FIRST, units, unit_flops(job, &choice.shape), choice.items);
    }
    free(table);
    return opencl_launch_end(&launch);
}
