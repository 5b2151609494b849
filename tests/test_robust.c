/* SPDX-License-Identifier: MIT */
/* Robust selection: identities with the other selectors, variants against the reference, and the answers of
 * real data. */

#include "fixture.h"
#include "npy.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct target *reference_target(void)
{
    FOR_EACH_TARGET (target)
        if (target->info.backend == CLATTN_BACKEND_REFERENCE) return target;
    return NULL;
}

static clattn_select_desc robust_desc(int32_t topk, int32_t leaf, int32_t beam, clattn_node_score score,
                                      int32_t vote, int32_t prefilter, int32_t parts)
{
    clattn_select_desc select = select_desc(CLATTN_SELECT_ROBUST, topk, leaf);
    select.beam = beam;
    select.score = score;
    select.vote = vote;
    select.prefilter = prefilter;
    select.parts = parts;
    return select;
}

static void expect_equal(const struct lists *a, const struct lists *b, int64_t entries, const char *label,
                         const char *name)
{
    for (int64_t n = 0; n < entries; n++)
        if (a->indices[n] != b->indices[n])
            fail_msg("%s: %s: entry %lld is leaf %d; %d is right", label, name, (long long)n, b->indices[n],
                     a->indices[n]);
}

/* The first one is for every OpenCL implementation. */
static const struct shape shapes[] = {
    {"tiny", SIZE_TINY, 1, 12, 410, 1, 3, 20, 20, CLATTN_FLOAT32, LAYOUT_PADDED, false},
    {"one head", SIZE_CPU, 1, 300, 300, 1, 1, 16, 16, CLATTN_FLOAT32, LAYOUT_BTHD, false},
    {"group 16", SIZE_CPU, 1, 60, 900, 1, 16, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false},
    {"group 5", SIZE_CPU, 2, 80, 517, 2, 5, 20, 20, CLATTN_BFLOAT16, LAYOUT_PADDED, false},
    {"group 33", SIZE_CPU, 1, 20, 700, 1, 33, 60, 60, CLATTN_FLOAT32, LAYOUT_BHTD, false},
    {"all keys", SIZE_CPU, 1, 30, 611, 1, 4, 32, 32, CLATTN_FLOAT32, LAYOUT_BTHD, true},
    {"more queries", SIZE_CPU, 1, 150, 100, 1, 2, 16, 16, CLATTN_FLOAT32, LAYOUT_BTHD, false},
};

static int64_t entries_of(const struct shape *s, const clattn_select_desc *select)
{
    return s->batch * s->q_len * s->kv_heads * select->topk;
}

/* A beam over everything with summed exact scores is flat selection; a beam of topk with PISA's score is PISA.
 */
static void test_identities(void **state)
{
    (void)state;
    const clattn_select_desc pairs[][2] = {
        {select_desc(CLATTN_SELECT_FLAT_LSE, 4, 16), robust_desc(4, 16, 200, CLATTN_SCORE_AHEAD, 0, 0, 4)},
        {select_desc(CLATTN_SELECT_PISA, 4, 16), robust_desc(4, 16, 1, CLATTN_SCORE_LSE, 0, 0, 4)},
    };
    FOR_EACH_TARGET (target)
        for (const struct shape *s = shapes; s < shapes + COUNT(shapes); s++) {
            if (!target_runs(target, s == shapes ? SIZE_NORMAL : SIZE_CPU)) continue;
            struct random random = random_seeded((uint64_t)(s - shapes));
            struct fixture f = fixture_new(s, &random);
            for (int n = 0; n < COUNT(pairs); n++) {
                struct lists a = fixture_select(target, &f, &pairs[n][0], NULL),
                             b = fixture_select(target, &f, &pairs[n][1], NULL);
                expect_equal(&a, &b, entries_of(s, &pairs[n][0]), target->label, s->name);
                free(a.indices);
                free(b.indices);
            }
            fixture_free(&f);
        }
    target_report("identities");
}

