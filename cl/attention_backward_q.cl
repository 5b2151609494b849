/* SPDX-License-Identifier: MIT */
/* Gradient of the queries over block lists; mirrors cpu/attention_backward_ref.c.
 *
 *   P = exp(z - lse),   dx = P (dout . v_j - D) slope,   dq = scale * sum_j dx k_j
 *
 * A work-group owns a row tile as in attention_forward.cl: TOKENS neighbouring query rows times HEADS heads of
 * one key head, and walks over the union of the tokens' lists in ascending order, STREAM keys at a time.
 *
 *     dp [STREAM][LANE_ROWS] = v x dout^T        s [STREAM][LANE_ROWS] = k x q^T
 *     dq^T [DIM][LANE_ROWS] += k^T x dx          dx from s, dp, lse and D; 0 where a row does not see the key
 *
 * Reads for each tile: LANE_ROWS x (DIM + DIM_V + 2) elements of q, dout, lse and D, and STREAM x (DIM + DIM_V)
 * of k and v for every STREAM keys of the union; writes LANE_ROWS x DIM. Invariant after each step: dq^T holds
 * the sum over the keys so far.
 *
 * Macros: DIM, DIM_V 1..256; LANE_ROWS >= TOKENS * HEADS; STREAM a power of two that divides BLOCK;
 * ITEM_COLUMNS dimensions an item, a multiple of 4, STREAM_GROUPS * ITEM_COLUMNS >= DIM; GROUP query heads a
 * key head, HEADS of them in a tile; LOAD_K, LOAD_V elements a load, divide DIM and DIM_V; PAD floats after a
 * row of a tile, a multiple of 4; DOUT_DTYPE, DQ_DTYPE; SOFTCAP, BIAS, MASK 0 or 1; STARTS 1: blocks begin
 * where the caller says. */

#include "attention_backward.cl"

#define HEAD_TILES CEIL_DIV(GROUP, HEADS) /* of a key head */
#define DIM_PADDED ROUND_UP(DIM, 4)
#define DIM_V_PADDED ROUND_UP(DIM_V, 4)
#define K_PITCH (DIM_PADDED + PAD)
#define V_PITCH (DIM_V_PADDED + PAD)
#define PITCH_MAX (K_PITCH > V_PITCH ? K_PITCH : V_PITCH)
#define SUM_COLUMNS (STREAM_GROUPS * ITEM_COLUMNS)
#define Q_COLUMNS (DIM_PADDED > SUM_COLUMNS ? DIM_PADDED : SUM_COLUMNS)
#define NO_BLOCK 0x7fffffff

/* Loads `count` rows, the rest of STREAM rows becomes zero, as do columns past the dimension. Returns whether
 * an element is infinite or NaN. */
#define DEFINE_LOAD_ROWS(NAME, WIDTH, COLUMNS, COLUMNS_PADDED, PITCH)                                          \
    inline int NAME(__local float *tile, __global const element *rows, long stride, uint count, uint lid)      \
    {                                                                                                          \
        const uint loads = CEIL_DIV(COLUMNS_PADDED, WIDTH);                                                    \
        BITS(WIDTH) check = 0;                                                                                 \
        for (uint e = lid; e < STREAM * loads; e += ITEMS) {                                                   \
            uint row = e / loads, column = (e - row * loads) * WIDTH;                                          \
            VECTOR(WIDTH) x = 0.0f;                                                                            \
            if (row < count && column < COLUMNS) x = LOAD(WIDTH)(rows + (long)row * stride + column);          \
            PUT(WIDTH)(x, tile + row * PITCH + column);                                                        \
            check |= ODD_BITS(WIDTH, x);                                                                       \
        }                                                                                                      \
        return IS_ODD(check);                                                                                  \
    }
DEFINE_LOAD_ROWS(load_keys, LOAD_K, DIM, DIM_PADDED, K_PITCH)
DEFINE_LOAD_ROWS(load_values, LOAD_V, DIM_V, DIM_V_PADDED, V_PITCH)

/* The lists of a tile's tokens. */
struct list {
    __global const int *indices, *counts;
    ulong first; /* list of the sequence's first token */
    uint heads, q_block, topk, has_lists, blocks, kv_len;
    ulong seen_most; /* keys that some token sees */
    __global const long *starts; /* of the sequence's blocks; with STARTS */
    long k_row;
};

/* First key of a block, counted from the sequence's first, and the key after its last one. */
inline uint block_first_key(const struct list *list, int block)
{
#if STARTS
    return (uint)(list->starts[block] - list->k_row);
#else
    return (uint)block * BLOCK;
#endif
}

