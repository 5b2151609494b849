/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TILE_VIEW_SIMD_H
#define CLATTN_TILE_VIEW_SIMD_H

/* Which keys the rows of a tile see, and what the options make of their logits: for the forward pass and for
 * the gradient of the queries. Included after a vector layer (simd_*.h).
 *
 * A tile walks over the blocks that any of its lists has, in pieces of at most `capacity` keys. Of a piece, row
 * r sees the keys from[r] .. to[r] - 1, and of those only what its window of a neighborhood has when the piece
 * is cut. What a row does not see gets the logit -infinity. Whether anything of this is needed is decided once
 * a piece: plain pieces pay nothing.
 *
 * The keys of a cut piece are the coordinates of a box, the last axis fastest, and a window is a range on every
 * axis: what a row sees is the product of up to three ranges. So a piece costs one comparison for each row and
 * coordinate of an axis, and one operation more for each row and key. */

#include "exp_simd.h"
#include "rows_simd.h"

#include "key_blocks.h"
#include "neighborhood.h"

#include <float.h>
#include <math.h>

enum {
    STARTS_KEYS = 64,  /* keys at once with the caller's block boundaries */
    KV_TILE_MAX = 128, /* keys of a cut piece, at most */
};

/* Keys of the largest piece. */
static inline int64_t piece_capacity(const clattn_blocks *blocks)
{
    return !blocks ? DENSE_BLOCK : blocks->starts ? STARTS_KEYS : blocks->block;
}

struct piece {
    int64_t block;        /* its number in the sequence */
    int64_t first, count; /* keys of the sequence */
    uint32_t listed;      /* bit n: list n of the tile has the block */
    bool cut;             /* the element mask matters */
    bool bounded;         /* some row does not see all keys, whatever the mask says */
    bool partial;         /* bounded or cut */
};

struct tile_view {
    const struct problem *problem;
    const clattn_blocks *blocks;
    const struct forward_tile *tile;
    struct key_blocks keys;
    int64_t capacity, rows, lanes; /* lanes: rows, rounded up */
    int64_t first, end;            /* keys that some row sees */
    float softcap, softcap_inverse;
    float *from, *to;  /* [lanes] */
    float *bias;       /* [lanes] of the current block */
    float *window;     /* [2 * AXES][lanes] lo and hi, relative to `origin` */
    int32_t origin[AXES]; /* coordinates of the first key of the last cut piece */
    bool has_origin;
    int64_t block, at; /* the walk: current block (dense), next key of the current block */
    int32_t next[TILE_LISTS_MAX];
};

static inline int64_t tile_view_floats(const struct problem *problem, const clattn_blocks *blocks,
                                       int64_t lanes)
{
    (void)problem;
    return 3 * lanes + (blocks && blocks->mask ? 2 * AXES * lanes : 0);
}

/* memory: tile_view_floats(). */
static inline void tile_view_begin(const struct problem *problem, const clattn_blocks *blocks,
                                   const struct forward_tile *tile, int64_t lanes, float *memory,
                                   struct tile_view *view)
{
    *view = (struct tile_view){.problem = problem,
                               .blocks = blocks,
                               .tile = tile,
                               .keys = key_blocks_listed(blocks, tile->sequence),
                               .capacity = piece_capacity(blocks),
                               .rows = (int64_t)tile->rows * tile->heads,
                               .lanes = lanes,
                               .first = first_visible_key(problem, tile->sequence, tile->row),
                               .end = visible_keys(problem, tile->sequence, tile->row + tile->rows - 1),
                               .softcap = problem->options.softcap};
    /* Where the inverse overflows every logit is bent to less than the smallest normal number. */
    view->softcap_inverse = fminf(1 / view->softcap, FLT_MAX);
    view->from = memory;
    view->to = view->from + lanes;
    view->bias = view->to + lanes;
    view->window = view->bias + lanes;
    view->block = view->first / DENSE_BLOCK;
}

/* ---- the walk ---- */

