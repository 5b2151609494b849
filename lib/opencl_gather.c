/* SPDX-License-Identifier: MIT */
/* Moving rows by a table of indices on OpenCL; see cl/gather.cl. */

#include "config.h"

#include "opencl_tile.h"

enum { ITEMS = 64, ELEMENTS_AT_ONCE = 2048, ARG_UNIT_FIRST = 4 };

/* Elements of a load: 16 bytes, where rows have so many. */
static int width_of(const struct gather_job *job, bool is_copy)
{
    int width = is_copy ? 16 / (int)dtype_bytes(job->to->dtype) : 1;
    return job->to->dim % width ? 1 : width;
}

/* Rows of a work-group. */
static int64_t tile_of(const clattn_tensor *to)
{
    return MIN(MAX(ELEMENTS_AT_ONCE / (to->heads * to->dim), 1), MAX(to->len, 1));
}

static void set_arguments(struct opencl_launch *launch, const struct gather_job *job, int64_t tile)
{
    opencl_arg_tensor(launch, job->from);
    opencl_arg_tensor(launch, job->more);
    opencl_arg_tensor(launch, job->to);
    opencl_arg_storage(launch, job->index);
    opencl_arg_long(launch, 0); /* the first unit: opencl_run_units */
    opencl_arg_strides(launch, job->from);
    opencl_arg_strides(launch, job->more);
    opencl_arg_strides(launch, job->to);
    opencl_arg_long(launch, job->from->len);
    opencl_arg_long(launch, job->more ? job->more->len : 0);
    opencl_arg_long(launch, job->to->len);
    opencl_arg_int(launch, (int32_t)job->to->heads);
    opencl_arg_int(launch, (int32_t)job->to->dim);
    opencl_arg_int(launch, job->terms);
    opencl_arg_int(launch, (int32_t)tile);
}

clattn_status opencl_gather(clattn_context *context, const struct gather_job *job)
{
    const clattn_tensor *to = job->to;
    bool is_copy = job->terms == 1 && to->dtype == job->from->dtype;
    struct opencl_options options = {""};
    struct opencl_launch launch;
    if (to->heads > INT32_MAX / to->dim)
        return fail(context, CLATTN_DEVICE_LIMIT,
                    "a row has %lld heads of %lld elements; OpenCL kernels take 2^31", (long long)to->heads,
                    (long long)to->dim);
    opencl_option(&options, "BYTES", is_copy ? (int)dtype_bytes(to->dtype) : 0);
    if (!is_copy) opencl_option(&options, "DTYPE", (int)job->from->dtype);
    if (!is_copy) opencl_option(&options, "OUT_DTYPE", (int)to->dtype);
    opencl_option(&options, "WIDTH", width_of(job, is_copy));
    opencl_option(&options, "ITEMS", ITEMS);
    int64_t tile = tile_of(to), units = to->batch * ceil_div(to->len, tile);
    opencl_launch_begin(context, job->sync, &launch);
    if (units > 0) {
        double work = (double)(tile * to->heads * to->dim) * job->terms;
        opencl_launch_kernel(&launch, "gather.cl", "gather", options.text);
        set_arguments(&launch, job, tile);
        opencl_run_units(&launch, ARG_UNIT_FIRST, units, work, ITEMS);
    }
    return opencl_launch_end(&launch);
}
