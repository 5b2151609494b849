/* SPDX-License-Identifier: MIT */
/* Key pyramid with what robust selection needs; mirrors cpu/cpu_bounds.c. Behind pyramid.cl:
 *
 *     means   [nodes][DIM]                  as pyramid.cl makes them, to the bit
 *     bounds  [nodes][2][DIM]               minimum, maximum of the node's keys
 *     parts   [leaves][LEAF_PARTS][3][DIM]  mean, minimum, maximum of a quarter of a leaf, where it has keys
 *
 * Minima and maxima do not round, and NaN keys are passed over: all backends have the same bits. bounds_leaf
 * reads every key element once and writes 3 + 12 floats for LEAF of them; bounds_join reads a level and writes
 * half of it. */

#define LEAF_PARTS 4

inline __global float *head_bounds(__global float *bounds, const struct place *place)
{
    const long node = place->sequence[SEQUENCE_NODE] + (long)place->kv_head * place->sequence[SEQUENCE_NODES];
    return bounds + node * (2 * DIM);
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
bounds_leaf(__global const element *restrict k, __global float *restrict means, __global float *restrict bounds,
            __global float *restrict parts, __global const long *restrict table, uint sequences,
            long k_len_stride, long k_head_stride, ulong unit_first, ulong units)
{
    struct place place;
    if (!place_of(&place, table, sequences, unit_first, units, 1)) return;
    const uint kv_len = (uint)place.sequence[SEQUENCE_KV_LEN], first = place.node * LEAF;
    const uint count = min(kv_len - first, (uint)LEAF);
    const long leaf = place.sequence[SEQUENCE_LEAF] + (long)place.kv_head * CEIL_DIV(kv_len, LEAF) + place.node;
    __global const element *key = k + place.sequence[SEQUENCE_K] + (long)place.kv_head * k_head_stride +
                                  (long)first * k_len_stride + place.d;
    __global float *part = parts + leaf * (LEAF_PARTS * 3 * DIM) + place.d;
    __global float *own = head_bounds(bounds, &place) + (long)place.node * (2 * DIM) + place.d;
    float sum = 0, least = INFINITY, most = -INFINITY;
    for (uint begin = 0; begin < count; begin += LEAF / LEAF_PARTS, part += 3 * DIM) {
        const uint end = min(begin + LEAF / LEAF_PARTS, count);
        float part_sum = 0, part_least = INFINITY, part_most = -INFINITY;
        for (uint j = begin; j < end; j++) {
            const float x = LOAD(1)(key + (long)j * k_len_stride);
            sum += x;
            part_sum += x;
            part_least = x < part_least ? x : part_least;
            part_most = x > part_most ? x : part_most;
        }
        part[0] = quotient(part_sum, (float)(end - begin));
        part[DIM] = part_least;
        part[2 * DIM] = part_most;
        least = part_least < least ? part_least : least;
        most = part_most > most ? part_most : most;
    }
    head_means(means, &place)[(long)place.node * DIM + place.d] = quotient(sum, (float)count);
    own[0] = least;
    own[DIM] = most;
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
bounds_join(__global float *restrict bounds, __global const long *table, uint sequences, uint level,
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
    __global float *level_below = head_bounds(bounds, &place) + below * (2 * DIM);
    __global const float *left = level_below + (2 * (ulong)place.node) * (2 * DIM) + place.d;
    float least = left[0], most = left[DIM];
    if (2 * place.node + 1 < children) {
        least = left[2 * DIM] < least ? left[2 * DIM] : least;
        most = left[3 * DIM] > most ? left[3 * DIM] : most;
    }
    __global float *own = level_below + ((ulong)children + place.node) * (2 * DIM) + place.d;
    own[0] = least;
    own[DIM] = most;
}
