/* SPDX-License-Identifier: MIT */
/* Launches that the driver refuses although their kernels were built: the next tile of the ladder computes the
 * same.
 *
 * clEnqueueNDRangeKernel of this program comes before the loader's; it refuses what a test wants refused and
 * passes the rest on. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RTLD_NEXT */
#endif
#include "opencl_fixture.h"

#include <dlfcn.h>

/* ---- a driver that refuses launches ---- */

enum { ALL = 1000 };

static const char *refused_kernel; /* NULL: none */
static cl_int refused_code;
static int refused_most; /* the first so many launches of it */
static int refusals;
static cl_program refused_program; /* the last one */

cl_int clEnqueueNDRangeKernel(cl_command_queue queue, cl_kernel kernel, cl_uint dims, const size_t *offset,
                              const size_t *global, const size_t *local, cl_uint count, const cl_event *list,
                              cl_event *event)
{
    static cl_int (*real)(cl_command_queue, cl_kernel, cl_uint, const size_t *, const size_t *, const size_t *,
                          cl_uint, const cl_event *, cl_event *);
    char name[128] = "";
    cl_program program = NULL;
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "clEnqueueNDRangeKernel");
    if (clGetKernelInfo(kernel, CL_KERNEL_FUNCTION_NAME, sizeof name, name, NULL) ||
        clGetKernelInfo(kernel, CL_KERNEL_PROGRAM, sizeof program, &program, NULL))
        return CL_INVALID_KERNEL;
    assert_true(program != refused_program); /* a smaller tile is another program */
    if (!refused_kernel || strcmp(name, refused_kernel) || refusals == refused_most)
        return real(queue, kernel, dims, offset, global, local, count, list, event);
    refusals++;
    refused_program = program;
    return refused_code;
}

static const char
    *unbuilt_part; /* NULL: none; a program with this in its source is not built, the first time */
static cl_int unbuilt_code;
static const char *unbuilt_log;
static int unbuilt;

cl_int clBuildProgram(cl_program program, cl_uint count, const cl_device_id *devices, const char *options,
                      void(CL_CALLBACK *notify)(cl_program, void *), void *user)
{
    static cl_int (*real)(cl_program, cl_uint, const cl_device_id *, const char *,
                          void(CL_CALLBACK *)(cl_program, void *), void *);
    size_t bytes = 0;
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "clBuildProgram");
    if (unbuilt_part && !unbuilt && !clGetProgramInfo(program, CL_PROGRAM_SOURCE, 0, NULL, &bytes)) {
        char *source = calloc(bytes + 1, 1);
        assert_non_null(source);
        clGetProgramInfo(program, CL_PROGRAM_SOURCE, bytes, source, NULL);
        unbuilt = strstr(source, unbuilt_part) != NULL;
        free(source);
        if (unbuilt) return unbuilt_code;
    }
    return real(program, count, devices, options, notify, user);
}

cl_int clGetProgramBuildInfo(cl_program program, cl_device_id device, cl_program_build_info what, size_t room,
                             void *to, size_t *need)
{
    static cl_int (*real)(cl_program, cl_device_id, cl_program_build_info, size_t, void *, size_t *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "clGetProgramBuildInfo");
    if (!unbuilt_part || what != CL_PROGRAM_BUILD_LOG) return real(program, device, what, room, to, need);
    if (need) *need = strlen(unbuilt_log) + 1;
    if (to) snprintf(to, room, "%s", unbuilt_log);
    return CL_SUCCESS;
}

static void refuse(const char *kernel, cl_int code, int most)
{
    refused_kernel = kernel;
    refused_code = code;
    refused_most = most;
    refused_program = NULL;
    refusals = 0;
}

/* ---- a small case ---- */

enum { Q_LEN = 40, KV_LEN = 72, HEADS = 4, KV_HEADS = 1, DIM = 16, Q = Q_LEN * HEADS * DIM, K = KV_LEN * DIM };

static float q[Q], k[K], v[K], dout[Q];

struct result {
    float out[Q], lse[Q_LEN * HEADS], dq[Q], dk[K], dv[K];
    int32_t lists[Q_LEN * 2];
};

static void fill(float *values, int count, uint32_t seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = ((float)(seed >> 25) - 64) / 64;
    }
}

static clattn_tensor tensor(float *data, int len, int heads, int dim)
{
    return clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, len, heads, dim);
}

