/* SPDX-License-Identifier: MIT */
#include "config.h"

#define CL_TARGET_OPENCL_VERSION 120

#include "bench_opencl.h"

#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct bench_opencl {
    cl_context context;
    cl_device_id device;
    cl_command_queue queue;
    cl_event begin, end;
};

/* ---- the device ---- */

static bool is_device(cl_platform_id platform, cl_device_id id, const clattn_device_info *info)
{
    char text[4096] = "";
    if (clGetPlatformInfo(platform, CL_PLATFORM_NAME, sizeof text - 1, text, NULL)) return false;
    if (strncmp(text, info->platform, sizeof info->platform - 1) != 0) return false;
    memset(text, 0, sizeof text);
    if (clGetDeviceInfo(id, CL_DEVICE_NAME, sizeof text - 1, text, NULL)) return false;
    return strncmp(text + strspn(text, " "), info->name, sizeof info->name - 1) == 0;
}

/* How many devices before this one look the same. */
static int twins_before(const clattn_device_info *info)
{
    clattn_device_info other = {.size = sizeof other};
    int twins = 0;
    for (int n = 0; clattn_device_get(n, &other) == CLATTN_SUCCESS; n++)
        twins += other.backend == info->backend && other.index < info->index &&
                 strcmp(other.name, info->name) == 0 && strcmp(other.platform, info->platform) == 0;
    return twins;
}

static bool find_device(const clattn_device_info *info, cl_device_id *device)
{
    cl_platform_id platforms[32];
    cl_uint platform_count = 0;
    int twins = twins_before(info);
    if (clGetPlatformIDs(32, platforms, &platform_count)) return false;
    for (cl_uint p = 0; p < platform_count && p < 32; p++) {
        cl_device_id ids[64];
        cl_uint count = 0;
        if (clGetDeviceIDs(platforms[p], CL_DEVICE_TYPE_ALL, 64, ids, &count)) continue;
        for (cl_uint d = 0; d < count && d < 64; d++)
            if (is_device(platforms[p], ids[d], info) && twins-- == 0) {
                *device = ids[d];
                return true;
            }
    }
    return false;
}

struct bench_opencl *bench_opencl_open(const clattn_device_info *info, clattn_context_desc *desc)
{
    struct bench_opencl *opencl = calloc(1, sizeof *opencl);
    cl_int code = CL_SUCCESS;
    if (!opencl || !find_device(info, &opencl->device)) goto fail;
    opencl->context = clCreateContext(NULL, 1, &opencl->device, NULL, NULL, &code);
    if (code) goto fail;
    opencl->queue = clCreateCommandQueue(opencl->context, opencl->device, CL_QUEUE_PROFILING_ENABLE, &code);
    if (code) goto fail;
    desc->cl_context = opencl->context;
    desc->cl_device = opencl->device;
    desc->cl_queue = opencl->queue;
    return opencl;
fail:
    bench_opencl_close(opencl);
    return NULL;
}

static void drop_event(cl_event *event)
{
    if (*event) clReleaseEvent(*event);
    *event = NULL;
}

void bench_opencl_close(struct bench_opencl *opencl)
{
    if (!opencl) return;
    drop_event(&opencl->begin);
    drop_event(&opencl->end);
    if (opencl->queue) clReleaseCommandQueue(opencl->queue);
    if (opencl->context) clReleaseContext(opencl->context);
    free(opencl);
}

/* ---- time ---- */

static bool event_time(cl_event event, cl_profiling_info what, double *seconds)
{
    cl_ulong nanoseconds = 0;
    if (clGetEventProfilingInfo(event, what, sizeof nanoseconds, &nanoseconds, NULL)) return false;
    *seconds = 1e-9 * (double)nanoseconds;
    return nanoseconds > 0;
}

bool bench_opencl_begin(struct bench_opencl *opencl, clattn_sync *sync)
{
    *sync = (clattn_sync)CLATTN_SYNC_INIT;
    drop_event(&opencl->begin);
    drop_event(&opencl->end);
    if (clFinish(opencl->queue) || clEnqueueMarkerWithWaitList(opencl->queue, 0, NULL, &opencl->begin))
        return false;
    sync->queue = opencl->queue;
    sync->event = (void **)&opencl->end;
    return true;
}

bool bench_opencl_end(struct bench_opencl *opencl, double *seconds)
{
    double begin, end;
    if (!opencl->end || clWaitForEvents(1, &opencl->end)) return false;
    if (!event_time(opencl->begin, CL_PROFILING_COMMAND_END, &begin) ||
        !event_time(opencl->end, CL_PROFILING_COMMAND_END, &end))
        return false;
    *seconds = end - begin;
    return *seconds > 0;
}

/* ---- ceilings ---- */

/* Eight independent chains of multiply-adds in vectors of four, so that neither latency nor scalar units bound
 * it. */
#define FMA_ROUNDS 512
static const char fma_source[] =
    "__kernel void clattn_ceiling(__global float *result, int rounds)\n"
    "{\n"
    "    float4 a = (float4)(get_global_id(0)), b = a + 1, c = a + 2, d = a + 3;\n"
    "    float4 e = a + 4, f = a + 5, g = a + 6, h = a + 7;\n"
    "    const float4 x = (float4)(0.999f);\n"
    "    for (int i = 0; i < rounds; i++) {\n"
    "        a = fma(a, x, x); b = fma(b, x, x); c = fma(c, x, x); d = fma(d, x, x);\n"
    "        e = fma(e, x, x); f = fma(f, x, x); g = fma(g, x, x); h = fma(h, x, x);\n"
    "    }\n"
    "    a += b + c + d + e + f + g + h;\n"
    "    result[get_global_id(0)] = a.x + a.y + a.z + a.w;\n"
    "}\n";

