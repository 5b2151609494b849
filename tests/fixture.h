/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TEST_FIXTURE_H
#define CLATTN_TEST_FIXTURE_H

/* One problem with its arrays, and the library's calls on it with poisoned outputs and checked guards. */

#include "oracle.h"

struct shape {
    const char *name;
    enum test_size size;
    int64_t batch, q_len, kv_len;
    int kv_heads, group, dim, dim_v;
    clattn_dtype dtype;
    enum layout layout;
    bool all_keys; /* not causal */
};

struct fixture {
    struct array q, k, v, out, lse;
    clattn_attention_desc attention;
    bool exact_logits;
    const char *name;
};

/* Arrays of the shape, filled with normal numbers. */
struct fixture fixture_new(const struct shape *shape, struct random *random);
void fixture_free(struct fixture *fixture);
void fixture_out_dtype(struct fixture *fixture, clattn_dtype dtype); /* another type of `out` */
void fixture_packed(struct fixture *fixture, int64_t sequences, const int32_t *cu_q, const int32_t *cu_k);

struct forward fixture_problem(const struct fixture *fixture, const struct lists *lists);
struct selection fixture_selection(const struct fixture *fixture, const clattn_select_desc *select);
struct spans fixture_spans(const struct fixture *fixture, int32_t q_block);

/* Runs clattn_attention_forward into poisoned arrays, checks the guards and nothing else. lists NULL: all keys.
 */
void fixture_forward(const struct target *target, struct fixture *fixture, const struct lists *lists);

/* The same, and compares with the expected result. */
void fixture_check_forward(const struct target *target, struct fixture *fixture, const struct lists *lists,
                           const struct expected *expected);

/* On every target that runs the class. */
void fixture_check_all(enum test_size size, struct fixture *fixture, const struct lists *lists);

clattn_blocks *lists_upload(const struct target *target, const struct lists *lists);

/* clattn_select with a pyramid made by the call; the result as host lists, whose counts are in *counts if not
 * NULL. */
struct lists fixture_select(const struct target *target, const struct fixture *fixture,
                            const clattn_select_desc *select, int32_t **counts);

/* Selects on every target that runs the class and compares with the oracle; returns the share of lists with
 * only one right answer. */
double fixture_check_select(enum test_size size, const struct fixture *fixture,
                            const clattn_select_desc *select);

clattn_select_desc select_desc(clattn_selector selector, int32_t topk, int32_t leaf);
const char *selector_name(clattn_selector selector);

/* Expects this list for a row and head; -1 ends `want`. */
void lists_expect(const struct lists *lists, int64_t row, int32_t head, const int32_t *want, const char *label,
                  const char *name);

#endif
