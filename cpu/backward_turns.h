/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_BACKWARD_TURNS_H
#define CLATTN_CPU_BACKWARD_TURNS_H

#include "backward.h"

/* Gradients of queries in the walk over the key blocks (cpu_backward.c): five matrix products for a pair of a
 * row and a block, where a second walk over the rows takes seven, and every exponential twice.
 *
 * Blocks of one row are worked on by several threads. Each row and head counts the blocks that have given to
 * it, and a block gives when those before it in the row's list have: the bits do not depend on the threads. The
 * sums are the caller's tensor, so it must be float32. */

/* items: pieces of work of the walk; so few would leave threads idle that tiles of rows keep busy. Depends on
 * the shape alone. */
bool backward_turns_wanted(const struct backward_job *job, int64_t items);

/* Blocks that give to query row i and head before the tile's. */
int64_t backward_turn(const struct backward_job *job, const struct key_tile *tile, int64_t i, int32_t head);

/* Row i of a sequence of dq, all heads, to 0. */
void backward_clear_row(const struct backward_job *job, const struct sequence *sequence, int64_t i);

#endif