/* OpenCL kernels are built for every leaf; scores, votes and parts are their arguments. */
static const struct variant {
    int32_t topk, leaf, beam;
    clattn_node_score score;
    int32_t vote, prefilter, parts;
} variants[] = {
    {8, 64, 32, CLATTN_SCORE_AHEAD, 1, 32, 4}, {3, 16, 5, CLATTN_SCORE_AHEAD, 1, 7, 4},
    {4, 16, 6, CLATTN_SCORE_BLEND, 1, 6, 1},   {4, 32, 4, CLATTN_SCORE_BOUND, 0, 5, 4},
    {2, 16, 9, CLATTN_SCORE_LSE, 1, 0, 4},     {1, 16, 3, CLATTN_SCORE_BLEND, 0, 2, 4},
    {5, 16, 5, CLATTN_SCORE_BOUND, 1, 30, 1},  {6, 16, 4, CLATTN_SCORE_AHEAD, 0, 8, 1},
    {4, 16, 70, CLATTN_SCORE_AHEAD, 1, 12, 4},
};

/* More nodes in a beam than local memory has room for the scores of, or a leaf of another size. */
static enum test_size variant_size(const struct shape *s, const struct variant *v)
{
    if (v->beam > 64) return s == shapes ? SIZE_NORMAL : SIZE_CPU;
    return v->leaf == 16 ? s->size : SIZE_CPU;
}

static void test_variants(void **state)
{
    (void)state;
    for (const struct shape *s = shapes; s < shapes + COUNT(shapes); s++)
        for (const struct variant *v = variants; v < variants + COUNT(variants); v++) {
            struct random random = random_seeded((uint64_t)(s - shapes) * 31 + (uint64_t)(v - variants));
            struct fixture f = fixture_new(s, &random);
            clattn_select_desc desc =
                robust_desc(v->topk, v->leaf, v->beam, v->score, v->vote, v->prefilter, v->parts);
            struct lists expected = fixture_select(reference_target(), &f, &desc, NULL);
            FOR_EACH_TARGET (target) {
                if (!target_runs(target, variant_size(s, v))) continue;
                struct lists got = fixture_select(target, &f, &desc, NULL);
                expect_equal(&expected, &got, entries_of(s, &desc), target->label, s->name);
                free(got.indices);
            }
            free(expected.indices);
            fixture_free(&f);
        }
    target_report("variants");
}

/* A single large key in one leaf: no mean shows it, the bounds do. Constant keys: the lowest leaves. */
static void test_planted(void **state)
{
    (void)state;
    enum { KEYS = 4096, DIM = 32, LEAF = 64, PLANTED = 37 };
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_CPU)) continue;
        struct random random = random_seeded(5);
        struct array q = array_new(CLATTN_FLOAT32, 1, 1, 2, DIM, LAYOUT_BTHD),
                     k = array_new(CLATTN_FLOAT32, 1, KEYS, 1, DIM, LAYOUT_BTHD);
        clattn_select_desc select = robust_desc(4, LEAF, 8, CLATTN_SCORE_AHEAD, 1, 8, 4);
        clattn_blocks *blocks = NULL;
        int32_t list[4];
        array_fill(&q, FILL_NORMAL, &random);
        array_fill(&k, FILL_NORMAL, &random);
        for (int d = 0; d < DIM; d++)
            tensor_set(&k.view, 0, PLANTED * LEAF + 11, 0, d, 4 * tensor_get(&q.view, 0, 0, 1, d));
        check_success(target,
                      clattn_select(target->context, NULL, &select, &q.view, &k.view, NULL, &blocks, NULL),
                      "planted");
        check_success(target, clattn_blocks_read(target->context, blocks, list, NULL), "read");
        if (list[1] != PLANTED)
            fail_msg("%s: the list is %d %d %d %d", target->label, list[0], list[1], list[2], list[3]);
        array_fill(&k, FILL_CONSTANT, &random);
        check_success(target,
                      clattn_select(target->context, NULL, &select, &q.view, &k.view, NULL, &blocks, NULL),
                      "constant");
        check_success(target, clattn_blocks_read(target->context, blocks, list, NULL), "read");
        if (list[0] != 0 || list[1] != 1 || list[2] != KEYS / LEAF - 2 || list[3] != KEYS / LEAF - 1)
            fail_msg("%s: the list of constant keys is %d %d %d %d", target->label, list[0], list[1], list[2],
                     list[3]);
        clattn_blocks_release(target->context, blocks);
        array_free(&q);
        array_free(&k);
    }
}

