/* SPDX-License-Identifier: MIT */
/* Cases that users of other attention libraries met, and the shapes that those libraries test with. */

#include "fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define F32 CLATTN_FLOAT32
#define F16 CLATTN_FLOAT16
#define BF16 CLATTN_BFLOAT16

/* Selects with every target, compares the lists, and then attends over the oracle-checked lists. */
static void check_select_and_attend(enum test_size size, struct fixture *f, const clattn_select_desc *select)
{
    fixture_check_select(size, f, select);
    struct lists lists = fixture_select(&targets[0], f, select, NULL);
    fixture_check_all(size, f, &lists);
    lists_free(&lists);
}

/* ---- lengths ---- */

/* N = 1 .. 63 and others that nothing divides, with K = 16 leaves of 16; every row is finite, all are compared.
 */
static void test_lengths(void **state)
{
    static const int others[] = {65, 100, 507, 781, 1025, 4095};
    (void)state;
    for (int n = 1; n <= 63 + COUNT(others); n++) {
        int64_t len = n <= 63 ? n : others[n - 64];
        struct shape shape = {"lengths", SIZE_CPU, 1,   len < 130 ? len : 130, len,  1, 2,
                              64,        64,       F32, LAYOUT_BTHD,           false};
        struct random random = random_seeded((uint64_t)n);
        struct fixture f = fixture_new(&shape, &random);
        clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 16, 16);
        bool device = len == 1 || len == 17 || len == 63 || len > 1000;
        check_select_and_attend(device ? SIZE_NORMAL : SIZE_CPU, &f, &select);
        fixture_free(&f);
    }
    target_report("lengths");
}

/* All blocks listed at 4095 keys equals dense attention: both are compared with the definition. */
static void test_all_blocks_4095(void **state)
{
    (void)state;
    struct shape shape = {"all blocks of 4095", SIZE_NORMAL, 1, 5, 4095, 1, 4, 64, 64, F32, LAYOUT_BTHD, false};
    struct random random = random_seeded(100);
    struct fixture f = fixture_new(&shape, &random);
    struct spans spans = fixture_spans(&f, 1);
    struct lists lists = lists_all(&spans, 64, 1);
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 64, 64);
    fixture_check_all(SIZE_NORMAL, &f, &lists);
    fixture_check_all(SIZE_NORMAL, &f, NULL);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_CPU)) continue;
        struct lists chosen = fixture_select(target, &f, &select, NULL);
        assert_memory_equal(chosen.indices, lists.indices, 5 * 64 * sizeof(int32_t));
        lists_free(&chosen);
    }
    lists_free(&lists);
    fixture_free(&f);
    target_report("all blocks of 4095");
}

/* A batch without queries, and one without keys: contiguous memory without rows, whose entries all lie at its
 * begin. */
static void check_nothing(const struct target *target, int64_t q_len, int64_t kv_len)
{
    enum { BATCH = 3, LEN = 5, HEADS = 2, DIM = 16, ELEMENTS = BATCH * LEN * HEADS * DIM };
    clattn_context *context = target->context;
    float in[ELEMENTS], results[5][ELEMENTS];
    for (int i = 0; i < ELEMENTS; i++)
        in[i] = (float)(i % 7) - 3;
    memset(results, 0xff, sizeof results); /* NaN */
    clattn_tensor q = clattn_tensor_bthd(in, F32, BATCH, q_len, HEADS, DIM), out = q, dq = q;
    clattn_tensor k = clattn_tensor_bthd(in, F32, BATCH, kv_len, HEADS, DIM), dk = k, dv = k;
    clattn_tensor lse = clattn_tensor_bthd(results[1], F32, BATCH, q_len, HEADS, 1);
    out.data = results[0], dq.data = results[2], dk.data = results[3], dv.data = results[4];
    check_success(target, clattn_attention(context, NULL, NULL, &q, &k, &k, &out, &lse, NULL),
                  "clattn_attention");
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    gradients.dout = &q, gradients.dq = &dq, gradients.dk = &dk, gradients.dv = &dv;
    check_success(target,
                  clattn_attention_backward(context, NULL, &q, &k, &k, NULL, &out, &lse, &gradients, NULL),
                  "clattn_attention_backward");
    const int64_t q_elements = BATCH * q_len * HEADS * DIM, k_elements = BATCH * kv_len * HEADS * DIM;
    const int64_t written[] = {q_elements, q_elements / DIM, q_elements, k_elements, k_elements};
    for (int n = 0; n < 5; n++)
        for (int64_t i = 0; i < ELEMENTS; i++)
            if (i >= written[n])
                assert_true(isnan(results[n][i]));
            else
                assert_true(results[n][i] == (n == 1 ? -INFINITY : 0));
}

