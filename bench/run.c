/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "run.h"

#include "program.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* More multiplications than this take seconds on a small machine; then a terminal is told what goes on. */
#define LONG_WORK 1e10

static void show_progress(const char *step)
{
    fprintf(stderr, "\rclattn run: %s ...        ", step);
}

static void prepare_job(struct run *run)
{
    static const int32_t leaves[] = {16, 32, 64, 128};
    struct job *job = &run->job;
    job->attention.causal = run->causal;
    job->attention.window = run->window_tokens;
    if (!isnan(run->softcap)) job->attention.softcap = (float)run->softcap;
    if (!isnan(run->scale)) job->attention.scale = (float)run->scale;
    job->select = run->select;
    job->select.topk = (int32_t)run->topk;
    job->select.leaf = leaves[run->leaf];
    job->select.forced_first = run->forced_first;
    job->select.forced_last = run->forced_last;
    job->neighborhood = run->is_neighborhood ? &run->neighborhood : NULL;
    job->pattern = run->pattern;
    job->join = run->join;
    job->pattern_heads = run->selector_text && strchr(run->selector_text, ';') ? (int32_t)run->q_heads : 1;

    double keys = run->select.selector == CLATTN_SELECT_DENSE ? (double)run->kv_len : 64.0 * (double)run->topk;
    for (int a = 0; a < run->neighborhood.axes; a++)
        keys = (a == 0 ? 1 : keys) * run->neighborhood.window[a];
    double work = keys * (double)run->batch * (double)run->q_len * (double)run->q_heads;
    if (isatty(STDERR_FILENO) && work * (double)(run->dim + run->dim_v) > LONG_WORK)
        job->progress = show_progress;
}

static int compute(struct run *run)
{
    struct job *job = &run->job;
    int64_t rows = run->batch * run->q_len * run->q_heads;
    job->out = malloc((size_t)(rows * run->dim_v) * sizeof *job->out);
    job->lse = malloc((size_t)rows * sizeof *job->lse);
    if (!job->out || !job->lse) {
        program_error("out of memory: the result has %lld rows of %lld numbers", (long long)rows,
                      (long long)run->dim_v);
        return STATUS_FAILED;
    }
    int status = job_run(job);
    if (job->progress) fprintf(stderr, "\r%40s\r", "");
    return status;
}

static int run_all(struct run *run)
{
    int status;
    run->job.attention = (clattn_attention_desc)CLATTN_ATTENTION_DESC_INIT;
    if ((status = run_open_inputs(run)) != STATUS_OK || (status = run_open_extras(run)) != STATUS_OK ||
        (status = run_open_quality(run)) != STATUS_OK || (status = run_open_outputs(run)) != STATUS_OK ||
        (status = device_open(&run->choice, &run->job.context)) != STATUS_OK)
        return status;
    run->device.size = sizeof run->device;
    clattn_context_device(run->job.context, &run->device);
    run_count_values(run);
    prepare_job(run);
    if ((status = compute(run)) != STATUS_OK || (status = run_write_outputs(run)) != STATUS_OK ||
        (status = run_judge(run)) != STATUS_OK)
        return status;
    return run_report(run);
}

int run_main(int argc, char **argv)
{
    int status = STATUS_OK;
    struct run run = {.select = CLATTN_SELECT_DESC_INIT,
                      .causal_option = -1,
                      .scale = NAN,
                      .softcap = NAN,
                      .leaf = 2,
                      .topk = 8,
                      .forced_first = 1,
                      .forced_last = 2};
    if (run_parse_options(&run, argc, argv, &status)) status = run_all(&run);
    run_close(&run);
    return status;
}
