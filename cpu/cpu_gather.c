/* SPDX-License-Identifier: MIT */
/* Moving rows by a table of indices. */

#include "config.h"

#include "cpu.h"

#include <string.h>

/* Source row of an index, or NULL for a row of zeros. */
static const void *source_row(const struct gather_job *job, int64_t batch, int64_t index, int64_t head)
{
    if (index < 0) return NULL;
    if (index < job->from->len) return tensor_row(job->from, batch, index, head);
    if (!job->more || index - job->from->len >= job->more->len) return NULL;
    return tensor_row(job->more, batch, index - job->from->len, head);
}

static void gather_row(const struct gather_job *job, int64_t batch, int64_t n, int64_t head)
{
    const int64_t *index = (const int64_t *)job->index->host + n * job->terms;
    const clattn_tensor *to = job->to;
    void *target = tensor_row(to, batch, n, head);
    if (job->terms == 1 && to->dtype == job->from->dtype) {
        const void *source = source_row(job, batch, index[0], head);
        size_t bytes = (size_t)to->dim * dtype_bytes(to->dtype);
        if (source)
            memcpy(target, source, bytes);
        else
            memset(target, 0, bytes);
        return;
    }
    for (int64_t d = 0; d < to->dim; d++) {
        float sum = 0;
        for (int32_t t = 0; t < job->terms; t++) {
            const void *source = source_row(job, batch, index[t], head);
            if (source) sum += load_element(source, job->from->dtype, d);
        }
        store_element(target, to->dtype, d, sum);
    }
}

clattn_status cpu_gather(clattn_context *context, const struct gather_job *job)
{
    int64_t rows = job->to->batch * job->to->len;
    int threads = cpu_threads(context);
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t n = 0; n < rows; n++)
        for (int64_t h = 0; h < job->to->heads; h++)
            gather_row(job, n / job->to->len, n % job->to->len, h);
    return CLATTN_SUCCESS;
}
