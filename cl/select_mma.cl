/* SPDX-License-Identifier: MIT */
/* PISA selection, one warp a query: the (up to 16) heads of a kv head are the rows of the matrix unit's tile.
 *
 *     start level: all visible nodes (<= TOPK)          lanes hold up to 32 candidates, ascending
 *        |  children of the kept (<= 2 TOPK)
 *     level l: eligible candidates, four at a time: their eight children's means are the columns of one tile;
 *        |     columns 2c, 2c+1 of a lane are the two children of node c: log-sum-exp within the lane, sum
 *          over heads by
 *        |     shuffles; keep the forced and the best
 *     level 1: each eligible leaf's 64 keys: exact log-sum-exp
 *
 * The descent starts at the lowest level that has at most TOPK nodes up to the query's own: on higher levels
 * everything is kept anyway, and so the result does not depend on later keys.
 * Ranks: forced first, higher score, lower index; NaN counts as -inf, -0 as 0. Means are multiplied as high +
 * low parts.
 * Read per query: 4 DIM bytes a child, 128 DIM bytes an eligible leaf (<= 2 TOPK - forced); q once.
 * Neighbouring queries share
 * them through the caches. Written: the list and its length. Invariant: `kept` holds the n kept nodes of the level above,
 * ascending.
 * Mirrors cpu/select_ref.c. Macros: WARPS 4, TOPK <= 16, GROUP <= 16, and those of attention_tile.cl.
 */
#ifndef WARPS
#define WARPS 4
#endif
#ifndef TOPK
#define TOPK 8
#endif
#define SCORE_TILES ((2 * TOPK + 3) / 4)

static inline void write_list(__global int *list, __global int *counts, ulong at, uint lane, int leaf, uint n)
{
    if (lane < TOPK) list[at * TOPK + lane] = leaf;
    if (lane == 0) counts[at] = (int)n;
}

