/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_DOT_WORDS_AVX512VNNI_H
#define CLATTN_DOT_WORDS_AVX512VNNI_H

/* Rough logits by products of 16-bit words, with bounds of their errors: AVX-512 VNNI. One instruction does the
 * work of two multiply-adds. Included after simd_avx512.h and dot_vectors_simd.h.
 *
 *     q_h = step_h w_h + r_h,   k_c = center + step w_c + r_c     w: whole numbers, r: what rounding leaves
 *     logit[c][h] = scale (step_h step (w_h . w_c) + q_h . center),
 *                   off by at most  |scale| (|q_h| |r_c| + |r_h| |step w_c|)
 *
 * The last by Cauchy-Schwarz. Steps are such that no |w| exceeds WORD_NORM: neither does a sum overflow, by the
 * same inequality, nor an element. All keys of a leaf have one step.
 *
 *     queries [vector][pair of d][lane][2]
 *     keys    [row][word_stride]              pairs in the order of word_pair, padded by zeros
 */

#include "dot_vectors_simd.h"

#include <float.h>
#include <math.h>

enum {
    WORD_BLOCK = 32,   /* elements that _mm512_packs_epi32 brings into an order of its own */
    WORD_NORM = 46000, /* (WORD_NORM + sqrt(256) / 2)^2 < 2^31 */
    WORD_MAX = 32767,
    ROUGH_LOGIT = 4096 /* logits that may be greater have useless bounds */
};

static inline int64_t word_steps(int32_t dim)
{
    return round_up(dim, WORD_BLOCK) / 2;
}

/* Distance of keys: one cache line more, so that rows do not compete for the same sets. */
static inline int64_t word_stride(int32_t dim)
{
    return round_up(dim, WORD_BLOCK) + 32;
}

