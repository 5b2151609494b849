/* SPDX-License-Identifier: MIT */
/* Hopper verbs: warpgroup multiplication (wgmma), bulk copies and transaction barriers.
 *
 * The compiler of OpenCL C emits PTX for sm_90 and refuses wgmma, which needs sm_90a. The instruction is
 * therefore written as a PTX comment with its operands; the host uncomments the marks in the program's binary
 * (which is that text), sets the target sm_90a and loads it again. Built without that step the kernels compute
 * nothing: the self-test finds it.
 *
 * B operands lie in local memory as core matrices without swizzle: 8 rows (columns of B) x 16 bytes
 * contiguous; `lead` bytes to the next core matrix in k (128), `stride` bytes to the next 8 columns. A operands
 * are registers in the layout of mma.sync, one 16-row tile a warp, or local memory; results are registers.
 */
#ifndef CLATTN_EMULATE
#define SM90A "//sm_90a "
/* Limits a kernel's registers so that n work-groups fit on a multiprocessor: another mark for the host, which
 * adds `.minnctapersm n` to the kernel (the compiler has no working option for it). */
#define GROUPS_PER_UNIT(n) __asm volatile("//groups_per_unit " #n)
#define GROUPS_PER_UNIT_OF(n) GROUPS_PER_UNIT(n)
#define REGISTERS_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define REGISTERS_1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define REGISTERS_3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS_4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define REGISTERS_5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define REGISTERS_6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define REGISTERS_7 ",%56,%57,%58,%59,%60,%61,%62,%63"
/* the operands of 16 columns: two 8-column tiles d[i], d[i + 1] */
#define PAIR(d, i)                                                                                          \
    "+f"((d)[i].x), "+f"((d)[i].y), "+f"((d)[i].z), "+f"((d)[i].w), "+f"((d)[i + 1].x), "+f"((d)[i + 1].y), \
        "+f"((d)[i + 1].z), "+f"((d)[i + 1].w)
#define PAIRS_4(d) PAIR(d, 0), PAIR(d, 2), PAIR(d, 4), PAIR(d, 6)
#define LIST_4 REGISTERS_0 REGISTERS_1 REGISTERS_2 REGISTERS_3
#if V_TILES == 4
#define V_LIST LIST_4
#define V_PAIRS(d) PAIRS_4(d)
#define V_SHAPE "64"
#elif V_TILES == 5
#define V_LIST LIST_4 REGISTERS_4
#define V_PAIRS(d) PAIRS_4(d), PAIR(d, 8)
#define V_SHAPE "80"
#elif V_TILES == 6
#define V_LIST LIST_4 REGISTERS_4 REGISTERS_5
#define V_PAIRS(d) PAIRS_4(d), PAIR(d, 8), PAIR(d, 10)
#define V_SHAPE "96"
#elif V_TILES == 8
#define V_LIST LIST_4 REGISTERS_4 REGISTERS_5 REGISTERS_6 REGISTERS_7
#define V_PAIRS(d) PAIRS_4(d), PAIR(d, 8), PAIR(d, 10), PAIR(d, 12), PAIR(d, 14)
#define V_SHAPE "128"
#else
#error "the Hopper form takes value dimensions of 64, 80, 96 and 128"
#endif
#if DIM > 48 && DIM <= 64
#define Q_LIST LIST_4
#define Q_PAIRS(d) PAIRS_4(d)
#define Q_SHAPE "64"
#elif DIM > 64 && DIM <= 80
#define Q_LIST LIST_4 REGISTERS_4
#define Q_PAIRS(d) PAIRS_4(d), PAIR(d, 8)
#define Q_SHAPE "80"
#elif DIM > 80 && DIM <= 96
#define Q_LIST LIST_4 REGISTERS_4 REGISTERS_5
#define Q_PAIRS(d) PAIRS_4(d), PAIR(d, 8), PAIR(d, 10)
#define Q_SHAPE "96"
#elif DIM > 112 && DIM <= 128
#define Q_LIST LIST_4 REGISTERS_4 REGISTERS_5 REGISTERS_6 REGISTERS_7
#define Q_PAIRS(d) PAIRS_4(d), PAIR(d, 8), PAIR(d, 10), PAIR(d, 12), PAIR(d, 14)
#define Q_SHAPE "128"
#endif

