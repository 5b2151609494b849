/* SPDX-License-Identifier: MIT */
/* Results that must equal each other: they need no oracle, and find what an oracle with the same mistake would
 * not. */

#include "fixture.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define F32 CLATTN_FLOAT32
#define F16 CLATTN_FLOAT16

static const struct shape plain = {"plain", SIZE_NORMAL, 1, 40, 600, 2, 4, 64, 64, F32, LAYOUT_BTHD, false};

/* One more view of the same content. */
static struct array array_copy(const struct array *array, enum layout layout)
{
    const clattn_tensor *t = &array->view;
    struct array copy = array_new(t->dtype, t->batch, t->len, t->heads, t->dim, layout);
    for (int64_t row = 0; row < t->batch * t->len * t->heads; row++)
        for (int64_t d = 0; d < t->dim; d++) {
            int64_t b = row / t->heads / t->len, i = row / t->heads % t->len, h = row % t->heads;
            tensor_set(&copy.view, b, i, h, d, tensor_get(t, b, i, h, d));
        }
    return copy;
}

static void check_equal_bits(const clattn_tensor *a, const clattn_tensor *b, const char *label,
                             const char *name)
{
    if (!tensor_equal_bits(a, b)) fail_msg("%s: %s: the bits differ", label, name);
}

/* Two float32 results of the same numbers in another order: 16 roundings of numbers around 1 apart. */
static void check_close(const clattn_tensor *a, const clattn_tensor *b, double allowed, const char *label,
                        const char *name)
{
    for (int64_t row = 0; row < a->batch * a->len * a->heads; row++)
        for (int64_t d = 0; d < a->dim; d++) {
            int64_t n = row / a->heads / a->len, i = row / a->heads % a->len, h = row % a->heads;
            double x = tensor_get(a, n, i, h, d), y = tensor_get(b, n, i, h, d);
            if (x != y && !(fabs(x - y) <= allowed))
                fail_msg("%s: %s: [%lld][%lld][%lld][%lld] is %.9g and %.9g", label, name, (long long)n,
                         (long long)i, (long long)h, (long long)d, x, y);
        }
}

static const double close_enough = 16 * FLT_EPSILON;

/* ---- lists ---- */

/* Every block listed equals dense attention, for each block size; the same blocks in another order have the
 * same bits, because stored lists are ascending. */
static void test_all_listed(void **state)
{
    (void)state;
    for (int32_t block = 16; block <= 128; block *= 2) {
        struct random random = random_seeded((uint64_t)block);
        struct fixture f = fixture_new(&plain, &random);
        struct spans spans = fixture_spans(&f, 1);
        struct lists lists = lists_all(&spans, block, 2);
        enum test_size size = block == 64 ? SIZE_NORMAL : SIZE_CPU;
        int32_t topk = lists.desc.topk;
        FOR_EACH_TARGET (target) {
            if (!target_runs(target, size)) continue;
            fixture_forward(target, &f, NULL);
            struct array out = array_copy(&f.out, LAYOUT_BTHD), lse = array_copy(&f.lse, LAYOUT_BTHD);
            fixture_forward(target, &f, &lists);
            check_close(&out.view, &f.out.view, close_enough, target->label, "all blocks listed, out");
            check_close(&lse.view, &f.lse.view, close_enough, target->label, "all blocks listed, lse");
            for (int64_t n = 0; n < lists.desc.rows * 2; n++)
                for (int32_t i = topk - 1; i > 0; i--) {
                    int32_t *list = lists.indices + n * topk, other = (int32_t)random_below(&random, i + 1),
                            kept = list[i];
                    list[i] = list[other];
                    list[other] = kept;
                }
            array_free(&out);
            out = array_copy(&f.out, LAYOUT_BTHD);
            fixture_forward(target, &f, &lists);
            check_equal_bits(&out.view, &f.out.view, target->label, "order of blocks");
            array_free(&out);
            array_free(&lse);
        }
        lists_free(&lists);
        fixture_free(&f);
    }
    target_report("all blocks listed");
}

