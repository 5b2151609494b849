/* SPDX-License-Identifier: MIT */
/* Attention over a block list, vectorised: one tile of query rows and heads that share a list.
 *
 *   z_j = scale * q . k_j   over the listed keys j (j <= t when causal)
 *   lse = log sum_j exp z_j,   out = sum_j exp(z_j - lse) v_j
 *
 * One pass over the blocks with the online softmax. After each block and for each row: row_max = max z so far,
 * row_sum = sum exp(z - row_max), out = sum exp(z - row_max) v. The tile's rows ("lanes" of dot_simd.h) are all
 * pairs (query row, head), heads running fastest. Each block is read once from the caller's memory; while its
 * logits are computed its values are prefetched, while its values are added the next block's keys are.
 *
 * Included by attention_forward_<variant>.c after a vector layer; mirrors attention_forward_ref.c. */

#include "dot_simd.h"
#include "exp_simd.h"
#include "weighted_sum_simd.h"

#include <math.h>

struct forward_state {
    const struct forward_job *job;
    const struct forward_tile *tile;
    int64_t rows;             /* query rows x heads */
    int32_t block;            /* keys of a block */
    int64_t out_stride;       /* of a row of out */
    float *q;                 /* [lane group][dim][lanes] */
    float *logits;            /* [lane group][block][lanes], then the weights exp(z - row_max) */
    float *out;               /* [rows][out_stride], not yet divided by row_sum */
    float *row_max, *row_sum; /* [rows] */
    float *correction;        /* [rows] exp(old row_max - new row_max) */
    float *seen;              /* [rows] keys of the current block that the row sees */
    float *key;               /* packed keys: see dot_keys */
    float *value;             /* [block][2 * WIDTH] packed values of one panel */
};

static int64_t rows_padded(int64_t rows)
{
    return round_up(rows, LANES_MAX);
}

/* Cuts the scratch memory; returns its size. scratch NULL: only the size. */
static size_t state_layout(const struct forward_job *job, int64_t rows, void *scratch,
                           struct forward_state *state)
{
    const struct problem *problem = job->problem;
    int64_t lanes = rows_padded(rows), block = job->blocks ? job->blocks->block : DENSE_BLOCK;
    struct {
        float **part;
        int64_t floats;
    } parts[] = {
        {&state->q, lanes * problem->dim},
        {&state->logits, lanes * block},
        {&state->out, lanes * round_up(problem->dim_v, WIDTH)},
        {&state->row_max, lanes},
        {&state->row_sum, lanes},
        {&state->correction, lanes},
        {&state->seen, lanes},
        {&state->key, CHUNK_ROWS_MAX * packed_stride(problem->dim)},
        {&state->value, block * LANES_MAX},
    };
    size_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (scratch) *parts[i].part = (float *)((char *)scratch + used);
        used += (size_t)round_up(parts[i].floats * (int64_t)sizeof(float), 64);
    }
    state->block = (int32_t)block;
    state->rows = rows;
    state->out_stride = round_up(problem->dim_v, WIDTH);
    return used;
}

/* Query row of the sequence, and head, of row r of the tile. */
static int64_t row_position(const struct forward_tile *tile, int64_t r)
{
    return tile->row + r / tile->heads;
}

static const void *tensor_tile_row(const struct forward_state *state, const clattn_tensor *tensor, int64_t r)
{
    const struct sequence *sequence = state->tile->sequence;
    return tensor_row(tensor, sequence->batch, sequence->q_row + row_position(state->tile, r),
                      state->tile->head + r % state->tile->heads);
}

static void state_begin(struct forward_state *state)
{
    const clattn_tensor *q = state->job->q;
    int32_t dim = state->job->problem->dim;
    for (int64_t first = 0; first < state->rows; first += LANES_MAX) {
        int64_t left = MIN(state->rows - first, LANES_MAX), lanes = lane_vectors(left) * WIDTH;
        for (int64_t lane = 0; lane < left; lane++)
            query_pack(tensor_tile_row(state, q, first + lane), q->dtype, dim, state->q + first * dim, lanes,
                       lane);
        query_pad(dim, state->q + first * dim, lanes, left);
    }
    for (int64_t r = 0; r < rows_padded(state->rows); r++) {
        state->row_max[r] = -INFINITY;
        state->row_sum[r] = 0;
    }
    memset(state->out, 0, (size_t)(state->rows * state->out_stride) * sizeof(float));
}

/* ---- one block ---- */

struct block_view {
    int64_t first; /* its first key */
    int64_t count; /* keys that exist and that some row sees */
    bool partial;  /* some row does not see all of them: state->seen counts */
    struct rows key, value;
};

