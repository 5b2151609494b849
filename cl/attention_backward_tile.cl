/* SPDX-License-Identifier: MIT */
/* dq of a tile of queries over one list of key blocks, Hopper form; dk and dv come from
 * attention_backward_wgmma.cl.
 *
 *   P = exp(scale q.k - lse)   dS = P (dout.v - delta)   dq = scale sum dS k_j
 *
 * backward_tile: WARPGROUPS x 64 rows of a list, numbered as in attention_tile_wgmma.cl.
 *
 *     list l:  b0 b1 b2 ...         two blocks in local memory, the second one coming
 *     +---------+                   +----+----+
 *     | q, dout | warpgroup 0       | K0 | K1 |    S  = Q K^T      64 rows x 64 keys, registers
 *     | q, dout | warpgroup 1       | V0 | V1 |    dP = dO V^T     the same
 *     +---------+                   +----+----+    dQ += dS K      registers, over the whole list
 *
 * Read per tile: q, dout, lse and delta once, 64 (DIM + DIM_V) elements a block of the list; written: dq once.
 * Invariant: after block j, dq holds the sum over the row's keys in blocks 0..j.
 * Mirrors cpu/attention_backward_ref.c. Macros: WARPGROUPS 2, and those of attention_tile.cl (64, 80, 96, 128).
 */
#ifndef WARPGROUPS
#define WARPGROUPS 2
#endif
#define ROWS_TILE (64 * WARPGROUPS)

/* One block, the rows of which begin at k and v, `valid` of which exist. */
static inline void stage_block(__local uint4 *keys, __local uint4 *values, __global const ushort *k,
                               ulong k_stride, __global const ushort *v, ulong v_stride, int valid, uint t)
{
    for (uint row = t / 4; row < LEAF; row += 32 * WARPGROUPS) {
        const int exists = (int)row < valid;
        stage_row(keys, k + (exists ? row * k_stride : 0), K_CHUNKS, DIM, row, exists, t % 4 * K_CHUNKS / 4,
                  (t % 4 + 1) * K_CHUNKS / 4, 1);
        stage_row(values, v + (exists ? row * v_stride : 0), V_CHUNKS, DIM_V, row, exists, t % 4 * V_CHUNKS / 4,
                  (t % 4 + 1) * V_CHUNKS / 4, 1);
    }
}

