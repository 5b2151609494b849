/* SPDX-License-Identifier: MIT */
/* Backward of attention over block lists, Hopper form: one key block at a time through inverted lists, no
 * atomics.
 *
 *   P = exp(scale q.k - lse)   dS = P (dout.v - delta)   delta = sum_d dout out - dlse
 *   dv_j = sum P dout          dk_j = scale sum dS q     dq = scale sum dS k_j
 *
 * backward_delta: delta, 16 lanes a row (query, head).
 * backward_block: a work-group of WARPGROUPS warpgroups stages one block's 64 keys and values and takes ROWS
 * rows of the queries that list it, 64 rows a warpgroup and step:
 *
 *      64 rows (q, dout; two stages)       S^T = K Q^T, dP^T = V dO^T        64 keys x 64 rows, keys are M
 *      +--------+                          P^T, dS^T in registers            (row scalars lse, delta along N)
 *      |  q     |   K, V resident          dV += P^T dO, dK += dS^T Q        registers, whole row range
 *      |  dout  |                          dQ  = dS K                        through local memory, one partial
 *        row a pair
 *      +--------+
 *
 * Read per row: DIM + DIM_V elements, two floats; written: DIM elements (dq of this pair). Per work-group and
 * warpgroup:
 * 64 (DIM + DIM_V) float32 of dk, dv.
 * Invariant: dk, dv hold the sums over this warpgroup's rows so far.
 * backward_keys: dk, dv = sums over a block's tiles in order, so two runs give the same bits. Blocks that
 * nobody lists get 0.
 * backward_queries: dq = sum over a row's pairs in list order.
 * With DQ 0 there are no dq: attention_backward_tile.cl makes them where lists serve many rows.
 * Mirrors cpu/attention_backward_ref.c. Macros: WARPGROUPS 2, ROWS 4096, DQ 1, and those of attention_tile.cl
 * (64, 80, 96, 128).
 */
#ifndef WARPGROUPS
#define WARPGROUPS 2
#endif
#ifndef ROWS
#define ROWS 4096
#endif
#ifndef DQ
#define DQ 1
#endif

__kernel
__attribute__((reqd_work_group_size(128, 1, 1))) void
backward_delta(__global const ushort *dout, ulong dout_base, ulong dout_len_stride, ulong dout_head_stride,
               __global const ushort *out, ulong out_base, ulong out_len_stride, ulong out_head_stride,
               __global const float *dlse, ulong dlse_base, __global float *delta, uint q_len, uint heads)
{
    const uint lane = (uint)get_local_id(0) & 15;
    const ulong own = (ulong)get_group_id(0) * 8 + ((uint)get_local_id(0) >> 4), rows = (ulong)q_len * heads;
    const ulong row = min(own, rows - 1);
    const uint i = (uint)(row / heads), h = (uint)(row % heads);
    float s = 0;
    for (uint d = 8 * lane; d < DIM_V; d += 128) {
        const uint4 x = load8(dout + dout_base + i * dout_len_stride + h * dout_head_stride, d, DIM_V);
        const uint4 y = load8(out + out_base + i * out_len_stride + h * out_head_stride, d, DIM_V);
        s = fma(unpack_low(x.x), unpack_low(y.x), s);
        s = fma(unpack_high(x.x), unpack_high(y.x), s);
        s = fma(unpack_low(x.y), unpack_low(y.y), s);
        s = fma(unpack_high(x.y), unpack_high(y.y), s);
        s = fma(unpack_low(x.z), unpack_low(y.z), s);
        s = fma(unpack_high(x.z), unpack_high(y.z), s);
        s = fma(unpack_low(x.w), unpack_low(y.w), s);
        s = fma(unpack_high(x.w), unpack_high(y.w), s);
    }
    for (uint m = 8; m > 0; m /= 2)
        s += shuffle_xor(s, m);
    if (lane == 0 && own < rows) delta[row] = s - (dlse ? dlse[dlse_base + row] : 0.0f);
}

