/* SPDX-License-Identifier: MIT */
/* The decode cache against the prefill: however the tokens arrive, the pyramid has the bits of
 * clattn_pyramid_build, the lists are those of clattn_select, and out is that of clattn_attention. */

#include "fixture.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct cache_case {
    const char *name;
    enum test_size size;
    clattn_dtype dtype;
    int64_t len;
    int kv_heads, group, dim, dim_v;
    int32_t leaf, page_size;
    clattn_selector selector;
    bool all_keys; /* not causal: only the rows of the last chunk are compared */
};

#define F32 CLATTN_FLOAT32
#define F16 CLATTN_FLOAT16
#define BF16 CLATTN_BFLOAT16
#define PISA CLATTN_SELECT_PISA

/* A kernel is compiled for each dtype, dim, group and leaf, which takes an OpenCL device seconds, so that cases
 * which all devices run share them: it is the way through memory or the selector that differs. */
static const struct cache_case cases[] = {
    {"contiguous", SIZE_TINY, F32, 150, 1, 2, 8, 8, 16, 0, PISA, false},
    {"pages of 16", SIZE_TINY, F32, 150, 2, 1, 8, 12, 16, 16, PISA, false},
    {"pages across leaves", SIZE_NORMAL, F32, 333, 2, 3, 20, 20, 16, 40, PISA, false},
    {"leaves across pages", SIZE_NORMAL, F16, 600, 2, 2, 24, 24, 64, 48, PISA, false},
    {"small pages", SIZE_CPU, BF16, 420, 1, 16, 64, 32, 32, 16, PISA, false},
    {"large pages", SIZE_CPU, F16, 700, 1, 5, 80, 80, 16, 256, PISA, false},
    {"leaves of 128", SIZE_CPU, F32, 900, 1, 1, 16, 16, 128, 100, PISA, false},
    {"pages of two leaves", SIZE_CPU, BF16, 900, 1, 16, 64, 64, 64, 128, PISA, false},
    {"mean of logits", SIZE_NORMAL, F32, 300, 2, 3, 20, 20, 16, 16, CLATTN_SELECT_PISA1, false},
    {"variance", SIZE_NORMAL, F32, 300, 1, 20, 20, 20, 16, 24, CLATTN_SELECT_PISA2, false},
    {"flat mean", SIZE_NORMAL, F32, 300, 2, 3, 20, 20, 16, 24, CLATTN_SELECT_FLAT_MEAN, false},
    {"flat exact", SIZE_NORMAL, F16, 300, 1, 40, 24, 24, 16, 20, CLATTN_SELECT_FLAT_LSE, false},
    {"dense", SIZE_NORMAL, F32, 200, 2, 3, 20, 20, 16, 24, CLATTN_SELECT_DENSE, false},
    {"every key seen", SIZE_NORMAL, F32, 301, 2, 3, 20, 20, 16, 16, PISA, true},
    {"robust", SIZE_NORMAL, F16, 420, 2, 2, 24, 24, 16, 40, CLATTN_SELECT_ROBUST, false},
    {"robust contiguous", SIZE_NORMAL, F32, 333, 2, 3, 20, 20, 16, 0, CLATTN_SELECT_ROBUST, false},
    {"robust, leaves of 32", SIZE_CPU, F32, 333, 1, 3, 20, 20, 32, 0, CLATTN_SELECT_ROBUST, false},
};

/* ---- one sequence in chunks ---- */

enum chunking { WHOLE, TOKENS, RANDOM, ROLLBACK };

static const char *const chunkings[] = {"at once", "token by token", "in chunks", "with tokens taken back"};

struct problem {
    const struct cache_case *c;
    struct fixture f;
    clattn_select_desc select;
    int32_t *indices, *counts; /* of clattn_select; NULL: dense */
    clattn_pyramid *pyramid;
};

static int64_t cache_tokens(const struct cache_case *c)
{
    return c->len + 13; /* levels lie elsewhere than in a pyramid of len keys */
}

static clattn_cache *cache_of(const struct target *target, const struct cache_case *c, clattn_dtype dtype,
                              int32_t sequences)
{
    clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
    clattn_cache *cache = NULL;
    desc.sequences = sequences;
    desc.tokens = cache_tokens(c);
    desc.kv_heads = c->kv_heads;
    desc.dim = c->dim;
    desc.dim_v = c->dim_v;
    desc.dtype = dtype;
    desc.leaf = c->leaf;
    desc.page_size = c->page_size;
    desc.bounds = c->selector == CLATTN_SELECT_ROBUST;
    check_success(target, clattn_cache_create(target->context, &desc, &cache), "cache_create");
    return cache;
}