/* Weights of one lane group: logits become exp(z - row_max). */
static void softmax_lanes(struct forward_state *state, const struct block_view *block, int64_t first,
                          int vectors)
{
    for (int n = 0; n < vectors; n++) {
        int64_t lane = first + n * WIDTH, lanes = vectors * WIDTH;
        float *z = state->logits + first * state->block + n * WIDTH;
        vec old_max = vec_load(state->row_max + lane), new_max = old_max;
        vec minus_infinity = vec_set(-INFINITY);
        if (block->partial) {
            vec seen = vec_load(state->seen + lane);
            for (int64_t j = 0; j < block->count; j++)
                vec_store(z + j * lanes,
                          vec_where_less(vec_set((float)j), seen, vec_load(z + j * lanes), minus_infinity));
        }
        for (int64_t j = 0; j < block->count; j++)
            new_max = vec_max(vec_load(z + j * lanes), new_max);
        /* A row that has seen nothing subtracts 0: its weights are exp(-inf) = 0. */
        vec shift = vec_where_less(minus_infinity, new_max, new_max, vec_zero()), sum = vec_zero();
        for (int64_t j = 0; j < block->count; j++) {
            vec weight = vec_exp(vec_sub(vec_load(z + j * lanes), shift));
            vec_store(z + j * lanes, weight);
            sum = vec_add(sum, weight);
        }
        vec correction = vec_exp(vec_sub(old_max, shift));
        vec_store(state->row_max + lane, new_max);
        vec_store(state->correction + lane, correction);
        vec_store(state->row_sum + lane, vec_fma(vec_load(state->row_sum + lane), correction, sum));
    }
}

/* Columns d .. d + 2 * WIDTH - 1 of the values. Packed, with zeros past dim_v: 16-bit types, incomplete
 * vectors, and rows that would fall into a few cache sets when they are read more than once. */
static struct float_rows value_panel(const struct forward_state *state, const struct rows *value, int32_t d,
                                     int vectors)
{
    bool conflicts = value->stride != 0 && value->stride % 256 == 0 && state->rows > PV_ROWS;
    if (value->dtype == CLATTN_FLOAT32 && d + vectors * WIDTH <= value->dim && !conflicts)
        return (struct float_rows){(const float *)value->data + d, value->stride};
    int64_t lanes = vectors * WIDTH, element = value->dtype == CLATTN_FLOAT32 ? 4 : 2;
    int32_t exists = (int32_t)MIN(lanes, value->dim - d);
    memset(state->value, 0, exists < lanes ? (size_t)(value->count * lanes) * sizeof(float) : 0);
    panel_to_float(value->data + d * element, value->dtype, value->stride, value->count, exists, state->value,
                   lanes);
    return (struct float_rows){state->value, lanes};
}

/* Rows r .. r + rows - 1 of a lane group, columns d of the values. Weights of keys that a row does not see are
 * not touched: the value may be NaN. */
static void block_values_rows(struct forward_state *state, const struct block_view *block, int64_t first,
                              int64_t r, int rows, struct float_rows value, int64_t d, int vectors)
{
    int64_t lanes = lane_vectors(state->rows - first) * WIDTH, common = block->count;
    const float *p = state->logits + first * state->block + (r - first);
    float *out = state->out + r * state->out_stride + d;
    if (block->partial)
        for (int i = 0; i < rows; i++)
            common = MIN(common, (int64_t)state->seen[r + i]);
    weighted_sum(p, lanes, value, common, state->correction + r, out, state->out_stride, rows, vectors);
    for (int i = 0; i < rows && block->partial; i++) {
        const float one = 1;
        int64_t rest = MIN(block->count, (int64_t)state->seen[r + i]) - common;
        struct float_rows from = {value.data + common * value.stride, value.stride};
        if (rest > 0)
            weighted_sum(p + common * lanes + i, lanes, from, rest, &one, out + i * state->out_stride,
                         state->out_stride, 1, vectors);
    }
}

/* out = out * correction + weights * values; meanwhile the next block's keys are prefetched. */
static void block_values(struct forward_state *state, const struct block_view *block, const struct rows *next)
{
    int64_t panels = ceil_div(state->out_stride, 2 * WIDTH);
    int64_t panel_keys = next ? ceil_div(next->count, panels) : 0;
    for (int64_t panel = 0; panel < panels; panel++) {
        int64_t d = panel * 2 * WIDTH;
        int vectors = state->out_stride - d > WIDTH ? 2 : 1;
        prefetch_rows(next, panel * panel_keys, panel_keys);
        struct float_rows value = value_panel(state, &block->value, (int32_t)d, vectors);
        for (int64_t first = 0; first < state->rows; first += LANES_MAX) {
            int64_t end = MIN(first + LANES_MAX, state->rows);
            for (int64_t r = first; r < end; r += PV_ROWS)
                block_values_rows(state, block, first, r, (int)MIN(PV_ROWS, end - r), value, d, vectors);
        }
    }
}

