/* SPDX-License-Identifier: MIT */
/* Pages of a decode cache: entries of its block table, and copies of ranges of its memory.
 *
 * Macros: ITEMS of a work-group; UNIT bytes that decode_copy moves at once, 1, 4 (default) or 16. */

#ifndef UNIT
#define UNIT 4
#endif
#if UNIT == 16
typedef uint4 unit;
#elif UNIT == 4
typedef uint unit;
#else
typedef uchar unit;
#endif

/* entries [count][2]: place in the table, page. */
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
decode_table(__global int *table, __global const long *entries, uint count)
{
    const uint n = get_global_id(0);
    if (n < count) table[entries[2 * n]] = (int)entries[2 * n + 1];
}

/* ranges [.][3]: from, to and length in units; a range for each work-group of the second dimension. */
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void decode_copy(__global unit *memory,
                                                                             __global const long *ranges)
{
    __global const long *range = ranges + get_group_id(1) * 3;
    __global const unit *from = memory + range[0];
    __global unit *to = memory + range[1];
    for (ulong n = get_global_id(0); n < (ulong)range[2]; n += get_global_size(0))
        to[n] = from[n];
}
