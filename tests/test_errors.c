/* SPDX-License-Identifier: MIT */
/* Wrong arguments: each gives its status, a detail that names the argument and its value, and untouched
 * outputs. */

#include "fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BIG (INT64_C(1) << 61)

/* Everything that a call gets. */
struct call {
    clattn_attention_desc attention;
    clattn_select_desc select;
    clattn_tensor q, k, v, out, lse;
    clattn_tensor *q_at, *k_at, *v_at, *out_at;
    clattn_sync sync, *sync_at;
};

static const int32_t cu_good[] = {0, 8, 20}, cu_first[] = {1, 8, 20}, cu_descends[] = {0, 25, 20},
                     cu_short[] = {0, 8, 19};
static const int32_t used_good[] = {20}, used_long[] = {21}, used_negative[] = {-2};
static clattn_tensor bad_tensor; /* a sink or bias that a case has made wrong */

static void packed(struct call *c, const int32_t *cu_q, const int32_t *cu_k)
{
    c->attention.sequences = 2;
    c->attention.cu_seqlens_q = cu_q;
    c->attention.cu_seqlens_k = cu_k;
}

static void sink(struct call *c, clattn_dtype dtype, int64_t heads)
{
    static float logits[16];
    bad_tensor = clattn_tensor_bthd(logits, dtype, 1, 1, heads, 1);
    c->attention.sink = &bad_tensor;
}

/* name, status, argument and value in the detail, what is done to a good call: 20 queries, 20 keys, 4 heads on
 * 2, dim 64, dim_v 64, batch 1, float32. */
