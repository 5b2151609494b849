/* SPDX-License-Identifier: MIT */
/* Flat selection by exact scores: every leaf's logsumexp, summed over the heads, then the best of each query.
 *
 * flat_scores: a work-group of WARPS warps takes SLABS * WARPS slabs of 16 rows; a row is one (query, head), a query's
 * heads fill HEADS rows, GROUP of them in use. It walks all leaves that its last query sees whole, two in local memory.
 *
 *     slab: 16 rows x 64 keys -> max, sum of exp2 along the row -> sum over the query's heads -> scores[query][leaf]
 *
 * flat_best: a warp a query. Lane x holds the x-th best so far, in falling order of order_key (select_rank.cl), equal ones
 * by rising index; 32 leaves are read at a time, and those that beat the last place are put in, one after the other.
 *
 *   scores [kv_heads][rows][n_leaves] float32, of the rows of this launch; first_row is the first one's number
 *
 * Read: 64 DIM elements a leaf and 128 / HEADS queries; q once; the scores once. Written: 4 bytes a query and leaf.
 * Mirrors cpu/select_ref.c. Macros: TOPK <= 32, GROUP <= 16, WARPS 4, and those of attention_tile.cl.
 */
#ifndef WARPS
#define WARPS 4
#endif
#ifndef TOPK
#define TOPK 8
#endif
#define HEADS (GROUP > 8 ? 16 : GROUP > 4 ? 8 : GROUP > 2 ? 4 : GROUP)
#define SLABS (K_STEPS > 4 ? 1 : 2) /* of a warp: more would not fit its registers */
#define SLAB_QUERIES (16 / HEADS)

/* Takes a lane's 4 x 2 columns of rows g (x) and g + 8 (y), `limit` of which exist, into its sum of exp2(.. - top). */
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

/* Sums over the heads: x and y belong to rows g and g + 8, whose heads are g % HEADS (16 heads: both of one query). */
static inline float2 sum_slab(float x, float y, uint g)
{
    if (HEADS == 16) return (float2)(sum_heads(x, y, g), 0.0f);
    const int used = g % HEADS < GROUP;
    float2 s = (float2)(used ? x : 0.0f, used ? y : 0.0f);
#pragma unroll
    for (uint step = 1; step < HEADS; step *= 2) {
        s.x += shuffle_xor(s.x, 4 * step);
        s.y += shuffle_xor(s.y, 4 * step);
    }
    return s;
}

__kernel
__attribute__((reqd_work_group_size(32 * WARPS, 1, 1))) void
flat_scores(__global const ushort *q, ulong q_base, ulong q_len_stride, ulong q_head_stride, __global const ushort *k,
            ulong k_base, ulong k_len_stride, ulong k_head_stride, __global float *scores, uint first_row, uint rows,
            uint q_len, uint kv_len, uint n_leaves, float scale)
{
    __local uint4 keys[2][LEAF * K_ROW];
    const uint t = (uint)get_local_id(0), lane = t & 31, g = lane >> 2, c = lane & 3;
    const uint kv_head = (uint)get_group_id(1), tile = (uint)get_num_groups(0) - 1 - (uint)get_group_id(0);
    const uint tile_row = tile * (WARPS * SLABS * SLAB_QUERIES), warp_row = tile_row + (t >> 5) * (SLABS * SLAB_QUERIES);
    const uint last_row = first_row + min(tile_row + WARPS * SLABS * SLAB_QUERIES, rows) - 1;
    const int seen = CAUSAL ? max((int)(last_row + 1 + kv_len - q_len), 0) : (int)kv_len;
    const uint leaves = CAUSAL ? (uint)seen / LEAF : n_leaves;
    q += q_base + (ulong)kv_head * GROUP * q_head_stride;
    k += k_base + (ulong)kv_head * k_head_stride;
    scores += (ulong)kv_head * rows * n_leaves;
    scale *= LOG2E; /* > 0 */
    uint4 a0[SLABS][K_STEPS], a1[SLABS][K_STEPS];
#pragma unroll
    for (uint u = 0; u < SLABS; u++) {
        const uint row0 = warp_row + u * SLAB_QUERIES + g / HEADS, row1 = warp_row + u * SLAB_QUERIES + (g + 8) / HEADS;
        __global const ushort *q0 = q + (first_row + min(row0, rows - 1)) * q_len_stride +
                                    min(g % HEADS, (uint)GROUP - 1) * q_head_stride;
        __global const ushort *q1 = q + (first_row + min(row1, rows - 1)) * q_len_stride +
                                    min((g + 8) % HEADS, (uint)GROUP - 1) * q_head_stride;
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
            const float2 score = sum_slab(lse.x, lse.y, g);
            const uint row0 = warp_row + u * SLAB_QUERIES + g / HEADS, row1 = row0 + 8 / HEADS;
            if (c == 0 && (HEADS >= 8 ? g == 0 : g % HEADS == 0)) {
                if (row0 < rows) scores[(ulong)row0 * n_leaves + leaf] = score.x;
                if (HEADS < 16 && row1 < rows) scores[(ulong)row1 * n_leaves + leaf] = score.y;
            }
        }
    }
}

