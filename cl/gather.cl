/* SPDX-License-Identifier: MIT */
/* Rows moved by a table of indices; mirrors cpu/cpu_gather.c.
 *
 *   to[b][n][h] = sum over terms t of row index[n][t] of `from`, of `more` from from_len on, of nothing below 0
 *
 * A work-group owns `tile` neighbouring rows n of one batch entry, all heads: it reads tile x terms indices and
 * as many rows of heads x dim elements, and writes tile rows. Every element is a work-item's own, so the order
 * of the terms is that of the table.
 *
 * Macros: BYTES 1, 2, 4: one term and equal types, moved bit for bit as elements of that size; 0: sums in
 * float32 of DTYPE elements, stored as OUT_DTYPE. WIDTH elements at once, divides dim. ITEMS of a work-group.
 */

#if BYTES == 4
typedef uint from_element;
typedef uint to_element;
#define FROM_VECTOR uint
#elif BYTES == 2
typedef ushort from_element;
typedef ushort to_element;
#define FROM_VECTOR ushort
#elif BYTES == 1
typedef uchar from_element;
typedef uchar to_element;
#define FROM_VECTOR uchar
#else
typedef element from_element;
typedef ELEMENT_OF(OUT_DTYPE) to_element;
#define STORE STORE_OF(OUT_DTYPE)
#endif

/* The tensors that rows come from. */
struct source {
    __global const from_element *from, *more;
    long from_stride, more_stride, from_len, more_len; /* strides of len */
};

/* A row's elements, or 0 when there is no such row. */
inline __global const from_element *source_row(const struct source *source, long index)
{
    if (index < 0) return 0;
    if (index < source->from_len) return source->from + index * source->from_stride;
    index -= source->from_len;
    return index < source->more_len ? source->more + index * source->more_stride : 0;
}

#if BYTES
/* WIDTH elements of one row. */
inline void move(const struct source *source, __global const long *index, uint terms, long from_column,
                 long more_column, __global to_element *to)
{
    __global const from_element *row = source_row(source, *index);
    long column = *index < source->from_len ? from_column : more_column;
#if WIDTH == 1
    *to = row ? row[column] : 0;
#else
    JOIN(FROM_VECTOR, WIDTH) x = 0;
    if (row) x = JOIN(vload, WIDTH)(0, row + column);
    JOIN(vstore, WIDTH)(x, 0, to);
#endif
}
#else
/* One element, since WIDTH is 1. */
inline void move(const struct source *source, __global const long *index, uint terms, long from_column,
                 long more_column, __global to_element *to)
{
    float sum = 0.0f;
    for (uint t = 0; t < terms; t++) {
        __global const from_element *row = source_row(source, index[t]);
        if (row) sum += LOAD(1)(row + (index[t] < source->from_len ? from_column : more_column));
    }
    STORE(sum, to);
}
#endif

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
gather(__global const from_element *restrict from, __global const from_element *restrict more,
       __global to_element *restrict to, __global const long *restrict index, ulong unit_first,
       long from_offset, long from_batch_stride, long from_len_stride, long from_head_stride, long more_offset,
       long more_batch_stride, long more_len_stride, long more_head_stride, long to_offset,
       long to_batch_stride, long to_len_stride, long to_head_stride, long from_len, long more_len, ulong rows,
       uint heads, uint dim, uint terms, uint tile)
{
    const ulong unit = unit_first + get_group_id(0), tiles = CEIL_DIV(rows, (ulong)tile);
    const ulong batch = unit / tiles, first = (unit - batch * tiles) * tile;
    const uint count = (uint)min((ulong)tile, rows - first), columns = dim / WIDTH,
               row_columns = heads * columns;
    const struct source source = {from + from_offset + (long)batch * from_batch_stride,
                                  more + more_offset + (long)batch * more_batch_stride,
                                  from_len_stride,
                                  more_len_stride,
                                  from_len,
                                  more_len};
    to += to_offset + (long)batch * to_batch_stride;
    for (uint e = get_local_id(0); e < count * row_columns; e += ITEMS) {
        const uint n = e / row_columns, in_row = e - n * row_columns, h = in_row / columns;
        const long d = (long)(in_row - h * columns) * WIDTH;
        move(&source, index + (first + n) * terms, terms, h * from_head_stride + d, h * more_head_stride + d,
             to + (long)(first + n) * to_len_stride + h * to_head_stride + d);
    }
}
