/* SPDX-License-Identifier: MIT */
/* Common to all kernels of the portable tier: OpenCL C 1.2, no fp16 arithmetic, no subgroups, work-groups of at
 * most 256.
 *
 * Elements are float32 in registers and local memory; float16 and bfloat16 exist in global memory only. Rows
 * (query tokens and heads) are the lanes of a vector, so that neither maxima nor sums cross lanes:
 *
 *             row group 0 ... ROW_GROUPS-1          an item owns LANES rows and ITEM_KEYS keys
 *            +-----------+-----------+              (later LANES rows and a share of the value dimensions):
 *     key    | item 0    | item 1    |              it reads its rows from a transposed tile of q as one
 * vector, groups | item 2    | item 3    |              and single key elements, which the lanes share
 *            +-----------+-----------+
 *
 * Rows are numbered by uint, and a remainder is written as x - x / n * n: for / and % side by side clang emits
 * `freeze`, which oclgrind and llvm-spirv do not know.
 *
 * CPUs take 16 lanes and few items; GPUs take 4 lanes and many.
 *
 * Macros, integers given at build time: DTYPE 1 float32, 2 float16, 3 bfloat16 (clattn_dtype; default 1). LANES
 * rows in a vector (1, 2, 4, 8, 16; default 1). */

#pragma OPENCL FP_CONTRACT ON

#ifndef DTYPE
#define DTYPE 1
#endif
#ifndef LANES
#define LANES 1
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define CEIL_DIV(a, b) (((a) + (b)-1) / (b))
#define ROUND_UP(a, b) (CEIL_DIV(a, b) * (b))
/* Only loops over what lies in registers may be unrolled: compilers unroll all that are short enough, and then spill. */
#define ROLLED _Pragma("unroll 1")
#define UNROLLED _Pragma("unroll")

/* ---- vectors of rows ---- */

#if LANES == 1
typedef float lanes;
typedef int lanes_int;
#else
typedef JOIN(float, LANES) lanes;
typedef JOIN(int, LANES) lanes_int;
#endif

#if LANES == 1
#define LANE_NUMBER 0
#elif LANES == 2
#define LANE_NUMBER ((int2)(0, 1))
#elif LANES == 4
#define LANE_NUMBER ((int4)(0, 1, 2, 3))
#elif LANES == 8
#define LANE_NUMBER ((int8)(0, 1, 2, 3, 4, 5, 6, 7))
#else
#define LANE_NUMBER ((int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))
#endif

inline float lanes_sum(lanes x)
{
#if LANES == 16
    float8 x8 = x.lo + x.hi;
#elif LANES == 8
    float8 x8 = x;
#endif
#if LANES >= 8
    float4 x4 = x8.lo + x8.hi;
#elif LANES == 4
    float4 x4 = x;
#endif
    /* By dot: a sum of two elements becomes a shuffle with undefined elements, at which oclgrind fails. */
#if LANES >= 4
    return dot(x4, (float4)(1.0f));
#elif LANES == 2
    return dot(x, (float2)(1.0f));
#else
    return x;
#endif
}

/* The greater one; b when a is NaN, so that a NaN never becomes a maximum. */
inline lanes lanes_max(lanes a, lanes b)
{
    return a > b ? a : b;
}

/* Running maximum: keeps `most` where x is NaN. */
inline lanes lanes_most(lanes most, lanes x)
{
    return x > most ? x : most;
}

/* What exponents are taken against: the maximum, or 0 where it is infinite, so that no difference is inf - inf.
 */
inline lanes lanes_base(lanes most)
{
    return fabs(most) < (lanes)(INFINITY) ? most : (lanes)(0.0f);
}

/* ---- elements in global memory ---- */

/* Types and functions by the number of a type, a macro: ELEMENT_OF(OUT_DTYPE) *out. */
typedef float element_float32;
typedef half element_float16;
typedef ushort element_bfloat16;
#define DTYPE_NAME_1 float32
#define DTYPE_NAME_2 float16
#define DTYPE_NAME_3 bfloat16
#define ELEMENT_OF(TYPE) JOIN(element_, JOIN(DTYPE_NAME_, TYPE))
#define LOAD_OF(TYPE, N) JOIN(JOIN(load_, JOIN(DTYPE_NAME_, TYPE)), JOIN(_, N))
#define STORE_OF(TYPE) JOIN(store_, JOIN(DTYPE_NAME_, TYPE))
typedef ELEMENT_OF(DTYPE) element;
#define LOAD(N) LOAD_OF(DTYPE, N)

#define DEFINE_LOAD(N)                                                                                         \
    inline float##N load_float32_##N(__global const float *p)                                                  \
    {                                                                                                          \
        return vload##N(0, p);                                                                                 \
    }                                                                                                          \
    inline float##N load_float16_##N(__global const half *p)                                                   \
    {                                                                                                          \
        return vload_half##N(0, p);                                                                            \
    }                                                                                                          \
    inline float##N load_bfloat16_##N(__global const ushort *p)                                                \
    {                                                                                                          \
        return as_float##N(convert_uint##N(vload##N(0, p)) << 16);                                             \
    }
