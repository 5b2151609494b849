/* SPDX-License-Identifier: MIT */
/* Gradients of keys, values and biases on OpenCL: chooses the tile, builds, launches; see
 * cl/attention_backward_kv.cl. */

#include "config.h"

#include "opencl_backward.h"

#include "key_blocks.h"

#include <stdlib.h>

enum { KEYS_MAX = 32, PAIRS_MAX = 32, SHRINK_MAX = 4 };
static const char *const kv_file = "attention_backward_kv.cl";

/* Rows give to blocks that they do not list, which there are with lists only. */
static bool has_compensation(const struct backward_job *job)
{
    return job->compensation != 0 && job->dk && job->blocks;
}

static size_t local_bytes(const struct backward_run *run, const struct backward_tile *shape)
{
    const struct problem *problem = run->job->problem;
    int keys = shape->tile.rows, pairs = shape->tile.keys, groups = pairs / shape->tile.item_keys;
    int dim = (problem->dim + 3) / 4 * 4, dim_v = (problem->dim_v + 3) / 4 * 4;
    int k = MAX(dim, groups * shape->columns), v = MAX(dim_v, groups * shape->columns_v);
    size_t floats = (size_t)(keys * (k + v)) + (size_t)(pairs * (dim + dim_v + 2 * run->taste.pad)) +
                    (size_t)(2 * pairs * keys) + (size_t)(pairs * 9 + 1);
    if (run->job->dbias) floats += (size_t)(pairs * (keys / shape->tile.lanes + 1) + problem->group);
    if (run->job->blocks && run->job->blocks->mask) floats += (size_t)(3 * keys + 7 * pairs);
    return floats * sizeof(float);
}

/* The tile for at most so many keys and pairs. */
static struct backward_tile tile_for(const struct backward_run *run, int keys, int pairs)
{
    const struct problem *problem = run->job->problem;
    const struct opencl_taste *taste = &run->taste;
    struct backward_tile shape = {.tile = opencl_tile_of(taste, keys, pairs)};
    int dim = MAX(problem->dim, problem->dim_v);
    while (backward_item_columns(&shape.tile, dim) > taste->item_dims && shape.tile.item_keys > 1 &&
           2 * opencl_tile_items(&shape.tile) <= taste->items)
        shape.tile.item_keys /= 2;
    opencl_tile_limit(&shape.tile, taste);
    shape.columns = backward_item_columns(&shape.tile, problem->dim);
    shape.columns_v = backward_item_columns(&shape.tile, problem->dim_v);
    opencl_tile_narrow(&shape.tile, taste, shape.columns + shape.columns_v);
    return shape;
}

/* An item's sums do not fit into registers: twice as many items share them, with half the keys and twice the
 * pairs, if local memory has room. That is more of it than a tile takes otherwise, but spilled sums cost more.
 */
static struct backward_tile tile_wider(const struct backward_run *run, const struct backward_tile *shape)
{
    enum { LOCAL_MOST = 48 * 1024 };
    struct backward_tile wider = tile_for(run, MAX(shape->tile.rows / 2, 1), 2 * shape->tile.keys);
    size_t room = (size_t)MIN(opencl_of(run->context)->device.local_bytes, LOCAL_MOST);
    return local_bytes(run, &wider) <= room ? wider : *shape;
}

/* The largest tile whose local memory fits; `shrink` halves its pairs and keys in turn. */
static struct backward_tile tile_fitting(const struct backward_run *run, int shrink)
{
    int pairs = opencl_limit(run->taste.keys, PAIRS_MAX) >> (shrink + 1) / 2;
    int keys = MIN(opencl_limit(run->taste.rows, KEYS_MAX), run->lists.block) >> shrink / 2;
    struct backward_tile shape = tile_for(run, keys, pairs);
    while (local_bytes(run, &shape) > run->taste.local_bytes && (keys > 4 || pairs > 8)) {
        if (pairs > 16 || keys <= 4)
            pairs /= 2;
        else
            keys /= 2;
        shape = tile_for(run, keys, pairs);
    }
    return shape.tile.lanes == 1 && shape.columns + shape.columns_v > run->taste.sums ? tile_wider(run, &shape)
                                                                                      : shape;
}

