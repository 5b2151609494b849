/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_SELECT_REF_H
#define CLATTN_SELECT_REF_H

/* What the files of the reference selection share. */

#include "reference.h"

/* One query row and key head. */
struct ref_walk {
    const struct select_job *job;
    const struct sequence *sequence;
    int64_t sequence_index;
    const float *means; /* of the pyramid; NULL for flat LSE */
    int64_t row, seen;  /* query row, number of keys that it sees */
    int32_t kv_head, leaf, topk;
    int64_t forced[CLATTN_TOPK_MAX]; /* forced leaves, by priority */
    int32_t forced_count;
};

/* scale * q_g . row for head g of the group; row: float32 means, or a key of the caller. */
double ref_logit(const struct ref_walk *walk, int32_t g, const void *row, clattn_dtype dtype);
double ref_key_logit(const struct ref_walk *walk, int32_t g, int64_t j); /* of key j */
int64_t ref_level_first(const struct ref_walk *walk, int level); /* first node of the level in walk->means */
double ref_logsumexp(const double *logit, int64_t count);        /* NaN when a logit is NaN */

/* Robust selection: group scores of those candidates that are not kept already. prefilter: of leaves by their
 * parts. */
void robust_scores_ref(const struct ref_walk *walk, int level, bool prefilter, const int64_t *nodes,
                       int64_t count, const bool *keep, double *score);

#endif
