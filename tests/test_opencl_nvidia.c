/* SPDX-License-Identifier: MIT */
/* The matrix tier of NVIDIA cards: every path against the definition, the choice between paths, what happens
 * when a kernel or a whole tier is refused. Skipped where no NVIDIA card is. */

#include "fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TIER_MMA = 1, TIER_HOPPER = 2 };

/* ---- contexts that remember what they said ---- */

struct recorder {
    char text[1 << 16];
    size_t used;
};

static struct recorder recorder;

static void record(void *user, clattn_log_level level, const char *message)
{
    struct recorder *r = user;
    (void)level;
    int bytes = snprintf(r->text + r->used, sizeof r->text - r->used, "%s\n", message);
    if (bytes > 0 && r->used + (size_t)bytes < sizeof r->text) r->used += (size_t)bytes;
}

static void record_clear(void)
{
    recorder.used = 0;
    recorder.text[0] = 0;
}

static int card = -1, tiers; /* index of the card, TIER_MMA or TIER_HOPPER */

static bool card_find(void)
{
    clattn_device_info info = {.size = sizeof info};
    for (int i = 0; clattn_device_get(i, &info) == CLATTN_SUCCESS; i++) {
        if (info.backend != CLATTN_BACKEND_OPENCL || !strstr(info.variants, "mma")) continue;
        card = info.index;
        tiers = strstr(info.variants, "hopper") ? TIER_HOPPER : TIER_MMA;
        return true;
    }
    return false;
}

static struct target card_open(const char *variant)
{
    struct target target = {.info = {.size = sizeof target.info}, .limit = SIZE_NORMAL};
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    char index[16], error[1024] = "";
    snprintf(index, sizeof index, "%d", card);
    desc.backend = CLATTN_BACKEND_OPENCL;
    desc.device = index;
    desc.variant = variant;
    desc.log = record;
    desc.log_user = &recorder;
    desc.log_level = CLATTN_LOG_DEBUG;
    desc.error = error;
    desc.error_bytes = sizeof error;
    record_clear();
    if (clattn_context_create(&desc, &target.context))
        fail_msg("%s: %s", variant ? variant : "best tier", error);
    assert_int_equal(clattn_context_device(target.context, &target.info), CLATTN_SUCCESS);
    snprintf(target.label, sizeof target.label, "%s", target.info.variant);
    return target;
}

static void card_close(struct target *target)
{
    clattn_context_release(target->context);
}

/* ---- paths of attention ---- */

enum list_kind { LIST_RANDOM, LIST_SHARED, LIST_ALL_KEYS };

