/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "tune.h"

#include "device.h"
#include "program.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KERNEL_TOKEN, KERNEL_BLOCK, KERNEL_SELECT, KERNEL_BACKWARD_Q, KERNEL_BACKWARD_KV };
enum { PAIRS_MAX = 101, PAIRS_MIN = 5, SELECT_QUERIES = 512 };

/* ---- the default ---- */

static struct bench_case case_of(const struct tune_search *search, const struct tune_settings *settings,
                                 int64_t len)
{
    struct bench_case shape = {.suite = "tune",
                               .operation = search->kernel == KERNEL_SELECT       ? BENCH_SELECT
                                            : search->kernel >= KERNEL_BACKWARD_Q ? BENCH_BACKWARD
                                                                                  : BENCH_FORWARD,
                               .dtype = search->dtype,
                               .selector = CLATTN_SELECT_PISA,
                               .pattern = search->kernel == KERNEL_BLOCK ? "local:1+log-stride" : NULL,
                               .causal = true,
                               .q_len = len,
                               .kv_len = len,
                               .q_heads = settings->q_heads,
                               .kv_heads = settings->kv_heads,
                               .dim = search->dim,
                               .topk = settings->topk,
                               .leaf = 64};
    if (search->kernel == KERNEL_SELECT && shape.q_len > SELECT_QUERIES) shape.q_len = SELECT_QUERIES;
    return shape;
}

static uint64_t tuned_tiles(clattn_context *context)
{
    clattn_stats stats = {.size = sizeof stats};
    clattn_context_stats(context, &stats);
    return stats.tiles_by_tuning[CLATTN_TUNING_CALLER];
}

/* Inputs, one call, its verification: a failure is the status, a wrong result *is_right. */
static clattn_status prepare(struct bench_problem *problem, const struct bench_case *shape,
                             struct bench_device *device, clattn_context *reference, bool *is_right)
{
    struct bench_verdict verdict;
    double transfer;
    clattn_status status = bench_problem_make(problem, shape, device, &transfer);
    if (!status) status = bench_problem_run(problem, NULL);
    if (!status) status = bench_problem_fetch(problem);
    if (!status) status = bench_verify(problem, reference, &verdict);
    *is_right = !status && verdict.tolerated <= 1 && verdict.lists_wrong == 0;
    if (!status) status = bench_problem_densify(problem);
    return status;
}

static int open_device(const struct tune_search *search, const struct tune_point *point,
                       struct bench_device *device)
{
    char *text = tune_point_record(search, point);
    int status = text ? bench_device_open(device, &search->device, 0, text) : STATUS_FAILED;
    if (!text) program_error("out of memory");
    free(text);
    return status;
}

int tune_base_open(struct tune_base *base, const struct tune_search *search,
                   const struct tune_settings *settings, clattn_context *reference, bool *applies)
{
    struct tune_point defaults;
    bool is_right = false;
    clattn_status status = CLATTN_SUCCESS;
    *base = (struct tune_base){.settings = settings, .reference = reference};
    for (int p = 0; p < TUNE_PARAMETERS; p++)
        defaults.value[p] = -1;
    int result = open_device(search, &defaults, &base->device);
    if (result != STATUS_OK) return result;
    base->is_open = true;
    for (int l = 0; l < settings->len_count && !status; l++) {
        base->shapes[l] = case_of(search, settings, settings->lens[l]);
        status = prepare(&base->problems[base->problem_count++], &base->shapes[l], &base->device, reference,
                         &is_right);
        if (!is_right) break;
    }
    /* Even a record without parameters is counted where it is looked for. */
    *applies = status || tuned_tiles(base->device.context) > 0;
    if (!status && is_right) return STATUS_OK;
    if (status)
        device_error(base->device.context, status, tune_kernels[search->kernel]);
    else
        program_error("%s, dim %d: the default computes wrongly on '%s'", tune_kernels[search->kernel],
                      (int)search->dim, search->device.name);
    return STATUS_FAILED;
}

