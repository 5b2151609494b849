/* SPDX-License-Identifier: MIT */
/* Forward attention on OpenCL: chooses the tile, builds, launches; see cl/attention_forward.cl. */

#include "config.h"

#include "opencl_decode.h"
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
                    (size_t)(3 * tile->rows + 2 * shape->tokens + 6);
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
    opencl_tile_limit(&shape.tile, taste);
    shape.item_dims = item_dims_of(&shape.tile, problem->dim_v);
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
                                        const struct forward_tile_shape *shape, const struct opencl_pages *pages)
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
    if (pages) opencl_option(&options, "CACHE", 1);
    return options;
}

static int64_t sequence_units(const struct problem *problem, int64_t s, const struct forward_tile_shape *shape)
{
    return ceil_div(problem->sequences[s].q_len, shape->tokens) * problem->kv_heads *
           ceil_div(problem->group, shape->heads);
}

/* Fills the table; returns the units of all sequences. */
static int64_t units_fill(const struct forward_job *job, const struct forward_tile_shape *shape,
                          const struct opencl_pages *pages, cl_long *table)
{
    const struct problem *problem = job->problem;
    const struct tensors tensors = {.q = job->q, .k = job->k, .v = job->v, .out = job->out, .lse = job->lse};
    int64_t units = 0;
    opencl_table_fill(problem, &tensors, NULL, table);
    opencl_table_pages(pages, problem->count, table);
    for (int64_t s = 0; s < problem->count; s++) {
        table[s * OPENCL_SEQUENCE_FIELDS + OPENCL_SEQUENCE_UNIT] = units;
        units += sequence_units(problem, s, shape);
    }
    return units;
}

/* ---- few queries: work-groups share a row tile's keys ---- */

enum { PARTS_MAX = 128, GROUPS_PER_UNIT = 2, MERGE_ITEMS = 64 };

struct forward_parts {
    int64_t count, entries; /* parts, and list entries (blocks, without lists) of each */
    int64_t rows;           /* of q */
};

static struct forward_parts parts_of(const clattn_context *context, const struct forward_job *job,
                                     const struct forward_tile_shape *shape, const struct opencl_pages *pages)
{
    const struct problem *problem = job->problem;
    struct forward_parts parts = {1, INT32_MAX / 2, job->q->len};
    int64_t units = 0, groups = GROUPS_PER_UNIT * (int64_t)opencl_of(context)->device.compute_units;
    int64_t entries = job->blocks ? job->blocks->topk : ceil_div(problem->kv_len_max, shape->tile.keys);
    for (int64_t s = 0; pages && s < problem->count; s++)
        units += sequence_units(problem, s, shape);
    int64_t most = units ? MIN(MIN(ceil_div(groups, units), entries), PARTS_MAX) : 1;
    if (most <= 1) return parts;
    parts.entries = ceil_div(entries, most);
    parts.count = ceil_div(entries, parts.entries);
    return parts;
}

/* The job whose results are parts: float32 in memory of the launch, without the sink, which joins at the end. */
struct part_job {
    struct problem problem;
    struct forward_job job;
    clattn_tensor out, lse;
};

static void part_job_make(struct opencl_launch *launch, const struct forward_job *job,
                          const struct forward_parts *parts, struct part_job *part)
{
    int64_t heads = job->problem->q_heads, rows = parts->rows * parts->count, dim_v = job->problem->dim_v;
    part->problem = *job->problem;
    part->problem.options.sink = NULL;
    part->job = *job;
    part->job.problem = &part->problem;
    part->job.out = &part->out;
    part->job.lse = &part->lse;
    part->out = clattn_tensor_bthd(NULL, CLATTN_FLOAT32, 1, rows, heads, dim_v);
    part->lse = clattn_tensor_bthd(NULL, CLATTN_FLOAT32, 1, rows, heads, 1);
    part->out.memory = part->lse.memory = CLATTN_MEMORY_CL_MEM;
    if (!launch) return;
    part->out.data = opencl_launch_temporary(launch, (size_t)(rows * heads * dim_v) * sizeof(float));
    part->lse.data = opencl_launch_temporary(launch, (size_t)(rows * heads) * sizeof(float));
}

static void arg_rows(struct opencl_launch *launch, const clattn_tensor *tensor)
{
    opencl_arg_tensor(launch, tensor);
    opencl_arg_long(launch, tensor ? tensor->offset : 0);
    opencl_arg_long(launch, tensor ? tensor->len_stride : 0);
    opencl_arg_long(launch, tensor ? tensor->head_stride : 0);
}

static void run_merge(struct opencl_launch *launch, const struct forward_job *job,
                      const struct forward_parts *parts, const struct part_job *part)
{
    const clattn_tensor *sink = job->problem->options.sink;
    int64_t pairs = parts->rows * job->problem->q_heads;
    struct opencl_options options = {""};
    opencl_option(&options, "DIM_V", job->problem->dim_v);
    opencl_option(&options, "OUT_DTYPE", (int)job->out->dtype);
    opencl_option(&options, "ITEMS", MERGE_ITEMS);
    if (sink) opencl_option(&options, "SINK", 1);
    opencl_launch_kernel(launch, "decode_merge.cl", "decode_merge", options.text);
    opencl_arg_tensor(launch, &part->out);
    opencl_arg_tensor(launch, &part->lse);
    opencl_arg_int(launch, (int32_t)parts->count);
    opencl_arg_long(launch, pairs);
    opencl_arg_int(launch, job->problem->q_heads);
    arg_rows(launch, job->out);
    arg_rows(launch, job->lse);
    opencl_arg_int(launch, job->lse != NULL);
    opencl_arg_tensor(launch, sink);
    opencl_arg_long(launch, sink ? sink->offset : 0);
    opencl_arg_long(launch, sink ? sink->head_stride : 0);
    size_t local = MERGE_ITEMS, global = (size_t)pairs * local;
    opencl_launch_run(launch, 1, &global, &local);
}

