/* SPDX-License-Identifier: MIT */
/* Neighborhood attention: which key tiles a query tile visits, and which of them need the element mask. */

#include "neighborhood.h"

#include <stdlib.h>
#include <string.h>

/* One query tile along one axis: key tiles first .. last that it visits, and those of them that none of its
 * windows cuts. */
struct tile_span {
    int32_t first, last;
    int32_t whole_first, whole_last; /* empty when whole_first > whole_last */
};

static struct tile_span axis_span(const struct window_axis *axis, int32_t r, int32_t begin, int32_t end,
                                  int32_t kv_tile)
{
    struct range first = window_keys(axis, r, begin), all = first, common = first;
    for (int32_t i = begin + 1; i < end; i++) {
        struct range keys = window_keys(axis, r, i);
        all.lo = MIN(all.lo, keys.lo);
        all.hi = MAX(all.hi, keys.hi);
        common.lo = MAX(common.lo, keys.lo);
        common.hi = MIN(common.hi, keys.hi);
    }
    return (struct tile_span){all.lo / kv_tile, (all.hi - 1) / kv_tile, (int32_t)ceil_div(common.lo, kv_tile),
                              common.hi >= kv_tile ? common.hi / kv_tile - 1 : -1};
}

/* Lists being filled. */
struct lists {
    int32_t *indices, *counts;
    unsigned char *cut;
    int32_t topk;
};

/* Blocks of one query tile, written to list row `row` unless lists is NULL; returns how many. */
static int32_t tile_list(const clattn_neighborhood *plan, const int32_t residue[AXES], const int32_t tile[AXES],
                         const struct lists *lists, int64_t row)
{
    struct tile_span span[AXES];
    int32_t kv_tiles[AXES], count = 0;
    int64_t own_tiles = 1;
    for (int a = 0; a < AXES; a++) {
        int32_t length = class_length(&plan->axis[a], residue[a]), begin = tile[a] * plan->q.tile[a];
        span[a] = axis_span(&plan->axis[a], residue[a], begin, MIN(begin + plan->q.tile[a], length),
                            plan->kv.tile[a]);
        kv_tiles[a] = (int32_t)ceil_div(length, plan->kv.tile[a]);
        own_tiles *= kv_tiles[a];
    }
    for (int32_t x = span[0].first; x <= span[0].last; x++)
        for (int32_t y = span[1].first; y <= span[1].last; y++)
            for (int32_t z = span[2].first; z <= span[2].last; z++, count++) {
                if (!lists) continue;
                bool whole = x >= span[0].whole_first && x <= span[0].whole_last && y >= span[1].whole_first &&
                             y <= span[1].whole_last && z >= span[2].whole_first && z <= span[2].whole_last;
                lists->indices[row * lists->topk + count] = (x * kv_tiles[1] + y) * kv_tiles[2] + z;
                lists->cut[row * lists->topk + count] = !whole;
            }
    for (int64_t e = 0; e < ceil_div(plan->extra_len, plan->kv.tile_tokens); e++, count++)
        if (lists) {
            lists->indices[row * lists->topk + count] = (int32_t)(own_tiles + e);
            lists->cut[row * lists->topk + count] = 0;
        }
    if (lists) lists->counts[row] = count;
    return count;
}

/* Calls tile_list for every query tile; returns the longest list. */
static int32_t all_lists(const clattn_neighborhood *plan, const struct lists *lists)
{
    int32_t longest = 1;
    int64_t row = 0;
    for (int64_t c = 0; c < plan->classes; c++) {
        int32_t residue[AXES], tiles[AXES], tile[AXES];
        class_residues(plan, c, residue);
        for (int a = 0; a < AXES; a++)
            tiles[a] = (int32_t)ceil_div(class_length(&plan->axis[a], residue[a]), plan->q.tile[a]);
        for (tile[0] = 0; tile[0] < tiles[0]; tile[0]++)
            for (tile[1] = 0; tile[1] < tiles[1]; tile[1]++)
                for (tile[2] = 0; tile[2] < tiles[2]; tile[2]++, row++) {
                    int32_t count = tile_list(plan, residue, tile, lists, row);
                    longest = MAX(longest, count);
                }
    }
    return longest;
}