/* Selection, attention over it, gradients that are added to 1. */
static clattn_status compute(clattn_context *context, bool robust, struct result *result)
{
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_blocks *blocks = NULL;
    clattn_tensor t_q = tensor(q, Q_LEN, HEADS, DIM), t_k = tensor(k, KV_LEN, KV_HEADS, DIM);
    clattn_tensor t_v = tensor(v, KV_LEN, KV_HEADS, DIM), t_dout = tensor(dout, Q_LEN, HEADS, DIM);
    clattn_tensor out = tensor(result->out, Q_LEN, HEADS, DIM), lse = tensor(result->lse, Q_LEN, HEADS, 1);
    clattn_tensor dq = tensor(result->dq, Q_LEN, HEADS, DIM), dk = tensor(result->dk, KV_LEN, KV_HEADS, DIM);
    clattn_tensor dv = tensor(result->dv, KV_LEN, KV_HEADS, DIM);
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    for (int i = 0; i < Q; i++)
        result->dq[i] = 1;
    for (int i = 0; i < K; i++)
        result->dk[i] = result->dv[i] = 1;
    gradients.dout = &t_dout;
    gradients.dq = &dq;
    gradients.dk = &dk;
    gradients.dv = &dv;
    gradients.accumulate = 1;
    if (robust) select.selector = CLATTN_SELECT_ROBUST;
    select.leaf = 16;
    select.topk = 2;
    clattn_status status = clattn_select(context, NULL, &select, &t_q, &t_k, NULL, &blocks, NULL);
    if (!status) status = clattn_blocks_read(context, blocks, result->lists, NULL);
    if (!status) status = clattn_attention_forward(context, NULL, &t_q, &t_k, &t_v, blocks, &out, &lse, NULL);
    if (!status)
        status =
            clattn_attention_backward(context, NULL, &t_q, &t_k, &t_v, blocks, &out, &lse, &gradients, NULL);
    clattn_blocks_release(context, blocks);
    return status;
}

static void assert_close(const char *name, const float *have, const float *want, int count)
{
    for (int i = 0; i < count; i++)
        if (!(have[i] == want[i] || (have[i] - want[i] < 1e-4f && want[i] - have[i] < 1e-4f)))
            fail_msg("%s[%d] is %g, must be %g", name, i, (double)have[i], (double)want[i]);
}

static void assert_result(const char *refused, const struct result *have, const struct result *want)
{
    print_message("with another tile of %s\n", refused);
    assert_memory_equal(have->lists, want->lists, sizeof want->lists);
    assert_close("out", have->out, want->out, Q);
    assert_close("lse", have->lse, want->lse, Q_LEN * HEADS);
    assert_close("dq", have->dq, want->dq, Q);
    assert_close("dk", have->dk, want->dk, K);
    assert_close("dv", have->dv, want->dv, K);
}

/* ---- tests ---- */

static struct result wanted[2]; /* of PISA and of robust selection */

static char said[8192];

static void log_keep(void *user, clattn_log_level level, const char *message)
{
    (void)user, (void)level;
    strncat(said, message, sizeof said - strlen(said) - 2);
    strcat(said, "\n");
}

/* NULL: the device has no such tier. */
static clattn_context *open_tier(const char *variant)
{
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_OPENCL;
    desc.variant = variant;
    desc.log = log_keep;
    desc.log_level = CLATTN_LOG_WARNING;
    said[0] = 0;
    clattn_status status = clattn_context_create(&desc, &context);
    assert_true(status == CLATTN_SUCCESS || (status == CLATTN_NO_DEVICE && strcmp(variant, "portable")));
    return context;
}

/* A tile is refused once and then left alone; what is computed instead is right, and gradients are added once.
 */