/* The lists of a query do not depend on later keys. With the kernels of the first shape. */
static void test_later_keys(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_NORMAL)) continue;
        struct random random = random_seeded(6);
        struct shape s = {"prefix", SIZE_NORMAL, 1,  1000,           1000,        1,
                          3,        20,          20, CLATTN_FLOAT32, LAYOUT_BTHD, false};
        struct fixture f = fixture_new(&s, &random);
        clattn_select_desc select = robust_desc(4, 16, 8, CLATTN_SCORE_AHEAD, 1, 8, 4);
        struct lists whole = fixture_select(target, &f, &select, NULL);
        for (int64_t length = 1; length < 1000; length += 111) {
            clattn_tensor q = tensor_rows(&f.q.view, length - 1, length), k = tensor_rows(&f.k.view, 0, length);
            clattn_blocks *blocks = NULL;
            int32_t list[4];
            check_success(target, clattn_select(target->context, NULL, &select, &q, &k, NULL, &blocks, NULL),
                          "prefix");
            check_success(target, clattn_blocks_read(target->context, blocks, list, NULL), "read");
            assert_memory_equal(list, whole.indices + (length - 1) * 4, sizeof list);
            clattn_blocks_release(target->context, blocks);
        }
        free(whole.indices);
        fixture_free(&f);
    }
}

/* Packed sequences, an empty one among them, equal runs of their own. With the kernels of the first shape. */
static void test_packed(void **state)
{
    (void)state;
    static const int32_t cu_q[] = {0, 40, 40, 49, 50}, cu_k[] = {0, 300, 390, 399, 800};
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_NORMAL)) continue;
        struct random random = random_seeded(8);
        struct shape s = {"packed", SIZE_NORMAL, 1, 50, 800, 2, 3, 20, 20, CLATTN_FLOAT32, LAYOUT_BTHD, false};
        struct fixture f = fixture_new(&s, &random);
        fixture_packed(&f, 4, cu_q, cu_k);
        clattn_select_desc select = robust_desc(4, 16, 6, CLATTN_SCORE_BLEND, 1, 9, 4);
        struct lists packed = fixture_select(target, &f, &select, NULL);
        for (int n = 0; n < 4; n++) {
            clattn_tensor q = tensor_rows(&f.q.view, cu_q[n], cu_q[n + 1]),
                          k = tensor_rows(&f.k.view, cu_k[n], cu_k[n + 1]);
            clattn_blocks *blocks = NULL;
            int32_t lists[40 * 2 * 4];
            size_t bytes = (size_t)q.len * 2 * 4 * sizeof *lists;
            if (q.len == 0) continue;
            check_success(target, clattn_select(target->context, NULL, &select, &q, &k, NULL, &blocks, NULL),
                          "alone");
            check_success(target, clattn_blocks_read(target->context, blocks, lists, NULL), "read");
            assert_memory_equal(lists, packed.indices + cu_q[n] * 2 * 4, bytes);
            clattn_blocks_release(target->context, blocks);
        }
        free(packed.indices);
        fixture_free(&f);
    }
}

/* Leaves with a NaN rank last, infinite logits as they compare, whatever the score. */
static void test_special_keys(void **state)
{
    (void)state;
    static const double specials[] = {NAN, INFINITY, -INFINITY, 1e30};
    for (int n = 0; n < COUNT(specials); n++)
        for (int score = CLATTN_SCORE_LSE; score <= CLATTN_SCORE_AHEAD; score++) {
            struct random random = random_seeded(9);
            struct fixture f = fixture_new(&shapes[0], &random);
            clattn_select_desc select = robust_desc(6, 16, 6, (clattn_node_score)score, n % 2, 9, 4);
            tensor_set(&f.k.view, 0, 100, 0, 5, specials[n]);
            tensor_set(&f.k.view, 0, 310, 0, 7, specials[n]);
            struct lists expected = fixture_select(reference_target(), &f, &select, NULL);
            FOR_EACH_TARGET (target) {
                if (!target_runs(target, SIZE_NORMAL)) continue;
                struct lists got = fixture_select(target, &f, &select, NULL);
                expect_equal(&expected, &got, entries_of(&shapes[0], &select), target->label, "special keys");
                free(got.indices);
            }
            free(expected.indices);
            fixture_free(&f);
        }
}

/* Every planted fact of the recording is found, by the same lists everywhere; the paper's rule, on this model,
 * finds two. */
