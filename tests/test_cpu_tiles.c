/* SPDX-License-Identifier: MIT */
/* Sizes of tiles and packs from the caches, and that results do not depend on them. */

#include "config.h"

#include "cpu.h"
#include "cpu_cases.h"
#include "cpu_tiles.h"

#include "backward.h"

/* ---- sizes ---- */

static void test_tile_rows(void **state)
{
    static const struct {
        int64_t cache_bytes, row_bytes, rows;
        int32_t suited, wanted;
    } cases[] = {
        {0, 1280, 1 << 20, 64, 64},                                                  /* not known */
        {2 << 20, 1280, 1 << 20, 64, 128},                                           /* dim 128, blocks of 64 */
        {2 << 20, 1280, 128 * 256, 64, 128}, {2 << 20, 1280, 128 * 256 - 1, 64, 64}, /* too few rows */
        {512 << 10, 1280, 1 << 20, 64, 128}, {256 << 10, 1280, 1 << 20, 64, 128},
        {128 << 10, 1280, 1 << 20, 64, 64},  {64 << 10, 1280, 1 << 20, 64, 32},
        {16 << 10, 1280, 1 << 20, 64, 32},   {256 << 10, 2304, 1 << 20, 64, 64}, /* dim 256 */
        {128 << 10, 2304, 1 << 20, 64, 32},  {2 << 20, 1280, 1 << 20, 1, 1},     /* the reference */
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(tile_rows_of(cases[i].cache_bytes, cases[i].row_bytes, cases[i].rows, cases[i].suited),
                         cases[i].wanted);
}

static void test_pack_rows(void **state)
{
    (void)state;
    assert_int_equal(pack_rows_of(0, 1792, 163840), PACK_ROWS_MAX);
    assert_int_equal(pack_rows_of(2 << 20, 1792, 163840), PACK_ROWS_MAX); /* dim 128, blocks of 64 */
    assert_int_equal(pack_rows_of(512 << 10, 1792, 163840), PACK_ROWS_MAX);
    assert_int_equal(pack_rows_of(256 << 10, 1792, 163840), PACK_ROWS_MAX / 2);
}

/* Tiles have every row once, in order, and none so few that kernels would treat them in another way. */
static void check_cut(int64_t q_len, int32_t heads, int64_t cache_bytes)
{
    struct sequence sequence = {.q_len = q_len, .kv_len = 100};
    struct problem problem = {.q_heads = heads,
                              .kv_heads = 1,
                              .group = heads,
                              .dim = 128,
                              .dim_v = 128,
                              .count = 1,
                              .q_block = 1,
                              .q_len_max = q_len,
                              .kv_len_max = 100,
                              .sequences = &sequence};
    struct cpu_state cpu = {.kernels = {.forward_rows = 64, .union_rows = 16},
                            .machine = {.cache_bytes = cache_bytes}};
    struct tiling tiling = tiling_of(&cpu, &problem, NULL);
    int64_t next = 0;
    for (int64_t n = 0; n < tiling_tiles(&tiling, &problem, NULL, 0); n++) {
        struct forward_tile tile;
        if (!tile_of(&problem, NULL, &tiling, 0, n, &tile)) continue;
        assert_int_equal(tile.row, next);
        assert_true(tile.rows > 0 && tile.rows <= tiling.rows_most);
        assert_true(tile.rows * heads > 4 || tile.rows == q_len);
        next = tile.row + tile.rows;
    }
    assert_int_equal(next, q_len);
}

static void test_cut(void **state)
{
    (void)state;
    for (int64_t q_len = 1; q_len < 300; q_len++)
        for (int32_t heads = 1; heads <= 5; heads++)
            for (int64_t cache = 0; cache <= 1 << 20; cache = cache ? 4 * cache : 1 << 16)
                check_cut(q_len, heads, cache);
    check_cut(128 * 256 + 3, 1, 1 << 20); /* large tiles */
}

/* ---- results ---- */

#ifdef HAVE_HWLOC

struct shape {
    int q_len, kv_len, group, dim, q_block; /* q_block 0: all keys */
    clattn_dtype dtype;
    int64_t window;
};

struct results {
    clattn_tensor out, lse, dq, dk, dv;
};

static struct results run(const char *variant, const char *topology, const struct shape *s,
                          const clattn_tensor *in)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_blocks_desc lists = CLATTN_BLOCKS_DESC_INIT;
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    clattn_context *context;
    clattn_blocks *blocks = NULL;
    int32_t indices[64 * 4];
    struct results r = {tensor_make(0, s->dtype, 1, s->q_len, s->group, s->dim),
                        tensor_make(0, CLATTN_FLOAT32, 1, s->q_len, s->group, 1),
                        tensor_make(0, CLATTN_FLOAT32, 1, s->q_len, s->group, s->dim),
                        tensor_make(0, CLATTN_FLOAT32, 1, s->kv_len, 1, s->dim),
                        tensor_make(0, CLATTN_FLOAT32, 1, s->kv_len, 1, s->dim)};
    desc.backend = CLATTN_BACKEND_CPU;
    desc.variant = variant;
    desc.threads = 2;
    attention.window = s->window;
    setenv("HWLOC_SYNTHETIC", topology, 1);
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
    unsetenv("HWLOC_SYNTHETIC");
    if (s->q_block) {
        lists.q_block = s->q_block;
        lists.rows = ceil_div(s->q_len, s->q_block);
        lists.topk = 4;
        assert_true(lists.rows * 4 <= 64 * 4);
        for (int64_t n = 0; n < lists.rows * 4; n++)
            indices[n] = (int32_t)(n * 7 % ceil_div(s->kv_len, lists.block));
        assert_int_equal(clattn_blocks_create(context, &lists, indices, &blocks), CLATTN_SUCCESS);
    }
    assert_int_equal(
        clattn_attention_forward(context, &attention, &in[0], &in[1], &in[2], blocks, &r.out, &r.lse, NULL),
        CLATTN_SUCCESS);
    gradients.dout = &in[0];
    gradients.dq = &r.dq;
    gradients.dk = &r.dk;
    gradients.dv = &r.dv;
    assert_int_equal(clattn_attention_backward(context, &attention, &in[0], &in[1], &in[2], blocks, &r.out,
                                               &r.lse, &gradients, NULL),
                     CLATTN_SUCCESS);
    clattn_blocks_release(context, blocks);
    clattn_context_release(context);
    return r;
}

