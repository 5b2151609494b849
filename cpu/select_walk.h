/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_SELECT_WALK_H
#define CLATTN_SELECT_WALK_H

/* The walk down the pyramid, common to all vectorised variants; only the scores are theirs. select_ref.c says
 * the same in plain words. */

#include "cpu.h"

/* Where a choice stands: at level 1, robust selection chooses twice. */
enum stage { STAGE_LEVEL, STAGE_PREFILTER };

/* One query row and key head. */
struct walk {
    const struct select_job *job;
    const struct sequence *sequence;
    const float *means;          /* of the pyramid; NULL for flat LSE */
    const float *bounds, *parts; /* of the pyramid, for robust selection */
    enum stage stage;            /* of the scores that are asked for */
    int64_t row, seen;           /* query row, number of keys that it sees */
    int64_t room;                /* keys that decide where the pyramid's nodes lie */
    int32_t kv_head, leaf, topk;
    int64_t last_first, last_end; /* forced leaves: [last_first, last_end) up to the query's own ... */
    int64_t first_end;            /* ... and [0, first_end) */
    void *score_scratch;          /* of the variant */
};

/* What is scored at a level: node n has the rows n * width .. n * width + width - 1 below `rows`. */
struct walk_children {
    bool keys;     /* the caller's keys, else means */
    int64_t width; /* rows of a node */
    int64_t rows;  /* that exist */
    int64_t base;  /* first of them in walk.means */
};

struct walk_children walk_children(const struct walk *walk, int level);

/* Group scores of `count` nodes in ascending order; NaN ranks as -infinity, which the function itself sees to.
 */
typedef void select_score_function(const struct walk *walk, int level, const int64_t *nodes, int64_t count,
                                   double *score);

/* Robust selection: one head's score of a node by statistics, where the vectorised one is NaN. */
double robust_score_exact(const struct walk *walk, int32_t head, int level, int64_t node);

/* Bytes that select_walk needs, a multiple of 64; score_scratch begins there. */
size_t select_walk_scratch(const struct select_job *job);

/* As select_row_function, with the variant's scores and `scratch` of select_walk_scratch bytes.
 * walk->score_scratch must be set by the caller through `score_scratch`; `begin` is called once before the
 * first score. */
int32_t select_walk(const struct select_job *job, int64_t s, int32_t kv_head, int64_t i,
                    void (*begin)(const struct walk *walk), select_score_function *score_nodes, void *scratch,
                    int32_t *indices);

#endif
