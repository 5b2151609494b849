/* SPDX-License-Identifier: MIT */
/* Attention over block lists, forward; mirrors cpu/attention_forward_ref.c.
 *
 * A work-group owns a row tile: TOKENS neighbouring query rows times HEADS heads of one key head. It walks over
 * the union of the tokens' lists in ascending order; a row that does not list a block, or does not see a key,
 * has its score masked. Without lists the union is all blocks.
 *
 *                      ROWS                                      ROWS
 *                 +------------+                            +------------+
 *     q^T  [DIM]  |            |                p^T [KEYS]  |            |
 *                 +------------+                            +------------+
 *       k [KEYS][DIM] x q^T = s^T [KEYS][ROWS]      v^T [DIM_V][KEYS] x p^T = out^T [DIM_V][ROWS]
 *
 * Reads for each tile: ROWS x DIM elements of q, and KEYS x (DIM + DIM_V) of k and v for every KEYS keys of the
 * union; writes ROWS x (DIM_V + 1). Invariant after each step: out^T = sum_j exp(s_j - row_max) v_j and row_sum
 * = sum_j exp(s_j - row_max) over the keys so far; row_sum is kept in parts, one a key group, until the end.
 *
 * Macros: DIM, DIM_V 1..256; ROWS = ROW_GROUPS * LANES >= TOKENS * HEADS; KEYS a power of two that divides
 * BLOCK; ITEM_KEYS keys an item; ITEM_DIMS value dimensions an item, a multiple of 4, KEY_GROUPS * ITEM_DIMS >=
 * DIM_V; GROUP query heads a key head, HEADS of them in a tile; LOAD_K, LOAD_V elements a load, divide DIM and
 * DIM_V; PAD floats after a row of a tile, against bank conflicts, a multiple of 4; OUT_DTYPE; the options of
 * attention.cl. BIAS_BLOCK is a multiple of KEYS. CACHE 1: keys and values lie in the pages of a decode cache, and
 * `parts` work-groups share a row tile: each takes part_entries entries of the lists (or blocks of all keys) and
 * writes results of its own, which decode_merge.cl joins. */

#include "attention.cl"

#if CACHE
#define SPLIT_ARGUMENTS , uint parts, uint part_entries, ulong out_part_stride, ulong lse_part_stride
#else
#define SPLIT_ARGUMENTS
#endif
#define ROW_GROUPS (ROWS / LANES)
#define KEY_GROUPS (KEYS / ITEM_KEYS)
#define ITEMS (ROW_GROUPS * KEY_GROUPS)
#define HEAD_TILES CEIL_DIV(GROUP, HEADS) /* of a key head */
#define DIM_PADDED ROUND_UP(DIM, 4)
#define DIM_V_PADDED (KEY_GROUPS * ITEM_DIMS)
#define K_PITCH (DIM_PADDED + PAD)
#define V_PITCH (DIM_V_PADDED + PAD)
#define PITCH_MAX (K_PITCH > V_PITCH ? K_PITCH : V_PITCH)
#define COLUMNS_MAX (DIM_PADDED > DIM_V_PADDED ? DIM_PADDED : DIM_V_PADDED)
#define DIMS_AT_ONCE (ITEM_DIMS % 8 == 0 ? 8 : 4)

typedef ELEMENT_OF(OUT_DTYPE) out_element;
#define STORE STORE_OF(OUT_DTYPE)

/* Loads rows first .. first + count - 1 of a key or value tile, the rest of KEYS rows becomes zero, as do
 * columns past the dimension. Returns whether an element is infinite or NaN, from the bits: arithmetic such as x * 0 is
 * folded by compilers that take numbers to be finite. All bits of the exponent plus one give bit 8. */
