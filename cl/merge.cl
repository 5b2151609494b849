/* SPDX-License-Identifier: MIT */
/* Merges results of attention over disjoint keys; mirrors cpu/cpu_merge.c.
 *
 *   lse = log(exp lse0 + exp lse1),   out = out0 exp(lse0 - lse) + out1 exp(lse1 - lse)
 *
 * A work-group owns `tile` <= ITEMS neighbouring (row, head) pairs of one batch entry: an item computes the
 * shares of one pair, then all of them go over its elements. Reads 2 (dim + 1) elements a pair, writes dim + 1.
 * An output may be an input, since each element is read and written by the same item.
 *
 * Macros: DTYPE of out0 and out1, OUT_DTYPE of out; ITEMS of a work-group. */

typedef ELEMENT_OF(OUT_DTYPE) out_element;
#define STORE STORE_OF(OUT_DTYPE)

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
merge(__global const element *out0, __global const float *lse0, __global const element *out1,
      __global const float *lse1, __global out_element *out, __global float *lse, ulong unit_first,
      long out0_offset, long out0_batch, long out0_len, long out0_head, long lse0_offset, long lse0_batch,
      long lse0_len, long lse0_head, long out1_offset, long out1_batch, long out1_len, long out1_head,
      long lse1_offset, long lse1_batch, long lse1_len, long lse1_head, long out_offset, long out_batch,
      long out_len, long out_head, long lse_offset, long lse_batch, long lse_len, long lse_head, uint pairs,
      uint heads, uint dim, uint tile, uint has_lse)
{
    __local float share0[ITEMS], share1[ITEMS];
    const uint lid = get_local_id(0), tiles = CEIL_DIV(pairs, tile);
    const ulong unit = unit_first + get_group_id(0);
    const long batch = (long)(unit / tiles);
    const uint first = (uint)(unit - (ulong)batch * tiles) * tile, count = min(tile, pairs - first);

    if (lid < count) {
        const uint i = (first + lid) / heads, h = first + lid - i * heads;
        const float x0 = lse0[lse0_offset + batch * lse0_batch + i * lse0_len + h * lse0_head];
        const float x1 = lse1[lse1_offset + batch * lse1_batch + i * lse1_len + h * lse1_head];
        const float most = x0 > x1 || isnan(x0) ? x0 : x1;
        const bool is_empty = most == -INFINITY;
        const float part0 = is_empty ? 0.0f : exp(x0 - most), part1 = is_empty ? 0.0f : exp(x1 - most);
        share0[lid] = is_empty ? 0.0f : part0 / (part0 + part1);
        share1[lid] = is_empty ? 0.0f : part1 / (part0 + part1);
        if (has_lse)
            lse[lse_offset + batch * lse_batch + i * lse_len + h * lse_head] = most + log(part0 + part1);
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    for (uint e = lid; e < count * dim; e += ITEMS) {
        const uint pair = e / dim, d = e - pair * dim, i = (first + pair) / heads, h = first + pair - i * heads;
        float sum = 0.0f;
        if (share0[pair] != 0.0f)
            sum += share0[pair] *
                   LOAD(1)(out0 + out0_offset + batch * out0_batch + i * out0_len + h * out0_head + d);
        if (share1[pair] != 0.0f)
            sum += share1[pair] *
                   LOAD(1)(out1 + out1_offset + batch * out1_batch + i * out1_len + h * out1_head + d);
        STORE(sum, out + out_offset + batch * out_batch + i * out_len + h * out_head + d);
    }
}
