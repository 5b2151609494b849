/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "bench.h"

#include "device.h"
#include "layout.h"
#include "program.h"
#include "table.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

const char *const bench_state_words[] = {"good", "wrong", "failed", "skipped"};

static const char *dtype_word(clattn_dtype dtype)
{
    return dtype == CLATTN_FLOAT32 ? "float32" : dtype == CLATTN_FLOAT16 ? "float16" : "bfloat16";
}

static const char *operation_words[] = {"pyramid", "select", "forward", "backward", "neighborhood", "decode"};
static const char *selector_words[] = {"pisa", "pisa1", "pisa2", "flat-mean", "flat-lse", "dense", "robust"};

/* What a row says about itself: numbers that were not measured are NAN. */
struct value {
    const char *name;
    enum { VALUE_TEXT, VALUE_INTEGER, VALUE_REAL } kind;
    const char *text;
    int64_t integer;
    double real;
};
enum { VALUES_MAX = 64 };

static int text(struct value *value, const char *name, const char *content)
{
    *value = (struct value){.name = name, .kind = VALUE_TEXT, .text = content};
    return 1;
}

static int integer(struct value *value, const char *name, int64_t content)
{
    *value = (struct value){.name = name, .kind = VALUE_INTEGER, .integer = content};
    return 1;
}

static int real(struct value *value, const char *name, double content)
{
    *value = (struct value){.name = name, .kind = VALUE_REAL, .real = content};
    return 1;
}

static const char *selector_text(const struct bench_case *s)
{
    if (s->operation == BENCH_NEIGHBORHOOD || s->operation == BENCH_PYRAMID) return NULL;
    return s->pattern ? s->pattern : selector_words[s->selector];
}

static const char *const tuning_words[] = {"built in", "shipped", "system", "user", "environment", "caller"};

static double positive(double number)
{
    return number > 0 ? number : NAN;
}

static int describe_device(const struct bench_row *row, struct value *v)
{
    int n = 0;
    n += text(v + n, "backend", backend_words[row->device.backend]);
    n += text(v + n, "device", row->device.name);
    n += text(v + n, "platform", row->device.platform);
    n += text(v + n, "driver", row->device.driver);
    n += text(v + n, "tier", row->device.variant);
    n += integer(v + n, "threads", row->threads);
    n += text(v + n, "tuning", tuning_words[row->tuning]);
    n += text(v + n, "library", clattn_version());
    return n;
}

static int describe_case(const struct bench_row *row, struct value *v)
{
    const struct bench_case *s = &row->shape;
    int n = 0;
    n += text(v + n, "suite", s->suite);
    n += text(v + n, "name", s->name);
    n += text(v + n, "operation", operation_words[s->operation]);
    n += text(v + n, "dtype", dtype_word(s->dtype));
    n += text(v + n, "selector", selector_text(s));
    n += integer(v + n, "causal", s->causal);
    n += integer(v + n, "q_len", s->q_len);
    n += integer(v + n, "kv_len", s->kv_len);
    n += integer(v + n, "q_heads", s->q_heads);
    n += integer(v + n, "kv_heads", s->kv_heads);
    n += integer(v + n, "dim", s->dim);
    n += integer(v + n, "topk", s->topk);
    n += integer(v + n, "leaf", s->leaf);
    return n;
}

