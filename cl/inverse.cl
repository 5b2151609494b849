/* SPDX-License-Identifier: MIT */
/* Block lists the other way round: which list rows each key block is listed in, ascending; mirrors
 * lib/inverse.c.
 *
 * A counting sort without atomics. List rows are cut into chunks; a bin is a key block of a list head (with
 * lists for each query head, the `list_group` heads of a group have neighbouring bins):
 *
 *     starts[1 + bin * chunks + chunk]   inverse_count     entries of the bin in the chunk
 *                                        inverse_scan...   where they begin
 *                                        inverse_place     where they end, which is where the next ones begin
 *
 * so that in the end the entries of `bin` are starts[bin * chunks] .. starts[(bin + 1) * chunks] - 1. A
 * work-group goes through the rows of a chunk one after the other; no list names a block twice, so its items
 * never meet in a bin.
 *
 * Reads the lists twice; memory: one uint an entry, and one a bin and chunk.
 *
 * Macros: ITEMS of a work-group; SCAN_EACH elements an item in a scan. */

#include "attention_backward.cl"

#define SCAN_PART (ITEMS * SCAN_EACH)

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void inverse_clear(__global uint *restrict starts,
                                                                               ulong unit_first, ulong count)
{
    const ulong part = (unit_first + get_group_id(0)) * SCAN_PART;
    for (uint n = get_local_id(0); n < SCAN_PART; n += ITEMS)
        if (part + n < count) starts[part + n] = 0;
}

/* Counts the entries of a chunk, or places them. */
inline void chunk_visit(__global const int *indices, __global const int *counts, __global const long *table,
                        __global uint *starts, __global uint *entries, uint sequences, ulong chunk,
                        ulong chunks, ulong chunk_rows, ulong rows, uint list_heads, uint topk, uint q_block,
                        uint list_group, bool is_placing)
{
    const uint lid = get_local_id(0);
    const ulong end = min((chunk + 1) * chunk_rows, rows);
    for (ulong row = chunk * chunk_rows; row < end; row++) {
        __global const long *sequence = sequence_by(table, sequences, FIELD_LIST_ROW, row);
        const ulong local_row = row - (ulong)sequence[FIELD_LIST_ROW];
        const uint blocks = (uint)sequence[FIELD_BLOCKS];
        const bool is_used = local_row * q_block < (ulong)sequence[FIELD_Q_LEN];
        for (uint x = lid; is_used && x < list_heads * topk; x += ITEMS) {
            const uint head = x / topk, n = x - head * topk;
            const ulong list = row * list_heads + head;
            if (n >= (uint)counts[list]) continue;
            const uint block = (uint)indices[list * topk + n];
            if (block >= blocks) continue; /* selected on more keys than these */
            const uint list_kv = head / list_group, in_group = head - list_kv * list_group;
            const ulong bin =
                ((ulong)sequence[FIELD_BIN] + (ulong)list_kv * blocks + block) * list_group + in_group;
            const uint place = starts[1 + bin * chunks + chunk]++;
            if (is_placing) entries[place] = (uint)local_row * list_group + in_group;
        }
        barrier(CLK_GLOBAL_MEM_FENCE);
    }
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
inverse_count(__global const int *restrict indices, __global const int *restrict counts,
              __global const long *restrict table, __global uint *restrict starts,
              __global uint *restrict entries, uint sequences, ulong unit_first, ulong chunks, ulong chunk_rows,
              ulong rows, uint list_heads, uint topk, uint q_block, uint list_group)
{
    chunk_visit(indices, counts, table, starts, entries, sequences, unit_first + get_group_id(0), chunks,
                chunk_rows, rows, list_heads, topk, q_block, list_group, false);
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
inverse_place(__global const int *restrict indices, __global const int *restrict counts,
              __global const long *restrict table, __global uint *restrict starts,
              __global uint *restrict entries, uint sequences, ulong unit_first, ulong chunks, ulong chunk_rows,
              ulong rows, uint list_heads, uint topk, uint q_block, uint list_group)
{
    chunk_visit(indices, counts, table, starts, entries, sequences, unit_first + get_group_id(0), chunks,
                chunk_rows, rows, list_heads, topk, q_block, list_group, true);
}

/* The sum of the items before this one; *total of all. */
inline uint items_before(__local uint *part, uint sum, uint lid, uint *total)
{
    uint before = 0, all = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    part[lid] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint n = 0; n < ITEMS; n++) {
        before += n < lid ? part[n] : 0;
        all += part[n];
    }
    *total = all;
    return before;
}

/* starts[1 + n], n < count: exclusive sums within parts of SCAN_PART; sums[part] is the part's sum. */
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
inverse_scan_parts(__global uint *restrict starts, __global uint *restrict sums, ulong unit_first, ulong count)
{
    __local uint part[ITEMS];
    const uint lid = get_local_id(0);
    const ulong unit = unit_first + get_group_id(0), first = unit * SCAN_PART + lid * SCAN_EACH;
    uint sum = 0, total;
    for (uint n = 0; n < SCAN_EACH; n++)
        sum += first + n < count ? starts[1 + first + n] : 0;
    uint running = items_before(part, sum, lid, &total);
    for (uint n = 0; n < SCAN_EACH; n++)
        if (first + n < count) {
            uint own = starts[1 + first + n];
            starts[1 + first + n] = running;
            running += own;
        }
    if (lid == 0) sums[unit] = total;
}

/* The same for the parts' sums, in one work-group. */
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
inverse_scan_sums(__global uint *restrict sums, ulong unit_first, ulong count)
{
    __local uint part[ITEMS];
    const uint lid = get_local_id(0);
    const ulong each = CEIL_DIV(count, ITEMS), first = min(lid * each, count), end = min(first + each, count);
    uint sum = 0, total;
    for (ulong n = first; n < end; n++)
        sum += sums[n];
    uint running = items_before(part, sum, lid, &total);
    for (ulong n = first; n < end; n++) {
        uint own = sums[n];
        sums[n] = running;
        running += own;
    }
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
inverse_scan_add(__global uint *restrict starts, __global const uint *restrict sums, ulong unit_first,
                 ulong count)
{
    const ulong unit = unit_first + get_group_id(0);
    const uint sum = sums[unit];
    for (uint n = get_local_id(0); n < SCAN_PART; n += ITEMS)
        if (unit * SCAN_PART + n < count) starts[1 + unit * SCAN_PART + n] += sum;
}
