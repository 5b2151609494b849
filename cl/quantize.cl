/* SPDX-License-Identifier: MIT */
/* Quantises to int8; mirrors cpu/cpu_quantize.c.
 *
 * A work-group owns one group of leaves of one batch entry and head: it finds the greatest finite magnitude of
 * its rows, writes the scale of its leaves, then the codes. Reads the rows twice, writes them once as bytes.
 *
 * Macros: DTYPE of x; ITEMS of a work-group, a power of two. */

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
quantize(__global const element *x, __global char *codes, __global float *scales, ulong unit_first,
         long x_offset, long x_batch, long x_len, long x_head, long codes_offset, long codes_batch,
         long codes_len, long codes_head, long scales_offset, long scales_batch, long scales_len,
         long scales_head, ulong rows, uint heads, uint dim, uint scale_block, ulong groups, ulong far_begin,
         ulong far_end, uint far_group, ulong leaves)
{
    __local float most[ITEMS];
    const uint lid = get_local_id(0);
    const ulong unit = unit_first + get_group_id(0), rest = unit / groups, group = unit - rest * groups;
    const ulong batch = rest / heads, head = rest - batch * heads;
    const ulong far_groups = CEIL_DIV(far_end - far_begin, far_group);
    ulong leaf = group, leaf_end = group + 1;
    if (group >= far_begin + far_groups) {
        leaf = far_end + group - far_begin - far_groups;
        leaf_end = leaf + 1;
    } else if (group >= far_begin) {
        leaf = far_begin + (group - far_begin) * far_group;
        leaf_end = min(leaf + far_group, far_end);
    }
    const ulong first = leaf * scale_block, end = min(leaf_end * scale_block, rows);
    x += x_offset + (long)batch * x_batch + (long)head * x_head;
    codes += codes_offset + (long)batch * codes_batch + (long)head * codes_head;
    scales += scales_offset + (long)batch * scales_batch + (long)head * scales_head;

    float mine = 0.0f;
    for (ulong i = first; i < end; i++)
        for (uint d = lid; d < dim; d += ITEMS) {
            const float value = fabs(LOAD(1)(x + (long)i * x_len + d));
            if (value > mine && value < INFINITY) mine = value;
        }
    most[lid] = mine;
    for (uint step = ITEMS / 2; step > 0; step /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < step) most[lid] = fmax(most[lid], most[lid + step]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    const float scale = most[0] / 127.0f;
    for (ulong n = leaf + lid; n < leaf_end; n += ITEMS)
        scales[(long)n * scales_len] = scale;
    for (ulong i = first; i < end; i++)
        for (uint d = lid; d < dim; d += ITEMS) {
            const float value = LOAD(1)(x + (long)i * x_len + d);
            const float code = isnan(value) || scale == 0.0f ? 0.0f : value / scale;
            codes[(long)i * codes_len + d] = convert_char(rint(clamp(code, -127.0f, 127.0f)));
        }
}