/* The lowest block that a list still has; false past the last one. */
static inline bool view_block(const struct tile_view *view, struct piece *piece)
{
    const struct forward_tile *tile = view->tile;
    if (!tile->indices) {
        piece->block = view->block;
        piece->listed = 1;
        return piece->block < view->keys.count;
    }
    piece->block = INT64_MAX;
    piece->listed = 0;
    for (int32_t n = 0; n < tile->lists; n++) {
        int32_t cursor = view->next[n];
        int64_t block = cursor < tile->counts[n * tile->count_step]
                            ? tile->indices[n * tile->list_step + cursor]
                            : INT64_MAX;
        if (block < piece->block) {
            piece->block = block;
            piece->listed = 0;
        }
        piece->listed |= (uint32_t)(block == piece->block && block < INT64_MAX) << n;
    }
    return piece->block < view->keys.count; /* a list may have been selected on more keys than these */
}

static inline void view_leave_block(struct tile_view *view, const struct piece *piece)
{
    view->at = 0;
    view->block++;
    for (int32_t n = 0; n < view->tile->lists; n++)
        view->next[n] += piece->listed >> n & 1;
}

/* The next piece with a key that some row of the tile may see. */
static inline bool view_next(struct tile_view *view, struct piece *piece)
{
    while (view_block(view, piece)) {
        int64_t first = MAX(MAX(key_block_first(&view->keys, piece->block), view->first), view->at);
        int64_t end = MIN(key_block_end(&view->keys, piece->block), view->end);
        piece->first = first;
        int64_t most = MIN(view->capacity, sequence_row_run(view->tile->sequence, first));
        piece->count = MIN(end - first, most);
        piece->cut = view->tile->cut && view->tile->cut[view->next[0]];
        view->at = first + most;
        if (view->at >= end) view_leave_block(view, piece);
        if (piece->count > 0) return true;
        if (first >= view->end) return false; /* lists ascend */
    }
    return false;
}

/* ---- one piece ---- */

/* Relative coordinates stay whole numbers in float32: window bounds far away are moved nearer. */
static inline float relative_coordinate(int64_t x, int64_t origin)
{
    return (float)MAX(MIN(x - origin, 1 << 20), -(1 << 20));
}

/* Coordinate -1, of a row without a token, lies below every bound. */
static inline float view_coordinate(int32_t x, int32_t origin)
{
    return x < 0 ? -0x1p22f : relative_coordinate(x, origin);
}

/* Windows of the tile's rows along one axis, relative to the piece's first key. Pieces follow each other along
 * the last axis, so those of the others seldom change. */
static inline void view_windows(struct tile_view *view, int axis, int32_t origin)
{
    const struct forward_tile *tile = view->tile;
    const int32_t *window = (const int32_t *)view->blocks->mask->window.host +
                            (tile->sequence->q_row + tile->row) * 2 * AXES + 2 * axis;
    float *lo = view->window + 2 * axis * view->lanes, *hi = lo + view->lanes;
    int64_t r = 0;
    if (view->has_origin && view->origin[axis] == origin) return;
    view->origin[axis] = origin;
    for (int64_t i = 0; i < tile->rows; i++, window += 2 * AXES)
        for (int32_t head = 0; head < tile->heads; head++, r++) {
            lo[r] = relative_coordinate(window[0], origin);
            hi[r] = relative_coordinate(window[1], origin);
        }
    for (; r < view->lanes; r++)
        lo[r] = hi[r] = 0;
}

/* The first and last key of a cut piece that each row sees. */
static inline void view_cut(struct tile_view *view, const struct piece *piece)
{
    const struct element_mask *mask = view->blocks->mask;
    const int32_t *origin =
        (const int32_t *)mask->coordinate.host + (view->tile->sequence->k_row + piece->first) * AXES;
    vec zero = vec_zero(), one = vec_set(1);
    for (int a = 0; a < AXES; a++)
        view_windows(view, a, origin[a]);
    view->has_origin = true;
    for (int64_t lane = 0; lane < view->lanes; lane += WIDTH) {
        vec from = zero, to = zero, seen = one;
        for (int a = 0; a < AXES; a++) {
            const float *window = view->window + 2 * a * view->lanes + lane;
            vec length = vec_set((float)mask->kv_tile[a]);
            vec lo = vec_max(vec_load(window), zero), hi = vec_min(vec_load(window + view->lanes), length);
            seen = vec_where_less(lo, hi, seen, zero);
            from = vec_fma(from, length, lo);
            to = vec_fma(to, length, vec_sub(hi, one));
        }
        from = vec_max(from, vec_load(view->from + lane));
        to = vec_min(vec_add(to, one), vec_load(view->to + lane));
        vec_store(view->from + lane, from);
        vec_store(view->to + lane, vec_where_less(zero, seen, to, from));
    }
}

