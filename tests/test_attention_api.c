/* SPDX-License-Identifier: MIT */
/* The public calls: the one-call path equals its pieces, defaults, objects, and the log. */

#include "fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define F32 CLATTN_FLOAT32

static const struct shape plain = {"plain", SIZE_NORMAL, 2, 40, 600, 2, 4, 64, 64, F32, LAYOUT_BTHD, false};

static void check_same(const struct fixture *a, const struct fixture *b, const char *label, const char *name)
{
    if (!tensor_equal_bits(&a->out.view, &b->out.view)) fail_msg("%s: %s: out differs", label, name);
    if (!tensor_equal_bits(&a->lse.view, &b->lse.view)) fail_msg("%s: %s: lse differs", label, name);
}

/* A second fixture with the same inputs and its own outputs. */
static struct fixture with_outputs(const struct fixture *f, enum layout layout)
{
    struct fixture g = *f;
    clattn_tensor t = f->out.view;
    g.out = array_new(t.dtype, t.batch, t.len, t.heads, t.dim, layout);
    g.lse = array_new(F32, t.batch, t.len, t.heads, 1, layout);
    return g;
}

static void free_outputs(struct fixture *g)
{
    array_free(&g->out);
    array_free(&g->lse);
}

/* ---- one call and its pieces ---- */

static void pieces(const struct target *target, struct fixture *f, const clattn_select_desc *select)
{
    clattn_pyramid *pyramid = NULL;
    clattn_blocks *blocks = NULL;
    clattn_context *context = target->context;
    if (select->selector != CLATTN_SELECT_DENSE) {
        check_success(target,
                      clattn_pyramid_build(context, &f->attention, select->leaf, &f->k.view, &pyramid, NULL),
                      "pyramid_build");
        check_success(
            target,
            clattn_select(context, &f->attention, select, &f->q.view, &f->k.view, pyramid, &blocks, NULL),
            "select");
    }
    check_success(target,
                  clattn_attention_forward(context, &f->attention, &f->q.view, &f->k.view, &f->v.view, blocks,
                                           &f->out.view, &f->lse.view, NULL),
                  "attention_forward");
    clattn_blocks_release(context, blocks);
    clattn_pyramid_release(context, pyramid);
}

static void test_one_call(void **state)
{
    (void)state;
    struct random random = random_seeded(1);
    struct fixture f = fixture_new(&plain, &random), g = with_outputs(&f, LAYOUT_PADDED);
    for (int selector = 0; selector <= CLATTN_SELECT_DENSE; selector++) {
        clattn_select_desc select = select_desc(selector, 5, 64);
        FOR_EACH_TARGET (target) {
            if (!target_runs(target, SIZE_NORMAL)) continue;
            pieces(target, &f, &select);
            check_success(target,
                          clattn_attention(target->context, &f.attention, &select, &f.q.view, &f.k.view,
                                           &f.v.view, &g.out.view, &g.lse.view, NULL),
                          "attention");
            array_check_guards(&g.out, target->label, "one call, out");
            array_check_guards(&g.lse, target->label, "one call, lse");
            check_same(&f, &g, target->label, "one call and its pieces");
        }
    }
    free_outputs(&g);
    fixture_free(&f);
    target_report("one call");
}

/* NULL descriptors are the defaults that the header states: causal, 1/sqrt(dim); PISA, 8 leaves of 64, 1 + 2
 * forced. */
static void test_defaults(void **state)
{
    (void)state;
    struct random random = random_seeded(2);
    struct shape shape = plain;
    shape.kv_len = 900;
    struct fixture f = fixture_new(&shape, &random), g = with_outputs(&f, LAYOUT_BTHD);
    f.attention.scale = 0.125f; /* exact */
    f.attention.causal = 1;
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 8, 64);
    select.forced_first = 1;
    select.forced_last = 2;
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_NORMAL)) continue;
        pieces(target, &f, &select);
        check_success(target,
                      clattn_attention(target->context, NULL, NULL, &f.q.view, &f.k.view, &f.v.view,
                                       &g.out.view, &g.lse.view, NULL),
                      "attention with defaults");
        check_same(&f, &g, target->label, "defaults");
    }
    free_outputs(&g);
    fixture_free(&f);
    target_report("defaults");
}

/* ---- descriptors of other sizes ---- */

/* A caller with an older header passes less, one with a newer header more; zero bytes beyond what the library
 * knows are fine. The result is that of the plain descriptor. */
