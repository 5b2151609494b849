/* SPDX-License-Identifier: MIT */
/* Options of attention - soft cap, window, sink, bias, int8 keys and values, block boundaries of the caller,
 * key padding - alone and together, on every target, against the definition. */

#include "fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SOFTCAP = 1, WINDOW = 2, SINK = 4, BIAS = 8, INT8 = 16, STARTS = 32, PADDING = 64, PACKED = 128 };
enum { OPTIONS_END = 256, STARTS_MAX = 256, BATCH_MAX = 3 };

/* How the lists look: none, or heads 1, kv_heads or q_heads. */
enum list_kind { NO_LISTS, LISTS_SHARED, LISTS_KV, LISTS_Q };

struct option_case {
    struct shape shape;
    int options; /* SOFTCAP | ... */
    enum list_kind lists;
    int block, q_block, topk;
    int64_t window;
};

/* A fixture with the arrays of its options. */
struct problem {
    struct fixture f;
    struct array sink, bias, k_scale, v_scale;
    int64_t starts[STARTS_MAX], start_count;
    int32_t used_q[BATCH_MAX], used_k[BATCH_MAX];
    int32_t cu_q[4], cu_k[4];
    struct lists lists; /* indices NULL: all keys */
};

/* ---- problems ---- */

static void array_replace(struct array *array, clattn_dtype dtype)
{
    clattn_tensor t = array->view;
    array_free(array);
    *array = array_new(dtype, t.batch, t.len, t.heads, t.dim, LAYOUT_PADDED);
}

static struct array option_array(struct random *random, int64_t batch, int64_t len, int64_t heads)
{
    struct array array = array_new(CLATTN_FLOAT32, batch, len, heads, 1, LAYOUT_PADDED);
    array_fill(&array, FILL_NORMAL, random);
    return array;
}

/* Codes of the whole range, and scales that differ from leaf to leaf. */
static void make_int8(struct problem *p, struct random *random)
{
    clattn_attention_desc *attention = &p->f.attention;
    struct array *const stored[] = {&p->f.k, &p->f.v}, *const scales[] = {&p->k_scale, &p->v_scale};
    attention->scale_block = (int32_t[]){64, 16, 37, 1}[random_below(random, 4)];
    for (int n = 0; n < 2; n++) {
        array_replace(stored[n], CLATTN_INT8);
        clattn_tensor *t = &stored[n]->view;
        for (int64_t row = 0; row < t->batch * t->len * t->heads; row++)
            for (int64_t d = 0; d < t->dim; d++)
                tensor_set(t, row / t->heads / t->len, row / t->heads % t->len, row % t->heads, d,
                           (double)(random_below(random, 255) - 127));
        int64_t leaves = (t->len + attention->scale_block - 1) / attention->scale_block;
        *scales[n] = array_new(CLATTN_FLOAT32, n ? t->batch : 1, leaves, t->heads, 1, LAYOUT_PADDED);
        for (int64_t b = 0; b < scales[n]->view.batch; b++)
            for (int64_t i = 0; i < leaves; i++)
                for (int64_t h = 0; h < t->heads; h++)
                    tensor_set(&scales[n]->view, b, i, h, 0, (0.2 + random_uniform(random)) / 64);
    }
    attention->k_scale = &p->k_scale.view;
    attention->v_scale = &p->v_scale.view;
}

/* Three packed sequences, the middle one without rows or without keys; two rows of the first see nothing. */
static void make_packed(struct problem *p, struct random *random)
{
    int32_t q_len = (int32_t)p->f.q.view.len, kv_len = (int32_t)p->f.k.view.len;
    int32_t first_q = q_len / 2, first_k = kv_len / 3, empty = (int32_t)random_below(random, 2);
    const int32_t cu_q[] = {0, first_q, first_q + (empty ? q_len / 5 : 0), q_len};
    const int32_t cu_k[] = {0, first_k, first_k + (empty ? 0 : kv_len / 5), kv_len};
    memcpy(p->cu_q, cu_q, sizeof cu_q);
    memcpy(p->cu_k, cu_k, sizeof cu_k);
    fixture_packed(&p->f, 3, p->cu_q, p->cu_k);
}

static void make_padding(struct problem *p, struct random *random)
{
    for (int64_t b = 0; b < p->f.q.view.batch; b++) {
        p->used_q[b] = (int32_t)random_below(random, p->f.q.view.len + 1);
        p->used_k[b] = (int32_t)random_below(random, p->f.k.view.len + 1);
    }
    p->used_q[0] = (int32_t)p->f.q.view.len - 1;
    p->f.attention.seqused_q = p->used_q;
    p->f.attention.seqused_k = p->used_k;
}

/* Blocks of 1 to 90 keys; every sequence begins one, and some starts lie past the keys. */
static void make_starts(struct problem *p, struct random *random)
{
    int64_t at = 0;
    while (p->start_count < STARTS_MAX && at < p->f.k.view.len + 100) {
        int64_t next = at + 1 + random_below(random, random_below(random, 2) ? 90 : 12);
        for (int s = 0; p->f.attention.sequences && s < 3; s++)
            if (p->cu_k[s] > at && p->cu_k[s] < next) next = p->cu_k[s];
        p->starts[p->start_count++] = at;
        at = next;
    }
}

