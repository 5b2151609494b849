/* SPDX-License-Identifier: MIT */
/* clattn_attention_merge on every target: against the formula in double, with empty parts and outputs that are
 * inputs, and two halves of attention against the whole. */

#include "fixture.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct merge_case {
    const char *name;
    enum test_size size;
    int64_t batch, len, heads, dim;
    clattn_dtype dtype, out_dtype;
    enum layout layout;
    int alias; /* out and lse are those of part 0 or 1; -1: neither */
};

#define F32 CLATTN_FLOAT32
#define F16 CLATTN_FLOAT16
#define BF16 CLATTN_BFLOAT16

/* The dtypes are few: OpenCL builds a kernel for each pair. */
static const struct merge_case cases[] = {
    {"one element", SIZE_TINY, 1, 1, 1, 1, F32, F32, LAYOUT_BTHD, -1},
    {"odd", SIZE_TINY, 2, 13, 3, 17, F32, F32, LAYOUT_PADDED, -1},
    {"into part 0", SIZE_NORMAL, 2, 13, 3, 17, F32, F32, LAYOUT_PADDED, 0},
    {"into part 1", SIZE_NORMAL, 1, 70, 5, 64, F32, F32, LAYOUT_BHTD, 1},
    {"no rows", SIZE_NORMAL, 1, 0, 2, 8, F32, F32, LAYOUT_BTHD, -1},
    {"wide", SIZE_NORMAL, 1, 3, 2, 5000, F32, F32, LAYOUT_BTHD, -1},
    {"float16", SIZE_NORMAL, 2, 9, 4, 33, F16, F16, LAYOUT_PADDED, 1},
    {"float16 to float32", SIZE_NORMAL, 1, 9, 2, 40, F16, F32, LAYOUT_BHTD, -1},
    {"bfloat16", SIZE_NORMAL, 1, 50, 2, 64, BF16, BF16, LAYOUT_PADDED, 0},
};

enum { KINDS = 6 };

/* lse of the parts of row n: all sorts of distances, and empty ones, whose out is NaN. */
static void lse_pair(int64_t n, struct random *random, double lse[2])
{
    const double gaps[KINDS] = {0, 1, 30, -200, INFINITY, NAN};
    double gap = gaps[n % KINDS];
    lse[0] = 10 * random_normal(random);
    lse[1] = isinf(gap) ? -INFINITY : lse[0] + gap;
    if (isnan(gap)) lse[0] = lse[1] = -INFINITY;
    if (n / KINDS % 2) {
        double swap = lse[0];
        lse[0] = lse[1];
        lse[1] = swap;
    }
}

struct parts {
    struct array out[2], lse[2], to, to_lse;
};

static struct parts parts_new(const struct merge_case *c)
{
    struct parts p;
    struct random random = random_seeded(77);
    for (int n = 0; n < 2; n++) {
        p.out[n] = array_new(c->dtype, c->batch, c->len, c->heads, c->dim, c->layout);
        p.lse[n] = array_new(F32, c->batch, c->len, c->heads, 1, c->layout);
        array_fill(&p.out[n], FILL_NORMAL, &random);
    }
    p.to = array_new(c->out_dtype, c->batch, c->len, c->heads, c->dim, c->layout);
    p.to_lse = array_new(F32, c->batch, c->len, c->heads, 1, c->layout);
    for (int64_t row = 0; row < c->batch * c->len * c->heads; row++) {
        int64_t b = row / c->heads / c->len, i = row / c->heads % c->len, h = row % c->heads;
        double lse[2];
        lse_pair(row, &random, lse);
        for (int n = 0; n < 2; n++) {
            tensor_set(&p.lse[n].view, b, i, h, 0, lse[n]);
            for (int64_t d = 0; d < c->dim && isinf(lse[n]); d++)
                tensor_set(&p.out[n].view, b, i, h, d, NAN);
        }
    }
    return p;
}

static void parts_free(struct parts *p)
{
    struct array *const arrays[] = {&p->out[0], &p->out[1], &p->lse[0], &p->lse[1], &p->to, &p->to_lse};
    for (int n = 0; n < COUNT(arrays); n++)
        array_free(arrays[n]);
}

