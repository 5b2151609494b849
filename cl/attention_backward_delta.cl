/* SPDX-License-Identifier: MIT */
/* What the backward pass needs of every query row and head, and the gradient of sinks; mirrors
 * cpu/attention_backward_ref.c.
 *
 *   D = sum_d dout out - dlse            dsink[head] = - sum over rows of exp(sink - lse) D
 *
 * attention_backward_delta: an item computes one D; reads 2 dim_v elements (and dlse), writes one float.
 * attention_backward_sink: a work-group sums one head; item n takes rows n, n + ITEMS ... of each sequence, and
 * item 0 adds up the items, always in the same order.
 *
 * Macros: LOAD_V elements a load, divides dim_v; OUT_DTYPE, DOUT_DTYPE; ITEMS of a work-group. */

#include "attention_backward.cl"

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void attention_backward_delta(
    __global const ELEMENT_OF(OUT_DTYPE) *restrict out, __global const ELEMENT_OF(DOUT_DTYPE) *restrict dout,
    __global const float *restrict dlse, __global float *restrict delta, __global const long *restrict table,
    uint sequences, ulong unit_first, uint q_heads, uint dim_v, uint has_dlse)
{
    const ulong unit = unit_first + get_group_id(0);
    __global const long *sequence = sequence_by(table, sequences, FIELD_UNIT_ROWS, unit);
    const ulong n = (unit - (ulong)sequence[FIELD_UNIT_ROWS]) * ITEMS + get_local_id(0);
    const ulong row = n / q_heads;
    const uint head = (uint)(n - row * q_heads);
    if (row >= (ulong)sequence[FIELD_Q_LEN]) return;

    __global const ELEMENT_OF(OUT_DTYPE) *o = out + sequence[TENSOR_OUT] +
                                              (long)row * LEN_STRIDE(table, TENSOR_OUT) +
                                              (long)head * HEAD_STRIDE(table, TENSOR_OUT);
    __global const ELEMENT_OF(DOUT_DTYPE) *g = dout + sequence[TENSOR_DOUT] +
                                               (long)row * LEN_STRIDE(table, TENSOR_DOUT) +
                                               (long)head * HEAD_STRIDE(table, TENSOR_DOUT);
    VECTOR(LOAD_V) sum = 0.0f;
    for (uint d = 0; d < dim_v; d += LOAD_V)
        sum += LOAD_OF(OUT_DTYPE, LOAD_V)(o + d) * LOAD_OF(DOUT_DTYPE, LOAD_V)(g + d);
    float total = SUM(LOAD_V)(sum);
    if (has_dlse)
        total -= dlse[sequence[TENSOR_DLSE] + (long)row * LEN_STRIDE(table, TENSOR_DLSE) +
                      (long)head * HEAD_STRIDE(table, TENSOR_DLSE)];
    delta[(ulong)sequence[FIELD_DELTA] + n] = total;
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
attention_backward_sink(__global const float *restrict sink, __global const float *restrict lse,
                        __global const float *restrict delta, __global float *restrict dsink,
                        __global const long *restrict table, uint sequences, ulong unit_first, uint q_heads,
                        long sink_first, long sink_stride, long dsink_first, long dsink_stride, uint accumulate)
{
    __local float part[ITEMS];
    const uint lid = get_local_id(0), head = (uint)(unit_first + get_group_id(0));
    const float logit = sink[sink_first + (long)head * sink_stride];
    float total = 0;
    for (uint s = 0; s < sequences; s++) {
        __global const long *sequence = table + 2 * TENSORS + s * FIELDS;
        const uint q_len = (uint)sequence[FIELD_Q_LEN];
        float sum = 0;
        for (uint row = lid; row < q_len; row += ITEMS) {
            float row_lse = lse[sequence[TENSOR_LSE] + (long)row * LEN_STRIDE(table, TENSOR_LSE) +
                                (long)head * HEAD_STRIDE(table, TENSOR_LSE)];
            if (row_lse > -INFINITY)
                sum -= exp(logit - row_lse) * delta[(ulong)sequence[FIELD_DELTA] + (ulong)row * q_heads + head];
        }
        total += sum;
    }
    part[lid] = total;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid > 0) return;
    for (uint n = 1; n < ITEMS; n++)
        total += part[n];
    __global float *place = dsink + dsink_first + (long)head * dsink_stride;
    *place = accumulate ? *place + total : total;
}
