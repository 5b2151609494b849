/* SPDX-License-Identifier: MIT */
/* Robust selection of leaves for one query token and key head by a work-group; mirrors cpu/select_robust_ref.c.
 *
 * Down the pyramid as in select.cl, with `beam` nodes kept at each level. A node is scored for every head from
 * a few pairs, then the heads vote:
 *
 *   pairs    two vectors A, B of DIM floats, made from statistics while they are loaded:
 *                logit[pair][head] = sum_d q_d (q_d > 0 ? A_d : B_d)         q with the scale
 *            A = B = mean gives scale q.mean; A = maximum, B = minimum the bound; halves of both their half.
 *   nodes    logsumexp over the node's pairs goes to heads[head][node]
 *   leaves   at the end, logsumexp over the LEAF keys of each leaf, key tile by key tile
 *   vote     score[node] = sum over heads of the softmax over the nodes, or of the scores
 *   keep     the best, by counting those ahead
 *
 * A tile has KEYS rows of DIM floats: KEYS / 2 pairs, or KEYS keys. Items own pairs or keys as in common.cl.
 *
 * Reads, with score AHEAD, 6 vectors of DIM floats for each of the 2 * beam candidates of a level above the
 * leaves; 12 for each leaf that the beam reaches; LEAF x DIM elements of k for each leaf that the prefilter
 * keeps. At 65536 keys, dim 64, beam and prefilter 32 that is 0.6 MB of statistics and 0.5 MB of float32 keys a
 * query, of which neighbouring queries share most, and products of each head with 2048 keys and 768 pairs.
 * Writes topk + 1 integers. Invariant: candidate[] is ascending and holds every forced node of its level.
 *
 * Macros: as in select.cl, with SELECTOR ROBUST; CAPACITY >= beam and topk; HEADS_LOCAL 1: heads[][] is local
 * memory, 0: `scratch` is, GROUP * CANDIDATES floats a work-group; ITEM_KEYS is even, KEYS at least 8. With CACHE
 * the statistics are regions of a decode cache's memory. */

#if HEADS_LOCAL
#define HEADS __local
#define HEADS_FENCE CLK_LOCAL_MEM_FENCE
#else
#define HEADS __global
#define HEADS_FENCE (CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#endif

#if CACHE && INT8
#define STATISTICS_ARGUMENTS                                                                                   \
    , ulong means_first, ulong bounds_first, ulong parts_first, uint room,                                     \
        __global const float *restrict k_scale, long k_scale_first, long k_scale_head_stride
#elif CACHE
#define STATISTICS_ARGUMENTS , ulong means_first, ulong bounds_first, ulong parts_first, uint room
#else
#define STATISTICS_ARGUMENTS
#endif

#define ITEM_PAIRS (ITEM_KEYS / 2)
#define PAIRS (KEYS / 2)
/* Logits of the pairs of a tile, or what the items have of a leaf: (maximum, sum). */
#define WORK (PAIRS > 2 * KEY_GROUPS ? PAIRS : 2 * KEY_GROUPS)

/* Scores: clattn_node_score, then the two of the prefilter: a leaf's quarters, or the leaf itself. */
#define SCORE_LSE 0
#define SCORE_BOUND 1
#define SCORE_BLEND 2
#define SCORE_AHEAD 3
#define SCORE_PARTS 4
#define SCORE_LEAF 5
#define LEAF_PARTS 4

/* What a work-group shares. */
struct shared {
    lanes q_tile[DIM_PADDED * ROW_GROUPS];
    float4 key_tile[KEYS * PITCH / 4];
    lanes work[WORK * ROW_GROUPS];
    float most[GROUP], share[GROUP]; /* of each head: its greatest score, one over its sum of exponentials */
    float score[CANDIDATES];         /* of todo */
    int candidate[CANDIDATES];
    int kept[CANDIDATES];
    ushort todo[CANDIDATES]; /* candidates that are not forced */
    uchar forced[CANDIDATES], keep[CANDIDATES];
    ulong list; /* where the result goes: it would be spilled, being needed last */
#if HEADS_LOCAL
    float heads[GROUP * CANDIDATES];
#endif
};

