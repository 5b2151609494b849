/* SPDX-License-Identifier: MIT */
/* Attention over block lists, one warp a query: its GROUP <= 16 heads are the rows of the tile. Keys and
 * values come from the packed copy (pack_blocks.cl) straight into registers, 512 contiguous bytes a load;
 * queries beside each other run in
 * one work-group at the same time, so blocks that they share come from the first-level cache.
 *
 *     warp w: query first + w      16 rows (heads) x 64 keys  ->  online softmax  ->  16 x DIM_V, in list order
 *
 * list [q_len / list_block][kv_heads][topk]: list_block 1 for per-query lists, more for lists of query blocks.
 * Read per query and listed block: 64 (DIM + DIM_V) elements (from cache when shared); q once, out and lse
 * once.
 * Invariant: after block j, o / row_sum is the attention over blocks 0..j, row_max their largest score (times
 * scale).
 * Mirrors cpu/attention_forward_ref.c. Macros: WARPS 4, and those of attention_tile.cl.
 */
#ifndef WARPS
#define WARPS 4
#endif

__kernel
__attribute__((reqd_work_group_size(32 * WARPS, 1, 1))) void
attention_token(__global const ushort *q, ulong q_base, ulong q_len_stride, ulong q_head_stride,
                __global const uint4 *restrict packed_k, __global const uint4 *restrict packed_v,
                __global const int *list, ulong list_base, __global ushort *out, ulong out_base,
                ulong out_len_stride, ulong out_head_stride, __global float *lse, ulong lse_base,
                ulong lse_len_stride, ulong lse_head_stride, uint q_len, uint kv_len, uint topk,
                uint n_blocks, uint list_block, float scale, float cap_scale, uint window, __global const float *sink,
                ulong sink_base, ulong sink_stride)
{
    const uint t = (uint)get_local_id(0), lane = t & 31, g = lane >> 2, c = lane & 3;
    const uint kv_head = (uint)get_group_id(1), kv_heads = (uint)get_num_groups(1);
    const uint i = (uint)get_group_id(0) * WARPS + (t >> 5);
    if (i >= q_len) return;
    const uint h0 = (uint)get_group_id(2) * 16 + g, h1 = h0 + 8;
    q += q_base + (ulong)i * q_len_stride + (ulong)kv_head * GROUP * q_head_stride;
    list += list_base + ((ulong)(i / list_block) * kv_heads + kv_head) * topk;
    packed_k += (ulong)kv_head * n_blocks * (LEAF / 8 * K_STEPS * 32) + lane;
    packed_v += (ulong)kv_head * n_blocks * (LEAF / 16 * V_TILES * 32) + lane;
    scale *= LOG2E; /* > 0 */
    cap_scale *= LOG2E;
    const int position = (int)(i + kv_len - q_len), begin = keys_begin(position, window);
    const int visible = keys_end(position, kv_len, window);
#if DIM <= 128 && DIM_V <= 128
    uint4 a0[K_STEPS], a1[K_STEPS];
#pragma unroll
    for (uint kk = 0; kk < K_STEPS; kk++) {
        a0[kk] = load8(q + min(h0, (uint)GROUP - 1) * q_head_stride, 32 * kk + 8 * c, DIM);
        a1[kk] = load8(q + min(h1, (uint)GROUP - 1) * q_head_stride, 32 * kk + 8 * c, DIM);
    }
#endif
    float4 o[2 * V_TILES];
#pragma unroll
    for (uint n = 0; n < 2 * V_TILES; n++)
        o[n] = (float4)(0, 0, 0, 0);
    float2 row_max = (float2)(-INFINITY, -INFINITY), row_sum = (float2)(0, 0);

    for (uint j = WINDOW ? entries_before(list, topk, begin, lane) : 0; j < topk; j++) {
        const int block = list[j];
        if (block < 0) break;
        const int limit = visible - block * LEAF;
        if (limit <= 0) continue;
        __global const uint4 *restrict kb = packed_k + (ulong)block * (LEAF / 8 * K_STEPS * 32);
        __global const uint4 *restrict vb = packed_v + (ulong)block * (LEAF / 16 * V_TILES * 32);
        float4 s[8];
#pragma unroll
        for (uint n = 0; n < 8; n++)
            s[n] = (float4)(0, 0, 0, 0);
#if DIM > 128 || DIM_V > 128 /* no room to keep the query: a stretch of 32 columns at a time */
#pragma unroll 1
        for (uint kk = 0; kk < K_STEPS; kk++) {
            const uint4 a0 = load8(q + min(h0, (uint)GROUP - 1) * q_head_stride, 32 * kk + 8 * c, DIM);
            const uint4 a1 = load8(q + min(h1, (uint)GROUP - 1) * q_head_stride, 32 * kk + 8 * c, DIM);
#pragma unroll
            for (uint n = 0; n < 8; n++)
                mma32(&s[n], a0, a1, kb[(n * K_STEPS + kk) * 32]);
        }
#else
#pragma unroll
        for (uint n = 0; n < 8; n++)
#pragma unroll
            for (uint kk = 0; kk < K_STEPS; kk++)
                mma32(&s[n], a0[kk], a1[kk], kb[(n * K_STEPS + kk) * 32]);
#endif
        if (SOFTCAP) cap_scores(s, cap_scale);
        if (limit < LEAF) mask_scores(s, limit, limit, c);
        if (WINDOW && begin > block * LEAF) mask_scores_before(s, begin - block * LEAF, begin - block * LEAF, c);
        float2 top = row_max_of(s) * scale;
        top.x = fmax(row_max.x, top.x);
        top.y = fmax(row_max.y, top.y);
        const float2 keep = (float2)(exp2_fast(row_max.x - top.x), exp2_fast(row_max.y - top.y));
        row_max = top;
        row_sum = row_sum * keep + weigh(s, scale, top);
#pragma unroll
        for (uint n = 0; n < 2 * V_TILES; n++)
            o[n] *= (float4)(keep.x, keep.x, keep.y, keep.y);
#if DIM > 128 || DIM_V > 128 /* 16 keys at a time: for loads ahead there are no registers */
#pragma unroll 1
#else
#pragma unroll
#endif
        for (uint k = 0; k < 4; k++) {
            const uint p0 = pack2(s[0].x, s[0].y), p1 = pack2(s[0].z, s[0].w);
            const uint p2 = pack2(s[1].x, s[1].y), p3 = pack2(s[1].z, s[1].w);
#pragma unroll
            for (uint n = 0; n < V_TILES; n++) {
                const uint4 b = vb[(k * V_TILES + n) * 32];
                mma(&o[2 * n], p0, p1, p2, p3, b.x, b.y);
                mma(&o[2 * n + 1], p0, p1, p2, p3, b.z, b.w);
            }
#pragma unroll
            for (uint n = 0; n < 6; n++)
                s[n] = s[n + 2];
        }
    }
    row_sum.x += shuffle_xor(row_sum.x, 1);
    row_sum.y += shuffle_xor(row_sum.y, 1);
    row_sum.x += shuffle_xor(row_sum.x, 2);
    row_sum.y += shuffle_xor(row_sum.y, 2);
    /* Where this item stands is asked again, since registers held from the start on would be spilled. */
    const uint again = work_item_again(), column = again & 3, row = work_group_again() * WARPS + (again >> 5);
    const uint head0 = (uint)get_group_id(2) * 16 + (again >> 2 & 7), head1 = head0 + 8;
    const ulong first_sink = sink_base + kv_head * GROUP * sink_stride;
    const float2 inv = close_rows(&row_max, &row_sum, sink, first_sink + min(head0, (uint)GROUP - 1) * sink_stride,
                                  first_sink + min(head1, (uint)GROUP - 1) * sink_stride);
    out += out_base + (ulong)row * out_len_stride + (ulong)kv_head * GROUP * out_head_stride;
#pragma unroll
    for (uint n = 0; n < V_QUADS; n++) {
        uint w0[4], w1[4];
#pragma unroll
        for (uint w = 0; w < 4; w++) {
            w0[w] = 4 * n + w < 2 * V_TILES ? pack2(o[4 * n + w].x * inv.x, o[4 * n + w].y * inv.x) : 0;
            w1[w] = 4 * n + w < 2 * V_TILES ? pack2(o[4 * n + w].z * inv.y, o[4 * n + w].w * inv.y) : 0;
        }
        const uint4 r0 = quad_transpose((uint4)(w0[0], w0[1], w0[2], w0[3]), column);
        const uint4 r1 = quad_transpose((uint4)(w1[0], w1[1], w1[2], w1[3]), column);
        if (head0 < GROUP) store8(out + head0 * out_head_stride, 32 * n + 8 * column, DIM_V, r0);
        if (head1 < GROUP) store8(out + head1 * out_head_stride, 32 * n + 8 * column, DIM_V, r1);
    }
    if (lse && column == 0) {
        lse += lse_base + (ulong)row * lse_len_stride + (ulong)kv_head * GROUP * lse_head_stride;
        if (head0 < GROUP) lse[head0 * lse_head_stride] = row_lse(row_max.x, row_sum.x);
        if (head1 < GROUP) lse[head1 * lse_head_stride] = row_lse(row_max.y, row_sum.y);
    }
}
