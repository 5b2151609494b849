/* SPDX-License-Identifier: MIT
 *
 * The four charts. A curve is a block of data, $cN, and a part of the plot command behind it. */
#include "config.h"

#include "chart.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { CURVES_MAX = 64, NAMES_MAX = 16, POINTS_MAX = 512 };

static bool is(const char *a, const char *b)
{
    return strcmp(a, b) == 0;
}

/* Numbers of a panel's curve of one source; returns how many rows. */
static int put_curve(const struct canvas *canvas, int curve, const struct chart_panel *panel, int source,
                     void (*put)(FILE *script, const struct result *row))
{
    int count = 0;
    fprintf(canvas->script, "$c%d << EOD\n", curve);
    for (int r = 0; r < canvas->results->row_count; r++) {
        const struct result *row = &canvas->results->rows[r];
        if (row->source != source || !chart_in_panel(panel, row)) continue;
        put(canvas->script, row);
        count++;
    }
    fputs("EOD\n", canvas->script);
    return count;
}

/* All curves of a panel by keys. band: data has p5 and p95 in columns 3 and 4. */
static void plot_panel(const struct canvas *canvas, const struct chart_panel *panel,
                       void (*put)(FILE *script, const struct result *row), bool band, const char *besides)
{
    FILE *script = canvas->script;
    int used[CURVES_MAX] = {0}, sources = canvas->results->source_count;
    for (int s = 0; s < sources && s < CURVES_MAX; s++)
        used[s] = put_curve(canvas, s, panel, s, put);
    chart_lengths(canvas, panel);
    const char *comma = "plot ";
    if (besides) {
        fprintf(script, "plot %s", besides);
        comma = ", ";
    }
    for (int s = 0; s < sources && s < CURVES_MAX; s++) {
        if (!used[s]) continue;
        if (band && used[s] > 1)
            fprintf(script,
                    "%s$c%d using 1:3:4 with filledcurves fs transparent solid 0.15 noborder lc rgb '%s'",
                    comma, s, chart_colour(s));
        if (band && used[s] > 1) comma = ", ";
        fprintf(script, "%s$c%d using 1:2 with linespoints lw 2 pt 7 ps 0.8 * point lc rgb '%s'", comma, s,
                chart_colour(s));
        comma = ", ";
    }
    fputc('\n', script);
}

/* ---- throughput ---- */

static bool is_by_length(const struct result *row)
{
    return !is(row->suite, "selection-scaling") && !is(row->suite, "neighborhood");
}

/* What a call does: keys that go into a pyramid, else queries. */
static double units(const struct result *row)
{
    return is(row->operation, "pyramid") ? (double)row->kv_len : (double)row->q_len;
}

static void put_throughput(FILE *script, const struct result *row)
{
    fprintf(script, "%" PRId64 " %.6g %.6g %.6g\n", row->kv_len, units(row) / row->median,
            units(row) / row->p95, units(row) / row->p5);
}

static bool draw_throughput(struct canvas *canvas, const char *terminal, const char *output)
{
    struct chart_panel panels[PANELS_MAX];
    int count = chart_panels(canvas->results, is_by_length, panels);
    if (count == 0) return false;
    canvas_begin(canvas, terminal, output, "Throughput (median, 5 to 95 %)", count, 0);
    for (int p = 0; p < count; p++) {
        bool is_pyramid = is(panels[p].first->operation, "pyramid");
        canvas_panel(canvas, p, &panels[p], is_pyramid ? "keys a second" : "queries a second");
        fputs("set logscale y 10\nset format y '%.0s%c'\nset yrange [*:*]\n", canvas->script);
        plot_panel(canvas, &panels[p], put_throughput, true, NULL);
    }
    canvas_end(canvas);
    return true;
}

/* ---- speed-up over dense attention ---- */

static bool has_speedup(const struct result *row)
{
    return is_by_length(row) && row->speedup > 0 && !is(row->selector, "dense");
}

static void put_speedup(FILE *script, const struct result *row)
{
    if (row->speedup > 0) fprintf(script, "%" PRId64 " %.6g\n", row->kv_len, row->speedup);
}

