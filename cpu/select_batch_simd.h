/* SPDX-License-Identifier: MIT */
/* Selection of many query rows at once, level by level, so that a leaf is read once for all rows that score it.
 *
 *   logit[c][h] = scale * q_h . child_c          for the children of a node: keys at level 1, else means
 *   score       = sum over h of  logsumexp_c | mean_c + variance_c / 2
 *
 * Inner levels, row by row: the rows have their own candidates, pairs of means that lie anywhere (dot_pairs).
 * Level 1, leaf by leaf: the visits (row, leaf) are sorted by leaf. A visit's logits are [key][head] and go
 * straight into its score. Small groups stand side by side in the lanes, several rows at once.
 * Flat mean: rows as lanes, every node for all of them.
 *
 * What a row's score is does not depend on who shares its lanes: each lane is summed up for itself.
 *
 * Here the batch's memory and its packed queries; the levels are in select_levels_simd.h. Included by
 * select_simd.h; mirrors select_ref.c. */

#include "dot_vectors_simd.h"

#if defined(SIMD_WORD_DOTS)
#include "dot_words_avx512vnni.h"
#endif

enum {
    BATCH_ROWS = 256,
    BATCH_QUERY_BYTES =
        2 << 20, /* of packed queries, which are read again and again: the level-2 cache's size, ... */
    BATCH_QUERY_LEAST = 1 << 19, /* ... or that of the machine within these bounds */
    BATCH_WALK_BYTES = 16 << 20,
    ROUGH_ROWS = 2048, /* with rough scores, for which the keys of a leaf are converted once a batch */
    ROUGH_BYTES = 8 << 20,
    SIDE_ROWS = 2 /* that go down the levels side by side */
};

#if !defined(SIMD_RANK)
#define SIMD_RANK NULL /* the variant's walk_rank_function */
#endif

/* Row `row` of the batch scores `node`, and the score belongs to entry `slot` of its walk. */
struct visit {
    int32_t node, row, slot;
};

struct batch {
    const struct select_job *job;
    const struct sequence *sequence;
    int64_t row; /* first query row */
    int32_t kv_head, rows;
    int32_t vectors;   /* of a row's heads */
    int32_t together;  /* rows whose heads stand side by side in VECTORS_MAX vectors; 1: each alone */
    int64_t q_floats;  /* of a row */
    int32_t q_rows;    /* that are kept packed: all, or with rough scores SIDE_ROWS */
    struct walk *walk; /* [rows] */
    char *walk_memory; /* [rows][walk_bytes] */
    int64_t walk_bytes;
    float *q;      /* [q_rows][vector][dim][WIDTH]; flat mean: [lane group of rows][dim][lanes] */
    float *joined; /* [VECTORS_MAX][dim][WIDTH] heads of several rows */
    float *logits; /* [vector][RUN_ROWS][WIDTH]; flat mean: [lane group][RUN_ROWS][lanes] */
    float *leaf;   /* [RUN_ROWS][packed_stride(dim)] keys of a leaf as float32 */
    struct visit *visits, *unsorted; /* of level 1; flat: those of one leaf */
    int64_t *cursor;                 /* [rows] flat: next entry of each row */
    bool rough;                      /* leaves get rough scores first: see select_rough_simd.h */
#if defined(SIMD_WORD_DOTS)
    int32_t *words, *joined_words;   /* as q and joined: [..][pair of d][WIDTH] */
    float *word_step, *joined_step;  /* [rows][vector][WIDTH], [VECTORS_MAX][WIDTH] */
    struct word_row *word_row;       /* [rows] */
    int16_t *leaf_words;             /* [RUN_ROWS][word_stride(dim)] keys of a leaf */
    bool flat, rough_levels;         /* inner levels too: see select_rough_levels_simd.h */
    int16_t *mean_words;             /* [mean][word_stride(dim)] of all levels */
    struct word_leaf *mean;          /* [mean] */
    struct word_center center;       /* of keys and means */
    int64_t rough_nodes, rough_open; /* scored there, and of these how many needed the exact way */
    int64_t mean_first[64];          /* [level] */
    int32_t *packed;                 /* [q_rows] row whose queries are packed there; -1: none */
#endif
};

static bool is_flat_mean(const struct select_job *job)
{
    return job->select->selector == CLATTN_SELECT_FLAT_MEAN;
}

/* Do rough scores pay for so many rows? */
static bool rough_pays(const struct select_job *job, int64_t rows)
{
#if defined(SIMD_WORD_DOTS)
    enum { LEAST = 16 };
    clattn_selector selector = job->select->selector;
    return rows >= LEAST && (selector == CLATTN_SELECT_PISA || selector == CLATTN_SELECT_FLAT_LSE);
#else
    (void)job;
    (void)rows;
    return false;
#endif
}

