/* SPDX-License-Identifier: MIT */
/* Matrix verbs for NVIDIA cards (Ampere and later), by inline PTX: load, multiply, store, lane map.
 *
 * A warp holds fragments of 16 x 16 (A), 16 x 8 (B) and 16 x 8 (C, float32). With lane = 4 g + c:
 *
 *   A  a0 (row g,   k 2c..2c+1)   a1 (row g+8, same k)   a2 (row g, k+8)   a3 (row g+8, k+8)
 *   B  b0 (k 2c..2c+1, column g)  b1 (k+8, column g)
 *   C  x,y (row g, columns 2c, 2c+1)   z,w (row g+8, the same columns)
 *
 * The order of k is free as long as A and B agree. Where both come from rows of `dim` numbers, lane c takes
 * the eight consecutive numbers 8c..8c+7 of a stretch of 32: one 16-byte load feeds two multiplications
 * (mma32).
 *
 * Macros: DTYPE 0 bfloat16, 1 float16.
 */
#ifndef DTYPE
#define DTYPE 0
#endif
#if DTYPE == 0
#define MMA_TYPE "bf16"
#else
#define MMA_TYPE "f16"
#endif

#define LOG2E 1.44269504088896341f
#define LN2 0.693147180559945309f

#ifndef CLATTN_EMULATE
static inline void mma(float4 *d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1)
{
    __asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 "
                   "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                   : "+f"(d->x), "+f"(d->y), "+f"(d->z), "+f"(d->w)
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* The address within local memory, as ldmatrix, cp.async and mbarrier want it. */
static inline uint local_address(__local const void *p)
{
    uint u;
    __asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(u) : "l"((ulong)p));
    return u;
}

/* Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8. */
static inline uint4 load_matrix_trans(uint address)
{
    uint4 r;
    __asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                   : "r"(address)
                   : "memory");
    return r;
}

static inline uint4 load_matrix(uint address)
{
    uint4 r;
    __asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                   : "r"(address)
                   : "memory");
    return r;
}

/* Asynchronous copy of 16 bytes; only the first `bytes` are read, the rest becomes zero. */
static inline void copy_async(uint to, __global const void *from, uint bytes)
{
    __asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"((ulong)from), "r"(bytes)
                   : "memory");
}
#define copy_commit() __asm volatile("cp.async.commit_group;" ::: "memory")
#define copy_wait(n) __asm volatile("cp.async.wait_group " #n ";" ::: "memory")

static inline float shuffle_xor(float v, uint mask)
{
    float r;
    __asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(r) : "f"(v), "r"(mask));
    return r;
}
static inline uint shuffle_xor_uint(uint v, uint mask)
{
    uint r;
    __asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(r) : "r"(v), "r"(mask));
    return r;
}
static inline uint shuffle(uint v, uint from)
{
    uint r;
    __asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(r) : "r"(v), "r"(from));
    return r;
}
static inline uint ballot(int p)
{
    uint r;
    __asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
                   : "=r"(r)
                   : "r"(p));
    return r;
}
#define warp_fence() __asm volatile("bar.warp.sync 0xffffffff;" ::: "memory")

/* The work-item's number, read anew: what an epilogue derives from it need not stay in registers over the main
 * loop. */
static inline uint work_item_again(void)
{
    uint t;
    __asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}

static inline uint work_group_again(void)
{
    uint t;
    __asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(t));
    return t;
}

static inline float exp2_fast(float x)
{
    float r;
    __asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
static inline float log2_fast(float x)
{
    float r;
    __asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
static inline float reciprocal_fast(float x)
{
    float r;
    __asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
static inline uint pack2(float low, float high)
{
    uint r;
    __asm("cvt.rn." MMA_TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
#if DTYPE == 1
static inline float half_to_float(uint h)
{
    float r;
    __asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "r"(h));
    return r;
}
#endif
#define compiler_fence() __asm volatile("" ::: "memory")
#endif /* CLATTN_EMULATE */

#if DTYPE == 0
#define unpack_low(w) as_float((w) << 16)
#define unpack_high(w) as_float((w)&0xffff0000u)
#else
#define unpack_low(w) half_to_float((w)&0xffffu)
#define unpack_high(w) half_to_float((w) >> 16)
#endif

/* d += A B over a stretch of 32: a0, a1 are the lane's 8 numbers of rows g and g+8, b those of column g. */
static inline void mma32(float4 *d, uint4 a0, uint4 a1, uint4 b)
{
    mma(d, a0.x, a1.x, a0.y, a1.y, b.x, b.y);
    mma(d, a0.z, a1.z, a0.w, a1.w, b.z, b.w);
}