/* Element of which pair `p` has this and the next. */
static inline int32_t word_pair(int64_t p)
{
    return (int32_t)(p / 16 * WORD_BLOCK + p % 16 / 4 * 4 + p % 2 * 2 + p % 4 / 2 * 16);
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

/* One vector of a row, q [dim][WIDTH]: words [pair][lane][2], step [WIDTH]; what it adds to `row`. Norms within
 * 1e-10 .. 1e15 or 0 are usable: their squares and those of the rests are exact enough. */
static inline void word_queries(const float *q, const struct word_center *center, int32_t dim, int32_t *words,
                                float *step, struct word_row *row)
{
    __m512 zero = _mm512_setzero_ps(), square = zero, squares[2] = {zero, zero}, most = zero,
           rests[2] = {zero, zero}, shift = zero;
    for (int32_t d = 0; d < dim; d += 2) {
        UNROLL for (int32_t n = 0; n < 2; n++)
        {
            __m512 x = d + n < dim ? _mm512_loadu_ps(q + (d + n) * WIDTH) : zero;
            squares[n] = _mm512_fmadd_ps(x, x, squares[n]);
            most = _mm512_max_ps(_mm512_abs_ps(x), most);
            shift = _mm512_fmadd_ps(x, _mm512_set1_ps(d + n < dim ? center->at[d + n] : 0), shift);
        }
    }
    square = _mm512_add_ps(squares[0], squares[1]);
    __mmask16 fits = _mm512_cmp_ps_mask(square, _mm512_set1_ps(1e-20f), _CMP_GE_OQ) &
                     _mm512_cmp_ps_mask(square, _mm512_set1_ps(1e30f), _CMP_LE_OQ);
    __mmask16 none = _mm512_cmp_ps_mask(most, zero, _CMP_EQ_OQ) & _mm512_cmp_ps_mask(square, zero, _CMP_EQ_OQ);
    row->usable &= (fits | none) == 0xffff;
    if (!row->usable) return;
    __m512 norm = _mm512_sqrt_ps(square);
    __m512 unit = _mm512_max_ps(_mm512_mul_ps(norm, _mm512_set1_ps(1.0f / WORD_NORM)),
                                _mm512_mul_ps(most, _mm512_set1_ps(1.0f / WORD_MAX)));
    __m512 inverse = _mm512_maskz_div_ps(fits, _mm512_set1_ps(1), unit);
    for (int64_t p = 0; p < word_steps(dim); p++) {
        __m512i pair[2];
        int32_t d = word_pair(p);
        UNROLL for (int32_t n = 0; n < 2; n++)
        {
            __m512 x = d + n < dim ? _mm512_loadu_ps(q + (d + n) * WIDTH) : zero, r;
            pair[n] = _mm512_cvt_roundps_epi32(_mm512_mul_ps(x, inverse),
                                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            r = _mm512_fnmadd_ps(unit, _mm512_cvtepi32_ps(pair[n]), x);
            rests[n] = _mm512_fmadd_ps(r, r, rests[n]);
        }
        pair[0] = _mm512_and_si512(pair[0], _mm512_set1_epi32(0xffff));
        _mm512_storeu_si512(words + p * WIDTH, _mm512_or_si512(pair[0], _mm512_slli_epi32(pair[1], 16)));
    }
    _mm512_storeu_ps(step, unit);
    row->shift += vec_total(shift);
    row->norms += (double)_mm512_reduce_add_ps(norm);
    row->rests += (double)_mm512_reduce_add_ps(_mm512_sqrt_ps(_mm512_add_ps(rests[0], rests[1])));
    row->norm_max = MAX(row->norm_max, (double)_mm512_reduce_max_ps(norm));
}

/* ---- keys of a leaf ---- */

struct word_leaf {
    float step;
    double norm, rest; /* the greatest |k_c - center|, and a bound of |r_c| */
};

/* Elements d .. d + WIDTH - 1 of a row less the center, zero from dim on; d < 256. */
ALWAYS_INLINE __m512 word_load(const float *row, const struct word_center *center, int32_t d, int32_t dim)
{
    int32_t left = dim - d;
    __m512 x = left >= WIDTH ? _mm512_loadu_ps(row + d)
                             : _mm512_maskz_loadu_ps((__mmask16)((1u << MAX(left, 0)) - 1), row + d);
    return _mm512_sub_ps(x, _mm512_loadu_ps(center->at + d));
}

/* Greatest |k_c - center|^2 and greatest magnitude; NaN or infinite when a key is. Several sums side by side.
 */
static inline float word_squares(struct float_rows key, const struct word_center *center, int64_t count,
                                 int32_t dim, float *most)
{
    enum { SIDE = 4 };
    __m512 range[SIDE];
    float greatest = 0;
    UNROLL for (int n = 0; n < SIDE; n++) range[n] = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j++) {
        const float *row = key.data + j * key.stride;
        __m512 side[SIDE];
        UNROLL for (int n = 0; n < SIDE; n++) side[n] = _mm512_setzero_ps();
        for (int32_t d = 0; d < dim; d += SIDE * WIDTH) {
            UNROLL for (int n = 0; n < SIDE; n++)
            {
                __m512 x = word_load(row, center, d + n * WIDTH, dim);
                side[n] = _mm512_fmadd_ps(x, x, side[n]);
                range[n] = _mm512_range_ps(range[n], x, 0xb); /* the greater magnitude */
            }
        }
        side[0] = _mm512_add_ps(_mm512_add_ps(side[0], side[1]), _mm512_add_ps(side[2], side[3]));
        float square = _mm512_reduce_add_ps(side[0]);
        greatest = square > greatest || isnan(square) ? square : greatest;
        if (isnan(greatest)) break;
    }
    range[0] = _mm512_max_ps(_mm512_max_ps(range[0], range[1]), _mm512_max_ps(range[2], range[3]));
    *most = _mm512_reduce_max_ps(range[0]);
    return greatest;
}

/* words [count][word_stride(dim)] of keys; false: not usable, as above. */
static inline bool word_keys(struct float_rows key, const struct word_center *center, int64_t count,
                             int32_t dim, int16_t *words, struct word_leaf *leaf)
{
    float most, square = word_squares(key, center, count, dim, &most);
    if (!(square >= 1e-20f && square <= 1e30f) && !(square == 0 && most == 0)) return false;
    float norm = sqrtf(square), step = MAX(norm * (1.0f / WORD_NORM), most * (1.0f / WORD_MAX));
    __m512 inverse = _mm512_set1_ps(step > 0 ? 1 / step : 0);
    *leaf = (struct word_leaf){step, (double)norm, 0.505 * sqrt((double)dim) * (double)step};
    for (int64_t j = 0; j < count; j++) {
        const float *row = key.data + j * key.stride;
        int16_t *to = words + j * word_stride(dim);
        for (int32_t d = 0; d < dim; d += WORD_BLOCK, to += WORD_BLOCK) {
            __m512i half[2];
            for (int n = 0; n < 2; n++) {
                __m512 x = _mm512_mul_ps(word_load(row, center, d + n * WIDTH, dim), inverse);
                half[n] = _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            }
            _mm512_storeu_si512(to, _mm512_packs_epi32(half[0], half[1]));
        }
    }
    return true;
}

/* How far the rough score of a row and a leaf, the sum over heads of logsumexp, may be from that of the exact
 * way: by the rests, by the roundings of either way, and for each head by exponentials and logarithms. */
static inline double word_error(const struct word_row *row, const struct word_leaf *leaf,
                                const struct word_center *center, double scale, int32_t dim, int32_t heads,
                                double by_sums)
{
    double rests = row->norms * leaf->rest + row->rests * (leaf->norm + leaf->rest);
    double roundings = (dim + 40) * 0x1p-24 * row->norms * (leaf->norm + 2 * center->norm);
    return 1.001 * fabs(scale) * (rests + roundings) + heads * by_sums;
}

/* ---- logits ---- */

/* sum [lane] += products of two words each, from a register and broadcast from memory. Not by the intrinsic,
 * around which GCC 12 copies and spills the sums. */
typedef int32_t word_codes __attribute__((may_alias, aligned(2)));

ALWAYS_INLINE void add_words(__m512i *sum, __m512i words, __m512i codes)
{
    __asm__("vpdpwssd %2, %1, %0" : "+v"(*sum) : "v"(words), "v"(codes));
}

ALWAYS_INLINE void add_words_from(__m512i *sum, __m512i words, const word_codes *codes)
{
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(*sum) : "v"(words), "m"(*codes));
}

