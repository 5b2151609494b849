/* SPDX-License-Identifier: MIT */
/* Does this card multiply as wgmma_nvidia.cl says? One warpgroup: out [64][64] = A [64][64] B [64][64]^T of small integers,
 * both brought by a bulk copy as core matrices of 8 rows x 16 bytes.
 *
 *   ab [2][8 row octets][8 chunks][8 rows][8 numbers] 16-bit
 */
#define BYTES (64 * 64 * 2)
__kernel
__attribute__((reqd_work_group_size(128, 1, 1))) void canary_wgmma(__global const uchar *ab, __global float *out)
{
    __local uchar rows[2 * BYTES] __attribute__((aligned(1024)));
    __local ulong full;
    const uint t = (uint)get_local_id(0), g = t >> 2 & 7, c = t & 3, row = (t >> 5) * 16 + g;
    const uint address = local_address(rows), full_address = local_address(&full);
    if (t == 0) {
        barrier_init(full_address, 1);
        barrier_init_fence();
        barrier_expect(full_address, 2 * BYTES);
        bulk_copy(address, ab, 2 * BYTES, full_address);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    barrier_wait(full_address, 0);
    float4 s[8];
    warpgroup_scores_local(s, address, address + BYTES);
#pragma unroll
    for (uint n = 0; n < 8; n++) {
        out[row * 64 + 8 * n + 2 * c] = s[n].x;
        out[row * 64 + 8 * n + 2 * c + 1] = s[n].y;
        out[(row + 8) * 64 + 8 * n + 2 * c] = s[n].z;
        out[(row + 8) * 64 + 8 * n + 2 * c + 1] = s[n].w;
    }
}
