/* SPDX-License-Identifier: MIT */
/* Calls of the decode cache: what they refuse, what a batch does, how much work an append is, memory, int8. */

#include "fixture.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 2, GROUP = 2, DIM = 12, LEAF = 16, ROWS = 200, SEQUENCES = 4 };

/* Every target has caches. */
#define FOR_EACH_CACHE(target) FOR_EACH_TARGET (target)

static clattn_cache_desc small_desc(clattn_dtype dtype)
{
    clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
    desc.sequences = SEQUENCES;
    desc.tokens = ROWS;
    desc.kv_heads = HEADS;
    desc.dim = desc.dim_v = DIM;
    desc.dtype = dtype;
    desc.leaf = LEAF;
    return desc;
}

static clattn_cache *cache_new(const struct target *target, const clattn_cache_desc *desc)
{
    clattn_cache *cache = NULL;
    check_success(target, clattn_cache_create(target->context, desc, &cache), "cache_create");
    return cache;
}

static clattn_cache_info describe(const struct target *target, const clattn_cache *cache)
{
    clattn_cache_info info = {.size = sizeof info};
    check_success(target, clattn_cache_describe(cache, &info), "cache_describe");
    return info;
}

static struct fixture small_fixture(clattn_dtype dtype, uint64_t stream)
{
    struct random random = random_seeded(stream);
    struct shape shape = {"cache", SIZE_TINY, 1, ROWS, ROWS, HEADS, GROUP, DIM, DIM, dtype, LAYOUT_BTHD, false};
    return fixture_new(&shape, &random);
}

/* Decodes rows first .. of the fixture as the tokens of a batch; k and v may be left out. */
static clattn_status decode(const struct target *target, clattn_cache *cache, struct fixture *f, int64_t first,
                            int64_t count, const int32_t *sequences, const int32_t *lens, bool appends,
                            clattn_blocks **blocks)
{
    int64_t rows = 0;
    for (int64_t n = 0; n < count; n++)
        rows += lens[n];
    clattn_tensor q = tensor_rows(&f->q.view, first, first + rows),
                  k = tensor_rows(&f->k.view, first, first + rows);
    clattn_tensor v = tensor_rows(&f->v.view, first, first + rows),
                  out = tensor_rows(&f->out.view, first, first + rows);
    clattn_tensor lse = tensor_rows(&f->lse.view, first, first + rows);
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 4, LEAF);
    return clattn_decode(target->context, cache, NULL, &select, count, sequences, lens, &q, appends ? &k : NULL,
                         appends ? &v : NULL, &out, &lse, blocks, NULL);
}

/* ---- batches ---- */

static void check_near(const clattn_tensor *a, const clattn_tensor *b, double tolerance, const char *label)
{
    for (int64_t i = 0; i < a->len; i++)
        for (int64_t h = 0; h < a->heads; h++)
            for (int64_t d = 0; d < a->dim; d++) {
                double x = tensor_get(a, 0, i, h, d), y = tensor_get(b, 0, i, h, d);
                if (x != y && !(fabs(x - y) <= tolerance))
                    fail_msg("%s: row %lld, head %lld is %.9g, alone %.9g", label, (long long)i, (long long)h,
                             x, y);
            }
}