/* Tiles as in dot_vectors_simd.h: each of `vectors` vectors of queries where its pointer says, with its factor,
 * which turns sums into logits. */
struct word_vectors {
    const int32_t *q[VECTORS_MAX];
    const int32_t *next[VECTORS_MAX]; /* of the vectors after these, to be prefetched; NULL: none */
    vec factor[VECTORS_MAX];
    int64_t steps;
};

/* rows pair[n] and pair[n] + stride, each with its step, or rows `stride` apart from key on */
struct word_rows {
    const int16_t *key;
    int64_t stride;
    const int16_t *const *pair;
    const float *step;
};

ALWAYS_INLINE void words_tile(const struct word_vectors *from, struct word_rows key, float *logits,
                              int64_t capacity, struct line_walk *ahead, const bool pairs, const int rows,
                              const int vectors)
{
    __m512i sum[16][VECTORS_MAX];
    const int16_t *base[8];
    const int32_t *at[VECTORS_MAX];
    const int together = pairs ? 2 : 3; /* rows that are reached from one pointer by the stride */
    int64_t stride = key.stride;
    struct line_walk line;
    if (!pairs) line = *ahead;
    UNROLL for (int n = 0; n < vectors; n++) at[n] = from->q[n];
    UNROLL for (int a = 0; a < rows; a++)
    {
        if (a % together == 0) base[a / together] = pairs ? key.pair[a / 2] : key.key + a * stride;
        UNROLL for (int n = 0; n < vectors; n++) sum[a][n] = _mm512_setzero_si512();
    }
    for (int64_t step = 0; step < from->steps; step += 2) {
        for (int32_t n = 0; !pairs && n < line.burst; n++) {
            prefetch_line(line.at);
            line.at += LINE;
            if (--line.left > 0) continue;
            line.at += line.skip;
            line.left = line.lines;
        }
        UNROLL for (int64_t s = step; s < step + 2; s++)
        {
            __m512i query[VECTORS_MAX];
            UNROLL for (int n = 0; n < vectors; n++) query[n] = _mm512_loadu_si512(at[n] + s * WIDTH);
            UNROLL for (int a = 0; a < rows; a++)
            {
                const word_codes *codes =
                    (const word_codes *)(base[a / together] + a % together * stride + 2 * s);
                if (vectors == 1) {
                    add_words_from(&sum[a][0], query[0], codes);
                    continue;
                }
                __m512i element = _mm512_set1_epi32(*codes);
                UNROLL for (int n = 0; n < vectors; n++) add_words(&sum[a][n], query[n], element);
            }
        }
    }
    if (!pairs) *ahead = line;
    UNROLL for (int a = 0; a < rows; a++)
    {
        UNROLL for (int n = 0; n < vectors; n++)
        {
            vec z = vec_mul(_mm512_cvtepi32_ps(sum[a][n]), from->factor[n]);
            vec_store(logits + (n * capacity + a) * WIDTH, pairs ? vec_mul(z, vec_set(key.step[a])) : z);
        }
    }
}

