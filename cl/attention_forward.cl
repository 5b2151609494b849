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
 * DIM_V; PAD floats after a row of a tile, against bank conflicts, a multiple of 4; OUT_DTYPE. */

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
#define NO_BLOCK 0x7fffffff

#if OUT_DTYPE == 1
typedef float out_element;
#define STORE store_float32
#elif OUT_DTYPE == 2
typedef half out_element;
#define STORE store_float16
#else
typedef ushort out_element;
#define STORE store_bfloat16
#endif

/* Loads `count` rows of a key or value tile, the rest of KEYS rows becomes zero, as do columns past the
 * dimension. Returns 0, or NaN when an element is infinite or NaN. */
#define DEFINE_LOAD_TILE(NAME, WIDTH, COLUMNS, COLUMNS_PADDED, PITCH)                                          \
    inline float NAME(__local float *tile, __global const element *rows, long stride, uint count, uint lid)    \
    {                                                                                                          \
        const uint loads = CEIL_DIV(COLUMNS_PADDED, WIDTH);                                                    \
        VECTOR(WIDTH) check = 0.0f;                                                                            \
        for (uint e = lid; e < KEYS * loads; e += ITEMS) {                                                     \
            uint row = e / loads, column = (e - row * loads) * WIDTH;                                          \
            VECTOR(WIDTH) x = 0.0f;                                                                            \
            if (row < count && column < COLUMNS) x = LOAD(WIDTH)(rows + (long)row * stride + column);          \
            PUT(WIDTH)(x, tile + row * PITCH + column);                                                        \
            check += x * 0.0f;                                                                                 \
        }                                                                                                      \
        return SUM(WIDTH)(check);                                                                              \
    }
DEFINE_LOAD_TILE(load_keys, LOAD_K, DIM, DIM_PADDED, K_PITCH)
DEFINE_LOAD_TILE(load_values, LOAD_V, DIM_V, DIM_V_PADDED, V_PITCH)

/* The lists of a tile's tokens. */
struct list {
    __global const int *indices, *counts;
    ulong first; /* list of the sequence's first token */
    uint heads, q_block, topk, seen_most, has_lists;
};

/* Entry `at` of a token's list; NO_BLOCK past its end or past the keys. Lists ascend. */
inline int list_entry(const struct list *list, uint token, int at)
{
    int block = at;
    if (list->has_lists) {
        ulong row = list->first + (ulong)(token / list->q_block) * list->heads;
        block = at < min(list->counts[row], (int)list->topk) ? list->indices[row * list->topk + at] : -1;
    }
    return block >= 0 && (ulong)block * BLOCK < list->seen_most ? block : NO_BLOCK;
}

/* The least of the tokens' next blocks. */
inline int first_block(__local const int *next)
{
    int block = NO_BLOCK;
#pragma unroll
    for (uint t = 0; t < TOKENS; t++)
        block = min(block, next[t]);
    return block;
}

/* p * v; with `careful` 0 where p is, so that a NaN or an infinity stays with the rows that see its key. */
inline lanes weighted(lanes p, float v, bool careful)
{
    lanes product = p * v;
    if (careful) product = p == (lanes)(0.0f) ? (lanes)(0.0f) : product;
    return product;
}

