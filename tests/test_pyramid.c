/* SPDX-License-Identifier: MIT */
/* Key pyramid: every node against the definition, number of nodes, and bits that later keys do not change. */

#include "fixture.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define F32 CLATTN_FLOAT32
#define F16 CLATTN_FLOAT16
#define BF16 CLATTN_BFLOAT16

static const struct {
    struct shape shape;
    int32_t leaf;
} cases[] = {
    {{"one key", SIZE_TINY, 1, 1, 1, 1, 1, 64, 64, F32, LAYOUT_BTHD, false}, 64},
    {{"two leaves and one key", SIZE_TINY, 1, 1, 33, 1, 2, 64, 64, F32, LAYOUT_BTHD, false}, 16},
    {{"odd levels", SIZE_NORMAL, 1, 1, 64 * 11 + 5, 2, 4, 64, 64, F32, LAYOUT_PADDED, false}, 64},
    {{"half, whole leaves", SIZE_NORMAL, 2, 1, 1024, 1, 16, 64, 64, F16, LAYOUT_BTHD, false}, 64},
    {{"bfloat16", SIZE_NORMAL, 1, 1, 333, 2, 3, 100, 60, BF16, LAYOUT_BHTD, false}, 32},
    {{"leaf 128", SIZE_CPU, 1, 1, 128 * 9 - 1, 2, 1, 128, 128, F32, LAYOUT_BTHD, false}, 128},
    {{"dim 1", SIZE_CPU, 1, 1, 100, 3, 1, 1, 1, F32, LAYOUT_BTHD, false}, 16},
    {{"dim 256", SIZE_CPU, 1, 1, 100, 1, 1, 256, 256, F32, LAYOUT_BTHD, false}, 16},
    {{"many levels", SIZE_CPU, 1, 1, 16 * 1000 + 3, 1, 1, 2, 2, F32, LAYOUT_BTHD, false}, 16},
};

/* A float32 mean of n keys: a rounding for each addition, of numbers no larger than the sum of magnitudes. */
static void check_level(const struct target *target, const struct fixture *f, const clattn_pyramid *pyramid,
                        int64_t s, int64_t h, int level, const struct means *want)
{
    int64_t nodes = -1, dim = f->k.view.dim, count = want->nodes[level];
    float *got = malloc((size_t)(count * dim + 1) * sizeof *got);
    assert_non_null(got);
    got[count * dim] = 12345;
    check_success(target, clattn_pyramid_read(target->context, pyramid, s, h, level, NULL, &nodes),
                  "read count");
    assert_int_equal(nodes, count);
    check_success(target, clattn_pyramid_read(target->context, pyramid, s, h, level, got, &nodes), "read");
    assert_true(got[count * dim] == 12345);
    for (int64_t n = 0; n < count * dim; n++) {
        double allowed = 16 * FLT_EPSILON; /* 128 additions of numbers around 1: their root, generously */
        if (!(fabs(got[n] - want->at[level][n]) <= allowed))
            fail_msg(
                "%s: %s: sequence %lld, head %lld, level %d, node %lld, element %lld is %.9g; %.9g is right",
                target->label, f->name, (long long)s, (long long)h, level, (long long)(n / dim),
                (long long)(n % dim), (double)got[n], want->at[level][n]);
    }
    free(got);
}

static void check_pyramid(const struct target *target, const struct fixture *f, int32_t leaf)
{
    clattn_pyramid *pyramid = NULL;
    struct spans spans = fixture_spans(f, 1);
    check_success(target,
                  clattn_pyramid_build(target->context, &f->attention, leaf, &f->k.view, &pyramid, NULL),
                  f->name);
    for (int s = 0; s < spans.count; s++)
        for (int64_t h = 0; h < f->k.view.heads; h++) {
            struct means means = means_new(&f->k.view, &spans.at[s], h, leaf);
            int levels = spans.at[s].kv_len ? means.levels : 0;
            int64_t nodes;
            for (int level = 1; level <= levels; level++)
                check_level(target, f, pyramid, s, h, level, &means);
            if (levels) assert_int_equal(means.nodes[levels], 1);
            assert_int_equal(clattn_pyramid_read(target->context, pyramid, s, h, levels + 1, NULL, &nodes),
                             CLATTN_INVALID_ARGUMENT);
            means_free(&means);
        }
    clattn_pyramid_release(target->context, pyramid);
}

static void test_against_definition(void **state)
{
    (void)state;
    for (int n = 0; n < COUNT(cases); n++) {
        struct random random = random_seeded((uint64_t)n);
        struct fixture f = fixture_new(&cases[n].shape, &random);
        FOR_EACH_TARGET (target)
            if (target_runs(target, cases[n].shape.size)) check_pyramid(target, &f, cases[n].leaf);
        fixture_free(&f);
    }
    target_report("against the definition");
}

static void test_packed(void **state)
{
    static const int32_t cu_q[] = {0, 1, 1, 2, 3, 4}, cu_k[] = {0, 0, 15, 205, 550, 800};
    (void)state;
    struct shape shape = {"packed", SIZE_NORMAL, 1, 4, 800, 2, 4, 64, 64, F32, LAYOUT_BTHD, false};
    struct random random = random_seeded(100);
    struct fixture f = fixture_new(&shape, &random);
    fixture_packed(&f, 5, cu_q, cu_k);
    FOR_EACH_TARGET (target)
        if (target_runs(target, SIZE_NORMAL)) check_pyramid(target, &f, 64);
    fixture_free(&f);
    target_report("packed");
}