static void test_answers(void **state)
{
    (void)state;
    char folder[3072];
    const char *srcdir = getenv("srcdir");
    snprintf(folder, sizeof folder, "%s/tests/data/retrieval16k", srcdir ? srcdir : "..");
    struct npy q = npy_read(folder, "q", "f2"), k = npy_read(folder, "k", "f2");
    struct npy answer = npy_read(folder, "answer_pos", "i4"), needle = npy_read(folder, "needle_pos", "i4");
    int64_t first = k.shape[1] - q.shape[1];
    clattn_tensor queries = clattn_tensor_bthd(q.data, CLATTN_FLOAT16, 1, q.shape[1], q.shape[2], q.shape[3]);
    clattn_tensor keys = clattn_tensor_bthd(k.data, CLATTN_FLOAT16, 1, k.shape[1], 1, k.shape[3]);
    clattn_select_desc select = select_desc(CLATTN_SELECT_ROBUST, 8, 64);
    int32_t *lists = malloc((size_t)q.shape[1] * 8 * sizeof *lists), first_lists[32][8];
    bool is_first = true;
    assert_true(answer.count <= 32);
    FOR_EACH_TARGET (target) {
        clattn_blocks *blocks = NULL;
        int found = 0;
        if (target->info.backend == CLATTN_BACKEND_REFERENCE || !target_runs(target, SIZE_NORMAL)) continue;
        check_success(target,
                      clattn_select(target->context, NULL, &select, &queries, &keys, NULL, &blocks, NULL),
                      "select");
        check_success(target, clattn_blocks_read(target->context, blocks, lists, NULL), "read");
        for (int64_t n = 0; n < answer.count; n++) {
            const int32_t *list = lists + (((const int32_t *)answer.data)[n] - first) * 8;
            int32_t leaf = ((const int32_t *)needle.data)[n] / 64;
            bool has = false;
            for (int i = 0; i < 8; i++)
                has = has || list[i] == leaf;
            found += has;
            if (is_first) memcpy(first_lists[n], list, sizeof first_lists[n]);
            assert_memory_equal(list, first_lists[n], sizeof first_lists[n]);
        }
        is_first = false;
        print_message("%s: %d of %d answers\n", target->label, found, (int)answer.count);
        assert_int_equal(found, answer.count);
        clattn_blocks_release(target->context, blocks);
    }
    free(lists);
    npy_free(&q);
    npy_free(&k);
    npy_free(&answer);
    npy_free(&needle);
}

static void test_errors(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target) {
        struct random random = random_seeded(7);
        struct array q = array_new(CLATTN_FLOAT32, 1, 20, 1, 16, LAYOUT_BTHD),
                     k = array_new(CLATTN_FLOAT32, 1, 20, 1, 16, LAYOUT_BTHD);
        clattn_select_desc select = select_desc(CLATTN_SELECT_ROBUST, 2, 16),
                           wrong[4] = {select, select, select, select};
        clattn_blocks *blocks = NULL;
        clattn_pyramid *pyramid = NULL;
        char text[512];
        array_fill(&q, FILL_NORMAL, &random);
        array_fill(&k, FILL_NORMAL, &random);
        wrong[0].beam = 0;
        wrong[1].prefilter = -1;
        wrong[2].parts = 3;
        wrong[3].score = 4;
        const char *const names[] = {"beam", "prefilter", "parts", "score"};
        for (int n = 0; n < 4; n++) {
            assert_int_equal(
                clattn_select(target->context, NULL, &wrong[n], &q.view, &k.view, NULL, &blocks, NULL),
                CLATTN_INVALID_ARGUMENT);
            clattn_context_error(target->context, text, sizeof text);
            assert_non_null(strstr(text, names[n]));
        }
        check_success(target, clattn_pyramid_build(target->context, NULL, 16, &k.view, &pyramid, NULL),
                      "build");
        assert_int_equal(
            clattn_select(target->context, NULL, &select, &q.view, &k.view, pyramid, &blocks, NULL),
            CLATTN_INVALID_ARGUMENT);
        clattn_context_error(target->context, text, sizeof text);
        assert_non_null(strstr(text, "clattn_pyramid_build_for"));
        assert_null(blocks);
        clattn_pyramid_release(target->context, pyramid);
        array_free(&q);
        array_free(&k);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_identities), cmocka_unit_test(test_variants),
                                       cmocka_unit_test(test_planted),    cmocka_unit_test(test_later_keys),
                                       cmocka_unit_test(test_packed),     cmocka_unit_test(test_special_keys),
                                       cmocka_unit_test(test_answers),    cmocka_unit_test(test_errors)};
    return cmocka_run_group_tests_name("robust", tests, targets_open, targets_close);
}