/* Attention over two disjoint halves of the blocks, merged, is attention over the whole. */
static void test_merge(void **state)
{
    (void)state;
    struct random random = random_seeded(200);
    struct fixture f = fixture_new(&plain, &random);
    struct spans spans = fixture_spans(&f, 1);
    struct lists half[2] = {lists_all(&spans, 64, 2), lists_all(&spans, 64, 2)};
    for (int64_t n = 0; n < half[0].desc.rows * 2 * half[0].desc.topk; n++)
        half[random_bits(&random) % 2].indices[n] = -1;
    FOR_EACH_TARGET (target) {
        struct array out[2], lse[2];
        if (!target_runs(target, SIZE_NORMAL)) continue;
        for (int n = 0; n < 2; n++) {
            fixture_forward(target, &f, &half[n]);
            out[n] = array_copy(&f.out, LAYOUT_BTHD);
            lse[n] = array_copy(&f.lse, LAYOUT_BTHD);
        }
        fixture_forward(target, &f, NULL);
        for (int64_t row = 0; row < 40 * 8; row++) {
            double l[2], l_max, l_sum;
            for (int n = 0; n < 2; n++)
                l[n] = tensor_get(&lse[n].view, 0, row / 8, row % 8, 0);
            l_max = fmax(l[0], l[1]);
            l_sum = l_max + log(exp(l[0] - l_max) + exp(l[1] - l_max));
            tensor_set(&lse[0].view, 0, row / 8, row % 8, 0, l_sum);
            for (int64_t d = 0; d < 64; d++)
                tensor_set(&out[0].view, 0, row / 8, row % 8, d,
                           tensor_get(&out[0].view, 0, row / 8, row % 8, d) * exp(l[0] - l_sum) +
                               tensor_get(&out[1].view, 0, row / 8, row % 8, d) * exp(l[1] - l_sum));
        }
        check_close(&out[0].view, &f.out.view, close_enough, target->label, "merged out");
        check_close(&lse[0].view, &f.lse.view, close_enough, target->label, "merged lse");
        for (int n = 0; n < 2; n++) {
            array_free(&out[n]);
            array_free(&lse[n]);
        }
    }
    lists_free(&half[0]);
    lists_free(&half[1]);
    fixture_free(&f);
    target_report("merge");
}

/* ---- repetition and layout ---- */

/* Two runs, and other strides, give the same bits: lists, out and lse. */
static void test_same_bits(void **state)
{
    (void)state;
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 4, 64);
    struct random random = random_seeded(300);
    struct fixture f = fixture_new(&plain, &random), g = f;
    g.q = array_copy(&f.q, LAYOUT_PADDED);
    g.k = array_copy(&f.k, LAYOUT_BHTD);
    g.v = array_copy(&f.v, LAYOUT_PADDED);
    g.out = array_copy(&f.out, LAYOUT_BHTD);
    g.lse = array_copy(&f.lse, LAYOUT_PADDED);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_NORMAL)) continue;
        struct lists first = fixture_select(target, &f, &select, NULL);
        fixture_forward(target, &f, &first);
        for (int n = 0; n < 3; n++) {
            struct lists again = fixture_select(target, &g, &select, NULL);
            assert_memory_equal(first.indices, again.indices,
                                (size_t)(again.desc.rows * 2 * 4) * sizeof(int32_t));
            fixture_forward(target, &g, &again);
            check_equal_bits(&f.out.view, &g.out.view, target->label, "out of another run and layout");
            check_equal_bits(&f.lse.view, &g.lse.view, target->label, "lse of another run and layout");
            lists_free(&again);
        }
        lists_free(&first);
    }
    fixture_free(&f);
    fixture_free(&g);
    target_report("same bits");
}

/* ---- causality ---- */

