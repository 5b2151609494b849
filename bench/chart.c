/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "chart.h"

#include "program.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

const char *const chart_words[CHARTS + 1] = {"throughput", "roofline", "speedup", "crossover", NULL};

/* ---- canvas ---- */

enum { TITLE = 50, PANEL_WIDTH = 360, PANEL_HEIGHT = 310, SINGLE_HEIGHT = 500, WIDTH_MIN = 900 };
enum { LEGEND_ROW = 24, SOURCE_COLUMNS = 2, ENTRY_COLUMNS = 4 };

/* Okabe and Ito's colours, which colour-blind people can tell apart; dark ones first. */
const char *chart_colour(int number)
{
    static const char *const colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                          "#e69f00", "#56b4e9", "#7f3fbf", "#8c6d31"};
    return number < 0 ? "#333333" : colours[number % 8];
}

int chart_shape(int number)
{
    static const int shapes[] = {7, 5, 9, 13, 11, 15, 6, 4, 8, 12, 10, 14, 1, 2, 3};
    return shapes[number % 15];
}

void chart_text(FILE *script, const char *text)
{
    fputc('\'', script);
    for (; *text; text++) {
        if (*text == '\'') fputc('\'', script);
        fputc((unsigned char)*text < 0x20 ? ' ' : *text, script);
    }
    fputc('\'', script);
}

/* "float32, 4/1 heads x 64"; false: rows of several shapes are drawn. */
static bool one_shape(const struct results *results)
{
    const struct result *first = NULL;
    for (int r = 0; r < results->row_count; r++) {
        const struct result *row = &results->rows[r];
        if (!result_is_good(row)) continue;
        if (!first) first = row;
        if (strcmp(row->dtype, first->dtype) != 0 || row->q_heads != first->q_heads ||
            row->kv_heads != first->kv_heads || row->dim != first->dim)
            return false;
    }
    return first != NULL;
}

/* `what`, and the row's shape behind it. */
static void with_shape(const struct result *row, char *text, size_t bytes, const char *what)
{
    snprintf(text, bytes, "%s, %s, %" PRId64 "/%" PRId64 " heads of %" PRId64, what, row->dtype, row->q_heads,
             row->kv_heads, row->dim);
}

/* The title has the shape when all rows share it, else each panel has its own. */
static void shape_text(const struct canvas *canvas, char *text, size_t bytes, const char *title)
{
    const struct results *results = canvas->results;
    int r = 0;
    while (r < results->row_count && !result_is_good(&results->rows[r]))
        r++;
    if (one_shape(results))
        with_shape(&results->rows[r], text, bytes, title);
    else
        snprintf(text, bytes, "%s", title);
}

static void put_legend(struct canvas *canvas, int row, int column, int columns, const char *text, int colour,
                       int shape)
{
    double x = (70 + (canvas->width - 100) * column / columns) / (double)canvas->width;
    double y = (canvas->legend_rows - row) * LEGEND_ROW / (double)canvas->height;
    fprintf(canvas->script, "set label %d ", ++canvas->labels);
    chart_text(canvas->script, text);
    fprintf(canvas->script, " at screen %.4f,%.4f left point pt %d ps point lc rgb '%s' offset 1.2,0\n", x, y,
            shape, chart_colour(colour));
}

void canvas_begin(struct canvas *canvas, const char *terminal, const char *output, const char *title,
                  int panels, int entries)
{
    FILE *script = canvas->script;
    bool is_svg = strcmp(terminal, "svg") == 0;
    const struct results *results = canvas->results;
    char text[256];
    canvas->labels = 0;
    canvas->columns = panels > 6 ? 4 : panels > 4 || panels == 3 ? 3 : panels > 1 ? 2 : 1;
    canvas->rows = (panels + canvas->columns - 1) / canvas->columns;
    canvas->source_rows = (results->source_count + SOURCE_COLUMNS - 1) / SOURCE_COLUMNS;
    canvas->legend_rows = canvas->source_rows + (entries + ENTRY_COLUMNS - 1) / ENTRY_COLUMNS;
    canvas->width = canvas->columns * PANEL_WIDTH > WIDTH_MIN ? canvas->columns * PANEL_WIDTH : WIDTH_MIN;
    int panel_height = panels == 1 ? SINGLE_HEIGHT : PANEL_HEIGHT;
    canvas->height = TITLE + canvas->rows * panel_height + (canvas->legend_rows + 1) * LEGEND_ROW;
    /* The same picture: a PNG has one and a half pixels for each. */
    if (is_svg)
        fprintf(script,
                "reset\nset terminal svg noenhanced dynamic size %d,%d font 'DejaVu Sans,Helvetica,13' "
                "background 'white'\n",
                canvas->width, canvas->height);
    else
        fprintf(script,
                "reset\nset terminal pngcairo noenhanced size %d,%d font 'DejaVu Sans,11' fontscale 1.5 "
                "linewidth 1.5 pointscale 1.5 background 'white'\n",
                canvas->width * 3 / 2, canvas->height * 3 / 2);
    /* SVG's letters are in pixels and its points larger. */
    canvas->panel_letters = is_svg ? 15 : 13;
    fprintf(script, "point = %s\nset encoding utf8\nset output ", is_svg ? "0.7" : "1");
    chart_text(script, output);
    fputs("\nset multiplot title ", script);
    shape_text(canvas, text, sizeof text, title);
    chart_text(script, text);
    fprintf(script, " font ',%d' offset 0,-0.2\n", is_svg ? 18 : 16);
    fputs("set border 3 lc rgb '#666666'\nset tics nomirror out textcolor rgb '#333333'\n"
          "set grid xtics ytics lc rgb '#dddddd' lt 1 lw 0.8\nunset key\nset datafile missing 'nan'\n",
          script);
    for (int s = 0; s < results->source_count; s++)
        put_legend(canvas, s / SOURCE_COLUMNS, s % SOURCE_COLUMNS, SOURCE_COLUMNS, results->sources[s].label, s,
                   7);
}

