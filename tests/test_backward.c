/* SPDX-License-Identifier: MIT */
/* Gradients of every backend and variant against the reference: per tensor and per row. */

#include "gradients.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum lists {
    LISTS_DENSE,
    LISTS_RANDOM,  /* with empty lists and padding */
    LISTS_ALL,     /* every block */
    LISTS_SAME,    /* every row lists the same block */
    LISTS_SELECTED /* by PISA */
};

struct shape {
    const char *name;
    enum test_size size;
    int64_t batch, q_len, kv_len, kv_heads, group, dim, dim_v;
    int32_t block, q_block, topk, list_heads; /* list_heads 0: kv_heads */
    enum lists lists;
    int causal;
    clattn_dtype dtype;
    enum layout layout;
};

static const struct shape shapes[] = {
    {"tiny", SIZE_TINY, 1, 20, 20, 1, 2, 16, 16, 16, 1, 2, 0, LISTS_RANDOM, 1, CLATTN_FLOAT32, LAYOUT_BTHD},
    {"one key", SIZE_NORMAL, 1, 1, 1, 1, 1, 64, 64, 64, 1, 1, 0, LISTS_DENSE, 1, CLATTN_FLOAT32, LAYOUT_BTHD},
    {"selected", SIZE_NORMAL, 1, 300, 300, 1, 16, 64, 64, 64, 1, 4, 0, LISTS_SELECTED, 1, CLATTN_FLOAT32,
     LAYOUT_BTHD},
    {"selected f16", SIZE_NORMAL, 1, 260, 260, 1, 16, 64, 64, 64, 1, 4, 0, LISTS_SELECTED, 1, CLATTN_FLOAT16,
     LAYOUT_PADDED},
    {"selected bf16", SIZE_NORMAL, 1, 260, 260, 1, 16, 64, 64, 64, 1, 4, 0, LISTS_SELECTED, 1, CLATTN_BFLOAT16,
     LAYOUT_BHTD},
    {"group 5, dim 60", SIZE_CPU, 2, 150, 177, 2, 5, 60, 100, 32, 1, 3, 0, LISTS_RANDOM, 1, CLATTN_FLOAT32,
     LAYOUT_PADDED},
    {"dense causal", SIZE_CPU, 1, 200, 200, 2, 3, 80, 80, 64, 1, 1, 0, LISTS_DENSE, 1, CLATTN_FLOAT32,
     LAYOUT_BTHD},
    {"dense, all see all", SIZE_CPU, 1, 90, 130, 1, 1, 7, 19, 64, 1, 1, 0, LISTS_DENSE, 0, CLATTN_FLOAT32,
     LAYOUT_BHTD},
    {"all blocks", SIZE_CPU, 1, 200, 200, 2, 3, 80, 80, 16, 1, 13, 0, LISTS_ALL, 1, CLATTN_FLOAT32,
     LAYOUT_BTHD},
    {"query blocks", SIZE_CPU, 1, 333, 333, 2, 2, 64, 64, 64, 64, 4, 1, LISTS_RANDOM, 1, CLATTN_FLOAT32,
     LAYOUT_BTHD},
    {"lists by query head", SIZE_CPU, 1, 130, 130, 2, 4, 32, 32, 32, 16, 3, 8, LISTS_RANDOM, 0, CLATTN_FLOAT32,
     LAYOUT_BTHD},
    {"the same block", SIZE_CPU, 1, 700, 700, 1, 7, 96, 96, 64, 1, 1, 0, LISTS_SAME, 0, CLATTN_FLOAT32,
     LAYOUT_BTHD},
    {"segments", SIZE_CPU, 1, 9000, 9000, 1, 1, 16, 16, 64, 1, 2, 0, LISTS_SELECTED, 1, CLATTN_FLOAT32,
     LAYOUT_BTHD},
    {"segments by head", SIZE_CPU, 1, 4500, 4500, 1, 2, 16, 16, 16, 1, 2, 2, LISTS_SAME, 1, CLATTN_FLOAT32,
     LAYOUT_BTHD},
    {"more rows than keys", SIZE_CPU, 1, 100, 33, 1, 2, 128, 128, 64, 1, 1, 0, LISTS_RANDOM, 1, CLATTN_FLOAT32,
     LAYOUT_BTHD},
    {"wide", SIZE_CPU, 1, 70, 140, 1, 12, 256, 256, 128, 1, 2, 0, LISTS_ALL, 1, CLATTN_BFLOAT16, LAYOUT_BTHD},
};