/* What stands behind a query does not change its result by a bit: neither other keys and values nor NaN. */
static void test_later_keys(void **state)
{
    (void)state;
    struct random random = random_seeded(400);
    struct shape shape = plain;
    shape.q_len = 30;
    struct fixture f = fixture_new(&shape, &random);
    for (int selector = 0; selector < 5; selector++) {
        clattn_select_desc select = select_desc(selector, 4, 64);
        FOR_EACH_TARGET (target) {
            if (!target_runs(target, selector == 0 ? SIZE_NORMAL : SIZE_CPU)) continue;
            struct fixture g = f; /* rows 0 to 9 stand at 570 to 579; keys from 580 on change */
            g.k = array_copy(&f.k, LAYOUT_BTHD);
            g.v = array_copy(&f.v, LAYOUT_BTHD);
            for (int64_t n = 580 * 128; n < 600 * 128; n++) {
                tensor_set(&g.k.view, 0, n / 128, n / 64 % 2, n % 64, n % 5 ? 1e3 : NAN);
                tensor_set(&g.v.view, 0, n / 128, n / 64 % 2, n % 64, n % 7 ? -1e3 : NAN);
            }
            struct lists a = fixture_select(target, &f, &select, NULL),
                         b = fixture_select(target, &g, &select, NULL);
            fixture_forward(target, &f, &a);
            clattn_tensor rows = tensor_rows(&f.out.view, 0, 10), rows_lse = tensor_rows(&f.lse.view, 0, 10);
            assert_memory_equal(a.indices, b.indices, 10 * 2 * 4 * sizeof(int32_t));
            g.out = array_copy(&f.out, LAYOUT_BTHD);
            g.lse = array_copy(&f.lse, LAYOUT_BTHD);
            fixture_forward(target, &g, &b);
            clattn_tensor other = tensor_rows(&g.out.view, 0, 10), other_lse = tensor_rows(&g.lse.view, 0, 10);
            check_equal_bits(&rows, &other, target->label, "out with other later keys");
            check_equal_bits(&rows_lse, &other_lse, target->label, "lse with other later keys");
            lists_free(&a);
            lists_free(&b);
            array_free(&g.k);
            array_free(&g.v);
            array_free(&g.out);
            array_free(&g.lse);
        }
    }
    fixture_free(&f);
    target_report("later keys");
}

/* The last 1, 3 ... queries alone: the same lists and results as those rows of the whole prefill; and a prefill
 * cut off at any length: its rows are those of the longer one. */
static void test_decode(void **state)
{
    static const int64_t counts[] = {1, 3, 15, 25, 33};
    (void)state;
    struct random random = random_seeded(500);
    struct shape shape = {"decode", SIZE_NORMAL, 1, 600, 600, 1, 4, 64, 64, F32, LAYOUT_BTHD, false};
    struct fixture f = fixture_new(&shape, &random);
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 4, 16);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_NORMAL)) continue;
        struct lists whole = fixture_select(target, &f, &select, NULL);
        fixture_forward(target, &f, &whole);
        for (int n = 0; n < 2 * COUNT(counts); n++) {
            int64_t last = n % 2 ? 600 : 301 + counts[n / 2], first = last - counts[n / 2];
            struct fixture g = f;
            g.q.view = tensor_rows(&f.q.view, first, last);
            g.k.view = tensor_rows(&f.k.view, 0, last);
            g.v.view = tensor_rows(&f.v.view, 0, last);
            g.out = array_new(F32, 1, last - first, 4, 64, LAYOUT_BTHD);
            g.lse = array_new(F32, 1, last - first, 4, 1, LAYOUT_BTHD);
            struct lists part = fixture_select(target, &g, &select, NULL);
            assert_memory_equal(part.indices, whole.indices + first * 4,
                                (size_t)(last - first) * 4 * sizeof(int32_t));
            fixture_forward(target, &g, &part);
            clattn_tensor out = tensor_rows(&f.out.view, first, last),
                          lse = tensor_rows(&f.lse.view, first, last);
            check_close(&g.out.view, &out, close_enough, target->label, "decoded out");
            check_close(&g.lse.view, &lse, close_enough, target->label, "decoded lse");
            lists_free(&part);
            array_free(&g.out);
            array_free(&g.lse);
        }
        lists_free(&whole);
    }
    fixture_free(&f);
    target_report("decode");
}

/* ---- exact results ---- */

/* q = 0 and values 0 .. 7: out is the mean of the visible listed values. The sums are exact, so a key too many
 * or too few shows at once. With a power of two of keys the mean is exact as well. */
