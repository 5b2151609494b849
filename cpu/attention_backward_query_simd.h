/* SPDX-License-Identifier: MIT */
/* Gradient of the queries, vectorised: a tile of query rows and heads, as in the forward pass.
 *
 * The rows are lanes; for each piece of a block
 *     logits [key][lanes] = q . k,   dp [key][lanes] = dout . v,   dq [lane][dim] += sum over keys of dx k
 *
 * Included by attention_backward_<variant>.c after a vector layer. */

#include "attention_backward_simd.h"

struct query_state {
    const struct backward_job *job;
    const struct forward_tile *tile;
    struct tile_view view;
    int64_t rows, dq_stride;
    float *q, *dout;    /* [lane group][dim or dim_v][lanes] */
    float *z, *dp;      /* [piece][lanes] of one lane group */
    float *slope;       /* likewise, with a soft cap */
    float *dq;          /* [rows][dq_stride] */
    float *lse, *delta; /* [rows] */
    float *visible;     /* of the view */
    float *key, *value; /* [piece] packed rows */
};

static size_t query_layout(const struct backward_job *job, int64_t rows, char *memory,
                           struct query_state *state)
{
    const struct problem *problem = job->problem;
    int64_t lanes = round_up(rows, LANES_MAX), block = piece_capacity(job->blocks);
    char *start = memory;
    state->rows = rows;
    state->dq_stride = round_up(problem->dim, WIDTH);
    state->q = part(&memory, lanes * problem->dim);
    state->dout = part(&memory, lanes * problem->dim_v);
    state->z = part(&memory, LANES_MAX * block);
    state->dp = part(&memory, LANES_MAX * block);
    state->slope = part(&memory, LANES_MAX * block);
    state->dq = part(&memory, lanes * state->dq_stride);
    state->lse = part(&memory, lanes);
    state->delta = part(&memory, lanes);
    state->visible = part(&memory, tile_view_floats(problem, job->blocks, lanes));
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
        int64_t left = MIN(state->rows - first, LANES_MAX);
        const void *q[LANES_MAX], *dout[LANES_MAX];
        for (int64_t lane = 0; lane < LANES_MAX; lane++) {
            int64_t r = first + lane, i = tile->row + r / tile->heads, row = sequence->q_row + i;
            int32_t head = tile->head + (int32_t)(r % tile->heads);
            state->lse[r] = INFINITY; /* of lanes without a row, and of empty rows: P = 0 */
            state->delta[r] = 0;
            if (lane >= left) continue;
            float lse = *(const float *)tensor_row(job->lse, sequence->batch, row, head);
            if (lse > -INFINITY) state->lse[r] = lse;
            state->delta[r] = delta[i * problem->q_heads + head];
            q[lane] = tensor_row(job->q, sequence->batch, row, head);
            dout[lane] = tensor_row(job->dout, sequence->batch, row, head);
        }
        queries_pack(q, left, job->q->dtype, problem->dim, state->q + first * problem->dim, lane_vectors(left));
        queries_pack(dout, left, job->dout->dtype, problem->dim_v, state->dout + first * problem->dim_v,
                     lane_vectors(left));
    }
    memset(state->dq, 0, (size_t)(state->rows * state->dq_stride) * sizeof(float));
}

/* One row, run by run of the keys that it sees: keys are not all finite. */
static void query_add_seen(const struct query_state *state, const struct piece *piece, int64_t r,
                           const float *dx, int64_t lanes, struct float_rows key)
{
    for (int64_t first = 0, end; first < piece->count; first = end) {
        end = first + 1;
        if (!view_sees(&state->view, piece, r, first)) continue;
        while (end < piece->count && view_sees(&state->view, piece, r, end))
            end++;
        struct float_rows from = {key.data + first * key.stride, key.stride};
        add_weighted(dx + first * lanes, lanes, from, end - first, state->job->problem->dim,
                     state->dq + r * state->dq_stride, state->dq_stride, 1);
    }
}