#define TENSOR_CASES(X)                                                                                        \
    X(no_q, INVALID_ARGUMENT, "q", "NULL", c->q_at = NULL)                                                     \
    X(no_k, INVALID_ARGUMENT, "k", "NULL", c->k_at = NULL)                                                     \
    X(no_v, INVALID_ARGUMENT, "v", "NULL", c->v_at = NULL)                                                     \
    X(no_out, INVALID_ARGUMENT, "out", "NULL", c->out_at = NULL)                                               \
    X(no_q_data, INVALID_ARGUMENT, "q.data", "NULL", c->q.data = NULL)                                         \
    X(no_out_data, INVALID_ARGUMENT, "out.data", "NULL", c->out.data = NULL)                                   \
    X(no_lse_data, INVALID_ARGUMENT, "lse.data", "NULL", c->lse.data = NULL)                                   \
    X(q_dtype, INVALID_DTYPE, "q.dtype", "77", c->q.dtype = (clattn_dtype)77)                                  \
    X(q_dtype_0, INVALID_DTYPE, "q.dtype", "0", c->q.dtype = (clattn_dtype)0)                                  \
    X(q_int8, INVALID_DTYPE, "q", "", c->q.dtype = CLATTN_INT8)                                                \
    X(k_other_dtype, INVALID_DTYPE, "k.dtype", "float16", c->k.dtype = CLATTN_FLOAT16)                         \
    X(v_other_dtype, INVALID_DTYPE, "v.dtype", "bfloat16", c->v.dtype = CLATTN_BFLOAT16)                       \
    X(out_other_dtype, INVALID_DTYPE, "out.dtype", "float16", c->out.dtype = CLATTN_FLOAT16)                   \
    X(lse_dtype, INVALID_DTYPE, "lse.dtype", "bfloat16", c->lse.dtype = CLATTN_BFLOAT16)                       \
    X(q_len_negative, INVALID_SHAPE, "q", "-1", c->q.len = -1)                                                 \
    X(q_heads_0, INVALID_SHAPE, "q", "[0]", c->q.heads = 0)                                                    \
    X(k_dim_0, INVALID_SHAPE, "k", "[0]", c->k.dim = 0)                                                        \
    X(v_batch_0, INVALID_SHAPE, "v", "[0]", c->v.batch = 0)                                                    \
    X(dim_257, INVALID_SHAPE, "dim", "257", c->q.dim = c->k.dim = 257)                                         \
    X(dim_v_257, INVALID_SHAPE, "v.dim", "257", c->v.dim = c->out.dim = 257)                                   \
    X(dims_differ, INVALID_SHAPE, "q.dim", "63", c->q.dim = 63)                                                \
    X(heads_no_multiple, INVALID_SHAPE, "q.heads", "3", c->q.heads = 3)                                        \
    X(fewer_q_heads, INVALID_SHAPE, "q.heads", "1", c->q.heads = 1)                                            \
    X(batch_differs, INVALID_SHAPE, "batch", "2", c->k.batch = 2)                                              \
    X(v_len_differs, INVALID_SHAPE, "v.len", "19", c->v.len = 19)                                              \
    X(v_heads_differ, INVALID_SHAPE, "v.heads", "1", c->v.heads = 1)                                           \
    X(out_len, INVALID_SHAPE, "out.len", "19", c->out.len = 19)                                                \
    X(out_heads, INVALID_SHAPE, "out.heads", "2", c->out.heads = 2)                                            \
    X(out_dim, INVALID_SHAPE, "out.dim", "63", c->out.dim = 63)                                                \
    X(lse_len, INVALID_SHAPE, "lse.len", "21", c->lse.len = 21)                                                \
    X(lse_dim, INVALID_SHAPE, "lse.dim", "2", c->lse.dim = c->lse.head_stride = (c->lse.len_stride = 8) / 4)   \
    X(stride_negative, INVALID_STRIDE, "k", "-128", c->k.len_stride = -128)                                    \
    X(offset_negative, INVALID_STRIDE, "v", "-4", c->v.offset = -4)                                            \
    X(out_stride_0, INVALID_STRIDE, "out", "0", c->out.len_stride = 0)                                         \
    X(out_overlaps, INVALID_STRIDE, "out", "63", c->out.head_stride = 63)                                      \
    X(out_rows_overlap, INVALID_STRIDE, "out", "255", c->out.len_stride = 255)                                 \
    X(lse_overlaps, INVALID_STRIDE, "lse", "3", c->lse.len_stride = 3)                                         \
    X(q_memory, INVALID_MEMORY, "q.memory", "9", c->q.memory = (clattn_memory)9)                               \
    X(q_len_huge, SIZE_OVERFLOW, "q", "", c->q.len = BIG)                                                      \
    X(product_huge, SIZE_OVERFLOW, "k", "", c->k.heads = c->k.len = INT64_C(1) << 30)                          \
    X(stride_huge, SIZE_OVERFLOW, "v", "", c->v.len_stride = BIG)                                              \
    X(offset_huge, SIZE_OVERFLOW, "out", "", c->out.offset = INT64_MAX - 5)

#define DESCRIPTOR_CASES(X)                                                                                    \
    X(attention_size, INVALID_ARGUMENT, "attention.size", "0", c->attention.size = 0)                          \
    X(scale_nan, INVALID_ARGUMENT, "scale", "nan", c->attention.scale = NAN)                                   \
    X(scale_infinite, INVALID_ARGUMENT, "scale", "-inf", c->attention.scale = -INFINITY)                       \
    X(sequences_negative, INVALID_SEQLENS, "sequences", "-3", c->attention.sequences = -3)                     \
    X(cu_q_missing, INVALID_SEQLENS, "cu_seqlens_q", "NULL", packed(c, NULL, cu_good))                         \
    X(cu_k_missing, INVALID_SEQLENS, "cu_seqlens_k", "NULL", packed(c, cu_good, NULL))                         \
    X(cu_q_first, INVALID_SEQLENS, "cu_seqlens_q[0]", "1", packed(c, cu_first, cu_good))                       \
    X(cu_k_descends, INVALID_SEQLENS, "cu_seqlens_k[2]", "20", packed(c, cu_good, cu_descends))                \
    X(cu_q_short, INVALID_SEQLENS, "cu_seqlens_q[2]", "19", packed(c, cu_short, cu_good))                      \
    X(used_k_long, INVALID_SEQLENS, "seqused_k", "21", c->attention.seqused_k = used_long)                     \
    X(used_q_negative, INVALID_SEQLENS, "seqused_q", "-2", c->attention.seqused_q = used_negative)             \
    X(used_with_packed, INVALID_SEQLENS, "seqused", "",                                                        \
      (packed(c, cu_good, cu_good), c->attention.seqused_k = used_good))                                       \
    X(softcap_negative, INVALID_ARGUMENT, "softcap", "-1", c->attention.softcap = -1)                          \
    X(softcap_nan, INVALID_ARGUMENT, "softcap", "nan", c->attention.softcap = NAN)                             \
    X(window_negative, INVALID_ARGUMENT, "window", "-7", c->attention.window = -7)                             \
    X(sink_dtype, INVALID_DTYPE, "sink", "float16", sink(c, CLATTN_FLOAT16, 4))                                \
    X(sink_heads, INVALID_SHAPE, "sink", "3", sink(c, CLATTN_FLOAT32, 3))