#define WORDS_TILE(NAME, ROWS, VECTORS)                                                                        \
    static void NAME(const struct word_vectors *from, const int16_t *key, int64_t stride, float *logits,       \
                     int64_t capacity, struct line_walk *ahead)                                                \
    {                                                                                                          \
        struct word_rows rows = {key, stride, NULL, NULL};                                                     \
        words_tile(from, rows, logits, capacity, ahead, false, ROWS, VECTORS);                                 \
    }

WORDS_TILE(words_tile_1, TILE_ROWS_1, 1)
WORDS_TILE(words_tile_2, TILE_ROWS_2, 2)
WORDS_TILE(words_tile_3, TILE_ROWS_3, 3)
WORDS_TILE(words_four_1, 4, 1)
WORDS_TILE(words_four_2, 4, 2)
WORDS_TILE(words_single_1, 1, 1)
WORDS_TILE(words_single_2, 1, 2)
WORDS_TILE(words_single_3, 1, 3)

#undef WORDS_TILE

typedef void words_tile_function(const struct word_vectors *from, const int16_t *key, int64_t stride,
                                 float *logits, int64_t capacity, struct line_walk *ahead);

static const struct {
    int full, less; /* rows of the three functions: full, less, 1 */
    words_tile_function *tile, *rest, *single;
} words_tiles[VECTORS_MAX] = {
    {TILE_ROWS_1, 4, words_tile_1, words_four_1, words_single_1},
    {TILE_ROWS_2, 4, words_tile_2, words_four_2, words_single_2},
    {TILE_ROWS_3, TILE_ROWS_3, words_tile_3, words_tile_3, words_single_3},
};

/* Lines first .. end - 1 of each vector after these. */
static inline void prefetch_words(const struct word_vectors *from, int64_t first, int64_t end)
{
    for (int n = 0; n < VECTORS_MAX && from->next[n]; n++)
        for (int64_t s = first; s < MIN(end, from->steps); s++)
            prefetch_line(from->next[n] + s * WIDTH);
}