void canvas_legend(struct canvas *canvas, int entry, const char *text, int colour, int shape)
{
    put_legend(canvas, canvas->source_rows + entry / ENTRY_COLUMNS, entry % ENTRY_COLUMNS, ENTRY_COLUMNS, text,
               colour, shape);
}

/* The legend belongs to the first panel. */
void canvas_panel(struct canvas *canvas, int number, const struct chart_panel *panel, const char *y_label)
{
    FILE *script = canvas->script;
    double width = canvas->width, height = canvas->height, legend = (canvas->legend_rows + 1) * LEGEND_ROW;
    double cell_x = width / canvas->columns, cell_y = (height - TITLE - legend) / canvas->rows;
    double left = cell_x * (number % canvas->columns),
           top = height - TITLE - cell_y * (number / canvas->columns);
    char title[160] = "";
    if (panel && one_shape(canvas->results))
        snprintf(title, sizeof title, "%s", panel->first->name);
    else if (panel)
        with_shape(panel->first, title, sizeof title, panel->first->name);
    if (number > 0) fputs("unset label\n", script);
    fprintf(script, "set lmargin at screen %.4f\nset rmargin at screen %.4f\n", (left + 80) / width,
            (left + cell_x - 20) / width);
    fprintf(script, "set tmargin at screen %.4f\nset bmargin at screen %.4f\nset title ",
            (top - (panel ? 34 : 12)) / height, (top - cell_y + 58) / height);
    chart_text(script, title);
    fprintf(script, " font ',%d' offset 0,-0.5\nset ylabel ",
            canvas->panel_letters - (strlen(title) > 40 ? 2 : 0));
    chart_text(script, y_label);
    fputs(" offset 0.5,0\n", script);
}

void canvas_end(struct canvas *canvas)
{
    fputs("unset multiplot\nunset output\n", canvas->script);
}

/* ---- panels ---- */

bool chart_in_panel(const struct chart_panel *panel, const struct result *row)
{
    const struct result *first = panel->first;
    return result_is_good(row) && strcmp(row->suite, first->suite) == 0 &&
           strcmp(row->name, first->name) == 0 && strcmp(row->dtype, first->dtype) == 0 &&
           row->q_heads == first->q_heads && row->kv_heads == first->kv_heads && row->dim == first->dim;
}

int chart_panels(const struct results *results, bool (*wanted)(const struct result *row),
                 struct chart_panel panels[PANELS_MAX])
{
    int count = 0;
    for (int r = 0; r < results->row_count; r++) {
        const struct result *row = &results->rows[r];
        bool known = !result_is_good(row) || !wanted(row);
        for (int p = 0; p < count && !known; p++)
            known = chart_in_panel(&panels[p], row);
        if (!known && count < PANELS_MAX) panels[count++].first = row;
    }
    return count;
}

static void put_length(FILE *script, int64_t length)
{
    if (length >= 1 << 20 && length % (1 << 20) == 0)
        fprintf(script, "'%" PRId64 "M' %" PRId64, length >> 20, length);
    else if (length >= 1024 && length % 1024 == 0)
        fprintf(script, "'%" PRId64 "K' %" PRId64, length >> 10, length);
    else
        fprintf(script, "'%" PRId64 "' %" PRId64, length, length);
}