/* ---- launch ---- */

static double unit_flops(const struct forward_job *job, const struct forward_tile_shape *shape)
{
    const struct problem *problem = job->problem;
    const clattn_blocks *blocks = job->blocks;
    double keys = (double)problem->kv_len_max;
    if (blocks && !blocks->starts)
        keys = MIN(keys, (double)blocks->topk * blocks->block * ceil_div(shape->tokens, blocks->q_block));
    return 2.0 * (problem->dim + problem->dim_v) * shape->tile.rows * keys;
}

static void set_arguments(struct opencl_launch *launch, const struct forward_job *job,
                          const struct opencl_pages *pages, const struct forward_parts *parts, cl_mem table)
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
    if (!pages) return;
    opencl_arg_pages(launch, pages);
    opencl_arg_int(launch, (int32_t)parts->count);
    opencl_arg_int(launch, (int32_t)parts->entries);
    opencl_arg_long(launch, parts->count == 1 ? 0 : parts->rows * problem->q_heads * problem->dim_v);
    opencl_arg_long(launch, parts->count == 1 ? 0 : parts->rows * problem->q_heads);
}

enum { ARG_UNIT_FIRST = 9 };

/* The program for a job. */
struct forward_choice {
    const char *files, *kernel;
    struct forward_tile_shape shape;
    struct opencl_options options;
    int items; /* of a work-group */
    struct forward_parts parts;
};

static clattn_status choose_tile(clattn_context *context, const struct forward_job *job,
                                 const struct opencl_pages *pages, struct forward_choice *choice)
{
    const struct opencl_taste taste =
        opencl_taste_of(context, kernel_of(job), job->problem->dim, job->q->dtype);
    clattn_status status = CLATTN_SUCCESS;
    struct part_job part;
    choice->files = "attention_forward.cl";
    choice->kernel = "attention_forward";
    for (int shrink = 0; shrink <= SHRINK_MAX; shrink++) { /* the ladder of tiles */
        choice->shape = shape_fitting(&taste, job, shrink);
        choice->parts = parts_of(context, job, &choice->shape, pages);
        part_job_make(NULL, job, &choice->parts, &part);
        choice->options = options_of(&taste, choice->parts.count > 1 ? &part.job : job, &choice->shape, pages);
        choice->items = opencl_tile_items(&choice->shape.tile);
        status = opencl_kernel_try(context, choice->files, choice->kernel, choice->options.text);
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
    choice->parts = (struct forward_parts){.count = 1};
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
    return opencl_kernel_try(context, choice->files, choice->kernel, choice->options.text) == CLATTN_SUCCESS;
}

clattn_status opencl_forward(clattn_context *context, const struct forward_job *job)
{
    bool done = false;
    clattn_status status = nvidia_forward(context, job, &done);
    if (status || done) return status;
    status = opencl_check_lengths(context, job->problem);
    if (!status && opencl_dense_wanted(context, job)) {
        status = opencl_dense(context, job, &done);
        if (done) return status;
    }
    return status ? status : opencl_forward_portable(context, job, NULL);
}

static clattn_status forward_once(clattn_context *context, const struct forward_job *job,
                                  const struct opencl_pages *pages, bool *is_refused)
{
    const struct problem *problem = job->problem;
    struct forward_choice choice;
    struct part_job part;
    struct opencl_launch launch;
    clattn_status status = opencl_check_lengths(context, problem);
    *is_refused = false;
    if (!status && (pages || !choose_subgroup(context, job, &choice)))
        status = choose_tile(context, job, pages, &choice);
    if (status) return status;

    size_t bytes = (size_t)problem->count * OPENCL_SEQUENCE_FIELDS * sizeof(cl_long);
    cl_long *table = malloc(MAX(bytes, 1));
    if (!table)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a table of %lld sequences",
                    (long long)problem->count);
    opencl_launch_begin(context, job->sync, &launch);
    bool is_split = choice.parts.count > 1;
    if (is_split) part_job_make(&launch, job, &choice.parts, &part);
    const struct forward_job *own = is_split ? &part.job : job;
    int64_t units = units_fill(own, &choice.shape, pages, table) * choice.parts.count;
    if (units > 0) {
        opencl_launch_kernel(&launch, choice.files, choice.kernel, choice.options.text);
        set_arguments(&launch, own, pages, &choice.parts, opencl_launch_table(&launch, table, bytes));
        opencl_run_units(&launch, ARG_UNIT_FIRST, units,
                         unit_flops(job, &choice.shape) / (double)choice.parts.count, choice.items);
        if (is_split) run_merge(&launch, job, &choice.parts, &part);
    }
    free(table);
    *is_refused = launch.is_refused;
    return opencl_launch_end(&launch);
}

clattn_status opencl_forward_portable(clattn_context *context, const struct forward_job *job,
                                      const struct opencl_pages *pages)
{
    clattn_status status;
    bool is_refused;
    do /* the ladder goes on */
        status = forward_once(context, job, pages, &is_refused);
    while (is_refused);
    return status;
}