#define SELECT_CASES(X)                                                                                        \
    X(select_size, INVALID_ARGUMENT, "select.size", "3", c->select.size = 3)                                   \
    X(selector, INVALID_ARGUMENT, "select.selector", "99", c->select.selector = (clattn_selector)99)           \
    X(selector_negative, INVALID_ARGUMENT, "select.selector", "-1", c->select.selector = (clattn_selector)-1)  \
    X(topk_0, INVALID_ARGUMENT, "select.topk", "0", c->select.topk = 0)                                        \
    X(topk_large, INVALID_ARGUMENT, "select.topk", "513", c->select.topk = CLATTN_TOPK_MAX + 1)                \
    X(leaf_48, INVALID_ARGUMENT, "select.leaf", "48", c->select.leaf = 48)                                     \
    X(leaf_256, INVALID_ARGUMENT, "select.leaf", "256", c->select.leaf = 256)                                  \
    X(forced_first, INVALID_ARGUMENT, "forced_first", "-1", c->select.forced_first = -1)                       \
    X(forced_last, INVALID_ARGUMENT, "forced_last", "-2", c->select.forced_last = -2)                          \
    X(sync_size, INVALID_ARGUMENT, "sync", "", (c->sync_at = &c->sync, c->sync.size = 1))                      \
    X(sync_list, INVALID_ARGUMENT, "sync", "", (c->sync_at = &c->sync, c->sync.wait_count = 2))

#define DEFINE(name, status, argument, value, action)                                                          \
    static void make_##name(struct call *c)                                                                    \
    {                                                                                                          \
        (void)(action);                                                                                        \
    }
#define DEFINE_PACKED(name, status, argument, value, action)                                                   \
    static void make_##name(struct call *c)                                                                    \
    {                                                                                                          \
        action;                                                                                                \
    }
#define ENTRY(name, status, argument, value, action) {#name, CLATTN_##status, argument, value, make_##name},

TENSOR_CASES(DEFINE)
DESCRIPTOR_CASES(DEFINE_PACKED)
SELECT_CASES(DEFINE)

static const struct {
    const char *name;
    clattn_status status;
    const char *argument, *value;
    void (*make)(struct call *c);
} cases[] = {TENSOR_CASES(ENTRY) DESCRIPTOR_CASES(ENTRY) SELECT_CASES(ENTRY)};

enum { SELECT_COUNT = 11 };

static const struct shape good = {"good", SIZE_TINY,      1,           20,   20, 2, 2, 64,
                                  64,     CLATTN_FLOAT32, LAYOUT_BTHD, false};

static struct call call_of(const struct fixture *f)
{
    return (struct call){.attention = CLATTN_ATTENTION_DESC_INIT,
                         .select = CLATTN_SELECT_DESC_INIT,
                         .q = f->q.view,
                         .k = f->k.view,
                         .v = f->v.view,
                         .out = f->out.view,
                         .lse = f->lse.view,
                         .sync = CLATTN_SYNC_INIT};
}

static void check_failed(const struct target *target, clattn_status got, int n, const char *function)
{
    char error[1024] = "";
    clattn_context_error(target->context, error, sizeof error);
    if (got != cases[n].status)
        fail_msg("%s: %s with %s: status %d (%s; %s); %d is right", target->label, function, cases[n].name, got,
                 clattn_strerror(got), error, cases[n].status);
    if (!strstr(error, cases[n].argument) || !strstr(error, cases[n].value))
        fail_msg("%s: %s with %s: the detail '%s' does not name '%s' and '%s'", target->label, function,
                 cases[n].name, error, cases[n].argument, cases[n].value);
}

