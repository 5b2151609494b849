/* SPDX-License-Identifier: MIT */
/* Quantising to int8 on OpenCL; see cl/quantize.cl. */

#include "config.h"

#include "opencl_tile.h"

enum { ITEMS = 64, ARG_UNIT_FIRST = 3 };

clattn_status opencl_quantize(clattn_context *context, const struct quantize_job *job)
{
    const clattn_tensor *const tensors[] = {job->x, job->codes, job->scales};
    struct opencl_options options = {""};
    struct opencl_launch launch;
    int64_t groups = quantize_groups(job), units = job->x->batch * job->x->heads * groups;
    opencl_option(&options, "DTYPE", (int)job->x->dtype);
    opencl_option(&options, "ITEMS", ITEMS);
    opencl_launch_begin(context, job->sync, &launch);
    if (units > 0) {
        opencl_launch_kernel(&launch, "quantize.cl", "quantize", options.text);
        for (int i = 0; i < 3; i++)
            opencl_arg_tensor(&launch, tensors[i]);
        opencl_arg_long(&launch, 0); /* the first unit: opencl_run_units */
        for (int i = 0; i < 3; i++)
            opencl_arg_strides(&launch, tensors[i]);
        opencl_arg_long(&launch, job->x->len);
        opencl_arg_int(&launch, (int32_t)job->x->heads);
        opencl_arg_int(&launch, (int32_t)job->x->dim);
        opencl_arg_int(&launch, job->scale_block);
        opencl_arg_long(&launch, groups);
        opencl_arg_long(&launch, job->far_begin);
        opencl_arg_long(&launch, job->far_end);
        opencl_arg_int(&launch, job->far_group);
        opencl_arg_long(&launch, job->leaves);
        double rows = (double)MIN(job->x->len, (int64_t)job->scale_block * job->far_group);
        opencl_run_units(&launch, ARG_UNIT_FIRST, units, 8 * rows * (double)job->x->dim, ITEMS);
    }
    return opencl_launch_end(&launch);
}
