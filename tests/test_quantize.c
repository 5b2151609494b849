/* SPDX-License-Identifier: MIT */
/* clattn_quantize on every target: each code within half a scale, scales as the definition has them, and the
 * result of attention within the bound that follows. */

#include "fixture.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

struct quantize_case {
    const char *name;
    enum test_size size;
    int64_t batch, len, heads, dim;
    clattn_dtype dtype;
    int32_t scale_block, far_group, near_first, near_last;
};

#define F32 CLATTN_FLOAT32

static const struct quantize_case cases[] = {
    {"one", SIZE_TINY, 1, 1, 1, 1, F32, 64, 1, 1, 2},
    {"odd", SIZE_TINY, 2, 61, 3, 7, F32, 16, 1, 1, 2},
    {"far leaves share", SIZE_NORMAL, 1, 333, 2, 20, F32, 16, 4, 1, 2},
    {"all share", SIZE_NORMAL, 2, 100, 1, 130, F32, 7, 1000, 0, 0},
    {"all near", SIZE_NORMAL, 1, 100, 2, 5, F32, 32, 3, 9, 9},
    {"float16", SIZE_NORMAL, 1, 150, 2, 64, CLATTN_FLOAT16, 64, 2, 1, 1},
    {"bfloat16", SIZE_NORMAL, 1, 150, 2, 64, CLATTN_BFLOAT16, 64, 1, 1, 2},
    {"empty", SIZE_NORMAL, 1, 0, 2, 5, F32, 32, 3, 1, 2},
};

/* Leaves first .. end - 1 share the scale of `leaf`. */
static void sharing(const struct quantize_case *c, int64_t leaf, int64_t *first, int64_t *end)
{
    int64_t leaves = (c->len + c->scale_block - 1) / c->scale_block, far_end = leaves - c->near_last;
    *first = leaf, *end = leaf + 1;
    if (leaf < c->near_first || leaf >= far_end) return;
    *first = c->near_first + (leaf - c->near_first) / c->far_group * c->far_group;
    *end = *first + c->far_group < far_end ? *first + c->far_group : far_end;
}

static void check_leaf(const struct quantize_case *c, const clattn_tensor *x, const clattn_tensor *codes,
                       const clattn_tensor *scales, int64_t b, int64_t leaf, int64_t h, const char *label)
{
    int64_t first, end;
    double most = 0, scale = tensor_get(scales, b, leaf, h, 0);
    sharing(c, leaf, &first, &end);
    for (int64_t i = first * c->scale_block; i < end * c->scale_block && i < c->len; i++)
        for (int64_t d = 0; d < c->dim; d++)
            most = fmax(most, fabs(tensor_get(x, b, i, h, d)));
    if (!(fabs(scale - most / 127) <= FLT_EPSILON * scale))
        fail_msg("%s: %s: the scale of leaf %lld is %.9g; %.9g is right", label, c->name, (long long)leaf,
                 scale, most / 127);
    for (int64_t i = leaf * c->scale_block; i < (leaf + 1) * c->scale_block && i < c->len; i++)
        for (int64_t d = 0; d < c->dim; d++) {
            double value = tensor_get(x, b, i, h, d), code = tensor_get(codes, b, i, h, d);
            if (!(fabs(value - scale * code) <= scale * (0.5 + 256 * FLT_EPSILON)) || code < -127)
                fail_msg("%s: %s: %.9g became %g * %.9g", label, c->name, value, code, scale);
        }
}

static void check_target(const struct target *target, const struct quantize_case *c)
{
    struct random random = random_seeded(5);
    struct array x = array_new(c->dtype, c->batch, c->len, c->heads, c->dim, LAYOUT_PADDED);
    int64_t leaves = (c->len + c->scale_block - 1) / c->scale_block;
    struct array codes = array_new(CLATTN_INT8, c->batch, c->len, c->heads, c->dim, LAYOUT_PADDED);
    struct array scales = array_new(F32, c->batch, leaves, c->heads, 1, LAYOUT_PADDED);
    clattn_quantize_desc desc = {sizeof desc, c->scale_block, c->far_group, c->near_first, c->near_last};
    array_fill(&x, FILL_NORMAL, &random);
    for (int64_t i = 0; i < c->scale_block && i < c->len; i++) /* a leaf of zeros, in head 0 */
        for (int64_t d = 0; d < c->dim && c->heads > 1; d++)
            tensor_set(&x.view, 0, i, 0, d, 0);
    check_success(target, clattn_quantize(target->context, &desc, &x.view, &codes.view, &scales.view, NULL),
                  c->name);
    array_check_guards(&codes, target->label, c->name);
    array_check_guards(&scales, target->label, c->name);
    for (int64_t n = 0; n < c->batch * leaves * c->heads; n++)
        check_leaf(c, &x.view, &codes.view, &scales.view, n / c->heads / leaves, n / c->heads % leaves,
                   n % c->heads, target->label);
    array_free(&x);
    array_free(&codes);
    array_free(&scales);
}