/* Each case through clattn_attention, and through clattn_attention_forward where the argument is its own too.
 */
static void test_calls(void **state)
{
    (void)state;
    struct random random = random_seeded(1);
    struct fixture f = fixture_new(&good, &random);
    for (int n = 0; n < COUNT(cases) * 2; n++) {
        bool forward = n % 2;
        FOR_EACH_TARGET (target) {
            struct call c = call_of(&f);
            c.q_at = &c.q, c.k_at = &c.k, c.v_at = &c.v, c.out_at = &c.out;
            cases[n / 2].make(&c);
            if (forward && n / 2 >= COUNT(cases) - SELECT_COUNT) continue;
            clattn_status status = forward
                                       ? clattn_attention_forward(target->context, &c.attention, c.q_at, c.k_at,
                                                                  c.v_at, NULL, c.out_at, &c.lse, c.sync_at)
                                       : clattn_attention(target->context, &c.attention, &c.select, c.q_at,
                                                          c.k_at, c.v_at, c.out_at, &c.lse, c.sync_at);
            check_failed(target, status, n / 2, forward ? "clattn_attention_forward" : "clattn_attention");
            if (!array_untouched(&f.out) || !array_untouched(&f.lse))
                fail_msg("%s: %s: an output was written", target->label, cases[n / 2].name);
        }
    }
    fixture_free(&f);
}

/* The same for selection and pyramid, whose results stay NULL. */
static void test_objects(void **state)
{
    (void)state;
    struct random random = random_seeded(2);
    struct fixture f = fixture_new(&good, &random);
    for (int n = 0; n < COUNT(cases); n++) {
        const char *name = cases[n].argument;
        bool of_v = strchr("vol", name[0]) || strncmp(name, "so", 2) == 0 || strncmp(name, "win", 3) == 0 ||
                    strncmp(name, "sink", 4) == 0;
        if (of_v) continue; /* v, out, lse, softcap, window and sink are no concern of selection */
        FOR_EACH_TARGET (target) {
            clattn_blocks *blocks = NULL;
            struct call c = call_of(&f);
            c.q_at = &c.q, c.k_at = &c.k;
            cases[n].make(&c);
            clattn_status status = clattn_select(target->context, &c.attention, &c.select, c.q_at, c.k_at, NULL,
                                                 &blocks, c.sync_at);
            check_failed(target, status, n, "clattn_select");
            assert_null(blocks);
        }
    }
    FOR_EACH_TARGET (target) {
        clattn_pyramid *pyramid = NULL;
        clattn_blocks *blocks = NULL;
        clattn_context *context = target->context;
        clattn_select_desc dense = select_desc(CLATTN_SELECT_DENSE, 8, 64);
        assert_int_equal(clattn_pyramid_build(context, NULL, 65, &f.k.view, &pyramid, NULL),
                         CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_pyramid_build(context, NULL, 64, NULL, &pyramid, NULL),
                         CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_pyramid_build(context, NULL, 64, &f.k.view, NULL, NULL),
                         CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_pyramid_build(NULL, NULL, 64, &f.k.view, &pyramid, NULL),
                         CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_select(context, NULL, &dense, &f.q.view, &f.k.view, NULL, &blocks, NULL),
                         CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_select(context, NULL, NULL, &f.q.view, &f.k.view, NULL, NULL, NULL),
                         CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_select(NULL, NULL, NULL, &f.q.view, &f.k.view, NULL, &blocks, NULL),
                         CLATTN_INVALID_ARGUMENT);
        assert_true(!pyramid && !blocks);
    }
    fixture_free(&f);
}

/* ---- block lists ---- */