static void test_no_rows(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, SIZE_TINY)) continue;
        check_nothing(target, 0, 0);
        check_nothing(target, 0, 5);
        check_nothing(target, 5, 0);
    }
    target_report("no rows");
}

/* ---- groups and dims ---- */

static void test_groups_and_dims(void **state)
{
    static const int groups[] = {1, 2, 3, 4, 5, 7, 12, 16},
                     dims[] = {16, 60, 64, 80, 96, 100, 120, 128, 192, 256};
    static const clattn_dtype dtypes[] = {F32, F16, BF16};
    (void)state;
    for (int n = 0; n < COUNT(groups) * COUNT(dims); n++) {
        int group = groups[n / COUNT(dims)], dim = dims[n % COUNT(dims)],
            dim_v = n % 3 ? dim : dims[(n + 3) % COUNT(dims)];
        struct shape shape = {"groups and dims", SIZE_CPU,    1,    6, 170, 1 + n % 2, group, dim, dim_v,
                              dtypes[n % 3],     LAYOUT_BTHD, false};
        struct random random = random_seeded(200 + (uint64_t)n);
        struct fixture f = fixture_new(&shape, &random);
        clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 4, 16);
        char name[64];
        snprintf(name, sizeof name, "group %d, dim %d, dim_v %d, %s", group, dim, dim_v,
                 dtype_text(shape.dtype));
        f.name = name;
        /* each group and dim once on OpenCL would be 80 compilations: the diagonal */
        check_select_and_attend(n % (COUNT(dims) + 1) == 0 ? SIZE_NORMAL : SIZE_CPU, &f, &select);
        fixture_free(&f);
    }
    target_report("groups and dims");
}

/* ---- variable length ---- */

static void check_packed(enum test_size size, const struct shape *shape, int64_t sequences, const int32_t *cu_q,
                         const int32_t *cu_k, int32_t topk, int32_t leaf)
{
    struct random random = random_seeded(300 + (uint64_t)cu_q[1]);
    struct fixture f = fixture_new(shape, &random);
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, topk, leaf);
    fixture_packed(&f, sequences, cu_q, cu_k);
    check_select_and_attend(size, &f, &select);
    fixture_check_all(size, &f, NULL);
    fixture_free(&f);
}

static void test_packed(void **state)
{
    static const int32_t cu_q1[] = {0, 76, 110, 256}, cu_k1[] = {0, 1, 2, 3};
    static const int32_t cu2[] = {0, 0, 0, 0, 1}, cu3[] = {0, 15, 205, 550, 800},
                         cu4[] = {0, 0, 64, 64, 65, 65, 200, 200};
    static const int32_t cu_q5[] = {0, 20, 60, 100}, cu_k5[] = {0, 1000, 3000, 7096};
    (void)state;
    struct shape s1 = {"more queries than keys", SIZE_NORMAL, 1, 256, 3, 2, 4, 64, 64, F32, LAYOUT_BTHD, false};
    struct shape s2 = {"one token", SIZE_CPU, 1, 1, 1, 7, 3, 120, 120, F16, LAYOUT_BTHD, false};
    struct shape s3 = {"packed", SIZE_NORMAL, 1, 800, 800, 2, 4, 64, 64, F32, LAYOUT_PADDED, false};
    struct shape s4 = {"empty sequences", SIZE_NORMAL, 1, 200, 200, 2, 4, 64, 64, F32, LAYOUT_BTHD, true};
    struct shape s5 = {"64 heads on 8, dim 96", SIZE_CPU, 1, 100, 7096, 8, 8, 96, 96, F16, LAYOUT_BTHD, false};
    check_packed(SIZE_NORMAL, &s1, 3, cu_q1, cu_k1, 8, 64);
    check_packed(SIZE_CPU, &s2, 4, cu2, cu2, 16, 32);
    check_packed(SIZE_NORMAL, &s3, 4, cu3, cu3, 5, 64);
    check_packed(SIZE_NORMAL, &s4, 7, cu4, cu4, 3, 16);
    struct random random = random_seeded(310);
    struct fixture f = fixture_new(&s5, &random);
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 5, 64);
    fixture_packed(&f, 3, cu_q5, cu_k5);
    check_select_and_attend(SIZE_CPU, &f, &select);
    fixture_free(&f);
    target_report("packed");
}