enum { DQ, DK, DV, GRADIENTS };
static const char *const gradient_names[GRADIENTS] = {"dq", "dk", "dv"};

struct problem_arrays {
    const struct shape *shape;
    struct array q, k, v, out, lse, dout, dlse;
    int32_t *indices;
    int64_t rows;
    int32_t heads;
};

static void lists_make(clattn_context *reference, struct problem_arrays *p, struct random *random)
{
    const struct shape *s = p->shape;
    int32_t blocks = (int32_t)((s->kv_len + s->block - 1) / s->block);
    p->heads = s->list_heads ? s->list_heads : (int32_t)s->kv_heads;
    p->rows = s->batch * ((s->q_len + s->q_block - 1) / s->q_block);
    int64_t entries = p->rows * p->heads * s->topk;
    p->indices = malloc((size_t)entries * sizeof *p->indices);
    for (int64_t n = 0; n < entries; n++)
        p->indices[n] = s->lists == LISTS_ALL    ? (int32_t)(n % s->topk)
                        : s->lists == LISTS_SAME ? blocks / 2
                                                 : (int32_t)random_below(random, blocks + 1) - 1;
    if (s->lists != LISTS_SELECTED) return;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_blocks *selected = NULL;
    select.topk = s->topk;
    select.leaf = s->block;
    assert_int_equal(clattn_select(reference, NULL, &select, &p->q.view, &p->k.view, NULL, &selected, NULL),
                     CLATTN_SUCCESS);
    assert_int_equal(clattn_blocks_read(reference, selected, p->indices, NULL), CLATTN_SUCCESS);
    clattn_blocks_release(reference, selected);
}

static clattn_blocks *lists_of(clattn_context *context, const struct problem_arrays *p)
{
    const struct shape *s = p->shape;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_blocks *blocks = NULL;
    desc.block = s->block;
    desc.q_block = s->q_block;
    desc.rows = p->rows;
    desc.heads = p->heads;
    desc.topk = s->topk;
    if (s->lists != LISTS_DENSE)
        assert_int_equal(clattn_blocks_create(context, &desc, p->indices, &blocks), CLATTN_SUCCESS);
    return blocks;
}

static void problem_make(clattn_context *reference, const struct shape *s, struct problem_arrays *p)
{
    struct random random = random_seeded((uint64_t)(s - shapes) + 77);
    int64_t q_heads = s->kv_heads * s->group;
    p->shape = s;
    p->q = array_new(s->dtype, s->batch, s->q_len, q_heads, s->dim, s->layout);
    p->k = array_new(s->dtype, s->batch, s->kv_len, s->kv_heads, s->dim, s->layout);
    p->v = array_new(s->dtype, s->batch, s->kv_len, s->kv_heads, s->dim_v, s->layout);
    p->dout = array_new(s->dtype, s->batch, s->q_len, q_heads, s->dim_v, s->layout);
    p->out = array_new(CLATTN_FLOAT32, s->batch, s->q_len, q_heads, s->dim_v, s->layout);
    p->lse = array_new(CLATTN_FLOAT32, s->batch, s->q_len, q_heads, 1, s->layout);
    p->dlse = array_new(CLATTN_FLOAT32, s->batch, s->q_len, q_heads, 1, s->layout);
    array_fill(&p->q, FILL_NORMAL, &random);
    array_fill(&p->k, FILL_NORMAL, &random);
    array_fill(&p->v, FILL_NORMAL, &random);
    array_fill(&p->dout, FILL_NORMAL, &random);
    array_fill(&p->dlse, FILL_NORMAL, &random);
    lists_make(reference, p, &random);
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_blocks *blocks = lists_of(reference, p);
    attention.causal = s->causal;
    assert_int_equal(clattn_attention_forward(reference, &attention, &p->q.view, &p->k.view, &p->v.view, blocks,
                                              &p->out.view, &p->lse.view, NULL),
                     CLATTN_SUCCESS);
    clattn_blocks_release(reference, blocks);
}

