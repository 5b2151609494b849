/* SPDX-License-Identifier: MIT */
/* Selection: every selector against the definition, ties, forced leaves, and cases with a known answer. */

#include "fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define F32 CLATTN_FLOAT32
#define F16 CLATTN_FLOAT16
#define BF16 CLATTN_BFLOAT16

static const struct {
    struct shape shape;
    int32_t topk, leaf, forced_first, forced_last;
} cases[] = {
    {{"tiny", SIZE_TINY, 1, 2, 300, 1, 2, 64, 64, F32, LAYOUT_BTHD, false}, 4, 16, 1, 2},
    {{"prefill", SIZE_NORMAL, 1, 700, 700, 1, 4, 64, 64, F32, LAYOUT_BTHD, false}, 8, 16, 1, 2},
    {{"leaf 64", SIZE_NORMAL, 1, 40, 2500, 2, 4, 64, 64, F32, LAYOUT_PADDED, false}, 8, 64, 1, 2},
    {{"half", SIZE_NORMAL, 1, 40, 1500, 1, 16, 64, 64, F16, LAYOUT_BTHD, false}, 8, 64, 1, 2},
    {{"not causal", SIZE_NORMAL, 1, 13, 1111, 2, 4, 64, 64, F32, LAYOUT_BHTD, true}, 5, 16, 1, 2},
    {{"bfloat16", SIZE_NORMAL, 1, 40, 777, 2, 3, 100, 60, BF16, LAYOUT_PADDED, false}, 6, 32, 1, 2},
    {{"more queries than keys", SIZE_NORMAL, 1, 200, 150, 2, 4, 64, 64, F32, LAYOUT_BTHD, false}, 4, 16, 1, 2},
    {{"two of a batch", SIZE_NORMAL, 2, 20, 600, 2, 4, 64, 64, F32, LAYOUT_BTHD, false}, 4, 16, 1, 2},
    {{"K 1", SIZE_NORMAL, 1, 100, 400, 1, 4, 64, 64, F32, LAYOUT_BTHD, false}, 1, 16, 1, 2},
    {{"K 2", SIZE_NORMAL, 1, 100, 400, 1, 4, 64, 64, F32, LAYOUT_BTHD, false}, 2, 16, 1, 2},
    {{"K 3", SIZE_CPU, 1, 100, 400, 1, 4, 64, 64, F32, LAYOUT_BTHD, false}, 3, 16, 1, 2},
    {{"K 2, three last", SIZE_CPU, 1, 100, 400, 1, 4, 64, 64, F32, LAYOUT_BTHD, false}, 2, 16, 2, 3},
    {{"K above the leaves", SIZE_NORMAL, 1, 100, 200, 1, 4, 64, 64, F32, LAYOUT_BTHD, false}, 32, 16, 1, 2},
    {{"K 512", SIZE_CPU, 1, 10, 9000, 1, 1, 16, 16, F32, LAYOUT_BTHD, false}, 512, 16, 1, 2},
    {{"K 512, few keys", SIZE_CPU, 1, 10, 900, 1, 1, 16, 16, F32, LAYOUT_BTHD, true}, 512, 16, 1, 2},
    {{"nothing forced", SIZE_CPU, 1, 60, 500, 1, 2, 64, 64, F32, LAYOUT_BTHD, false}, 6, 16, 0, 0},
    {{"first forced", SIZE_CPU, 1, 60, 500, 1, 2, 64, 64, F32, LAYOUT_BTHD, false}, 6, 16, 3, 0},
    {{"current forced", SIZE_CPU, 1, 60, 500, 1, 2, 64, 64, F32, LAYOUT_BTHD, false}, 6, 16, 0, 1},
    {{"many forced", SIZE_CPU, 1, 60, 500, 1, 2, 64, 64, F32, LAYOUT_BTHD, false}, 9, 16, 4, 4},
    {{"all forced", SIZE_CPU, 1, 60, 500, 1, 2, 64, 64, F32, LAYOUT_BTHD, false}, 6, 16, 600, 600},
    {{"leaf 128", SIZE_CPU, 1, 50, 4000, 1, 2, 80, 80, F32, LAYOUT_BTHD, false}, 8, 128, 1, 2},
    {{"leaf 32, dim 256", SIZE_CPU, 1, 40, 1025, 1, 5, 256, 256, F16, LAYOUT_BTHD, false}, 7, 32, 1, 2},
    {{"dim 1", SIZE_CPU, 1, 50, 801, 1, 1, 1, 1, F32, LAYOUT_BTHD, true}, 8, 16, 1, 2},
    {{"group 12, dim 33", SIZE_CPU, 1, 12, 1000, 1, 12, 33, 33, BF16, LAYOUT_BTHD, false}, 8, 16, 1, 2},
};

