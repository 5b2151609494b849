/* SPDX-License-Identifier: MIT */
/* Unions of lists for tokens and for query tiles, attended to in two parts that are merged: on every target,
 * whether it would choose so or not. */

#include "lib/internal.h" /* before CMocka, whose `fail` is a macro */

#include "fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- a backend that always takes the parts ---- */

static int merges; /* that it was asked for */
static clattn_status (*merge)(clattn_context *context, const struct merge_job *job);

static bool always(const clattn_context *context, const struct forward_job *job)
{
    (void)context;
    (void)job;
    return true;
}

static clattn_status merge_counted(clattn_context *context, const struct merge_job *job)
{
    merges++;
    return merge(context, job);
}

/* ---- cases ---- */

struct parts_case {
    struct shape shape;
    int32_t q_block, coarse_heads, fine_heads;
    bool is_packed, has_softcap, has_sink, has_padding;
};

#define F32 CLATTN_FLOAT32
#define F16 CLATTN_FLOAT16
#define BF16 CLATTN_BFLOAT16

static const struct parts_case cases[] = {
    {{"odd lengths", SIZE_TINY, 1, 101, 101, 2, 1, 16, 16, F32, LAYOUT_BTHD, false},
     16,
     1,
     2,
     false,
     false,
     false,
     false},
    {{"all keys", SIZE_NORMAL, 2, 70, 133, 1, 4, 16, 24, F32, LAYOUT_PADDED, true},
     64,
     1,
     1,
     false,
     false,
     false,
     false},
    {{"packed", SIZE_NORMAL, 1, 256, 256, 2, 2, 16, 16, F32, LAYOUT_BHTD, false},
     32,
     4,
     1,
     true,
     true,
     false,
     false},
    {{"sink", SIZE_NORMAL, 1, 40, 40, 2, 1, 16, 16, F32, LAYOUT_BTHD, false},
     16,
     1,
     1,
     false,
     false,
     true,
     false},
    {{"padding", SIZE_NORMAL, 2, 40, 40, 2, 1, 16, 16, F32, LAYOUT_BTHD, false},
     16,
     1,
     1,
     false,
     false,
     false,
     true},
    {{"float16", SIZE_CPU, 1, 130, 130, 1, 4, 64, 64, F16, LAYOUT_PADDED, false},
     64,
     1,
     1,
     false,
     false,
     false,
     false},
    {{"bfloat16", SIZE_CPU, 1, 130, 130, 2, 1, 64, 80, BF16, LAYOUT_BTHD, false},
     64,
     2,
     2,
     false,
     false,
     false,
     false},
};

static const int32_t used[] = {33, 0}, cu[] = {0, 0, 76, 110, 110, 256};

/* What the library made of the two, on the host. */
static struct lists lists_of(const struct target *target, const clattn_blocks *blocks)
{
    struct lists lists = {.desc = CLATTN_BLOCKS_DESC_INIT};
    check_success(target, clattn_blocks_describe(blocks, &lists.desc), "clattn_blocks_describe");
    size_t entries = (size_t)(lists.desc.rows * lists.desc.heads * lists.desc.topk);
    lists.indices = malloc((entries + 1) * sizeof *lists.indices);
    assert_non_null(lists.indices);
    check_success(target, clattn_blocks_read(target->context, blocks, lists.indices, NULL),
                  "clattn_blocks_read");
    return lists;
}

static bool has(const struct lists *lists, const struct span *span, int64_t i, int32_t h, int32_t heads,
                int32_t b)
{
    int64_t row = span->list_row + i / lists->desc.q_block;
    const int32_t *list =
        lists->indices + (row * lists->desc.heads + h * lists->desc.heads / heads) * lists->desc.topk;
    for (int32_t n = 0; n < lists->desc.topk; n++)
        if (list[n] == b) return true;
    return false;
}

static int64_t listed(const struct lists *lists)
{
    int64_t count = 0;
    for (int64_t n = 0; n < lists->desc.rows * lists->desc.heads * lists->desc.topk; n++)
        count += lists->indices[n] >= 0;
    return count;
}

/* Each block of the union is in one part, and in one only; the others are in none. */
static void check_disjoint(const struct target *target, const struct fixture *f, const clattn_blocks *blocks)
{
    assert_non_null(blocks->coarse);
    assert_non_null(blocks->rest);
    struct lists whole = lists_of(target, blocks), coarse = lists_of(target, blocks->coarse),
                 rest = lists_of(target, blocks->rest);
    struct spans rows = fixture_spans(f, whole.desc.q_block), tiles = fixture_spans(f, coarse.desc.q_block);
    for (int s = 0; s < rows.count; s++)
        for (int64_t i = 0; i < rows.at[s].q_len; i++)
            for (int32_t h = 0; h < whole.desc.heads; h++)
                for (int32_t b = 0; b < 1 + rows.at[s].kv_len / whole.desc.block; b++) {
                    bool in_coarse = has(&coarse, &tiles.at[s], i, h, whole.desc.heads, b),
                         in_rest = has(&rest, &rows.at[s], i, h, whole.desc.heads, b),
                         in_whole = has(&whole, &rows.at[s], i, h, whole.desc.heads, b);
                    assert_int_equal(in_whole, in_coarse || in_rest);
                    assert_false(in_coarse && in_rest);
                }
    double saved = (double)(listed(&whole) - listed(&rest)) / (double)(whole.desc.rows * whole.desc.heads);
    assert_true(fabs((double)blocks->parts_saved - saved) < 1e-5 * saved);
    lists_free(&whole);
    lists_free(&coarse);
    lists_free(&rest);
}