/* ---- selection ---- */

/* K = 1: the current leaf only. K above the number of leaves: all of them, and -1 on the right. */
static void test_extreme_topk(void **state)
{
    (void)state;
    struct shape shape = {"extreme K", SIZE_NORMAL, 1, 4, 300, 1, 4, 64, 64, F32, LAYOUT_BTHD, false};
    struct random random = random_seeded(400);
    struct fixture f = fixture_new(&shape, &random);
    for (int selector = 0; selector < 5; selector++) {
        clattn_select_desc one = select_desc(selector, 1, 64), many = select_desc(selector, 16, 64);
        FOR_EACH_TARGET (target) {
            if (!target_runs(target, selector == 0 ? SIZE_NORMAL : SIZE_CPU)) continue;
            struct lists lists = fixture_select(target, &f, &one, NULL);
            lists_expect(&lists, 2, 0, (int32_t[]){4}, target->label, "K = 1");
            lists_free(&lists);
            lists = fixture_select(target, &f, &many, NULL);
            lists_expect(&lists, 2, 0, (int32_t[]){0, 1, 2, 3, 4, -1}, target->label, "K = 16 of 5 leaves");
            lists_free(&lists);
        }
    }
    fixture_free(&f);
    target_report("extreme K");
}

/* Each level has one node that attracts the query, down to leaf `leaf`: as a walk that expands only the kept
 * nodes must, it ends there, from 1024 leaves with K = 4. Another leaf with the best exact score, whose
 * parents' means cancel, is what only flat scoring finds: a walk that found it would have looked at every leaf.
 */
static void test_walk(void **state)
{
    (void)state;
    struct shape shape = {"walk", SIZE_NORMAL, 1, 1, 16384, 1, 4, 64, 64, F32, LAYOUT_BTHD, true};
    struct random random = random_seeded(500);
    struct fixture f = fixture_new(&shape, &random);
    array_fill_constant(&f.q, 0);
    array_fill_constant(&f.k, 0);
    for (int64_t h = 0; h < 4; h++)
        tensor_set(&f.q.view, 0, 0, h, 3, 8);
    const int64_t leaf = 421, hidden = 700;
    for (int64_t j = 0; j < 16; j++) {
        tensor_set(&f.k.view, 0, leaf * 16 + j, 0, 3, 16);
        tensor_set(&f.k.view, 0, hidden * 16 + j, 0, 3, j ? -40 : 24); /* one strong key among opposite ones */
    }
    for (int selector = CLATTN_SELECT_PISA; selector <= CLATTN_SELECT_FLAT_LSE; selector++) {
        clattn_select_desc select = select_desc(selector, 4, 16);
        if (selector == CLATTN_SELECT_PISA2) continue; /* the variance finds it */
        FOR_EACH_TARGET (target) {
            if (!target_runs(target, selector == 0 ? SIZE_NORMAL : SIZE_CPU)) continue;
            struct lists lists = fixture_select(target, &f, &select, NULL);
            bool has_leaf = false, has_hidden = false;
            for (int n = 0; n < 4; n++) {
                has_leaf = has_leaf || lists.indices[n] == leaf;
                has_hidden = has_hidden || lists.indices[n] == hidden;
            }
            if (!has_leaf) fail_msg("%s: %s misses leaf 421", target->label, selector_name(selector));
            if (has_hidden != (selector == CLATTN_SELECT_FLAT_LSE))
                fail_msg("%s: %s and leaf 700: %d", target->label, selector_name(selector), has_hidden);
            lists_free(&lists);
        }
    }
    fixture_free(&f);
    target_report("walk");
}

/* ---- shapes of peers ---- */

static const struct {
    struct shape shape;
    int32_t topk, leaf;
} peers[] = {
    {{"1 63 1 16 64", SIZE_NORMAL, 1, 63, 63, 1, 16, 64, 64, F16, LAYOUT_BTHD, false}, 16, 32},
    {{"3 111 1 32 100", SIZE_CPU, 3, 111, 111, 1, 32, 100, 100, BF16, LAYOUT_BTHD, false}, 16, 32},
    {{"3 1024 2 32 60", SIZE_CPU, 3, 25, 1024, 2, 16, 60, 60, F32, LAYOUT_BTHD, false}, 16, 32},
    {{"3 1024 2 32 128", SIZE_CPU, 3, 25, 1024, 2, 16, 128, 128, F16, LAYOUT_BHTD, false}, 16, 32},
    {{"4 2048 2 32 64", SIZE_NORMAL, 4, 15, 2048, 2, 16, 64, 64, F16, LAYOUT_BTHD, false}, 16, 32},
};