static inline void view_bias(struct tile_view *view, const struct piece *piece)
{
    const clattn_tensor *bias = view->problem->options.bias;
    const struct forward_tile *tile = view->tile;
    for (int64_t r = 0; r < view->lanes; r++)
        view->bias[r] = r < view->rows
                            ? *(const float *)tensor_row(bias, bias->batch == 1 ? 0 : tile->sequence->batch,
                                                         piece->block, tile->head + r % tile->heads)
                            : 0;
}

/* The keys that each row sees by its position and its list. */
static inline void view_bounds(struct tile_view *view, const struct piece *piece)
{
    const struct problem *problem = view->problem;
    const struct forward_tile *tile = view->tile;
    for (int64_t r = 0, i = 0; i < tile->rows; i++) {
        int64_t row = tile->row + i, end = visible_keys(problem, tile->sequence, row) - piece->first;
        int64_t from = MAX(first_visible_key(problem, tile->sequence, row) - piece->first, 0);
        int64_t to = MAX(MIN(end, piece->count), 0);
        if (!(piece->listed >> i / tile->list_rows & 1)) to = 0;
        for (int32_t head = 0; head < tile->heads; head++, r++) {
            view->from[r] = (float)MIN(from, to);
            view->to[r] = (float)to;
        }
    }
    for (int64_t r = view->rows; r < view->lanes; r++)
        view->from[r] = view->to[r] = 0;
}

/* Fills what the piece's rows see. Pieces are opened in order, each before its logits are used. */
static inline void view_open(struct tile_view *view, struct piece *piece)
{
    const struct problem *problem = view->problem;
    const struct forward_tile *tile = view->tile;
    int64_t last = tile->row + tile->rows - 1;
    if (problem->options.bias) view_bias(view, piece);
    piece->bounded = visible_keys(problem, tile->sequence, tile->row) - piece->first < piece->count ||
                     first_visible_key(problem, tile->sequence, last) > piece->first ||
                     piece->listed != UINT32_MAX >> (32 - tile->lists);
    piece->partial = piece->cut || piece->bounded;
    for (int64_t r = 0; r < view->lanes && piece->cut; r++) {
        view->from[r] = 0;
        view->to[r] = r < view->rows ? (float)piece->count : 0;
    }
    if (piece->bounded) view_bounds(view, piece);
    if (piece->cut) view_cut(view, piece);
}

/* Does row r see key j of the piece? */
static inline bool view_sees(const struct tile_view *view, const struct piece *piece, int64_t r, int64_t j)
{
    if (!piece->partial) return true;
    if ((float)j < view->from[r] || (float)j >= view->to[r]) return false;
    for (int a = AXES - 1; a >= 0 && piece->cut; a--) {
        int32_t length = view->blocks->mask->kv_tile[a];
        float x = (float)(j % length);
        if (x < view->window[2 * a * view->lanes + r] || x >= view->window[(2 * a + 1) * view->lanes + r])
            return false;
        j /= length;
    }
    return true;
}

/* Rows that follow each other and see something of a piece, and the keys that at least one of them sees. */
struct view_run {
    int64_t row, end;    /* the walk goes on from `end` */
    int64_t first, last; /* keys first .. last - 1 */
};

static inline bool view_run_next(const struct tile_view *view, const struct piece *piece, int64_t end,
                                 struct view_run *run)
{
    const float *from = view->from, *to = view->to;
    int64_t row = run->end;
    if (!piece->partial) {
        *run = (struct view_run){row, end, 0, piece->count};
        return row < end;
    }
    while (row < end && from[row] >= to[row])
        row++;
    *run = (struct view_run){row, row, piece->count, 0};
    for (; run->end < end && from[run->end] < to[run->end]; run->end++) {
        run->first = MIN(run->first, (int64_t)from[run->end]);
        run->last = MAX(run->last, (int64_t)to[run->end]);
    }
    return row < end;
}

