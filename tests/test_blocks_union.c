/* SPDX-License-Identifier: MIT */
/* Unions of block lists: against sets of blocks, for all granularities and head counts; with a selection. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clattn.h"

enum { BLOCKS = 40, Q_HEADS = 6, KV_HEADS = 2 };

static uint32_t state_of_random = 1;

static uint32_t below(uint32_t n)
{
    state_of_random = state_of_random * 1664525 + 1013904223;
    return (state_of_random >> 8) % n;
}

static const int32_t cu[] = {0, 65, 65, 66, 130, 137};

/* Sequences of the test: batch x q_len, or packed. */
struct sequences {
    int64_t batch, q_len, packed;
};

static int64_t sequence_count(const struct sequences *s)
{
    return s->packed ? s->packed : s->batch;
}

static int64_t sequence_len(const struct sequences *s, int64_t n)
{
    return s->packed ? cu[n + 1] - cu[n] : s->q_len;
}

/* First list row of sequence n. */
static int64_t row_of(const struct sequences *s, int64_t n, int32_t q_block)
{
    int64_t row = 0;
    for (int64_t i = 0; i < n; i++)
        row += (sequence_len(s, i) + q_block - 1) / q_block;
    return row;
}

struct lists {
    clattn_blocks *blocks;
    clattn_blocks_desc desc;
    int32_t *indices, *counts;
};

static void lists_read(clattn_context *context, struct lists *lists)
{
    lists->desc.size = sizeof lists->desc;
    assert_int_equal(clattn_blocks_describe(lists->blocks, &lists->desc), CLATTN_SUCCESS);
    size_t count = (size_t)(lists->desc.rows * lists->desc.heads);
    lists->indices = malloc((count * (size_t)lists->desc.topk + 1) * sizeof *lists->indices);
    lists->counts = malloc((count + 1) * sizeof *lists->counts);
    assert_non_null(lists->indices);
    assert_non_null(lists->counts);
    assert_int_equal(clattn_blocks_read(context, lists->blocks, lists->indices, lists->counts), CLATTN_SUCCESS);
}

static void lists_free(clattn_context *context, struct lists *lists)
{
    clattn_blocks_release(context, lists->blocks);
    free(lists->indices);
    free(lists->counts);
}

static struct lists lists_random(clattn_context *context, const struct sequences *s, int32_t q_block,
                                 int32_t heads, int32_t topk)
{
    struct lists lists = {.desc = CLATTN_BLOCKS_DESC_INIT};
    lists.desc.block = 16;
    lists.desc.q_block = q_block;
    lists.desc.rows = row_of(s, sequence_count(s), q_block);
    lists.desc.heads = heads;
    lists.desc.topk = topk;
    size_t entries = (size_t)(lists.desc.rows * heads * topk);
    int32_t *indices = malloc((entries + 1) * sizeof *indices);
    assert_non_null(indices);
    for (size_t i = 0; i < entries; i++)
        indices[i] = below(3) ? (int32_t)below(BLOCKS) : -1;
    assert_int_equal(clattn_blocks_create(context, &lists.desc, indices, &lists.blocks), CLATTN_SUCCESS);
    free(indices);
    lists_read(context, &lists);
    return lists;
}

/* Does query row i of sequence n list block b for head h of `heads`? */
static bool has(const struct sequences *s, const struct lists *lists, int64_t n, int64_t i, int32_t h,
                int32_t heads, int32_t b)
{
    int64_t row = row_of(s, n, lists->desc.q_block) + i / lists->desc.q_block;
    int64_t list = row * lists->desc.heads + h / (heads / lists->desc.heads);
    for (int32_t k = 0; k < lists->counts[list]; k++)
        if (lists->indices[list * lists->desc.topk + k] == b) return true;
    return false;
}

static void check_union(const struct sequences *s, const struct lists *a, const struct lists *b,
                        const struct lists *u)
{
    int32_t longest = 1;
    int64_t lists = u->desc.rows * u->desc.heads;
    for (int64_t i = 0; i < lists; i++) {
        if (u->counts[i] > longest) longest = u->counts[i];
        for (int32_t k = 0; k < u->desc.topk; k++) {
            int32_t entry = u->indices[i * u->desc.topk + k],
                    before = k ? u->indices[i * u->desc.topk + k - 1] : -1;
            assert_true(k < u->counts[i] ? entry > before : entry == -1);
        }
    }
    assert_int_equal(u->desc.topk, longest);
    for (int64_t n = 0; n < sequence_count(s); n++)
        for (int64_t i = 0; i < sequence_len(s, n); i++)
            for (int32_t h = 0; h < Q_HEADS; h++)
                for (int32_t block = 0; block < BLOCKS; block++)
                    assert_int_equal(has(s, u, n, i, h, Q_HEADS, block),
                                     has(s, a, n, i, h, Q_HEADS, block) || has(s, b, n, i, h, Q_HEADS, block));
}

