/* SPDX-License-Identifier: MIT */
/* Streaming: which list rows change when sequences grow or are cut, against brute force over pairs of tokens;
 * and attention computed again for these rows only. */

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

#define LENGTHS(q, k) .batch = 1, .q_len = q, .kv_len = k
#define CUT(keys, rows, lists) .block = keys, .q_block = rows, .heads = lists

static const int64_t starts_before[] = {0, 3, 50, 51, 120, 180},
                     starts_after[] = {0, 3, 50, 51, 120, 190, 200, 290};
static const int32_t cu_before[] = {0, 100, 100, 133}, cu_after[] = {0, 128, 150, 183};

#define SEQUENCES(cu) .sequences = 3, .cu_q = cu, .cu_k = cu

static const struct {
    struct oracle_shape before, after;
} steps[] = {
    {{LENGTHS(200, 200), CUT(32, 32, 4)}, {.name = "128 tokens", LENGTHS(328, 328), CUT(32, 32, 4)}},
    {{LENGTHS(192, 192), CUT(32, 32, 1)}, {.name = "whole blocks", LENGTHS(320, 320), CUT(32, 32, 1)}},
    {{LENGTHS(200, 200), CUT(16, 64, 4)}, {.name = "coarse rows", LENGTHS(201, 201), CUT(16, 64, 4)}},
    {{LENGTHS(60, 200), CUT(16, 1, 1)}, {.name = "token rows, offset", LENGTHS(90, 230), CUT(16, 1, 1)}},
    {{LENGTHS(60, 200), CUT(16, 48, 4)}, {.name = "offset", LENGTHS(90, 230), CUT(16, 48, 4)}},
    {{LENGTHS(328, 328), CUT(32, 32, 4)}, {.name = "cut", LENGTHS(200, 200), CUT(32, 32, 4)}},
    {{LENGTHS(230, 230), CUT(16, 64, 4)}, {.name = "cut, coarse rows", LENGTHS(210, 210), CUT(16, 64, 4)}},
    {{LENGTHS(0, 0), CUT(16, 16, 1)}, {.name = "from nothing", LENGTHS(40, 40), CUT(16, 16, 1)}},
    {{LENGTHS(40, 40), CUT(16, 16, 1)}, {.name = "the same", LENGTHS(40, 40), CUT(16, 16, 1)}},
    {{CUT(16, 16, 4), SEQUENCES(cu_before)}, {.name = "packed", CUT(16, 16, 4), SEQUENCES(cu_after)}},
    {{LENGTHS(200, 200), CUT(0, 16, 4), .starts = starts_before, .start_count = 6},
     {.name = "starts", LENGTHS(300, 300), CUT(0, 16, 4), .starts = starts_after, .start_count = 8}},
};
enum { STEPS = sizeof steps / sizeof *steps };

static clattn_pattern *parsed(const char *text)
{
    char error[200];
    clattn_pattern *pattern = NULL;
    if (clattn_pattern_parse(text, &pattern, error, sizeof error)) fail_msg("'%s': %s", text, error);
    return pattern;
}

/* Do all query rows of list row r see the same keys in both? */
static bool row_same(const struct oracle_shape *shape, const struct oracle_sequence *then,
                     const struct oracle_sequence *now, const unsigned char *joined_then,
                     const unsigned char *joined_now, int64_t r)
{
    for (int64_t i = r * shape->q_block; i < (r + 1) * shape->q_block && i < now->q_len; i++) {
        if (i >= then->q_len) return false;
        int64_t most = then->kv_len > now->kv_len ? then->kv_len : now->kv_len;
        for (int64_t j = 0; j < most; j++) {
            bool was = j < then->kv_len && joined_then[i * then->kv_len + j];
            bool is = j < now->kv_len && joined_now[i * now->kv_len + j];
            if (was != is) return false;
        }
    }
    return true;
}