void tune_base_close(struct tune_base *base)
{
    if (!base->is_open) return;
    for (int l = 0; l < base->problem_count; l++)
        bench_problem_release(&base->problems[l]);
    bench_device_close(&base->device);
    base->is_open = false;
}

/* ---- in turns ---- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(const double *samples, int count)
{
    double sorted[PAIRS_MAX];
    memcpy(sorted, samples, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, compare_doubles);
    return count % 2 ? sorted[count / 2] : 0.5 * (sorted[count / 2 - 1] + sorted[count / 2]);
}

/* The default and the candidate alternately, so that what else the machine does hits both. The ratio is the
 * median of the ratios of neighbours. */
static clattn_status time_pairs(struct bench_problem *base, struct bench_problem *candidate, double seconds,
                                double *ratio, double medians[2])
{
    struct bench_problem *const problems[] = {base, candidate};
    double times[2][PAIRS_MAX], ratios[PAIRS_MAX], begin = program_seconds();
    int count = 0;
    clattn_status status = CLATTN_SUCCESS;
    while (count < PAIRS_MAX && !status) {
        double taken = program_seconds() - begin;
        bool is_clear = count >= 2 && median_of(ratios, count) > 1.5;
        if (count > 0 && (bench_interrupted || is_clear)) break;
        if (count >= PAIRS_MIN && taken > seconds) break;
        if (count >= 2 && taken > 10 * seconds) break; /* slow devices: what there is must do */
        for (int n = 0; n < 2 && !status; n++) {
            int which = (n + count) % 2; /* nobody is always the second */
            status = bench_sample(problems[which], &times[which][count]);
        }
        if (!status) {
            ratios[count] = times[1][count] / times[0][count];
            count++;
        }
    }
    *ratio = count > 0 ? median_of(ratios, count) : NAN;
    for (int n = 0; n < 2 && count > 0; n++)
        medians[n] += median_of(times[n], count);
    return status;
}

/* One length: verified, then timed. */
static clattn_status measure_len(struct tune_base *base, struct bench_device *device, int l, double seconds,
                                 double *ratio, double medians[2], bool *is_right)
{
    struct bench_problem problem;
    clattn_status status = prepare(&problem, &base->shapes[l], device, base->reference, is_right);
    if (!status && *is_right) status = time_pairs(&base->problems[l], &problem, seconds, ratio, medians);
    bench_problem_release(&problem);
    return status;
}

int tune_measure(struct tune_base *base, const struct tune_search *search, const struct tune_point *point,
                 double seconds, struct tune_trial *trial)
{
    struct bench_device device;
    bool is_right = true;
    double medians[2] = {0, 0}, logs = 0, worst = 0, noise = base->settings->noise;
    int done = 0;
    *trial = (struct tune_trial){.point = *point, .state = TUNE_IMPOSSIBLE, .ratio = NAN};
    int result = open_device(search, point, &device);
    if (result != STATUS_OK) return result;
    /* Whatever a driver says of a candidate, that it is too large or that its compiler fails, is the
     * candidate's. */
    clattn_status status = CLATTN_SUCCESS;
    for (int l = 0; l < base->problem_count && !status && is_right && worst <= 1.5; l++) {
        double ratio = NAN;
        status = measure_len(base, &device, l, seconds / base->problem_count, &ratio, medians, &is_right);
        if (status || !is_right || !(ratio > 0)) break;
        logs += log(ratio);
        worst = fmax(worst, ratio);
        done++;
    }
    bench_device_close(&device);
    if (!status && !is_right) trial->state = TUNE_WRONG;
    if (status || !is_right || done == 0) return STATUS_OK;
    trial->state = TUNE_GOOD;
    trial->ratio = worst > 1 + noise ? worst : exp(logs / done);
    base->medians[0] = medians[0];
    base->medians[1] = medians[1];
    return STATUS_OK;
}
