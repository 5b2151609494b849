/* SPDX-License-Identifier: MIT
 *
 * How far a float32 result may be from the oracle. */
#ifndef CLATTN_BENCH_TOLERANCE_H
#define CLATTN_BENCH_TOLERANCE_H

#include <clattn.h>
#include <stdint.h>

struct comparison {
    double out_error, lse_error; /* greatest absolute difference */
    double out_ratio,
        lse_ratio; /* greatest difference over tolerance; above 1 is wrong; a NaN counts as infinite */
};

/* One row of the oracle: out and abs_out = sum_j p_j |v_j| over `keys` keys, each [dim_v]. */
struct oracle_row {
    const float *out, *abs_out;
    float lse;
    int64_t keys;
    double condition; /* row_condition() */
};

/* scale * max_j sum_d |q_d k_jd| over the keys j that a row sees: how far one rounding in q moves a logit, in
 * units of the rounding. `list` has leaves of `leaf` keys, -1 on the right; NULL: every key. Keys are `stride`
 * floats apart. */
struct row_keys {
    const float *keys;
    int64_t stride, visible; /* keys 0 .. visible - 1 */
    const int32_t *list;
    int32_t leaf, topk, dim;
};
double row_condition(const struct row_keys *row, const float *q, double scale);

/* How many keys a row sees. */
int64_t row_count(const struct row_keys *row);

/* Compares a row and raises the maxima. */
void compare_row(struct comparison *comparison, const struct oracle_row *oracle, clattn_dtype dtype,
                 int64_t dim_v, const float *out, float lse);

#endif
