/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_FORWARD_STATE_SIMD_H
#define CLATTN_FORWARD_STATE_SIMD_H

/* What a tile of attention_forward_simd.h keeps between pieces of blocks. Included after a vector layer. */

#include "dot_simd.h"
#include "tile_view_simd.h"
#if defined(SIMD_STREAM_ROWS)
#include "dot_stream_simd.h"
#endif

enum { FEW_ROWS = WIDTH / 4 }; /* see attention_few_simd.h */

struct forward_state {
    const struct forward_job *job;
    const struct forward_tile *tile;
    struct tile_view view;
    int64_t rows;                   /* query rows x heads */
    int64_t block;                  /* keys of the largest piece */
    int64_t out_stride;             /* of a row of out */
    float *q;                       /* [lane group][dim][lanes] */
    float *logits;                  /* [lane group][block][lanes], then the weights exp(z - row_max) */
    float *out;                     /* [rows][out_stride], not yet divided by row_sum */
    bool value_pairs;               /* each 2 * WIDTH columns of out: the even ones, then the odd ones */
    float *row_max, *row_sum;       /* [rows] */
    float *correction;              /* [rows] exp(old row_max - new row_max) */
    float *visible;                 /* of the view */
    struct key_range *ranges;       /* [lane group] keys of the piece that some row sees */
    float *key;                     /* packed keys: see dot_keys */
    float *value;                   /* [block][2 * WIDTH] packed values of one panel */
    float *key_scale, *value_scale; /* [block] of INT8 */
    float *few;                     /* [FEW_ROWS][dim] queries */
#if defined(SIMD_STREAM_ROWS)
    float *chunks;
#endif
#if defined(SIMD_BYTE_DOTS)
    struct byte_dots bytes;
#endif
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
    int64_t lanes = rows_padded(rows), block = piece_capacity(job->blocks);
    int64_t range_floats = lanes / LANES_MAX * (int64_t)(sizeof(struct key_range) / sizeof(float));
    struct {
        void *part;
        int64_t floats;
    } parts[] = {
        {&state->q, lanes * problem->dim},
        {&state->logits, lanes * block},
        {&state->out, lanes * round_up(problem->dim_v, WIDTH)},
        {&state->row_max, lanes},
        {&state->row_sum, lanes},
        {&state->correction, lanes},
        {&state->visible, tile_view_floats(problem, job->blocks, lanes)},
        {&state->ranges, range_floats},
        {&state->key, CHUNK_ROWS_MAX * packed_stride(problem->dim)},
        {&state->value, block * LANES_MAX},
        {&state->key_scale, block},
        {&state->value_scale, block},
        {&state->few, FEW_ROWS * problem->dim},
#if defined(SIMD_STREAM_ROWS)
        {&state->chunks, STREAM_FLOATS},
#endif
#if defined(SIMD_BYTE_DOTS)
        {&state->bytes.memory, byte_dots_floats(job->k, lanes, block)},
#endif
    };
    size_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (scratch) *(void **)parts[i].part = (char *)scratch + used;
        used += (size_t)round_up(parts[i].floats * (int64_t)sizeof(float), 64);
    }
    state->block = block;
    state->rows = rows;
    state->out_stride = round_up(problem->dim_v, WIDTH);
#if defined(SIMD_TALL_ROWS)
    state->value_pairs =
        rows == SIMD_TALL_ROWS && job->v->dtype == CLATTN_BFLOAT16 && problem->dim_v % (2 * WIDTH) == 0;
#endif
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
        int64_t left = MIN(state->rows - first, LANES_MAX);
        const void *row[LANES_MAX];
        for (int64_t lane = 0; lane < left; lane++)
            row[lane] = tensor_tile_row(state, q, first + lane);
        queries_pack(row, left, q->dtype, dim, state->q + first * dim, lane_vectors(left));
    }
    for (int64_t r = 0; r < state->rows && state->rows <= FEW_ROWS; r++)
        for (int32_t d = 0; d < dim; d++)
            state->few[r * dim + d] = state->q[d * WIDTH + r];
#if defined(SIMD_BYTE_DOTS)
    byte_dots_begin(&state->bytes, state->job->k, state->q, state->rows, rows_padded(state->rows));
#endif
    for (int64_t r = 0; r < rows_padded(state->rows); r++) {
        state->row_max[r] = -INFINITY;
        state->row_sum[r] = 0;
    }
    memset(state->out, 0, (size_t)(state->rows * state->out_stride) * sizeof(float));
}

struct block_view {
    struct piece piece;
    struct rows key, value;
    bool finite; /* of a partial piece: are all values? */
};

#endif
