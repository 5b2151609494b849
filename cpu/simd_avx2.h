/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_SIMD_AVX2_H
#define CLATTN_SIMD_AVX2_H

/* Vectors of eight floats: AVX2, FMA and F16C. The same names as in simd_c.h, which explains them. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* 6 x 16 floats of sums, 2 vectors and a broadcast fill the 16 registers. */
enum { WIDTH = 8, DOT_ROWS_1 = 12, DOT_ROWS_2 = 6, PV_ROWS = 6 };
#define SIMD_FEW_2
#define SIMD_PAIRS_6
#define SIMD_DOUBLES 4
#define SIMD_SUM_VECTORS 4

typedef __m256 vec;
typedef __m256d doubles;

static inline vec vec_set(float a)
{
    return _mm256_set1_ps(a);
}

static inline vec vec_zero(void)
{
    return _mm256_setzero_ps();
}

static inline vec vec_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

static inline void vec_store(float *p, vec a)
{
    _mm256_storeu_ps(p, a);
}

static inline vec vec_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}

static inline vec vec_sub(vec a, vec b)
{
    return _mm256_sub_ps(a, b);
}

static inline vec vec_mul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}

static inline vec vec_div(vec a, vec b)
{
    return _mm256_div_ps(a, b);
}

static inline vec vec_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline vec vec_where_less(vec a, vec b, vec x, vec y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

static inline vec vec_max(vec a, vec b)
{
    return _mm256_max_ps(a, b);
}

static inline vec vec_min(vec a, vec b)
{
    return _mm256_min_ps(a, b);
}

static inline vec vec_round(vec a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vec vec_power_of_two(__m256i n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

static inline vec vec_scale_exponent(vec a, vec n)
{
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    vec first = vec_power_of_two(half), rest = vec_power_of_two(_mm256_sub_epi32(whole, half));
    return _mm256_mul_ps(_mm256_mul_ps(a, first), rest);
}

static inline vec vec_scale_near(vec a, vec n)
{
    __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shift));
}

static inline vec vec_fraction(vec a)
{
    return _mm256_sub_ps(a, _mm256_floor_ps(a));
}

static inline vec vec_scale_floor(vec a, vec n)
{
    return vec_scale_near(a, _mm256_floor_ps(n));
}

static inline vec vec_load_bfloat16(const uint16_t *p)
{
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

static inline vec vec_load_float16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

static inline vec vec_load_int8(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

/* To nearest even; a NaN stays one. */
static inline void vec_store_bfloat16(uint16_t *p, vec a)
{
    __m256i bits = _mm256_castps_si256(a), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    __m256i half = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, is_nan);
    _mm_storeu_si128((__m128i *)p,
                     _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

static inline void vec_store_float16(uint16_t *p, vec a)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline double vec_total(vec a)
{
    __m256d four =
        _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

static inline double vec_product(vec a)
{
    __m256d four =
        _mm256_mul_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
    __m128d two = _mm_mul_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_mul_sd(two, _mm_unpackhi_pd(two, two)));
}

static inline doubles doubles_load(const float *p)
{
    return _mm256_cvtps_pd(_mm_loadu_ps(p));
}

static inline void doubles_halves(vec a, doubles *low, doubles *high)
{
    *low = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
    *high = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
}

static inline void vec_transpose(vec rows[WIDTH])
{
    vec pairs[WIDTH], fours[WIDTH];
    for (int i = 0; i < WIDTH; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < WIDTH; i += 4)
        for (int half = 0; half < 2; half++) {
            fours[i + 2 * half] = _mm256_shuffle_ps(pairs[i + half], pairs[i + half + 2], 0x44);
            fours[i + 2 * half + 1] = _mm256_shuffle_ps(pairs[i + half], pairs[i + half + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        rows[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
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
