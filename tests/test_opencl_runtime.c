/* SPDX-License-Identifier: MIT */
/* The OpenCL runtime on the first device: programs and their cache, errors, fork, threads,
 * teardown. */

#include "opencl_fixture.h"

#include <pthread.h>
#include <sys/wait.h>

static char folder[4096];

static clattn_stats stats_of(clattn_context *context)
{
    clattn_stats stats = {.size = sizeof stats};
    assert_success(context, clattn_context_stats(context, &stats));
    return stats;
}

/* Runs `advance` on 40 numbers `times` times; returns whether the result is right. */
static int run_steps(clattn_context *context, const char *options, uint32_t add, int times)
{
    enum { COUNT = 40 };
    uint32_t x[COUNT], want[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        x[i] = want[i] = i;
        for (int j = 0; j < times; j++)
            want[i] = 3 * want[i] + add;
    }
    struct opencl_launch launch;
    opencl_launch_begin(context, NULL, &launch);
    cl_mem mem = opencl_launch_table(&launch, x, sizeof x);
    if (mem) clRetainMemObject(mem);
    opencl_launch_kernel(&launch, "runtime.cl", "advance", options);
    opencl_arg_mem(&launch, mem);
    opencl_arg_int(&launch, COUNT);
    for (int j = 0; j < times; j++)
        opencl_launch_run(&launch, 1, (size_t[]){48}, (size_t[]){16});
    clattn_status status = opencl_launch_end(&launch);
    struct storage storage = {.mem = mem, .bytes = sizeof x};
    if (!status) status = opencl_storage_read(context, &storage, 0, x, sizeof x);
    opencl_storage_release(context, &storage);
    return status == CLATTN_SUCCESS && memcmp(x, want, sizeof x) == 0;
}

/* ---- programs ---- */

#ifdef HAVE_XXHASH
/* The key that an entry carries. */
static char *key_of_entry(const char *path)
{
    uint32_t key_bytes = 0;
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 12, SEEK_SET), 0); /* behind magic and format */
    assert_int_equal(fread(&key_bytes, sizeof key_bytes, 1, file), 1);
    char *key = calloc(key_bytes + 1, 1);
    assert_non_null(key);
    assert_int_equal(fseek(file, 40, SEEK_SET), 0);
    assert_int_equal(fread(key, 1, key_bytes, file), key_bytes);
    fclose(file);
    return key;
}

/* A payload for all entries of a folder, with right checksums. */
struct payload {
    void *data;
    size_t bytes;
};

static void payload_take(const char *path, void *user)
{
    struct payload *payload = user;
    char *key = key_of_entry(path);
    payload->data = opencl_cache_load(key, &payload->bytes);
    assert_non_null(payload->data);
    free(key);
}

static void payload_put(const char *path, void *user)
{
    const struct payload *payload = user;
    char *key = key_of_entry(path);
    opencl_cache_store(key, payload->data, payload->bytes);
    free(key);
}

static void expect_programs(uint64_t built, uint64_t loaded)
{
    clattn_context *context = context_open();
    assert_true(run_steps(context, "-DSTEP=7", 7, 2));
    assert_true(run_steps(context, "-DSTEP=7", 7, 1)); /* from the table */
    clattn_stats stats = stats_of(context);
    assert_int_equal(stats.programs_built, built);
    assert_int_equal(stats.programs_loaded, loaded);
    assert_int_equal(stats.kernels_enqueued, 3);
    clattn_context_release(context);
}

/* Entries that the cache takes for good and the driver or we do not. */
static void test_cache(void **state)
{
    (void)state;
    struct payload other, garbage = {"this is no binary", 17};
    cl_kernel kernel;
    cache_empty("runtime", folder);
    clattn_context *context = context_open();
    assert_success(context, opencl_kernel(context, "other.cl", "other", "", &kernel));
    clReleaseKernel(kernel);
    clattn_context_release(context);
    assert_int_equal(folder_files(folder, payload_take, &other), 1);
    cache_empty("runtime", folder);

    expect_programs(1, 0);
    assert_int_equal(folder_files(folder, NULL, NULL), 1);
    expect_programs(0, 1);
    folder_files(folder, payload_put, &other); /* another program: it has no such kernel */
    expect_programs(1, 0);
    expect_programs(0, 1);
    if (!platform_is("rusticl")) {
        folder_files(folder, payload_put, &garbage);
        expect_programs(1, 0);
        expect_programs(0, 1);
    }
    setenv("CLATTN_CACHE_DIR", "/dev/null/no", 1);
    expect_programs(1, 0);
    cache_empty("runtime", folder);
    free(other.data);
}

/* Processes that start together on an empty cache. */
static void test_cache_processes(void **state)
{
    (void)state;
    enum { PROCESSES = 4 };
    pid_t children[PROCESSES];
    cache_empty("together", folder);
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) {
            execl("/proc/self/exe", "test_opencl_runtime", "one-process", (char *)NULL);
            _exit(127);
        }
    }
    for (int i = 0; i < PROCESSES; i++) {
        int result = -1;
        assert_int_equal(waitpid(children[i], &result, 0), children[i]);
        assert_true(WIFEXITED(result));
        assert_int_equal(WEXITSTATUS(result), 0);
    }
    assert_int_equal(folder_files(folder, NULL, NULL), 1);
    expect_programs(0, 1);
}
#endif

