/* SPDX-License-Identifier: MIT */
/* The memory of a decode cache: writes what is appended and keeps the pyramid; mirrors cpu/cpu_cache.c.
 *
 *   decode_append     a work-group takes the tokens of one leaf and key head: it copies their rows into the
 * cache (or their codes, with a scale a row) and adds the keys to the leaf's sum. A sequence whose tokens are
 * all in one leaf gets its ancestors here too, through all levels: one launch a step decode_ancestors  a
 * work-group takes a sequence and key head that has more leaves, in a launch behind it decode_cut        a
 * work-group takes a key head whose sequence was cut: its last leaf anew, and the ancestors
 *
 * Keys are added in token order in float32, as pyramid_leaf does, so the means have its bits; sums run on from
 * call to call. Read and written for a token: its rows once, and 8 DIM bytes a level.
 *
 * Macros: DIM, DIM_V 1..256; LEAF 16..128; ITEMS of a work-group, a power of two; DTYPE of the appended rows;
 * INT8 1: the cache holds codes. CACHE is 1. */

#include "key_rows.cl"
#include "quotient.cl"

/* spans: SPAN_FIELDS numbers for each sequence that gets tokens. One sequence alone comes in arguments: making
 * memory for a table takes longer than the kernel. */
#define SPAN_FIRST 0    /* position of its first token */
#define SPAN_LEN 1      /* tokens */
#define SPAN_ROW 2      /* of the first one in the call's tensors */
#define SPAN_SEQUENCE 3 /* of the cache */
#define SPAN_PAGES 4    /* its first entry in the block table */
#define SPAN_UNIT 5     /* its first leaf, among those of all sequences */
#define SPAN_FIELDS 6
#define SPAN_ARGUMENTS                                                                                         \
    __global const long *spans, uint count, uint one_first, uint one_len, uint one_row, ulong one_sequence,    \
        ulong one_pages

struct span {
    uint first, len, row;
    ulong sequence, pages, unit;
};

inline struct span span_one(uint first, uint len, uint row, ulong sequence, ulong pages)
{
    struct span span;
    span.first = first, span.len = len, span.row = row;
    span.sequence = sequence, span.pages = pages, span.unit = 0;
    return span;
}

inline void span_read(struct span *span, __global const long *spans, uint number)
{
    spans += number * SPAN_FIELDS;
    span->first = (uint)spans[SPAN_FIRST], span->len = (uint)spans[SPAN_LEN], span->row = (uint)spans[SPAN_ROW];
    span->sequence = (ulong)spans[SPAN_SEQUENCE], span->pages = (ulong)spans[SPAN_PAGES];
    span->unit = (ulong)spans[SPAN_UNIT];
}

