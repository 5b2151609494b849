/* SPDX-License-Identifier: MIT */
/* Neighborhood attention: window arithmetic, analyser, permutation, and tiles against the definition. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "clattn.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t random_state = 20261129;

static uint32_t random_below(uint32_t bound)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(((random_state >> 32) * bound) >> 32);
}

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
}

/* ---- attention ---- */

struct layout {
    int32_t axes, length[3], window[3], stride[3], dilation[3], causal[3];
    int64_t batch, kv_heads, group, dim, dim_v, extra;
};

static clattn_tensor tensor_new(int64_t batch, int64_t len, int64_t heads, int64_t dim, bool poison)
{
    size_t count = (size_t)(batch * len * heads * dim);
    float *data = malloc((count + 1) * sizeof *data);
    for (size_t i = 0; i < count; i++)
        data[i] = poison ? NAN : (float)((double)random_below(2000) / 1000.0 - 1.0);
    return clattn_tensor_bthd(data, CLATTN_FLOAT32, batch, len, heads, dim);
}

struct results {
    clattn_tensor out, lse, dq, dk, dv, dextra_k, dextra_v;
};

enum { RESULTS = sizeof(struct results) / sizeof(clattn_tensor) };

static void run_layout(clattn_context *context, const clattn_neighborhood_desc *desc, const struct layout *l,
                       const clattn_tensor in[6], struct results *r, bool backward)
{
    clattn_neighborhood *plan = NULL;
    clattn_status status = clattn_neighborhood_create(context, desc, l->extra, &plan);
    if (status) {
        char text[512];
        clattn_context_error(context, text, sizeof text);
        fail_msg("create: %s", text);
    }
    const clattn_tensor *extra_k = l->extra ? &in[3] : NULL, *extra_v = l->extra ? &in[4] : NULL;
    int64_t tokens = in[0].len;
    r->out = tensor_new(l->batch, tokens, l->kv_heads * l->group, l->dim_v, true);
    r->lse = tensor_new(l->batch, tokens, l->kv_heads * l->group, 1, true);
    r->dq = tensor_new(l->batch, tokens, l->kv_heads * l->group, l->dim, true);
    r->dk = tensor_new(l->batch, tokens, l->kv_heads, l->dim, true);
    r->dv = tensor_new(l->batch, tokens, l->kv_heads, l->dim_v, true);
    r->dextra_k = tensor_new(l->batch, l->extra, l->kv_heads, l->dim, true);
    r->dextra_v = tensor_new(l->batch, l->extra, l->kv_heads, l->dim_v, true);
    assert_int_equal(clattn_neighborhood_forward(context, plan, CLATTN_SCALE_DEFAULT, &in[0], &in[1], &in[2],
                                                 extra_k, extra_v, &r->out, &r->lse, NULL),
                     CLATTN_SUCCESS);
    if (backward) {
        clattn_gradients g = CLATTN_GRADIENTS_INIT;
        g.dout = &in[5];
        g.dq = &r->dq;
        g.dk = &r->dk;
        g.dv = &r->dv;
        assert_int_equal(clattn_neighborhood_backward(context, plan, CLATTN_SCALE_DEFAULT, &in[0], &in[1],
                                                      &in[2], extra_k, extra_v, &r->out, &r->lse, &g,
                                                      l->extra ? &r->dextra_k : NULL,
                                                      l->extra ? &r->dextra_v : NULL, NULL),
                         CLATTN_SUCCESS);
    }
    clattn_neighborhood_release(context, plan);
}

