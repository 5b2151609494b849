/* SPDX-License-Identifier: MIT */
/* The self-test of automatically chosen devices: a good device passes, a wrong one is refused, both are
 * remembered. */

#include "opencl_fixture.h"

#include "lib/kernel_sources.h"

static uint64_t kernels_of(clattn_context *context)
{
    clattn_stats stats = {.size = sizeof stats};
    assert_success(context, clattn_context_stats(context, &stats));
    return stats.kernels_enqueued;
}

static void test_passes_once(void **state)
{
    (void)state;
    char folder[4096];
    cache_empty("selftest", folder);
    unsetenv("CLATTN_KERNEL_DIR");
    clattn_context *context = context_open();
    assert_int_equal(kernels_of(context), 0); /* the device was asked for, so nothing was tested */
    assert_success(context, opencl_selftest(context));
    uint64_t kernels = kernels_of(context);
    assert_true(kernels > 0);
    assert_success(context, opencl_selftest(context));
#ifdef HAVE_XXHASH
    assert_int_equal(kernels_of(context), kernels);
#endif
    clattn_context_release(context);
}

/* Writes a kernel file whose exponentials are 3 % too small. */
static void write_wrong(const char *path, const char *text)
{
    int changed = 0;
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (const char *at; (at = strstr(text, " exp(")); text = at + 5, changed++)
        fprintf(file, "%.*s 0.97f * exp(", (int)(at - text), text);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
    assert_true(changed > 0);
}

static void test_refuses_wrong_results(void **state)
{
    (void)state;
    char folder[4096], kernels[5000], path[5100];
    const char *file = "attention_forward.cl", *text = NULL;
    cache_empty("selftest_wrong", folder);
    snprintf(kernels, sizeof kernels, "%s.kernels", folder);
    snprintf(path, sizeof path, "%s/%s", kernels, file);
    mkdir(kernels, 0700);
    for (unsigned i = 0; i < kernel_source_count; i++)
        if (strcmp(kernel_sources[i].name, file) == 0) text = kernel_sources[i].text;
    assert_non_null(text);
    write_wrong(path, text);
    setenv("CLATTN_KERNEL_DIR", kernels, 1);

    clattn_context *context = context_open();
    assert_status(context, opencl_selftest(context), CLATTN_NO_DEVICE);
    assert_non_null(strstr(last_error(context), "computes wrongly"));
    clattn_context_release(context);
    unsetenv("CLATTN_KERNEL_DIR");
    unlink(path);
    rmdir(kernels);
}

#ifdef HAVE_XXHASH
static void put_failure(const char *path, void *user)
{
    char key[2048] = "";
    (void)user;
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    size_t bytes = fread(key, 1, sizeof key - 1, file);
    fclose(file);
    /* The only entry with this kind; its key stands behind 40 bytes of header and ends with a line. */
    if (bytes < 60 || !strstr(key + 40, "kind self-test")) return;
    *(strrchr(key + 40, '\n') + 1) = 0;
    opencl_cache_store(key + 40, "it was wrong before", 19);
}

static void test_remembers_failure(void **state)
{
    (void)state;
    char folder[4096];
    cache_empty("selftest", folder);
    clattn_context *context = context_open();
    assert_success(context, opencl_selftest(context));
    folder_files(folder, put_failure, NULL);
    uint64_t kernels = kernels_of(context);
    assert_status(context, opencl_selftest(context), CLATTN_NO_DEVICE);
    assert_non_null(strstr(last_error(context), "it was wrong before"));
    assert_int_equal(kernels_of(context), kernels);
    clattn_context_release(context);
}
#endif

int main(void)
{
    if (!has_device()) {
        puts("skipped: no OpenCL device");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_passes_once),
        cmocka_unit_test(test_refuses_wrong_results),
#ifdef HAVE_XXHASH
        cmocka_unit_test(test_remembers_failure),
#endif
    };
    return cmocka_run_group_tests_name("opencl_selftest", tests, NULL, NULL);
}
