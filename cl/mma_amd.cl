/* SPDX-License-Identifier: MIT */
/* The matrix tier's interface (mma_portable.cl) on AMD's GPUs: MFMA on gfx90a and gfx942, whose 64 lanes share the depth,
 * WMMA on gfx1100, whose two halves of 32 lanes have the same operands.
 *
 *            a, b: row or column     depth             c.x[i]: row              column
 *   MFMA     lane % 16               lane / 16 * 4 ..  lane / 16 * 4 + i        lane % 16
 *   WMMA     lane % 16               all               2 * i + lane / 16        lane % 16
 *
 * Macro: HALF 1: float16, 0: bfloat16. */

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define MMA_ROWS 16
#define MMA_COLUMNS 16
#define MMA_DEPTH 16
#define MMA_COLUMN(lane, i) ((lane) % 16u)
#define MMA_KERNEL

#if defined(__gfx90a__) || defined(__gfx942__)
#define MMA_LANES 64
#define MMA_VALUES 4
#define MMA_ROW(lane, i) ((lane) / 16u * 4u + (i))
#define MMA_OPERAND 4
#define MMA_FIRST(lane) ((lane) / 16u * 4u)
#if HALF
#define MMA_BUILTIN(a, b, c) __builtin_amdgcn_mfma_f32_16x16x16f16(as_half4(a), as_half4(b), c, 0, 0, 0)
#else
#define MMA_BUILTIN(a, b, c) __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(as_short4(a), as_short4(b), c, 0, 0, 0)
#endif
#elif defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || defined(__gfx1103__)
#define MMA_LANES 32
#define MMA_VALUES 8
#define MMA_ROW(lane, i) (2u * (i) + (lane) / 16u)
#define MMA_OPERAND 16
#define MMA_FIRST(lane) 0u
#if HALF
#define MMA_BUILTIN(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(as_half16(a), as_half16(b), c)
#else
#define MMA_BUILTIN(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(as_short16(a), as_short16(b), c)
#endif
#else
#error "no matrix units are known on this device"
#endif

typedef struct {
    JOIN(ushort, MMA_OPERAND) x;
} mma_a;
typedef mma_a mma_b;
typedef union {
    JOIN(float, MMA_VALUES) all;
    float x[MMA_VALUES];
} mma_c;

static inline void mma_load_a(mma_a *a, __local const ushort *p, uint pitch)
{
    const uint lane = (uint)get_local_id(0);
    a->x = JOIN(vload, MMA_OPERAND)(0, p + lane % 16u * pitch + MMA_FIRST(lane));
}
#define mma_load_b mma_load_a

static inline void mma_zero(mma_c *c)
{
    c->all = 0.0f;
}

static inline void mma_multiply(mma_c *c, const mma_a *a, const mma_b *b)
{
    c->all = MMA_BUILTIN(a->x, b->x, c->all);
}

static inline void mma_store(const mma_c *c, __local float *p, uint pitch)
{
    const uint lane = (uint)get_local_id(0);
    UNROLLED
    for (uint i = 0; i < MMA_VALUES; i++)
        p[MMA_ROW(lane, i) * pitch + MMA_COLUMN(lane, i)] = c->x[i];
}