__kernel
__attribute__((reqd_work_group_size(32 * WARPS, 1, 1))) void
select_pisa(__global const ushort *q, ulong q_base, ulong q_len_stride, ulong q_head_stride,
            __global const uint4 *restrict packed_k, __global const uint4 *restrict split,
            __global int *list, __global int *counts, ulong list_row, uint q_len, uint kv_len,
            uint n_leaves, uint nodes, float scale)
{
    __local volatile uint board[WARPS][32];
    const uint t = (uint)get_local_id(0), lane = t & 31, warp = t >> 5, g = lane >> 2, c = lane & 3;
    const uint kv_head = (uint)get_group_id(1), kv_heads = (uint)get_num_groups(1);
    const uint i = (uint)get_group_id(0) * WARPS + warp, before = (1u << lane) - 1;
    if (i >= q_len) return;
    if (CAUSAL && i + kv_len < q_len) {
        write_list(list, counts, (list_row + i) * kv_heads + kv_head, lane, -1, 0);
        return;
    }
    const uint own = CAUSAL ? (i + kv_len - q_len) / LEAF : n_leaves - 1; /* the last visible leaf */
    q += q_base + (ulong)i * q_len_stride + (ulong)kv_head * GROUP * q_head_stride;
    packed_k += (ulong)kv_head * n_leaves * (LEAF / 8 * K_STEPS * 32) + lane;
    split += (ulong)kv_head * nodes * (2 * K_CHUNKS);
    scale *= LOG2E; /* > 0 */
    uint4 a0[K_STEPS], a1[K_STEPS];
#pragma unroll
    for (uint kk = 0; kk < K_STEPS; kk++) {
        a0[kk] = load8(q + min(g, (uint)GROUP - 1) * q_head_stride, 32 * kk + 8 * c, DIM);
        a1[kk] = load8(q + min(g + 8, (uint)GROUP - 1) * q_head_stride, 32 * kk + 8 * c, DIM);
    }

    uint shift = 0; /* level - 1 */
    while ((own >> shift) + 1 > TOPK)
        shift++;
    uint first_child = 0; /* nodes of the levels below the children's */
    for (uint l = 0; l + 1 < shift; l++)
        first_child += (n_leaves + (1u << l) - 1) >> l;
    uint n = (own >> shift) + 1, node = lane; /* lane x < n: the x-th kept node */
    while (shift > 0) {
        shift--;
        const uint children = shift > 0 ? (n_leaves + (1u << (shift - 1)) - 1) >> (shift - 1) : 0;
        first_child -= children;
        node = 2 * shuffle(node, lane >> 1) + (lane & 1);
        const uint last = own >> shift;
        const int valid = lane < 2 * n && node <= last;
        int keep = valid;
        if (popcount(ballot(valid)) > TOPK) {
            int forced = 0;
            if (CAUSAL)
                forced = valid && (node == last || (TOPK > 1 && own > 0 && node == (own - 1) >> shift) ||
                                   (TOPK > 2 && node == 0));
            const uint eligible = ballot(valid && !forced), e = popcount(eligible);
            const uint place = popcount(eligible & before), room = TOPK - popcount(ballot(forced));
            if (valid && !forced) board[warp][place] = node;
            warp_fence();
            float score = -INFINITY; /* lane x: of the x-th eligible */
            if (shift > 0) {
                __global const uint4 *restrict level = split + (ulong)first_child * (2 * K_CHUNKS);
#pragma unroll
                for (uint m = 0; m < SCORE_TILES; m++) {
                    if (4 * m >= e) break;
                    const uint child = 2 * board[warp][min(4 * m + (g >> 1), e - 1)] + (g & 1);
                    __global const uint4 *restrict b =
                        level + (ulong)min(child, children - 1) * (2 * K_CHUNKS) + c;
                    float4 s = (float4)(0, 0, 0, 0), r = (float4)(0, 0, 0, 0);
#pragma unroll
                    for (uint kk = 0; kk < K_STEPS; kk++) {
                        mma32(&s, a0[kk], a1[kk], b[4 * kk]);
                        mma32(&r, a0[kk], a1[kk], b[K_CHUNKS + 4 * kk]);
                    }
                    s = (s + r) * scale;
                    if (2 * board[warp][min(4 * m + c, e - 1)] + 1 >= children) s.y = s.w = -INFINITY;
                    const float x = sum_heads(log_sum_2(s.x, s.y), log_sum_2(s.z, s.w), g);
                    score = lane >> 2 == m ? x : score;
                }
            } else {
                for (uint m = 0; m < e; m++) {
                    const uint leaf = board[warp][m];
                    __global const uint4 *restrict b = packed_k + (ulong)leaf * (LEAF / 8 * K_STEPS * 32);
                    float4 s[8];
#pragma unroll
                    for (uint y = 0; y < 8; y++) {
                        s[y] = (float4)(0, 0, 0, 0);
#pragma unroll
                        for (uint kk = 0; kk < K_STEPS; kk++)
                            mma32(&s[y], a0[kk], a1[kk], b[(y * K_STEPS + kk) * 32]);
                        s[y] *= scale;
                    }
                    const int limit = (int)kv_len - (int)(leaf * LEAF);
                    if (!CAUSAL && limit < LEAF) mask_scores(s, limit, limit, c);
                    const float2 top = row_max_of(s);
                    float2 sum = weigh(s, 1.0f, top);
                    sum.x += shuffle_xor(sum.x, 1);
                    sum.y += shuffle_xor(sum.y, 1);
                    sum.x += shuffle_xor(sum.x, 2);
                    sum.y += shuffle_xor(sum.y, 2);
                    const float x = sum_heads(top.x + log2_fast(sum.x), top.y + log2_fast(sum.y), g);
                    score = lane == m ? x : score;
                }
            }
            const uint self = work_item_again() & 31, key = self < e ? order_key(score) : 0;
            uint rank = 0;
            for (uint j = 0; j < e; j++) {
                const uint other = shuffle(key, j);
                rank += other > key || (other == key && j < self);
            }
            const uint winners = ballot(self < e && rank < room);
            keep = valid && (forced || winners >> place & 1);
        }
        const uint mask = ballot(keep);
        if (keep) board[warp][popcount(mask & before)] = node;
        warp_fence();
        n = popcount(mask);
        node = board[warp][lane];
        warp_fence();
    }
    /* Where this is to go is asked again, since registers held from the start on would be spilled. */
    const uint row = work_group_again() * WARPS + (work_item_again() >> 5);
    write_list(list, counts, (list_row + row) * kv_heads + kv_head, lane, lane < n ? (int)node : -1, n);
}