static int describe_result(const struct bench_row *row, struct value *v)
{
    const struct bench_timing *timing = &row->timing;
    const struct bench_work *work = &row->work;
    bool has_verdict = row->state == BENCH_GOOD || row->state == BENCH_WRONG;
    bool has_time = row->state == BENCH_GOOD;
    int n = 0;
    n += text(v + n, "state", bench_state_words[row->state]);
    n += text(v + n, "message", row->message);
    n += integer(v + n, "rows_verified", row->verdict.rows);
    n += integer(v + n, "lists_wrong", row->verdict.lists_wrong);
    n += real(v + n, "error", has_verdict ? row->verdict.error : NAN);
    n += real(v + n, "error_over_tolerance", has_verdict ? row->verdict.tolerated : NAN);
    n += text(v + n, "clock", has_time ? bench_clock_words[timing->clock] : NULL);
    n += real(v + n, "median_seconds", positive(timing->median));
    n += real(v + n, "p5_seconds", positive(timing->p5));
    n += real(v + n, "p95_seconds", positive(timing->p95));
    n += real(v + n, "wall_median_seconds", positive(timing->wall));
    n += integer(v + n, "samples", timing->samples);
    n += real(v + n, "transfer_seconds", row->transfer);
    n += real(v + n, "compile_seconds", row->compile);
    n += real(v + n, "first_seconds", has_time ? row->first : NAN);
    n += real(v + n, "wall_seconds", row->wall);
    n += real(v + n, "flops", positive(work->flops));
    n += real(v + n, "bytes", positive(work->bytes));
    n += real(v + n, "flops_per_second", has_time ? positive(work->flops / timing->median) : NAN);
    n += real(v + n, "ceiling_flops_per_second", positive(row->fma_rate));
    n += real(v + n, "ceiling_bytes_per_second", positive(row->copy_rate));
    n += real(v + n, "roofline_share", bench_row_roofline(row));
    n += real(v + n, "density", work->dense_flops > 0 ? work->flops / work->dense_flops : NAN);
    n += real(v + n, "dense_flops_per_second", positive(row->dense_rate));
    n += real(v + n, "speedup_over_dense", bench_row_speedup(row));
    n += real(v + n, "tile_bound_speedup", positive(work->bound));
    n += real(v + n, "ideal_speedup", positive(work->ideal));
    n += real(v + n, "recall", quality_recall(&row->quality));
    n += real(v + n, "mass", quality_mass(&row->quality));
    n += real(v + n, "mass_share", quality_share(&row->quality));
    n += integer(v + n, "answers", row->quality.answers);
    n += integer(v + n, "answers_found", row->quality.found);
    return n;
}

static int describe(const struct bench_row *row, struct value values[VALUES_MAX])
{
    int n = describe_case(row, values);
    n += describe_result(row, values + n);
    return n + describe_device(row, values + n);
}

/* ---- JSON ---- */

int bench_print_json(const struct bench_row *rows, int count, const struct bench_device *devices,
                     int device_count, bool is_complete)
{
    struct value values[VALUES_MAX];
    report *root = report_object();
    report_text(root, "schema", "clattn-bench");
    report_integer(root, "schema_version", BENCH_SCHEMA_VERSION);
    report_text(root, "version", clattn_version());
    report_flag(root, "complete", is_complete);
    report *list = report_list(root, "devices");
    for (int d = 0; d < device_count; d++) {
        report *entry = report_entry(list);
        device_report(entry, &devices[d].info);
        report_real(entry, "ceiling_flops_per_second", positive(devices[d].fma_rate));
        report_real(entry, "ceiling_bytes_per_second", positive(devices[d].copy_rate));
        report_real(entry, "ceiling_matrix_flops_per_second", positive(devices[d].matrix_rate));
    }
    list = report_list(root, "rows");
    for (int r = 0; r < count; r++) {
        report *entry = report_entry(list);
        int n = describe(&rows[r], values);
        for (int i = 0; i < n; i++)
            if (values[i].kind == VALUE_TEXT)
                report_text(entry, values[i].name, values[i].text && *values[i].text ? values[i].text : NULL);
            else if (values[i].kind == VALUE_INTEGER)
                report_integer(entry, values[i].name, values[i].integer);
            else
                report_real(entry, values[i].name, values[i].real);
    }
    int status = report_print(root);
    report_release(root);
    return status;
}

/* ---- CSV ---- */

/* RFC 4180: quotes around everything that is text, doubled inside. */
static void put_quoted(const char *content)
{
    putchar('"');
    for (; content && *content; content++) {
        if (*content == '"') putchar('"');
        putchar(*content);
    }
    putchar('"');
}

void bench_print_csv(const struct bench_row *rows, int count)
{
    struct value values[VALUES_MAX];
    struct bench_row none = {.shape.suite = ""};
    int n = describe(count > 0 ? &rows[0] : &none, values);
    printf("schema_version");
    for (int i = 0; i < n; i++)
        printf(",%s", values[i].name);
    putchar('\n');
    for (int r = 0; r < count; r++) {
        printf("%d", BENCH_SCHEMA_VERSION);
        describe(&rows[r], values);
        for (int i = 0; i < n; i++) {
            putchar(',');
            if (values[i].kind == VALUE_TEXT)
                put_quoted(values[i].text);
            else if (values[i].kind == VALUE_INTEGER)
                printf("%" PRId64, values[i].integer);
            else if (isfinite(values[i].real))
                printf("%.9g", values[i].real);
        }
        putchar('\n');
    }
}

/* ---- table ---- */

