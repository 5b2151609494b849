/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "results.h"

#include "options.h"
#include "program.h"
#include "report.h"

#include <math.h>
#include <string.h>

enum { FORMAT_BOTH, FORMAT_SVG, FORMAT_PNG };

static const struct command_help help = {"compare [OPTION...] FILE...",
                                         "Compares results of 'clattn bench --json' across devices, vendors "
                                         "and versions: a table, charts, and what\n"
                                         "became slower than in a baseline.",
                                         "Charts are PREFIX-throughput, PREFIX-roofline, PREFIX-speedup and "
                                         "PREFIX-crossover, each as .svg and .png; those\n"
                                         "that the files have no numbers for are left out. They are drawn by "
                                         "gnuplot (package gnuplot-nox, or gnuplot).\n"
                                         "\n"
                                         "Exit status: 0 done, 1 failed, 2 wrong usage, 3 something is slower "
                                         "than the baseline, or no longer right.\n"
                                         "\n"
                                         "Example:\n"
                                         "  clattn compare laptop.json server.json --charts speed\n"
                                         "  clattn compare new.json --baseline old.json --noise 5"};

/* ---- rows ---- */

bool result_same_case(const struct result *a, const struct result *b)
{
    return strcmp(a->suite, b->suite) == 0 && strcmp(a->name, b->name) == 0 &&
           strcmp(a->dtype, b->dtype) == 0 && strcmp(a->selector, b->selector) == 0 && a->causal == b->causal &&
           a->q_len == b->q_len && a->kv_len == b->kv_len && a->q_heads == b->q_heads &&
           a->kv_heads == b->kv_heads && a->dim == b->dim && a->topk == b->topk && a->leaf == b->leaf;
}

bool result_is_good(const struct result *row)
{
    return strcmp(row->state, "good") == 0 && row->median > 0;
}

const struct result *results_find(const struct results *results, int source, const struct result *wanted)
{
    const struct result *found = NULL;
    for (int r = 0; r < results->row_count; r++)
        if (results->rows[r].source == source && result_same_case(&results->rows[r], wanted) &&
            (!found || (!result_is_good(found) && result_is_good(&results->rows[r]))))
            found = &results->rows[r];
    return found;
}

const struct result *results_baseline(const struct results *baseline, const struct result *now)
{
    for (int r = 0; r < baseline->row_count; r++) {
        const struct result *row = &baseline->rows[r];
        if (strcmp(row->backend, now->backend) == 0 && strcmp(row->device, now->device) == 0 &&
            strcmp(row->platform, now->platform) == 0 && row->threads == now->threads &&
            result_same_case(row, now))
            return row;
    }
    return NULL;
}

enum result_change result_compare(const struct result *before, const struct result *now, double noise)
{
    if (!result_is_good(before)) return RESULT_SAME;
    if (strcmp(now->state, "wrong") == 0 || strcmp(now->state, "failed") == 0) return RESULT_BROKEN;
    if (!result_is_good(now)) return RESULT_SAME;
    double median = now->median / before->median, least = now->p5 / before->p5;
    if (median > 1 + noise && least > 1 + noise) return RESULT_SLOWER;
    if (median < 1 / (1 + noise) && least < 1 / (1 + noise)) return RESULT_FASTER;
    return RESULT_SAME;
}

/* ---- where selections cross ---- */

/* The flat partner of a row of the pyramid, on the same source. */
static const struct result *flat_of(const struct results *results, const struct result *pyramid)
{
    for (int r = 0; r < results->row_count; r++) {
        const struct result *row = &results->rows[r];
        if (row->source == pyramid->source && strcmp(row->suite, pyramid->suite) == 0 &&
            strcmp(row->name, "flat") == 0 && row->kv_len == pyramid->kv_len && row->dim == pyramid->dim &&
            strcmp(row->dtype, pyramid->dtype) == 0 && result_is_good(row))
            return row;
    }
    return NULL;
}

