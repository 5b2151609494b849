/* SPDX-License-Identifier: MIT */
/* Dense attention and flat selection through CLBlast against the reference. */

#include "harness.h"

#include "config.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct shape {
    int64_t batch, q_len, kv_len, kv_heads, group, dim, dim_v;
    int causal;
    clattn_dtype dtype, out;
    enum layout layout;
};

static const struct shape shapes[] = {
    {1, 70, 70, 1, 2, 64, 64, 1, CLATTN_FLOAT32, CLATTN_FLOAT32, LAYOUT_BTHD},
    {2, 33, 65, 2, 3, 60, 40, 1, CLATTN_FLOAT16, CLATTN_FLOAT32, LAYOUT_PADDED},
    {1, 50, 31, 1, 1, 16, 16, 1, CLATTN_BFLOAT16, CLATTN_BFLOAT16,
     LAYOUT_BHTD}, /* the first rows see nothing */
    {1, 5, 129, 2, 1, 80, 80, 0, CLATTN_FLOAT32, CLATTN_FLOAT32, LAYOUT_BTHD},
};

static int log_lines; /* about CLBlast */

static void count_log(void *user, clattn_log_level level, const char *message)
{
    (void)user;
    (void)level;
    log_lines += strstr(message, "CLBlast is not used") != NULL;
}

static clattn_context *context_of(clattn_backend backend)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_context *context = NULL;
    desc.backend = backend;
    desc.log = count_log;
    clattn_status status = clattn_context_create(&desc, &context);
    if (status != CLATTN_SUCCESS) assert_int_equal(status, CLATTN_NO_DEVICE); /* nothing else is a reason to skip */
    return context;
}

static void run(clattn_context *context, const struct shape *s, struct array in[3], struct array *out,
                struct array *lse)
{
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    attention.causal = s->causal;
    *out = array_new(s->out, s->batch, s->q_len, s->kv_heads * s->group, s->dim_v, s->layout);
    *lse = array_new(CLATTN_FLOAT32, s->batch, s->q_len, s->kv_heads * s->group, 1, s->layout);
    assert_int_equal(clattn_attention_forward(context, &attention, &in[0].view, &in[1].view, &in[2].view, NULL,
                                              &out->view, &lse->view, NULL),
                     CLATTN_SUCCESS);
}

static void compare(const char *what, const struct array *expected, const struct array *have, double tolerance)
{
    const clattn_tensor *t = &expected->view;
    double *a = tensor_doubles(t), *b = tensor_doubles(&have->view);
    for (int64_t n = 0; n < t->batch * t->len * t->heads * t->dim; n++) {
        bool both_empty = isinf(a[n]) && a[n] == b[n];
        if (!both_empty && !(fabs(a[n] - b[n]) <= tolerance * (1 + fabs(a[n]))))
            fail_msg("%s[%lld] is %g, expected %g", what, (long long)n, b[n], a[n]);
    }
    array_check_guards(have, "opencl", what);
    free(a);
    free(b);
}

static void test_products(void **state)
{
    (void)state;
    clattn_context *reference = context_of(CLATTN_BACKEND_REFERENCE),
                   *context = context_of(CLATTN_BACKEND_OPENCL);
    if (!context) {
        clattn_context_release(reference);
        skip(); /* no OpenCL device */
    }
    setenv("CLATTN_DENSE", "clblast", 1);
    log_lines = 0;
    for (const struct shape *s = shapes; s < shapes + COUNT(shapes); s++) {
        struct random random = random_seeded((uint64_t)(s - shapes));
        struct array in[3] = {
            array_new(s->dtype, s->batch, s->q_len, s->kv_heads * s->group, s->dim, s->layout),
            array_new(s->dtype, s->batch, s->kv_len, s->kv_heads, s->dim, s->layout),
            array_new(s->dtype, s->batch, s->kv_len, s->kv_heads, s->dim_v, s->layout)};
        struct array out[2], lse[2];
        for (int i = 0; i < 3; i++)
            array_fill(&in[i], FILL_NORMAL, &random);
        run(reference, s, in, &out[0], &lse[0]);
        run(context, s, in, &out[1], &lse[1]);
        compare("out", &out[0], &out[1], s->out == CLATTN_BFLOAT16 ? 1e-2 : 1e-5);
        compare("lse", &lse[0], &lse[1], 1e-5);
        for (int i = 0; i < 3; i++)
            array_free(&in[i]);
        for (int i = 0; i < 2; i++) {
            array_free(&out[i]);
            array_free(&lse[i]);
        }
    }
    assert_int_equal(log_lines, 0); /* it was CLBlast that computed */
    unsetenv("CLATTN_DENSE");
    clattn_context_release(context);
    clattn_context_release(reference);
}

