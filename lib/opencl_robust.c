/* SPDX-License-Identifier: MIT */
/* Robust selection on OpenCL: chooses the tile, builds, launches; see cl/select_robust.cl. */

#include "config.h"

#include "opencl_select.h"

#include <stdlib.h>

enum { ROWS_MAX = 32, KEYS_MAX = 64, KEYS_MIN = 8, SHRINK_MAX = 4, ARG_UNIT_FIRST = 10 };

static const char FILES[] = "common.cl+select_query.cl+select_robust.cl";

/* How one job is run. */
struct plan {
    struct opencl_tile tile;
    int capacity;     /* nodes kept, at most */
    bool heads_local; /* the scores of the heads are in local memory */
};

/* Few capacities, so that few programs are built. */
static int capacity_of(const clattn_select_desc *select)
{
    int most = MAX(select->beam, select->topk);
    return most <= 32 ? 32 : most <= 64 ? 64 : CLATTN_TOPK_MAX;
}

static size_t heads_bytes(const struct select_job *job, int capacity)
{
    return (size_t)job->problem->group * 2 * (size_t)capacity * sizeof(float);
}

/* Local memory of the kernel. */
static size_t local_bytes(const struct opencl_taste *taste, const struct select_job *job,
                          const struct plan *plan)
{
    const struct opencl_tile *tile = &plan->tile;
    size_t columns = (size_t)((job->problem->dim + 3) / 4 * 4), pad = (size_t)taste->pad;
    size_t rows = (size_t)tile->rows, keys = (size_t)tile->keys;
    size_t work = MAX(keys / 2, 2 * keys / (size_t)tile->item_keys);
    size_t floats = columns * rows + keys * (columns + pad) + work * rows + 2 * (size_t)job->problem->group;
    size_t alignment = 128; /* gaps of the struct */
    return floats * sizeof(float) + (size_t)plan->capacity * 34 + alignment +
           (plan->heads_local ? heads_bytes(job, plan->capacity) : 0);
}

/* The largest tile whose local memory fits; `shrink` halves its rows and keys in turn. */
static struct plan plan_fitting(const struct opencl_taste *taste, const struct select_job *job, int shrink)
{
    int group = job->problem->group, most = MAX(opencl_limit(taste->rows, ROWS_MAX) >> shrink / 2, 1);
    int keys = MAX(MIN(job->select->leaf, opencl_limit(taste->keys, KEYS_MAX)) >> (shrink + 1) / 2, KEYS_MIN);
    struct plan plan = {.capacity = capacity_of(job->select)};
    plan.heads_local = heads_bytes(job, plan.capacity) <= taste->local_bytes / 4;
    for (;;) {
        int rounds = (group + most - 1) / most;
        plan.tile = opencl_tile_of(taste, (group + rounds - 1) / rounds, keys);
        while (opencl_tile_items(&plan.tile) > taste->items && plan.tile.item_keys < keys)
            plan.tile.item_keys *= 2;
        if (local_bytes(taste, job, &plan) <= taste->local_bytes) return plan;
        if (keys > 16 || (most <= 1 && keys > KEYS_MIN)) {
            keys /= 2;
        } else if (plan.heads_local) {
            plan.heads_local = false;
        } else if (most > 1) {
            most /= 2;
        } else {
            return plan;
        }
    }
}

static double unit_flops(const struct select_job *job)
{
    const clattn_select_desc *select = job->select;
    double leaves = (double)ceil_div(job->problem->kv_len_max, select->leaf);
    double reached = MIN(leaves, 2.0 * MAX(select->beam, select->topk));
    double exact = select->prefilter > 0 ? MIN(reached, MAX(select->prefilter, select->topk)) : reached;
    int levels = level_count(job->problem->kv_len_max, select->leaf);
    double dots = reached * 4 * levels + reached * 2 * LEAF_PARTS + exact * select->leaf;
    return 2.0 * job->problem->dim * job->problem->group * dots;
}

