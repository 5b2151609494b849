/* SPDX-License-Identifier: MIT */
/* Tuning records: which are used, what a void one does, the order of files; and that odd tiles compute the
 * same. */

#include "opencl_fixture.h"

#include "lib/opencl_tile.h"

#ifdef HAVE_JANSSON

static struct opencl_device device; /* the first one */

/* A file or text of one record for the first device, whose driver is another. */
static const char *record(const char *kernel, const char *parameters)
{
    static char text[2][2048];
    static int turn;
    char *to = text[turn ^= 1];
    snprintf(to, sizeof text[0],
             "{\"schema\": \"clattn-tuning\", \"schema_version\": 1, \"records\": [{\"platform\": \"%s\", "
             "\"device\": "
             "\"%s\", \"driver\": \"another\", \"kernel\": \"%s\", \"dim\": 64, \"dtype\": \"float16\", %s}]}",
             device.platform_name, device.name, kernel, parameters);
    return to;
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static char logged[4096];
static void log_keep(void *user, clattn_log_level level, const char *message)
{
    (void)user;
    if (level == CLATTN_LOG_WARNING) snprintf(logged, sizeof logged, "%s", message);
}

static clattn_context *open_with(const char *tuning)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_context *context = NULL;
    desc.backend = CLATTN_BACKEND_OPENCL;
    desc.device = "0";
    desc.tuning = tuning;
    desc.log = log_keep;
    logged[0] = 0;
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
    return context;
}

/* Of the record that is found for select, dim 64, float16: its rows, or -2 without one. */
static int rows_with(const char *tuning, clattn_tuning source)
{
    clattn_context *context = open_with(tuning);
    clattn_stats stats = {.size = sizeof stats};
    const struct tuning_record *found = opencl_tuning_find(context, TUNING_SELECT, 64, CLATTN_FLOAT16);
    int rows = found ? found->value[TUNING_ROWS] : -2;
    assert_success(context, clattn_context_stats(context, &stats));
    assert_int_equal(stats.tiles_by_tuning[found ? source : CLATTN_TUNING_DEFAULT], 1);
    /* Records are of one dim, type and kernel; the library ships none of these. */
    assert_null(opencl_tuning_find(context, TUNING_SELECT, 65, CLATTN_FLOAT16));
    assert_null(opencl_tuning_find(context, TUNING_SELECT, 64, CLATTN_BFLOAT16));
    assert_null(opencl_tuning_find(context, TUNING_BACKWARD_Q, 64, CLATTN_FLOAT16));
    clattn_context_release(context);
    return rows;
}

static void test_texts(void **state)
{
    (void)state;
    const clattn_tuning caller = CLATTN_TUNING_CALLER;
    assert_int_equal(rows_with("", caller), -2);
    assert_int_equal(rows_with(record("select", "\"parameters\": {\"rows\": 8}"), caller), 8);
    assert_int_equal(rows_with(record("select", "\"parameters\": {\"pad\": 8}"), caller), -1);
    assert_int_equal(rows_with(record("select", "\"parameters\": {}"), caller), -1);
    /* Unfinished searches, values out of range or of another kind, and unknown kernels are void. */
    static const char *const voids[] = {"\"best\": {\"rows\": 8}",
                                        "\"parameters\": {\"rows\": 12}",
                                        "\"parameters\": {\"rows\": 128}",
                                        "\"parameters\": {\"rows\": -8}",
                                        "\"parameters\": {\"rows\": 8, \"pad\": 3}",
                                        "\"parameters\": {\"rows\": 8, \"item_keys\": 1}",
                                        "\"parameters\": {\"rows\": \"8\"}",
                                        "\"parameters\": {\"rows\": 8.0}",
                                        "\"parameters\": {\"rows\": 4294967304}",
                                        "\"parameters\": 8"};
    for (size_t i = 0; i < sizeof voids / sizeof *voids; i++)
        assert_int_equal(rows_with(record("select", voids[i]), caller), -2);
    assert_int_equal(rows_with(record("something", "\"parameters\": {\"rows\": 8}"), caller), -2);
    assert_string_equal(logged, "");
    assert_int_equal(
        rows_with("{\"schema\": \"clattn-tuning\", \"schema_version\": 2, \"records\": []}", caller), -2);
    assert_non_null(strstr(logged, "not clattn-tuning of version 1"));
    assert_int_equal(rows_with("{]", caller), -2);
    assert_non_null(strstr(logged, "desc.tuning"));
}

