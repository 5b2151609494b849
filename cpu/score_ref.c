/* SPDX-License-Identifier: MIT */
/* Logits of one query row and head, reference: which keys it attends to, and what they score.
 *
 *   x = scale * q . k_j,   z = softcap * tanh(x / softcap) + bias   (softcap 0: x + bias)
 *
 * over the listed keys j that the row sees. */

#include "reference.h"

#include "neighborhood.h"

#include <math.h>

int64_t row_keys_max(const struct problem *problem, const clattn_blocks *blocks)
{
    bool equal = blocks && !blocks->starts;
    return equal ? MIN(problem->kv_len_max, (int64_t)blocks->topk * blocks->block) : problem->kv_len_max;
}

double key_element(const struct problem *problem, const clattn_tensor *tensor, const clattn_tensor *scales,
                   const struct sequence *sequence, int64_t j, int32_t kv_head, int32_t d)
{
    double value = load_element(sequence_row(tensor, sequence, j, kv_head), tensor->dtype, d);
    return scales ? value * (double)sequence_scale(&problem->options, scales, sequence, j, kv_head) : value;
}

double option_element(const clattn_tensor *tensor, const struct sequence *sequence, int64_t row, int32_t head)
{
    int64_t batch = tensor->batch == 1 ? 0 : sequence->batch;
    return load_element(tensor_row(tensor, batch, row, head), CLATTN_FLOAT32, 0);
}

/* Is key j in the row's window on every axis? */
static bool in_window(const struct row_job *job, int64_t j)
{
    const int32_t *window =
        (const int32_t *)job->mask->window.host + (job->sequence->q_row + job->i) * 2 * AXES;
    const int32_t *coordinate = (const int32_t *)job->mask->coordinate.host + (job->sequence->k_row + j) * AXES;
    for (int a = 0; a < AXES; a++)
        if (coordinate[a] < window[2 * a] || coordinate[a] >= window[2 * a + 1]) return false;
    return true;
}

/* Listed keys first .. end - 1 of a row, in order. */
static void listed_keys(const struct row_job *job, int64_t first, int64_t end, struct row_keys *keys)
{
    for (int32_t n = 0; n < job->count; n++) {
        int64_t block_first = key_block_first(&job->key_blocks, job->indices[n]);
        int64_t block_end = key_block_end(&job->key_blocks, job->indices[n]);
        for (int64_t j = MAX(block_first, first); j < MIN(block_end, end); j++)
            if (!job->cut || !job->cut[n] || in_window(job, j)) keys->index[keys->count++] = j;
    }
}

/* Keys of a neighborhood as its definition has them, then the extra keys. */
static void neighborhood_keys(const struct row_job *job, struct row_keys *keys)
{
    const clattn_neighborhood *plan = job->neighborhood;
    struct range range[AXES];
    int32_t residue[AXES];
    int64_t token = job->i;
    for (int a = AXES - 1; a >= 0; a--) {
        int32_t x = (int32_t)(token % plan->axis[a].length);
        residue[a] = x % plan->axis[a].dilation;
        range[a] = window_keys(&plan->axis[a], residue[a], x / plan->axis[a].dilation);
        token /= plan->axis[a].length;
    }
    for (int32_t x = range[0].lo; x < range[0].hi; x++)
        for (int32_t y = range[1].lo; y < range[1].hi; y++)
            for (int32_t z = range[2].lo; z < range[2].hi; z++) {
                int64_t j = (int64_t)x * plan->axis[0].dilation + residue[0];
                j = j * plan->axis[1].length + (int64_t)y * plan->axis[1].dilation + residue[1];
                keys->index[keys->count++] =
                    j * plan->axis[2].length + (int64_t)z * plan->axis[2].dilation + residue[2];
            }
    for (int64_t n = 0; n < plan->extra_len; n++)
        keys->index[keys->count++] = plan->tokens + n;
}

static void row_keys(const struct row_job *job, int64_t first, int64_t end, struct row_keys *keys)
{
    keys->count = 0;
    if (job->neighborhood)
        neighborhood_keys(job, keys);
    else if (job->indices)
        listed_keys(job, first, end, keys);
    else
        for (int64_t j = first; j < end; j++)
            keys->index[keys->count++] = j;
}

void row_scores(const struct row_job *job, struct row_keys *keys)
{
    const struct problem *problem = job->problem;
    const struct options *options = &problem->options;
    const struct sequence *sequence = job->sequence;
    const void *q = tensor_row(job->q, sequence->batch, sequence->q_row + job->i, job->head);
    int32_t kv_head = job->head / problem->group;

    row_keys(job, first_visible_key(problem, sequence, job->i), visible_keys(problem, sequence, job->i), keys);
    for (int64_t n = 0; n < keys->count; n++) {
        int64_t j = keys->index[n];
        double dot = 0;
        for (int32_t d = 0; d < problem->dim; d++)
            dot += (double)load_element(q, job->q->dtype, d) *
                   key_element(problem, job->k, options->k_scale, sequence, j, kv_head, d);
        double x = (double)problem->scale * dot;
        keys->slope[n] = 1;
        keys->z[n] = x;
        if (options->softcap != 0) {
            double bent = tanh(x / (double)options->softcap);
            keys->z[n] = (double)options->softcap * bent;
            keys->slope[n] = 1 - bent * bent;
        }
        if (options->bias)
            keys->z[n] += option_element(options->bias, sequence, key_block_at(&job->key_blocks, j), job->head);
    }
}

double row_lse(const struct row_job *job, const struct row_keys *keys)
{
    const clattn_tensor *sink = job->problem->options.sink;
    double row_max = -INFINITY, row_sum = 0;
    if (keys->count == 0) return -INFINITY; /* an empty row stays empty, sink or not */
    for (int64_t n = 0; n < keys->count; n++)
        row_max = fmax(row_max, keys->z[n]);
    double sink_logit = sink ? option_element(sink, job->sequence, 0, job->head) : -INFINITY;
    row_max = fmax(row_max, sink_logit);
    if (row_max == -INFINITY) return -INFINITY;
    for (int64_t n = 0; n < keys->count; n++)
        row_sum += exp(keys->z[n] - row_max);
    if (sink) row_sum += exp(sink_logit - row_max);
    return row_max + log(row_sum);
}
