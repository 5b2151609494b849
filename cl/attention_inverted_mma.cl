/* SPDX-License-Identifier: MIT */
/* Attention over block lists, one key block at a time (inverted lists); attention_merge.cl joins the partial results.
 *
 * attention_inverted: a work-group of WARPS warps stages one block's 64 keys and values once and takes ROWS
 * rows of the queries that list it; a row is one (query, head). Each warp walks its own tiles of 16 rows
 * without barriers.
 *
 *     pairs of block b   row r = pair r / GROUP, head r % GROUP
 *     +-----------+
 *     | 16 rows   | warp 0      keys [64][DIM]   values [64][DIM_V]   in local memory, read by all warps
 *     | 16 rows   | warp 1
 *     |  ...      |             S = Q K^T (16 x 64) -> softmax within the block -> O = P V (16 x DIM_V)
 *     +-----------+
 *
 * Read per tile of ROWS rows: 64 (DIM + DIM_V) elements of the block, ROWS * DIM of q; written: ROWS * DIM_V
 * partial results and ROWS float32 logarithms. A partial result is normalised within its block; its row is
 * stored in groups of 32 columns, word w of lane c (w, c < 4) at c * 4 + w holding columns 8 w + 2 c, +1, so
 * that a lane stores 16 bytes.
 *
 * Mirrors cpu/attention_forward_ref.c.
 *
 * Macros: those of attention_inverted.cl.
 */
/* o += P V, as add_values, with the weights' lost parts; s is used up. */
static inline void add_values_exactly(float4 *o, float4 *s, uint values, uint lane)
{
#if V_TILES > 8 /* 16 keys at a time: for the parts of others there are no registers */
#pragma unroll 1
#else
#pragma unroll
#endif
    for (uint k = 0; k < 4; k++) {
        const uint4 p = weights_of(s, 0), lost = lost_weights_of(s, 0);
        const uint row = 16 * k + (lane & 15);
#pragma unroll
        for (uint n = 0; n < V_TILES; n++) {
            const uint4 b = load_matrix_trans(values + 16 * V_AT(row, 2 * n + (lane >> 4)));
            mma(&o[2 * n], p.x, p.y, p.z, p.w, b.x, b.y);
            mma(&o[2 * n + 1], p.x, p.y, p.z, p.w, b.z, b.w);
            mma(&o[2 * n], lost.x, lost.y, lost.z, lost.w, b.x, b.y);
            mma(&o[2 * n + 1], lost.x, lost.y, lost.z, lost.w, b.z, b.w);
        }
#pragma unroll
        for (uint n = 0; n < 6; n++)
            s[n] = s[n + 2];
    }
}

__kernel
__attribute__((reqd_work_group_size(32 * WARPS, 1, 1))) void
attention_inverted(__global const ushort *q, ulong q_base, ulong q_len_stride, ulong q_head_stride,
                   __global const ushort *k, ulong k_base, ulong k_len_stride, ulong k_head_stride,
                   __global const ushort *v, ulong v_base, ulong v_len_stride, ulong v_head_stride,
                   __global const uint *pairs, __global const uint *offset, __global const uint *tile_offset,
                   __global uint4 *partial_out, __global float *partial_lse, uint q_len, uint kv_len, uint topk,
                   uint n_blocks, uint entries, float scale, float cap_scale, uint window)
{
    __local uint4 keys[LEAF * K_ROW];
    __local uint4 values[LEAF * V_ROW];
    const uint t = (uint)get_local_id(0), lane = t & 31, warp = t >> 5, g = lane >> 2, c = lane & 3;
    const uint kv_head = (uint)get_group_id(1), kv_heads = (uint)get_num_groups(1),
               tile = (uint)get_group_id(0);
    offset += (ulong)kv_head * (entries + 1);
    tile_offset += (ulong)kv_head * (entries + 1);
    if (tile >= tile_offset[entries]) return;
    const uint entry = find_entry(tile_offset, entries, tile, lane);
    const uint block = entry % n_blocks, first = (tile - tile_offset[entry]) * ROWS;
    const uint rows = min((uint)ROWS, (offset[entry + 1] - offset[entry]) * GROUP - first);
    const int valid = (int)kv_len - (int)(block * LEAF);
    stage_keys(keys, k + k_base + (ulong)block * LEAF * k_len_stride + kv_head * k_head_stride, k_len_stride,
               valid, t, 32 * WARPS);
    stage_values(values, v + v_base + (ulong)block * LEAF * v_len_stride + kv_head * v_head_stride,
                 v_len_stride, valid, t, 32 * WARPS);
    copy_commit();
    pairs += (ulong)kv_head * q_len * topk + offset[entry];
    q += q_base + (ulong)kv_head * GROUP * q_head_stride;
    scale *= LOG2E; /* > 0 */
    cap_scale *= LOG2E;
    const uint value_address = local_address(values);
    copy_wait(0);
    barrier(CLK_LOCAL_MEM_FENCE);

    for (uint r = 16 * warp; r < rows; r += 16 * WARPS) {
        const uint row0 = first + min(r + g, rows - 1), row1 = first + min(r + g + 8, rows - 1);
        const uint slot0 = pairs[row0 / GROUP], slot1 = pairs[row1 / GROUP], h0 = row0 % GROUP,
                   h1 = row1 % GROUP;
        const uint i0 = slot0 / topk, i1 = slot1 / topk, part0 = slot0 - i0 * topk, part1 = slot1 - i1 * topk;
        uint4 a0[K_STEPS], a1[K_STEPS];
        load_queries(a0, a1, q, q_len_stride, q_head_stride, i0, i1, h0, h1, c);
        float4 s[8];
#pragma unroll
        for (uint n = 0; n < 8; n++)
            s[n] = (float4)(0, 0, 0, 0);
#pragma unroll
        for (uint kk = 0; kk < K_STEPS; kk++)
#pragma unroll
            for (uint n = 0; n < 8; n++)
                mma32(&s[n], a0[kk], a1[kk], keys[K_AT(8 * n + g, 4 * kk + c)]);

        float2 top;
        float2 sum = weigh_block(s, columns_seen(i0, valid, q_len, window), columns_seen(i1, valid, q_len, window), scale,
                                 cap_scale, c, &top);
        float4 o[2 * V_TILES];
#pragma unroll
        for (uint n = 0; n < 2 * V_TILES; n++)
            o[n] = (float4)(0, 0, 0, 0);
        add_values_exactly(o, s, value_address, lane);
        sum = sum_quad(sum);
        const ulong at0 = (((ulong)i0 * kv_heads + kv_head) * topk + part0) * GROUP + h0;
        const ulong at1 = (((ulong)i1 * kv_heads + kv_head) * topk + part1) * GROUP + h1;
        store_partial(partial_out, partial_lse, o, top, sum, at0, at1, r + g < rows, r + g + 8 < rows, c);
    }
}