static void test_files(void **state)
{
    (void)state;
    char folder[4096], path[8192], file[8192];
    cache_empty("tuning", folder);
    setenv("CLATTN_CACHE_SIZE", "0", 1);
    mkdir(folder, 0700);
    snprintf(path, sizeof path, "%s/clattn", folder);
    mkdir(path, 0700);
    snprintf(path, sizeof path, "%s/clattn/tuning.json", folder);
    snprintf(file, sizeof file, "%s/mine.json", folder);
    write_file(path, record("select", "\"parameters\": {\"rows\": 16}"));
    write_file(file, record("select", "\"parameters\": {\"rows\": 32}"));
    unsetenv("CLATTN_TUNING");
    setenv("XDG_DATA_HOME", folder, 1);
    assert_int_equal(rows_with(NULL, CLATTN_TUNING_USER), 16);
    assert_int_equal(rows_with("", CLATTN_TUNING_CALLER), -2);
    setenv("CLATTN_TUNING", file, 1);
    assert_int_equal(rows_with(NULL, CLATTN_TUNING_ENVIRONMENT), 32);
    setenv("CLATTN_TUNING", "none", 1);
    assert_int_equal(rows_with(NULL, CLATTN_TUNING_USER), -2);
    /* A file that is named but not there is told; the next one counts. */
    setenv("CLATTN_TUNING", "/nonexistent/tuning.json", 1);
    assert_int_equal(rows_with(NULL, CLATTN_TUNING_USER), 16);
    assert_non_null(strstr(logged, "/nonexistent/tuning.json"));
    /* HOME, where XDG_DATA_HOME is not set or not absolute. */
    setenv("CLATTN_TUNING", "", 1);
    setenv("XDG_DATA_HOME", "relative", 1);
    setenv("HOME", folder, 1);
    assert_int_equal(rows_with(NULL, CLATTN_TUNING_USER), -2);
    setenv("CLATTN_TUNING", "none", 1);
    unlink(path);
    unlink(file);
}

/* What is in the library is read, for the device that it was measured on. */
static void test_shipped(void **state)
{
    (void)state;
    static struct opencl_device measured = {.platform_name = "NVIDIA CUDA", .name = "NVIDIA H200"};
    struct tuning_table table = {0};
    clattn_context *context = open_with("");
    unsetenv("CLATTN_TUNING");
    setenv("XDG_DATA_HOME", "/nonexistent", 1);
    opencl_tuning_load(context, &measured, NULL, &table);
    setenv("CLATTN_TUNING", "none", 1);
    assert_string_equal(logged, "");
    int found = 0;
    for (int n = 0; n < table.count; n++)
        found += table.records[n].source == CLATTN_TUNING_SHIPPED && table.records[n].kernel == TUNING_SELECT &&
                 table.records[n].dim == 64 && table.records[n].value[TUNING_ROWS] == 16;
    assert_int_equal(found, 1);
    opencl_tuning_free(&table);
    clattn_context_release(context);
}

/* The same driver's record comes first, wherever it stands. */
static void test_driver(void **state)
{
    (void)state;
    static const char format[] = "{\"schema\": \"clattn-tuning\", \"schema_version\": 1, \"records\": ["
                                 "{\"platform\": \"%s\", \"device\": \"%s\", \"driver\": \"another\", "
                                 "\"kernel\": \"select\", \"dim\": 64, "
                                 "\"dtype\": \"float16\", \"parameters\": {\"rows\": 8}},"
                                 "{\"platform\": \"%s\", \"device\": \"%s\", \"driver\": \"%.60s, %.60s\", "
                                 "\"kernel\": \"select\", \"dim\": 64, "
                                 "\"dtype\": \"float16\", \"parameters\": {\"rows\": 64}},"
                                 "{\"platform\": \"%s\", \"device\": \"none\", \"kernel\": \"select\", "
                                 "\"dim\": 64, \"dtype\": \"float16\", "
                                 "\"parameters\": {\"rows\": 4}}]}";
    char text[4096];
    snprintf(text, sizeof text, format, device.platform_name, device.name, device.platform_name, device.name,
             device.driver, device.version, device.platform_name);
    assert_int_equal(rows_with(text, CLATTN_TUNING_CALLER), 64);
}

/* ---- results ---- */

enum { Q_LEN = 40, KV_LEN = 100, HEADS = 3, DIM = 64 };

