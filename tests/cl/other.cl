/* SPDX-License-Identifier: MIT */
/* A program without the kernels of runtime.cl. */
__kernel void other(__global uint *x, int count)
{
    uint i = (uint)get_global_id(0);
    if (i < (uint)count) x[i] = 0;
}