/* Forced by priority: the row's own leaf and those before it, then the first ones. */
__kernel
__attribute__((reqd_work_group_size(32 * WARPS, 1, 1))) void
flat_best(__global const float *scores, __global int *list, __global int *counts, ulong list_row, uint first_row,
          uint rows, uint q_len, uint kv_len, uint n_leaves, uint forced_first, uint forced_last)
{
    const uint t = (uint)get_local_id(0), lane = t & 31, row = (uint)get_group_id(0) * WARPS + (t >> 5);
    const uint kv_head = (uint)get_group_id(1), kv_heads = (uint)get_num_groups(1);
    if (row >= rows) return;
    const int end = CAUSAL ? (int)(first_row + row + 1 + kv_len - q_len) : (int)kv_len;
    const uint seen = (uint)max(end, 0), leaves = (seen + LEAF - 1) / LEAF;
    const uint last = CAUSAL ? min(min(forced_last, leaves), (uint)TOPK) : 0;
    const uint first = CAUSAL ? min(min(forced_first, leaves - last), (uint)TOPK - last) : 0;
    const uint room = TOPK - first - last, eligible = CAUSAL ? min(leaves - last, seen / LEAF) : leaves;
    scores += ((ulong)kv_head * rows + row) * n_leaves;
    uint best = 0, leaf = 0; /* the lane's place: its key and leaf */
    for (uint base = first; base < eligible && room > 0; base += 32) {
        const uint key = base + lane < eligible ? order_key(scores[base + lane]) : 0;
        for (uint better = ballot(key > shuffle(best, room - 1)); better; better &= better - 1) {
            const uint from = 31 - clz(better & (0 - better)), own = shuffle(key, from);
            if (own <= shuffle(best, room - 1)) continue; /* the last place got better meanwhile */
            const uint at = popcount(ballot(lane < room && best >= own));
            const uint next = shuffle(best, lane - 1), next_leaf = shuffle(leaf, lane - 1);
            best = lane == at ? own : lane > at ? next : best;
            leaf = lane == at ? base + from : lane > at ? next_leaf : leaf;
        }
    }
    const uint kept = popcount(ballot(lane < room && best > 0)), count = first + kept + last;
    uint rank = 0;
    for (uint j = 0; j < kept; j++)
        rank += shuffle(leaf, j) < leaf;
    list += ((list_row + first_row + row) * kv_heads + kv_head) * TOPK;
    if (lane < first) list[lane] = (int)lane;
    if (lane < kept) list[first + rank] = (int)leaf;
    if (lane < last) list[first + kept + lane] = (int)(leaves - last + lane);
    if (lane >= count && lane < TOPK) list[lane] = -1;
    if (lane == 0) counts[(list_row + first_row + row) * kv_heads + kv_head] = (int)count;
}