__kernel
__attribute__((reqd_work_group_size(128 * WARPGROUPS, 1, 1))) void
backward_block(__global const ushort *q, ulong q_base, ulong q_len_stride, ulong q_head_stride,
               __global const ushort *k, ulong k_base, ulong k_len_stride, ulong k_head_stride,
               __global const ushort *v, ulong v_base, ulong v_len_stride, ulong v_head_stride,
               __global const ushort *dout, ulong dout_base, ulong dout_len_stride, ulong dout_head_stride,
               __global const float *lse, ulong lse_base, __global const float *delta,
               __global const uint *pairs, __global const uint *offset, __global const uint *tile_offset,
               __global uint4 *partial_dq, __global float *partial_dk, __global float *partial_dv, uint q_len,
               uint kv_len, uint topk, uint n_blocks, uint max_tiles, float scale, float cap_scale, uint window)
{
    __local uint4 keys[LEAF * K_CHUNKS] __attribute__((aligned(1024)));
    __local uint4 values[LEAF * V_CHUNKS] __attribute__((aligned(1024)));
    __local uint4 queries[WARPGROUPS][2][64 * K_CHUNKS] __attribute__((aligned(1024)));
    __local uint4 douts[WARPGROUPS][2][64 * V_CHUNKS] __attribute__((aligned(1024)));
    __local uint gradient[WARPGROUPS][DQ ? 64 * 32 : 1] __attribute__((aligned(1024)));
    __local float row_lse[WARPGROUPS][2][64], row_delta[WARPGROUPS][2][64];
    /* the key after the one at the row's position, counted from the block; where rows see all: the keys' end */
    __local int row_key[WARPGROUPS][2][64];
    __local uint row_place[WARPGROUPS][2][DQ ? 64 : 1];
    const uint t = (uint)get_local_id(0), lane = t & 31, g = lane >> 2, c = lane & 3, group = t >> 7,
               warp = t >> 5 & 3;
    const uint kv_head = (uint)get_group_id(1), kv_heads = (uint)get_num_groups(1),
               tile = (uint)get_group_id(0);
    offset += (ulong)kv_head * (n_blocks + 1);
    tile_offset += (ulong)kv_head * (n_blocks + 1);
    if (tile >= tile_offset[n_blocks]) return;
    const uint block = find_entry(tile_offset, n_blocks, tile, t & 31),
               first = (tile - tile_offset[block]) * ROWS;
    const uint rows = min((uint)ROWS, (offset[block + 1] - offset[block]) * GROUP - first);
    const int valid = (int)kv_len - (int)(block * LEAF),
              shift = (int)kv_len - (int)q_len + 1 - (int)(block * LEAF);
    k += k_base + (ulong)block * LEAF * k_len_stride + kv_head * k_head_stride;
    v += v_base + (ulong)block * LEAF * v_len_stride + kv_head * v_head_stride;
    for (uint row = t / 4; row < LEAF; row += 32 * WARPGROUPS) {
        const int exists = (int)row < valid;
        stage_row(keys, k + (exists ? row * k_len_stride : 0), K_CHUNKS, DIM, row, exists,
                  t % 4 * (K_CHUNKS / 4), (t % 4 + 1) * (K_CHUNKS / 4), 1);
        stage_row(values, v + (exists ? row * v_len_stride : 0), V_CHUNKS, DIM_V, row, exists,
                  t % 4 * V_CHUNKS / 4, (t % 4 + 1) * V_CHUNKS / 4, 1);
    }
    copy_commit();
    pairs += (ulong)kv_head * q_len * topk + offset[block];
    if (DQ) partial_dq += (ulong)kv_head * q_len * topk * GROUP * (K_QUADS * 4);
    q += q_base + (ulong)kv_head * GROUP * q_head_stride;
    lse += lse_base;
    dout += dout_base + (ulong)kv_head * GROUP * dout_head_stride;
    const uint key_address = local_address(keys), value_address = local_address(values);
    const float exponent = scale * LOG2E;

    float4 dk[2 * K_TILES], dv[2 * V_TILES];
#pragma unroll
    for (uint n = 0; n < 2 * K_TILES; n++)
        dk[n] = (float4)(0, 0, 0, 0);
#pragma unroll
    for (uint n = 0; n < 2 * V_TILES; n++)
        dv[n] = (float4)(0, 0, 0, 0);

    const uint steps = (rows + 63) / 64;
    uint next_slot = group < steps ? pairs[(first + min(group * 64 + (t & 127) / 2, rows - 1)) / GROUP] : 0;
    copy_wait(0);
    local_fence();
    barrier(CLK_LOCAL_MEM_FENCE);
    /* Which row an item fetches is asked again: dk, dv and dq leave no register for it. */
    for (uint step = group, stage = 0; step < steps + WARPGROUPS; step += WARPGROUPS, stage ^= 1) {
        if (step <
            steps) { /* fetch this step's rows into `stage`; the products below belong to the step before */
            const uint here = work_item_again(), row = (here & 127) / 2, half_row = here % 2;
            const uint r = step * 64 + row;
            const uint rr = first + min(r, rows - 1), i = next_slot / topk, h = rr % GROUP;
            const int exists = r < rows;
            /* Two items share a row's neighbouring pieces: the second-level cache sends no fewer. */
            stage_row(queries[group][stage], q + i * q_len_stride + h * q_head_stride, K_CHUNKS, DIM, row,
                      exists, half_row, K_CHUNKS, 2);
            stage_row(douts[group][stage], dout + i * dout_len_stride + h * dout_head_stride, V_CHUNKS, DIM_V,
                      row, exists, half_row, V_CHUNKS, 2);
            const ulong at = ((ulong)i * kv_heads + kv_head) * GROUP + h;
            if (half_row == 0) {
                copy_async_4(local_address(&row_lse[group][stage][row]), lse + at);
                copy_async_4(local_address(&row_delta[group][stage][row]), delta + at);
                row_key[group][stage][row] = !exists ? INT_MIN / 2 : CAUSAL || WINDOW ? (int)i + shift : valid;
                if (DQ) row_place[group][stage][row] = next_slot * GROUP + h;
            }
            next_slot = pairs[(first + min((step + WARPGROUPS) * 64 + row, rows - 1)) / GROUP];
        }
        copy_commit();
        if (step == group) continue;
        copy_wait(1);
        local_fence();
        warpgroup_barrier(group);
        const uint now = stage ^ 1, done = (step - WARPGROUPS) * 64;
        const uint query_address = local_address(queries[group][now]),
                   dout_address = local_address(douts[group][now]);
        float4 s[8];
        uint2 p2[8], ds2[8]; /* low: rows g, high: rows g + 8 */
        const int key = (int)(16 * warp + g);
        warpgroup_scores_local(s, key_address, query_address);
#pragma unroll
        for (uint n = 0; n < 8; n++) {
            const uint column = 8 * n + 2 * c;
            const float l0 = row_lse[group][now][column], l1 = row_lse[group][now][column + 1];
            const int k0 = row_key[group][now][column], k1 = row_key[group][now][column + 1];
            const float b0 = l0 == -INFINITY ? INFINITY : l0 * LOG2E,
                        b1 = l1 == -INFINITY ? INFINITY : l1 * LOG2E;
            const int m0 = CAUSAL || !WINDOW ? k0 : min(valid, k0 - 1 + (int)window), n0 = k0 - (int)window;
            const int m1 = CAUSAL || !WINDOW ? k1 : min(valid, k1 - 1 + (int)window), n1 = k1 - (int)window;
            p2[n].x = pack2(SEES(key, n0, m0) ? exp2_fast(fma(s[n].x, exponent, -b0)) : 0.0f,
                            SEES(key, n1, m1) ? exp2_fast(fma(s[n].y, exponent, -b1)) : 0.0f);
            p2[n].y = pack2(SEES(key + 8, n0, m0) ? exp2_fast(fma(s[n].z, exponent, -b0)) : 0.0f,
                            SEES(key + 8, n1, m1) ? exp2_fast(fma(s[n].w, exponent, -b1)) : 0.0f);
        }
        warpgroup_value_scores(s, value_address, dout_address);
#pragma unroll
        for (uint n = 0; n < 8; n++) {
            const uint column = 8 * n + 2 * c;
            const float d0 = row_delta[group][now][column], d1 = row_delta[group][now][column + 1];
            ds2[n].x = pack2(unpack_low(p2[n].x) * (s[n].x - d0), unpack_high(p2[n].x) * (s[n].y - d1));
            ds2[n].y = pack2(unpack_low(p2[n].y) * (s[n].z - d0), unpack_high(p2[n].y) * (s[n].w - d1));
            if (DQ) {
                gradient[group][(2 * warp * 8 + n) * 32 + lane] = ds2[n].x;
                gradient[group][((2 * warp + 1) * 8 + n) * 32 + lane] = ds2[n].y;
            }
        }
        uint4 p[4], ds[4];
#pragma unroll
        for (uint n = 0; n < 4; n++) {
            p[n] = (uint4)(p2[2 * n], p2[2 * n + 1]);
            ds[n] = (uint4)(ds2[2 * n], ds2[2 * n + 1]);
        }
        warpgroup_add_values(dv, p, dout_address);
        warpgroup_add_keys(dk, ds, query_address);
#if DQ
        local_fence();
        warpgroup_barrier(group);
        float4 dq[2 * K_TILES];
        warpgroup_query_gradient(dq, local_address(gradient[group]), key_address);
        const uint r0 = 16 * warp + g, r1 = r0 + 8;
        const ulong at0 = row_place[group][now][r0], at1 = row_place[group][now][r1];
#pragma unroll
        for (uint n = 0; n < K_QUADS; n++) {
            uint w0[4], w1[4];
#pragma unroll
            for (uint w = 0; w < 4; w++) {
                w0[w] = 4 * n + w < 2 * K_TILES ? pack2(dq[4 * n + w].x * scale, dq[4 * n + w].y * scale) : 0;
                w1[w] = 4 * n + w < 2 * K_TILES ? pack2(dq[4 * n + w].z * scale, dq[4 * n + w].w * scale) : 0;
            }
            if (done + r0 < rows)
                partial_dq[at0 * (K_QUADS * 4) + 4 * n + c] = (uint4)(w0[0], w0[1], w0[2], w0[3]);
            if (done + r1 < rows)
                partial_dq[at1 * (K_QUADS * 4) + 4 * n + c] = (uint4)(w1[0], w1[1], w1[2], w1[3]);
        }
#endif
        warpgroup_barrier(group); /* the stage is free for the rows after next */
    }
    const uint again = work_item_again(), column = again & 3, row = (again >> 5 & 3) * 16 + (again >> 2 & 7);
    const ulong sum = (((ulong)kv_head * max_tiles + tile) * WARPGROUPS + group) * LEAF + row;
#pragma unroll
    for (uint n = 0; n < 2 * K_TILES; n++) {
        *(__global float2 *)(partial_dk + sum * (16 * K_TILES) + 8 * n + 2 * column) = dk[n].xy;
        *(__global float2 *)(partial_dk + (sum + 8) * (16 * K_TILES) + 8 * n + 2 * column) = dk[n].zw;
    }
#pragma unroll
    for (uint n = 0; n < 2 * V_TILES; n++) {
        *(__global float2 *)(partial_dv + sum * (16 * V_TILES) + 8 * n + 2 * column) = dv[n].xy;
        *(__global float2 *)(partial_dv + (sum + 8) * (16 * V_TILES) + 8 * n + 2 * column) = dv[n].zw;
    }
}

