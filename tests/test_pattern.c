/* SPDX-License-Identifier: MIT */
/* Static patterns as lists: against brute force over pairs of tokens, counts, random draws, changes, text. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clattn.h"
#include "pattern_oracle.h"

static const int32_t cu_q[] = {0, 76, 76, 110, 110, 256}, cu_k[] = {0, 100, 130, 130, 130, 500};
static const int32_t used_q[] = {70, 0, 45}, used_k[] = {200, 90, 0};
static const int64_t starts[] = {0, 1, 7, 40, 41, 90, 100, 117, 130, 131, 200, 290, 301, 302, 400, 5000};

#define PACKED .sequences = 5, .cu_q = cu_q, .cu_k = cu_k
#define STARTS .starts = starts, .start_count = sizeof starts / sizeof *starts

#define LENGTHS(b, q, k) .batch = b, .q_len = q, .kv_len = k
#define CUT(keys, rows, lists) .block = keys, .q_block = rows, .heads = lists

static const struct oracle_shape shapes[] = {
    {.name = "one block a row", LENGTHS(1, 300, 300), CUT(32, 32, 1)},
    {.name = "not causal", LENGTHS(1, 300, 300), CUT(32, 32, 4), .all_keys = true},
    {.name = "one token a row", LENGTHS(1, 190, 190), CUT(16, 1, 4)},
    {.name = "coarse rows", LENGTHS(1, 333, 333), CUT(16, 64, 2)},
    {.name = "fine rows", LENGTHS(1, 260, 260), CUT(64, 16, 4)},
    {.name = "rows across blocks", LENGTHS(1, 113, 203), CUT(32, 48, 4)},
    {.name = "rows across blocks, not causal", LENGTHS(1, 113, 203), CUT(32, 48, 4), .all_keys = true},
    {.name = "more queries than keys", LENGTHS(1, 217, 128), CUT(16, 32, 1)},
    {.name = "more queries than keys, not causal", LENGTHS(1, 217, 128), CUT(16, 32, 1), .all_keys = true},
    {.name = "one token", LENGTHS(2, 1, 1), CUT(64, 64, 1)},
    {.name = "no keys", LENGTHS(1, 5, 0), CUT(64, 2, 1)},
    {.name = "no queries", LENGTHS(1, 0, 77), CUT(64, 64, 1)},
    {.name = "decode", LENGTHS(2, 3, 500), CUT(16, 1, 4)},
    {.name = "packed", CUT(16, 32, 4), PACKED},
    {.name = "packed, not causal", CUT(32, 5, 1), .all_keys = true, PACKED},
    {.name = "padding", LENGTHS(3, 80, 210), CUT(16, 32, 4), .used_q = used_q, .used_k = used_k},
    {.name = "padding, not causal",
     LENGTHS(3, 80, 210),
     CUT(32, 16, 1),
     .all_keys = true,
     .used_q = used_q,
     .used_k = used_k},
    {.name = "starts", LENGTHS(2, 333, 333), CUT(0, 32, 4), STARTS},
    {.name = "starts, not causal", LENGTHS(1, 100, 333), CUT(64, 7, 1), .all_keys = true, STARTS},
    {.name = "starts, packed", CUT(0, 16, 4), PACKED, STARTS},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static clattn_pattern *parsed(const char *text)
{
    char error[200];
    clattn_pattern *pattern = NULL;
    if (clattn_pattern_parse(text, &pattern, error, sizeof error)) fail_msg("'%s': %s", text, error);
    return pattern;
}

static bool fits(const struct oracle_pattern *pattern, const struct oracle_shape *shape)
{
    return pattern->heads <= shape->heads;
}

/* ---- lists ---- */

/* What brute force counts. */
struct sums {
    int64_t connections, pairs, unconnected, blocks, lists, least, most;
};

static void check_list(const struct oracle_shape *shape, const struct oracle_sequence *sequence, int64_t r,
                       const int32_t *list, int32_t count, int32_t topk, struct sums *sums)
{
    int64_t last_row =
        (r + 1) * shape->q_block < sequence->q_len ? (r + 1) * shape->q_block - 1 : sequence->q_len - 1;
    for (int32_t n = 0; n < topk; n++) {
        if (n >= count) assert_int_equal(list[n], -1);
        if (n >= count) continue;
        assert_in_range(list[n], n ? list[n - 1] + 1 : 0, sequence->blocks - 1);
        if (!shape->all_keys)
            assert_true(sequence->edges[list[n]] <= last_row + sequence->kv_len - sequence->q_len);
    }
    if (r * shape->q_block >= sequence->q_len) {
        assert_int_equal(count, 0); /* padding */
        return;
    }
    sums->lists++;
    sums->blocks += count;
    if (count < sums->least) sums->least = count;
    if (count > sums->most) sums->most = count;
}

