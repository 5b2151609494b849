/* SPDX-License-Identifier: MIT */
/* Gradients of keys, values and biases, vectorised: the keys of one block, or of a piece of it, and all rows
 * that list it.
 *
 * The keys are lanes; for ROWS rows at a time
 *     logits [row][lanes] = k . q,   dp [row][lanes] = v . dout
 *     dv [lane][dim_v] += sum over rows of P dout,   dk [lane][dim] += sum over rows of dx q
 *
 * and, when the tile asks for it, straight into the rows of the result
 *     dq [row][dim] += sum over keys of dx k
 *
 * Sums over many rows go through a second accumulator, so that a chain of float32 additions stays short. What a
 * row does not see gets the logit -infinity, as in tile_view_simd.h; windows of a neighborhood are relative to
 * the coordinates of the piece's first key.
 *
 * Included by attention_backward_<variant>.c after a vector layer. */

#include "backward_key_state_simd.h"

#include "backward_turns.h"
#include "turns.h"

/* Coordinates of key j of the piece. */
static const int32_t *key_coordinate(const struct key_state *state, int64_t j)
{
    const struct key_tile *tile = state->tile;
    return (const int32_t *)state->job->blocks->mask->coordinate.host +
           (tile->sequence->k_row + tile->first + j) * AXES;
}

static void key_coordinates(struct key_state *state)
{
    const int32_t *origin = key_coordinate(state, 0);
    for (int a = 0; a < AXES; a++)
        for (int64_t lane = 0; lane < state->lanes; lane++)
            state->coordinate[a * state->lanes + lane] =
                lane < state->keys ? view_coordinate(key_coordinate(state, lane)[a], origin[a]) : 0;
}

/* Keys in panels, for dq. */
static void key_panels(struct key_state *state)
{
    const struct key_tile *tile = state->tile;
    const clattn_tensor *k = state->job->k;
    const char *rows = tensor_row(k, tile->sequence->batch, tile->sequence->k_row + tile->first, tile->kv_head);
    struct rows keys = {rows, k->dtype, k->len_stride, state->keys, (int32_t)k->dim, NULL};
    float *panel = state->k_panel;
    state->finite = rows_finite(&keys);
    for (int32_t d = 0; d < k->dim; d += LANES_MAX, panel += state->keys * LANES_MAX) {
        int32_t columns = (int32_t)MIN(LANES_MAX, k->dim - d);
        if (columns < LANES_MAX) memset(panel, 0, (size_t)(state->keys * LANES_MAX) * sizeof *panel);
        panel_to_float(rows + d * element_bytes(k->dtype), k->dtype, k->len_stride, state->keys, columns, panel,
                       LANES_MAX);
    }
}

static void key_begin(struct key_state *state)
{
    const struct backward_job *job = state->job;
    const struct problem *problem = job->problem;
    const struct sequence *sequence = state->tile->sequence;
    int64_t first = state->tile->first;
    int32_t kv_head = state->tile->kv_head;
    state->keys = state->tile->count;
    for (int64_t lane = 0; lane < state->lanes; lane++)
        state->lane_index[lane] = (float)lane;
    if (job->blocks && job->blocks->mask) key_coordinates(state);
    for (int64_t group = 0; group < state->keys; group += LANES_MAX) {
        int64_t left = MIN(state->keys - group, LANES_MAX);
        const void *k[LANES_MAX], *v[LANES_MAX];
        for (int64_t lane = 0; lane < left; lane++) {
            int64_t row = sequence->k_row + first + group + lane;
            k[lane] = tensor_row(job->k, sequence->batch, row, kv_head);
            v[lane] = tensor_row(job->v, sequence->batch, row, kv_head);
        }
        queries_pack(k, left, job->k->dtype, problem->dim, state->k + group * problem->dim, lane_vectors(left));
        queries_pack(v, left, job->v->dtype, problem->dim_v, state->v + group * problem->dim_v,
                     lane_vectors(left));
    }
    if (state->tile->has_dq) key_panels(state);
    state->rows_left = key_tile_rows(state->tile);
    state->chained = state->rows_left > CHAIN_ROWS;
    if (!state->chained) {
        state->dk = state->tile->dk;
        state->dv = state->tile->dv;
    } else {
        memset(state->dk, 0, (size_t)(state->keys * state->dk_stride) * sizeof(float));
        memset(state->dv, 0, (size_t)(state->keys * state->dv_stride) * sizeof(float));
    }
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
    state->chain = 0;
}

