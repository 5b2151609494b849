/* SPDX-License-Identifier: MIT */
/* Ranking of scored nodes, shared by select_mma.cl and decode_step_mma.cl. */

/* Unsigned order of scores: NaN as -inf, -0 as 0; 0 is below every score. */
static inline uint order_key(float x)
{
    const uint u = as_uint(x + 0.0f);
    return x != x ? 0x007fffffu : u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* sum over the group's heads; x, y belong to rows g and g+8 */
static inline float sum_heads(float x, float y, uint g)
{
    float s = (g < GROUP ? x : 0.0f) + (g + 8 < GROUP ? y : 0.0f);
    s += shuffle_xor(s, 4);
    s += shuffle_xor(s, 8);
    s += shuffle_xor(s, 16);
    return s;
}

static inline float log_sum_2(float a, float b)
{
    const float m = fmax(a, b);
    return m == -INFINITY ? m : m + log2_fast(exp2_fast(a - m) + exp2_fast(b - m));
}
