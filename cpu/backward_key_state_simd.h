/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_BACKWARD_KEY_STATE_SIMD_H
#define CLATTN_BACKWARD_KEY_STATE_SIMD_H

/* What a tile of attention_backward_key_simd.h keeps between packs of rows. Included after a vector layer. */

#include "attention_backward_simd.h"

enum {
    ROWS = PACK_ROWS_MAX,
    CHAIN_ROWS = 11 * ROWS /* until the inner accumulator is emptied, whatever the size of the packs */
};

enum { SHORT_DIM = 16 }; /* steps of a dot product whose rounding dbias does not bear otherwise */

struct key_state {
    const struct backward_job *job;
    const struct key_tile *tile;
    int64_t keys, rows;   /* of the piece; packed so far */
    int64_t lanes;        /* keys, rounded up */
    int64_t rows_left;    /* that are not packed yet, at most */
    int64_t pieces_ahead; /* rows of the next piece that have been asked for */
    int64_t chain;        /* rows since the inner accumulators were emptied */
    int64_t dk_stride, dv_stride;
    float *k, *v;       /* [lane group][dim or dim_v][lanes] */
    float *z, *dp;      /* [ROWS][lanes] of one lane group */
    float *dk, *dv;     /* inner accumulators [keys][stride] */
    float *q, *dout;    /* [ROWS] packed rows */
    float *lse, *delta; /* [ROWS] */
    float *from, *to;   /* [ROWS] keys that the row sees */
    float *bias;        /* [ROWS] */
    float *window;      /* [ROWS][2 * AXES] lo and hi */
    float *lane_index;  /* [lanes] 0, 1 ... */
    float *coordinate;  /* [AXES][lanes] */
    float *slope;       /* [lanes] of the soft cap */
    float *ds;          /* [ROWS][WIDTH] sums of dS */
    float *part;        /* [ROWS][lanes] of one lane group: some dimensions' part of z or dp, with dbias */
    float *all_dx;      /* [ROWS][lanes] of all lane groups; with dq */
    float *k_panel;     /* [panel of two vectors][key][2 * WIDTH] keys */
    float *dq;          /* [ROWS][2 * WIDTH] of a panel */
    float *dq_row[ROWS];
    int64_t *turn[ROWS], number[ROWS]; /* of the row of dq */
    bool finite;                       /* the keys are, with dq */
    int32_t head[ROWS];
    bool chained;         /* dk and dv are inner accumulators; false: few rows, they are the tile's */
    bool partial;         /* some packed row does not see all keys */
    struct row_walk walk; /* what comes after the packed rows */
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
    state->from = part(&memory, ROWS);
    state->to = part(&memory, ROWS);
    state->bias = part(&memory, ROWS);
    state->window = part(&memory, ROWS * 2 * AXES);
    state->lane_index = part(&memory, lanes);
    state->coordinate = part(&memory, lanes * AXES);
    state->slope = part(&memory, LANES_MAX);
    state->ds = part(&memory, ROWS * WIDTH);
    state->part = part(&memory, LANES_MAX * ROWS);
    state->all_dx = part(&memory, ROWS * lanes);
    state->k_panel = part(&memory, lanes * round_up(problem->dim, LANES_MAX));
    state->dq = part(&memory, ROWS * LANES_MAX);
    state->lanes = lanes;
    return (size_t)(memory - start);
}

static size_t backward_key_scratch_simd(const struct backward_job *job)
{
    struct key_state state;
    return key_layout(job, NULL, &state);
}

#endif
