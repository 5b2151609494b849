/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_SIMD_NEON_H
#define CLATTN_SIMD_NEON_H

/* Vectors of four floats: NEON of 64-bit ARM processors. The same names as in simd_c.h, which explains them. */

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

/* 24 or 16 vectors of sums of the 32 registers. */
enum { WIDTH = 4, DOT_ROWS_1 = 16, DOT_ROWS_2 = 12, PV_ROWS = 8 };
#define SIMD_PV_ROWS_8
#define SIMD_PAIRS_6
#define SIMD_PAIRS_8
#define SIMD_DOUBLES 2
#define SIMD_SUM_VECTORS 8

typedef float32x4_t vec;
typedef float64x2_t doubles;

static inline vec vec_set(float a)
{
    return vdupq_n_f32(a);
}

static inline vec vec_zero(void)
{
    return vdupq_n_f32(0);
}

static inline vec vec_load(const float *p)
{
    return vld1q_f32(p);
}

static inline void vec_store(float *p, vec a)
{
    vst1q_f32(p, a);
}

static inline vec vec_add(vec a, vec b)
{
    return vaddq_f32(a, b);
}

static inline vec vec_sub(vec a, vec b)
{
    return vsubq_f32(a, b);
}

static inline vec vec_mul(vec a, vec b)
{
    return vmulq_f32(a, b);
}

static inline vec vec_div(vec a, vec b)
{
    return vdivq_f32(a, b);
}

static inline vec vec_fma(vec a, vec b, vec c)
{
    return vfmaq_f32(c, a, b);
}

static inline vec vec_where_less(vec a, vec b, vec x, vec y)
{
    return vbslq_f32(vcltq_f32(a, b), x, y);
}

/* Not FMAX and FMIN, which return NaN when only a is one. */
static inline vec vec_max(vec a, vec b)
{
    return vec_where_less(b, a, a, b);
}

static inline vec vec_min(vec a, vec b)
{
    return vec_where_less(a, b, a, b);
}

static inline vec vec_round(vec a)
{
    return vrndnq_f32(a);
}

static inline vec vec_power_of_two(int32x4_t n)
{
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}

static inline vec vec_scale_exponent(vec a, vec n)
{
    int32x4_t whole = vcvtq_s32_f32(n), half = vshrq_n_s32(whole, 1);
    return vmulq_f32(vmulq_f32(a, vec_power_of_two(half)), vec_power_of_two(vsubq_s32(whole, half)));
}

static inline vec vec_scale_near(vec a, vec n)
{
    int32x4_t shift = vshlq_n_s32(vcvtq_s32_f32(n), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), shift));
}

static inline vec vec_fraction(vec a)
{
    return vsubq_f32(a, vrndmq_f32(a));
}

static inline vec vec_scale_floor(vec a, vec n)
{
    return vec_scale_near(a, vrndmq_f32(n));
}

static inline vec vec_load_bfloat16(const uint16_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}

static inline vec vec_load_float16(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

static inline vec vec_load_int8(const int8_t *p)
{
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    int16x8_t wide = vmovl_s8(vcreate_s8(bytes));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}

/* To nearest even; a NaN stays one. */
static inline void vec_store_bfloat16(uint16_t *p, vec a)
{
    uint32x4_t bits = vreinterpretq_u32_f32(a), high = vshrq_n_u32(bits, 16);
    uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));
    uint32x4_t is_number = vceqq_f32(a, a);
    vst1_u16(p, vmovn_u32(vbslq_u32(is_number, vshrq_n_u32(rounded, 16), quiet)));
}

static inline void vec_store_float16(uint16_t *p, vec a)
{
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a)));
}

static inline double vec_total(vec a)
{
    return vaddvq_f64(vaddq_f64(vcvt_f64_f32(vget_low_f32(a)), vcvt_high_f64_f32(a)));
}

static inline double vec_product(vec a)
{
    float64x2_t two = vmulq_f64(vcvt_f64_f32(vget_low_f32(a)), vcvt_high_f64_f32(a));
    return vgetq_lane_f64(two, 0) * vgetq_lane_f64(two, 1);
}

static inline doubles doubles_load(const float *p)
{
    return vcvt_f64_f32(vld1_f32(p));
}

static inline void doubles_halves(vec a, doubles *low, doubles *high)
{
    *low = vcvt_f64_f32(vget_low_f32(a));
    *high = vcvt_high_f64_f32(a);
}

static inline void vec_transpose(vec rows[WIDTH])
{
    float32x4x2_t low = vzipq_f32(rows[0], rows[2]), high = vzipq_f32(rows[1], rows[3]);
    float32x4x2_t first = vzipq_f32(low.val[0], high.val[0]), last = vzipq_f32(low.val[1], high.val[1]);
    rows[0] = first.val[0];
    rows[1] = first.val[1];
    rows[2] = last.val[0];
    rows[3] = last.val[1];
}

/* The empty statement is an effect: GCC 12 takes functions that only prefetch for pure and drops calls of them.
 */
static inline void prefetch_line(const void *p)
{
    __builtin_prefetch(p, 0, 2);
    __asm__ volatile("" : : "r"(p));
}

#endif