/* The keys of a piece that some row of a lane group sees: `lanes` rows from `lane` on. */
static inline struct key_range view_range(const struct tile_view *view, const struct piece *piece, int64_t lane,
                                          int64_t lanes)
{
    if (!piece->partial) return (struct key_range){0, piece->count};
    float first[WIDTH], last[WIDTH];
    struct key_range range = {piece->count, 0};
    vec from = vec_set((float)piece->count), to = vec_zero();
    for (int64_t n = 0; n < lanes; n += WIDTH) { /* of rows that see nothing both are 0 or equal */
        vec row_from = vec_load(view->from + lane + n), row_to = vec_load(view->to + lane + n);
        from = vec_where_less(row_from, row_to, vec_min(from, row_from), from);
        to = vec_where_less(row_from, row_to, vec_max(to, row_to), to);
    }
    vec_store(first, from);
    vec_store(last, to);
    for (int n = 0; n < WIDTH; n++) {
        range.first = MIN(range.first, (int64_t)first[n]);
        range.end = MAX(range.end, (int64_t)last[n]);
    }
    return range;
}

/* Do logits of the piece need view_logits? */
static inline bool view_changes(const struct tile_view *view, const struct piece *piece)
{
    return view->softcap != 0 || view->problem->options.bias || piece->partial;
}

/* -1 in the rows that do not see coordinate x of an axis, 0 in the others. */
static inline vec view_hidden(const struct tile_view *view, int axis, int64_t lane, int32_t x)
{
    const float *window = view->window + 2 * axis * view->lanes + lane;
    vec at = vec_set((float)x), hidden = vec_set(-1);
    vec below_end = vec_where_less(at, vec_load(window + view->lanes), vec_zero(), hidden);
    return vec_where_less(at, vec_load(window), hidden, below_end);
}

/* The element mask of keys range.first .. range.end - 1, for one vector of rows from `lane` on. */
static inline void view_mask(const struct tile_view *view, struct key_range range, int64_t lane, float *z,
                             int64_t lanes)
{
    const int32_t *tile = view->blocks->mask->kv_tile;
    int64_t plane = (int64_t)tile[1] * tile[2];
    vec minus_infinity = vec_set(-INFINITY), last[KV_TILE_MAX], middle[KV_TILE_MAX];
    for (int32_t x = 0; x < tile[1]; x++)
        middle[x] = view_hidden(view, 1, lane, x);
    for (int32_t x = 0; x < tile[2]; x++)
        last[x] = view_hidden(view, 2, lane, x);
    for (int64_t at = range.first / plane * plane, first = at / plane; at < range.end; first++) {
        vec outer = view_hidden(view, 0, lane, (int32_t)first);
        for (int32_t x = 0; x < tile[1]; x++) {
            vec row = vec_min(outer, middle[x]);
            for (int32_t y = 0; y < tile[2]; y++, at++) {
                float *to = z + at * lanes;
                if (at < range.first || at >= range.end) continue;
                vec_store(to, vec_where_less(vec_min(row, last[y]), vec_zero(), minus_infinity, vec_load(to)));
            }
        }
    }
}

/* Soft cap, bias and what is not seen, for one vector of rows from `lane` on and the keys of `range`:
 * z [count][lanes]. slope (NULL: not wanted) [count][lanes] receives the slope of the soft cap. */
static inline void view_logits(const struct tile_view *view, const struct piece *piece, struct key_range range,
                               int64_t lane, float *z, int64_t lanes, float *slope)
{
    vec minus_infinity = vec_set(-INFINITY), from = vec_load(view->from + lane), to = vec_load(view->to + lane);
    vec bias = view->problem->options.bias ? vec_load(view->bias + lane) : vec_zero();
    bool bends = view->softcap != 0 || view->problem->options.bias || piece->bounded;
    for (int64_t j = range.first; j < range.end && bends; j++) {
        vec x = vec_load(z + j * lanes);
        if (view->softcap != 0) {
            vec bent;
            x = vec_tanh(vec_mul(x, vec_set(view->softcap_inverse)), &bent);
            x = vec_mul(x, vec_set(view->softcap));
            if (slope) vec_store(slope + j * lanes, bent);
        }
        if (view->problem->options.bias) x = vec_add(x, bias);
        if (piece->bounded) {
            x = vec_where_less(vec_set((float)j), to, x, minus_infinity);
            x = vec_where_less(vec_set((float)j), from, minus_infinity, x);
        }
        vec_store(z + j * lanes, x);
    }
    if (piece->cut) view_mask(view, range, lane, z, lanes);
}

#endif
