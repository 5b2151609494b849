/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "results.h"

#include "program.h"
#include "report.h"
#include "table.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const change_words[] = {"same", "faster", "slower", "broken"};

static const char *time_text(double seconds, char text[24])
{
    if (!(seconds > 0))
        snprintf(text, 24, "-");
    else if (seconds < 1e-3)
        snprintf(text, 24, "%.1f us", seconds * 1e6);
    else if (seconds < 1)
        snprintf(text, 24, "%.2f ms", seconds * 1e3);
    else
        snprintf(text, 24, "%.2f s", seconds);
    return text;
}

/* The first row of its case? */
static bool is_first(const struct results *results, int row)
{
    for (int r = 0; r < row; r++)
        if (result_same_case(&results->rows[r], &results->rows[row])) return false;
    return true;
}

/* ---- table ---- */

enum { LETTER_BYTES = 16 };
static void letter_of(int source, char text[LETTER_BYTES])
{
    snprintf(text, LETTER_BYTES, source < 26 ? "%c" : "%c%d", 'A' + source % 26, source / 26);
}

/* Time, and how many times faster than the first source that has one. */
static void add_cell(struct table *table, const struct results *results, const struct result *row, int source)
{
    char text[24];
    const struct result *found = results_find(results, source, row), *first = NULL;
    for (int s = 0; s < source && !first; s++) {
        const struct result *other = results_find(results, s, row);
        if (other && result_is_good(other)) first = other;
    }
    if (!found)
        table_add(table, "-");
    else if (!result_is_good(found))
        table_add(table, "%s", found->state);
    else if (first)
        table_add(table, "%s  %.*fx", time_text(found->median, text),
                  first->median > 0.1 * found->median ? 2 : 4, first->median / found->median);
    else
        table_add(table, "%s", time_text(found->median, text));
}

/* A table has room for so many sources; more of them take several. */
enum { SOURCES_AT_ONCE = TABLE_MAX_COLUMNS - 3 };

static void print_part(const struct results *results, int begin, int end)
{
    struct table table;
    char letter[LETTER_BYTES];
    char align[TABLE_MAX_COLUMNS + 1] = "lrl";
    for (int s = begin; s < end; s++)
        strcat(align, "r");
    table_begin(&table, align);
    table_add(&table, "case");
    table_add(&table, "keys");
    table_add(&table, "shape");
    for (int s = begin; s < end; s++) {
        letter_of(s, letter);
        table_add(&table, "%s", letter);
    }
    for (int r = 0; r < results->row_count; r++) {
        const struct result *row = &results->rows[r];
        if (!is_first(results, r)) continue;
        table_add(&table, "%s%s", row->name, strcmp(row->suite, "selection-scaling") ? "" : " selection");
        table_add(&table, "%" PRId64, row->kv_len);
        table_add(&table, "%s %" PRId64 "/%" PRId64 " x %" PRId64, row->dtype, row->q_heads, row->kv_heads,
                  row->dim);
        for (int s = begin; s < end; s++)
            add_cell(&table, results, row, s);
    }
    table_end(&table);
}

void results_print_table(const struct results *results)
{
    char letter[LETTER_BYTES];
    for (int s = 0; s < results->source_count; s++) {
        const struct result_source *source = &results->sources[s];
        letter_of(s, letter);
        printf("%s  %s, clattn %s%s%s; %s\n", letter, source->label, source->first->library,
               *source->first->driver ? ", driver " : "", source->first->driver, results->files[source->file]);
    }
    for (int s = 0; s < results->source_count; s += SOURCES_AT_ONCE) {
        int end = s + SOURCES_AT_ONCE;
        putchar('\n');
        print_part(results, s, end < results->source_count ? end : results->source_count);
    }
    for (int s = 0; s < results->source_count; s++) {
        double cross = results_crossover(results, s);
        letter_of(s, letter);
        if (cross == cross)
            printf("\n%s: selection by the pyramid is faster than flat %s", letter,
                   cross > 0 ? "from about " : "everywhere");
        if (cross > 0) printf("%.0f keys on", cross);
        if (cross == cross) putchar('\n');
    }
}

/* ---- regressions ---- */

