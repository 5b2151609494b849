/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "tune.h"

#include "program.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SCHEMA_VERSION = 1 };
static const char schema[] = "clattn-tuning";
static const char *const state_words[] = {"good", "wrong", "impossible"};

struct tune_records {
    json_t *root, *list;
};

static int out_of_memory(void)
{
    program_error("out of memory");
    return STATUS_FAILED;
}

static const char *dtype_word(clattn_dtype dtype)
{
    return dtype == CLATTN_FLOAT32 ? "float32" : dtype == CLATTN_FLOAT16 ? "float16" : "bfloat16";
}

/* ---- files ---- */

static struct tune_records *wrap(json_t *root)
{
    struct tune_records *records = calloc(1, sizeof *records);
    if (!records || !root) {
        out_of_memory();
        json_decref(root);
        free(records);
        return NULL;
    }
    records->root = root;
    records->list = json_object_get(root, "records");
    return records;
}

static json_t *empty_root(void)
{
    return json_pack("{s:s, s:i, s:[]}", "schema", schema, "schema_version", SCHEMA_VERSION, "records");
}

struct tune_records *tune_records_open(const char *file)
{
    json_error_t error;
    if (access(file, F_OK) != 0 && errno == ENOENT) return wrap(empty_root());
    json_t *root = json_load_file(file, 0, &error);
    const char *name = json_string_value(json_object_get(root, "schema"));
    if (!root) {
        program_error("%s: line %d: %s", file, error.line, error.text);
        return NULL;
    }
    if (!name || strcmp(name, schema) != 0 || !json_is_array(json_object_get(root, "records")) ||
        json_integer_value(json_object_get(root, "schema_version")) != SCHEMA_VERSION) {
        program_error("%s: these are no tuning records of version %d", file, SCHEMA_VERSION);
        json_decref(root);
        return NULL;
    }
    return wrap(root);
}

void tune_records_close(struct tune_records *records)
{
    if (!records) return;
    json_decref(records->root);
    free(records);
}

static void make_folders(const char *file)
{
    char path[4096];
    if (snprintf(path, sizeof path, "%s", file) >= (int)sizeof path) return;
    for (char *slash = path + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(path, 0777);
        *slash = '/';
    }
}

int tune_records_save(const struct tune_records *records, const char *file)
{
    const size_t flags = JSON_INDENT(1) | JSON_REAL_PRECISION(6);
    char temporary[4096];
    if (!file) {
        if (json_dumpf(records->root, stdout, flags) != 0 || putchar('\n') == EOF) return STATUS_FAILED;
        return STATUS_OK;
    }
    make_folders(file);
    int length = snprintf(temporary, sizeof temporary, "%s.%ld", file, (long)getpid());
    if (length >= (int)sizeof temporary || json_dump_file(records->root, temporary, flags) != 0 ||
        rename(temporary, file) != 0) {
        program_error("%s: %s", file, errno ? strerror(errno) : "cannot be written");
        unlink(temporary);
        return STATUS_FAILED;
    }
    return STATUS_OK;
}

/* ---- one record ---- */

static json_t *pack_point(const struct tune_point *point)
{
    json_t *object = json_object();
    for (int p = 0; p < TUNE_PARAMETERS; p++)
        if (point->value[p] >= 0)
            json_object_set_new(object, tune_parameters[p].name, json_integer(point->value[p]));
    return object;
}

static struct tune_point unpack_point(const json_t *object)
{
    struct tune_point point;
    for (int p = 0; p < TUNE_PARAMETERS; p++) {
        const json_t *value = json_object_get(object, tune_parameters[p].name);
        point.value[p] = json_is_integer(value) ? (int)json_integer_value(value) : -1;
    }
    return point;
}

static json_t *pack_key(const struct tune_search *search)
{
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:i, s:s}", "platform", search->device.platform, "device",
                     search->device.name, "driver", search->device.driver, "library", clattn_version(),
                     "kernel", tune_kernels[search->kernel], "dim", (int)search->dim, "dtype",
                     dtype_word(search->dtype));
}

static json_t *pack_trials(const struct tune_search *search)
{
    json_t *list = json_array();
    for (int t = 0; t < search->trial_count; t++) {
        const struct tune_trial *trial = &search->trials[t];
        json_t *entry = pack_point(&trial->point);
        json_object_set_new(entry, "state", json_string(state_words[trial->state]));
        if (trial->state == TUNE_GOOD) json_object_set_new(entry, "ratio", json_real(trial->ratio));
        json_array_append_new(list, entry);
    }
    return list;
}

static int count_trials(const struct tune_search *search, enum tune_state state)
{
    int count = 0;
    for (int t = 0; t < search->trial_count; t++)
        count += search->trials[t].state == state;
    return count;
}

