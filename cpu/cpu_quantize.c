/* SPDX-License-Identifier: MIT */
/* Quantising to int8: scale = greatest finite magnitude / 127, code = x / scale to nearest even. */

#include "config.h"

#include "cpu.h"

#include <math.h>

static float greatest(const struct quantize_job *job, int64_t batch, int64_t head, int64_t first, int64_t end)
{
    float most = 0;
    for (int64_t i = first; i < end; i++) {
        const void *row = tensor_row(job->x, batch, i, head);
        for (int64_t d = 0; d < job->x->dim; d++) {
            float x = fabsf(load_element(row, job->x->dtype, d));
            if (x > most && x < INFINITY) most = x;
        }
    }
    return most;
}

/* Codes of one group of leaves; a NaN becomes 0, an infinity the greatest code. */
static void quantize_group(const struct quantize_job *job, int64_t batch, int64_t head, int64_t group)
{
    int64_t leaf, leaf_end;
    quantize_leaves(job, group, &leaf, &leaf_end);
    int64_t first = leaf * job->scale_block, end = MIN(leaf_end * job->scale_block, job->x->len);
    float scale = greatest(job, batch, head, first, end) / 127, inverse = scale > 0 ? 1 / scale : 0;
    for (; leaf < leaf_end; leaf++)
        *(float *)tensor_row(job->scales, batch, leaf, head) = scale;
    for (int64_t i = first; i < end; i++) {
        const void *row = tensor_row(job->x, batch, i, head);
        int8_t *codes = tensor_row(job->codes, batch, i, head);
        for (int64_t d = 0; d < job->x->dim; d++) {
            float x = load_element(row, job->x->dtype, d);
            /* A scale that is no normal number has no exact inverse: divide. */
            float code = isnan(x) || scale == 0 ? 0 : inverse < INFINITY ? x * inverse : x / scale;
            codes[d] = (int8_t)rintf(fminf(fmaxf(code, -127), 127));
        }
    }
}

clattn_status cpu_quantize(clattn_context *context, const struct quantize_job *job)
{
    int64_t heads = job->x->heads, groups = quantize_groups(job), units = job->x->batch * heads * groups;
    int threads = cpu_threads(context);
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t n = 0; n < units; n++)
        quantize_group(job, n / heads / groups, n / groups % heads, n % groups);
    return CLATTN_SUCCESS;
}