static void set_arguments(struct opencl_launch *launch, const struct select_job *job,
                          const struct opencl_pages *pages, cl_mem scratch, cl_mem table)
{
    const clattn_select_desc *select = job->select;
    opencl_arg_tensor(launch, job->q);
    opencl_arg_tensor(launch, job->k);
    opencl_arg_storage(launch, &job->pyramid->means);
    opencl_arg_storage(launch, &job->pyramid->bounds);
    opencl_arg_storage(launch, &job->pyramid->parts);
    opencl_arg_mem(launch, scratch);
    select_arg_query(launch, job, table);
    opencl_arg_int(launch, MAX(select->beam, select->topk));
    opencl_arg_int(launch, select->prefilter > 0 ? MAX(select->prefilter, select->topk) : 0);
    opencl_arg_int(launch, select->parts);
    opencl_arg_int(launch, (int32_t)select->score);
    opencl_arg_int(launch, select->vote);
    if (!pages) return;
    const struct cache_layout *layout = &pages->cache->layout;
    opencl_arg_pages(launch, pages); /* CACHE_ARGUMENTS, STATISTICS_ARGUMENTS */
    opencl_arg_long(launch, (int64_t)(layout->means / sizeof(float)));
    opencl_arg_long(launch, (int64_t)(layout->bounds / sizeof(float)));
    opencl_arg_long(launch, (int64_t)(layout->parts / sizeof(float)));
    opencl_arg_int(launch, (int32_t)pages->cache->leaves);
    select_arg_scales(launch, job);
}

/* The plan of the ladder that the device can run. */
static clattn_status plan_find(clattn_context *context, const struct select_job *job,
                               const struct opencl_pages *pages, struct plan *plan,
                               struct opencl_options *options)
{
    const struct opencl_taste taste =
        opencl_taste_of(context, TUNING_SELECT, job->problem->dim, job->q->dtype);
    clattn_status status = CLATTN_DEVICE_LIMIT;
    for (int shrink = 0; status == CLATTN_DEVICE_LIMIT && shrink <= SHRINK_MAX; shrink++) {
        *plan = plan_fitting(&taste, job, shrink);
        *options = select_options(&taste, job, plan->capacity, &plan->tile, pages);
        opencl_option(options, "HEADS_LOCAL", plan->heads_local);
        status = opencl_kernel_try(context, FILES, "select_robust", options->text);
    }
    return status;
}

enum { SCRATCH_UNITS = 4096 }; /* work-groups of a launch with scores in global memory */

static clattn_status robust_once(clattn_context *context, const struct select_job *job,
                                 const struct opencl_pages *pages, bool *is_refused)
{
    const struct problem *problem = job->problem;
    struct plan plan;
    struct opencl_options options;
    struct opencl_launch launch;
    clattn_status status = opencl_check_lengths(context, problem);
    *is_refused = false;
    if (!status) status = plan_find(context, job, pages, &plan, &options);
    if (status) return status;
    size_t bytes;
    int64_t units;
    cl_long *table = select_table(job, pages, &bytes, &units);
    if (!table)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a table of %lld sequences",
                    (long long)problem->count);
    int64_t most = plan.heads_local ? units : MIN(units, SCRATCH_UNITS);
    opencl_launch_begin(context, job->sync, &launch);
    if (units > 0) {
        cl_mem scratch = plan.heads_local
                             ? NULL
                             : opencl_launch_temporary(&launch, (size_t)most * heads_bytes(job, plan.capacity));
        opencl_launch_kernel(&launch, FILES, "select_robust", options.text);
        set_arguments(&launch, job, pages, scratch, opencl_launch_table(&launch, table, bytes));
        opencl_run_units_most(&launch, ARG_UNIT_FIRST, units, most, unit_flops(job),
                              opencl_tile_items(&plan.tile));
    }
    free(table);
    *is_refused = launch.is_refused;
    return opencl_launch_end(&launch);
}

clattn_status opencl_robust(clattn_context *context, const struct select_job *job,
                            const struct opencl_pages *pages)
{
    clattn_status status;
    bool is_refused;
    do /* the ladder goes on */
        status = robust_once(context, job, pages, &is_refused);
    while (is_refused);
    return status;
}
