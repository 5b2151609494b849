/* SPDX-License-Identifier: MIT */
/* Inverts block lists: for every key block the queries that list it, in ascending order, the same on every run.
 *
 *   list  [q_len][kv_heads][topk]                 query -> blocks, -1 padded right
 *   pairs [kv_heads][q_len * topk]                slots i * topk + j, sorted by (span, block, i)
 *
 * A counting sort whose digits are counted per chunk of CHUNK queries and whose ranks come from bit maps in
 * local memory, so no result depends on the order of atomics. A span is a stretch of consecutive queries (a
 * multiple of CHUNK) that
 * keeps a pass's queries within the cache; with one span the list of a block is whole.
 *
 *   list_count        group (chunk, kv head)            counts  [kv_heads][chunks][n_blocks]
 *   list_scan_chunks  item block, group (.., head, span)  counts become ranks; totals
 *     [kv_heads][spans][n_blocks]
 *   list_scan_blocks  group (kv head)                   offset, tile_offset [kv_heads][spans * n_blocks + 1]
 *   list_scatter      group (chunk, kv head)            pairs
 *
 * list_all          item block, group (.., head)      list [heads][n_blocks] of every block, for all keys
 * list_halve        item entry                        lists of blocks of 128 keys as lists of blocks of 64
 * list_expand       item entry                        lists of query blocks as lists of queries
 *
 * tile_offset counts the tiles of ROWS rows (GROUP rows a pair) that each block's list is cut into.
 * Traffic: the list twice, counts three times, pairs once.
 * Macros: CHUNK 256 queries (also the work-group size), RANGE 1024 blocks a pass, ROWS, GROUP.
 */
#define CHUNK 256
#define RANGE 1024
#ifndef ROWS
#define ROWS 512
#endif
#ifndef GROUP
#define GROUP 16
#endif

