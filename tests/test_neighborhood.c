/* SPDX-License-Identifier: MIT */
/* Neighborhood attention: permutation, and tiles against the definition as the reference computes it. */

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

/* ---- attention ---- */

struct layout {
    int32_t axes, length[3], window[3], stride[3], dilation[3], causal[3];
    int64_t batch, kv_heads, group, dim, dim_v, extra;
    int32_t q_tile[3], kv_tile[3]; /* 0: searched */
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
        desc.q_tile[a] = l->q_tile[a];
        desc.kv_tile[a] = l->kv_tile[a];
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
    {1, {256}, {255}, {82}, {1}, {0}, 1, 1, 1, 16, 16, 0, {0}, {0}},
    {1, {128}, {63}, {31}, {1}, {1}, 1, 2, 1, 16, 16, 0, {0}, {0}},
    {1, {128}, {3}, {2}, {10}, {0}, 1, 1, 2, 16, 16, 5, {0}, {0}},
    {1, {128}, {8}, {7}, {5}, {1}, 1, 1, 1, 16, 8, 0, {0}, {0}},
    {1, {125}, {3}, {1}, {1}, {0}, 2, 1, 1, 16, 16, 0, {0}, {0}},
    {2, {5, 25}, {5, 16}, {1, 16}, {1, 1}, {0, 1}, 1, 1, 1, 16, 16, 0, {0}, {0}},
    {2, {84, 19}, {7, 3}, {1, 1}, {5, 1}, {0, 0}, 1, 1, 1, 8, 8, 0, {0}, {0}},
    {2, {19, 29}, {8, 8}, {1, 1}, {2, 3}, {1, 0}, 1, 1, 1, 16, 16, 3, {0}, {0}},
    {2, {67, 80}, {12, 7}, {8, 4}, {5, 11}, {0, 0}, 1, 1, 1, 4, 4, 0, {0}, {0}},
    {2, {36, 40}, {36, 40}, {12, 13}, {1, 1}, {1, 0}, 1, 1, 1, 4, 4, 0, {0}, {0}},
    {3, {32, 10, 10}, {7, 3, 3}, {5, 1, 1}, {1, 2, 3}, {0, 0, 1}, 1, 1, 1, 4, 4, 0, {0}, {0}},
    {3, {8, 8, 16}, {3, 3, 3}, {2, 1, 2}, {2, 2, 4}, {0, 0, 0}, 1, 1, 1, 8, 8, 9, {0}, {0}},
    {3, {13, 11, 9}, {3, 4, 3}, {2, 3, 3}, {3, 2, 2}, {1, 1, 1}, 1, 1, 2, 4, 4, 0, {0}, {0}},
};

/* Interpreters and checkers: minutes where others take seconds. */
static bool is_slow(const clattn_device_info *info)
{
    const char *size = getenv("CLATTN_TEST_SIZE");
    return strstr(info->platform, "rusticl") || strstr(info->platform, "Oclgrind") ||
           (size && strcmp(size, "tiny") == 0);
}

/* The CPU and every OpenCL device. */
static void each_context(void (*body)(clattn_context *reference, clattn_context *context,
                                      const clattn_device_info *info))
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_device_info info = {.size = sizeof info};
    clattn_context *reference;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    assert_int_equal(clattn_context_create(&desc, &reference), CLATTN_SUCCESS);
    for (int i = 0; clattn_device_get(i, &info) == CLATTN_SUCCESS; i++) {
        clattn_context *context;
        char index[16];
        if (info.backend == CLATTN_BACKEND_REFERENCE) continue;
        snprintf(index, sizeof index, "%d", info.index);
        desc.backend = info.backend;
        desc.device = info.backend == CLATTN_BACKEND_OPENCL ? index : NULL;
        assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
        body(reference, context, &info);
        clattn_stats stats = {.size = sizeof stats};
        assert_int_equal(clattn_context_stats(context, &stats), CLATTN_SUCCESS);
        print_message("%s: %d programs built, %d loaded\n", info.name, (int)stats.programs_built,
                      (int)stats.programs_loaded);
        clattn_context_release(context);
    }
    clattn_context_release(reference);
}

