/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_SIMD_AVX512_H
#define CLATTN_SIMD_AVX512_H

/* Vectors of sixteen floats: AVX-512 F, BW, DQ and VL. The same names as in simd_c.h, which explains them. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* 24 or 16 vectors of sums of the 32 registers; broadcasts are operands in memory. */
enum { WIDTH = 16, DOT_ROWS_1 = 16, DOT_ROWS_2 = 12, PV_ROWS = 8 };
#define SIMD_FEW_2
#define SIMD_FEW_4
#define SIMD_PV_ROWS_8
#define SIMD_TALL_ROWS 16 /* rows of weighted_sum_tall: as many sums, each of one vector */
#define SIMD_BFLOAT16_PAIRS
#define SIMD_STREAM_ROWS 16 /* rows of a chunk of dot_stream: as many sums */
#define SIMD_SCALE_FROM
#define SIMD_PAIRS_6
#define SIMD_PAIRS_8
#define SIMD_DOUBLES 8
#define SIMD_SUM_VECTORS 8

typedef __m512 vec;
typedef __m512d doubles;

static inline vec vec_set(float a)
{
    return _mm512_set1_ps(a);
}

static inline vec vec_zero(void)
{
    return _mm512_setzero_ps();
}

static inline vec vec_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

static inline void vec_store(float *p, vec a)
{
    _mm512_storeu_ps(p, a);
}

static inline vec vec_add(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}

static inline vec vec_sub(vec a, vec b)
{
    return _mm512_sub_ps(a, b);
}

static inline vec vec_mul(vec a, vec b)
{
    return _mm512_mul_ps(a, b);
}

static inline vec vec_div(vec a, vec b)
{
    return _mm512_div_ps(a, b);
}

static inline vec vec_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}

static inline vec vec_where_less(vec a, vec b, vec x, vec y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}

static inline vec vec_max(vec a, vec b)
{
    return _mm512_max_ps(a, b);
}

static inline vec vec_min(vec a, vec b)
{
    return _mm512_min_ps(a, b);
}

static inline vec vec_round(vec a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vec vec_scale_exponent(vec a, vec n)
{
    return _mm512_scalef_ps(a, n);
}

/* a 2^n; 0 where x is less than `least`. */
static inline vec vec_scale_from(vec a, vec n, vec x, vec least)
{
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), a, n);
}

static inline vec vec_fraction(vec a)
{
    return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

static inline vec vec_scale_floor(vec a, vec n)
{
    return _mm512_scalef_ps(a, n); /* which takes the integer below n itself */
}

/* A permutation of words (two instructions of the machine): the elements become the upper halves, the mask
 * clears the lower ones. */
static inline vec vec_load_bfloat16(const uint16_t *p)
{
    const __m512i place = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5,
                                           0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    __m512i bits = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, place, bits));
}

static inline vec vec_load_float16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* Of 2 * WIDTH elements: one instruction. */
static inline vec vec_load_bfloat16_even(const void *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}

static inline vec vec_load_bfloat16_odd(const void *p)
{
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-65536)));
}

/* The elements of both in their order again. */
static inline void vec_interleave(vec even, vec odd, vec *low, vec *high)
{
    const __m512i place = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    *low = _mm512_permutex2var_ps(even, place, odd);
    *high = _mm512_permutex2var_ps(even, _mm512_add_epi32(place, _mm512_set1_epi32(8)), odd);
}

static inline vec vec_load_int8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* To nearest even; a NaN stays one. */
static inline void vec_store_bfloat16(uint16_t *p, vec a)
{
    __m512i bits = _mm512_castps_si512(a), high = _mm512_srli_epi32(bits, 16);
    __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    __m512i half = _mm512_mask_or_epi32(_mm512_srli_epi32(rounded, 16), is_nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(half));
}

static inline void vec_store_float16(uint16_t *p, vec a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline double vec_total(vec a)
{
    return _mm512_reduce_add_pd(_mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(a)),
                                              _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1))));
}

static inline double vec_product(vec a)
{
    return _mm512_reduce_mul_pd(_mm512_mul_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(a)),
                                              _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1))));
}

static inline doubles doubles_load(const float *p)
{
    return _mm512_cvtps_pd(_mm256_loadu_ps(p));
}

static inline void doubles_halves(vec a, doubles *low, doubles *high)
{
    *low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
    *high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
}

static inline void vec_transpose(vec rows[WIDTH])
{
    vec pairs[WIDTH], fours[WIDTH];
    for (int i = 0; i < WIDTH; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < WIDTH; i += 4)
        for (int half = 0; half < 2; half++) {
            fours[i + 2 * half] = _mm512_shuffle_ps(pairs[i + half], pairs[i + half + 2], 0x44);
            fours[i + 2 * half + 1] = _mm512_shuffle_ps(pairs[i + half], pairs[i + half + 2], 0xee);
        }
    for (int i = 0; i < WIDTH; i += 8)
        for (int n = i; n < i + 4; n++) {
            pairs[n] = _mm512_shuffle_f32x4(fours[n], fours[n + 4], 0x88);
            pairs[n + 4] = _mm512_shuffle_f32x4(fours[n], fours[n + 4], 0xdd);
        }
    for (int n = 0; n < 8; n++) {
        rows[n] = _mm512_shuffle_f32x4(pairs[n], pairs[n + 8], 0x88);
        rows[n + 8] = _mm512_shuffle_f32x4(pairs[n], pairs[n + 8], 0xdd);
    }
}

/* The empty statement is an effect: GCC 12 takes functions that only prefetch for pure and drops calls of them.
 */
static inline void prefetch_line(const void *p)
{
    _mm_prefetch((const char *)p, _MM_HINT_T1);
    __asm__ volatile("" : : "r"(p));
}

#endif
