/* SPDX-License-Identifier: MIT */
/* Attention in the matrix tier of NVIDIA cards: every path against the definition, and the choice between paths.
 * Skipped where no NVIDIA card is. */

#include "nvidia.h"

#include <string.h>

static const struct path_case path_cases[] = {
    /* name, class, batch, q_len, kv_len, kv_heads, group, dim, dim_v, dtype, layout, all keys
     * list kind, q_block, topk, block */
    {{"few blocks of many", SIZE_NORMAL, 1, 70, 2100, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted-hopper"},
    {{"two key heads", SIZE_NORMAL, 2, 65, 1900, 2, 4, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted-hopper"},
    {{"no groups, padded", SIZE_NORMAL, 2, 33, 1900, 2, 1, 96, 80, CLATTN_BFLOAT16, LAYOUT_PADDED, false},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted-hopper"},
    {{"odd dimensions", SIZE_NORMAL, 1, 40, 1900, 1, 3, 100, 60, CLATTN_BFLOAT16, LAYOUT_PADDED, false},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted"},
    {{"dim 256", SIZE_NORMAL, 1, 40, 1900, 1, 4, 256, 192, CLATTN_FLOAT16, LAYOUT_BHTD, false},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted"},
    {{"group 20", SIZE_NORMAL, 1, 20, 1900, 1, 20, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted-hopper"},
    {{"neighbours agree", SIZE_NORMAL, 1, 203, 500, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_SHARED, 1, 4, 0, .mma = "inverted", .hopper = "union"},
    {{"neighbours agree, group 7", SIZE_NORMAL, 2, 90, 777, 2, 7, 80, 80, CLATTN_FLOAT16, LAYOUT_BHTD, false},
     LIST_SHARED, 1, 4, 0, .mma = "inverted", .hopper = "union"},
    {{"neighbours agree, dim 64", SIZE_NORMAL, 1, 130, 300, 1, 8, 64, 64, CLATTN_BFLOAT16, LAYOUT_PADDED, true},
     LIST_SHARED, 1, 4, 0, .mma = "inverted", .hopper = "union"},
    {{"query blocks", SIZE_NORMAL, 1, 333, 400, 2, 2, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM, 64, 3, 0, .mma = "token", .hopper = "tile"},
    {{"blocks of 128 keys", SIZE_NORMAL, 2, 300, 460, 2, 4, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM, 128, 3, 128, .mma = "token", .hopper = "tile"},
    {{"query blocks, batch", SIZE_NORMAL, 2, 100, 90, 1, 5, 96, 96, CLATTN_FLOAT16, LAYOUT_PADDED, false},
     LIST_RANDOM, 16, 3, 0, .mma = "token", .hopper = "tile"},
    {{"query blocks, dim 100", SIZE_NORMAL, 1, 100, 90, 1, 5, 100, 100, CLATTN_FLOAT16, LAYOUT_BTHD, true},
     LIST_RANDOM, 16, 3, 0, .mma = "token", .hopper = "token"},
    {{"all keys", SIZE_NORMAL, 2, 150, 200, 2, 4, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_ALL_KEYS, 1, 1, 0, .mma = "token", .hopper = "tile"},
    {{"all keys, not causal", SIZE_NORMAL, 1, 65, 129, 1, 16, 64, 64, CLATTN_FLOAT16, LAYOUT_BHTD, true},
     LIST_ALL_KEYS, 1, 1, 0, .mma = "token", .hopper = "tile"},
    {{"more queries than keys", SIZE_NORMAL, 1, 200, 70, 1, 16, 80, 80, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_ALL_KEYS, 1, 1, 0, .mma = "token", .hopper = "tile"},
    {{"float32", SIZE_NORMAL, 1, 20, 130, 1, 4, 64, 64, CLATTN_FLOAT32, LAYOUT_BTHD, false},
     LIST_RANDOM, 1, 2, 0, .mma = NULL, .hopper = NULL},
};

/* Windows that cut blocks, that hide whole blocks and that hide nothing; sinks; caps; padding. */
static const int32_t used_q[] = {40, 0, 90}, used_k[] = {200, 70, 0};
static const struct path_case option_cases[] = {
    {{"window, all keys", SIZE_NORMAL, 1, 150, 400, 2, 4, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_ALL_KEYS, 1, 1, 0, .mma = "token", .hopper = "tile", .window = 70},
    {{"window on both sides", SIZE_NORMAL, 1, 200, 200, 1, 5, 64, 64, CLATTN_FLOAT16, LAYOUT_PADDED, true},
     LIST_ALL_KEYS, 1, 1, 0, .mma = "token", .hopper = "tile", .window = 33, .sink = true},
    {{"window of one key", SIZE_NORMAL, 1, 130, 100, 1, 16, 80, 80, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_ALL_KEYS, 1, 1, 0, .mma = "token", .hopper = "tile", .window = 1, .softcap = 1},
    {{"wide window", SIZE_NORMAL, 1, 50, 100, 1, 2, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, false},
     LIST_ALL_KEYS, 1, 1, 0, .mma = "token", .hopper = "tile", .window = INT64_C(1) << 40, .sink = true},
    {{"sink, cap, window, query blocks", SIZE_NORMAL, 1, 333, 400, 2, 2, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM, 64, 3, 0, .mma = "token", .hopper = "tile", .window = 100, .softcap = 3, .sink = true},
    {{"sink, cap, blocks of 128 keys", SIZE_NORMAL, 2, 300, 460, 2, 4, 96, 96, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM, 128, 3, 128, .mma = "token", .hopper = "tile", .softcap = 3, .sink = true},
    {{"options, dim 256", SIZE_NORMAL, 1, 60, 300, 1, 4, 256, 256, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_ALL_KEYS, 1, 1, 0, .mma = "token", .hopper = "token", .window = 90, .softcap = 50, .sink = true},
    {{"inverted, all options", SIZE_NORMAL, 1, 70, 2100, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted-hopper", .window = 900, .softcap = 2, .sink = true},
    {{"inverted, window", SIZE_NORMAL, 2, 300, 1900, 2, 1, 64, 80, CLATTN_FLOAT16, LAYOUT_PADDED, false},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted-hopper", .window = 30},
    {{"inverted, window on both sides", SIZE_NORMAL, 1, 300, 1900, 1, 3, 100, 60, CLATTN_FLOAT16, LAYOUT_BTHD, true},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted", .window = 500, .softcap = 4},
    {{"union, all options", SIZE_NORMAL, 1, 203, 500, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_SHARED, 1, 4, 0, .mma = "inverted", .hopper = "union", .window = 130, .softcap = 2, .sink = true},
    {{"union, window on both sides", SIZE_NORMAL, 2, 90, 777, 2, 7, 80, 80, CLATTN_FLOAT16, LAYOUT_BHTD, true},
     LIST_SHARED, 1, 4, 0, .mma = "inverted", .hopper = "union", .window = 300, .sink = true},
    {{"padding, one batch entry without keys", SIZE_NORMAL, 3, 90, 200, 1, 8, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD,
      false},
     LIST_ALL_KEYS, 1, 1, 0, .mma = "token", .hopper = "tile", .sink = true, .seqused_q = used_q, .seqused_k = used_k},
    {{"padding, lists", SIZE_NORMAL, 3, 90, 200, 1, 8, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, true},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted-hopper", .window = 99, .seqused_q = used_q, .seqused_k = used_k},
    {{"padding, query blocks", SIZE_NORMAL, 3, 90, 200, 1, 8, 64, 64, CLATTN_FLOAT16, LAYOUT_BTHD, true},
     LIST_RANDOM, 16, 2, 0, .mma = "token", .hopper = "tile", .softcap = 2, .seqused_q = used_q, .seqused_k = used_k},
};

static void check_paths(const struct path_case *cases, int count, uint64_t seed)
{
    for (int tier = TIER_MMA; tier <= tiers; tier++) {
        struct target target = card_open(tier == TIER_MMA ? "mma" : "hopper");
        for (int n = 0; n < count; n++)
            check_path(&target, &cases[n], seed + (uint64_t)n);
        card_close(&target);
    }
}

static void test_paths(void **state)
{
    (void)state;
    check_paths(path_cases, COUNT(path_cases), 1000);
}

static void test_options(void **state)
{
    (void)state;
    check_paths(option_cases, COUNT(option_cases), 1500);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_packed),
    };
    if (!card_find()) return 77;
    return cmocka_run_group_tests_name("opencl nvidia", tests, NULL, NULL);
}