static void test_random_lists(void **state)
{
    static const int32_t q_blocks[][3] = {{1, 1, 1}, {1, 64, 1},   {16, 48, 16},
                                          {6, 4, 2}, {32, 32, 32}, {5, 3, 1}};
    static const int32_t heads[][3] = {{1, 1, 1}, {1, 6, 6}, {2, 6, 6}, {2, 1, 2}, {6, 6, 6}};
    static const struct sequences sequences[] = {{1, 130, 0}, {3, 33, 0}, {0, 0, 5}, {1, 0, 0}};
    for (int s = 0; s < 4; s++)
        for (int q = 0; q < 6; q++)
            for (int h = 0; h < 5; h++) {
                clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
                if (sequences[s].packed)
                    attention.sequences = 5, attention.cu_seqlens_q = attention.cu_seqlens_k = cu;
                struct lists a = lists_random(*state, &sequences[s], q_blocks[q][0], heads[h][0], 3), u = {0};
                struct lists b = lists_random(*state, &sequences[s], q_blocks[q][1], heads[h][1], 5);
                bool swapped = (q + h) % 2;
                assert_int_equal(clattn_blocks_union(*state, &attention, sequences[s].batch, sequences[s].q_len,
                                                     swapped ? b.blocks : a.blocks,
                                                     swapped ? a.blocks : b.blocks, &u.blocks),
                                 CLATTN_SUCCESS);
                lists_read(*state, &u);
                assert_int_equal(u.desc.block, 16);
                assert_int_equal(u.desc.q_block, q_blocks[q][2]);
                assert_int_equal(u.desc.heads, heads[h][2]);
                check_union(&sequences[s], &a, &b, &u);
                lists_free(*state, &a);
                lists_free(*state, &b);
                lists_free(*state, &u);
            }
}

/* A static pattern with a selection: both are in the union, and attention over it is attention over a list that
 * a caller makes of the two. */
static void test_with_selection(void **state)
{
    enum { LEN = 333, DIM = 16 };
    static const struct sequences sequences = {1, LEN, 0};
    float *data[4];
    for (int i = 0; i < 4; i++) {
        data[i] = malloc(LEN * Q_HEADS * DIM * sizeof(float));
        assert_non_null(data[i]);
        for (int n = 0; n < LEN * Q_HEADS * DIM; n++)
            data[i][n] = (float)below(2000) / 500 - 2;
    }
    clattn_tensor q = clattn_tensor_bthd(data[0], CLATTN_FLOAT32, 1, LEN, Q_HEADS, DIM), out = q, other = q;
    clattn_tensor k = clattn_tensor_bthd(data[1], CLATTN_FLOAT32, 1, LEN, KV_HEADS, DIM), v = k;
    float *again = malloc(LEN * Q_HEADS * DIM * sizeof(float));
    assert_non_null(again);
    v.data = data[2];
    out.data = data[3];
    other.data = again;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_pattern_shape shape = CLATTN_PATTERN_SHAPE_INIT;
    clattn_pattern *pattern = NULL;
    struct lists selected = {0}, listed = {0}, u = {0};
    clattn_blocks *copy = NULL;
    select.leaf = shape.block = shape.q_block = 16;
    select.topk = 3;
    shape.q_len = shape.kv_len = LEN;
    shape.heads = Q_HEADS;
    assert_int_equal(clattn_pattern_parse("log-stride;2=anchors:first,middle", &pattern, NULL, 0),
                     CLATTN_SUCCESS);
    assert_int_equal(clattn_select(*state, NULL, &select, &q, &k, NULL, &selected.blocks, NULL),
                     CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_blocks(*state, pattern, NULL, &shape, &listed.blocks), CLATTN_SUCCESS);
    assert_int_equal(clattn_blocks_union(*state, NULL, 1, LEN, selected.blocks, listed.blocks, &u.blocks),
                     CLATTN_SUCCESS);
    lists_read(*state, &selected);
    lists_read(*state, &listed);
    lists_read(*state, &u);
    assert_int_equal(u.desc.q_block, 1);
    assert_int_equal(u.desc.heads, Q_HEADS);
    check_union(&sequences, &selected, &listed, &u);
    assert_int_equal(clattn_blocks_create(*state, &u.desc, u.indices, &copy), CLATTN_SUCCESS);
    assert_int_equal(clattn_attention_forward(*state, NULL, &q, &k, &v, u.blocks, &out, NULL, NULL),
                     CLATTN_SUCCESS);
    assert_int_equal(clattn_attention_forward(*state, NULL, &q, &k, &v, copy, &other, NULL, NULL),
                     CLATTN_SUCCESS);
    assert_memory_equal(out.data, other.data, LEN * Q_HEADS * DIM * sizeof(float));
    clattn_blocks_release(*state, copy);
    lists_free(*state, &selected);
    lists_free(*state, &listed);
    lists_free(*state, &u);
    clattn_pattern_release(pattern);
    for (int i = 0; i < 4; i++)
        free(data[i]);
    free(again);
}

