/* SPDX-License-Identifier: MIT */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib/kernel_sources.h"

/* Every embedded text is its file in cl/, byte for byte. */
static void test_texts(void **state)
{
    (void)state;
    const char *srcdir = getenv("srcdir");
    assert_non_null(srcdir);
    for (unsigned i = 0; i < kernel_source_count; i++) {
        const char *text = kernel_sources[i].text;
        char path[4096];
        snprintf(path, sizeof(path), "%s/cl/%s", srcdir, kernel_sources[i].name);
        FILE *file = fopen(path, "rb");
        assert_non_null(file);
        size_t size = strlen(text);
        char *content = malloc(size + 2);
        assert_non_null(content);
        assert_int_equal(fread(content, 1, size + 1, file), size);
        assert_memory_equal(content, text, size);
        free(content);
        fclose(file);
    }
    assert_null(kernel_sources[kernel_source_count].name);
    assert_null(kernel_sources[kernel_source_count].text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_texts)};
    return cmocka_run_group_tests_name("kernel_sources", tests, NULL, NULL);
}
