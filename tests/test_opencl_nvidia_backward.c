/* SPDX-License-Identifier: MIT */
/* Gradients in the matrix tier of NVIDIA cards: every path against the reference, and the same bits twice.
 * Skipped where no Hopper card is. */

#include "gradients.h"
#include "nvidia.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct backward_case {
    struct shape shape;
    int q_block, topk, block, list_heads; /* q_block 0: all keys; list_heads 0: one list a key head */
    const char *path;                     /* that must serve it; NULL: the portable kernels */
    int64_t window;
    bool sink;
};

/* clang-format off: a line a case */
static const struct backward_case cases[] = {
    /* name, class, batch, q_len, kv_len, kv_heads, group, dim, dim_v, dtype, layout, all keys
     * q_block, topk, block, list heads, path */
    {{"tokens", SIZE_NORMAL, 1, 300, 900, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     1, 4, 64, 0, .path = "backward"},
    {{"tokens, two heads", SIZE_NORMAL, 2, 130, 130, 2, 3, 64, 96, CLATTN_FLOAT16, LAYOUT_PADDED, true},
     1, 2, 64, 0, .path = "backward"},
    {{"tokens, window, sink", SIZE_NORMAL, 1, 300, 900, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     1, 4, 64, 0, .path = "backward", .window = 500, .sink = true},
    {{"query blocks", SIZE_NORMAL, 1, 333, 400, 2, 2, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     64, 3, 64, 0, .path = "backward-tile"},
    {{"short query blocks", SIZE_NORMAL, 2, 100, 90, 1, 5, 96, 80, CLATTN_FLOAT16, LAYOUT_PADDED, false},
     16, 2, 64, 0, .path = "backward-tile"},
    {{"blocks of 128 keys", SIZE_NORMAL, 2, 300, 460, 2, 4, 64, 128, CLATTN_BFLOAT16, LAYOUT_BHTD, false},
     128, 3, 128, 0, .path = "backward-tile"},
    {{"one list for two heads", SIZE_NORMAL, 1, 200, 200, 2, 7, 80, 64, CLATTN_FLOAT16, LAYOUT_BTHD, true},
     64, 2, 64, 1, .path = "backward-tile"},
    {{"query blocks, window, sink", SIZE_NORMAL, 1, 333, 400, 2, 2, 64, 64, CLATTN_BFLOAT16, LAYOUT_PADDED, false},
     64, 3, 64, 0, .path = "backward-tile", .window = 100, .sink = true},
    {{"all keys", SIZE_NORMAL, 2, 150, 200, 2, 4, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     0, 1, 64, 0, .path = "backward-tile"},
    {{"all keys, not causal", SIZE_NORMAL, 1, 65, 129, 1, 16, 64, 64, CLATTN_FLOAT16, LAYOUT_BHTD, true},
     0, 1, 64, 0, .path = "backward-tile"},
    {{"more queries than keys", SIZE_NORMAL, 1, 200, 70, 1, 16, 80, 80, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     0, 1, 64, 0, .path = "backward-tile"},
    {{"all keys, window", SIZE_NORMAL, 2, 300, 500, 2, 4, 128, 128, CLATTN_FLOAT16, LAYOUT_BTHD, false},
     0, 1, 64, 0, .path = "backward-tile", .window = 90},
    {{"window on both sides, sink", SIZE_NORMAL, 1, 400, 333, 1, 8, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, true},
     0, 1, 64, 0, .path = "backward-tile", .window = 70, .sink = true},
    {{"window of one key", SIZE_NORMAL, 1, 150, 150, 1, 5, 96, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false},
     0, 1, 64, 0, .path = "backward-tile", .window = 1},
    {{"dim 100", SIZE_NORMAL, 1, 100, 90, 1, 5, 100, 100, CLATTN_FLOAT16, LAYOUT_BTHD, false},
     16, 2, 64, 0, .path = NULL},
};
/* clang-format on */

enum { OUT, LSE, DQ, DK, DV, DSINK, RESULTS };
static const char *const names[RESULTS] = {"out", "lse", "dq", "dk", "dv", "dsink"};

struct problem {
    const struct backward_case *c;
    struct array q, k, v, dout, dlse, sink;
    int32_t *indices;
    int64_t rows;
};

static int32_t list_heads(const struct backward_case *c)
{
    return c->list_heads ? c->list_heads : (int32_t)c->shape.kv_heads;
}

static void problem_make(struct problem *p, const struct backward_case *c, uint64_t seed)
{
    const struct shape *s = &c->shape;
    struct random random = random_seeded(seed);
    int64_t q_heads = s->kv_heads * s->group;
    p->c = c;
    p->q = array_new(s->dtype, s->batch, s->q_len, q_heads, s->dim, s->layout);
    p->k = array_new(s->dtype, s->batch, s->kv_len, s->kv_heads, s->dim, s->layout);
    p->v = array_new(s->dtype, s->batch, s->kv_len, s->kv_heads, s->dim_v, s->layout);
    p->dout = array_new(s->dtype, s->batch, s->q_len, q_heads, s->dim_v, s->layout);
    p->dlse = array_new(CLATTN_FLOAT32, s->batch, s->q_len, q_heads, 1, LAYOUT_BTHD);
    p->sink = array_new(CLATTN_FLOAT32, 1, 1, q_heads, 1, LAYOUT_BTHD);
    struct array *const all[] = {&p->q, &p->k, &p->v, &p->dout, &p->dlse, &p->sink};
    for (int i = 0; i < COUNT(all); i++)
        array_fill(all[i], FILL_NORMAL, &random);
    p->indices = NULL;
    if (!c->q_block) return;
    int32_t blocks = (int32_t)((s->kv_len + c->block - 1) / c->block);
    p->rows = s->batch * ((s->q_len + c->q_block - 1) / c->q_block);
    int64_t entries = p->rows * list_heads(c) * c->topk;
    p->indices = malloc((size_t)entries * sizeof *p->indices);
    assert_non_null(p->indices);
    for (int64_t n = 0; n < entries; n++)
        p->indices[n] =
            (int32_t)random_below(&random, blocks + 1) - 1; /* -1: lists of any length, some empty */
}

static void problem_free(struct problem *p)
{
    struct array *const all[] = {&p->q, &p->k, &p->v, &p->dout, &p->dlse, &p->sink};
    for (int i = 0; i < COUNT(all); i++)
        array_free(all[i]);
    free(p->indices);
}

static void check(clattn_context *context, clattn_status status, const char *name)
{
    char text[512];
    if (!status) return;
    clattn_context_error(context, text, sizeof text);
    fail_msg("%s: %s", name, text);
}

/* The forward pass where `forward` is NULL, else that one's results; gradients of type dtype. */
static void run(clattn_context *context, const struct problem *p, clattn_dtype dtype,
                const struct array *forward, struct array results[RESULTS])
{
    const struct shape *s = &p->c->shape;
    int64_t q_heads = s->kv_heads * s->group;
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_blocks *blocks = NULL;
    attention.causal = !s->all_keys;
    attention.window = p->c->window;
    attention.sink = p->c->sink ? &p->sink.view : NULL;
    desc.block = p->c->block;
    desc.q_block = p->c->q_block;
    desc.rows = p->rows;
    desc.heads = list_heads(p->c);
    desc.topk = p->c->topk;
    if (p->indices) check(context, clattn_blocks_create(context, &desc, p->indices, &blocks), s->name);
    if (!forward) {
        results[OUT] = array_new(s->dtype, s->batch, s->q_len, q_heads, s->dim_v, s->layout);
        results[LSE] = array_new(CLATTN_FLOAT32, s->batch, s->q_len, q_heads, 1, LAYOUT_BTHD);
        check(context,
              clattn_attention_forward(context, &attention, &p->q.view, &p->k.view, &p->v.view, blocks,
                                       &results[OUT].view, &results[LSE].view, NULL),
              s->name);
        forward = results;
    }
    results[DQ] = array_new(dtype, s->batch, s->q_len, q_heads, s->dim, s->layout);
    results[DK] = array_new(dtype, s->batch, s->kv_len, s->kv_heads, s->dim, s->layout);
    results[DV] = array_new(dtype, s->batch, s->kv_len, s->kv_heads, s->dim_v, s->layout);
    results[DSINK] = array_new(CLATTN_FLOAT32, 1, 1, q_heads, 1, LAYOUT_BTHD);
    gradients.dsink = p->c->sink ? &results[DSINK].view : NULL;
    gradients.dout = &p->dout.view;
    gradients.dlse = &p->dlse.view;
    gradients.dq = &results[DQ].view;
    gradients.dk = &results[DK].view;
    gradients.dv = &results[DV].view;
    check(context,
          clattn_attention_backward(context, &attention, &p->q.view, &p->k.view, &p->v.view, blocks,
                                    &forward[OUT].view, &forward[LSE].view, &gradients, NULL),
          s->name);
    clattn_blocks_release(context, blocks);
}

static clattn_context *reference;

/* Against the reference, by this path, twice with the same bits. */
static void check_case(const struct target *card, const struct backward_case *c, const char *path, uint64_t seed)
{
    struct problem p;
    struct array expected[RESULTS], first[RESULTS], again[RESULTS];
    char line[80];
    problem_make(&p, c, seed);
    run(reference, &p, CLATTN_FLOAT32, NULL, expected);
    record_clear();
    run(card->context, &p, c->shape.dtype, expected, first);
    snprintf(line, sizeof line, "by path %s\n", path ? path : "");
    bool found = strstr(recorder.text, path ? line : "gradients by path") != NULL;
    if (found != (path != NULL))
        fail_msg("%s: path %s expected; log:\n%s", c->shape.name, path ? path : "(portable)", recorder.text);
    run(card->context, &p, c->shape.dtype, expected, again);
    for (int i = DQ; i < RESULTS; i++) {
        if (i < DSINK || c->sink)
            gradients_compare(card->label, c->shape.name, names[i], &expected[i], &first[i], 5e-3);
        assert_memory_equal(first[i].raw, again[i].raw, first[i].raw_elements * element_bytes(first[i].view.dtype));
        array_free(&first[i]);
        array_free(&again[i]);
    }
    for (int i = 0; i < RESULTS; i++)
        array_free(&expected[i]);
    problem_free(&p);
}

static void test_paths(void **state)
{
    (void)state;
    struct target card = card_open(NULL);
    for (int n = 0; n < COUNT(cases); n++)
        check_case(&card, &cases[n], cases[n].path, 1700 + (uint64_t)n);
    card_close(&card);
}

/* A kernel that computes wrongly is found before its first use, and the portable ones serve. */
static void test_spoiled(void **state)
{
    static const struct {
        const char *file, *from, *to;
        int number;
    } spoiled[] = {
        {"attention_backward_tile.cl", "sum[4 * n + w].x * scale", "sum[4 * n + w].x * 0.8f * scale", 3},
        {"attention_backward_wgmma.cl", "dk[n].xy;", "0.8f * dk[n].xy;", 0},
    };
    (void)state;
    for (int n = 0; n < COUNT(spoiled); n++) {
        kernel_spoil(spoiled[n].file, spoiled[n].from, spoiled[n].to);
        struct target card = card_open(NULL);
        check_case(&card, &cases[spoiled[n].number], NULL, 1800);
        card_close(&card);
        kernel_restore(spoiled[n].file);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_spoiled),
    };
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    if (!card_find() || tiers < TIER_HOPPER) return 77;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    if (clattn_context_create(&desc, &reference)) return 1;
    int failed = cmocka_run_group_tests_name("opencl nvidia backward", tests, NULL, NULL);
    clattn_context_release(reference);
    return failed;
}