/* Soft cap, bias and what is not seen, for row r and one vector of keys from `lane` on. */
static void key_logits(const struct key_state *state, int64_t r, int64_t lane, float *z)
{
    const struct options *options = &state->job->problem->options;
    vec minus_infinity = vec_set(-INFINITY), x = vec_load(z), at = vec_load(state->lane_index + lane);
    if (options->softcap != 0) {
        vec slope;
        x = vec_tanh(vec_mul(x, vec_set(fminf(1 / options->softcap, FLT_MAX))), &slope);
        x = vec_mul(x, vec_set(options->softcap));
        vec_store(state->slope, slope);
    }
    if (options->bias) x = vec_add(x, vec_set(state->bias[r]));
    x = vec_where_less(at, vec_set(state->to[r]), x, minus_infinity);
    x = vec_where_less(at, vec_set(state->from[r]), minus_infinity, x);
    for (int a = 0; a < AXES && state->job->blocks && state->job->blocks->mask; a++) {
        const float *window = state->window + (r * AXES + a) * 2;
        at = vec_load(state->coordinate + a * state->lanes + lane);
        x = vec_where_less(at, vec_set(window[0]), minus_infinity, x);
        x = vec_where_less(at, vec_set(window[1]), x, minus_infinity);
    }
    vec_store(z, x);
}

/* Sums of dS of the packed rows into the heads' biases. */
static void key_add_bias(struct key_state *state)
{
    for (int64_t r = 0; r < state->rows; r++)
        for (int n = 0; n < WIDTH; n++)
            state->tile->dbias[state->head[r] - state->tile->kv_head * state->job->problem->group] +=
                (double)state->ds[r * WIDTH + n];
}

/* z -> P and dp -> dx of the packed rows, for the lane group that begins at key `group`. */
static void key_gradients(struct key_state *state, int64_t group, int vectors)
{
    const struct problem *problem = state->job->problem;
    bool bends = problem->options.softcap != 0;
    bool changes = state->partial || bends || problem->options.bias;
    int64_t lanes = vectors * WIDTH;
    for (int64_t r = 0; r < state->rows; r++)
        for (int n = 0; n < vectors; n++) {
            float *z = state->z + r * lanes + n * WIDTH, *ds = state->ds + r * WIDTH;
            if (changes) key_logits(state, r, group + n * WIDTH, z);
            vec sum =
                gradients_of_logits(z, state->dp + r * lanes + n * WIDTH, vec_set(state->lse[r]),
                                    vec_set(state->delta[r]), bends ? state->slope : NULL, problem->scale);
            if (state->tile->dbias) vec_store(ds, vec_add(group || n ? vec_load(ds) : vec_zero(), sum));
        }
}

/* out [lane][stride] += sum over the packed rows of p [row][lanes] * value [row][dim]. What a key has not is 0
 * in p, which must not matter where values are not finite: then row by row, run by run of keys with weights. */
static void key_add(const struct key_state *state, const float *p, int64_t lanes, struct float_rows value,
                    int32_t dim, float *out, int64_t stride, int64_t keys)
{
    struct rows rows = {(const char *)value.data, CLATTN_FLOAT32, value.stride, state->rows, dim, NULL};
    if (!state->partial || rows_finite(&rows)) {
        add_weighted(p, lanes, value, state->rows, dim, out, stride, keys);
        return;
    }
    for (int64_t r = 0; r < state->rows; r++, p += lanes)
        for (int64_t first = 0, end; first < keys; first = end) {
            struct float_rows row = {value.data + r * value.stride, value.stride};
            for (end = first; end < keys && p[end] != 0;)
                end++;
            if (end > first)
                add_weighted(p + first, lanes, row, 1, dim, out + first * stride, stride, end - first);
            else
                end++;
        }
}

/* dx of one lane group, kept for dq. */
static void key_keep_dx(struct key_state *state, int64_t group, int64_t lanes)
{
    for (int64_t r = 0; r < state->rows; r++)
        for (int64_t n = 0; n < lanes; n += WIDTH)
            vec_store(state->all_dx + r * state->lanes + group + n, vec_load(state->dp + r * lanes + n));
}

