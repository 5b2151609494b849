/* SPDX-License-Identifier: MIT */
/* Selection of leaves for one query token and key head by a work-group; mirrors cpu/select_ref.c.
 *
 * select_walk goes down the pyramid: at each level it has at most 2 topk candidates (two children for each node
 * that was kept), scores them, keeps topk. select_flat goes along level 1 in batches: the best so far and the
 * next leaves are the candidates. Both hand the same two steps to the work-group:
 *
 *   score   children [KEYS][DIM] x q^T [DIM][ROWS] = logits [KEYS][ROWS], rows being the heads of the group; an
 * item holds ITEM_KEYS neighbouring children for LANES heads. Nodes of inner levels have 2 children (two
 * means), so that one tile scores KEYS / 2 nodes; a leaf has LEAF keys in one or more tiles, whose logits each
 * item folds into running (maximum, sum) or (mean, squares), joined over the items at the end of the leaf. keep
 * a candidate stays when fewer than topk minus the forced ones are better; candidates are ascending, so
 *           counting the kept ones before it gives its place.
 *
 * Reads ROWS x DIM elements of q, for each level 2 means of DIM floats a candidate, and LEAF x DIM elements of
 * k for each candidate at level 1 that is not forced; writes topk + 1 integers. Invariant: candidate[] is
 * ascending and holds every forced node of its level.
 *
 * Macros: as in attention_forward.cl, and SELECTOR 0..4 (clattn_selector); LEAF 16..128; CAPACITY >= topk,
 * candidates are at most 2 * CAPACITY; ROWS heads at a time (a larger group takes several rounds); ITEM_KEYS is
 * even and KEYS divides LEAF. CACHE 1: keys (INT8 1: codes with scales) and means are those of a decode cache. */

#if CACHE && INT8
#define ROOM_ARGUMENTS                                                                                         \
    , ulong means_first, uint room, __global const float *restrict k_scale, long k_scale_first,                \
        long k_scale_head_stride
#elif CACHE
#define ROOM_ARGUMENTS , ulong means_first, uint room
#else
#define ROOM_ARGUMENTS
#endif

#define IS_FLAT (SELECTOR == FLAT_MEAN || SELECTOR == FLAT_LSE)

/* What a work-group shares. */
struct shared {
    lanes q_tile[DIM_PADDED * ROW_GROUPS];
    float4 key_tile[KEYS * PITCH / 4];
    lanes part_a[ITEMS], part_b[ITEMS];
    float partial[KEYS * ROW_GROUPS]; /* scores of nodes, a row group each */
    float score[CANDIDATES];
    float kept_score[CAPACITY];
    int candidate[CANDIDATES];
    int kept[CAPACITY];
    ushort todo[CANDIDATES]; /* candidates that are not forced */
    uchar forced[CANDIDATES], keep[CANDIDATES];
};

/* ---- score ---- */

/* The children of the candidates from `first` on, `children` each, in the level that begins at `base`. */
inline void load_means(__local struct shared *shared, const struct query *query, uint first, uint count,
                       uint children, ulong base, uint existing)
{
    const uint loads = CEIL_DIV(DIM_PADDED, LOAD_K);
#pragma unroll 1
    for (uint e = query->lid; e < KEYS * loads; e += ITEMS) {
        uint row = e / loads, column = (e - row * loads) * LOAD_K, n = first + row / children;
        uint child =
            n < count ? (uint)shared->candidate[n] * children + (row - row / children * children) : existing;
        __local float *to = tile_place(shared->key_tile, row, column);
        if (child < existing && column < DIM)
            PUT(LOAD_K)(JOIN(load_float32_, LOAD_K)(query->means + (base + child) * DIM + column), to);
        else
            PUT(LOAD_K)(0.0f, to);
    }
}

/* Sum over the heads that exist. */
inline float heads_sum(lanes x, const struct query *query, uint round)
{
    lanes_int head = LANE_NUMBER + (int)(round * ROWS + query->row_group * LANES);
    return lanes_sum(head < (lanes_int)(GROUP) ? x : (lanes)(0.0f));
}

