/* SPDX-License-Identifier: MIT
 *
 * `clattn demo` in parts: backends and table (demo.c), the sample and what is expected of it (demo_sample.c).
 */
#ifndef CLATTN_BENCH_DEMO_H
#define CLATTN_BENCH_DEMO_H

#include "tensor_file.h"

#include <clattn.h>

/* What the sample was computed with, tests/data/README.md. */
#define SAMPLE_TOPK 8
#define SAMPLE_LEAF 64
#define SAMPLE_CLEAR_GAP 1e-3f /* score differences below may be decided by rounding */

enum sample_file {
    SAMPLE_Q,
    SAMPLE_K,
    SAMPLE_V,
    SAMPLE_POS,
    SAMPLE_ANSWERS,
    SAMPLE_NEEDLES,
    SAMPLE_OUT,
    SAMPLE_LSE,
    SAMPLE_FILES
};

struct sample {
    char directory[1024];
    struct tensor_file files[SAMPLE_FILES];
    clattn_dtype dtype;
    int64_t q_len, kv_len, q_heads, kv_heads, dim, dim_v;
    int64_t first_position; /* of query row 0 */
    int64_t positions, answers;
    const int32_t *position;        /* [positions]: where results are known */
    const int32_t *answer, *needle; /* [answers]: where the model answers, and where the fact stands */
};

/* What a selector should choose, and attention over that: for each known position. */
struct oracle {
    struct tensor_file lists_file, gap_file;
    const int32_t *lists; /* [positions][SAMPLE_TOPK] */
    const float *gap;     /* [positions] */
    float *out, *abs_out; /* [positions][q_heads][dim_v]; abs_out = sum_j p_j |v_j| */
    float *lse;           /* [positions][q_heads] */
    int64_t *keys;        /* [positions]: how many keys a query sees */
    double *condition;    /* [positions][q_heads]: row_condition() */
};

/* Opens the sample in `directory`, or where it was installed or built (NULL). Returns an exit status. */
int sample_open(struct sample *sample, const char *directory);
void sample_close(struct sample *sample);

/* Host views of the sample's tensors. */
clattn_tensor sample_view(const struct sample *sample, enum sample_file which);

/* Reads the expected lists of a selector ("pisa", "flat_lse") and attends to them with the reference; for pisa
 * the result is that of the sample's independent computation. Returns an exit status; call oracle_close() in
 * any case. */
int oracle_open(struct oracle *oracle, const struct sample *sample, const char *selector,
                clattn_context *reference);
void oracle_close(struct oracle *oracle);

#endif
