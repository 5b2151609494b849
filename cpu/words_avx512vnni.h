/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_WORDS_AVX512VNNI_H
#define CLATTN_WORDS_AVX512VNNI_H

/* Queries and keys rounded to words of 16 bits, with what is needed for bounds of the error: AVX-512. Included
 * after simd_avx512.h and dot_vectors_simd.h.
 *
 *     q_h = step_h w_h + r_h,   k_c = center + step w_c + r_c     w: whole numbers, r: what rounding leaves
 *     logit[c][h] = scale (step_h step (w_h . w_c) + q_h . center),
 *                   off by at most  |scale| (|q_h| |r_c| + |r_h| |step w_c|)
 *
 * The last by Cauchy-Schwarz. Steps are such that no |w| exceeds WORD_NORM: neither does a sum overflow, by the
 * same inequality, nor an element. All keys of a leaf have one step.
 *
 *     queries [vector][pair][lane][2]
 *     keys    [row][word_stride]        padded by zeros
 *
 * Pair n of a block of 32 elements has its elements n and n + 16. */

#include "dot_vectors_simd.h"

#include <float.h>
#include <math.h>

enum {
    WORD_BLOCK = 32,   /* elements whose halves make the pairs */
    WORD_NORM = 46000, /* (WORD_NORM + sqrt(256) / 2)^2 < 2^31 */
    WORD_MAX = 32767,
    ROUGH_LOGIT = 4096 /* logits that may be greater have useless bounds */
};

static inline int64_t word_steps(int32_t dim)
{
    return round_up(dim, WORD_BLOCK) / 2;
}

/* Distance of keys. */
static inline int64_t word_stride(int32_t dim)
{
    return round_up(dim, WORD_BLOCK);
}

/* Of 16 rows: their totals, or greatest lanes, in the order of the rows. */
ALWAYS_INLINE __m512 word_join(const __m512 *row, __m512 (*join)(__m512, __m512))
{
    __m512 pair[8], four[4], half[2];
    UNROLL for (int n = 0; n < 8; n++) pair[n] =
        join(_mm512_unpacklo_ps(row[2 * n], row[2 * n + 1]), _mm512_unpackhi_ps(row[2 * n], row[2 * n + 1]));
    UNROLL for (int n = 0; n < 4; n++) four[n] = join(_mm512_shuffle_ps(pair[2 * n], pair[2 * n + 1], 0x44),
                                                      _mm512_shuffle_ps(pair[2 * n], pair[2 * n + 1], 0xee));
    UNROLL for (int n = 0; n < 2; n++) half[n] = join(_mm512_shuffle_f32x4(four[2 * n], four[2 * n + 1], 0x88),
                                                      _mm512_shuffle_f32x4(four[2 * n], four[2 * n + 1], 0xdd));
    return join(_mm512_shuffle_f32x4(half[0], half[1], 0x88), _mm512_shuffle_f32x4(half[0], half[1], 0xdd));
}

ALWAYS_INLINE __m512 word_rounded(__m512 x, __m512 inverse)
{
    return _mm512_fmadd_ps(x, inverse, _mm512_set1_ps(0x1.8p23f)); /* whose low bits are the whole number */
}

/* Pairs of words from two rounded halves of a block. */
ALWAYS_INLINE __m512i word_pairs(__m512 low, __m512 high)
{
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_castps_si512(low),
                                   _mm512_slli_epi32(_mm512_castps_si512(high), 16));
}

/* Adds to `sum` the square of what rounding left of x. */
ALWAYS_INLINE __m512 word_rest(__m512 x, __m512 rounded, __m512 step, __m512 sum)
{
    __m512 r = _mm512_fnmadd_ps(step, _mm512_sub_ps(rounded, _mm512_set1_ps(0x1.8p23f)), x);
    return _mm512_fmadd_ps(r, r, sum);
}

/* ---- queries ---- */

/* What the scores and bounds need of a row: sums over its heads, and the greatest. */
struct word_row {
    double norms, rests, norm_max; /* |q_h|, |r_h| */
    double shift;                  /* q_h . center */
    bool usable;
};

/* Keys of real models have elements that are far from zero in all of them; |k - center| is less than |k|. */
struct word_center {
    float at[256];
    double norm;
};

/* The center `at` [dim]; NULL, or not finite: zero. */
static inline void word_center_set(struct word_center *center, const float *at, int32_t dim)
{
    double square = 0;
    for (int32_t d = 0; d < 256; d++) {
        center->at[d] = at && d < dim ? at[d] : 0;
        square += (double)center->at[d] * (double)center->at[d];
    }
    if (!(square < 1e30))
        word_center_set(center, NULL, dim);
    else
        center->norm = sqrt(square);
}

