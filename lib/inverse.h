/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_LIB_INVERSE_H
#define CLATTN_LIB_INVERSE_H

#include "key_blocks.h"

/* Block lists the other way round: which list rows a block is listed in. A list head of a sequence with b
 * blocks has b consecutive bins; rows of a bin ascend. Built by a counting sort: 4 bytes a listed pair and 8 a
 * bin. */
struct inverse {
    int64_t *bins;  /* [sequences + 1] first bin of list head 0; head h begins h * blocks later */
    int64_t *first; /* [bins + 1] first entry of a bin */
    int32_t *rows;  /* [entries] list row, counted from the sequence's first */
};

/* indices, counts: those of `blocks` in host memory. */
clattn_status inverse_make(clattn_context *context, const struct problem *problem, const clattn_blocks *blocks,
                           const int32_t *indices, const int32_t *counts, struct inverse *inverse);
void inverse_free(struct inverse *inverse);

static inline int64_t inverse_bin(const struct inverse *inverse, const struct problem *problem,
                                  const clattn_blocks *blocks, int64_t s, int32_t list_head, int64_t block)
{
    return inverse->bins[s] + list_head * key_blocks_listed(blocks, &problem->sequences[s]).count + block;
}

#endif
