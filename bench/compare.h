/* SPDX-License-Identifier: MIT
 *
 * How far a float32 result may be from the oracle (DESIGN: "Numbers"). */
#ifndef CLATTN_BENCH_COMPARE_H
#define CLATTN_BENCH_COMPARE_H

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
};

/* Compares a row and raises the maxima. */
void compare_row(struct comparison *comparison, const struct oracle_row *oracle, clattn_dtype dtype,
                 int64_t dim_v, const float *out, float lse);

#endif