/* Several sequences of different lengths in one call give what each gives alone; some get nothing. */
static void test_ragged(void **state)
{
    static const int32_t order[3][4] = {{2, 0, 3, 1}, {1, 3, 2, 0}, {0, 1, 2, 3}};
    static const int32_t lens[3][4] = {{33, 0, 1, 17}, {1, 40, 2, 1}, {3, 1, 1, 12}};
    (void)state;
    FOR_EACH_CACHE(target)
    {
        clattn_cache_desc desc = small_desc(CLATTN_FLOAT32);
        desc.page_size = 24;
        struct fixture f = small_fixture(CLATTN_FLOAT32, 91), alone = small_fixture(CLATTN_FLOAT32, 91);
        clattn_cache *cache = cache_new(target, &desc), *single = cache_new(target, &desc);
        int64_t first = 0;
        for (int step = 0; step < 3; step++) {
            int64_t at = first;
            check_success(target, decode(target, cache, &f, first, 4, order[step], lens[step], true, NULL),
                          "decode");
            for (int n = 0; n < 4; at += lens[step][n++])
                check_success(
                    target, decode(target, single, &alone, at, 1, &order[step][n], &lens[step][n], true, NULL),
                    "decode");
            clattn_tensor a[2] = {tensor_rows(&f.out.view, first, at), tensor_rows(&f.lse.view, first, at)};
            clattn_tensor b[2] = {tensor_rows(&alone.out.view, first, at),
                                  tensor_rows(&alone.lse.view, first, at)};
            check_near(&a[0], &b[0], 1e-5, target->label);
            check_near(&a[1], &b[1], 1e-5, target->label);
            first = at;
        }
        for (int32_t s = 0; s < SEQUENCES; s++)
            assert_int_equal(clattn_cache_length(cache, s), clattn_cache_length(single, s));
        array_check_guards(&f.out, target->label, "ragged");
        clattn_cache_release(target->context, cache);
        clattn_cache_release(target->context, single);
        fixture_free(&f);
        fixture_free(&alone);
    }
}

/* Without keys the rows are the last tokens; what lies before the begin sees nothing. */
static void test_rows_without_keys(void **state)
{
    const int32_t sequence = 1, len = 20, rows = 25;
    (void)state;
    FOR_EACH_CACHE(target)
    {
        clattn_cache_desc desc = small_desc(CLATTN_FLOAT32);
        struct fixture f = small_fixture(CLATTN_FLOAT32, 92), again = small_fixture(CLATTN_FLOAT32, 92);
        clattn_cache *cache = cache_new(target, &desc);
        check_success(target, decode(target, cache, &f, 5, 1, &sequence, &len, true, NULL), "decode");
        check_success(target, decode(target, cache, &again, 0, 1, &sequence, &rows, false, NULL), "decode");
        assert_int_equal(clattn_cache_length(cache, sequence), len);
        clattn_tensor a = tensor_rows(&f.out.view, 5, 25), b = tensor_rows(&again.out.view, 5, 25);
        check_near(&a, &b, 1e-5, target->label);
        for (int64_t i = 0; i < rows - len; i++)
            for (int64_t h = 0; h < HEADS * GROUP; h++) {
                assert_true(tensor_get(&again.lse.view, 0, i, h, 0) == -INFINITY);
                assert_true(tensor_get(&again.out.view, 0, i, h, 0) == 0);
            }
        clattn_cache_release(target->context, cache);
        fixture_free(&f);
        fixture_free(&again);
    }
}

/* ---- work ---- */

/* A token writes its leaf and the leaf's ancestors, and its key is summed once, whatever is there already. */
static void test_work(void **state)
{
    enum { TOKENS = 3000 };
    const int32_t sequence = 0, one = 1;
    (void)state;
    FOR_EACH_CACHE(target)
    {
        clattn_cache_desc desc = small_desc(CLATTN_FLOAT32);
        desc.tokens = TOKENS;
        struct fixture f = small_fixture(CLATTN_FLOAT32, 93);
        clattn_cache *cache = cache_new(target, &desc);
        clattn_tensor k = tensor_rows(&f.k.view, 0, 1), v = tensor_rows(&f.v.view, 0, 1);
        for (int64_t n = 0; n < TOKENS; n++) {
            clattn_cache_info before = describe(target, cache);
            check_success(target, clattn_cache_append(target->context, cache, 1, &sequence, &one, &k, &v, NULL),
                          "append");
            clattn_cache_info after = describe(target, cache);
            uint64_t levels = 1;
            while (nodes_of(n + 1, LEAF, (int)levels) > 1)
                levels++;
            assert_int_equal(after.nodes_updated - before.nodes_updated, HEADS * levels);
            assert_true((double)levels <= 2 + log2(ceil((double)(n + 1) / LEAF)));
            assert_int_equal(after.rows_summed - before.rows_summed, HEADS);
            assert_int_equal(after.tokens_appended, n + 1);
        }
        clattn_cache_release(target->context, cache);
        fixture_free(&f);
    }
}

