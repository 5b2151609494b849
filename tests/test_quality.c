/* SPDX-License-Identifier: MIT */
/* Recall, mass and answers of block lists, on keys whose attention masses are known by hand. */
#include "config.h"

#include "bench/program.h"
#include "bench/quality.h"
#include "bench/sixteen.h"
#include "npy.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { LEAF = 16, LEAVES = 4, LEN = LEAF * LEAVES };

/* quality_files.c tells its errors so. */
static char told[512];
static void tell(const char *format, va_list arguments)
{
    vsnprintf(told, sizeof told, format, arguments);
}
void program_error(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    tell(format, arguments);
    va_end(arguments);
}
int program_usage(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    tell(format, arguments);
    va_end(arguments);
    return STATUS_USAGE;
}

/* Two heads of dim 2 share one key head; head h looks at number h of the keys. The mass of leaf i is
 * weight[h][i] over their sum, as all keys of a leaf are alike. */
static const double weight[2][LEAVES] = {{1, 2, 3, 4}, {8, 1, 1, 2}};

struct fixture {
    float k[LEN][1][2], q[LEN][2][2];
    struct quality_problem problem;
};

static void fixture_make(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    for (int n = 0; n < LEN; n++)
        for (int h = 0; h < 2; h++) {
            f->k[n][0][h] = (float)log(weight[h][n / LEAF]);
            f->q[n][h][h] = 1;
        }
    f->problem.q = clattn_tensor_bthd(f->q, CLATTN_FLOAT32, 1, LEN, 2, 2);
    f->problem.k = clattn_tensor_bthd(f->k, CLATTN_FLOAT32, 1, LEN, 1, 2);
    f->problem.scale = 1;
    f->problem.leaf = LEAF;
    f->problem.topk = 2;
}

static void measure(const struct quality_problem *problem, const struct quality_lists *lists,
                    struct quality *result)
{
    *result = (struct quality){0};
    assert_true(quality_measure(problem, lists, 1, result));
}

/* One list for all rows. */
static struct quality_lists shared(const int32_t *list, int entries)
{
    return (struct quality_lists){list, entries, 1, LEN};
}

static void test_shared_by_heads(void **state)
{
    (void)state;
    struct fixture f;
    struct quality result;
    fixture_make(&f);
    /* Means over the heads: (0.1 + 8/12)/2, (0.2 + 1/12)/2, (0.3 + 1/12)/2, (0.4 + 2/12)/2: the best are 0
     * and 3. */
    const int32_t list[] = {0, 2, -1};
    double mass = (0.1 + 8. / 12 + 0.3 + 1. / 12) / 2, best = (0.1 + 8. / 12 + 0.4 + 2. / 12) / 2;
    struct quality_lists lists = shared(list, 3);
    measure(&f.problem, &lists, &result);
    assert_int_equal(result.lists, LEN);
    assert_float_equal(quality_recall(&result), 0.5, 1e-6);
    assert_float_equal(quality_mass(&result), mass, 1e-6);
    assert_float_equal(quality_share(&result), mass / best, 1e-6);
}

static void test_own_lists(void **state)
{
    (void)state;
    struct fixture f;
    struct quality result;
    fixture_make(&f);
    /* Head 0's best are 3 and 2, head 1's 0 and 3. */
    const int32_t lists_of_heads[] = {2, 3, 0, 1};
    struct quality_lists lists = {lists_of_heads, 2, 2, LEN};
    measure(&f.problem, &lists, &result);
    assert_int_equal(result.lists, 2 * LEN);
    assert_float_equal(quality_recall(&result), (1 + 0.5) / 2, 1e-6);
    assert_float_equal(quality_mass(&result), (0.7 + 9. / 12) / 2, 1e-6);
}

