/* SPDX-License-Identifier: MIT */
/* What select.cl and select_robust.cl share: tiles of queries and keys, and logits that are folded into a leaf's
 * score.
 *
 * Macros: as in select.cl. */

#define ROW_GROUPS (ROWS / LANES)
#define KEY_GROUPS (KEYS / ITEM_KEYS)
#define ITEMS (ROW_GROUPS * KEY_GROUPS)
#define ROUNDS CEIL_DIV(GROUP, ROWS)
#define DIM_PADDED ROUND_UP(DIM, 4)
#define PITCH (DIM_PADDED + PAD)
#define CANDIDATES (2 * CAPACITY)

#define PISA 0
#define PISA1 1
#define PISA2 2
#define FLAT_MEAN 3
#define FLAT_LSE 4
#define ROBUST 6
#define IS_LSE (SELECTOR == PISA || SELECTOR == FLAT_LSE || SELECTOR == ROBUST)

#include "select_level.cl"

/* ---- tiles ---- */

inline void load_query(__local lanes *q_tile, const struct query *query, uint round)
{
#pragma unroll 1
    for (uint e = query->lid; e < ROWS * DIM_PADDED; e += ITEMS) {
        uint row = e / DIM_PADDED, d = e - row * DIM_PADDED, head = round * ROWS + row;
        float x = 0;
        if (head < GROUP && d < DIM)
            x = query->scale * LOAD(1)(query->q + (long)head * query->q_head_stride + d);
        ((__local float *)q_tile)[d * ROWS + row] = x;
    }
}

/* Child `row` of a tile stands where item row / ITEM_KEYS finds it as its (row % ITEM_KEYS)th; see tile_logits.
 */
inline __local float *tile_place(__local float4 *key_tile, uint row, uint column)
{
    uint item = row / ITEM_KEYS, slot = (row - item * ITEM_KEYS) * KEY_GROUPS + item;
    return (__local float *)key_tile + slot * PITCH + column;
}

/* Keys first .. first + count - 1; the rest of the tile becomes zero. */
inline void load_keys(__local float4 *key_tile, const struct query *query, uint first, uint count)
{
    const uint loads = CEIL_DIV(DIM_PADDED, LOAD_K);
#pragma unroll 1
    for (uint e = query->lid; e < KEYS * loads; e += ITEMS) {
        uint row = e / loads, column = (e - row * loads) * LOAD_K;
        __local float *to = tile_place(key_tile, row, column);
        if (row < count && column < DIM)
            PUT(LOAD_K)(SCALED(LOAD_KV(LOAD_K)(STORED_ROW(query->k, query->k_len_stride, first, row,
                                                          query->scales) +
                                               column),
                               query->scales, first + row),
                        to);
        else
            PUT(LOAD_K)(0.0f, to);
    }
}

/* ---- logits of a leaf ---- */

/* Joins (a, b) of `count` logits with (a2, b2) of `count2` more: maximum and sum of exponentials, or mean and
 * sum of squared differences from it. */
inline void join_logits(lanes *a, lanes *b, uint count, lanes a2, lanes b2, uint count2)
{
#if IS_LSE
    lanes most = lanes_most(*a, a2), base = lanes_base(most);
    *b = *b * exp(*a - base) + b2 * exp(a2 - base);
    *a = most;
#else
    float share = count2 == 0 ? 0.0f : (float)count2 / (float)(count + count2);
    lanes gap = a2 - *a;
    if (count2 == 0) return;
    if (count == 0) {
        *a = a2;
        *b = b2;
        return;
    }
    *b += b2 + gap * gap * ((float)count * share);
    *a += gap * share;
#endif
}

/* (a, b) of an item's first `count` logits; LSE: of all, those past `count` being masked. */
inline void fold_logits(const lanes *s, uint count, lanes *a, lanes *b)
{
#if IS_LSE
    lanes t[ITEM_KEYS], most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (uint j = 0; j < ITEM_KEYS; j++) {
        t[j] = j < count ? s[j] : (lanes)(-INFINITY);
        most = lanes_most(most, t[j]);
    }
    lanes base = lanes_base(most);
#pragma unroll
    for (uint j = 0; j < ITEM_KEYS; j++)
        sum += exp(t[j] - base);
    *a = most;
    *b = sum;
#else
    lanes sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (uint j = 0; j < ITEM_KEYS; j++)
        sum += j < count ? s[j] : (lanes)(0.0f);
    sum *= count == 0 ? 0.0f : 1.0f / (float)count;
#pragma unroll
    for (uint j = 0; j < ITEM_KEYS; j++)
        squares += j < count ? (s[j] - sum) * (s[j] - sum) : (lanes)(0.0f);
    *a = sum;
    *b = squares;
#endif
}

/* How many of the leaf's first `keys` keys (tiles included) belong to an item. */
inline uint item_count(uint key_group, uint keys)
{
    uint whole = keys / KEYS * ITEM_KEYS, rest = keys % KEYS, before = key_group * ITEM_KEYS;
    return whole + (rest > before ? min(rest - before, (uint)ITEM_KEYS) : 0);
}
