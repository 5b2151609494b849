/* SPDX-License-Identifier: MIT
 *
 * One timed attention: host tensors in, host results out, step by step through the public interface. */
#ifndef CLATTN_BENCH_JOB_H
#define CLATTN_BENCH_JOB_H

#include <clattn.h>
#include <stdbool.h>
#include <stdint.h>

enum job_step { JOB_TRANSFER, JOB_PYRAMID, JOB_SELECT, JOB_ATTEND, JOB_STEPS };

struct job {
    /* What to compute. */
    clattn_context *context;
    clattn_attention_desc attention;
    clattn_select_desc select;
    const clattn_pattern *pattern; /* NULL: chosen by `select` alone; else its lists, which are joined with
                                      those of `select` when `join` is set */
    bool join;
    int32_t pattern_heads; /* list heads of the pattern */
    const clattn_neighborhood_desc
        *neighborhood;              /* NULL: none; else instead of all of the above but the scale */
    clattn_tensor q, k, v;          /* host views */
    clattn_tensor extra_k, extra_v; /* of a neighborhood; len 0: none */
    float *out, *lse;               /* [batch][q_len][q_heads][dim_v], [batch][q_len][q_heads] */
    clattn_blocks
        *blocks; /* NULL: chosen by `select`, and released by job_release(); else attended to as it is */
    void (*progress)(const char *step); /* called before each step; may be NULL */

    /* What it took. The time of OpenCL's compiler is in `build` alone, that of copies in seconds[JOB_TRANSFER].
     */
    double seconds[JOB_STEPS];
    double build, total;
    uint64_t programs_built, programs_loaded;

    /* Private: what the steps share. */
    clattn_tensor device_q, device_k, device_v, device_out, device_lse, device_extra_k, device_extra_v;
    clattn_neighborhood *plan;
    bool staged;
    clattn_pyramid *pyramid;
};

/* "transfer", "pyramid", "select", "attend" */
extern const char *const job_step_names[JOB_STEPS];

/* Runs everything. Returns an exit status; errors were printed. Call job_release() in any case. */
int job_run(struct job *job);

void job_release(struct job *job);

#endif