/* Row t sees keys 0 .. t: at t = 23 leaf 1 counts half. And no more leaves can be recalled than are seen. */
static void test_causal(void **state)
{
    (void)state;
    struct fixture f;
    struct quality result;
    const int64_t rows[] = {23};
    const int32_t list[] = {1, -1};
    struct quality_lists lists = shared(list, 2);
    fixture_make(&f);
    f.problem.causal = true;
    f.problem.rows = rows;
    f.problem.row_count = 1;
    measure(&f.problem, &lists, &result);
    assert_int_equal(result.lists, 1);
    assert_float_equal(quality_recall(&result), 0.5, 1e-6);
    assert_float_equal(quality_mass(&result), (1. / 2 + 0.5 / 8.5) / 2, 1e-6);
    f.problem.topk = 4;
    measure(&f.problem, &lists, &result);
    assert_float_equal(quality_recall(&result), 0.5, 1e-6);
    /* Fewer queries than keys stand at the end: row 0 of one query is position LEN - 1. */
    f.problem.q.len = 1;
    f.problem.rows = NULL;
    measure(&f.problem, &lists, &result);
    assert_int_equal(result.lists, 1);
    assert_float_equal(quality_mass(&result), (0.2 + 1. / 12) / 2, 1e-6);
}

/* A window of 16 tokens at row 39 has half of leaf 1 and half of leaf 2. */
static void test_window_and_softcap(void **state)
{
    (void)state;
    struct fixture f;
    struct quality result;
    const int64_t rows[] = {39};
    const int32_t list[] = {2, 0};
    struct quality_lists lists = shared(list, 2);
    fixture_make(&f);
    f.problem.causal = true;
    f.problem.rows = rows;
    f.problem.row_count = 1;
    f.problem.window = 16;
    measure(&f.problem, &lists, &result);
    assert_float_equal(quality_mass(&result), (3. / 5 + 1. / 2) / 2, 1e-6);
    f.problem.softcap = 0.5f;
    double two = exp(0.5 * tanh(log(2) / 0.5)), three = exp(0.5 * tanh(log(3) / 0.5));
    measure(&f.problem, &lists, &result);
    assert_float_equal(quality_mass(&result), (three / (two + three) + 1. / 2) / 2, 1e-6);
}

/* Rows that see nothing are not judged. */
static void test_empty(void **state)
{
    (void)state;
    struct fixture f;
    struct quality result;
    const int32_t list[] = {0};
    struct quality_lists lists = shared(list, 1);
    fixture_make(&f);
    f.problem.causal = true;
    f.problem.k.len = 10;
    measure(&f.problem, &lists, &result);
    assert_int_equal(result.lists, 10);
    assert_float_equal(quality_mass(&result), 1, 1e-12);
    assert_true(isnan(quality_mass(&(struct quality){0})));
}

/* float16 and bfloat16 in [heads][len] order, several selectors at once, answers. */
static void test_types_and_answers(void **state)
{
    (void)state;
    struct fixture f;
    struct quality results[2] = {{0}};
    uint16_t k[LEN][1][2], q[2][LEN][2];
    const int64_t answer_rows[] = {3, 60, 61}, answer_leaves[] = {1, 1, 3};
    const int32_t zero_two[] = {0, 2}, one_three[] = {1, 3};
    const struct quality_lists lists[] = {shared(zero_two, 2), shared(one_three, 2)};
    for (int half = 0; half < 2; half++) {
        fixture_make(&f);
        memset(results, 0, sizeof results);
        for (int n = 0; n < LEN; n++)
            for (int h = 0; h < 2; h++) {
                float x = f.k[n][0][h];
                k[n][0][h] = half ? float_to_half(x) : float_to_bfloat16(x);
                for (int d = 0; d < 2; d++)
                    q[h][n][d] = h != d ? 0 : half ? 0x3c00 : 0x3f80;
            }
        clattn_dtype dtype = half ? CLATTN_FLOAT16 : CLATTN_BFLOAT16;
        f.problem.k = clattn_tensor_bthd(k, dtype, 1, LEN, 1, 2);
        f.problem.q = clattn_tensor_bhtd(q, dtype, 1, 2, LEN, 2);
        f.problem.answer_rows = answer_rows;
        f.problem.answer_leaves = answer_leaves;
        f.problem.answer_count = 3;
        assert_true(quality_measure(&f.problem, lists, 2, results));
        double mass = (0.1 + 8. / 12 + 0.3 + 1. / 12) / 2;
        assert_float_equal(quality_mass(&results[0]), mass, 2e-2);
        assert_float_equal(quality_mass(&results[1]), 1 - mass, 2e-2);
        assert_int_equal(results[0].answers, 3);
        assert_int_equal(results[0].found, 0);
        assert_int_equal(results[1].found, 3);
    }
}