#define DEFINE_LOAD_TILE(NAME, WIDTH, COLUMNS, COLUMNS_PADDED, PITCH)                                          \
    inline int NAME(__local float *tile, __global const kv_element *all, long stride, uint first, uint count,  \
                    uint lid, struct scales scales)                                                            \
    {                                                                                                          \
        const uint loads = CEIL_DIV(COLUMNS_PADDED, WIDTH);                                                    \
        BITS(WIDTH) check = 0;                                                                                 \
        ROLLED                                                                                                 \
        for (uint e = lid; e < KEYS * loads; e += ITEMS) {                                                     \
            uint row = e / loads, column = (e - row * loads) * WIDTH;                                          \
            VECTOR(WIDTH) x = 0.0f;                                                                            \
            if (row < count && column < COLUMNS)                                                               \
                x = SCALED(LOAD_KV(WIDTH)(STORED_ROW(all, stride, first, row, scales) + column), scales,       \
                           first + row);                                                                       \
            PUT(WIDTH)(x, tile + row * PITCH + column);                                                        \
            check |= ((AS_BITS(WIDTH)(x) >> 23) & 255) + 1;                                                    \
        }                                                                                                      \
        return any(check << 23);                                                                               \
    }
DEFINE_LOAD_TILE(load_keys, LOAD_K, DIM, DIM_PADDED, K_PITCH)
DEFINE_LOAD_TILE(load_values, LOAD_V, DIM_V, DIM_V_PADDED, V_PITCH)

/* The least of the tokens' next blocks. */
inline int first_block(__local const int *next)
{
    int block = NO_BLOCK;
#pragma unroll
    for (uint t = 0; t < TOKENS; t++)
        block = min(block, next[t]);
    return block;
}

#if MASK
/* The rows in whose window, on every axis, the coordinates [3] lie. windows [3][lo, hi] are ROW_GROUPS apart.
 */
inline lanes_int in_window(__local const int *coordinate, __local const lanes_int *windows)
{
    lanes_int inside = -1;
    for (uint axis = 0; axis < 3; axis++) {
        lanes_int x = coordinate[axis];
        inside &= (x >= windows[2 * axis * ROW_GROUPS]) & (x < windows[(2 * axis + 1) * ROW_GROUPS]);
    }
    return inside;
}
#endif

/* sum + p * v; with `careful` just sum where p is 0, so that a NaN or an infinity stays with the rows that see its
 * key. mad, because a compiler may contract p * v + sum in one case and not in the other: a row's bits must not depend on
 * what stands behind it. */
inline lanes plus_weighted(lanes sum, lanes p, float v, bool careful)
{
    lanes next = mad(p, (lanes)(v), sum);
    return careful ? (p == (lanes)(0.0f) ? sum : next) : next;
}

/* sums[d] += sum_j p_j v_j for DIMS_AT_ONCE dimensions of all keys of the tile. */
inline void add_values(lanes *sums, __local const lanes *p, __local const float4 *values, bool careful)
{
    lanes sum[DIMS_AT_ONCE];
#pragma unroll
    for (uint d = 0; d < DIMS_AT_ONCE; d++)
        sum[d] = sums[d];
#pragma unroll 1
    for (uint j = 0; j < KEYS; j++) {
        lanes p_j = p[j * ROW_GROUPS];
#pragma unroll
        for (uint d = 0; d < DIMS_AT_ONCE; d += 4) {
            float4 value = values[j * (V_PITCH / 4) + d / 4 * KEY_GROUPS];
            sum[d] = plus_weighted(sum[d], p_j, value.x, careful);
            sum[d + 1] = plus_weighted(sum[d + 1], p_j, value.y, careful);
            sum[d + 2] = plus_weighted(sum[d + 2], p_j, value.z, careful);
            sum[d + 3] = plus_weighted(sum[d + 3], p_j, value.w, careful);
        }
    }
#pragma unroll
    for (uint d = 0; d < DIMS_AT_ONCE; d++)
        sums[d] = sum[d];
}

#if SOFTCAP
/* softcap tanh(s / softcap), by way of the item's own places in p_tile: tanh is long, and written out for every
 * key it takes so many registers that others go to memory. */