/* As dot_vectors. */
static inline void dot_words(const struct word_vectors *from, int vectors, const int16_t *key, int64_t stride,
                             int64_t count, float *logits, int64_t capacity, struct line_walk *ahead,
                             int64_t passes)
{
    int full = words_tiles[vectors - 1].full, less = words_tiles[vectors - 1].less;
    int64_t steps = from->steps / 2, share = ceil_div(ahead->all, passes);
    for (int64_t done = 0, rows; done < count; done += rows) {
        words_tile_function *tile = words_tiles[vectors - 1].tile;
        rows = full;
        if (count - done < full) {
            tile = count - done >= less ? words_tiles[vectors - 1].rest : words_tiles[vectors - 1].single;
            rows = count - done >= less ? less : 1;
        }
        prefetch_words(from, done * from->steps / count, (done + rows) * from->steps / count);
        ahead->burst = (int32_t)MIN(ceil_div(share, ceil_div(count - done, full) * steps), ahead->all / steps);
        share -= ahead->burst * steps;
        ahead->all -= ahead->burst * steps;
        tile(from, key + done * stride, stride, logits + done * WIDTH, capacity, ahead);
    }
}

/* ---- pairs of rows ---- */

#define WORDS_PAIRS(PAIRS)                                                                                     \
    case PAIRS:                                                                                                \
        if (vectors == 1)                                                                                      \
            words_tile(from, rows, to, capacity, NULL, true, 2 * PAIRS, 1);                                    \
        else                                                                                                   \
            words_tile(from, rows, to, capacity, NULL, true, 2 * PAIRS, 2);                                    \
        break;

/* As dot_pairs. step [2 * count]: of the rows, which lie `stride` apart. */
static void dot_word_pairs(const struct word_vectors *from, int vectors, const int16_t *const *pair,
                           const float *step, int64_t stride, int64_t count, float *logits, int64_t capacity)
{
    int64_t most = vectors == 2 ? TILE_ROWS_2 / 2 : TILE_ROWS_1 / 2, tiles = ceil_div(count, most);
    for (int64_t done = 0, pairs; done < count; done += pairs, tiles--) {
        struct word_rows rows = {NULL, stride, pair + done, step + 2 * done};
        float *to = logits + 2 * done * WIDTH;
        pairs = ceil_div(count - done, tiles);
        switch (pairs) {
            WORDS_PAIRS(1)
            WORDS_PAIRS(2)
            WORDS_PAIRS(3)
            WORDS_PAIRS(4)
            WORDS_PAIRS(5)
            WORDS_PAIRS(6)
        case 7:
            words_tile(from, rows, to, capacity, NULL, true, 14, 1);
            break;
        case 8:
            words_tile(from, rows, to, capacity, NULL, true, 16, 1);
            break;
        }
    }
}

#undef WORDS_PAIRS

/* Sum of 2^z for |z| <= 60, within 8e-5 of itself. Between two integers a polynomial of least relative error;
 * sums side by side would otherwise wait for each other. */
static inline vec word_exp2(vec z)
{
    vec r = vec_fraction(z), p = vec_set(0.0780245215f);
    p = vec_fma(p, r, vec_set(0.2260671556f));
    p = vec_fma(p, r, vec_set(0.6958335638f));
    p = vec_fma(p, r, vec_set(0.9999251962f));
    return vec_scale_floor(p, z);
}

static inline vec word_sum(const float *z, int64_t count)
{
    enum { SIDE = 4 };
    vec side[SIDE] = {vec_zero(), vec_zero(), vec_zero(), vec_zero()};
    int64_t c = 0;
    for (; c + SIDE <= count; c += SIDE) {
        UNROLL for (int n = 0; n < SIDE; n++) side[n] =
            vec_add(side[n], word_exp2(vec_load(z + (c + n) * WIDTH)));
    }
    for (; c < count; c++)
        side[0] = vec_add(side[0], word_exp2(vec_load(z + c * WIDTH)));
    return vec_add(vec_add(side[0], side[1]), vec_add(side[2], side[3]));
}

#endif
