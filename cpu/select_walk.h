/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_SELECT_WALK_H
#define CLATTN_SELECT_WALK_H

/* The walk down the pyramid, common to all vectorised variants; only the scores are theirs. select_ref.c says
 * the same in plain words. */

#include "cpu.h"

/* Where a choice stands: at level 1, robust selection chooses twice. */
enum stage { STAGE_LEVEL, STAGE_PREFILTER };

/* Says which of at most RANK_MAX scores are the best `room`; equal scores: the first ones. */
enum { RANK_MAX = 24 };
typedef void walk_rank_function(const double *score, int32_t count, int32_t room, bool *keep);

/* One query row and key head. */
struct walk {
    const struct select_job *job;
    walk_rank_function *rank; /* the variant's own; NULL: plain C */
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

    /* Candidates of the current level, ascending, and what choosing among them needs. */
    int top;         /* level where the walk starts; 0: the query sees nothing */
    int64_t *node;   /* [max] */
    int64_t *scored; /* [max] those that are not forced */
    double *score;   /* [max] of scored */
    int32_t *heap;   /* [room] indices into scored, the worst on top */
    bool *keep;      /* [max] of scored */
    bool chosen;     /* keep says already what walk_choose would find */
    bool *open;      /* [max] of scored: those whose score is asked for; rough scores: see walk_decide */
    float *error;    /* [max] of score, when it is rough */
    double *bound;   /* [max] score minus or plus error */
    int64_t count, scored_count;
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

/* Bytes that one walk needs, a multiple of 64; score_scratch begins there. */
size_t select_walk_scratch(const struct select_job *job);

/* As select_row_function, with the variant's scores and `scratch` of select_walk_scratch bytes.
 * walk->score_scratch must be set by the caller through `score_scratch`; `begin` is called once before the
 * first score. */
int32_t select_walk(const struct select_job *job, int64_t s, int32_t kv_head, int64_t i,
                    void (*begin)(const struct walk *walk), select_score_function *score_nodes, void *scratch,
                    int32_t *indices);

/* The steps of select_walk, for those who take many rows through one level after the other:
 *
 *     walk_begin;  for level = top .. 1: if (walk_enter) { fill score [scored_count]; walk_choose }  walk_end
 *
 * walk_enter goes to `level` and says whether there are more candidates than may be kept; then scored
 * [scored_count] are the nodes whose scores walk_choose needs. */
void walk_begin(const struct select_job *job, int64_t s, int32_t kv_head, int64_t i, void *scratch,
                struct walk *walk);
bool walk_enter(struct walk *walk, int level);
void walk_choose(struct walk *walk, int level);

/* Between the two, when score [scored_count] is off by at most error [scored_count]: opens those nodes whose
 * exact scores decide which ones are kept. The others get scores beyond all, so that walk_choose does what it
 * would with exact scores everywhere. Scores with an error of 0 are exact and stay as they are. */
void walk_decide(struct walk *walk, int level);

/* Scored nodes that may be kept at `level`. */
int32_t walk_room(const struct walk *walk, int level);
int32_t walk_end(const struct walk *walk, int32_t *indices); /* fills indices [topk], returns their number */

#endif