/* Only a complete record has "parameters", so that no other is used. */
static json_t *pack_search(const struct tune_search *search)
{
    char date[32];
    time_t now = time(NULL);
    struct tm utc;
    json_t *record = pack_key(search);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    json_object_set_new(record, "measured", json_string(date));
    if (search->is_complete) {
        json_object_set_new(record, "parameters", pack_point(&search->best));
        json_object_set_new(record, "tried", json_integer(search->trial_count));
        json_object_set_new(record, "wrong", json_integer(count_trials(search, TUNE_WRONG)));
        json_object_set_new(record, "impossible", json_integer(count_trials(search, TUNE_IMPOSSIBLE)));
        json_object_set_new(record, "default_seconds", json_real(search->default_seconds));
        json_object_set_new(record, "tuned_seconds", json_real(search->tuned_seconds));
    } else {
        json_object_set_new(record, "best", pack_point(&search->best));
        json_object_set_new(record, "best_ratio", json_real(search->best_ratio));
        json_object_set_new(record, "trials", pack_trials(search));
    }
    return record;
}

static bool same_text(const json_t *a, const json_t *b, const char *name)
{
    const char *x = json_string_value(json_object_get(a, name)),
               *y = json_string_value(json_object_get(b, name));
    return x && y && strcmp(x, y) == 0;
}

static bool same_key(const json_t *a, const json_t *b)
{
    return same_text(a, b, "platform") && same_text(a, b, "device") && same_text(a, b, "driver") &&
           same_text(a, b, "kernel") && same_text(a, b, "dtype") &&
           json_integer_value(json_object_get(a, "dim")) == json_integer_value(json_object_get(b, "dim"));
}

static void unpack_trials(const json_t *list, struct tune_search *search)
{
    for (size_t n = 0; n < json_array_size(list) && search->trial_count < TUNE_TRIALS_MAX; n++) {
        const json_t *entry = json_array_get(list, n);
        struct tune_trial *trial = &search->trials[search->trial_count++];
        const char *word = json_string_value(json_object_get(entry, "state"));
        trial->point = unpack_point(entry);
        trial->state = TUNE_IMPOSSIBLE;
        for (int s = 0; s < 3; s++)
            if (word && strcmp(word, state_words[s]) == 0) trial->state = (enum tune_state)s;
        trial->ratio = json_number_value(json_object_get(entry, "ratio"));
    }
}

bool tune_records_find(const struct tune_records *records, struct tune_search *search)
{
    json_t *key = pack_key(search);
    bool found = false;
    for (size_t n = 0; n < json_array_size(records->list) && !found; n++) {
        const json_t *record = json_array_get(records->list, n);
        if (!same_key(record, key) || !same_text(record, key, "library")) continue;
        found = true;
        search->is_complete = json_is_object(json_object_get(record, "parameters"));
        search->best = unpack_point(json_object_get(record, "parameters"));
        search->default_seconds = json_number_value(json_object_get(record, "default_seconds"));
        search->tuned_seconds = json_number_value(json_object_get(record, "tuned_seconds"));
        unpack_trials(json_object_get(record, "trials"), search);
        if (search->is_complete)
            search->trial_count = (int)json_integer_value(json_object_get(record, "tried"));
    }
    json_decref(key);
    return found;
}

/* ---- lists of records ---- */

static int put(struct tune_records *records, json_t *record)
{
    size_t n = 0;
    if (!record) return out_of_memory();
    while (n < json_array_size(records->list) && !same_key(json_array_get(records->list, n), record))
        n++;
    int failed = n < json_array_size(records->list) ? json_array_set_new(records->list, n, record)
                                                    : json_array_append_new(records->list, record);
    return failed ? out_of_memory() : STATUS_OK;
}

int tune_records_put(struct tune_records *records, const struct tune_search *search)
{
    return put(records, pack_search(search));
}

/* Times are texts that sort. */
static bool is_better(const json_t *a, const json_t *b)
{
    bool complete_a = json_object_get(a, "parameters") != NULL,
         complete_b = json_object_get(b, "parameters") != NULL;
    const char *x = json_string_value(json_object_get(a, "measured")),
               *y = json_string_value(json_object_get(b, "measured"));
    if (complete_a != complete_b) return complete_a;
    return strcmp(x ? x : "", y ? y : "") >= 0;
}

int tune_records_merge(struct tune_records *records, const struct tune_records *more)
{
    int status = STATUS_OK;
    for (size_t m = 0; m < json_array_size(more->list) && status == STATUS_OK; m++) {
        json_t *record = json_array_get(more->list, m);
        size_t n = 0;
        while (n < json_array_size(records->list) && !same_key(json_array_get(records->list, n), record))
            n++;
        if (n == json_array_size(records->list) || is_better(record, json_array_get(records->list, n)))
            status = put(records, json_deep_copy(record));
    }
    return status;
}

char *tune_point_record(const struct tune_search *search, const struct tune_point *point)
{
    json_t *root = empty_root(), *record = pack_key(search);
    json_object_set_new(record, "parameters", pack_point(point));
    json_array_append_new(json_object_get(root, "records"), record);
    char *text = json_dumps(root, 0);
    json_decref(root);
    return text;
}