#define MULTIPLY(shape, list, pairs, a0, a1, a2, a3, b, keep, trans_b)                                         \
    __asm volatile("{ .reg .pred p; setp.ne.b32 p, %[k], 0;\n" SM90A "wgmma.mma_async.sync.aligned.m64n" shape \
                   "k16.f32." MMA_TYPE "." MMA_TYPE " {" list                                                  \
                   "}, {%[x0],%[x1],%[x2],%[x3]}, %[y], p, 1, 1, " trans_b ";\n}"                              \
                   : pairs                                                                                     \
                   : [x0] "r"(a0), [x1] "r"(a1), [x2] "r"(a2), [x3] "r"(a3), [y] "l"(b), [k] "r"(keep)         \
                   : "memory")
#define MULTIPLY_LOCAL(shape, list, pairs, a, b, keep, trans_a, trans_b)                                       \
    __asm volatile("{ .reg .pred p; setp.ne.b32 p, %[k], 0;\n" SM90A "wgmma.mma_async.sync.aligned.m64n" shape \
                   "k16.f32." MMA_TYPE "." MMA_TYPE " {" list "}, %[x], %[y], p, 1, 1, " trans_a ", " trans_b  \
                   ";\n}"                                                                                      \
                   : pairs                                                                                     \
                   : [x] "l"(a), [y] "l"(b), [k] "r"(keep)                                                     \
                   : "memory")
#define FENCE(pairs) __asm volatile(SM90A "wgmma.fence.sync.aligned;\n" : pairs : : "memory")
#define COMMIT(pairs)                                                                                    \
    __asm volatile(SM90A "wgmma.commit_group.sync.aligned;\n" SM90A "wgmma.wait_group.sync.aligned 0;\n" \
                   : pairs                                                                               \
                   :                                                                                     \
                   : "memory")

static inline ulong matrix_descriptor(uint address, uint stride)
{
    return (ulong)((address & 0x3ffff) >> 4) | (ulong)(128 >> 4) << 16 | (ulong)(stride >> 4) << 32;
}

/* The steps are written out: NVIDIA's compiler does not unroll loops around these statements (whatever the
 * pragma says), and a rolled loop keeps fragments in memory and makes every multiplication wait for the one
 * before. */
#define SCORE_STEP(kk)                                                                                        \
    MULTIPLY("64", LIST_4, PAIRS_4(s), a0[kk].x, a1[kk].x, a0[kk].y, a1[kk].y, b + 32 * kk, kk ? 1 : 0, "0"); \
    MULTIPLY("64", LIST_4, PAIRS_4(s), a0[kk].z, a1[kk].z, a0[kk].w, a1[kk].w, b + 32 * kk + 16, 1, "0");
#define VALUE_STEP(p, k, keep) \
    MULTIPLY(V_SHAPE, V_LIST, V_PAIRS(o), p[k].x, p[k].y, p[k].z, p[k].w, b + 16 * k, keep, "0");

/* s (64 x 64, this warp's 16 rows) = Q K^T; keys packed by pack_cores */
static inline void warpgroup_scores(float4 *s, const uint4 *a0, const uint4 *a1, uint keys)
{
    const ulong b = matrix_descriptor(keys, K_CHUNKS * 128);
    FENCE(PAIRS_4(s));
    SCORE_STEP(0)
    SCORE_STEP(1)
#if K_STEPS > 2
    SCORE_STEP(2)
#endif
#if K_STEPS > 3
    SCORE_STEP(3)
#endif
#if K_STEPS > 4
    SCORE_STEP(4)
    SCORE_STEP(5)
#endif
#if K_STEPS > 6
    SCORE_STEP(6)
    SCORE_STEP(7)
#endif
    COMMIT(PAIRS_4(s));
}

