/* SPDX-License-Identifier: MIT */
/* A decode step in one launch: selection (PISA) and attention of a query row on the memory of a decode cache. A
 * work-group of 8 warps takes one row and key head:
 *
 *   down the pyramid  tile m of the level's candidates is scored by warp m, then every warp ranks all scores:
 * one barrier a level, and no warp waits for another's list leaves            leaf m by warp m, exactly; ranked
 * likewise attention         listed block b by warp b, with its values in local memory; results merged there
 *
 * So a level costs the latency of one fetch. Read per row and head: 8 DIM bytes a candidate, 128 DIM bytes an
 * eligible leaf, 128 (DIM + DIM_V) a listed one: with TOPK 8 about 0.6 MB at any length. Means are multiplied
 * as high + low parts; the order of everything is that of select_mma.cl. A row sees the keys up to its position
 * only, so that NaN and infinity behind it do not reach it. Leaves do not cross pages: a page has page_leaves
 * of them. Options of attention (attention_tile.cl) do not change what is selected. Mirrors cpu/cpu_decode.c. Macros: TOPK <= 16, GROUP <= 16, and those of attention_tile.cl; CAUSAL
 * is 1. Without spills: TOPK <= 8 and DIM, DIM_V <= 128, or TOPK <= 16 and DIM, DIM_V <= 64.
 */
#ifndef TOPK
#define TOPK 8
#endif
#define WARPS 8
#define AT_ONCE (DIM_V <= 128 ? 8 : 4) /* blocks whose values lie in local memory */
#define ROUNDS ((TOPK + AT_ONCE - 1) / AT_ONCE)
/* Local memory of a work-group, in 16 bytes. Above half of a multiprocessor's where registers are many: else
 * the compiler goes for two work-groups, and spills. */
#define VALUES_LEAST (ROUNDS > 1 || K_STEPS > 2 ? 7300 : 0)
#define VALUES (AT_ONCE * LEAF * V_ROW > VALUES_LEAST ? AT_ONCE * LEAF * V_ROW : VALUES_LEAST)
#define KEYS_AHEAD (!VECTORS(DIM) || ROUNDS > 1 ? 2 : K_STEPS == 3 ? 3 : 4) /* key rows in flight, of 8 */
#define PART_ROW (16 * V_TILES) /* floats of a row of results in local memory */

/* spans: SPAN_FIELDS numbers for each sequence of the step. One sequence alone comes in arguments: making
 * memory for a table takes longer than the kernel. */
#define SPAN_ROW 0    /* its first row of q */
#define SPAN_LEN 1    /* rows */
#define SPAN_TOKENS 2 /* keys, appended ones included */
#define SPAN_SEQUENCE 3
#define SPAN_PAGES 4 /* its first entry in the block table */
#define SPAN_FIELDS 5

/* First row of a leaf among the rows of its key head. */
static inline ulong leaf_row(__global const int *pages, ulong page_rows, uint page_leaves, uint leaf)
{
    const uint page = leaf / page_leaves;
    return (ulong)(uint)pages[page] * page_rows + (leaf - page * page_leaves) * LEAF;
}

/* Eight numbers of a mean from column `at`, as two 16-bit parts; beyond the row they are zero. */
static inline void load_parts(__global const float *mean, uint at, uint4 *high, uint4 *low)
{
    float x[8];
    if (DIM % 4 == 0) {
        const float4 a = at < DIM ? *(__global const float4 *)(mean + at) : (float4)(0, 0, 0, 0);
        const float4 b = at + 4 < DIM ? *(__global const float4 *)(mean + at + 4) : (float4)(0, 0, 0, 0);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
#pragma unroll
        for (uint u = 0; u < 8; u++)
            x[u] = at + u < DIM ? mean[at + u] : 0.0f;
    }
    uint h[4], l[4];
#pragma unroll
    for (uint u = 0; u < 4; u++) {
        h[u] = pack2(x[2 * u], x[2 * u + 1]);
        l[u] = pack2(x[2 * u] - unpack_low(h[u]), x[2 * u + 1] - unpack_high(h[u]));
    }
    *high = (uint4)(h[0], h[1], h[2], h[3]);
    *low = (uint4)(l[0], l[1], l[2], l[3]);
}

