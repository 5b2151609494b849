/* SPDX-License-Identifier: MIT */
/* Selection on OpenCL: chooses the tile, builds, launches; see cl/select.cl. */

#include "config.h"

#include "opencl_nvidia.h"
#include "opencl_select.h"
#include "opencl_subgroup.h"

#include <stdlib.h>

enum { ROWS_MAX = 32, KEYS_MAX = 64, SHRINK_MAX = 4, ARG_UNIT_FIRST = 7 };

static const char FILES[] = "common.cl+select_query.cl+select.cl";

/* Capacities of the candidate lists: few, so that few programs are built. */
static int capacity_of(int topk)
{
    return topk <= 16 ? 16 : topk <= 64 ? 64 : CLATTN_TOPK_MAX;
}

/* Local memory of the kernel. */
static size_t local_bytes(const struct opencl_taste *taste, const struct select_job *job,
                          const struct opencl_tile *tile)
{
    size_t columns = (size_t)((job->problem->dim + 3) / 4 * 4), pad = (size_t)taste->pad;
    size_t rows = (size_t)tile->rows, keys = (size_t)tile->keys,
           capacity = (size_t)capacity_of(job->select->topk);
    size_t floats = columns * rows + keys * (columns + pad) + 2 * rows * (keys / (size_t)tile->item_keys) +
                    keys * rows / (size_t)tile->lanes;
    return floats * sizeof(float) + capacity * 32;
}

/* The largest tile whose local memory fits; `shrink` halves its rows and keys in turn. */
static struct opencl_tile tile_fitting(const struct opencl_taste *taste, const struct select_job *job,
                                       int shrink)
{
    int group = job->problem->group, most = MAX(opencl_limit(taste->rows, ROWS_MAX) >> shrink / 2, 1);
    int keys = MAX(MIN(job->select->leaf, opencl_limit(taste->keys, KEYS_MAX)) >> (shrink + 1) / 2, 8);
    for (;;) {
        int rounds = (group + most - 1) / most;
        struct opencl_tile tile = opencl_tile_of(taste, (group + rounds - 1) / rounds, keys);
        while (opencl_tile_items(&tile) > taste->items && tile.item_keys < keys)
            tile.item_keys *= 2;
        if (local_bytes(taste, job, &tile) <= taste->local_bytes || (keys <= 8 && most <= 1)) return tile;
        if (keys > 16 || most <= 1)
            keys /= 2;
        else
            most /= 2;
    }
}

struct opencl_options select_options(const struct opencl_taste *taste, const struct select_job *job, int capacity,
                                     const struct opencl_tile *tile, const struct opencl_pages *pages)
{
    struct opencl_options options = {""};
    opencl_option(&options, "DTYPE", (int)job->q->dtype);
    opencl_option(&options, "DIM", job->problem->dim);
    opencl_option(&options, "GROUP", job->problem->group);
    opencl_option(&options, "SELECTOR", (int)job->select->selector);
    opencl_option(&options, "LEAF", job->select->leaf);
    opencl_option(&options, "CAPACITY", capacity);
    opencl_tile_option(&options, tile);
    opencl_option(&options, "LOAD_K", opencl_load_width(taste, job->problem->dim));
    opencl_option(&options, "PAD", taste->pad);
    if (pages) opencl_option(&options, "CACHE", 1);
    if (pages && job->problem->options.k_scale) opencl_option(&options, "INT8", 1);
    return options;
}

cl_long *select_table(const struct select_job *job, const struct opencl_pages *pages, size_t *bytes,
                      int64_t *units)
{
    const struct problem *problem = job->problem;
    *bytes = (size_t)problem->count * OPENCL_SEQUENCE_FIELDS * sizeof(cl_long);
    *units = 0;
    cl_long *table = malloc(MAX(*bytes, 1));
    if (!table) return NULL;
    opencl_table_fill(problem, &(struct tensors){.q = job->q, .k = job->k}, job->pyramid, table);
    opencl_table_pages(pages, problem->count, table);
    for (int64_t s = 0; s < problem->count; s++) {
        table[s * OPENCL_SEQUENCE_FIELDS + OPENCL_SEQUENCE_UNIT] = *units;
        *units += problem->sequences[s].q_len * problem->kv_heads;
    }
    return table;
}