/* Every pair of tokens of one sequence and head. */
static void check_pairs(const struct oracle_pattern *pattern, const struct oracle_shape *shape,
                        const struct oracle_sequence *sequence, int32_t head, const int32_t *indices,
                        const int32_t *counts, int32_t topk, struct sums *sums)
{
    unsigned char *expected = oracle_joined(pattern, shape, sequence, head);
    for (int64_t i = 0; i < sequence->q_len; i++) {
        int64_t list = (sequence->list_row + i / shape->q_block) * shape->heads + head, seen = 0, joined = 0;
        int64_t t = i + sequence->kv_len - sequence->q_len;
        for (int64_t b = 0, n = 0; b < sequence->blocks; b++) {
            bool is_listed = n < counts[list] && indices[list * topk + n] == b;
            n += is_listed;
            for (int64_t j = sequence->edges[b]; j < sequence->edges[b + 1]; j++) {
                bool visible = shape->all_keys || j <= t;
                if ((is_listed && visible) != expected[i * sequence->kv_len + j])
                    fail_msg("%s, %s: head %d, row %lld and key %lld: expected %d", pattern->text, shape->name,
                             head, (long long)i, (long long)j, expected[i * sequence->kv_len + j]);
                seen += visible;
                joined += is_listed && visible;
            }
        }
        sums->pairs += seen;
        sums->connections += joined;
        sums->unconnected += seen && !joined;
    }
    free(expected);
}

static void check_stats(const clattn_pattern *pattern, const struct oracle_shape *shape,
                        const struct sums *sums)
{
    clattn_attention_desc attention = oracle_attention(shape);
    clattn_pattern_shape desc = oracle_pattern_shape(shape);
    clattn_pattern_stats stats = {.size = sizeof stats};
    assert_int_equal(clattn_pattern_count(pattern, &attention, &desc, &stats), CLATTN_SUCCESS);
    assert_int_equal(stats.lists, sums->lists);
    assert_int_equal(stats.blocks, sums->blocks);
    assert_int_equal(stats.blocks_min, sums->lists ? sums->least : 0);
    assert_int_equal(stats.blocks_max, sums->most);
    assert_int_equal(stats.connections, sums->connections);
    assert_int_equal(stats.pairs, sums->pairs);
    assert_int_equal(stats.unconnected, sums->unconnected);
    assert_true(stats.blocks_all >= stats.blocks);
    if (sums->pairs) assert_true(stats.density == (double)sums->connections / (double)sums->pairs);
}

static void check_case(clattn_context *context, const struct oracle_pattern *oracle,
                       const struct oracle_shape *shape)
{
    clattn_pattern *pattern = parsed(oracle->text);
    clattn_attention_desc attention = oracle_attention(shape);
    clattn_pattern_shape desc = oracle_pattern_shape(shape);
    clattn_blocks *blocks = NULL;
    clattn_blocks_desc made = {.size = sizeof made};
    assert_int_equal(clattn_pattern_blocks(context, pattern, &attention, &desc, &blocks), CLATTN_SUCCESS);
    assert_int_equal(clattn_blocks_describe(blocks, &made), CLATTN_SUCCESS);
    assert_int_equal(made.block, shape->starts ? 0 : shape->block);
    assert_int_equal(made.start_count, shape->start_count);
    size_t lists = (size_t)(made.rows * made.heads);
    int32_t *indices = calloc(lists * (size_t)made.topk + 1, sizeof *indices),
            *counts = calloc(lists + 1, sizeof *counts);
    assert_non_null(indices);
    assert_non_null(counts);
    assert_int_equal(clattn_blocks_read(context, blocks, indices, counts), CLATTN_SUCCESS);

    static struct oracle_sequence sequence;
    struct sums sums = {.least = INT64_MAX};
    for (int64_t s = 0; s < oracle_sequences(shape); s++) {
        oracle_sequence(shape, s, &sequence);
        for (int32_t h = 0; h < shape->heads; h++) {
            for (int64_t r = 0; r < sequence.list_rows; r++) {
                int64_t list = (sequence.list_row + r) * made.heads + h, count = -1;
                int32_t one[1024];
                check_list(shape, &sequence, r, indices + list * made.topk, counts[list], made.topk, &sums);
                assert_int_equal(clattn_pattern_list(pattern, &attention, &desc, sequence.list_row + r, h, one,
                                                     1024, &count),
                                 CLATTN_SUCCESS);
                assert_int_equal(count, counts[list]);
                assert_memory_equal(one, indices + list * made.topk, (size_t)count * sizeof *one);
            }
            check_pairs(oracle, shape, &sequence, h, indices, counts, made.topk, &sums);
        }
    }
    assert_int_equal(made.rows, sequence.list_row + sequence.list_rows);
    assert_int_equal(made.topk, sums.most ? sums.most : 1);
    check_stats(pattern, shape, &sums);
    free(indices);
    free(counts);
    clattn_blocks_release(context, blocks);
    clattn_pattern_release(pattern);
}