static void results_free(struct results *r)
{
    tensor_free(&r->out);
    tensor_free(&r->lse);
    tensor_free(&r->dq);
    tensor_free(&r->dk);
    tensor_free(&r->dv);
}

static void check_bits(const char *what, const char *variant, const clattn_tensor *a, const clattn_tensor *b)
{
    size_t bytes = (size_t)(a->batch * a->batch_stride) * dtype_bytes(a->dtype);
    if (memcmp(a->data, b->data, bytes)) fail_msg("%s: %s depends on the caches", variant, what);
}

static void check_shape(const struct shape *s)
{
    static const char *const topologies[] = {"l2:2(size=2097152) core:1 pu:1", "l2:2(size=131072) core:1 pu:1",
                                             "l2:2(size=32768) core:1 pu:1", "core:2 pu:1"};
    clattn_tensor in[] = {tensor_make(0, s->dtype, 1, s->q_len, s->group, s->dim),
                          tensor_make(0, s->dtype, 1, s->kv_len, 1, s->dim),
                          tensor_make(0, s->dtype, 1, s->kv_len, 1, s->dim)};
    for (int n = 0; n < 3; n++)
        tensor_fill(&in[n], 1);
    for (int n = 0; n < variant_count; n++) {
        struct results first = run(variants[n].name, topologies[0], s, in);
        for (size_t t = 1; t < sizeof topologies / sizeof *topologies; t++) {
            struct results other = run(variants[n].name, topologies[t], s, in);
            check_bits("out", variants[n].name, &first.out, &other.out);
            check_bits("lse", variants[n].name, &first.lse, &other.lse);
            check_bits("dq", variants[n].name, &first.dq, &other.dq);
            check_bits("dk", variants[n].name, &first.dk, &other.dk);
            check_bits("dv", variants[n].name, &first.dv, &other.dv);
            results_free(&other);
        }
        results_free(&first);
    }
    for (int n = 0; n < 3; n++)
        tensor_free(&in[n]);
}

/* The last tile of 64 rows would have 1 to 4, 16 or 33 rows; the first shape has large tiles, too. */
static void test_results(void **state)
{
    static const struct shape shapes[] = {
        {2050, 130, 16, 16, 0, CLATTN_FLOAT32, 0},   {130, 200, 1, 64, 0, CLATTN_FLOAT32, 0},
        {67, 67, 1, 128, 0, CLATTN_FLOAT32, 20},     {80, 150, 1, 64, 0, CLATTN_FLOAT16, 0},
        {97, 97, 1, 128, 0, CLATTN_BFLOAT16, 0},     {129, 129, 1, 32, 129, CLATTN_FLOAT32, 0},
        {256, 300, 3, 96, 128, CLATTN_FLOAT16, 100}, {50, 400, 5, 128, 1, CLATTN_FLOAT32, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_shape(&shapes[i]);
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tile_rows),
        cmocka_unit_test(test_pack_rows),
        cmocka_unit_test(test_cut),
#ifdef HAVE_HWLOC
        cmocka_unit_test(test_results),
#endif
    };
    random_seed();
    contexts_open();
    int failed = cmocka_run_group_tests_name("cpu_tiles", tests, NULL, NULL);
    contexts_close();
    return failed;
}
