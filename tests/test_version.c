/* SPDX-License-Identifier: MIT */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "clattn.h"
#include "config.h"

/* The header, the library and the package say the same version. */
static void test_version(void **state)
{
    (void)state;
    assert_string_equal(clattn_version(), PACKAGE_VERSION);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_version)};
    return cmocka_run_group_tests_name("version", tests, NULL, NULL);
}
