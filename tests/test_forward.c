/* SPDX-License-Identifier: MIT */
/* Attention over block lists against the definition: shapes x types x layouts x lists, and difficult values. */

#include "fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define F32 CLATTN_FLOAT32
#define F16 CLATTN_FLOAT16
#define BF16 CLATTN_BFLOAT16

/* name, class, batch, q_len, kv_len, kv_heads, group, dim, dim_v, dtype, layout, all keys */
static const struct shape shapes[] = {
    {"small", SIZE_TINY, 1, 3, 70, 1, 2, 64, 64, F32, LAYOUT_BTHD, false},
    {"one key", SIZE_TINY, 1, 1, 1, 1, 1, 64, 64, F32, LAYOUT_BTHD, false},
    {"plain", SIZE_NORMAL, 2, 37, 300, 2, 4, 64, 64, F32, LAYOUT_BTHD, false},
    {"plain, all keys", SIZE_NORMAL, 2, 37, 300, 2, 4, 64, 64, F32, LAYOUT_BHTD, true},
    {"padded", SIZE_NORMAL, 2, 20, 129, 2, 4, 64, 64, F32, LAYOUT_PADDED, false},
    {"more queries than keys", SIZE_NORMAL, 1, 70, 33, 2, 4, 64, 64, F32, LAYOUT_BTHD, false},
    {"group 16, half", SIZE_NORMAL, 1, 9, 515, 1, 16, 64, 64, F16, LAYOUT_BTHD, false},
    {"bfloat16", SIZE_NORMAL, 1, 33, 200, 2, 3, 100, 60, BF16, LAYOUT_PADDED, false},
    {"dim 128", SIZE_NORMAL, 1, 11, 257, 2, 1, 128, 128, F32, LAYOUT_BHTD, false},
    {"dim 256", SIZE_NORMAL, 1, 5, 90, 1, 2, 256, 256, F16, LAYOUT_BTHD, false},
    {"dim 1", SIZE_CPU, 1, 5, 90, 1, 1, 1, 1, F32, LAYOUT_BTHD, false},
    {"dim 3 by 256", SIZE_CPU, 1, 5, 90, 2, 2, 3, 256, F32, LAYOUT_BTHD, false},
    {"dim 256 by 1", SIZE_CPU, 1, 5, 90, 2, 2, 256, 1, BF16, LAYOUT_PADDED, true},
    {"dim 16, group 5", SIZE_CPU, 2, 19, 64, 1, 5, 16, 16, F32, LAYOUT_BTHD, false},
    {"dim 60, group 12", SIZE_CPU, 1, 7, 333, 1, 12, 60, 60, F16, LAYOUT_BHTD, false},
    {"dim 80, group 7", SIZE_CPU, 1, 17, 100, 2, 7, 80, 80, BF16, LAYOUT_BTHD, true},
    {"dim 96, group 3", SIZE_CPU, 1, 31, 161, 2, 3, 96, 96, F16, LAYOUT_PADDED, false},
    {"dim 120, group 2", SIZE_CPU, 1, 21, 150, 3, 2, 120, 120, F32, LAYOUT_BTHD, false},
    {"dim 192 by 128", SIZE_CPU, 1, 13, 140, 1, 4, 192, 128, F32, LAYOUT_BTHD, false},
    {"dim 65 by 63", SIZE_CPU, 1, 13, 140, 1, 4, 65, 63, F32, LAYOUT_PADDED, false},
};

/* Every shape with the dense list NULL, and with random lists of every block size, q_block and number of list
 * heads. */
static void test_shapes(void **state)
{
    static const int32_t blocks[] = {16, 32, 64, 128}, q_blocks[] = {1, 4, 16, 7};
    (void)state;
    for (int n = 0; n < COUNT(shapes); n++) {
        const struct shape *shape = &shapes[n];
        struct random random = random_seeded((uint64_t)n);
        struct fixture f = fixture_new(shape, &random);
        fixture_check_all(shape->size, &f, NULL);
        for (int variant = 0; variant < 3; variant++) {
            int32_t block = shape->size == SIZE_CPU ? blocks[(n + variant) % 4] : 64;
            int32_t heads = variant == 0 ? shape->kv_heads : variant == 1 ? 1 : shape->kv_heads * shape->group;
            struct spans spans = fixture_spans(&f, q_blocks[(n + variant) % 4]);
            struct lists lists =
                lists_random(&random, &spans, block, q_blocks[(n + variant) % 4], heads, 1 + n % 5, 0.8);
            fixture_check_all(shape->size, &f, &lists);
            lists_free(&lists);
        }
        fixture_free(&f);
    }
    target_report("shapes");
}