inline uint block_end_key(const struct list *list, int block)
{
    return (uint)block + 1 < list->blocks ? block_first_key(list, block + 1) : list->kv_len;
}

/* Entry `at` of a token's list; NO_BLOCK past its end or past the keys. Lists ascend. */
inline int list_entry(const struct list *list, uint token, int at)
{
    int block = at;
    if (list->has_lists) {
        ulong row = list->first + (ulong)(token / list->q_block) * list->heads;
        block = at < min(list->counts[row], (int)list->topk) ? list->indices[row * list->topk + at] : -1;
    }
    bool exists = block >= 0 && (uint)block < list->blocks;
    return exists && block_first_key(list, block) < list->seen_most ? block : NO_BLOCK;
}

/* The least of the tokens' next blocks. */
inline int first_block(__local const int *next)
{
    int block = NO_BLOCK;
    for (uint t = 0; t < TOKENS; t++)
        block = min(block, next[t]);
    return block;
}

#if MASK
/* Coordinate `axis` of a key; of keys past the last one -1, which is in no window. */
inline int key_coordinate(__global const int *coordinate, ulong row, bool exists, uint axis)
{
    return exists ? coordinate[row * 3 + axis] : -1;
}
#endif

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
attention_backward_q(__global const element *restrict q, __global const element *restrict k,
                     __global const element *restrict v, __global const ELEMENT_OF(DOUT_DTYPE) *restrict dout,
                     __global const float *restrict lse, __global const float *restrict delta,
                     __global ELEMENT_OF(DQ_DTYPE) *restrict dq, __global const int *restrict indices,
                     __global const int *restrict counts, __global const long *restrict table,
                     __global const float *restrict bias, __global const uchar *restrict cut,
                     __global const int *restrict window_of, __global const int *restrict coordinate,
                     __global const long *restrict block_starts, uint sequences, ulong unit_first, float scale,
                     float softcap, long window, int causal, uint accumulate, uint has_lists, uint list_heads,
                     uint q_block, uint topk, uint kv_heads)
{
    __local lanes q_tile[Q_COLUMNS * LANE_GROUPS]; /* q^T, at the end dq^T */
    __local lanes dout_tile[DIM_V_PADDED * LANE_GROUPS];
    __local float4 stream_tile[STREAM * PITCH_MAX / 4]; /* v, then k */
    __local lanes dx_tile[STREAM * LANE_GROUPS];
    __local lanes row_lse[LANE_GROUPS], row_delta[LANE_GROUPS], row_bias[LANE_GROUPS];
    __local lanes_int seen_first[LANE_GROUPS], seen_end[LANE_GROUPS]; /* keys that a row sees */
    __local lanes_int from[LANE_GROUPS], end[LANE_GROUPS];            /* likewise of the streamed ones */
    __local int next[TOKENS], cursor[TOKENS];
    __local int odd; /* the keys have a NaN or an infinity */
#if MASK
    __local lanes_int row_cut[LANE_GROUPS], row_window[6 * LANE_GROUPS];
#endif
    __local float *tile = (__local float *)stream_tile;

    const uint lid = get_local_id(0), stream_group = lid / LANE_GROUPS;
    const uint lane_group = lid - stream_group * LANE_GROUPS;
    const ulong unit = unit_first + get_group_id(0);
    __global const long *sequence = sequence_by(table, sequences, FIELD_UNIT_Q, unit);
    const uint q_len = (uint)sequence[FIELD_Q_LEN], kv_len = (uint)sequence[FIELD_KV_LEN];
    const uint token_tiles = CEIL_DIV(q_len, TOKENS);
    const uint local_unit = (uint)(unit - (ulong)sequence[FIELD_UNIT_Q]);
    const uint head_tile = local_unit / token_tiles, token = (local_unit - head_tile * token_tiles) * TOKENS;
    const uint kv_head = head_tile / HEAD_TILES, head_in_group = (head_tile - kv_head * HEAD_TILES) * HEADS;
    const uint head = kv_head * GROUP + head_in_group, q_heads = kv_heads * GROUP;
    const uint tokens = min((uint)TOKENS, q_len - token), heads = min((uint)HEADS, GROUP - head_in_group);
    const long shift = (long)kv_len - (long)q_len; /* position of query row 0 */
    const long last = causal ? (long)token + tokens + shift : (long)kv_len;
    struct list list = {.indices = indices,
                        .counts = counts,
                        .heads = list_heads,
                        .q_block = q_block,
                        .topk = topk,
                        .has_lists = has_lists,
                        .blocks = (uint)sequence[FIELD_BLOCKS],
                        .kv_len = kv_len,
                        .seen_most = last < 0 ? 0 : (ulong)last,
                        .starts = block_starts,
                        .k_row = sequence[FIELD_K_ROW]};
    if (STARTS) list.starts += sequence[FIELD_START];
    list.first = (ulong)sequence[FIELD_LIST_ROW] * list_heads;
    list.first += list_heads == 1 ? 0 : list_heads == kv_heads ? kv_head : head;
    __global const element *k_rows = k + sequence[TENSOR_K] + (long)kv_head * HEAD_STRIDE(table, TENSOR_K);
    __global const element *v_rows = v + sequence[TENSOR_V] + (long)kv_head * HEAD_STRIDE(table, TENSOR_V);

    for (uint e = lid; e < LANE_ROWS * DIM_PADDED; e += ITEMS) {
        uint row = e / DIM_PADDED, d = e - row * DIM_PADDED, t = row / HEADS, h = row - t * HEADS;
        float x = 0;
        if (t < tokens && h < heads && d < DIM)
            x = LOAD(1)(q + sequence[TENSOR_Q] + (long)(token + t) * LEN_STRIDE(table, TENSOR_Q) +
                        (long)(head + h) * HEAD_STRIDE(table, TENSOR_Q) + d);
        ((__local float *)q_tile)[d * LANE_ROWS + row] = x;
    }
    for (uint e = lid; e < LANE_ROWS * DIM_V_PADDED; e += ITEMS) {
        uint row = e / DIM_V_PADDED, d = e - row * DIM_V_PADDED, t = row / HEADS, h = row - t * HEADS;
        float x = 0;
        if (t < tokens && h < heads && d < DIM_V)
            x = LOAD_OF(DOUT_DTYPE, 1)(dout + sequence[TENSOR_DOUT] +
                                       (long)(token + t) * LEN_STRIDE(table, TENSOR_DOUT) +
                                       (long)(head + h) * HEAD_STRIDE(table, TENSOR_DOUT) + d);
        ((__local float *)dout_tile)[d * LANE_ROWS + row] = x;
    }
    for (uint row = lid; row < LANE_ROWS; row += ITEMS) {
        uint t = row / HEADS, h = row - t * HEADS;
        float z = -INFINITY, D = 0;
        long first = 0, visible = 0;
        if (t < tokens && h < heads) {
            const long position = (long)(token + t) + shift;
            z = lse[sequence[TENSOR_LSE] + (long)(token + t) * LEN_STRIDE(table, TENSOR_LSE) +
                    (long)(head + h) * HEAD_STRIDE(table, TENSOR_LSE)];
            D = delta[(ulong)sequence[FIELD_DELTA] + (ulong)(token + t) * q_heads + head + h];
            visible = causal ? position + 1 : window ? min((long)kv_len, position + window) : (long)kv_len;
            first = window ? max(position - window + 1, 0L) : 0L;
        }
        ((__local float *)row_lse)[row] = z == -INFINITY ? INFINITY : z; /* so that P = 0 in an empty row */
        ((__local float *)row_delta)[row] = D;
        ((__local int *)seen_end)[row] = (int)max(visible, 0L);
        ((__local int *)seen_first)[row] = (int)min(first, (long)kv_len);
#if MASK
        for (uint a = 0; a < 6; a++)
            ((__local int *)row_window)[a * LANE_ROWS + row] =
                t < tokens ? window_of[((ulong)sequence[FIELD_Q_ROW] + token + t) * 6 + a] : 0;
#endif
    }
    for (uint t = lid; t < TOKENS; t += ITEMS) {
        cursor[t] = 0;
        next[t] = t < tokens ? list_entry(&list, token + t, 0) : NO_BLOCK;
    }
    lanes sums[ITEM_COLUMNS];
#pragma unroll
    for (uint d = 0; d < ITEM_COLUMNS; d++)
        sums[d] = 0.0f;
    barrier(CLK_LOCAL_MEM_FENCE);

    uint first = 0;
    int block = first_block(next);
    while (block != NO_BLOCK) { /* keys first .. first + STREAM - 1 of the block */
        const uint key = block_first_key(&list, block) + first, count = block_end_key(&list, block) - key;
        const bool is_last = count <= STREAM || (ulong)key + STREAM >= list.seen_most;
        lanes s[ITEM_STREAM], dp[ITEM_STREAM];
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid == 0) odd = 0;
        load_values(tile, v_rows + (long)key * LEN_STRIDE(table, TENSOR_V), LEN_STRIDE(table, TENSOR_V), count,
                    lid);
        for (uint row = lid; row < LANE_ROWS; row += ITEMS) {
            uint t = min(row / HEADS, (uint)TOKENS - 1), h = row - row / HEADS * HEADS;
            bool listed = next[t] == block;
            ((__local int *)from)[row] = ((__local int *)seen_first)[row] - (int)key;
            ((__local int *)end)[row] =
                listed ? min(((__local int *)seen_end)[row] - (int)key, (int)min(count, (uint)STREAM)) : 0;
#if BIAS
            ((__local float *)row_bias)[row] =
                h < heads ? bias[sequence[TENSOR_BIAS] + (long)block * LEN_STRIDE(table, TENSOR_BIAS) +
                                 (long)(head + h) * HEAD_STRIDE(table, TENSOR_BIAS)]
                          : 0.0f;
#endif
#if MASK
            ulong list_row = (ulong)sequence[FIELD_LIST_ROW] + (token + t) / q_block;
            ((__local int *)row_cut)[row] = listed && cut[list_row * topk + cursor[t]] ? -1 : 0;
#endif
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        tile_products(dout_tile, stream_tile, DIM_V_PADDED, V_PITCH, lane_group, stream_group, dp);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (load_keys(tile, k_rows + (long)key * LEN_STRIDE(table, TENSOR_K), LEN_STRIDE(table, TENSOR_K),
                      count, lid))
            odd = 1;
        for (uint t = lid; is_last && t < TOKENS; t += ITEMS)
            if (next[t] == block) {
                cursor[t]++;
                next[t] = list_entry(&list, token + t, cursor[t]);
            }
        barrier(CLK_LOCAL_MEM_FENCE);
        tile_products(q_tile, stream_tile, DIM_PADDED, K_PITCH, lane_group, stream_group, s);
#pragma unroll
        for (uint j = 0; j < ITEM_STREAM; j++) {
            const lanes_int at = (lanes_int)((int)(j * STREAM_GROUPS + stream_group));
            lanes z = scale * s[j], slope = 1.0f;
            lanes_int visible = (at < end[lane_group]) & (at >= from[lane_group]);
#if SOFTCAP
            lanes bent = tanh(z / softcap);
            z = softcap * bent;
            slope = 1.0f - bent * bent;
#endif
#if BIAS
            z += row_bias[lane_group];
#endif
#if MASK
            lanes_int inside = visible;
            for (uint a = 0; a < 3; a++) {
                const uint number = key + j * STREAM_GROUPS + stream_group;
                const int x =
                    key_coordinate(coordinate, (ulong)sequence[FIELD_K_ROW] + number, number < kv_len, a);
                inside &= (x >= row_window[2 * a * LANE_GROUPS + lane_group]) &
                          (x < row_window[(2 * a + 1) * LANE_GROUPS + lane_group]);
            }
            visible &= inside | ~row_cut[lane_group];
#endif
            lanes dx = exp(z - row_lse[lane_group]) * (dp[j] - row_delta[lane_group]) * slope;
            dx_tile[(j * STREAM_GROUPS + stream_group) * LANE_GROUPS + lane_group] =
                visible ? scale * dx : (lanes)(0.0f);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        tile_add(sums, ITEM_COLUMNS, dx_tile, stream_tile, DIM_PADDED, K_PITCH, lane_group, stream_group,
                 odd != 0);
        first = is_last ? 0 : first + STREAM;
        if (is_last) block = first_block(next);
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    tile_put(sums, ITEM_COLUMNS, q_tile, lane_group, stream_group);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint e = lid; e < LANE_ROWS * DIM; e += ITEMS) {
        uint row = e / DIM, d = e - row * DIM, t = row / HEADS, h = row - t * HEADS;
        if (t < tokens && h < heads) {
            __global ELEMENT_OF(DQ_DTYPE) *place = dq + sequence[TENSOR_DQ] +
                                                   (long)(token + t) * LEN_STRIDE(table, TENSOR_DQ) +
                                                   (long)(head + h) * HEAD_STRIDE(table, TENSOR_DQ) + d;
            float x = ((__local float *)q_tile)[d * LANE_ROWS + row];
            STORE_OF(DQ_DTYPE)(accumulate ? LOAD_OF(DQ_DTYPE, 1)(place) + x : x, place);
        }
    }
}
