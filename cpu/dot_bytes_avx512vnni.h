/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_DOT_BYTES_AVX512VNNI_H
#define CLATTN_DOT_BYTES_AVX512VNNI_H

/* Logits of int8 keys by products of bytes: AVX-512 VNNI. Included after simd_avx512.h and dot_simd.h.
 *
 *   q_d = step * (65536 high_d + 256 middle_d + low_d),   logit_j = scale * k_scale_j * step * sum_d (...) k_jd
 *
 * Each query row is rounded once to a multiple of its step, its greatest magnitude / CODE_MAX (23 bits: as
 * exact as float32 for its greatest element), and cut into three signed bytes. The sums of byte products are
 * exact integers, so three instructions do the work of four multiply-adds without converting the keys. The
 * instruction multiplies unsigned by signed bytes: keys get 128 added, and sums start at -128 sum_d digit_d.
 *
 *     digits [vector][d / 4][plane][lane][4]      signed; planes: low, middle, high; lanes: query rows
 *     key    [row][key_stride]                    k + 128 */

#include "dot_simd.h"

#include <float.h>

enum {
    CODE_MAX = 127 * 65536, /* rounded up by a little it still has its high digit */
    PLANES = 3,
    BYTE_ROWS = 8, /* keys at once: 24 sums, three planes and a broadcast of the 32 registers */
};

struct byte_dots {
    float *memory; /* byte_dots_floats() */
    bool usable;   /* the rows have been cut into digits */
    int64_t steps; /* of four elements */
    int64_t key_stride;
    int8_t *digits;
    int32_t *first; /* [vector][plane][lane] where sums start */
    float *step;    /* [vector][lane] */
    uint8_t *key;
};

static inline int64_t byte_dots_floats(const clattn_tensor *k, int64_t lanes, int64_t keys)
{
    if (k->dtype != CLATTN_INT8) return 0;
    return lanes * (ceil_div(k->dim, 4) * PLANES + PLANES + 1) + keys * round_up(k->dim, 64) / 4;
}

/* One vector of rows, q [dim][lanes]; false: an element is not finite or they are too small for the step. */
static inline bool byte_dots_cut(const float *q, int64_t lanes, int32_t dim, int8_t *digits, int32_t *first,
                                 float *step)
{
    __m512 most = _mm512_setzero_ps();
    __mmask16 bad = 0;
    for (int32_t d = 0; d < dim; d++) {
        __m512 x = _mm512_loadu_ps(q + d * lanes);
        most = _mm512_max_ps(most, _mm512_abs_ps(x));
        bad |= _mm512_fpclass_ps_mask(x, 0x99); /* NaN, infinity */
    }
    __mmask16 some = _mm512_cmp_ps_mask(most, _mm512_setzero_ps(), _CMP_GT_OQ);
    bad |= _mm512_mask_cmp_ps_mask(some, most, _mm512_set1_ps(0x1p-100f), _CMP_LT_OQ);
    if (bad) return false;
    __m512 inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(CODE_MAX), most);
    __m512i sum[PLANES] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    _mm512_storeu_ps(step, _mm512_mul_ps(most, _mm512_set1_ps(1.0f / CODE_MAX)));
    for (int32_t d = 0; d < dim; digits += PLANES * 4 * WIDTH) {
        __m512i plane[PLANES] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
        for (unsigned i = 0; i < 4 && d < dim; i++, d++) {
            __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(q + d * lanes), inverse));
            for (int n = 0; n < PLANES; n++) {
                __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(code, 24), 24);
                code = _mm512_srai_epi32(_mm512_sub_epi32(code, digit), 8);
                sum[n] = _mm512_add_epi32(sum[n], digit);
                digit = _mm512_and_si512(digit, _mm512_set1_epi32(0xff));
                plane[n] = _mm512_or_si512(plane[n], _mm512_slli_epi32(digit, 8 * i));
            }
        }
        for (int n = 0; n < PLANES; n++)
            _mm512_storeu_si512(digits + n * 4 * WIDTH, plane[n]);
    }
    for (int n = 0; n < PLANES; n++)
        _mm512_storeu_si512(first + n * WIDTH, _mm512_mullo_epi32(sum[n], _mm512_set1_epi32(-128)));
    return true;
}

/* Cuts all rows of a tile, q [lane group][dim][lanes]. */
static inline void byte_dots_begin(struct byte_dots *dots, const clattn_tensor *k, const float *q, int64_t rows,
                                   int64_t lanes)
{
    dots->usable = k->dtype == CLATTN_INT8;
    if (!dots->usable) return;
    dots->steps = ceil_div(k->dim, 4);
    dots->key_stride = round_up(k->dim, 64);
    dots->digits = (int8_t *)dots->memory;
    dots->first = (int32_t *)(dots->memory + lanes * dots->steps * PLANES);
    dots->step = (float *)(dots->first + lanes * PLANES);
    dots->key = (uint8_t *)(dots->step + lanes);
    for (int64_t lane = 0; lane < rows && dots->usable; lane += WIDTH) {
        int64_t group = lane / LANES_MAX * LANES_MAX, n = lane / WIDTH;
        int64_t group_lanes = lane_vectors(rows - group) * WIDTH;
        dots->usable = byte_dots_cut(q + group * k->dim + (lane - group), group_lanes, (int32_t)k->dim,
                                     dots->digits + n * dots->steps * PLANES * 4 * WIDTH,
                                     dots->first + n * PLANES * WIDTH, dots->step + n * WIDTH);
    }
}

