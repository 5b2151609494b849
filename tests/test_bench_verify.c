/* SPDX-License-Identifier: MIT */
/* clattn bench verifies before it times: right results pass, and each kind of wrong one is found. */
#include "config.h"

#include "bench/bench.h"
#include "bench/program.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static clattn_context *reference;
static struct bench_device device;

/* What bench_problem.c takes from the program; no time is looked at here. */
double program_seconds(void)
{
    return 0;
}

static int set_up(void **state)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    (void)state;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    assert_int_equal(clattn_context_create(&desc, &reference), CLATTN_SUCCESS);
    desc.backend = CLATTN_BACKEND_CPU;
    assert_int_equal(clattn_context_create(&desc, &device.context), CLATTN_SUCCESS);
    device.info.backend = CLATTN_BACKEND_CPU;
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    clattn_context_release(reference);
    clattn_context_release(device.context);
    return 0;
}

static struct bench_case make_case(enum bench_operation operation)
{
    return (struct bench_case){.operation = operation,
                               .dtype = CLATTN_FLOAT32,
                               .selector = CLATTN_SELECT_PISA,
                               .causal = true,
                               .q_len = 100,
                               .kv_len = 300,
                               .q_heads = 2,
                               .kv_heads = 1,
                               .dim = 16,
                               .topk = 4,
                               .leaf = 16};
}

static void make(struct bench_problem *problem, const struct bench_case *shape)
{
    double transfer;
    assert_int_equal(bench_problem_make(problem, shape, &device, &transfer), CLATTN_SUCCESS);
    assert_int_equal(bench_problem_run(problem, NULL), CLATTN_SUCCESS);
    assert_int_equal(bench_problem_fetch(problem), CLATTN_SUCCESS);
    assert_int_equal(problem->sampled_count, 8);
    assert_int_equal(problem->sampled[0], 0);
    assert_int_equal(problem->sampled[7], shape->q_len - 1);
}

static bool is_right(struct bench_problem *problem)
{
    struct bench_verdict verdict;
    assert_int_equal(bench_verify(problem, reference, &verdict), CLATTN_SUCCESS);
    assert_true(verdict.rows >= 8);
    return verdict.tolerated <= 1 && verdict.lists_wrong == 0;
}

static void check_forward(const struct bench_case *shape)
{
    struct bench_problem problem;
    make(&problem, shape);
    assert_true(is_right(&problem));
    float *number = problem.out + (problem.sampled[3] * shape->q_heads + 1) * shape->dim + 5;
    *number += 1e-4f;
    assert_false(is_right(&problem));
    *number -= 1e-4f;
    problem.lse[problem.sampled[7] * shape->q_heads] = __builtin_nanf("");
    assert_false(is_right(&problem));
    bench_problem_release(&problem);
}

static void test_forward(void **state)
{
    struct bench_case shape = make_case(BENCH_FORWARD);
    (void)state;
    check_forward(&shape);
    shape.selector = CLATTN_SELECT_DENSE;
    check_forward(&shape);
    shape.causal = false;
    check_forward(&shape);
    shape.causal = true;
    shape.pattern = "local:1+anchors:first";
    check_forward(&shape);
}

static void test_neighborhood(void **state)
{
    struct bench_case shape = make_case(BENCH_NEIGHBORHOOD);
    clattn_neighborhood_desc desc = CLATTN_NEIGHBORHOOD_DESC_INIT;
    (void)state;
    desc.axes = 2;
    desc.length[0] = 9, desc.length[1] = 14;
    desc.window[0] = 4, desc.window[1] = 5;
    desc.dilation[1] = 2;
    desc.causal[0] = 1;
    shape.neighborhood = desc;
    shape.q_len = shape.kv_len = 9 * 14;
    shape.causal = false;
    check_forward(&shape);
}

static void test_select(void **state)
{
    struct bench_case shape = make_case(BENCH_SELECT);
    struct bench_problem problem;
    (void)state;
    make(&problem, &shape);
    assert_true(is_right(&problem));
    /* The list of a query in leaf 12 and later: 0, a chosen one, the previous leaf and its own. */
    int32_t *list = problem.indices + problem.sampled[5] * shape.topk;
    list[1] = list[1] > 1 ? list[1] - 1 : list[1] + 1;
    assert_false(is_right(&problem));
    bench_problem_release(&problem);
}