static double unit_flops(const struct select_job *job)
{
    const clattn_select_desc *select = job->select;
    double leaves = (double)ceil_div(job->problem->kv_len_max, select->leaf), dots;
    if (select->selector == CLATTN_SELECT_FLAT_MEAN)
        dots = leaves;
    else if (select->selector == CLATTN_SELECT_FLAT_LSE)
        dots = leaves * select->leaf;
    else /* exact scores of the leaves, and at most 32 levels above them */
        dots = MIN(leaves, 2.0 * select->topk) * (select->leaf + 2 * 32);
    return 2.0 * job->problem->dim * job->problem->group * dots;
}

void select_arg_query(struct opencl_launch *launch, const struct select_job *job, cl_mem table)
{
    const struct problem *problem = job->problem;
    const clattn_select_desc *select = job->select;
    opencl_arg_storage(launch, &job->blocks->indices);
    opencl_arg_storage(launch, &job->blocks->counts);
    opencl_arg_mem(launch, table);
    opencl_arg_int(launch, (int32_t)problem->count);
    opencl_arg_long(launch, 0);
    opencl_arg_long(launch, job->q->len_stride);
    opencl_arg_long(launch, job->q->head_stride);
    opencl_arg_long(launch, job->k->len_stride);
    opencl_arg_long(launch, job->k->head_stride);
    opencl_arg_float(launch, problem->scale);
    opencl_arg_int(launch, problem->causal);
    opencl_arg_int(launch, select->topk);
    /* More than topk cannot be kept. */
    opencl_arg_int(launch, MIN(select->forced_first, select->topk));
    opencl_arg_int(launch, MIN(select->forced_last, select->topk));
    opencl_arg_int(launch, problem->kv_heads);
}

void select_arg_scales(struct opencl_launch *launch, const struct select_job *job)
{
    const clattn_tensor *scale = job->problem->options.k_scale;
    if (!scale) return;
    opencl_arg_tensor(launch, scale);
    opencl_arg_long(launch, scale->offset);
    opencl_arg_long(launch, scale->head_stride);
}

static void set_arguments(struct opencl_launch *launch, const struct select_job *job,
                          const struct opencl_pages *pages, cl_mem table)
{
    opencl_arg_tensor(launch, job->q);
    opencl_arg_tensor(launch, job->k);
    opencl_arg_storage(launch, job->pyramid ? &job->pyramid->means : NULL);
    select_arg_query(launch, job, table);
    if (!pages) return;
    opencl_arg_pages(launch, pages); /* CACHE_ARGUMENTS, ROOM_ARGUMENTS */
    opencl_arg_long(launch, (int64_t)(pages->cache->layout.means / sizeof(float)));
    opencl_arg_int(launch, (int32_t)pages->cache->leaves);
    select_arg_scales(launch, job);
}

/* The program for a job. */
struct select_choice {
    const char *files, *kernel;
    struct opencl_options options;
    int items; /* of a work-group */
};

static clattn_status choose_tile(clattn_context *context, const struct select_job *job,
                                 const struct opencl_pages *pages, struct select_choice *choice)
{
    const struct opencl_taste taste = opencl_taste_of(context, TUNING_SELECT, job->problem->dim, job->q->dtype);
    clattn_status status = CLATTN_SUCCESS;
    choice->files = FILES;
    choice->kernel = "select_leaves";
    for (int shrink = 0; shrink <= SHRINK_MAX; shrink++) { /* the ladder of tiles */
        const struct opencl_tile tile = tile_fitting(&taste, job, shrink);
        choice->options = select_options(&taste, job, capacity_of(job->select->topk), &tile, pages);
        choice->items = opencl_tile_items(&tile);
        status = opencl_kernel_try(context, choice->files, choice->kernel, choice->options.text);
        if (status != CLATTN_DEVICE_LIMIT) break;
    }
    return status;
}