/* Small integers in leaves of 16: every sum and mean is exact, up to the levels where 2^-24 is reached. */
static void test_exact(void **state)
{
    (void)state;
    struct shape shape = {"exact", SIZE_TINY, 1, 1, 16 * 12, 1, 2, 64, 64, F32, LAYOUT_BTHD, false};
    struct random random = random_seeded(200);
    struct fixture f = fixture_new(&shape, &random);
    array_fill(&f.k, FILL_INTEGER, &random);
    struct spans spans = fixture_spans(&f, 1);
    struct means means = means_new(&f.k.view, &spans.at[0], 0, 16);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_TINY)) continue;
        clattn_pyramid *pyramid = NULL;
        float got[12 * 64];
        int64_t nodes;
        check_success(target, clattn_pyramid_build(target->context, NULL, 16, &f.k.view, &pyramid, NULL),
                      "build");
        for (int level = 1; level <= 5; level++) {
            check_success(target, clattn_pyramid_read(target->context, pyramid, 0, 0, level, got, &nodes),
                          "read");
            for (int64_t n = 0; n < nodes * 64; n++)
                if ((double)got[n] != means.at[level][n])
                    fail_msg("%s: level %d, element %lld is %.9g; %.9g is right", target->label, level,
                             (long long)n, (double)got[n], means.at[level][n]);
        }
        clattn_pyramid_release(target->context, pyramid);
    }
    means_free(&means);
    fixture_free(&f);
    target_report("exact");
}

/* Builds from the first `len` keys, and appends every level's complete nodes to `bits`. */
static size_t complete_nodes(const struct target *target, const struct fixture *f, int64_t len,
                             int64_t complete, clattn_pyramid **pyramid, float *bits)
{
    clattn_tensor k = tensor_rows(&f->k.view, 0, len);
    size_t used = 0;
    check_success(target, clattn_pyramid_build(target->context, NULL, 16, &k, pyramid, NULL), "build");
    for (int level = 1; level <= 6; level++) {
        static float means[64 * 64];
        int64_t nodes, span = (int64_t)16 << (level - 1);
        check_success(target, clattn_pyramid_read(target->context, *pyramid, 0, 0, level, means, &nodes),
                      "read");
        assert_true(nodes >= complete / span);
        memcpy(bits + used, means, (size_t)(complete / span * 64) * sizeof *means);
        used += (size_t)(complete / span * 64);
    }
    return used;
}

/* Complete nodes have the same bits whether built twice, in place, or from more keys. */
static void test_same_bits(void **state)
{
    (void)state;
    struct shape shape = {"same bits", SIZE_TINY, 1, 1, 1000, 1, 2, 64, 64, F32, LAYOUT_BTHD, false};
    struct random random = random_seeded(300);
    struct fixture f = fixture_new(&shape, &random);
    static float first[64 * 128], again[64 * 128];
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_TINY)) continue;
        clattn_pyramid *a = NULL, *b = NULL;
        size_t n = complete_nodes(target, &f, 700, 700, &a, first);
        complete_nodes(target, &f, 1000, 700, &b, again);
        assert_memory_equal(first, again, n * sizeof *first);
        clattn_pyramid *given = a;
        complete_nodes(target, &f, 700, 700, &a, again);
        assert_ptr_equal(a, given);
        assert_memory_equal(first, again, n * sizeof *first);
        clattn_pyramid_release(target->context, a);
        clattn_pyramid_release(target->context, b);
    }
    fixture_free(&f);
    target_report("same bits");
}

/* Another shape than the one that the pyramid was made for is refused, and the pyramid stays as it was. */
static void test_rebuild_other_shape(void **state)
{
    (void)state;
    struct shape shape = {"other shape", SIZE_TINY, 1, 1, 100, 1, 2, 64, 64, F32, LAYOUT_BTHD, false};
    struct random random = random_seeded(400);
    struct fixture f = fixture_new(&shape, &random);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_TINY)) continue;
        clattn_pyramid *pyramid = NULL;
        clattn_tensor shorter = tensor_rows(&f.k.view, 0, 99);
        float before[7 * 64], after[7 * 64];
        int64_t nodes;
        check_success(target, clattn_pyramid_build(target->context, NULL, 16, &f.k.view, &pyramid, NULL),
                      "build");
        check_success(target, clattn_pyramid_read(target->context, pyramid, 0, 0, 1, before, &nodes), "read");
        clattn_pyramid *given = pyramid;
        assert_int_not_equal(clattn_pyramid_build(target->context, NULL, 16, &shorter, &pyramid, NULL),
                             CLATTN_SUCCESS);
        assert_int_not_equal(clattn_pyramid_build(target->context, NULL, 32, &f.k.view, &pyramid, NULL),
                             CLATTN_SUCCESS);
        assert_ptr_equal(pyramid, given);
        check_success(target, clattn_pyramid_read(target->context, pyramid, 0, 0, 1, after, &nodes), "read");
        assert_int_equal(nodes, 7);
        assert_memory_equal(before, after, sizeof before);
        clattn_pyramid_release(target->context, pyramid);
    }
    fixture_free(&f);
    target_report("other shape");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_definition),
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_exact),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_rebuild_other_shape),
    };
    return cmocka_run_group_tests_name("pyramid", tests, targets_open, targets_close);
}
