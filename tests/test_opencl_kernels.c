/* SPDX-License-Identifier: MIT */
/* The OpenCL kernels where their tiles are cut oddly: groups that do not fill a vector, dimensions that do not
 * fill a load, lengths around the tiles, sequences without rows or keys. OpenCL targets only; the harness's
 * other tests hold what all backends have in common. */

#include "fixture.h"

#include <stdlib.h>

/* name, class, batch, q_len, kv_len, kv_heads, group, dim, dim_v, dtype, layout, all keys */
static const struct shape shapes[] = {
    {"group 2, 12 by 20", SIZE_TINY, 1, 3, 40, 1, 2, 12, 20, CLATTN_FLOAT16, LAYOUT_PADDED, false},
    {"group 12, 60 by 80", SIZE_NORMAL, 1, 65, 507, 1, 12, 60, 80, CLATTN_FLOAT16, LAYOUT_PADDED, false},
    {"group 5, 16 by 100", SIZE_NORMAL, 2, 33, 129, 2, 5, 16, 100, CLATTN_BFLOAT16, LAYOUT_BHTD, false},
    {"group 3, dim 192", SIZE_NORMAL, 1, 40, 100, 1, 3, 192, 192, CLATTN_FLOAT32, LAYOUT_PADDED, true},
};

static bool runs(const struct target *target, enum test_size size)
{
    return target->info.backend == CLATTN_BACKEND_OPENCL && target_runs(target, size);
}

static void check_forward(enum test_size size, struct fixture *f, const struct lists *lists)
{
    struct forward problem = fixture_problem(f, lists);
    struct expected expected = expected_forward(&problem);
    FOR_EACH_TARGET (target)
        if (runs(target, size)) fixture_check_forward(target, f, lists, &expected);
    expected_free(&expected);
}

static void check_select(enum test_size size, const struct fixture *f, const clattn_select_desc *select)
{
    struct selection selection = fixture_selection(f, select);
    struct choices choices = choices_of(&selection);
    FOR_EACH_TARGET (target) {
        int32_t *counts;
        if (!runs(target, size)) continue;
        struct lists lists = fixture_select(target, f, select, &counts);
        choices_compare(&choices, &selection, lists.indices, counts, target->label, f->name);
        lists_free(&lists);
        free(counts);
    }
    choices_free(&choices);
}

/* A list for each token, shared by all heads, by those of a key head, or of one query head. */
static void test_shapes(void **state)
{
    (void)state;
    for (int n = 0; n < COUNT(shapes); n++) {
        const struct shape *shape = &shapes[n];
        struct random random = random_seeded((uint64_t)n);
        struct fixture f = fixture_new(shape, &random);
        struct spans spans = fixture_spans(&f, 1);
        int32_t heads = n % 3 == 0 ? shape->kv_heads : n % 3 == 1 ? 1 : shape->kv_heads * shape->group;
        struct lists lists = lists_random(&random, &spans, 16, 1, heads, 3, 0.8);
        clattn_select_desc select = select_desc((clattn_selector)n, 3, 16);
        check_forward(shape->size, &f, &lists);
        check_select(shape->size, &f, &select);
        lists_free(&lists);
        fixture_free(&f);
    }
    target_report("shapes");
}

/* One program, many lengths: around lanes, tiles and leaves, and fewer leaves than topk. */
static void test_lengths(void **state)
{
    static const int lengths[] = {17, 31, 33, 47, 49, 63, 65, 100, 507, 781, 1025};
    (void)state;
    for (int n = 0; n < COUNT(lengths); n++) {
        struct random random = random_seeded(100 + (uint64_t)n);
        struct shape shape = {"lengths", SIZE_NORMAL,    1,           17,   lengths[n], 1, 1, 16,
                              16,        CLATTN_FLOAT32, LAYOUT_BTHD, false};
        struct fixture f = fixture_new(&shape, &random);
        struct spans spans = fixture_spans(&f, 1);
        struct lists lists = lists_random(&random, &spans, 16, 1, 1, 16, 0.5);
        clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 16, 16);
        check_forward(SIZE_NORMAL, &f, &lists);
        check_select(SIZE_NORMAL, &f, &select);
        lists_free(&lists);
        fixture_free(&f);
    }
    target_report("lengths");
}

/* Sequences without rows, without keys, without both, at every place of the table. */
static void test_packed(void **state)
{
    static const int32_t cu_q[] = {0, 0, 3, 3, 20, 21, 21}, cu_k[] = {0, 5, 5, 5, 70, 100, 100};
    (void)state;
    struct random random = random_seeded(200);
    struct shape shape = {"packed", SIZE_TINY, 1, 21, 100, 1, 2, 12, 20, CLATTN_FLOAT16, LAYOUT_PADDED, false};
    struct fixture f = fixture_new(&shape, &random);
    fixture_packed(&f, COUNT(cu_q) - 1, cu_q, cu_k);
    struct spans spans = fixture_spans(&f, 1);
    struct lists lists = lists_random(&random, &spans, 16, 1, 1, 3, 0.8);
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 3, 16);
    check_forward(SIZE_TINY, &f, &lists);
    check_select(SIZE_TINY, &f, &select);
    lists_free(&lists);
    fixture_free(&f);
    target_report("packed");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_packed),
    };
    clattn_device_info info = {.size = sizeof info};
    bool has_device = false;
    for (int i = 0; clattn_device_get(i, &info) == CLATTN_SUCCESS; i++)
        has_device = has_device || info.backend == CLATTN_BACKEND_OPENCL;
    if (!has_device) {
        print_message("no OpenCL device\n");
        return 77;
    }
    return cmocka_run_group_tests_name("opencl kernels", tests, targets_open, targets_close);
}