clattn_status backward_kv_prepare(struct backward_run *run)
{
    clattn_status status = CLATTN_SUCCESS;
    run->taste = opencl_taste_of(run->context, TUNING_BACKWARD_KV, run->job->problem->dim, run->job->q->dtype);
    for (int shrink = 0; shrink <= SHRINK_MAX; shrink++) { /* the ladder of tiles */
        struct backward_tile *shape = &run->kv_tile;
        *shape = tile_fitting(run, shrink);
        run->kv_options = (struct opencl_options){""};
        backward_tile_options(&run->kv_options, run, shape);
        opencl_option(&run->kv_options, "DK_DTYPE", (int)(run->job->dk ? run->job->dk->dtype : CLATTN_FLOAT32));
        opencl_option(&run->kv_options, "DV_DTYPE", (int)(run->job->dv ? run->job->dv->dtype : CLATTN_FLOAT32));
        opencl_option(&run->kv_options, "ITEM_COLUMNS", shape->columns);
        opencl_option(&run->kv_options, "ITEM_COLUMNS_V", shape->columns_v);
        opencl_option(&run->kv_options, "LIST_GROUP", run->lists.list_group);
        opencl_option(&run->kv_options, "LIST_KV", run->lists.list_kv);
        opencl_option(&run->kv_options, "DBIAS", run->job->dbias != NULL);
        opencl_option(&run->kv_options, "COMPENSATION", has_compensation(run->job));
        status = opencl_kernel_try(run->context, kv_file, "attention_backward_kv", run->kv_options.text);
        if (status != CLATTN_DEVICE_LIMIT) break;
    }
    return status;
}

/* ---- launches ---- */

/* How bins are cut. */
struct cuts {
    int64_t segment, slots;
    double unit_flops;
};

/* Partial sums may cost 6 bytes an entry. */
static struct cuts cuts_of(const struct backward_run *run)
{
    const struct problem *problem = run->job->problem;
    const clattn_blocks *blocks = run->job->blocks;
    int64_t bytes = (int64_t)run->lists.block * (problem->dim + problem->dim_v) * (int64_t)sizeof(float);
    int64_t entries =
        blocks ? blocks->rows * blocks->heads * blocks->topk : run->lists.bins * problem->q_len_max;
    struct cuts cuts = {.segment = MAX(ceil_div(bytes * run->lists.list_kv, 6), 64)};
    cuts.slots = entries / cuts.segment;
    if (blocks && blocks->starts) {
        cuts.segment = INT64_C(1) << 40;
        cuts.slots = 0;
    }
    double pairs =
        (double)entries * problem->q_block * problem->group / run->lists.list_group * run->lists.list_kv;
    double units = (double)MAX((run->lists.bins + cuts.slots) * run->lists.list_kv, 1);
    if (has_compensation(run->job)) /* up to what dense attention costs */
        pairs = MAX(pairs,
                    (double)run->lists.bins * run->lists.list_kv * (double)problem->q_len_max * problem->group);
    cuts.unit_flops = 4.0 * (problem->dim + problem->dim_v) * pairs / units * run->kv_tile.tile.rows;
    return cuts;
}

/* First tile, first key and the key after the last one of each bin, and the number of tiles; with boundaries of
 * the caller. Bins are numbered as in table_fill (opencl_backward.c). */