/* ---- memory ---- */

static size_t bytes_of(const struct target *target, clattn_cache_desc desc, clattn_dtype dtype)
{
    size_t bytes = 0;
    desc.dtype = dtype;
    check_success(target, clattn_cache_bytes(target->context, &desc, &bytes), "cache_bytes");
    return bytes;
}

static void test_memory(void **state)
{
    static const int32_t dims[] = {64, 80, 128, 256};
    (void)state;
    FOR_EACH_CACHE(target)
    for (int n = 0; n < 4; n++)
        for (int32_t page = 0; page <= 64; page += 64) {
            clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
            desc.tokens = 65536;
            desc.dim = desc.dim_v = dims[n];
            desc.page_size = page;
            double whole = (double)bytes_of(target, desc, CLATTN_FLOAT16);
            assert_true((double)bytes_of(target, desc, CLATTN_INT8) <= 0.55 * whole);
            assert_true(whole >= 65536.0 * 4 * dims[n] && whole <= 1.1 * 65536 * 4 * dims[n]);
        }
}

/* The caller's memory holds everything, and nothing is written beside it. */
static void test_storage(void **state)
{
    enum { GUARD = 4096 };
    const int32_t sequence = 3, len = 190;
    (void)state;
    FOR_EACH_CACHE(target)
    {
        if (target->info.backend == CLATTN_BACKEND_OPENCL) continue; /* a cl_mem: test_opencl_decode.c */
        clattn_cache_desc desc = small_desc(CLATTN_INT8);
        size_t bytes = bytes_of(target, desc, CLATTN_INT8);
        unsigned char *memory = aligned_alloc(4096, (bytes + 2 * GUARD + 4095) / 4096 * 4096);
        assert_non_null(memory);
        memset(memory, 0xa5, bytes + 2 * GUARD);
        clattn_cache *cache = NULL;
        desc.storage = memory + GUARD;
        desc.storage_bytes = bytes - 1;
        assert_int_equal(clattn_cache_create(target->context, &desc, &cache), CLATTN_INVALID_ARGUMENT);
        desc.storage_bytes = bytes;
        cache = cache_new(target, &desc);
        struct fixture f = small_fixture(CLATTN_FLOAT32, 94);
        check_success(target, decode(target, cache, &f, 0, 1, &sequence, &len, true, NULL), "decode");
        assert_int_equal(describe(target, cache).bytes, bytes);
        for (size_t i = 0; i < GUARD; i++)
            assert_true(memory[i] == 0xa5 && memory[GUARD + bytes + i] == 0xa5);
        clattn_cache_release(target->context, cache);
        free(memory);
        fixture_free(&f);
    }
}

/* ---- int8 ---- */

/* Against the definition over the keys as they were given and the same lists: clattn_quantize(3) has the bound.
 */
static void test_int8(void **state)
{
    const int32_t sequence = 0, len = ROWS;
    (void)state;
    FOR_EACH_CACHE(target)
    {
        struct fixture f = small_fixture(CLATTN_FLOAT32, 95);
        clattn_cache_desc desc = small_desc(CLATTN_INT8);
        clattn_cache *cache = cache_new(target, &desc);
        clattn_blocks *blocks = NULL;
        struct lists lists = {.desc = {.size = sizeof lists.desc}};
        check_success(target, decode(target, cache, &f, 0, 1, &sequence, &len, true, &blocks), "decode");
        check_success(target, clattn_blocks_describe(blocks, &lists.desc), "blocks_describe");
        lists.indices =
            malloc((size_t)(lists.desc.rows * lists.desc.heads * lists.desc.topk) * sizeof(int32_t));
        assert_non_null(lists.indices);
        check_success(target, clattn_blocks_read(target->context, blocks, lists.indices, NULL), "blocks_read");
        struct forward forward = fixture_problem(&f, &lists);
        struct expected expected = expected_forward(&forward);
        double key = 0, value = 0, moved = 0;
        for (int64_t n = 0; n < ROWS * HEADS * DIM; n++) {
            key = fmax(key, fabs(tensor_get(&f.k.view, 0, n / HEADS / DIM, n / DIM % HEADS, n % DIM)));
            value = fmax(value, fabs(tensor_get(&f.v.view, 0, n / HEADS / DIM, n / DIM % HEADS, n % DIM)));
        }
        for (int64_t row = 0; row < ROWS * HEADS * GROUP; row++) {
            double norm = 0;
            int64_t i = row / (HEADS * GROUP), h = row % (HEADS * GROUP);
            for (int d = 0; d < DIM; d++)
                norm += fabs(tensor_get(&f.q.view, 0, i, h, d));
            double e = norm / sqrt(DIM) * key / 127 / 2 + 1e-5,
                   bound = expm1(2 * e) * value + value / 127 / 2 + 1e-5;
            assert_true(fabs(tensor_get(&f.lse.view, 0, i, h, 0) - expected.lse[row]) <= e);
            for (int d = 0; d < DIM; d++) {
                double error = fabs(tensor_get(&f.out.view, 0, i, h, d) - expected.out[row * DIM + d]);
                assert_true(error <= bound);
                moved = fmax(moved, error);
            }
        }
        assert_true(moved > 1e-4); /* it is int8 */
        expected_free(&expected);
        lists_free(&lists);
        clattn_blocks_release(target->context, blocks);
        clattn_cache_release(target->context, cache);
        fixture_free(&f);
    }
}

