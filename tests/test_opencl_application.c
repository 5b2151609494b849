/* SPDX-License-Identifier: MIT */
/* An application with OpenCL objects of its own: it allocates, enqueues a kernel of its own that makes the
 * inputs, calls clattn, enqueues a kernel of its own on the results, and waits once, at the end. Nothing runs
 * before it opens a gate, so a call that blocked would never come back. */

#include "opencl_fixture.h"

enum { Q_LEN = 40, KV_LEN = 72, HEADS = 4, DIM = 16, TOPK = 2, LEAF = 16 };
enum { Q = Q_LEN * HEADS * DIM, K = KV_LEN * DIM, Q_OFFSET = 5, K_OFFSET = 3, OUT_OFFSET = 7 };

static const char *const own_source =
    "__kernel void before(__global float *x, int offset, int count, int seed)\n"
    "{\n"
    "    int i = get_global_id(0);\n"
    "    if (i < count) x[offset + i] = (float)((i * 37 + seed) % 128 - 64) / 64.0f;\n"
    "}\n"
    "__kernel void after(__global const float *x, int offset, int count, __global float *y)\n"
    "{\n"
    "    int i = get_global_id(0);\n"
    "    if (i < count) y[i] = 2.0f * x[offset + i] + 1.0f;\n"
    "}\n";

static float q_host[Q], k_host[K], v_host[K], wanted[Q];

struct application {
    cl_device_id device;
    cl_context context;
    cl_command_queue queue;
    cl_program program;
    cl_mem q, k, v, out, result;
    bool out_of_order;
};

static cl_mem buffer(const struct application *own, size_t floats)
{
    cl_int code;
    cl_mem mem = clCreateBuffer(own->context, CL_MEM_READ_WRITE, floats * sizeof(float), NULL, &code);
    assert_int_equal(code, CL_SUCCESS);
    return mem;
}

static void application_open(struct application *own, cl_command_queue_properties properties)
{
    struct opencl_device device;
    cl_int code;
    assert_true(opencl_device_at(0, &device));
    *own = (struct application){.device = device.id};
    own->out_of_order = (properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE) != 0;
    own->context = clCreateContext(NULL, 1, &device.id, NULL, NULL, &code);
    assert_int_equal(code, CL_SUCCESS);
    own->queue = clCreateCommandQueue(own->context, device.id, properties, &code);
    if (code == CL_INVALID_QUEUE_PROPERTIES) {
        clReleaseContext(own->context);
        skip();
    }
    assert_int_equal(code, CL_SUCCESS);
    const char *source = own_source;
    own->program = clCreateProgramWithSource(own->context, 1, &source, NULL, &code);
    assert_int_equal(code, CL_SUCCESS);
    assert_int_equal(clBuildProgram(own->program, 1, &device.id, "", NULL, NULL), CL_SUCCESS);
    own->q = buffer(own, Q_OFFSET + Q);
    own->k = buffer(own, K_OFFSET + K);
    own->v = buffer(own, K_OFFSET + K);
    own->out = buffer(own, OUT_OFFSET + Q);
    own->result = buffer(own, Q);
}

static void application_close(struct application *own)
{
    cl_mem all[] = {own->q, own->k, own->v, own->out, own->result};
    for (int i = 0; i < 5; i++)
        clReleaseMemObject(all[i]);
    clReleaseProgram(own->program);
    clReleaseCommandQueue(own->queue);
    clReleaseContext(own->context);
}

/* x[offset + i] of `count` elements, behind `wait`. */
static cl_event own_kernel(struct application *own, const char *name, cl_mem x, int offset, int count,
                           const int *seed, cl_mem y, cl_event wait)
{
    cl_int code, at = offset, n = count;
    cl_event done = NULL;
    size_t global = (size_t)(count + 63) / 64 * 64, local = 64;
    cl_kernel kernel = clCreateKernel(own->program, name, &code);
    assert_int_equal(code, CL_SUCCESS);
    code = clSetKernelArg(kernel, 0, sizeof x, &x);
    code |= clSetKernelArg(kernel, 1, sizeof at, &at);
    code |= clSetKernelArg(kernel, 2, sizeof n, &n);
    code |= seed ? clSetKernelArg(kernel, 3, sizeof *seed, seed) : clSetKernelArg(kernel, 3, sizeof y, &y);
    assert_int_equal(code, CL_SUCCESS);
    code = clEnqueueNDRangeKernel(own->queue, kernel, 1, NULL, &global, &local, wait != NULL,
                                  wait ? &wait : NULL, &done);
    assert_int_equal(code, CL_SUCCESS);
    clReleaseKernel(kernel);
    return done;
}

static clattn_tensor tensor_at(cl_mem mem, int offset, int len, int heads)
{
    clattn_tensor tensor = clattn_tensor_bthd(mem, CLATTN_FLOAT32, 1, len, heads, DIM);
    tensor.memory = CLATTN_MEMORY_CL_MEM;
    tensor.offset = offset;
    return tensor;
}

