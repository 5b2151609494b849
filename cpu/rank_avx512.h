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

/* walk_decide for at most 16 scores, in float32 whose roundings go outwards. What is decided for all of them is
 * already the choice. */
static inline void rank_decide_few(struct walk *walk, int32_t room)
{
    int32_t count = (int32_t)walk->scored_count;
    __mmask16 exists = (__mmask16)((1u << count) - 1), unknown;
    float low[16], high[16];
    __m512d score[2], error[2];
    __m256 lows[2], highs[2];
    for (int n = 0; n < 2; n++) {
        __mmask8 part = (__mmask8)(exists >> 8 * n);
        score[n] = _mm512_mask_loadu_pd(_mm512_set1_pd(NAN), part, walk->score + 8 * n);
        error[n] = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(part, walk->error + 8 * n));
        lows[n] =
            _mm512_cvt_roundpd_ps(_mm512_sub_pd(score[n], error[n]), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        highs[n] =
            _mm512_cvt_roundpd_ps(_mm512_add_pd(score[n], error[n]), _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    }
    __m512 all_low = _mm512_insertf32x8(_mm512_castps256_ps512(lows[0]), lows[1], 1);
    __m512 all_high = _mm512_insertf32x8(_mm512_castps256_ps512(highs[0]), highs[1], 1);
    __m512i better = _mm512_setzero_si512(), rivals = _mm512_set1_epi32(-1), one = _mm512_set1_epi32(1);
    _mm512_storeu_ps(low, all_low);
    _mm512_storeu_ps(high, all_high);
    for (int32_t n = 0; n < count; n++) { /* each is a rival of itself */
        __mmask16 above = _mm512_cmp_ps_mask(_mm512_set1_ps(low[n]), all_high, _CMP_GT_OQ);
        __mmask16 near = _mm512_cmp_ps_mask(_mm512_set1_ps(high[n]), all_low, _CMP_GE_OQ);
        better = _mm512_mask_add_epi32(better, above, better, one);
        rivals = _mm512_mask_add_epi32(rivals, near, rivals, one);
    }
    __mmask16 kept = _mm512_mask_cmplt_epi32_mask(exists, rivals, _mm512_set1_epi32(room));
    __mmask16 dropped = _mm512_mask_cmpge_epi32_mask(exists, better, _mm512_set1_epi32(room));
    __m512 errors = _mm512_maskz_loadu_ps(exists, walk->error);
    unknown = exists & (__mmask16) ~(kept | dropped);
    for (int n = 0; n < 2; n++) {
        _mm512_mask_storeu_pd(walk->score + 8 * n, (__mmask8)(dropped >> 8 * n), _mm512_set1_pd(-INFINITY));
        _mm512_mask_storeu_pd(walk->score + 8 * n, (__mmask8)(kept >> 8 * n), _mm512_set1_pd(INFINITY));
    }
    _mm_mask_storeu_epi8(
        walk->open, exists,
        _mm_maskz_set1_epi8(_mm512_mask_cmp_ps_mask(unknown, errors, _mm512_setzero_ps(), _CMP_GT_OQ), 1));
    _mm_mask_storeu_epi8(walk->keep, exists, _mm_maskz_set1_epi8(kept, 1));
    walk->chosen = unknown == 0;
}

/* walk_decide for at most RANK_MAX scores. */
static inline void rank_decide(struct walk *walk, int32_t room)
{
    int32_t count = (int32_t)walk->scored_count;
    if (count <= 16) {
        rank_decide_few(walk, room);
        return;
    }
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