/* ---- refusals ---- */

static void refused_desc(const struct target *target, clattn_cache_desc desc, clattn_status want)
{
    clattn_cache *cache = NULL;
    size_t bytes = 7;
    assert_int_equal(clattn_cache_create(target->context, &desc, &cache), want);
    assert_null(cache);
    assert_int_equal(clattn_cache_bytes(target->context, &desc, &bytes), want);
    assert_int_equal(bytes, 7);
}

static void test_desc(void **state)
{
    (void)state;
    FOR_EACH_CACHE(target)
    {
        const clattn_cache_desc good = small_desc(CLATTN_FLOAT16);
        clattn_cache_desc desc[14];
        for (int n = 0; n < 14; n++)
            desc[n] = good;
        desc[0].sequences = 0;
        desc[1].tokens = 0;
        desc[2].kv_heads = -1;
        desc[3].dim = 257;
        desc[4].dim_v = 0;
        for (int n = 0; n < 5; n++)
            refused_desc(target, desc[n], CLATTN_INVALID_SHAPE);
        desc[5].dtype = (clattn_dtype)9;
        refused_desc(target, desc[5], CLATTN_INVALID_DTYPE);
        desc[6].leaf = 65;
        desc[7].page_size = 15;
        desc[8].page_size = 257;
        desc[9].pages = 3; /* without page_size */
        desc[10].size = 3;
        for (int n = 6; n < 11; n++)
            refused_desc(target, desc[n], CLATTN_INVALID_ARGUMENT);
        desc[11].tokens = INT64_MAX;
        desc[12].tokens = INT64_C(1) << 34;
        desc[12].sequences = INT32_MAX;
        desc[12].kv_heads = INT32_MAX;
        desc[13].page_size = 16;
        desc[13].pages = INT64_MAX;
        for (int n = 11; n < 14; n++)
            refused_desc(target, desc[n], CLATTN_SIZE_OVERFLOW);
    }
}

