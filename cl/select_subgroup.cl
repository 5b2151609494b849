/* SPDX-License-Identifier: MIT */
/* Selection of leaves down the pyramid for one query token and key head by a subgroup; same arguments and lists as
 * select.cl. At inner levels two neighbouring lanes have the two children of a node, so that its score takes one exchange;
 * at level 1 the lanes share the keys of a leaf, each folds its own, and one exchange joins them.
 *
 * Reads GROUP x DIM elements of q, for each level 2 means of DIM floats a candidate, and LEAF x DIM elements of k for each
 * candidate at level 1 that is not forced, ceil(GROUP / HEADS) times; writes topk + 1 integers. Invariant: candidate[] is
 * ascending and holds every forced node of its level.
 *
 * Macros: those of subgroup.cl; DTYPE, DIM, GROUP; HEADS of the group at a time; SELECTOR 0..2 (clattn_selector); LEAF
 * 16..128; CAPACITY >= topk, candidates are at most 2 * CAPACITY; LOAD_K elements a load, which divide DIM. */

#define PISA 0
#define PISA2 2
#define CANDIDATES (2 * CAPACITY)
#define HEAD_ROUNDS CEIL_DIV(GROUP, HEADS)

struct shared {
    float q_tile[HEAD_ROUNDS * HEADS * DIM]; /* heads that do not exist are zero */
    float score[CANDIDATES];
    int candidate[CANDIDATES], kept[CAPACITY];
    uchar forced[CANDIDATES], keep[CANDIDATES];
};

#include "select_level.cl"

/* ---- score ---- */

/* s[h] = q[h] . row for HEADS heads, whose queries lie one after another; rows of means are float32. */
#define DEFINE_LOGITS(NAME, TYPE, LOAD_ROW)                                                                                  \
    static inline void NAME(__local const float *q_tile, __global const TYPE *row, float *s)                                 \
    {                                                                                                                        \
        VECTOR(LOAD_K) sum[HEADS];                                                                                           \
        UNROLLED                                                                                                             \
        for (uint h = 0; h < HEADS; h++)                                                                                     \
            sum[h] = 0.0f;                                                                                                   \
        ROLLED                                                                                                               \
        for (uint d = 0; d < DIM; d += LOAD_K) {                                                                             \
            VECTOR(LOAD_K) x = LOAD_ROW(row + d);                                                                            \
            UNROLLED                                                                                                         \
            for (uint h = 0; h < HEADS; h++)                                                                                 \
                sum[h] += x * GET(LOAD_K)(q_tile + h * DIM + d);                                                             \
        }                                                                                                                    \
        UNROLLED                                                                                                             \
        for (uint h = 0; h < HEADS; h++)                                                                                     \
            s[h] = SUM(LOAD_K)(sum[h]);                                                                                      \
    }
DEFINE_LOGITS(key_logits, element, LOAD(LOAD_K))
DEFINE_LOGITS(mean_logits, float, JOIN(load_float32_, LOAD_K))

/* Score of a node whose children have the logits a and b; the same in both children's lanes. */
static inline float pair_score(float a, float b)
{
#if SELECTOR == PISA
    float base = lanes_base(lanes_max(a, b));
    return base + log(exp(a - base) + exp(b - base));
#elif SELECTOR == PISA2
    float half_gap = 0.5f * (a - b);
    return 0.5f * (a + b) + 0.5f * half_gap * half_gap;
#else
    return 0.5f * (a + b);
#endif
}

static inline void score_nodes(__local struct shared *shared, const struct query *query, uint level, uint count)
{
    const uint existing = level_nodes(query->kv_len, level - 1);
    const ulong base = level_first(query->room, level - 1);
#pragma unroll 1
    for (uint first = 0; first < count; first += SG / 2) {
        const uint n = first + query->lid / 2, node = (uint)shared->candidate[min(n, count - 1)];
        const uint child = min(2 * node + query->lid % 2, existing - 1);
        const bool has_two = 2 * node + 1 < existing;
        float total = 0.0f;
#pragma unroll 1
        for (uint head = 0; head < GROUP; head += HEADS) {
            float s[HEADS];
            mean_logits(shared->q_tile + head * DIM, query->means + (base + child) * DIM, s);
#pragma unroll
            for (uint h = 0; h < HEADS; h++) {
                const float other = sg_xor(s[h], 1u);
                if (head + h < GROUP) total += has_two ? pair_score(s[h], other) : s[h];
            }
        }
        if (query->lid % 2 == 0 && n < count) shared->score[n] = isnan(total) ? -INFINITY : total;
    }
}