static void check_layout(clattn_context *reference, clattn_context *context, const struct layout *l,
                         bool backward)
{
    clattn_neighborhood_desc desc = CLATTN_NEIGHBORHOOD_DESC_INIT;
    int64_t tokens = 1;
    desc.axes = l->axes;
    for (int a = 0; a < l->axes; a++) {
        desc.length[a] = l->length[a];
        desc.window[a] = l->window[a];
        desc.stride[a] = l->stride[a];
        desc.dilation[a] = l->dilation[a];
        desc.causal[a] = l->causal[a];
        tokens *= l->length[a];
    }
    clattn_tensor in[6] = {tensor_new(l->batch, tokens, l->kv_heads * l->group, l->dim, false),
                           tensor_new(l->batch, tokens, l->kv_heads, l->dim, false),
                           tensor_new(l->batch, tokens, l->kv_heads, l->dim_v, false),
                           tensor_new(l->batch, l->extra, l->kv_heads, l->dim, false),
                           tensor_new(l->batch, l->extra, l->kv_heads, l->dim_v, false),
                           tensor_new(l->batch, tokens, l->kv_heads * l->group, l->dim_v, false)};
    struct results expected, have;
    run_layout(reference, &desc, l, in, &expected, backward);
    run_layout(context, &desc, l, in, &have, backward);
    clattn_tensor *e = &expected.out, *h = &have.out;
    for (int i = 0; i < RESULTS; i++) {
        size_t count = (size_t)(e[i].batch * e[i].len * e[i].heads * e[i].dim);
        for (size_t n = 0; n < count && (i < 2 || backward); n++) {
            float a = ((float *)e[i].data)[n], b = ((float *)h[i].data)[n];
            if (!(fabsf(a - b) <= 2e-5f * (1 + fabsf(a))))
                fail_msg("result %d[%zu] is %g, expected %g (axes %d, length %d %d %d, window %d %d %d, stride "
                         "%d %d %d, "
                         "dilation %d %d %d, causal %d %d %d, extra %d)",
                         i, n, (double)b, (double)a, l->axes, l->length[0], l->length[1], l->length[2],
                         l->window[0], l->window[1], l->window[2], l->stride[0], l->stride[1], l->stride[2],
                         l->dilation[0], l->dilation[1], l->dilation[2], l->causal[0], l->causal[1],
                         l->causal[2], (int)l->extra);
        }
    }
    for (int i = 0; i < RESULTS; i++) {
        free(e[i].data);
        free(h[i].data);
    }
    for (int i = 0; i < 6; i++)
        free(in[i].data);
}

static struct layout random_layout(int32_t most_tokens)
{
    struct layout l = {.axes = 1 + (int32_t)random_below(3)};
    int64_t tokens;
    do {
        tokens = 1;
        for (int a = 0; a < l.axes; a++) {
            l.length[a] = 2 + (int32_t)random_below(l.axes == 1 ? 150 : l.axes == 2 ? 20 : 9);
            tokens *= l.length[a];
        }
    } while (tokens > most_tokens);
    for (int a = 0; a < l.axes; a++) {
        l.dilation[a] = 1 + (int32_t)random_below((uint32_t)(l.length[a] / 2 < 4 ? l.length[a] / 2 : 4));
        l.window[a] = 2 + (int32_t)random_below((uint32_t)(l.length[a] / l.dilation[a] - 1));
        l.stride[a] = 1 + (int32_t)random_below((uint32_t)l.window[a]);
        l.causal[a] = (int32_t)random_below(2);
    }
    l.batch = 1 + random_below(2);
    l.kv_heads = 1 + random_below(2);
    l.group = 1 + random_below(3);
    l.dim = 1 + random_below(9);
    l.dim_v = 1 + random_below(9);
    l.extra = random_below(3) ? 0 : 1 + random_below(70);
    return l;
}

/* Shapes that other libraries are tested with: length | window | stride | dilation. */
static const struct layout known[] = {
    {1, {256}, {255}, {82}, {1}, {0}, 1, 1, 1, 16, 16, 0},
    {1, {128}, {63}, {31}, {1}, {1}, 1, 2, 1, 16, 16, 0},
    {1, {128}, {3}, {2}, {10}, {0}, 1, 1, 2, 16, 16, 5},
    {1, {128}, {8}, {7}, {5}, {1}, 1, 1, 1, 16, 8, 0},
    {1, {125}, {3}, {1}, {1}, {0}, 2, 1, 1, 16, 16, 0},
    {2, {5, 25}, {5, 16}, {1, 16}, {1, 1}, {0, 1}, 1, 1, 1, 16, 16, 0},
    {2, {84, 19}, {7, 3}, {1, 1}, {5, 1}, {0, 0}, 1, 1, 1, 8, 8, 0},
    {2, {19, 29}, {8, 8}, {1, 1}, {2, 3}, {1, 0}, 1, 1, 1, 16, 16, 3},
    {2, {67, 80}, {12, 7}, {8, 4}, {5, 11}, {0, 0}, 1, 1, 1, 4, 4, 0},
    {2, {36, 40}, {36, 40}, {12, 13}, {1, 1}, {1, 0}, 1, 1, 1, 4, 4, 0},
    {3, {32, 10, 10}, {7, 3, 3}, {5, 1, 1}, {1, 2, 3}, {0, 0, 1}, 1, 1, 1, 4, 4, 0},
    {3, {8, 8, 16}, {3, 3, 3}, {2, 1, 2}, {2, 2, 4}, {0, 0, 0}, 1, 1, 1, 8, 8, 9},
    {3, {13, 11, 9}, {3, 4, 3}, {2, 3, 3}, {3, 2, 2}, {1, 1, 1}, 1, 1, 2, 4, 4, 0},
};