/* The library's part, behind `made`; its event. In pieces or in one call. */
static cl_event attend(struct application *own, clattn_context *context, const cl_event *made, int made_count,
                       bool pieces)
{
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_sync sync = CLATTN_SYNC_INIT;
    clattn_blocks *blocks = NULL;
    void *done = NULL, *selected = NULL;
    clattn_tensor q = tensor_at(own->q, Q_OFFSET, Q_LEN, HEADS), k = tensor_at(own->k, K_OFFSET, KV_LEN, 1);
    clattn_tensor v = tensor_at(own->v, K_OFFSET, KV_LEN, 1),
                  out = tensor_at(own->out, OUT_OFFSET, Q_LEN, HEADS);
    select.leaf = LEAF;
    select.topk = TOPK;
    sync.wait_count = (uint32_t)made_count;
    sync.wait_list = (void *const *)made;
    if (pieces) {
        sync.event = &selected;
        assert_success(context, clattn_select(context, NULL, &select, &q, &k, NULL, &blocks, &sync));
        sync.wait_count = 1;
        sync.wait_list = &selected;
        sync.event = &done;
        assert_success(context, clattn_attention_forward(context, NULL, &q, &k, &v, blocks, &out, NULL, &sync));
        clReleaseEvent(selected);
        clattn_blocks_release(context, blocks); /* while they are still to be used */
    } else {
        sync.event = &done;
        assert_success(context, clattn_attention(context, NULL, &select, &q, &k, &v, &out, NULL, &sync));
    }
    assert_non_null(done);
    return done;
}

static void check_profile(cl_event event, cl_command_queue_properties properties)
{
    cl_ulong begin = 0, end = 0;
    if (!(properties & CL_QUEUE_PROFILING_ENABLE)) return;
    assert_int_equal(clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_START, sizeof begin, &begin, NULL),
                     CL_SUCCESS);
    assert_int_equal(clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_END, sizeof end, &end, NULL),
                     CL_SUCCESS);
    assert_true(begin <= end);
}

static void run(cl_command_queue_properties properties, bool pieces)
{
    const int seeds[] = {1, 50, 90};
    struct application own;
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    float result[Q];
    cl_int code, state = CL_COMPLETE;
    cl_event made[3], done, read = NULL;
    application_open(&own, properties);
    desc.cl_context = own.context;
    desc.cl_device = own.device;
    desc.cl_queue = own.queue;
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);

    bool is_held = !platform_is("Oclgrind"); /* its clFlush waits for the work */
    cl_event gate = clCreateUserEvent(own.context, &code);
    assert_int_equal(code, CL_SUCCESS);
    if (!is_held) clSetUserEventStatus(gate, CL_COMPLETE);
    made[0] = own_kernel(&own, "before", own.q, Q_OFFSET, Q, &seeds[0], NULL, gate);
    made[1] = own_kernel(&own, "before", own.k, K_OFFSET, K, &seeds[1], NULL, gate);
    made[2] = own_kernel(&own, "before", own.v, K_OFFSET, K, &seeds[2], NULL, gate);
    done = attend(&own, context, made, 3, pieces);
    cl_event after = own_kernel(&own, "after", own.out, OUT_OFFSET, Q, NULL, own.result, done);
    code = clEnqueueReadBuffer(own.queue, own.result, CL_FALSE, 0, sizeof result, result, 1, &after, &read);
    assert_int_equal(code, CL_SUCCESS);
    assert_int_equal(clGetEventInfo(read, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state, &state, NULL),
                     CL_SUCCESS);
    if (is_held) assert_int_not_equal(state, CL_COMPLETE); /* all is enqueued and nothing has run */
    clattn_context_release(context);
    if (is_held) assert_int_equal(clSetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
    assert_int_equal(clWaitForEvents(1, &read), CL_SUCCESS); /* the one wait */

    for (int i = 0; i < Q; i++)
        if (!(result[i] - wanted[i] < 1e-4f && wanted[i] - result[i] < 1e-4f))
            fail_msg("element %d is %g, must be %g", i, (double)result[i], (double)wanted[i]);
    check_profile(done, properties);
    cl_event all[] = {made[0], made[1], made[2], done, after, read, gate};
    for (int i = 0; i < 7; i++)
        clReleaseEvent(all[i]);
    application_close(&own);
}

static void test_in_order(void **state)
{
    (void)state;
    run(0, false);
    run(CL_QUEUE_PROFILING_ENABLE, true);
}

static void test_out_of_order(void **state)
{
    (void)state;
    run(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, true);
    run(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE | CL_QUEUE_PROFILING_ENABLE, false);
}

static void fill(float *x, int count, int seed)
{
    for (int i = 0; i < count; i++)
        x[i] = (float)((i * 37 + seed) % 128 - 64) / 64.0f;
}

/* The same by the reference. */
static void want(void)
{
    clattn_context *reference = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    select.leaf = LEAF;
    select.topk = TOPK;
    fill(q_host, Q, 1);
    fill(k_host, K, 50);
    fill(v_host, K, 90);
    clattn_tensor q = clattn_tensor_bthd(q_host, CLATTN_FLOAT32, 1, Q_LEN, HEADS, DIM);
    clattn_tensor k = clattn_tensor_bthd(k_host, CLATTN_FLOAT32, 1, KV_LEN, 1, DIM);
    clattn_tensor v = clattn_tensor_bthd(v_host, CLATTN_FLOAT32, 1, KV_LEN, 1, DIM);
    clattn_tensor out = clattn_tensor_bthd(wanted, CLATTN_FLOAT32, 1, Q_LEN, HEADS, DIM);
    desc.backend = CLATTN_BACKEND_REFERENCE;
    assert_int_equal(clattn_context_create(&desc, &reference), CLATTN_SUCCESS);
    assert_success(reference, clattn_attention(reference, NULL, &select, &q, &k, &v, &out, NULL, NULL));
    clattn_context_release(reference);
    for (int i = 0; i < Q; i++)
        wanted[i] = 2 * wanted[i] + 1;
}

int main(void)
{
    if (!has_device()) {
        puts("skipped: no OpenCL device");
        return 77;
    }
    want();
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_in_order), cmocka_unit_test(test_out_of_order)};
    return cmocka_run_group_tests_name("opencl_application", tests, NULL, NULL);
}