/* key [count][key_stride] = keys + 128 */
static inline void byte_dots_keys(const struct byte_dots *dots, const struct rows *keys)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    for (int64_t j = 0; j < keys->count; j++)
        for (int64_t d = 0; d < keys->dim; d += 64) {
            int64_t left = keys->dim - d;
            __mmask64 exists = left >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << left) - 1;
            __m512i codes = _mm512_maskz_loadu_epi8(exists, keys->data + j * keys->stride + d);
            _mm512_storeu_si512(dots->key + j * dots->key_stride + d, _mm512_xor_si512(codes, sign));
        }
}

/* sum [lane] += products of four unsigned and four signed bytes. Not by the intrinsic, around which GCC 12
 * copies and spills the sums. */
ALWAYS_INLINE void add_products(__m512i *sum, __m512i bytes, __m512i signed_bytes)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(bytes), "v"(signed_bytes));
}

/* Logits of `rows` keys for one vector of query rows: logits [key][lanes]. */
ALWAYS_INLINE void byte_dots_tile(const struct byte_dots *dots, int64_t vector, const uint8_t *key,
                                  const float *k_scale, float scale, float *logits, int64_t lanes,
                                  struct ahead ahead, const int rows)
{
    const int8_t *digits = dots->digits + vector * dots->steps * PLANES * 4 * WIDTH;
    const int32_t *first = dots->first + vector * PLANES * WIDTH;
    __m512i sum[BYTE_ROWS][PLANES];
    UNROLL for (int a = 0; a < rows; a++)
    {
        UNROLL for (int n = 0; n < PLANES; n++) sum[a][n] = _mm512_loadu_si512(first + n * WIDTH);
    }
    for (int64_t step = 0; step < dots->steps; step++, digits += PLANES * 4 * WIDTH, key += 4) {
        __m512i plane[PLANES];
        prefetch_line(ahead.at);
        ahead.at += ahead.stride;
        UNROLL for (int n = 0; n < PLANES; n++) plane[n] = _mm512_loadu_si512(digits + n * 4 * WIDTH);
        UNROLL for (int a = 0; a < rows; a++)
        {
            int32_t four;
            memcpy(&four, key + a * dots->key_stride, sizeof four);
            __m512i codes = _mm512_set1_epi32(four);
            UNROLL for (int n = 0; n < PLANES; n++) add_products(&sum[a][n], codes, plane[n]);
        }
    }
    __m512 factor = _mm512_mul_ps(_mm512_loadu_ps(dots->step + vector * WIDTH), _mm512_set1_ps(scale));
    UNROLL for (int a = 0; a < rows; a++)
    {
        __m512i low = _mm512_add_epi32(_mm512_slli_epi32(sum[a][1], 8), sum[a][0]);
        __m512 z =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[a][2]), _mm512_set1_ps(65536), _mm512_cvtepi32_ps(low));
        _mm512_storeu_ps(logits + a * lanes,
                         _mm512_mul_ps(_mm512_mul_ps(z, factor), _mm512_set1_ps(k_scale[a])));
    }
}

/* Logits of a piece, as dot_keys_seen with the keys' scales; meanwhile `next` is prefetched. */
static inline void byte_dots_seen(const struct byte_dots *dots, int64_t query_rows, const struct rows *keys,
                                  float scale, const struct key_range *ranges, float *logits, int64_t capacity,
                                  const struct rows *next)
{
    int64_t calls = ceil_div(keys->count, BYTE_ROWS), bytes = next->count * stride_bytes(next);
    int64_t step = ceil_div(bytes, calls * dots->steps);
    bool spread = rows_contiguous(next) && step <= LINE;
    if (!spread) prefetch_lines(next, 0, row_lines(next));
    byte_dots_keys(dots, keys);
    for (int64_t lane = 0; lane < query_rows; lane += WIDTH) {
        int64_t group = lane / LANES_MAX * LANES_MAX, lanes = lane_vectors(query_rows - group) * WIDTH;
        struct key_range range = ranges[group / LANES_MAX];
        float *to = logits + group * capacity + (lane - group);
        for (int64_t j = range.first, left; j < range.end; j += left) {
            struct ahead ahead = {next->data, 0};
            if (spread && lane == 0) ahead = (struct ahead){next->data + bytes * j / keys->count, step};
            const uint8_t *key = dots->key + j * dots->key_stride;
            left = range.end - j >= BYTE_ROWS ? BYTE_ROWS : 1;
            if (left == BYTE_ROWS)
                byte_dots_tile(dots, lane / WIDTH, key, keys->scale + j, scale, to + j * lanes, lanes, ahead,
                               BYTE_ROWS);
            else
                byte_dots_tile(dots, lane / WIDTH, key, keys->scale + j, scale, to + j * lanes, lanes, ahead,
                               1);
        }
    }
}

#endif
