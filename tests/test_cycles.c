/* SPDX-License-Identifier: MIT */
/* Contexts that are made, used and released a thousand times: the same result each time, and memory that does
 * not grow. */

#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

enum { LEN = 40, HEADS = 2, DIM = 16 };

/* Kilobytes in memory; 0 where the system does not tell. */
static long resident(void)
{
    long all = 0, pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file) return 0;
    if (fscanf(file, "%ld %ld", &all, &pages) != 2) pages = 0;
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

/* Bytes that are allocated; 0 where the system does not tell. */
static long allocated(void)
{
#if defined(__GLIBC__) && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 33) && !defined(__SANITIZE_ADDRESS__)
    return (long)mallinfo2().uordblks;
#else
    return 0;
#endif
}

static void cycle(const struct target *target, struct array *in, struct array *out)
{
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_context *context = target_context_new(target);
    clattn_pyramid *pyramid = NULL;
    select.leaf = 16;
    select.topk = 2;
    array_poison(out);
    check_success(
        target,
        clattn_attention(context, NULL, &select, &in->view, &in->view, &in->view, &out->view, NULL, NULL),
        "attention");
    check_success(target, clattn_pyramid_build(context, NULL, 16, &in->view, &pyramid, NULL), "pyramid_build");
    clattn_pyramid_release(context, pyramid);
    clattn_context_release(context);
}

/* The CPU's variants differ in kernels alone, so that one of them tells; slow OpenCL devices tell less. */
static int cycles_of(const struct target *target)
{
    const char *wanted = getenv("CLATTN_TEST_CYCLES");
    bool is_opencl = target->info.backend == CLATTN_BACKEND_OPENCL, is_last = target == targets + target_count - 1;
    if (wanted) return atoi(wanted);
    if (is_opencl) return target->limit > SIZE_TINY ? 1000 : 40;
    return is_last || target[1].info.backend != target->info.backend ? 1000 : 100;
}

static void test_cycles(void **state)
{
    (void)state;
    struct random random = random_seeded(1);
    struct array in = array_new(CLATTN_FLOAT32, 1, LEN, HEADS, DIM, LAYOUT_BTHD);
    struct array first = array_new(CLATTN_FLOAT32, 1, LEN, HEADS, DIM, LAYOUT_BTHD);
    struct array out = array_new(CLATTN_FLOAT32, 1, LEN, HEADS, DIM, LAYOUT_BTHD);
    array_fill(&in, FILL_NORMAL, &random);
    /* Without other contexts: PoCL keeps some KiB of every program that is loaded while any context lives. */
    FOR_EACH_TARGET (target) {
        clattn_context_release(target->context);
        target->context = NULL;
    }
    FOR_EACH_TARGET (target) {
        int cycles = cycles_of(target);
        long before = 0, heap = 0;
        cycle(target, &in, &first);
        for (int i = 1; i < cycles; i++) {
            if (i == cycles / 4) { /* drivers and allocators have filled their pools */
                before = resident();
                heap = allocated();
            }
            cycle(target, &in, &out);
            if (!tensor_equal_bits(&out.view, &first.view))
                fail_msg("%s: cycle %d: another result", target->label, i);
        }
        heap = allocated() - heap;
        before = resident() - before;
        print_message(
            "%s: %d cycles; after the first quarter %ld KiB more in memory, %ld bytes more allocated\n",
            target->label, cycles, before, heap);
        /* Drivers but PoCL keep memory of their own for each context: rusticl 22.3 some 90 KiB, Intel's
         * runtime 8. */
        bool is_exact =
            target->info.backend != CLATTN_BACKEND_OPENCL || strstr(target->info.platform, "Portable") != NULL;
        long allowance = is_exact ? 0 : 128L * cycles;
        assert_true(heap / 1024 < 128 + allowance);
#ifndef __SANITIZE_ADDRESS__ /* which keeps freed memory */
        assert_true(before < 2048 + allowance);
#endif
    }
    array_free(&in);
    array_free(&first);
    array_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cycles)};
    unsetenv("CLATTN_CACHE_SIZE"); /* a cycle loads its programs */
    return cmocka_run_group_tests_name("cycles", tests, targets_open, targets_close);
}
