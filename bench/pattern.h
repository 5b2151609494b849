/* SPDX-License-Identifier: MIT
 *
 * `clattn pattern` in parts: options and counts (pattern.c), the map of a pattern (pattern_map.c). */
#ifndef CLATTN_BENCH_PATTERN_H
#define CLATTN_BENCH_PATTERN_H

#include <clattn.h>
#include <stdbool.h>
#include <stdio.h>

/* List rows down, key blocks across; a cell stands for row_step x block_step pairs of them. */
struct pattern_map {
    int64_t rows, blocks; /* of the pattern */
    int64_t row_step, block_step;
    int height, width;
    float *listed;  /* [height][width] share of the cell's pairs that are listed */
    float *visible; /* [height][width] share that could be */
};

/* Makes the map of one list head with at most `most` cells each way. Returns an exit status; errors were
 * printed. */
int pattern_map_make(const clattn_pattern *pattern, const clattn_attention_desc *attention,
                     const clattn_pattern_shape *shape, int32_t head, int most, struct pattern_map *map);
void pattern_map_release(struct pattern_map *map);

/* '#' listed, '+' partly, '.' not, ' ' not visible. */
void pattern_map_print(const struct pattern_map *map);

/* Writes the map as SVG with a title. Returns an exit status; errors were printed. */
int pattern_map_write_svg(const struct pattern_map *map, const char *title, const char *path);

#endif
