/* SPDX-License-Identifier: MIT */
/* Where the threads of a call run: on which cores, that they are bound only while it computes, and that whoever
 * has placed them already is respected. */

#include "config.h"

#include "cpu.h"
#include "cpu_cases.h"

#ifdef _OPENMP
#include <omp.h>
#endif

enum { THREADS_MAX = 256 };

static const char *program; /* this one */

/* ---- the plan ---- */

static void test_plan(void **state)
{
    static const struct {
        enum cpu_placement placement;
        int cores, threads;
        int places[8];
    } plans[] = {
        {CPU_PLACE_AUTO, 4, 4, {0, 1, 2, 3}},
        {CPU_PLACE_AUTO, 8, 4, {-1, -1, -1, -1}}, /* the system knows which are free */
        {CPU_PLACE_AUTO, 4, 5, {-1, -1, -1, -1, -1}},
        {CPU_PLACE_AUTO, 1, 1, {-1}},
        {CPU_PLACE_NONE, 4, 4, {-1, -1, -1, -1}},
        {CPU_PLACE_CLOSE, 8, 4, {0, 1, 2, 3}},
        {CPU_PLACE_SPREAD, 8, 4, {0, 2, 4, 6}}, /* with two nodes, two threads on each */
        {CPU_PLACE_SPREAD, 12, 5, {0, 2, 4, 7, 9}},
        {CPU_PLACE_CLOSE, 8, 8, {0, 1, 2, 3, 4, 5, 6, 7}},
        {CPU_PLACE_SPREAD, 8, 8, {0, 1, 2, 3, 4, 5, 6, 7}},
        {CPU_PLACE_SPREAD, 8, 1, {-1}},
        {CPU_PLACE_CLOSE, 0, 4, {-1, -1, -1, -1}}, /* a machine that is not known */
    };
    (void)state;
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++)
        for (int n = 0; n < plans[i].threads; n++)
            assert_int_equal(cpu_place_of(plans[i].placement, plans[i].cores, plans[i].threads, n),
                             plans[i].places[n]);
}

/* Any number of threads: cores that exist, none twice, and the nodes of a machine of equal ones differ by one
 * at most. */
static void test_plan_spread(void **state)
{
    enum { CORES = 48, NODES = 4 };
    (void)state;
    for (int threads = 2; threads <= CORES; threads++) {
        int last = -1, on_node[NODES] = {0};
        for (int n = 0; n < threads; n++) {
            int core = cpu_place_of(CPU_PLACE_SPREAD, CORES, threads, n);
            assert_true(core > last && core < CORES);
            on_node[core / (CORES / NODES)]++;
            last = core;
        }
        for (int n = 0; n < NODES; n++)
            assert_in_range(on_node[n], threads / NODES, (threads + NODES - 1) / NODES);
    }
}

/* ---- what the caller has chosen ---- */

static clattn_context *context_new(const char *bind, int threads)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_context *context;
    desc.backend = CLATTN_BACKEND_CPU;
    desc.threads = threads;
    if (bind) setenv("CLATTN_BIND", bind, 1);
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
    unsetenv("CLATTN_BIND");
    return context;
}

static enum cpu_placement placement_of(const char *bind)
{
    clattn_context *context = context_new(bind, 0);
    enum cpu_placement placement = ((const struct cpu_state *)context->state)->placement;
    clattn_context_release(context);
    return placement;
}

static void test_choice(void **state)
{
    (void)state;
    assert_int_equal(placement_of(NULL), CPU_PLACE_AUTO);
    assert_int_equal(placement_of("none"), CPU_PLACE_NONE);
    assert_int_equal(placement_of("close"), CPU_PLACE_CLOSE);
    assert_int_equal(placement_of("spread"), CPU_PLACE_SPREAD);
    assert_int_equal(placement_of("elsewhere"), CPU_PLACE_AUTO);
    setenv("OMP_PLACES", "cores", 1);
    assert_int_equal(placement_of("spread"), CPU_PLACE_NONE);
    unsetenv("OMP_PLACES");
}

