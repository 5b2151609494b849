/* SPDX-License-Identifier: MIT */
/* Patterns from text, and what is refused: every message names what and where. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clattn.h"

static const struct {
    const char *text, *error; /* the whole message */
} wrong_texts[] = {
    {"", "column 1: the text ends where the name of a pattern is expected"},
    {"locl:1",
     "column 1: unknown pattern 'locl'; local, log-stride, anchors, anchor-queries, global, strided, dilated, "
     "random, bigbird and dense are known"},
    {"local:1+", "column 9: the text ends where the name of a pattern is expected"},
    {"local:x", "column 7: 'x' where a window is expected"},
    {"local:-1", "column 7: '-1' where a window is expected"},
    {"local:", "column 7: the text ends where a window is expected"},
    {"local:1,2", "column 8: ',' where '+', ';' or the end is expected"},
    {"local:99999999999", "column 7: '99999999999' is too large; at most 2147483647"},
    {"local 1", "column 7: '1' where '+', ';' or the end is expected"},
    {"anchors", "column 8: the text ends where ':' and a list of anchors is expected"},
    {"anchors:", "column 9: the text ends where first, middle, last or a block number is expected"},
    {"anchors:first,center", "column 15: 'center' where first, middle, last or a block number is expected"},
    {"anchors:first,,last", "column 15: ',' where first, middle, last or a block number is expected"},
    {"log-stride:token", "column 12: 'token' where tokens, blocks or an offset is expected"},
    {"log-stride:tokens:", "column 19: the text ends where tokens, blocks or an offset is expected"},
    {"strided:0", "column 9: a stride is 0; 1 or more is needed"},
    {"dilated:1", "column 10: the text ends where ',' and a stride is expected"},
    {"dilated:1,0", "column 11: a stride is 0; 1 or more is needed"},
    {"bigbird:1,2", "column 12: the text ends where ',' and a number of random blocks is expected"},
    {"bigbird:1,2,3,x", "column 15: 'x' where a seed is expected"},
    {"random:1,18446744073709551616",
     "column 10: '18446744073709551616' is too large; at most 18446744073709551615"},
    {"local:1;", "column 9: the text ends where a head is expected"},
    {"local:1;2:local", "column 10: ':' where '=' and a pattern is expected"},
    {"local:1;3-2=local", "column 9: heads 3-2; they must ascend and be below 65536"},
    {"local:1;0-70000=local", "column 9: heads 0-70000; they must ascend and be below 65536"},
    {"local:1;1=", "column 11: the text ends where the name of a pattern is expected"},
};

static void test_wrong_texts(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof wrong_texts / sizeof *wrong_texts; i++) {
        char error[256] = "untouched", small[8];
        clattn_pattern *untouched = (clattn_pattern *)&error, *pattern = untouched;
        assert_int_equal(clattn_pattern_parse(wrong_texts[i].text, &pattern, error, sizeof error),
                         CLATTN_INVALID_ARGUMENT);
        assert_string_equal(error, wrong_texts[i].error);
        assert_ptr_equal(pattern, untouched);
        assert_int_equal(clattn_pattern_parse(wrong_texts[i].text, &pattern, small, sizeof small),
                         CLATTN_INVALID_ARGUMENT);
        assert_string_equal(small, "column ");
        assert_int_equal(clattn_pattern_parse(wrong_texts[i].text, &pattern, NULL, 0), CLATTN_INVALID_ARGUMENT);
    }
    clattn_pattern *pattern = NULL;
    char error[64];
    assert_int_equal(clattn_pattern_parse(NULL, &pattern, error, sizeof error), CLATTN_INVALID_ARGUMENT);
    assert_string_equal(error, "text is NULL");
    assert_int_equal(clattn_pattern_parse("local", NULL, error, sizeof error), CLATTN_INVALID_ARGUMENT);
    assert_string_equal(error, "pattern is NULL");
}

