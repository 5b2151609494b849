/* SPDX-License-Identifier: MIT
 *
 * What `clattn bench --json` wrote, read back; and `clattn compare` in parts: files (results.c), flow, table
 * and regressions (results_compare.c, results_report.c), charts (chart.c, chart_plots.c). */
#ifndef CLATTN_BENCH_RESULTS_H
#define CLATTN_BENCH_RESULTS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* One row of a file. Texts live as long as the results; those that are null there are "". Numbers that were not
 * measured are NAN. */
struct result {
    const char *suite, *name, *operation, *dtype, *selector, *state, *message;
    const char *backend, *device, *platform, *driver, *tier, *tuning, *library;
    int64_t threads; /* 0: all */
    int64_t causal, q_len, kv_len, q_heads, kv_heads, dim, topk, leaf;
    double median, p5, p95, flops, bytes, ceiling_flops, ceiling_bytes, roofline, speedup;
    int source;
};

/* Where rows come from: a device, driver and library version in a file, or in several that have no case in common. */
struct result_source {
    int file;
    const struct result *first; /* a row of it */
    char label[160];            /* that tells it from the others */
};

struct results {
    int file_count;
    const char **files;
    void **roots; /* what holds the texts */
    struct result *rows;
    int row_count;
    struct result_source *sources;
    int source_count;
};

/* Reads the files, in this order. Returns an exit status; the reason was printed. Call results_close() anyway.
 */
int results_open(struct results *results, char *const *files, int count);
void results_close(struct results *results);

/* Do the rows measure the same, wherever? */
bool result_same_case(const struct result *a, const struct result *b);
bool result_is_good(const struct result *row);

/* The source's row of this case, a good one if there is one; NULL: it has none. */
const struct result *results_find(const struct results *results, int source, const struct result *wanted);

/* ---- regressions ---- */

enum result_change { RESULT_SAME, RESULT_FASTER, RESULT_SLOWER, RESULT_BROKEN };

/* Slower or faster: median and 5th percentile both are, by more than the share `noise`. Broken: good before. */
enum result_change result_compare(const struct result *before, const struct result *now, double noise);

/* The row of the baseline for the same case on the same device, whatever driver, tier and version; NULL: none.
 */
const struct result *results_baseline(const struct results *baseline, const struct result *now);

/* ---- output ---- */

/* Where the pyramid becomes faster than flat selection: keys, interpolated; NAN: nowhere, or not measured; 0:
 * everywhere. */
double results_crossover(const struct results *results, int source);

struct result_changes {
    int count[4]; /* of each enum result_change */
    int missing;  /* rows that the baseline does not have */
};
struct result_changes results_changes(const struct results *results, const struct results *baseline,
                                      double noise);

void results_print_table(const struct results *results);
void results_print_changes(const struct results *results, const struct results *baseline, double noise);

/* baseline: NULL: none. Returns an exit status. */
int results_print_json(const struct results *results, const struct results *baseline, double noise);

/* ---- charts ---- */

enum chart { CHART_THROUGHPUT, CHART_ROOFLINE, CHART_SPEEDUP, CHART_CROSSOVER, CHARTS };
extern const char *const chart_words[CHARTS + 1];

/* Writes the commands for one chart in gnuplot's language; false: the results have nothing for it. `output` is
 * the file, `terminal` svg or pngcairo. */
bool chart_write(FILE *script, const struct results *results, enum chart chart, const char *terminal,
                 const char *output);

/* Draws all charts that there are numbers for as PREFIX-throughput.svg and so on, by gnuplot(1). script: a file
 * for its commands beside; NULL: none. Returns an exit status. */
int charts_draw(const struct results *results, const char *prefix, bool svg, bool png, const char *script);

#endif