/* A batch that is refused changes nothing: a sequence that the message does not name is as it was, too. */
static void test_out_of_pages(void **state)
{
    static const int32_t sequences[3] = {0, 2, 1}, lens[3] = {20, 30, 40}, more[3] = {12, 2, 1},
                         fits[3] = {12, 2, 0};
    (void)state;
    FOR_EACH_CACHE(target)
    {
        clattn_cache_desc desc = small_desc(CLATTN_FLOAT32);
        char text[256];
        desc.page_size = 16;
        desc.pages = 7;
        struct fixture f = small_fixture(CLATTN_FLOAT32, 96), poisoned = small_fixture(CLATTN_FLOAT32, 96);
        clattn_cache *cache = cache_new(target, &desc);
        check_success(target, decode(target, cache, &f, 0, 3, sequences, lens, true, NULL), "decode");
        assert_int_equal(describe(target, cache).pages_free, 0);
        array_poison(&poisoned.out);
        assert_int_equal(decode(target, cache, &poisoned, 0, 3, sequences, more, true, NULL), CLATTN_SUCCESS);
        array_poison(&poisoned.out);
        assert_int_equal(decode(target, cache, &poisoned, 0, 3, sequences, more, true, NULL),
                         CLATTN_OUT_OF_PAGES);
        assert_true(clattn_context_error(target->context, text, sizeof text) > 0 && strstr(text, "sequence 0"));
        assert_true(array_untouched(&poisoned.out));
        assert_int_equal(clattn_cache_length(cache, 0), 32);
        assert_int_equal(clattn_cache_length(cache, 2), 32);
        assert_int_equal(clattn_cache_length(cache, 1), 41);
        check_success(target, clattn_cache_truncate(target->context, cache, 1, 16, NULL), "truncate");
        assert_int_equal(describe(target, cache).pages_free, 2);
        assert_int_equal(decode(target, cache, &f, 0, 3, sequences, fits, true, NULL), CLATTN_SUCCESS);
        check_success(target, clattn_cache_truncate(target->context, cache, 0, 0, NULL), "truncate");
        assert_int_equal(describe(target, cache).pages_free, 3);
        clattn_cache_release(target->context, cache);
        fixture_free(&f);
        fixture_free(&poisoned);
    }
}

/* Without keys in the call nothing is said of keys: a query that does not fit the cache is what is named. */
static void check_queries(const struct target *target, clattn_cache *cache, clattn_tensor q, clattn_tensor out,
                          clattn_status right, const char *named)
{
    static const int32_t sequence = 1, len = 2;
    char error[256] = "";
    clattn_status status = clattn_decode(target->context, cache, NULL, NULL, 1, &sequence, &len, &q, NULL, NULL,
                                         &out, NULL, NULL, NULL);
    clattn_context_error(target->context, error, sizeof error);
    if (status != right || strncmp(error, named, strlen(named)) != 0)
        fail_msg("%s: status %d, '%s'; %d and '%s ...' are right", target->label, status, error, right, named);
}

static void test_queries_alone(void **state)
{
    (void)state;
    FOR_EACH_CACHE(target)
    {
        clattn_cache_desc desc = small_desc(CLATTN_FLOAT32);
        struct fixture f = small_fixture(CLATTN_FLOAT32, 98), half = small_fixture(CLATTN_FLOAT16, 98);
        clattn_cache *cache = cache_new(target, &desc);
        clattn_tensor q = tensor_rows(&f.q.view, 0, 2), h = tensor_rows(&half.q.view, 0, 2), t;
        clattn_tensor out = tensor_rows(&f.out.view, 0, 2);
        array_poison(&f.out);
        check_queries(target, cache, h, out, CLATTN_INVALID_DTYPE, "q.dtype is float16");
        check_queries(target, cache, (t = q, t.dtype = CLATTN_INT8, t), out, CLATTN_INVALID_DTYPE, "q.dtype");
        check_queries(target, cache, (t = q, t.dim--, t), out, CLATTN_INVALID_SHAPE, "q.dim");
        check_queries(target, cache, (t = q, t.batch = 2, t), out, CLATTN_INVALID_SHAPE, "q.batch");
        check_queries(target, cache, (t = q, t.heads--, t), out, CLATTN_INVALID_SHAPE, "q.heads");
        assert_true(array_untouched(&f.out));
        clattn_cache_release(target->context, cache);
        fixture_free(&f);
        fixture_free(&half);
    }
}