#ifdef _OPENMP

/* Threads of a context with the caller's variables, in a process of its own: OpenMP reads them once. */
static int threads_with(const char *variables)
{
    char command[512], said[64] = "";
    snprintf(command, sizeof command, "env -u OMP_NUM_THREADS %s '%s' --threads", variables, program);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_non_null(fgets(said, sizeof said, pipe));
    assert_int_equal(pclose(pipe), 0);
    return atoi(said);
}

/* OpenMP that binds its threads has bound the first one to one place: that is not the whole machine. */
static void test_openmp_places(void **state)
{
    (void)state;
    int threads = threads_with("CLATTN_BIND=");
    assert_true(threads >= 1);
    assert_int_equal(threads_with("OMP_PROC_BIND=true"), threads);
    assert_int_equal(threads_with("OMP_PROC_BIND=close OMP_PLACES=cores"), threads);
    assert_int_equal(threads_with("OMP_PROC_BIND=false"), threads);
#ifdef HAVE_HWLOC
    assert_int_equal(threads_with("OMP_PLACES={0}"), 1);
#endif
    assert_int_equal(threads_with("OMP_NUM_THREADS=3"), 3);
}

#ifdef HAVE_HWLOC

/* ---- bound, and free again ---- */

/* Cores of the threads of a region, of each its own; returns how many threads there were. */
static int cores_of_region(const clattn_context *context, int *core)
{
    const struct cpu_machine *machine = &((const struct cpu_state *)context->state)->machine;
    struct cpu_team team = cpu_team(context);
    int threads = 0;
#pragma omp parallel num_threads(team.threads)
    {
        struct cpu_binding *binding = cpu_team_enter(&team);
        core[omp_get_thread_num()] = cpu_thread_core(machine);
#pragma omp single
        threads = omp_get_num_threads();
        cpu_team_leave(&team, binding);
    }
    return threads;
}

/* All threads of a region may run where the process may. */
static void check_free(const clattn_context *context, int threads)
{
    const struct cpu_machine *machine = &((const struct cpu_state *)context->state)->machine;
    int least = machine->cores;
#pragma omp parallel num_threads(threads) reduction(min : least)
    least = cpu_cores_here(machine);
    assert_int_equal(least, machine->cores);
}

static void forward_once(clattn_context *context)
{
    clattn_tensor q = tensor_make(0, CLATTN_FLOAT32, 1, 70, 2, 32),
                  k = tensor_make(0, CLATTN_FLOAT32, 1, 70, 1, 32);
    clattn_tensor out = tensor_make(0, CLATTN_FLOAT32, 1, 70, 2, 32);
    tensor_fill(&q, 1);
    tensor_fill(&k, 1);
    assert_int_equal(clattn_attention_forward(context, NULL, &q, &k, &k, NULL, &out, NULL, NULL),
                     CLATTN_SUCCESS);
    tensor_free(&q);
    tensor_free(&k);
    tensor_free(&out);
}

static int cores_of_machine(void)
{
    struct cpu_machine machine = cpu_machine_read();
    int cores = machine.cores;
    cpu_machine_free(&machine);
    return cores;
}

/* Threads of a context of `wanted` are where the plan says, each on a core of its own, and free afterwards. */
static void check_bound(const char *bind, int cores, int wanted)
{
    int core[THREADS_MAX];
    clattn_context *context = context_new(bind, wanted);
    enum cpu_placement placement = ((const struct cpu_state *)context->state)->placement;
    assert_int_equal(cores_of_region(context, core), wanted);
    for (int n = 0; n < wanted && cores > 1; n++)
        assert_int_equal(core[n], cpu_place_of(placement, cores, wanted, n));
    check_free(context, wanted);
    forward_once(context);
    check_free(context, wanted);
    clattn_context_release(context);
}