static void print_change(const struct results *results, const struct result *before, const struct result *now,
                         enum result_change change)
{
    char old[24], new[24];
    printf("  %-7s %s, %" PRId64 " keys, %s: %s", change_words[change], now->name, now->kv_len,
           results->sources[now->source].label, time_text(before->median, old));
    if (change == RESULT_BROKEN)
        printf(" -> %s%s%s\n", now->state, *now->message ? ": " : "", now->message);
    else
        printf(" -> %s, %+.0f %%\n", time_text(now->median, new), 100 * (now->median / before->median - 1));
}

void results_print_changes(const struct results *results, const struct results *baseline, double noise)
{
    struct result_changes changes = results_changes(results, baseline, noise);
    printf("\nagainst %s, noise %g %%: %d slower, %d broken, %d faster, %d as before, %d not in it\n",
           baseline->files[0], 100 * noise, changes.count[RESULT_SLOWER], changes.count[RESULT_BROKEN],
           changes.count[RESULT_FASTER], changes.count[RESULT_SAME], changes.missing);
    for (int r = 0; r < results->row_count; r++) {
        const struct result *row = &results->rows[r], *before = results_baseline(baseline, row);
        enum result_change change = before ? result_compare(before, row, noise) : RESULT_SAME;
        if (change != RESULT_SAME) print_change(results, before, row, change);
    }
}

/* ---- JSON ---- */

static void report_sources(report *root, const struct results *results)
{
    report *list = report_list(root, "sources");
    for (int s = 0; s < results->source_count; s++) {
        const struct result_source *source = &results->sources[s];
        report *entry = report_entry(list);
        double cross = results_crossover(results, s);
        report_text(entry, "label", source->label);
        report_text(entry, "file", results->files[source->file]);
        report_text(entry, "backend", source->first->backend);
        report_text(entry, "device", source->first->device);
        report_text(entry, "platform", source->first->platform);
        report_text(entry, "driver", source->first->driver);
        report_text(entry, "tier", source->first->tier);
        report_text(entry, "library", source->first->library);
        report_real(entry, "pyramid_faster_from_keys", cross);
    }
}

static void report_times(report *entry, const struct results *results, const struct result *row)
{
    report *list = report_list(entry, "times");
    for (int s = 0; s < results->source_count; s++) {
        const struct result *found = results_find(results, s, row);
        if (!found) continue;
        report *time = report_entry(list);
        report_integer(time, "source", s);
        report_text(time, "state", found->state);
        report_real(time, "median_seconds", found->median);
        report_real(time, "roofline_share", found->roofline);
        report_real(time, "speedup_over_dense", found->speedup);
    }
}

static void report_changes(report *root, const struct results *results, const struct results *baseline,
                           double noise)
{
    report *list = report_list(root, "changes");
    for (int r = 0; r < results->row_count; r++) {
        const struct result *row = &results->rows[r], *before = results_baseline(baseline, row);
        if (!before) continue;
        report *entry = report_entry(list);
        report_text(entry, "name", row->name);
        report_integer(entry, "kv_len", row->kv_len);
        report_integer(entry, "source", row->source);
        report_text(entry, "change", change_words[result_compare(before, row, noise)]);
        report_real(entry, "before_seconds", before->median);
        report_real(entry, "now_seconds", row->median);
    }
}

int results_print_json(const struct results *results, const struct results *baseline, double noise)
{
    report *root = report_object();
    report_text(root, "schema", "clattn-compare");
    report_integer(root, "schema_version", 1);
    report_sources(root, results);
    report *list = report_list(root, "cases");
    for (int r = 0; r < results->row_count; r++) {
        const struct result *row = &results->rows[r];
        if (!is_first(results, r)) continue;
        report *entry = report_entry(list);
        report_text(entry, "suite", row->suite);
        report_text(entry, "name", row->name);
        report_text(entry, "dtype", row->dtype);
        report_integer(entry, "q_len", row->q_len);
        report_integer(entry, "kv_len", row->kv_len);
        report_integer(entry, "q_heads", row->q_heads);
        report_integer(entry, "kv_heads", row->kv_heads);
        report_integer(entry, "dim", row->dim);
        report_times(entry, results, row);
    }
    if (baseline) {
        report_text(root, "baseline", baseline->files[0]);
        report_real(root, "noise", noise);
        report_changes(root, results, baseline, noise);
    }
    int status = report_print(root);
    report_release(root);
    return status;
}
