/* SPDX-License-Identifier: MIT */
/* The union of the lists of q_block <= 32 neighbouring queries, ascending, with the mask of the queries that
 * have each.
 * One work-group a (tile, kv head); topk * q_block <= 512. */
__kernel
__attribute__((reqd_work_group_size(128, 1, 1))) void list_union(__global const int *list, ulong list_base,
                                                                 __global int *tile_list,
                                                                 __global uint *tile_mask, uint q_len,
                                                                 uint topk, uint q_block)
{
    __local int block[512];
    __local uint mask[512];
    const uint t = (uint)get_local_id(0), tile = (uint)get_group_id(0), head = (uint)get_group_id(1);
    const uint kv_heads = (uint)get_num_groups(1), n = q_block * topk;
    for (uint e = t; e < n; e += 128) {
        const uint i = tile * q_block + e / topk;
        block[e] = i < q_len ? list[list_base + ((ulong)i * kv_heads + head) * topk + e % topk] : -1;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint e = t; e < n; e += 128) { /* the first of equal entries takes the mask, the others none */
        const int b = block[e];
        uint m = 0, earlier = 0;
        for (uint o = 0, query = 0, j = 0; o < n; o++) {
            const int same = block[o] == b;
            m |= same ? 1u << query : 0;
            earlier |= same && o < e;
            if (++j == topk) {
                j = 0;
                query++;
            }
        }
        mask[e] = b >= 0 && !earlier ? m : 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    tile_list += ((ulong)tile * kv_heads + head) * n;
    tile_mask += ((ulong)tile * kv_heads + head) * n;
    uint count = 0;
    for (uint o = 0; o < n; o++)
        count += mask[o] != 0;
    for (uint e = t; e < n; e += 128) {
        if (mask[e]) {
            uint rank = 0;
            for (uint o = 0; o < n; o++)
                rank += mask[o] && block[o] < block[e];
            tile_list[rank] = block[e];
            tile_mask[rank] = mask[e];
        }
        if (e >= count) tile_list[e] = -1;
    }
}