static void problem_free(struct problem_arrays *p)
{
    struct array *const all[] = {&p->q, &p->k, &p->v, &p->out, &p->lse, &p->dout, &p->dlse};
    for (int i = 0; i < COUNT(all); i++)
        array_free(all[i]);
    free(p->indices);
}

/* Gradients of one context, poisoned or with what is accumulated before. */
static void gradients_run(clattn_context *context, const struct problem_arrays *p, clattn_dtype dtype,
                          int accumulate, struct array results[GRADIENTS])
{
    const struct shape *s = p->shape;
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    clattn_blocks *blocks = lists_of(context, p);
    results[DQ] = array_new(dtype, s->batch, s->q_len, s->kv_heads * s->group, s->dim, s->layout);
    results[DK] = array_new(dtype, s->batch, s->kv_len, s->kv_heads, s->dim, s->layout);
    results[DV] = array_new(dtype, s->batch, s->kv_len, s->kv_heads, s->dim_v, s->layout);
    for (int n = 0; n < GRADIENTS && accumulate; n++)
        array_fill_constant(&results[n], 0.25);
    attention.causal = s->causal;
    gradients.dout = &p->dout.view;
    gradients.dlse = &p->dlse.view;
    gradients.dq = &results[DQ].view;
    gradients.dk = &results[DK].view;
    gradients.dv = &results[DV].view;
    gradients.accumulate = accumulate;
    clattn_status status = clattn_attention_backward(context, &attention, &p->q.view, &p->k.view, &p->v.view,
                                                     blocks, &p->out.view, &p->lse.view, &gradients, NULL);
    if (status) {
        char text[512];
        clattn_context_error(context, text, sizeof text);
        fail_msg("backward: %s", text);
    }
    clattn_blocks_release(context, blocks);
}

static const struct target *reference_target(void)
{
    FOR_EACH_TARGET (target)
        if (target->info.backend == CLATTN_BACKEND_REFERENCE) return target;
    return NULL;
}

static void test_shapes(void **state)
{
    (void)state;
    clattn_context *reference = reference_target()->context;
    for (const struct shape *s = shapes; s < shapes + COUNT(shapes); s++) {
        struct problem_arrays p;
        struct array expected[GRADIENTS], have[GRADIENTS];
        double tolerance = s->dtype == CLATTN_FLOAT32 ? 1e-5 : 5e-3;
        problem_make(reference, s, &p);
        gradients_run(reference, &p, CLATTN_FLOAT32, 0, expected);
        FOR_EACH_TARGET (target) {
            if (target->info.backend == CLATTN_BACKEND_REFERENCE || !target_runs(target, s->size)) continue;
            gradients_run(target->context, &p, s->dtype, 0, have);
            for (int n = 0; n < GRADIENTS; n++) {
                gradients_compare(target->label, s->name, gradient_names[n], &expected[n], &have[n], tolerance);
                array_free(&have[n]);
            }
        }
        for (int n = 0; n < GRADIENTS; n++)
            array_free(&expected[n]);
        problem_free(&p);
    }
    target_report("gradients");
}

