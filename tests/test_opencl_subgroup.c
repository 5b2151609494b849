/* SPDX-License-Identifier: MIT */
/* The subgroup tier with every number of lanes from 8 to 64 that the device has: selection and attention agree
 * with the reference, rows that see nothing included. */

#include "opencl_fixture.h"

#include "lib/opencl_subgroup.h"

enum { SIZES_MAX = 16, SUB_GROUP_SIZES_INTEL = 0x4108 };

static char said[1 << 16];

static void log_keep(void *user, clattn_log_level level, const char *message)
{
    (void)user, (void)level;
    strncat(said, message, sizeof said - strlen(said) - 2);
    strcat(said, "\n");
}

/* NULL: the device has no such tier. */
static clattn_context *subgroup_context(void)
{
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_OPENCL;
    desc.variant = "subgroup";
    desc.log = log_keep;
    desc.log_level = CLATTN_LOG_INFO;
    clattn_status status = clattn_context_create(&desc, &context);
    assert_true(status == CLATTN_SUCCESS || status == CLATTN_NO_DEVICE);
    return context;
}

/* Is there a line of the log with both? */
static bool has_built(const char *file, const char *option)
{
    for (const char *at = said; (at = strstr(at, file)); at++) {
        const char *found = strstr(at, option), *end = strchr(at, '\n');
        if (found && found < end) return true;
    }
    return false;
}

static int sizes_of(const struct opencl *state, size_t sizes[SIZES_MAX])
{
    size_t bytes = 0;
    if (state->subgroup.kind == SUBGROUP_INTEL &&
        !clGetDeviceInfo(state->device.id, SUB_GROUP_SIZES_INTEL, SIZES_MAX * sizeof *sizes, sizes, &bytes))
        return (int)(bytes / sizeof *sizes);
    sizes[0] = (size_t)state->subgroup.size;
    return 1;
}

static void test_sizes(void **state)
{
    size_t sizes[SIZES_MAX];
    char part[64];
    (void)state;
    said[0] = 0;
    clattn_context *context = subgroup_context();
    assert_non_null(context);
    int count = sizes_of(opencl_of(context), sizes), used = 0;
    for (int i = 0; i < count; i++) {
        if (sizes[i] < 8 || sizes[i] > 64) continue;
        opencl_of(context)->subgroup.size = (int)sizes[i];
        assert_success(context, opencl_selftest(context));
        snprintf(part, sizeof part, "-DSG=%zu ", sizes[i]);
        assert_true(has_built("select_subgroup.cl", part) && has_built("attention_subgroup.cl", part));
        print_message("%zu lanes\n", sizes[i]);
        used++;
    }
    assert_true(used > 0);
    clattn_context_release(context);
}

int main(void)
{
    if (!has_device()) {
        puts("skipped: no OpenCL device");
        return 77;
    }
    unsetenv("CLATTN_TIER");
    unsetenv("CLATTN_KERNEL_DIR");
    setenv("CLATTN_CACHE_SIZE", "0", 1); /* no result is remembered */
    clattn_context *context = subgroup_context();
    if (!context) {
        puts("skipped: no OpenCL device with a subgroup tier");
        return 77;
    }
    clattn_context_release(context);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sizes)};
    return cmocka_run_group_tests_name("opencl_subgroup", tests, NULL, NULL);
}