static bool draw_speedup(struct canvas *canvas, const char *terminal, const char *output)
{
    struct chart_panel panels[PANELS_MAX];
    int count = chart_panels(canvas->results, has_speedup, panels);
    if (count == 0) return false;
    canvas_begin(canvas, terminal, output, "Speed-up over dense attention", count, 0);
    for (int p = 0; p < count; p++) {
        canvas_panel(canvas, p, &panels[p], "times as fast as dense");
        fputs("set logscale y 2\nset format y '%g'\nset yrange [*:*]\n", canvas->script);
        plot_panel(canvas, &panels[p], put_speedup, false, "1 lw 1.5 dt 2 lc rgb '#888888'");
    }
    canvas_end(canvas);
    return true;
}

/* ---- roofline ---- */

static bool has_roof(const struct result *row)
{
    return row->flops > 0 && row->bytes > 0 && row->ceiling_flops > 0 && row->ceiling_bytes > 0 &&
           !is(row->suite, "selection-scaling");
}

/* Each name has a shape of its own. */
static void add_name(const char *names[NAMES_MAX], int *count, const char *name)
{
    for (int n = 0; n < *count; n++)
        if (is(names[n], name)) return;
    if (*count < NAMES_MAX) names[(*count)++] = name;
}

static bool is_point(const struct result *row, int source, const char *name)
{
    return row->source == source && result_is_good(row) && has_roof(row) && is(row->name, name);
}

/* Points of a source and name as $cN; returns how many. least, most: of what is on the x axis so far. */
static int put_points(const struct canvas *canvas, int curve, int source, const char *name, double *least,
                      double *most)
{
    int count = 0;
    fprintf(canvas->script, "$c%d << EOD\n", curve);
    for (int r = 0; r < canvas->results->row_count; r++) {
        const struct result *row = &canvas->results->rows[r];
        if (!is_point(row, source, name)) continue;
        double intensity = row->flops / row->bytes, ridge = row->ceiling_flops / row->ceiling_bytes;
        fprintf(canvas->script, "%.6g %.6g\n", intensity, row->flops / row->median * 1e-9);
        *least = fmin(*least, fmin(intensity, ridge));
        *most = fmax(*most, fmax(intensity, ridge));
        count++;
    }
    fputs("EOD\n", canvas->script);
    return count;
}

/* The greatest ceilings of a source: they may differ with the element type. */
static const struct result *roof_of(const struct results *results, int source, const struct result *above)
{
    const struct result *best = NULL;
    for (int r = 0; r < results->row_count; r++) {
        const struct result *row = &results->rows[r];
        if (row->source != source || !has_roof(row)) continue;
        if (above && !(row->ceiling_flops < above->ceiling_flops)) continue;
        if (!best || row->ceiling_flops > best->ceiling_flops) best = row;
    }
    return best;
}

/* The roofs and points of one source. */
static void plot_roofline(const struct canvas *canvas, int source, int name_count, const int *used,
                          const char **comma)
{
    FILE *script = canvas->script;
    const struct result *roof = NULL;
    while ((roof = roof_of(canvas->results, source, roof)) != NULL) {
        fprintf(script, "%s(x * %.6g < %.6g ? x * %.6g : %.6g) lw 2 lc rgb '%s'", *comma,
                roof->ceiling_bytes * 1e-9, roof->ceiling_flops * 1e-9, roof->ceiling_bytes * 1e-9,
                roof->ceiling_flops * 1e-9, chart_colour(source));
        *comma = ", ";
    }
    for (int n = 0; n < name_count; n++) {
        int curve = source * name_count + n;
        if (curve >= POINTS_MAX || !used[curve]) continue;
        fprintf(script, "%s$c%d with points pt %d ps point lc rgb '%s'", *comma, curve, chart_shape(n),
                chart_colour(source));
        *comma = ", ";
    }
}

