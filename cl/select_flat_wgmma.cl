/* SPDX-License-Identifier: MIT */
/* Hopper form of the scores of flat selection (select_flat.cl, select_flat_mma.cl): the products by wgmma on 64
 * rows, leaves packed by pack_key_cores come by bulk copies into a ring of STAGES.
 *
 *     work-group: WARPGROUPS x 64 rows, a slab of 16 a warp; queries stay in local memory. A stage is free
 * again as soon as the scores are in registers, so the copies run behind the exponentials.
 *
 * Read: 64 DIM elements a leaf and 4 WARPGROUPS slabs; q once. Written: 4 bytes a query and leaf.
 * Mirrors cpu/select_ref.c. Macros: WARPGROUPS 1..4, STAGES, GROUPS work-groups a multiprocessor, and those of
 * select_flat.cl (DIM 64, 80, 96, 128).
 */
#ifndef WARPGROUPS
#define WARPGROUPS 2
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef GROUPS
#define GROUPS 3
#endif
#define K_BYTES (LEAF * K_CHUNKS * 16)

__kernel
__attribute__((reqd_work_group_size(128 * WARPGROUPS, 1, 1))) void
flat_scores(__global const ushort *q, ulong q_base, ulong q_len_stride, ulong q_head_stride,
            __global const uchar *core, __global float *scores, uint first_row, uint rows, uint q_len,
            uint kv_len, uint n_leaves, float scale)
{
    __local uchar ring[STAGES * K_BYTES] __attribute__((aligned(1024)));
    __local uint queries[64 * WARPGROUPS * K_CHUNKS * 4] __attribute__((aligned(1024)));
    __local ulong full[STAGES], empty[STAGES];
    const uint t = (uint)get_local_id(0), lane = t & 31, g = lane >> 2, c = lane & 3;
    const uint kv_head = (uint)get_group_id(1);
    const uint tile = (uint)get_num_groups(0) - 1 - (uint)get_group_id(0); /* causal: the longest first */
    const uint slab = tile * (4 * WARPGROUPS) + (t >> 5);
    const uint leaves = leaves_seen((tile + 1) * (4 * WARPGROUPS), first_row, rows, q_len, kv_len, n_leaves);
    GROUPS_PER_UNIT_OF(GROUPS);
    const uint ring_address = local_address(ring), full_address = local_address(full),
               empty_address = local_address(empty);
    core += (ulong)kv_head * n_leaves * K_BYTES;
    q += q_base + (ulong)kv_head * GROUP * q_head_stride;
    scores += (ulong)kv_head * rows * n_leaves;
    scale *= LOG2E; /* > 0 */
    if (t == 0) {
        for (uint s = 0; s < STAGES; s++) {
            barrier_init(full_address + 8 * s, 1);
            barrier_init(empty_address + 8 * s, 4 * WARPGROUPS);
        }
        barrier_init_fence();
        for (uint s = 0; s < STAGES && s < leaves; s++) {
            barrier_expect(full_address + 8 * s, K_BYTES);
            bulk_copy(ring_address + s * K_BYTES, core + (ulong)s * K_BYTES, K_BYTES, full_address + 8 * s);
        }
    }
    __global const ushort *q0 = slab_row(q, slab, g, first_row, rows, q_len_stride, q_head_stride);
    __global const ushort *q1 = slab_row(q, slab, g + 8, first_row, rows, q_len_stride, q_head_stride);
#pragma unroll
    for (uint kk = 0; kk < K_STEPS; kk++) { /* core matrices, in the same order of numbers as the keys */
        const uint4 w0 = load8(q0, 32 * kk + 8 * c, DIM), w1 = load8(q1, 32 * kk + 8 * c, DIM);
        const uint at = ((t >> 5) * 2 * K_CHUNKS + 4 * kk) * 32 + g * 4 + c;
        queries[at] = w0.x;
        queries[at + 32] = w0.y;
        queries[at + 64] = w0.z;
        queries[at + 96] = w0.w;
        queries[at + K_CHUNKS * 32] = w1.x;
        queries[at + K_CHUNKS * 32 + 32] = w1.y;
        queries[at + K_CHUNKS * 32 + 64] = w1.z;
        queries[at + K_CHUNKS * 32 + 96] = w1.w;
    }
    local_fence();
    barrier(CLK_LOCAL_MEM_FENCE);
    const uint query_address = local_address(queries) + (t >> 7) * 64 * K_CHUNKS * 16;

    for (uint leaf = 0; leaf < leaves; leaf++) {
        const uint stage = leaf % STAGES, phase = leaf / STAGES & 1;
        if (t == 0 && leaf > 0 && leaf - 1 + STAGES < leaves) { /* the stage before has been free for a while */
            const uint fill = (leaf - 1) % STAGES;
            barrier_wait(empty_address + 8 * fill, (leaf - 1) / STAGES & 1);
            barrier_expect(full_address + 8 * fill, K_BYTES);
            bulk_copy(ring_address + fill * K_BYTES, core + (ulong)(leaf - 1 + STAGES) * K_BYTES, K_BYTES,
                      full_address + 8 * fill);
        }
        warp_fence();
        barrier_wait(full_address + 8 * stage, phase);
        float4 s[8];
        warpgroup_scores_local(s, query_address, ring_address + stage * K_BYTES);
        warp_fence();
        if (lane == 0) barrier_arrive(empty_address + 8 * stage);
        const int limit = (int)kv_len - (int)(leaf * LEAF);
        if (!CAUSAL && limit < LEAF) mask_scores(s, limit, limit, c);
        const float2 top = row_max_of(s) * scale;
        float2 sum = weigh(s, scale, top);
        sum.x += shuffle_xor(sum.x, 1);
        sum.y += shuffle_xor(sum.y, 1);
        sum.x += shuffle_xor(sum.x, 2);
        sum.y += shuffle_xor(sum.y, 2);
        const float2 score = sum_slab(top.x + log2_fast(sum.x), top.y + log2_fast(sum.y), g);
        store_scores(scores, score, slab, rows, n_leaves, leaf, g, c);
    }
}
