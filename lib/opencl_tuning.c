/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "opencl_tuning.h"

#include "kernel_sources.h"
#include "opencl.h"

#include <stdlib.h>
#include <string.h>

#ifdef HAVE_JANSSON

#include <jansson.h>
#include <stdio.h>
#include <unistd.h>

#define SCHEMA "clattn-tuning"
enum { SCHEMA_VERSION = 1, RECORDS_MAX = 4096 };

static const char *const kernel_names[TUNING_KERNELS] = {"forward-token", "forward-block", "select",
                                                         "backward-q", "backward-kv"};

/* What a value may be: within the bounds, and a power of two or a multiple of `step`. */
static const struct {
    const char *name;
    int least, most;
    bool power;
    int step;
} parameters[TUNING_PARAMETERS] = {[TUNING_ROWS] = {"rows", 4, 64, true, 1},
                                   [TUNING_KEYS] = {"keys", 8, 128, true, 1},
                                   [TUNING_LANES] = {"lanes", 1, 16, true, 1},
                                   [TUNING_ITEM_KEYS] = {"item_keys", 2, 16, true, 1},
                                   [TUNING_ITEM_DIMS] = {"item_dims", 4, 128, false, 4},
                                   [TUNING_LOAD] = {"load", 1, 16, true, 1},
                                   [TUNING_PAD] = {"pad", 0, 16, false, 4},
                                   [TUNING_LOCAL_KIB] = {"local_kib", 8, 256, false, 1},
                                   [TUNING_ITEMS] = {"items", 16, 1024, true, 1}};

/* ---- one record ---- */

static bool is_text(const json_t *record, const char *name, const char *wanted)
{
    const char *text = json_string_value(json_object_get(record, name));
    return text && strcmp(text, wanted) == 0;
}

static int dtype_of(const json_t *record)
{
    return is_text(record, "dtype", "float32")    ? CLATTN_FLOAT32
           : is_text(record, "dtype", "float16")  ? CLATTN_FLOAT16
           : is_text(record, "dtype", "bfloat16") ? CLATTN_BFLOAT16
                                                  : 0;
}

static bool is_allowed(int parameter, json_int_t value)
{
    return value >= parameters[parameter].least && value <= parameters[parameter].most &&
           (!parameters[parameter].power || (value & (value - 1)) == 0) &&
           value % parameters[parameter].step == 0;
}

/* False: not for this device, or not to be used. */
static bool read_record(const json_t *record, const struct opencl_device *device, struct tuning_record *result)
{
    const json_t *values = json_object_get(record, "parameters");
    int kernel = 0;
    if (!is_text(record, "platform", device->platform_name) || !is_text(record, "device", device->name) ||
        !json_is_object(values))
        return false;
    while (kernel < TUNING_KERNELS && !is_text(record, "kernel", kernel_names[kernel]))
        kernel++;
    if (kernel == TUNING_KERNELS || dtype_of(record) == 0) return false;
    result->kernel = (enum tuning_kernel)kernel;
    result->dtype = (clattn_dtype)dtype_of(record);
    result->dim = (int32_t)json_integer_value(json_object_get(record, "dim"));
    for (int p = 0; p < TUNING_PARAMETERS; p++) {
        const json_t *value = json_object_get(values, parameters[p].name);
        result->value[p] = -1;
        if (!value) continue;
        if (!json_is_integer(value) || !is_allowed(p, json_integer_value(value))) return false;
        result->value[p] = (int)json_integer_value(value);
    }
    return true;
}

/* ---- files ---- */

static void add_records(const json_t *root, const struct opencl_device *device, clattn_tuning source,
                        struct tuning_table *table)
{
    const json_t *list = json_object_get(root, "records");
    char driver[128]; /* as clattn_device_info has it */
    snprintf(driver, sizeof driver, "%.60s, %.60s", device->driver, device->version);
    /* The same driver's records first, then those of others. */
    for (int pass = 0; pass < 2; pass++)
        for (size_t n = 0; n < json_array_size(list) && table->count < RECORDS_MAX; n++) {
            const json_t *record = json_array_get(list, n);
            struct tuning_record read = {.source = source};
            if (is_text(record, "driver", driver) != (pass == 0) || !read_record(record, device, &read))
                continue;
            struct tuning_record *grown =
                realloc(table->records, (size_t)(table->count + 1) * sizeof *table->records);
            if (!grown) return;
            table->records = grown;
            table->records[table->count++] = read;
        }
}