/* OpenCL builds a kernel for each dim, group and tile: there are two. */
static struct layout for_opencl(struct layout l, bool is_large)
{
    static const int32_t kv_tiles[4][3] = {{0}, {16, 1, 1}, {4, 4, 1}, {2, 4, 2}};
    static const int32_t kv_tiles_large[4][3] = {{0}, {64, 1, 1}, {16, 4, 1}, {4, 8, 2}};
    static const int32_t q_tiles[4][3] = {{0}, {12, 1, 1}, {4, 3, 1}, {2, 2, 3}};
    memcpy(l.kv_tile, (is_large ? kv_tiles_large : kv_tiles)[l.axes], sizeof l.kv_tile);
    memcpy(l.q_tile, q_tiles[l.axes], sizeof l.q_tile);
    l.dim = 4;
    l.dim_v = 8;
    l.group = is_large ? 3 : 2;
    return l;
}

static void body_known(clattn_context *reference, clattn_context *context, const clattn_device_info *info)
{
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        struct layout l = known[i];
        bool is_opencl = info->backend == CLATTN_BACKEND_OPENCL;
        if (is_opencl && is_slow(info)) continue;
        if (is_opencl) l = for_opencl(l, i % 2 == 0);
        check_layout(reference, context, &l, i % 2 == 1);
        for (int a = 0; a < l.axes; a++) /* causal the other way round */
            l.causal[a] = !l.causal[a];
        check_layout(reference, context, &l, false);
    }
}

static void body_random(clattn_context *reference, clattn_context *context, const clattn_device_info *info)
{
    bool is_opencl = info->backend == CLATTN_BACKEND_OPENCL;
    int count = !is_opencl ? 2000 : is_slow(info) ? 3 : 60;
    print_message("seed %llu, %d layouts on %s\n", (unsigned long long)random_state, count, info->name);
    for (int i = 0; i < count; i++) {
        struct layout l = random_layout(is_opencl && is_slow(info) ? 60 : 150);
        if (is_opencl) l = for_opencl(l, !is_slow(info) && i % 3 == 0);
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

static const struct permutation {
    clattn_dtype dtype;
    int64_t batch, heads, dim;
    bool is_bhtd; /* the permuted tensor; the tokens have gaps */
} permutations[] = {{CLATTN_FLOAT32, 1, 2, 3, false},
                    {CLATTN_FLOAT32, 2, 1, 4, true},
                    {CLATTN_FLOAT16, 2, 3, 8, false},
                    {CLATTN_BFLOAT16, 1, 2, 5, true},
                    {CLATTN_INT8, 1, 2, 16, true}};

enum { PERMUTATIONS = sizeof permutations / sizeof *permutations };

/* Bytes that no one must change: tokens with a gap after each head and token. */
static clattn_tensor gapped_new(const struct permutation *p, int64_t len, size_t element, bool fill)
{
    clattn_tensor t = clattn_tensor_bthd(NULL, p->dtype, p->batch, len, p->heads, p->dim);
    t.offset = 3;
    t.head_stride = p->dim + 1;
    t.len_stride = p->heads * t.head_stride + 2;
    t.batch_stride = len * t.len_stride;
    size_t bytes = (size_t)(t.offset + p->batch * t.batch_stride) * element;
    t.data = malloc(bytes);
    assert_non_null(t.data);
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)t.data)[i] = fill ? (unsigned char)(1 + random_below(255)) : 0xee;
    return t;
}

static const void *row_at(const clattn_tensor *t, int64_t b, int64_t i, int64_t h, size_t element)
{
    return (const char *)t->data +
           (size_t)(t->offset + b * t->batch_stride + i * t->len_stride + h * t->head_stride) * element;
}