DEFINE_LOAD(2)
DEFINE_LOAD(4)
DEFINE_LOAD(8)
DEFINE_LOAD(16)

inline float load_float32_1(__global const float *p)
{
    return *p;
}

inline float load_float16_1(__global const half *p)
{
    return vload_half(0, p);
}

inline float load_bfloat16_1(__global const ushort *p)
{
    return as_float((uint)*p << 16);
}

inline void store_float32(float x, __global float *p)
{
    *p = x;
}

inline void store_float16(float x, __global half *p)
{
    vstore_half_rte(x, 0, p);
}

/* To nearest even; a NaN stays one. */
inline void store_bfloat16(float x, __global ushort *p)
{
    uint bits = as_uint(x);
    uint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    *p = (ushort)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

/* Vectors into local memory. */
inline void put1(float x, __local float *p)
{
    *p = x;
}
#define DEFINE_PUT(N)                                                                                          \
    inline void put##N(float##N x, __local float *p)                                                           \
    {                                                                                                          \
        vstore##N(x, 0, p);                                                                                    \
    }
DEFINE_PUT(2)
DEFINE_PUT(4)
DEFINE_PUT(8)
DEFINE_PUT(16)
#define PUT(N) JOIN(put, N)

/* Sums of their elements. */
inline float sum1(float x)
{
    return x;
}
inline float sum2(float2 x)
{
    return dot(x, (float2)(1.0f));
}
inline float sum4(float4 x)
{
    return dot(x, (float4)(1.0f));
}
inline float sum8(float8 x)
{
    return sum4(x.lo + x.hi);
}
inline float sum16(float16 x)
{
    return sum8(x.lo + x.hi);
}
#define SUM(N) JOIN(sum, N)

typedef float float1;
typedef int int1;
#define VECTOR(N) JOIN(float, N)
#define BITS(N) JOIN(int, N)
#define AS_BITS(N) JOIN(as_int, N)
#define as_int1 as_int

/* ---- sequences ---- */

/* A launch covers the sequences of a batch; `table` holds SEQUENCE_FIELDS numbers for each. A sequence has
 * units of work (what one work-group does), numbered through all sequences. */
#define SEQUENCE_Q 0   /* element of query row 0, head 0 */
#define SEQUENCE_K 1   /* likewise of k */
#define SEQUENCE_V 2   /* v */
#define SEQUENCE_OUT 3 /* out */
#define SEQUENCE_LSE 4 /* lse */
#define SEQUENCE_Q_LEN 5
#define SEQUENCE_KV_LEN 6
#define SEQUENCE_LIST_ROW 7 /* its first list row */
#define SEQUENCE_NODE 8     /* its first pyramid node */
#define SEQUENCE_NODES 9    /* nodes of one key head */
#define SEQUENCE_UNIT 10    /* its first unit */
#define SEQUENCE_LEAF 11    /* its first leaf of the pyramid */
#define SEQUENCE_PAGES 12   /* its first entry in the block table of a decode cache */
#define SEQUENCE_FIELDS 13

/* The sequence that a unit belongs to: the last one that begins at or before it. */
inline __global const long *sequence_of(__global const long *table, uint sequences, ulong unit)
{
    uint low = 0, high = sequences;
    while (high - low > 1) {
        uint middle = (low + high) / 2;
        if ((ulong)table[middle * SEQUENCE_FIELDS + SEQUENCE_UNIT] <= unit)
            low = middle;
        else
            high = middle;
    }
    return table + low * SEQUENCE_FIELDS;
}

/* ---- tiles ---- */

#ifdef ITEM_KEYS
/* s[j] = q . key for the LANES rows of an item and its ITEM_KEYS keys, which lie KEYS / ITEM_KEYS rows of the
 * tile apart, so that neighbouring items read neighbouring rows. */
inline void tile_logits(__local const lanes *q_tile, __local const float4 *key_tile, uint row_group,
                        uint key_group, lanes *s)
{
    lanes sum[ITEM_KEYS];
#pragma unroll
    for (uint j = 0; j < ITEM_KEYS; j++)
        sum[j] = 0.0f;
#pragma unroll 1
    for (uint d = 0; d < ROUND_UP(DIM, 4); d += 4) {
        __local const lanes *columns = q_tile + d * (ROWS / LANES) + row_group;
        lanes q0 = columns[0], q1 = columns[ROWS / LANES], q2 = columns[2 * (ROWS / LANES)];
        lanes q3 = columns[3 * (ROWS / LANES)];
#pragma unroll
        for (uint j = 0; j < ITEM_KEYS; j++) {
            float4 key = key_tile[((j * (KEYS / ITEM_KEYS) + key_group) * (ROUND_UP(DIM, 4) + PAD) + d) / 4];
            sum[j] += q0 * key.x;
            sum[j] += q1 * key.y;
            sum[j] += q2 * key.z;
            sum[j] += q3 * key.w;
        }
    }
#pragma unroll
    for (uint j = 0; j < ITEM_KEYS; j++)
        s[j] = sum[j];
}
#endif