void chart_lengths(const struct canvas *canvas, const struct chart_panel *panel)
{
    const struct results *results = canvas->results;
    int64_t seen[64], least = 0, most = 0;
    int count = 0;
    fputs("set logscale x 2\nset xlabel 'keys' offset 0,0.4\nset xtics (", canvas->script);
    for (int r = 0; r < results->row_count; r++) {
        int64_t length = results->rows[r].kv_len;
        bool known = !chart_in_panel(panel, &results->rows[r]) || count == 64;
        for (int n = 0; n < count && !known; n++)
            known = seen[n] == length;
        if (known) continue;
        if (count) fputs(", ", canvas->script);
        put_length(canvas->script, length);
        if (count == 0 || length < least) least = length;
        if (length > most) most = length;
        seen[count++] = length;
    }
    fprintf(canvas->script, ")\nset xrange [%g:%g]\n", (double)least / 1.3, (double)most * 1.3);
}

/* ---- gnuplot ---- */

static int write_script(FILE *script, const struct results *results, const char *prefix, bool svg, bool png)
{
    static const char *const terminals[] = {"svg", "pngcairo"}, *const endings[] = {"svg", "png"};
    const bool wanted[] = {svg, png};
    char name[4096];
    int drawn = 0;
    for (int c = 0; c < CHARTS; c++)
        for (int t = 0; t < 2; t++) {
            if (!wanted[t]) continue;
            snprintf(name, sizeof name, "%s-%s.%s", prefix, chart_words[c], endings[t]);
            if (chart_write(script, results, (enum chart)c, terminals[t], name)) drawn++;
        }
    return drawn;
}

/* gnuplot without the user's settings, reading `script`. */
static int run_gnuplot(FILE *script)
{
    char program[] = "gnuplot", defaults[] = "-d", from[] = "-";
    char *arguments[] = {program, defaults, from, NULL};
    posix_spawn_file_actions_t actions;
    pid_t child = 0;
    int status = 0;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fileno(script), STDIN_FILENO);
    int error = posix_spawnp(&child, program, &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error == 0 && waitpid(child, &status, 0) != child) error = errno;
    bool is_absent = error == ENOENT || (error == 0 && WIFEXITED(status) && WEXITSTATUS(status) == 127);
    if (is_absent)
        program_error("--charts: gnuplot is not installed: package gnuplot-nox (Debian, Ubuntu) or gnuplot");
    else if (error)
        program_error("gnuplot: %s", strerror(error));
    else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        program_error("gnuplot failed; --script FILE keeps what it was told");
    else
        return STATUS_OK;
    return STATUS_FAILED;
}

static int save_script(FILE *script, const char *name)
{
    char part[4096];
    size_t bytes;
    FILE *file = fopen(name, "w");
    rewind(script);
    while (file && (bytes = fread(part, 1, sizeof part, script)) > 0)
        fwrite(part, 1, bytes, file);
    bool failed = !file || ferror(file);
    if (file && fclose(file) != 0) failed = true;
    if (failed) program_error("%s: %s", name, strerror(errno));
    return failed ? STATUS_FAILED : STATUS_OK;
}

/* gnuplot warns of files that it cannot write, and succeeds. */
static int check_files(const struct results *results, const char *prefix, bool svg, bool png)
{
    char name[4096];
    FILE *nowhere = fopen("/dev/null", "w");
    int status = STATUS_OK;
    for (int c = 0; c < CHARTS && nowhere; c++)
        for (int t = 0; t < 2; t++) {
            if (!(t ? png : svg)) continue;
            snprintf(name, sizeof name, "%s-%s.%s", prefix, chart_words[c], t ? "png" : "svg");
            if (!chart_write(nowhere, results, (enum chart)c, "svg", name) || access(name, R_OK) == 0) continue;
            program_error("%s: was not written", name);
            status = STATUS_FAILED;
        }
    if (nowhere) fclose(nowhere);
    return status;
}

int charts_draw(const struct results *results, const char *prefix, bool svg, bool png, const char *script_name)
{
    FILE *script = tmpfile();
    if (!script) {
        program_error("a temporary file: %s", strerror(errno));
        return STATUS_FAILED;
    }
    int status = STATUS_OK, drawn = write_script(script, results, prefix, svg, png);
    if (drawn == 0) {
        program_error("--charts: no row of the files is good, there is nothing to draw");
        status = STATUS_FAILED;
    }
    if (status == STATUS_OK && (fflush(script) != 0 || ferror(script))) {
        program_error("a temporary file: %s", strerror(errno));
        status = STATUS_FAILED;
    }
    if (status == STATUS_OK && script_name) status = save_script(script, script_name);
    if (status == STATUS_OK) {
        rewind(script);
        lseek(fileno(script), 0, SEEK_SET);
        status = run_gnuplot(script);
    }
    if (status == STATUS_OK) status = check_files(results, prefix, svg, png);
    fclose(script);
    return status;
}
