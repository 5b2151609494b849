/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TEST_PATTERN_ORACLE_H
#define CLATTN_TEST_PATTERN_ORACLE_H

/* Static patterns by brute force: is query row i joined with key j? One predicate a pattern, no lists. */

#include "clattn.h"

#include <stdbool.h>

/* Is a query in key block c connected to key block b? */
struct oracle_pair {
    int64_t c, b;
    int64_t blocks, keys; /* M and N of the sequence */
    int32_t block;        /* keys per block; 0: edges differ */
    int32_t head;
    bool causal;
    const int64_t *edges; /* [blocks + 1] first key of each block */
};

struct oracle_pattern {
    const char *text; /* for clattn_pattern_parse */
    bool (*connected)(const struct oracle_pair *pair);
    int32_t heads; /* that it needs; 0: any */
};

extern const struct oracle_pattern oracle_patterns[];
extern const int oracle_pattern_count;

/* What a pattern is applied to, as tests give it. */
struct oracle_shape {
    const char *name;
    int64_t batch, q_len, kv_len;
    int32_t block, q_block, heads;
    bool all_keys; /* not causal */
    int32_t sequences;
    const int32_t *cu_q, *cu_k, *used_q, *used_k;
    const int64_t *starts;
    int64_t start_count;
};

clattn_attention_desc oracle_attention(const struct oracle_shape *shape);
clattn_pattern_shape oracle_pattern_shape(const struct oracle_shape *shape);

/* One sequence of a shape. */
struct oracle_sequence {
    int64_t q_len, kv_len, q_row, k_row, list_row, list_rows;
    int64_t blocks;
    int64_t edges[1025]; /* first key of each block, at last kv_len */
};

int64_t oracle_sequences(const struct oracle_shape *shape);
void oracle_sequence(const struct oracle_shape *shape, int64_t s, struct oracle_sequence *sequence);
int64_t oracle_block_of(const struct oracle_sequence *sequence, int64_t key);

/* joined [q_len][kv_len], to be freed; never NULL. */
unsigned char *oracle_joined(const struct oracle_pattern *pattern, const struct oracle_shape *shape,
                             const struct oracle_sequence *sequence, int32_t head);

/* `random` draws for a block c of head h out of 0 .. count - 1, in order of the draws. */
void oracle_draws(uint64_t seed, int32_t head, int64_t c, int64_t count, int64_t random, int64_t *draws);

#endif