/* Scores of a block for this warp's 16 rows; key rows straight from the cache. */
static inline void block_scores(float4 *s, const uint4 *a0, const uint4 *a1, __global const ushort *k,
                                uint valid, uint g, uint c)
{
#pragma unroll
    for (uint n = 0; n < 8; n++) {
        const uint key = 8 * n + g;
        if (n > 0 && n % KEYS_AHEAD == 0) compiler_fence(); /* all loads at once would not fit in registers */
        __global const ushort *row = k + (key < valid ? key : 0) * (ulong)DIM;
        s[n] = (float4)(0, 0, 0, 0);
#pragma unroll
        for (uint kk = 0; kk < K_STEPS; kk++)
            mma32(&s[n], a0[kk], a1[kk], load8(row, 32 * kk + 8 * c, DIM));
    }
}

/* Score of a leaf: of its exact logits, summed over the heads. */
static inline float leaf_score(float4 *s, float exponent, uint g)
{
#pragma unroll
    for (uint y = 0; y < 8; y++)
        s[y] *= exponent;
    const float2 top = row_max_of(s);
    float2 sum = weigh(s, 1.0f, top);
    sum.x += shuffle_xor(sum.x, 1);
    sum.y += shuffle_xor(sum.y, 1);
    sum.x += shuffle_xor(sum.x, 2);
    sum.y += shuffle_xor(sum.y, 2);
    return sum_heads(top.x + log2_fast(sum.x), top.y + log2_fast(sum.y), g);
}

struct span {
    int row, len, tokens;
    ulong sequence, pages;
};

/* The span of a row: the last one that begins at or before it. */
static inline void span_find(struct span *span, __global const long *spans, uint count, int row)
{
    uint low = 0, high = count;
    while (high - low > 1) {
        const uint middle = (low + high) / 2;
        if ((int)spans[middle * SPAN_FIELDS + SPAN_ROW] <= row)
            low = middle;
        else
            high = middle;
    }
    spans += low * SPAN_FIELDS;
    span->row = (int)spans[SPAN_ROW], span->len = (int)spans[SPAN_LEN], span->tokens = (int)spans[SPAN_TOKENS];
    span->sequence = (ulong)spans[SPAN_SEQUENCE], span->pages = (ulong)spans[SPAN_PAGES];
}