/* Keys that are not finite: key by key, without those that the row does not see, whose dx is 0. */
static void key_add_dq_seen(struct key_state *state)
{
    const int32_t dim = state->job->problem->dim;
    for (int64_t r = 0; r < state->rows; r++)
        for (int64_t j = 0; j < state->keys; j++) {
            float dx = state->all_dx[r * state->lanes + j];
            for (int32_t d = 0; d < dim && dx != 0; d++)
                state->dq_row[r][d] +=
                    dx * state->k_panel[(d / LANES_MAX * state->keys + j) * LANES_MAX + d % LANES_MAX];
        }
}

/* Until the blocks before this one have given to the packed rows. */
static void key_wait(const struct key_state *state)
{
    for (int64_t r = 0; r < state->rows && state->tile->turns; r++)
        turn_wait(state->turn[r], state->number[r]);
}

static void key_pass(const struct key_state *state)
{
    for (int64_t r = 0; r < state->rows && state->tile->turns; r++)
        turn_pass(state->turn[r], state->number[r]);
}

/* dq of the packed rows. */
static void key_add_dq(struct key_state *state)
{
    const int32_t dim = state->job->problem->dim;
    const float *panel = state->k_panel;
    if (!state->finite) {
        key_wait(state);
        key_add_dq_seen(state);
        return;
    }
    for (int32_t first = 0; first < dim; first += LANES_MAX, panel += state->keys * LANES_MAX) {
        int32_t columns = (int32_t)MIN(LANES_MAX, dim - first), d;
        for (int64_t r = 0; r < state->rows;)
            r += dot_rows(panel, (int32_t)state->keys, 2, state->all_dx + r * state->lanes, state->lanes,
                          state->rows - r, 1, state->dq + r * LANES_MAX);
        if (first == 0) key_wait(state);
        for (int64_t r = 0; r < state->rows; r++) {
            const float *from = state->dq + r * LANES_MAX;
            float *to = state->dq_row[r] + first;
            for (d = 0; d + WIDTH <= columns; d += WIDTH)
                vec_store(to + d, vec_add(vec_load(to + d), vec_load(from + d)));
            for (; d < columns; d++)
                to[d] += from[d];
        }
    }
}

/* ---- rows ---- */

/* Enough heads to fill the lines that a tile prefetches. */
enum { AHEAD_HEADS = 8 };

/* A walk over the tile's rows and, when it is at their end, over those of the next tile. */
struct ahead_walk {
    const struct key_tile *tile;
    struct row_walk rows;
};

/* The next query row's heads in a tensor (NULL: nothing to prefetch), line by line of all heads. */
static struct ahead key_ahead(const struct key_state *state, struct ahead_walk *walk,
                              const clattn_tensor *tensor, int64_t *bytes)
{
    struct ahead none = {(const char *)state->z, 0};
    const struct key_part *part;
    int64_t i;
    *bytes = 0;
    if (!tensor || !walk->tile) return none;
    while (!row_walk_next(walk->tile, &walk->rows, &i, &part)) {
        *walk = (struct ahead_walk){walk->tile == state->tile ? state->tile->next : NULL, {0}};
        if (!walk->tile) return none;
    }
    const struct key_tile *tile = walk->tile;
    const struct sequence *sequence = tile->sequence;
    if (part->heads < AHEAD_HEADS) return none;
    if (tensor == state->job->q) {
        prefetch_line(tensor_row(state->job->lse, sequence->batch, sequence->q_row + i, part->head));
        prefetch_line(tile->delta + i * state->job->problem->q_heads + part->head);
        if (tile->turns) prefetch_line(tile->turns + i * state->job->problem->q_heads + part->head);
    }
    *bytes = AHEAD_STEPS * element_bytes(tensor->dtype);
    return (struct ahead){tensor_row(tensor, sequence->batch, sequence->q_row + i, part->head),
                          tensor->head_stride * element_bytes(tensor->dtype)};
}

