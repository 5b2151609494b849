/* SPDX-License-Identifier: MIT */
/* Attention over block lists, forward, a subgroup a query token and HEADS heads of its key head; same arguments and results
 * as attention_forward.cl, without its options.
 *
 *            lane 0 1 2 ... SG-1
 *   keys      k   k+1 k+2           a lane has a key: logits need no exchange, maxima and sums one a step
 *   values    d   d+1 d+2           a lane has dimensions d, d + SG ...: weights come from the key's lane
 *
 * Reads HEADS x DIM elements of q, and DIM + DIM_V of each listed key once; writes HEADS x (DIM_V + 1). Invariant after each
 * step: sums[h] = sum_j exp(s_j - row_max) v_j and row_sum = sum_j exp(s_j - row_max) over the keys so far, the same row_max
 * and row_sum in all lanes.
 *
 * Macros: those of subgroup.cl; DIM, DIM_V 1..256; GROUP query heads a key head, HEADS of them at a time; BLOCK; LOAD_K
 * elements a load, which divide DIM; OUT_DTYPE. */

#include "attention.cl"

#define HEAD_TILES CEIL_DIV(GROUP, HEADS) /* of a key head */
#define LANE_DIMS CEIL_DIV(DIM_V, SG)

typedef ELEMENT_OF(OUT_DTYPE) out_element;
#define STORE STORE_OF(OUT_DTYPE)

/* s[h] = q[h] . key */
static inline void key_logits(__local const float *q_tile, __global const element *key, float *s)
{
    VECTOR(LOAD_K) sum[HEADS];
#pragma unroll
    for (uint h = 0; h < HEADS; h++)
        sum[h] = 0.0f;
#pragma unroll 1
    for (uint d = 0; d < DIM; d += LOAD_K) {
        VECTOR(LOAD_K) x = LOAD(LOAD_K)(key + d);
#pragma unroll
        for (uint h = 0; h < HEADS; h++)
            sum[h] += x * GET(LOAD_K)(q_tile + h * DIM + d);
    }
#pragma unroll
    for (uint h = 0; h < HEADS; h++)
        s[h] = SUM(LOAD_K)(sum[h]);
}

