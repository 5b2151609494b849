/* SPDX-License-Identifier: MIT */
/* What robust selection needs of a decode cache: minima and maxima of its nodes, means and bounds of the
 * quarters of its leaves; mirrors cpu/cpu_cache.c. Behind decode_append.cl, whose spans and units it has:
 *
 *   bounds_append      a work-group takes the tokens of one leaf and key head
 *   bounds_ancestors   a work-group takes a sequence and key head, in a launch behind it
 *   bounds_cut         a work-group takes a key head whose sequence was cut: its last leaf anew, and the
 *                      ancestors
 *
 * Keys are added in token order in float32, so that parts have the bits of bounds_leaf in pyramid_bounds.cl.
 * Read and written for a token: its key once, 5 floats a dimension, and 4 a dimension and level. */

#define LEAF_PARTS 4
#define PART (LEAF / LEAF_PARTS)

/* One key head of a sequence. */
struct bounds_head {
    __global float *bounds; /* [node][2][DIM] */
    __global float *parts;  /* [leaf][LEAF_PARTS][3][DIM] */
    __global float *sums;   /* [2][DIM] of the last quarter: before this call, and after it */
};

inline struct bounds_head bounds_head_of(__global float *memory, ulong bounds_first, ulong parts_first,
                                         ulong sums_first, ulong nodes, uint room, ulong number)
{
    struct bounds_head head;
    head.bounds = memory + bounds_first + number * nodes * (2 * DIM);
    head.parts = memory + parts_first + number * room * (LEAF_PARTS * 3 * DIM);
    head.sums = memory + sums_first + (number * 4 + 1) * DIM; /* behind the sum of the last leaf */
    return head;
}

/* One dimension of a leaf while keys are added to it. */
struct running {
    float sum, least, most, leaf_least, leaf_most;
};

/* What there is before `token`. */
inline void running_begin(struct running *running, const struct bounds_head *head, uint token, uint d)
{
    __global const float *own = head->bounds + (ulong)(token / LEAF) * (2 * DIM) + d;
    __global const float *part = head->parts + (ulong)(token / PART) * (3 * DIM) + d;
    const bool in_leaf = token % LEAF != 0, in_part = token % PART != 0;
    running->leaf_least = in_leaf ? own[0] : INFINITY;
    running->leaf_most = in_leaf ? own[DIM] : -INFINITY;
    running->sum = in_part ? head->sums[d] : 0.0f;
    running->least = in_part ? part[DIM] : INFINITY;
    running->most = in_part ? part[2 * DIM] : -INFINITY;
}

/* Adds the key of `token`; the last of a call or a quarter is written. NaN is passed over by bounds. */
inline void running_add(struct running *running, const struct bounds_head *head, uint token, bool is_last,
                        uint d, float x)
{
    if (token % PART == 0) {
        running->sum = 0.0f;
        running->least = INFINITY;
        running->most = -INFINITY;
    }
    running->sum += x;
    running->least = x < running->least ? x : running->least;
    running->most = x > running->most ? x : running->most;
    running->leaf_least = x < running->leaf_least ? x : running->leaf_least;
    running->leaf_most = x > running->leaf_most ? x : running->leaf_most;
    if (!is_last && token % PART != PART - 1) return;
    __global float *part = head->parts + (ulong)(token / PART) * (3 * DIM) + d;
    part[0] = quotient(running->sum, (float)(token % PART + 1));
    part[DIM] = running->least;
    part[2 * DIM] = running->most;
}

inline void running_end(const struct running *running, const struct bounds_head *head, uint leaf, uint d)
{
    __global float *own = head->bounds + (ulong)leaf * (2 * DIM) + d;
    own[0] = running->leaf_least;
    own[DIM] = running->leaf_most;
}