static void test_lists(void **state)
{
    for (int p = 0; p < oracle_pattern_count; p++)
        for (int s = 0; s < SHAPES; s++)
            if (fits(&oracle_patterns[p], &shapes[s])) check_case(*state, &oracle_patterns[p], &shapes[s]);
}

/* Offsets by head, which text cannot say: the same as a pattern of its own for each head. */
static void test_offsets(void **state)
{
    static const int32_t offsets[3][2] = {{0, 0}, {1, -1}, {4, 3}};
    static const char *const alike[] = {"log-stride", "log-stride:1,-1", "log-stride:4,3"};
    (void)state;
    clattn_pattern *pattern = NULL;
    clattn_pattern_shape shape = CLATTN_PATTERN_SHAPE_INIT;
    shape.q_len = shape.kv_len = 2000;
    shape.heads = 3;
    assert_int_equal(clattn_pattern_create(&pattern), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add_log_stride(pattern, CLATTN_LOG_STRIDE_BLOCKS, offsets[0], 3, 2),
                     CLATTN_SUCCESS);
    for (int32_t h = 0; h < 3; h++) {
        clattn_pattern *single = parsed(alike[h]);
        for (int64_t row = 0; row < 32; row++) {
            int32_t a[32], b[32];
            int64_t count_a, count_b;
            assert_int_equal(clattn_pattern_list(pattern, NULL, &shape, row, h, a, 32, &count_a),
                             CLATTN_SUCCESS);
            assert_int_equal(clattn_pattern_list(single, NULL, &shape, row, h, b, 32, &count_b),
                             CLATTN_SUCCESS);
            assert_int_equal(count_a, count_b);
            assert_memory_equal(a, b, (size_t)count_a * sizeof *a);
        }
        clattn_pattern_release(single);
    }
    shape.heads = 2;
    assert_int_equal(clattn_pattern_list(pattern, NULL, &shape, 0, 0, NULL, 0, NULL), CLATTN_INVALID_SHAPE);
    clattn_pattern_release(pattern);
}

/* ---- counts ---- */

/* N log N: with M blocks every list has at most 3 local blocks, 3 anchors and one block a level and side, and
 * the mean grows by one block a side when N doubles. */
static void test_growth(void **state)
{
    (void)state;
    clattn_pattern *pattern = parsed("local:1+log-stride+anchors:first,middle,last");
    for (int causal = 0; causal < 2; causal++) {
        clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
        attention.causal = causal;
        double before = 0;
        for (int log_n = 10; log_n <= 20; log_n++) {
            clattn_pattern_shape shape = CLATTN_PATTERN_SHAPE_INIT;
            clattn_pattern_stats stats = {.size = sizeof stats};
            shape.block = shape.q_block = 32;
            shape.q_len = shape.kv_len = INT64_C(1) << log_n;
            assert_int_equal(clattn_pattern_count(pattern, &attention, &shape, &stats), CLATTN_SUCCESS);
            int sides = causal ? 1 : 2, levels = log_n - 5;
            assert_int_equal(stats.unconnected, 0);
            assert_int_equal(stats.lists, shape.q_len / 32);
            assert_true(stats.blocks_max <= 6 + sides * (levels + 1));
            assert_true(stats.connections <= shape.kv_len * 32 * (6 + sides * (levels + 1)));
            assert_true(stats.connections >= shape.kv_len * 32 * (sides * (levels - 2)));
            if (log_n > 15) { /* in short sequences the anchors and the ends matter */
                assert_true(stats.blocks_mean - before < sides * 1.01);
                assert_true(stats.blocks_mean - before > sides * 0.99);
            }
            before = stats.blocks_mean;
        }
    }
    clattn_pattern_release(pattern);
}