static int64_t blocks_most(const struct option_case *c, const struct problem *p)
{
    if (c->options & STARTS) return p->start_count;
    int block = c->lists ? c->block : 64;
    return (c->shape.kv_len + block - 1) / block;
}

static void make_lists(const struct option_case *c, struct problem *p, struct random *random)
{
    struct spans spans = fixture_spans(&p->f, c->q_block);
    int32_t kv_heads = c->shape.kv_heads, q_heads = kv_heads * c->shape.group;
    int32_t heads = c->lists == LISTS_Q ? q_heads : c->lists == LISTS_KV ? kv_heads : 1;
    if (c->lists == NO_LISTS) return;
    p->lists = c->options & STARTS ? lists_random_starts(random, &spans, p->starts, p->start_count, c->q_block,
                                                         heads, c->topk, 0.8)
                                   : lists_random(random, &spans, c->block, c->q_block, heads, c->topk, 0.8);
}

static void problem_make(const struct option_case *c, struct problem *p, struct random *random)
{
    *p = (struct problem){.f = fixture_new(&c->shape, random)};
    clattn_attention_desc *attention = &p->f.attention;
    int64_t q_heads = (int64_t)c->shape.kv_heads * c->shape.group;
    if (c->options & PACKED) make_packed(p, random);
    if (c->options & PADDING) make_padding(p, random);
    if (c->options & STARTS) make_starts(p, random);
    if (c->options & INT8) make_int8(p, random);
    if (c->options & SOFTCAP) attention->softcap = 1.5f;
    if (c->options & WINDOW) attention->window = c->window;
    if (c->options & SINK) {
        p->sink = option_array(random, 1, 1, q_heads);
        attention->sink = &p->sink.view;
    }
    if (c->options & BIAS) {
        int64_t batch = random_below(random, 2) ? c->shape.batch : 1, blocks = blocks_most(c, p);
        p->bias = option_array(random, batch, blocks + 2, q_heads);
        for (int64_t n = 0; n < blocks; n++) /* some blocks are masked out */
            if (random_below(random, 4) == 0)
                tensor_set(&p->bias.view, 0, n, random_below(random, q_heads), 0, -INFINITY);
        attention->bias = &p->bias.view;
    }
    make_lists(c, p, random);
}

static void problem_free(struct problem *p)
{
    struct array *const arrays[] = {&p->sink, &p->bias, &p->k_scale, &p->v_scale};
    for (int n = 0; n < COUNT(arrays); n++)
        array_free(arrays[n]);
    lists_free(&p->lists);
    fixture_free(&p->f);
}

static void check_case(const struct option_case *c, enum test_size size, struct random *random)
{
    struct problem p;
    problem_make(c, &p, random);
    fixture_check_all(size, &p.f, p.lists.indices ? &p.lists : NULL);
    problem_free(&p);
}

/* ---- chosen cases ---- */

#define F32 CLATTN_FLOAT32
#define F16 CLATTN_FLOAT16
#define BF16 CLATTN_BFLOAT16
#define PAD LAYOUT_PADDED

/* {name, class, batch, q_len, kv_len, kv_heads, group, dim, dim_v, dtype, layout, all keys}, options, lists,
 * block, q_block, topk, window. Classes are few for OpenCL, which builds a kernel for each case. */
static const struct option_case cases[] = {
    {{"all, tiny", SIZE_TINY, 1, 5, 60, 1, 2, 12, 20, F32, PAD, false},
     SOFTCAP | WINDOW | SINK | BIAS,
     LISTS_KV,
     16,
     1,
     3,
     30},
    {{"int8 and starts, tiny", SIZE_TINY, 2, 4, 50, 2, 2, 12, 20, F16, PAD, true},
     INT8 | STARTS | SINK | PADDING,
     LISTS_SHARED,
     0,
     2,
     3,
     0},
    {{"softcap", SIZE_NORMAL, 1, 70, 200, 2, 3, 20, 24, F32, PAD, false}, SOFTCAP, NO_LISTS, 0, 1, 0, 0},
    {{"window", SIZE_NORMAL, 2, 70, 300, 1, 2, 24, 20, F32, PAD, false}, WINDOW, NO_LISTS, 0, 1, 0, 50},
    {{"window, all keys", SIZE_NORMAL, 1, 70, 301, 1, 2, 24, 20, F32, PAD, true},
     WINDOW,
     LISTS_KV,
     32,
     16,
     5,
     41},
    {{"window of one key", SIZE_NORMAL, 1, 90, 70, 1, 2, 24, 20, F32, PAD, false},
     WINDOW,
     NO_LISTS,
     0,
     1,
     0,
     1},
    {{"sink", SIZE_NORMAL, 1, 70, 40, 2, 5, 16, 16, BF16, PAD, false}, SINK, LISTS_Q, 16, 1, 2, 0},
    {{"bias", SIZE_NORMAL, 2, 33, 200, 2, 2, 16, 36, F16, PAD, true}, BIAS, NO_LISTS, 0, 1, 0, 0},
    {{"bias and sink", SIZE_NORMAL, 1, 40, 200, 1, 4, 16, 36, F32, PAD, false},
     BIAS | SINK,
     LISTS_Q,
     16,
     1,
     4,
     0},
    {{"int8", SIZE_NORMAL, 1, 60, 300, 2, 2, 64, 64, F16, PAD, false}, INT8, NO_LISTS, 0, 1, 0, 0},
    {{"int8, odd", SIZE_NORMAL, 2, 30, 131, 1, 3, 7, 9, BF16, PAD, false},
     INT8 | PADDING,
     LISTS_KV,
     16,
     1,
     4,
     0},
    {{"starts", SIZE_NORMAL, 1, 100, 400, 1, 2, 16, 20, F32, PAD, false}, STARTS, LISTS_KV, 0, 16, 6, 0},
    {{"starts, packed", SIZE_NORMAL, 1, 60, 300, 2, 1, 16, 20, F32, PAD, true},
     STARTS | PACKED | WINDOW | BIAS,
     LISTS_Q,
     0,
     8,
     6,
     60},
    {{"padding", SIZE_NORMAL, 3, 40, 90, 1, 2, 20, 24, F32, PAD, false}, PADDING, NO_LISTS, 0, 1, 0, 0},
    {{"everything", SIZE_NORMAL, 1, 50, 250, 2, 3, 40, 48, F16, PAD, false},
     SOFTCAP | WINDOW | SINK | BIAS | INT8 | STARTS | PACKED,
     LISTS_KV,
     0,
     4,
     8,
     100},
};

