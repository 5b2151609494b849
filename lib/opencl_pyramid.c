/* SPDX-License-Identifier: MIT */
/* Key pyramid on OpenCL: one launch a level; see cl/pyramid.cl, and cl/pyramid_bounds.cl for its bounds. */

#include "config.h"

#include "opencl_nvidia.h"

#include <stdlib.h>
#include <string.h>

enum { ITEMS = 64, ADDITIONS_MAX = 1 << 30 };

static const char PLAIN[] = "pyramid.cl", BOUNDED[] = "common.cl+pyramid.cl+pyramid_bounds.cl";

/* [levels][count][FIELDS]: a table for each level, whose units are its nodes of all sequences and heads; nodes
 * [levels]. */
static cl_long *level_tables(const struct pyramid_job *job, int levels, int64_t *nodes)
{
    const struct problem *problem = job->problem;
    const clattn_pyramid *pyramid = job->pyramid;
    size_t numbers = (size_t)problem->count * OPENCL_SEQUENCE_FIELDS;
    cl_long *tables = malloc(numbers * (size_t)levels * sizeof *tables);
    if (!tables) return NULL;
    opencl_table_fill(problem, &(struct tensors){.k = job->k}, pyramid, tables);
    for (int l = 1; l < levels; l++)
        memcpy(tables + (size_t)l * numbers, tables, numbers * sizeof *tables);
    for (int l = 0; l < levels; l++) {
        nodes[l] = 0;
        for (int64_t s = 0; s < problem->count; s++) {
            tables[((size_t)l * (size_t)problem->count + (size_t)s) * OPENCL_SEQUENCE_FIELDS +
                   OPENCL_SEQUENCE_UNIT] = nodes[l];
            nodes[l] += level_nodes(problem->sequences[s].kv_len, pyramid->leaf, l + 1) * problem->kv_heads;
        }
    }
    return tables;
}

/* Argument `first_arg` is the first node of a launch, the next one the number of all nodes. */
static void run_nodes(struct opencl_launch *launch, cl_uint first_arg, int64_t nodes, int64_t additions,
                      int dim)
{
    int64_t part = MAX(ADDITIONS_MAX / (additions * dim), 1);
    for (int64_t first = 0; first < nodes; first += part) {
        int64_t items = MIN(part, nodes - first) * dim;
        size_t local = ITEMS, global = (size_t)ceil_div(items, ITEMS) * ITEMS;
        opencl_arg_from(launch, first_arg);
        opencl_arg_long(launch, first);
        opencl_arg_long(launch, MIN(first + part, nodes));
        opencl_launch_run(launch, 1, &global, &local);
    }
}

/* Level 1: means and, where the pyramid has them, bounds and parts. */
static void run_leaf(struct opencl_launch *launch, const struct pyramid_job *job, cl_mem tables, int64_t nodes,
                     const char *options)
{
    const clattn_pyramid *pyramid = job->pyramid;
    bool bounded = pyramid_has_bounds(pyramid);
    if (bounded)
        opencl_launch_kernel(launch, BOUNDED, "bounds_leaf", options);
    else
        opencl_launch_kernel(launch, PLAIN, "pyramid_leaf", options);
    opencl_arg_tensor(launch, job->k);
    opencl_arg_storage(launch, &pyramid->means);
    if (bounded) {
        opencl_arg_storage(launch, &pyramid->bounds);
        opencl_arg_storage(launch, &pyramid->parts);
    }
    opencl_arg_mem(launch, tables);
    opencl_arg_int(launch, (int32_t)job->problem->count);
    opencl_arg_long(launch, job->k->len_stride);
    opencl_arg_long(launch, job->k->head_stride);
    run_nodes(launch, bounded ? 8 : 6, nodes, pyramid->leaf, pyramid->dim);
}

/* A level from the one below: its means, or its bounds. */
static void run_join(struct opencl_launch *launch, const struct pyramid_job *job, cl_mem tables, int level,
                     int64_t nodes, bool bounds, const char *options)
{
    opencl_launch_kernel(launch, pyramid_has_bounds(job->pyramid) ? BOUNDED : PLAIN,
                         bounds ? "bounds_join" : "pyramid_join", options);
    opencl_arg_storage(launch, bounds ? &job->pyramid->bounds : &job->pyramid->means);
    opencl_arg_mem(launch, tables);
    opencl_arg_int(launch, (int32_t)job->problem->count);
    opencl_arg_int(launch, level);
    run_nodes(launch, 4, nodes, bounds ? 4 : 2, job->pyramid->dim);
}

clattn_status opencl_pyramid_build(clattn_context *context, const struct pyramid_job *job)
{
    const clattn_pyramid *pyramid = job->pyramid;
    struct opencl_options options = {""};
    struct opencl_launch launch;
    int64_t nodes[64] = {0};
    int levels = level_count(job->problem->kv_len_max, pyramid->leaf);
    bool done = false;
    clattn_status status = nvidia_pyramid(context, job, &done);
    if (status || done) return status;
    status = opencl_check_lengths(context, job->problem);
    if (status) return status;
    opencl_launch_begin(context, job->sync, &launch);
    if (levels == 0) return opencl_launch_end(&launch); /* no keys */
    cl_long *tables = level_tables(job, levels, nodes);
    if (!tables && !launch.status)
        launch.status = fail(context, CLATTN_OUT_OF_MEMORY, "no memory for tables of %lld sequences",
                             (long long)job->problem->count);
    opencl_option(&options, "DTYPE", (int)job->k->dtype);
    opencl_option(&options, "DIM", pyramid->dim);
    opencl_option(&options, "LEAF", pyramid->leaf);
    opencl_option(&options, "ITEMS", ITEMS);
    cl_mem memory = opencl_launch_table(&launch, tables,
                                        (size_t)levels * (size_t)job->problem->count * OPENCL_SEQUENCE_FIELDS *
                                            sizeof *tables);
    run_leaf(&launch, job, memory, nodes[0], options.text);
    for (int level = 2; level <= levels; level++) {
        run_join(&launch, job, memory, level, nodes[level - 1], false, options.text);
        if (pyramid_has_bounds(pyramid))
            run_join(&launch, job, memory, level, nodes[level - 1], true, options.text);
    }
    free(tables);
    return opencl_launch_end(&launch);
}