/* The statistics that a level is scored by. Node n has the rows n << shift ... below `existing`. */
struct statistics {
    __global const float *means;        /* of row 0 */
    __global const float *bounds, *own; /* minimum and maximum of row 0; of node 0, for BLEND */
    uint mean_stride, bound_stride;
    uint existing, shift;
    int kind;
};

/* ---- rows ---- */

/* The pairs of the nodes todo[first], todo[first + 1] ... below `count`; others are zero. A node has 1 << shift
 * pairs, with BLEND 4: two means, its own bound, and nothing. */
inline void load_pairs(__local struct shared *shared, const struct query *query,
                       const struct statistics *statistics, uint first, uint count)
{
    const uint loads = CEIL_DIV(DIM_PADDED, LOAD_K);
    const bool blend = statistics->kind == SCORE_BLEND;
    const uint shift = blend ? 2 : statistics->shift;
#pragma unroll 1
    for (uint e = query->lid; e < PAIRS * loads; e += ITEMS) {
        uint pair = e / loads, column = (e - pair * loads) * LOAD_K, n = first + (pair >> shift);
        uint sub = pair & ((1u << shift) - 1);
        bool own = blend && sub >= 2, exists = n < count && column < DIM;
        uint node = exists ? (uint)shared->candidate[shared->todo[n]] : 0;
        uint row = own ? node : (node << statistics->shift) + sub;
        VECTOR(LOAD_K) above = 0.0f, below = 0.0f;
        exists = exists && (own ? sub == 2 : row < statistics->existing);
        if (exists && !own && statistics->kind != SCORE_BOUND) {
            above =
                JOIN(load_float32_, LOAD_K)(statistics->means + (ulong)row * statistics->mean_stride + column);
            below = above;
        }
        if (exists && (own || (statistics->kind != SCORE_LSE && !blend))) {
            __global const float *bounds = own ? statistics->own + (ulong)row * (2 * DIM)
                                               : statistics->bounds + (ulong)row * statistics->bound_stride;
            VECTOR(LOAD_K) least = JOIN(load_float32_, LOAD_K)(bounds + column);
            VECTOR(LOAD_K) most = JOIN(load_float32_, LOAD_K)(bounds + DIM + column);
            bool halve = !own && statistics->kind != SCORE_BOUND;
            above = halve ? 0.5f * above + 0.5f * most : most;
            below = halve ? 0.5f * below + 0.5f * least : least;
        }
        PUT(LOAD_K)(above, tile_place(shared->key_tile, 2 * pair, column));
        PUT(LOAD_K)(below, tile_place(shared->key_tile, 2 * pair + 1, column));
    }
}

/* s[j] for the LANES heads of an item and its ITEM_PAIRS pairs. */
inline void pair_logits(__local const struct shared *shared, const struct query *query, lanes *s)
{
    lanes sum[ITEM_PAIRS];
    const lanes zero = 0.0f;
#pragma unroll
    for (uint j = 0; j < ITEM_PAIRS; j++)
        sum[j] = 0.0f;
#pragma unroll 1
    for (uint d = 0; d < DIM_PADDED; d += 4) {
        __local const lanes *columns = shared->q_tile + d * ROW_GROUPS + query->row_group;
        lanes q0 = columns[0], q1 = columns[ROW_GROUPS], q2 = columns[2 * ROW_GROUPS];
        lanes q3 = columns[3 * ROW_GROUPS];
#pragma unroll
        for (uint j = 0; j < ITEM_PAIRS; j++) {
            __local const float4 *at =
                shared->key_tile + ((2 * j * KEY_GROUPS + query->key_group) * PITCH + d) / 4;
            float4 above = at[0], below = at[KEY_GROUPS * PITCH / 4];
            sum[j] += q0 * (q0 > zero ? (lanes)(above.x) : (lanes)(below.x));
            sum[j] += q1 * (q1 > zero ? (lanes)(above.y) : (lanes)(below.y));
            sum[j] += q2 * (q2 > zero ? (lanes)(above.z) : (lanes)(below.z));
            sum[j] += q3 * (q3 > zero ? (lanes)(above.w) : (lanes)(below.w));
        }
    }
#pragma unroll
    for (uint j = 0; j < ITEM_PAIRS; j++)
        s[j] = sum[j];
}

