/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "simulate.h"

#include "layout.h"
#include "program.h"
#include "svg.h"

#include <stdlib.h>

/* A picture of more visited tiles takes long and shows nothing more. */
#define MOST_PAIRS 2e8

/* What the query tiles of one axis visit. Tiles are counted over all residue classes, key tiles in their class.
 */
struct axis_map {
    const clattn_neighborhood_desc *desc;
    int axis;
    int32_t length, dilation, q_tile, kv_tile;
    int64_t *class_q;  /* [dilation + 1] first query tile of a class */
    int32_t *class_kv; /* [dilation] key tiles of a class */
    int32_t *first;    /* [query tiles] first key tile that it visits ... */
    int64_t *at;       /* [query tiles + 1] ... and where the shares of its key tiles begin */
    float *share;      /* attending pairs of a visited pair of tiles, of all that exist in it */
};

struct tile_map {
    struct axis_map axis[LAYOUT_AXES];
    int64_t rows, columns, row_step, column_step;
    int height, width;
    float *sum; /* [height][width] shares of the cell's pairs of tiles */
};

static int32_t class_length(const struct axis_map *map, int32_t r)
{
    return (map->length - r + map->dilation - 1) / map->dilation;
}

/* Keys of query i of class r as class coordinates lo .. hi - 1. */
static void window(const struct axis_map *map, int32_t r, int32_t i, int32_t *lo, int32_t *hi)
{
    int32_t first = 0, end = 1; /* an axis that the layout does not have */
    if (map->axis < map->desc->axes)
        clattn_neighborhood_keys(map->desc, map->axis, i * map->dilation + r, &first, &end);
    *lo = first / map->dilation;
    *hi = (end - 1) / map->dilation + 1;
}

/* Share of the pairs of query tile `begin` .. `end` - 1 and the key tile from `key` that attend. */
static float pair_share(const struct axis_map *map, int32_t r, int32_t begin, int32_t end, int32_t key)
{
    int32_t key_end = key + map->kv_tile, length = class_length(map, r), lo, hi;
    double pairs = 0;
    if (key_end > length) key_end = length;
    for (int32_t i = begin; i < end; i++) {
        window(map, r, i, &lo, &hi);
        if (lo < key) lo = key;
        if (hi > key_end) hi = key_end;
        if (hi > lo) pairs += hi - lo;
    }
    return (float)(pairs / ((double)(end - begin) * (key_end - key)));
}

/* Finds the key tiles of each query tile (shares NULL), or computes their shares. */
static void axis_fill(struct axis_map *map, float *shares)
{
    int64_t tile = 0, used = 0;
    for (int32_t r = 0; r < map->dilation; r++) {
        int32_t length = class_length(map, r), lo, hi, last;
        map->class_q[r] = tile;
        map->class_kv[r] = (length + map->kv_tile - 1) / map->kv_tile;
        for (int32_t begin = 0; begin < length; begin += map->q_tile, tile++) {
            int32_t end = length - begin < map->q_tile ? length : begin + map->q_tile;
            window(map, r, begin, &lo, &hi);
            window(map, r, end - 1, &last, &hi);
            map->first[tile] = lo / map->kv_tile;
            map->at[tile] = used;
            for (int32_t key = map->first[tile]; key <= (hi - 1) / map->kv_tile; key++, used++)
                if (shares) shares[used] = pair_share(map, r, begin, end, key * map->kv_tile);
        }
    }
    map->class_q[map->dilation] = tile;
    map->at[tile] = used;
}

static bool axis_make(struct axis_map *map, const clattn_neighborhood_desc *desc, int axis,
                      const clattn_neighborhood_analysis *analysis)
{
    bool exists = axis < desc->axes;
    *map = (struct axis_map){desc,
                             axis,
                             exists ? desc->length[axis] : 1,
                             exists ? desc->dilation[axis] : 1,
                             exists ? analysis->q_tile[axis] : 1,
                             exists ? analysis->kv_tile[axis] : 1,
                             NULL,
                             NULL,
                             NULL,
                             NULL,
                             NULL};
    size_t classes = (size_t)map->dilation + 1, tiles = (size_t)map->length + 1;
    map->class_q = malloc(classes * sizeof *map->class_q);
    map->class_kv = malloc(classes * sizeof *map->class_kv);
    map->first = malloc(tiles * sizeof *map->first);
    map->at = malloc(tiles * sizeof *map->at);
    if (!map->class_q || !map->class_kv || !map->first || !map->at) return false;
    axis_fill(map, NULL);
    map->share = malloc((size_t)(map->at[map->class_q[map->dilation]] + 1) * sizeof *map->share);
    if (!map->share) return false;
    axis_fill(map, map->share);
    return true;
}