/* Squares, greatest magnitudes and products with the center of WIDTH heads. */
static inline void word_query_sums(const float *const *head, const struct word_center *center, int32_t dim,
                                   __m512 *square, __m512 *most, __m512 *shift)
{
    __m512 squares[WIDTH], ranges[WIDTH], shifts[WIDTH];
    for (int h = 0; h < WIDTH; h++) {
        squares[h] = ranges[h] = shifts[h] = _mm512_setzero_ps();
        for (int32_t d = 0; d < dim; d += WIDTH) {
            __m512 x = _mm512_loadu_ps(head[h] + d);
            squares[h] = _mm512_fmadd_ps(x, x, squares[h]);
            ranges[h] = _mm512_max_ps(_mm512_abs_ps(x), ranges[h]);
            shifts[h] = _mm512_fmadd_ps(x, _mm512_loadu_ps(center->at + d), shifts[h]);
        }
    }
    *square = word_join(squares, vec_add);
    *most = word_join(ranges, vec_max);
    *shift = word_join(shifts, vec_add);
}

/* WIDTH heads of a row, each padded by zeros to whole blocks: words [pair][lane][2], step [WIDTH]; what they
 * add to `row`. Norms within 1e-10 .. 1e15 or 0 are usable: their squares and those of the rests are exact
 * enough. */
static inline void word_queries(const float *const *head, const struct word_center *center, int32_t dim,
                                int32_t *words, float *step, struct word_row *row)
{
    __m512 zero = _mm512_setzero_ps(), square, most, shift, rests[WIDTH], pairs[WIDTH];
    float inverses[WIDTH];
    word_query_sums(head, center, (int32_t)word_stride(dim), &square, &most, &shift);
    __mmask16 fits = _mm512_cmp_ps_mask(square, _mm512_set1_ps(1e-20f), _CMP_GE_OQ) &
                     _mm512_cmp_ps_mask(square, _mm512_set1_ps(1e30f), _CMP_LE_OQ);
    __mmask16 none = _mm512_cmp_ps_mask(most, zero, _CMP_EQ_OQ) & _mm512_cmp_ps_mask(square, zero, _CMP_EQ_OQ);
    row->usable &= (fits | none) == 0xffff;
    if (!row->usable) return;
    __m512 norm = _mm512_sqrt_ps(square);
    __m512 unit = _mm512_max_ps(_mm512_mul_ps(norm, _mm512_set1_ps(1.0f / WORD_NORM)),
                                _mm512_mul_ps(most, _mm512_set1_ps(1.0f / WORD_MAX)));
    _mm512_storeu_ps(step, unit);
    _mm512_storeu_ps(inverses, _mm512_maskz_div_ps(fits, _mm512_set1_ps(1), unit));
    for (int h = 0; h < WIDTH; h++)
        rests[h] = zero;
    for (int32_t d = 0; d < dim; d += WORD_BLOCK) {
        for (int h = 0; h < WIDTH; h++) {
            __m512 own = _mm512_set1_ps(step[h]), inverse = _mm512_set1_ps(inverses[h]);
            __m512 low = _mm512_loadu_ps(head[h] + d), high = _mm512_loadu_ps(head[h] + d + WIDTH);
            __m512 low_word = word_rounded(low, inverse), high_word = word_rounded(high, inverse);
            rests[h] = word_rest(high, high_word, own, word_rest(low, low_word, own, rests[h]));
            pairs[h] = _mm512_castsi512_ps(word_pairs(low_word, high_word));
        }
        vec_transpose(pairs);
        UNROLL for (int n = 0; n < WIDTH; n++) _mm512_storeu_ps(words + (d / 2 + n) * WIDTH, pairs[n]);
    }
    row->shift += vec_total(shift);
    row->norms += (double)_mm512_reduce_add_ps(norm);
    row->rests += (double)_mm512_reduce_add_ps(_mm512_sqrt_ps(word_join(rests, vec_add)));
    row->norm_max = MAX(row->norm_max, (double)_mm512_reduce_max_ps(norm));
}

/* ---- keys of a leaf ---- */

struct word_leaf {
    float step;
    double norm, rest; /* the greatest |k_c - center|, and a bound of |r_c| */
};

/* Elements d .. d + WIDTH - 1 of a row less the center, zero from dim on; d < 256. whole: dim is of whole
 * blocks. */
ALWAYS_INLINE __m512 word_load(const float *row, const struct word_center *center, int32_t d, int32_t dim,
                               const bool whole)
{
    int32_t left = dim - d;
    __m512 x = whole || left >= WIDTH ? _mm512_loadu_ps(row + d)
                                      : _mm512_maskz_loadu_ps((__mmask16)((1u << MAX(left, 0)) - 1), row + d);
    return _mm512_sub_ps(x, _mm512_loadu_ps(center->at + d));
}

