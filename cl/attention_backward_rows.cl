/* SPDX-License-Identifier: MIT */
/* Rows of q, k, v and dout as wgmma wants them in local memory; attention_backward_wgmma.cl and
 * attention_backward_tile.cl share it. Macros: those of attention_tile.cl. */

#define K_TILES ((DIM + 15) / 16)
#define K_QUADS ((DIM + 31) / 32)
/* 16-byte piece `chunk` of `row`: core matrices of eight rows, chunks side by side */
#define CORE(chunks, row, chunk) (((row) / 8 * (chunks) + (chunk)) * 8 + (row) % 8)

/* Is a key or column among those from `begin` on and before `end`? */
#define SEES(key, begin, end) ((!WINDOW || (key) >= (begin)) && (key) < (end))

/* 16-byte pieces of a row into core matrices; zeros where it does not exist */
static inline void stage_row(__local uint4 *to, __global const ushort *from, uint chunks, uint dim, uint row,
                             int exists, uint first, uint last)
{
#if VECTORS(DIM) && VECTORS(DIM_V)
#pragma unroll 8
#else
#pragma unroll 1 /* it goes through registers, of which the sums leave few */
#endif
    for (uint chunk = first; chunk < last; chunk++) {
        const int there = exists && chunk * 8 < dim;
        if (VECTORS(DIM) && VECTORS(DIM_V))
            copy_async(local_address(to + CORE(chunks, row, chunk)), from + (there ? chunk * 8 : 0),
                       there ? 16 : 0);
        else
            to[CORE(chunks, row, chunk)] = there ? load8(from, chunk * 8, dim) : (uint4)(0, 0, 0, 0);
    }
}
