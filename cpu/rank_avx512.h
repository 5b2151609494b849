/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_RANK_AVX512_H
#define CLATTN_RANK_AVX512_H

/* The best of few scores, each compared with all others at once: AVX-512. See select_walk.h. */

#include "select_walk.h"

#include <immintrin.h>
#include <math.h>

enum { RANK_VECTORS = RANK_MAX / 8 };

/* Up to RANK_MAX doubles; the lanes from count on are NaN, which compares with nothing. */
static inline void rank_load(const double *x, int32_t count, __m512d part[RANK_VECTORS])
{
    for (int32_t n = 0; n < RANK_VECTORS; n++) {
        int32_t left = MIN(MAX(count - 8 * n, 0), 8);
        part[n] =
            _mm512_mask_loadu_pd(_mm512_set1_pd(NAN), (__mmask8)((1u << left) - 1), x + (left ? 8 * n : 0));
    }
}

/* Bit j: does x[j] compare so with `than`? */
#define RANK_COMPARE(PART, THAN, HOW)                                                                          \
    ((uint32_t)_mm512_cmp_pd_mask((PART)[0], THAN, HOW) |                                                      \
     (uint32_t)_mm512_cmp_pd_mask((PART)[1], THAN, HOW) << 8 |                                                 \
     (uint32_t)_mm512_cmp_pd_mask((PART)[2], THAN, HOW) << 16)

static void rank_few(const double *score, int32_t count, int32_t room, bool *keep)
{
    __m512d part[RANK_VECTORS];
    rank_load(score, count, part);
    for (int32_t i = 0; i < count; i++) {
        __m512d own = _mm512_set1_pd(score[i]);
        uint32_t above = RANK_COMPARE(part, own, _CMP_GT_OQ);
        uint32_t before = RANK_COMPARE(part, own, _CMP_EQ_OQ) & ((1u << i) - 1);
        keep[i] = __builtin_popcount(above | before) < room;
    }
}

/* walk_decide for at most RANK_MAX scores. */
static inline void rank_decide(struct walk *walk, int32_t room)
{
    int32_t count = (int32_t)walk->scored_count;
    double low[RANK_MAX], high[RANK_MAX];
    __m512d lows[RANK_VECTORS], highs[RANK_VECTORS];
    for (int32_t i = 0; i < count; i++) {
        low[i] = walk->score[i] - (double)walk->error[i];
        high[i] = walk->score[i] + (double)walk->error[i];
    }
    rank_load(low, count, lows);
    rank_load(high, count, highs);
    for (int32_t i = 0; i < count; i++) {
        uint32_t better = RANK_COMPARE(lows, _mm512_set1_pd(high[i]), _CMP_GT_OQ);
        uint32_t rivals = RANK_COMPARE(highs, _mm512_set1_pd(low[i]), _CMP_GE_OQ) & ~(1u << i);
        bool dropped = __builtin_popcount(better) >= room, kept = __builtin_popcount(rivals) < room;
        double decided = kept ? INFINITY : -INFINITY;
        walk->score[i] = dropped || kept ? decided : walk->score[i];
        walk->open[i] = !dropped && !kept && walk->error[i] > 0;
    }
}

#undef RANK_COMPARE

#endif
