/* SPDX-License-Identifier: MIT */
/* Flat selection by means, around one matrix product. The score of a leaf is linear in the query, so the queries of a
 * group are added first:
 *
 *     flat_sum     q [len][heads][dim] -> sum over the group [rows][dim]     float32, heads in order
 *     (product)    scores [leaves][rows] = means * sums^T
 *     flat_best    the best TOPK leaves of each row, forced ones included; an item a row, one pass over its column
 *
 * Neighbouring items read neighbouring scores. The lists of the items lie in local memory, since registers cannot be
 * indexed. Macros: DTYPE of q; TOPK 1..64 entries of a list; ITEMS of a work-group of flat_best. */

#ifndef TOPK
#define TOPK 1
#endif
#ifndef ITEMS
#define ITEMS 1
#endif
#define AT(n) ((n) * ITEMS + lid)

/* Item: element d of row i. */
__kernel void flat_sum(__global const element *restrict q, __global float *restrict sums, long first, long len_stride,
                       long head_stride, uint dim, uint group)
{
    uint d = (uint)get_global_id(0), i = (uint)get_global_id(1);
    float sum = 0.0f;
    if (d >= dim) return;
    for (uint g = 0; g < group; g++)
        sum += LOAD(1)(q + first + (long)i * len_stride + (long)g * head_stride + d);
    sums[(ulong)i * dim + d] = sum;
}

/* Item: row i of the chunk, at position `position` + i. Lists go to indices [list_first + i * list_stride]. */
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
flat_best(__global const float *restrict scores, __global int *restrict indices, __global int *restrict counts,
                        uint rows, long position, long kv_len, int causal, uint leaf, uint forced_first, uint forced_last,
                        long list_first, long list_stride)
{
    __local float best[TOPK * ITEMS]; /* [entry][item] */
    __local int list[TOPK * ITEMS];
    const uint i = (uint)get_global_id(0), lid = (uint)get_local_id(0);
    if (i >= rows) return;
    const long end = causal ? position + (long)i + 1 : kv_len;
    const ulong seen = end < 0 ? 0 : (ulong)end;
    const uint leaves = (uint)((seen + leaf - 1) / leaf);
    uint count = 0, first_end = 0, last_first = leaves;
    if (causal) { /* by priority: the row's own leaf, those before it, then the first ones */
        uint last = min(min(forced_last, leaves), (uint)TOPK);
        uint others = leaves > forced_last ? leaves - forced_last : 0;
        last_first = leaves - last;
        first_end = min(min(forced_first, others), (uint)TOPK - last);
    }
    const uint room = TOPK - first_end - (leaves - last_first);
    const uint eligible = causal ? min(last_first, (uint)(seen / leaf)) : leaves;
    for (uint n = first_end; n < eligible && room > 0; n++) {
        float score = scores[(ulong)n * rows + i];
        score = score == score ? score : -INFINITY;
        if (count == room && !(score > best[AT(room - 1)])) continue;
        uint at = count < room ? count++ : room - 1;
        while (at > 0 && score > best[AT(at - 1)]) { /* equal scores: the lower index, which came first, stays */
            best[AT(at)] = best[AT(at - 1)];
            list[AT(at)] = list[AT(at - 1)];
            at--;
        }
        best[AT(at)] = score;
        list[AT(at)] = (int)n;
    }
    for (uint n = 0; n < first_end; n++)
        list[AT(count++)] = (int)n;
    for (uint n = last_first; n < leaves; n++)
        list[AT(count++)] = (int)n;
    for (uint a = 1; a < count; a++) { /* ascending */
        int value = list[AT(a)];
        uint at = a;
        while (at > 0 && list[AT(at - 1)] > value) {
            list[AT(at)] = list[AT(at - 1)];
            at--;
        }
        list[AT(at)] = value;
    }
    const long to = list_first + (long)i * list_stride;
    for (uint n = 0; n < TOPK; n++)
        indices[to * TOPK + n] = n < count ? list[AT(n)] : -1;
    counts[to] = (int)count;
}