static void test_exact_means(void **state)
{
    (void)state;
    struct random random = random_seeded(600);
    struct shape shape = {"exact means", SIZE_TINY, 1, 130, 256, 1, 2, 64, 64, F32, LAYOUT_BTHD, false};
    struct fixture f = fixture_new(&shape, &random);
    array_fill_constant(&f.q, 0);
    for (int64_t n = 0; n < 256 * 64; n++)
        tensor_set(&f.v.view, 0, n / 64, 0, n % 64, (double)random_below(&random, 8));
    struct spans spans = fixture_spans(&f, 1);
    struct lists lists = lists_random(&random, &spans, 64, 1, 1, 3, 0.9);
    f.exact_logits = true;
    struct forward problem = fixture_problem(&f, &lists);
    struct expected expected = expected_forward(&problem);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_TINY)) continue;
        fixture_check_forward(target, &f, &lists, &expected);
        for (int64_t row = 0; row < 130 * 2; row++)
            for (int64_t d = 0; d < 64; d++) {
                int64_t keys = expected.keys[row];
                double got = tensor_get(&f.out.view, 0, row / 2, row % 2, d),
                       right = expected.out[row * 64 + d];
                double ulp = keys & (keys - 1) ? 2 * FLT_EPSILON * fabs(right) : 0;
                if (!(fabs(got - right) <= ulp))
                    fail_msg("%s: exact means: row %lld, element %lld of %lld keys is %.9g; %.9g is right",
                             target->label, (long long)row, (long long)d, (long long)keys, got, right);
            }
    }
    expected_free(&expected);
    lists_free(&lists);
    fixture_free(&f);
    target_report("exact means");
}

/* ---- heads, batches, sequences ---- */

/* Groups of every size equal keys and values repeated for each query head. */
static void test_group_broadcast(void **state)
{
    static const int groups[] = {1, 2, 3, 4, 5, 7, 12, 16};
    (void)state;
    for (int n = 0; n < COUNT(groups); n++) {
        struct random random = random_seeded(700 + (uint64_t)n);
        struct shape shape = {"group", SIZE_CPU,          1,           9,    150, 2, groups[n], 64,
                              64,      n % 2 ? F16 : F32, LAYOUT_BTHD, false};
        struct fixture f = fixture_new(&shape, &random), g = f;
        int64_t heads = 2 * groups[n];
        g.k = array_new(shape.dtype, 1, 150, heads, 64, LAYOUT_BTHD);
        g.v = array_new(shape.dtype, 1, 150, heads, 64, LAYOUT_BTHD);
        g.out = array_new(shape.dtype, 1, 9, heads, 64, LAYOUT_BTHD);
        g.lse = array_new(F32, 1, 9, heads, 1, LAYOUT_BTHD);
        for (int64_t m = 0; m < 150 * heads * 64; m++) {
            int64_t j = m / 64 / heads, h = m / 64 % heads, d = m % 64;
            tensor_set(&g.k.view, 0, j, h, d, tensor_get(&f.k.view, 0, j, h / groups[n], d));
            tensor_set(&g.v.view, 0, j, h, d, tensor_get(&f.v.view, 0, j, h / groups[n], d));
        }
        double allowed = shape.dtype == F16 ? 0x1p-9 : close_enough;
        FOR_EACH_TARGET (target) {
            if (!target_runs(target, groups[n] == 4 || groups[n] == 16 ? SIZE_NORMAL : SIZE_CPU)) continue;
            fixture_forward(target, &f, NULL);
            fixture_forward(target, &g, NULL);
            check_close(&f.out.view, &g.out.view, allowed, target->label, "repeated keys, out");
            check_close(&f.lse.view, &g.lse.view, close_enough, target->label, "repeated keys, lse");
        }
        array_free(&g.k);
        array_free(&g.v);
        array_free(&g.out);
        array_free(&g.lse);
        fixture_free(&f);
    }
    target_report("group broadcast");
}

/* Input strides of 0 are repetition. */
static void test_zero_strides(void **state)
{
    (void)state;
    struct random random = random_seeded(800);
    struct shape shape = {"strides of 0", SIZE_NORMAL, 2, 9, 150, 2, 4, 64, 64, F32, LAYOUT_BTHD, false};
    struct fixture f = fixture_new(&shape, &random);
    f.q.view.batch_stride = f.q.view.head_stride = 0;
    f.k.view.batch_stride = 0;
    f.v.view.len_stride = 0;
    fixture_check_all(SIZE_NORMAL, &f, NULL);
    f.k.view.len_stride = f.k.view.head_stride = 0;
    fixture_check_all(SIZE_NORMAL, &f, NULL);
    fixture_free(&f);
    target_report("strides of 0");
}