/* Every case with every selector. Most lists have only one right answer, else the test would say little. */
static void test_against_definition(void **state)
{
    (void)state;
    for (int n = 0; n < COUNT(cases) * 5; n++) {
        clattn_select_desc select = select_desc(n % 5, cases[n / 5].topk, cases[n / 5].leaf);
        struct random random = random_seeded((uint64_t)n / 5);
        struct fixture f = fixture_new(&cases[n / 5].shape, &random);
        char name[96];
        snprintf(name, sizeof name, "%s, %s", f.name, selector_name(select.selector));
        f.name = name;
        select.forced_first = cases[n / 5].forced_first;
        select.forced_last = cases[n / 5].forced_last;
        double unique = fixture_check_select(cases[n / 5].shape.size, &f, &select);
        if (unique < 0.9) fail_msg("%s: only %.0f%% of the lists are decided", name, 100 * unique);
        fixture_free(&f);
    }
    target_report("against the definition");
}

/* Lengths around every border, each query of a prefill. */
static void test_lengths(void **state)
{
    static const int lengths[] = {1, 2, 15, 16, 17, 31, 33, 63, 65, 100, 127, 129, 255, 257, 507, 513};
    (void)state;
    for (int n = 0; n < COUNT(lengths); n++) {
        struct shape shape = {"lengths", SIZE_TINY, 1,  lengths[n], lengths[n],  1,
                              1,         64,        64, F32,        LAYOUT_BTHD, n % 4 == 3};
        struct random random = random_seeded(100 + (uint64_t)n);
        struct fixture f = fixture_new(&shape, &random);
        for (int selector = 0; selector < 5; selector++) {
            clattn_select_desc select = select_desc(selector, 4, 16);
            fixture_check_select(lengths[n] < 70 && selector == 0 ? SIZE_TINY : SIZE_CPU, &f, &select);
        }
        fixture_free(&f);
    }
    target_report("lengths");
}

/* Equal keys: all scores are equal, so the lowest indices are chosen, the same on every run. Zero keys, a scale
 * of 0 and a zero of either sign likewise. */
static void test_ties(void **state)
{
    (void)state;
    for (int n = 0; n < 5 * 4; n++) {
        int kind = n / 5;
        struct shape shape = {"ties", SIZE_NORMAL, 1, 3, 1027, 1, 4, 64, 64, F32, LAYOUT_BTHD, false};
        clattn_select_desc select = select_desc(n % 5, 8, 16);
        struct random random = random_seeded(200 + (uint64_t)n);
        struct fixture f = fixture_new(&shape, &random);
        if (kind < 2) array_fill(&f.k, kind ? FILL_CONSTANT : FILL_ZERO, &random);
        if (kind == 2) array_fill_constant(&f.q, 0);
        if (kind == 3) /* -0 and +0 in turn, leaf by leaf */
            for (int64_t i = 0; i < 1027; i++)
                for (int64_t d = 0; d < 64; d++)
                    tensor_set(&f.k.view, 0, i, 0, d, i / 16 % 2 ? 0.0 : -0.0);
        FOR_EACH_TARGET (target) {
            if (!target_runs(target, n % 5 == 0 ? SIZE_TINY : SIZE_NORMAL)) continue;
            struct lists lists = fixture_select(target, &f, &select, NULL);
            /* positions 1024, 1025, 1026 lie in leaf 64; 63 and 64 are forced */
            for (int64_t row = 0; row < 3; row++)
                lists_expect(&lists, row, 0, (int32_t[]){0, 1, 2, 3, 4, 5, 63, 64}, target->label,
                             selector_name(select.selector));
            lists_free(&lists);
        }
        fixture_free(&f);
    }
    target_report("ties");
}