static void check_step(const struct oracle_pattern *oracle, struct oracle_shape before,
                       struct oracle_shape after)
{
    static struct oracle_sequence then, now;
    clattn_pattern *pattern = parsed(oracle->text);
    clattn_attention_desc attention_before = oracle_attention(&before),
                          attention_after = oracle_attention(&after);
    clattn_pattern_shape shape_before = oracle_pattern_shape(&before),
                         shape_after = oracle_pattern_shape(&after);
    unsigned char changed[1000], expected[1000];
    int64_t count = -1, ones = 0, only_count = -1;
    memset(changed, 7, sizeof changed);
    memset(expected, 7, sizeof expected);
    for (int64_t s = 0; s < oracle_sequences(&after); s++) {
        oracle_sequence(&before, s, &then);
        oracle_sequence(&after, s, &now);
        memset(expected + now.list_row, 0, (size_t)now.list_rows);
        for (int32_t h = 0; h < after.heads; h++) {
            unsigned char *joined_then = oracle_joined(oracle, &before, &then, h);
            unsigned char *joined_now = oracle_joined(oracle, &after, &now, h);
            for (int64_t r = 0; r < now.list_rows; r++)
                if (!row_same(&after, &then, &now, joined_then, joined_now, r)) expected[now.list_row + r] = 1;
            free(joined_then);
            free(joined_now);
        }
    }
    for (int64_t r = 0; r < now.list_row + now.list_rows; r++)
        ones += expected[r];
    assert_int_equal(clattn_pattern_changed(pattern, &attention_before, &shape_before, &attention_after,
                                            &shape_after, changed, &count),
                     CLATTN_SUCCESS);
    for (size_t r = 0; r < sizeof changed; r++)
        if (changed[r] != expected[r])
            fail_msg("%s, %s%s: list row %zu: %d, expected %d", oracle->text, after.name,
                     after.all_keys ? ", not causal" : "", r, changed[r], expected[r]);
    assert_int_equal(count, ones);
    assert_int_equal(clattn_pattern_changed(pattern, &attention_before, &shape_before, &attention_after,
                                            &shape_after, NULL, &only_count),
                     CLATTN_SUCCESS);
    assert_int_equal(only_count, ones);
    clattn_pattern_release(pattern);
}

static void test_changed(void **state)
{
    (void)state;
    for (int p = 0; p < oracle_pattern_count; p++)
        for (int s = 0; s < 2 * STEPS; s++) {
            struct oracle_shape before = steps[s / 2].before, after = steps[s / 2].after;
            before.all_keys = after.all_keys = s % 2;
            if (oracle_patterns[p].heads <= after.heads) check_step(&oracle_patterns[p], before, after);
        }
}

static void test_refused(void **state)
{
    (void)state;
    clattn_pattern *pattern = parsed("local:1");
    clattn_pattern_shape before = CLATTN_PATTERN_SHAPE_INIT, after;
    clattn_attention_desc all_keys = CLATTN_ATTENTION_DESC_INIT;
    uint8_t changed[4] = {9, 9, 9, 9};
    int64_t count = 9;
    all_keys.causal = 0;
    before.q_len = before.kv_len = 100;
    for (int i = 0; i < 5; i++) {
        after = before;
        if (i == 0) after.q_len++;
        if (i == 1) after.block = 32;
        if (i == 2) after.q_block = 32;
        if (i == 3) after.batch = 2;
        assert_int_equal(
            clattn_pattern_changed(pattern, NULL, &before, i == 4 ? &all_keys : NULL, &after, changed, &count),
            CLATTN_INVALID_SHAPE);
    }
    assert_int_equal(count, 9);
    for (int i = 0; i < 4; i++)
        assert_int_equal(changed[i], 9);
    clattn_pattern_release(pattern);
}

/* ---- attention over the changed rows only ---- */

enum { DIM = 16, BEFORE = 700, AFTER = BEFORE + 128, HEADS = 4, KV_HEADS = 2 };

struct stream {
    float *q, *k, *v, *new, *full; /* [AFTER][heads][DIM] */
};

static clattn_tensor rows(float *data, int64_t first, int64_t len, int64_t heads)
{
    return clattn_tensor_bthd(data + first * heads * DIM, CLATTN_FLOAT32, 1, len, heads, DIM);
}

static void attend(clattn_context *context, const struct stream *stream, const clattn_attention_desc *attention,
                   const clattn_blocks *blocks, int64_t first, int64_t end, int64_t kv_len, float *result)
{
    clattn_tensor q = rows(stream->q, first, end - first, HEADS), k = rows(stream->k, 0, kv_len, KV_HEADS);
    clattn_tensor v = rows(stream->v, 0, kv_len, KV_HEADS), out = rows(result, first, end - first, HEADS);
    assert_int_equal(clattn_attention_forward(context, attention, &q, &k, &v, blocks, &out, NULL, NULL),
                     CLATTN_SUCCESS);
}

/* Query rows first .. end - 1 alone. Causal: they are the end of a shorter sequence. Otherwise their lists are
 * taken out of the whole one. */
