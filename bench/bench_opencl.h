/* SPDX-License-Identifier: MIT
 *
 * What `clattn bench` needs of OpenCL itself: a queue with a clock, and two ceilings. Without OpenCL everything
 * fails. */
#ifndef CLATTN_BENCH_BENCH_OPENCL_H
#define CLATTN_BENCH_BENCH_OPENCL_H

#include <clattn.h>
#include <stdbool.h>

struct bench_opencl;

/* Finds the device and makes a context and a profiling queue, which are put into `desc`. NULL: not possible. */
struct bench_opencl *bench_opencl_open(const clattn_device_info *info, clattn_context_desc *desc);
void bench_opencl_close(struct bench_opencl *opencl);

/* Multiply-adds in FLOP/s, and a copy's bytes read and written in bytes/s. */
bool bench_opencl_ceilings(struct bench_opencl *opencl, double *fma_rate, double *copy_rate);

/* FLOP/s of NVIDIA's matrix units in 16-bit types; only for devices whose tier uses them. */
bool bench_opencl_matrix(struct bench_opencl *opencl, double *rate);

/* Seconds by the device's clock between begin and the end of the call that got `sync`. */
bool bench_opencl_begin(struct bench_opencl *opencl, clattn_sync *sync);
bool bench_opencl_end(struct bench_opencl *opencl, double *seconds);

#endif