static void test_arguments(void **state)
{
    static const int32_t twice[2] = {1, 1}, ones[2] = {1, 1}, minus[2] = {1, -1}, pair[2] = {0, 1},
                         beyond[2] = {0, 4};
    (void)state;
    FOR_EACH_CACHE(target)
    {
        clattn_cache_desc desc = small_desc(CLATTN_FLOAT32);
        struct fixture f = small_fixture(CLATTN_FLOAT32, 97), half = small_fixture(CLATTN_FLOAT16, 97);
        clattn_cache *cache = cache_new(target, &desc);
        clattn_context *context = target->context;
        clattn_blocks *blocks = NULL;
        clattn_tensor q = tensor_rows(&f.q.view, 0, 2), k = tensor_rows(&f.k.view, 0, 2),
                      v = tensor_rows(&f.v.view, 0, 2);
        clattn_tensor out = tensor_rows(&f.out.view, 0, 2), h = tensor_rows(&half.k.view, 0, 2);
        clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
        clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 4, 2 * LEAF);
        array_poison(&f.out);
#define APPEND(S, L, K, V) clattn_cache_append(context, cache, 2, S, L, K, V, NULL)
#define DECODE(A, S, Q, K, V, O, B)                                                                            \
    clattn_decode(context, cache, A, S, 2, pair, ones, Q, K, V, O, NULL, B, NULL)
        assert_int_equal(APPEND(twice, ones, &k, &v), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(APPEND(beyond, ones, &k, &v), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(APPEND(pair, minus, &k, &v), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(APPEND(NULL, ones, &k, &v), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(APPEND(pair, ones, NULL, &v), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(APPEND(pair, ones, &h, &v), CLATTN_INVALID_DTYPE);
        assert_int_equal(APPEND(pair, ones, &k, &q), CLATTN_INVALID_SHAPE);
        assert_int_equal(APPEND(pair, ones, &f.k.view, &v), CLATTN_INVALID_SHAPE);
        assert_int_equal(DECODE(NULL, &select, &q, &k, &v, &out, NULL), CLATTN_INVALID_ARGUMENT);
        select = select_desc(CLATTN_SELECT_ROBUST, 4, LEAF);
        assert_int_equal(DECODE(NULL, &select, &q, &k, &v, &out, NULL), CLATTN_INVALID_ARGUMENT);
        select.selector = CLATTN_SELECT_DENSE;
        assert_int_equal(DECODE(NULL, &select, &q, &k, &v, &out, &blocks), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(DECODE(NULL, NULL, &q, &k, NULL, &out, NULL), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(DECODE(NULL, NULL, NULL, &k, &v, &out, NULL), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(DECODE(NULL, NULL, &q, &k, &v, NULL, NULL), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(DECODE(NULL, NULL, &f.q.view, &k, &v, &out, NULL), CLATTN_INVALID_SHAPE);
        attention.sequences = 2;
        assert_int_equal(DECODE(&attention, NULL, &q, &k, &v, &out, NULL), CLATTN_INVALID_SEQLENS);
        attention = (clattn_attention_desc)CLATTN_ATTENTION_DESC_INIT;
        attention.bias = &f.lse.view;
        assert_int_equal(DECODE(&attention, NULL, &q, &k, &v, &out, NULL), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_cache_truncate(context, cache, 0, 1, NULL), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_cache_truncate(context, cache, -1, 0, NULL), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_cache_share(context, cache, 0, 9, 0, NULL), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_cache_share(context, cache, 0, 1, 1, NULL), CLATTN_INVALID_ARGUMENT);
        assert_int_equal(clattn_cache_length(cache, SEQUENCES), -1);
        assert_true(array_untouched(&f.out) && !blocks);
        for (int32_t s = 0; s < SEQUENCES; s++)
            assert_int_equal(clattn_cache_length(cache, s), 0);
        select = select_desc(CLATTN_SELECT_PISA, 4, LEAF);
        check_success(target, DECODE(NULL, &select, &q, &k, &v, &out, &blocks), "decode");
        clattn_blocks_release(context, blocks);
        clattn_cache_release(context, cache);
        clattn_cache_release(context, NULL);
        fixture_free(&f);
        fixture_free(&half);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ragged),    cmocka_unit_test(test_rows_without_keys),
        cmocka_unit_test(test_work),      cmocka_unit_test(test_memory),
        cmocka_unit_test(test_storage),   cmocka_unit_test(test_int8),
        cmocka_unit_test(test_desc),      cmocka_unit_test(test_out_of_pages),
        cmocka_unit_test(test_arguments), cmocka_unit_test(test_queries_alone),
    };
    return cmocka_run_group_tests(tests, targets_open, targets_close);
}
