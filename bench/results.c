/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "results.h"

#include "bench.h"
#include "program.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- one row ---- */

static const char *text_of(const json_t *row, const char *name)
{
    const char *text = json_string_value(json_object_get(row, name));
    return text ? text : "";
}

static int64_t integer_of(const json_t *row, const char *name)
{
    return json_integer_value(json_object_get(row, name));
}

static double real_of(const json_t *row, const char *name)
{
    const json_t *value = json_object_get(row, name);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static struct result read_row(const json_t *row)
{
    return (struct result){.suite = text_of(row, "suite"),
                           .name = text_of(row, "name"),
                           .operation = text_of(row, "operation"),
                           .dtype = text_of(row, "dtype"),
                           .selector = text_of(row, "selector"),
                           .state = text_of(row, "state"),
                           .message = text_of(row, "message"),
                           .backend = text_of(row, "backend"),
                           .device = text_of(row, "device"),
                           .platform = text_of(row, "platform"),
                           .driver = text_of(row, "driver"),
                           .tier = text_of(row, "tier"),
                           .tuning = text_of(row, "tuning"),
                           .library = text_of(row, "library"),
                           .threads = integer_of(row, "threads"),
                           .causal = integer_of(row, "causal"),
                           .q_len = integer_of(row, "q_len"),
                           .kv_len = integer_of(row, "kv_len"),
                           .q_heads = integer_of(row, "q_heads"),
                           .kv_heads = integer_of(row, "kv_heads"),
                           .dim = integer_of(row, "dim"),
                           .topk = integer_of(row, "topk"),
                           .leaf = integer_of(row, "leaf"),
                           .median = real_of(row, "median_seconds"),
                           .p5 = real_of(row, "p5_seconds"),
                           .p95 = real_of(row, "p95_seconds"),
                           .flops = real_of(row, "flops"),
                           .bytes = real_of(row, "bytes"),
                           .ceiling_flops = real_of(row, "ceiling_flops_per_second"),
                           .ceiling_bytes = real_of(row, "ceiling_bytes_per_second"),
                           .roofline = real_of(row, "roofline_share"),
                           .speedup = real_of(row, "speedup_over_dense")};
}

/* ---- sources ---- */

static bool same_source(const struct result *a, const struct result *b)
{
    return strcmp(a->backend, b->backend) == 0 && strcmp(a->device, b->device) == 0 &&
           strcmp(a->platform, b->platform) == 0 && strcmp(a->driver, b->driver) == 0 &&
           strcmp(a->tier, b->tier) == 0 && a->threads == b->threads && strcmp(a->library, b->library) == 0;
}

static int find_source(struct results *results, const struct result *row, int file)
{
    for (int s = 0; s < results->source_count; s++)
        if (results->sources[s].file == file && same_source(results->sources[s].first, row)) return s;
    results->sources[results->source_count] = (struct result_source){.file = file, .first = row};
    return results->source_count++;
}

/* Did both measure a case? */
static bool coincide(const struct results *results, int a, int b)
{
    for (int r = 0; r < results->row_count; r++)
        for (int n = 0; n < results->row_count && results->rows[r].source == a; n++)
            if (results->rows[n].source == b && result_same_case(&results->rows[r], &results->rows[n]) &&
                result_is_good(&results->rows[r]) && result_is_good(&results->rows[n]))
                return true;
    return false;
}

/* What was measured in pieces becomes one source: files of the same device and version that have no case in
 * common. */
static void join_sources(struct results *results)
{
    for (int a = 0; a < results->source_count; a++)
        for (int b = a + 1; b < results->source_count; b++) {
            struct result_source *sources = results->sources;
            if (!same_source(sources[a].first, sources[b].first) || coincide(results, a, b)) continue;
            for (int r = 0; r < results->row_count; r++) {
                int *source = &results->rows[r].source;
                *source = *source == b ? a : *source > b ? *source - 1 : *source;
            }
            memmove(&sources[b], &sources[b + 1], (size_t)(--results->source_count - b) * sizeof *sources);
            b--;
        }
}

/* "cpu: AMD EPYC 9654 (avx512)", "PoCL: AMD EPYC 9654": the platform stands for the backend. */
static void name_source(struct result_source *source)
{
    static const struct {
        const char *part, *name;
    } platforms[] = {{"Portable Computing Language", "PoCL"}, {"NVIDIA", ""}, {"AMD Accelerated", "AMD"}};
    const struct result *row = source->first;
    const char *where = *row->platform ? row->platform : row->backend, *device = row->device;
    for (size_t i = 0; i < sizeof platforms / sizeof *platforms; i++)
        if (strstr(where, platforms[i].part)) where = platforms[i].name;
    /* PoCL puts driver and processor family in front of the name. */
    const char *tail = strcmp(where, "PoCL") == 0 ? strrchr(device, '-') : NULL;
    if (tail && strncmp(device, "pthread-", 8) == 0 && tail[1]) device = tail + 1;
    char threads[32] = "";
    if (row->threads > 0)
        snprintf(threads, sizeof threads, ", %d thread%s", (int)row->threads, row->threads > 1 ? "s" : "");
    snprintf(source->label, sizeof source->label, "%s%s%.60s (%s%s)", where, *where ? ": " : "", device,
             row->tier, threads);
}

static int count_label(const struct results *results, const char *label)
{
    int count = 0;
    for (int s = 0; s < results->source_count; s++)
        count += strcmp(results->sources[s].label, label) == 0;
    return count;
}

/* Where labels are alike, the version tells them apart, or the file. */
static void name_sources(struct results *results)
{
    char plain[160];
    for (int s = 0; s < results->source_count; s++)
        name_source(&results->sources[s]);
    for (int s = 0; s < results->source_count; s++) {
        struct result_source *source = &results->sources[s];
        bool versions = false;
        strcpy(plain, source->label);
        if (count_label(results, plain) < 2) continue;
        for (int other = 0; other < results->source_count; other++) {
            struct result_source *twin = &results->sources[other];
            if (strcmp(twin->label, plain) == 0)
                versions = versions || strcmp(twin->first->library, source->first->library) != 0;
        }
        for (int other = 0; other < results->source_count; other++) {
            struct result_source *twin = &results->sources[other];
            const char *file = results->files[twin->file], *slash = strrchr(file, '/');
            if (strcmp(twin->label, plain) == 0)
                snprintf(twin->label, sizeof twin->label, "%.100s, %.50s", plain,
                         versions ? twin->first->library
                         : slash  ? slash + 1
                                  : file);
        }
    }
}

/* ---- files ---- */

static int read_file(struct results *results, int file)
{
    const char *name = results->files[file];
    json_error_t error;
    json_t *root = strcmp(name, "-") == 0 ? json_loadf(stdin, 0, &error) : json_load_file(name, 0, &error);
    results->roots[file] = root;
    if (!root) {
        if (error.line > 0)
            program_error("%s: line %d: %s", name, error.line, error.text);
        else
            program_error("%s", error.text);
        return STATUS_FAILED;
    }
    if (strcmp(text_of(root, "schema"), "clattn-bench") != 0) {
        program_error("%s: this is no result of 'clattn bench --json'", name);
        return STATUS_FAILED;
    }
    if (integer_of(root, "schema_version") != BENCH_SCHEMA_VERSION) {
        program_error("%s: the schema's version is %" PRId64 ", this program knows %d", name,
                      integer_of(root, "schema_version"), BENCH_SCHEMA_VERSION);
        return STATUS_FAILED;
    }
    return STATUS_OK;
}

static int out_of_memory(void)
{
    program_error("out of memory");
    return STATUS_FAILED;
}

int results_open(struct results *results, char *const *files, int count)
{
    size_t total = 0;
    *results = (struct results){.file_count = count};
    results->files = calloc((size_t)count + 1, sizeof *results->files);
    results->roots = calloc((size_t)count + 1, sizeof *results->roots);
    if (!results->files || !results->roots) return out_of_memory();
    for (int f = 0; f < count; f++) {
        results->files[f] = files[f];
        int status = read_file(results, f);
        if (status != STATUS_OK) return status;
        total += json_array_size(json_object_get(results->roots[f], "rows"));
    }
    results->rows = calloc(total + 1, sizeof *results->rows);
    results->sources = calloc(total + 1, sizeof *results->sources);
    if (!results->rows || !results->sources) return out_of_memory();
    for (int f = 0; f < count; f++) {
        const json_t *rows = json_object_get(results->roots[f], "rows");
        for (size_t n = 0; n < json_array_size(rows); n++) {
            struct result *row = &results->rows[results->row_count++];
            *row = read_row(json_array_get(rows, n));
            row->source = find_source(results, row, f);
        }
    }
    join_sources(results);
    name_sources(results);
    return STATUS_OK;
}

void results_close(struct results *results)
{
    for (int f = 0; results->roots && f < results->file_count; f++)
        json_decref(results->roots[f]);
    free(results->files);
    free(results->roots);
    free(results->rows);
    free(results->sources);
    *results = (struct results){0};
}
