/* SPDX-License-Identifier: MIT */
/* The matrix tier's interface: the portable form of its four verbs multiplies exactly what has an exact
 * product. The same kernel is built for AMD and Intel by tests/vendors.sh. */

#include "opencl_fixture.h"

enum { ROWS = 16, COLUMNS = 16, DEPTH = 64 };

/* Small integers, which both types have: in float16 and in bfloat16. */
static uint16_t number16(int value, bool is_half)
{
    static const uint16_t halves[] = {0x0000, 0x3c00, 0x4000, 0x4200, 0x4400}, /* 0 1 2 3 4 */
        bfloats[] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080};
    int size = value < 0 ? -value : value;
    return (uint16_t)((is_half ? halves : bfloats)[size] | (value < 0 ? 0x8000 : 0));
}

static int element(int side, int row, int d)
{
    return (row * (5 + 2 * side) + d * 3 + row * d) % 9 - 4;
}

static void check_product(clattn_context *context, bool is_half)
{
    static uint16_t in[2][ROWS * DEPTH];
    static float out[2 * ROWS * COLUMNS + 2];
    char options[64];
    struct storage result = {0};
    struct opencl_launch launch;
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < ROWS * DEPTH; i++)
            in[side][i] = number16(element(side, i / DEPTH, i % DEPTH), is_half);
    snprintf(options, sizeof options, "-DHALF=%d -DDEPTH=%d", is_half, DEPTH);
    memset(out, 0xff, sizeof out);
    assert_success(context, opencl_storage_copy(context, out, sizeof out, &result));
    opencl_launch_begin(context, NULL, &launch);
    opencl_launch_kernel(&launch, "common.cl+mma_portable.cl+canary_matrix.cl", "canary_matrix", options);
    opencl_arg_mem(&launch, opencl_launch_table(&launch, in[0], sizeof in[0]));
    opencl_arg_mem(&launch, opencl_launch_table(&launch, in[1], sizeof in[1]));
    opencl_arg_storage(&launch, &result);
    opencl_launch_run(&launch, 1, (size_t[]){16}, (size_t[]){16});
    assert_success(context, opencl_launch_end(&launch));
    assert_success(context, opencl_storage_read(context, &result, 0, out, sizeof out));
    opencl_storage_release(context, &result);

    assert_true(out[2 * ROWS * COLUMNS] == ROWS && out[2 * ROWS * COLUMNS + 1] == COLUMNS);
    for (int i = 0; i < 2 * ROWS * COLUMNS; i++) { /* as stored, then by the lane map */
        int want = 0, row = i / COLUMNS % ROWS, column = i % COLUMNS;
        for (int d = 0; d < DEPTH; d++)
            want += element(0, row, d) * element(1, column, d);
        if (out[i] != (float)want)
            fail_msg("%s, %s: row %d, column %d is %g, must be %d", is_half ? "float16" : "bfloat16",
                     i < ROWS * COLUMNS ? "stored" : "lane map", row, column, (double)out[i], want);
    }
}

static void test_portable_form(void **state)
{
    (void)state;
    clattn_context *context = context_open();
    check_product(context, false);
    check_product(context, true);
    clattn_context_release(context);
}

int main(void)
{
    if (!has_device()) {
        puts("skipped: no OpenCL device");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_portable_form)};
    return cmocka_run_group_tests_name("opencl_matrix", tests, NULL, NULL);
}
