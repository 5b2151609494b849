/* SPDX-License-Identifier: MIT
 *
 * `clattn check` in parts: options and flow (check.c), the shapes (check_cases.c), random inputs and the
 * reference's answer (check_problem.c), comparing lists and numbers (check_compare.c), whether a list may
 * differ (select_gap.c). */
#ifndef CLATTN_BENCH_CHECK_H
#define CLATTN_BENCH_CHECK_H

#include "tolerance.h"
#include "job.h"

#include <clattn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum input_kind {
    INPUT_RANDOM,   /* normal numbers */
    INPUT_LARGE,    /* keys and queries so large that softmax picks one key */
    INPUT_CONSTANT, /* all keys equal: ties everywhere */
    INPUT_ZERO_Q    /* exact means */
};

struct check_case {
    bool quick; /* part of --quick */
    enum input_kind kind;
    clattn_selector selector;
    bool causal;
    int32_t batch, q_len, kv_len, q_heads, kv_heads, dim, dim_v, leaf, topk;
    int32_t sequences; /* 0: every batch entry is one */
    const int32_t *cu_q, *cu_k;
};

extern const struct check_case check_cases[];
extern const size_t check_case_count;

/* One case with one element type: the inputs, and what the reference makes of them. */
struct check_problem {
    const struct check_case *shape;
    clattn_dtype dtype;
    float *q, *k; /* the values that the elements below stand for */
    void *q_data, *k_data, *v_data, *v_abs_data;
    struct job reference; /* lists, out, lse */
    float *abs_out;       /* sum_j p_j |v_j|, as out */
    int32_t *lists;       /* [batch][q_len][kv_heads][topk]; NULL: dense */
};

/* Makes inputs from `seed` and runs the reference. Returns an exit status; call check_problem_release() in any
 * case.
 */
int check_problem_make(struct check_problem *problem, const struct check_case *shape, clattn_dtype dtype,
                       uint64_t seed, clattn_context *reference);
void check_problem_release(struct check_problem *problem);

/* Fills in what `job` shares with every other one of the problem, with memory for its results. False: no
 * memory. */
bool check_problem_job(const struct check_problem *problem, clattn_context *context, struct job *job);

/* Where query row (batch b, row i) stands. */
struct query_place {
    int64_t position;       /* t, negative: before every key */
    int64_t keys, key_base; /* length of its sequence of keys, and its first row in k */
};
struct query_place check_problem_place(const struct check_problem *problem, int64_t b, int64_t i);

struct check_result {
    int64_t lists_wrong; /* lists that differ where the scores decide clearly */
    int64_t lists_tied;  /* lists that differ where rounding may decide */
    struct comparison numbers;
};

/* Runs the problem in `context` and compares. Returns an exit status: STATUS_FAILED when it could not run. */
int check_problem_compare(const struct check_problem *problem, clattn_context *context,
                          struct check_result *result);

/* How clearly the selection of one query and key head was decided. */
struct select_gap {
    double gap;   /* smallest difference of scores between a kept and a dropped node */
    double error; /* how much two such scores may differ by rounding in float32 */
};
struct select_gap select_gap(const struct check_problem *problem, int64_t b, int64_t i, int64_t kv_head);

#endif
