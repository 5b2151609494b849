/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_COMPENSATION_H
#define CLATTN_CPU_COMPENSATION_H

/* Gradient compensation: what key blocks receive from rows that see but do not list them.
 *
 * A row that lists block a, and then nothing before block b, gives to the keys of a .. b - 1 what it gives to
 * those of a, as far as it sees them. So the rows of a are taken by the last block that they reach, the
 * farthest first: their running sum is what each block on the right of a receives, and every product is
 * computed once more at most. Rows that see a part of a block only are computed for it alone, which is one
 * block a row. */

#include "backward.h"
#include "inverse.h"

struct compensation {
    int64_t floats; /* of a block: dk, then dv, as in struct key_tile */
    int64_t *first; /* [sequences] first block of key head 0; head h begins h * blocks later */
    float *sums;    /* [blocks][floats]; NULL: there is none */
};

/* delta, delta_base: D as in struct key_tile, of sequence s from delta_base[s] on. Memory: as dk and dv in
 * float32. */
clattn_status compensation_make(clattn_context *context, const struct backward_job *job,
                                const struct inverse *inverse, const float *delta, const int64_t *delta_base,
                                int32_t pack, struct compensation *result);

/* Adds the block's share to dk and dv, which lie one behind the other. */
void compensation_add(const struct compensation *compensation, const struct backward_job *job, int64_t s,
                      int32_t kv_head, int64_t block, float *sums);
void compensation_free(struct compensation *compensation);

#endif
