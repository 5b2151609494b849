/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "bench.h"

#include "device.h"
#include "fma.h"
#include "program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif

double bench_seconds(const struct bench_device *device)
{
    struct timespec now;
    if (device->threads != 1 || device->info.backend == CLATTN_BACKEND_OPENCL) return program_seconds();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- ceilings of the processor ---- */

static int thread_count(const struct bench_device *device)
{
#ifdef _OPENMP
    return device->threads > 0 ? device->threads : omp_get_max_threads();
#else
    (void)device;
    return 1;
#endif
}

/* All threads at once, as the kernels run. The best of many short runs: other programs disturb some. */
static double measure_fma(const struct bench_device *device)
{
    double best = 0;
    int threads = thread_count(device);
    (void)threads; /* a build without OpenMP has one */
    for (int r = 0; r < 12; r++) {
        double flops = 0, start = bench_seconds(device);
        float total = 0;
#ifdef _OPENMP
#pragma omp parallel reduction(+ : flops, total) num_threads(threads)
#endif
        {
            float sum;
            flops += fma_run(device->info.variant, 1000000, &sum);
            total += sum;
        }
        double rate = flops / (bench_seconds(device) - start);
        if (rate > best && total == total) best = rate;
    }
    return best;
}

/* Bytes read and written by a copy that no cache holds. */
static double measure_copy(const struct bench_device *device)
{
    const size_t part = (size_t)1 << 20, parts = 48, bytes = part * parts;
    char *from = malloc(bytes), *to = malloc(bytes);
    double best = 0;
    int threads = thread_count(device);
    (void)threads; /* a build without OpenMP has one */
    if (from && to) {
        memset(from, 1, bytes);
        memset(to, 2, bytes);
        for (int r = 0; r < 12; r++) {
            double start = bench_seconds(device);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads)
#endif
            for (int64_t p = 0; p < (int64_t)parts; p++)
                memcpy(to + (size_t)p * part, from + (size_t)p * part, part);
            double rate = 2 * (double)bytes / (bench_seconds(device) - start);
            if (rate > best) best = rate;
        }
    }
    free(from);
    free(to);
    return best;
}

int bench_device_open(struct bench_device *device, const clattn_device_info *info, int threads,
                      const char *tuning)
{
    char index[16], detail[512] = "";
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    snprintf(index, sizeof index, "%d", info->index);
    *device = (struct bench_device){.info = *info, .threads = threads};
    desc.threads = threads;
    desc.tuning = tuning;
    desc.backend = info->backend;
    desc.error = detail;
    desc.error_bytes = sizeof detail;
    if (info->backend == CLATTN_BACKEND_OPENCL) {
        desc.device = index;
        device->opencl = bench_opencl_open(info, &desc);
    }
    clattn_status status = clattn_context_create(&desc, &device->context);
    if (status != CLATTN_SUCCESS) {
        detail[strcspn(detail, "\n")] = 0;
        program_error("%s: %s%s%s", info->name, clattn_strerror(status), *detail ? ": " : "", detail);
        bench_device_close(device);
        return status == CLATTN_NO_DEVICE ? STATUS_NO_DEVICE : STATUS_FAILED;
    }
    clattn_device_info used = {.size = sizeof used};
    if (clattn_context_device(device->context, &used) == CLATTN_SUCCESS)
        memcpy(device->info.variant, used.variant, sizeof used.variant);
    return STATUS_OK;
}

bool bench_has_matrix(const clattn_device_info *info)
{
    return strcmp(info->variant, "mma") == 0 || strcmp(info->variant, "hopper") == 0;
}

void bench_device_measure(struct bench_device *device)
{
    if (device->info.backend != CLATTN_BACKEND_OPENCL) {
        device->fma_rate = measure_fma(device);
        device->copy_rate = measure_copy(device);
    } else if (!device->opencl ||
               !bench_opencl_ceilings(device->opencl, &device->fma_rate, &device->copy_rate)) {
        device->fma_rate = device->copy_rate = 0;
        program_note("%s: no ceilings could be measured", device->info.name);
    }
    if (device->opencl && bench_has_matrix(&device->info) &&
        !bench_opencl_matrix(device->opencl, &device->matrix_rate))
        device->matrix_rate = 0;
}

void bench_device_close(struct bench_device *device)
{
    clattn_context_release(device->context);
    bench_opencl_close(device->opencl);
    device->context = NULL;
    device->opencl = NULL;
}