/* Each block size, with lists that repeat, descend and have holes. */
static void test_block_sizes(void **state)
{
    (void)state;
    for (int32_t block = 16; block <= 128; block *= 2) {
        struct random random = random_seeded(100 + (uint64_t)block);
        struct shape shape = shapes[2];
        struct fixture f = fixture_new(&shape, &random);
        struct spans spans = fixture_spans(&f, 1);
        struct lists lists = lists_random(&random, &spans, block, 1, 2, 6, 0.7);
        for (int64_t row = 0; row < lists.desc.rows * 2; row++) { /* a duplicate and a hole in front */
            lists.indices[row * 6 + 5] = lists.indices[row * 6 + 1];
            lists.indices[row * 6] = -1;
        }
        fixture_check_all(SIZE_NORMAL, &f, &lists);
        lists_free(&lists);
        fixture_free(&f);
    }
    target_report("block sizes");
}

/* Scales other than the default; 0 is 0: the mean of the values. */
static void test_scales(void **state)
{
    static const float scales[] = {0, 1, -0.25f, 1e-30f, 3.5f};
    (void)state;
    for (int n = 0; n < COUNT(scales); n++) {
        struct random random = random_seeded(200);
        struct shape shape = {"scale", SIZE_TINY, 1, 5, 150, 2, 2, 64, 64, F32, LAYOUT_BTHD, false};
        struct fixture f = fixture_new(&shape, &random);
        f.attention.scale = scales[n];
        fixture_check_all(n < 2 ? SIZE_TINY : SIZE_NORMAL, &f, NULL);
        fixture_free(&f);
    }
    target_report("scales");
}

/* 16-bit inputs with a float32 result, which must be as right as float32. */
static void test_float_output(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        struct random random = random_seeded(300 + (uint64_t)n);
        struct shape shape = {"float32 result", SIZE_NORMAL, 1,    9, 200, 1, 16, 64, 64,
                              n ? BF16 : F16,   LAYOUT_BTHD, false};
        struct fixture f = fixture_new(&shape, &random);
        fixture_out_dtype(&f, F32);
        fixture_check_all(SIZE_NORMAL, &f, NULL);
        fixture_free(&f);
    }
    target_report("float32 result");
}

/* The same computation with every intermediate result rounded to the type: the largest error. */
static double naive_error(const struct fixture *f, const struct expected *e)
{
    const clattn_tensor *q = &f->q.view, *k = &f->k.view, *v = &f->v.view;
    double worst = 0, p[200], scale = scale_of(&f->attention, k);
    for (int64_t row = 0; row < q->len * q->heads; row++) {
        int64_t i = row / q->heads, h = row % q->heads, keys = e->keys[row];
        double most = -INFINITY, sum = 0;
        for (int64_t j = 0; j < keys; j++) {
            double dot = 0;
            for (int64_t d = 0; d < q->dim; d++)
                dot += tensor_get(q, 0, i, h, d) * tensor_get(k, 0, j, h * k->heads / q->heads, d);
            p[j] = widen16(q->dtype, narrow16(q->dtype, scale * dot));
            most = fmax(most, p[j]);
        }
        for (int64_t j = 0; j < keys; j++)
            sum += p[j] = widen16(q->dtype, narrow16(q->dtype, exp(p[j] - most)));
        for (int64_t d = 0; d < v->dim; d++) {
            double value = 0;
            for (int64_t j = 0; j < keys; j++)
                value += p[j] / sum * tensor_get(v, 0, j, h * k->heads / q->heads, d);
            value = widen16(q->dtype, narrow16(q->dtype, value));
            worst = fmax(worst, fabs(value - e->out[row * v->dim + d]));
        }
    }
    return worst;
}