/* Cuts the scratch memory; returns its size. scratch NULL: only the size. */
static size_t batch_layout(const struct select_job *job, int64_t rows, void *scratch, struct batch *batch)
{
    const struct problem *problem = job->problem;
    bool flat_mean = is_flat_mean(job), flat = job->select->selector == CLATTN_SELECT_FLAT_LSE;
    int64_t dim = problem->dim, key = packed_stride((int32_t)dim);
    int64_t lanes = flat_mean ? round_up(rows, LANES_MAX) : VECTORS_MAX * WIDTH;
    int64_t visits = flat_mean ? 0 : flat ? rows : rows * 2 * job->select->topk;
    batch->vectors = (int32_t)ceil_div(problem->group, WIDTH);
    batch->together = problem->group % WIDTH ? MAX(1, VECTORS_MAX * WIDTH / problem->group) : 1;
    batch->q_floats = dim * (flat_mean ? 1 : batch->vectors * WIDTH);
    batch->walk_bytes = (int64_t)select_walk_scratch(job);
    batch->rough = rough_pays(job, rows);
    batch->q_rows = (int32_t)(flat_mean ? round_up(rows, LANES_MAX) : batch->rough ? SIDE_ROWS : rows);
#if defined(SIMD_WORD_DOTS)
    int64_t words = batch->rough ? word_steps((int32_t)dim) * WIDTH : 0;
    int64_t means = words && !flat ? pyramid_nodes(problem->kv_len_max, job->select->leaf) + 1 : 0;
    batch->flat = flat;
#endif
    const struct {
        void *part;
        int64_t bytes;
    } parts[] = {
        {&batch->walk, rows * (int64_t)sizeof(struct walk)},
        {&batch->walk_memory, rows * batch->walk_bytes},
        {&batch->q, batch->q_rows * batch->q_floats * (int64_t)sizeof(float)},
        {&batch->joined, MAX(dim, 32) * VECTORS_MAX * WIDTH * (int64_t)sizeof(float)},
        {&batch->logits, lanes * RUN_ROWS * (int64_t)sizeof(float)},
        {&batch->leaf, RUN_ROWS * key * (int64_t)sizeof(float)},
        {&batch->visits, visits * (int64_t)sizeof(struct visit)},
        {&batch->unsorted, visits * (int64_t)sizeof(struct visit)},
        {&batch->cursor, rows * (int64_t)sizeof(int64_t)},
#if defined(SIMD_WORD_DOTS)
        {&batch->words, rows * batch->vectors * words * (int64_t)sizeof(int32_t)},
        {&batch->joined_words, VECTORS_MAX * words * (int64_t)sizeof(int32_t)},
        {&batch->word_step, words ? rows * batch->vectors * WIDTH * (int64_t)sizeof(float) : 0},
        {&batch->joined_step, VECTORS_MAX * WIDTH * (int64_t)sizeof(float)},
        {&batch->word_row, words ? rows * (int64_t)sizeof(struct word_row) : 0},
        {&batch->leaf_words, words ? RUN_ROWS * word_stride((int32_t)dim) * (int64_t)sizeof(int16_t) : 0},
        {&batch->mean_words, means * word_stride((int32_t)dim) * (int64_t)sizeof(int16_t)},
        {&batch->mean, means * (int64_t)sizeof(struct word_leaf)},
        {&batch->packed, batch->q_rows * (int64_t)sizeof(int32_t)},
#endif
    };
    size_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (scratch) *(void **)parts[i].part = (char *)scratch + used;
        used += (size_t)round_up(parts[i].bytes, 64);
    }
    return used;
}

/* Where the score of a visit goes. The memory of all walks is cut alike, so that no walk is read for it: they
 * are many, and far. */
static double *visit_score(const struct batch *batch, const struct visit *visit)
{
    return (double *)((char *)batch->walk[0].score + visit->row * batch->walk_bytes) + visit->slot;
}

static int32_t batch_rows(const struct select_job *job)
{
    struct batch batch = {0};
    batch_layout(job, 1, NULL, &batch);
    int64_t query = batch.q_floats * (int64_t)sizeof(float), walk = (int64_t)select_walk_scratch(job);
    int64_t near = job->cache_bytes ? job->cache_bytes : BATCH_QUERY_BYTES;
    near = MAX(MIN(near, BATCH_QUERY_BYTES), BATCH_QUERY_LEAST);
    int64_t rows = MIN(near / query, BATCH_ROWS);
    if (rough_pays(job, ROUGH_ROWS)) rows = MIN(ROUGH_BYTES / (query / 2), ROUGH_ROWS);
    return (int32_t)MAX(1, MIN(rows, BATCH_WALK_BYTES / walk));
}

/* ---- the queries ---- */

/* to [dim][WIDTH] = heads as lanes; lanes without a head are zero. */
static void pack_heads(const struct batch *batch, int32_t r, int32_t first, float *to)
{
    const struct problem *problem = batch->job->problem;
    const clattn_tensor *q = batch->job->q;
    const void *head[WIDTH];
    int32_t heads = MIN(WIDTH, problem->group - first);
    for (int32_t h = 0; h < heads; h++)
        head[h] = tensor_row(q, batch->sequence->batch, batch->sequence->q_row + batch->row + r,
                             batch->kv_head * problem->group + first + h);
    queries_pack(head, heads, q->dtype, problem->dim, to, 1);
}

