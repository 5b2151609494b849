/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_EXP_SIMD_H
#define CLATTN_EXP_SIMD_H

/* exp for whole vectors, within 2 ulp over the whole range: 0 below -104, subnormals, infinity above 88.73, NaN
 * for NaN. Included after a vector layer (simd_*.h).
 *
 *   exp x = 2^n exp r,   n = round(x / ln 2),   |r| <= ln 2 / 2
 *
 * ln 2 is split into a part of few bits, whose product with n is exact, and the rest. The polynomial is that of
 * Cephes' expf. */

static inline vec vec_exp(vec x)
{
    vec below = x;
    x = vec_where_less(x, vec_set(-104.0f), vec_zero(), x); /* NaN stays: see vec_max */
    x = vec_min(vec_set(89.0f), x);
    vec n = vec_round(vec_mul(x, vec_set(1.44269504088896341f)));
    vec r = vec_fma(n, vec_set(-0.693359375f), x);
    r = vec_fma(n, vec_set(2.12194440e-4f), r);
    vec p = vec_set(1.9875691500e-4f);
    p = vec_fma(p, r, vec_set(1.3981999507e-3f));
    p = vec_fma(p, r, vec_set(8.3334519073e-3f));
    p = vec_fma(p, r, vec_set(4.1665795894e-2f));
    p = vec_fma(p, r, vec_set(1.6666665459e-1f));
    p = vec_fma(p, r, vec_set(5.0000001201e-1f));
    p = vec_fma(vec_mul(r, r), p, r);
    p = vec_scale_exponent(vec_add(p, vec_set(1)), n);
    return vec_where_less(below, vec_set(-104.0f), vec_zero(), p);
}

/* exp x for x <= 0, for the weights of a softmax: within 2 ulp from -87 on, 0 below; NaN for NaN. The
 * polynomial has the least relative error with a term 1. */
static inline vec vec_exp_below(vec x)
{
    vec least = vec_set(-87), bounded = vec_max(least, x); /* NaN stays: see vec_max */
    vec rounds = vec_set(0x1.8p23f);                       /* what is added to it loses its fraction */
    vec n = vec_sub(vec_fma(bounded, vec_set(1.44269504088896341f), rounds), rounds);
    vec r = vec_fma(n, vec_set(-0.693359375f), bounded);
    r = vec_fma(n, vec_set(2.12194440e-4f), r);
    vec p = vec_set(0.00138436072f);
    p = vec_fma(p, r, vec_set(0.00837419555f));
    p = vec_fma(p, r, vec_set(0.0416680053f));
    p = vec_fma(p, r, vec_set(0.166664302f));
    p = vec_fma(p, r, vec_set(0.49999994f));
    p = vec_fma(p, r, vec_set(1));
    p = vec_fma(p, r, vec_set(1));
#if defined(SIMD_SCALE_FROM)
    return vec_scale_from(p, n, x, least);
#else
    return vec_where_less(x, least, vec_zero(), vec_scale_near(p, n));
#endif
}

/* 2^x for x <= 0, within 2e-7 of itself from -125 on and 2^-125 below; NaN for NaN. For sums that have a term
 * 1: what vanishes beside it needs no care. The polynomial has the least relative error, 8.2e-8, with a term 1,
 * between two integers. */
static inline vec vec_exp2_below(vec x)
{
    x = vec_max(vec_set(-125.0f), x); /* NaN stays: see vec_max */
    vec r = vec_fraction(x), p = vec_set(1.86713007e-3f);
    p = vec_fma(p, r, vec_set(9.01703032e-3f));
    p = vec_fma(p, r, vec_set(5.57999131e-2f));
    p = vec_fma(p, r, vec_set(2.401644502e-1f));
    p = vec_fma(p, r, vec_set(6.931513118e-1f));
    p = vec_fma(p, r, vec_set(1.0f));
    return vec_scale_floor(p, x);
}

/* tanh, and its slope 1 - tanh^2 without cancellation, both within 4 ulp; NaN for NaN.
 *
 *   u = exp(-2 |y|),   tanh |y| = (1 - u) / (1 + u),   slope = 4 u / (1 + u)^2
 *
 * Below 0.625 the polynomial of Cephes' tanhf, since 1 - u would cancel. */
static inline vec vec_tanh(vec y, vec *slope)
{
    vec one = vec_set(1), size = vec_max(vec_sub(vec_zero(), y), y);
    vec u = vec_exp(vec_mul(vec_set(-2), size)), share = vec_div(one, vec_add(one, u));
    vec far = vec_mul(vec_sub(one, u), share), square = vec_mul(y, y);
    vec p = vec_set(-5.70498872745e-3f);
    p = vec_fma(p, square, vec_set(2.06390887954e-2f));
    p = vec_fma(p, square, vec_set(-5.37397155531e-2f));
    p = vec_fma(p, square, vec_set(1.33314422036e-1f));
    p = vec_fma(p, square, vec_set(-3.33332819422e-1f));
    vec near = vec_fma(vec_mul(p, square), y, y);
    far = vec_where_less(y, vec_zero(), vec_sub(vec_zero(), far), far);
    *slope = vec_mul(vec_mul(vec_set(4), u), vec_mul(share, share));
    return vec_where_less(size, vec_set(0.625f), near, far);
}

#endif