static void test_build_failures(void **state)
{
    (void)state;
    cl_kernel kernel;
    clattn_context *context = context_open();
    for (int i = 0; i < 2; i++) {
        assert_status(context, opencl_kernel(context, "broken.cl", "broken", "", &kernel), CLATTN_INTERNAL);
        assert_null(kernel);
        if (i == 0) assert_non_null(strstr(last_error(context), "no_such_name"));
        assert_non_null(strstr(last_error(context), "broken.cl"));
    }
    assert_status(context, opencl_kernel(context, "no_such_file.cl", "x", "", &kernel), CLATTN_INTERNAL);
    assert_non_null(strstr(last_error(context), "no_such_file.cl"));
    assert_status(context, opencl_kernel(context, "runtime.cl", "no_such_kernel", "", &kernel),
                  (clattn_status)CL_INVALID_KERNEL_NAME);
    assert_non_null(strstr(last_error(context), "no_such_kernel"));
    assert_true(run_steps(context, "", 1, 3)); /* the context is none the worse */
    clattn_context_release(context);
}

/* ---- processes, threads, teardown ---- */

static void test_fork(void **state)
{
    (void)state;
    clattn_context *context = context_open();
    assert_true(run_steps(context, "", 1, 1));
    clattn_tensor tensor;
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, 4, 1, 4, &tensor));
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        cl_kernel kernel;
        clattn_tensor other;
        float data[16] = {0};
        clattn_device_info info = {.size = sizeof info};
        clattn_tensor host = clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, 4, 1, 4);
        alarm(30); /* a hang is a failure */
        int good = clattn_tensor_create(context, CLATTN_FLOAT32, 1, 4, 1, 4, &other) == CLATTN_FORKED;
        good = good && clattn_tensor_upload(context, &host, &tensor) == CLATTN_FORKED;
        good = good && clattn_tensor_download(context, &tensor, &host) == CLATTN_FORKED;
        good = good && opencl_kernel(context, "runtime.cl", "advance", "", &kernel) == CLATTN_FORKED;
        good = good && clattn_context_device(context, &info) == CLATTN_FORKED;
        good = good && !run_steps(context, "", 1, 1) && strstr(last_error(context), "fork");
        clattn_tensor_release(context, &tensor);
        clattn_context_release(context);
        _exit(good ? 0 : 1);
    }
    int result = -1;
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_true(WIFEXITED(result));
    assert_int_equal(WEXITSTATUS(result), 0);
    assert_true(run_steps(context, "", 1, 2)); /* the parent goes on */
    clattn_tensor_release(context, &tensor);
    clattn_context_release(context);
}

struct worker {
    clattn_context *context; /* NULL: makes its own */
    int number, good;
};

static void *work(void *user)
{
    struct worker *worker = user;
    char options[32];
    clattn_context *context = worker->context;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_OPENCL;
    if (!context && clattn_context_create(&desc, &context)) return NULL;
    worker->good = 1;
    for (int i = 0; i < 20 && worker->good; i++) {
        uint32_t add = (uint32_t)(1 + (i + worker->number) % 3);
        snprintf(options, sizeof options, "-DSTEP=%u", add);
        worker->good = run_steps(context, options, add, 5);
    }
    if (!worker->context) clattn_context_release(context);
    return NULL;
}

static void run_workers(clattn_context *context)
{
    if (platform_is("Oclgrind")) {
        clattn_context_release(context);
        skip();
    }
    enum { WORKERS = 4 };
    pthread_t threads[WORKERS];
    struct worker workers[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        workers[i] = (struct worker){context, i, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < WORKERS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < WORKERS; i++)
        assert_true(workers[i].good);
}

static void test_threads_own_contexts(void **state)
{
    (void)state;
    run_workers(NULL);
}

static void test_threads_one_context(void **state)
{
    (void)state;
    clattn_context *context = context_open();
    run_workers(context);
    clattn_stats stats = stats_of(context);
    assert_int_equal(stats.programs_built + stats.programs_loaded, 3); /* none twice */
    assert_int_equal(stats.kernels_enqueued, 4 * 20 * 5);
    clattn_context_release(context);
}

static long resident_pages(void)
{
    long all = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file) return 0;
    if (fscanf(file, "%ld %ld", &all, &resident) != 2) resident = 0;
    fclose(file);
    return resident;
}

static void test_cycles(void **state)
{
    (void)state;
    const char *wanted = getenv("CLATTN_TEST_CYCLES");
    int cycles = wanted ? atoi(wanted) : 200;
    long before = 0;
    for (int i = 0; i < cycles; i++) {
        if (i == cycles / 4) before = resident_pages(); /* drivers have filled their own pools */
        clattn_context *context = context_open();
        assert_true(run_steps(context, "-DSTEP=7", 7, 2));
        clattn_context_release(context);
    }
    long grown = (resident_pages() - before) * sysconf(_SC_PAGESIZE) / 1024;
    print_message("%d cycles, %ld KiB more resident\n", cycles, grown);
#ifndef __SANITIZE_ADDRESS__ /* which keeps freed memory */
    assert_true(grown < 16L << 10);
#endif
}

int main(int count, char **arguments)
{
    if (!has_device()) {
        puts("skipped: no OpenCL device");
        return 77;
    }
    setenv("CLATTN_TIER", "portable", 1); /* programs and cache files are counted: no canaries */
    use_test_kernels();
    if (count == 2 && strcmp(arguments[1], "one-process") == 0) {
        clattn_context *context = context_open();
        int good = run_steps(context, "-DSTEP=7", 7, 2);
        clattn_context_release(context);
        return !good;
    }
    cache_empty("runtime", folder);
    const struct CMUnitTest tests[] = {
#ifdef HAVE_XXHASH
        cmocka_unit_test(test_cache),
        cmocka_unit_test(test_cache_processes),
#endif
        cmocka_unit_test(test_build_failures),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_threads_own_contexts),
        cmocka_unit_test(test_threads_one_context),
        cmocka_unit_test(test_cycles),
    };
    return cmocka_run_group_tests_name("opencl_runtime", tests, NULL, NULL);
}
