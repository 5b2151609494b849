/* SPDX-License-Identifier: MIT */
/* Selection and decode steps in the matrix tier of NVIDIA cards. Skipped where no NVIDIA card is. */

#include "nvidia.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- selection ---- */

static void test_select(void **state)
{
    static const struct {
        struct shape shape;
        int topk;
    } cases[] = {
        {{"16 heads", SIZE_NORMAL, 1, 130, 2049, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false}, 8},
        {{"two key heads", SIZE_NORMAL, 2, 50, 1500, 2, 3, 64, 64, CLATTN_FLOAT16, LAYOUT_PADDED, false}, 4},
        {{"dim 100", SIZE_NORMAL, 1, 40, 1025, 1, 5, 100, 100, CLATTN_FLOAT16, LAYOUT_BHTD, true}, 16},
        {{"more queries than keys", SIZE_NORMAL, 1, 300, 200, 1, 2, 80, 80, CLATTN_BFLOAT16, LAYOUT_BTHD,
          false},
         2},
        {{"one leaf a list", SIZE_NORMAL, 1, 40, 777, 1, 4, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false}, 1},
    };
    (void)state;
    struct target target = card_open(NULL);
    for (int n = 0; n < COUNT(cases); n++) {
        struct random random = random_seeded(1200 + (uint64_t)n);
        struct fixture f = fixture_new(&cases[n].shape, &random);
        clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, cases[n].topk, 64);
        struct selection selection = fixture_selection(&f, &select);
        struct choices choices = choices_of(&selection);
        int32_t *counts;
        record_clear();
        struct lists lists = fixture_select(&target, &f, &select, &counts);
        assert_non_null(strstr(recorder.text, "pyramid by path"));
        assert_non_null(strstr(recorder.text, "selection by path"));
        choices_compare(&choices, &selection, lists.indices, counts, target.label, f.name);
        lists_free(&lists);
        free(counts);
        choices_free(&choices);
        fixture_free(&f);
    }
    card_close(&target);
}

/* Every leaf by its exact score: groups that fill a tile's rows and that do not, other forced leaves, packed sequences. */
static const struct flat_case {
    struct shape shape;
    int topk, forced_first, forced_last;
    bool mma_only; /* its dimension */
} flat_cases[] = {
    {{"flat, 16 heads", SIZE_NORMAL, 1, 130, 2049, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false}, 8, 1, 2, false},
    {{"flat, 12 heads", SIZE_NORMAL, 1, 70, 700, 1, 12, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false}, 4, 0, 0, false},
    {{"flat, groups of 5", SIZE_NORMAL, 2, 50, 1500, 2, 5, 80, 80, CLATTN_FLOAT16, LAYOUT_PADDED, false}, 16, 2, 3, false},
    {{"flat, groups of 3", SIZE_NORMAL, 1, 61, 1025, 2, 3, 100, 100, CLATTN_FLOAT16, LAYOUT_BHTD, true}, 5, 1, 2, true},
    {{"flat, groups of 2", SIZE_NORMAL, 1, 300, 200, 1, 2, 96, 96, CLATTN_BFLOAT16, LAYOUT_BTHD, false}, 2, 0, 1, false},
    {{"flat, dim 256, topk 32", SIZE_NORMAL, 1, 40, 2500, 1, 1, 256, 256, CLATTN_FLOAT16, LAYOUT_BTHD, false}, 32, 5, 9, true},
    {{"flat, one leaf a list", SIZE_NORMAL, 1, 40, 777, 1, 4, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false}, 1, 1, 2, false},
    {{"flat, short", SIZE_NORMAL, 1, 40, 40, 1, 8, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, true}, 8, 1, 2, false},
};

static void check_flat(const struct target *target, const struct flat_case *c, uint64_t seed, const char *path)
{
    struct random random = random_seeded(seed);
    struct fixture f = fixture_new(&c->shape, &random);
    clattn_select_desc select = select_desc(CLATTN_SELECT_FLAT_LSE, c->topk, 64);
    select.forced_first = c->forced_first;
    select.forced_last = c->forced_last;
    struct selection selection = fixture_selection(&f, &select);
    struct choices choices = choices_of(&selection);
    int32_t *counts;
    record_clear();
    struct lists lists = fixture_select(target, &f, &select, &counts);
    char line[64];
    snprintf(line, sizeof line, "selection by path%s%s%s", path ? " " : "", path ? path : "", path ? "\n" : "");
    if ((strstr(recorder.text, line) != NULL) != (path != NULL))
        fail_msg("%s: path %s expected; log:\n%s", f.name, path ? path : "none", recorder.text);
    choices_compare(&choices, &selection, lists.indices, counts, target->label, f.name);
    lists_free(&lists);
    free(counts);
    choices_free(&choices);
    fixture_free(&f);
}