/* Lists by leaf means: forced leaves of every kind, fewer leaves than entries, empty rows, not causal. */
static const struct {
    int64_t q_len, kv_len, kv_heads, group, dim;
    int32_t leaf, topk, forced_first, forced_last;
    int causal;
    clattn_dtype dtype;
} selections[] = {
    {300, 300, 1, 4, 16, 16, 5, 1, 2, 1, CLATTN_FLOAT32}, {40, 777, 2, 2, 20, 16, 8, 0, 0, 1, CLATTN_FLOAT16},
    {33, 500, 1, 1, 16, 32, 3, 9, 9, 1, CLATTN_FLOAT32},  {90, 45, 1, 3, 16, 16, 4, 1, 1, 1, CLATTN_BFLOAT16},
    {21, 200, 2, 1, 16, 16, 6, 1, 2, 0, CLATTN_FLOAT32},
};

static void select_lists(clattn_context *context, int n, const struct array *q, const struct array *k,
                         int32_t *indices, int32_t *counts)
{
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_blocks *blocks = NULL;
    attention.causal = selections[n].causal;
    select.selector = CLATTN_SELECT_FLAT_MEAN;
    select.leaf = selections[n].leaf;
    select.topk = selections[n].topk;
    select.forced_first = selections[n].forced_first;
    select.forced_last = selections[n].forced_last;
    assert_int_equal(clattn_select(context, &attention, &select, &q->view, &k->view, NULL, &blocks, NULL),
                     CLATTN_SUCCESS);
    assert_int_equal(clattn_blocks_read(context, blocks, indices, counts), CLATTN_SUCCESS);
    clattn_blocks_release(context, blocks);
}

static void test_flat_means(void **state)
{
    (void)state;
    clattn_context *reference = context_of(CLATTN_BACKEND_REFERENCE),
                   *context = context_of(CLATTN_BACKEND_OPENCL);
    if (!context) {
        clattn_context_release(reference);
        skip(); /* no OpenCL device */
    }
    setenv("CLATTN_DENSE", "clblast", 1);
    log_lines = 0;
    for (int n = 0; n < COUNT(selections); n++) {
        struct random random = random_seeded(100 + (uint64_t)n);
        int64_t lists = selections[n].q_len * selections[n].kv_heads, entries = lists * selections[n].topk;
        struct array q =
            array_new(selections[n].dtype, 1, selections[n].q_len, selections[n].kv_heads * selections[n].group,
                      selections[n].dim, LAYOUT_PADDED);
        struct array k = array_new(selections[n].dtype, 1, selections[n].kv_len, selections[n].kv_heads,
                                   selections[n].dim, LAYOUT_BHTD);
        int32_t *indices[2], *counts[2];
        array_fill(&q, FILL_NORMAL, &random);
        array_fill(&k, FILL_NORMAL, &random);
        for (int i = 0; i < 2; i++) {
            indices[i] = malloc((size_t)entries * sizeof **indices);
            counts[i] = malloc((size_t)lists * sizeof **counts);
            select_lists(i ? context : reference, n, &q, &k, indices[i], counts[i]);
        }
        assert_memory_equal(counts[0], counts[1], (size_t)lists * sizeof **counts);
        assert_memory_equal(indices[0], indices[1], (size_t)entries * sizeof **indices);
        for (int i = 0; i < 2; i++) {
            free(indices[i]);
            free(counts[i]);
        }
        array_free(&q);
        array_free(&k);
    }
    assert_int_equal(log_lines, 0);
    unsetenv("CLATTN_DENSE");
    clattn_context_release(context);
    clattn_context_release(reference);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_products), cmocka_unit_test(test_flat_means)};
    return cmocka_run_group_tests_name("opencl_dense", tests, NULL, NULL);
}
