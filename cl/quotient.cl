/* SPDX-License-Identifier: MIT */
/* Quotients as the CPU has them: a division in OpenCL C may be some units in the last place off. Kernels
 * include this file. */

/* a / b, rounded to nearest: the remainder of a quotient is exact by fma, and two of them correct it. */
inline float quotient(float a, float b)
{
    const float about = 1.0f / b, inverse = fma(fma(-b, about, 1.0f), about, about);
    if (!(fabs(a) < INFINITY) || !(fabs(inverse) < INFINITY)) return a / b;
    float q = a * inverse;
    q = fma(fma(-b, q, a), inverse, q);
    return fma(fma(-b, q, a), inverse, q);
}
