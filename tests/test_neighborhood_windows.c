/* SPDX-License-Identifier: MIT */
/* Neighborhood attention: window arithmetic, the rules that a desc must keep, and the analyser. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "clattn.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

static clattn_neighborhood_desc line(int32_t length, int32_t window, int32_t stride, int32_t dilation,
                                     int32_t causal)
{
    clattn_neighborhood_desc desc = CLATTN_NEIGHBORHOOD_DESC_INIT;
    desc.length[0] = length;
    desc.window[0] = window;
    desc.stride[0] = stride;
    desc.dilation[0] = dilation;
    desc.causal[0] = causal;
    return desc;
}

/* ---- windows ---- */

static void check_window(const clattn_neighborhood_desc *desc, int32_t query, int32_t lo, int32_t hi)
{
    int32_t first, end;
    assert_int_equal(clattn_neighborhood_keys(desc, 0, query, &first, &end), CLATTN_SUCCESS);
    assert_int_equal(first, lo);
    assert_int_equal(end, hi);
}

static void test_golden_windows(void **state)
{
    (void)state;
    static const int32_t even[] = {0, 0, 0, 1, 2, 3, 4, 5, 6, 6}, strided[] = {0, 0, 0, 2, 2, 2, 5, 5, 5, 5};
    static const int32_t causal[][2] = {{0, 1}, {0, 2}, {0, 3}, {1, 4}, {1, 5},
                                        {1, 6}, {4, 7}, {4, 8}, {4, 9}, {5, 10}};
    static const int32_t groups[] = {0, 0, 8, 16, 20, 20};
    clattn_neighborhood_desc a = line(10, 4, 1, 1, 0), b = line(10, 5, 3, 1, 0), c = line(10, 5, 3, 1, 1);
    clattn_neighborhood_desc d = line(44, 24, 8, 1, 0);
    for (int i = 0; i < 10; i++) {
        check_window(&a, i, even[i], even[i] + 4);
        check_window(&b, i, strided[i], strided[i] + 5);
        check_window(&c, i, causal[i][0], causal[i][1]);
    }
    for (int i = 0; i < 44; i++)
        check_window(&d, i, groups[i / 8], groups[i / 8] + 24);
}

/* A line as long as 32 bits allow: leaders and sums of lengths lie beyond. */
static void test_long_line(void **state)
{
    (void)state;
    const int32_t L = INT32_MAX, w = 1500000000, s = 1200000000, d = 1000000000;
    clattn_neighborhood_desc causal = line(L, w, s, 1, 1), both = line(L, w, s, 1, 0);
    clattn_neighborhood_desc dilated = line(L, 2, 1, d, 0);
    check_window(&causal, L - 1, L - w, L);
    check_window(&both, L - 1, L - w, L);
    check_window(&dilated, L - 1, L - 1 - d, L);
    int32_t first, end;
    assert_int_equal(clattn_neighborhood_queries(&causal, 0, 0, &first, &end), CLATTN_SUCCESS);
    assert_int_equal(first, 0);
    assert_int_equal(end, s); /* the first group's leader sees it, that of the second no more */
}

/* The definition, written down once more. */
static void defined_window(int L, int w, int s, int d, int causal, int x, int *lo, int *hi)
{
    int r = x % d, i = x / d, Lr = (L - r + d - 1) / d;
    int lead = (i / s) * s + (causal ? s - 1 : s / 2);
    if (lead > Lr - 1) lead = Lr - 1;
    if (causal) {
        *lo = lead - w + 1 > 0 ? lead - w + 1 : 0;
        *hi = i + 1;
    } else {
        *lo = lead - w / 2;
        if (*lo < 0) *lo = 0;
        if (*lo > Lr - w) *lo = Lr - w;
        *hi = *lo + w;
    }
}

static void check_line(int L, int w, int s, int d, int causal)
{
    clattn_neighborhood_desc desc = line(L, w, s, d, causal);
    bool sees[32][32] = {{false}};
    for (int x = 0; x < L; x++) {
        int lo, hi, first, end;
        defined_window(L, w, s, d, causal, x, &lo, &hi);
        assert_int_equal(clattn_neighborhood_keys(&desc, 0, x, &first, &end), CLATTN_SUCCESS);
        int seen = 0;
        for (int k = 0; k < L; k++) {
            sees[x][k] = k % d == x % d && k / d >= lo && k / d < hi;
            seen += sees[x][k];
            assert_int_equal(sees[x][k], k % d == x % d && k >= first && k < end);
        }
        assert_true(causal ? seen >= 1 : seen == w);
    }
    for (int k = 0; k < L; k++) { /* the other direction */
        int first, end;
        assert_int_equal(clattn_neighborhood_queries(&desc, 0, k, &first, &end), CLATTN_SUCCESS);
        for (int x = 0; x < L; x++)
            assert_int_equal(sees[x][k], x % d == k % d && x >= first && x < end);
    }
}

static void test_every_short_line(void **state)
{
    (void)state;
    int checked = 0;
    for (int L = 2; L <= 32; L++)
        for (int d = 1; 2 * d <= L; d++)
            for (int w = 2; w * d <= L; w++)
                for (int s = 1; s <= w; s++)
                    for (int causal = 0; causal < 2; causal++, checked++)
                        check_line(L, w, s, d, causal);
    print_message("%d lines\n", checked);
    assert_true(checked > 5000);
}