/* The same pattern by text and by calls. */
static void test_equal_to_calls(void **state)
{
    static const int32_t anchors[] = {CLATTN_ANCHOR_FIRST, CLATTN_ANCHOR_MIDDLE, CLATTN_ANCHOR_LAST, 5},
                         offsets[] = {0, 2, -1};
    (void)state;
    clattn_pattern *text = NULL, *calls = NULL, *own = NULL;
    char error[200];
    assert_int_equal(
        clattn_pattern_parse("local:2+log-stride:0,2,-1+log-stride:tokens+anchors:first,middle,last,5\n"
                             "+anchor-queries:-1+strided:40+dilated:2,5+bigbird:1,1,2,3; 1=random:3",
                             &text, error, sizeof error),
        CLATTN_SUCCESS);
    assert_string_equal(error, "");
    assert_int_equal(clattn_pattern_create(&calls), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_create(&own), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add_bigbird(own, 1, 1, 2, 3), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add(calls, own), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add(calls, calls), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add_local(calls, 2), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add_dilated(calls, 2, 5), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add_strided(calls, 40), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add_log_stride(calls, CLATTN_LOG_STRIDE_BLOCKS, offsets, 1, 3),
                     CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add_log_stride(calls, CLATTN_LOG_STRIDE_TOKENS, NULL, 0, 0),
                     CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add_anchors(calls, anchors, 4, CLATTN_ANCHOR_KEYS), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add_anchors(calls, anchors + 2, 1, CLATTN_ANCHOR_QUERIES), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_set_head(calls, 1, own), CLATTN_SUCCESS);
    clattn_pattern_release(own);
    assert_int_equal(clattn_pattern_create(&own), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_add_random(own, 3, 0), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_set_head(calls, 1, own), CLATTN_SUCCESS); /* replaces the one before */
    clattn_pattern_release(own);

    clattn_pattern_shape shape = CLATTN_PATTERN_SHAPE_INIT;
    shape.q_len = shape.kv_len = 6400;
    shape.heads = 2;
    for (int64_t row = 0; row < 100; row++)
        for (int32_t h = 0; h < 2; h++) {
            int32_t a[100], b[100];
            int64_t count_a, count_b;
            assert_int_equal(clattn_pattern_list(text, NULL, &shape, row, h, a, 100, &count_a), CLATTN_SUCCESS);
            assert_int_equal(clattn_pattern_list(calls, NULL, &shape, row, h, b, 100, &count_b),
                             CLATTN_SUCCESS);
            assert_int_equal(count_a, count_b);
            assert_memory_equal(a, b, (size_t)count_a * sizeof *a);
        }
    clattn_pattern_release(text);
    clattn_pattern_release(calls);
}

/* ---- refused arguments ---- */

static void check_error(const clattn_pattern *pattern, const char *expected)
{
    char text[512];
    size_t length = clattn_pattern_error(pattern, text, sizeof text);
    assert_string_equal(text, expected);
    assert_int_equal(length, strlen(expected));
}

static void test_refused_parts(void **state)
{
    static const int32_t anchor = 3;
    (void)state;
    clattn_pattern *pattern = NULL;
    assert_int_equal(clattn_pattern_create(NULL), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_create(&pattern), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_error(pattern, NULL, 0), 0);
    assert_int_equal(clattn_pattern_add_local(pattern, -1), CLATTN_INVALID_ARGUMENT);
    check_error(pattern, "window is -1; 0 or more is needed");
    assert_int_equal(clattn_pattern_add_strided(pattern, 0), CLATTN_INVALID_ARGUMENT);
    check_error(pattern, "stride is 0; 1 or more is needed");
    assert_int_equal(clattn_pattern_add_dilated(pattern, 1, 0), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_add_random(pattern, -1, 0), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_add_bigbird(pattern, 1, -1, 1, 0), CLATTN_INVALID_ARGUMENT);
    check_error(pattern, "global is -1; 0 or more is needed");
    assert_int_equal(clattn_pattern_add_anchors(pattern, NULL, 1, 1), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_add_anchors(pattern, &anchor, 0, 1), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_add_anchors(pattern, &anchor, 1, 4), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_add_log_stride(pattern, 2, NULL, 0, 0), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_add_log_stride(pattern, 0, &anchor, 0, 1), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_add_log_stride(pattern, 0, NULL, 1, 1), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_add(pattern, NULL), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_set_head(pattern, -1, pattern), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_set_head(pattern, 0, NULL), CLATTN_INVALID_ARGUMENT);

    /* None of these has left a part behind. */
    clattn_pattern_shape shape = CLATTN_PATTERN_SHAPE_INIT;
    clattn_pattern_stats stats = {.size = sizeof stats};
    shape.q_len = shape.kv_len = 1000;
    assert_int_equal(clattn_pattern_count(pattern, NULL, &shape, &stats), CLATTN_SUCCESS);
    assert_int_equal(stats.blocks, 0);
    assert_int_equal(stats.unconnected, 1000);
    clattn_pattern_release(pattern);
    clattn_pattern_release(NULL);
}

