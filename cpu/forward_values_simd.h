/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_FORWARD_VALUES_SIMD_H
#define CLATTN_FORWARD_VALUES_SIMD_H

/* A piece's values, times the weights that logits have become:
 *
 *   out = out * correction + sum over keys j of weight_j v_j
 *
 * Meanwhile the next piece's keys are prefetched. Included by attention_forward_simd.h. */

#include "forward_state_simd.h"
#include "weighted_sum_simd.h"

/* Columns d .. d + 2 * WIDTH - 1 of the values. Packed, with zeros past dim_v: 16-bit types, incomplete
 * vectors, and rows that would fall into a few cache sets when they are read more than once. */
static struct float_rows value_panel(const struct forward_state *state, const struct rows *value, int32_t d,
                                     int vectors)
{
    bool conflicts = value->stride != 0 && value->stride % 256 == 0 && state->rows > PV_ROWS;
    if (value->dtype == CLATTN_FLOAT32 && d + vectors * WIDTH <= value->dim && !conflicts)
        return (struct float_rows){(const float *)value->data + d, value->stride};
    int64_t lanes = vectors * WIDTH, element = element_bytes(value->dtype);
    int32_t exists = (int32_t)MIN(lanes, value->dim - d);
#if defined(SIMD_TALL_ROWS)
    for (int64_t j = 0; j < value->count && state->value_pairs; j++) {
        const char *pair = value->data + j * stride_bytes(value) + d * element;
        vec_store(state->value + j * PAIR, vec_load_half(pair, CLATTN_BFLOAT16, 0));
        vec_store(state->value + j * PAIR + WIDTH, vec_load_half(pair, CLATTN_BFLOAT16, 1));
    }
    if (state->value_pairs) return (struct float_rows){state->value, PAIR};
#endif
    memset(state->value, 0, exists < lanes ? (size_t)(value->count * lanes) * sizeof(float) : 0);
    panel_to_float(value->data + d * element, value->dtype, value->stride, value->count, exists, state->value,
                   lanes);
    return (struct float_rows){state->value, lanes};
}

struct panel {
    struct float_rows value;
    struct ahead ahead;
    int64_t d; /* first column */
    int vectors;
};

/* Keys first .. end - 1 for rows r .. r + rows - 1 of the lane group that begins at row `group`. */
static void add_values(struct forward_state *state, const struct panel *panel, const float *correction,
                       int64_t group, int64_t r, int rows, int64_t first, int64_t end)
{
    int64_t lanes = lane_vectors(state->rows - group) * WIDTH;
    const float *p = state->logits + group * state->block + (r - group);
    struct float_rows from = {panel->value.data + first * panel->value.stride, panel->value.stride};
    weighted_sum_ahead(p + first * lanes, lanes, from, MAX(end - first, 0), correction,
                       state->out + r * state->out_stride + panel->d, state->out_stride, panel->ahead, rows,
                       panel->vectors);
}

/* One row, run by run of the keys that it sees: what it does not see must not matter, even where it is NaN. */
static void add_values_seen(struct forward_state *state, const struct block_view *block,
                            const struct panel *panel, int64_t group, int64_t r)
{
    const float one = 1, *correction = state->correction + r;
    const struct tile_view *view = &state->view;
    for (int64_t first = 0, end; first < block->piece.count; first = end) {
        end = first + 1;
        if (!view_sees(view, &block->piece, r, first)) continue;
        while (end < block->piece.count && view_sees(view, &block->piece, r, end))
            end++;
        add_values(state, panel, correction, group, r, 1, first, end);
        correction = &one;
    }
}

/* Rows r .. r + rows - 1 of a lane group. Rows that see nothing of the piece are left alone; the weights of
 * what a row does not see are 0, which adds nothing while the values are finite. */
static void block_values_rows(struct forward_state *state, const struct block_view *block,
                              const struct panel *panel, int64_t group, int64_t r, int rows)
{
    struct view_run run = {.end = r};
    while (view_run_next(&state->view, &block->piece, r + rows, &run)) {
        if (!block->piece.partial || block->finite)
            add_values(state, panel, state->correction + run.row, group, run.row, (int)(run.end - run.row),
                       run.first, run.last);
        else
            for (int64_t row = run.row; row < run.end; row++)
                add_values_seen(state, block, panel, group, row);
    }
}