/* Adds the pairs of one query tile: a product along the axes. `base` is its class's first column. */
static void add_row(struct tile_map *map, int64_t row, const int64_t tile[LAYOUT_AXES],
                    const int32_t residue[LAYOUT_AXES], int64_t base)
{
    const struct axis_map *x = &map->axis[0], *y = &map->axis[1], *z = &map->axis[2];
    float *sum = map->sum + row / map->row_step * map->width;
    for (int64_t i = x->at[tile[0]]; i < x->at[tile[0] + 1]; i++)
        for (int64_t j = y->at[tile[1]]; j < y->at[tile[1] + 1]; j++)
            for (int64_t k = z->at[tile[2]]; k < z->at[tile[2] + 1]; k++) {
                int64_t column = x->first[tile[0]] + i - x->at[tile[0]];
                column = column * y->class_kv[residue[1]] + y->first[tile[1]] + j - y->at[tile[1]];
                column = column * z->class_kv[residue[2]] + z->first[tile[2]] + k - z->at[tile[2]];
                sum[(base + column) / map->column_step] += x->share[i] * y->share[j] * z->share[k];
            }
}

/* Walks the tiles in the library's order: class by class, in each in row-major order. add false: counts only.
 */
static void walk(struct tile_map *map, bool add)
{
    int64_t row = 0, base = 0;
    int32_t r[LAYOUT_AXES];
    const struct axis_map *x = &map->axis[0], *y = &map->axis[1], *z = &map->axis[2];
    for (r[0] = 0; r[0] < x->dilation; r[0]++)
        for (r[1] = 0; r[1] < y->dilation; r[1]++)
            for (r[2] = 0; r[2] < z->dilation; r[2]++) {
                int64_t t[LAYOUT_AXES];
                for (t[0] = x->class_q[r[0]]; t[0] < x->class_q[r[0] + 1]; t[0]++)
                    for (t[1] = y->class_q[r[1]]; t[1] < y->class_q[r[1] + 1]; t[1]++)
                        for (t[2] = z->class_q[r[2]]; t[2] < z->class_q[r[2] + 1]; t[2]++, row++)
                            if (add) add_row(map, row, t, r, base);
                base += (int64_t)x->class_kv[r[0]] * y->class_kv[r[1]] * z->class_kv[r[2]];
            }
    map->rows = row;
    map->columns = base;
}

/* Cells at the end may stand for fewer pairs. */
static int map_level(const void *data, int x, int y)
{
    const struct tile_map *map = data;
    int64_t rows = map->rows - y * map->row_step, columns = map->columns - x * map->column_step;
    if (rows > map->row_step) rows = map->row_step;
    if (columns > map->column_step) columns = map->column_step;
    return svg_level(map->sum[(int64_t)y * map->width + x] / (float)(rows * columns));
}

static void scale_map(struct tile_map *map, int cells)
{
    map->row_step = (map->rows + cells - 1) / cells;
    map->column_step = (map->columns + cells - 1) / cells;
    map->height = (int)((map->rows + map->row_step - 1) / map->row_step);
    map->width = (int)((map->columns + map->column_step - 1) / map->column_step);
    map->sum = calloc((size_t)map->height * (size_t)map->width, sizeof *map->sum);
}

int simulate_draw(const clattn_neighborhood_desc *desc, const clattn_neighborhood_analysis *analysis, int cells,
                  const char *title, const char *path)
{
    struct tile_map map = {0};
    int status = STATUS_FAILED;
    bool ready = true;
    if (analysis->tile_pairs > MOST_PAIRS)
        return program_usage("--svg: %.0f visited pairs of tiles are too many to draw", analysis->tile_pairs);
    for (int a = 0; a < LAYOUT_AXES && ready; a++)
        ready = axis_make(&map.axis[a], desc, a, analysis);
    if (ready) {
        walk(&map, false);
        scale_map(&map, cells);
    }
    if (map.sum) {
        walk(&map, true);
        struct svg_grid grid = {
            title,
            "Query tiles down, key tiles across. Grey: not visited; the darker, the more of "
            "a cell's pairs of tokens attend; the darkest need no mask.",
            map.width,
            map.height,
            map_level,
            &map};
        status = svg_grid_write(&grid, path);
    } else {
        program_error("out of memory for the map of %.0f tiles", analysis->tile_pairs);
    }
    for (int a = 0; a < LAYOUT_AXES; a++) {
        free(map.axis[a].class_q);
        free(map.axis[a].class_kv);
        free(map.axis[a].first);
        free(map.axis[a].at);
        free(map.axis[a].share);
    }
    free(map.sum);
    return status;
}