static void test_descriptor_sizes(void **state)
{
    (void)state;
    struct random random = random_seeded(3);
    struct fixture f = fixture_new(&plain, &random), g = with_outputs(&f, LAYOUT_BTHD);
    struct {
        clattn_select_desc known;
        int64_t newer[2];
    } select = {.known = CLATTN_SELECT_DESC_INIT};
    struct {
        clattn_attention_desc known;
        int64_t newer[2];
    } attention = {.known = CLATTN_ATTENTION_DESC_INIT};
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_NORMAL)) continue;
        pieces(target, &f, &select.known);
        for (int n = 0; n < 3; n++) {
            bool newer = n > 0;
            select.known.size = newer ? sizeof select : offsetof(clattn_select_desc, forced_first);
            attention.known.size = newer ? sizeof attention : offsetof(clattn_attention_desc, sequences);
            attention.newer[1] = n == 2;
            clattn_status status = clattn_attention(target->context, &attention.known, &select.known, &f.q.view,
                                                    &f.k.view, &f.v.view, &g.out.view, &g.lse.view, NULL);
            if (n == 2) {
                assert_int_equal(status, CLATTN_INVALID_ARGUMENT);
                break;
            }
            check_success(target, status, newer ? "newer descriptors" : "older descriptors");
            check_same(&f, &g, target->label, newer ? "newer descriptors" : "older descriptors");
        }
        attention.newer[1] = 0;
        attention.known.size = sizeof attention.known;
        select.known.size = sizeof select.known;
    }
    free_outputs(&g);
    fixture_free(&f);
    target_report("descriptor sizes");
}

/* ---- memory of the context ---- */

static clattn_tensor to_device(const struct target *target, const clattn_tensor *host)
{
    clattn_tensor t = {0};
    check_success(
        target,
        clattn_tensor_create(target->context, host->dtype, host->batch, host->len, host->heads, host->dim, &t),
        "tensor_create");
    assert_int_equal(t.dtype, host->dtype);
    assert_true(t.batch == host->batch && t.len == host->len && t.heads == host->heads && t.dim == host->dim);
    check_success(target, clattn_tensor_upload(target->context, host, &t), "tensor_upload");
    return t;
}

/* Tensors of the context, uploaded from and downloaded to any strides, give the same bits as host tensors. */
static void test_device_tensors(void **state)
{
    (void)state;
    struct random random = random_seeded(4);
    struct shape shape = plain;
    shape.layout = LAYOUT_PADDED;
    struct fixture f = fixture_new(&shape, &random), g = with_outputs(&f, LAYOUT_PADDED);
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 5, 64);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_NORMAL)) continue;
        clattn_context *context = target->context;
        pieces(target, &f, &select);
        clattn_tensor q = to_device(target, &f.q.view), k = to_device(target, &f.k.view);
        clattn_tensor v = to_device(target, &f.v.view), out = to_device(target, &g.out.view);
        clattn_tensor lse = to_device(target, &g.lse.view);
        check_success(target, clattn_attention(context, &f.attention, &select, &q, &k, &v, &out, &lse, NULL),
                      "attention on device tensors");
        check_success(target, clattn_tensor_download(context, &out, &g.out.view), "tensor_download");
        check_success(target, clattn_tensor_download(context, &lse, &g.lse.view), "tensor_download");
        array_check_guards(&g.out, target->label, "downloaded out");
        check_same(&f, &g, target->label, "device tensors");
        clattn_tensor *all[] = {&q, &k, &v, &out, &lse};
        for (int n = 0; n < COUNT(all); n++) {
            clattn_tensor_release(context, all[n]);
            assert_null(all[n]->data);
        }
    }
    free_outputs(&g);
    fixture_free(&f);
    target_report("device tensors");
}

static void test_views(void **state)
{
    (void)state;
    float data[1];
    clattn_tensor a = clattn_tensor_bthd(data, F32, 2, 3, 5, 7), b = clattn_tensor_bhtd(data, F32, 2, 5, 3, 7);
    assert_true(a.data == data && a.memory == CLATTN_MEMORY_HOST && a.dtype == F32 && a.offset == 0);
    assert_true(a.batch == 2 && a.len == 3 && a.heads == 5 && a.dim == 7);
    assert_true(a.batch_stride == 105 && a.len_stride == 35 && a.head_stride == 7);
    assert_true(b.batch == 2 && b.len == 3 && b.heads == 5 && b.dim == 7);
    assert_true(b.batch_stride == 105 && b.len_stride == 7 && b.head_stride == 21);
}

/* ---- block lists ---- */

/* What is stored is ascending, without duplicates and holes, padded with -1 on the right; the input is not
 * changed. */
