/* SPDX-License-Identifier: MIT */
/* Small kernels whose results depend on order, offsets and arguments. */

/* x = 3 x + STEP: running it n times in order has one result only. */
__kernel __attribute__((reqd_work_group_size(16, 1, 1))) void advance(__global uint *x, int count)
{
    uint i = (uint)get_global_id(0);
    if (i < (uint)count) x[i] = 3u * x[i] + STEP;
}

#ifdef LEN
/* out[i] = factor * in[i] of a strided tensor [batch][LEN][HEADS][DIM]; missing in is 0. Divisions are by constants:
 * others make clang emit an instruction that Oclgrind does not know. */
__kernel void gather(__global const float *in, long offset, long batch_stride, long len_stride, long head_stride,
                     __global const float *missing, __global float *out, int count, float factor,
                     __local float *scratch)
{
    uint i = (uint)get_global_id(0), d = i % DIM, h = i / DIM % HEADS, t = i / (DIM * HEADS) % LEN;
    uint b = i / (DIM * HEADS * LEN);
    scratch[get_local_id(0)] = in[offset + b * batch_stride + t * len_stride + h * head_stride + d];
    barrier(CLK_LOCAL_MEM_FENCE);
    if (i < (uint)count) out[i] = factor * scratch[get_local_id(0)] + (missing ? missing[0] : 0.0f);
}
#endif
