/* SPDX-License-Identifier: MIT
 *
 * Maps as SVG: a grid of cells in eight shades. */
#ifndef CLATTN_BENCH_SVG_H
#define CLATTN_BENCH_SVG_H

struct svg_grid {
    const char *title, *description;
    int width, height;
    int (*level)(const void *data, int x, int y); /* -1: no cell, 0: grey, 1 to 8: the more, the darker */
    const void *data;
};

/* The level of a cell of which this share is set. */
int svg_level(float share);

/* Writes the grid to a file. Returns an exit status; errors were printed. */
int svg_grid_write(const struct svg_grid *grid, const char *path);

#endif