/* 16-bit types: at most twice the error of the naive computation in that type. */
static void test_against_naive(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        struct random random = random_seeded(350 + (uint64_t)n);
        struct shape shape = {"naive", SIZE_NORMAL,    1,           9,    200, 1, 16, 64,
                              64,      n ? BF16 : F16, LAYOUT_BTHD, false};
        struct fixture f = fixture_new(&shape, &random);
        struct forward problem = fixture_problem(&f, NULL);
        struct expected expected = expected_forward(&problem);
        double naive = naive_error(&f, &expected);
        FOR_EACH_TARGET (target) {
            double worst = 0;
            if (!target_runs(target, SIZE_NORMAL)) continue;
            fixture_forward(target, &f, NULL);
            for (int64_t m = 0; m < 9 * 16 * 64; m++)
                worst = fmax(worst,
                             fabs(tensor_get(&f.out.view, 0, m / 1024, m / 64 % 16, m % 64) - expected.out[m]));
            print_message("%s, %s: error %.2g, naive %.2g\n", target->label, dtype_text(shape.dtype), worst,
                          naive);
            if (!(worst <= 2 * naive)) fail_msg("%s: error %g, naive %g", target->label, worst, naive);
        }
        expected_free(&expected);
        fixture_free(&f);
    }
    target_report("against naive");
}

/* Without lse, nothing else changes. */
static void test_no_lse(void **state)
{
    (void)state;
    struct random random = random_seeded(400);
    struct fixture f = fixture_new(&shapes[2], &random);
    struct array kept = array_new(F32, 2, 37, 8, 64, LAYOUT_BTHD);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_NORMAL)) continue;
        fixture_forward(target, &f, NULL);
        memcpy(kept.raw, f.out.raw, f.out.raw_elements * 4);
        array_poison(&f.out);
        array_poison(&f.lse);
        check_success(target,
                      clattn_attention_forward(target->context, &f.attention, &f.q.view, &f.k.view, &f.v.view,
                                               NULL, &f.out.view, NULL, NULL),
                      "without lse");
        assert_true(tensor_equal_bits(&kept.view, &f.out.view));
        assert_true(array_untouched(&f.lse));
    }
    array_free(&kept);
    fixture_free(&f);
    target_report("no lse");
}

/* ---- difficult values ---- */

/* Every combination of fills of q, k and v in each type; some scores are huge, equal, zero or denormal. */
static void test_fills(void **state)
{
    static const enum fill fills[] = {FILL_CONSTANT, FILL_ZERO,        FILL_HUGE,
                                      FILL_DENORMAL, FILL_ALTERNATING, FILL_INTEGER};
    static const clattn_dtype dtypes[] = {F32, F16, BF16};
    (void)state;
    for (int n = 0; n < COUNT(fills) * COUNT(fills) * 3; n++) {
        struct shape shape = {"fills", SIZE_CPU, 1, 3, 70, 1, 2, 64, 64, dtypes[n % 3], LAYOUT_BTHD, false};
        enum fill fill_q = fills[n / 3 % COUNT(fills)], fill_k = fills[n / 3 / COUNT(fills)];
        struct random random = random_seeded(500 + (uint64_t)n);
        struct fixture f = fixture_new(&shape, &random);
        char name[64];
        snprintf(name, sizeof name, "q %s, k %s, %s", fill_name(fill_q), fill_name(fill_k),
                 dtype_text(shape.dtype));
        f.name = name;
        array_fill(&f.q, fill_q, &random);
        array_fill(&f.k, fill_k, &random);
        array_fill(&f.v, fills[n % COUNT(fills)], &random);
        f.exact_logits = fill_q != FILL_DENORMAL && fill_k != FILL_DENORMAL;
        fixture_check_all(n % 3 == 0 ? SIZE_NORMAL : SIZE_CPU, &f, NULL);
        fixture_free(&f);
    }
    target_report("fills");
}

/* Keys with a logit of -inf weigh nothing, also when the whole first block and the row's own key are such. */
static void test_minus_infinity(void **state)
{
    (void)state;
    struct random random = random_seeded(600);
    struct shape shape = {"-inf keys", SIZE_TINY, 1, 3, 70, 1, 2, 64, 64, F32, LAYOUT_BTHD, true};
    struct fixture f = fixture_new(&shape, &random);
    for (int64_t i = 0; i < 3; i++)
        for (int64_t h = 0; h < 2; h++)
            tensor_set(&f.q.view, 0, i, h, 5, 0.75);
    for (int64_t j = 0; j < 70; j++)
        if (j < 65 || j == 69) tensor_set(&f.k.view, 0, j, 0, 5, -INFINITY);
    fixture_check_all(SIZE_TINY, &f, NULL);
    fixture_free(&f);
    target_report("-inf keys");
}

