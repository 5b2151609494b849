/* SPDX-License-Identifier: MIT */
/* Gradients of keys and values over block lists; mirrors cpu/attention_backward_ref.c.
 *
 *   P = exp(z - lse),   dS = P (dout . v_j - D),   dx = dS slope
 *   dv_j = sum P dout,   dk_j = scale * sum dx q      over the rows that list the block, and the heads
 *
 * A work-group owns LANE_ROWS keys of a block of one key head. The (query row, head) pairs whose lists name the
 * block pass by in order, STREAM at a time:
 *
 *     s [STREAM][LANE_ROWS] = q x k^T            dp [STREAM][LANE_ROWS] = dout x v^T
 *     dk^T [DIM][LANE_ROWS] += q^T x dx          dv^T [DIM_V][LANE_ROWS] += dout^T x P
 *
 * With COMPENSATION the block also receives a share of what rows that see but do not list it give to the
 * nearest block on its left that they list: the group then walks over the blocks on the left as well, each with
 * its keys and its rows, of which those pass that list nothing between. That is as much work as dense
 * attention's.
 *
 * A bin holds the rows of one block; those of many rows are cut into pieces (attention_backward_bins.cl), whose
 * sums attention_backward_merge adds in order.
 *
 * Reads for each unit: LANE_ROWS x (DIM + DIM_V) elements of k and v, and for each pair DIM + DIM_V of q and
 * dout, lse and D; writes LANE_ROWS x (DIM + DIM_V). Invariant: dk^T and dv^T hold the sum over the pairs so
 * far.
 *
 * Macros: DIM, DIM_V 1..256; BLOCK, and LANE_ROWS keys of a tile, which divide BLOCK; STREAM pairs at a time;
 * ITEM_COLUMNS, ITEM_COLUMNS_V dimensions an item, multiples of 4; GROUP query heads a key head; LIST_GROUP of
 * them with lists of their own (1 or GROUP); LIST_KV key heads that share a list; LOAD_K, LOAD_V elements a
 * load; PAD floats after a row of a tile; DOUT_DTYPE, DK_DTYPE, DV_DTYPE; SOFTCAP, BIAS, DBIAS, MASK 0 or 1;
 * COMPENSATION 0 or 1, not with STARTS; STARTS 1: blocks begin where the caller says, each is cut into tiles of
 * LANE_ROWS keys, and no bin is cut. */

#include "attention_backward.cl"
#include "attention_backward_bins.cl"

#define DIM_PADDED ROUND_UP(DIM, 4)
#define DIM_V_PADDED ROUND_UP(DIM_V, 4)
#define Q_PITCH (DIM_PADDED + PAD)
#define DOUT_PITCH (DIM_V_PADDED + PAD)
#define K_SUMS (STREAM_GROUPS * ITEM_COLUMNS)
#define V_SUMS (STREAM_GROUPS * ITEM_COLUMNS_V)
#define K_COLUMNS (DIM_PADDED > K_SUMS ? DIM_PADDED : K_SUMS)
#define V_COLUMNS (DIM_V_PADDED > V_SUMS ? DIM_V_PADDED : V_SUMS)
#define TILES (BLOCK / LANE_ROWS)
#define ENTRY_HEADS (GROUP / LIST_GROUP) /* query heads of an entry */
#define PARTIAL (BLOCK * (DIM + DIM_V))

#if COMPENSATION
/* Does a list have a block of first .. end - 1? */
inline bool lists_any(__global const int *list, uint topk, uint first, uint end)
{
    bool has = false;
    for (uint t = 0; t < topk; t++)
        has |= list[t] >= (int)first && list[t] < (int)end;
    return has;
}
#endif

inline void store_key(float x, __global ELEMENT_OF(DK_DTYPE) * to, uint accumulate)
{
    STORE_OF(DK_DTYPE)(accumulate ? LOAD_OF(DK_DTYPE, 1)(to) + x : x, to);
}