static clattn_blocks *union_new(const struct target *target, const struct parts_case *c,
                                const struct fixture *f, struct random *random)
{
    struct spans tiles = fixture_spans(f, c->q_block), rows = fixture_spans(f, 1);
    struct lists coarse = lists_random(random, &tiles, 16, c->q_block, c->coarse_heads, 3, 0.6),
                 fine = lists_random(random, &rows, 16, 1, c->fine_heads, 4, 0.5);
    clattn_blocks *a = lists_upload(target, &coarse), *b = lists_upload(target, &fine), *both = NULL;
    check_success(
        target,
        clattn_blocks_union(target->context, &f->attention, f->q.view.batch, f->q.view.len, b, a, &both),
        "clattn_blocks_union");
    clattn_blocks_release(target->context, a);
    clattn_blocks_release(target->context, b);
    lists_free(&coarse);
    lists_free(&fine);
    return both;
}

/* Attention over the list by a backend that takes parts wherever there are any: `wanted` merges of two results. */
static void check_attention(const struct target *target, struct fixture *f, clattn_blocks *blocks, int wanted,
                            const char *name)
{
    struct lists lists = lists_of(target, blocks);
    struct forward problem = fixture_problem(f, &lists);
    struct expected expected = expected_forward(&problem);
    const struct backend *own = target->context->backend;
    struct backend forced = *own;
    forced.prefers_parts = always;
    forced.merge = merge_counted;
    merge = own->merge;
    merges = 0;
    array_poison(&f->out);
    array_poison(&f->lse);
    target->context->backend = &forced;
    clattn_status status = clattn_attention_forward(target->context, &f->attention, &f->q.view, &f->k.view,
                                                    &f->v.view, blocks, &f->out.view, &f->lse.view, NULL);
    target->context->backend = own;
    check_success(target, status, "clattn_attention_forward");
    assert_int_equal(merges, wanted);
    array_check_guards(&f->out, target->label, name);
    array_check_guards(&f->lse, target->label, name);
    expected_compare(&expected, &problem, &f->out.view, &f->lse.view, target->label, name);

    expected_free(&expected);
    lists_free(&lists);
}

static void check_case(const struct target *target, const struct parts_case *c)
{
    struct random random = random_seeded(31);
    struct fixture f = fixture_new(&c->shape, &random);
    float sinks[] = {0.5f, -1, 2, 0};
    clattn_tensor sink = clattn_tensor_bthd(sinks, CLATTN_FLOAT32, 1, 1, f.q.view.heads, 1);
    if (c->is_packed) fixture_packed(&f, 5, cu, cu);
    if (c->has_softcap) f.attention.softcap = 3;
    if (c->has_padding) f.attention.seqused_q = f.attention.seqused_k = used;
    if (c->has_sink) f.attention.sink = &sink;
    clattn_blocks *blocks = union_new(target, c, &f, &random);
    check_disjoint(target, &f, blocks);

    check_attention(target, &f, blocks, c->has_sink || c->has_padding ? 0 : 1, c->shape.name);
    clattn_blocks_release(target->context, blocks);
    fixture_free(&f);
}

static void test_parts(void **state)
{
    (void)state;
    for (int i = 0; i < COUNT(cases); i++)
        FOR_EACH_TARGET (target)
            if (target_runs(target, cases[i].shape.size)) check_case(target, &cases[i]);
    target_report("union parts");
}

/* A selector that writes over a union: neither its parts nor the greatest index of its rows are those of the
 * list. */
static void check_selected(const struct target *target, const struct parts_case *c)
{
    struct random random = random_seeded(33);
    struct fixture f = fixture_new(&c->shape, &random);
    clattn_blocks *blocks = union_new(target, c, &f, &random);
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    check_success(target, clattn_blocks_describe(blocks, &desc), "clattn_blocks_describe");
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, desc.topk, desc.block);
    assert_non_null(blocks->coarse);
    check_success(
        target,
        clattn_select(target->context, &f.attention, &select, &f.q.view, &f.k.view, NULL, &blocks, NULL),
        "clattn_select");
    check_attention(target, &f, blocks, 0, "a union selected over");
    assert_null(blocks->row_max);
    clattn_blocks_release(target->context, blocks);
    fixture_free(&f);
}

static void test_selected(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target)
        if (target_runs(target, cases[0].shape.size)) check_selected(target, &cases[0]);
    target_report("a union selected over");
}

/* Lists of like granularity have no parts. */
static void test_none(void **state)
{
    (void)state;
    const struct target *target = &targets[0];
    const struct parts_case *c = &cases[0];
    struct random random = random_seeded(32);
    struct fixture f = fixture_new(&c->shape, &random);
    for (int32_t q_block = 8; q_block <= 16; q_block += 8) {
        struct spans spans = fixture_spans(&f, q_block);
        struct lists lists = lists_random(&random, &spans, 16, q_block, 1, 3, 0.6);
        clattn_blocks *a = lists_upload(target, &lists), *b = lists_upload(target, &lists), *both = NULL;
        check_success(target, clattn_blocks_union(target->context, &f.attention, 1, f.q.view.len, a, b, &both),
                      "clattn_blocks_union");
        assert_null(both->coarse);
        assert_null(both->rest);
        clattn_blocks_release(target->context, a);
        clattn_blocks_release(target->context, b);
        clattn_blocks_release(target->context, both);
        lists_free(&lists);
    }
    fixture_free(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_parts), cmocka_unit_test(test_selected),
                                       cmocka_unit_test(test_none)};
    return cmocka_run_group_tests_name("union parts", tests, targets_open, targets_close);
}