static void test_bound(void **state)
{
    (void)state;
    for (int n = 0; n < COUNT(cases); n++)
        FOR_EACH_TARGET (target)
            if (target_runs(target, cases[n].size)) check_target(target, &cases[n]);
    target_report("bound");
}

static void test_not_finite(void **state)
{
    (void)state;
    const float x[] = {NAN, INFINITY, -INFINITY, 127, 2, 0};
    const int8_t right[] = {0, 127, -127, 127, 2, 0};
    FOR_EACH_TARGET (target) {
        int8_t codes[COUNT(x)];
        float scale;
        clattn_tensor from = clattn_tensor_bthd((void *)x, F32, 1, 1, 1, COUNT(x)),
                      to = clattn_tensor_bthd(codes, CLATTN_INT8, 1, 1, 1, COUNT(x)),
                      scales = clattn_tensor_bthd(&scale, F32, 1, 1, 1, 1);
        check_success(target, clattn_quantize(target->context, NULL, &from, &to, &scales, NULL), "not finite");
        assert_true(scale == 1);
        assert_memory_equal(codes, right, sizeof right);
        assert_int_equal(clattn_quantize(target->context, NULL, &to, &to, &scales, NULL), CLATTN_INVALID_DTYPE);
        assert_int_equal(clattn_quantize(target->context, NULL, &from, &from, &scales, NULL),
                         CLATTN_INVALID_DTYPE);
        assert_int_equal(clattn_quantize(target->context, NULL, &from, &to, &from, NULL), CLATTN_INVALID_SHAPE);
    }
}

/* Greatest scale of all leaves and heads. */
static double greatest(const clattn_tensor *scales)
{
    double most = 0;
    for (int64_t n = 0; n < scales->len * scales->heads; n++)
        most = fmax(most, tensor_get(scales, 0, n / scales->heads, n % scales->heads, 0));
    return most;
}

/* |logit error| <= e = scale k_scale / 2 sum |q|; then |out error| <= (exp(2e) - 1) max |v| + v_scale / 2. */
static void test_attention(void **state)
{
    (void)state;
    struct random random = random_seeded(9);
    struct shape shape = {"quantised", SIZE_NORMAL, 1, 40, 200, 2, 2, 16, 16, F32, LAYOUT_BTHD, false};
    struct fixture f = fixture_new(&shape, &random);
    struct forward exact = fixture_problem(&f, NULL);
    struct expected expected = expected_forward(&exact);
    struct array codes[2], scales[2], k = f.k, v = f.v;
    for (int n = 0; n < 2; n++) {
        codes[n] = array_new(CLATTN_INT8, 1, 200, 2, 16, LAYOUT_BTHD);
        scales[n] = array_new(F32, 1, 4, 2, 1, LAYOUT_BTHD);
    }
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_NORMAL)) continue;
        for (int n = 0; n < 2; n++)
            check_success(target,
                          clattn_quantize(target->context, NULL, n ? &v.view : &k.view, &codes[n].view,
                                          &scales[n].view, NULL),
                          "quantize");
        f.k = codes[0], f.v = codes[1];
        f.attention.k_scale = &scales[0].view, f.attention.v_scale = &scales[1].view;
        fixture_forward(target, &f, NULL);
        double k_scale = greatest(&scales[0].view), v_scale = greatest(&scales[1].view), squares[2] = {0, 0};
        for (int64_t row = 0; row < 40 * 4; row++) {
            double sum = 0;
            for (int64_t d = 0; d < 16; d++)
                sum += fabs(tensor_get(&f.q.view, 0, row / 4, row % 4, d));
            double moved = 0.25 * k_scale / 2 * sum;
            double allowed = expm1(2 * moved) * 127 * v_scale + v_scale / 2 + 1e-5;
            for (int64_t d = 0; d < 16; d++) {
                double want = expected.out[row * 16 + d], got = tensor_get(&f.out.view, 0, row / 4, row % 4, d);
                if (!(fabs(got - want) <= allowed))
                    fail_msg("%s: row %lld is off by %g; at most %g", target->label, (long long)row, got - want,
                             allowed);
                squares[0] += (got - want) * (got - want);
                squares[1] += want * want;
            }
            assert_true(fabs(tensor_get(&f.lse.view, 0, row / 4, row % 4, 0) - expected.lse[row]) <=
                        moved + 1e-5);
        }
        double relative = sqrt(squares[0] / squares[1]);
        if (!(relative < 0.02)) fail_msg("%s: relative error %g", target->label, relative);
    }
    f.k = k, f.v = v;
    for (int n = 0; n < 2; n++) {
        array_free(&codes[n]);
        array_free(&scales[n]);
    }
    expected_free(&expected);
    fixture_free(&f);
    target_report("attention");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bound),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_attention),
    };
    return cmocka_run_group_tests_name("quantize", tests, targets_open, targets_close);
}