/* sums[d] += sum_j p_j v_j for DIMS_AT_ONCE dimensions of all keys of the tile. */
inline void add_values(lanes *sums, __local const lanes *p, __local const float4 *values, bool careful)
{
    lanes sum[DIMS_AT_ONCE];
#pragma unroll
    for (uint d = 0; d < DIMS_AT_ONCE; d++)
        sum[d] = sums[d];
    for (uint j = 0; j < KEYS; j++) {
        lanes p_j = p[j * ROW_GROUPS];
#pragma unroll
        for (uint d = 0; d < DIMS_AT_ONCE; d += 4) {
            float4 value = values[j * (V_PITCH / 4) + d / 4 * KEY_GROUPS];
            sum[d] += weighted(p_j, value.x, careful);
            sum[d + 1] += weighted(p_j, value.y, careful);
            sum[d + 2] += weighted(p_j, value.z, careful);
            sum[d + 3] += weighted(p_j, value.w, careful);
        }
    }
#pragma unroll
    for (uint d = 0; d < DIMS_AT_ONCE; d++)
        sums[d] = sum[d];
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
attention_forward(__global const element *restrict q, __global const element *restrict k,
                  __global const element *restrict v, __global out_element *restrict out,
                  __global float *restrict lse, __global const int *restrict indices,
                  __global const int *restrict counts, __global const long *restrict table, uint sequences,
                  ulong unit_first, long q_len_stride, long q_head_stride, long k_len_stride,
                  long k_head_stride, long v_len_stride, long v_head_stride, long out_len_stride,
                  long out_head_stride, long lse_len_stride, long lse_head_stride, float scale, int causal,
                  uint has_lse, uint has_lists, uint list_heads, uint q_block, uint topk, uint kv_heads)
{
    __local lanes q_tile[COLUMNS_MAX * ROW_GROUPS]; /* q^T, at the end out^T */
    __local float4 key_tile[KEYS * PITCH_MAX / 4];  /* k, then v */
    __local lanes p_tile[KEYS * ROW_GROUPS];
    __local lanes part[KEY_GROUPS * ROW_GROUPS];
    __local lanes decay[ROW_GROUPS];
    __local lanes_int seen[ROW_GROUPS], limit[ROW_GROUPS]; /* keys that a row sees at all, and in this block */
    __local int next[TOKENS], cursor[TOKENS];
    __local int odd; /* the value tile has a NaN or an infinity */
    __local float *tile = (__local float *)key_tile;

    const uint lid = get_local_id(0), key_group = lid / ROW_GROUPS, row_group = lid - key_group * ROW_GROUPS;
    const ulong unit = unit_first + get_group_id(0);
    __global const long *sequence = sequence_of(table, sequences, unit);
    const uint q_len = (uint)sequence[SEQUENCE_Q_LEN], kv_len = (uint)sequence[SEQUENCE_KV_LEN];
    const uint token_tiles = CEIL_DIV(q_len, TOKENS),
               local_unit = (uint)(unit - (ulong)sequence[SEQUENCE_UNIT]);
    const uint head_tile = local_unit / token_tiles, token = (local_unit - head_tile * token_tiles) * TOKENS;
    const uint kv_head = head_tile / HEAD_TILES, head_in_group = (head_tile - kv_head * HEAD_TILES) * HEADS;
    const uint head = kv_head * GROUP + head_in_group;
    const uint tokens = min((uint)TOKENS, q_len - token), heads = min((uint)HEADS, GROUP - head_in_group);
    const long position = (long)token + tokens - 1 + (long)kv_len - (long)q_len; /* of the last token */
    const uint seen_most = !causal ? kv_len : position < 0 ? 0 : (uint)position + 1;
    struct list list = {indices, counts, 0, list_heads, q_block, topk, seen_most, has_lists};
    list.first = (ulong)sequence[SEQUENCE_LIST_ROW] * list_heads;
    list.first += list_heads == 1 ? 0 : list_heads == kv_heads ? kv_head : head;
    __global const element *k_rows = k + sequence[SEQUENCE_K] + kv_head * k_head_stride;
    __global const element *v_rows = v + sequence[SEQUENCE_V] + kv_head * v_head_stride;

    for (uint e = lid; e < ROWS * DIM_PADDED; e += ITEMS) {
        uint row = e / DIM_PADDED, d = e - row * DIM_PADDED, t = row / HEADS, h = row - t * HEADS;
        float x = 0;
        if (t < tokens && h < heads && d < DIM)
            x = scale * LOAD(1)(q + sequence[SEQUENCE_Q] + (long)(token + t) * q_len_stride +
                                (long)(head + h) * q_head_stride + d);
        ((__local float *)q_tile)[d * ROWS + row] = x;
    }
    for (uint row = lid; row < ROWS; row += ITEMS) {
        uint t = row / HEADS, h = row - t * HEADS;
        long past = causal && t < tokens ? (long)(tokens - 1 - t) : 0;
        long count = (long)seen_most - past;
        if (causal && position - past < 0) count = 0;
        ((__local int *)seen)[row] = t < tokens && h < heads ? (int)count : 0;
    }
    for (uint t = lid; t < TOKENS; t += ITEMS) {
        cursor[t] = 0;
        next[t] = t < tokens ? list_entry(&list, token + t, 0) : NO_BLOCK;
    }

    lanes row_max = -INFINITY, row_sum = 0.0f, sums[ITEM_DIMS];
#pragma unroll
    for (uint d = 0; d < ITEM_DIMS; d++)
        sums[d] = 0.0f;
    barrier(CLK_LOCAL_MEM_FENCE);

    uint first = 0;
    int block = first_block(next);
    while (block != NO_BLOCK) { /* keys first .. first + KEYS - 1, which lie in the block */
        const uint block_first = (uint)block * BLOCK, count = kv_len - (block_first + first);
        const bool is_last = first + KEYS >= BLOCK || block_first + first + KEYS >= seen_most;
        const long key = (long)block_first + first;
        barrier(CLK_LOCAL_MEM_FENCE);
        load_keys(tile, k_rows + key * k_len_stride, k_len_stride, count, lid);
        if (lid == 0) odd = 0;
        for (uint row = lid; row < ROWS; row += ITEMS) {
            uint t = min(row / HEADS, (uint)TOKENS - 1);
            ((__local int *)limit)[row] = next[t] == block ? ((__local int *)seen)[row] - (int)key : 0;
        }
        barrier(CLK_LOCAL_MEM_FENCE);

        lanes s[ITEM_KEYS], most = -INFINITY;
        tile_logits(q_tile, key_tile, row_group, key_group, s);
#pragma unroll
        for (uint j = 0; j < ITEM_KEYS; j++) {
            s[j] =
                (lanes_int)((int)(j * KEY_GROUPS + key_group)) < limit[row_group] ? s[j] : (lanes)(-INFINITY);
            most = lanes_most(most, s[j]);
        }
        part[lid] = most;
        barrier(CLK_LOCAL_MEM_FENCE);

        most = row_max;
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
        float check = load_values(tile, v_rows + key * v_len_stride, v_len_stride, count, lid);
        if (check != 0.0f) odd = 1;
        for (uint t = lid; is_last && t < TOKENS; t += ITEMS)
            if (next[t] == block) {
                cursor[t]++;
                next[t] = list_entry(&list, token + t, cursor[t]);
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
    for (uint g = 0; g < KEY_GROUPS; g++)
        row_sum += part[g * ROW_GROUPS + row_group];
    /* Not "> 0": a NaN must reach the output. */
    lanes inverse = row_sum == (lanes)(0.0f) ? (lanes)(0.0f) : (lanes)(1.0f) / row_sum;
#pragma unroll
    for (uint d = 0; d < ITEM_DIMS; d++)
        q_tile[(d / 4 * KEY_GROUPS * 4 + key_group * 4 + d % 4) * ROW_GROUPS + row_group] = sums[d] * inverse;
    if (key_group == 0) p_tile[row_group] = row_max + log(row_sum);
    barrier(CLK_LOCAL_MEM_FENCE);

    for (uint e = lid; e < ROWS * DIM_V; e += ITEMS) {
        uint row = e / DIM_V, d = e - row * DIM_V, t = row / HEADS, h = row - t * HEADS;
        if (t < tokens && h < heads)
            STORE(((__local float *)q_tile)[d * ROWS + row], out + sequence[SEQUENCE_OUT] +
                                                                 (long)(token + t) * out_len_stride +
                                                                 (long)(head + h) * out_head_stride + d);
    }
    for (uint row = lid; has_lse && row < ROWS; row += ITEMS) {
        uint t = row / HEADS, h = row - t * HEADS;
        if (t < tokens && h < heads)
            lse[sequence[SEQUENCE_LSE] + (long)(token + t) * lse_len_stride +
                (long)(head + h) * lse_head_stride] = ((__local float *)p_tile)[row];
    }
}