/* The span that a leaf belongs to: the last one that begins at or before it. */
inline uint span_of(__global const long *spans, uint count, ulong unit)
{
    uint low = 0, high = count;
    while (high - low > 1) {
        const uint middle = (low + high) / 2;
        if ((ulong)spans[middle * SPAN_FIELDS + SPAN_UNIT] <= unit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Where things begin in the cache's memory, in elements of their type. */
#define STATISTICS_ARGUMENTS __global float *memory, ulong means_first, ulong sums_first, ulong nodes, uint room

/* ---- one leaf and its ancestors ---- */

struct head {
    __global float *means; /* [nodes][DIM] */
    __global float *sum;   /* [DIM] of the last leaf */
};

inline struct head head_of(__global float *memory, ulong means_first, ulong sums_first, ulong nodes,
                           ulong number)
{
    struct head head;
    head.means = memory + means_first + number * nodes * DIM;
    head.sum = memory + sums_first + number * 4 * DIM; /* of 16 bytes a dimension 4 are used */
    return head;
}

#define LEVELS_AT_ONCE 8

/* Dimension d of the ancestors of a sequence's last leaf, whose mean is x. At each level the last node has a
 * left neighbour below it, or one child. The neighbours are fetched together: they depend on nothing. */
inline void last_ancestors(__global float *means, uint leaf, uint room, uint d, float x)
{
    ulong first = 0; /* node of the level */
    uint level_room = room, node = leaf;
    while (node > 0) {
        float left[LEVELS_AT_ONCE];
        ulong at = first;
        uint below = level_room, n = node;
#pragma unroll
        for (uint l = 0; l < LEVELS_AT_ONCE; l++) {
            left[l] = n & 1 ? means[(at + n - 1) * DIM + d] : 0.0f;
            at += below;
            below = CEIL_DIV(below, 2u);
            n /= 2;
        }
#pragma unroll
        for (uint l = 0; l < LEVELS_AT_ONCE; l++)
            if (node > 0) {
                if (node & 1) x = 0.5f * (left[l] + x);
                first += level_room;
                level_room = CEIL_DIV(level_room, 2u);
                node /= 2;
                means[(first + node) * DIM + d] = x;
            }
    }
}

/* ---- rows ---- */

/* An element to be copied: there is no arithmetic for half, assignment included. */
#if DTYPE == 1
typedef uint bits;
#else
typedef ushort bits;
#endif

#if INT8
/* Codes of a row of `dim`, whose scale is returned; a NaN becomes 0, an infinity the greatest code. */
inline float quantise(__global const element *from, __global char *to, uint dim, __local float *most)
{
    const uint lid = get_local_id(0);
    float mine = 0.0f;
    for (uint d = lid; d < dim; d += ITEMS) {
        const float value = fabs(LOAD(1)(from + d));
        if (value > mine && value < INFINITY) mine = value;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    most[lid] = mine;
    for (uint step = ITEMS / 2; step > 0; step /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < step) most[lid] = fmax(most[lid], most[lid + step]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const float scale = quotient(most[0], 127.0f);
    for (uint d = lid; d < dim; d += ITEMS) {
        const float value = LOAD(1)(from + d);
        const float code = isnan(value) || scale == 0.0f ? 0.0f : quotient(value, scale);
        to[d] = convert_char(rint(clamp(code, -127.0f, 127.0f)));
    }
    return scale;
}
#endif

/* Rows of keys and values of the whole cache: of key head h from h * page_size rows on. */
struct stored {
    __global kv_element *k, *v;
#if INT8
    __global float *k_scale, *v_scale;
#endif
};

/* Copies tokens of one head from position `first` on. */
inline void write_rows(const struct stored *stored, const struct pages *pages, ulong head_row, uint first,
                       uint count, __global const element *k, long k_stride, __global const element *v,
                       long v_stride, __local float *most)
{
    const uint lid = get_local_id(0);
    for (uint j = 0; j < count; j++) {
        const ulong row = head_row + (ulong)page_row(pages, first + j);
        __global const element *k_from = k + (long)j * k_stride, *v_from = v + (long)j * v_stride;
        __global kv_element *k_to = stored->k + row * DIM, *v_to = stored->v + row * DIM_V;
#if INT8
        const float k_scale = quantise(k_from, k_to, DIM, most), v_scale = quantise(v_from, v_to, DIM_V, most);
        if (lid == 0) {
            stored->k_scale[row] = k_scale;
            stored->v_scale[row] = v_scale;
        }
#else
        for (uint d = lid; d < DIM; d += ITEMS)
            ((__global bits *)k_to)[d] = ((__global const bits *)k_from)[d];
        for (uint d = lid; d < DIM_V; d += ITEMS)
            ((__global bits *)v_to)[d] = ((__global const bits *)v_from)[d];
#endif
    }
}

/* ---- append ---- */

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
decode_append(__global const element *restrict k, long k_first, long k_stride, long k_head_stride,
              __global const element *restrict v, long v_first, long v_stride, long v_head_stride,
              STATISTICS_ARGUMENTS, __global kv_element *stored_k, ulong stored_k_first,
              __global kv_element *stored_v, ulong stored_v_first, ulong k_scales_first, ulong v_scales_first,
              uint kv_heads, SPAN_ARGUMENTS CACHE_ARGUMENTS)
{
    __local float most[ITEMS];
    const uint lid = get_local_id(0), kv_head = get_group_id(1);
    const ulong unit = get_group_id(0);
    struct span span = span_one(one_first, one_len, one_row, one_sequence, one_pages);
    if (count > 1) span_read(&span, spans, span_of(spans, count, unit));
    const uint begin = span.first, end = begin + span.len;
    const uint leaf = begin / LEAF + (uint)(unit - span.unit);
    const uint first = max(begin, leaf * LEAF), last = min(end, leaf * LEAF + LEAF);
    const long row = (long)(span.row + first - begin);
    const bool is_alone = begin / LEAF == (end - 1) / LEAF;
    const struct head head =
        head_of(memory, means_first, sums_first, nodes, span.sequence * kv_heads + kv_head);
    k += k_first + row * k_stride + (long)kv_head * k_head_stride;
    v += v_first + row * v_stride + (long)kv_head * v_head_stride;

    struct pages pages;
    pages.table = page_table + span.pages;
    pages.rows = page_rows;
    pages.size = page_size;
    struct stored stored;
    stored.k = stored_k + stored_k_first;
    stored.v = stored_v + stored_v_first;
#if INT8
    stored.k_scale = memory + k_scales_first;
    stored.v_scale = memory + v_scales_first;
#endif
    write_rows(&stored, &pages, (ulong)kv_head * (page_rows / kv_heads), first, last - first, k, k_stride, v,
               v_stride, most);

    for (uint d = lid; d < DIM; d += ITEMS) {
        float sum = first > leaf * LEAF ? head.sum[d] : 0.0f;
        for (uint j = 0; j < last - first; j++)
            sum += LOAD(1)(k + (long)j * k_stride + d);
        const float mean = quotient(sum, (float)(last - leaf * LEAF));
        head.means[(ulong)leaf * DIM + d] = mean;
        if (!is_alone) continue;
        head.sum[d] = sum;
        last_ancestors(head.means, leaf, room, d, mean);
    }
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
decode_ancestors(__global const element *restrict k, long k_first, long k_stride, long k_head_stride,
                 STATISTICS_ARGUMENTS, uint kv_heads, SPAN_ARGUMENTS)
{
    const uint lid = get_local_id(0), kv_head = get_group_id(1);
    struct span span = span_one(one_first, one_len, one_row, one_sequence, one_pages);
    if (count > 1) span_read(&span, spans, get_group_id(0));
    const uint begin = span.first, end = begin + span.len;
    uint from = begin / LEAF, to = (end - 1) / LEAF;
    if (end == begin || from == to) return;
    const struct head head =
        head_of(memory, means_first, sums_first, nodes, span.sequence * kv_heads + kv_head);

    /* The last leaf begins in this call: what it will go on with. */
    const uint last_leaf = to * LEAF;
    k += k_first + (long)(span.row + last_leaf - begin) * k_stride + (long)kv_head * k_head_stride;
    for (uint d = lid; d < DIM; d += ITEMS) {
        float sum = 0.0f;
        for (uint j = 0; j < end - last_leaf; j++)
            sum += LOAD(1)(k + (long)j * k_stride + d);
        head.sum[d] = sum;
    }
    ulong below = 0; /* first node of the level below */
    uint children = to + 1, level_room = room;
    while (children > 1) {
        const ulong first = below + level_room;
        from /= 2;
        to /= 2;
        for (ulong e = lid; e < (ulong)(to - from + 1) * DIM; e += ITEMS) {
            const uint n = from + (uint)(e / DIM), d = (uint)(e - e / DIM * DIM);
            __global const float *left = head.means + (below + 2 * (ulong)n) * DIM + d;
            float mean = left[0];
            if (2 * n + 1 < children) mean = 0.5f * (left[0] + left[DIM]);
            head.means[(first + n) * DIM + d] = mean;
        }
        barrier(CLK_GLOBAL_MEM_FENCE);
        below = first;
        level_room = CEIL_DIV(level_room, 2u);
        children = CEIL_DIV(children, 2u);
    }
}

/* ---- a prefix was taken ---- */

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
decode_cut(STATISTICS_ARGUMENTS, __global const kv_element *stored_k, ulong stored_k_first,
           ulong k_scales_first, uint kv_heads, ulong sequence, ulong table_first, uint length CACHE_ARGUMENTS)
{
    const uint lid = get_local_id(0), kv_head = get_group_id(1), leaf = (length - 1) / LEAF;
    const struct head head = head_of(memory, means_first, sums_first, nodes, sequence * kv_heads + kv_head);
    const ulong head_row = (ulong)kv_head * (page_rows / kv_heads);
    struct pages pages;
    pages.table = page_table + table_first;
    pages.rows = page_rows;
    pages.size = page_size;
    stored_k += stored_k_first;
    for (uint d = lid; d < DIM; d += ITEMS) {
        __global float *mean = head.means + (ulong)leaf * DIM + d;
        if (length % LEAF) {
            float sum = 0.0f;
            for (uint j = leaf * LEAF; j < length; j++) {
                const ulong row = head_row + (ulong)page_row(&pages, j);
                float key = LOAD_KV(1)(stored_k + row * DIM + d);
#if INT8
                key *= memory[k_scales_first + row];
#endif
                sum += key;
            }
            head.sum[d] = sum;
            *mean = quotient(sum, (float)(length - leaf * LEAF));
        }
        last_ancestors(head.means, leaf, room, d, *mean);
    }
}