static void test_blocks_normalised(void **state)
{
    static const int32_t given[] = {5, -1, 3, 5, 0, -1, -1, -1, -1, -1, 7, 6, 5, 4, 3, 2, 2, 2, 2, 2};
    static const int32_t stored[] = {0, 3, 5, -1, -1, -1, -1, -1, -1, -1, 3, 4, 5, 6, 7, 2, -1, -1, -1, -1};
    (void)state;
    struct lists lists = {CLATTN_BLOCKS_DESC_INIT, NULL};
    int32_t input[20], got[20], counts[4];
    lists.desc.rows = 2;
    lists.desc.heads = 2;
    lists.desc.topk = 5;
    lists.desc.q_block = 9;
    lists.desc.block = 32;
    FOR_EACH_TARGET (target) {
        memcpy(input, given, sizeof input);
        lists.indices = input;
        clattn_blocks *blocks = lists_upload(target, &lists);
        assert_memory_equal(input, given, sizeof input);
        clattn_blocks_desc desc = {.size = sizeof desc};
        check_success(target, clattn_blocks_describe(blocks, &desc), "describe");
        assert_memory_equal(&desc, &lists.desc, sizeof desc);
        check_success(target, clattn_blocks_read(target->context, blocks, got, counts), "read");
        assert_memory_equal(got, stored, sizeof got);
        assert_memory_equal(counts, ((int32_t[]){3, 0, 5, 1}), sizeof counts);
        check_success(target, clattn_blocks_read(target->context, blocks, NULL, NULL), "read nothing");
        clattn_blocks_release(target->context, blocks);
    }
}

/* ---- devices, statistics, log ---- */

static void test_devices(void **state)
{
    (void)state;
    clattn_device_info info = {.size = sizeof info};
    int number = 0;
    for (; clattn_device_get(number, &info) == CLATTN_SUCCESS; number++) {
        assert_true(info.name[0] && info.variants[0] && !info.variant[0] && info.compute_units > 0);
        assert_int_equal(info.backend, number == 0   ? CLATTN_BACKEND_REFERENCE
                                       : number == 1 ? CLATTN_BACKEND_CPU
                                                     : CLATTN_BACKEND_OPENCL);
        assert_int_equal(info.index, number < 2 ? 0 : number - 2);
        assert_int_equal(info.size, sizeof info);
    }
    assert_int_equal(clattn_device_get(number, &info), CLATTN_NO_DEVICE);
    assert_int_equal(clattn_device_get(-1, &info), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_device_get(0, NULL), CLATTN_INVALID_ARGUMENT);
    info.size = 0;
    assert_int_equal(clattn_device_get(0, &info), CLATTN_INVALID_ARGUMENT);
    memset(&info, 0x5a, sizeof info); /* an older caller's structure: nothing behind it is written */
    info.size = offsetof(clattn_device_info, platform);
    assert_int_equal(clattn_device_get(0, &info), CLATTN_SUCCESS);
    for (size_t i = offsetof(clattn_device_info, platform); i < sizeof info; i++)
        assert_int_equal(((unsigned char *)&info)[i], 0x5a);
}

static void test_stats(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target) {
        clattn_stats stats = {.size = sizeof stats};
        check_success(target, clattn_context_stats(target->context, &stats), "stats");
        assert_true(stats.build_seconds >= 0 && stats.transfer_seconds >= 0);
        if (target->info.backend == CLATTN_BACKEND_OPENCL) /* all cases of this file are too large for slow ones */
            assert_true(target->limit == SIZE_TINY || (stats.kernels_enqueued > 0 && stats.programs_built + stats.programs_loaded > 0));
        else
            assert_true(stats.programs_built == 0 && stats.programs_loaded == 0);
        assert_int_equal(clattn_context_stats(target->context, NULL), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_context_stats(NULL, &stats), CLATTN_INVALID_ARGUMENT);
    }
}

static void count_lines(void *user, clattn_log_level level, const char *message)
{
    assert_true(level >= CLATTN_LOG_ERROR && level <= CLATTN_LOG_DEBUG);
    assert_true(message[0] && !strchr(message, '\n'));
    (*(int *)user)++;
}

/* An error is logged as one line, unless the level leaves it out. */
static void test_log(void **state)
{
    (void)state;
    for (int level = CLATTN_LOG_NONE; level <= CLATTN_LOG_ERROR; level++) {
        clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
        clattn_context *context = NULL;
        int lines = 0;
        desc.backend = CLATTN_BACKEND_CPU;
        desc.log = count_lines;
        desc.log_user = &lines;
        desc.log_level = level;
        assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
        assert_int_equal(clattn_context_error(context, NULL, 0), 0);
        assert_int_equal(clattn_attention(context, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
                         CLATTN_INVALID_ARGUMENT);
        if (!getenv("CLATTN_LOG")) assert_int_equal(lines, level == CLATTN_LOG_ERROR);
        clattn_context_release(context);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_call),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_descriptor_sizes),
        cmocka_unit_test(test_device_tensors),
        cmocka_unit_test(test_views),
        cmocka_unit_test(test_blocks_normalised),
        cmocka_unit_test(test_devices),
        cmocka_unit_test(test_stats),
        cmocka_unit_test(test_log),
    };
    return cmocka_run_group_tests_name("attention api", tests, targets_open, targets_close);
}