static cl_mem bin_table(struct backward_run *run, int64_t *tiles)
{
    const struct problem *problem = run->job->problem;
    const struct backward_lists *lists = &run->lists;
    cl_long *table = malloc((size_t)(3 * lists->bins + 1) * sizeof *table), *to = table;
    *tiles = 0;
    if (!table) {
        run->launch.status = fail(run->context, CLATTN_OUT_OF_MEMORY,
                                  "no memory for a table of %lld key blocks", (long long)lists->bins);
        return NULL;
    }
    for (int64_t s = 0; s < problem->count; s++) {
        const struct key_blocks keys = key_blocks_listed(run->job->blocks, &problem->sequences[s]);
        for (int h = 0; h < lists->list_heads / lists->list_group; h++)
            for (int64_t b = 0; b < keys.count; b++, to += 3) {
                to[0] = *tiles;
                to[1] = key_block_first(&keys, b);
                to[2] = key_block_end(&keys, b);
                *tiles += ceil_div(to[2] - to[1], run->kv_tile.tile.rows);
            }
    }
    cl_mem mem = opencl_launch_table(&run->launch, table, (size_t)(3 * lists->bins + 1) * sizeof *table);
    free(table);
    return mem;
}

/* Arguments that all kernels of the file have: from `sequences` on. */
static void arg_bins(struct backward_run *run, const struct backward_bins *bins, const struct cuts *cuts)
{
    struct opencl_launch *launch = &run->launch;
    opencl_arg_int(launch, (int32_t)run->job->problem->count);
    opencl_arg_long(launch, 0); /* the first unit */
    opencl_arg_long(launch, run->lists.bins);
    opencl_arg_long(launch, bins->chunks);
    opencl_arg_long(launch, bins->virtual_rows);
    opencl_arg_long(launch, cuts->segment);
}

static void run_kv(struct backward_run *run, const struct backward_bins *bins, const struct cuts *cuts,
                   cl_mem partial, cl_mem bias_part, cl_mem table, int64_t units)
{
    enum { ARG_UNIT_FIRST = 20 };
    const struct backward_job *job = run->job;
    const struct problem *problem = job->problem;
    const clattn_blocks *blocks = job->blocks;
    const struct element_mask *mask = blocks ? blocks->mask : NULL;
    struct opencl_launch *launch = &run->launch;
    const clattn_tensor *const inputs[] = {job->q, job->k, job->v, job->dout, job->lse};
    opencl_launch_kernel(launch, kv_file, "attention_backward_kv", run->kv_options.text);
    for (int i = 0; i < 5; i++)
        opencl_arg_tensor(launch, inputs[i]);
    opencl_arg_mem(launch, run->delta);
    opencl_arg_tensor(launch, job->dk);
    opencl_arg_tensor(launch, job->dv);
    opencl_arg_mem(launch, partial);
    opencl_arg_mem(launch, bins->starts);
    opencl_arg_mem(launch, bins->entries);
    opencl_arg_mem(launch, run->table);
    opencl_arg_tensor(launch, problem->options.bias);
    opencl_arg_mem(launch, bias_part);
    opencl_arg_storage(launch, blocks ? &blocks->indices : NULL);
    opencl_arg_storage(launch, mask ? &mask->cut : NULL);
    opencl_arg_storage(launch, mask ? &mask->window : NULL);
    opencl_arg_storage(launch, mask ? &mask->coordinate : NULL);
    opencl_arg_mem(launch, table);
    arg_bins(run, bins, cuts);
    opencl_arg_float(launch, problem->scale);
    opencl_arg_float(launch, problem->options.softcap);
    opencl_arg_long(launch, problem->options.window);
    opencl_arg_int(launch, problem->causal);
    opencl_arg_int(launch, job->accumulate);
    opencl_arg_int(launch, blocks != NULL);
    opencl_arg_int(launch, job->dk != NULL); /* else dbias only */
    opencl_arg_int(launch, problem->q_block);
    opencl_arg_int(launch, blocks ? blocks->topk : 1);
    opencl_arg_int(launch, problem->kv_heads);
    opencl_arg_int(launch, blocks ? blocks->heads : 1);
    opencl_arg_float(launch, job->compensation);
    opencl_run_units(launch, ARG_UNIT_FIRST, units, cuts->unit_flops, opencl_tile_items(&run->kv_tile.tile));
}