/* Folds a logit into (a, b) of `count` others: maximum and sum of exponentials, or mean and sum of squared differences. */
static inline void fold_logit(float *a, float *b, uint count, float s)
{
#if SELECTOR == PISA
    float most = lanes_most(*a, s), base = lanes_base(most);
    *b = *b * exp(*a - base) + exp(s - base);
    *a = most;
#else
    float gap = s - *a;
    *a += gap / (float)(count + 1);
    *b += gap * (s - *a);
#endif
}

/* Score of a leaf of `keys` keys from what each lane has of `count` of them. */
static inline float leaf_score(float a, float b, uint count, uint keys)
{
#if SELECTOR == PISA
    float base = lanes_base(sg_most(a));
    return base + log(sg_sum(b * exp(a - base)));
#else
    float mean = sg_sum(a * (float)count) / (float)keys;
#if SELECTOR == PISA2
    float gap = a - mean;
    return mean + 0.5f * sg_sum(b + gap * gap * (float)count) / (float)keys;
#else
    return mean;
#endif
#endif
}

static inline void score_leaf(__local struct shared *shared, const struct query *query, uint n)
{
    const uint first = (uint)shared->candidate[n] * LEAF, keys = min(query->kv_len - first, (uint)LEAF);
    float total = 0.0f;
#pragma unroll 1
    for (uint head = 0; head < GROUP; head += HEADS) {
        float a[HEADS], b[HEADS];
        uint count = 0;
#pragma unroll
        for (uint h = 0; h < HEADS; h++) {
            a[h] = SELECTOR == PISA ? -INFINITY : 0.0f;
            b[h] = 0.0f;
        }
#pragma unroll 1
        for (uint key = query->lid; key < keys; key += SG) {
            float s[HEADS];
            key_logits(shared->q_tile + head * DIM, query->k + (long)(first + key) * query->k_len_stride, s);
#pragma unroll
            for (uint h = 0; h < HEADS; h++)
                fold_logit(&a[h], &b[h], count, s[h]);
            count++;
        }
#pragma unroll
        for (uint h = 0; h < HEADS; h++) {
            const float score = leaf_score(a[h], b[h], count, keys);
            if (head + h < GROUP) total += score;
        }
    }
    if (query->lid == 0) shared->score[n] = isnan(total) ? -INFINITY : total;
}

/* ---- keep ---- */