static bool measure_event(cl_event event, double work, double *rate)
{
    double begin, end;
    bool good = !clWaitForEvents(1, &event) && event_time(event, CL_PROFILING_COMMAND_START, &begin) &&
                event_time(event, CL_PROFILING_COMMAND_END, &end) && end > begin;
    if (good && work / (end - begin) > *rate) *rate = work / (end - begin);
    clReleaseEvent(event);
    return good;
}

/* FLOP/s of a kernel that takes a result and a number of rounds; each item does `flops` a round. */
static bool measure_kernel(struct bench_opencl *opencl, const char *source, const char *name, size_t local,
                           double flops, double *rate)
{
    cl_uint units = 1;
    cl_int code, rounds = FMA_ROUNDS;
    cl_kernel kernel = NULL;
    cl_mem result = NULL;
    bool good = false;
    cl_program program = clCreateProgramWithSource(opencl->context, 1, &source, NULL, &code);
    if (code || clBuildProgram(program, 1, &opencl->device, "", NULL, NULL)) goto done;
    clGetDeviceInfo(opencl->device, CL_DEVICE_MAX_COMPUTE_UNITS, sizeof units, &units, NULL);
    size_t global = (size_t)units * 64 * local;
    kernel = clCreateKernel(program, name, &code);
    if (code) goto done;
    result = clCreateBuffer(opencl->context, CL_MEM_WRITE_ONLY, global * sizeof(float), NULL, &code);
    if (code || clSetKernelArg(kernel, 0, sizeof result, &result) ||
        clSetKernelArg(kernel, 1, sizeof rounds, &rounds))
        goto done;
    *rate = 0;
    for (int r = 0; r < 5; r++) {
        cl_event event;
        if (clEnqueueNDRangeKernel(opencl->queue, kernel, 1, NULL, &global, &local, 0, NULL, &event)) goto done;
        good = measure_event(event, flops * FMA_ROUNDS * (double)global, rate);
    }
done:
    if (result) clReleaseMemObject(result);
    if (kernel) clReleaseKernel(kernel);
    if (program) clReleaseProgram(program);
    return good;
}

/* Eight independent chains of NVIDIA's matrix instruction a warp, 16 x 8 x 16 multiply-adds each. */
static const char matrix_source[] =
    "__kernel void clattn_matrix_ceiling(__global float *result, int rounds)\n"
    "{\n"
    "    float d[8][4];\n"
    "    uint a = 0x3c003c00u + get_local_id(0), b = 0x3c003c00u;\n"
    "#pragma unroll\n"
    "    for (int c = 0; c < 8; c++) d[c][0] = d[c][1] = d[c][2] = d[c][3] = 0;\n"
    "    for (int i = 0; i < rounds; i++) {\n"
    "#pragma unroll\n"
    "        for (int c = 0; c < 8; c++)\n"
    "            __asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, \"\n"
    "                           \"{%4,%4,%4,%4}, {%5,%5}, {%0,%1,%2,%3};\"\n"
    "                           : \"+f\"(d[c][0]), \"+f\"(d[c][1]), \"+f\"(d[c][2]), \"+f\"(d[c][3])\n"
    "                           : \"r\"(a), \"r\"(b));\n"
    "    }\n"
    "    float sum = 0;\n"
    "#pragma unroll\n"
    "    for (int c = 0; c < 8; c++) sum += d[c][0] + d[c][1] + d[c][2] + d[c][3];\n"
    "    result[get_global_id(0)] = sum;\n"
    "}\n";

static bool measure_copy(struct bench_opencl *opencl, double *rate)
{
    const size_t bytes = (size_t)128 << 20;
    cl_int code;
    bool good = false;
    cl_mem from = clCreateBuffer(opencl->context, CL_MEM_READ_WRITE, bytes, NULL, &code), to = NULL;
    if (code) return false;
    to = clCreateBuffer(opencl->context, CL_MEM_READ_WRITE, bytes, NULL, &code);
    *rate = 0;
    for (int r = 0; r < 5 && !code; r++) {
        cl_event event;
        code = clEnqueueCopyBuffer(opencl->queue, from, to, 0, 0, bytes, 0, NULL, &event);
        if (!code) good = measure_event(event, 2 * (double)bytes, rate);
    }
    clReleaseMemObject(from);
    if (to) clReleaseMemObject(to);
    return good;
}

bool bench_opencl_ceilings(struct bench_opencl *opencl, double *fma_rate, double *copy_rate)
{
    return measure_kernel(opencl, fma_source, "clattn_ceiling", 64, 2.0 * 4 * 8, fma_rate) &&
           measure_copy(opencl, copy_rate);
}

bool bench_opencl_matrix(struct bench_opencl *opencl, double *rate)
{
    /* 2 x 16 x 8 x 16 for eight chains, by 32 items together. */
    return measure_kernel(opencl, matrix_source, "clattn_matrix_ceiling", 256, 8 * 2.0 * 16 * 8 * 16 / 32,
                          rate);
}
