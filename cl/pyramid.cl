/* SPDX-License-Identifier: MIT */
/* Key pyramid; mirrors cpu/pyramid_ref.c. An item makes one dimension of one node: pyramid_leaf adds the keys
 * of a leaf in token order, pyramid_join halves the sum of two neighbours. Neighbouring items have neighbouring
 * dimensions.
 *
 * pyramid_leaf reads every key element once and writes 1 / LEAF of them as float32; pyramid_join reads a level
 * and writes half of it.
 *
 * Macros: DIM 1..256; LEAF 16..128; ITEMS of a work-group. Units of a sequence are nodes: those of the level,
 * key head after key head; `table` holds a table of sequences for each level. */

#include "quotient.cl"

/* Where an item works; place_of is false past unit `units` - 1. */
struct place {
    __global const long *sequence;
    uint node, kv_head, d;
};

inline bool place_of(struct place *place, __global const long *table, uint sequences, ulong unit_first,
                     ulong units, uint level)
{
    const ulong item = get_global_id(0), unit = unit_first + item / DIM;
    if (unit >= units) return false;
    place->sequence = sequence_of(table, sequences, unit);
    uint nodes = CEIL_DIV((uint)place->sequence[SEQUENCE_KV_LEN], LEAF);
    for (uint l = 1; l < level; l++)
        nodes = nodes == 1 ? 0 : CEIL_DIV(nodes, 2u);
    const ulong local_unit = unit - (ulong)place->sequence[SEQUENCE_UNIT];
    place->kv_head = (uint)(local_unit / nodes);
    place->node = (uint)(local_unit - (ulong)place->kv_head * nodes);
    place->d = (uint)(item - item / DIM * DIM);
    return true;
}

inline __global float *head_means(__global float *means, const struct place *place)
{
    return means +
           (place->sequence[SEQUENCE_NODE] + (long)place->kv_head * place->sequence[SEQUENCE_NODES]) * DIM;
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
pyramid_leaf(__global const element *restrict k, __global float *restrict means,
             __global const long *restrict table, uint sequences, long k_len_stride, long k_head_stride,
             ulong unit_first, ulong units)
{
    struct place place;
    if (!place_of(&place, table, sequences, unit_first, units, 1)) return;
    const uint first = place.node * LEAF,
               count = min((uint)place.sequence[SEQUENCE_KV_LEN] - first, (uint)LEAF);
    __global const element *key = k + place.sequence[SEQUENCE_K] + (long)place.kv_head * k_head_stride +
                                  (long)first * k_len_stride + place.d;
    float sum = 0;
    for (uint j = 0; j < count; j++)
        sum += LOAD(1)(key + (long)j * k_len_stride);
    head_means(means, &place)[(long)place.node * DIM + place.d] = quotient(sum, (float)count);
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void pyramid_join(__global float *restrict means,
                                                                              __global const long *table,
                                                                              uint sequences, uint level,
                                                                              ulong unit_first, ulong units)
{
    struct place place;
    table += (ulong)(level - 1) * sequences * SEQUENCE_FIELDS;
    if (!place_of(&place, table, sequences, unit_first, units, level)) return;
    uint children = CEIL_DIV((uint)place.sequence[SEQUENCE_KV_LEN], LEAF);
    ulong below = 0; /* first node of the level below */
    for (uint l = 2; l < level; l++) {
        below += children;
        children = CEIL_DIV(children, 2u);
    }
    __global float *level_below = head_means(means, &place) + below * DIM;
    __global const float *left = level_below + (2 * (ulong)place.node) * DIM + place.d;
    float mean = left[0];
    if (2 * place.node + 1 < children) mean = 0.5f * (left[0] + left[DIM]);
    level_below[((ulong)children + place.node) * DIM + place.d] = mean;
}
