/* SPDX-License-Identifier: MIT */
/* Does this card multiply as mma_nvidia.cl says? One warp: out [16][8] = A [16][16] B [16][8]^T of small integers.
 *
 *   a [16 rows][16], b [8 rows][16] 16-bit numbers in pairs
 */
__kernel
__attribute__((reqd_work_group_size(32, 1, 1))) void canary_mma(__global const uint *a, __global const uint *b,
                                                                __global float *out)
{
    const uint lane = (uint)get_local_id(0), g = lane >> 2, c = lane & 3;
    float4 d = (float4)(0, 0, 0, 0);
    mma(&d, a[g * 8 + c], a[(g + 8) * 8 + c], a[g * 8 + c + 4], a[(g + 8) * 8 + c + 4], b[g * 8 + c],
        b[g * 8 + c + 4]);
    out[g * 8 + 2 * c] = d.x;
    out[g * 8 + 2 * c + 1] = d.y;
    out[(g + 8) * 8 + 2 * c] = d.z;
    out[(g + 8) * 8 + 2 * c + 1] = d.w;
}
