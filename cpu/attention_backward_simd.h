/* SPDX-License-Identifier: MIT */
/* Gradients of attention over a block list, vectorised.
 *
 *   P = exp(z - lse),  dx = scale P (dout . v_j - D),   dv_j = sum P dout,  dq = sum dx k_j,  dk_j = sum dx q
 *
 * Queries: a tile of query rows and heads that share a list, as in the forward pass. The rows are lanes; for
 * each block logits [key][lanes] = q . k,   dp [key][lanes] = dout . v,   dq [lane][dim] += sum over keys of dx
 * k Keys: one block, whose keys are lanes, and all rows that list it, ROWS at a time: logits [row][lanes] = k .
 * q,   dp [row][lanes] = v . dout dv [lane][dim_v] += sum over rows of P dout,   dk [lane][dim] += sum over
 * rows of dx q Sums over many rows go through a second accumulator, so that a chain of float32 additions stays
 * short.
 *
 * Included by attention_backward_<variant>.c after a vector layer; mirrors attention_backward_ref.c. */

#include "dot_simd.h"
#include "exp_simd.h"
#include "weighted_sum_simd.h"

#include "backward.h"

#include <math.h>

enum { ROWS = 64, CHAIN = 16 }; /* rows at a time; packs of rows until the inner accumulator is emptied */

/* Cuts memory into parts of whole cache lines. */
static float *part(char **memory, int64_t floats)
{
    float *start = (float *)*memory;
    *memory += round_up(floats * (int64_t)sizeof(float), 64);
    return start;
}

/* z -> P, dp -> dx, for `count` keys or rows by one vector of lanes; from/to: lanes outside see nothing. */
static inline void gradients_of_logits(float *z, float *dp, vec lse, vec delta, vec visible, float scale)
{
    vec none = vec_zero(), p = vec_exp(vec_sub(vec_load(z), lse));
    p = vec_where_less(none, visible, p, none);
    vec ds = vec_mul(p, vec_sub(vec_load(dp), delta));
    vec_store(z, p);
    vec_store(dp, vec_where_less(none, visible, vec_mul(ds, vec_set(scale)), none));
}

/* out [rows][stride] += sum over `count` of p [count][lanes] * value [count][dim]; in tiles of PV_ROWS rows and
 * two vectors. */
static void add_weighted(const float *p, int64_t lanes, struct float_rows value, int64_t count, int32_t dim,
                         float *out, int64_t stride, int64_t rows)
{
    static const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    for (int64_t d = 0; d < dim; d += 2 * WIDTH) {
        int vectors = dim - d > WIDTH ? 2 : 1;
        struct float_rows panel = {value.data + d, value.stride};
        for (int64_t r = 0; r < rows; r += PV_ROWS)
            weighted_sum(p + r, lanes, panel, count, ones, out + r * stride + d, stride,
                         (int)MIN(PV_ROWS, rows - r), vectors);
    }
}

/* ---- gradient of the queries ---- */

struct query_state {
    const struct backward_job *job;
    const struct forward_tile *tile;
    int64_t rows, dq_stride;
    float *q, *dout;    /* [lane group][dim or dim_v][lanes] */
    float *z, *dp;      /* [block][lanes] of one lane group */
    float *dq;          /* [rows][dq_stride] */
    float *lse, *delta; /* [rows] */
    float *seen;        /* [rows] keys of the current block that the row sees */
    float *key, *value; /* [block] packed rows */
};

static size_t query_layout(const struct backward_job *job, int64_t rows, char *memory,
                           struct query_state *state)
{
    const struct problem *problem = job->problem;
    int64_t lanes = round_up(rows, LANES_MAX), block = backward_block(job);
    char *start = memory;
    state->rows = rows;
    state->dq_stride = round_up(problem->dim, WIDTH);
    state->q = part(&memory, lanes * problem->dim);
    state->dout = part(&memory, lanes * problem->dim_v);
    state->z = part(&memory, LANES_MAX * block);
    state->dp = part(&memory, LANES_MAX * block);
    state->dq = part(&memory, lanes * state->dq_stride);
    state->lse = part(&memory, lanes);
    state->delta = part(&memory, lanes);
    state->seen = part(&memory, lanes);
    state->key = part(&memory, block * packed_stride(problem->dim));
    state->value = part(&memory, block * packed_stride(problem->dim_v));
    return (size_t)(memory - start);
}

