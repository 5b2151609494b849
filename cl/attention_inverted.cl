/* SPDX-License-Identifier: MIT */
/* What attention_inverted_mma.cl and attention_inverted_wgmma.cl share: queries of listed rows, weights within
 * one block, partial results.
 *
 * Macros: WARPS 4, ROWS 512, and those of attention_tile.cl.
 */
#ifndef WARPS
#define WARPS 4
#endif
#ifndef ROWS
#define ROWS 512
#endif

static inline void load_queries(uint4 *a0, uint4 *a1, __global const ushort *q, ulong len_stride,
                                ulong head_stride, uint i0, uint i1, uint h0, uint h1, uint c)
{
    __global const ushort *q0 = q + i0 * len_stride + h0 * head_stride,
                          *q1 = q + i1 * len_stride + h1 * head_stride;
#pragma unroll
    for (uint kk = 0; kk < K_STEPS; kk++) {
        a0[kk] = load8(q0, 32 * kk + 8 * c, DIM);
        a1[kk] = load8(q1, 32 * kk + 8 * c, DIM);
    }
}

/* The columns of the block that query i sees, first and end; `valid` keys lie from the block's first one on. */
static inline int2 columns_seen(uint i, int valid, uint q_len, uint window)
{
    const int position = valid + (int)(i - q_len);
    return (int2)(WINDOW ? position + 1 - (int)window : 0, CAUSAL   ? min(valid, position + 1)
                                                           : WINDOW ? min(valid, position + (int)window)
                                                                    : valid);
}

/* Scores of one block become weights; returns their sums over the row, *top is the largest score times scale.
 */
static inline float2 weigh_block(float4 *s, int2 seen0, int2 seen1, float scale, float cap_scale, uint c,
                                 float2 *top)
{
    if (SOFTCAP) cap_scores(s, cap_scale);
    if (ballot(seen0.y < LEAF || seen1.y < LEAF)) mask_scores(s, seen0.y, seen1.y, c);
    if (WINDOW && ballot(seen0.x > 0 || seen1.x > 0)) mask_scores_before(s, seen0.x, seen1.x, c);
    const int has0 = seen0.y > 0 && (!WINDOW || seen0.x < min(seen0.y, LEAF));
    const int has1 = seen1.y > 0 && (!WINDOW || seen1.x < min(seen1.y, LEAF));
    *top = row_max_of(s) * scale;
    top->x = has0 ? top->x : 0.0f; /* a row without keys: all weights exp2(-inf) = 0 */
    top->y = has1 ? top->y : 0.0f;
    return weigh(s, scale, *top);
}

/* What is lost where weights_of rounds, as operand A too. Results of a block are rounded to 16 bits and those of a row
 * once more; so that weights are not a third rounding, P V is the sum of two products. */
static inline float2 lost_of(float low, float high)
{
    const uint w = pack2(low, high);
    return (float2)(low - unpack_low(w), high - unpack_high(w));
}
static inline uint4 lost_weights_of(const float4 *s, uint k)
{
    const float4 lost[2] = {
        (float4)(lost_of(s[2 * k].x, s[2 * k].y), lost_of(s[2 * k].z, s[2 * k].w)),
        (float4)(lost_of(s[2 * k + 1].x, s[2 * k + 1].y), lost_of(s[2 * k + 1].z, s[2 * k + 1].w))};
    return weights_of(lost, 0);
}

static inline float2 sum_quad(float2 sum)
{
    sum.x += shuffle_xor(sum.x, 1);
    sum.y += shuffle_xor(sum.y, 1);
    sum.x += shuffle_xor(sum.x, 2);
    sum.y += shuffle_xor(sum.y, 2);
    return sum;
}

/* Normalised results and logarithms of rows at0 and at1. */
static inline void store_partial(__global uint4 *partial_out, __global float *partial_lse, const float4 *o,
                                 float2 top, float2 sum, ulong at0, ulong at1, int store0, int store1, uint c)
{
    const float inv0 = sum.x > 0 ? 1.0f / sum.x : 0.0f, inv1 = sum.y > 0 ? 1.0f / sum.y : 0.0f;
#pragma unroll
    for (uint n = 0; n < V_QUADS; n++) {
        uint w0[4], w1[4];
#pragma unroll
        for (uint w = 0; w < 4; w++) {
            w0[w] = 4 * n + w < 2 * V_TILES ? pack2(o[4 * n + w].x * inv0, o[4 * n + w].y * inv0) : 0;
            w1[w] = 4 * n + w < 2 * V_TILES ? pack2(o[4 * n + w].z * inv1, o[4 * n + w].w * inv1) : 0;
        }
        if (store0) partial_out[at0 * (V_QUADS * 4) + 4 * n + c] = (uint4)(w0[0], w0[1], w0[2], w0[3]);
        if (store1) partial_out[at1 * (V_QUADS * 4) + 4 * n + c] = (uint4)(w1[0], w1[1], w1[2], w1[3]);
    }
    if (c == 0 && store0) partial_lse[at0] = top.x + log2_fast(sum.x);
    if (c == 0 && store1) partial_lse[at1] = top.y + log2_fast(sum.y);
}
