/* SPDX-License-Identifier: MIT */
/* The partial results of attention_inverted_mma.cl and attention_inverted_wgmma.cl joined:
 *
 *   out = sum_j exp(lse_j - lse) out_j   over the topk partial results of a row, in list order
 *
 * One item: 8 columns of one row; rows of the launch are (query, query head). Read: topk (2 DIM_V + 4) bytes a row;
 * written: out and lse. Macros: those of attention_tile.cl.
 */
__kernel
__attribute__((reqd_work_group_size(256, 1, 1))) void
attention_merge(__global const uint4 *partial_out, __global const float *partial_lse, __global const int *list,
                ulong list_base, __global ushort *out, ulong out_base, ulong out_len_stride,
                ulong out_head_stride, __global float *lse, ulong lse_base, ulong lse_len_stride,
                ulong lse_head_stride, uint q_len, uint kv_heads, uint topk,
                __global const float *sink, ulong sink_base, ulong sink_stride)
{
    const uint lanes = V_QUADS * 4, heads = kv_heads * GROUP;
    const ulong item = (ulong)get_group_id(0) * 256 + get_local_id(0), rows = (ulong)q_len * heads;
    const ulong row = min(item / lanes, rows - 1);
    const uint part = (uint)(item % lanes), c = part & 3;
    const uint i = (uint)(row / heads), head = (uint)(row % heads), kv_head = head / GROUP;
    const ulong pair = ((ulong)i * kv_heads + kv_head) * topk;
    const ulong first = pair * GROUP + head % GROUP;
    float top = -INFINITY, sum = 0, o[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (uint j = 0; j < topk; j += 8) { /* eight loads in flight */
        uint4 w[8];
        float l[8], next = top;
#pragma unroll
        for (uint u = 0; u < 8; u++) {
            const int exists = j + u < topk && list[list_base + pair + j + u] >= 0;
            l[u] = exists ? partial_lse[first + (j + u) * GROUP] : -INFINITY;
            w[u] = exists ? partial_out[(first + (j + u) * GROUP) * lanes + part] : (uint4)(0, 0, 0, 0);
        }
#pragma unroll
        for (uint u = 0; u < 8; u++)
            next = fmax(next, l[u]);
        if (next == -INFINITY) continue;
        const float keep = exp2_fast(top - next);
        top = next;
        sum *= keep;
#pragma unroll
        for (uint u = 0; u < 8; u++)
            o[u] *= keep;
#pragma unroll
        for (uint u = 0; u < 8; u++) {
            const float weight = exp2_fast(l[u] - top);
            sum += weight;
            o[0] = fma(weight, unpack_low(w[u].x), o[0]);
            o[1] = fma(weight, unpack_high(w[u].x), o[1]);
            o[2] = fma(weight, unpack_low(w[u].y), o[2]);
            o[3] = fma(weight, unpack_high(w[u].y), o[3]);
            o[4] = fma(weight, unpack_low(w[u].z), o[4]);
            o[5] = fma(weight, unpack_high(w[u].z), o[5]);
            o[6] = fma(weight, unpack_low(w[u].w), o[6]);
            o[7] = fma(weight, unpack_high(w[u].w), o[7]);
        }
    }
    const float inv = close_row(&top, &sum, sink, sink_base + head * sink_stride);
    uint4 w = (uint4)(pack2(o[0] * inv, o[1] * inv), pack2(o[2] * inv, o[3] * inv),
                      pack2(o[4] * inv, o[5] * inv), pack2(o[6] * inv, o[7] * inv));
    w = quad_transpose(w, c);
    if (item / lanes < rows) {
        store8(out + out_base + i * out_len_stride + head * out_head_stride, 8 * part, DIM_V, w);
        if (part == 0 && lse)
            lse[lse_base + i * lse_len_stride + head * lse_head_stride] = row_lse(top, sum);
    }
}