static size_t backward_query_scratch_simd(const struct backward_job *job, int32_t rows, int32_t heads)
{
    struct query_state state;
    return query_layout(job, (int64_t)rows * heads, NULL, &state);
}

static void query_begin(struct query_state *state, const float *delta)
{
    const struct backward_job *job = state->job;
    const struct problem *problem = job->problem;
    const struct forward_tile *tile = state->tile;
    const struct sequence *sequence = tile->sequence;
    for (int64_t first = 0; first < state->rows; first += LANES_MAX) {
        int64_t left = MIN(state->rows - first, LANES_MAX), lanes = lane_vectors(left) * WIDTH;
        float *q = state->q + first * problem->dim, *dout = state->dout + first * problem->dim_v;
        for (int64_t lane = 0; lane < LANES_MAX; lane++) {
            int64_t r = first + lane, i = tile->row + r / tile->heads, row = sequence->q_row + i;
            int32_t head = tile->head + (int32_t)(r % tile->heads);
            state->lse[r] = INFINITY; /* of lanes without a row, and of empty rows: P = 0 */
            state->delta[r] = 0;
            if (lane >= left) continue;
            float lse = *(const float *)tensor_row(job->lse, sequence->batch, row, head);
            if (lse > -INFINITY) state->lse[r] = lse;
            state->delta[r] = delta[i * problem->q_heads + head];
            query_pack(tensor_row(job->q, sequence->batch, row, head), job->q->dtype, problem->dim, q, lanes,
                       lane);
            query_pack(tensor_row(job->dout, sequence->batch, row, head), job->dout->dtype, problem->dim_v,
                       dout, lanes, lane);
        }
        query_pad(problem->dim, q, lanes, left);
        query_pad(problem->dim_v, dout, lanes, left);
    }
    memset(state->dq, 0, (size_t)(state->rows * state->dq_stride) * sizeof(float));
}

/* Keys first .. first + count - 1 and the lane group that begins at row `lane`. */
static void query_lanes(struct query_state *state, int64_t lane, int64_t count, struct float_rows key,
                        struct float_rows value)
{
    const struct problem *problem = state->job->problem;
    int vectors = lane_vectors(state->rows - lane);
    int64_t lanes = vectors * WIDTH;
    for (int64_t j = 0; j < count;)
        j += dot_rows(state->q + lane * problem->dim, problem->dim, vectors, key.data + j * key.stride,
                      key.stride, count - j, problem->scale, state->z + j * lanes);
    for (int64_t j = 0; j < count;)
        j += dot_rows(state->dout + lane * problem->dim_v, problem->dim_v, vectors,
                      value.data + j * value.stride, value.stride, count - j, 1, state->dp + j * lanes);
    for (int n = 0; n < vectors; n++) {
        int64_t r = lane + n * WIDTH;
        vec lse = vec_load(state->lse + r), delta = vec_load(state->delta + r),
            seen = vec_load(state->seen + r);
        for (int64_t j = 0; j < count; j++)
            gradients_of_logits(state->z + j * lanes + n * WIDTH, state->dp + j * lanes + n * WIDTH, lse, delta,
                                vec_sub(seen, vec_set((float)j)), problem->scale);
    }
    add_weighted(state->dp, lanes, key, count, problem->dim, state->dq + lane * state->dq_stride,
                 state->dq_stride, MIN(state->rows - lane, lanes));
}

static void query_block(struct query_state *state, int64_t first, int64_t count)
{
    const struct backward_job *job = state->job;
    const struct problem *problem = job->problem;
    const struct forward_tile *tile = state->tile;
    const struct sequence *sequence = tile->sequence;
    int32_t kv_head = tile->head / problem->group;
    for (int64_t r = 0; r < round_up(state->rows, LANES_MAX); r++) {
        int64_t i = tile->row + MIN(r, state->rows - 1) / tile->heads;
        state->seen[r] = (float)MAX(0, MIN(visible_keys(problem, sequence, i) - first, count));
    }
    /* Packed, because weighted sums need whole vectors of keys. */
    struct float_rows key = rows_pack(tensor_row(job->k, sequence->batch, sequence->k_row + first, kv_head),
                                      job->k->dtype, job->k->len_stride, count, problem->dim, state->key);
    struct float_rows value = key_rows(tensor_row(job->v, sequence->batch, sequence->k_row + first, kv_head),
                                       job->v->dtype, job->v->len_stride, count, problem->dim_v, state->value);
    for (int64_t lane = 0; lane < state->rows; lane += LANES_MAX)
        query_lanes(state, lane, count, key, value);
}