/* A batch, and packed sequences, equal one run for each sequence, in every bit of lists, out and lse. */
static void check_singles(const struct target *target, struct fixture *f, const clattn_select_desc *select)
{
    struct spans spans = fixture_spans(f, 1);
    struct lists lists = fixture_select(target, f, select, NULL);
    fixture_forward(target, f, &lists);
    for (int s = 0; s < spans.count; s++) {
        const struct span *span = &spans.at[s];
        struct fixture g = {.name = "one sequence", .attention = CLATTN_ATTENTION_DESC_INIT};
        if (span->q_len == 0) continue;
        g.attention.causal = f->attention.causal;
        clattn_tensor *views[] = {&g.q.view, &g.k.view, &g.v.view};
        clattn_tensor all[] = {f->q.view, f->k.view, f->v.view};
        for (int n = 0; n < 3; n++) {
            clattn_tensor one = tensor_batch(&all[n], span->batch);
            *views[n] = n ? tensor_rows(&one, span->k_row, span->k_row + span->kv_len)
                          : tensor_rows(&one, span->q_row, span->q_row + span->q_len);
        }
        g.out = array_new(F32, 1, span->q_len, f->q.view.heads, f->v.view.dim, LAYOUT_BTHD);
        g.lse = array_new(F32, 1, span->q_len, f->q.view.heads, 1, LAYOUT_BTHD);
        struct lists own = fixture_select(target, &g, select, NULL);
        size_t row_entries = (size_t)(lists.desc.heads * lists.desc.topk);
        assert_memory_equal(own.indices, lists.indices + (size_t)span->list_row * row_entries,
                            (size_t)span->q_len * row_entries * sizeof(int32_t));
        fixture_forward(target, &g, &own);
        clattn_tensor out = tensor_batch(&f->out.view, span->batch),
                      lse = tensor_batch(&f->lse.view, span->batch);
        out = tensor_rows(&out, span->q_row, span->q_row + span->q_len);
        lse = tensor_rows(&lse, span->q_row, span->q_row + span->q_len);
        check_close(&out, &g.out.view, close_enough, target->label, "one sequence, out");
        check_close(&lse, &g.lse.view, close_enough, target->label, "one sequence, lse");
        array_free(&g.out);
        array_free(&g.lse);
        lists_free(&own);
    }
    lists_free(&lists);
}

static void test_singles(void **state)
{
    static const int32_t cu_q[] = {0, 0, 30, 31, 31, 90, 100}, cu_k[] = {0, 20, 130, 131, 131, 190, 500};
    (void)state;
    for (int n = 0; n < 4; n++) {
        struct random random = random_seeded(900 + (uint64_t)n);
        struct shape batch = {"batch", SIZE_NORMAL, 3, 40, 300, 2, 4, 64, 64, F32, LAYOUT_BTHD, n % 2};
        struct shape packed = {"packed", SIZE_NORMAL, 1, 100, 500, 2, 4, 64, 64, F32, LAYOUT_PADDED, n % 2};
        struct fixture f = fixture_new(n / 2 ? &packed : &batch, &random);
        clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 3, 16);
        if (n / 2) fixture_packed(&f, 6, cu_q, cu_k);
        FOR_EACH_TARGET (target)
            if (target_runs(target, SIZE_NORMAL)) check_singles(target, &f, &select);
        fixture_free(&f);
    }
    target_report("single sequences");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_listed),      cmocka_unit_test(test_merge),
        cmocka_unit_test(test_same_bits),       cmocka_unit_test(test_later_keys),
        cmocka_unit_test(test_decode),          cmocka_unit_test(test_exact_means),
        cmocka_unit_test(test_group_broadcast), cmocka_unit_test(test_zero_strides),
        cmocka_unit_test(test_singles),
    };
    return cmocka_run_group_tests_name("identities", tests, targets_open, targets_close);
}
