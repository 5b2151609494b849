/* SPDX-License-Identifier: MIT */
/* Attention of a tile of queries over one list of key blocks, Hopper form.
 *
 * Keys and values come packed (pack_cores.cl): a stage is one bulk copy. Lists are the caller's, or unions with masks
 * (list_union.cl). A list stands at list_base + entry * list_stride + kv_head * list_head_stride: strides of 0 share it.
 *
 * attention_tile: WARPGROUPS x 64 rows; row r of list l is query l * q_block + r / GROUP, head r % GROUP.
 *
 *     list l:  b0 b1 b2 ...       ring of STAGES blocks in local memory
 *     +---------+                 +----+----+--
 *     | 64 rows | warpgroup 0     | K0 | K1 |    filled by work-item 0 (bulk copies, `full` barriers),
 *     | 64 rows | warpgroup 1     | V0 | V1 |    freed by all warps (`empty` barriers)
 *     +---------+                 +----+----+--
 *        S = Q K^T (wgmma) -> online softmax in registers -> O += P V (wgmma)
 *
 * MASKED 1: the list is a union, bit x of its mask says that query x of the list has the block; a warpgroup
 * none of whose queries has it lets it pass.
 * Read per tile: q once, 64 (DIM + DIM_V) elements a block of the list; written: out and lse once.
 * Invariant: after block j, o / row_sum is the attention over the row's keys in blocks 0..j.
 * Mirrors cpu/attention_forward_ref.c.
 *
 * Macros: WARPGROUPS 1..4; STAGES 2..6 (default 3 at 64 columns, else 2) blocks in local memory, AHEAD < STAGES of
 * them in flight; GROUPS work-groups a multiprocessor, so that one's start and end hide behind another (local memory: GROUPS * (1 KiB
 * + ROWS_TILE * (16 K_CHUNKS + 8) + STAGES blocks) <= 228 KiB); MASKED 0/1; and those of attention_tile.cl
 * (DIM_V 64, 80, 96, 128).
 */
#ifndef WARPGROUPS
#define WARPGROUPS 2
#endif
#ifndef STAGES
#if K_STEPS + V_TILES <= 6
#define STAGES 3
#else
#define STAGES 2
#endif
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef MASKED
#define MASKED 0
#endif
#define ROWS_TILE (64 * WARPGROUPS)
#define K_BYTES (LEAF * K_CHUNKS * 16)
#define V_BYTES (LEAF * V_CHUNKS * 16)