/* Constant keys, not causal: exactly the first K leaves. */
static void test_ties_all_keys(void **state)
{
    (void)state;
    struct shape shape = {"ties, all keys", SIZE_NORMAL, 1, 2, 1024, 1, 4, 64, 64, F32, LAYOUT_BTHD, true};
    struct random random = random_seeded(300);
    struct fixture f = fixture_new(&shape, &random);
    array_fill(&f.k, FILL_CONSTANT, &random);
    for (int selector = 0; selector < 5; selector++) {
        clattn_select_desc select = select_desc(selector, 8, 16);
        FOR_EACH_TARGET (target) {
            if (!target_runs(target, SIZE_NORMAL)) continue;
            struct lists lists = fixture_select(target, &f, &select, NULL);
            lists_expect(&lists, 1, 0, (int32_t[]){0, 1, 2, 3, 4, 5, 6, 7}, target->label,
                         selector_name(selector));
            lists_free(&lists);
        }
    }
    fixture_free(&f);
    target_report("ties, all keys");
}

/* A key of 40 u at the first token of leaf 7 is found by queries along u, by every selector. */
static void test_planted(void **state)
{
    (void)state;
    struct shape shape = {"planted key", SIZE_NORMAL, 1, 5, 2048, 1, 4, 64, 64, F32, LAYOUT_BTHD, false};
    struct random random = random_seeded(400);
    struct fixture f = fixture_new(&shape, &random);
    double u[64], norm = 0;
    for (int d = 0; d < 64; d++) {
        u[d] = random_normal(&random);
        norm += u[d] * u[d];
    }
    for (int64_t d = 0; d < 64; d++) {
        tensor_set(&f.k.view, 0, 7 * 64, 0, d, 40 * u[d] / sqrt(norm));
        for (int64_t i = 0; i < 5 * 4; i++)
            tensor_set(&f.q.view, 0, i / 4, i % 4, d, 8 * u[d] / sqrt(norm));
    }
    for (int selector = 0; selector < 5; selector++) {
        clattn_select_desc select = select_desc(selector, 4, 64);
        FOR_EACH_TARGET (target) {
            if (!target_runs(target, SIZE_NORMAL)) continue;
            struct lists lists = fixture_select(target, &f, &select, NULL);
            for (int64_t row = 0; row < 5; row++)
                lists_expect(&lists, row, 0, (int32_t[]){0, 7, 30, 31}, target->label, selector_name(selector));
            lists_free(&lists);
        }
        fixture_check_select(SIZE_NORMAL, &f, &select);
    }
    fixture_free(&f);
    target_report("planted key");
}

/* The group's score is the sum of each head's logsumexp, not the logsumexp of summed logits. Head 0 looks along
 * axis 0 and head 1 along axis 1. Leaf 1 has one key that both heads like, with 10 on both axes; leaf 2 has one
 * with 11 for head 0 and another with 11 for head 1. Summing first prefers leaf 1 (20 > 11); the right rule
 * leaf 2 (22 > 20). */
static void test_sum_of_logsumexp(void **state)
{
    (void)state;
    struct shape shape = {"sum of logsumexp", SIZE_TINY, 1, 1, 96, 1, 2, 64, 64, F32, LAYOUT_BTHD, true};
    struct random random = random_seeded(500);
    struct fixture f = fixture_new(&shape, &random);
    array_fill_constant(&f.q, 0);
    array_fill_constant(&f.k, 0);
    f.attention.scale = 1;
    tensor_set(&f.q.view, 0, 0, 0, 0, 1);
    tensor_set(&f.q.view, 0, 0, 1, 1, 1);
    tensor_set(&f.k.view, 0, 20, 0, 0, 10);
    tensor_set(&f.k.view, 0, 20, 0, 1, 10);
    tensor_set(&f.k.view, 0, 40, 0, 0, 11);
    tensor_set(&f.k.view, 0, 41, 0, 1, 11);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_TINY)) continue;
        clattn_select_desc select = select_desc(CLATTN_SELECT_FLAT_LSE, 1, 16);
        struct lists lists = fixture_select(target, &f, &select, NULL);
        lists_expect(&lists, 0, 0, (int32_t[]){2}, target->label, f.name);
        lists_free(&lists);
    }
    fixture_free(&f);
    target_report("sum of logsumexp");
}

