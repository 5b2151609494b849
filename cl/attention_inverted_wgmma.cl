/* SPDX-License-Identifier: MIT */
/* Hopper form of attention_inverted_mma.cl: the same job and results, the products by wgmma on 64 rows (four
 * warps), the block (packed by pack_cores) by one bulk copy. attention_merge.cl joins them.
 *
 * Pairs are fetched two tiles ahead, queries one, through local memory and not through registers, which decide
 * how many work-groups (GROUPS) share a multiprocessor: 5 of 96 registers at 64 columns, 4 of 128 at 96, 3 of
 * 168 at 128 (4 were 2 % faster there, with a spill of 4 bytes).
 * Macros: those of attention_inverted.cl (WARPS 4, 8 or 12, dimensions 64, 80, 96, 128), GROUPS, TOPK (the argument's
 * value, or 0 for any).
 */
#ifndef TOPK
#define TOPK 0
#endif
#ifndef GROUPS
#define HAS_ROOM !(WINDOW && SOFTCAP) /* together they need registers of one work-group more */
#if K_STEPS <= 2 && V_TILES <= 4 && HAS_ROOM
#define GROUPS 5
#elif (K_STEPS <= 2 && V_TILES <= 4) || (K_STEPS <= 3 && V_TILES <= 6 && HAS_ROOM)
#define GROUPS 4
#else
#define GROUPS 3
#endif
#endif
#define K_BYTES (LEAF * K_CHUNKS * 16)
#define V_BYTES (LEAF * V_CHUNKS * 16)

/* This warp's 16 rows of a tile into its own corner of local memory, asynchronously; `slot` is the pair of row
 * lane & 15. */
static inline void stage_queries(__local uint4 *to, __global const ushort *q, ulong len_stride,
                                 ulong head_stride, uint row, uint last, uint slot, uint topk, uint lane)
{
#pragma unroll
    for (uint u = 0; u < K_CHUNKS / 2; u++) {
        const uint n = 32 * u + lane, r = n / K_CHUNKS, chunk = n % K_CHUNKS;
        const uint i = shuffle(slot, r) / topk, h = min(row + r, last) % GROUP;
        copy_async(local_address(to + K_AT(r, chunk)),
                   q + i * len_stride + h * head_stride + (8 * chunk < DIM ? 8 * chunk : 0),
                   8 * chunk < DIM ? 16 : 0);
    }
}