/* Part `part` of `parts` of a row's queries, if there is such a row. */
static void prefetch_queries(const struct batch *batch, int32_t r, int32_t part, int32_t parts)
{
    const struct problem *problem = batch->job->problem;
    const clattn_tensor *q = batch->job->q;
    if (r >= batch->rows) return;
    int32_t first = problem->group * part / parts, end = problem->group * (part + 1) / parts;
    struct rows rows = {tensor_row(q, batch->sequence->batch, batch->sequence->q_row + batch->row + r,
                                   batch->kv_head * problem->group + first),
                        q->dtype,
                        q->head_stride,
                        end - first,
                        problem->dim,
                        NULL};
    prefetch_lines(&rows, 0, row_lines(&rows));
}

/* Where the packed queries of a row are, when they are. */
static float *row_queries(const struct batch *batch, int32_t r)
{
    return batch->q + r % batch->q_rows * batch->q_floats;
}

static void row_pack(const struct batch *batch, int32_t r)
{
    for (int32_t v = 0; v < batch->vectors; v++)
        pack_heads(batch, r, v * WIDTH, row_queries(batch, r) + (int64_t)v * batch->job->problem->dim * WIDTH);
}

#if defined(SIMD_WORD_DOTS)

/* Heads first .. as rows of float32 that are padded by zeros to whole blocks: in place, or in batch->joined. */
static void row_heads(const struct batch *batch, int32_t r, int32_t first, const float *head[WIDTH])
{
    static const float zeros[256];
    const struct problem *problem = batch->job->problem;
    const clattn_tensor *q = batch->job->q;
    int64_t padded = word_stride(problem->dim);
    for (int32_t h = 0; h < WIDTH; h++) {
        head[h] = zeros;
        if (first + h >= problem->group) continue;
        const void *from = tensor_row(q, batch->sequence->batch, batch->sequence->q_row + batch->row + r,
                                      batch->kv_head * problem->group + first + h);
        head[h] = from;
        if (q->dtype == CLATTN_FLOAT32 && padded == problem->dim) continue;
        float *to = batch->joined + h * padded;
        panel_to_float(from, q->dtype, 0, 1, problem->dim, to, 0);
        memset(to + problem->dim, 0, (size_t)(padded - problem->dim) * sizeof *to);
        head[h] = to;
    }
}

#endif

/* Queries of a row that is to be scored. With rough scores only their words: see row_need. */
static void row_begin(const struct batch *batch, int32_t r)
{
#if defined(SIMD_WORD_DOTS)
    if (batch->rough) {
        struct word_row row = {.usable = true};
        int32_t dim = batch->job->problem->dim;
        int64_t words = word_steps(dim) * WIDTH, first = (int64_t)r * batch->vectors;
        for (int32_t v = 0; v < batch->vectors; v++) {
            const float *head[WIDTH];
            row_heads(batch, r, v * WIDTH, head);
            word_queries(head, &batch->center, dim, batch->words + (first + v) * words,
                         batch->word_step + (first + v) * WIDTH, &row);
        }
        batch->word_row[r] = row;
        batch->packed[r % batch->q_rows] = -1;
        return;
    }
#endif
    row_pack(batch, r);
}

/* Packed queries of a row that has begun. */
static const float *row_need(const struct batch *batch, int32_t r)
{
#if defined(SIMD_WORD_DOTS)
    if (batch->rough && batch->packed[r % batch->q_rows] != r) {
        row_pack(batch, r);
        batch->packed[r % batch->q_rows] = r;
    }
#endif
    return row_queries(batch, r);
}

/* One vector of a row's packed queries; where they are not kept, `to` [dim][WIDTH] gets it. */
static const float *vector_queries(const struct batch *batch, int32_t r, int32_t v, float *to)
{
    if (!batch->rough) return row_queries(batch, r) + (int64_t)v * batch->job->problem->dim * WIDTH;
    pack_heads(batch, r, v * WIDTH, to);
    return to;
}

/* The sum of the group's queries of each row, rows as lanes. */
static void batch_query_sums(const struct batch *batch)
{
    const struct problem *problem = batch->job->problem;
    float sum[256];
    for (int32_t r = 0; r < batch->rows; r++) {
        int32_t first = r / LANES_MAX * LANES_MAX;
        int64_t lanes = lane_vectors(batch->rows - first) * WIDTH;
        float *group = batch->q + (int64_t)first * problem->dim;
        if (r == first) query_pad(problem->dim, group, lanes, 0);
        query_sum(batch->job, batch->sequence, batch->kv_head, batch->row + r, sum);
        query_pack(sum, CLATTN_FLOAT32, problem->dim, group, lanes, r - first);
    }
}
