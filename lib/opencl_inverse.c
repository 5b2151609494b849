/* SPDX-License-Identifier: MIT */
/* Inverts block lists on the device; see cl/inverse.cl.
 *
 * Memory: 4 bytes an entry, and 4 bytes a bin and chunk, of which there are at most one for two entries (but at
 * least one a bin). */

#include "config.h"

#include "opencl_backward.h"

enum { INVERSE_ITEMS = 32, SCAN_EACH = 16, CHUNKS_MAX = 4096 };

static const char *const inverse_file = "inverse.cl";

/* count elements in parts of a work-group each. */
static void run_parts(struct opencl_launch *launch, int64_t count)
{
    int64_t units = ceil_div(count, INVERSE_ITEMS * SCAN_EACH);
    opencl_run_units(launch, 1, units, INVERSE_ITEMS * SCAN_EACH, INVERSE_ITEMS);
}

static void clear(struct opencl_launch *launch, const char *options, cl_mem starts, int64_t count)
{
    opencl_launch_kernel(launch, inverse_file, "inverse_clear", options);
    opencl_arg_mem(launch, starts);
    opencl_arg_long(launch, 0);
    opencl_arg_long(launch, count);
    run_parts(launch, count);
}

static void visit(struct backward_run *run, const char *name, const char *options,
                  const struct backward_bins *bins, int64_t chunk_rows)
{
    const clattn_blocks *blocks = run->job->blocks;
    struct opencl_launch *launch = &run->launch;
    opencl_launch_kernel(launch, inverse_file, name, options);
    opencl_arg_storage(launch, &blocks->indices);
    opencl_arg_storage(launch, &blocks->counts);
    opencl_arg_mem(launch, run->table);
    opencl_arg_mem(launch, bins->starts);
    opencl_arg_mem(launch, bins->entries);
    opencl_arg_int(launch, (int32_t)run->job->problem->count);
    opencl_arg_long(launch, 0); /* the first unit */
    opencl_arg_long(launch, bins->chunks);
    opencl_arg_long(launch, chunk_rows);
    opencl_arg_long(launch, blocks->rows);
    opencl_arg_int(launch, blocks->heads);
    opencl_arg_int(launch, blocks->topk);
    opencl_arg_int(launch, blocks->q_block);
    opencl_arg_int(launch, run->lists.list_group);
    /* 1000: an entry costs about as much as so many operations of attention */
    double flops = 1000.0 * (double)chunk_rows * blocks->heads * blocks->topk;
    opencl_run_units(launch, 6, bins->chunks, flops, INVERSE_ITEMS);
}

static void scan(struct opencl_launch *launch, const char *options, cl_mem starts, cl_mem sums, int64_t count)
{
    static const char *const names[] = {"inverse_scan_parts", "inverse_scan_sums", "inverse_scan_add"};
    for (int step = 0; step < 3; step++) {
        opencl_launch_kernel(launch, inverse_file, names[step], options);
        if (step != 1) opencl_arg_mem(launch, starts);
        opencl_arg_mem(launch, sums);
        opencl_arg_long(launch, 0);
        opencl_arg_long(launch, step == 1 ? ceil_div(count, INVERSE_ITEMS * SCAN_EACH) : count);
        if (step == 1)
            opencl_run_units(launch, 1, 1, 1, INVERSE_ITEMS);
        else
            opencl_run_units(launch, 2, ceil_div(count, INVERSE_ITEMS * SCAN_EACH), INVERSE_ITEMS * SCAN_EACH,
                             INVERSE_ITEMS);
    }
}

struct backward_bins backward_inverse(struct backward_run *run)
{
    const clattn_blocks *blocks = run->job->blocks;
    struct opencl_launch *launch = &run->launch;
    struct opencl_options options = {""};
    int64_t entries = blocks->rows * blocks->heads * blocks->topk;
    int64_t bins = run->lists.bins * run->lists.list_group;
    struct backward_bins result = {.chunks = MIN(entries / (2 * MAX(bins, 1)), CHUNKS_MAX)};
    result.chunks = MAX(MIN(result.chunks, blocks->rows), 1);
    int64_t chunk_rows = ceil_div(MAX(blocks->rows, 1), result.chunks), count = bins * result.chunks;
    if (entries > UINT32_MAX || blocks->rows * run->lists.list_group > UINT32_MAX) {
        launch->status = fail(run->context, CLATTN_DEVICE_LIMIT,
                              "lists of %lld rows have %lld entries; OpenCL kernels take 2^32 - 1",
                              (long long)blocks->rows, (long long)entries);
        return result;
    }
    opencl_option(&options, "ITEMS", INVERSE_ITEMS);
    opencl_option(&options, "SCAN_EACH", SCAN_EACH);
    result.starts = opencl_launch_temporary(launch, (size_t)(count + 1) * sizeof(cl_uint));
    result.entries = opencl_launch_temporary(launch, (size_t)MAX(entries, 1) * sizeof(cl_uint));
    cl_mem sums = opencl_launch_temporary(launch, (size_t)(ceil_div(count, INVERSE_ITEMS * SCAN_EACH) + 1) *
                                                      sizeof(cl_uint));
    if (launch->status) return result;
    clear(launch, options.text, result.starts, count + 1);
    visit(run, "inverse_count", options.text, &result, chunk_rows);
    scan(launch, options.text, result.starts, sums, count);
    visit(run, "inverse_place", options.text, &result, chunk_rows);
    return result;
}