__kernel
__attribute__((reqd_work_group_size(CHUNK, 1, 1))) void
list_count(__global const int *list, ulong list_base, __global uint *counts, uint q_len, uint kv_heads,
           uint topk, uint n_blocks)
{
    __local uint count[RANGE];
    const uint t = (uint)get_local_id(0), head = (uint)get_group_id(1);
    const uint i = (uint)get_group_id(0) * CHUNK + t;
    __global const int *row = list + list_base + ((ulong)i * kv_heads + head) * topk;
    counts += ((ulong)head * get_num_groups(0) + get_group_id(0)) * n_blocks;
    for (uint low = 0; low < n_blocks; low += RANGE) {
        for (uint b = t; b < RANGE; b += CHUNK)
            count[b] = 0;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (i < q_len)
            for (uint j = 0; j < topk; j++) {
                const uint b = (uint)row[j] - low; /* -1 and blocks below wrap around */
                if (b < RANGE) atomic_inc(&count[b]);
            }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint b = t; b < RANGE && low + b < n_blocks; b += CHUNK)
            counts[low + b] = count[b];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

__kernel
__attribute__((reqd_work_group_size(128, 1, 1))) void
list_scan_chunks(__global uint *counts, __global uint *totals, uint chunks, uint chunks_per_span, uint n_blocks)
{
    const uint b = (uint)get_group_id(0) * 128 + (uint)get_local_id(0), head = (uint)get_group_id(1);
    const uint span = (uint)get_group_id(2), first = span * chunks_per_span;
    const uint last = min(first + chunks_per_span, chunks);
    if (b >= n_blocks) return;
    __global uint *c = counts + (ulong)head * chunks * n_blocks + b;
    uint sum = 0;
    for (uint k = first; k < last; k += 8) {
        uint n[8];
#pragma unroll
        for (uint u = 0; u < 8; u++)
            n[u] = k + u < last ? c[(ulong)(k + u) * n_blocks] : 0;
#pragma unroll
        for (uint u = 0; u < 8; u++)
            if (k + u < last) {
                c[(ulong)(k + u) * n_blocks] = sum;
                sum += n[u];
            }
    }
    totals[((ulong)head * ((chunks + chunks_per_span - 1) / chunks_per_span) + span) * n_blocks + b] = sum;
}

/* entries = spans * n_blocks */
#define STRIP 8
__kernel
__attribute__((reqd_work_group_size(256, 1, 1))) void
list_scan_blocks(__global const uint *totals, __global uint *offset, __global uint *tile_offset, uint entries)
{
    __local uint sum_pairs[256], sum_tiles[256];
    const uint t = (uint)get_local_id(0), head = (uint)get_group_id(0);
    totals += (ulong)head * entries;
    offset += (ulong)head * (entries + 1);
    tile_offset += (ulong)head * (entries + 1);
    uint base_pairs = 0, base_tiles = 0;
    for (uint low = 0; low < entries; low += 256 * STRIP) {
        uint pairs[STRIP], own_pairs = 0, own_tiles = 0;
#pragma unroll
        for (uint u = 0; u < STRIP; u++) {
            const uint e = low + t * STRIP + u;
            pairs[u] = e < entries ? totals[e] : 0;
            own_pairs += pairs[u];
            own_tiles += (pairs[u] * GROUP + ROWS - 1) / ROWS;
        }
        sum_pairs[t] = own_pairs;
        sum_tiles[t] = own_tiles;
        for (uint d = 1; d < 256; d *= 2) {
            barrier(CLK_LOCAL_MEM_FENCE);
            const uint p = t >= d ? sum_pairs[t - d] : 0, q = t >= d ? sum_tiles[t - d] : 0;
            barrier(CLK_LOCAL_MEM_FENCE);
            sum_pairs[t] += p;
            sum_tiles[t] += q;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        uint p = base_pairs + sum_pairs[t] - own_pairs, q = base_tiles + sum_tiles[t] - own_tiles;
#pragma unroll
        for (uint u = 0; u < STRIP; u++) {
            const uint e = low + t * STRIP + u;
            if (e < entries) {
                offset[e] = p;
                tile_offset[e] = q;
            }
            p += pairs[u];
            q += (pairs[u] * GROUP + ROWS - 1) / ROWS;
        }
        base_pairs += sum_pairs[255];
        base_tiles += sum_tiles[255];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (t == 0) {
        offset[entries] = base_pairs;
        tile_offset[entries] = base_tiles;
    }
}

__kernel
__attribute__((reqd_work_group_size(CHUNK, 1, 1))) void
list_scatter(__global const int *list, ulong list_base, __global const uint *counts,
             __global const uint *offset, __global uint *pairs, uint q_len, uint kv_heads, uint topk,
             uint n_blocks, uint chunks_per_span, uint entries)
{
    __local uint bits[RANGE * (CHUNK / 32)];
    const uint t = (uint)get_local_id(0), head = (uint)get_group_id(1), chunk = (uint)get_group_id(0);
    const uint i = chunk * CHUNK + t, word = t / 32, below = (1u << (t % 32)) - 1;
    __global const int *row = list + list_base + ((ulong)i * kv_heads + head) * topk;
    counts += ((ulong)head * get_num_groups(0) + chunk) * n_blocks;
    offset += (ulong)head * (entries + 1) + (ulong)(chunk / chunks_per_span) * n_blocks;
    pairs += (ulong)head * q_len * topk;
    for (uint low = 0; low < n_blocks; low += RANGE) {
        for (uint b = t; b < RANGE * (CHUNK / 32); b += CHUNK)
            bits[b] = 0;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (i < q_len)
            for (uint j = 0; j < topk; j++) {
                const uint b = (uint)row[j] - low;
                if (b < RANGE) atomic_or(&bits[b * (CHUNK / 32) + word], 1u << (t % 32));
            }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (i < q_len)
            for (uint j = 0; j < topk; j++) {
                const uint b = (uint)row[j] - low;
                if (b >= RANGE) continue;
                uint rank = popcount(bits[b * (CHUNK / 32) + word] & below);
                for (uint w = 0; w < word; w++)
                    rank += popcount(bits[b * (CHUNK / 32) + w]);
                pairs[offset[low + b] + counts[low + b] + rank] = i * topk + j;
            }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

__kernel
__attribute__((reqd_work_group_size(128, 1, 1))) void list_all(__global int *list, uint n_blocks)
{
    const uint b = (uint)get_group_id(0) * 128 + (uint)get_local_id(0);
    if (b < n_blocks) list[(ulong)get_group_id(1) * n_blocks + b] = (int)b;
}

/* list and halves are [lists][topk] and [lists][2 topk]; n_blocks counts halves. */
__kernel
__attribute__((reqd_work_group_size(128, 1, 1))) void
list_halve(__global const int *list, ulong list_base, __global int *halves, ulong entries, uint n_blocks)
{
    const ulong e = (ulong)get_group_id(0) * 128 + get_local_id(0);
    if (e >= entries) return;
    const int b = list[list_base + e];
    halves[2 * e] = b < 0 ? -1 : 2 * b;
    halves[2 * e + 1] =
        b < 0 || 2 * b + 1 >= (int)n_blocks ? -1 : 2 * b + 1; /* only the last may lack its second */
}

/* The lists of q_block queries, or of all keys where list is NULL, as lists of single queries [q_len][kv_heads][topk],
 * without the blocks that a query does not see (-1); of all keys those from the window's first one on. One item an entry. */
__kernel
__attribute__((reqd_work_group_size(128, 1, 1))) void
list_expand(__global const int *list, ulong list_base, uint list_stride, uint list_head_stride,
            __global int *tokens, uint q_len, uint kv_len, uint kv_heads, uint topk, uint q_block, uint causal,
            uint window)
{
    const ulong e = (ulong)get_group_id(0) * 128 + get_local_id(0);
    if (e >= (ulong)q_len * kv_heads * topk) return;
    const uint j = (uint)(e % topk), head = (uint)(e / topk % kv_heads), i = (uint)(e / topk / kv_heads);
    const int position = (int)(i + kv_len - q_len);
    const int begin = window ? max(position + 1 - (int)window, 0) : 0;
    const int end = causal ? position + 1 : window ? min((int)kv_len, position + (int)window) : (int)kv_len;
    const int b = list ? list[list_base + (ulong)(i / q_block) * list_stride + head * list_head_stride + j]
                       : begin / 64 + (int)j;
    tokens[e] = b * 64 < end && b * 64 + 64 > begin ? b : -1;
}