static void attend_rows(clattn_context *context, const clattn_pattern *pattern, const struct stream *stream,
                        const clattn_attention_desc *attention, const clattn_pattern_shape *after, int64_t r,
                        int64_t end_r)
{
    int64_t first = r * after->q_block, end = end_r * after->q_block < AFTER ? end_r * after->q_block : AFTER;
    int64_t kv_len = attention->causal ? end : AFTER, entries = 0;
    int32_t lists[64][64], count = 64;
    memset(lists, -1, sizeof lists);
    for (int64_t n = r; n < end_r; n++) {
        int64_t listed;
        assert_int_equal(clattn_pattern_list(pattern, attention, after, n, 0, lists[entries++], count, &listed),
                         CLATTN_SUCCESS);
        assert_true(listed <= count);
    }
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_blocks *blocks = NULL;
    desc.block = after->block;
    desc.q_block = after->q_block;
    desc.rows = end_r - r;
    desc.topk = 64;
    assert_int_equal(clattn_blocks_create(context, &desc, lists[0], &blocks), CLATTN_SUCCESS);
    attend(context, stream, attention, blocks, first, end, kv_len, stream->new);
    clattn_blocks_release(context, blocks);
}

static void check_stream(clattn_context *context, const char *text, int causal, struct stream *stream)
{
    clattn_pattern *pattern = parsed(text);
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_pattern_shape before = CLATTN_PATTERN_SHAPE_INIT, after;
    clattn_blocks *blocks = NULL;
    uint8_t changed[64];
    int64_t count;
    attention.causal = causal;
    before.block = before.q_block = 32;
    before.q_len = before.kv_len = BEFORE;
    after = before;
    after.q_len = after.kv_len = AFTER;
    assert_int_equal(clattn_pattern_blocks(context, pattern, &attention, &before, &blocks), CLATTN_SUCCESS);
    attend(context, stream, &attention, blocks, 0, BEFORE, BEFORE, stream->new);
    clattn_blocks_release(context, blocks);
    assert_int_equal(clattn_pattern_blocks(context, pattern, &attention, &after, &blocks), CLATTN_SUCCESS);
    attend(context, stream, &attention, blocks, 0, AFTER, AFTER, stream->full);
    clattn_blocks_release(context, blocks);

    assert_int_equal(clattn_pattern_changed(pattern, &attention, &before, &attention, &after, changed, &count),
                     CLATTN_SUCCESS);
    int64_t list_rows = (AFTER + 31) / 32, appended = list_rows - BEFORE / 32;
    assert_in_range(count, appended, list_rows - 1); /* some rows were not computed again */
    if (causal && !strstr(text, "middle") && !strstr(text, "last")) assert_int_equal(count, appended);
    for (int64_t r = 0, end; r < list_rows; r = end) {
        for (end = r + 1; end < list_rows && changed[end] == changed[r];)
            end++;
        if (changed[r]) attend_rows(context, pattern, stream, &attention, &after, r, end);
    }
    for (int i = 0; i < AFTER * HEADS * DIM; i++)
        if (memcmp(&stream->new[i], &stream->full[i], sizeof(float)))
            fail_msg("%s, causal %d: row %d differs", text, causal, i / (HEADS * DIM));
    clattn_pattern_release(pattern);
}

/* The same bits as computing everything again, on every CPU backend. */
static void test_streaming(void **state)
{
    static const char *const texts[] = {"local:1+log-stride+anchors:first",
                                        "local:1+log-stride+anchors:first,middle,last", "bigbird:1,1,2,5",
                                        "dilated:2,2+anchor-queries:-1"};
    (void)state;
    struct stream stream;
    float **const all[] = {&stream.q, &stream.k, &stream.v, &stream.new, &stream.full};
    uint32_t x = 1;
    for (int a = 0; a < 5; a++) {
        *all[a] = malloc(AFTER * HEADS * DIM * sizeof(float));
        assert_non_null(*all[a]);
        for (int i = 0; i < AFTER * HEADS * DIM; i++)
            (*all[a])[i] = (float)((x = x * 1664525 + 1013904223) >> 8) / 8388608 - 1;
    }
    for (int backend = CLATTN_BACKEND_REFERENCE; backend <= CLATTN_BACKEND_CPU; backend++) {
        clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
        clattn_context *context = NULL;
        desc.backend = (clattn_backend)backend;
        assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
        for (size_t n = 0; n < sizeof texts / sizeof *texts; n++)
            check_stream(context, texts[n], 1, &stream);
        check_stream(context, "local:1+log-stride+anchors:first", 0, &stream);
        clattn_context_release(context);
    }
    for (int a = 0; a < 5; a++)
        free(*all[a]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_changed),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_streaming),
    };
    return cmocka_run_group_tests_name("pattern changed", tests, NULL, NULL);
}
