/* SPDX-License-Identifier: MIT */
/* Exponentials of every CPU variant against those of the C library in double. */

#include "config.h"

#include "cpu_cases.h"
#include "kernels_avx2.h"
#include "kernels_avx512.h"
#include "kernels_avx512vnni.h"
#include "kernels_c.h"
#include "kernels_neon.h"

enum exp_kind { EXP, EXP_BELOW, EXP2_BELOW, EXP_KINDS };

typedef void exp_function(const float *x, float *result, int64_t count);

/* The reference takes the C library's own. */
static const struct {
    const char *variant;
    exp_function *of[EXP_KINDS];
} functions[] = {
    {"c", {exp_c, exp_below_c, exp2_below_c}},
#ifdef HAVE_CPU_AVX2
    {"avx2", {exp_avx2, exp_below_avx2, exp2_below_avx2}},
#endif
#ifdef HAVE_CPU_AVX512
    {"avx512", {exp_avx512, exp_below_avx512, exp2_below_avx512}},
#endif
#ifdef HAVE_CPU_AVX512VNNI
    {"avx512vnni", {exp_avx512vnni, exp_below_avx512vnni, exp2_below_avx512vnni}},
#endif
#ifdef HAVE_CPU_NEON
    {"neon", {exp_neon, exp_below_neon, exp2_below_neon}},
#endif
};

enum { FUNCTIONS = sizeof functions / sizeof *functions };

/* Distance in units of the last place that a float has at `exact`. */
static double units_off(float value, double exact)
{
    if (exact >= 0x1.ffffffp127) return value == INFINITY ? 0 : INFINITY;
    int exponent = ilogb(exact);
    return fabs((double)value - exact) / ldexp(1, (exact == 0 || exponent < -126 ? -126 : exponent) - 23);
}

/* Every 509th float from -inf to +inf, and all those around the ends of the range. */
static void check_exp(const char *variant, exp_function *function)
{
    enum { BATCH = 64 };
    float x[BATCH], result[BATCH];
    int64_t step = 509, count = 2 * INT64_C(0x7f800001);
    double worst = 0;
    float worst_at = 0;
    for (int64_t at = 0; at < count; at += BATCH * step) {
        for (int64_t i = 0; i < BATCH; i++) {
            int64_t bits = MIN(at + i * step, count - 1);
            x[i] = float_of_bits((uint32_t)(bits / 2) | (bits & 1 ? 0x80000000u : 0));
        }
        function(x, result, BATCH);
        for (int i = 0; i < BATCH; i++) {
            double off = units_off(result[i], exp((double)x[i]));
            if (!(off <= worst)) {
                worst = off;
                worst_at = x[i];
            }
        }
    }
    printf("exp %s: at most %.3f ulp, at %.9g\n", variant, worst, (double)worst_at);
    assert_true(worst <= 2);
    const float ends[16] = {0,      -0.0f,  INFINITY, -INFINITY, 88.7228394f, 88.7228317f, 88.8f,  89,
                            -87.3f, -87.4f, -103.9f,  -103.98f,  -104,        -105,        -1e38f, 1e38f};
    float values[16], nan[16], not_numbers[16];
    function(ends, values, 16);
    for (int i = 0; i < 16; i++) {
        nan[i] = i % 2 ? NAN : -NAN;
        if (!(units_off(values[i], exp((double)ends[i])) <= 2))
            fail_msg("exp %s: exp(%.9g) is %.9g", variant, (double)ends[i], (double)values[i]);
    }
    function(nan, not_numbers, 16);
    for (int i = 0; i < 16; i++)
        assert_true(isnan(not_numbers[i]));
}

/* Weights of a softmax: every 61st float from -0 down, 0 below -87. */
static void check_exp_below(const char *variant, exp_function *function)
{
    enum { BATCH = 64 };
    float x[BATCH], result[BATCH];
    for (int64_t at = 0; at <= 0x7f800000; at += BATCH * 61) {
        for (int64_t i = 0; i < BATCH; i++)
            x[i] = float_of_bits(0x80000000u | (uint32_t)MIN(at + i * 61, 0x7f800000));
        function(x, result, BATCH);
        for (int i = 0; i < BATCH; i++)
            if (x[i] < -87 ? result[i] != 0 : !(units_off(result[i], exp((double)x[i])) <= 2))
                fail_msg("exp below 0, %s: exp(%.9g) is %.9g", variant, (double)x[i], (double)result[i]);
    }
    for (int i = 0; i < BATCH; i++)
        x[i] = i % 2 ? NAN : -NAN;
    function(x, result, BATCH);
    for (int i = 0; i < BATCH; i++)
        assert_true(isnan(result[i]));
}

/* Terms of a sum beside a 1: every 61st float from -0 down, 2^-125 below -125. */
static void check_exp2_below(const char *variant, exp_function *function)
{
    enum { BATCH = 64 };
    float x[BATCH], result[BATCH];
    double worst = 0;
    for (int64_t at = 0; at <= 0x7f800000; at += BATCH * 61) {
        for (int64_t i = 0; i < BATCH; i++)
            x[i] = float_of_bits(0x80000000u | (uint32_t)MIN(at + i * 61, 0x7f800000));
        function(x, result, BATCH);
        for (int i = 0; i < BATCH; i++) {
            double off = fabs((double)result[i] * exp2(-fmax((double)x[i], -125)) - 1);
            if (!(off <= 2e-7)) fail_msg("2^x, %s: 2^%.9g is %.9g", variant, (double)x[i], (double)result[i]);
            worst = fmax(worst, off);
        }
    }
    printf("2^x %s: within %.3g\n", variant, worst);
    for (int i = 0; i < BATCH; i++)
        x[i] = i % 2 ? NAN : -NAN;
    function(x, result, BATCH);
    for (int i = 0; i < BATCH; i++)
        assert_true(isnan(result[i]));
}

/* Each variant that runs here is in the table, and is tested under its own name. */
static void check_variants(void (*check)(const char *variant, exp_function *function), enum exp_kind kind)
{
    for (int n = 0; n < variant_count; n++) {
        size_t i = 0;
        while (i < FUNCTIONS && strcmp(functions[i].variant, variants[n].name))
            i++;
        if (i == FUNCTIONS) fail_msg("no exponentials of variant %s", variants[n].name);
        check(variants[n].name, functions[i].of[kind]);
    }
}

static void test_exp(void **state)
{
    (void)state;
    check_variants(check_exp, EXP);
}

static void test_exp_below(void **state)
{
    (void)state;
    check_variants(check_exp_below, EXP_BELOW);
}

static void test_exp2_below(void **state)
{
    (void)state;
    check_variants(check_exp2_below, EXP2_BELOW);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_exp_below),
        cmocka_unit_test(test_exp2_below),
    };
    contexts_open();
    int failed = cmocka_run_group_tests_name("cpu_exp", tests, NULL, NULL);
    contexts_close();
    return failed;
}