inline void cap_logits(lanes *s, __local lanes *own, float softcap)
{
#pragma unroll
    for (uint j = 0; j < ITEM_KEYS; j++)
        own[j * KEY_GROUPS * ROW_GROUPS] = s[j];
#pragma unroll 1
    for (uint j = 0; j < ITEM_KEYS; j++)
        own[j * KEY_GROUPS * ROW_GROUPS] = softcap * tanh(own[j * KEY_GROUPS * ROW_GROUPS] / softcap);
#pragma unroll
    for (uint j = 0; j < ITEM_KEYS; j++)
        s[j] = own[j * KEY_GROUPS * ROW_GROUPS];
}
#endif

#if SINK
/* Joins the sink's logit to the maximum and sum of a row. Returns what the row's values are to be multiplied
 * with. */
inline lanes sink_join(lanes logit, lanes *row_max, lanes *row_sum)
{
    lanes most = lanes_most(*row_max, logit), base = lanes_base(most), factor = exp(*row_max - base);
    *row_sum = *row_sum * factor + exp(logit - base);
    *row_max = most;
    return factor;
}
#endif

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
attention_forward(__global const element *restrict q, __global const kv_element *restrict k,
                  __global const kv_element *restrict v, __global out_element *restrict out,
                  __global float *restrict lse, __global const int *restrict indices,
                  __global const int *restrict counts, __global const long *restrict table, uint sequences,
                  ulong unit_first, long q_len_stride, long q_head_stride, long k_len_stride,
                  long k_head_stride, long v_len_stride, long v_head_stride, long out_len_stride,
                  long out_head_stride, long lse_len_stride, long lse_head_stride, float scale, int causal,
                  uint has_lse, uint has_lists, uint list_heads, uint q_block, uint topk,
                  uint kv_heads OPTION_ARGUMENTS CACHE_ARGUMENTS SPLIT_ARGUMENTS)
{
#if !OPTIONS
    const ulong window = 0;
#endif
    __local lanes q_tile[COLUMNS_MAX * ROW_GROUPS]; /* q^T, at the end out^T */
    __local float4 key_tile[KEYS * PITCH_MAX / 4];  /* k, then v */
    __local lanes p_tile[KEYS * ROW_GROUPS];
    __local lanes part[KEY_GROUPS * ROW_GROUPS];
    __local lanes decay[ROW_GROUPS];
    __local lanes_int seen[ROW_GROUPS], limit[ROW_GROUPS]; /* keys that a row sees at all, and in this block */
    __local int next[TOKENS], cursor[TOKENS];
    __local int odd; /* the value tile has a NaN or an infinity */
    __local long out_first, lse_first; /* of the first row: needed last, so not kept in registers */
#if WINDOW
    __local lanes_int seen_from[ROW_GROUPS], from[ROW_GROUPS]; /* keys before these are not seen */
#endif
#if SINK
    __local lanes sink_tile[ROW_GROUPS]; /* -infinity where the row has seen no key: empty rows stay empty */
#endif
#if BIAS
    __local lanes bias_tile[ROW_GROUPS]; /* of the block */
#endif
#if MASK
    __local lanes_int window_tile[6 * ROW_GROUPS], whole[ROW_GROUPS]; /* rows that the block is not cut for */
    __local int coordinates[KEYS * 3], any_cut;
#endif
    __local float *tile = (__local float *)key_tile;

    const uint lid = get_local_id(0), key_group = lid / ROW_GROUPS, row_group = lid - key_group * ROW_GROUPS;
#if CACHE
    const ulong part_unit = unit_first + get_group_id(0), unit = part_unit / parts;
    const uint list_part = (uint)(part_unit - unit * parts);
    out += list_part * out_part_stride;
    lse += list_part * lse_part_stride;
#else
    const ulong unit = unit_first + get_group_id(0);
#endif
    __global const long *sequence = sequence_of(table, sequences, unit);
    const uint q_len = (uint)sequence[SEQUENCE_Q_LEN], kv_len = (uint)sequence[SEQUENCE_KV_LEN];
    const uint token_tiles = CEIL_DIV(q_len, TOKENS),
               local_unit = (uint)(unit - (ulong)sequence[SEQUENCE_UNIT]);
    const uint head_tile = local_unit / token_tiles, token = (local_unit - head_tile * token_tiles) * TOKENS;
    const uint kv_head = head_tile / HEAD_TILES, head_in_group = (head_tile - kv_head * HEAD_TILES) * HEADS;
    const uint head = kv_head * GROUP + head_in_group;
    const uint tokens = min((uint)TOKENS, q_len - token), heads = min((uint)HEADS, GROUP - head_in_group);
    const long position = (long)token + (long)kv_len - (long)q_len; /* of the first token */
    struct list list = {.indices = indices,
                        .counts = counts,
                        .heads = list_heads,
                        .q_block = q_block,
                        .topk = topk,
                        .has_lists = has_lists};
    list.first = (ulong)sequence[SEQUENCE_LIST_ROW] * list_heads;
    list.first += list_heads == 1 ? 0 : list_heads == kv_heads ? kv_head : head;
    list.seen_least = (uint)keys_seen(position, kv_len, causal, window).x;
    list.seen_most = (uint)keys_seen(position + tokens - 1, kv_len, causal, window).y;
    __global const kv_element *k_rows = k + sequence[SEQUENCE_K] + kv_head * k_head_stride;
    __global const kv_element *v_rows = v + sequence[SEQUENCE_V] + kv_head * v_head_stride;
    struct scales k_scales = {0}, v_scales = {0};
#if CACHE
    k_scales.pages.table = page_table + sequence[SEQUENCE_PAGES];
    k_scales.pages.rows = page_rows;
    k_scales.pages.size = page_size;
    v_scales.pages = k_scales.pages;
    list.end = (int)((list_part + 1) * part_entries);
#endif
#if OPTIONS
    __global const long *option = option_table + (uint)(sequence - table) / SEQUENCE_FIELDS * OPTION_FIELDS;
#endif
#if INT8
    k_scales.of = k_scale + option[OPTION_K_SCALE] + kv_head * k_scale_head_stride;
    v_scales.of = v_scale + option[OPTION_V_SCALE] + kv_head * v_scale_head_stride;
    k_scales.stride = k_scale_stride, v_scales.stride = v_scale_stride;
    k_scales.row = v_scales.row = (uint)option[OPTION_K_ROW];
    k_scales.block = v_scales.block = scale_block;
#endif
#if STARTS
    list.starts = starts + option[OPTION_START];
    list.k_row = option[OPTION_K_ROW];
    list.blocks = (uint)option[OPTION_BLOCKS];
#endif

    if (lid == 0) {
        out_first = sequence[SEQUENCE_OUT] + (long)token * out_len_stride + (long)head * out_head_stride;
        lse_first = sequence[SEQUENCE_LSE] + (long)token * lse_len_stride + (long)head * lse_head_stride;
    }
#pragma unroll 1
    for (uint e = lid; e < ROWS * DIM_PADDED; e += ITEMS) {
        uint row = e / DIM_PADDED, d = e - row * DIM_PADDED, t = row / HEADS, h = row - t * HEADS;
        float x = 0;
        if (t < tokens && h < heads && d < DIM)
            x = scale * LOAD(1)(q + sequence[SEQUENCE_Q] + (long)(token + t) * q_len_stride +
                                (long)(head + h) * q_head_stride + d);
        ((__local float *)q_tile)[d * ROWS + row] = x;
    }
#pragma unroll 1
    for (uint row = lid; row < ROWS; row += ITEMS) {
        uint t = row / HEADS, h = row - t * HEADS;
        int2 keys = keys_seen(position + t, kv_len, causal, window);
        bool is_row = t < tokens && h < heads;
        ((__local int *)seen)[row] = is_row ? keys.y : 0;
#if WINDOW
        ((__local int *)seen_from)[row] = keys.x;
#endif
#if SINK
        ((__local float *)sink_tile)[row] = -INFINITY;
#endif
#if MASK
        for (uint side = 0; side < 6; side++)
            ((__local int *)window_tile)[side * ROWS + row] =
                is_row ? row_windows[(option[OPTION_Q_ROW] + token + t) * 6 + side] : 0;
#endif
    }
    for (uint t = lid; t < TOKENS; t += ITEMS) {
        int at = WINDOW && !has_lists ? (int)(list.seen_least / BLOCK) : 0;
#if CACHE
        at = max(at, (int)(list_part * part_entries));
#endif
        next[t] = t < tokens ? list_next(&list, token + t, &at, kv_len) : NO_BLOCK;
        cursor[t] = at;
    }

    lanes row_max = -INFINITY, row_sum = 0.0f, sums[ITEM_DIMS];
#pragma unroll
    for (uint d = 0; d < ITEM_DIMS; d++)
        sums[d] = 0.0f;
    barrier(CLK_LOCAL_MEM_FENCE);

    uint first = 0;
    int block = first_block(next);
    while (block != NO_BLOCK) { /* keys first .. first + KEYS - 1, which lie in the block */
        const uint key = block_first_key(&list, block) + first;
        const uint count = block_end_key(&list, block, kv_len) - key;
        const bool is_last = count <= KEYS || key + KEYS >= list.seen_most;
        barrier(CLK_LOCAL_MEM_FENCE);
        load_keys(tile, k_rows, k_len_stride, key, count, lid, k_scales);
        if (lid == 0) odd = 0;
#if MASK
        if (lid == 0) any_cut = 0;
#pragma unroll 1
        for (uint e = lid; e < KEYS * 3; e += ITEMS)
            coordinates[e] = e < count * 3 ? key_coordinates[(option[OPTION_K_ROW] + key) * 3 + e] : -1;
        barrier(CLK_LOCAL_MEM_FENCE);
#endif
#pragma unroll 1
        for (uint row = lid; row < ROWS; row += ITEMS) {
            uint t = min(row / HEADS, (uint)TOKENS - 1);
            bool is_listed = next[t] == block;
            int seen_here = ((__local int *)seen)[row] - (int)key;
            if (STARTS) seen_here = min(seen_here, (int)count);
            ((__local int *)limit)[row] = is_listed ? seen_here : 0;
#if WINDOW
            ((__local int *)from)[row] = ((__local int *)seen_from)[row] - (int)key;
#endif
#if SINK /* which comes without element masks */
            int end = min(((__local int *)limit)[row], (int)KEYS);
#if WINDOW
            end -= max(((__local int *)from)[row], 0);
#endif
            const uint sink_head = head + row - row / HEADS * HEADS;
            if (end > 0) ((__local float *)sink_tile)[row] = sink[sink_first + sink_head * sink_stride];
#endif
#if BIAS
            uint h = min(row - row / HEADS * HEADS, heads - 1),
                 bias_block = has_lists ? block : key / BIAS_BLOCK;
            ((__local float *)bias_tile)[row] =
                bias[option[OPTION_BIAS] + bias_block * bias_block_stride + (head + h) * bias_head_stride];
#endif
#if MASK
            ulong list_row = list.first + (ulong)((token + t) / q_block) * list_heads;
            int is_cut = is_listed && t < tokens ? cut[list_row * topk + cursor[t]] : 0;
            ((__local int *)whole)[row] = is_cut ? 0 : -1;
            if (is_cut) any_cut = 1;
#endif
        }
        barrier(CLK_LOCAL_MEM_FENCE);

        lanes s[ITEM_KEYS], most = -INFINITY;
        tile_logits(q_tile, key_tile, row_group, key_group, s);
#if SOFTCAP
        cap_logits(s, p_tile + key_group * ROW_GROUPS + row_group, softcap);
#endif
#pragma unroll
        for (uint j = 0; j < ITEM_KEYS; j++) {
            const uint in_tile = j * KEY_GROUPS + key_group;
            lanes_int visible = (lanes_int)((int)in_tile) < limit[row_group];
#if BIAS
            s[j] += bias_tile[row_group];
#endif
#if WINDOW
            visible &= (lanes_int)((int)in_tile) >= from[row_group];
#endif
#if MASK
            if (any_cut)
                visible &= whole[row_group] | in_window(coordinates + in_tile * 3, window_tile + row_group);
#endif
            s[j] = visible ? s[j] : (lanes)(-INFINITY);
            most = lanes_most(most, s[j]);
        }
        part[lid] = most;
        barrier(CLK_LOCAL_MEM_FENCE);

        most = row_max;
#pragma unroll 1
        for (uint g = 0; g < KEY_GROUPS; g++)
            most = lanes_most(most, part[g * ROW_GROUPS + row_group]);
        lanes base = lanes_base(most), factor = exp(row_max - base);
        row_max = most;
        row_sum *= factor;
#pragma unroll
        for (uint j = 0; j < ITEM_KEYS; j++) {
            lanes p = exp(s[j] - base);
            row_sum += p;
            p_tile[(j * KEY_GROUPS + key_group) * ROW_GROUPS + row_group] = p;
        }
        if (key_group == 0) decay[row_group] = factor;
        if (load_values(tile, v_rows, v_len_stride, key, count, lid, v_scales)) odd = 1;
        for (uint t = lid; is_last && t < TOKENS; t += ITEMS)
            if (next[t] == block) {
                int at = cursor[t] + 1;
                next[t] = list_next(&list, token + t, &at, kv_len);
                cursor[t] = at;
            }
        barrier(CLK_LOCAL_MEM_FENCE);

        factor = decay[row_group];
#pragma unroll
        for (uint d = 0; d < ITEM_DIMS; d++)
            sums[d] *= factor;
#pragma unroll
        for (uint d = 0; d < ITEM_DIMS; d += DIMS_AT_ONCE) {
            __local const float4 *values = key_tile + d / 4 * KEY_GROUPS + key_group;
            if (odd)
                add_values(sums + d, p_tile + row_group, values, true);
            else
                add_values(sums + d, p_tile + row_group, values, false);
        }
        first = is_last ? 0 : first + KEYS;
        if (is_last) block = first_block(next);
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    part[lid] = row_sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    row_sum = 0.0f;
#pragma unroll 1
    for (uint g = 0; g < KEY_GROUPS; g++)
        row_sum += part[g * ROW_GROUPS + row_group];
        /* Not "> 0": a NaN must reach the output. */
#if SINK
    lanes factor = sink_join(sink_tile[row_group], &row_max, &row_sum);
    lanes inverse = row_sum == (lanes)(0.0f) ? (lanes)(0.0f) : factor / row_sum;
#else
    lanes inverse = row_sum == (lanes)(0.0f) ? (lanes)(0.0f) : (lanes)(1.0f) / row_sum;
#endif
#pragma unroll
    for (uint d = 0; d < ITEM_DIMS; d++)
        q_tile[(d / 4 * KEY_GROUPS * 4 + key_group * 4 + d % 4) * ROW_GROUPS + row_group] = sums[d] * inverse;
    if (key_group == 0) p_tile[row_group] = row_max + log(row_sum);
    barrier(CLK_LOCAL_MEM_FENCE);

#pragma unroll 1
    for (uint e = lid; e < ROWS * DIM_V; e += ITEMS) {
        uint row = e / DIM_V, d = e - row * DIM_V, t = row / HEADS, h = row - t * HEADS;
        if (t < tokens && h < heads)
            STORE(((__local float *)q_tile)[d * ROWS + row],
                  out + out_first + (long)t * out_len_stride + (long)h * out_head_stride + d);
    }
    for (uint row = lid; has_lse && row < ROWS; row += ITEMS) {
        uint t = row / HEADS, h = row - t * HEADS;
        if (t < tokens && h < heads)
            lse[lse_first + (long)t * lse_len_stride + (long)h * lse_head_stride] =
                ((__local float *)p_tile)[row];
    }
}