/* The same with the queries in local memory too: 64 rows of core matrices in the order of the keys. (Queries
 * that stay in registers over a loop met a fault of ptxas 13.0: at DIM 64 it gave P their registers without
 * keeping them.)
 * */
#define LOCAL_STEP(kk)                                                                        \
    MULTIPLY_LOCAL("64", LIST_4, PAIRS_4(s), a + 32 * kk, b + 32 * kk, kk ? 1 : 0, "0", "0"); \
    MULTIPLY_LOCAL("64", LIST_4, PAIRS_4(s), a + 32 * kk + 16, b + 32 * kk + 16, 1, "0", "0");
static inline void warpgroup_scores_local(float4 *s, uint queries, uint keys)
{
    const ulong a = matrix_descriptor(queries, K_CHUNKS * 128), b = matrix_descriptor(keys, K_CHUNKS * 128);
    FENCE(PAIRS_4(s));
    LOCAL_STEP(0)
    LOCAL_STEP(1)
#if K_STEPS > 2
    LOCAL_STEP(2)
#endif
#if K_STEPS > 3
    LOCAL_STEP(3)
#endif
#if K_STEPS > 4
    LOCAL_STEP(4)
    LOCAL_STEP(5)
#endif
#if K_STEPS > 6
    LOCAL_STEP(6)
    LOCAL_STEP(7)
#endif
    COMMIT(PAIRS_4(s));
}

/* o (64 x DIM_V) = keep o + P V, keep 0 or 1; p holds the 16 x 64 weights in A's layout, values packed by
 * pack_cores */
static inline void warpgroup_values(float4 *o, const uint4 *p, uint values, int keep)
{
    const ulong b = matrix_descriptor(values, 1024);
    FENCE(V_PAIRS(o));
    VALUE_STEP(p, 0, keep)
    VALUE_STEP(p, 1, 1)
    VALUE_STEP(p, 2, 1)
    VALUE_STEP(p, 3, 1)
    COMMIT(V_PAIRS(o));
}

/* o = P V + R V; r like p */
static inline void warpgroup_values_twice(float4 *o, const uint4 *p, const uint4 *r, uint values)
{
    const ulong b = matrix_descriptor(values, 1024);
    FENCE(V_PAIRS(o));
    VALUE_STEP(p, 0, 0)
    VALUE_STEP(p, 1, 1)
    VALUE_STEP(p, 2, 1)
    VALUE_STEP(p, 3, 1)
    VALUE_STEP(r, 0, 1)
    VALUE_STEP(r, 1, 1)
    VALUE_STEP(r, 2, 1)
    VALUE_STEP(r, 3, 1)
    COMMIT(V_PAIRS(o));
}

#define barrier_init(b, count) \
    __asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(count) : "memory")
/* Transposed operands (k runs over rows): the same core matrices, 8 numbers of a row contiguous; `lead` bytes
 * to the next
 * 8 rows, 128 bytes to the next 8 columns. */
static inline ulong row_descriptor(uint address, uint lead)
{
    return (ulong)((address & 0x3ffff) >> 4) | (ulong)(lead >> 4) << 16 | (ulong)(128 >> 4) << 32;
}

/* s (64 keys x 64 rows) = V dO^T, both [64][DIM_V] in core matrices */
#define VALUE_SCORE_STEP(k) \
    MULTIPLY_LOCAL("64", LIST_4, PAIRS_4(s), a + 16 * k, b + 16 * k, k ? 1 : 0, "0", "0");
