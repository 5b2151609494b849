/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "bench.h"

#include "device.h"
#include "fma.h"
#include "program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- ceilings of the processor ---- */

/* All threads at once, as the kernels run. The best of many short runs: other programs disturb some. */
static double measure_fma(const char *variant)
{
    double best = 0;
    for (int r = 0; r < 12; r++) {
        double flops = 0, start = program_seconds();
        float total = 0;
#ifdef _OPENMP
#pragma omp parallel reduction(+ : flops, total)
#endif
        {
            float sum;
            flops += fma_run(variant, 1000000, &sum);
            total += sum;
        }
        double rate = flops / (program_seconds() - start);
        if (rate > best && total == total) best = rate;
    }
    return best;
}

/* Bytes read and written by a copy that no cache holds. */
static double measure_copy(void)
{
    const size_t part = (size_t)1 << 20, parts = 48, bytes = part * parts;
    char *from = malloc(bytes), *to = malloc(bytes);
    double best = 0;
    if (from && to) {
        memset(from, 1, bytes);
        memset(to, 2, bytes);
        for (int r = 0; r < 12; r++) {
            double start = program_seconds();
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
            for (int64_t p = 0; p < (int64_t)parts; p++)
                memcpy(to + (size_t)p * part, from + (size_t)p * part, part);
            double rate = 2 * (double)bytes / (program_seconds() - start);
            if (rate > best) best = rate;
        }
    }
    free(from);
    free(to);
    return best;
}

int bench_device_open(struct bench_device *device, const clattn_device_info *info)
{
    char index[16], detail[512] = "";
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    snprintf(index, sizeof index, "%d", info->index);
    *device = (struct bench_device){.info = *info};
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
    if (info->backend != CLATTN_BACKEND_OPENCL) {
        device->fma_rate = measure_fma(device->info.variant);
        device->copy_rate = measure_copy();
    } else if (!device->opencl ||
               !bench_opencl_ceilings(device->opencl, &device->fma_rate, &device->copy_rate)) {
        device->fma_rate = device->copy_rate = 0;
        program_note("%s: no ceilings could be measured", info->name);
    }
    return STATUS_OK;
}

void bench_device_close(struct bench_device *device)
{
    clattn_context_release(device->context);
    bench_opencl_close(device->opencl);
    device->context = NULL;
    device->opencl = NULL;
}
