/* SPDX-License-Identifier: MIT */
/* Flat selection by exact scores: every leaf's logsumexp, summed over the heads (flat_scores, in
 * select_flat_mma.cl and select_flat_wgmma.cl), then the best leaves of each query (flat_best).
 *
 *   scores [kv_heads][rows][n_leaves] float32, of the rows of this launch; first_row is the first one's number.
 *          Written are the leaves that a row sees whole (not causal: all), and some more.
 *
 * Rows of a tile: one (query, head); a query's heads fill HEADS of them, GROUP of which are in use, and 16 rows
 * make a slab.
 *
 * flat_best: a warp a query. Lane x holds the x-th best so far, in falling order of order_key (select_rank.cl),
 * equal ones by rising index; 32 leaves are read at a time, and those that beat the last place are put in, one
 * after the other.
 *
 * Mirrors cpu/select_ref.c. Macros: TOPK <= 32, GROUP <= 16, and those of attention_tile.cl.
 */
#ifndef TOPK
#define TOPK 8
#endif
#define BEST_WARPS 4 /* of a work-group of flat_best */
#define HEADS (GROUP > 8 ? 16 : GROUP > 4 ? 8 : GROUP > 2 ? 4 : GROUP)
#define SLAB_QUERIES (16 / HEADS)

/* Sums over the heads: x and y belong to rows g and g + 8, whose heads are g % HEADS (16 heads: both of one
 * query). */
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

/* Where row g of slab `slab` finds its query and head, among the rows of the launch. */
static inline __global const ushort *slab_row(__global const ushort *q, uint slab, uint g, uint first_row,
                                              uint rows, ulong len_stride, ulong head_stride)
{
    return q + (first_row + min(slab * SLAB_QUERIES + g / HEADS, rows - 1)) * len_stride +
           min(g % HEADS, (uint)GROUP - 1) * head_stride;
}

static inline void store_scores(__global float *scores, float2 score, uint slab, uint rows, uint n_leaves,
                                uint leaf, uint g, uint c)
{
    const uint row0 = slab * SLAB_QUERIES + g / HEADS, row1 = row0 + 8 / HEADS;
    if (c != 0 || (HEADS >= 8 ? g : g % HEADS) != 0) return;
    if (row0 < rows) scores[(ulong)row0 * n_leaves + leaf] = score.x;
    if (HEADS < 16 && row1 < rows) scores[(ulong)row1 * n_leaves + leaf] = score.y;
}

/* Leaves to score for the slabs before `end`: those that the last query sees whole. */
static inline uint leaves_seen(uint end, uint first_row, uint rows, uint q_len, uint kv_len, uint n_leaves)
{
    const uint last_row = first_row + min(end * SLAB_QUERIES, rows) - 1;
    return CAUSAL ? (uint)max((int)(last_row + 1 + kv_len - q_len), 0) / LEAF : n_leaves;
}

/* Forced by priority: the row's own leaf and those before it, then the first ones. */
__kernel
__attribute__((reqd_work_group_size(32 * BEST_WARPS, 1, 1))) void
flat_best(__global const float *scores, __global int *list, __global int *counts, ulong list_row,
          uint first_row, uint rows, uint q_len, uint kv_len, uint n_leaves, uint forced_first,
          uint forced_last)
{
    const uint t = (uint)get_local_id(0), lane = t & 31, row = (uint)get_group_id(0) * BEST_WARPS + (t >> 5);
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