static const struct path_case {
    struct shape shape;
    enum list_kind kind;
    int q_block, topk, block; /* block 0: 64 */
    const char *mma, *hopper; /* the path that must serve it; NULL: the portable kernel */
} path_cases[] = {
    /* name, class, batch, q_len, kv_len, kv_heads, group, dim, dim_v, dtype, layout, all keys */
    {{"few blocks of many", SIZE_NORMAL, 1, 70, 2100, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM,
     1,
     2,
     0,
     "inverted",
     "inverted-hopper"},
    {{"two key heads", SIZE_NORMAL, 2, 65, 1900, 2, 4, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM,
     1,
     2,
     0,
     "inverted",
     "inverted-hopper"},
    {{"no groups, padded", SIZE_NORMAL, 2, 33, 1900, 2, 1, 96, 80, CLATTN_BFLOAT16, LAYOUT_PADDED, false},
     LIST_RANDOM,
     1,
     2,
     0,
     "inverted",
     "inverted-hopper"},
    {{"odd dimensions", SIZE_NORMAL, 1, 40, 1900, 1, 3, 100, 60, CLATTN_BFLOAT16, LAYOUT_PADDED, false},
     LIST_RANDOM,
     1,
     2,
     0,
     "inverted",
     "inverted"},
    {{"dim 256", SIZE_NORMAL, 1, 40, 1900, 1, 4, 256, 192, CLATTN_FLOAT16, LAYOUT_BHTD, false},
     LIST_RANDOM,
     1,
     2,
     0,
     "inverted",
     "inverted"},
    {{"group 20", SIZE_NORMAL, 1, 20, 1900, 1, 20, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM,
     1,
     2,
     0,
     "inverted",
     "inverted-hopper"},
    {{"neighbours agree", SIZE_NORMAL, 1, 203, 500, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_SHARED,
     1,
     4,
     0,
     "inverted",
     "union"},
    {{"neighbours agree, group 7", SIZE_NORMAL, 2, 90, 777, 2, 7, 80, 80, CLATTN_FLOAT16, LAYOUT_BHTD, false},
     LIST_SHARED,
     1,
     4,
     0,
     "inverted",
     "union"},
    {{"neighbours agree, dim 64", SIZE_NORMAL, 1, 130, 300, 1, 8, 64, 64, CLATTN_BFLOAT16, LAYOUT_PADDED, true},
     LIST_SHARED,
     1,
     4,
     0,
     "inverted",
     "union"},
    {{"query blocks", SIZE_NORMAL, 1, 333, 400, 2, 2, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM,
     64,
     3,
     0,
     "token",
     "tile"},
    {{"blocks of 128 keys", SIZE_NORMAL, 2, 300, 460, 2, 4, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM,
     128,
     3,
     128,
     "token",
     "tile"},
    {{"query blocks, batch", SIZE_NORMAL, 2, 100, 90, 1, 5, 96, 96, CLATTN_FLOAT16, LAYOUT_PADDED, false},
     LIST_RANDOM,
     16,
     3,
     0,
     "token",
     "tile"},
    {{"query blocks, dim 100", SIZE_NORMAL, 1, 100, 90, 1, 5, 100, 100, CLATTN_FLOAT16, LAYOUT_BTHD, true},
     LIST_RANDOM,
     16,
     3,
     0,
     "token",
     "token"},
    {{"all keys", SIZE_NORMAL, 2, 150, 200, 2, 4, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_ALL_KEYS,
     1,
     1,
     0,
     "token",
     "tile"},
    {{"all keys, not causal", SIZE_NORMAL, 1, 65, 129, 1, 16, 64, 64, CLATTN_FLOAT16, LAYOUT_BHTD, true},
     LIST_ALL_KEYS,
     1,
     1,
     0,
     "token",
     "tile"},
    {{"more queries than keys", SIZE_NORMAL, 1, 200, 70, 1, 16, 80, 80, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_ALL_KEYS,
     1,
     1,
     0,
     "token",
     "tile"},
    {{"float32", SIZE_NORMAL, 1, 20, 130, 1, 4, 64, 64, CLATTN_FLOAT32, LAYOUT_BTHD, false},
     LIST_RANDOM,
     1,
     2,
     0,
     NULL,
     NULL},
};

/* Every eight rows list the same blocks. */
static void lists_share(struct lists *lists)
{
    int64_t entries = (int64_t)lists->desc.heads * lists->desc.topk;
    for (int64_t row = 0; row < lists->desc.rows; row++)
        memcpy(lists->indices + row * entries, lists->indices + row / 8 * 8 * entries,
               (size_t)entries * sizeof *lists->indices);
}

static void expect_path(const char *path, const char *tier, const char *name)
{
    char line[80];
    snprintf(line, sizeof line, "by path %s\n", path ? path : "");
    bool found = strstr(recorder.text, path ? line : "attention by path") != NULL;
    if (found != (path != NULL))
        fail_msg("%s on %s: path %s expected; log:\n%s", name, tier, path, recorder.text);
}

static void check_path(const struct target *target, const struct path_case *c, uint64_t seed)
{
    struct random random = random_seeded(seed);
    struct fixture f = fixture_new(&c->shape, &random);
    struct spans spans = fixture_spans(&f, c->q_block);
    struct lists lists =
        lists_random(&random, &spans, c->block ? c->block : 64, c->q_block, c->shape.kv_heads, c->topk, 0.9);
    const struct lists *used = c->kind == LIST_ALL_KEYS ? NULL : &lists;
    if (c->kind == LIST_SHARED) lists_share(&lists);
    struct forward problem = fixture_problem(&f, used);
    struct expected expected = expected_forward(&problem);
    record_clear();
    fixture_check_forward(target, &f, used, &expected);
    expect_path(strcmp(target->info.variant, "mma") ? c->hopper : c->mma, target->label, f.name);
    size_t bytes = f.out.raw_elements * element_bytes(f.out.view.dtype);
    unsigned char *first = malloc(bytes);
    assert_non_null(first);
    memcpy(first, f.out.raw, bytes);
    fixture_forward(target, &f, used); /* the same bits again */
    assert_memory_equal(first, f.out.raw, bytes);
    free(first);
    expected_free(&expected);
    lists_free(&lists);
    fixture_free(&f);
}

static void test_paths(void **state)
{
    (void)state;
    for (int tier = TIER_MMA; tier <= tiers; tier++) {
        struct target target = card_open(tier == TIER_MMA ? "mma" : "hopper");
        for (int n = 0; n < COUNT(path_cases); n++)
            check_path(&target, &path_cases[n], 1000 + (uint64_t)n);
        card_close(&target);
    }
}

/* Sequences of different lengths, one of them empty, through inverted lists and tiles. */
static void test_packed(void **state)
{
    static const int32_t cu_q[] = {0, 20, 20, 100, 130}, cu_k[] = {0, 65, 65, 1400, 1401};
    (void)state;
    struct target target = card_open(NULL);
    struct shape shape = {"packed",        SIZE_NORMAL,   1,    130, 1401, 2, 4, 64, 64,
                          CLATTN_BFLOAT16, LAYOUT_PADDED, false};
    struct random random = random_seeded(1100);
    struct fixture f = fixture_new(&shape, &random);
    fixture_packed(&f, COUNT(cu_q) - 1, cu_q, cu_k);
    for (int q_block = 1; q_block <= 16; q_block += 15) {
        struct spans spans = fixture_spans(&f, q_block);
        struct lists lists = lists_random(&random, &spans, 64, q_block, 2, 2, 0.9);
        struct forward problem = fixture_problem(&f, &lists);
        struct expected expected = expected_forward(&problem);
        record_clear();
        fixture_check_forward(&target, &f, &lists, &expected);
        assert_non_null(strstr(recorder.text, "attention by path"));
        expected_free(&expected);
        lists_free(&lists);
    }
    fixture_free(&f);
    card_close(&target);
}

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
} decode_cases[] = {
    {{"decode", SIZE_NORMAL, 1, 5, 2049, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false}, 8, 0, false},
    {{"decode, pages", SIZE_NORMAL, 1, 70, 1500, 2, 3, 64, 48, CLATTN_FLOAT16, LAYOUT_BTHD, false}, 16, 128, false},
    {{"decode, padded", SIZE_NORMAL, 1, 1, 1400, 1, 5, 100, 100, CLATTN_FLOAT16, LAYOUT_PADDED, false}, 4, 64, false},
    {{"decode, short", SIZE_NORMAL, 1, 30, 40, 2, 1, 80, 80, CLATTN_BFLOAT16, LAYOUT_BTHD, false}, 8, 0, false},
    {{"decode, pages across leaves", SIZE_NORMAL, 1, 3, 900, 1, 4, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false},
     8, 48, true},
};

static void check_decode(const struct target *target, const struct decode_case *c, bool is_portable)
{
    struct random random = random_seeded(1350);
    struct fixture f = fixture_new(&c->shape, &random);
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, c->topk, 64);
    struct selection selection = fixture_selection(&f, &select);
    struct choices choices = choices_of(&selection);
    struct lists lists = {.desc = CLATTN_BLOCKS_DESC_INIT};
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

/* ---- refusals ---- */

static char folder[4096];

/* A kernel file whose text has `from` replaced by `to`, in CLATTN_KERNEL_DIR. */
static void kernel_spoil(const char *name, const char *from, const char *to)
{
    char path[4400], line[4096];
    int changed = 0;
    const char *srcdir = getenv("srcdir");
    snprintf(path, sizeof path, "%s/cl/%s", srcdir ? srcdir : ".", name);
    FILE *in = fopen(path, "r");
    assert_non_null(in);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    while (fgets(line, sizeof line, in)) {
        char *at = strstr(line, from);
        changed += at != NULL;
        if (at)
            fprintf(out, "%.*s%s%s", (int)(at - line), line, to, at + strlen(from));
        else
            fputs(line, out);
    }
    fclose(in);
    assert_int_equal(fclose(out), 0);
    assert_true(changed > 0);
    setenv("CLATTN_KERNEL_DIR", folder, 1);
}

static void kernel_restore(const char *name)
{
    char path[4400];
    unsetenv("CLATTN_KERNEL_DIR");
    snprintf(path, sizeof path, "%s/%s", folder, name);
    unlink(path);
}

/* A canary that computes wrongly, and one that does not build, take their tier away. */
static void test_canaries(void **state)
{
    (void)state;
    if (tiers >= TIER_HOPPER) {
        kernel_spoil("canary_wgmma.cl", "= s[n].x;", "= s[n].x + 1.0f;");
        struct target target = card_open(NULL);
        assert_string_equal(target.info.variant, "mma");
        assert_non_null(strstr(recorder.text, "tier hopper is not used: canary_wgmma"));
        card_close(&target);
        kernel_restore("canary_wgmma.cl");
        kernel_spoil("wgmma_nvidia.cl", "wgmma.fence", "wgmma.no_such_instruction");
        target = card_open(NULL);
        assert_string_equal(target.info.variant, "mma");
        assert_non_null(strstr(recorder.text, "does not build for sm_90a"));
        card_close(&target);
        kernel_restore("wgmma_nvidia.cl");
    }
    kernel_spoil("canary_mma.cl", "= d.w;", "= d.z;");
    struct target target = card_open(NULL);
    assert_string_equal(target.info.variant, "portable");
    card_close(&target);
    kernel_restore("canary_mma.cl");
}

/* A kernel that computes wrongly is found and the next path serves the call, rightly. */
static void test_spoiled_paths(void **state)
{
    static const struct {
        const char *file, *from, *to;
        int number; /* of path_cases */
        const char *then;
    } spoiled[] = {
        {"attention_inverted_wgmma.cl", "weigh(s, scale, top)", "weigh(s, 0.8f * scale, top)", 0, "inverted"},
        {"attention_inverted_mma.cl", "const float inv0 = sum.x > 0 ? 1.0f",
         "const float inv0 = sum.x > 0 ? 0.5f", 3, "token"},
        {"attention_tile_wgmma.cl", "float2 top = row_max_of(s) * scale;",
         "float2 top = row_max_of(s) * scale; scale *= 0.8f;", 6, "inverted-hopper"},
    };
    (void)state;
    for (int n = 0; n < COUNT(spoiled); n++) {
        struct path_case c = path_cases[spoiled[n].number];
        if (tiers < TIER_HOPPER && strstr(spoiled[n].file, "wgmma")) continue;
        kernel_spoil(spoiled[n].file, spoiled[n].from, spoiled[n].to);
        struct target target = card_open(NULL);
        c.mma = c.hopper = spoiled[n].then;
        check_path(&target, &c, 1400);
        card_close(&target);
        kernel_restore(spoiled[n].file);
    }
}

static void test_spoiled_decode(void **state)
{
    (void)state;
    kernel_spoil("decode_step_mma.cl", "weigh(s[round], exponent, row_max)",
                 "weigh(s[round], 0.8f * exponent, row_max)");
    struct target target = card_open(NULL);
    check_decode(&target, &decode_cases[0], true);
    card_close(&target);
    kernel_restore("decode_step_mma.cl");
}

/* The variable limits the tier, and says what it does not know. */
static void test_limit(void **state)
{
    (void)state;
    setenv("CLATTN_TIER", "portable", 1);
    struct target target = card_open(NULL);
    assert_string_equal(target.info.variant, "portable");
    assert_string_equal(target.info.variants, "portable");
    card_close(&target);
    setenv("CLATTN_TIER", "mma", 1);
    target = card_open(NULL);
    assert_string_equal(target.info.variant, "mma");
    card_close(&target);
    unsetenv("CLATTN_TIER");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paths),         cmocka_unit_test(test_packed),
        cmocka_unit_test(test_select),        cmocka_unit_test(test_canaries),
        cmocka_unit_test(test_spoiled_paths), cmocka_unit_test(test_select_portable),
        cmocka_unit_test(test_limit),         cmocka_unit_test(test_decode),
        cmocka_unit_test(test_spoiled_decode),
    };
    const char *base = getenv("CLATTN_CACHE_DIR");
    unsetenv("CLATTN_CACHE_SIZE");
    unsetenv("CLATTN_LOG"); /* the tests read all of the log */
    if (!card_find()) {
        print_message("no NVIDIA card with matrix units\n");
        return 77;
    }
    snprintf(folder, sizeof folder, "%.4000s/nvidia.kernels", base ? base : ".");
    mkdir(folder, 0700);
    return cmocka_run_group_tests_name("opencl nvidia", tests, NULL, NULL);
}