/* Windows of the permuted query rows. Rows without a token see nothing. window [q.rows][AXES][2]. */
static void windows_fill(const clattn_neighborhood *plan, int32_t *window)
{
    for (int64_t c = 0; c < plan->classes; c++) {
        int32_t residue[AXES];
        class_residues(plan, c, residue);
        for (int64_t row = plan->q.class_row[c]; row < plan->q.class_row[c + 1]; row++)
            for (int a = 0; a < AXES; a++) {
                int32_t i = plan->q.coordinate[row * AXES + a];
                struct range keys = i < 0 ? (struct range){0, 0} : window_keys(&plan->axis[a], residue[a], i);
                window[(row * AXES + a) * 2] = keys.lo;
                window[(row * AXES + a) * 2 + 1] = keys.hi;
            }
    }
}

/* Coordinates of the permuted key rows; extra keys lie in blocks that are never cut. coordinate
 * [kv_rows][AXES]. */
static void coordinates_fill(const clattn_neighborhood *plan, int32_t *coordinate)
{
    int64_t to = 0;
    for (int64_t c = 0; c < plan->classes; c++) {
        for (int64_t row = plan->kv.class_row[c]; row < plan->kv.class_row[c + 1]; row++, to++)
            for (int a = 0; a < AXES; a++)
                coordinate[to * AXES + a] = plan->kv.coordinate[row * AXES + a];
        for (int64_t n = 0; n < plan->extra_len; n++, to++)
            for (int a = 0; a < AXES; a++)
                coordinate[to * AXES + a] = -1;
    }
}

static clattn_status store(clattn_context *context, struct storage *storage, const void *data, size_t bytes)
{
    clattn_status status = context->backend->storage_create(context, MAX(bytes, 8), storage);
    return status || !bytes ? status : context->backend->storage_write(context, storage, data, bytes);
}

clattn_status neighborhood_blocks(clattn_context *context, clattn_neighborhood *plan)
{
    struct lists lists = {.topk = all_lists(plan, NULL)};
    size_t rows = (size_t)(plan->q.rows / plan->q.tile_tokens), entries = rows * (size_t)lists.topk;
    size_t window_count = (size_t)plan->q.rows * AXES * 2, coordinate_count = (size_t)plan->kv_rows * AXES;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    desc.block = plan->kv.tile_tokens;
    desc.q_block = plan->q.tile_tokens;
    desc.rows = (int64_t)rows;
    desc.topk = lists.topk;
    lists.indices = malloc(entries * sizeof *lists.indices);
    lists.counts = malloc(rows * sizeof *lists.counts);
    lists.cut = calloc(entries, 1);
    int32_t *window = malloc(window_count * sizeof *window),
            *coordinate = malloc(coordinate_count * sizeof *coordinate);
    clattn_status status = CLATTN_SUCCESS;
    if (!lists.indices || !lists.counts || !lists.cut || !window || !coordinate)
        status = fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu list entries", entries);
    if (!status) status = blocks_new(context, &desc, &plan->blocks);
    if (status) goto done;
    plan->blocks->mask = calloc(1, sizeof *plan->blocks->mask);
    if (!plan->blocks->mask) {
        status = fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a mask");
        goto done;
    }
    for (size_t i = 0; i < entries; i++)
        lists.indices[i] = -1;
    all_lists(plan, &lists);
    windows_fill(plan, window);
    coordinates_fill(plan, coordinate);
    status = context->backend->storage_write(context, &plan->blocks->indices, lists.indices,
                                             entries * sizeof *lists.indices);
    if (!status)
        status = context->backend->storage_write(context, &plan->blocks->counts, lists.counts,
                                                 rows * sizeof *lists.counts);
    struct element_mask *mask = plan->blocks->mask;
    memcpy(mask->kv_tile, plan->kv.tile, sizeof mask->kv_tile);
    if (!status) status = store(context, &mask->cut, lists.cut, entries);
    if (!status) status = store(context, &mask->window, window, window_count * sizeof *window);
    if (!status) status = store(context, &mask->coordinate, coordinate, coordinate_count * sizeof *coordinate);
done:
    free(lists.indices);
    free(lists.counts);
    free(lists.cut);
    free(window);
    free(coordinate);
    return status;
}