__kernel
__attribute__((reqd_work_group_size(32 * WARPS, 1, 1))) void
decode_step(__global const ushort *q, ulong q_first, ulong q_len_stride, ulong q_head_stride,
            __global const ushort *k, ulong k_first, __global const ushort *v, ulong v_first,
            __global const float *restrict means, ulong means_first, uint nodes, uint room,
            __global const int *restrict page_table, ulong page_rows, ulong head_rows, uint page_leaves,
            __global const long *restrict spans, uint count, int one_row, int one_len, int one_tokens,
            ulong one_sequence, ulong one_pages, __global int *list, __global int *counts, __global ushort *out,
            ulong out_first, ulong out_len_stride, ulong out_head_stride, __global float *lse, ulong lse_first,
            ulong lse_len_stride, ulong lse_head_stride, float select_scale, float scale, float cap_scale,
            uint window, __global const float *sink, ulong sink_base, ulong sink_stride)
{
    __local uint4 values[VALUES];
    __local float scores[2][32], row_max_of_warp[AT_ONCE][16], row_sum_of_warp[AT_ONCE][16];
    __local volatile uint board[WARPS][32];
    const uint t = (uint)get_local_id(0), lane = t & 31, warp = t >> 5, g = lane >> 2, c = lane & 3;
    const uint query = (uint)get_group_id(0), kv_head = (uint)get_group_id(1),
               kv_heads = (uint)get_num_groups(1);
    struct span span = {one_row, one_len, one_tokens, one_sequence, one_pages};
    if (count > 1) span_find(&span, spans, count, (int)query);
    const int at = (int)query - span.row + span.tokens - span.len;
    list += ((ulong)query * kv_heads + kv_head) * TOPK;
    counts += (ulong)query * kv_heads + kv_head;
    out += out_first + query * out_len_stride + (ulong)kv_head * GROUP * out_head_stride;
    if (lse) lse += lse_first + query * lse_len_stride + (ulong)kv_head * GROUP * lse_head_stride;
    if (at < 0) { /* a row that sees nothing */
        if (t < TOPK) list[t] = -1;
        if (t == 0) *counts = 0;
        for (uint e = t; e < GROUP * DIM_V; e += 32 * WARPS)
            out[e / DIM_V * out_head_stride + e % DIM_V] = 0;
        if (lse && t < GROUP) lse[t * lse_head_stride] = -INFINITY;
        return;
    }
    const uint position = (uint)at, own = position / LEAF;
    const ulong number = span.sequence * kv_heads + kv_head;
    page_table += span.pages;
    k += k_first + kv_head * head_rows * DIM;
    v += v_first + kv_head * head_rows * DIM_V;
    means += means_first + number * nodes * DIM;

    q += q_first + query * q_len_stride + (ulong)kv_head * GROUP * q_head_stride;
    const float exponent = select_scale * LOG2E; /* > 0 */
    uint4 a0[K_STEPS], a1[K_STEPS];
#pragma unroll
    for (uint kk = 0; kk < K_STEPS; kk++) {
        a0[kk] = load8(q + min(g, (uint)GROUP - 1) * q_head_stride, 32 * kk + 8 * c, DIM);
        a1[kk] = load8(q + min(g + 8, (uint)GROUP - 1) * q_head_stride, 32 * kk + 8 * c, DIM);
    }
    const uint before = (1u << lane) - 1;
    uint shift = 0; /* level - 1 */
    while ((own >> shift) + 1 > TOPK)
        shift++;
    ulong first_child = 0; /* nodes of the levels below the children's */
    for (uint l = 0; l + 1 < shift; l++)
        first_child += (room + (1u << l) - 1) >> l;
    uint n = (own >> shift) + 1, node = lane; /* lane x < n: the x-th kept node */
    while (shift > 0) {
        shift--;
        if (shift > 0) first_child -= (room + (1u << (shift - 1)) - 1) >> (shift - 1);
        node = 2 * shuffle(node, lane >> 1) + (lane & 1);
        const uint last = own >> shift;
        const int valid = lane < 2 * n && node <= last;
        int keep = valid;
        if (popcount(ballot(valid)) > TOPK) {
            const int forced = valid && (node == last || (TOPK > 1 && own > 0 && node == (own - 1) >> shift) ||
                                         (TOPK > 2 && node == 0));
            const uint eligible = ballot(valid && !forced), e = popcount(eligible);
            const uint place = popcount(eligible & before), room_left = TOPK - popcount(ballot(forced));
            if (valid && !forced) board[warp][place] = node;
            warp_fence();
            if (shift > 0) {
                const uint m = warp; /* eligible nodes have all their children */
                if (4 * m < e) {
                    __global const float *mean =
                        means + (first_child + 2 * board[warp][min(4 * m + (g >> 1), e - 1)] + (g & 1)) * DIM;
                    float4 s = (float4)(0, 0, 0, 0), r = (float4)(0, 0, 0, 0);
#pragma unroll
                    for (uint kk = 0; kk < K_STEPS; kk++) {
                        uint4 high, low;
                        load_parts(mean, 32 * kk + 8 * c, &high, &low);
                        mma32(&s, a0[kk], a1[kk], high);
                        mma32(&r, a0[kk], a1[kk], low);
                    }
                    s = (s + r) * exponent;
                    const float x = sum_heads(log_sum_2(s.x, s.y), log_sum_2(s.z, s.w), g);
                    if (lane < 4) scores[shift & 1][4 * m + lane] = x;
                }
            } else {
                for (uint m = warp; m < e; m += WARPS) {
                    float4 s[8];
                    block_scores(s, a0, a1,
                                 k + leaf_row(page_table, page_rows, page_leaves, board[warp][m]) * DIM, LEAF,
                                 g, c);
                    const float x = leaf_score(s, exponent, g);
                    if (lane == 0) scores[0][m] = x;
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            const uint key = lane < e ? order_key(scores[shift & 1][lane]) : 0;
            uint rank = 0;
            for (uint j = 0; j < e; j++) {
                const uint other = shuffle(key, j);
                rank += other > key || (other == key && j < lane);
            }
            const uint winners = ballot(lane < e && rank < room_left);
            keep = valid && (forced || winners >> place & 1);
        }
        const uint mask = ballot(keep);
        warp_fence();
        if (keep) board[warp][popcount(mask & before)] = node;
        warp_fence();
        n = popcount(mask);
        node = board[warp][lane];
        warp_fence();
    }
    if (t < TOPK) list[t] = t < n ? (int)node : -1;
    if (t == 0) *counts = (int)n;

    const float weight_exponent = scale * LOG2E;
    cap_scale *= LOG2E;
    /* All scores first: then neither results nor queries are in registers while the others need them. */
    float4 s[ROUNDS][8];
    float2 row_max = (float2)(-INFINITY, -INFINITY), row_sum = (float2)(0, 0);
    const uint stagers = 32 * (WARPS / AT_ONCE);
#pragma unroll
    for (uint round = 0; round < ROUNDS; round++) {
        const uint mine = round * AT_ONCE + warp, block = shuffle(node, min(mine, n - 1));
        const uint row = position + 1 - block * LEAF; /* keys that are seen */
        if (round == 0) {
            const uint b = warp / (WARPS / AT_ONCE), staged = shuffle(node, min(b, n - 1));
            if (b < n)
                stage_values(values + b * LEAF * V_ROW,
                             v + leaf_row(page_table, page_rows, page_leaves, staged) * DIM_V, DIM_V,
                             (int)(position + 1 - staged * LEAF), t % stagers, stagers);
            copy_commit();
        }
        if (warp >= AT_ONCE || mine >= n) continue;
        block_scores(s[round], a0, a1, k + leaf_row(page_table, page_rows, page_leaves, block) * DIM, row, g,
                     c);
        if (SOFTCAP) cap_scores(s[round], cap_scale);
        if (row < LEAF) mask_scores(s[round], (int)row, (int)row, c);
        if (WINDOW) {
            const int begin = (int)row - (int)window;
            if (begin > 0) mask_scores_before(s[round], begin, begin, c);
        }
        const float2 top = row_max_of(s[round]) * weight_exponent;
        row_max.x = fmax(row_max.x, top.x);
        row_max.y = fmax(row_max.y, top.y);
    }
    float4 o[2 * V_TILES];
#pragma unroll
    for (uint x = 0; x < 2 * V_TILES; x++)
        o[x] = (float4)(0, 0, 0, 0);
#pragma unroll
    for (uint round = 0; round < ROUNDS; round++) {
        const int is_mine = warp < AT_ONCE && round * AT_ONCE + warp < n;
        if (round > 0) {
            const uint b = warp / (WARPS / AT_ONCE), staged = shuffle(node, min(round * AT_ONCE + b, n - 1));
            if (round * AT_ONCE + b < n)
                stage_values(values + b * LEAF * V_ROW,
                             v + leaf_row(page_table, page_rows, page_leaves, staged) * DIM_V, DIM_V,
                             (int)(position + 1 - staged * LEAF), t % stagers, stagers);
            copy_commit();
        }
        /* a window may hide all blocks of a warp */
        const float2 shift = (float2)(WINDOW && row_max.x == -INFINITY ? 0.0f : row_max.x,
                                      WINDOW && row_max.y == -INFINITY ? 0.0f : row_max.y);
        if (is_mine) row_sum += weigh(s[round], weight_exponent, shift);
        copy_wait(0);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (is_mine) add_values(o, s[round], local_address(values + warp * LEAF * V_ROW), lane);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    row_sum.x += shuffle_xor(row_sum.x, 1);
    row_sum.y += shuffle_xor(row_sum.y, 1);
    row_sum.x += shuffle_xor(row_sum.x, 2);
    row_sum.y += shuffle_xor(row_sum.y, 2);
    /* merge over warps: rows [16][PART_ROW] of each in the place of the values */
    __local float *parts = (__local float *)values;
    if (warp < AT_ONCE) {
        if (c == 0) {
            row_max_of_warp[warp][g] = row_max.x;
            row_max_of_warp[warp][g + 8] = row_max.y;
            row_sum_of_warp[warp][g] = row_sum.x;
            row_sum_of_warp[warp][g + 8] = row_sum.y;
        }
#pragma unroll
        for (uint x = 0; x < 2 * V_TILES; x++) {
            __local float *to = parts + (warp * 16 + g) * PART_ROW + 8 * x + 2 * c;
            to[0] = o[x].x;
            to[1] = o[x].y;
            to[8 * PART_ROW] = o[x].z;
            to[8 * PART_ROW + 1] = o[x].w;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint e = t; e < GROUP * DIM_V; e += 32 * WARPS) {
        const uint h = e / DIM_V, d = e % DIM_V;
        float top = -INFINITY, sum = 0, x = 0;
#pragma unroll
        for (uint w = 0; w < AT_ONCE; w++)
            top = fmax(top, row_max_of_warp[w][h]);
#pragma unroll
        for (uint w = 0; w < AT_ONCE; w++) {
            const float weight = exp2_fast(row_max_of_warp[w][h] - top);
            sum = fma(weight, row_sum_of_warp[w][h], sum);
            x = fma(weight, parts[(w * 16 + h) * PART_ROW + d], x);
        }
        const float inv = close_row(&top, &sum, sink, sink_base + (kv_head * GROUP + h) * sink_stride);
        out[h * out_head_stride + d] = (ushort)pack2(x * inv, 0.0f);
        if (lse && d == 0) lse[h * lse_head_stride] = row_lse(top, sum);
    }
}
