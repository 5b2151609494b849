/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_SIMD_C_H
#define CLATTN_SIMD_C_H

/* Vectors of four floats in the compiler's own terms (GCC and Clang on any architecture). The other layers,
 * simd_avx2.h, simd_avx512.h and simd_neon.h, define the same names; a kernel file includes exactly one. */

#include "half.h"

#include <stdint.h>
#include <string.h>

enum {
    WIDTH = 4,      /* floats of a vector */
    DOT_ROWS_1 = 8, /* rows of keys that dot_tile takes at once with one and with two vectors of queries */
    DOT_ROWS_2 = 6,
    PV_ROWS = 6 /* query rows that weighted_sum_tile takes at once */
};
#define SIMD_DOUBLES 2
#define SIMD_SUM_VECTORS 4

typedef float vec __attribute__((vector_size(16)));
typedef int32_t vec_int __attribute__((vector_size(16)));
typedef uint32_t vec_bits __attribute__((vector_size(16)));
typedef uint16_t vec_half __attribute__((vector_size(8)));
typedef double vec_double __attribute__((vector_size(32)));
typedef double doubles __attribute__((vector_size(16)));

static inline vec vec_set(float a)
{
    return (vec){a, a, a, a};
}

static inline vec vec_zero(void)
{
    return vec_set(0);
}

static inline vec vec_load(const float *p)
{
    vec a;
    memcpy(&a, p, sizeof a);
    return a;
}

static inline void vec_store(float *p, vec a)
{
    memcpy(p, &a, sizeof a);
}

static inline vec vec_add(vec a, vec b)
{
    return a + b;
}

static inline vec vec_sub(vec a, vec b)
{
    return a - b;
}

static inline vec vec_mul(vec a, vec b)
{
    return a * b;
}

static inline vec vec_div(vec a, vec b)
{
    return a / b;
}

/* a * b + c */
static inline vec vec_fma(vec a, vec b, vec c)
{
    return a * b + c;
}

/* a < b ? x : y, lane by lane */
static inline vec vec_where_less(vec a, vec b, vec x, vec y)
{
    vec_int less = a < b;
    return (vec)((less & (vec_int)x) | (~less & (vec_int)y));
}

/* The greater; b when either is NaN. */
static inline vec vec_max(vec a, vec b)
{
    return vec_where_less(b, a, a, b);
}

/* The smaller; b when either is NaN. */
static inline vec vec_min(vec a, vec b)
{
    return vec_where_less(a, b, a, b);
}

/* To the nearest integer; |a| < 2^22. */
static inline vec vec_round(vec a)
{
    vec magic = vec_set(0x1.8p23f);
    return (a + magic) - magic;
}

/* What a lies above the next integer below it, and a * 2^n for that integer n, |n| < 127; likewise when a
 * little more is left to both. */
static inline vec vec_fraction(vec a)
{
    return a - vec_round(a - 0.5f);
}

/* a * 2^n for whole n in -252 .. 254, rounded once: two factors, since 2^n itself may not be a normal number.
 */
static inline vec vec_scale_exponent(vec a, vec n)
{
    vec_int whole = __builtin_convertvector(n, vec_int), half = whole >> 1, rest = whole - half;
    return a * (vec)((half + 127) << 23) * (vec)((rest + 127) << 23);
}

/* a * 2^n where neither a nor the result is subnormal or infinite, |n| < 127. NaN stays: as an integer it is
 * 0 or -2^31 on some processors, 2^31 - 1 on RISC-V. */
static inline vec vec_scale_near(vec a, vec n)
{
    vec_int is_number = n == n, whole = __builtin_convertvector(n, vec_int) & is_number;
    return (vec)((vec_int)a + (whole << 23));
}

static inline vec vec_scale_floor(vec a, vec n)
{
    return vec_scale_near(a, vec_round(n - 0.5f));
}

static inline vec vec_load_bfloat16(const uint16_t *p)
{
    vec_half half;
    memcpy(&half, p, sizeof half);
    return (vec)(__builtin_convertvector(half, vec_bits) << 16);
}

/* The exponent moves by a multiplication, which makes subnormals exact; infinity and NaN need their exponent
 * set. */
static inline vec vec_load_float16(const uint16_t *p)
{
    vec_half half;
    memcpy(&half, p, sizeof half);
    vec_bits bits = __builtin_convertvector(half, vec_bits), magnitude = (bits & 0x7fff) << 13;
    vec_bits special = (vec_bits)(magnitude >= 0x0f800000) & 0x7f800000;
    return (vec)((vec_bits)((vec)magnitude * 0x1p112f) | special | (bits & 0x8000) << 16);
}

static inline vec vec_load_int8(const int8_t *p)
{
    return (vec){p[0], p[1], p[2], p[3]};
}

static inline void vec_store_bfloat16(uint16_t *p, vec a)
{
    for (int i = 0; i < WIDTH; i++)
        p[i] = bfloat16_of_float(a[i]);
}

static inline void vec_store_float16(uint16_t *p, vec a)
{
    for (int i = 0; i < WIDTH; i++)
        p[i] = float16_of_float(a[i]);
}

/* Sum and product of all lanes, in double. */
static inline double vec_total(vec a)
{
    return ((double)a[0] + (double)a[1]) + ((double)a[2] + (double)a[3]);
}

static inline double vec_product(vec a)
{
    return ((double)a[0] * (double)a[1]) * ((double)a[2] * (double)a[3]);
}

/* Half a vector of floats as doubles; and both halves. */
static inline doubles doubles_load(const float *p)
{
    return (doubles){(double)p[0], (double)p[1]};
}

static inline void doubles_halves(vec a, doubles *low, doubles *high)
{
    *low = (doubles){(double)a[0], (double)a[1]};
    *high = (doubles){(double)a[2], (double)a[3]};
}

/* rows [WIDTH][WIDTH]: row i becomes column i. */
static inline void vec_transpose(vec rows[WIDTH])
{
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < i; j++) {
            float a = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = a;
        }
}

/* The empty statement is an effect: GCC 12 takes functions that only prefetch for pure and drops calls of them.
 */
static inline void prefetch_line(const void *p)
{
    __builtin_prefetch(p, 0, 2);
    __asm__ volatile("" : : "r"(p));
}

#endif