SG_KERNEL __kernel __attribute__((reqd_work_group_size(SG, 1, 1))) void
attention_subgroup(__global const element *restrict q, __global const element *restrict k,
                   __global const element *restrict v, __global out_element *restrict out, __global float *restrict lse,
                   __global const int *restrict indices, __global const int *restrict counts,
                   __global const long *restrict table, uint sequences, ulong unit_first, long q_len_stride,
                   long q_head_stride, long k_len_stride, long k_head_stride, long v_len_stride, long v_head_stride,
                   long out_len_stride, long out_head_stride, long lse_len_stride, long lse_head_stride, float scale,
                   int causal, uint has_lse, uint has_lists, uint list_heads, uint q_block, uint topk, uint kv_heads)
{
    __local float q_tile[HEADS * DIM];
    const uint lane = (uint)get_local_id(0);
    const ulong unit = unit_first + get_group_id(0);
    __global const long *sequence = sequence_of(table, sequences, unit);
    const uint q_len = (uint)sequence[SEQUENCE_Q_LEN], kv_len = (uint)sequence[SEQUENCE_KV_LEN];
    const uint local_unit = (uint)(unit - (ulong)sequence[SEQUENCE_UNIT]);
    const uint head_tile = local_unit / q_len, token = local_unit - head_tile * q_len;
    const uint kv_head = head_tile / HEAD_TILES, head_in_group = (head_tile - kv_head * HEAD_TILES) * HEADS;
    const uint head = kv_head * GROUP + head_in_group, heads = min((uint)HEADS, GROUP - head_in_group);
    const uint seen = (uint)keys_seen((long)token + (long)kv_len - (long)q_len, kv_len, causal, 0).y;
    struct list list = {.indices = indices,
                        .counts = counts,
                        .heads = list_heads,
                        .q_block = q_block,
                        .topk = topk,
                        .seen_most = seen,
                        .has_lists = has_lists};
    list.first = (ulong)sequence[SEQUENCE_LIST_ROW] * list_heads;
    list.first += list_heads == 1 ? 0 : list_heads == kv_heads ? kv_head : head;
    __global const element *k_rows = k + sequence[SEQUENCE_K] + kv_head * k_head_stride;
    __global const element *v_rows = v + sequence[SEQUENCE_V] + kv_head * v_head_stride;

#pragma unroll 1
    for (uint e = lane; e < HEADS * DIM; e += SG) {
        uint h = e / DIM, d = e - h * DIM;
        q_tile[e] = h < heads ? scale * LOAD(1)(q + sequence[SEQUENCE_Q] + (long)token * q_len_stride +
                                                (long)(head + h) * q_head_stride + d)
                              : 0.0f;
    }
    float row_max[HEADS], row_sum[HEADS], sums[HEADS][LANE_DIMS];
#pragma unroll
    for (uint h = 0; h < HEADS; h++) {
        row_max[h] = -INFINITY;
        row_sum[h] = 0.0f;
#pragma unroll
        for (uint d = 0; d < LANE_DIMS; d++)
            sums[h][d] = 0.0f;
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    int at = 0;
#pragma unroll 1
    for (int block = list_entry(&list, token, 0); block != NO_BLOCK; block = list_entry(&list, token, ++at)) {
        const uint end = min(block_end_key(&list, block, kv_len), seen);
#pragma unroll 1
        for (uint first = block_first_key(&list, block); first < end; first += SG) {
            const uint key = first + lane, count = min((uint)SG, end - first);
            float s[HEADS];
            key_logits(q_tile, k_rows + (long)min(key, end - 1) * k_len_stride, s);
#pragma unroll
            for (uint h = 0; h < HEADS; h++) {
                s[h] = key < end ? s[h] : -INFINITY;
                const float most = lanes_most(row_max[h], sg_most(s[h])), base = lanes_base(most);
                const float factor = exp(row_max[h] - base);
                row_max[h] = most;
                s[h] = exp(s[h] - base);
                row_sum[h] = row_sum[h] * factor + sg_sum(s[h]);
#pragma unroll
                for (uint d = 0; d < LANE_DIMS; d++)
                    sums[h][d] *= factor;
            }
#pragma unroll 1
            for (uint j = 0; j < count; j++) {
                __global const element *value = v_rows + (long)(first + j) * v_len_stride;
                float p[HEADS];
#pragma unroll
                for (uint h = 0; h < HEADS; h++)
                    p[h] = sg_from(s[h], j);
#pragma unroll
                for (uint d = 0; d < LANE_DIMS; d++) {
                    const float x = d * SG + lane < DIM_V ? LOAD(1)(value + d * SG + lane) : 0.0f;
#pragma unroll
                    for (uint h = 0; h < HEADS; h++) /* a weight of 0 keeps away from NaN and infinity */
                        sums[h][d] = p[h] == 0.0f ? sums[h][d] : mad(p[h], x, sums[h][d]);
                }
            }
        }
    }

#pragma unroll
    for (uint h = 0; h < HEADS; h++) {
        if (h >= heads) continue;
        /* Not "> 0": a NaN must reach the output. */
        const float inverse = row_sum[h] == 0.0f ? 0.0f : 1.0f / row_sum[h];
        __global out_element *row =
            out + sequence[SEQUENCE_OUT] + (long)token * out_len_stride + (long)(head + h) * out_head_stride;
#pragma unroll
        for (uint d = 0; d < LANE_DIMS; d++)
            if (d * SG + lane < DIM_V) STORE(sums[h][d] * inverse, row + d * SG + lane);
        if (has_lse && lane == 0)
            lse[sequence[SEQUENCE_LSE] + (long)token * lse_len_stride + (long)(head + h) * lse_head_stride] =
                row_max[h] + log(row_sum[h]);
    }
}
