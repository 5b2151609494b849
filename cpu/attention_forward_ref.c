/* SPDX-License-Identifier: MIT */
/* Attention over a block list, reference: double, one query row and head at a time, two passes over its keys.
 *
 *   lse = log sum_j exp z_j,   out = sum_j exp(z_j - lse) v_j   over the listed keys j that the row sees */

#include "reference.h"

#include <math.h>

size_t forward_scratch_ref(const struct forward_job *job, int32_t rows, int32_t heads)
{
    (void)rows;
    (void)heads;
    return (size_t)row_keys_max(job->problem, job->blocks) * ROW_KEY_BYTES +
           sizeof(double) * (size_t)job->problem->dim_v;
}

static void forward_row(const struct forward_job *job, const struct row_job *row, struct row_keys *keys,
                        double *out)
{
    const struct problem *problem = job->problem;
    const struct sequence *sequence = row->sequence;
    row_scores(row, keys);
    double lse = row_lse(row, keys);
    for (int32_t d = 0; d < problem->dim_v; d++)
        out[d] = 0;
    for (int64_t n = 0; n < keys->count && lse != -INFINITY; n++) {
        double p = exp(keys->z[n] - lse);
        for (int32_t d = 0; d < problem->dim_v; d++)
            out[d] += p * key_element(problem, job->v, problem->options.v_scale, sequence, keys->index[n],
                                      row->head / problem->group, d);
    }
    void *out_row = tensor_row(job->out, sequence->batch, sequence->q_row + row->i, row->head);
    for (int32_t d = 0; d < problem->dim_v; d++)
        store_element(out_row, job->out->dtype, d, (float)out[d]);
    if (job->lse)
        store_element(tensor_row(job->lse, sequence->batch, sequence->q_row + row->i, row->head),
                      CLATTN_FLOAT32, 0, (float)lse);
}

void forward_tile_ref(const struct forward_job *job, const struct forward_tile *tile, void *scratch)
{
    int64_t most = row_keys_max(job->problem, job->blocks);
    struct row_keys keys = {.z = scratch};
    keys.slope = keys.z + most;
    double *out = keys.slope + most;
    keys.index = (int64_t *)(out + job->problem->dim_v);
    struct row_job row = {.problem = job->problem,
                          .sequence = tile->sequence,
                          .q = job->q,
                          .k = job->k,
                          .indices = tile->indices,
                          .count = tile->indices ? tile->counts[0] : 0,
                          .key_blocks = key_blocks_listed(job->blocks, tile->sequence),
                          .mask = job->blocks ? job->blocks->mask : NULL,
                          .cut = tile->cut,
                          .neighborhood = job->neighborhood};
    for (row.i = tile->row; row.i < tile->row + tile->rows; row.i++)
        for (row.head = tile->head; row.head < tile->head + tile->heads; row.head++)
            forward_row(job, &row, &keys, out);
}
