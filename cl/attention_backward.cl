/* SPDX-License-Identifier: MIT */
/* What the kernels of the backward pass share: the table of sequences and tiles. They include this file. */

/* The table of the backward kernels (opencl_backward.h): steps from row to row and from head to head of each
 * tensor, then for each sequence the element of its row 0, head 0 in each tensor, and numbers. */
#define TENSOR_Q 0
#define TENSOR_K 1
#define TENSOR_V 2
#define TENSOR_OUT 3
#define TENSOR_LSE 4
#define TENSOR_DOUT 5
#define TENSOR_DLSE 6
#define TENSOR_DQ 7
#define TENSOR_DK 8
#define TENSOR_DV 9
#define TENSOR_BIAS 10
#define TENSORS 11
#define FIELD_Q_LEN 11
#define FIELD_KV_LEN 12
#define FIELD_LIST_ROW 13  /* its first list row */
#define FIELD_DELTA 14     /* its first element of D [q_len][q_heads] */
#define FIELD_BIN 15       /* its first bin: key blocks of its list heads */
#define FIELD_UNIT_ROWS 16 /* its first work-group of the kernel of D */
#define FIELD_UNIT_Q 17    /* its first work-group of the kernel of dq */
#define FIELD_Q_ROW 18     /* its first row of q and of k, for element masks */
#define FIELD_K_ROW 19
#define FIELD_BATCH 20
#define FIELD_BLOCKS 21 /* its number of key blocks */
#define FIELD_START 22  /* entry of the caller's block boundaries that its first block has */
#define FIELDS 23

#define LEN_STRIDE(TABLE, TENSOR) ((TABLE)[2 * (TENSOR)])
#define HEAD_STRIDE(TABLE, TENSOR) ((TABLE)[2 * (TENSOR) + 1])

/* The last sequence whose `field` is at most `value`. */
inline __global const long *sequence_by(__global const long *table, uint sequences, uint field, ulong value)
{
    uint low = 0, high = sequences;
    while (high - low > 1) {
        uint middle = (low + high) / 2;
        if ((ulong)table[2 * TENSORS + middle * FIELDS + field] <= value)
            low = middle;
        else
            high = middle;
    }
    return table + 2 * TENSORS + low * FIELDS;
}

#ifdef STREAM
/* Tiles of the backward kernels: LANE_ROWS rows lie transposed, as vectors of lanes; STREAM other rows pass by.
 * An item owns LANES of the former and ITEM_STREAM of the latter, STREAM_GROUPS apart. */
#define LANE_GROUPS (LANE_ROWS / LANES)
#define STREAM_GROUPS (STREAM / ITEM_STREAM)
#define ITEMS (LANE_GROUPS * STREAM_GROUPS)

/* s[j] = sum over columns of the item's lanes x its streamed rows. */
inline void tile_products(__local const lanes *lane_tile, __local const float4 *stream_tile, const uint columns,
                          const uint pitch, uint lane_group, uint stream_group, lanes *s)
{
    lanes sum[ITEM_STREAM];
#pragma unroll
    for (uint j = 0; j < ITEM_STREAM; j++)
        sum[j] = 0.0f;
    for (uint d = 0; d < columns; d += 4) {
        __local const lanes *column = lane_tile + d * LANE_GROUPS + lane_group;
        lanes x0 = column[0], x1 = column[LANE_GROUPS], x2 = column[2 * LANE_GROUPS];
        lanes x3 = column[3 * LANE_GROUPS];
#pragma unroll
        for (uint j = 0; j < ITEM_STREAM; j++) {
            float4 y = stream_tile[((j * STREAM_GROUPS + stream_group) * pitch + d) / 4];
            sum[j] += x0 * y.x;
            sum[j] += x1 * y.y;
            sum[j] += x2 * y.z;
            sum[j] += x3 * y.w;
        }
    }
#pragma unroll
    for (uint j = 0; j < ITEM_STREAM; j++)
        s[j] = sum[j];
}

/* Column of an item's sum d: four neighbouring ones, then the next four STREAM_GROUPS * 4 further. */
#define ITEM_COLUMN(D, STREAM_GROUP) (((D) / 4 * STREAM_GROUPS + (STREAM_GROUP)) * 4 + (D) % 4)

/* Is an element infinite or NaN? From the bits, as in attention_forward.cl: a part of what is_odd takes. */
#define ODD_BITS(N, X) (((AS_BITS(N)(X) >> 23) & 255) + 1)
#define IS_ODD(CHECK) any((CHECK) << 23)

/* sum + weight * y; with `careful` just sum where the weight is 0, so that a NaN or an infinity of a row stays
 * with the lanes that see it. mad, so that both ways give the same bits. */
inline lanes plus_weighted(lanes sum, lanes weight, float y, bool careful)
{
    lanes next = mad(weight, (lanes)(y), sum);
    return careful ? (weight == (lanes)(0.0f) ? sum : next) : next;
}

/* sums[d] += sum_j weights[j] x column d of streamed row j, for the item's share of `columns`. The inner sum
 * begins anew in each tile, so that chains of additions stay short. careful: the rows have a NaN or an
 * infinity. */
inline void tile_add(lanes *sums, const uint item_columns, __local const lanes *weights,
                     __local const float4 *stream_tile, const uint columns, const uint pitch, uint lane_group,
                     uint stream_group, bool careful)
{
#pragma unroll
    for (uint d = 0; d < item_columns; d += 4) {
        const uint at = d / 4 * STREAM_GROUPS + stream_group;
        if (4 * at >= columns) continue;
        lanes x0 = 0.0f, x1 = 0.0f, x2 = 0.0f, x3 = 0.0f;
        for (uint j = 0; j < STREAM; j++) {
            lanes weight = weights[j * LANE_GROUPS + lane_group];
            float4 y = stream_tile[j * (pitch / 4) + at];
            x0 = plus_weighted(x0, weight, y.x, careful);
            x1 = plus_weighted(x1, weight, y.y, careful);
            x2 = plus_weighted(x2, weight, y.z, careful);
            x3 = plus_weighted(x3, weight, y.w, careful);
        }
        sums[d] += x0;
        sums[d + 1] += x1;
        sums[d + 2] += x2;
        sums[d + 3] += x3;
    }
}

/* An item's sums into a transposed tile of LANE_ROWS rows. */
inline void tile_put(const lanes *sums, const uint item_columns, __local lanes *tile, uint lane_group,
                     uint stream_group)
{
#pragma unroll
    for (uint d = 0; d < item_columns; d++)
        tile[ITEM_COLUMN(d, stream_group) * LANE_GROUPS + lane_group] = sums[d];
}
#endif
