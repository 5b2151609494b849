/* SPDX-License-Identifier: MIT */
/* What stands around the matrix products of dense attention: copies to float32, softmax of rows, results.
 *
 *     dense_widen    rows [len][heads][dim] of a tensor -> float32 [heads][len][dim]     reads and writes each element once
 *     dense_softmax  scores [rows][keys] -> weights, in place; one work-group a row      reads them twice, writes them once
 *     dense_store    float32 [heads][len][dim] -> rows [len][heads][dim] of the result
 *
 * Macros: DTYPE of what dense_widen reads and dense_store writes; ITEMS of a softmax work-group, a power of two. */

#ifndef ITEMS
#define ITEMS 64
#endif

/* Item: element d of row (i, h). */
__kernel void dense_widen(__global const element *restrict from, __global float *restrict to, long first, long len_stride,
                          long head_stride, uint dim, uint len)
{
    uint d = (uint)get_global_id(0), i = (uint)get_global_id(1), h = (uint)get_global_id(2);
    if (d < dim) to[((ulong)h * len + i) * dim + d] = LOAD(1)(from + first + i * len_stride + h * head_stride + d);
}

__kernel void dense_store(__global const float *restrict from, __global element *restrict to, long first, long len_stride,
                          long head_stride, uint dim, uint len)
{
    uint d = (uint)get_global_id(0), i = (uint)get_global_id(1), h = (uint)get_global_id(2);
    float x = d < dim ? from[((ulong)h * len + i) * dim + d] : 0.0f;
    __global element *place = to + first + i * len_stride + h * head_stride + d;
    if (d < dim) STORE_OF(DTYPE)(x, place);
}

inline float reduce_most(float x, __local float *part)
{
    uint lid = (uint)get_local_id(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    part[lid] = x;
    for (uint n = ITEMS / 2; n > 0; n /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < n) part[lid] = part[lid + n] > part[lid] ? part[lid + n] : part[lid];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return part[0];
}

inline float reduce_sum(float x, __local float *part)
{
    uint lid = (uint)get_local_id(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    part[lid] = x;
    for (uint n = ITEMS / 2; n > 0; n /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < n) part[lid] += part[lid + n];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return part[0];
}

/* Group: row i of head h, which sees the first `seen` of `keys` keys. An empty row gets zeros and -infinity. */
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
dense_softmax(__global float *restrict scores, __global float *restrict lse, uint keys, long position, int causal,
              long lse_first, long lse_len_stride, long lse_head_stride, uint has_lse)
{
    __local float part[ITEMS];
    const uint lid = (uint)get_local_id(0), i = (uint)get_group_id(1), h = (uint)get_group_id(2);
    __global float *row = scores + ((ulong)h * get_num_groups(1) + i) * keys;
    const long end = causal ? position + (long)i + 1 : (long)keys;
    const uint seen = end < 0 ? 0u : end < (long)keys ? (uint)end : keys;
    float most = -INFINITY, sum = 0.0f;
    for (uint j = lid; j < seen; j += ITEMS)
        most = row[j] > most ? row[j] : most;
    most = reduce_most(most, part);
    float base = fabs(most) < INFINITY ? most : 0.0f;
    for (uint j = lid; j < seen; j += ITEMS) {
        float weight = exp(row[j] - base);
        row[j] = weight;
        sum += weight;
    }
    sum = reduce_sum(sum, part);
    float factor = sum != 0.0f ? 1.0f / sum : 0.0f;
    for (uint j = lid; j < keys; j += ITEMS)
        row[j] = j < seen ? row[j] * factor : 0.0f;
    if (has_lse && lid == 0)
        lse[lse_first + i * lse_len_stride + h * lse_head_stride] = sum != 0.0f ? base + log(sum) : -INFINITY;
}
