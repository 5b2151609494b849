/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TEST_ORACLE_H
#define CLATTN_TEST_ORACLE_H

/* What the results must be, in double precision and straight from the definition; shares no code with the
 * library. */

#include "harness.h"

/* ---- sequences ---- */

struct span {
    int64_t batch, q_row, q_len, k_row, kv_len, list_row;
};

enum { SPANS_MAX = 64 };

struct spans {
    struct span at[SPANS_MAX];
    int count;
    int64_t list_rows;
};

struct spans spans_of(const clattn_attention_desc *attention, const clattn_tensor *q, const clattn_tensor *k,
                      int32_t q_block);
double scale_of(const clattn_attention_desc *attention, const clattn_tensor *k);

/* ---- lists ---- */

/* Block lists on the host: indices [rows][heads][topk]. desc.starts, if any, are the test's. */
struct lists {
    clattn_blocks_desc desc; /* with starts, block is 0 */
    int32_t *indices;
};

struct lists lists_random(struct random *random, const struct spans *spans, int32_t block, int32_t q_block,
                          int32_t heads, int32_t topk, double density);
struct lists lists_random_starts(struct random *random, const struct spans *spans, const int64_t *starts,
                                 int64_t start_count, int32_t q_block, int32_t heads, int32_t topk,
                                 double density);
struct lists lists_all(const struct spans *spans, int32_t block,
                       int32_t heads); /* every block of each sequence */
void lists_free(struct lists *lists);

/* ---- forward ---- */

struct forward {
    clattn_attention_desc attention;
    clattn_tensor q, k, v;
    const struct lists *lists; /* NULL: all keys */
    bool exact_logits;         /* small integers and the like: the logits have no rounding */
};

/* For each (batch, row, head) of q, in that order. */
struct expected {
    double *out;       /* [rows][dim_v] */
    double *magnitude; /* [rows][dim_v] sum_j p_j |v_j| */
    double *lse;       /* [rows] */
    double *condition; /* [rows] scale * max_j sum_d |q_d k_jd|: how far one rounding in q moves a logit, in
                          epsilons; with the roundings of options, if any */
    int64_t *keys;     /* [rows] number of keys connected; -1: padding, which must stay as it is */
};

struct expected expected_forward(const struct forward *forward);
void expected_free(struct expected *expected);

/* Compares and fails with the first bad index. lse may be NULL. */
void expected_compare(const struct expected *expected, const struct forward *forward, const clattn_tensor *out,
                      const clattn_tensor *lse, const char *label, const char *name);

/* ---- selection ---- */

/* What a query may get: `sure` leaves must be in the list, the others must be among `possible`. They differ
 * only where the deciding scores lie closer than the rounding of the library allows. */
struct choice {
    int32_t *sure, *possible; /* ascending */
    int sure_count, possible_count;
    int count_min, count_max;
};

struct selection {
    clattn_attention_desc attention;
    clattn_select_desc select;
    clattn_tensor q, k;
};

/* Means of one sequence's key head in double precision. Level 0 are the keys, level 1 the leaves. */
enum { LEVELS_MAX = 32 };

struct means {
    int levels; /* the highest level */
    int64_t dim, nodes[LEVELS_MAX];
    double *at[LEVELS_MAX]; /* [nodes][dim] */
};

int64_t nodes_of(int64_t kv_len, int32_t leaf, int level);
struct means means_new(const clattn_tensor *k, const struct span *span, int64_t kv_head, int32_t leaf);
void means_free(struct means *means);

/* For every list [rows][kv_heads]. */
struct choices {
    struct choice *at;
    int64_t count, unique; /* lists, and those with only one right answer */
};

struct choices choices_of(const struct selection *selection);
void choices_free(struct choices *choices);

/* Compares whole lists [rows][kv_heads][topk] and counts [rows][kv_heads]. */
void choices_compare(const struct choices *choices, const struct selection *selection, const int32_t *indices,
                     const int32_t *counts, const char *label, const char *name);

#endif
