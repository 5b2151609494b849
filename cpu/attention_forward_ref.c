/* SPDX-License-Identifier: MIT */
/* Attention over a block list, reference: double, one query row and head at a time, two passes over its keys.
 *
 *   z_j = scale * q . k_j   over the listed keys j (j <= t when causal)
 *   lse = log sum_j exp z_j,   out = sum_j exp(z_j - lse) v_j */

#include "reference.h"

#include <math.h>

/* One query row and head: its listed, visible keys in order. */
struct keys {
    int64_t *index; /* [count] */
    double *z;      /* [count] */
    int64_t count;
};

static int64_t keys_max(const struct forward_job *job)
{
    int64_t kv_len = job->problem->kv_len_max;
    return job->blocks ? MIN(kv_len, (int64_t)job->blocks->topk * job->blocks->block) : kv_len;
}

size_t forward_scratch_ref(const struct forward_job *job, int32_t rows, int32_t heads)
{
    (void)rows;
    (void)heads;
    return (size_t)keys_max(job) * (sizeof(int64_t) + sizeof(double)) +
           sizeof(double) * (size_t)job->problem->dim_v;
}

static void keys_listed(const struct forward_job *job, const struct forward_tile *tile, int64_t visible,
                        struct keys *keys)
{
    keys->count = 0;
    if (!tile->indices) {
        for (int64_t j = 0; j < visible; j++)
            keys->index[keys->count++] = j;
        return;
    }
    for (int32_t n = 0; n < tile->count; n++) {
        int64_t first = (int64_t)tile->indices[n] * job->blocks->block;
        for (int64_t j = first; j < MIN(first + job->blocks->block, visible); j++)
            keys->index[keys->count++] = j;
    }
}

static double log_sum_exp(const double *z, int64_t count)
{
    double row_max = -INFINITY, row_sum = 0;
    for (int64_t j = 0; j < count; j++)
        row_max = fmax(row_max, z[j]);
    if (row_max == -INFINITY) return -INFINITY;
    for (int64_t j = 0; j < count; j++)
        row_sum += exp(z[j] - row_max);
    return row_max + log(row_sum);
}

static void forward_row(const struct forward_job *job, const struct forward_tile *tile, int64_t i, int32_t head,
                        struct keys *keys, double *out)
{
    const struct problem *problem = job->problem;
    const struct sequence *sequence = tile->sequence;
    int32_t kv_head = head / problem->group;
    const void *q = tensor_row(job->q, sequence->batch, sequence->q_row + i, head);

    keys_listed(job, tile, visible_keys(problem, sequence, i), keys);
    for (int64_t n = 0; n < keys->count; n++) {
        const void *k = tensor_row(job->k, sequence->batch, sequence->k_row + keys->index[n], kv_head);
        double dot = 0;
        for (int32_t d = 0; d < problem->dim; d++)
            dot += (double)load_element(q, job->q->dtype, d) * (double)load_element(k, job->k->dtype, d);
        keys->z[n] = (double)problem->scale * dot;
    }
    double lse = log_sum_exp(keys->z, keys->count);
    for (int32_t d = 0; d < problem->dim_v; d++)
        out[d] = 0;
    for (int64_t n = 0; n < keys->count && lse != -INFINITY; n++) {
        const void *v = tensor_row(job->v, sequence->batch, sequence->k_row + keys->index[n], kv_head);
        double p = exp(keys->z[n] - lse);
        for (int32_t d = 0; d < problem->dim_v; d++)
            out[d] += p * (double)load_element(v, job->v->dtype, d);
    }
    void *row = tensor_row(job->out, sequence->batch, sequence->q_row + i, head);
    for (int32_t d = 0; d < problem->dim_v; d++)
        store_element(row, job->out->dtype, d, (float)out[d]);
    if (job->lse)
        store_element(tensor_row(job->lse, sequence->batch, sequence->q_row + i, head), CLATTN_FLOAT32, 0,
                      (float)lse);
}

void forward_tile_ref(const struct forward_job *job, const struct forward_tile *tile, void *scratch)
{
    int64_t most = keys_max(job);
    struct keys keys = {.z = scratch};
    double *out = keys.z + most;
    keys.index = (int64_t *)(out + job->problem->dim_v);
    for (int64_t i = tile->row; i < tile->row + tile->rows; i++)
        for (int32_t head = tile->head; head < tile->head + tile->heads; head++)
            forward_row(job, tile, i, head, &keys, out);
}