/* Greatest |k_c - center|^2 and greatest magnitude; NaN or infinite when a key is. */
ALWAYS_INLINE float word_squares(struct float_rows key, const struct word_center *center, int64_t count,
                                 int32_t dim, float *most, const bool whole)
{
    __m512 range[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, greatest = _mm512_setzero_ps();
    __mmask16 bad = 0;
    for (int64_t first = 0; first < count; first += WIDTH) {
        __m512 square[WIDTH];
        for (int64_t j = 0; j < WIDTH; j++) {
            const float *row = key.data + MIN(first + j, count - 1) * key.stride;
            __m512 low_sum = _mm512_setzero_ps(), high_sum = _mm512_setzero_ps();
            for (int32_t d = 0; d < dim; d += WORD_BLOCK) {
                __m512 low = word_load(row, center, d, dim, whole);
                __m512 high = word_load(row, center, d + WIDTH, dim, whole);
                low_sum = _mm512_fmadd_ps(low, low, low_sum);
                high_sum = _mm512_fmadd_ps(high, high, high_sum);
                range[0] = _mm512_range_ps(range[0], low, 0xb); /* the greater magnitude */
                range[1] = _mm512_range_ps(range[1], high, 0xb);
            }
            square[j] = _mm512_add_ps(low_sum, high_sum);
        }
        __m512 squares = word_join(square, vec_add);
        bad |= _mm512_cmp_ps_mask(squares, squares, _CMP_UNORD_Q);
        greatest = _mm512_max_ps(greatest, squares);
    }
    *most = _mm512_reduce_max_ps(_mm512_max_ps(range[0], range[1]));
    return bad ? NAN : _mm512_reduce_max_ps(greatest);
}

/* Writes the words; returns the greatest |r_c|^2 when it is to be measured. */
ALWAYS_INLINE float word_round(struct float_rows key, const struct word_center *center, int64_t count,
                               int32_t dim, float unit, int16_t *words, const bool measure, const bool whole)
{
    __m512 inverse = _mm512_set1_ps(unit > 0 ? 1 / unit : 0), step = _mm512_set1_ps(unit);
    __m512 greatest = _mm512_setzero_ps();
    for (int64_t first = 0; first < count; first += WIDTH) {
        int64_t rows = MIN(WIDTH, count - first);
        __m512 rest[WIDTH];
        for (int64_t j = 0; j < WIDTH && (measure || j < rows); j++) {
            const float *row = key.data + (first + MIN(j, rows - 1)) * key.stride;
            int16_t *to = words + (first + MIN(j, rows - 1)) * word_stride(dim);
            rest[j] = _mm512_setzero_ps();
            for (int32_t d = 0; d < dim; d += WORD_BLOCK) {
                __m512 low = word_load(row, center, d, dim, whole);
                __m512 high = word_load(row, center, d + WIDTH, dim, whole);
                __m512 low_word = word_rounded(low, inverse), high_word = word_rounded(high, inverse);
                _mm512_storeu_si512(to + d, word_pairs(low_word, high_word));
                if (measure)
                    rest[j] = word_rest(high, high_word, step, word_rest(low, low_word, step, rest[j]));
            }
        }
        if (measure) greatest = _mm512_max_ps(greatest, word_join(rest, vec_add));
    }
    return measure ? _mm512_reduce_max_ps(greatest) : 0;
}

/* words [count][word_stride(dim)] of keys; false: not usable, as above. The rests are measured where that pays,
 * else none is greater than half a step. */
static inline bool word_keys(struct float_rows key, const struct word_center *center, int64_t count,
                             int32_t dim, bool measure, int16_t *words, struct word_leaf *leaf)
{
    bool whole = dim % WORD_BLOCK == 0;
    float most, square = whole ? word_squares(key, center, count, dim, &most, true)
                               : word_squares(key, center, count, dim, &most, false);
    if (!(square >= 1e-20f && square <= 1e30f) && !(square == 0 && most == 0)) return false;
    float norm = sqrtf(square), step = MAX(norm * (1.0f / WORD_NORM), most * (1.0f / WORD_MAX)), rest = 0;
    *leaf = (struct word_leaf){step, (double)norm, 0.505 * sqrt((double)dim) * (double)step};
    if (!whole)
        (void)word_round(key, center, count, dim, step, words, false, false);
    else if (measure)
        rest = word_round(key, center, count, dim, step, words, true, true);
    else
        (void)word_round(key, center, count, dim, step, words, false, true);
    if (rest > 0) leaf->rest = MIN(leaf->rest, 1.001 * sqrt((double)rest));
    return true;
}

/* How far the rough score of a row and a leaf, the sum over heads of logsumexp, may be from that of the exact
 * way: by the rests, by the roundings of either way, and for each head by exponentials and logarithms. */
static inline double word_error(const struct word_row *row, const struct word_leaf *leaf,
                                const struct word_center *center, double scale, int32_t dim, int32_t heads,
                                double by_sums)
{
    double rests = row->norms * leaf->rest + row->rests * (leaf->norm + leaf->rest);
    double roundings = (dim + 48) * 0x1p-24 * row->norms * (leaf->norm + 2 * center->norm);
    return 1.001 * fabs(scale) * (rests + roundings) + heads * by_sums;
}

#endif