/* logsumexp of z[0], z[ROWS] ..., `count` of them. NaN ranks as -infinity. */
inline float rows_lse(__local const float *z, uint count)
{
    float most = -INFINITY, sum = 0;
    for (uint c = 0; c < count; c++)
        most = z[c * ROWS] > most ? z[c * ROWS] : most;
    const float base = fabs(most) < INFINITY ? most : 0.0f;
    for (uint c = 0; c < count; c++)
        sum += exp(z[c * ROWS] - base);
    return base + log(sum);
}

/* heads[head][n] of the nodes todo[0 .. count-1]. */
inline void score_nodes(__local struct shared *shared, HEADS float *heads, const struct query *query,
                        const struct statistics *statistics, uint count)
{
    const bool blend = statistics->kind == SCORE_BLEND;
    const uint shift = blend ? 2 : statistics->shift, nodes = PAIRS >> shift;
    for (uint round = 0; round < ROUNDS; round++) {
        if (ROUNDS > 1) load_query(shared->q_tile, query, round);
        for (uint first = 0; first < count; first += nodes) {
            lanes s[ITEM_PAIRS];
            load_pairs(shared, query, statistics, first, count);
            barrier(CLK_LOCAL_MEM_FENCE);
            pair_logits(shared, query, s);
#pragma unroll
            for (uint j = 0; j < ITEM_PAIRS; j++)
                shared->work[(query->key_group * ITEM_PAIRS + j) * ROW_GROUPS + query->row_group] = s[j];
            barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll 1
            for (uint e = query->lid; e < nodes * ROWS; e += ITEMS) {
                uint n = e / ROWS, row = e - n * ROWS, head = round * ROWS + row;
                if (first + n >= count || head >= GROUP) continue;
                uint node = (uint)shared->candidate[shared->todo[first + n]] << statistics->shift;
                __local const float *z = (__local const float *)shared->work + (n << shift) * ROWS + row;
                float score = rows_lse(z, min(1u << statistics->shift, statistics->existing - node));
                if (blend) score = 0.5f * (score + z[2 * ROWS]);
                heads[head * CANDIDATES + first + n] = isnan(score) ? -INFINITY : score;
            }
        }
    }
}

/* ---- keys ---- */

/* The same of leaves, by all their keys. One loop over tiles, leaf by leaf in each round. */
inline void score_leaves(__local struct shared *shared, HEADS float *heads, const struct query *query,
                         uint count)
{
    lanes a = -INFINITY, b = 0.0f;
    uint n = 0, round = 0, done = 0; /* keys of the leaf before this tile */
    while (n < count) {
        const uint first = (uint)shared->candidate[shared->todo[n]] * LEAF;
        const uint keys = min(query->kv_len - first, (uint)LEAF), after = min(keys, done + KEYS);
        if (ROUNDS > 1 && done == 0 && n == 0) load_query(shared->q_tile, query, round);
        load_keys(shared->key_tile, query, first + done, keys - done);
        barrier(CLK_LOCAL_MEM_FENCE);

        lanes s[ITEM_KEYS], a2, b2;
        tile_logits(shared->q_tile, shared->key_tile, query->row_group, query->key_group, s);
        const uint before = item_count(query->key_group, done),
                   more = item_count(query->key_group, after) - before;
        fold_logits(s, more, &a2, &b2);
        if (done == 0) {
            a = a2;
            b = b2;
        } else {
            join_logits(&a, &b, before, a2, b2, more);
        }
        shared->work[query->lid] = a;
        shared->work[ITEMS + query->lid] = b;
        barrier(CLK_LOCAL_MEM_FENCE);

        done = after == keys ? 0 : after;
        if (done > 0) continue;
        __local const float *most = (__local const float *)shared->work, *sum = most + ITEMS * LANES;
        for (uint row = query->lid; row < ROWS && round * ROWS + row < GROUP; row += ITEMS) {
            float top = -INFINITY, total = 0;
            for (uint g = 0; g < KEY_GROUPS; g++)
                top = fmax(top, most[g * ROWS + row]);
            const float base = fabs(top) < INFINITY ? top : 0.0f;
            for (uint g = 0; g < KEY_GROUPS; g++)
                total += sum[g * ROWS + row] * exp(most[g * ROWS + row] - base);
            const float score = base + log(total);
            heads[(round * ROWS + row) * CANDIDATES + n] = isnan(score) ? -INFINITY : score;
        }
        if (++n == count && round + 1 < ROUNDS) {
            n = 0;
            round++;
        }
    }
}