static void test_peer_shapes(void **state)
{
    (void)state;
    for (int n = 0; n < COUNT(peers); n++) {
        struct random random = random_seeded(600 + (uint64_t)n);
        struct fixture f = fixture_new(&peers[n].shape, &random);
        clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, peers[n].topk, peers[n].leaf);
        check_select_and_attend(peers[n].shape.size, &f, &select);
        fixture_free(&f);
    }
    target_report("shapes of peers");
}

/* Static masks: a share `sparsity` of the blocks is left out, for each query block of 64 and head of its own.
 * The query lengths are cut to their last rows where that saves time; the positions stay. */
static void test_static_masks(void **state)
{
    static const int64_t lengths[][2] = {{113, 203}, {128, 217}, {113, 211},   {108, 256},
                                         {256, 512}, {512, 256}, {1023, 1024}, {1024, 1023}};
    static const double sparsity[] = {0, .1, .3, .7, 1};
    (void)state;
    for (int n = 0; n < COUNT(lengths) * COUNT(sparsity) * 2; n++) {
        const int64_t *len = lengths[n / 2 / COUNT(sparsity)];
        double share = sparsity[n / 2 % COUNT(sparsity)];
        struct shape shape = {"static mask",     SIZE_CPU,    1,    len[0], len[1], 1, 2, 32, 32,
                              n % 3 ? F32 : F16, LAYOUT_BTHD, n % 2};
        struct random random = random_seeded(700 + (uint64_t)n);
        struct fixture f = fixture_new(&shape, &random);
        struct spans spans = fixture_spans(&f, 64);
        int32_t blocks = (int32_t)((len[1] + 63) / 64);
        struct lists lists = lists_random(&random, &spans, 64, 64, 2, blocks, 0);
        char name[96];
        snprintf(name, sizeof name, "%lld queries, %lld keys, sparsity %g, %s", (long long)len[0],
                 (long long)len[1], share, shape.all_keys ? "all keys" : "causal");
        f.name = name;
        for (int64_t m = 0; m < lists.desc.rows * 2 * blocks; m++)
            if (random_uniform(&random) >= share) lists.indices[m] = (int32_t)(m % blocks);
        fixture_check_all(n < 10 ? SIZE_NORMAL : SIZE_CPU, &f, &lists);
        lists_free(&lists);
        fixture_free(&f);
    }
    target_report("static masks");
}

/* ---- addresses ---- */

/* Offsets beyond 2^31 and 2^32 elements: a view whose strides reach there and back to the few elements that
 * exist, so that 32-bit arithmetic would read elsewhere. The keys' data pointer lies before the array by the
 * offset. */
static void test_large_offsets(void **state)
{
    (void)state;
    struct random random = random_seeded(800);
    struct shape shape = {"large offsets", SIZE_CPU, 1, 3, 40, 1, 2, 64, 64, F32, LAYOUT_BTHD, false};
    struct fixture f = fixture_new(&shape, &random), g = f;
    const int64_t far = (INT64_C(1) << 32) + (INT64_C(1) << 31) + 5;
    clattn_tensor *views[] = {&g.q.view, &g.k.view, &g.v.view};
    for (int n = 0; n < 3; n++) {
        views[n]->data = (void *)((uintptr_t)views[n]->data - (uintptr_t)far * sizeof(float));
        views[n]->offset += far;
    }
    struct forward problem = fixture_problem(&f, NULL);
    struct expected expected = expected_forward(&problem);
    FOR_EACH_TARGET (target)
        if (target_runs(target, SIZE_CPU)) {
            fixture_forward(target, &g, NULL);
            expected_compare(&expected, &problem, &g.out.view, &g.lse.view, target->label, f.name);
        }
    expected_free(&expected);
    fixture_free(&f);
    target_report("large offsets");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lengths),         cmocka_unit_test(test_all_blocks_4095),
        cmocka_unit_test(test_groups_and_dims), cmocka_unit_test(test_packed),
        cmocka_unit_test(test_extreme_topk),    cmocka_unit_test(test_walk),
        cmocka_unit_test(test_peer_shapes),     cmocka_unit_test(test_static_masks),
        cmocka_unit_test(test_large_offsets),   cmocka_unit_test(test_no_rows),
    };
    return cmocka_run_group_tests_name("cases", tests, targets_open, targets_close);
}
