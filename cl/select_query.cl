/* SPDX-License-Identifier: MIT */
/* What select.cl and select_robust.cl share: the query with its forced leaves, levels of the pyramid, tiles of
 * queries and keys, and logits that are folded into a leaf's score.
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

/* The query: the same in all items. */
struct query {
    __global const element *q, *k; /* its first head; key 0 of its sequence and key head */
    __global const float *means;   /* of its sequence and key head */
    long q_head_stride, k_len_stride;
    float scale;
    uint kv_len, seen, topk;
    uint first_count, last_from, last_to; /* forced leaves: 0 .. first_count-1 and last_from .. last_to-1 */
    int causal;
    uint lid, row_group, key_group;
};

/* Own leaf first, then those before it, then the first ones, topk in all. */
inline void forced_leaves(struct query *query, uint forced_first, uint forced_last)
{
    uint leaves = CEIL_DIV(query->seen, LEAF);
    uint last = query->causal ? min(min(forced_last, leaves), query->topk) : 0;
    query->last_to = leaves;
    query->last_from = leaves - last;
    query->first_count = query->causal ? min(min(forced_first, query->last_from), query->topk - last) : 0;
}

inline bool is_forced(const struct query *query, uint level, uint node)
{
    uint shift = level - 1;
    bool is_last = query->last_from < query->last_to && node >= query->last_from >> shift &&
                   node <= (query->last_to - 1) >> shift;
    return is_last || (query->first_count > 0 && node <= (query->first_count - 1) >> shift);
}

/* Nodes of a level over `tokens` keys, and where the level begins. */
inline uint level_nodes(uint tokens, uint level)
{
    uint nodes = CEIL_DIV(tokens, LEAF);
    for (uint l = 1; l < level; l++)
        nodes = CEIL_DIV(nodes, 2u);
    return nodes;
}

inline ulong level_first(uint tokens, uint level)
{
    ulong first = 0;
    for (uint l = 1; l < level; l++)
        first += level_nodes(tokens, l);
    return first;
}

/* The last candidate is the only one that can straddle the query; it is dropped unless it is forced. */
inline uint drop_straddling(const struct query *query, uint level, uint last, uint count)
{
    ulong end = ((ulong)last + 1) * ((ulong)LEAF << (level - 1));
    return count - (query->causal && end > query->seen && !is_forced(query, level, last) ? 1 : 0);
}

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
            PUT(LOAD_K)(LOAD(LOAD_K)(query->k + (long)(first + row) * query->k_len_stride + column), to);
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
