/* SPDX-License-Identifier: MIT */
/* float16 and bfloat16: every code, every rounding, by the library's own conversions and through attention. */

#include "fixture.h"

#include "half.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CODES = 65536 };

static const clattn_dtype dtypes[] = {CLATTN_FLOAT16, CLATTN_BFLOAT16};

static float widen(clattn_dtype dtype, uint16_t code)
{
    return dtype == CLATTN_FLOAT16 ? float_of_float16(code) : float_of_bfloat16(code);
}

static uint16_t narrow(clattn_dtype dtype, float value)
{
    return dtype == CLATTN_FLOAT16 ? float16_of_float(value) : bfloat16_of_float(value);
}

static bool is_nan_code(clattn_dtype dtype, uint16_t code)
{
    return (code & 0x7fff) > (dtype == CLATTN_FLOAT16 ? 0x7c00 : 0x7f80);
}

/* Each code has its value, and narrowing the value gives the code again. */
static void test_every_code(void **state)
{
    (void)state;
    for (int n = 0; n < 2 * CODES; n++) {
        clattn_dtype dtype = dtypes[n / CODES];
        uint16_t code = (uint16_t)n;
        float value = widen(dtype, code);
        if (is_nan_code(dtype, code)) {
            if (!isnan(value) || !is_nan_code(dtype, narrow(dtype, value)))
                fail_msg("%s code %04x: a NaN is lost", dtype_text(dtype), code);
            continue;
        }
        double right = widen16(dtype, code);
        if ((double)value != right || !signbit(value) != !signbit(right))
            fail_msg("%s code %04x: %.9g; %.9g is right", dtype_text(dtype), code, (double)value, right);
        if (narrow(dtype, value) != code)
            fail_msg("%s code %04x: narrows to %04x", dtype_text(dtype), code, narrow(dtype, value));
    }
}

static void check_narrow(clattn_dtype dtype, float value)
{
    uint16_t got = narrow(dtype, value), right = narrow16(dtype, (double)value);
    if (got != right)
        fail_msg("%s: %a narrows to %04x; %04x is right", dtype_text(dtype), (double)value, got, right);
}

/* Between each two neighbours: the middle goes to the even one, a float32 step before and after it to the
 * nearer. */
static void test_rounding(void **state)
{
    (void)state;
    for (int n = 0; n < 2 * 32768; n++) {
        clattn_dtype dtype = dtypes[n / 32768];
        uint16_t code = (uint16_t)(n % 32768), next = (uint16_t)(code + 1);
        if (is_nan_code(dtype, code) || is_nan_code(dtype, next)) continue;
        double low = widen16(dtype, code), high = widen16(dtype, next);
        if (isinf(high))
            high = 2 * low - widen16(dtype, (uint16_t)(code - 1)); /* what one more step would be */
        float middle = (float)((low + high) / 2);
        for (int sign = -1; sign <= 1; sign += 2) {
            check_narrow(dtype, (float)sign * middle);
            check_narrow(dtype, (float)sign * nextafterf(middle, 0));
            check_narrow(dtype, (float)sign * nextafterf(middle, INFINITY));
        }
        uint16_t even = code & 1 ? next : code;
        if (narrow(dtype, middle) != even)
            fail_msg("%s: the middle above %04x goes to %04x", dtype_text(dtype), code, narrow(dtype, middle));
    }
}

/* Random float32 bit patterns, infinities and the largest and smallest numbers. */
static void test_random_floats(void **state)
{
    static const float special[] = {0.0f,
                                    65504,
                                    65519.996f,
                                    65520,
                                    65536,
                                    0x1p-24f,
                                    0x1p-25f,
                                    0x1.000002p-25f,
                                    0x1p-26f,
                                    0x1.fep127f,
                                    0x1.fefffep127f,
                                    0x1.ffp127f,
                                    0x1.fffffep127f,
                                    0x1p-133f,
                                    0x1p-134f,
                                    0x1.8p-134f,
                                    0x1p-149f,
                                    INFINITY};
    (void)state;
    struct random random = random_seeded(0);
    for (int n = 0; n < 2000000; n++) {
        uint32_t bits = (uint32_t)random_bits(&random);
        float value;
        memcpy(&value, &bits, sizeof value);
        if (!isnan(value)) check_narrow(dtypes[n % 2], value);
    }
    for (int n = 0; n < COUNT(special) * 4; n++)
        check_narrow(dtypes[n % 2], n / 2 % 2 ? -special[n / 4] : special[n / 4]);
}

/* Through a whole call: one key, so that out is v. Every finite code comes back as its value in float32, and as
 * itself in its own type. Denormal float32 numbers, which some bfloat16 codes are, may be flushed to 0 on a
 * device. */
static void test_codes_through_attention(void **state)
{
    enum { HEADS = CODES / 64 };
    (void)state;
    for (int n = 0; n < 4; n++) {
        clattn_dtype dtype = dtypes[n / 2];
        struct shape shape = {"codes", SIZE_NORMAL, 1, 1, 1, HEADS, 1, 64, 64, dtype, LAYOUT_BTHD, false};
        struct random random = random_seeded(1);
        struct fixture f = fixture_new(&shape, &random);
        for (int code = 0; code < CODES; code++)
            tensor_set(&f.v.view, 0, 0, code / 64, code % 64, widen16(dtype, (uint16_t)code));
        if (n % 2) fixture_out_dtype(&f, CLATTN_FLOAT32);
        FOR_EACH_TARGET (target) {
            if (!target_runs(target, SIZE_NORMAL)) continue;
            fixture_forward(target, &f, NULL);
            for (int code = 0; code < CODES; code++) {
                double got = tensor_get(&f.out.view, 0, 0, code / 64, code % 64),
                       right = widen16(dtype, (uint16_t)code);
                bool may_flush = fabs(right) < 0x1p-126 && got == 0;
                if (isnan(right) ? !isnan(got) : got != right && !may_flush)
                    fail_msg("%s: %s code %04x arrives as %a; %a is right", target->label, dtype_text(dtype),
                             code, got, right);
            }
        }
        fixture_free(&f);
    }
    target_report("codes through attention");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_code),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_random_floats),
        cmocka_unit_test(test_codes_through_attention),
    };
    return cmocka_run_group_tests_name("half", tests, targets_open, targets_close);
}