static void test_rules(void **state)
{
    (void)state;
    static const struct {
        int32_t length, window, stride, dilation;
        const char *rule;
    } broken[] = {{2, 3, 1, 1, "window * dilation <= length"},
                  {10, 4, 1, 3, "window * dilation <= length"},
                  {10, 4, 5, 1, "stride <= window"},
                  {10, 1, 1, 1, ">= 2"},
                  {10, 4, 0, 1, ">= 1"},
                  {10, 4, 1, 0, ">= 1"},
                  {0, 4, 1, 1, ">= 2"},
                  {10, -3, 1, 1, ">= 2"}};
    clattn_context *context;
    assert_int_equal(clattn_context_create(NULL, &context), CLATTN_SUCCESS);
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        char text[512];
        clattn_neighborhood *plan = NULL;
        clattn_neighborhood_desc desc =
            line(broken[i].length, broken[i].window, broken[i].stride, broken[i].dilation, 0);
        assert_int_equal(clattn_neighborhood_create(context, &desc, 0, &plan), CLATTN_INVALID_ARGUMENT);
        assert_null(plan);
        clattn_context_error(context, text, sizeof text);
        if (!strstr(text, broken[i].rule)) fail_msg("'%s' does not name '%s'", text, broken[i].rule);
    }
    clattn_context_release(context);
}

/* ---- analyser ---- */

static void check_bound(const int32_t length[3], const int32_t window[3], const int32_t stride[3],
                        const int32_t q_tile[3], const int32_t kv_tile[3], int axes, double bound, int perfect)
{
    clattn_neighborhood_analysis analysis = {.size = sizeof analysis};
    clattn_neighborhood_desc desc = CLATTN_NEIGHBORHOOD_DESC_INIT;
    desc.axes = axes;
    for (int a = 0; a < axes; a++) {
        desc.length[a] = length[a];
        desc.window[a] = window[a];
        desc.stride[a] = stride[a];
        desc.q_tile[a] = q_tile[a];
        desc.kv_tile[a] = kv_tile[a];
    }
    assert_int_equal(clattn_neighborhood_analyse(&desc, &analysis), CLATTN_SUCCESS);
    print_message("bound %.3f, ideal %.3f, sparsity %.4f, waste %.3f, perfect %d\n", analysis.bound_speedup,
                  analysis.ideal_speedup, analysis.sparsity, analysis.waste, analysis.perfect);
    assert_true(fabs(analysis.bound_speedup - bound) < 0.005);
    assert_int_equal(analysis.perfect, perfect);
    if (perfect) { /* only rows that fill up the last tiles are wasted */
        double rows = 1;
        for (int a = 0; a < axes; a++)
            rows *= (double)((length[a] + q_tile[a] - 1) / q_tile[a] * q_tile[a]);
        assert_true(fabs(analysis.waste - (1 - analysis.tokens / rows)) < 1e-9);
    }
}

static void test_analyser(void **state)
{
    (void)state;
    const int32_t video[] = {30, 48, 80}, window[] = {18, 24, 24}, q_tile[] = {4, 8, 8}, kv_tile[] = {2, 8, 8};
    check_bound(video, window, (int32_t[]){1, 1, 1}, q_tile, kv_tile, 3, 5.24, 0);
    check_bound(video, window, (int32_t[]){1, 8, 8}, q_tile, kv_tile, 3, 10.26, 0);
    check_bound(video, window, (int32_t[]){16, 8, 8}, q_tile, kv_tile, 3, 11.11, 1);
    check_bound((int32_t[]){16, 44, 80}, (int32_t[]){16, 24, 16}, (int32_t[]){1, 8, 16}, (int32_t[]){8, 4, 8},
                (int32_t[]){4, 4, 8}, 3, 9.17, 1);
    check_bound((int32_t[]){256, 256, 1}, (int32_t[]){80, 80, 1}, (int32_t[]){16, 16, 1},
                (int32_t[]){16, 16, 1}, (int32_t[]){16, 8, 1}, 2, 10.24, 1);
    clattn_neighborhood_analysis analysis = {.size = sizeof analysis};
    clattn_neighborhood_desc desc = CLATTN_NEIGHBORHOOD_DESC_INIT;
    desc.axes = 3;
    for (int a = 0; a < 3; a++) {
        desc.length[a] = video[a];
        desc.window[a] = window[a];
    }
    assert_int_equal(clattn_neighborhood_analyse(&desc, &analysis), CLATTN_SUCCESS);
    assert_true(fabs(analysis.ideal_speedup - 11.11) < 0.005 && fabs(analysis.sparsity - 0.91) < 0.00005);
    assert_int_equal(analysis.kv_tile[0] * analysis.kv_tile[1] * analysis.kv_tile[2], 64);

    /* Tiles that reach far over a short axis compute padding: the search must not take them. */
    const int32_t short_axis[] = {16, 24, 40}, short_window[] = {9, 12, 12};
    for (int a = 0; a < 3; a++) {
        desc.length[a] = short_axis[a];
        desc.window[a] = short_window[a];
    }
    assert_int_equal(clattn_neighborhood_analyse(&desc, &analysis), CLATTN_SUCCESS);
    double computed = 64 * 64 * analysis.tile_pairs, all = analysis.tokens * analysis.tokens;
    for (int a = 0; a < 3; a++) {
        assert_true(analysis.q_tile[a] <= short_axis[a]);
        desc.q_tile[a] = desc.kv_tile[a] = 4;
    }
    assert_int_equal(clattn_neighborhood_analyse(&desc, &analysis), CLATTN_SUCCESS);
    assert_true(computed <= 64 * 64 * analysis.tile_pairs && all / computed > 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_windows),
        cmocka_unit_test(test_long_line),
        cmocka_unit_test(test_every_short_line),
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_analyser),
    };
    return cmocka_run_group_tests_name("neighborhood windows", tests, NULL, NULL);
}