/* ---- the tile ---- */

static int64_t block_first(const struct forward_state *state, int64_t n)
{
    const struct forward_tile *tile = state->tile;
    return (tile->indices ? tile->indices[n] : n) * (int64_t)state->block;
}

static struct rows block_rows(const struct forward_state *state, const clattn_tensor *tensor,
                              const struct block_view *block)
{
    const struct sequence *sequence = state->tile->sequence;
    int32_t kv_head = state->tile->head / state->job->problem->group;
    return (struct rows){tensor_row(tensor, sequence->batch, sequence->k_row + block->first, kv_head),
                         tensor->dtype, tensor->len_stride, block->count, (int32_t)tensor->dim};
}

/* Block n of the list, cut to the keys that the tile's last row sees; false when it sees none. */
static bool block_at(const struct forward_state *state, int64_t n, int64_t visible, struct block_view *block)
{
    block->first = block_first(state, n);
    block->count = MIN(state->block, visible - block->first);
    if (block->count <= 0) return false;
    block->key = block_rows(state, state->job->k, block);
    block->value = block_rows(state, state->job->v, block);
    return true;
}

static void count_seen(struct forward_state *state, struct block_view *block)
{
    const struct problem *problem = state->job->problem;
    const struct sequence *sequence = state->tile->sequence;
    block->partial = visible_keys(problem, sequence, state->tile->row) - block->first < block->count;
    if (!block->partial) return;
    for (int64_t r = 0; r < rows_padded(state->rows); r++) {
        int64_t i = row_position(state->tile, MIN(r, state->rows - 1));
        int64_t seen = visible_keys(problem, sequence, i) - block->first;
        state->seen[r] = (float)MAX(0, MIN(seen, block->count));
    }
}

static void state_finish(const struct forward_state *state)
{
    const struct forward_job *job = state->job;
    int32_t dim_v = job->problem->dim_v;
    for (int64_t r = 0; r < state->rows; r++) {
        float *from = state->out + r * state->out_stride, sum = state->row_sum[r];
        void *to = (void *)tensor_tile_row(state, job->out, r);
        bool empty = state->row_max[r] == -INFINITY;
        vec divisor = vec_set(empty ? 1 : sum);
        int32_t d = 0;
        if (empty) memset(from, 0, (size_t)state->out_stride * sizeof(float));
        for (; d < dim_v; d += WIDTH)
            vec_store(from + d, vec_div(vec_load(from + d), divisor));
        for (d = 0; d + WIDTH <= dim_v; d += WIDTH)
            vec_store_as(to, job->out->dtype, d, vec_load(from + d));
        for (; d < dim_v; d++)
            store_element(to, job->out->dtype, d, from[d]);
        if (!job->lse) continue;
        float lse = empty ? -INFINITY : (float)((double)state->row_max[r] + log((double)sum));
        store_element((void *)tensor_tile_row(state, job->lse, r), CLATTN_FLOAT32, 0, lse);
    }
}

static size_t forward_scratch_simd(const struct forward_job *job, int32_t rows, int32_t heads)
{
    struct forward_state state = {0};
    return state_layout(job, (int64_t)rows * heads, NULL, &state);
}

static void forward_tile_simd(const struct forward_job *job, const struct forward_tile *tile, void *scratch)
{
    struct forward_state state = {.job = job, .tile = tile};
    struct block_view block, next;
    state_layout(job, (int64_t)tile->rows * tile->heads, scratch, &state);
    state_begin(&state);

    int64_t visible = visible_keys(job->problem, tile->sequence, tile->row + tile->rows - 1);
    int64_t blocks = tile->indices ? tile->count : ceil_div(visible, state.block);
    bool more = blocks > 0 && block_at(&state, 0, visible, &next);
    for (int64_t n = 0; more; n++) {
        block = next;
        more = n + 1 < blocks && block_at(&state, n + 1, visible, &next);
        count_seen(&state, &block);
        dot_keys(state.q, state.rows, &block.key, job->problem->scale, state.logits, state.block, state.key,
                 &block.value);
        for (int64_t first = 0; first < state.rows; first += LANES_MAX)
            softmax_lanes(&state, &block, first, lane_vectors(state.rows - first));
        block_values(&state, &block, more ? &next.key : NULL);
    }
    state_finish(&state);
}
