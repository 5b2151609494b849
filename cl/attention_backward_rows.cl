/* SPDX-License-Identifier: MIT */
/* Rows of q, k, v and dout as wgmma wants them in local memory; attention_backward_wgmma.cl and
 * attention_backward_tile.cl share it. Macros: those of attention_tile.cl. */

#define K_TILES ((DIM + 15) / 16)
#define K_QUADS ((DIM + 31) / 32)
/* 16-byte piece `chunk` of `row`: core matrices of eight rows, chunks side by side */
#define CORE(chunks, row, chunk) (((row) / 8 * (chunks) + (chunk)) * 8 + (row) % 8)

/* Is a key or column among those from `begin` on and before `end`? */
#define SEES(key, begin, end) ((!WINDOW || (key) >= (begin)) && (key) < (end))

/* 16-byte pieces of a row into core matrices; zeros where it does not exist. Rows that are not aligned come number
 * by number: more of them at once would take registers that the sums leave no more. */
static inline void stage_row(__local uint4 *to, __global const ushort *from, uint chunks, uint dim, uint row,
                             int exists, uint first, uint last)
{
#if VECTORS(DIM) && VECTORS(DIM_V)
#pragma unroll 8
    for (uint chunk = first; chunk < last; chunk++) {
        const int there = exists && chunk * 8 < dim;
        copy_async(local_address(to + CORE(chunks, row, chunk)), from + (there ? chunk * 8 : 0), there ? 16 : 0);
    }
#else
#pragma unroll 1
    for (uint n = 8 * first; n < 8 * last; n++)
        ((__local ushort *)(to + CORE(chunks, row, n / 8)))[n % 8] = exists && n < dim ? from[n] : (ushort)0;
#endif
}