static void test_refused(void **state)
{
    static const struct sequences sequences = {1, 100, 0}, longer = {1, 170, 0};
    static const int64_t starts[] = {0, 16, 32};
    const clattn_attention_desc plain = CLATTN_ATTENTION_DESC_INIT;
    clattn_attention_desc packed = plain, lost = plain;
    clattn_blocks *untouched = (clattn_blocks *)&packed, *result = untouched;
    struct lists a = lists_random(*state, &sequences, 16, 2, 3), b = lists_random(*state, &sequences, 16, 3, 3);
    struct lists c = lists_random(*state, &longer, 16, 2, 3);
    clattn_blocks *other_block = NULL, *with_starts = NULL;
    clattn_blocks_desc desc = a.desc;
    packed.sequences = 5;
    packed.cu_seqlens_q = packed.cu_seqlens_k = cu;
    lost.sequences = 5;
    desc.block = 32;
    assert_int_equal(clattn_blocks_create(*state, &desc, a.indices, &other_block), CLATTN_SUCCESS);
    desc.starts = starts;
    desc.start_count = 3;
    assert_int_equal(clattn_blocks_create(*state, &desc, a.indices, &with_starts), CLATTN_SUCCESS);
    const struct {
        const clattn_attention_desc *attention;
        int64_t batch, q_len;
        const clattn_blocks *a, *b;
        clattn_status status;
    } calls[] = {
        {&plain, 1, 100, a.blocks, b.blocks, CLATTN_INVALID_BLOCKS},    /* 2 and 3 heads */
        {&plain, 1, 100, a.blocks, c.blocks, CLATTN_INVALID_BLOCKS},    /* rows */
        {&plain, 1, 101, a.blocks, a.blocks, CLATTN_SUCCESS},           /* as many rows */
        {&plain, 1, 170, a.blocks, a.blocks, CLATTN_INVALID_BLOCKS},    /* too few for these sequences */
        {&plain, 1, 50, a.blocks, a.blocks, CLATTN_INVALID_BLOCKS},     /* too many */
        {&packed, 1, 100, a.blocks, a.blocks, CLATTN_INVALID_BLOCKS},   /* other sequences */
        {&lost, 1, 100, a.blocks, a.blocks, CLATTN_INVALID_SEQLENS},    /* no cu_seqlens_q */
        {&plain, 0, 100, a.blocks, a.blocks, CLATTN_INVALID_SHAPE},     /* no batch */
        {&plain, 1, 100, a.blocks, other_block, CLATTN_INVALID_BLOCKS}, /* 16 and 32 keys */
        {&plain, 1, 100, a.blocks, with_starts, CLATTN_INVALID_BLOCKS}, /* starts with none */
        {&plain, 1, 100, with_starts, with_starts, CLATTN_SUCCESS},     /* the same starts */
        {&plain, 1, 100, a.blocks, NULL, CLATTN_INVALID_ARGUMENT},
        {&plain, 1, 100, NULL, a.blocks, CLATTN_INVALID_ARGUMENT},
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        result = untouched;
        assert_int_equal(clattn_blocks_union(*state, calls[i].attention, calls[i].batch, calls[i].q_len,
                                             calls[i].a, calls[i].b, &result),
                         calls[i].status);
        if (calls[i].status) assert_ptr_equal(result, untouched);
        if (!calls[i].status) clattn_blocks_release(*state, result);
    }
    clattn_blocks_release(*state, other_block);
    clattn_blocks_release(*state, with_starts);
    lists_free(*state, &a);
    lists_free(*state, &b);
    lists_free(*state, &c);
}

static int open_cpu(void **state)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_CPU;
    return clattn_context_create(&desc, (clattn_context **)state);
}

static int close_cpu(void **state)
{
    clattn_context_release(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_lists),
        cmocka_unit_test(test_with_selection),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests_name("blocks union", tests, open_cpu, close_cpu);
}