/* Block pairs counted one by one: M = 128 blocks of 32, causal. */
static void test_count_4096(void **state)
{
    (void)state;
    clattn_pattern *pattern = parsed("local:1+log-stride+anchors:first,middle,last");
    clattn_pattern_shape shape = CLATTN_PATTERN_SHAPE_INIT;
    clattn_pattern_stats stats = {.size = sizeof stats};
    shape.block = shape.q_block = 32;
    shape.q_len = shape.kv_len = 4096;
    int64_t blocks = 0;
    for (int64_t c = 0; c < 128; c++)
        for (int64_t b = 0; b <= c; b++) {
            int64_t d = c - b;
            blocks += d == 0 || (d & (d - 1)) == 0 || b == 0 || b == 64 || b == 127;
        }
    assert_int_equal(clattn_pattern_count(pattern, NULL, &shape, &stats), CLATTN_SUCCESS);
    assert_int_equal(stats.blocks, blocks);
    assert_int_equal(stats.blocks_all, 128 * 129 / 2);
    assert_int_equal(stats.pairs, INT64_C(4096) * 4097 / 2);
    assert_int_equal(stats.connections, (blocks - 128) * 32 * 32 + 128 * (32 * 33 / 2));
    assert_int_equal(stats.unconnected, 0);
    clattn_pattern_release(pattern);
}

/* ---- random ---- */

static void test_seeds(void **state)
{
    /* Computed once from the definition in clattn.h by a third program; they must never change. */
    static const int64_t known[4] = {488, 222, 151, 8};
    int64_t draws[4], count;
    int32_t list[4], other[4];
    (void)state;
    oracle_draws(42, 3, 1000, 1001, 4, draws);
    assert_memory_equal(draws, known, sizeof known);
    clattn_pattern *pattern = parsed("random:4,42"), *reseeded = parsed("random:4,43");
    clattn_pattern_shape shape = CLATTN_PATTERN_SHAPE_INIT;
    shape.q_len = shape.kv_len = 64 * 1001;
    shape.heads = 4;
    assert_int_equal(clattn_pattern_list(pattern, NULL, &shape, 1000, 3, list, 4, &count), CLATTN_SUCCESS);
    assert_int_equal(count, 4);
    for (int i = 0; i < 4; i++) {
        bool found = false;
        for (int k = 0; k < 4; k++)
            found |= list[k] == known[i];
        assert_true(found);
    }
    assert_int_equal(clattn_pattern_list(pattern, NULL, &shape, 1000, 2, other, 4, &count), CLATTN_SUCCESS);
    assert_memory_not_equal(list, other, sizeof list);
    assert_int_equal(clattn_pattern_list(reseeded, NULL, &shape, 1000, 3, other, 4, &count), CLATTN_SUCCESS);
    assert_memory_not_equal(list, other, sizeof list);

    /* Uniform: 64 bins of 1000 blocks' draws, chi squared below the 1e-6 point (about 128 for 63 degrees). */
    int64_t bins[64] = {0};
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    attention.causal = 0;
    shape.q_len = shape.kv_len = 64 * 1024;
    for (int64_t row = 0; row < 1024; row++) {
        assert_int_equal(clattn_pattern_list(pattern, &attention, &shape, row, 0, list, 4, &count),
                         CLATTN_SUCCESS);
        for (int i = 0; i < 4; i++)
            bins[list[i] / 16]++;
    }
    double chi = 0;
    for (int i = 0; i < 64; i++)
        chi += (double)((bins[i] - 64) * (bins[i] - 64)) / 64;
    assert_true(chi < 128);
    clattn_pattern_release(pattern);
    clattn_pattern_release(reseeded);
}

static int open_reference(void **state)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    return clattn_context_create(&desc, (clattn_context **)state);
}

static int close_reference(void **state)
{
    clattn_context_release(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists),      cmocka_unit_test(test_offsets), cmocka_unit_test(test_growth),
        cmocka_unit_test(test_count_4096), cmocka_unit_test(test_seeds),
    };
    return cmocka_run_group_tests_name("pattern", tests, open_reference, close_reference);
}