static void test_ladder(void **state)
{
    static const struct {
        const char *variant, *kernel;
        cl_int code;
        bool robust;
    } cases[] = {
        {"portable", "select_leaves", CL_OUT_OF_RESOURCES, false},
        {"portable", "select_robust", CL_INVALID_WORK_GROUP_SIZE, true},
        {"portable", "attention_forward", CL_INVALID_WORK_GROUP_SIZE, false},
        {"portable", "attention_backward_q", CL_OUT_OF_RESOURCES, false},
        {"portable", "attention_backward_kv", CL_INVALID_WORK_ITEM_SIZE, false},
        {"subgroup", "select_subgroup", CL_OUT_OF_RESOURCES, false},
        {"subgroup", "attention_subgroup", CL_INVALID_WORK_GROUP_SIZE, false},
    };
    static struct result result;
    char text[64];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        refuse(NULL, CL_SUCCESS, 0);
        clattn_context *context = open_tier(cases[i].variant);
        if (!context) {
            print_message("no tier %s here: %s is not refused\n", cases[i].variant, cases[i].kernel);
            continue;
        }
        refuse(cases[i].kernel, cases[i].code, 1);
        for (int round = 0; round < 2; round++) {
            memset(&result, 0xff, sizeof result);
            assert_success(context, compute(context, cases[i].robust, &result));
            assert_result(cases[i].kernel, &result, &wanted[cases[i].robust]);
            assert_int_equal(refusals, 1);
        }
        snprintf(text, sizeof text, "kernel %s builds on", cases[i].kernel);
        assert_non_null(strstr(said, text));
        snprintf(text, sizeof text, "(%d)", cases[i].code);
        assert_non_null(strstr(said, text));
        clattn_context_release(context);
    }
}

/* Drivers that find it while they build. A program that does not build for another reason is no matter of
 * tiles. */
static void test_builds(void **state)
{
    static const struct {
        cl_int code;
        const char *log;
        clattn_status status;
    } cases[] = {
        {CL_OUT_OF_RESOURCES, "", CLATTN_SUCCESS},
        {CL_BUILD_PROGRAM_FAILURE, "ptxas error : Entry function uses too much shared data (0x12000 bytes)",
         CLATTN_SUCCESS},
        {CL_BUILD_PROGRAM_FAILURE, "error: ran out of registers during register allocation", CLATTN_SUCCESS},
        {CL_BUILD_PROGRAM_FAILURE, "error: expected expression", CLATTN_INTERNAL},
    };
    static struct result result;
    char folder[4096];
    (void)state;
    refuse(NULL, CL_SUCCESS, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cache_empty("unbuilt", folder); /* nothing but sources is built */
        clattn_context *context = open_tier("portable");
        unbuilt_part = "\nattention_forward(__global";
        unbuilt_code = cases[i].code;
        unbuilt_log = cases[i].log;
        unbuilt = 0;
        assert_status(context, compute(context, false, &result), cases[i].status);
        assert_int_equal(unbuilt, 1);
        if (!cases[i].status) assert_result(cases[i].log, &result, &wanted[0]);
        unbuilt_part = NULL;
        clattn_context_release(context);
    }
    folder_files(folder, file_unlink, NULL);
    cache_empty("refused", folder);
}

/* Where no tile runs the call fails, and the detail says why; what has no ladder fails with the driver's own
 * code. */
static void test_end_of_ladder(void **state)
{
    static struct result result;
    (void)state;
    refuse("attention_forward", CL_OUT_OF_RESOURCES, ALL);
    clattn_context *context = open_tier("portable");
    assert_status(context, compute(context, false, &result), CLATTN_DEVICE_LIMIT);
    assert_in_range(refusals, 2, 5);
    assert_non_null(strstr(last_error(context), "attention_forward.cl"));
    assert_non_null(strstr(last_error(context), "(-5)"));
    refuse("pyramid_leaf", CL_OUT_OF_RESOURCES, ALL);
    assert_status(context, compute(context, false, &result), (clattn_status)CL_OUT_OF_RESOURCES);
    assert_int_equal(refusals, 1);
    assert_non_null(strstr(last_error(context), "pyramid_leaf"));
    clattn_context_release(context);
}

static void want(void)
{
    clattn_context *reference = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    assert_int_equal(clattn_context_create(&desc, &reference), CLATTN_SUCCESS);
    for (int robust = 0; robust < 2; robust++)
        assert_success(reference, compute(reference, robust, &wanted[robust]));
    clattn_context_release(reference);
}

int main(void)
{
    char folder[4096];
    if (!has_device()) {
        puts("skipped: no OpenCL device");
        return 77;
    }
    unsetenv("CLATTN_TIER");
    setenv("CLATTN_DENSE", "tiles", 1);
    cache_empty("refused", folder);
    fill(q, Q, 1);
    fill(k, K, 2);
    fill(v, K, 3);
    fill(dout, Q, 4);
    want();
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ladder), cmocka_unit_test(test_builds),
                                       cmocka_unit_test(test_end_of_ladder)};
    int failures = cmocka_run_group_tests_name("opencl_refused", tests, NULL, NULL);
    folder_files(folder, file_unlink, NULL);
    return failures;
}
