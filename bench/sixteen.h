/* SPDX-License-Identifier: MIT
 *
 * float16 and bfloat16 as bits, rounding to nearest even. */
#ifndef CLATTN_BENCH_SIXTEEN_H
#define CLATTN_BENCH_SIXTEEN_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float bits_to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t float_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float bfloat16_to_float(uint16_t bits)
{
    return bits_to_float((uint32_t)bits << 16);
}

static inline uint16_t float_to_bfloat16(float value)
{
    uint32_t bits = float_to_bits(value);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float half_to_float(uint16_t half)
{
    int exponent = (half >> 10) & 31, mantissa = half & 1023;
    float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                      : exponent == 0 ? ldexpf((float)mantissa, -24)
                                      : ldexpf((float)(1024 + mantissa), exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

static inline uint16_t float_to_half(float value)
{
    uint16_t sign = (uint16_t)((float_to_bits(value) >> 16) & 0x8000);
    float magnitude = fabsf(value);
    if (value != value) return 0x7e00;
    if (magnitude >= 65520) return sign | 0x7c00;
    /* Below 2^-14 the spacing stays 2^-24; above it is 2^(exponent - 10). Both divisions are exact. */
    int exponent = magnitude < 0x1p-14f ? -14 : ilogbf(magnitude);
    int32_t steps = (int32_t)nearbyintf(ldexpf(magnitude, 10 - exponent));
    /* A carry into the next exponent is the right number in this encoding. */
    return (uint16_t)(sign | (steps + ((exponent + 14) << 10)));
}

#endif