static void check_row(const struct merge_case *c, const double *const out[2], const double *const lse[2],
                      const clattn_tensor *to, const clattn_tensor *to_lse, int64_t row, const char *label)
{
    int64_t b = row / c->heads / c->len, i = row / c->heads % c->len, h = row % c->heads;
    double most = fmax(lse[0][row], lse[1][row]), sum = 0;
    for (int n = 0; n < 2; n++)
        sum += isinf(most) ? 0 : exp(lse[n][row] - most);
    double want = isinf(most) ? -INFINITY : most + log(sum), got = tensor_get(to_lse, b, i, h, 0);
    if (!(got == want || fabs(got - want) <= FLT_EPSILON * (4 + fabs(want))))
        fail_msg("%s: %s: lse of row %lld is %.9g; %.9g is right", label, c->name, (long long)row, got, want);
    for (int64_t d = 0; d < c->dim; d++) {
        double right = 0, size = 0;
        for (int n = 0; n < 2; n++) {
            double share = isinf(lse[n][row]) ? 0 : exp(lse[n][row] - most) / sum;
            double value = share > 0 ? share * out[n][row * c->dim + d] : 0;
            right += value;
            size += fabs(value) * (4 + fabs(lse[0][row] - lse[1][row]));
        }
        double allowed = FLT_EPSILON * (isfinite(size) ? size : fabs(right)) + FLT_MIN;
        if (c->out_dtype != F32) allowed += dtype_epsilon(c->out_dtype) / 2 * (fabs(right) + allowed) + 0x1p-25;
        double have = tensor_get(to, b, i, h, d);
        if (!(fabs(have - right) <= allowed))
            fail_msg("%s: %s: element %lld of row %lld is %.9g; %.9g is right", label, c->name, (long long)d,
                     (long long)row, have, right);
    }
}

static void check_target(const struct target *target, const struct merge_case *c)
{
    struct parts p = parts_new(c);
    double *out[2], *lse[2];
    for (int n = 0; n < 2; n++) {
        out[n] = tensor_doubles(&p.out[n].view);
        lse[n] = tensor_doubles(&p.lse[n].view);
    }
    struct array *to = c->alias < 0 ? &p.to : &p.out[c->alias];
    struct array *to_lse = c->alias < 0 ? &p.to_lse : &p.lse[c->alias];
    check_success(target,
                  clattn_attention_merge(target->context, &p.out[0].view, &p.lse[0].view, &p.out[1].view,
                                         &p.lse[1].view, &to->view, &to_lse->view, NULL),
                  c->name);
    array_check_guards(to, target->label, c->name);
    array_check_guards(to_lse, target->label, c->name);
    for (int64_t row = 0; row < c->batch * c->len * c->heads; row++)
        check_row(c, (const double *const[]){out[0], out[1]}, (const double *const[]){lse[0], lse[1]},
                  &to->view, &to_lse->view, row, target->label);
    for (int n = 0; n < 2; n++) {
        free(out[n]);
        free(lse[n]);
    }
    parts_free(&p);
}

static void test_formula(void **state)
{
    (void)state;
    for (int n = 0; n < COUNT(cases); n++)
        FOR_EACH_TARGET (target)
            if (target_runs(target, cases[n].size)) check_target(target, &cases[n]);
    target_report("formula");
}