/* Bytes that differ from `value`, of the tensor's rows only. */
static int64_t bytes_other(const clattn_tensor *t, size_t element, unsigned char value)
{
    int64_t count = 0;
    for (int64_t row = 0; row < t->batch * t->len * t->heads; row++) {
        const unsigned char *at =
            row_at(t, row / t->heads / t->len, row / t->heads % t->len, row % t->heads, element);
        for (size_t i = 0; i < (size_t)t->dim * element; i++)
            count += at[i] != value;
    }
    return count;
}

/* There and back, bit for bit. Fills have no byte 0, so bytes that are not 0 are counted: rows without a token
 * are zero. */
static void check_round_trip(clattn_context *context, const clattn_neighborhood_desc *desc, int64_t tokens,
                             const struct permutation *p)
{
    clattn_neighborhood *plan = NULL;
    size_t element = p->dtype == CLATTN_FLOAT32 ? 4 : p->dtype == CLATTN_INT8 ? 1 : 2;
    int64_t moved = p->batch * tokens * p->heads * p->dim * (int64_t)element;
    assert_int_equal(clattn_neighborhood_create(context, desc, 0, &plan), CLATTN_SUCCESS);
    for (int tiles = 0; tiles < 2; tiles++) {
        int64_t rows = clattn_neighborhood_rows(plan, (clattn_tiles)tiles);
        assert_true(rows >= tokens);
        clattn_tensor from = gapped_new(p, tokens, element, true), back = gapped_new(p, tokens, element, false);
        size_t to_bytes = (size_t)(p->batch * rows * p->heads * p->dim) * element;
        void *data = malloc(to_bytes);
        memset(data, 0xee, to_bytes);
        clattn_tensor to = p->is_bhtd ? clattn_tensor_bhtd(data, p->dtype, p->batch, p->heads, rows, p->dim)
                                      : clattn_tensor_bthd(data, p->dtype, p->batch, rows, p->heads, p->dim);
        assert_int_equal(clattn_neighborhood_permute(context, plan, (clattn_tiles)tiles, &from, &to, NULL),
                         CLATTN_SUCCESS);
        assert_int_equal(clattn_neighborhood_unpermute(context, plan, (clattn_tiles)tiles, &to, &back, NULL),
                         CLATTN_SUCCESS);
        assert_true(bytes_other(&to, element, 0) == moved);
        for (int64_t row = 0; row < p->batch * tokens * p->heads; row++) {
            int64_t b = row / p->heads / tokens, i = row / p->heads % tokens, h = row % p->heads;
            assert_memory_equal(row_at(&from, b, i, h, element), row_at(&back, b, i, h, element),
                                (size_t)p->dim * element);
        }
        free(from.data);
        free(to.data);
        free(back.data);
    }
    clattn_neighborhood_release(context, plan);
}

static void body_permutation(clattn_context *reference, clattn_context *context, const clattn_device_info *info)
{
    (void)reference;
    bool is_small = is_slow(info);
    clattn_neighborhood_desc desc = CLATTN_NEIGHBORHOOD_DESC_INIT;
    int64_t tokens = 1;
    desc.axes = 3;
    for (int a = 0; a < 3; a++) {
        desc.length[a] = (is_small ? (int32_t[]){5, 17, 11} : (int32_t[]){30, 47, 53})[a]; /* 74730 tokens */
        desc.window[a] = 5;
        desc.dilation[a] = (int32_t[]){1, 3, 2}[a];
        tokens *= desc.length[a];
    }
    for (int n = 0; n < PERMUTATIONS; n++) {
        const int32_t q_tile[] = {3, 5, 7}, kv_tile[] = {2, 4, 16};
        if (n % 2) {
            memcpy(desc.q_tile, q_tile, sizeof q_tile);
            memcpy(desc.kv_tile, kv_tile, sizeof kv_tile);
        }
        check_round_trip(context, &desc, tokens, &permutations[n]);
    }
}

static void test_permutation(void **state)
{
    (void)state;
    each_context(body_permutation);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_layouts),
        cmocka_unit_test(test_random_layouts),
        cmocka_unit_test(test_permutation),
    };
    return cmocka_run_group_tests_name("neighborhood", tests, NULL, NULL);
}