/* A subgroup a query token, down the pyramid. */
static bool choose_subgroup(clattn_context *context, const struct select_job *job, struct select_choice *choice)
{
    const struct problem *problem = job->problem;
    const struct opencl *state = opencl_of(context);
    int heads = MIN(problem->group, 4), capacity = capacity_of(job->select->topk);
    int64_t bytes = ceil_div(problem->group, heads) * heads * problem->dim * 4 + (int64_t)capacity * 24;
    if (!state->subgroup.kind || job->select->selector > CLATTN_SELECT_PISA2 ||
        bytes > (int64_t)MIN(state->device.local_bytes, 24 * 1024))
        return false;
    choice->files = SUBGROUP_FILES "select_subgroup.cl";
    choice->kernel = "select_subgroup";
    choice->items = state->subgroup.size;
    choice->options = (struct opencl_options){""};
    subgroup_options(&choice->options, &state->subgroup);
    opencl_option(&choice->options, "DTYPE", (int)job->q->dtype);
    opencl_option(&choice->options, "DIM", problem->dim);
    opencl_option(&choice->options, "GROUP", problem->group);
    opencl_option(&choice->options, "HEADS", heads);
    opencl_option(&choice->options, "SELECTOR", (int)job->select->selector);
    opencl_option(&choice->options, "LEAF", job->select->leaf);
    opencl_option(&choice->options, "CAPACITY", capacity);
    opencl_option(&choice->options, "LOAD_K", subgroup_load(&state->subgroup, problem->dim));
    return opencl_kernel_try(context, choice->files, choice->kernel, choice->options.text) == CLATTN_SUCCESS;
}

clattn_status opencl_select(clattn_context *context, const struct select_job *job)
{
    bool done = false;
    clattn_status status = nvidia_select(context, job, &done);
    if (!status && !done) status = nvidia_flat(context, job, &done);
    if (status || done) return status;
    status = opencl_check_lengths(context, job->problem);
    if (!status && opencl_flat_wanted(context, job)) {
        status = opencl_flat(context, job, &done);
        if (done) return status;
    }
    return status ? status : opencl_select_portable(context, job, NULL);
}

static clattn_status select_once(clattn_context *context, const struct select_job *job,
                                 const struct opencl_pages *pages, bool *is_refused)
{
    const struct problem *problem = job->problem;
    struct select_choice choice;
    struct opencl_launch launch;
    clattn_status status = opencl_check_lengths(context, problem);
    *is_refused = false;
    if (!status && (pages || !choose_subgroup(context, job, &choice)))
        status = choose_tile(context, job, pages, &choice);
    if (status) return status;

    size_t bytes;
    int64_t units;
    cl_long *table = select_table(job, pages, &bytes, &units);
    if (!table)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a table of %lld sequences",
                    (long long)problem->count);
    opencl_launch_begin(context, job->sync, &launch);
    if (units > 0) {
        opencl_launch_kernel(&launch, choice.files, choice.kernel, choice.options.text);
        set_arguments(&launch, job, pages, opencl_launch_table(&launch, table, bytes));
        opencl_run_units(&launch, ARG_UNIT_FIRST, units, unit_flops(job), choice.items);
    }
    free(table);
    *is_refused = launch.is_refused;
    return opencl_launch_end(&launch);
}

clattn_status opencl_select_portable(clattn_context *context, const struct select_job *job,
                                     const struct opencl_pages *pages)
{
    clattn_status status;
    bool is_refused;
    if (job->select->selector == CLATTN_SELECT_ROBUST) return opencl_robust(context, job, pages);
    do /* the ladder goes on */
        status = select_once(context, job, pages, &is_refused);
    while (is_refused);
    return status;
}