static int64_t chunk_next(enum chunking chunking, int64_t left, struct random *random)
{
    int64_t len = chunking == TOKENS ? 1 : chunking == WHOLE ? left : 1 + random_below(random, 90);
    return len < left ? len : left;
}

/* Appends junk and takes it back. */
static void detour(const struct target *target, clattn_cache *cache, const struct problem *p,
                   struct random *random)
{
    const int32_t sequence = 0, lens = 1 + (int32_t)random_below(random, 12);
    int64_t length = clattn_cache_length(cache, 0);
    clattn_tensor k = tensor_rows(&p->f.k.view, 0, lens), v = tensor_rows(&p->f.v.view, 0, lens);
    check_success(target, clattn_cache_append(target->context, cache, 1, &sequence, &lens, &k, &v, NULL),
                  "junk");
    check_success(target, clattn_cache_truncate(target->context, cache, 0, length, NULL), "truncate");
}

static void lists_compare(const struct target *target, const struct problem *p, clattn_blocks *blocks,
                          int64_t first, int64_t rows, const char *how)
{
    int32_t heads = p->c->kv_heads, topk = p->select.topk;
    size_t lists = (size_t)(rows * heads), entries = lists * (size_t)topk;
    int32_t *indices = malloc(entries * sizeof *indices), *counts = malloc(lists * sizeof *counts);
    assert_true(indices && counts);
    check_success(target, clattn_blocks_read(target->context, blocks, indices, counts), "blocks_read");
    for (size_t n = 0; n < entries; n++)
        if (indices[n] != p->indices[(size_t)(first * heads * topk) + n])
            fail_msg("%s: %s, %s: entry %zu of row %lld is leaf %d; %d is right", target->label, p->c->name,
                     how, n % (size_t)topk, (long long)(first + (int64_t)(n / (size_t)(heads * topk))),
                     indices[n], p->indices[(size_t)(first * heads * topk) + n]);
    for (size_t n = 0; n < lists; n++)
        assert_int_equal(counts[n], p->counts[(size_t)(first * heads) + n]);
    free(indices);
    free(counts);
}

static void run_chunks(const struct target *target, struct problem *p, clattn_cache *cache,
                       enum chunking chunking)
{
    struct random random = random_seeded(40 + (uint64_t)chunking);
    const int32_t sequence = 0;
    for (int64_t at = 0, len; at < p->c->len; at += len) {
        len = chunk_next(chunking, p->c->len - at, &random);
        if (chunking == ROLLBACK && at + 12 < p->c->len) detour(target, cache, p, &random);
        clattn_tensor t[5] = {p->f.q.view, p->f.k.view, p->f.v.view, p->f.out.view, p->f.lse.view};
        for (int n = 0; n < 5; n++)
            t[n] = tensor_rows(&t[n], at, at + len);
        clattn_blocks *blocks = NULL;
        int32_t lens = (int32_t)len;
        check_success(target,
                      clattn_decode(target->context, cache, &p->f.attention, &p->select, 1, &sequence, &lens,
                                    &t[0], &t[1], &t[2], &t[3], &t[4], p->indices ? &blocks : NULL, NULL),
                      p->c->name);
        assert_int_equal(clattn_cache_length(cache, 0), at + len);
        if (p->indices && (!p->c->all_keys || len == p->c->len))
            lists_compare(target, p, blocks, at, len, chunkings[chunking]);
        clattn_blocks_release(target->context, blocks);
    }
    array_check_guards(&p->f.out, target->label, p->c->name);
    array_check_guards(&p->f.lse, target->label, p->c->name);
}