static void check_blocks(const struct target *target, struct fixture *f, const int32_t *indices,
                         clattn_blocks_desc desc, clattn_status at_create, clattn_status at_use,
                         const char *value)
{
    clattn_blocks *blocks = NULL;
    char error[1024] = "";
    clattn_status status = clattn_blocks_create(target->context, &desc, indices, &blocks);
    clattn_context_error(target->context, error, sizeof error);
    if (status != at_create)
        fail_msg("%s: blocks_create with %s: status %d (%s); %d is right", target->label, value, status, error,
                 at_create);
    if (status) {
        assert_null(blocks);
    } else {
        array_poison(&f->out);
        array_poison(&f->lse);
        status = clattn_attention_forward(target->context, NULL, &f->q.view, &f->k.view, &f->v.view, blocks,
                                          &f->out.view, &f->lse.view, NULL);
        clattn_context_error(target->context, error, sizeof error);
        if (status != at_use)
            fail_msg("%s: forward with %s: status %d (%s); %d is right", target->label, value, status, error,
                     at_use);
        assert_true(array_untouched(&f->out) && array_untouched(&f->lse));
    }
    if (!strstr(error, value)) fail_msg("%s: '%s' does not name '%s'", target->label, error, value);
    clattn_blocks_release(target->context, blocks);
}

static void test_blocks(void **state)
{
    (void)state;
    struct random random = random_seeded(3);
    struct fixture f = fixture_new(&good, &random);
    int32_t indices[20 * 4 * 2] = {0};
    clattn_blocks_desc right = CLATTN_BLOCKS_DESC_INIT, d;
    right.rows = 20;
    right.topk = 2;
    const clattn_status ok = CLATTN_SUCCESS, argument = CLATTN_INVALID_ARGUMENT, bad = CLATTN_INVALID_BLOCKS;
    FOR_EACH_TARGET (target) {
        check_blocks(target, &f, indices, (d = right, d.rows = 19, d), ok, bad, "19");
        check_blocks(target, &f, indices, (d = right, d.q_block = 3, d), ok, bad, "20");
        check_blocks(target, &f, indices, (d = right, d.heads = 3, d), ok, bad, "3");
        check_blocks(target, &f, indices, (d = right, d.block = 48, d), argument, ok, "48");
        check_blocks(target, &f, indices, (d = right, d.q_block = 0, d), argument, ok, "0");
        check_blocks(target, &f, indices, (d = right, d.topk = 0, d), CLATTN_INVALID_SHAPE, ok, "0");
        check_blocks(target, &f, indices, (d = right, d.heads = 0, d), CLATTN_INVALID_SHAPE, ok, "0");
        check_blocks(target, &f, indices, (d = right, d.rows = -20, d), CLATTN_INVALID_SHAPE, ok, "-20");
        check_blocks(target, &f, indices, (d = right, d.size = 2, d), argument, ok, "2");
        check_blocks(target, &f, indices, (d = right, d.rows = BIG, d), CLATTN_SIZE_OVERFLOW, ok, "");
        indices[13] = 1; /* 20 keys are one block of 64, or two of 16 */
        check_blocks(target, &f, indices, right, ok, bad, "1");
        indices[13] = INT32_MAX;
        check_blocks(target, &f, indices, (d = right, d.block = 16, d), ok, bad, "2147483647");
        indices[13] = -2;
        check_blocks(target, &f, indices, right, bad, ok, "-2");
        indices[13] = 0;
        clattn_blocks *blocks = NULL;
        assert_int_equal(clattn_blocks_create(target->context, &right, NULL, &blocks), argument);
        assert_int_equal(clattn_blocks_create(target->context, NULL, indices, &blocks), argument);
        assert_int_equal(clattn_blocks_create(target->context, &right, indices, NULL), argument);
        assert_int_equal(clattn_blocks_create(NULL, &right, indices, &blocks), argument);
        assert_int_equal(clattn_blocks_read(target->context, NULL, indices, NULL), argument);
        assert_int_equal(clattn_blocks_describe(NULL, &right), argument);
    }
    fixture_free(&f);
}

/* ---- contexts ---- */