__kernel
__attribute__((reqd_work_group_size(128 * WARPGROUPS, 1, 1))) void
backward_tile(__global const ushort *q, ulong q_base, ulong q_len_stride, ulong q_head_stride,
              __global const ushort *k, ulong k_base, ulong k_len_stride, ulong k_head_stride,
              __global const ushort *v, ulong v_base, ulong v_len_stride, ulong v_head_stride,
              __global const ushort *dout, ulong dout_base, ulong dout_len_stride, ulong dout_head_stride,
              __global const float *lse, ulong lse_base, __global const float *delta,
              __global const int *tile_list, ulong list_base, uint list_stride, uint list_head_stride,
              __global ushort *dq, ulong dq_base, ulong dq_len_stride, ulong dq_head_stride, uint q_len,
              uint kv_len, uint list_length, uint q_block, uint tiles_per_list, float scale, float cap_scale, uint window)
{
    __local uint4 keys[2][LEAF * K_CHUNKS] __attribute__((aligned(1024)));
    __local uint4 values[2][LEAF * V_CHUNKS] __attribute__((aligned(1024)));
    __local uint4 queries[ROWS_TILE * K_CHUNKS] __attribute__((aligned(1024)));
    __local uint4 douts[ROWS_TILE * V_CHUNKS] __attribute__((aligned(1024)));
    const uint t = (uint)get_local_id(0), lane = t & 31, g = lane >> 2, c = lane & 3, warpgroup = t >> 7;
    const uint kv_head = (uint)get_group_id(1), kv_heads = (uint)get_num_groups(1);
    const uint tile = (uint)get_num_groups(0) - 1 - (uint)get_group_id(0); /* causal: the longest first */
    const uint entry = tile / tiles_per_list, first_query = entry * q_block,
               first = tile % tiles_per_list * ROWS_TILE;
    const uint rows = min(q_block, q_len - first_query) * GROUP; /* of the whole list */
    if (first >= rows) return;
    tile_list += list_base + (ulong)entry * list_stride + kv_head * list_head_stride;
    q += q_base + first_query * q_len_stride + kv_head * GROUP * q_head_stride;
    dout += dout_base + first_query * dout_len_stride + kv_head * GROUP * dout_head_stride;
    k += k_base + kv_head * k_head_stride;
    v += v_base + kv_head * v_head_stride;
    {
        const uint own = t / 2, half_row = t % 2, r = min(first + own, rows - 1);
        const int exists = first + own < rows;
        stage_row(queries, q + r / GROUP * q_len_stride + r % GROUP * q_head_stride, K_CHUNKS, DIM, own, exists,
                  half_row, K_CHUNKS, 2);
        stage_row(douts, dout + r / GROUP * dout_len_stride + r % GROUP * dout_head_stride, V_CHUNKS, DIM_V,
                  own, exists, half_row, V_CHUNKS, 2);
    }
    const int position = (int)(first_query + kv_len - q_len); /* of the list's first query */
    const uint last = (min(first + ROWS_TILE, rows) - 1) / GROUP;
    const int end = keys_end(position + (int)last, kv_len, window); /* of the keys that a row of this tile sees */
    if (WINDOW) { /* the list begins where the tile's first query does */
        const uint before =
            entries_before(tile_list, list_length, keys_begin(position + (int)(first / GROUP), window), lane);
        tile_list += before;
        list_length -= before;
    }
    const uint r0 = first + 16 * (t >> 5) + g, r1 = r0 + 8;
    const uint x0 = min(r0, rows - 1) / GROUP, x1 = min(r1, rows - 1) / GROUP; /* queries within the list */
    const ulong at0 = ((ulong)(first_query + x0) * kv_heads + kv_head) * GROUP + min(r0, rows - 1) % GROUP;
    const ulong at1 = ((ulong)(first_query + x1) * kv_heads + kv_head) * GROUP + min(r1, rows - 1) % GROUP;
    const int begin0 = keys_begin(position + (int)x0, window), end0 = keys_end(position + (int)x0, kv_len, window);
    const int begin1 = keys_begin(position + (int)x1, window), end1 = keys_end(position + (int)x1, kv_len, window);
    const float l0 = lse[lse_base + at0], l1 = lse[lse_base + at1], d0 = delta[at0], d1 = delta[at1];
    const float b0 = l0 == -INFINITY ? INFINITY : l0 * LOG2E, b1 = l1 == -INFINITY ? INFINITY : l1 * LOG2E;
    const float exponent = scale * LOG2E;
    const uint query_address = local_address(queries) + warpgroup * 64 * K_CHUNKS * 16;
    const uint dout_address = local_address(douts) + warpgroup * 64 * V_CHUNKS * 16;
    float4 sum[2 * K_TILES];
#pragma unroll
    for (uint n = 0; n < 2 * K_TILES; n++)
        sum[n] = (float4)(0, 0, 0, 0);

    int block = list_length > 0 ? tile_list[0] : -1;
    if (block >= 0 && block * LEAF < end)
        stage_block(keys[0], values[0], k + (ulong)block * LEAF * k_len_stride, k_len_stride,
                    v + (ulong)block * LEAF * v_len_stride, v_len_stride, (int)kv_len - block * LEAF, t);
    copy_commit();
    for (uint j = 0; block >= 0 && block * LEAF < end; j++) {
        const uint stage = j & 1;
        const int next = j + 1 < list_length ? tile_list[j + 1] : -1;
        if (next >= 0 && next * LEAF < end)
            stage_block(keys[stage ^ 1], values[stage ^ 1], k + (ulong)next * LEAF * k_len_stride, k_len_stride,
                        v + (ulong)next * LEAF * v_len_stride, v_len_stride, (int)kv_len - next * LEAF, t);
        copy_commit();
        copy_wait(1);
        local_fence();
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint key_address = local_address(keys[stage]), value_address = local_address(values[stage]);
        const int n0 = begin0 - block * LEAF, n1 = begin1 - block * LEAF;
        const int m0 = end0 - block * LEAF, m1 = end1 - block * LEAF;
        float4 s[8];
        uint2 p2[8], ds2[8]; /* low: row g, high: row g + 8 */
        warpgroup_scores_local(s, query_address, key_address);
#pragma unroll
        for (uint n = 0; n < 8; n++) {
            const int column = (int)(8 * n + 2 * c);
            p2[n].x = pack2(SEES(column, n0, m0) ? exp2_fast(fma(s[n].x, exponent, -b0)) : 0.0f,
                            SEES(column + 1, n0, m0) ? exp2_fast(fma(s[n].y, exponent, -b0)) : 0.0f);
            p2[n].y = pack2(SEES(column, n1, m1) ? exp2_fast(fma(s[n].z, exponent, -b1)) : 0.0f,
                            SEES(column + 1, n1, m1) ? exp2_fast(fma(s[n].w, exponent, -b1)) : 0.0f);
        }
        warpgroup_value_scores(s, dout_address, value_address);
#pragma unroll
        for (uint n = 0; n < 8; n++) {
            ds2[n].x = pack2(unpack_low(p2[n].x) * (s[n].x - d0), unpack_high(p2[n].x) * (s[n].y - d0));
            ds2[n].y = pack2(unpack_low(p2[n].y) * (s[n].z - d1), unpack_high(p2[n].y) * (s[n].w - d1));
        }
        uint4 ds[4];
#pragma unroll
        for (uint n = 0; n < 4; n++)
            ds[n] = (uint4)(ds2[2 * n], ds2[2 * n + 1]);
        warpgroup_add_keys(sum, ds, key_address);
        barrier(CLK_LOCAL_MEM_FENCE); /* this stage is free for the block after the next */
        block = next;
    }
    dq += dq_base + first_query * dq_len_stride + kv_head * GROUP * dq_head_stride;
#pragma unroll
    for (uint n = 0; n < K_QUADS; n++) {
        uint w0[4], w1[4];
#pragma unroll
        for (uint w = 0; w < 4; w++) {
            w0[w] = 4 * n + w < 2 * K_TILES ? pack2(sum[4 * n + w].x * scale, sum[4 * n + w].y * scale) : 0;
            w1[w] = 4 * n + w < 2 * K_TILES ? pack2(sum[4 * n + w].z * scale, sum[4 * n + w].w * scale) : 0;
        }
        const uint4 v0 = quad_transpose((uint4)(w0[0], w0[1], w0[2], w0[3]), c);
        const uint4 v1 = quad_transpose((uint4)(w1[0], w1[1], w1[2], w1[3]), c);
        if (r0 < rows) store8(dq + x0 * dq_len_stride + r0 % GROUP * dq_head_stride, 32 * n + 8 * c, DIM, v0);
        if (r1 < rows) store8(dq + x1 * dq_len_stride + r1 % GROUP * dq_head_stride, 32 * n + 8 * c, DIM, v1);
    }
}
