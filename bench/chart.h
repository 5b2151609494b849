/* SPDX-License-Identifier: MIT
 *
 * What the charts share: a canvas in gnuplot's language, cut into panels above a legend. Places are in pixels
 * of the SVG; a PNG has more of them. */
#ifndef CLATTN_BENCH_CHART_H
#define CLATTN_BENCH_CHART_H

#include "results.h"

enum { PANELS_MAX = 12 };

/* Rows that a panel shows: of one name and shape. */
struct chart_panel {
    const struct result *first;
};

struct canvas {
    FILE *script;
    const struct results *results;
    int width, height, columns, rows, source_rows, legend_rows;
    int panel_letters; /* size of a panel's title */
    int labels;        /* used so far */
};

/* Finds the panels: good rows of the results that `wanted` takes. Returns how many. */
int chart_panels(const struct results *results, bool (*wanted)(const struct result *row),
                 struct chart_panel panels[PANELS_MAX]);
bool chart_in_panel(const struct chart_panel *panel, const struct result *row);

/* Begins a canvas with a title for so many panels; each of them; the end. `entries`: of the legend beside the
 * sources. */
void canvas_begin(struct canvas *canvas, const char *terminal, const char *output, const char *title,
                  int panels, int entries);
void canvas_panel(struct canvas *canvas, int number, const struct chart_panel *panel, const char *y_label);
void canvas_end(struct canvas *canvas);

/* An entry of the legend: the sources have their own, in front of these. colour -1: black. */
void canvas_legend(struct canvas *canvas, int entry, const char *text, int colour, int shape);

/* A text in quotes. */
void chart_text(FILE *script, const char *text);
const char *chart_colour(int number);
int chart_shape(int number);

/* Labels of the x axis: the lengths that the panel's rows have. */
void chart_lengths(const struct canvas *canvas, const struct chart_panel *panel);

#endif
