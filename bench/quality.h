/* SPDX-License-Identifier: MIT
 *
 * How good block lists are: what exact attention would have given to the blocks they hold (quality.c), and the
 * files that say which rows are judged and where answers stand (quality_files.c).
 *
 * For every judged query row and key head the attention mass of a leaf is the sum over its visible keys of the
 * softmax over all visible keys, the mean over the heads of the group. The best K leaves are those of greatest
 * mass; equal masses, lower index first. Sums are double. */
#ifndef CLATTN_BENCH_QUALITY_H
#define CLATTN_BENCH_QUALITY_H

#include "tensor_file.h"

#include <clattn.h>
#include <stdbool.h>
#include <stdint.h>

/* One sequence. */
struct quality_problem {
    clattn_tensor q, k; /* host views of batch 1, float32, float16 or bfloat16; any strides */
    bool causal;
    float scale;         /* CLATTN_SCALE_DEFAULT: 1 / sqrt(dim) */
    float softcap;       /* 0: none */
    int64_t window;      /* tokens; 0: none */
    int32_t leaf, topk;  /* K of recall and of the best mass */
    const int64_t *rows; /* [row_count] query rows that are judged; NULL: all */
    int64_t row_count;
    const int64_t *answer_rows;   /* [answer_count] query rows at which the model answers, judged or not ... */
    const int64_t *answer_leaves; /* ... and the leaf that it needs there */
    int64_t answer_count;
};

/* The lists of one selector: row i of head h begins at indices + (i / q_block * heads + h) * entries. */
struct quality_lists {
    const int32_t *indices; /* -1 on the right */
    int64_t entries;        /* of a list, padding included */
    int32_t heads;          /* 1, kv_heads or q_heads; of q_heads, each head is judged by its own mass */
    int32_t q_block;        /* query rows that share a list */
};

/* Sums, so that sequences add up; see quality_recall() and so on. */
struct quality {
    int64_t lists;              /* (row, head) pairs judged */
    double recall, mass, share; /* sums over them */
    int64_t answers, found;     /* an answer is found when a list of its row has the leaf, of any head */
};

/* Adds what `count` selectors reach to results [count]; the masses are computed once for all of them.
 * False: out of memory. */
bool quality_measure(const struct quality_problem *problem, const struct quality_lists *lists, int count,
                     struct quality *results);

/* Means; NAN when nothing was judged. Recall: the share of the best K leaves that the list has. Mass: of all
 * attention, what the list keeps. Share: that over the mass of the best K leaves. */
double quality_recall(const struct quality *quality);
double quality_mass(const struct quality *quality);
double quality_share(const struct quality *quality);

/* ---- files ---- */

/* Positions of queries as int32 [count], where a query row's position is its row + kv_len - q_len. */
struct quality_files {
    struct tensor_file positions, answers, needles;
    int64_t *rows, *answer_rows, *answer_leaves; /* as in struct quality_problem */
    int64_t row_count, answer_count;
};

/* Opens --positions, --answers and --needles (each may be NULL, the last two go together) and turns them into
 * rows of a sequence. Rows before position `from` and positions that the queries do not have are left out of
 * `rows`; answers outside of them are left out likewise. Returns an exit status; the reason was printed. */
int quality_files_open(struct quality_files *files, const char *positions, const char *answers,
                       const char *needles, int64_t from, int64_t q_len, int64_t kv_len, int32_t leaf);
void quality_files_close(struct quality_files *files);

#endif