/* One item: one number pair of dk or dv. dim: the tensor's, padded: the partial rows' */
__kernel
__attribute__((reqd_work_group_size(128, 1, 1))) void
backward_keys(__global const float *partial, __global const uint *tile_offset, __global ushort *to, ulong base,
              ulong len_stride, ulong head_stride, uint kv_len, uint n_blocks, uint max_tiles, uint dim,
              uint padded, float factor)
{
    const uint item = (uint)get_group_id(2) * 128 + (uint)get_local_id(0), block = (uint)get_group_id(0);
    const uint kv_head = (uint)get_group_id(1), row = item / (padded / 2), d = item % (padded / 2) * 2;
    if (row >= LEAF || block * LEAF + row >= kv_len) return;
    tile_offset += (ulong)kv_head * (n_blocks + 1);
    const uint first = tile_offset[block] * WARPGROUPS, last = tile_offset[block + 1] * WARPGROUPS;
    partial += (ulong)kv_head * max_tiles * WARPGROUPS * LEAF * padded + (ulong)row * padded + d;
    float2 s = (float2)(0, 0);
    for (uint n = first; n < last; n += 8) {
        float2 x[8];
#pragma unroll
        for (uint u = 0; u < 8; u++)
            x[u] = n + u < last ? *(__global const float2 *)(partial + (ulong)(n + u) * LEAF * padded)
                                : (float2)(0, 0);
#pragma unroll
        for (uint u = 0; u < 8; u++)
            s += x[u];
    }
    to += base + (ulong)(block * LEAF + row) * len_stride + kv_head * head_stride;
    const uint w = pack2(s.x * factor, s.y * factor);
    if (d < dim) to[d] = (ushort)w;
    if (d + 1 < dim) to[d + 1] = (ushort)(w >> 16);
}

