/* SPDX-License-Identifier: MIT */
/* Rows of q, k, v and dout as wgmma wants them in local memory; attention_backward_wgmma.cl and
 * attention_backward_tile.cl share it. Macros: those of attention_tile.cl. */

#define K_TILES ((DIM + 15) / 16)
#define K_QUADS ((DIM + 31) / 32)
/* 16-byte piece `chunk` of `row`: core matrices of eight rows, chunks side by side */
#define CORE(chunks, row, chunk) (((row) / 8 * (chunks) + (chunk)) * 8 + (row) % 8)

/* Is a key or column among those from `begin` on and before `end`? */
#define SEES(key, begin, end) ((!WINDOW || (key) >= (begin)) && (key) < (end))

/* Each `step`-th of the 16-byte pieces first..last-1 of a row into core matrices; zeros where it does not exist. Rows
 * that are not aligned come number by number: more of them at once would take registers that the sums leave no more. */
static inline void stage_row(__local uint4 *to, __global const ushort *from, uint chunks, uint dim, uint row,
                             int exists, uint first, uint last, uint step)
{
#if VECTORS(DIM) && VECTORS(DIM_V)
#pragma unroll 8
    for (uint chunk = first; chunk < last; chunk += step) {
        const int there = exists && chunk * 8 < dim;
        copy_async(local_address(to + CORE(chunks, row, chunk)), from + (there ? chunk * 8 : 0), there ? 16 : 0);
    }
#else
#pragma unroll 1
    for (uint chunk = first; chunk < last; chunk += step) {
        __local ushort *piece = (__local ushort *)(to + CORE(chunks, row, chunk));
#pragma unroll 1
        for (uint n = 0; n < 8; n++)
            piece[n] = exists && 8 * chunk + n < dim ? from[8 * chunk + n] : (ushort)0;
    }
#endif
}