/* Ancestors of the leaves from .. to, the last of them the sequence's last, by a work-group. */
inline void join_bounds(__global float *bounds, uint from, uint to, uint room)
{
    const uint lid = get_local_id(0);
    ulong below = 0; /* first node of the level below */
    uint children = to + 1, level_room = room;
    while (children > 1) {
        const ulong first = below + level_room;
        from /= 2;
        to /= 2;
        for (ulong e = lid; e < (ulong)(to - from + 1) * DIM; e += ITEMS) {
            const uint n = from + (uint)(e / DIM), d = (uint)(e - e / DIM * DIM);
            __global const float *left = bounds + (below + 2 * (ulong)n) * (2 * DIM) + d;
            __global float *own = bounds + (first + n) * (2 * DIM) + d;
            float least = left[0], most = left[DIM];
            if (2 * n + 1 < children) {
                least = left[2 * DIM] < least ? left[2 * DIM] : least;
                most = left[3 * DIM] > most ? left[3 * DIM] : most;
            }
            own[0] = least;
            own[DIM] = most;
        }
        barrier(CLK_GLOBAL_MEM_FENCE);
        below = first;
        level_room = CEIL_DIV(level_room, 2u);
        children = CEIL_DIV(children, 2u);
    }
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
bounds_append(__global const element *restrict k, long k_first, long k_stride, long k_head_stride,
              STATISTICS_ARGUMENTS, ulong bounds_first, ulong parts_first, uint kv_heads, SPAN_ARGUMENTS)
{
    const uint lid = get_local_id(0), kv_head = get_group_id(1);
    const ulong unit = get_group_id(0);
    struct span span = span_one(one_first, one_len, one_row, one_sequence, one_pages);
    if (count > 1) span_read(&span, spans, span_of(spans, count, unit));
    const uint begin = span.first, end = begin + span.len;
    const uint leaf = begin / LEAF + (uint)(unit - span.unit);
    const uint first = max(begin, leaf * LEAF), last = min(end, leaf * LEAF + LEAF);
    const struct bounds_head head = bounds_head_of(memory, bounds_first, parts_first, sums_first, nodes, room,
                                                   span.sequence * kv_heads + kv_head);
    k += k_first + (long)(span.row + first - begin) * k_stride + (long)kv_head * k_head_stride;
    for (uint d = lid; d < DIM; d += ITEMS) {
        struct running running;
        running_begin(&running, &head, first, d);
        for (uint j = first; j < last; j++)
            running_add(&running, &head, j, j == last - 1, d, LOAD(1)(k + (long)(j - first) * k_stride + d));
        running_end(&running, &head, leaf, d);
        if (last == end) head.sums[DIM + d] = running.sum;
    }
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
bounds_ancestors(STATISTICS_ARGUMENTS, ulong bounds_first, ulong parts_first, uint kv_heads, SPAN_ARGUMENTS)
{
    const uint lid = get_local_id(0), kv_head = get_group_id(1);
    struct span span = span_one(one_first, one_len, one_row, one_sequence, one_pages);
    if (count > 1) span_read(&span, spans, get_group_id(0));
    if (span.len == 0) return;
    const struct bounds_head head = bounds_head_of(memory, bounds_first, parts_first, sums_first, nodes, room,
                                                   span.sequence * kv_heads + kv_head);
    for (uint d = lid; d < DIM; d += ITEMS)
        head.sums[d] = head.sums[DIM + d];
    join_bounds(head.bounds, span.first / LEAF, (span.first + span.len - 1) / LEAF, room);
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
bounds_cut(STATISTICS_ARGUMENTS, ulong bounds_first, ulong parts_first, __global const kv_element *stored_k,
           ulong stored_k_first, ulong k_scales_first, uint kv_heads, ulong sequence, ulong table_first,
           uint length CACHE_ARGUMENTS)
{
    const uint lid = get_local_id(0), kv_head = get_group_id(1), leaf = (length - 1) / LEAF;
    const struct bounds_head head = bounds_head_of(memory, bounds_first, parts_first, sums_first, nodes, room,
                                                   sequence * kv_heads + kv_head);
    const ulong head_row = (ulong)kv_head * (page_rows / kv_heads);
    struct pages pages;
    pages.table = page_table + table_first;
    pages.rows = page_rows;
    pages.size = page_size;
    stored_k += stored_k_first;
    for (uint d = lid; d < DIM && length % LEAF; d += ITEMS) {
        struct running running;
        running_begin(&running, &head, leaf * LEAF, d);
        for (uint j = leaf * LEAF; j < length; j++) {
            const ulong row = head_row + (ulong)page_row(&pages, j);
            float key = LOAD_KV(1)(stored_k + row * DIM + d);
#if INT8
            key *= memory[k_scales_first + row];
#endif
            running_add(&running, &head, j, j == length - 1, d, key);
        }
        running_end(&running, &head, leaf, d);
        head.sums[d] = running.sum;
    }
    barrier(CLK_GLOBAL_MEM_FENCE);
    join_bounds(head.bounds, leaf, leaf, room);
}