/* Score of a node with the logits a and b, or a alone. */
inline lanes pair_score(lanes a, lanes b, bool has_two)
{
    if (!has_two) return a;
#if IS_LSE
    lanes base = lanes_base(lanes_max(a, b));
    return base + log(exp(a - base) + exp(b - base));
#elif SELECTOR == PISA2
    lanes half_gap = 0.5f * (a - b);
    return 0.5f * (a + b) + 0.5f * half_gap * half_gap;
#else
    return 0.5f * (a + b);
#endif
}

inline void add_score(__local struct shared *shared, uint n, uint round, float score)
{
    float sum = round == 0 ? score : shared->score[n] + score;
    shared->score[n] = round == ROUNDS - 1 && isnan(sum) ? -INFINITY : sum;
}

/* Scores candidates from .. count-1 by means: of their two children, or their own (children = 1). */
inline void score_means(__local struct shared *shared, const struct query *query, uint level, uint children,
                        uint from, uint count)
{
    const uint child_level = children == 1 ? level : level - 1;
    const uint existing = level_nodes(query->kv_len, child_level);
    const ulong base = level_first(query->room, child_level);
    for (uint round = 0; round < ROUNDS; round++) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (ROUNDS > 1) load_query(shared->q_tile, query, round);
        for (uint first = from; first < count; first += KEYS / children) {
            barrier(CLK_LOCAL_MEM_FENCE);
            load_means(shared, query, first, count, children, base, existing);
            barrier(CLK_LOCAL_MEM_FENCE);
            lanes s[ITEM_KEYS];
            tile_logits(shared->q_tile, shared->key_tile, query->row_group, query->key_group, s);
#pragma unroll
            for (uint j = 0; j < ITEM_KEYS; j += 2) {
                uint row = query->key_group * ITEM_KEYS + j;
                __local float *to = shared->partial + query->row_group;
                if (children == 2) {
                    uint n = min(first + row / 2, count - 1);
                    bool has_two = (uint)shared->candidate[n] * 2 + 1 < existing;
                    to[row / 2 * ROW_GROUPS] = heads_sum(pair_score(s[j], s[j + 1], has_two), query, round);
                } else {
                    to[row * ROW_GROUPS] = heads_sum(s[j], query, round);
                    to[(row + 1) * ROW_GROUPS] = heads_sum(s[j + 1], query, round);
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            for (uint n = query->lid; n < KEYS / children && first + n < count; n += ITEMS) {
                float score = 0;
                for (uint g = 0; g < ROW_GROUPS; g++)
                    score += shared->partial[n * ROW_GROUPS + g];
                add_score(shared, first + n, round, score);
            }
        }
    }
}

inline lanes leaf_score(__local const struct shared *shared, uint row_group, uint keys)
{
    lanes a = shared->part_a[row_group], b = shared->part_b[row_group];
    uint count = item_count(0, keys);
    for (uint g = 1; g < KEY_GROUPS; g++) {
        uint more = item_count(g, keys);
        join_logits(&a, &b, count, shared->part_a[g * ROW_GROUPS + row_group],
                    shared->part_b[g * ROW_GROUPS + row_group], more);
        count += more;
    }
#if IS_LSE
    return lanes_base(a) + log(b);
#elif SELECTOR == PISA2
    return a + 0.5f * b / (float)count;
#else
    return a;
#endif
}

/* Scores the candidates todo[0 .. count-1] by all their keys. One loop over tiles, round by round, leaf by
 * leaf. */
inline void score_leaves(__local struct shared *shared, const struct query *query, uint count)
{
    lanes a = 0.0f, b = 0.0f;
    uint n = 0, round = 0, done = 0; /* keys of the leaf before this tile */
    while (n < count) {
        barrier(CLK_LOCAL_MEM_FENCE);
        const uint first = (uint)shared->candidate[shared->todo[n]] * LEAF;
        const uint keys = min(query->kv_len - first, (uint)LEAF), after = min(keys, done + KEYS);
        if (ROUNDS > 1 && done == 0) load_query(shared->q_tile, query, round);
        load_keys(shared->key_tile, query, first + done, keys - done);
        barrier(CLK_LOCAL_MEM_FENCE);

        lanes s[ITEM_KEYS], a2, b2;
        tile_logits(shared->q_tile, shared->key_tile, query->row_group, query->key_group, s);
        const uint before = item_count(query->key_group, done),
                   more = item_count(query->key_group, after) - before;
        fold_logits(s, more, &a2, &b2);
        if (done == 0) {
            a = IS_LSE ? -INFINITY : 0.0f;
            b = 0.0f;
        }
        join_logits(&a, &b, before, a2, b2, more);
        shared->part_a[query->lid] = a;
        shared->part_b[query->lid] = b;
        barrier(CLK_LOCAL_MEM_FENCE);

        if (after == keys && query->lid < ROW_GROUPS)
            shared->partial[query->lid] = heads_sum(leaf_score(shared, query->lid, keys), query, round);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (after == keys && query->lid == 0) {
            float score = 0;
            for (uint g = 0; g < ROW_GROUPS; g++)
                score += shared->partial[g];
            add_score(shared, shared->todo[n], round, score);
        }
        done = after;
        if (done == keys) {
            done = 0;
            if (++round == ROUNDS) {
                round = 0;
                n++;
            }
        }
    }
}

/* ---- keep ---- */

/* Marks the forced ones among candidates 0 .. count-1 and lists the others from `from` on; returns how many. */
inline uint list_unforced(__local struct shared *shared, const struct query *query, uint level, uint from,
                          uint count)
{
    uint others = 0;
    for (uint c = query->lid; c < count; c += ITEMS) {
        shared->forced[c] = is_forced(query, level, (uint)shared->candidate[c]);
        if (shared->forced[c]) shared->score[c] = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint c = from; c < count; c++) {
        if (!shared->forced[c] && c % ITEMS == query->lid) shared->todo[others] = (ushort)c;
        others += !shared->forced[c];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return others;
}

/* Copies the forced candidates and the best of the others, topk in all, to kept[] in ascending order. */
inline void keep_best(__local struct shared *shared, const struct query *query, uint count)
{
    for (uint c = query->lid; c < count; c += ITEMS) {
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
        if (shared->keep[c] && c % ITEMS == query->lid) {
            shared->kept[place] = shared->candidate[c];
            shared->kept_score[place] = shared->score[c];
        }
        place += shared->keep[c];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

inline void keep_all(__local struct shared *shared, const struct query *query, uint count)
{
    for (uint c = query->lid; c < count; c += ITEMS) {
        shared->kept[c] = shared->candidate[c];
        if (IS_FLAT) shared->kept_score[c] = shared->score[c];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

/* ---- the two ways ---- */

/* Down the pyramid of the keys that the query sees; returns the number of leaves in kept[]. */
inline uint walk(__local struct shared *shared, const struct query *query)
{
    uint level = 1, count = CEIL_DIV(query->seen, LEAF);
    while (count > query->topk) {
        count = CEIL_DIV(count, 2u);
        level++;
    }
    for (uint c = query->lid; c < count; c += ITEMS)
        shared->candidate[c] = (int)c;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (; level >= 1; level--) {
        if (count > 0) count = drop_straddling(query, level, (uint)shared->candidate[count - 1], count);
        if (count > query->topk) {
            uint others = list_unforced(shared, query, level, 0, count);
            if (level > 1)
                score_means(shared, query, level, 2, 0, count);
            else
                score_leaves(shared, query, others);
            barrier(CLK_LOCAL_MEM_FENCE);
            keep_best(shared, query, count);
            count = query->topk;
        } else {
            keep_all(shared, query, count);
        }
        if (level == 1) break;
        for (uint c = query->lid; c < count; c += ITEMS) {
            shared->candidate[2 * c] = 2 * shared->kept[c];
            shared->candidate[2 * c + 1] = 2 * shared->kept[c] + 1;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        count *= 2; /* the last node may have one child */
        if (count > 0 && (uint)shared->candidate[count - 1] >= level_nodes(query->seen, level - 1)) count--;
    }
    return count;
}

/* Along all leaves; returns the number of leaves in kept[]. */
inline uint flat(__local struct shared *shared, const struct query *query)
{
    const uint all = CEIL_DIV(query->seen, LEAF);
    const uint leaves = drop_straddling(query, 1, all - 1, all);
    uint held = 0;
    for (uint next = 0; next < leaves;) {
        uint count = held + min((uint)CANDIDATES - held, leaves - next);
        for (uint c = query->lid; c < count; c += ITEMS) {
            shared->candidate[c] = c < held ? shared->kept[c] : (int)(next + c - held);
            if (c < held) shared->score[c] = shared->kept_score[c];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        uint others = list_unforced(shared, query, 1, held, count);
        if (SELECTOR == FLAT_MEAN)
            score_means(shared, query, 1, 1, held, count);
        else
            score_leaves(shared, query, others);
        barrier(CLK_LOCAL_MEM_FENCE);
        next += count - held;
        if (count > query->topk)
            keep_best(shared, query, count);
        else
            keep_all(shared, query, count);
        held = min(count, query->topk);
    }
    return held;
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void
select_leaves(__global const element *restrict q, __global const kv_element *restrict k,
              __global const float *restrict means, __global int *restrict indices,
              __global int *restrict counts, __global const long *restrict table, uint sequences,
              ulong unit_first, long q_len_stride, long q_head_stride, long k_len_stride, long k_head_stride,
              float scale, int causal, uint topk, uint forced_first, uint forced_last,
              uint kv_heads CACHE_ARGUMENTS ROOM_ARGUMENTS)
{
    __local struct shared shared;
    const ulong unit = unit_first + get_group_id(0);
    __global const long *sequence = sequence_of(table, sequences, unit);
    const uint q_len = (uint)sequence[SEQUENCE_Q_LEN], kv_len = (uint)sequence[SEQUENCE_KV_LEN];
    const ulong local_unit = unit - (ulong)sequence[SEQUENCE_UNIT];
    const uint kv_head = (uint)(local_unit / q_len), token = (uint)(local_unit - (ulong)kv_head * q_len);
    const long position = (long)token + (long)kv_len - (long)q_len;
    const ulong list = ((ulong)sequence[SEQUENCE_LIST_ROW] + token) * kv_heads + kv_head;

    struct query query;
    query.q = q + sequence[SEQUENCE_Q] + (long)token * q_len_stride + (long)(kv_head * GROUP) * q_head_stride;
    query.k = k + sequence[SEQUENCE_K] + (long)kv_head * k_head_stride;
    query.means = means + (sequence[SEQUENCE_NODE] + (long)kv_head * sequence[SEQUENCE_NODES]) * DIM;
    query.q_head_stride = q_head_stride;
    query.k_len_stride = k_len_stride;
    query.scale = scale;
    query.kv_len = kv_len;
#if CACHE
    query.means += means_first;
    query.room = room;
    query.scales.pages.table = page_table + sequence[SEQUENCE_PAGES];
    query.scales.pages.rows = page_rows;
    query.scales.pages.size = page_size;
#else
    query.room = CEIL_DIV(kv_len, LEAF);
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

    if (ROUNDS == 1) load_query(shared.q_tile, &query, 0);
    uint count = 0;
    if (query.seen > 0) count = IS_FLAT ? flat(&shared, &query) : walk(&shared, &query);
    for (uint n = query.lid; n < topk; n += ITEMS)
        indices[list * topk + n] = n < count ? shared.kept[n] : -1;
    if (query.lid == 0) counts[list] = (int)count;
}