static void fill(uint16_t *halves, int count, uint32_t seed)
{
    static const uint16_t values[] = {0x0000, 0x3800, 0xb800, 0x3400, 0xb400, 0x3a00, 0xba00, 0x3000};
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        halves[i] = values[seed >> 29];
    }
}

static void attend(clattn_context *context, float *out)
{
    static uint16_t q[Q_LEN * HEADS * DIM], k[KV_LEN * DIM], v[KV_LEN * DIM];
    fill(q, Q_LEN * HEADS * DIM, 1);
    fill(k, KV_LEN * DIM, 2);
    fill(v, KV_LEN * DIM, 3);
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    select.leaf = 16;
    select.topk = 4;
    clattn_tensor tq = clattn_tensor_bthd(q, CLATTN_FLOAT16, 1, Q_LEN, HEADS, DIM);
    clattn_tensor tk = clattn_tensor_bthd(k, CLATTN_FLOAT16, 1, KV_LEN, 1, DIM);
    clattn_tensor tv = clattn_tensor_bthd(v, CLATTN_FLOAT16, 1, KV_LEN, 1, DIM);
    clattn_tensor to = clattn_tensor_bthd(out, CLATTN_FLOAT32, 1, Q_LEN, HEADS, DIM);
    assert_success(context, clattn_attention(context, NULL, &select, &tq, &tk, &tv, &to, NULL, NULL));
}

/* Tiles at the ends of what records may say, which no rule chooses. */
static void test_results(void **state)
{
    (void)state;
    static float expected[Q_LEN * HEADS * DIM], out[Q_LEN * HEADS * DIM];
    static const char *const tiles[] = {"\"parameters\": {\"rows\": 4, \"keys\": 128, \"lanes\": 1, "
                                        "\"item_keys\": 2, \"pad\": 16, \"load\": 1}",
                                        "\"parameters\": {\"rows\": 64, \"keys\": 8, \"lanes\": 8, "
                                        "\"item_keys\": 16, \"item_dims\": 4, \"items\": 1024, "
                                        "\"load\": 16, \"local_kib\": 8}",
                                        "\"parameters\": {\"rows\": 64, \"lanes\": 1, \"items\": 16}"};
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_context *reference = NULL;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    assert_int_equal(clattn_context_create(&desc, &reference), CLATTN_SUCCESS);
    attend(reference, expected);
    clattn_context_release(reference);
    for (size_t t = 0; t < sizeof tiles / sizeof *tiles; t++)
        for (int select = 0; select < 2; select++) {
            clattn_stats stats = {.size = sizeof stats};
            clattn_context *context = open_with(record(select ? "select" : "forward-token", tiles[t]));
            attend(context, out);
            assert_success(context, clattn_context_stats(context, &stats));
            if (strcmp(opencl_of(context)->tier, "portable") == 0)
                assert_int_equal(stats.tiles_by_tuning[CLATTN_TUNING_CALLER], 1);
            clattn_context_release(context);
            for (int i = 0; i < Q_LEN * HEADS * DIM; i++)
                if (!(out[i] - expected[i] < 1e-4f && expected[i] - out[i] < 1e-4f))
                    fail_msg("tile %d of %s: out[%d] is %g, must be %g", (int)t, select ? "select" : "forward",
                             i, (double)out[i], (double)expected[i]);
        }
}

/* Few items and many rows of few lanes: an item still has a part of the keys, and rows are whole vectors. */
static void test_limits(void **state)
{
    (void)state;
    for (int rows = 1; rows <= 64; rows++)
        for (int keys = 4; keys <= 128; keys *= 2)
            for (int lanes = 1; lanes <= 16; lanes *= 2)
                for (int items = 16; items <= 1024; items *= 2) {
                    const struct opencl_taste taste = {.lanes = lanes, .item_keys = 2, .items = items};
                    struct opencl_tile tile = opencl_tile_of(&taste, rows, keys);
                    opencl_tile_limit(&tile, &taste);
                    assert_true(tile.item_keys <= keys && keys % tile.item_keys == 0);
                    assert_true(tile.rows >= rows && tile.rows % tile.lanes == 0);
                    assert_in_range(opencl_tile_items(&tile), 1, items);
                }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_texts), cmocka_unit_test(test_files),
                                       cmocka_unit_test(test_driver), cmocka_unit_test(test_shipped),
                                       cmocka_unit_test(test_results), cmocka_unit_test(test_limits)};
    if (!opencl_device_at(0, &device)) return 77;
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void)
{
    return 77; /* without jansson there are no records */
}

#endif