__kernel
__attribute__((reqd_work_group_size(128 * WARPGROUPS, 1, 1))) void
attention_tile(__global const ushort *q, ulong q_base, ulong q_len_stride, ulong q_head_stride,
               __global const uchar *core, __global const int *tile_list, __global const uint *tile_mask,
               ulong list_base, uint list_stride, uint list_head_stride,
               __global ushort *out, ulong out_base, ulong out_len_stride, ulong out_head_stride,
               __global float *lse, ulong lse_base, ulong lse_len_stride, ulong lse_head_stride, uint q_len, uint kv_len, uint list_length, uint n_blocks,
               uint q_block, uint tiles_per_list, float scale, float cap_scale, uint window, __global const float *sink,
               ulong sink_base, ulong sink_stride)
{
    __local uchar ring[STAGES * (K_BYTES + V_BYTES)] __attribute__((aligned(1024)));
    __local uint queries[ROWS_TILE * K_CHUNKS * 4] __attribute__((aligned(1024)));
    __local ulong full[STAGES], empty[STAGES];
    __local volatile int row_end
        [ROWS_TILE]; /* first key that a row does not see, and the row's query: read anew for each block, */
    __local volatile int row_begin[WINDOW ? ROWS_TILE : 1];
    __local volatile uint tile_length; /* with WINDOW: entries of the list, and where it begins */
    __local volatile ulong tile_first;
    __local volatile float tile_cap;   /* with SOFTCAP */
    __local volatile uint row_query[ROWS_TILE]; /* because registers are what limits this kernel */
    __local volatile int tile_end;     /* the last position that a row of this tile sees; a list is cut there */
    /* The queries of each warpgroup. Without masks all have every block, but the test stays: it keeps the compiler from
     * moving the next block's loads up to where no register is free. */
    __local volatile uint members_of[WARPGROUPS];
    const uint t = (uint)get_local_id(0), lane = t & 31, g = lane >> 2, c = lane & 3, warpgroup = t >> 7;
    const uint kv_head = (uint)get_group_id(1);
    const uint tile = (uint)get_num_groups(0) - 1 - (uint)get_group_id(0); /* causal: the longest first */
    const uint entry = tile / tiles_per_list, first_query = entry * q_block,
               first = tile % tiles_per_list * ROWS_TILE;
    const uint rows = min(q_block, q_len - first_query) * GROUP; /* of the whole list */
    if (first >= rows) return;
    GROUPS_PER_UNIT_OF(GROUPS);
    const uint ring_address = local_address(ring), full_address = local_address(full),
               empty_address = local_address(empty);
    core += (ulong)kv_head * n_blocks * (K_BYTES + V_BYTES);
    ulong list_first = list_base + (ulong)entry * list_stride + kv_head * list_head_stride;
    if (WINDOW) { /* the list begins where the tile's first query does */
        const int position = (int)(first_query + first / GROUP + kv_len - q_len);
        const uint before =
            entries_before(tile_list + list_first, list_length, keys_begin(position, window), lane);
        list_first += before;
        list_length -= before;
        if (t == 0) {
            tile_first = list_first;
            tile_length = list_length;
        }
    } else {
        tile_list += list_first;
        tile_mask += list_first;
        list_first = 0;
    }
    const uint r0 = first + (t >> 5) * 16 + g, r1 = r0 + 8;
    const uint x0 = min(r0, rows - 1) / GROUP, x1 = min(r1, rows - 1) / GROUP; /* queries within the list */
    const uint h0 = kv_head * GROUP + min(r0, rows - 1) % GROUP,
               h1 = kv_head * GROUP + min(r1, rows - 1) % GROUP;
    const uint own_row = (t >> 5) * 16 + g;
    if (c == 0) {
        const int position = (int)(first_query + kv_len - q_len);
        row_end[own_row] = keys_end(position + (int)x0, kv_len, window);
        row_end[own_row + 8] = keys_end(position + (int)x1, kv_len, window);
        if (WINDOW) {
            row_begin[own_row] = keys_begin(position + (int)x0, window);
            row_begin[own_row + 8] = keys_begin(position + (int)x1, window);
        }
        row_query[own_row] = x0;
        row_query[own_row + 8] = x1;
    }
    if ((t & 127) == 0) {
        const uint low_query = min(first + warpgroup * 64, rows - 1) / GROUP;
        const uint high_query = min(first + warpgroup * 64 + 63, rows - 1) / GROUP;
        members_of[warpgroup] =
            MASKED ? (high_query < 31 ? (2u << high_query) - 1 : 0xffffffffu) & ~((1u << low_query) - 1) : 1;
    }
    q += q_base + first_query * q_len_stride;
    uint4 w0[K_STEPS], w1[K_STEPS]; /* under way while work-item 0 asks for the first blocks */
#pragma unroll
    for (uint kk = 0; kk < K_STEPS; kk++) {
        w0[kk] = load8(q + x0 * q_len_stride + h0 * q_head_stride, 32 * kk + 8 * c, DIM);
        w1[kk] = load8(q + x1 * q_len_stride + h1 * q_head_stride, 32 * kk + 8 * c, DIM);
    }
    if (t == 0) {
        const uint last_query = first_query + (min(first + ROWS_TILE, rows) - 1) / GROUP;
        const int end = keys_end((int)(last_query + kv_len - q_len), kv_len, window);
        tile_end = end;
        if (SOFTCAP) tile_cap = cap_scale * LOG2E;
        for (uint s = 0; s < STAGES; s++) {
            barrier_init(full_address + 8 * s, 1);
            barrier_init(empty_address + 8 * s, 4 * WARPGROUPS);
        }
        barrier_init_fence();
        for (uint j = 0; j < AHEAD && j < list_length; j++) {
            const int block = tile_list[list_first + j];
            if (block < 0 || block * LEAF >= end) break;
            barrier_expect(full_address + 8 * j, K_BYTES + V_BYTES);
            bulk_copy(ring_address + j * (K_BYTES + V_BYTES), core + (ulong)block * (K_BYTES + V_BYTES),
                      K_BYTES + V_BYTES, full_address + 8 * j);
        }
    }
    /* queries into core matrices, in the same order of numbers as the keys */
#pragma unroll
    for (uint kk = 0; kk < K_STEPS; kk++) {
        const uint at = ((t >> 5) * 2 * K_CHUNKS + 4 * kk) * 32 + g * 4 + c;
        queries[at] = w0[kk].x;
        queries[at + 32] = w0[kk].y;
        queries[at + 64] = w0[kk].z;
        queries[at + 96] = w0[kk].w;
        queries[at + K_CHUNKS * 32] = w1[kk].x;
        queries[at + K_CHUNKS * 32 + 32] = w1[kk].y;
        queries[at + K_CHUNKS * 32 + 64] = w1[kk].z;
        queries[at + K_CHUNKS * 32 + 96] = w1[kk].w;
    }
    local_fence();
    barrier(CLK_LOCAL_MEM_FENCE);
    const uint query_address = local_address(queries) + warpgroup * 64 * K_CHUNKS * 16;
    scale *= LOG2E; /* > 0 */
    float4 o[2 * V_TILES];
#pragma unroll
    for (uint n = 0; n < 2 * V_TILES; n++)
        o[n] = (float4)(0, 0, 0, 0);
    float2 row_max = (float2)(-INFINITY, -INFINITY), row_sum = (float2)(0, 0);

    for (uint j = 0; j < (WINDOW ? tile_length : list_length); j++) {
        const uint stage = j % STAGES, phase = j / STAGES & 1;
        const int block = tile_list[(WINDOW ? tile_first : 0) + j];
        if (block < 0 || block * LEAF >= tile_end) break;
        if (t == 0 && j + AHEAD < (WINDOW ? tile_length : list_length)) {
            const int next = tile_list[(WINDOW ? tile_first : 0) + j + AHEAD];
            if (next >= 0 && next * LEAF < tile_end) {
                const uint fill = (j + AHEAD) % STAGES;
                if (j >= STAGES - AHEAD) /* block j + AHEAD - STAGES has left the stage */
                    barrier_wait(empty_address + 8 * fill, ((j + AHEAD) / STAGES + 1) & 1);
                barrier_expect(full_address + 8 * fill, K_BYTES + V_BYTES);
                bulk_copy(ring_address + fill * (K_BYTES + V_BYTES), core + (ulong)next * (K_BYTES + V_BYTES),
                          K_BYTES + V_BYTES, full_address + 8 * fill);
            }
        }
        warp_fence();
        const uint members = MASKED ? tile_mask[(WINDOW ? tile_first : 0) + j] : 1;
        const uint keys = ring_address + stage * (K_BYTES + V_BYTES);
        barrier_wait(full_address + 8 * stage, phase);
        if (members & members_of[warpgroup]) {
            float4 s[8];
            warpgroup_scores_local(s, query_address, keys);
            if (SOFTCAP) cap_scores(s, tile_cap);
            /* A window needs the registers that hold where this item stands. */
            const uint again = WINDOW ? work_item_again() : t;
            const uint c = again & 3, own_row = (again >> 5) * 16 + (again >> 2 & 7);
            int limit0 = row_end[own_row] - block * LEAF, limit1 = row_end[own_row + 8] - block * LEAF;
            if (MASKED) {
                limit0 = members >> row_query[own_row] & 1 ? limit0 : 0;
                limit1 = members >> row_query[own_row + 8] & 1 ? limit1 : 0;
            }
            if (ballot(limit0 < LEAF || limit1 < LEAF)) mask_scores(s, limit0, limit1, c);
            if (WINDOW) {
                const int begin0 = row_begin[own_row] - block * LEAF, begin1 = row_begin[own_row + 8] - block * LEAF;
                if (ballot(begin0 > 0 || begin1 > 0)) mask_scores_before(s, begin0, begin1, c);
            }
            float2 top = row_max_of(s) * scale;
            top.x = limit0 > 0 ? fmax(row_max.x, top.x) : row_max.x;
            top.y = limit1 > 0 ? fmax(row_max.y, top.y) : row_max.y;
            const float2 shift = (float2)(top.x == -INFINITY ? 0.0f : top.x, top.y == -INFINITY ? 0.0f : top.y);
            const float2 keep = (float2)(exp2_fast(row_max.x - shift.x), exp2_fast(row_max.y - shift.y));
            if (ballot(row_max.x != top.x || row_max.y != top.y))
#pragma unroll
                for (uint n = 0; n < 2 * V_TILES; n++)
                    o[n] *= (float4)(keep.x, keep.x, keep.y, keep.y);
            row_sum = row_sum * keep;
            row_max = top;
            const float2 sum = weigh(s, scale, shift);
            row_sum += sum;
            uint4 p[4];
#pragma unroll
            for (uint k = 0; k < 4; k++)
                p[k] = weights_of(s, k);
            warpgroup_values(o, p, keys + K_BYTES, 1);
        }
        if (lane == 0) barrier_arrive(empty_address + 8 * stage);
    }
    row_sum.x += shuffle_xor(row_sum.x, 1);
    row_sum.y += shuffle_xor(row_sum.y, 1);
    row_sum.x += shuffle_xor(row_sum.x, 2);
    row_sum.y += shuffle_xor(row_sum.y, 2);
    const uint tile_again = (uint)get_num_groups(0) - 1 - work_group_again();
    const uint query_again = tile_again / tiles_per_list * q_block,
               first_again = tile_again % tiles_per_list * ROWS_TILE;
    const uint rows_again = min(q_block, q_len - query_again) * GROUP;
    const uint again = work_item_again(), column = again & 3,
               row0 = first_again + (again >> 5) * 16 + (again >> 2 & 7), row1 = row0 + 8;
    const uint query0 = min(row0, rows_again - 1) / GROUP, query1 = min(row1, rows_again - 1) / GROUP;
    const uint head0 = kv_head * GROUP + min(row0, rows_again - 1) % GROUP;
    const uint head1 = kv_head * GROUP + min(row1, rows_again - 1) % GROUP;
    const float2 inv = close_rows(&row_max, &row_sum, sink, sink_base + head0 * sink_stride,
                                  sink_base + head1 * sink_stride);
    out += out_base + query_again * out_len_stride;
#pragma unroll
    for (uint n = 0; n < V_QUADS; n++) {
        uint w0[4], w1[4];
#pragma unroll
        for (uint w = 0; w < 4; w++) {
            w0[w] = 4 * n + w < 2 * V_TILES ? pack2(o[4 * n + w].x * inv.x, o[4 * n + w].y * inv.x) : 0;
            w1[w] = 4 * n + w < 2 * V_TILES ? pack2(o[4 * n + w].z * inv.y, o[4 * n + w].w * inv.y) : 0;
        }
        const uint4 v0 = quad_transpose((uint4)(w0[0], w0[1], w0[2], w0[3]), column);
        const uint4 v1 = quad_transpose((uint4)(w1[0], w1[1], w1[2], w1[3]), column);
        if (row0 < rows_again)
            store8(out + query0 * out_len_stride + head0 * out_head_stride, 32 * n + 8 * column, DIM_V, v0);
        if (row1 < rows_again)
            store8(out + query1 * out_len_stride + head1 * out_head_stride, 32 * n + 8 * column, DIM_V, v1);
    }
    if (lse && column == 0) {
        lse += lse_base + query_again * lse_len_stride;
        if (row0 < rows_again)
            lse[query0 * lse_len_stride + head0 * lse_head_stride] = row_lse(row_max.x, row_sum.x);
        if (row1 < rows_again)
            lse[query1 * lse_len_stride + head1 * lse_head_stride] = row_lse(row_max.y, row_sum.y);
    }
}
