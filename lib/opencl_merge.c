/* SPDX-License-Identifier: MIT */
/* Merging results of attention on OpenCL; see cl/merge.cl. */

#include "config.h"

#include "opencl_tile.h"

enum { ITEMS = 64, ELEMENTS_AT_ONCE = 4096, ARG_UNIT_FIRST = 6 };

clattn_status opencl_merge(clattn_context *context, const struct merge_job *job)
{
    const clattn_tensor *const tensors[] = {job->out0, job->lse0, job->out1, job->lse1, job->out, job->lse};
    const clattn_tensor *out = job->out;
    struct opencl_options options = {""};
    struct opencl_launch launch;
    if (out->len > INT32_MAX / out->heads)
        return fail(context, CLATTN_DEVICE_LIMIT,
                    "out has %lld rows of %lld heads; OpenCL kernels take 2^31 - 1", (long long)out->len,
                    (long long)out->heads);
    opencl_option(&options, "DTYPE", (int)job->out0->dtype);
    opencl_option(&options, "OUT_DTYPE", (int)out->dtype);
    opencl_option(&options, "ITEMS", ITEMS);
    int64_t pairs = out->len * out->heads, tile = MIN(MAX(ELEMENTS_AT_ONCE / out->dim, 1), ITEMS);
    int64_t units = out->batch * ceil_div(pairs, tile);
    opencl_launch_begin(context, job->sync, &launch);
    if (units > 0) {
        opencl_launch_kernel(&launch, "merge.cl", "merge", options.text);
        for (int i = 0; i < 6; i++)
            opencl_arg_tensor(&launch, tensors[i]);
        opencl_arg_long(&launch, 0); /* the first unit: opencl_run_units */
        for (int i = 0; i < 6; i++)
            opencl_arg_strides(&launch, tensors[i]);
        opencl_arg_int(&launch, (int32_t)pairs);
        opencl_arg_int(&launch, (int32_t)out->heads);
        opencl_arg_int(&launch, (int32_t)out->dim);
        opencl_arg_int(&launch, (int32_t)tile);
        opencl_arg_int(&launch, job->lse != NULL);
        opencl_run_units(&launch, ARG_UNIT_FIRST, units, 4.0 * (double)(tile * out->dim), ITEMS);
    }
    return opencl_launch_end(&launch);
}