static inline void warpgroup_value_scores(float4 *s, uint values, uint rows)
{
    const ulong a = matrix_descriptor(values, V_CHUNKS * 128), b = matrix_descriptor(rows, V_CHUNKS * 128);
    FENCE(PAIRS_4(s));
    VALUE_SCORE_STEP(0)
    VALUE_SCORE_STEP(1)
    VALUE_SCORE_STEP(2)
    VALUE_SCORE_STEP(3)
#if V_TILES > 4
    VALUE_SCORE_STEP(4)
#endif
#if V_TILES > 5
    VALUE_SCORE_STEP(5)
#endif
#if V_TILES > 6
    VALUE_SCORE_STEP(6)
    VALUE_SCORE_STEP(7)
#endif
    COMMIT(PAIRS_4(s));
}

/* d (64 keys x DIM or DIM_V) += P^T X; p: 64 x 64 in A's layout, X [64 rows][..] in core matrices */
#define ADD_VALUES_STEP(k) \
    MULTIPLY(V_SHAPE, V_LIST, V_PAIRS(d), p[k].x, p[k].y, p[k].z, p[k].w, b + 16 * V_CHUNKS * k, 1, "1");
#define ADD_KEYS_STEP(k) \
    MULTIPLY(Q_SHAPE, Q_LIST, Q_PAIRS(d), p[k].x, p[k].y, p[k].z, p[k].w, b + 16 * K_CHUNKS * k, 1, "1");
static inline void warpgroup_add_values(float4 *d, const uint4 *p, uint rows)
{
    const ulong b = row_descriptor(rows, V_CHUNKS * 128);
    FENCE(V_PAIRS(d));
    ADD_VALUES_STEP(0)
    ADD_VALUES_STEP(1)
    ADD_VALUES_STEP(2)
    ADD_VALUES_STEP(3)
    COMMIT(V_PAIRS(d));
}
static inline void warpgroup_add_keys(float4 *d, const uint4 *p, uint rows)
{
    const ulong b = row_descriptor(rows, K_CHUNKS * 128);
    FENCE(Q_PAIRS(d));
    ADD_KEYS_STEP(0)
    ADD_KEYS_STEP(1)
    ADD_KEYS_STEP(2)
    ADD_KEYS_STEP(3)
    COMMIT(Q_PAIRS(d));
}

/* d (64 rows x DIM) = dS K; ds holds dS^T as [8 key octets][8 row octets][8 keys][8 rows], keys [64][DIM] in
 * core matrices */
#define QUERY_STEP(k) \
    MULTIPLY_LOCAL(Q_SHAPE, Q_LIST, Q_PAIRS(d), a + 128 * k, b + 16 * K_CHUNKS * k, k ? 1 : 0, "1", "1");
static inline void warpgroup_query_gradient(float4 *d, uint ds, uint keys)
{
    const ulong a = row_descriptor(ds, 1024), b = row_descriptor(keys, K_CHUNKS * 128);
    FENCE(Q_PAIRS(d));
    QUERY_STEP(0)
    QUERY_STEP(1)
    QUERY_STEP(2)
    QUERY_STEP(3)
    COMMIT(Q_PAIRS(d));
}

#define warpgroup_barrier(n) __asm volatile("bar.sync %0, 128;" ::"r"((n) + 1) : "memory")
static inline void copy_async_4(uint to, __global const void *from)
{
    __asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"((ulong)from) : "memory");
}
#define local_fence() \
    __asm volatile("fence.proxy.async.shared::cta;" ::: "memory") /* stores before wgmma's reads */
#define barrier_init_fence() __asm volatile("fence.proxy.async.shared::cta;" ::: "memory")
#define barrier_arrive(b) __asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory")
#define barrier_expect(b, bytes) \
    __asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory")
#define barrier_wait(b, parity)                                                                             \
    __asm volatile(                                                                                         \
        "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra D; bra W; D: }" :: \
            "r"(b),                                                                                         \
        "r"(parity)                                                                                         \
        : "memory")
static inline void bulk_copy(uint to, __global const void *from, uint bytes, uint b)
{
    __asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"((ulong)from), "r"(bytes), "r"(b)
        : "memory");
}
#endif /* CLATTN_EMULATE */