static void run_merge(struct backward_run *run, const struct backward_bins *bins, const struct cuts *cuts,
                      cl_mem partial)
{
    enum { ARG_UNIT_FIRST = 6 };
    const struct backward_job *job = run->job;
    struct opencl_launch *launch = &run->launch;
    opencl_launch_kernel(launch, kv_file, "attention_backward_merge", run->kv_options.text);
    opencl_arg_mem(launch, partial);
    opencl_arg_tensor(launch, job->dk);
    opencl_arg_tensor(launch, job->dv);
    opencl_arg_mem(launch, bins->starts);
    opencl_arg_mem(launch, run->table);
    arg_bins(run, bins, cuts);
    opencl_arg_int(launch, job->accumulate);
    opencl_arg_int(launch, job->blocks != NULL);
    opencl_run_units(launch, ARG_UNIT_FIRST, run->lists.bins * run->lists.list_kv,
                     (double)run->lists.block * (job->problem->dim + job->problem->dim_v),
                     opencl_tile_items(&run->kv_tile.tile));
}

static void run_bias(struct backward_run *run, const struct backward_bins *bins, const struct cuts *cuts,
                     cl_mem bias_part, cl_mem table)
{
    enum { ARG_UNIT_FIRST = 6 };
    const struct backward_job *job = run->job;
    const clattn_tensor *dbias = job->dbias;
    struct opencl_launch *launch = &run->launch;
    int items = opencl_tile_items(&run->kv_tile.tile);
    opencl_launch_kernel(launch, kv_file, "attention_backward_bias", run->kv_options.text);
    opencl_arg_mem(launch, bias_part);
    opencl_arg_tensor(launch, dbias);
    opencl_arg_mem(launch, bins->starts);
    opencl_arg_mem(launch, table);
    opencl_arg_mem(launch, run->table);
    arg_bins(run, bins, cuts);
    opencl_arg_int(launch, job->accumulate);
    opencl_arg_int(launch, job->blocks != NULL);
    opencl_arg_int(launch, job->problem->q_heads);
    opencl_arg_long(launch, dbias->len);
    opencl_arg_long(launch, dbias->batch);
    opencl_arg_strides(launch, dbias);
    opencl_run_units(launch, ARG_UNIT_FIRST, ceil_div(dbias->batch * dbias->len * dbias->heads, items),
                     (double)items * (double)job->problem->count * 100, items);
}

void backward_kv_run(struct backward_run *run)
{
    const struct backward_job *job = run->job;
    const struct problem *problem = job->problem;
    struct opencl_launch *launch = &run->launch;
    struct backward_bins bins = {.virtual_rows = problem->q_len_max};
    struct cuts cuts = cuts_of(run);
    if (job->blocks) bins = backward_inverse(run);
    int64_t pieces = (run->lists.bins + cuts.slots) * run->lists.list_kv;
    int64_t units = pieces * (run->lists.block / run->kv_tile.tile.rows), tiles;
    int64_t floats = (int64_t)run->lists.block * (problem->dim + problem->dim_v);
    cl_mem partial = NULL, bias_part = NULL, table = NULL;
    if (job->blocks && job->blocks->starts) {
        table = bin_table(run, &tiles);
        units = tiles * run->lists.list_kv;
    }
    if (cuts.slots)
        partial =
            opencl_launch_temporary(launch, (size_t)(cuts.slots * run->lists.list_kv * floats) * sizeof(float));
    if (job->dbias)
        bias_part = opencl_launch_temporary(launch, (size_t)(units * problem->group) * sizeof(float));
    run_kv(run, &bins, &cuts, partial, bias_part, table, units);
    launch->is_final = job->accumulate;
    if (cuts.slots && job->dk) run_merge(run, &bins, &cuts, partial);
    if (job->dbias) run_bias(run, &bins, &cuts, bias_part, table);
}