static void backward_query_simd(const struct backward_job *job, const struct forward_tile *tile,
                                const float *delta, void *scratch)
{
    struct query_state state = {.job = job, .tile = tile};
    const struct problem *problem = job->problem;
    const struct sequence *sequence = tile->sequence;
    int64_t visible = visible_keys(problem, sequence, tile->row + tile->rows - 1), block = backward_block(job);
    int64_t blocks = tile->indices ? tile->counts[0] : ceil_div(visible, block);
    query_layout(job, (int64_t)tile->rows * tile->heads, scratch, &state);
    query_begin(&state, delta);
    for (int64_t n = 0; n < blocks; n++) {
        int64_t first = (tile->indices ? tile->indices[n] : n) * block, count = MIN(block, visible - first);
        if (count > 0) query_block(&state, first, count);
    }
    for (int64_t r = 0; r < state.rows; r++)
        gradient_row_write(job, job->dq, sequence->batch, sequence->q_row + tile->row + r / tile->heads,
                           tile->head + (int32_t)(r % tile->heads), state.dq + r * state.dq_stride);
}

/* ---- gradients of keys and values ---- */

struct key_state {
    const struct backward_job *job;
    const struct key_tile *tile;
    int64_t keys, rows; /* of the block; packed so far */
    int packs;          /* since the inner accumulators were emptied */
    int64_t dk_stride, dv_stride;
    float *k, *v;       /* [lane group][dim or dim_v][lanes] */
    float *z, *dp;      /* [ROWS][lanes] of one lane group */
    float *dk, *dv;     /* inner accumulators [keys][stride] */
    float *q, *dout;    /* [ROWS] packed rows */
    float *lse, *delta; /* [ROWS] */
    float *seen;        /* [ROWS] keys of the block that the row sees */
    float *lane_index;  /* [lanes] 0, 1 ... */
};

static size_t key_layout(const struct backward_job *job, char *memory, struct key_state *state)
{
    const struct problem *problem = job->problem;
    int64_t lanes = round_up(backward_block(job), LANES_MAX);
    char *start = memory;
    state->dk_stride = gradient_stride(problem->dim);
    state->dv_stride = gradient_stride(problem->dim_v);
    state->k = part(&memory, lanes * problem->dim);
    state->v = part(&memory, lanes * problem->dim_v);
    state->z = part(&memory, LANES_MAX * ROWS);
    state->dp = part(&memory, LANES_MAX * ROWS);
    state->dk = part(&memory, lanes * state->dk_stride);
    state->dv = part(&memory, lanes * state->dv_stride);
    state->q = part(&memory, ROWS * packed_stride(problem->dim));
    state->dout = part(&memory, ROWS * packed_stride(problem->dim_v));
    state->lse = part(&memory, ROWS);
    state->delta = part(&memory, ROWS);
    state->seen = part(&memory, ROWS);
    state->lane_index = part(&memory, lanes);
    return (size_t)(memory - start);
}

static size_t backward_key_scratch_simd(const struct backward_job *job)
{
    struct key_state state;
    return key_layout(job, NULL, &state);
}

static void key_begin(struct key_state *state)
{
    const struct backward_job *job = state->job;
    const struct problem *problem = job->problem;
    const struct sequence *sequence = state->tile->sequence;
    int64_t first = state->tile->block * backward_block(job);
    int32_t kv_head = state->tile->kv_head;
    state->keys = MIN(backward_block(job), sequence->kv_len - first);
    for (int64_t lane = 0; lane < round_up(state->keys, LANES_MAX); lane++)
        state->lane_index[lane] = (float)lane;
    for (int64_t group = 0; group < state->keys; group += LANES_MAX) {
        int64_t left = MIN(state->keys - group, LANES_MAX), lanes = lane_vectors(left) * WIDTH;
        float *k = state->k + group * problem->dim, *v = state->v + group * problem->dim_v;
        for (int64_t lane = 0; lane < left; lane++) {
            int64_t row = sequence->k_row + first + group + lane;
            query_pack(tensor_row(job->k, sequence->batch, row, kv_head), job->k->dtype, problem->dim, k, lanes,
                       lane);
            query_pack(tensor_row(job->v, sequence->batch, row, kv_head), job->v->dtype, problem->dim_v, v,
                       lanes, lane);
        }
        query_pad(problem->dim, k, lanes, left);
        query_pad(problem->dim_v, v, lanes, left);
    }
    memset(state->dk, 0, (size_t)(state->keys * state->dk_stride) * sizeof(float));
    memset(state->dv, 0, (size_t)(state->keys * state->dv_stride) * sizeof(float));
}