static void pyramid_compare(const struct target *target, const struct problem *p, clattn_cache *cache,
                            const char *how)
{
    size_t most = (size_t)p->c->len * (size_t)p->c->dim;
    float *want = malloc(most * sizeof *want), *have = malloc(most * sizeof *have);
    int64_t nodes, other;
    assert_true(want && have);
    for (int64_t h = 0; h < p->c->kv_heads; h++) {
        int level = 1;
        for (; !clattn_pyramid_read(target->context, p->pyramid, 0, h, level, want, &nodes); level++) {
            check_success(target, clattn_cache_read(target->context, cache, 0, h, level, have, &other),
                          "cache_read");
            assert_int_equal(nodes, other);
            for (int64_t n = 0; n < nodes * p->c->dim; n++)
                if (memcmp(&want[n], &have[n], sizeof *want) != 0)
                    fail_msg("%s: %s, %s: element %lld of level %d is %.9g; %.9g is right", target->label,
                             p->c->name, how, (long long)n, level, have[n], want[n]);
        }
        assert_int_equal(clattn_cache_read(target->context, cache, 0, h, level, have, &other),
                         CLATTN_INVALID_ARGUMENT);
    }
    free(want);
    free(have);
}

static struct problem problem_new(const struct target *target, const struct cache_case *c)
{
    struct random random = random_seeded(31);
    struct shape shape = {c->name,  c->size, 1,        c->len,   c->len,        c->kv_heads,
                          c->group, c->dim,  c->dim_v, c->dtype, LAYOUT_PADDED, c->all_keys};
    struct problem p = {
        .c = c, .f = fixture_new(&shape, &random), .select = select_desc(c->selector, 5, c->leaf)};
    p.select.beam = 6;
    p.select.prefilter = 7;
    array_fill(&p.f.q, FILL_NORMAL, &random);
    check_success(target,
                  clattn_pyramid_build(target->context, &p.f.attention, c->leaf, &p.f.k.view, &p.pyramid, NULL),
                  "pyramid_build");
    if (c->selector != CLATTN_SELECT_DENSE) {
        struct lists lists = fixture_select(target, &p.f, &p.select, &p.counts);
        p.indices = lists.indices;
    }
    return p;
}

static void problem_free(const struct target *target, struct problem *p)
{
    clattn_pyramid_release(target->context, p->pyramid);
    fixture_free(&p->f);
    free(p->indices);
    free(p->counts);
}

/* What a case gives by the definition, for the lists of one target; others mostly have the same. */
struct answer {
    struct expected expected;
    int32_t *indices;
    bool known;
};

static void answer_free(struct answer *answer)
{
    if (answer->known) expected_free(&answer->expected);
    free(answer->indices);
    *answer = (struct answer){.known = false};
}

static void answer_find(struct answer *answer, const struct problem *p, const struct forward *forward)
{
    size_t bytes = (size_t)p->c->len * (size_t)p->c->kv_heads * (size_t)p->select.topk * sizeof *p->indices;
    if (answer->known && (!p->indices || memcmp(answer->indices, p->indices, bytes) == 0)) return;
    answer_free(answer);
    answer->expected = expected_forward(forward);
    answer->known = true;
    if (!p->indices) return;
    answer->indices = malloc(bytes);
    assert_non_null(answer->indices);
    memcpy(answer->indices, p->indices, bytes);
}

static void check_case(const struct target *target, const struct cache_case *c, struct answer *answer)
{
    struct problem p = problem_new(target, c);
    struct lists lists = {.desc = CLATTN_BLOCKS_DESC_INIT, .indices = p.indices};
    lists.desc.block = c->leaf;
    lists.desc.rows = c->len;
    lists.desc.heads = c->kv_heads;
    lists.desc.topk = p.select.topk;
    struct forward forward = fixture_problem(&p.f, p.indices ? &lists : NULL);
    answer_find(answer, &p, &forward);
    for (int chunking = WHOLE; chunking <= ROLLBACK; chunking++) {
        if (c->all_keys && chunking != WHOLE) continue;
        clattn_cache *cache = cache_of(target, c, c->dtype, 2);
        array_poison(&p.f.out);
        array_poison(&p.f.lse);
        run_chunks(target, &p, cache, chunking);
        expected_compare(&answer->expected, &forward, &p.f.out.view, &p.f.lse.view, target->label, c->name);
        pyramid_compare(target, &p, cache, chunkings[chunking]);
        clattn_cache_release(target->context, cache);
    }
    problem_free(target, &p);
}

static void test_prefill(void **state)
{
    (void)state;
    for (int n = 0; n < COUNT(cases); n++) {
        struct answer answer = {.known = false};
        FOR_EACH_TARGET (target)
            if (target_runs(target, cases[n].size)) check_case(target, &cases[n], &answer);
        answer_free(&answer);
    }
    target_report("decoding as the prefill");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_prefill)};
    return cmocka_run_group_tests(tests, targets_open, targets_close);
}