static void test_bound(void **state)
{
    static const char *const ways[] = {NULL, "close", "spread"};
    int cores = cores_of_machine();
    const int threads[] = {1, 2, (cores + 1) / 2, cores, cores + 1};
    (void)state;
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++)
        for (size_t n = 0; n < sizeof threads / sizeof *threads; n++)
            if (threads[n] <= THREADS_MAX) check_bound(ways[way], cores, threads[n]);
}

/* A thread that the caller has bound stays where it is, and has no more threads than cores. */
static void test_narrowed(void **state)
{
    (void)state;
    bool told = getenv("OMP_NUM_THREADS") != NULL; /* then that number holds */
    clattn_context *context = context_new("close", 0), *late;
    const struct cpu_machine *machine = &((const struct cpu_state *)context->state)->machine;
    int last = machine->cores - 1;
    assert_true(last >= 0);
    struct cpu_binding *own = cpu_thread_bind(machine, last);
    assert_non_null(own);
    if (!told) assert_int_equal(cpu_threads(context), 1);
    if (last > 0) assert_null(cpu_team(context).machine);
    forward_once(context);
    late = context_new(NULL, 0); /* made by a bound thread */
    if (!told) assert_int_equal(cpu_threads(late), 1);
    forward_once(late);
    assert_int_equal(cpu_thread_core(machine), last);
    cpu_thread_restore(machine, own);
    assert_int_equal(cpu_cores_here(machine), machine->cores);
    clattn_context_release(late);
    clattn_context_release(context);
}

/* Within the caller's own region, and beside another call, no thread is bound. */
static void test_not_alone(void **state)
{
    (void)state;
    clattn_context *context = context_new("close", 0);
    int bound = 0;
#pragma omp parallel num_threads(2) reduction(+ : bound)
    if (omp_in_parallel()) bound += cpu_team(context).machine != NULL;
    assert_int_equal(bound, 0);
    cpu_call_begin();
    cpu_call_begin();
    assert_null(cpu_team(context).machine);
    cpu_call_end();
    cpu_call_end();
    clattn_context_release(context);
}

#endif
#endif

/* ---- memory ---- */

/* Memory of a machine with several nodes is memory, whatever the system makes of the wish to spread it. */
static void test_memory(void **state)
{
    static const size_t sizes[] = {1, 1000, 1 << 20, (3 << 20) + 5};
    struct cpu_machine machine = cpu_machine_read(), several = machine;
    (void)state;
    several.nodes = 2;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const struct cpu_machine *of[] = {&machine, machine.cores ? &several : &machine};
        for (int n = 0; n < 2; n++) {
            unsigned char *memory = cpu_memory_new(of[n], sizes[i]);
            assert_non_null(memory);
            assert_int_equal((uintptr_t)memory % 64, 0);
            memset(memory, 7, sizes[i]);
            assert_int_equal(memory[sizes[i] - 1], 7);
            cpu_memory_free(of[n], memory, sizes[i]);
        }
    }
    cpu_machine_free(&machine);
}

static int print_threads(void)
{
    clattn_context *context = context_new(NULL, 0);
    printf("%d\n", cpu_threads(context));
    clattn_context_release(context);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan),          cmocka_unit_test(test_plan_spread),
        cmocka_unit_test(test_choice),
#ifdef _OPENMP
        cmocka_unit_test(test_openmp_places),
#ifdef HAVE_HWLOC
        cmocka_unit_test(test_bound),         cmocka_unit_test(test_narrowed),
        cmocka_unit_test(test_not_alone),
#endif
#endif
        cmocka_unit_test(test_memory),
    };
    program = argv[0];
    if (argc > 1 && strcmp(argv[1], "--threads") == 0) return print_threads();
    return cmocka_run_group_tests_name("cpu_places", tests, NULL, NULL);
}