static void test_refused_shapes(void **state)
{
    static const int64_t descending[] = {0, 20, 20}, late[] = {5, 20}, inside[] = {0, 20};
    static const int32_t cu[] = {0, 10, 5}, cu_other[] = {0, 10, 15}, one[] = {1, 2, 3}, used[] = {11};
    const clattn_pattern_shape good = {sizeof good, 1, 10, 10, 3, 64, 64, NULL, 0};
    const clattn_attention_desc plain = CLATTN_ATTENTION_DESC_INIT;
    clattn_pattern_shape s[14];
    clattn_attention_desc a[14];
    for (int i = 0; i < 14; i++)
        s[i] = good, a[i] = plain;
    s[0].block = 48;
    s[1].q_block = 0;
    s[2].heads = 0;
    s[3].heads = 2;
    s[4].batch = 0;
    s[5].kv_len = -1;
    s[6].kv_len = INT64_MAX;
    s[7].starts = descending, s[7].start_count = 3;
    s[8].starts = late, s[8].start_count = 2;
    s[9].starts = inside, s[9].start_count = 2, a[9].sequences = 2,
    a[9].cu_seqlens_q = a[9].cu_seqlens_k = cu_other;
    a[10].sequences = 2, a[10].cu_seqlens_q = a[10].cu_seqlens_k = cu;
    a[11].sequences = 2, a[11].cu_seqlens_q = a[11].cu_seqlens_k = one;
    a[12].seqused_q = used;
    s[13].size = 3;
    static const clattn_status expected[14] = {
        CLATTN_INVALID_ARGUMENT, CLATTN_INVALID_SHAPE,   CLATTN_INVALID_SHAPE,   CLATTN_INVALID_SHAPE,
        CLATTN_INVALID_SHAPE,    CLATTN_INVALID_SHAPE,   CLATTN_SIZE_OVERFLOW,   CLATTN_INVALID_BLOCKS,
        CLATTN_INVALID_BLOCKS,   CLATTN_INVALID_BLOCKS,  CLATTN_INVALID_SEQLENS, CLATTN_INVALID_SEQLENS,
        CLATTN_INVALID_SEQLENS,  CLATTN_INVALID_ARGUMENT};
    (void)state;
    clattn_pattern *pattern = NULL;
    clattn_context *context = NULL;
    clattn_context_desc reference = CLATTN_CONTEXT_DESC_INIT;
    reference.backend = CLATTN_BACKEND_REFERENCE;
    assert_int_equal(clattn_context_create(&reference, &context), CLATTN_SUCCESS);
    assert_int_equal(clattn_pattern_parse("local;2=dense", &pattern, NULL, 0), CLATTN_SUCCESS);
    for (int i = 0; i < 14; i++) {
        clattn_pattern_stats stats = {.size = sizeof stats, .lists = -5};
        clattn_blocks *blocks = NULL;
        char detail[512], of_context[512];
        assert_int_equal(clattn_pattern_count(pattern, &a[i], &s[i], &stats), expected[i]);
        assert_int_equal(stats.lists, -5);
        assert_true(clattn_pattern_error(pattern, detail, sizeof detail) > 0);
        assert_int_equal(clattn_pattern_blocks(context, pattern, &a[i], &s[i], &blocks), expected[i]);
        assert_null(blocks);
        clattn_context_error(context, of_context, sizeof of_context);
        assert_string_equal(detail, of_context);
    }
    assert_int_equal(clattn_pattern_list(pattern, NULL, &good, 1, 0, NULL, 0, NULL), CLATTN_INVALID_ARGUMENT);
    check_error(pattern, "row is 1 and head 0; there are 1 and 3");
    assert_int_equal(clattn_pattern_list(pattern, NULL, &good, 0, 3, NULL, 0, NULL), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_count(pattern, NULL, NULL, NULL), CLATTN_INVALID_ARGUMENT);
    assert_int_equal(clattn_pattern_blocks(context, NULL, NULL, &good, NULL), CLATTN_INVALID_ARGUMENT);
    clattn_pattern_release(pattern);
    clattn_context_release(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wrong_texts),
        cmocka_unit_test(test_equal_to_calls),
        cmocka_unit_test(test_refused_parts),
        cmocka_unit_test(test_refused_shapes),
    };
    return cmocka_run_group_tests_name("pattern text", tests, NULL, NULL);
}
