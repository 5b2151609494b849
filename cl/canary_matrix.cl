/* SPDX-License-Identifier: MIT */
/* Do the four verbs of a form of the matrix tier (mma_portable.cl) do what they say? a [MMA_ROWS][DEPTH] x
 * b^T [MMA_COLUMNS][DEPTH], of which DEPTH / MMA_DEPTH products make the sum; the result as stored, then by the lane map:
 * out [2][MMA_ROWS][MMA_COLUMNS], behind it the numbers of rows and columns. One work-group of MMA_LANES.
 *
 * Macro: DEPTH, a multiple of MMA_DEPTH. */

#define PITCH (DEPTH + 2)

MMA_KERNEL __kernel __attribute__((reqd_work_group_size(MMA_LANES, 1, 1))) void
canary_matrix(__global const ushort *restrict a, __global const ushort *restrict b, __global float *restrict out)
{
    __local ushort a_tile[MMA_ROWS * PITCH], b_tile[MMA_COLUMNS * PITCH];
    __local float result[MMA_ROWS * (MMA_COLUMNS + 1)];
    const uint lane = (uint)get_local_id(0);
    for (uint e = lane; e < MMA_ROWS * DEPTH; e += MMA_LANES)
        a_tile[e / DEPTH * PITCH + e % DEPTH] = a[e];
    for (uint e = lane; e < MMA_COLUMNS * DEPTH; e += MMA_LANES)
        b_tile[e / DEPTH * PITCH + e % DEPTH] = b[e];
    barrier(CLK_LOCAL_MEM_FENCE);
    mma_a x;
    mma_b y;
    mma_c sum;
    mma_zero(&sum);
    for (uint d = 0; d < DEPTH; d += MMA_DEPTH) {
        mma_load_a(&x, a_tile + d, PITCH);
        mma_load_b(&y, b_tile + d, PITCH);
        mma_multiply(&sum, &x, &y);
    }
    mma_store(&sum, result, MMA_COLUMNS + 1);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint e = lane; e < MMA_ROWS * MMA_COLUMNS; e += MMA_LANES)
        out[e] = result[e / MMA_COLUMNS * (MMA_COLUMNS + 1) + e % MMA_COLUMNS];
    UNROLLED
    for (uint i = 0; i < MMA_VALUES; i++)
        out[(MMA_ROWS + MMA_ROW(lane, i)) * MMA_COLUMNS + MMA_COLUMN(lane, i)] = sum.x[i];
    if (lane == 0) {
        out[2 * MMA_ROWS * MMA_COLUMNS] = MMA_ROWS;
        out[2 * MMA_ROWS * MMA_COLUMNS + 1] = MMA_COLUMNS;
    }
}
