/* SPDX-License-Identifier: MIT */
/* The scores of flat selection, see select_flat.cl: a work-group of WARPS warps takes SLABS * WARPS slabs of 16
 * rows and walks all leaves that its last query sees whole, two in local memory.
 *
 *     slab: 16 rows x 64 keys -> max, sum of exp2 along the row -> sum over the query's heads ->
 * scores[query][leaf]
 *
 * Read: 64 DIM elements a leaf and SLABS * WARPS slabs; q once. Written: 4 bytes a query and leaf.
 * Mirrors cpu/select_ref.c. Macros: WARPS 4, and those of select_flat.cl.
 */
#ifndef WARPS
#define WARPS 4
#endif
#define SLABS (K_STEPS > 4 ? 1 : 2) /* of a warp: more would not fit its registers */

/* Takes a lane's 4 x 2 columns of rows g (x) and g + 8 (y), `limit` of which exist, into its sum of exp2(.. -
 * top). */
static inline void add_scores(float4 *s, float scale, int limit, float2 *top, float2 *sum)
{
    float2 most = (float2)(-INFINITY, -INFINITY), shift;
#pragma unroll
    for (uint n = 0; n < 4; n++) {
        if (!CAUSAL && (int)(8 * n) >= limit) s[n].x = s[n].z = -INFINITY;
        if (!CAUSAL && (int)(8 * n) + 1 >= limit) s[n].y = s[n].w = -INFINITY;
        most.x = fmax(most.x, fmax(s[n].x, s[n].y));
        most.y = fmax(most.y, fmax(s[n].z, s[n].w));
    }
    most.x = fmax(top->x, most.x * scale);
    most.y = fmax(top->y, most.y * scale);
    shift.x = most.x == -INFINITY ? 0.0f : most.x;
    shift.y = most.y == -INFINITY ? 0.0f : most.y;
    float2 all = (float2)(sum->x * exp2_fast(top->x - shift.x), sum->y * exp2_fast(top->y - shift.y));
#pragma unroll
    for (uint n = 0; n < 4; n++) {
        all.x += exp2_fast(fma(s[n].x, scale, -shift.x)) + exp2_fast(fma(s[n].y, scale, -shift.x));
        all.y += exp2_fast(fma(s[n].z, scale, -shift.y)) + exp2_fast(fma(s[n].w, scale, -shift.y));
    }
    *top = most;
    *sum = all;
}

/* The same of all four lanes of a quad, as logarithm. */
static inline float2 quad_lse(float2 top, float2 sum)
{
    float2 most = top;
    most.x = fmax(most.x, shuffle_xor(most.x, 1));
    most.y = fmax(most.y, shuffle_xor(most.y, 1));
    most.x = fmax(most.x, shuffle_xor(most.x, 2));
    most.y = fmax(most.y, shuffle_xor(most.y, 2));
    sum.x *= exp2_fast(top.x - most.x);
    sum.y *= exp2_fast(top.y - most.y);
    sum.x += shuffle_xor(sum.x, 1);
    sum.y += shuffle_xor(sum.y, 1);
    sum.x += shuffle_xor(sum.x, 2);
    sum.y += shuffle_xor(sum.y, 2);
    return (float2)(most.x + log2_fast(sum.x), most.y + log2_fast(sum.y));
}

__kernel
__attribute__((reqd_work_group_size(32 * WARPS, 1, 1))) void
flat_scores(__global const ushort *q, ulong q_base, ulong q_len_stride, ulong q_head_stride,
            __global const ushort *k, ulong k_base, ulong k_len_stride, ulong k_head_stride,
            __global float *scores, uint first_row, uint rows, uint q_len, uint kv_len, uint n_leaves,
            float scale)
{
    __local uint4 keys[2][LEAF * K_ROW];
    const uint t = (uint)get_local_id(0), lane = t & 31, g = lane >> 2, c = lane & 3;
    const uint kv_head = (uint)get_group_id(1);
    const uint tile = (uint)get_num_groups(0) - 1 - (uint)get_group_id(0); /* causal: the longest first */
    const uint slab = (tile * WARPS + (t >> 5)) * SLABS;
    const uint leaves = leaves_seen((tile + 1) * (WARPS * SLABS), first_row, rows, q_len, kv_len, n_leaves);
    q += q_base + (ulong)kv_head * GROUP * q_head_stride;
    k += k_base + (ulong)kv_head * k_head_stride;
    scores += (ulong)kv_head * rows * n_leaves;
    scale *= LOG2E; /* > 0 */
    uint4 a0[SLABS][K_STEPS], a1[SLABS][K_STEPS];
#pragma unroll
    for (uint u = 0; u < SLABS; u++) {
        __global const ushort *q0 = slab_row(q, slab + u, g, first_row, rows, q_len_stride, q_head_stride);
        __global const ushort *q1 = slab_row(q, slab + u, g + 8, first_row, rows, q_len_stride, q_head_stride);
#pragma unroll
        for (uint kk = 0; kk < K_STEPS; kk++) {
            a0[u][kk] = load8(q0, 32 * kk + 8 * c, DIM);
            a1[u][kk] = load8(q1, 32 * kk + 8 * c, DIM);
        }
    }
    if (leaves > 0) stage_keys(keys[0], k, k_len_stride, (int)kv_len, t, 32 * WARPS);
    copy_commit();

    for (uint leaf = 0; leaf < leaves; leaf++) {
        copy_wait(0);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (leaf + 1 < leaves)
            stage_keys(keys[(leaf + 1) & 1], k + (ulong)(leaf + 1) * LEAF * k_len_stride, k_len_stride,
                       (int)(kv_len - (leaf + 1) * LEAF), t, 32 * WARPS);
        copy_commit();
        __local const uint4 *own = keys[leaf & 1];
        const int limit = CAUSAL ? LEAF : (int)kv_len - (int)(leaf * LEAF);
        float2 top[SLABS], sum[SLABS]; /* of this lane's columns */
#pragma unroll
        for (uint u = 0; u < SLABS; u++) {
            top[u] = (float2)(-INFINITY, -INFINITY);
            sum[u] = (float2)(0, 0);
        }
#pragma unroll 1 /* both at once would take a work-group's registers */
        for (uint half_leaf = 0; half_leaf < 2; half_leaf++) {
            float4 s[SLABS][4];
#pragma unroll
            for (uint n = 0; n < 4; n++) {
#pragma unroll
                for (uint u = 0; u < SLABS; u++)
                    s[u][n] = (float4)(0, 0, 0, 0);
#pragma unroll
                for (uint kk = 0; kk < K_STEPS; kk++) {
                    const uint4 b = own[K_AT(32 * half_leaf + 8 * n + g, 4 * kk + c)];
#pragma unroll
                    for (uint u = 0; u < SLABS; u++)
                        mma32(&s[u][n], a0[u][kk], a1[u][kk], b);
                }
            }
#pragma unroll
            for (uint u = 0; u < SLABS; u++)
                add_scores(s[u], scale, limit - (int)(32 * half_leaf + 2 * c), &top[u], &sum[u]);
        }
#pragma unroll
        for (uint u = 0; u < SLABS; u++) {
            const float2 lse = quad_lse(top[u], sum[u]);
            store_scores(scores, sum_slab(lse.x, lse.y, g), slab + u, rows, n_leaves, leaf, g, c);
        }
    }
}