/* One item: 8 columns of one row, laid out as in attention_merge. */
__kernel
__attribute__((reqd_work_group_size(256, 1, 1))) void
backward_queries(__global const uint4 *partial, __global const int *list, ulong list_base, __global ushort *dq,
                 ulong base, ulong len_stride, ulong head_stride, uint q_len, uint kv_heads, uint topk)
{
    const uint lanes = K_QUADS * 4, heads = kv_heads * GROUP;
    const ulong item = (ulong)get_group_id(0) * 256 + get_local_id(0), rows = (ulong)q_len * heads;
    const ulong row = min(item / lanes, rows - 1);
    const uint part = (uint)(item % lanes), c = part & 3;
    const uint i = (uint)(row / heads), head = (uint)(row % heads);
    const ulong pair = ((ulong)i * kv_heads + head / GROUP) * topk;
    const ulong first = ((ulong)(head / GROUP) * q_len + i) * topk * GROUP + head % GROUP;
    float o[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (uint j = 0; j < topk; j += 8) {
        uint4 w[8];
#pragma unroll
        for (uint u = 0; u < 8; u++)
            w[u] = j + u < topk && list[list_base + pair + j + u] >= 0
                       ? partial[(first + (j + u) * GROUP) * lanes + part]
                       : (uint4)(0, 0, 0, 0);
#pragma unroll
        for (uint u = 0; u < 8; u++) {
            o[0] += unpack_low(w[u].x);
            o[1] += unpack_high(w[u].x);
            o[2] += unpack_low(w[u].y);
            o[3] += unpack_high(w[u].y);
            o[4] += unpack_low(w[u].z);
            o[5] += unpack_high(w[u].z);
            o[6] += unpack_low(w[u].w);
            o[7] += unpack_high(w[u].w);
        }
    }
    uint4 w = (uint4)(pack2(o[0], o[1]), pack2(o[2], o[3]), pack2(o[4], o[5]), pack2(o[6], o[7]));
    w = quad_transpose(w, c);
    if (item / lanes < rows) store8(dq + base + i * len_stride + head * head_stride, 8 * part, DIM, w);
}