/* An infinite value that has weight makes its output element infinite and no other. */
static void test_infinite_value(void **state)
{
    (void)state;
    struct random random = random_seeded(700);
    struct shape shape = {"infinite values", SIZE_TINY, 1, 3, 70, 1, 2, 64, 64, F32, LAYOUT_BTHD, true};
    struct fixture f = fixture_new(&shape, &random);
    tensor_set(&f.v.view, 0, 11, 0, 7, INFINITY);
    tensor_set(&f.v.view, 0, 69, 0, 9, -INFINITY);
    fixture_check_all(SIZE_TINY, &f, NULL);
    fixture_free(&f);
    target_report("infinite values");
}

/* NaN keys and values stay with the rows that list them: later keys and other blocks must not leak, not even as
 * 0 * NaN. */
static void test_nan_stays(void **state)
{
    (void)state;
    struct random random = random_seeded(800);
    struct shape shape = {"NaN elsewhere", SIZE_TINY, 1, 6, 200, 1, 2, 64, 64, F32, LAYOUT_BTHD, false};
    struct fixture f = fixture_new(&shape, &random);
    struct spans spans = fixture_spans(&f, 1);
    struct lists lists = lists_all(&spans, 64, 1);
    for (int64_t i = 0; i < 6; i++) /* block 1 is not listed; block 3 holds the rows' own and later keys */
        lists.indices[i * lists.desc.topk + 1] = -1;
    for (int64_t j = 64; j < 200; j++)
        if (j < 128 || j == 197 || j == 199)
            for (int64_t d = 0; d < 64; d++) {
                tensor_set(&f.k.view, 0, j, 0, d, NAN);
                tensor_set(&f.v.view, 0, j, 0, d, j == 199 ? INFINITY : NAN);
            }
    struct fixture rows = f; /* only rows 0 to 2, at positions 194 to 196, see no NaN */
    struct forward problem = fixture_problem(&f, &lists);
    struct expected expected = expected_forward(&problem);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_TINY)) continue;
        fixture_forward(target, &f, &lists);
        clattn_tensor out = tensor_rows(&f.out.view, 0, 3), lse = tensor_rows(&f.lse.view, 0, 3);
        problem.q = tensor_rows(&rows.q.view, 0, 3);
        expected_compare(&expected, &problem, &out, &lse, target->label, f.name);
    }
    expected_free(&expected);
    lists_free(&lists);
    fixture_free(&f);
    target_report("NaN elsewhere");
}

/* Rows without keys: nothing visible, nothing listed, or only keys that are not visible. */
static void test_empty_rows(void **state)
{
    (void)state;
    struct random random = random_seeded(900);
    struct shape shape = {"empty rows", SIZE_TINY, 1, 70, 66, 1, 2, 64, 64, F32, LAYOUT_BTHD, false};
    struct fixture f = fixture_new(&shape, &random);
    struct spans spans = fixture_spans(&f, 1);
    struct lists lists = lists_random(&random, &spans, 64, 1, 1, 1, 0);
    for (int64_t i = 10; i < 70; i++)
        lists.indices[i] = i < 40 ? 1 : i % 3 - 1; /* block 1 is visible from row 68 on */
    fixture_check_all(SIZE_TINY, &f, &lists);
    struct forward problem = fixture_problem(&f, &lists);
    struct expected expected = expected_forward(&problem);
    assert_true(isinf(expected.lse[20 * 2]) && expected.keys[68 * 2] == 1);
    expected_free(&expected);
    lists_free(&lists);
    fixture_free(&f);
    target_report("empty rows");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),         cmocka_unit_test(test_block_sizes),
        cmocka_unit_test(test_scales),         cmocka_unit_test(test_float_output),
        cmocka_unit_test(test_against_naive),  cmocka_unit_test(test_no_lse),
        cmocka_unit_test(test_fills),          cmocka_unit_test(test_minus_infinity),
        cmocka_unit_test(test_infinite_value), cmocka_unit_test(test_nan_stays),
        cmocka_unit_test(test_empty_rows),
    };
    return cmocka_run_group_tests_name("forward", tests, targets_open, targets_close);
}
