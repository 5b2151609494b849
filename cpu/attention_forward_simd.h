/* SPDX-License-Identifier: MIT */
/* Attention over a block list, vectorised: one tile of query rows and heads that share a list.
 *
 *   z_j = scale * q . k_j   over the listed keys j that the row sees, changed by the options (tile_view_simd.h)
 *   lse = log sum_j exp z_j,   out = sum_j exp(z_j - lse) v_j
 *
 * One pass over the pieces of blocks with the online softmax. After each piece and for each row: row_max = max
 * z so far, row_sum = sum exp(z - row_max), out = sum exp(z - row_max) v. The tile's rows ("lanes" of
 * dot_simd.h) are all pairs (query row, head), heads running fastest. Each piece is read once from the caller's
 * memory; while its logits are computed its values are prefetched, while its values are added the next piece's
 * keys are.
 *
 * Included by attention_forward_<variant>.c after a vector layer; mirrors attention_forward_ref.c. */

#include "dot_simd.h"
#include "tile_view_simd.h"
#include "weighted_sum_simd.h"

#include "attention_few_simd.h"

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
    float *row_max, *row_sum;       /* [rows] */
    float *correction;              /* [rows] exp(old row_max - new row_max) */
    float *visible;                 /* of the view */
    struct key_range *ranges;       /* [lane group] keys of the piece that some row sees */
    float *key;                     /* packed keys: see dot_keys */
    float *value;                   /* [block][2 * WIDTH] packed values of one panel */
    float *key_scale, *value_scale; /* [block] of INT8 */
    float *few;                     /* [FEW_ROWS][dim] queries */
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

/* ---- one piece ---- */

struct block_view {
    struct piece piece;
    struct rows key, value;
    bool finite; /* of a partial piece: are all values? */
};

