/* SPDX-License-Identifier: MIT */
/* How many threads a context takes: of the machine, its control group, and the caller's own threads. */

#include "config.h"

#include "cpu.h"
#include "cpu_cases.h"

#ifdef _OPENMP
#include <omp.h>
#endif

static void test_quota(void **state)
{
    (void)state;
    assert_int_equal(cpu_quota_of("max 100000\n"), 0);
    assert_int_equal(cpu_quota_of("-1 100000"), 0);
    assert_int_equal(cpu_quota_of(""), 0);
    assert_int_equal(cpu_quota_of("200000"), 0);
    assert_int_equal(cpu_quota_of("200000 100000\n"), 2);
    assert_int_equal(cpu_quota_of("150000 100000\n"), 2);
    assert_int_equal(cpu_quota_of("1000 100000\n"), 1);
    struct cpu_machine machine = cpu_machine_read();
    assert_in_range(cpu_threads_default(&machine), getenv("OMP_NUM_THREADS") ? 0 : 1, 1 << 20);
    cpu_machine_free(&machine);
}

#ifdef HAVE_HWLOC
/* Machines that hwloc invents: one thread a core, whatever the packages, nodes and hardware threads; the share
 * of a core in the level-2 cache, the least when cores differ in nothing else. */
static void test_machines(void **state)
{
    (void)state;
    static const struct {
        const char *topology;
        int cores, nodes;
        int64_t cache_bytes;
    } machines[] = {
        {"pack:1 l2:4(size=1048576) core:1 pu:2", 4, 1, 1 << 20},
        {"pack:2 numa:2 l2:8(size=2097152) core:1 pu:1", 32, 4, 2 << 20},
        {"pack:1 l2:2(size=4194304) core:4 pu:1", 8, 1, 1 << 20}, /* four cores share a cache */
        {"numa:4 core:3 pu:2", 12, 4, 0},
        {"core:1 pu:8", 1, 1, 0},
    };
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        assert_int_equal(setenv("HWLOC_SYNTHETIC", machines[i].topology, 1), 0);
        struct cpu_machine machine = cpu_machine_read();
        assert_int_equal(machine.cores, machines[i].cores);
        assert_int_equal(machine.nodes, machines[i].nodes);
        assert_int_equal(machine.cache_bytes, machines[i].cache_bytes);
#ifdef _OPENMP
        if (!getenv("OMP_NUM_THREADS")) assert_true(cpu_threads_default(&machine) <= machine.cores);
#endif
        cpu_machine_free(&machine);
    }
    unsetenv("HWLOC_SYNTHETIC");
}
#endif

/* Calls at work at the same time divide the cores; a number that the caller names holds. */
static void test_shared_cores(void **state)
{
    (void)state;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_context *context, *fixed;
    desc.backend = CLATTN_BACKEND_CPU;
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
    desc.threads = 3;
    assert_int_equal(clattn_context_create(&desc, &fixed), CLATTN_SUCCESS);
    struct cpu_state *cpu = context->state;
    int alone = cpu_threads(context), own = cpu->threads;
    assert_true(alone >= 1);
    for (int calls = 1; calls <= 5; calls++) {
        cpu_call_begin();
        assert_int_equal(cpu_threads(context), own ? MAX(alone / calls, 1) : alone);
#ifdef _OPENMP
        assert_int_equal(cpu_threads(fixed), 3);
#endif
    }
    for (int calls = 1; calls <= 5; calls++)
        cpu_call_end();
    assert_int_equal(cpu_threads(context), alone);
#ifdef _OPENMP
    int more = 0; /* within the caller's own team each call stays in its thread */
#pragma omp parallel num_threads(2) reduction(+ : more)
    if (omp_in_parallel()) more += cpu_threads(context) - 1;
    assert_int_equal(more, 0);
#endif
    clattn_context_release(context);
    clattn_context_release(fixed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quota),
#ifdef HAVE_HWLOC
        cmocka_unit_test(test_machines),
#endif
        cmocka_unit_test(test_shared_cores),
    };
    return cmocka_run_group_tests_name("cpu_threads", tests, NULL, NULL);
}