/* Copies the forced candidates and the best of the others, topk in all, to kept[] in ascending order. */
static inline void keep_best(__local struct shared *shared, const struct query *query, uint count)
{
    for (uint c = query->lid; c < count; c += SG) {
        float score = shared->score[c];
        uint ahead = 0;
        for (uint other = 0; other < count; other++) {
            float s = shared->score[other];
            ahead += shared->forced[other] || s > score || (s == score && other < c);
        }
        shared->keep[c] = shared->forced[c] || ahead < query->topk;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    uint place = 0;
    for (uint c = 0; c < count; c++) {
        if (shared->keep[c] && c % SG == query->lid) shared->kept[place] = shared->candidate[c];
        place += shared->keep[c];
    }
}

/* Scores `count` candidates of a level and keeps topk. */
static inline void score_and_keep(__local struct shared *shared, const struct query *query, uint level, uint count)
{
    for (uint c = query->lid; c < count; c += SG)
        shared->forced[c] = is_forced(query, level, (uint)shared->candidate[c]);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (level > 1) {
        score_nodes(shared, query, level, count);
    } else {
#pragma unroll 1
        for (uint n = 0; n < count; n++)
            if (!shared->forced[n]) score_leaf(shared, query, n);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    keep_best(shared, query, count);
}

/* Down the pyramid of the keys that the query sees; returns the number of leaves in kept[]. */
static inline uint walk(__local struct shared *shared, const struct query *query)
{
    uint level = 1, count = CEIL_DIV(query->seen, LEAF);
    while (count > query->topk) {
        count = CEIL_DIV(count, 2u);
        level++;
    }
    for (uint c = query->lid; c < count; c += SG)
        shared->candidate[c] = (int)c;
    for (; level >= 1; level--) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (count > 0) count = drop_straddling(query, level, (uint)shared->candidate[count - 1], count);
        if (count > query->topk) {
            score_and_keep(shared, query, level, count);
            count = query->topk;
        } else {
            for (uint c = query->lid; c < count; c += SG)
                shared->kept[c] = shared->candidate[c];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (level == 1) break;
        for (uint c = query->lid; c < count; c += SG) {
            shared->candidate[2 * c] = 2 * shared->kept[c];
            shared->candidate[2 * c + 1] = 2 * shared->kept[c] + 1;
        }
        count *= 2; /* the last node may have one child */
        if (count > 0 && 2 * (uint)shared->kept[count / 2 - 1] + 1 >= level_nodes(query->seen, level - 1)) count--;
    }
    return count;
}

SG_KERNEL __kernel __attribute__((reqd_work_group_size(SG, 1, 1))) void
select_subgroup(__global const element *restrict q, __global const element *restrict k, __global const float *restrict means,
                __global int *restrict indices, __global int *restrict counts, __global const long *restrict table,
                uint sequences, ulong unit_first, long q_len_stride, long q_head_stride, long k_len_stride,
                long k_head_stride, float scale, int causal, uint topk, uint forced_first, uint forced_last, uint kv_heads)
{
    __local struct shared shared;
    const ulong unit = unit_first + get_group_id(0);
    __global const long *sequence = sequence_of(table, sequences, unit);
    const uint q_len = (uint)sequence[SEQUENCE_Q_LEN], kv_len = (uint)sequence[SEQUENCE_KV_LEN];
    const ulong local_unit = unit - (ulong)sequence[SEQUENCE_UNIT];
    const uint kv_head = (uint)(local_unit / q_len), token = (uint)(local_unit - (ulong)kv_head * q_len);
    const long position = (long)token + (long)kv_len - (long)q_len;
    const ulong list = ((ulong)sequence[SEQUENCE_LIST_ROW] + token) * kv_heads + kv_head;
    __global const element *heads =
        q + sequence[SEQUENCE_Q] + (long)token * q_len_stride + (long)(kv_head * GROUP) * q_head_stride;

    struct query query;
    query.k = k + sequence[SEQUENCE_K] + (long)kv_head * k_head_stride;
    query.means = means + (sequence[SEQUENCE_NODE] + (long)kv_head * sequence[SEQUENCE_NODES]) * DIM;
    query.k_len_stride = k_len_stride;
    query.kv_len = kv_len;
    query.room = CEIL_DIV(kv_len, LEAF);
    query.seen = !causal ? kv_len : position < 0 ? 0 : (uint)position + 1;
    query.topk = topk;
    query.causal = causal;
    query.lid = (uint)get_local_id(0);
    forced_leaves(&query, forced_first, forced_last);
#pragma unroll 1
    for (uint e = query.lid; e < HEAD_ROUNDS * HEADS * DIM; e += SG) {
        uint h = e / DIM, d = e - h * DIM;
        shared.q_tile[e] = h < GROUP ? scale * LOAD(1)(heads + (long)h * q_head_stride + d) : 0.0f;
    }

    uint count = 0;
    if (query.seen > 0) count = walk(&shared, &query);
    for (uint n = query.lid; n < topk; n += SG)
        indices[list * topk + n] = n < count ? shared.kept[n] : -1;
    if (query.lid == 0) counts[list] = (int)count;
}
