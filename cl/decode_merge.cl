/* SPDX-License-Identifier: MIT */
/* Joins the results that work-groups have for parts of a row's keys: merge.cl for any number of parts.
 *
 *   lse = log(sum_n exp lse[n]),   out = sum_n out[n] exp(lse[n] - lse)
 *
 * A work-group owns one row and head; an item its dimensions lid, lid + ITEMS ... Reads parts x (DIM_V + 1)
 * floats, writes DIM_V + 1. A part without keys has lse = -infinity.
 *
 * Macros: DIM_V 1..256; OUT_DTYPE; ITEMS of a work-group; SINK 1: a logit of the head joins rows that have
 * keys. */

#ifndef SINK
#define SINK 0
#endif
typedef ELEMENT_OF(OUT_DTYPE) out_element;
#define STORE STORE_OF(OUT_DTYPE)

/* part_out [parts][rows][heads][DIM_V], part_lse [parts][rows][heads]; `pairs` of rows and heads. */
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
decode_merge(__global const float *restrict part_out, __global const float *restrict part_lse, uint parts,
             ulong pairs, uint heads, __global out_element *restrict out, long out_first, long out_stride,
             long out_head_stride, __global float *restrict lse, long lse_first, long lse_stride,
             long lse_head_stride, uint has_lse, __global const float *restrict sink, long sink_first,
             long sink_stride)
{
    const uint lid = get_local_id(0);
    const ulong pair = get_group_id(0), row = pair / heads, head = pair - row * heads;
    float most = -INFINITY, sum = 0.0f;
    for (uint n = 0; n < parts; n++) {
        const float x = part_lse[n * pairs + pair];
        most = x > most || isnan(x) ? x : most;
    }
    const bool is_empty = most == -INFINITY;
#if SINK
    const float logit = sink[sink_first + (long)head * sink_stride];
    if (!is_empty && logit > most) most = logit;
    if (!is_empty) sum = exp(logit - most);
#endif
    for (uint n = 0; n < parts && !is_empty; n++)
        sum += exp(part_lse[n * pairs + pair] - most);
    if (has_lse && lid == 0)
        lse[lse_first + (long)row * lse_stride + (long)head * lse_head_stride] =
            is_empty ? -INFINITY : most + log(sum);
    out += out_first + (long)row * out_stride + (long)head * out_head_stride;
    for (uint d = lid; d < DIM_V; d += ITEMS) {
        float x = 0.0f;
        for (uint n = 0; n < parts && !is_empty; n++) {
            const float share = exp(part_lse[n * pairs + pair] - most);
            if (share != 0.0f) x += share / sum * part_out[(n * pairs + pair) * DIM_V + d];
        }
        STORE(x, out + d);
    }
}