static bool draw_roofline(struct canvas *canvas, const char *terminal, const char *output)
{
    const struct results *results = canvas->results;
    FILE *script = canvas->script;
    struct chart_panel panels[PANELS_MAX];
    const char *names[NAMES_MAX], *comma = "plot ";
    int name_count = 0, used[POINTS_MAX] = {0};
    double least = INFINITY, most = 0;
    if (chart_panels(results, has_roof, panels) == 0) return false;
    for (int r = 0; r < results->row_count; r++)
        if (result_is_good(&results->rows[r]) && has_roof(&results->rows[r]))
            add_name(names, &name_count, results->rows[r].name);
    canvas_begin(canvas, terminal, output, "Roofline", 1, name_count);
    for (int n = 0; n < name_count; n++)
        canvas_legend(canvas, n, names[n], -1, chart_shape(n));
    canvas_panel(canvas, 0, NULL, "GFLOP/s");
    for (int s = 0; s < results->source_count; s++)
        for (int n = 0; n < name_count && s * name_count + n < POINTS_MAX; n++)
            used[s * name_count + n] = put_points(canvas, s * name_count + n, s, names[n], &least, &most);
    fprintf(script,
            "set logscale xy 10\nset xtics auto\nset format y '%%g'\nset format x '%%g'\nset xrange [%g:%g]\n"
            "set yrange [*:*]\nset xlabel 'FLOP for each byte of inputs and results' offset 0,0.4\nset samples "
            "400\n",
            least / 2, most * 2);
    for (int s = 0; s < results->source_count; s++)
        plot_roofline(canvas, s, name_count, used, &comma);
    fputc('\n', script);
    canvas_end(canvas);
    return true;
}

/* ---- selection: pyramid against flat ---- */

static bool is_scaling(const struct result *row)
{
    return is(row->suite, "selection-scaling");
}

static void put_query(FILE *script, const struct result *row)
{
    fprintf(script, "%" PRId64 " %.6g\n", row->kv_len, row->median / (double)row->q_len);
}

static bool draw_crossover(struct canvas *canvas, const char *terminal, const char *output)
{
    const struct results *results = canvas->results;
    FILE *script = canvas->script;
    struct chart_panel panels[PANELS_MAX];
    const char *comma = "plot ";
    int count = chart_panels(results, is_scaling, panels), curve = 0;
    if (count == 0) return false;
    canvas_begin(canvas, terminal, output, "Selection by the pyramid (solid) and flat (dashed)", 1, 0);
    canvas_panel(canvas, 0, NULL, "time a query");
    for (int p = 0; p < count; p++)
        for (int s = 0; s < results->source_count; s++, curve++)
            put_curve(canvas, curve, &panels[p], s, put_query);
    chart_lengths(canvas, &panels[0]);
    fputs("set logscale y 10\nset format y '%.0s %cs'\nset yrange [*:*]\n", script);
    for (int s = 0; s < results->source_count; s++) {
        double cross = results_crossover(results, s);
        if (cross > 0)
            fprintf(script, "set arrow from %g, graph 0 to %g, graph 1 nohead dt 3 lw 1.5 lc rgb '%s'\n", cross,
                    cross, chart_colour(s));
    }
    for (int p = 0, c = 0; p < count; p++)
        for (int s = 0; s < results->source_count; s++, c++) {
            bool any = false;
            for (int r = 0; r < results->row_count && !any; r++)
                any = results->rows[r].source == s && chart_in_panel(&panels[p], &results->rows[r]);
            if (!any) continue;
            fprintf(script, "%s$c%d with linespoints lw 2 pt %d ps 0.8 * point dt %d lc rgb '%s'", comma, c,
                    is(panels[p].first->name, "flat") ? 6 : 7, is(panels[p].first->name, "flat") ? 2 : 1,
                    chart_colour(s));
            comma = ", ";
        }
    fputc('\n', script);
    canvas_end(canvas);
    return true;
}

bool chart_write(FILE *script, const struct results *results, enum chart chart, const char *terminal,
                 const char *output)
{
    struct canvas canvas = {.script = script, .results = results};
    switch (chart) {
    case CHART_THROUGHPUT:
        return draw_throughput(&canvas, terminal, output);
    case CHART_ROOFLINE:
        return draw_roofline(&canvas, terminal, output);
    case CHART_SPEEDUP:
        return draw_speedup(&canvas, terminal, output);
    default:
        return draw_crossover(&canvas, terminal, output);
    }
}