/* dq of the lane group that begins at row `lane`; rows that see nothing of the piece are left alone. */
static void query_add(const struct query_state *state, const struct piece *piece, int64_t lane, int64_t lanes,
                      struct float_rows key, bool finite)
{
    int32_t dim = state->job->problem->dim;
    struct view_run run = {.end = lane};
    int64_t end = MIN(state->rows, lane + lanes);
    while (view_run_next(&state->view, piece, end, &run)) {
        const float *dx = state->dp + run.row - lane;
        struct float_rows from = {key.data + run.first * key.stride, key.stride};
        if (!piece->partial || finite)
            add_weighted(dx + run.first * lanes, lanes, from, run.last - run.first, dim,
                         state->dq + run.row * state->dq_stride, state->dq_stride, run.end - run.row);
        else
            for (int64_t r = run.row; r < run.end; r++)
                query_add_seen(state, piece, r, state->dp + r - lane, lanes, key);
    }
}

/* A piece and the lane group that begins at row `lane`. */
static void query_lanes(struct query_state *state, const struct piece *piece, int64_t lane,
                        struct float_rows key, struct float_rows value, bool finite)
{
    const struct problem *problem = state->job->problem;
    int vectors = lane_vectors(state->rows - lane);
    int64_t lanes = vectors * WIDTH;
    struct key_range range = view_range(&state->view, piece, lane, lanes);
    bool changes = view_changes(&state->view, piece), bends = problem->options.softcap != 0;
    if (range.first >= range.end) return;
    for (int64_t j = range.first; j < range.end;)
        j += dot_rows(state->q + lane * problem->dim, problem->dim, vectors, key.data + j * key.stride,
                      key.stride, range.end - j, problem->scale, state->z + j * lanes);
    for (int64_t j = range.first; j < range.end;)
        j += dot_rows(state->dout + lane * problem->dim_v, problem->dim_v, vectors,
                      value.data + j * value.stride, value.stride, range.end - j, 1, state->dp + j * lanes);
    for (int64_t n = 0; n < lanes; n += WIDTH) {
        vec lse = vec_load(state->lse + lane + n), delta = vec_load(state->delta + lane + n);
        if (changes) view_logits(&state->view, piece, range, lane + n, state->z + n, lanes, state->slope + n);
        for (int64_t j = range.first; j < range.end; j++)
            gradients_of_logits(state->z + j * lanes + n, state->dp + j * lanes + n, lse, delta,
                                bends ? state->slope + j * lanes + n : NULL, problem->scale);
    }
    query_add(state, piece, lane, lanes, key, finite);
}

static void query_piece(struct query_state *state, const struct piece *piece)
{
    const struct backward_job *job = state->job;
    const struct problem *problem = job->problem;
    const struct sequence *sequence = state->tile->sequence;
    int32_t kv_head = state->tile->head / problem->group;
    const void *k = tensor_row(job->k, sequence->batch, sequence->k_row + piece->first, kv_head),
               *v = tensor_row(job->v, sequence->batch, sequence->k_row + piece->first, kv_head);
    struct rows keys = {k, job->k->dtype, job->k->len_stride, piece->count, problem->dim, NULL};
    bool finite = !piece->partial || rows_finite(&keys);
    struct float_rows key =
        vector_rows(k, job->k->dtype, job->k->len_stride, piece->count, problem->dim, state->key);
    struct float_rows value =
        key_rows(v, job->v->dtype, job->v->len_stride, piece->count, problem->dim_v, state->value);
    for (int64_t lane = 0; lane < state->rows; lane += LANES_MAX)
        query_lanes(state, piece, lane, key, value, finite);
}

static void backward_query_simd(const struct backward_job *job, const struct forward_tile *tile,
                                const float *delta, void *scratch)
{
    struct query_state state = {.job = job, .tile = tile};
    const struct sequence *sequence = tile->sequence;
    struct piece piece;
    query_layout(job, (int64_t)tile->rows * tile->heads, scratch, &state);
    query_begin(&state, delta);
    tile_view_begin(job->problem, job->blocks, tile, round_up(state.rows, LANES_MAX), state.visible,
                    &state.view);
    while (view_next(&state.view, &piece)) {
        view_open(&state.view, &piece);
        query_piece(&state, &piece);
    }
    for (int64_t r = 0; r < state.rows; r++)
        gradient_row_write(job, job->dq, sequence->batch, sequence->q_row + tile->row + r / tile->heads,
                           tile->head + (int32_t)(r % tile->heads), state.dq + r * state.dq_stride);
}
