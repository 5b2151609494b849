/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "bench.h"

#include "program.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SAMPLES_MAX 200
#define DENSE_FLOPS 2e10 /* of a dense measurement: a second or less on two cores */

volatile int bench_interrupted;
const char *const bench_clock_words[] = {"wall", "device", "processor"};

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of ascending samples, between the two nearest. */
static double quantile(const double *samples, int count, double share)
{
    double place = share * (count - 1);
    int below = (int)place;
    return below + 1 < count ? samples[below] + (place - below) * (samples[below + 1] - samples[below])
                             : samples[count - 1];
}

/* One call, timed by the device's clock where it has one that works (*is_device), and by the wall clock. */
static clattn_status sample(struct bench_problem *problem, bool *is_device, double *seconds, double *wall)
{
    struct bench_opencl *opencl = problem->device->opencl;
    clattn_sync sync;
    if (*is_device && bench_opencl_begin(opencl, &sync)) {
        double wall_start = program_seconds();
        clattn_status status = bench_problem_run(problem, &sync);
        bool has_time = !status && bench_opencl_end(opencl, seconds);
        *wall = program_seconds() - wall_start;
        if (status || has_time) return status;
    }
    /* No clock after all: this sample and the later ones are wall clock. */
    *is_device = false;
    double wall_start = program_seconds(), start = bench_seconds(problem->device);
    clattn_status status = bench_problem_run(problem, NULL);
    *seconds = bench_seconds(problem->device) - start;
    *wall = program_seconds() - wall_start;
    return status;
}

clattn_status bench_sample(struct bench_problem *problem, double *seconds)
{
    bool is_device = problem->device->opencl != NULL;
    double wall;
    return sample(problem, &is_device, seconds, &wall);
}

static clattn_status time_with(struct bench_problem *problem, double seconds, bool is_device,
                               struct bench_timing *timing)
{
    double samples[SAMPLES_MAX], walls[SAMPLES_MAX], start = program_seconds();
    int count = 0;
    while (count < SAMPLES_MAX && (count == 0 || (program_seconds() - start < seconds && !bench_interrupted))) {
        bool had_clock = is_device;
        clattn_status status = sample(problem, &is_device, &samples[count], &walls[count]);
        count++;
        if (status) return status;
        if (had_clock && !is_device) { /* the two are never mixed */
            samples[0] = samples[count - 1];
            walls[0] = walls[count - 1];
            count = 1;
        }
    }
    qsort(samples, (size_t)count, sizeof *samples, compare_doubles);
    qsort(walls, (size_t)count, sizeof *walls, compare_doubles);
    bool is_cpu = problem->device->info.backend != CLATTN_BACKEND_OPENCL;
    enum bench_clock clock = is_device                                 ? BENCH_DEVICE
                             : is_cpu && problem->device->threads == 1 ? BENCH_PROCESSOR
                                                                       : BENCH_WALL;
    *timing = (struct bench_timing){quantile(samples, count, 0.5),
                                    quantile(samples, count, 0.05),
                                    quantile(samples, count, 0.95),
                                    quantile(walls, count, 0.5),
                                    count,
                                    clock};
    return CLATTN_SUCCESS;
}

clattn_status bench_time(struct bench_problem *problem, double seconds, double first,
                         struct bench_timing *timing)
{
    bool has_clock = problem->device->opencl != NULL;
    double taken, wall;
    /* A long first call was warm-up enough. */
    if (first < seconds) {
        bool is_device = false;
        double start = program_seconds();
        clattn_status status = sample(problem, &is_device, &taken, &wall);
        if (status) return status;
        seconds -= program_seconds() - start;
    }
    return time_with(problem, seconds, has_clock, timing);
}

/* A wrong dense result gives no rate. */
static clattn_status measure_dense(struct bench_problem *problem, clattn_context *reference, double *rate)
{
    struct bench_verdict verdict;
    struct bench_timing timing;
    clattn_status status = bench_problem_run(problem, NULL);
    if (!status) status = bench_problem_fetch(problem);
    if (!status) status = bench_verify(problem, reference, &verdict);
    if (!status && !(verdict.tolerated <= 1)) status = CLATTN_INTERNAL;
    if (!status) status = bench_problem_densify(problem);
    if (!status) status = time_with(problem, 0.5 * problem->device->row_seconds, false, &timing);
    if (!status) *rate = bench_work_count(problem).dense_flops / timing.p5;
    return status;
}

clattn_status bench_dense_rate(struct bench_device *device, const struct bench_case *shape,
                               clattn_context *reference, double *rate)
{
    struct bench_case dense = *shape;
    struct bench_problem problem;
    double transfer;
    if (shape->operation != BENCH_BACKWARD && shape->operation != BENCH_DECODE) dense.operation = BENCH_FORWARD;
    dense.selector = CLATTN_SELECT_DENSE;
    dense.files = NULL;
    dense.pattern = NULL;
    if (dense.operation != BENCH_DECODE) dense.topk = 0; /* the cache wants a number of leaves */
    dense.neighborhood = (clattn_neighborhood_desc){0};
    double row =
        (dense.operation == BENCH_BACKWARD ? 10.0 : 4.0) * dense.dim * dense.q_heads * (double)dense.kv_len;
    int64_t rows = (int64_t)(DENSE_FLOPS / row) / 64 * 64;
    if (rows < 64) rows = 64;
    if (rows < dense.q_len) dense.q_len = rows;
    const struct bench_case *known = &device->dense_case;
    *rate = device->dense_rate;
    if (*rate > 0 && known->operation == dense.operation && known->dtype == dense.dtype &&
        known->causal == dense.causal && known->q_len == dense.q_len && known->kv_len == dense.kv_len &&
        known->q_heads == dense.q_heads && known->kv_heads == dense.kv_heads && known->dim == dense.dim)
        return CLATTN_SUCCESS;
    *rate = 0;
    clattn_status status = bench_problem_make(&problem, &dense, device, &transfer);
    if (!status) status = measure_dense(&problem, reference, rate);
    device->dense_case = dense;
    device->dense_rate = *rate;
    bench_problem_release(&problem);
    return status;
}
