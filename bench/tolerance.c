/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "tolerance.h"

#include <float.h>
#include <math.h>

/* Keys begin .. end - 1 of the row's n-th leaf, cut off where it sees no more. */
static int64_t leaf_end(const struct row_keys *row, int32_t n, int64_t *begin)
{
    if (!row->list) {
        *begin = 0;
        return row->visible;
    }
    *begin = (int64_t)row->list[n] * row->leaf;
    int64_t end = *begin + row->leaf;
    return end < row->visible ? end : row->visible;
}

static int32_t leaf_count(const struct row_keys *row)
{
    int32_t n = 0;
    if (!row->list) return 1;
    while (n < row->topk && row->list[n] >= 0)
        n++;
    return n;
}

int64_t row_count(const struct row_keys *row)
{
    int64_t count = 0, begin;
    for (int32_t n = 0; n < leaf_count(row); n++) {
        int64_t end = leaf_end(row, n, &begin);
        if (end > begin) count += end - begin;
    }
    return count;
}

double row_condition(const struct row_keys *row, const float *q, double scale)
{
    double most = 0;
    int64_t begin;
    for (int32_t n = 0; n < leaf_count(row); n++) {
        int64_t end = leaf_end(row, n, &begin);
        for (int64_t j = begin; j < end; j++) {
            const float *key = row->keys + j * row->stride;
            double size = 0;
            for (int32_t d = 0; d < row->dim; d++)
                size += fabs((double)q[d] * key[d]);
            most = fmax(most, size);
        }
    }
    return fabs(scale) * most;
}

/* Raises the maxima by one difference; NaN compares as infinitely far. */
static void raise_maximum(double *error, double *ratio, double difference, double tolerance)
{
    double r = difference == 0 ? 0 : difference / tolerance;
    if (isnan(difference)) difference = r = INFINITY;
    if (difference > *error) *error = difference;
    if (r > *ratio) *ratio = r;
}

void compare_row(struct comparison *comparison, const struct oracle_row *oracle, clattn_dtype dtype,
                 int64_t dim_v, const float *out, float lse)
{
    /* A sum of n products has at most n roundings; where they cancel, the roundings of the logits remain, which
     * move every p_j by eps times the logits' condition. */
    const double eps = FLT_EPSILON, n = (double)oracle->keys;
    /* Matrix units multiply 16-bit weights: each p_j may be off by half a unit in the last place. */
    const double unit = dtype == CLATTN_FLOAT16 ? 0x1p-11 : dtype == CLATTN_BFLOAT16 ? 0x1p-8 : 0;
    for (int64_t d = 0; d < dim_v; d++) {
        double reference = oracle->out[d], spread = oracle->abs_out[d];
        double tolerance = fmax(8 * (1 + n) * eps * fabs(reference), (1 + oracle->condition) * eps * spread);
        tolerance += unit * spread + FLT_MIN;
        raise_maximum(&comparison->out_error, &comparison->out_ratio, fabs(out[d] - reference), tolerance);
    }
    /* Both -inf: an empty row. */
    double difference = lse == oracle->lse ? 0 : fabs((double)lse - oracle->lse);
    raise_maximum(&comparison->lse_error, &comparison->lse_ratio, difference,
                  eps * (8 + 2 * fabs((double)oracle->lse) + 2 * oracle->condition));
}