double results_crossover(const struct results *results, int source)
{
    double cross = NAN, last_len = 0, last = 0;
    for (int r = 0; r < results->row_count; r++) {
        const struct result *row = &results->rows[r];
        if (row->source != source || strcmp(row->suite, "selection-scaling") != 0 ||
            strcmp(row->name, "pyramid") != 0 || !result_is_good(row))
            continue;
        const struct result *flat = flat_of(results, row);
        if (!flat) continue;
        /* Rows ascend. Above 0 the pyramid is faster. */
        double gain = log(flat->median / row->median), len = log((double)row->kv_len);
        if (gain > 0 && last_len == 0) cross = 0;
        if (gain > 0 && last < 0) cross = exp(last_len + (len - last_len) * last / (last - gain));
        if (gain <= 0) cross = NAN;
        last = gain;
        last_len = len;
    }
    return cross;
}

/* ---- flow ---- */

struct compare {
    const char *baseline, *charts, *script;
    double noise;
    int format;
    bool json;
    char **files;
    int file_count;
    struct results results, before;
};

static bool parse_options(struct compare *compare, int argc, char **argv, int *status)
{
    static const char *const formats[] = {"both", "svg", "png", NULL};
    const struct option_spec specs[] = {
        {"baseline", OPTION_TEXT, &compare->baseline, "FILE",
         "results that the others are held against, device by device", 0, 0, NULL},
        {"noise", OPTION_REAL, &compare->noise, "PERCENT",
         "what median and 5th percentile may both differ by (default 10)", 0, 0, NULL},
        {"charts", OPTION_TEXT, &compare->charts, "PREFIX", "draw charts, as files whose names begin so", 0, 0,
         NULL},
        {"format", OPTION_CHOICE, &compare->format, NULL, "of the charts (default both)", 0, 0, formats},
        {"script", OPTION_TEXT, &compare->script, "FILE", "keep what gnuplot was told, to change it", 0, 0,
         NULL},
        {"json", OPTION_FLAG, &compare->json, NULL, "print JSON", 0, 0, NULL},
        {0}};
    return options_parse_files(specs, &help, argc, argv, &compare->files, &compare->file_count, status);
}

static int check_options(const struct compare *compare)
{
    if (compare->file_count == 0) return program_usage("a FILE is missing; see 'clattn compare --help'");
    if (!(compare->noise >= 0)) return program_usage("--noise: a percentage of 0 or more is needed");
    if (compare->script && !compare->charts) return program_usage("--script goes with --charts");
    if (compare->json && !report_available()) return STATUS_USAGE;
    return STATUS_OK;
}

struct result_changes results_changes(const struct results *results, const struct results *baseline,
                                      double noise)
{
    struct result_changes changes = {{0}, 0};
    for (int r = 0; r < results->row_count; r++) {
        const struct result *row = &results->rows[r], *before = results_baseline(baseline, row);
        if (before)
            changes.count[result_compare(before, row, noise)]++;
        else
            changes.missing++;
    }
    return changes;
}

static int compare_all(struct compare *compare)
{
    struct results *now = &compare->results, *before = compare->baseline ? &compare->before : NULL;
    struct result_changes changes = {{0}, 0};
    double noise = compare->noise / 100;
    int status = results_open(now, compare->files, compare->file_count);
    if (status == STATUS_OK && before) status = results_open(before, (char *const *)&compare->baseline, 1);
    if (status != STATUS_OK) return status;
    if (before) changes = results_changes(now, before, noise);
    if (compare->json) {
        status = results_print_json(now, before, noise);
    } else {
        results_print_table(now);
        if (before) results_print_changes(now, before, noise);
    }
    if (status == STATUS_OK && compare->charts)
        status = charts_draw(now, compare->charts, compare->format != FORMAT_PNG, compare->format != FORMAT_SVG,
                             compare->script);
    if (status != STATUS_OK) return status;
    return changes.count[RESULT_SLOWER] + changes.count[RESULT_BROKEN] > 0 ? STATUS_REGRESSION : STATUS_OK;
}

int compare_main(int argc, char **argv)
{
    int status = STATUS_OK;
    struct compare compare = {.noise = 10};
    if (!parse_options(&compare, argc, argv, &status)) return status;
    status = check_options(&compare);
    if (status == STATUS_OK) status = compare_all(&compare);
    results_close(&compare.results);
    results_close(&compare.before);
    return status;
}
