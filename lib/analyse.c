/* SPDX-License-Identifier: MIT */
/* Analyser of neighborhoods: what a tile shape makes of a window, and the best tile shapes. Everything is a
 * product of sums along the axes, so no token is visited. */

#include "neighborhood.h"

#include <string.h>

enum { TILE_TOKENS = 64 }; /* of searched tiles: what the kernels like best */

/* One axis with one pair of tile lengths. */
struct axis_count {
    double visited; /* (query tile, key tile) pairs, over all residue classes */
    double dense;   /* pairs of an undilated dense computation */
    bool perfect;
};

static double axis_connections(const struct window_axis *axis)
{
    double sum = 0;
    for (int32_t r = 0; r < axis->dilation; r++)
        for (int32_t i = 0; i < class_length(axis, r); i++) {
            struct range keys = window_keys(axis, r, i);
            sum += keys.hi - keys.lo;
        }
    return sum;
}

static struct axis_count axis_tiles(const struct window_axis *axis, int32_t q_tile, int32_t kv_tile)
{
    bool is_full = axis->window == axis->length && !axis->causal;
    struct axis_count count = {.dense = (double)ceil_div(axis->length, q_tile) *
                                        (double)ceil_div(axis->length, kv_tile),
                               .perfect = true};
    for (int32_t r = 0; r < axis->dilation; r++) {
        int32_t length = class_length(axis, r);
        for (int64_t begin = 0; begin < length; begin += q_tile) {
            /* lo and hi never descend, so the first and the last query of the tile bound its windows. */
            struct range first = window_keys(axis, r, (int32_t)begin),
                         last = window_keys(axis, r, (int32_t)(MIN(begin + q_tile, length) - 1));
            count.visited += (last.hi - 1) / kv_tile - first.lo / kv_tile + 1;
            bool is_same = first.lo == last.lo && first.hi == last.hi;
            bool is_whole = first.lo % kv_tile == 0 && first.hi % kv_tile == 0;
            count.perfect = count.perfect && is_same && (is_whole || is_full);
        }
    }
    return count;
}

static void analyse_tiles(const struct window_axis axis[AXES], const int32_t q_tile[AXES],
                          const int32_t kv_tile[AXES], clattn_neighborhood_analysis *analysis)
{
    double pairs = 1, dense = 1, computed = 1;
    bool perfect = true;
    for (int a = 0; a < AXES; a++) {
        struct axis_count count = axis_tiles(&axis[a], q_tile[a], kv_tile[a]);
        pairs *= count.visited;
        dense *= count.dense;
        perfect = perfect && count.perfect;
        computed *= (double)q_tile[a] * kv_tile[a];
    }
    memcpy(analysis->q_tile, q_tile, sizeof analysis->q_tile);
    memcpy(analysis->kv_tile, kv_tile, sizeof analysis->kv_tile);
    analysis->tile_pairs = pairs;
    analysis->bound_speedup = dense / pairs;
    analysis->waste = 1 - analysis->connections / (pairs * computed);
    analysis->perfect = perfect;
}

/* The fewest pairs computed. bound_speedup tells the same where the tiles divide the lengths; where they reach
 * over the ends it compares with a dense computation that is padded as much, and would praise tiles of mere
 * padding. */
static bool is_better(const clattn_neighborhood_analysis *a, const clattn_neighborhood_analysis *b)
{
    if (a->waste != b->waste) return a->waste < b->waste;
    return a->perfect > b->perfect;
}

/* Tile shapes of TILE_TOKENS in powers of two, one after the other; false past the last. A given tile is the
 * only one. */
static bool next_tile(const clattn_neighborhood_desc *desc, const int32_t given[AXES], int step,
                      int32_t tile[AXES])
{
    int shapes = 0;
    if (given[0] > 0) {
        memcpy(tile, given, AXES * sizeof *tile);
        return step == 0;
    }
    for (int32_t x = 1; x <= TILE_TOKENS; x *= 2)
        for (int32_t y = 1; x * y <= TILE_TOKENS; y *= 2) {
            int32_t shape[AXES] = {x, y, TILE_TOKENS / (x * y)};
            bool fits = true; /* an axis that the layout does not have has tiles of 1 */
            for (int a = desc->axes; a < AXES; a++)
                fits = fits && shape[a] == 1;
            if (fits && shapes++ == step) {
                memcpy(tile, shape, sizeof shape);
                return true;
            }
        }
    return false;
}

static clattn_status check_quietly(const clattn_neighborhood_desc *desc, clattn_neighborhood_desc *full)
{
    return neighborhood_check(NULL, desc, full);
}

clattn_status clattn_neighborhood_analyse(const clattn_neighborhood_desc *desc,
                                          clattn_neighborhood_analysis *analysis)
{
    clattn_neighborhood_desc full;
    struct window_axis axis[AXES];
    int32_t q_tile[AXES], kv_tile[AXES];
    if (!analysis || analysis->size < sizeof(size_t)) return CLATTN_INVALID_ARGUMENT;
    clattn_status status = check_quietly(desc, &full);
    if (status) return status;
    clattn_neighborhood_analysis best = {.size = sizeof best, .waste = 2}, base = {.size = sizeof base};
    base.tokens = base.connections = 1;
    for (int a = 0; a < AXES; a++) {
        axis[a] = window_axis_of(&full, a);
        base.tokens *= axis[a].length;
        base.connections *= axis_connections(&axis[a]);
    }
    base.ideal_speedup = base.tokens * base.tokens / base.connections;
    base.sparsity = 1 - 1 / base.ideal_speedup;
    for (int i = 0; next_tile(&full, full.q_tile, i, q_tile); i++)
        for (int j = 0; next_tile(&full, full.kv_tile, j, kv_tile); j++) {
            clattn_neighborhood_analysis candidate = base;
            analyse_tiles(axis, q_tile, kv_tile, &candidate);
            if (is_better(&candidate, &best)) best = candidate;
        }
    size_t size = MIN(analysis->size, sizeof best);
    memcpy(analysis, &best, size);
    analysis->size = size;
    return CLATTN_SUCCESS;
}

/* ---- single axes ---- */

static clattn_status axis_query(const clattn_neighborhood_desc *desc, int axis, int32_t x, bool of_key,
                                int32_t *first, int32_t *end)
{
    clattn_neighborhood_desc full;
    clattn_status status = check_quietly(desc, &full);
    if (status) return status;
    if (axis < 0 || axis >= full.axes || x < 0 || x >= full.length[axis] || !first || !end)
        return CLATTN_INVALID_ARGUMENT;
    struct window_axis window = window_axis_of(&full, axis);
    int32_t residue = x % window.dilation, i = x / window.dilation;
    struct range range = of_key ? window_queries(&window, residue, i) : window_keys(&window, residue, i);
    *first = range.lo * window.dilation + residue;
    *end = range.hi > range.lo ? (range.hi - 1) * window.dilation + residue + 1 : *first;
    return CLATTN_SUCCESS;
}

clattn_status clattn_neighborhood_keys(const clattn_neighborhood_desc *desc, int axis, int32_t query,
                                       int32_t *first, int32_t *end)
{
    return axis_query(desc, axis, query, false, first, end);
}

clattn_status clattn_neighborhood_queries(const clattn_neighborhood_desc *desc, int axis, int32_t key,
                                          int32_t *first, int32_t *end)
{
    return axis_query(desc, axis, key, true, first, end);
}