/* Empties the inner accumulators into the tile's. */
static void key_flush(struct key_state *state)
{
    float *const from[] = {state->dk, state->dv}, *const to[] = {state->tile->dk, state->tile->dv};
    const int64_t count[] = {state->keys * state->dk_stride, state->keys * state->dv_stride};
    for (int which = 0; which < 2; which++)
        for (int64_t n = 0; n < count[which]; n++) {
            to[which][n] += from[which][n];
            from[which][n] = 0;
        }
    state->packs = 0;
}

/* The packed rows give what they have to all keys of the block. */
static void key_pack_done(struct key_state *state)
{
    const struct problem *problem = state->job->problem;
    struct float_rows q = {state->q, packed_stride(problem->dim)},
                      dout = {state->dout, packed_stride(problem->dim_v)};
    for (int64_t group = 0; group < state->keys && state->rows; group += LANES_MAX) {
        int vectors = lane_vectors(state->keys - group);
        int64_t lanes = vectors * WIDTH, left = MIN(state->keys - group, lanes);
        for (int64_t r = 0; r < state->rows;)
            r += dot_rows(state->k + group * problem->dim, problem->dim, vectors, q.data + r * q.stride,
                          q.stride, state->rows - r, problem->scale, state->z + r * lanes);
        for (int64_t r = 0; r < state->rows;)
            r += dot_rows(state->v + group * problem->dim_v, problem->dim_v, vectors,
                          dout.data + r * dout.stride, dout.stride, state->rows - r, 1, state->dp + r * lanes);
        for (int64_t r = 0; r < state->rows; r++)
            for (int n = 0; n < vectors; n++)
                gradients_of_logits(
                    state->z + r * lanes + n * WIDTH, state->dp + r * lanes + n * WIDTH, vec_set(state->lse[r]),
                    vec_set(state->delta[r]),
                    vec_sub(vec_set(state->seen[r]), vec_load(state->lane_index + group + n * WIDTH)),
                    problem->scale);
        add_weighted(state->z, lanes, dout, state->rows, problem->dim_v, state->dv + group * state->dv_stride,
                     state->dv_stride, left);
        add_weighted(state->dp, lanes, q, state->rows, problem->dim, state->dk + group * state->dk_stride,
                     state->dk_stride, left);
    }
    state->rows = 0;
    if (++state->packs == CHAIN) key_flush(state);
}

static void key_row(struct key_state *state, int64_t i, int32_t head)
{
    const struct backward_job *job = state->job;
    const struct problem *problem = job->problem;
    const struct sequence *sequence = state->tile->sequence;
    int64_t seen = visible_keys(problem, sequence, i) - state->tile->block * backward_block(job);
    int64_t row = sequence->q_row + i, n = state->rows;
    float lse = *(const float *)tensor_row(job->lse, sequence->batch, row, head);
    if (seen <= 0 || lse == -INFINITY) return;
    rows_pack(tensor_row(job->q, sequence->batch, row, head), job->q->dtype, 0, 1, problem->dim,
              state->q + n * packed_stride(problem->dim));
    rows_pack(tensor_row(job->dout, sequence->batch, row, head), job->dout->dtype, 0, 1, problem->dim_v,
              state->dout + n * packed_stride(problem->dim_v));
    state->lse[n] = lse;
    state->delta[n] = state->tile->delta[i * problem->q_heads + head];
    state->seen[n] = (float)MIN(seen, state->keys);
    if (++state->rows == ROWS) key_pack_done(state);
}

static void backward_key_simd(const struct backward_job *job, const struct key_tile *tile, void *scratch)
{
    struct key_state state = {.job = job, .tile = tile};
    int32_t q_block = job->problem->q_block;
    key_layout(job, scratch, &state);
    key_begin(&state);
    for (int32_t part_index = 0; part_index < tile->part_count; part_index++) {
        const struct key_part *p = &tile->parts[part_index];
        for (int64_t n = 0; n < p->count; n++) {
            int64_t row = (p->rows ? p->rows[n] : p->first_row + n) * q_block;
            for (int64_t i = row; i < MIN(row + q_block, tile->sequence->q_len); i++)
                for (int32_t head = p->head; head < p->head + p->heads; head++)
                    key_row(&state, i, head);
        }
    }
    key_pack_done(&state);
    key_flush(&state);
}