/* A leaf with a NaN ranks last in flat selection: above only other NaNs, which go by index. */
static void test_nan_ranks_last(void **state)
{
    (void)state;
    struct shape shape = {"NaN ranks last", SIZE_TINY, 1, 1, 128, 1, 2, 64, 64, F32, LAYOUT_BTHD, true};
    struct random random = random_seeded(600);
    struct fixture f = fixture_new(&shape, &random);
    for (int64_t leaf = 0; leaf < 7; leaf++)
        if (leaf != 4 && leaf != 5) tensor_set(&f.k.view, 0, leaf * 16 + leaf, 0, leaf, NAN);
    for (int selector = CLATTN_SELECT_FLAT_MEAN; selector <= CLATTN_SELECT_FLAT_LSE; selector++) {
        clattn_select_desc select = select_desc(selector, 5, 16);
        FOR_EACH_TARGET (target) {
            if (!target_runs(target, SIZE_TINY)) continue;
            struct lists lists = fixture_select(target, &f, &select, NULL);
            lists_expect(&lists, 0, 0, (int32_t[]){0, 1, 4, 5, 7}, target->label, selector_name(selector));
            lists_free(&lists);
        }
    }
    fixture_free(&f);
    target_report("NaN ranks last");
}

/* A query that is NaN has only NaN scores: the lowest indices, and no harm to its neighbours. */
static void test_nan_query(void **state)
{
    (void)state;
    struct shape shape = {"NaN query", SIZE_NORMAL, 1, 4, 900, 1, 4, 64, 64, F32, LAYOUT_BTHD, false};
    struct random random = random_seeded(700);
    struct fixture f = fixture_new(&shape, &random);
    tensor_set(&f.q.view, 0, 1, 2, 63, NAN);
    for (int selector = 0; selector < 5; selector++) {
        clattn_select_desc select = select_desc(selector, 6, 16);
        FOR_EACH_TARGET (target)
            if (target_runs(target, SIZE_NORMAL)) {
                struct lists lists = fixture_select(target, &f, &select, NULL);
                lists_expect(&lists, 1, 0, (int32_t[]){0, 1, 2, 3, 55, 56}, target->label,
                             selector_name(selector));
                lists_free(&lists);
            }
        fixture_check_select(SIZE_NORMAL, &f, &select);
    }
    fixture_free(&f);
    target_report("NaN query");
}

/* A pyramid given by the caller changes nothing, and a list given by the caller is overwritten. */
static void test_given_objects(void **state)
{
    (void)state;
    struct random random = random_seeded(800);
    struct fixture f = fixture_new(&cases[2].shape, &random), other = fixture_new(&cases[2].shape, &random);
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 8, 64);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_NORMAL)) continue;
        struct lists want = fixture_select(target, &f, &select, NULL), got = want;
        size_t entries = (size_t)(want.desc.rows * want.desc.heads * want.desc.topk);
        clattn_pyramid *pyramid = NULL;
        clattn_blocks *blocks = NULL, *given;
        got.indices = malloc(entries * sizeof(int32_t));
        check_success(target,
                      clattn_pyramid_build(target->context, &f.attention, 64, &f.k.view, &pyramid, NULL),
                      "pyramid");
        check_success(target,
                      clattn_select(target->context, &f.attention, &select, &other.q.view, &other.k.view, NULL,
                                    &blocks, NULL),
                      "another list");
        given = blocks;
        check_success(
            target,
            clattn_select(target->context, &f.attention, &select, &f.q.view, &f.k.view, pyramid, &blocks, NULL),
            "with a pyramid");
        assert_ptr_equal(blocks, given);
        check_success(target, clattn_blocks_read(target->context, blocks, got.indices, NULL), "read");
        assert_memory_equal(got.indices, want.indices, entries * sizeof(int32_t));
        clattn_blocks_release(target->context, blocks);
        clattn_pyramid_release(target->context, pyramid);
        lists_free(&want);
        lists_free(&got);
    }
    fixture_free(&f);
    fixture_free(&other);
    target_report("given objects");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_definition),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_ties_all_keys),
        cmocka_unit_test(test_planted),
        cmocka_unit_test(test_sum_of_logsumexp),
        cmocka_unit_test(test_nan_ranks_last),
        cmocka_unit_test(test_nan_query),
        cmocka_unit_test(test_given_objects),
    };
    return cmocka_run_group_tests_name("select", tests, targets_open, targets_close);
}