static void check_context(clattn_context_desc desc, clattn_status right, const char *value)
{
    clattn_context *context = NULL;
    char error[256];
    memset(error, 'x', sizeof error);
    desc.error = error;
    desc.error_bytes = sizeof error;
    clattn_status status = clattn_context_create(&desc, &context);
    if (status != right || context)
        fail_msg("context_create with %s: status %d, context %p; %d is right", value, status, (void *)context,
                 right);
    if (!memchr(error, 0, sizeof error) || !strstr(error, value))
        fail_msg("'%.250s' does not name '%s'", error, value);
}

/* A desc of a later library, with a field in use that this one does not know: the detail says so. */
static void check_later_context(void)
{
    struct {
        clattn_context_desc desc;
        int unknown;
    } later = {CLATTN_CONTEXT_DESC_INIT, 1};
    clattn_context *context = NULL;
    char error[256];
    memset(error, 'x', sizeof error);
    later.desc.size = sizeof later;
    later.desc.error = error;
    later.desc.error_bytes = sizeof error;
    assert_int_equal(clattn_context_create(&later.desc, &context), CLATTN_INVALID_ARGUMENT);
    assert_null(context);
    assert_non_null(memchr(error, 0, sizeof error));
    assert_non_null(strstr(error, "desc.size"));
}

static void test_contexts(void **state)
{
    (void)state;
    const clattn_context_desc right = CLATTN_CONTEXT_DESC_INIT;
    clattn_context_desc d;
    check_context((d = right, d.backend = (clattn_backend)42, d), CLATTN_INVALID_ARGUMENT, "42");
    check_context((d = right, d.threads = -1, d), CLATTN_INVALID_ARGUMENT, "-1");
    check_context((d = right, d.cl_queue = &d, d), CLATTN_INVALID_ARGUMENT, "queue");
    check_context((d = right, d.backend = CLATTN_BACKEND_CPU, d.variant = "mmx", d), CLATTN_NO_DEVICE, "mmx");
    check_context((d = right, d.backend = CLATTN_BACKEND_REFERENCE, d.variant = "avx2", d), CLATTN_NO_DEVICE,
                  "avx2");
    check_context((d = right, d.backend = CLATTN_BACKEND_OPENCL, d.device = "no such device", d),
                  CLATTN_NO_DEVICE, "");
    check_context((d = right, d.device = "no such device", d), CLATTN_NO_DEVICE, "");
    check_later_context();
    clattn_context *none = NULL; /* too small a size to say where the error should go */
    assert_int_equal(clattn_context_create((d = right, d.size = 5, &d), &none), CLATTN_INVALID_ARGUMENT);
    assert_null(none);
    assert_int_equal(clattn_context_create(NULL, NULL), CLATTN_INVALID_ARGUMENT);
    clattn_context_release(NULL);
    clattn_blocks_release(NULL, NULL);
    clattn_pyramid_release(NULL, NULL);
    clattn_tensor_release(NULL, NULL);
    assert_int_equal(clattn_context_error(NULL, NULL, 0), 0);
    FOR_EACH_TARGET (target) {
        char whole[1024], part[8];
        clattn_attention(target->context, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
        size_t length = clattn_context_error(target->context, whole, sizeof whole);
        assert_int_equal(length, strlen(whole));
        assert_true(length >= sizeof part);
        assert_int_equal(clattn_context_error(target->context, part, sizeof part), length);
        assert_int_equal(strlen(part), sizeof part - 1);
        assert_memory_equal(part, whole, sizeof part - 1);
    }
}

static void test_strerror(void **state)
{
    (void)state;
    for (int a = CLATTN_OUT_OF_PAGES; a <= CLATTN_INVALID_ARGUMENT; a++)
        for (int b = a + 1; b <= CLATTN_INVALID_ARGUMENT; b++)
            assert_string_not_equal(clattn_strerror((clattn_status)a), clattn_strerror((clattn_status)b));
    assert_string_not_equal(clattn_strerror(CLATTN_SUCCESS), clattn_strerror(CLATTN_INTERNAL));
    for (int status = -1100; status < 100; status++)
        assert_true(clattn_strerror((clattn_status)status)[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calls),    cmocka_unit_test(test_objects),  cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_contexts), cmocka_unit_test(test_strerror),
    };
    return cmocka_run_group_tests_name("errors", tests, targets_open, targets_close);
}