/* Weights of one lane group: logits become exp(z - row_max). */
static void softmax_lanes(struct forward_state *state, const struct block_view *block, int64_t first,
                          int vectors)
{
    struct key_range range = state->ranges[first / LANES_MAX];
    bool changes = view_changes(&state->view, &block->piece);
    for (int n = 0; n < vectors; n++) {
        int64_t lane = first + n * WIDTH, lanes = vectors * WIDTH;
        float *z = state->logits + first * state->block + n * WIDTH;
        vec old_max = vec_load(state->row_max + lane), new_max = old_max, other_max = old_max;
        if (changes) view_logits(&state->view, &block->piece, range, lane, z, lanes, NULL);
        int64_t j = range.first;
        for (; j + 2 <= range.end; j += 2) { /* two chains: each waits for its last result */
            new_max = vec_max(vec_load(z + j * lanes), new_max);
            other_max = vec_max(vec_load(z + (j + 1) * lanes), other_max);
        }
        if (j < range.end) other_max = vec_max(vec_load(z + j * lanes), other_max);
        new_max = vec_max(new_max, other_max);
        /* A row that has seen nothing subtracts 0: its weights are exp(-inf) = 0. */
        vec shift = vec_where_less(vec_set(-INFINITY), new_max, new_max, vec_zero()), sum = vec_zero();
        for (j = range.first; j < range.end; j++) {
            vec weight = vec_exp_below(vec_sub(vec_load(z + j * lanes), shift));
            vec_store(z + j * lanes, weight);
            sum = vec_add(sum, weight);
        }
        vec correction = vec_exp_below(vec_sub(old_max, shift));
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
    int64_t lanes = vectors * WIDTH, element = element_bytes(value->dtype);
    int32_t exists = (int32_t)MIN(lanes, value->dim - d);
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

/* Shares the lines of the next piece's keys among the calls of block_values_rows: call `n` of `calls`
 * prefetches its part of them in the order of addresses while it computes `steps` keys, or, of rows with gaps,
 * one line of each row, and further ones before. */
static struct ahead share_lines(const struct rows *next, int64_t steps, int64_t n, int64_t calls, bool before)
{
    if (next && !before && rows_contiguous(next)) {
        int64_t bytes = next->count * stride_bytes(next), from = n * bytes / calls;
        int64_t step = ((n + 1) * bytes / calls - from) / steps;
        if (step <= LINE) return (struct ahead){next->data + from, step};
    }
    int64_t from = next ? n * row_lines(next) / calls : 0, to = next ? (n + 1) * row_lines(next) / calls : 0;
    static const char nothing;
    struct ahead none = {&nothing, 0};
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
    for (int64_t n = 0; n < panels; n++)
        weighted_sum_tall(state->logits, value->data + n * WIDTH * element_bytes(value->dtype), value->dtype,
                          stride_bytes(value), value->count, state->correction, state->out + n * WIDTH,
                          state->out_stride, share_lines(next, value->count, n, panels, false));
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
    if (block->piece.partial) block->finite = rows_finite(&block->value);
    for (int64_t n = 0; n < panels; n++) {
        struct panel panel = {.d = n * 2 * WIDTH};
        panel.vectors = state->out_stride - panel.d > WIDTH ? 2 : 1;
        panel.value = value_panel(state, &block->value, (int32_t)panel.d, panel.vectors);
        for (int64_t group = 0; group < state->rows; group += LANES_MAX) {
            int64_t end = MIN(group + LANES_MAX, state->rows);
            for (int64_t r = group; r < end; r += PV_ROWS) {
                panel.ahead = share_lines(next, block->piece.count, call++, calls, block->piece.partial);
                block_values_rows(state, block, &panel, group, r, (int)MIN(PV_ROWS, end - r));
            }
        }
    }
}

/* ---- the tile ---- */

static struct rows piece_rows(const struct forward_job *job, const struct forward_tile *tile,
                              const clattn_tensor *tensor, const struct piece *piece)
{
    const struct sequence *sequence = tile->sequence;
    int32_t kv_head = tile->head / job->problem->group;
    return (struct rows){sequence_row(tensor, sequence, piece->first, kv_head),
                         tensor->dtype,
                         tensor->len_stride,
                         piece->count,
                         (int32_t)tensor->dim,
                         NULL};
}

static bool block_next(struct forward_state *state, struct block_view *block)
{
    if (!view_next(&state->view, &block->piece)) return false;
    block->key = piece_rows(state->job, state->tile, state->job->k, &block->piece);
    block->value = piece_rows(state->job, state->tile, state->job->v, &block->piece);
    return true;
}

static const float *block_scales(const struct forward_state *state, const clattn_tensor *scales,
                                 const struct piece *piece, float *scale)
{
    const struct problem *problem = state->job->problem;
    const struct sequence *sequence = state->tile->sequence;
    if (sequence->pages) /* one a key, in one piece */
        return sequence_row(scales, sequence, piece->first, state->tile->head / problem->group);
    for (int64_t j = 0, run; j < piece->count; j += run) { /* of the same scale */
        int64_t block = problem->options.scale_block, at = (sequence->k_row + piece->first + j) % block;
        float same = sequence_scale(&problem->options, scales, sequence, piece->first + j,
                                    state->tile->head / problem->group);
        run = MIN(block - at, piece->count - j);
        for (int64_t n = 0; n < run; n++)
            scale[j + n] = same;
    }
    return scale;
}

static void block_open(struct forward_state *state, struct block_view *block)
{
    const struct options *options = &state->job->problem->options;
    view_open(&state->view, &block->piece);
    for (int64_t first = 0; first < state->rows; first += LANES_MAX)
        state->ranges[first / LANES_MAX] =
            view_range(&state->view, &block->piece, first, lane_vectors(state->rows - first) * WIDTH);
    if (!options->k_scale) return;
    block->key.scale = block_scales(state, options->k_scale, &block->piece, state->key_scale);
    block->value.scale = block_scales(state, options->v_scale, &block->piece, state->value_scale);
}

/* Does the row see any key? Only asked when all its logits are -infinity. */
static bool row_sees_key(const struct forward_state *state, int64_t r)
{
    struct tile_view view;
    struct piece piece;
    tile_view_begin(state->job->problem, state->job->blocks, state->tile, state->view.lanes, state->visible,
                    &view);
    while (view_next(&view, &piece)) {
        view_open(&view, &piece);
        for (int64_t j = 0; j < piece.count; j++)
            if (view_sees(&view, &piece, r, j)) return true;
    }
    return false;
}

/* The sink joins the sum of row r; returns what multiplies its weights. A row without keys stays empty. */
static float row_sink(struct forward_state *state, int64_t r)
{
    float sink = *(const float *)tensor_row(state->job->problem->options.sink, 0, 0,
                                            state->tile->head + r % state->tile->heads);
    float old_max = state->row_max[r], new_max = fmaxf(old_max, sink);
    if (new_max == -INFINITY || (old_max == -INFINITY && !row_sees_key(state, r))) return 1;
    float factor = expf(old_max - new_max);
    state->row_max[r] = new_max;
    state->row_sum[r] =
        (float)((double)state->row_sum[r] * (double)factor + exp((double)sink - (double)new_max));
    return factor;
}

/* The query row of the next tile that will stand where row r stands now. */
static void prefetch_next_query(const struct forward_state *state, int64_t r)
{
    const struct forward_tile *next = state->tile->next;
    const clattn_tensor *q = state->job->q;
    int64_t bytes = q->dim * element_bytes(q->dtype);
    if (!next || r >= (int64_t)next->rows * next->heads) return;
    const char *row = tensor_row(q, next->sequence->batch, next->sequence->q_row + row_position(next, r),
                                 next->head + r % next->heads);
    for (int64_t at = 0; at < bytes; at += LINE)
        prefetch_line(row + at);
}

static void state_finish(struct forward_state *state)
{
    const struct forward_job *job = state->job;
    int32_t dim_v = job->problem->dim_v;
    for (int64_t r = 0; r < state->rows; r++) {
        prefetch_next_query(state, r);
        float factor = job->problem->options.sink ? row_sink(state, r) : 1;
        float *from = state->out + r * state->out_stride, sum = state->row_sum[r];
        void *to = (void *)tensor_tile_row(state, job->out, r);
        bool empty = state->row_max[r] == -INFINITY;
        vec divisor = vec_set(empty ? 1 : sum);
        int32_t d = 0;
        if (empty) memset(from, 0, (size_t)state->out_stride * sizeof(float));
        for (; d < dim_v; d += WIDTH)
            vec_store(from + d, vec_div(vec_mul(vec_load(from + d), vec_set(factor)), divisor));
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

/* Logits of the piece that the selection has kept, or NULL. */
static const float *kept_piece(const struct forward_state *state, const struct piece *piece)
{
    const struct kept_logits *kept = state->tile->kept;
    int64_t lanes = lane_vectors(state->rows) * WIDTH,
            leaf = state->job->blocks ? state->job->blocks->block : 0;
    for (int64_t n = 0; kept && n < kept->count && kept->leaves[n] <= piece->block; n++)
        if (kept->leaves[n] == piece->block)
            return kept->logits + (piece->first - piece->block * leaf + n * leaf) * lanes;
    return NULL;
}

static void block_logits(struct forward_state *state, const struct block_view *block)
{
    const float *kept = kept_piece(state, &block->piece);
    struct rows codes = block->key;
    codes.scale = NULL; /* logits are fewer than elements of keys: they get the scales */
    if (kept) {         /* the values are on their way already */
        memcpy(state->logits, kept,
               (size_t)(block->piece.count * lane_vectors(state->rows) * WIDTH) * sizeof *kept);
        return;
    }
#if defined(SIMD_BYTE_DOTS)
    if (state->bytes.usable) {
        byte_dots_seen(&state->bytes, state->rows, &block->key, state->job->problem->scale, state->ranges,
                       state->logits, state->block, &block->value);
        return;
    }
#endif
    dot_keys_seen(state->q, state->rows, &codes, state->job->problem->scale, state->ranges, state->logits,
                  state->block, state->key, &block->value);
    for (int64_t first = 0; first < state->rows && block->key.scale; first += LANES_MAX) {
        struct key_range range = state->ranges[first / LANES_MAX];
        int64_t lanes = lane_vectors(state->rows - first) * WIDTH;
        rows_scale(block->key.scale + range.first, range.end - range.first,
                   state->logits + first * state->block + range.first * lanes, lanes);
    }
}

/* The whole of a piece for few rows, where nothing hides keys or changes logits; false: nothing is done. */
static bool block_few(struct forward_state *state, const struct block_view *block,
                      const struct block_view *next)
{
    const struct rows *keys = &block->key, *values = &block->value;
    /* Other types would be converted once a row. */
    int64_t most = keys->dtype == CLATTN_FLOAT32 && values->dtype == CLATTN_FLOAT32 ? FEW_ROWS : 1;
    if (state->rows > most || view_changes(&state->view, &block->piece) || state->tile->kept) return false;
    if (keys->dim % WIDTH || values->dim % WIDTH || keys->count % WIDTH) return false;
    const struct rows *next_keys = next && next->key.count >= FEW_AHEAD ? &next->key : NULL;
    few_keys(state->few, state->rows, keys, next_keys, state->job->problem->scale, state->logits);
    for (int64_t r = 0; r < state->rows; r++) {
        float *z = state->logits + r * keys->count;
        float correction = few_softmax(z, keys->count, values->scale, &state->row_max[r], &state->row_sum[r]);
        few_values(z, values, next_keys ? &next->value : NULL, r == 0, correction,
                   state->out + r * state->out_stride);
    }
    return true;
}

/* The first keys that the tile after this one reads; false: there are none, or it is not known. */
static bool next_tile_keys(const struct forward_state *state, struct rows *keys)
{
    const struct forward_job *job = state->job;
    const struct forward_tile *next = state->tile->next;
    struct tile_view view;
    struct piece piece;
    if (!next) return false;
    tile_view_begin(job->problem, job->blocks, next, state->view.lanes, state->visible, &view);
    if (!view_next(&view, &piece)) return false;
    *keys = piece_rows(job, next, job->k, &piece);
    return true;
}

static void forward_tile_simd(const struct forward_job *job, const struct forward_tile *tile, void *scratch)
{
    struct forward_state state = {.job = job, .tile = tile};
    struct block_view block, next;
    state_layout(job, (int64_t)tile->rows * tile->heads, scratch, &state);
    state_begin(&state);
    tile_view_begin(job->problem, job->blocks, tile, rows_padded(state.rows), state.visible, &state.view);

    for (bool more = block_next(&state, &next); more;) {
        block = next;
        more = block_next(&state, &next);
        block_open(&state, &block);
        if (block_few(&state, &block, more ? &next : NULL)) continue;
        block_logits(&state, &block);
        for (int64_t first = 0; first < state.rows; first += LANES_MAX)
            if (state.ranges[first / LANES_MAX].first < state.ranges[first / LANES_MAX].end)
                softmax_lanes(&state, &block, first, lane_vectors(state.rows - first));
        const struct rows *first_read = more && kept_piece(&state, &next.piece) ? &next.value : &next.key;
        bool follows = more || next_tile_keys(&state, &next.key);
        block_values(&state, &block, follows ? first_read : NULL);
    }
    state_finish(&state);
}
