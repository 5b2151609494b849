/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_DOUBLES_SIMD_H
#define CLATTN_DOUBLES_SIMD_H

/* Totals and products of the lanes of several vectors at once, in double, and logarithms of the latter.
 * Included after a vector layer.
 *
 * A vector of WIDTH floats makes two of DOUBLES doubles, which are joined lane by lane; DOUBLES such vectors
 * become one, which has the result of vector n in lane n:
 *
 *     a0 a1 a2 a3   b0 b1 b2 b3      a01 a23 b01 b23
 *     c0 c1 c2 c3   d0 d1 d2 d3  ->  c01 c23 d01 d23  ->  a b c d */

#include "rows_simd.h"

enum { DOUBLES = WIDTH / 2 };

typedef int64_t longs __attribute__((vector_size(4 * WIDTH)));
typedef uint64_t long_bits __attribute__((vector_size(4 * WIDTH)));
typedef float half_vec __attribute__((vector_size(2 * WIDTH)));

#if defined(__clang__)
#define DOUBLES_SHUFFLE(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define DOUBLES_SHUFFLE(A, B, ...) __builtin_shuffle(A, B, (longs){__VA_ARGS__})
#endif

/* The lanes of even and odd numbers of a and b. */
ALWAYS_INLINE void doubles_deal(doubles a, doubles b, doubles *even, doubles *odd)
{
#if SIMD_DOUBLES == 8
    *even = DOUBLES_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
    *odd = DOUBLES_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#elif SIMD_DOUBLES == 4
    *even = DOUBLES_SHUFFLE(a, b, 0, 2, 4, 6);
    *odd = DOUBLES_SHUFFLE(a, b, 1, 3, 5, 7);
#else
    *even = DOUBLES_SHUFFLE(a, b, 0, 2);
    *odd = DOUBLES_SHUFFLE(a, b, 1, 3);
#endif
}

ALWAYS_INLINE doubles doubles_sum(vec a)
{
    doubles low, high;
    doubles_halves(a, &low, &high);
    return low + high;
}

ALWAYS_INLINE doubles doubles_product(vec a)
{
    doubles low, high;
    doubles_halves(a, &low, &high);
    return low * high;
}

/* Lane n: the total, or product, of the lanes of part[n]; part [DOUBLES] is overwritten. */
ALWAYS_INLINE doubles doubles_join(doubles *part, const bool multiply)
{
    UNROLL for (int count = DOUBLES / 2; count > 0; count /= 2)
    {
        UNROLL for (int n = 0; n < count; n++)
        {
            doubles even, odd;
            doubles_deal(part[2 * n], part[2 * n + 1], &even, &odd);
            part[n] = multiply ? even * odd : even + odd;
        }
    }
    return part[0];
}

/* log x within 1e-11 for 1 <= x < 2^1023; NaN for NaN, not finite for infinity.
 *
 *   x = 2^n m,  sqrt(1/2) <= m < sqrt 2,   log m = 2 artanh s,  s = (m - 1) / (m + 1) */
ALWAYS_INLINE doubles doubles_log(doubles x)
{
    const uint64_t root = 0x3fe6a09e667f3bcd, shift = 0x4330000000000000; /* sqrt(1/2); 2^52 */
    long_bits bits = (long_bits)x, n = (bits - root) >> 52;
    doubles m = (doubles)(bits - (n << 52)), s = (m - 1) / (m + 1), square = s * s;
    doubles p = square * 0.23618582 + 0.28534912;
    p = p * square + 0.40000387;
    p = p * square + 0.66666665;
    p = p * square + 2;
    return ((doubles)(n | shift) - 0x1p52) * 0.69314718055994530942 + s * p + (x - x);
}

#endif