/* Even and odd blocks, with a sink in the first half, against all of them. */
static void test_halves(void **state)
{
    (void)state;
    struct random random = random_seeded(3);
    struct shape shape = {"halves", SIZE_NORMAL, 1, 60, 130, 1, 2, 24, 20, F32, LAYOUT_PADDED, false};
    struct fixture f = fixture_new(&shape, &random);
    struct spans spans = fixture_spans(&f, 1);
    struct lists whole = lists_all(&spans, 16, 1),
                 half[2] = {lists_all(&spans, 16, 1), lists_all(&spans, 16, 1)};
    struct array sink = array_new(F32, 1, 1, 2, 1, LAYOUT_BTHD);
    array_fill_constant(&sink, 0.5);
    for (int64_t n = 0; n < whole.desc.rows * whole.desc.topk; n++)
        half[whole.indices[n] % 2 ? 0 : 1].indices[n] = -1;
    f.attention.sink = &sink.view;
    struct forward problem = fixture_problem(&f, &whole);
    struct expected expected = expected_forward(&problem);
    FOR_EACH_TARGET (target) {
        struct array out = array_new(F32, 1, 60, 2, 20, LAYOUT_BTHD),
                     lse = array_new(F32, 1, 60, 2, 1, LAYOUT_BTHD);
        if (target_runs(target, SIZE_NORMAL)) {
            f.attention.sink = &sink.view; /* block 0 is in the even half: every row has a key there */
            fixture_forward(target, &f, &half[0]);
            for (int64_t row = 0; row < 120; row++) {
                tensor_set(&lse.view, 0, row / 2, row % 2, 0, tensor_get(&f.lse.view, 0, row / 2, row % 2, 0));
                for (int64_t d = 0; d < 20; d++)
                    tensor_set(&out.view, 0, row / 2, row % 2, d,
                               tensor_get(&f.out.view, 0, row / 2, row % 2, d));
            }
            f.attention.sink = NULL;
            fixture_forward(target, &f, &half[1]);
            check_success(target,
                          clattn_attention_merge(target->context, &out.view, &lse.view, &f.out.view,
                                                 &f.lse.view, &f.out.view, &f.lse.view, NULL),
                          "halves");
            expected_compare(&expected, &problem, &f.out.view, &f.lse.view, target->label, "halves");
        }
        array_free(&out);
        array_free(&lse);
    }
    array_free(&sink);
    expected_free(&expected);
    lists_free(&whole);
    lists_free(&half[0]);
    lists_free(&half[1]);
    fixture_free(&f);
    target_report("halves");
}

/* Wrong arguments are named, and nothing is written. */
static void test_errors(void **state)
{
    (void)state;
    struct parts p = parts_new(&cases[1]);
    clattn_tensor out0 = p.out[0].view, lse0 = p.lse[0].view, out1 = p.out[1].view, lse1 = p.lse[1].view, bad;
    FOR_EACH_TARGET (target) {
        clattn_context *context = target->context;
#define MERGE(a, b, c, d, e, f) clattn_attention_merge(context, a, b, c, d, e, f, NULL)
        assert_int_equal(MERGE(NULL, &lse0, &out1, &lse1, &p.to.view, NULL), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(MERGE(&out0, &lse0, &out1, &lse1, NULL, NULL), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(MERGE(&out0, &lse0, &out1, NULL, &p.to.view, NULL), CLATTN_INVALID_ARGUMENT);
        bad = out1, bad.len--;
        assert_int_equal(MERGE(&out0, &lse0, &bad, &lse1, &p.to.view, NULL), CLATTN_INVALID_SHAPE);
        assert_int_equal(MERGE(&out0, &out0, &out1, &lse1, &p.to.view, NULL), CLATTN_INVALID_SHAPE);
        bad = out1, bad.dtype = CLATTN_FLOAT16;
        assert_int_equal(MERGE(&out0, &lse0, &bad, &lse1, &p.to.view, NULL), CLATTN_INVALID_DTYPE);
        bad = lse1, bad.dtype = CLATTN_FLOAT16;
        assert_int_equal(MERGE(&out0, &lse0, &out1, &bad, &p.to.view, NULL), CLATTN_INVALID_DTYPE);
        bad = p.to.view, bad.len_stride = 0;
        assert_int_equal(MERGE(&out0, &lse0, &out1, &lse1, &bad, NULL), CLATTN_INVALID_STRIDE);
        assert_true(array_untouched(&p.to));
        check_success(target, MERGE(&out0, &lse0, &out1, &lse1, &p.to.view, NULL), "without lse");
        array_poison(&p.to);
    }
    parts_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formula),
        cmocka_unit_test(test_halves),
        cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests_name("merge", tests, targets_open, targets_close);
}
