/* SPDX-License-Identifier: MIT */
/* What all selections down a pyramid share: the query with its forced leaves, and levels. Macros: DTYPE, DIM, LEAF. */

#include "key_rows.cl"

/* The query: the same in all items. */
struct query {
    __global const element *q;    /* its first head */
    __global const kv_element *k; /* key 0 of its sequence and key head */
    struct scales scales;
    __global const float *means; /* of its sequence and key head */
    long q_head_stride, k_len_stride;
    float scale;
    uint kv_len, seen, topk;
    uint room; /* leaves that decide where the levels of `means` begin */
    uint first_count, last_from, last_to; /* forced leaves: 0 .. first_count-1 and last_from .. last_to-1 */
    int causal;
    uint lid, row_group, key_group;
};

/* Own leaf first, then those before it, then the first ones, topk in all. */
static inline void forced_leaves(struct query *query, uint forced_first, uint forced_last)
{
    uint leaves = CEIL_DIV(query->seen, LEAF);
    uint last = query->causal ? min(min(forced_last, leaves), query->topk) : 0;
    query->last_to = leaves;
    query->last_from = leaves - last;
    query->first_count = query->causal ? min(min(forced_first, query->last_from), query->topk - last) : 0;
}

static inline bool is_forced(const struct query *query, uint level, uint node)
{
    uint shift = level - 1;
    bool is_last = query->last_from < query->last_to && node >= query->last_from >> shift &&
                   node <= (query->last_to - 1) >> shift;
    return is_last || (query->first_count > 0 && node <= (query->first_count - 1) >> shift);
}

/* Nodes of a level over `tokens` keys, and where the level begins when there are `leaves` of level 1. */
static inline uint level_nodes(uint tokens, uint level)
{
    uint nodes = CEIL_DIV(tokens, LEAF);
    for (uint l = 1; l < level; l++)
        nodes = CEIL_DIV(nodes, 2u);
    return nodes;
}

static inline ulong level_first(uint leaves, uint level)
{
    ulong first = 0;
    for (uint l = 1; l < level; l++) {
        first += leaves;
        leaves = CEIL_DIV(leaves, 2u);
    }
    return first;
}

/* The last candidate is the only one that can straddle the query; it is dropped unless it is forced. */
static inline uint drop_straddling(const struct query *query, uint level, uint last, uint count)
{
    ulong end = ((ulong)last + 1) * ((ulong)LEAF << (level - 1));
    return count - (query->causal && end > query->seen && !is_forced(query, level, last) ? 1 : 0);
}