static void test_flat(void **state)
{
    (void)state;
    for (int tier = TIER_MMA; tier <= tiers; tier++) {
        struct target target = card_open(tier == TIER_MMA ? "mma" : "hopper");
        for (int n = 0; n < COUNT(flat_cases); n++)
            check_flat(&target, &flat_cases[n], 1250 + (uint64_t)n,
                       tier == TIER_MMA || flat_cases[n].mma_only ? "flat" : "flat-hopper");
        card_close(&target);
    }
}

/* Wrong scores and wrong lists are found; the next path serves the call. */
static void test_spoiled_flat(void **state)
{
    static const struct {
        const char *file, *from, *to, *then;
    } spoiled[] = {
        {"select_flat_wgmma.cl", "scale *= LOG2E;", "scale *= 0.1f * LOG2E;", "flat"},
        {"select_flat_mma.cl", "scale *= LOG2E;", "scale *= 0.1f * LOG2E;", NULL},
        {"select_flat.cl", "best > 0)), count", "best > 1)) / 2, count", NULL},
    };
    (void)state;
    for (int n = 0; n < COUNT(spoiled); n++) {
        if (tiers < TIER_HOPPER && strstr(spoiled[n].file, "wgmma")) continue;
        kernel_spoil(spoiled[n].file, spoiled[n].from, spoiled[n].to);
        struct target target = card_open(spoiled[n].then ? "hopper" : "mma");
        check_flat(&target, &flat_cases[1], 1290, spoiled[n].then);
        card_close(&target);
        kernel_restore(spoiled[n].file);
    }
}

/* What the kernel does not know stays with the portable one. */
static void test_select_portable(void **state)
{
    (void)state;
    struct target target = card_open(NULL);
    struct shape shape = {"portable", SIZE_NORMAL,    1,           9,    515, 1, 16, 64,
                          64,         CLATTN_FLOAT16, LAYOUT_BTHD, false};
    struct random random = random_seeded(1300);
    struct fixture f = fixture_new(&shape, &random);
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 4, 64);
    select.forced_first = 0;
    int32_t *counts;
    record_clear();
    struct lists lists = fixture_select(&target, &f, &select, &counts);
    assert_null(strstr(recorder.text, "selection by path"));
    lists_free(&lists);
    free(counts);
    fixture_free(&f);
    card_close(&target);
}

/* ---- decode steps ---- */

/* The last rows of a prefill, decoded; lists [rows][kv_heads][topk]. */
static void decode_rows(const struct target *target, struct fixture *f, int32_t page_size, int topk, int32_t *lists)
{
    clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, topk, 64);
    clattn_cache *cache = NULL;
    clattn_blocks *blocks = NULL;
    int64_t rows = f->q.view.len, before = f->k.view.len - rows;
    const int32_t sequence = 1, lens[] = {(int32_t)before, (int32_t)rows};
    desc.sequences = 2;
    desc.tokens = f->k.view.len + 777;
    desc.kv_heads = (int32_t)f->k.view.heads;
    desc.dim = (int32_t)f->k.view.dim;
    desc.dim_v = (int32_t)f->v.view.dim;
    desc.dtype = f->k.view.dtype;
    desc.page_size = page_size;
    clattn_tensor k = tensor_rows(&f->k.view, 0, before), v = tensor_rows(&f->v.view, 0, before);
    clattn_tensor new_k = tensor_rows(&f->k.view, before, before + rows),
                  new_v = tensor_rows(&f->v.view, before, before + rows);
    check_success(target, clattn_cache_create(target->context, &desc, &cache), "cache_create");
    check_success(target, clattn_cache_append(target->context, cache, 1, &sequence, &lens[0], &k, &v, NULL),
                  "cache_append");
    record_clear();
    array_poison(&f->out);
    check_success(target,
                  clattn_decode(target->context, cache, &f->attention, &select, 1, &sequence, &lens[1], &f->q.view,
                                &new_k, &new_v, &f->out.view, &f->lse.view, &blocks, NULL),
                  "decode");
    check_success(target, clattn_blocks_read(target->context, blocks, lists, NULL), "blocks_read");
    clattn_blocks_release(target->context, blocks);
    clattn_cache_release(target->context, cache);
}

