/* SPDX-License-Identifier: MIT */
/* What happens when a kernel or a whole tier of NVIDIA cards is refused. Skipped where no NVIDIA card is. */

#include "nvidia.h"

#include <stdlib.h>
#include <string.h>

/* A canary that computes wrongly, and one that does not build, take their tier away. */
static void test_canaries(void **state)
{
    (void)state;
    if (tiers >= TIER_HOPPER) {
        kernel_spoil("canary_wgmma.cl", "= s[n].x;", "= s[n].x + 1.0f;");
        struct target target = card_open(NULL);
        assert_string_equal(target.info.variant, "mma");
        assert_non_null(strstr(recorder.text, "tier hopper is not used: canary_wgmma"));
        card_close(&target);
        kernel_restore("canary_wgmma.cl");
        kernel_spoil("wgmma_nvidia.cl", "wgmma.fence", "wgmma.no_such_instruction");
        target = card_open(NULL);
        assert_string_equal(target.info.variant, "mma");
        assert_non_null(strstr(recorder.text, "does not build for sm_90a"));
        card_close(&target);
        kernel_restore("wgmma_nvidia.cl");
    }
    kernel_spoil("canary_mma.cl", "= d.w;", "= d.z;");
    struct target target = card_open(NULL);
    assert_string_equal(target.info.variant, "portable");
    card_close(&target);
    kernel_restore("canary_mma.cl");
}

static const struct path_case cases[] = {
    {{"few blocks of many", SIZE_NORMAL, 1, 70, 2100, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted-hopper"},
    {{"odd dimensions", SIZE_NORMAL, 1, 40, 1900, 1, 3, 100, 60, CLATTN_BFLOAT16, LAYOUT_PADDED, false},
     LIST_RANDOM, 1, 2, 0, .mma = "inverted", .hopper = "inverted"},
    {{"neighbours agree", SIZE_NORMAL, 1, 203, 500, 1, 16, 128, 128, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
     LIST_SHARED, 1, 4, 0, .mma = "inverted", .hopper = "union"},
};

/* A kernel that computes wrongly is found and the next path serves the call, rightly. */
static void test_spoiled_paths(void **state)
{
    static const struct {
        const char *file, *from, *to;
        int number; /* of cases */
        const char *then;
    } spoiled[] = {
        {"attention_inverted_wgmma.cl", "scale *= LOG2E;", "scale *= 0.8f * LOG2E;", 0, "inverted"},
        {"attention_inverted_mma.cl", "sum = sum_quad(sum);",
         "sum = 2 * sum_quad(sum);", 1, "token"},
        {"attention_tile_wgmma.cl", "float2 top = row_max_of(s) * scale;",
         "float2 top = row_max_of(s) * scale; scale *= 0.8f;", 2, "inverted-hopper"},
    };
    (void)state;
    for (int n = 0; n < COUNT(spoiled); n++) {
        struct path_case c = cases[spoiled[n].number];
        if (tiers < TIER_HOPPER && strstr(spoiled[n].file, "wgmma")) continue;
        kernel_spoil(spoiled[n].file, spoiled[n].from, spoiled[n].to);
        struct target target = card_open(NULL);
        c.mma = c.hopper = spoiled[n].then;
        check_path(&target, &c, 1400);
        card_close(&target);
        kernel_restore(spoiled[n].file);
    }
}

/* The variable limits the tier, and says what it does not know. */
static void test_limit(void **state)
{
    (void)state;
    setenv("CLATTN_TIER", "portable", 1);
    struct target target = card_open(NULL);
    assert_string_equal(target.info.variant, "portable");
    assert_string_equal(target.info.variants, "portable");
    card_close(&target);
    setenv("CLATTN_TIER", "mma", 1);
    target = card_open(NULL);
    assert_string_equal(target.info.variant, "mma");
    card_close(&target);
    unsetenv("CLATTN_TIER");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_canaries),
        cmocka_unit_test(test_spoiled_paths),
        cmocka_unit_test(test_limit),
    };
    if (!card_find()) return 77;
    return cmocka_run_group_tests_name("opencl nvidia refused", tests, NULL, NULL);
}