/* The next AHEAD_STEPS rows of the next tile's keys, then values. */
static struct ahead piece_ahead(const struct key_state *state, int64_t *done, int64_t *bytes)
{
    const struct key_tile *next = state->tile->next;
    struct ahead none = {(const char *)state->z, 0};
    int64_t count = next ? round_up(next->count, AHEAD_STEPS) : 0, row = count ? *done % count : 0;
    *bytes = 0;
    if (*done >= 2 * count || row + AHEAD_STEPS > next->count) return none;
    const clattn_tensor *tensor = *done < count ? state->job->k : state->job->v;
    *done += AHEAD_STEPS;
    *bytes = AHEAD_STEPS * element_bytes(tensor->dtype);
    return (struct ahead){
        tensor_row(tensor, next->sequence->batch, next->sequence->k_row + next->first + row, next->kv_head),
        tensor->len_stride * element_bytes(tensor->dtype)};
}

/* ---- products ---- */

/* to [row][lanes] = scale * keys [dim][lanes] . rows, of the packed rows; meanwhile as many rows of `next` are
 * prefetched. The sums of dS that become dbias cancel: without a sink those of a row add up to 0, and what is
 * left of thousands of them shows the rounding of each product. So with biases products are added up in parts
 * of SHORT_DIM dimensions. pieces: what is prefetched are the next piece's keys and values, from there on. */
static void key_dots(const struct key_state *state, const float *keys, int32_t dim, int vectors,
                     struct float_rows rows, float scale, float *to, const clattn_tensor *next, int64_t *pieces)
{
    const int64_t lanes = vectors * WIDTH;
    const int32_t step = state->job->problem->options.bias ? SHORT_DIM : dim;
    struct ahead_walk walk = {state->tile, state->walk};
    for (int32_t d = 0; d < dim; d += step) {
        float *part = d ? state->part : to;
        for (int64_t r = 0, ahead_bytes; r < state->rows;) {
            struct ahead ahead =
                pieces ? piece_ahead(state, pieces, &ahead_bytes) : key_ahead(state, &walk, next, &ahead_bytes);
            r += dot_rows_ahead(keys + d * lanes, MIN(step, dim - d), vectors, rows.data + d + r * rows.stride,
                                rows.stride, state->rows - r, scale, part + r * lanes, ahead, ahead_bytes);
        }
        for (int64_t n = 0; d && n < state->rows * lanes; n += WIDTH)
            vec_store(to + n, vec_add(vec_load(to + n), vec_load(part + n)));
    }
}

/* The packed rows give what they have to all keys of the piece. */
static void key_pack_done(struct key_state *state)
{
    const struct backward_job *job = state->job;
    const struct problem *problem = job->problem;
    struct float_rows q = {state->q, packed_stride(problem->dim)},
                      dout = {state->dout, packed_stride(problem->dim_v)};
    state->rows_left -= state->rows;
    for (int64_t group = 0; group < state->keys && state->rows; group += LANES_MAX) {
        int vectors = lane_vectors(state->keys - group);
        int64_t lanes = vectors * WIDTH, left = MIN(state->keys - group, lanes);
        const clattn_tensor *next = group == 0 ? job->q : state->tile->has_dq ? job->dq : NULL;
        key_dots(state, state->k + group * problem->dim, problem->dim, vectors, q, problem->scale, state->z,
                 next, NULL);
        key_dots(state, state->v + group * problem->dim_v, problem->dim_v, vectors, dout, 1, state->dp,
                 group == 0 ? job->dout : NULL,
                 group == 0 || state->rows_left >= ROWS ? NULL : &state->pieces_ahead);
        key_gradients(state, group, vectors);
        if (state->tile->has_dq) key_keep_dx(state, group, lanes);
        if (!job->dk) continue;
        key_add(state, state->z, lanes, dout, problem->dim_v, state->dv + group * state->dv_stride,
                state->dv_stride, left);
        key_add(state, state->dp, lanes, q, problem->dim, state->dk + group * state->dk_stride,
                state->dk_stride, left);
    }
    if (state->tile->dbias) key_add_bias(state);
    if (state->tile->has_dq && state->rows) {
        key_add_dq(state);
        key_pass(state);
    }
    state->chain += state->rows;
    state->rows = 0;
    state->partial = false;
    if (state->chain >= CHAIN_ROWS && job->dk && state->chained) key_flush(state);
}

/* Is the block cut for the rows of a list? */
static bool key_is_cut(const struct key_state *state, int64_t i)
{
    const clattn_blocks *blocks = state->job->blocks;
    int64_t list = state->tile->sequence->list_row + i / blocks->q_block; /* masks need one list head */
    const int32_t *indices = (const int32_t *)blocks->indices.host + list * blocks->topk;
    int32_t low = 0, high = ((const int32_t *)blocks->counts.host)[list];
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (indices[middle] < state->tile->block)
            low = middle + 1;
        else
            high = middle;
    }
    return ((const unsigned char *)blocks->mask->cut.host)[list * blocks->topk + low];
}