inline void store_value(float x, __global ELEMENT_OF(DV_DTYPE) * to, uint accumulate)
{
    STORE_OF(DV_DTYPE)(accumulate ? LOAD_OF(DV_DTYPE, 1)(to) + x : x, to);
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
attention_backward_kv(__global const element *restrict q, __global const element *restrict k,
                      __global const element *restrict v, __global const ELEMENT_OF(DOUT_DTYPE) *restrict dout,
                      __global const float *restrict lse, __global const float *restrict delta,
                      __global ELEMENT_OF(DK_DTYPE) *restrict dk, __global ELEMENT_OF(DV_DTYPE) *restrict dv,
                      __global float *restrict partial, __global const uint *restrict starts,
                      __global const uint *restrict entries, __global const long *restrict table,
                      __global const float *restrict bias, __global float *restrict bias_part,
                      __global const int *restrict indices, __global const uchar *restrict cut,
                      __global const int *restrict window_of, __global const int *restrict coordinate,
                      __global const long *restrict bin_table, uint sequences, ulong unit_first,
                      ulong bin_count, ulong chunks, ulong virtual_rows, ulong segment, float scale,
                      float softcap, long window, int causal, uint accumulate, uint has_lists, uint has_results,
                      uint q_block, uint topk, uint kv_heads, uint list_heads, float compensation)
{
    __local lanes k_tile[K_COLUMNS * LANE_GROUPS]; /* k^T, at the end dk^T */
    __local lanes v_tile[V_COLUMNS * LANE_GROUPS]; /* v^T, at the end dv^T */
    __local float4 q_tile[STREAM * Q_PITCH / 4], dout_tile[STREAM * DOUT_PITCH / 4];
    __local lanes p_tile[STREAM * LANE_GROUPS], dx_tile[STREAM * LANE_GROUPS];
    __local long q_first[STREAM], dout_first[STREAM]; /* elements; -1: no pair */
    __local float pair_lse[STREAM], pair_delta[STREAM], pair_bias[STREAM];
    __local int pair_from[STREAM], pair_end[STREAM]; /* keys of the tile that the pair's row sees */
    __local int odd;                                 /* the rows have a NaN or an infinity */
#if DBIAS
    __local float ds_part[STREAM * LANE_GROUPS], head_bias[GROUP];
    __local int pair_head[STREAM];
#endif
#if MASK
    __local lanes_int key_place[3 * LANE_GROUPS];
    __local int pair_cut[STREAM], pair_window[6 * STREAM];
#endif

    const uint lid = get_local_id(0), stream_group = lid / LANE_GROUPS;
    const uint lane_group = lid - stream_group * LANE_GROUPS;
    const ulong unit = unit_first + get_group_id(0);
    struct bins bins = {starts, bin_count, chunks, virtual_rows, segment, has_lists};
#if STARTS
    const ulong tiles = unit / LIST_KV, bin = bin_of_tile(bin_table, bin_count, tiles);
    const uint shared_head = (uint)(unit - tiles * LIST_KV), tile = 0;
    const struct piece piece = piece_of(&bins, bin);
#else
    const ulong tiles = unit / TILES, piece_unit = tiles / LIST_KV;
    const uint tile = (uint)(unit - tiles * TILES), shared_head = (uint)(tiles - piece_unit * LIST_KV);
    const struct piece piece = piece_of(&bins, piece_unit);
#endif
    const struct place place = place_of(table, sequences, piece.bin, shared_head);
    __global const long *sequence = place.sequence;
    const uint q_len = (uint)sequence[FIELD_Q_LEN], kv_len = (uint)sequence[FIELD_KV_LEN];
    const uint q_heads = kv_heads * GROUP, block = place.block, kv_head = place.kv_head;
#if STARTS
    const uint key = BIN_KEY(bin_table, bin) + (uint)(tiles - (ulong)BIN_TILE(bin_table, bin)) * LANE_ROWS,
               key_end = BIN_END(bin_table, bin);
#else
    const uint key = block * BLOCK + tile * LANE_ROWS, key_end = kv_len;
#endif
    const uint keys = key < key_end ? min((uint)LANE_ROWS, key_end - key) : 0;
    const long shift = (long)kv_len - (long)q_len; /* position of query row 0 */
    const uint dense_first = causal ? (uint)clamp((long)block * BLOCK - shift, 0L, (long)q_len) : 0;
    const uint entry_pairs = q_block * ENTRY_HEADS;

    __global const element *k_rows = k + sequence[TENSOR_K] + (long)kv_head * HEAD_STRIDE(table, TENSOR_K);
    __global const element *v_rows = v + sequence[TENSOR_V] + (long)kv_head * HEAD_STRIDE(table, TENSOR_V);
#if MASK
    for (uint row = lid; row < LANE_ROWS; row += ITEMS)
        for (uint a = 0; a < 3; a++)
            ((__local int *)key_place)[a * LANE_ROWS + row] =
                row < keys ? coordinate[((ulong)sequence[FIELD_K_ROW] + key + row) * 3 + a] : -1;
#endif
#if DBIAS
    for (uint h = lid; h < GROUP; h += ITEMS)
        head_bias[h] = 0;
#endif
    lanes dk_sums[ITEM_COLUMNS], dv_sums[ITEM_COLUMNS_V];
#pragma unroll
    for (uint d = 0; d < ITEM_COLUMNS; d++)
        dk_sums[d] = 0.0f;
#pragma unroll
    for (uint d = 0; d < ITEM_COLUMNS_V; d++)
        dv_sums[d] = 0.0f;

#if COMPENSATION
    for (uint distance = 0; distance <= block; distance++)
#else
    const uint distance = 0;
#endif
    { /* keys from_key ... of the block `distance` on the left, and the rows that list it */
        const uint from_key = key - distance * BLOCK;
        const uint from_keys = distance ? LANE_ROWS : keys;
        ulong first = piece.first, used = has_lists ? piece.entries : (ulong)(q_len - dense_first);
        ulong number = piece.number, pieces = keys ? piece.pieces : 0;
        if (distance) { /* the pieces share the blocks */
            pieces = pieces && distance % pieces == number;
            number = 0;
            first = bin_first(&bins, piece.bin - distance);
            used = bin_first(&bins, piece.bin - distance + 1) - first;
        }
        /* Entries of the piece; without lists they are the query rows from the first one that sees the block.
         */
        const ulong pair_first = pieces ? used * number / pieces * entry_pairs : 0;
        const ulong pair_count = pieces ? used * (number + 1) / pieces * entry_pairs : 0;
        for (uint e = lid; e < LANE_ROWS * DIM_PADDED; e += ITEMS) {
            uint row = e / DIM_PADDED, d = e - row * DIM_PADDED;
            float x = 0;
            if (row < from_keys && d < DIM)
                x = LOAD(1)(k_rows + (long)(from_key + row) * LEN_STRIDE(table, TENSOR_K) + d);
            ((__local float *)k_tile)[d * LANE_ROWS + row] = x;
        }
        for (uint e = lid; e < LANE_ROWS * DIM_V_PADDED; e += ITEMS) {
            uint row = e / DIM_V_PADDED, d = e - row * DIM_V_PADDED;
            float x = 0;
            if (row < from_keys && d < DIM_V)
                x = LOAD(1)(v_rows + (long)(from_key + row) * LEN_STRIDE(table, TENSOR_V) + d);
            ((__local float *)v_tile)[d * LANE_ROWS + row] = x;
        }
        for (ulong pair = pair_first; pair < pair_count; pair += STREAM) {
            barrier(CLK_LOCAL_MEM_FENCE);
            if (lid == 0) odd = 0;
            for (uint n = lid; n < STREAM; n += ITEMS) {
                const ulong entry = (pair + n) / entry_pairs;
                const uint rest = (uint)(pair + n - entry * entry_pairs), in_block = rest / ENTRY_HEADS;
                uint list_row = 0, i = q_len, in_group = 0;
                if (pair + n < pair_count) {
                    const uint value = has_lists ? entries[first + entry] : dense_first + (uint)entry;
                    list_row = has_lists ? value / LIST_GROUP : value;
                    in_group = has_lists ? value - list_row * LIST_GROUP : 0;
                    i = list_row * q_block + in_block;
                }
                const uint in_entry = rest - in_block * ENTRY_HEADS;
                const uint head = kv_head * GROUP + (LIST_GROUP > 1 ? in_group : in_entry);
                const long position = (long)i + shift;
                float z = -INFINITY;
                long seen_end = 0, seen_first = 0;
                if (i < q_len) {
                    z = lse[sequence[TENSOR_LSE] + (long)i * LEN_STRIDE(table, TENSOR_LSE) +
                            (long)head * HEAD_STRIDE(table, TENSOR_LSE)];
                    seen_end = causal   ? position + 1
                               : window ? min((long)kv_len, position + window)
                                        : (long)kv_len;
                    seen_first = window ? max(position - window + 1, 0L) : 0L;
                }
                bool is_seen =
                    z != -INFINITY && seen_end > (long)key && seen_first < (long)(from_key + LANE_ROWS);
#if COMPENSATION
                const uint list_head = list_heads == 1 ? 0 : LIST_GROUP > 1 ? head : kv_head;
                const ulong own_list = ((ulong)sequence[FIELD_LIST_ROW] + list_row) * list_heads + list_head;
                if (distance && is_seen)
                    is_seen = !lists_any(indices + own_list * topk, topk, block - distance + 1, block + 1);
#endif
                q_first[n] = -1;
                if (is_seen) {
                    q_first[n] = sequence[TENSOR_Q] + (long)i * LEN_STRIDE(table, TENSOR_Q) +
                                 (long)head * HEAD_STRIDE(table, TENSOR_Q);
                    dout_first[n] = sequence[TENSOR_DOUT] + (long)i * LEN_STRIDE(table, TENSOR_DOUT) +
                                    (long)head * HEAD_STRIDE(table, TENSOR_DOUT);
                }
                pair_lse[n] = is_seen ? z : INFINITY;
                pair_delta[n] =
                    is_seen ? delta[(ulong)sequence[FIELD_DELTA] + (ulong)i * q_heads + head] : 0.0f;
                pair_end[n] = is_seen ? (int)min(seen_end - (long)key, (long)keys) : 0;
                pair_from[n] = is_seen ? (int)max(seen_first - (long)from_key, 0L) : 0;
                pair_bias[n] = 0;
#if BIAS
                if (is_seen)
                    pair_bias[n] =
                        bias[sequence[TENSOR_BIAS] + (long)(block - distance) * LEN_STRIDE(table, TENSOR_BIAS) +
                             (long)head * HEAD_STRIDE(table, TENSOR_BIAS)];
#endif
#if DBIAS
                pair_head[n] = (int)(head - kv_head * GROUP);
#endif
#if MASK
                pair_cut[n] = 0;
                for (uint a = 0; a < 6; a++)
                    pair_window[n * 6 + a] =
                        is_seen ? window_of[((ulong)sequence[FIELD_Q_ROW] + i) * 6 + a] : 0;
                const ulong list = ((ulong)sequence[FIELD_LIST_ROW] + list_row) * topk;
                for (uint t = 0; is_seen && t < topk; t++)
                    if (indices[list + t] == (int)block) pair_cut[n] = cut[list + t];
#endif
            }
            barrier(CLK_LOCAL_MEM_FENCE);
#if COMPENSATION
            bool has_pair = false;
            for (uint n = 0; n < STREAM; n++)
                has_pair |= q_first[n] >= 0;
            if (!has_pair) continue; /* all items do */
#endif
            BITS(LOAD_K) check_q = 0;
            BITS(LOAD_V) check_dout = 0;
            for (uint e = lid; e < STREAM * CEIL_DIV(DIM_PADDED, LOAD_K); e += ITEMS) {
                uint row = e / CEIL_DIV(DIM_PADDED, LOAD_K),
                     d = (e - row * CEIL_DIV(DIM_PADDED, LOAD_K)) * LOAD_K;
                VECTOR(LOAD_K) x = 0.0f;
                if (q_first[row] >= 0 && d < DIM) x = LOAD(LOAD_K)(q + q_first[row] + d);
                PUT(LOAD_K)(x, (__local float *)q_tile + row * Q_PITCH + d);
                check_q |= ODD_BITS(LOAD_K, x);
            }
            for (uint e = lid; e < STREAM * CEIL_DIV(DIM_V_PADDED, LOAD_V); e += ITEMS) {
                uint row = e / CEIL_DIV(DIM_V_PADDED, LOAD_V),
                     d = (e - row * CEIL_DIV(DIM_V_PADDED, LOAD_V)) * LOAD_V;
                VECTOR(LOAD_V) x = 0.0f;
                if (q_first[row] >= 0 && d < DIM_V) x = LOAD_OF(DOUT_DTYPE, LOAD_V)(dout + dout_first[row] + d);
                PUT(LOAD_V)(x, (__local float *)dout_tile + row * DOUT_PITCH + d);
                check_dout |= ODD_BITS(LOAD_V, x);
            }
            if (IS_ODD(check_q) || IS_ODD(check_dout)) odd = 1;
            barrier(CLK_LOCAL_MEM_FENCE);

            lanes s[ITEM_STREAM], dp[ITEM_STREAM];
            tile_products(k_tile, q_tile, DIM_PADDED, Q_PITCH, lane_group, stream_group, s);
            tile_products(v_tile, dout_tile, DIM_V_PADDED, DOUT_PITCH, lane_group, stream_group, dp);
#pragma unroll
            for (uint j = 0; j < ITEM_STREAM; j++) {
                const uint n = j * STREAM_GROUPS + stream_group;
                const lanes_int at = (lanes_int)((int)(lane_group * LANES)) + LANE_NUMBER;
                lanes z = scale * s[j], slope = 1.0f;
                lanes_int visible = (at < (lanes_int)(pair_end[n])) & (at >= (lanes_int)(pair_from[n]));
#if SOFTCAP
                lanes bent = tanh(z / softcap);
                z = softcap * bent;
                slope = 1.0f - bent * bent;
#endif
                z += pair_bias[n];
#if MASK
                lanes_int inside = visible;
                for (uint a = 0; a < 3; a++)
                    inside &=
                        (key_place[a * LANE_GROUPS + lane_group] >= (lanes_int)(pair_window[n * 6 + 2 * a])) &
                        (key_place[a * LANE_GROUPS + lane_group] < (lanes_int)(pair_window[n * 6 + 2 * a + 1]));
                if (pair_cut[n]) visible = inside;
#endif
                lanes p = visible ? exp(z - pair_lse[n]) : (lanes)(0.0f);
                lanes ds = visible ? p * (dp[j] - pair_delta[n]) : (lanes)(0.0f);
#if DBIAS
                ds_part[n * LANE_GROUPS + lane_group] = distance ? 0.0f : lanes_sum(ds);
#endif
#if COMPENSATION
                p *= distance ? compensation : 1.0f;
                ds *= distance ? compensation : 1.0f;
#endif
                p_tile[n * LANE_GROUPS + lane_group] = p;
                dx_tile[n * LANE_GROUPS + lane_group] = scale * ds * slope;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            tile_add(dk_sums, ITEM_COLUMNS, dx_tile, q_tile, DIM_PADDED, Q_PITCH, lane_group, stream_group,
                     odd != 0);
            tile_add(dv_sums, ITEM_COLUMNS_V, p_tile, dout_tile, DIM_V_PADDED, DOUT_PITCH, lane_group,
                     stream_group, odd != 0);
#if DBIAS
            for (uint h = lid; h < GROUP; h += ITEMS) {
                float sum = 0;
                for (uint n = 0; n < STREAM; n++)
                    for (uint g = 0; pair_head[n] == (int)h && g < LANE_GROUPS; g++)
                        sum += ds_part[n * LANE_GROUPS + g];
                head_bias[h] += sum;
            }
            /* PoCL 3.1 lets every item of a group of one head add, where COMPENSATION skips pairs, without it. */
            barrier(CLK_LOCAL_MEM_FENCE);
#endif
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    tile_put(dk_sums, ITEM_COLUMNS, k_tile, lane_group, stream_group);
    tile_put(dv_sums, ITEM_COLUMNS_V, v_tile, lane_group, stream_group);
    barrier(CLK_LOCAL_MEM_FENCE);
    const bool is_whole = piece.pieces == 1;
    const uint rows = piece.pieces && has_results ? keys : 0;
    __global float *part = partial + (piece.slot * LIST_KV + shared_head) * PARTIAL;
    for (uint e = lid; e < rows * DIM; e += ITEMS) {
        const uint row = e / DIM, d = e - row * DIM;
        const float x = ((__local float *)k_tile)[d * LANE_ROWS + row];
        if (is_whole)
            store_key(x,
                      dk + sequence[TENSOR_DK] + (long)(key + row) * LEN_STRIDE(table, TENSOR_DK) +
                          (long)kv_head * HEAD_STRIDE(table, TENSOR_DK) + d,
                      accumulate);
        else
            part[(tile * LANE_ROWS + row) * DIM + d] = x;
    }
    for (uint e = lid; e < rows * DIM_V; e += ITEMS) {
        const uint row = e / DIM_V, d = e - row * DIM_V;
        const float x = ((__local float *)v_tile)[d * LANE_ROWS + row];
        if (is_whole)
            store_value(x,
                        dv + sequence[TENSOR_DV] + (long)(key + row) * LEN_STRIDE(table, TENSOR_DV) +
                            (long)kv_head * HEAD_STRIDE(table, TENSOR_DV) + d,
                        accumulate);
        else
            part[BLOCK * DIM + (tile * LANE_ROWS + row) * DIM_V + d] = x;
    }
#if DBIAS
    for (uint h = lid; h < GROUP; h += ITEMS)
        bias_part[unit * GROUP + h] = head_bias[h];
#endif
}

/* Adds up the pieces of a cut bin in order; a work-group does one bin of one key head. */
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
attention_backward_merge(__global const float *restrict partial, __global ELEMENT_OF(DK_DTYPE) *restrict dk,
                         __global ELEMENT_OF(DV_DTYPE) *restrict dv, __global const uint *restrict starts,
                         __global const long *restrict table, uint sequences, ulong unit_first, ulong bin_count,
                         ulong chunks, ulong virtual_rows, ulong segment, uint accumulate, uint has_lists)
{
    const ulong unit = unit_first + get_group_id(0), bin = unit / LIST_KV;
    const uint lid = get_local_id(0), shared_head = (uint)(unit - bin * LIST_KV);
    struct bins bins = {starts, bin_count, chunks, virtual_rows, segment, has_lists};
    const ulong first = bin_first(&bins, bin), pieces = bin_pieces(&bins, bin_first(&bins, bin + 1) - first);
    if (pieces == 1) return;
    const struct place place = place_of(table, sequences, bin, shared_head);
    __global const long *sequence = place.sequence;
    const uint key = place.block * BLOCK, rows = min((uint)BLOCK, (uint)sequence[FIELD_KV_LEN] - key);
    __global const float *part = partial + (first / segment * LIST_KV + shared_head) * PARTIAL;
    for (uint e = lid; e < rows * (DIM + DIM_V); e += ITEMS) {
        const uint at = e < rows * DIM ? e : e - rows * DIM;
        const uint row = e < rows * DIM ? at / DIM : at / DIM_V;
        const uint d = e < rows * DIM ? at - row * DIM : at - row * DIM_V;
        float x = 0;
        for (ulong n = 0; n < pieces; n++)
            x += part[n * LIST_KV * PARTIAL + (e < rows * DIM ? 0 : BLOCK * DIM) + at];
        if (e < rows * DIM)
            store_key(x,
                      dk + sequence[TENSOR_DK] + (long)(key + row) * LEN_STRIDE(table, TENSOR_DK) +
                          (long)place.kv_head * HEAD_STRIDE(table, TENSOR_DK) + d,
                      accumulate);
        else
            store_value(x,
                        dv + sequence[TENSOR_DV] + (long)(key + row) * LEN_STRIDE(table, TENSOR_DV) +
                            (long)place.kv_head * HEAD_STRIDE(table, TENSOR_DV) + d,
                        accumulate);
    }
}

#if DBIAS
/* Gradient of one bias an item: the sums of dS of all units that it belongs to, in order. */
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
attention_backward_bias(__global const float *restrict bias_part, __global float *restrict dbias,
                        __global const uint *restrict starts, __global const long *restrict bin_table,
                        __global const long *restrict table, uint sequences, ulong unit_first, ulong bin_count,
                        ulong chunks, ulong virtual_rows, ulong segment, uint accumulate, uint has_lists,
                        uint q_heads, ulong bias_len, ulong bias_batches, long first, long batch_stride,
                        long len_stride, long head_stride)
{
    struct bins bins = {starts, bin_count, chunks, virtual_rows, segment, has_lists};
    const ulong n = (unit_first + get_group_id(0)) * ITEMS + get_local_id(0), rows = n / q_heads;
    const uint head = (uint)(n - rows * q_heads), kv_head = head / GROUP;
    const ulong batch = rows / bias_len, block = rows - batch * bias_len;
    if (batch >= bias_batches) return;
    float total = 0;
    for (uint s = 0; s < sequences; s++) {
        __global const long *sequence = table + 2 * TENSORS + s * FIELDS;
        const uint blocks = (uint)sequence[FIELD_BLOCKS];
        if (block >= blocks || (bias_batches > 1 && (ulong)sequence[FIELD_BATCH] != batch)) continue;
        const ulong bin = (ulong)sequence[FIELD_BIN] + (LIST_KV > 1 ? 0 : (ulong)kv_head * blocks) + block;
#if STARTS
        const uint bin_tiles = CEIL_DIV(BIN_END(bin_table, bin) - BIN_KEY(bin_table, bin), LANE_ROWS);
        for (uint tile = 0; tile < bin_tiles; tile++)
            total +=
                bias_part[((((ulong)BIN_TILE(bin_table, bin) + tile) * LIST_KV) + (LIST_KV > 1 ? kv_head : 0)) *
                              GROUP +
                          head - kv_head * GROUP];
#else
        const ulong entry = bin_first(&bins, bin),
                    pieces = bin_pieces(&bins, bin_first(&bins, bin + 1) - entry);
        ulong unit = pieces == 1 ? bin : bin_count + entry / segment;
        for (ulong piece = 0; piece < pieces; piece++, unit++)
            for (uint tile = 0; tile < TILES; tile++)
                total += bias_part[((unit * LIST_KV + (LIST_KV > 1 ? kv_head : 0)) * TILES + tile) * GROUP +
                                   head - kv_head * GROUP];
#endif
    }
    __global float *place =
        dbias + first + (long)batch * batch_stride + (long)block * len_stride + (long)head * head_stride;
    *place = accumulate ? *place + total : total;
}
#endif
