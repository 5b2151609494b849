/* SPDX-License-Identifier: MIT */
/* The matrix tier's interface, and its form for devices without matrix units. MMA_LANES items, which are a work-group,
 * multiply a tile of MMA_ROWS x MMA_DEPTH with one of MMA_DEPTH x MMA_COLUMNS:
 *
 *   load       mma_load_a(&a, p, pitch)   16-bit elements [MMA_ROWS][pitch] in local memory
 *              mma_load_b(&b, p, pitch)   [MMA_COLUMNS][pitch]: a column's depth is contiguous, as in rows of keys
 *   multiply   mma_multiply(&c, &a, &b)   c += a b, in float32; mma_zero(&c) before the first
 *   store      mma_store(&c, p, pitch)    float32 [MMA_ROWS][pitch] in local memory
 *   lane map   MMA_ROW(lane, i), MMA_COLUMN(lane, i)   place of value i, c.x[i], of a lane; 0 <= i < MMA_VALUES
 *
 * Rows start at multiples of 4 bytes (pitch is even). What is in local memory must be complete before a load, behind a
 * barrier, and may change behind another one after the multiply. Other forms: mma_amd.cl, mma_intel.cl; mma_nvidia.cl has
 * fragments of its own.
 *
 * Macro: HALF 1: float16, 0: bfloat16. */

#define MMA_LANES 16
#define MMA_ROWS 16
#define MMA_COLUMNS 16
#define MMA_DEPTH 16
#define MMA_VALUES 16
#define MMA_ROW(lane, i) (i)
#define MMA_COLUMN(lane, i) (lane)
#define MMA_KERNEL

/* Tiles stay where they are: items cannot hand over elements but through local memory. */
typedef struct {
    __local const ushort *p;
    uint pitch;
} mma_a;
typedef mma_a mma_b;
typedef struct {
    float x[MMA_VALUES];
} mma_c;

static inline float mma_element(__local const ushort *p)
{
#if HALF
    return vload_half(0, (__local const half *)p);
#else
    return as_float((uint)*p << 16);
#endif
}

static inline void mma_load_a(mma_a *a, __local const ushort *p, uint pitch)
{
    a->p = p;
    a->pitch = pitch;
}
#define mma_load_b mma_load_a

static inline void mma_zero(mma_c *c)
{
    UNROLLED
    for (uint i = 0; i < MMA_VALUES; i++)
        c->x[i] = 0.0f;
}

/* An item has a column. */
static inline void mma_multiply(mma_c *c, const mma_a *a, const mma_b *b)
{
    const uint lane = (uint)get_local_id(0);
    ROLLED
    for (uint d = 0; d < MMA_DEPTH; d++) {
        const float y = mma_element(b->p + lane * b->pitch + d);
        UNROLLED
        for (uint i = 0; i < MMA_VALUES; i++)
            c->x[i] = mad(mma_element(a->p + i * a->pitch + d), y, c->x[i]);
    }
}

static inline void mma_store(const mma_c *c, __local float *p, uint pitch)
{
    const uint lane = (uint)get_local_id(0);
    UNROLLED
    for (uint i = 0; i < MMA_VALUES; i++)
        p[MMA_ROW(lane, i) * pitch + MMA_COLUMN(lane, i)] = c->x[i];
}
