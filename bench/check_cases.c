/* SPDX-License-Identifier: MIT
 *
 * The shapes of `clattn check`: small, because the reference is slow, and each there for a reason. */
#include "config.h"

#include "check.h"

static const int32_t short_q[] = {0, 76, 110, 256}, short_k[] = {0, 1, 2, 3};
static const int32_t gaps[] = {0, 0, 0, 0, 1};
static const int32_t packed[] = {0, 15, 205, 550, 800};

#define PISA CLATTN_SELECT_PISA
#define PISA1 CLATTN_SELECT_PISA1
#define PISA2 CLATTN_SELECT_PISA2
#define MEAN CLATTN_SELECT_FLAT_MEAN
#define LSE CLATTN_SELECT_FLAT_LSE
#define DENSE CLATTN_SELECT_DENSE

/* quick, inputs, selector, causal, batch, q_len, kv_len, q_heads, kv_heads, dim, dim_v, leaf, topk, sequences
 */
const struct check_case check_cases[] = {
    /* Every selector, causal and not. */
    {true, INPUT_RANDOM, PISA, true, 1, 507, 507, 4, 2, 64, 64, 16, 4, 0, 0, 0},
    {false, INPUT_RANDOM, PISA, false, 1, 64, 1025, 4, 1, 64, 64, 16, 4, 0, 0, 0},
    {true, INPUT_RANDOM, PISA1, true, 1, 200, 781, 4, 2, 64, 64, 32, 4, 0, 0, 0},
    {false, INPUT_RANDOM, PISA1, false, 1, 64, 781, 4, 2, 64, 64, 32, 4, 0, 0, 0},
    {false, INPUT_RANDOM, PISA2, true, 1, 200, 781, 4, 2, 64, 64, 32, 4, 0, 0, 0},
    {true, INPUT_RANDOM, PISA2, false, 1, 64, 781, 4, 2, 64, 64, 32, 4, 0, 0, 0},
    {true, INPUT_RANDOM, MEAN, true, 1, 200, 781, 4, 2, 64, 64, 32, 4, 0, 0, 0},
    {false, INPUT_RANDOM, MEAN, false, 1, 64, 781, 4, 2, 64, 64, 32, 4, 0, 0, 0},
    {true, INPUT_RANDOM, LSE, true, 1, 200, 781, 4, 2, 64, 64, 32, 4, 0, 0, 0},
    {false, INPUT_RANDOM, LSE, false, 1, 64, 781, 4, 2, 64, 64, 32, 4, 0, 0, 0},
    {true, INPUT_RANDOM, DENSE, true, 1, 130, 257, 4, 2, 64, 64, 64, 1, 0, 0, 0},
    {false, INPUT_RANDOM, DENSE, false, 2, 65, 130, 4, 2, 64, 64, 64, 1, 0, 0, 0},
    /* Groups and dims. */
    {true, INPUT_RANDOM, PISA, true, 1, 63, 63, 16, 1, 64, 64, 32, 16, 0, 0, 0},
    {false, INPUT_RANDOM, PISA, true, 3, 111, 111, 32, 1, 100, 100, 32, 16, 0, 0, 0},
    {false, INPUT_RANDOM, PISA, true, 1, 64, 1024, 12, 1, 60, 60, 32, 8, 0, 0, 0},
    {true, INPUT_RANDOM, PISA, true, 1, 96, 1024, 16, 2, 128, 128, 64, 8, 0, 0, 0},
    {false, INPUT_RANDOM, PISA, true, 1, 64, 300, 7, 1, 80, 80, 16, 5, 0, 0, 0},
    {false, INPUT_RANDOM, PISA, true, 1, 64, 300, 3, 3, 96, 96, 16, 5, 0, 0, 0},
    {false, INPUT_RANDOM, PISA, true, 1, 64, 300, 5, 1, 192, 128, 64, 4, 0, 0, 0},
    {false, INPUT_RANDOM, PISA, true, 1, 64, 300, 2, 1, 256, 256, 64, 4, 0, 0, 0},
    {false, INPUT_RANDOM, PISA, true, 1, 64, 300, 2, 2, 16, 48, 16, 4, 0, 0, 0},
    {true, INPUT_RANDOM, PISA, true, 1, 64, 300, 4, 2, 1, 3, 128, 2, 0, 0, 0},
    /* Lengths: decode, one token, fewer leaves than topk, queries before the first key. */
    {true, INPUT_RANDOM, PISA, true, 2, 1, 4095, 16, 2, 64, 64, 64, 8, 0, 0, 0},
    {false, INPUT_RANDOM, PISA, true, 1, 33, 2048, 4, 1, 64, 64, 64, 8, 0, 0, 0},
    {true, INPUT_RANDOM, PISA, true, 1, 1, 1, 1, 1, 64, 64, 64, 8, 0, 0, 0},
    {false, INPUT_RANDOM, PISA, true, 1, 65, 65, 2, 1, 64, 64, 16, 16, 0, 0, 0},
    {true, INPUT_RANDOM, PISA, true, 1, 100, 40, 2, 1, 64, 64, 16, 2, 0, 0, 0},
    {false, INPUT_RANDOM, PISA, true, 1, 128, 512, 2, 1, 64, 64, 16, 1, 0, 0, 0},
    /* Sequences of different lengths in one tensor, empty ones among them. */
    {true, INPUT_RANDOM, PISA, true, 1, 256, 3, 4, 2, 64, 64, 64, 8, 3, short_q, short_k},
    {false, INPUT_RANDOM, PISA, true, 1, 1, 1, 21, 7, 120, 120, 64, 8, 4, gaps, gaps},
    {false, INPUT_RANDOM, PISA, true, 1, 800, 800, 4, 2, 64, 64, 16, 4, 4, packed, packed},
    {false, INPUT_RANDOM, DENSE, false, 1, 256, 3, 4, 2, 64, 64, 64, 1, 3, short_q, short_k},
    /* Values that hurt. */
    {true, INPUT_LARGE, PISA, true, 1, 100, 400, 4, 2, 64, 64, 16, 4, 0, 0, 0},
    {true, INPUT_CONSTANT, PISA, true, 1, 100, 1000, 4, 2, 64, 64, 16, 4, 0, 0, 0},
    {false, INPUT_CONSTANT, LSE, false, 1, 32, 1000, 4, 2, 64, 64, 16, 4, 0, 0, 0},
    {true, INPUT_ZERO_Q, PISA, true, 1, 100, 400, 4, 2, 64, 64, 16, 4, 0, 0, 0},
};

const size_t check_case_count = sizeof check_cases / sizeof *check_cases;