static void add_time(struct table *table, double seconds)
{
    if (!(seconds > 0))
        table_add(table, "-");
    else if (seconds < 1e-3)
        table_add(table, "%.1f us", seconds * 1e6);
    else if (seconds < 1)
        table_add(table, "%.2f ms", seconds * 1e3);
    else
        table_add(table, "%.2f s", seconds);
}

static void add_number(struct table *table, const char *format, double number)
{
    char cell[32];
    snprintf(cell, sizeof cell, format, number);
    table_add(table, "%s", isfinite(number) ? cell : "-");
}

static void add_row(struct table *table, const struct bench_row *row)
{
    const struct bench_timing *timing = &row->timing;
    const struct bench_work *work = &row->work;
    bool good = row->state == BENCH_GOOD;
    table_add(table, "%s", row->shape.name);
    table_add(table, "%" PRId64, row->shape.kv_len);
    add_time(table, timing->median);
    add_time(table, timing->p5);
    add_time(table, timing->p95);
    table_add(table, "%d", timing->samples);
    add_number(table, "%.1f", good ? positive(work->flops / timing->median * 1e-9) : NAN);
    add_number(table, "%.0f %%", 100 * bench_row_roofline(row));
    add_number(table, "%.3f", work->dense_flops > 0 ? work->flops / work->dense_flops : NAN);
    add_number(table, "%.2f", bench_row_speedup(row));
    add_number(table, "%.2f", positive(work->bound));
    table_add(table, "%s%s%s",
              good ? (timing->clock == BENCH_DEVICE      ? "device clock"
                      : timing->clock == BENCH_PROCESSOR ? "processor time"
                                                         : "good")
                   : bench_state_words[row->state],
              *row->message ? ": " : "", row->message);
}

/* What selectors keep of exact attention on the queries and keys of files. */
static void print_quality(const struct bench_row *rows, int count)
{
    static const char *const heads[] = {"selector", "keys",    "recall",  "mass",
                                        "of best",  "answers", "a query", "state"};
    struct table table;
    table_begin(&table, "lrrrrrrl");
    for (int c = 0; c < 8; c++)
        table_add(&table, "%s", heads[c]);
    for (int r = 0; r < count; r++) {
        const struct bench_row *row = &rows[r];
        const struct quality *quality = &row->quality;
        if (!row->shape.files) continue;
        table_add(&table, "%s", selector_text(&row->shape));
        table_add(&table, "%" PRId64, row->shape.kv_len);
        add_number(&table, "%.3f", quality_recall(quality));
        add_number(&table, "%.3f", quality_mass(quality));
        add_number(&table, "%.3f", quality_share(quality));
        if (quality->answers > 0)
            table_add(&table, "%" PRId64 " of %" PRId64, quality->found, quality->answers);
        else
            table_add(&table, "-");
        add_time(&table, row->timing.median / (double)row->shape.q_len);
        table_add(&table, "%s%s%s", bench_state_words[row->state], *row->message ? ": " : "", row->message);
    }
    table_end(&table);
}

static void print_times(const struct bench_row *rows, int count)
{
    static const char *const heads[] = {"case",    "keys",     "median",  "p5",      "p95",   "n",
                                        "GFLOP/s", "roofline", "density", "x dense", "bound", "state"};
    struct table table;
    table_begin(&table, "lrrrrrrrrrrl");
    for (int c = 0; c < 12; c++)
        table_add(&table, "%s", heads[c]);
    for (int r = 0; r < count; r++)
        if (!rows[r].shape.files) add_row(&table, &rows[r]);
    table_end(&table);
}

void bench_print_table(const struct bench_row *rows, int count)
{
    for (int begin = 0, end; begin < count; begin = end) {
        const struct bench_row *first = &rows[begin];
        int of_files = 0;
        printf("%s%s: %s (%s)", begin ? "\n" : "", backend_words[first->device.backend], first->device.name,
               first->device.variant);
        if (first->fma_rate > 0)
            printf(", at most %.1f GFLOP/s and %.1f GB/s", first->fma_rate * 1e-9, first->copy_rate * 1e-9);
        putchar('\n');
        for (end = begin; end < count && rows[end].device.backend == first->device.backend &&
                          rows[end].device.index == first->device.index;
             end++)
            of_files += rows[end].shape.files != NULL;
        if (of_files < end - begin) print_times(first, end - begin);
        if (of_files > 0) print_quality(first, end - begin);
    }
}