static const struct decode_case {
    struct shape shape;
    int topk;
    int32_t page_size;
    bool is_portable;
    int64_t window; /* options; 0, false: off */
    float softcap;
    bool sink;
} decode_cases[] = {
    {{"decode", SIZE_NORMAL, 1, 5, 2049, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false}, 8, 0, .is_portable = false},
    {{"decode, pages", SIZE_NORMAL, 1, 70, 1500, 2, 3, 64, 48, CLATTN_FLOAT16, LAYOUT_BTHD, false}, 16, 128, .is_portable = false},
    {{"decode, padded", SIZE_NORMAL, 1, 1, 1400, 1, 5, 100, 100, CLATTN_FLOAT16, LAYOUT_PADDED, false}, 4, 64, .is_portable = false},
    {{"decode, short", SIZE_NORMAL, 1, 30, 40, 2, 1, 80, 80, CLATTN_BFLOAT16, LAYOUT_BTHD, false}, 8, 0, .is_portable = false},
    {{"decode, pages across leaves", SIZE_NORMAL, 1, 3, 900, 1, 4, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false},
     8, 48, .is_portable = true},
    {{"decode, sink", SIZE_NORMAL, 1, 5, 2049, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     8, 0, .sink = true},
    {{"decode, window", SIZE_NORMAL, 1, 70, 1500, 2, 3, 64, 48, CLATTN_FLOAT16, LAYOUT_BTHD, false},
     16, 128, .window = 300},
    {{"decode, window of one key", SIZE_NORMAL, 1, 3, 700, 1, 8, 64, 64, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     8, 0, .window = 1, .sink = true},
    {{"decode, all options", SIZE_NORMAL, 1, 30, 1400, 1, 5, 80, 100, CLATTN_FLOAT16, LAYOUT_PADDED, false},
     8, 64, .window = 1000, .softcap = 2, .sink = true},
};

static void check_decode(const struct target *target, const struct decode_case *c, bool is_portable)
{
    struct random random = random_seeded(1350);
    struct fixture f = fixture_new(&c->shape, &random);
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, c->topk, 64);
    struct selection selection = fixture_selection(&f, &select);
    struct choices choices = choices_of(&selection);
    struct lists lists = {.desc = CLATTN_BLOCKS_DESC_INIT};
    struct array sink = array_new(CLATTN_FLOAT32, 1, 1, c->shape.kv_heads * c->shape.group, 1, LAYOUT_BTHD);
    array_fill(&sink, FILL_NORMAL, &random);
    f.attention.window = c->window; /* after the lists: selection knows no options */
    f.attention.softcap = c->softcap;
    f.attention.sink = c->sink ? &sink.view : NULL;
    size_t entries = (size_t)(c->shape.q_len * c->shape.kv_heads * c->topk);
    int32_t *counts = malloc(entries * sizeof *counts);
    lists.indices = malloc(entries * sizeof *lists.indices);
    assert_true(lists.indices && counts);
    lists.desc.rows = c->shape.q_len;
    lists.desc.heads = c->shape.kv_heads;
    lists.desc.topk = c->topk;
    decode_rows(target, &f, c->page_size, c->topk, lists.indices);
    bool found = strstr(recorder.text, "decode step by path decode\n") != NULL;
    if (found == is_portable) fail_msg("%s: %s; log:\n%s", f.name, found ? "matrix" : "portable", recorder.text);
    for (size_t i = 0; i < entries / (size_t)c->topk; i++)
        for (counts[i] = 0; counts[i] < c->topk && lists.indices[i * (size_t)c->topk + (size_t)counts[i]] >= 0;)
            counts[i]++;
    choices_compare(&choices, &selection, lists.indices, counts, target->label, f.name);
    struct forward problem = fixture_problem(&f, &lists);
    struct expected expected = expected_forward(&problem);
    expected_compare(&expected, &problem, &f.out.view, &f.lse.view, target->label, f.name);
    array_check_guards(&f.out, target->label, f.name);
    expected_free(&expected);
    choices_free(&choices);
    lists_free(&lists);
    array_free(&sink);
    free(counts);
    fixture_free(&f);
}

static void test_decode(void **state)
{
    (void)state;
    struct target target = card_open(NULL);
    for (int n = 0; n < COUNT(decode_cases); n++)
        check_decode(&target, &decode_cases[n], decode_cases[n].is_portable);
    card_close(&target);
}

static void test_spoiled_decode(void **state)
{
    (void)state;
    kernel_spoil("decode_step_mma.cl", "weigh(s[round], weight_exponent, shift)",
                 "weigh(s[round], 0.8f * weight_exponent, shift)");
    struct target target = card_open(NULL);
    check_decode(&target, &decode_cases[0], true);
    card_close(&target);
    kernel_restore("decode_step_mma.cl");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_select),
        cmocka_unit_test(test_select_portable),
        cmocka_unit_test(test_flat),
        cmocka_unit_test(test_spoiled_flat),
        cmocka_unit_test(test_decode),
        cmocka_unit_test(test_spoiled_decode),
    };
    if (!card_find()) return 77;
    return cmocka_run_group_tests_name("opencl nvidia select", tests, NULL, NULL);
}
