/* SPDX-License-Identifier: MIT */
/* The matrix tier's interface (mma_portable.cl) on Intel's GPUs with matrix engines, by DPAS
 * (cl_intel_subgroup_matrix_multiply_accumulate): 8 rows, a column a lane, a depth of 16.
 *
 *   8 lanes (Arc)          a: of each row, elements 2 lane and 2 lane + 1
 *   16 lanes (Max)         a: of each row, element lane
 *   both                   b: of the lane's column, 8 pairs; c.x[i]: row i, column lane
 *
 * Macros: SG 8 or 16 lanes; HALF 1: float16, 0: bfloat16. */

#pragma OPENCL EXTENSION cl_intel_subgroups : enable
#pragma OPENCL EXTENSION cl_intel_required_subgroup_size : enable

#define MMA_LANES SG
#define MMA_ROWS 8
#define MMA_COLUMNS SG
#define MMA_DEPTH 16
#define MMA_VALUES 8
#define MMA_ROW(lane, i) (i)
#define MMA_COLUMN(lane, i) (lane)
#define MMA_KERNEL __attribute__((intel_reqd_sub_group_size(SG)))

#if SG == 8
typedef int8 mma_operand_a;
#else
typedef short8 mma_operand_a;
#endif

/* Compilers know the functions and do not declare them. */
#if HALF
#define MMA_BUILTIN intel_sub_group_f16_f16_matrix_mad_k16
#else
#define MMA_BUILTIN intel_sub_group_bf16_bf16_matrix_mad_k16
#endif
float8 __attribute__((overloadable)) MMA_BUILTIN(mma_operand_a a, int8 b, float8 c);

typedef union {
    mma_operand_a all;
#if SG == 8
    int x[8];
#else
    short x[8];
#endif
} mma_a;
typedef union {
    int8 all;
    int x[8];
} mma_b;
typedef union {
    float8 all;
    float x[MMA_VALUES];
} mma_c;

static inline void mma_load_a(mma_a *a, __local const ushort *p, uint pitch)
{
    const uint lane = (uint)get_local_id(0);
    UNROLLED
    for (uint i = 0; i < MMA_ROWS; i++)
#if SG == 8
        a->x[i] = ((__local const int *)(p + i * pitch))[lane];
#else
        a->x[i] = ((__local const short *)(p + i * pitch))[lane];
#endif
}

static inline void mma_load_b(mma_b *b, __local const ushort *p, uint pitch)
{
    b->all = vload8(0, (__local const int *)(p + (uint)get_local_id(0) * pitch));
}

static inline void mma_zero(mma_c *c)
{
    c->all = 0.0f;
}

static inline void mma_multiply(mma_c *c, const mma_a *a, const mma_b *b)
{
    c->all = MMA_BUILTIN(a->all, b->all, c->all);
}

static inline void mma_store(const mma_c *c, __local float *p, uint pitch)
{
    const uint lane = (uint)get_local_id(0);
    UNROLLED
    for (uint i = 0; i < MMA_VALUES; i++)
        p[MMA_ROW(lane, i) * pitch + MMA_COLUMN(lane, i)] = c->x[i];
}
