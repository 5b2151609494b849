/* SPDX-License-Identifier: MIT
 *
 * In place of bench_opencl.c in a build without OpenCL. */
#include "config.h"

#include "bench_opencl.h"

#include <stddef.h>

struct bench_opencl *bench_opencl_open(const clattn_device_info *info, clattn_context_desc *desc)
{
    (void)info, (void)desc;
    return NULL;
}

void bench_opencl_close(struct bench_opencl *opencl)
{
    (void)opencl;
}

bool bench_opencl_ceilings(struct bench_opencl *opencl, double *fma_rate, double *copy_rate)
{
    (void)opencl, (void)fma_rate, (void)copy_rate;
    return false;
}

bool bench_opencl_matrix(struct bench_opencl *opencl, double *rate)
{
    (void)opencl, (void)rate;
    return false;
}

bool bench_opencl_begin(struct bench_opencl *opencl, clattn_sync *sync)
{
    (void)opencl, (void)sync;
    return false;
}

bool bench_opencl_end(struct bench_opencl *opencl, double *seconds)
{
    (void)opencl, (void)seconds;
    return false;
}