/* ---- vote and keep ---- */

/* score[n] of todo[0 .. count-1] from heads[][]. */
inline void sum_heads(__local struct shared *shared, HEADS float *heads, const struct query *query, int vote,
                      uint count)
{
    barrier(HEADS_FENCE);
    if (vote) {
        for (uint h = query->lid; h < GROUP; h += ITEMS) {
            float most = -INFINITY;
            for (uint n = 0; n < count; n++)
                most = fmax(most, heads[h * CANDIDATES + n]);
            shared->most[h] = most;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint h = 0; h < GROUP; h++) {
            const float most = shared->most[h];
            for (uint n = query->lid; n < count; n += ITEMS) {
                float x = heads[h * CANDIDATES + n];
                /* Infinite scores share the vote; nothing but -infinity: no vote. */
                heads[h * CANDIDATES + n] = fabs(most) < INFINITY ? exp(x - most)
                                            : most > 0 && x == most ? 1.0f
                                                                    : 0.0f;
            }
        }
        barrier(HEADS_FENCE);
        for (uint h = query->lid; h < GROUP; h += ITEMS) {
            float sum = 0;
            for (uint n = 0; n < count; n++)
                sum += heads[h * CANDIDATES + n];
            shared->share[h] = sum > 0 ? 1.0f / sum : 0.0f;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (uint n = query->lid; n < count; n += ITEMS) {
        float score = 0;
        for (uint h = 0; h < GROUP; h++)
            score += heads[h * CANDIDATES + n] * (vote ? shared->share[h] : 1.0f);
        shared->score[n] = isnan(score) ? -INFINITY : score;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

/* Marks the forced ones among the candidates and lists the others; returns how many. */
inline uint list_unforced(__local struct shared *shared, const struct query *query, uint level, uint count)
{
    uint others = 0;
    for (uint c = query->lid; c < count; c += ITEMS)
        shared->forced[c] = is_forced(query, level, (uint)shared->candidate[c]);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint c = 0; c < count; c++) {
        if (!shared->forced[c] && c % ITEMS == query->lid) shared->todo[others] = (ushort)c;
        others += !shared->forced[c];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return others;
}

/* Keeps the forced ones of `count` candidates and the best of the `others`, `room` in all, ascending. */
inline void keep_best(__local struct shared *shared, const struct query *query, uint count, uint others,
                      uint room)
{
    const uint free_room = room - (count - others);
    for (uint c = query->lid; c < count; c += ITEMS)
        if (shared->forced[c]) shared->keep[c] = 1;
    for (uint n = query->lid; n < others; n += ITEMS) {
        float score = shared->score[n];
        uint ahead = 0;
        for (uint m = 0; m < others; m++) {
            float s = shared->score[m];
            ahead += s > score || (s == score && m < n);
        }
        shared->keep[shared->todo[n]] = ahead < free_room;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    uint place = 0;
    for (uint c = 0; c < count; c++) {
        if (shared->keep[c] && c % ITEMS == query->lid) shared->kept[place] = shared->candidate[c];
        place += shared->keep[c];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint c = query->lid; c < room; c += ITEMS)
        shared->candidate[c] = shared->kept[c];
    barrier(CLK_LOCAL_MEM_FENCE);
}

/* ---- the walk ---- */

/* What the caller asked for; beam and prefilter are topk at least, and prefilter 0 is none. */
struct request {
    __global const float *bounds, *parts; /* of the sequence and key head */
    uint beam, prefilter, part_count;
    int score, vote;
};

inline struct statistics statistics_of(const struct query *query, const struct request *request, uint level,
                                       bool prefilter)
{
    struct statistics s;
    const uint below = prefilter ? level : level - 1;
    const ulong first = level_first(query->room, below);
    s.kind = !prefilter ? request->score : request->part_count > 1 ? SCORE_PARTS : SCORE_LEAF;
    s.shift = s.kind == SCORE_PARTS ? 2 : s.kind == SCORE_LEAF || s.kind == SCORE_BOUND ? 0 : 1;
    s.own = request->bounds + level_first(query->room, level) * (2 * DIM);
    s.means = query->means + first * DIM;
    s.bounds = request->bounds + first * (2 * DIM);
    s.mean_stride = DIM;
    s.bound_stride = 2 * DIM;
    s.existing = level_nodes(query->kv_len, below);
    if (s.kind == SCORE_BOUND) {
        s.bounds = s.own;
        s.existing = level_nodes(query->kv_len, level);
    }
    if (s.kind == SCORE_PARTS) {
        s.means = request->parts;
        s.bounds = request->parts + DIM;
        s.mean_stride = s.bound_stride = 3 * DIM;
        s.existing = CEIL_DIV(query->kv_len, LEAF / LEAF_PARTS);
    }
    return s;
}

/* Down the pyramid of the keys that the query sees; returns the number of leaves in candidate[]. */
inline uint walk(__local struct shared *shared, HEADS float *heads, const struct query *query,
                 const struct request *request)
{
    uint level = 1, count = CEIL_DIV(query->seen, LEAF);
    while (count > (level == 1 ? query->topk : request->beam)) {
        count = CEIL_DIV(count, 2u);
        level++;
    }
    for (uint c = query->lid; c < count; c += ITEMS)
        shared->candidate[c] = (int)c;
    barrier(CLK_LOCAL_MEM_FENCE);
    bool prefilter = false; /* the leaves are chosen from twice: by statistics, then by their keys */
    for (;;) {
        if (count > 0) count = drop_straddling(query, level, (uint)shared->candidate[count - 1], count);
        prefilter = level == 1 && !prefilter && request->prefilter > 0;
        const uint room = prefilter ? request->prefilter : level == 1 ? query->topk : request->beam;
        if (count > room) {
            const uint others = list_unforced(shared, query, level, count);
            const struct statistics statistics = statistics_of(query, request, level, prefilter);
            if (prefilter || level > 1)
                score_nodes(shared, heads, query, &statistics, others);
            else
                score_leaves(shared, heads, query, others);
            sum_heads(shared, heads, query, request->vote, others);
            keep_best(shared, query, count, others, room);
            count = room;
        }
        if (prefilter) continue;
        if (level == 1) return count;
        for (uint c = query->lid; c < count; c += ITEMS)
            shared->kept[c] = shared->candidate[c];
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint c = query->lid; c < count; c += ITEMS) {
            shared->candidate[2 * c] = 2 * shared->kept[c];
            shared->candidate[2 * c + 1] = 2 * shared->kept[c] + 1;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        level--;
        count *= 2; /* the last node may have one child */
        if (count > 0 && (uint)shared->candidate[count - 1] >= level_nodes(query->seen, level)) count--;
    }
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
select_robust(__global const element *restrict q, __global const kv_element *restrict k,
              __global const float *restrict means, __global const float *restrict bounds,
              __global const float *restrict parts, __global float *restrict scratch,
              __global int *restrict indices, __global int *restrict counts, __global const long *restrict table,
              uint sequences, ulong unit_first, long q_len_stride, long q_head_stride, long k_len_stride,
              long k_head_stride, float scale, int causal, uint topk, uint forced_first, uint forced_last,
              uint kv_heads, uint beam, uint prefilter, uint part_count, int score,
              int vote CACHE_ARGUMENTS STATISTICS_ARGUMENTS)
{
    __local struct shared shared;
    const ulong unit = unit_first + get_group_id(0);
    __global const long *sequence = sequence_of(table, sequences, unit);
    const uint q_len = (uint)sequence[SEQUENCE_Q_LEN], kv_len = (uint)sequence[SEQUENCE_KV_LEN];
    const ulong local_unit = unit - (ulong)sequence[SEQUENCE_UNIT];
    const uint kv_head = (uint)(local_unit / q_len), token = (uint)(local_unit - (ulong)kv_head * q_len);
    const long position = (long)token + (long)kv_len - (long)q_len;
    if (get_local_id(0) == 0)
        shared.list = ((ulong)sequence[SEQUENCE_LIST_ROW] + token) * kv_heads + kv_head;
    const long node = sequence[SEQUENCE_NODE] + (long)kv_head * sequence[SEQUENCE_NODES];
#if !CACHE
    const ulong means_first = 0, bounds_first = 0, parts_first = 0;
    const uint room = CEIL_DIV(kv_len, LEAF);
#endif
    const long leaf = sequence[SEQUENCE_LEAF] + (long)kv_head * room;

    struct query query;
    query.q = q + sequence[SEQUENCE_Q] + (long)token * q_len_stride + (long)(kv_head * GROUP) * q_head_stride;
    query.k = k + sequence[SEQUENCE_K] + (long)kv_head * k_head_stride;
    query.means = means + means_first + node * DIM;
    query.q_head_stride = q_head_stride;
    query.k_len_stride = k_len_stride;
    query.scale = scale;
    query.kv_len = kv_len;
    query.room = room;
#if CACHE
    query.scales.pages.table = page_table + sequence[SEQUENCE_PAGES];
    query.scales.pages.rows = page_rows;
    query.scales.pages.size = page_size;
#endif
#if INT8
    query.scales.of = k_scale + k_scale_first + (long)kv_head * k_scale_head_stride;
#endif
    query.seen = !causal ? kv_len : position < 0 ? 0 : (uint)position + 1;
    query.topk = topk;
    query.causal = causal;
    query.lid = get_local_id(0);
    query.key_group = query.lid / ROW_GROUPS;
    query.row_group = query.lid - query.key_group * ROW_GROUPS;
    forced_leaves(&query, forced_first, forced_last);
    struct request request;
    request.bounds = bounds + bounds_first + node * (2 * DIM);
    request.parts = parts + parts_first + leaf * (LEAF_PARTS * 3 * DIM);
    request.beam = beam;
    request.prefilter = prefilter;
    request.part_count = part_count;
    request.score = score;
    request.vote = vote;

    if (ROUNDS == 1) load_query(shared.q_tile, &query, 0);
    uint count = 0;
#if HEADS_LOCAL
    if (query.seen > 0) count = walk(&shared, shared.heads, &query, &request);
#else
    __global float *heads = scratch + (ulong)get_group_id(0) * (GROUP * CANDIDATES);
    if (query.seen > 0) count = walk(&shared, heads, &query, &request);
#endif
    barrier(CLK_LOCAL_MEM_FENCE);
    const ulong list = shared.list;
    for (uint n = query.lid; n < topk; n += ITEMS)
        indices[list * topk + n] = n < count ? shared.candidate[n] : -1;
    if (query.lid == 0) counts[list] = (int)count;
}
