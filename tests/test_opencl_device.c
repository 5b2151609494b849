/* SPDX-License-Identifier: MIT */
/* OpenCL devices: listing, choice by name, number and environment, tiers, limits. */

#include "opencl_fixture.h"

static clattn_status open_device(const char *device, char detail[2048], clattn_device_info *info)
{
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_OPENCL;
    desc.device = device;
    desc.error = detail;
    desc.error_bytes = 2048;
    detail[0] = 0;
    clattn_status status = clattn_context_create(&desc, &context);
    if (!status) {
        *info = (clattn_device_info){.size = sizeof *info};
        assert_success(context, clattn_context_device(context, info));
    }
    clattn_context_release(context);
    return status;
}

static int count_devices(void)
{
    clattn_device_info info = {.size = sizeof info};
    int count = 0, devices = 0;
    for (; clattn_device_get(count, &info) == CLATTN_SUCCESS; count++)
        if (info.backend == CLATTN_BACKEND_OPENCL) {
            assert_int_equal(info.index, devices);
            assert_true(info.name[0] && info.platform[0] && info.driver[0]);
            assert_int_equal(strncmp(info.variants, "portable", 8), 0); /* the first of them */
            assert_true(info.memory_bytes > 0 && info.max_alloc_bytes > 0 && info.compute_units > 0);
            devices++;
        }
    assert_int_equal(count, devices + 2);
    return devices;
}

static void test_devices(void **state)
{
    (void)state;
    char detail[2048], part[140], number[16];
    clattn_device_info info, first;
    int devices = count_devices();
    assert_true(devices > 0);
    assert_int_equal(open_device("0", detail, &first), CLATTN_SUCCESS);
    assert_int_equal(first.index, 0);
    assert_non_null(strstr(first.variants, first.variant));

    for (size_t i = 0; first.platform[i]; i++) /* any case of letters */
        part[i] = (char)((first.platform[i] >= 'a' && first.platform[i] <= 'z') ? first.platform[i] - 32
                                                                                : first.platform[i]);
    part[strlen(first.platform)] = 0;
    assert_int_equal(open_device(part, detail, &info), CLATTN_SUCCESS);
    assert_string_equal(info.platform, first.platform);
    snprintf(number, sizeof number, "%d", devices);
    assert_int_equal(open_device(number, detail, &info), CLATTN_NO_DEVICE);
    assert_non_null(strstr(detail, first.name));
    assert_int_equal(open_device("no such device", detail, &info), CLATTN_NO_DEVICE);
    assert_non_null(strstr(detail, "no such device"));
    setenv("CLATTN_DEVICE", "nor this one", 1);
    assert_int_equal(open_device(NULL, detail, &info), CLATTN_NO_DEVICE);
    assert_non_null(strstr(detail, "nor this one"));
    assert_int_equal(open_device("0", detail, &info), CLATTN_SUCCESS); /* the descriptor wins */
    unsetenv("CLATTN_DEVICE");
}

static void test_platform_filter(void **state)
{
    (void)state;
    char detail[2048], list[300];
    clattn_device_info first, info;
    int devices = count_devices();
    assert_int_equal(open_device("0", detail, &first), CLATTN_SUCCESS);
    setenv("CLATTN_PLATFORMS", "no such platform", 1);
    assert_int_equal(count_devices(), 0);
    assert_int_equal(open_device(NULL, detail, &info), CLATTN_NO_DEVICE);
    assert_non_null(strstr(detail, "CLATTN_PLATFORMS"));
    setenv("CLATTN_PLATFORMS", first.platform, 1);
    int of_platform = count_devices();
    assert_in_range(of_platform, 1, devices);
    snprintf(list, sizeof list, "-%s", first.platform);
    setenv("CLATTN_PLATFORMS", list, 1);
    assert_int_equal(count_devices(), devices - of_platform);
    snprintf(list, sizeof list, "no such platform,%s", first.platform);
    setenv("CLATTN_PLATFORMS", list, 1);
    assert_int_equal(count_devices(), of_platform);
    setenv("CLATTN_PLATFORMS", "", 1);
    assert_int_equal(count_devices(), devices);
    unsetenv("CLATTN_PLATFORMS");
}

static void test_tiers(void **state)
{
    (void)state;
    char detail[2048] = "";
    clattn_device_info info;
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_OPENCL;
    desc.variant = "no such tier";
    desc.error = detail;
    desc.error_bytes = sizeof detail;
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_NO_DEVICE);
    assert_non_null(strstr(detail, "no such tier"));
    desc.variant = "portable";
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
    clattn_context_release(context);
    setenv("CLATTN_TIER", "portable", 1);
    assert_int_equal(open_device(NULL, detail, &info), CLATTN_SUCCESS);
    setenv("CLATTN_TIER", "no such tier", 1);
    assert_int_equal(open_device(NULL, detail, &info), CLATTN_NO_DEVICE);
    unsetenv("CLATTN_TIER");
}

static void test_limits(void **state)
{
    (void)state;
    cl_kernel kernel;
    clattn_tensor tensor;
    char options[64], number[32];
    clattn_context *context = context_open();
    const struct opencl_device *device = &opencl_of(context)->device;
    snprintf(options, sizeof options, "-DGROUP=%zu", 2 * device->group_max);
    clattn_status status = opencl_kernel(context, "large.cl", "large", options, &kernel);
    /* Some compilers refuse it before the runtime can. */
    assert_true(status == CLATTN_DEVICE_LIMIT || status == CLATTN_INTERNAL);
    assert_null(kernel);
    assert_status(
        context,
        clattn_tensor_create(context, CLATTN_FLOAT32, 1, (int64_t)(device->alloc_max / 4) + 1, 1, 1, &tensor),
        CLATTN_DEVICE_LIMIT);
    assert_non_null(strstr(last_error(context), "CL_DEVICE_MAX_MEM_ALLOC_SIZE"));
    snprintf(number, sizeof number, "%llu", (unsigned long long)device->alloc_max);
    assert_non_null(strstr(last_error(context), number));
    clattn_context_release(context);
}

int main(void)
{
    char folder[4096];
    if (!has_device()) {
        puts("skipped: no OpenCL device");
        return 77;
    }
    use_test_kernels();
    cache_empty("device", folder);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_devices),
        cmocka_unit_test(test_platform_filter),
        cmocka_unit_test(test_tiers),
        cmocka_unit_test(test_limits),
    };
    return cmocka_run_group_tests_name("opencl_device", tests, NULL, NULL);
}
