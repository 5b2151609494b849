/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "pattern.h"

#include "program.h"
#include "svg.h"

#include <inttypes.h>
#include <stdlib.h>

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* How many of the blocks a list row can see: all, or those up to its last query. */
static int64_t visible_blocks(const clattn_attention_desc *attention, const clattn_pattern_shape *shape,
                              int64_t row)
{
    int64_t last = (row + 1) * shape->q_block - 1;
    if (last >= shape->q_len) last = shape->q_len - 1;
    int64_t position = attention->causal ? last + shape->kv_len - shape->q_len : shape->kv_len - 1;
    return position < 0 ? 0 : position / shape->block + 1;
}

static int add_row(const clattn_pattern *pattern, const clattn_attention_desc *attention,
                   const clattn_pattern_shape *shape, int32_t head, int64_t row, int32_t *list,
                   struct pattern_map *map)
{
    int64_t count;
    clattn_status status = clattn_pattern_list(pattern, attention, shape, row, head, list, map->blocks, &count);
    if (status != CLATTN_SUCCESS) {
        program_error("%s", clattn_strerror(status));
        return STATUS_FAILED;
    }
    float *listed = map->listed + row / map->row_step * map->width;
    float *visible = map->visible + row / map->row_step * map->width;
    float pair = 1.0f / (float)(map->row_step * map->block_step);
    int64_t seen = visible_blocks(attention, shape, row);
    for (int64_t n = 0; n < count; n++)
        listed[list[n] / map->block_step] += pair;
    for (int64_t b = 0; b < seen; b++)
        visible[b / map->block_step] += pair;
    return STATUS_OK;
}

int pattern_map_make(const clattn_pattern *pattern, const clattn_attention_desc *attention,
                     const clattn_pattern_shape *shape, int32_t head, int most, struct pattern_map *map)
{
    *map = (struct pattern_map){.rows = ceil_div(shape->q_len, shape->q_block),
                                .blocks = ceil_div(shape->kv_len, shape->block)};
    map->row_step = map->rows > most ? ceil_div(map->rows, most) : 1;
    map->block_step = map->blocks > most ? ceil_div(map->blocks, most) : 1;
    map->height = (int)ceil_div(map->rows, map->row_step);
    map->width = (int)ceil_div(map->blocks, map->block_step);
    size_t cells = (size_t)map->height * (size_t)map->width + 1;
    map->listed = calloc(cells, sizeof *map->listed);
    map->visible = calloc(cells, sizeof *map->visible);
    int32_t *list = malloc(((size_t)map->blocks + 1) * sizeof *list);
    int status = STATUS_OK;
    if (!map->listed || !map->visible || !list) {
        program_error("out of memory: %" PRId64 " rows of %" PRId64 " blocks", map->rows, map->blocks);
        status = STATUS_FAILED;
    }
    for (int64_t row = 0; status == STATUS_OK && row < map->rows; row++)
        status = add_row(pattern, attention, shape, head, row, list, map);
    free(list);
    return status;
}

void pattern_map_release(struct pattern_map *map)
{
    free(map->listed);
    free(map->visible);
    *map = (struct pattern_map){0};
}

void pattern_map_print(const struct pattern_map *map)
{
    for (int y = 0; y < map->height; y++) {
        int end = 0;
        char line[1024];
        for (int x = 0; x < map->width && x < (int)sizeof line - 1; x++) {
            float listed = map->listed[y * map->width + x], visible = map->visible[y * map->width + x];
            line[x] = visible <= 0 ? ' ' : listed <= 0 ? '.' : listed < visible * 0.999f ? '+' : '#';
            if (line[x] != ' ') end = x + 1;
        }
        printf("%.*s\n", end, line);
    }
}

static int map_level(const void *data, int x, int y)
{
    const struct pattern_map *map = data;
    float listed = map->listed[y * map->width + x], visible = map->visible[y * map->width + x];
    return visible <= 0 ? -1 : svg_level(listed / visible);
}

int pattern_map_write_svg(const struct pattern_map *map, const char *title, const char *path)
{
    struct svg_grid grid = {
        title,
        "List rows down, key blocks across. Grey: not listed; the darker, the more of a cell is listed.",
        map->width,
        map->height,
        map_level,
        map};
    return svg_grid_write(&grid, path);
}