/* The sample: its flat lists keep what doc/selection.md says, and find what its README says. */
static void test_sample(void **state)
{
    (void)state;
    char folder[3072], name[3][3200];
    const char *srcdir = getenv("srcdir");
    snprintf(folder, sizeof folder, "%s/tests/data/retrieval16k", srcdir ? srcdir : "..");
    const char *const files[] = {"pos", "answer_pos", "needle_pos"};
    for (int i = 0; i < 3; i++)
        snprintf(name[i], sizeof name[i], "%s/%s.npy", folder, files[i]);
    struct npy q = npy_read(folder, "q", "f2"), k = npy_read(folder, "k", "f2");
    struct npy lists[] = {npy_read(folder, "sel_pisa", "i4"), npy_read(folder, "sel_flat_lse", "i4")};
    struct quality_files rows;
    assert_int_equal(quality_files_open(&rows, name[0], name[1], name[2], 1024, 512, 16384, 64), STATUS_OK);
    assert_int_equal(rows.row_count, 46);
    assert_int_equal(rows.answer_count, 16);
    struct quality_problem problem = {.q = clattn_tensor_bthd(q.data, CLATTN_FLOAT16, 1, 512, 16, 64),
                                      .k = clattn_tensor_bthd(k.data, CLATTN_FLOAT16, 1, 16384, 1, 64),
                                      .causal = true,
                                      .scale = CLATTN_SCALE_DEFAULT,
                                      .leaf = 64,
                                      .topk = 8,
                                      .row_count = 1};
    /* The lists are those of `pos`: a row of them at a time. */
    struct quality sums[2] = {{0}};
    for (int64_t n = 0; n < rows.row_count; n++) {
        problem.rows = &rows.rows[n];
        for (int s = 0; s < 2; s++) {
            const struct quality_lists one = {(const int32_t *)lists[s].data + 8 * n, 8, 1, 512};
            assert_true(quality_measure(&problem, &one, 1, &sums[s]));
            for (int64_t a = 0; a < rows.answer_count; a++)
                for (int e = 0; e < 8 && rows.answer_rows[a] == rows.rows[n]; e++)
                    sums[s].found += one.indices[e] == rows.answer_leaves[a];
        }
    }
    assert_int_equal(sums[0].found, 2);
    assert_int_equal(sums[1].found, 16);
    assert_true(quality_share(&sums[1]) > quality_share(&sums[0]) && quality_share(&sums[1]) < 1);
    assert_true(quality_recall(&sums[1]) > 0.7 && quality_recall(&sums[1]) < 0.9);
    quality_files_close(&rows);
    npy_free(&q);
    npy_free(&k);
    npy_free(&lists[0]);
    npy_free(&lists[1]);
    assert_int_equal(quality_files_open(&rows, NULL, name[1], NULL, 0, 512, 16384, 64), STATUS_USAGE);
    quality_files_close(&rows);
    assert_int_equal(quality_files_open(&rows, "absent.npy", NULL, NULL, 0, 512, 16384, 64), STATUS_FAILED);
    assert_non_null(strstr(told, "absent.npy"));
    quality_files_close(&rows);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shared_by_heads), cmocka_unit_test(test_own_lists),
        cmocka_unit_test(test_causal),          cmocka_unit_test(test_window_and_softcap),
        cmocka_unit_test(test_empty),           cmocka_unit_test(test_types_and_answers),
        cmocka_unit_test(test_sample),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
