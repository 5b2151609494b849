/* SPDX-License-Identifier: MIT */
/* Merging results of attention over disjoint keys, in double on every variant: it is a matter of memory. */

#include "config.h"

#include "cpu.h"

#include <math.h>

/* Shares of the parts, which add up to 1, or are 0 where both are empty; returns the common lse. */
static double shares(double lse0, double lse1, double share[2])
{
    double most = lse0 > lse1 || isnan(lse0) ? lse0 : lse1;
    share[0] = share[1] = 0;
    if (most == -INFINITY) return most;
    double part0 = exp(lse0 - most), part1 = exp(lse1 - most);
    share[0] = part0 / (part0 + part1);
    share[1] = part1 / (part0 + part1);
    return most + log(part0 + part1);
}

static void merge_row(const struct merge_job *job, int64_t batch, int64_t i, int64_t head)
{
    const void *a = tensor_row(job->out0, batch, i, head), *b = tensor_row(job->out1, batch, i, head);
    void *to = tensor_row(job->out, batch, i, head);
    double share[2], lse = shares(*(const float *)tensor_row(job->lse0, batch, i, head),
                                  *(const float *)tensor_row(job->lse1, batch, i, head), share);
    for (int64_t d = 0; d < job->out->dim; d++) {
        double sum = 0;
        if (share[0] != 0) sum += share[0] * (double)load_element(a, job->out0->dtype, d);
        if (share[1] != 0) sum += share[1] * (double)load_element(b, job->out1->dtype, d);
        store_element(to, job->out->dtype, d, (float)sum);
    }
    if (job->lse) *(float *)tensor_row(job->lse, batch, i, head) = (float)lse;
}

clattn_status cpu_merge(clattn_context *context, const struct merge_job *job)
{
    int64_t rows = job->out->batch * job->out->len;
    int threads = cpu_threads(context);
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t n = 0; n < rows; n++)
        for (int64_t h = 0; h < job->out->heads; h++)
            merge_row(job, n / job->out->len, n % job->out->len, h);
    return CLATTN_SUCCESS;
}