static void test_decode(void **state)
{
    struct bench_case shape = make_case(BENCH_DECODE);
    struct bench_problem problem;
    double transfer;
    (void)state;
    shape.q_len = 1;
    for (int dense = 0; dense < 2; dense++) {
        struct bench_verdict verdict;
        shape.selector = dense ? CLATTN_SELECT_DENSE : CLATTN_SELECT_PISA;
        assert_int_equal(bench_problem_make(&problem, &shape, &device, &transfer), CLATTN_SUCCESS);
        assert_int_equal(bench_problem_run(&problem, NULL), CLATTN_SUCCESS);
        assert_int_equal(bench_problem_fetch(&problem), CLATTN_SUCCESS);
        assert_int_equal(bench_verify(&problem, reference, &verdict), CLATTN_SUCCESS);
        assert_true(verdict.rows == 1 && verdict.tolerated <= 1 && verdict.lists_wrong == 0);
        /* The first step is the last key's; a number or a leaf that is wrong is found. */
        problem.out[shape.dim + 3] += 1e-4f;
        assert_int_equal(bench_verify(&problem, reference, &verdict), CLATTN_SUCCESS);
        assert_true(verdict.tolerated > 1);
        problem.out[shape.dim + 3] -= 1e-4f;
        if (!dense)
            problem.indices[1] = problem.indices[1] > 1 ? problem.indices[1] - 1 : problem.indices[1] + 1;
        assert_int_equal(bench_verify(&problem, reference, &verdict), CLATTN_SUCCESS);
        assert_true(dense ? verdict.tolerated <= 1 : verdict.lists_wrong == 1);
        /* Many steps: the cache is cut back when it is full. */
        for (int n = 0; n < 1100; n++)
            assert_int_equal(bench_problem_run(&problem, NULL), CLATTN_SUCCESS);
        bench_problem_release(&problem);
    }
}

static void test_pyramid(void **state)
{
    struct bench_case shape = make_case(BENCH_PYRAMID);
    struct bench_problem problem;
    double transfer;
    (void)state;
    assert_int_equal(bench_problem_make(&problem, &shape, &device, &transfer), CLATTN_SUCCESS);
    assert_int_equal(bench_problem_run(&problem, NULL), CLATTN_SUCCESS);
    assert_true(is_right(&problem));
    ((float *)problem.k_data)[1000] += 0.01f; /* the pyramid is now one of other keys */
    assert_false(is_right(&problem));
    bench_problem_release(&problem);
}

static void test_backward(void **state)
{
    struct bench_case shape = make_case(BENCH_BACKWARD);
    (void)state;
    for (int dense = 0; dense < 2; dense++) {
        struct bench_problem problem;
        shape.selector = dense ? CLATTN_SELECT_DENSE : CLATTN_SELECT_PISA;
        make(&problem, &shape);
        assert_true(is_right(&problem));
        float *gradients[] = {(float *)problem.device_dq.data + problem.sampled[4] * 2 * 16,
                              (float *)problem.device_dk.data + 250 * 16,
                              (float *)problem.device_dv.data + 250 * 16};
        for (int i = 0; i < 3; i++) {
            *gradients[i] += 0.01f;
            assert_false(is_right(&problem));
            *gradients[i] -= 0.01f;
        }
        bench_problem_release(&problem);
    }
}

static void test_work(void **state)
{
    struct bench_case shape = make_case(BENCH_FORWARD);
    struct bench_problem problem;
    (void)state;
    make(&problem, &shape);
    struct bench_work work = bench_work_count(&problem);
    /* Positions 200 .. 299 see 201 .. 300 keys; a list has four leaves, the last cut off at the query. */
    assert_float_equal(work.dense_flops, 4.0 * 16 * 2 * (100 * 250.5), 0.5);
    double pairs = 0;
    for (int t = 200; t < 300; t++)
        pairs += 3 * 16 + t % 16 + 1;
    assert_float_equal(work.flops, 4.0 * 16 * 2 * pairs, 0.5);
    bench_problem_release(&problem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_forward), cmocka_unit_test(test_neighborhood),
                                       cmocka_unit_test(test_select),  cmocka_unit_test(test_decode),
                                       cmocka_unit_test(test_pyramid), cmocka_unit_test(test_backward),
                                       cmocka_unit_test(test_work)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
