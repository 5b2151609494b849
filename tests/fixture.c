/* SPDX-License-Identifier: MIT */
/* Problems of the tests and the library's calls on them. */

#include "fixture.h"

#include <stdlib.h>
#include <string.h>

struct fixture fixture_new(const struct shape *s, struct random *random)
{
    int64_t q_heads = (int64_t)s->kv_heads * s->group;
    struct fixture f = {.q = array_new(s->dtype, s->batch, s->q_len, q_heads, s->dim, s->layout),
                        .k = array_new(s->dtype, s->batch, s->kv_len, s->kv_heads, s->dim, s->layout),
                        .v = array_new(s->dtype, s->batch, s->kv_len, s->kv_heads, s->dim_v, s->layout),
                        .out = array_new(s->dtype, s->batch, s->q_len, q_heads, s->dim_v, s->layout),
                        .lse = array_new(CLATTN_FLOAT32, s->batch, s->q_len, q_heads, 1, s->layout),
                        .attention = CLATTN_ATTENTION_DESC_INIT,
                        .name = s->name};
    f.attention.causal = !s->all_keys;
    array_fill(&f.q, FILL_NORMAL, random);
    array_fill(&f.k, FILL_NORMAL, random);
    array_fill(&f.v, FILL_NORMAL, random);
    return f;
}

void fixture_free(struct fixture *f)
{
    array_free(&f->q);
    array_free(&f->k);
    array_free(&f->v);
    array_free(&f->out);
    array_free(&f->lse);
}

void fixture_out_dtype(struct fixture *f, clattn_dtype dtype)
{
    clattn_tensor t = f->out.view;
    array_free(&f->out);
    f->out = array_new(dtype, t.batch, t.len, t.heads, t.dim, LAYOUT_BTHD);
}

void fixture_packed(struct fixture *f, int64_t sequences, const int32_t *cu_q, const int32_t *cu_k)
{
    f->attention.sequences = sequences;
    f->attention.cu_seqlens_q = cu_q;
    f->attention.cu_seqlens_k = cu_k;
}

struct forward fixture_problem(const struct fixture *f, const struct lists *lists)
{
    return (struct forward){f->attention, f->q.view, f->k.view, f->v.view, lists, f->exact_logits};
}

struct selection fixture_selection(const struct fixture *f, const clattn_select_desc *select)
{
    return (struct selection){f->attention, *select, f->q.view, f->k.view};
}

struct spans fixture_spans(const struct fixture *f, int32_t q_block)
{
    return spans_of(&f->attention, &f->q.view, &f->k.view, q_block);
}

clattn_blocks *lists_upload(const struct target *target, const struct lists *lists)
{
    clattn_blocks *blocks = NULL;
    check_success(target, clattn_blocks_create(target->context, &lists->desc, lists->indices, &blocks),
                  "blocks_create");
    assert_non_null(blocks);
    return blocks;
}

void fixture_forward(const struct target *target, struct fixture *f, const struct lists *lists)
{
    clattn_blocks *blocks = lists ? lists_upload(target, lists) : NULL;
    array_poison(&f->out);
    array_poison(&f->lse);
    check_success(target,
                  clattn_attention_forward(target->context, &f->attention, &f->q.view, &f->k.view, &f->v.view,
                                           blocks, &f->out.view, &f->lse.view, NULL),
                  f->name);
    clattn_blocks_release(target->context, blocks);
    array_check_guards(&f->out, target->label, f->name);
    array_check_guards(&f->lse, target->label, f->name);
}

void fixture_check_forward(const struct target *target, struct fixture *f, const struct lists *lists,
                           const struct expected *expected)
{
    struct forward problem = fixture_problem(f, lists);
    fixture_forward(target, f, lists);
    expected_compare(expected, &problem, &f->out.view, &f->lse.view, target->label, f->name);
}

void fixture_check_all(enum test_size size, struct fixture *f, const struct lists *lists)
{
    struct forward problem = fixture_problem(f, lists);
    struct expected expected = expected_forward(&problem);
    FOR_EACH_TARGET (target)
        if (target_runs(target, size)) fixture_check_forward(target, f, lists, &expected);
    expected_free(&expected);
}

struct lists fixture_select(const struct target *target, const struct fixture *f,
                            const clattn_select_desc *select, int32_t **counts_out)
{
    clattn_blocks *blocks = NULL;
    struct lists lists = {.desc = {.size = sizeof lists.desc}};
    check_success(
        target,
        clattn_select(target->context, &f->attention, select, &f->q.view, &f->k.view, NULL, &blocks, NULL),
        f->name);
    check_success(target, clattn_blocks_describe(blocks, &lists.desc), "blocks_describe");
    struct spans spans = fixture_spans(f, 1);
    assert_int_equal(lists.desc.rows, spans.list_rows);
    assert_int_equal(lists.desc.heads, f->k.view.heads);
    assert_int_equal(lists.desc.topk, select->topk);
    assert_int_equal(lists.desc.block, select->leaf);
    assert_int_equal(lists.desc.q_block, 1);
    size_t count = (size_t)(lists.desc.rows * lists.desc.heads), entries = count * (size_t)lists.desc.topk;
    lists.indices = malloc((entries + 1) * sizeof(int32_t));
    int32_t *counts = malloc((count + 1) * sizeof *counts);
    assert_true(lists.indices && counts);
    lists.indices[entries] = counts[count] = 123456;
    check_success(target, clattn_blocks_read(target->context, blocks, lists.indices, counts), "blocks_read");
    assert_int_equal(lists.indices[entries], 123456);
    assert_int_equal(counts[count], 123456);
    clattn_blocks_release(target->context, blocks);
    if (counts_out)
        *counts_out = counts;
    else
        free(counts);
    return lists;
}

double fixture_check_select(enum test_size size, const struct fixture *f, const clattn_select_desc *select)
{
    struct selection selection = fixture_selection(f, select);
    struct choices choices = choices_of(&selection);
    FOR_EACH_TARGET (target) {
        int32_t *counts;
        if (!target_runs(target, size)) continue;
        struct lists lists = fixture_select(target, f, select, &counts);
        choices_compare(&choices, &selection, lists.indices, counts, target->label, f->name);
        lists_free(&lists);
        free(counts);
    }
    double unique = choices.count ? (double)choices.unique / (double)choices.count : 1;
    choices_free(&choices);
    return unique;
}

clattn_select_desc select_desc(clattn_selector selector, int32_t topk, int32_t leaf)
{
    clattn_select_desc desc = CLATTN_SELECT_DESC_INIT;
    desc.selector = selector;
    desc.topk = topk;
    desc.leaf = leaf;
    return desc;
}

const char *selector_name(clattn_selector selector)
{
    static const char *const names[] = {"pisa", "pisa1", "pisa2", "flat_mean", "flat_lse"};
    return names[selector];
}

void lists_expect(const struct lists *lists, int64_t row, int32_t head, const int32_t *want, const char *label,
                  const char *name)
{
    const int32_t *got = lists->indices + (row * lists->desc.heads + head) * lists->desc.topk;
    bool ended = false;
    for (int32_t n = 0; n < lists->desc.topk; n++) {
        ended = ended || want[n] < 0;
        int32_t right = ended ? -1 : want[n];
        if (got[n] != right)
            fail_msg("%s: %s: entry %d of the list of row %lld, head %d is %d; %d is right", label, name, n,
                     (long long)row, head, got[n], right);
    }
}