static void each_context(void (*body)(clattn_context *reference, clattn_context *context, bool is_slow))
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_device_info info = {.size = sizeof info};
    clattn_context *reference;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    assert_int_equal(clattn_context_create(&desc, &reference), CLATTN_SUCCESS);
    for (int i = 0; clattn_device_get(i, &info) == CLATTN_SUCCESS; i++) {
        clattn_context *context;
        if (info.backend != CLATTN_BACKEND_CPU) continue;
        desc.backend = CLATTN_BACKEND_CPU;
        assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
        body(reference, context, false);
        clattn_context_release(context);
    }
    clattn_context_release(reference);
}

static void body_known(clattn_context *reference, clattn_context *context, bool is_slow)
{
    (void)is_slow;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        struct layout l = known[i];
        check_layout(reference, context, &l, i % 2 == 1);
        for (int a = 0; a < l.axes; a++) /* causal the other way round */
            l.causal[a] = !l.causal[a];
        check_layout(reference, context, &l, false);
    }
}

static void body_random(clattn_context *reference, clattn_context *context, bool is_slow)
{
    int count = is_slow ? 20 : 2000;
    print_message("seed %llu, %d layouts\n", (unsigned long long)random_state, count);
    for (int i = 0; i < count; i++) {
        struct layout l = random_layout(150);
        check_layout(reference, context, &l, i % 4 == 0);
    }
}

static void test_known_layouts(void **state)
{
    (void)state;
    each_context(body_known);
}

static void test_random_layouts(void **state)
{
    (void)state;
    each_context(body_random);
}

/* ---- permutation ---- */

static void check_round_trip(clattn_context *context, const clattn_neighborhood_desc *desc, int64_t tokens)
{
    clattn_neighborhood *plan = NULL;
    assert_int_equal(clattn_neighborhood_create(context, desc, 0, &plan), CLATTN_SUCCESS);
    for (int tiles = 0; tiles < 2; tiles++) {
        int64_t rows = clattn_neighborhood_rows(plan, (clattn_tiles)tiles);
        assert_true(rows >= tokens);
        clattn_tensor from = tensor_new(1, tokens, 2, 3, false), to = tensor_new(1, rows, 2, 3, true);
        clattn_tensor back = tensor_new(1, tokens, 2, 3, true);
        assert_int_equal(clattn_neighborhood_permute(context, plan, (clattn_tiles)tiles, &from, &to, NULL),
                         CLATTN_SUCCESS);
        assert_int_equal(clattn_neighborhood_unpermute(context, plan, (clattn_tiles)tiles, &to, &back, NULL),
                         CLATTN_SUCCESS);
        assert_memory_equal(from.data, back.data, (size_t)tokens * 6 * sizeof(float));
        double sums[2] = {0, 0}; /* rows without a token are zero */
        for (int64_t i = 0; i < tokens * 6; i++)
            sums[0] += (double)fabsf(((float *)from.data)[i]);
        for (int64_t i = 0; i < rows * 6; i++)
            sums[1] += (double)fabsf(((float *)to.data)[i]);
        assert_true(fabs(sums[0] - sums[1]) <= 1e-9 * sums[0]);
        free(from.data);
        free(to.data);
        free(back.data);
    }
    clattn_neighborhood_release(context, plan);
}

static void test_permutation(void **state)
{
    (void)state;
    clattn_context *context;
    assert_int_equal(clattn_context_create(NULL, &context), CLATTN_SUCCESS);
    clattn_neighborhood_desc desc = CLATTN_NEIGHBORHOOD_DESC_INIT;
    desc.axes = 3;
    for (int a = 0; a < 3; a++) {
        desc.length[a] = (int32_t[]){30, 47, 53}[a]; /* 74730 tokens */
        desc.window[a] = 5;
        desc.dilation[a] = (int32_t[]){1, 3, 2}[a];
    }
    check_round_trip(context, &desc, 74730);
    const int32_t q_tile[] = {3, 5, 7}, kv_tile[] = {2, 4, 16};
    memcpy(desc.q_tile, q_tile, sizeof q_tile);
    memcpy(desc.kv_tile, kv_tile, sizeof kv_tile);
    check_round_trip(context, &desc, 74730);
    clattn_context_release(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_windows), cmocka_unit_test(test_every_short_line),
        cmocka_unit_test(test_rules),          cmocka_unit_test(test_analyser),
        cmocka_unit_test(test_known_layouts),  cmocka_unit_test(test_random_layouts),
        cmocka_unit_test(test_permutation),
    };
    return cmocka_run_group_tests_name("neighborhood", tests, NULL, NULL);
}