static void test_accumulate(void **state)
{
    (void)state;
    const struct shape *s = &shapes[0];
    struct problem_arrays p;
    problem_make(reference_target()->context, s, &p);
    FOR_EACH_TARGET (target) {
        struct array alone[GRADIENTS], added[GRADIENTS];
        if (!target_runs(target, s->size)) continue;
        gradients_run(target->context, &p, CLATTN_FLOAT32, 0, alone);
        gradients_run(target->context, &p, CLATTN_FLOAT32, 1, added);
        for (int n = 0; n < GRADIENTS; n++) {
            double *a = tensor_doubles(&alone[n].view), *b = tensor_doubles(&added[n].view);
            int64_t count = alone[n].view.batch * alone[n].view.len * alone[n].view.heads * alone[n].view.dim;
            for (int64_t i = 0; i < count; i++)
                if (!(fabs(a[i] + 0.25 - b[i]) <= 1e-6 * (1 + fabs(a[i]))))
                    fail_msg("%s: %s[%lld] is %g, accumulated %g", target->label, gradient_names[n],
                             (long long)i, a[i], b[i]);
            free(a);
            free(b);
            array_free(&alone[n]);
            array_free(&added[n]);
        }
    }
    problem_free(&p);
    target_report("accumulation");
}

/* The same bits on every run, for any number of threads. */
static void test_determinism(void **state)
{
    (void)state;
    static const int32_t chosen[] = {2, 5, 9, 12, 13};
    for (int i = 0; i < COUNT(chosen); i++) {
        const struct shape *s = &shapes[chosen[i]];
        struct problem_arrays p;
        problem_make(reference_target()->context, s, &p);
        FOR_EACH_TARGET (target) {
            struct array first[GRADIENTS], again[GRADIENTS];
            if (target->info.backend == CLATTN_BACKEND_REFERENCE || !target_runs(target, s->size)) continue;
            gradients_run(target->context, &p, s->dtype, 0, first);
            for (int threads = 1; threads <= 3; threads++) {
                clattn_context *context = target->context;
                clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
                if (target->info.backend == CLATTN_BACKEND_CPU) {
                    desc.backend = CLATTN_BACKEND_CPU;
                    desc.variant = target->info.variant;
                    desc.threads = threads;
                    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
                }
                gradients_run(context, &p, s->dtype, 0, again);
                for (int n = 0; n < GRADIENTS; n++) {
                    if (!tensor_equal_bits(&first[n].view, &again[n].view))
                        fail_msg("%s: %s, %s differs with %d threads", target->label, s->name,
                                 gradient_names[n], threads);
                    array_free(&again[n]);
                }
                if (context != target->context) clattn_context_release(context);
            }
            for (int n = 0; n < GRADIENTS; n++)
                array_free(&first[n]);
        }
        problem_free(&p);
    }
    target_report("determinism");
}

/* Listing every block gives the gradient of dense attention. */
static void test_dense_equals_all(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target) {
        struct array all[GRADIENTS], dense[GRADIENTS];
        struct problem_arrays p;
        struct shape s = shapes[8], without = shapes[8];
        if (!target_runs(target, SIZE_CPU)) continue;
        problem_make(reference_target()->context, &shapes[8], &p);
        p.shape = &s;
        gradients_run(target->context, &p, CLATTN_FLOAT32, 0, all);
        without.lists = LISTS_DENSE;
        p.shape = &without;
        gradients_run(target->context, &p, CLATTN_FLOAT32, 0, dense);
        for (int n = 0; n < GRADIENTS; n++) {
            gradients_compare(target->label, s.name, gradient_names[n], &dense[n], &all[n], 1e-5);
            array_free(&dense[n]);
            array_free(&all[n]);
        }
        problem_free(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shapes), cmocka_unit_test(test_accumulate),
                                       cmocka_unit_test(test_determinism),
                                       cmocka_unit_test(test_dense_equals_all)};
    return cmocka_run_group_tests_name("backward", tests, targets_open, targets_close);
}