__kernel
__attribute__((reqd_work_group_size(32 * WARPS, 1, 1))) void
attention_inverted(__global const ushort *q, ulong q_base, ulong q_len_stride, ulong q_head_stride,
                   __global const uchar *core, __global const uint *pairs, __global const uint *offset,
                   __global const uint *tile_offset, __global uint4 *partial_out, __global float *partial_lse,
                   uint q_len, uint kv_len, uint topk_, uint n_blocks, uint entries, float scale, float cap_scale,
                   uint window)
{
    __local uchar keys[K_BYTES + V_BYTES] __attribute__((aligned(1024)));
    __local ulong full;
    __local uint4 staged[WARPS][VECTORS(DIM) ? 16 * K_ROW : 1];
    const uint t = (uint)get_local_id(0), lane = t & 31, warp = t >> 5, g = lane >> 2, c = lane & 3;
    const uint kv_head = (uint)get_group_id(1), kv_heads = (uint)get_num_groups(1),
               tile = (uint)get_group_id(0);
    offset += (ulong)kv_head * (entries + 1);
    tile_offset += (ulong)kv_head * (entries + 1);
    if (tile >= tile_offset[entries]) return;
    const uint entry = find_entry(tile_offset, entries, tile, lane);
    const uint block = entry % n_blocks, first = (tile - tile_offset[entry]) * ROWS;
    const uint last = min(first + ROWS, (offset[entry + 1] - offset[entry]) * GROUP) -
                      1; /* rows first .. last of the block */
    const int valid = (int)kv_len - (int)(block * LEAF);
    GROUPS_PER_UNIT_OF(GROUPS);
    const uint key_address = local_address(keys), full_address = local_address(&full);
    if (t == 0) {
        barrier_init(full_address, 1);
        barrier_init_fence();
        barrier_expect(full_address, K_BYTES + V_BYTES);
        bulk_copy(key_address, core + ((ulong)kv_head * n_blocks + block) * (K_BYTES + V_BYTES),
                  K_BYTES + V_BYTES, full_address);
    }
    const uint topk = TOPK ? TOPK : topk_; /* divisions by a constant are cheap */
    pairs += (ulong)kv_head * q_len * topk + offset[entry];
    q += q_base + (ulong)kv_head * GROUP * q_head_stride;
    scale *= LOG2E; /* > 0 */
    cap_scale *= LOG2E;
    uint next_slot = pairs[min(first + 16 * warp + (lane & 15), last) / GROUP];
    if (VECTORS(DIM)) {
        stage_queries(staged[warp], q, q_len_stride, q_head_stride, first + 16 * warp, last, next_slot, topk,
                      lane);
        copy_commit();
        next_slot = pairs[min(first + 16 * (warp + WARPS) + (lane & 15), last) / GROUP];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    barrier_wait(full_address, 0);

    for (uint base = first; base <= last; base += 16 * WARPS) {
        const uint r = base + 16 * warp, row0 = min(r + g, last), row1 = min(r + g + 8, last);
        const uint i0 = pairs[row0 / GROUP] / topk, i1 = pairs[row1 / GROUP] / topk;
        uint4 a0[K_STEPS], a1[K_STEPS];
        if (VECTORS(DIM)) { /* take this tile's rows, then let the next tile's come */
            copy_wait(0);
            warp_fence();
#pragma unroll
            for (uint kk = 0; kk < K_STEPS; kk++) {
                a0[kk] = staged[warp][K_AT(g, 4 * kk + c)];
                a1[kk] = staged[warp][K_AT(g + 8, 4 * kk + c)];
            }
            warp_fence();
            if (base + 16 * WARPS <= last)
                stage_queries(staged[warp], q, q_len_stride, q_head_stride, r + 16 * WARPS, last, next_slot,
                              topk, lane);
            copy_commit();
            next_slot = pairs[min(r + 32 * WARPS + (lane & 15), last) / GROUP];
        } else {
            load_queries(a0, a1, q, q_len_stride, q_head_stride, i0, i1, row0 % GROUP, row1 % GROUP, c);
        }
        float4 s[8];
        warpgroup_scores(s, a0, a1, key_address);

        float2 top;
        float2 sum = weigh_block(s, columns_seen(i0, valid, q_len, window), columns_seen(i1, valid, q_len, window), scale,
                                 cap_scale, c, &top);
        float4 o[2 * V_TILES];
        uint4 p[4], lost[4];
#pragma unroll
        for (uint k = 0; k < 4; k++) {
            p[k] = weights_of(s, k);
            lost[k] = lost_weights_of(s, k);
        }
        warpgroup_values_twice(o, p, lost, key_address + K_BYTES);
        sum = sum_quad(sum);
        /* read anew, not kept, as is where this item stands: slot i * topk + j is place
         * (i * kv_heads + kv_head) * topk + j */
        const uint again = work_item_again(), own0 = base + (again >> 5) * 16 + (again >> 2 & 7), own1 = own0 + 8;
        const uint out0 = min(own0, last), out1 = min(own1, last);
        const uint slot0 = pairs[out0 / GROUP], slot1 = pairs[out1 / GROUP];
        const ulong at0 =
            (slot0 + ((ulong)(slot0 / topk) * (kv_heads - 1) + kv_head) * topk) * GROUP + out0 % GROUP;
        const ulong at1 =
            (slot1 + ((ulong)(slot1 / topk) * (kv_heads - 1) + kv_head) * topk) * GROUP + out1 % GROUP;
        store_partial(partial_out, partial_lse, o, top, sum, at0, at1, own0 <= last, own1 <= last, again & 3);
    }
}
