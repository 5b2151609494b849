/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_TURNS_H
#define CLATTN_CPU_TURNS_H

/* Threads that add to the same sums one after the other, in an order that does not depend on them.
 *
 * Pieces of work are numbered and begun in that order (turn_next); each adds to a sum when it is its turn
 * there. The piece of the least number that is not done never waits, so there is always one that goes on. */

#include <sched.h>
#include <stdint.h>

/* The number of the next piece. */
static inline int64_t turn_next(int64_t *counter)
{
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

/* Waits until all pieces before `number` have passed. */
static inline void turn_wait(const int64_t *turn, int64_t number)
{
    while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != number)
        sched_yield();
}

static inline void turn_pass(int64_t *turn, int64_t number)
{
    __atomic_store_n(turn, number + 1, __ATOMIC_RELEASE);
}

#endif