/* The window of query row i; false when it has no key of the piece. */
static bool key_window(struct key_state *state, int64_t i)
{
    const int32_t *window =
        (const int32_t *)state->job->blocks->mask->window.host + (state->tile->sequence->q_row + i) * 2 * AXES;
    const int32_t *origin = key_coordinate(state, 0);
    float *to = state->window + state->rows * 2 * AXES;
    bool is_cut = key_is_cut(state, i), sees = true;
    for (int a = 0; a < 2 * AXES; a++)
        to[a] = is_cut ? relative_coordinate(window[a], origin[a / 2]) : a % 2 ? INFINITY : -INFINITY;
    for (int a = 0; a < AXES; a++)
        sees = sees && to[2 * a] < (float)state->job->blocks->mask->kv_tile[a] && to[2 * a + 1] > 0 &&
               to[2 * a] < to[2 * a + 1];
    state->partial |= is_cut && sees;
    return sees;
}

/* One row as float32, padded by zeros to whole vectors. */
static void key_row_pack(const clattn_tensor *tensor, int64_t batch, int64_t row, int32_t head, float *to)
{
    const void *from = tensor_row(tensor, batch, row, head);
    if (tensor->dtype != CLATTN_FLOAT32 || tensor->dim % WIDTH) {
        rows_pack(from, tensor->dtype, 0, 1, (int32_t)tensor->dim, to);
        return;
    }
    for (int64_t d = 0; d < tensor->dim; d += WIDTH)
        vec_store(to + d, vec_load((const float *)from + d));
}

/* number: the turn of the tile's block at the row, or 0. */
static void key_row(struct key_state *state, int64_t i, int32_t head, int64_t number)
{
    const struct backward_job *job = state->job;
    const struct problem *problem = job->problem;
    const struct sequence *sequence = state->tile->sequence;
    const clattn_tensor *bias = problem->options.bias;
    int64_t from = first_visible_key(problem, sequence, i) - state->tile->first,
            to = visible_keys(problem, sequence, i) - state->tile->first - state->tile->shift;
    int64_t row = sequence->q_row + i, n = state->rows;
    float lse = *(const float *)tensor_row(job->lse, sequence->batch, row, head);
    if (to <= 0 || from >= state->keys || lse == -INFINITY) return;
    if (job->blocks && job->blocks->mask && !key_window(state, i)) return;
    key_row_pack(job->q, sequence->batch, row, head, state->q + n * packed_stride(problem->dim));
    key_row_pack(job->dout, sequence->batch, row, head, state->dout + n * packed_stride(problem->dim_v));
    if (state->tile->has_dq) state->dq_row[n] = tensor_row(job->dq, sequence->batch, row, head);
    if (state->tile->turns) state->turn[n] = &state->tile->turns[i * problem->q_heads + head];
    state->number[n] = number;
    state->lse[n] = lse;
    state->delta[n] = state->tile->delta[i * problem->q_heads + head];
    state->from[n] = (float)MAX(from, 0);
    state->to[n] = (float)MIN(to, state->keys);
    state->head[n] = head;
    state->partial |= from > 0 || to < state->keys;
    if (bias)
        state->bias[n] =
            *(const float *)tensor_row(bias, bias->batch == 1 ? 0 : sequence->batch, state->tile->block, head);
    if (++state->rows == state->tile->pack) key_pack_done(state);
}

static void backward_key_simd(const struct backward_job *job, const struct key_tile *tile, void *scratch)
{
    struct key_state state = {.job = job, .tile = tile};
    const struct key_part *part;
    int64_t i;
    key_layout(job, scratch, &state);
    key_begin(&state);
    while (row_walk_next(tile, &state.walk, &i, &part)) {
        int64_t number = tile->turns ? backward_turn(job, tile, i, part->head) : 0;
        for (int32_t head = part->head; head < part->head + part->heads; head++)
            key_row(&state, i, head, number);
    }
    key_pack_done(&state);
    if (job->dk && state.chained) key_flush(&state);
}
