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

#include "forward_state_simd.h"
#include "forward_values_simd.h"

#include "attention_few_simd.h"

/* ---- one piece ---- */

/* Weights of one lane group: logits become exp(z - row_max). */
static void softmax_lanes(struct forward_state *state, const struct block_view *block, int64_t first,
                          int vectors)
{
    struct key_range range = state->ranges[first / LANES_MAX];
    bool changes = view_changes(&state->view, &block->piece);
    for (int n = 0; n < vectors; n++) {
        int64_t lane = first + n * WIDTH, lanes = vectors * WIDTH;
        float *z = state->logits + first * state->block + n * WIDTH;
        vec old_max = vec_load(state->row_max + lane), most[4] = {old_max, old_max, old_max, old_max};
        if (changes) view_logits(&state->view, &block->piece, range, lane, z, lanes, NULL);
        int64_t j = range.first;
        for (; j + 4 <= range.end; j += 4) { /* chains: each waits for its last result */
            UNROLL for (int i = 0; i < 4; i++) most[i] = vec_max(vec_load(z + (j + i) * lanes), most[i]);
        }
        for (; j < range.end; j++)
            most[0] = vec_max(vec_load(z + j * lanes), most[0]);
        vec new_max = vec_max(vec_max(most[0], most[1]), vec_max(most[2], most[3]));
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

/* Columns that stand as even and odd ones (see forward_state) in their order. */
static void interleave_pairs(float *out, int32_t dim_v)
{
#if defined(SIMD_TALL_ROWS)
    for (int32_t d = 0; d < dim_v; d += 2 * WIDTH) {
        vec low, high;
        vec_interleave(vec_load(out + d), vec_load(out + d + WIDTH), &low, &high);
        vec_store(out + d, low);
        vec_store(out + d + WIDTH, high);
    }
#else
    (void)out;
    (void)dim_v;
#endif
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
        if (state->value_pairs) interleave_pairs(from, dim_v);
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
#if defined(SIMD_STREAM_ROWS)
    if (dot_stream_fits(state->rows, &codes) && codes.dtype != CLATTN_FLOAT32 && state->ranges[0].first == 0 &&
        state->ranges[0].end == codes.count) {
        dot_stream(state->q, &codes, state->job->problem->scale, state->logits, state->chunks, &block->value);
    } else
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
    if (state->rows > FEW_ROWS || view_changes(&state->view, &block->piece) || state->tile->kept) return false;
    if (keys->dim % WIDTH || values->dim % WIDTH || keys->count % WIDTH) return false;
    const struct rows *next_keys = next && next->key.count >= FEW_AHEAD_ROWS ? &next->key : NULL;
    float correction[FEW_ROWS];
    few_keys(state->few, state->rows, keys, next_keys, state->job->problem->scale, state->logits);
    for (int64_t r = 0; r < state->rows; r++)
        correction[r] = few_softmax(state->logits + r * keys->count, keys->count, values->scale,
                                    &state->row_max[r], &state->row_sum[r]);
    few_values(state->logits, state->rows, values, next_keys ? &next->value : NULL, correction, state->out,
               state->out_stride);
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