/* How the lines of the next piece's keys (NULL: none) are shared among `calls` of block_values_rows: each
 * prefetches its part of them in the order of addresses while it computes `steps` keys, or, of rows with gaps,
 * one line of each row, and further ones before. */
struct share {
    const struct rows *next;
    int64_t calls;
    int64_t step; /* bytes of a key; 0: rows with gaps, or no steps that all calls have */
    int64_t part; /* bytes of a call */
};

static struct share share_begin(const struct rows *next, int64_t steps, int64_t calls, bool before)
{
    struct share share = {next, calls, 0, 0};
    if (!next || before || !rows_contiguous(next)) return share;
    int64_t step = ceil_div(next->count * stride_bytes(next), calls * steps);
    if (step <= LINE) share.step = step;
    share.part = step * steps;
    return share;
}

static struct ahead share_lines(const struct share *share, int64_t n, bool before)
{
    static const char nothing;
    const struct ahead none = {&nothing, 0};
    const struct rows *next = share->next;
    if (!next) return none;
    if (share->step) return (struct ahead){next->data + n * share->part, share->step};
    int64_t lines = row_lines(next), from = n * lines / share->calls, to = (n + 1) * lines / share->calls;
    if (from == to) return none;
    prefetch_lines(next, from, before ? to : to - 1);
    return before ? none : (struct ahead){next->data + (to - 1) * LINE, stride_bytes(next)};
}

#if defined(SIMD_TALL_ROWS)
/* Values that are not float32 and that one tall tile reads only once are converted where they are used. */
static bool block_values_tall(struct forward_state *state, const struct block_view *block,
                              const struct rows *next)
{
    const struct rows *value = &block->value;
    int64_t panels = value->dim / WIDTH;
    if (block->piece.partial || state->rows != SIMD_TALL_ROWS || value->dtype == CLATTN_FLOAT32 ||
        value->dim % WIDTH != 0)
        return false;
    struct share share = share_begin(next, value->count, panels, false);
    for (int64_t n = 0; n < panels; n++) {
        int64_t first = state->value_pairs ? n / 2 * PAIR : n * WIDTH;
        weighted_sum_tall(state->logits, value->data + first * element_bytes(value->dtype), value->dtype,
                          stride_bytes(value), value->count, state->correction, state->out + n * WIDTH,
                          state->out_stride, share_lines(&share, n, false),
                          state->value_pairs ? (int)(n % 2) : -1);
    }
    return true;
}
#endif

/* Weights of int8 values get their scales: fewer products than scaling the values. */
static void scale_weights(struct forward_state *state, const struct block_view *block)
{
    for (int64_t first = 0; first < state->rows; first += LANES_MAX) {
        struct key_range range = state->ranges[first / LANES_MAX];
        int64_t lanes = lane_vectors(state->rows - first) * WIDTH;
        rows_scale(block->value.scale + range.first, range.end - range.first,
                   state->logits + first * state->block + range.first * lanes, lanes);
    }
}

/* out = out * correction + weights * values; meanwhile the next piece's keys are prefetched. */
static void block_values(struct forward_state *state, struct block_view *block, const struct rows *next)
{
    if (block->value.scale) scale_weights(state, block);
#if defined(SIMD_TALL_ROWS)
    if (block_values_tall(state, block, next)) return;
#endif
    int64_t panels = ceil_div(state->out_stride, 2 * WIDTH), call = 0;
    int64_t groups = state->rows / LANES_MAX, rest = state->rows % LANES_MAX;
    int64_t calls = panels * (groups * ceil_div(LANES_MAX, PV_ROWS) + ceil_div(rest, PV_ROWS));
    struct share share = share_begin(next, block->piece.count, calls, block->piece.partial);
    if (block->piece.partial) block->finite = rows_finite(&block->value);
    for (int64_t n = 0; n < panels; n++) {
        struct panel panel = {.d = n * 2 * WIDTH};
        panel.vectors = state->out_stride - panel.d > WIDTH ? 2 : 1;
        panel.value = value_panel(state, &block->value, (int32_t)panel.d, panel.vectors);
        for (int64_t group = 0; group < state->rows; group += LANES_MAX) {
            int64_t end = MIN(group + LANES_MAX, state->rows);
            for (int64_t r = group; r < end; r += PV_ROWS) {
                panel.ahead = share_lines(&share, call++, block->piece.partial);
                block_values_rows(state, block, &panel, group, r, (int)MIN(PV_ROWS, end - r));
            }
        }
    }
}

#endif