static void test_cases(void **state)
{
    (void)state;
    for (int n = 0; n < COUNT(cases); n++) {
        struct random random = random_seeded(1000 + (uint64_t)n);
        check_case(&cases[n], cases[n].shape.size, &random);
    }
    target_report("cases");
}

/* A row whose only keys are masked out has the sink alone; one without keys has nothing. */
static void test_empty_rows(void **state)
{
    (void)state;
    struct random random = random_seeded(1);
    struct option_case c = cases[COUNT(cases) - 1];
    c.options = SINK | BIAS;
    c.shape = (struct shape){"empty rows", SIZE_NORMAL, 1, 30, 20, 1, 2, 16, 16, F32, LAYOUT_BTHD, false};
    c.lists = NO_LISTS;
    struct problem p;
    problem_make(&c, &p, &random);
    tensor_set(&p.sink.view, 0, 0, 0, 0, 0.25);
    tensor_set(&p.bias.view, 0, 0, 0, 0, -INFINITY);
    tensor_set(&p.bias.view, 0, 0, 1, 0, 0.5);
    fixture_check_all(SIZE_NORMAL, &p.f, NULL);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_NORMAL)) continue;
        fixture_forward(target, &p.f, NULL);
        for (int64_t i = 0; i < 30; i++) {
            double lse = tensor_get(&p.f.lse.view, 0, i, 0, 0);
            if (i < 10 ? lse != (double)-INFINITY : fabs(lse - 0.25) > 1e-7)
                fail_msg("%s: lse of row %lld is %g", target->label, (long long)i, lse);
            for (int64_t d = 0; d < 16; d++)
                if (tensor_get(&p.f.out.view, 0, i, 0, d) != 0)
                    fail_msg("%s: out of row %lld is not 0", target->label, (long long)i);
        }
    }
    problem_free(&p);
    target_report("empty rows");
}

/* ---- random cases: reference and CPU ---- */

static void test_random(void **state)
{
    (void)state;
    for (int n = 0; n < 250; n++) {
        struct random random = random_seeded(2000 + (uint64_t)n);
        char name[32];
        snprintf(name, sizeof name, "random %d", n);
        struct option_case c = {.options = (int)random_below(&random, OPTIONS_END),
                                .lists = (enum list_kind)random_below(&random, 4),
                                .block = 16 << random_below(&random, 3),
                                .q_block = 1 + (int)random_below(&random, 20),
                                .topk = 1 + (int)random_below(&random, 8),
                                .window = 1 + random_below(&random, 150)};
        clattn_dtype dtype = (clattn_dtype)(1 + random_below(&random, 3));
        if (c.lists == NO_LISTS) c.options &= ~STARTS;
        if (c.options & PACKED) c.options &= ~PADDING;
        c.shape = (struct shape){name,
                                 SIZE_CPU,
                                 c.options & PACKED ? 1 : 1 + random_below(&random, BATCH_MAX),
                                 1 + random_below(&random, 40),
                                 1 + random_below(&random, 200),
                                 1 + (int)random_below(&random, 2),
                                 1 + (int)random_below(&random, 5),
                                 1 + (int)random_below(&random, 70),
                                 1 + (int)random_below(&random, 70),
                                 dtype,
                                 (enum layout)random_below(&random, 3),
                                 random_below(&random, 2) != 0};
        check_case(&c, SIZE_CPU, &random);
    }
    target_report("random");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_empty_rows),
        cmocka_unit_test(test_random),
    };
    return cmocka_run_group_tests_name("options", tests, targets_open, targets_close);
}