static void add_root(clattn_context *context, json_t *root, const char *name, const json_error_t *error,
                     const struct opencl_device *device, clattn_tuning source, struct tuning_table *table)
{
    if (!root)
        log_line(context, CLATTN_LOG_WARNING, "tuning records of %s are not used: line %d: %s", name,
                 error->line, error->text);
    else if (!is_text(root, "schema", SCHEMA) ||
             json_integer_value(json_object_get(root, "schema_version")) != SCHEMA_VERSION)
        log_line(context, CLATTN_LOG_WARNING, "tuning records of %s are not used: not %s of version %d", name,
                 SCHEMA, SCHEMA_VERSION);
    else
        add_records(root, device, source, table);
    json_decref(root);
}

static void add_file(clattn_context *context, const char *name, const struct opencl_device *device,
                     clattn_tuning source, struct tuning_table *table)
{
    json_error_t error;
    if (access(name, R_OK) != 0 && source != CLATTN_TUNING_ENVIRONMENT) return;
    add_root(context, json_load_file(name, 0, &error), name, &error, device, source, table);
}

static void add_text(clattn_context *context, const char *text, const char *name,
                     const struct opencl_device *device, clattn_tuning source, struct tuning_table *table)
{
    json_error_t error;
    if (*text) add_root(context, json_loads(text, 0, &error), name, &error, device, source, table);
}

static void add_users(clattn_context *context, const struct opencl_device *device, struct tuning_table *table)
{
    const char *xdg = getenv("XDG_DATA_HOME"), *home = getenv("HOME");
    char path[4096];
    int length = 0;
    if (xdg && xdg[0] == '/')
        length = snprintf(path, sizeof path, "%s/clattn/tuning.json", xdg);
    else if (home && home[0] == '/')
        length = snprintf(path, sizeof path, "%s/.local/share/clattn/tuning.json", home);
    if (length > 0 && length < (int)sizeof path) add_file(context, path, device, CLATTN_TUNING_USER, table);
}

static void add_shipped(clattn_context *context, const struct opencl_device *device, struct tuning_table *table)
{
    for (unsigned i = 0; i < kernel_source_count; i++)
        if (strcmp(kernel_sources[i].name, "tuning.json") == 0)
            add_text(context, kernel_sources[i].text, "the library", device, CLATTN_TUNING_SHIPPED, table);
}

void opencl_tuning_load(clattn_context *context, const struct opencl_device *device, const char *text,
                        struct tuning_table *table)
{
    const char *wanted = getenv("CLATTN_TUNING");
    /* A privileged program must not be led by its caller's environment. */
    bool is_trusted = getuid() == geteuid() && getgid() == getegid();
    if (text) {
        add_text(context, text, "desc.tuning", device, CLATTN_TUNING_CALLER, table);
        return;
    }
    if (is_trusted && wanted && strcmp(wanted, "none") == 0) return;
    if (is_trusted && wanted && *wanted) add_file(context, wanted, device, CLATTN_TUNING_ENVIRONMENT, table);
    if (is_trusted) add_users(context, device, table);
    add_file(context, SYSCONFDIR "/clattn/tuning.json", device, CLATTN_TUNING_SYSTEM, table);
    add_shipped(context, device, table);
}

#else

void opencl_tuning_load(clattn_context *context, const struct opencl_device *device, const char *text,
                        struct tuning_table *table)
{
    (void)context, (void)device, (void)text, (void)table;
}

#endif

void opencl_tuning_free(struct tuning_table *table)
{
    free(table->records);
    *table = (struct tuning_table){0};
}

const struct tuning_record *opencl_tuning_find(clattn_context *context, enum tuning_kernel kernel, int32_t dim,
                                               clattn_dtype dtype)
{
    const struct tuning_table *table = &opencl_of(context)->tuning;
    const struct tuning_record *found = NULL;
    for (int n = 0; n < table->count && !found; n++)
        if (table->records[n].kernel == kernel && table->records[n].dim == dim &&
            table->records[n].dtype == dtype)
            found = &table->records[n];
    stats_add_tuned(context, found ? found->source : CLATTN_TUNING_DEFAULT);
    return found;
}
