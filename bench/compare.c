/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "compare.h"

#include <float.h>
#include <math.h>

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
    const double eps = FLT_EPSILON, n = (double)oracle->keys;
    /* Matrix units multiply 16-bit weights: each p_j may be off by half a unit in the last place. */
    const double unit = dtype == CLATTN_FLOAT16 ? 0x1p-11 : dtype == CLATTN_BFLOAT16 ? 0x1p-8 : 0;
    for (int64_t d = 0; d < dim_v; d++) {
        double reference = oracle->out[d], spread = oracle->abs_out[d];
        double tolerance = fmax(8 * (1 + n) * eps * fabs(reference), eps * spread) + unit * spread;
        raise_maximum(&comparison->out_error, &comparison->out_ratio, fabs(out[d] - reference), tolerance);
    }
    /* Both -inf: an empty row. */
    double difference = lse == oracle->lse ? 0 : fabs((double)lse - oracle->lse);
    raise_maximum(&comparison->lse_error, &comparison->lse_ratio, difference,
                  8 * eps * (1 + fabs((double)oracle->lse)) + unit);
}
