/* SPDX-License-Identifier: MIT */
/* The caller's OpenCL objects: queues in and out of order, wait lists, events, what belongs to
 * another context. */

#include "opencl_fixture.h"

/* ---- a caller with OpenCL objects of its own ---- */

struct caller {
    cl_context context;
    cl_device_id device;
    cl_command_queue queue;
};

static void caller_open(struct caller *caller, cl_command_queue_properties properties)
{
    struct opencl_device device;
    cl_int code;
    assert_true(opencl_device_at(0, &device));
    caller->device = device.id;
    caller->context = clCreateContext(NULL, 1, &device.id, NULL, NULL, &code);
    assert_int_equal(code, CL_SUCCESS);
    caller->queue = clCreateCommandQueue(caller->context, device.id, properties, &code);
    if (code == CL_INVALID_QUEUE_PROPERTIES) { /* a device without out-of-order queues */
        clReleaseContext(caller->context);
        skip();
    }
    assert_int_equal(code, CL_SUCCESS);
}

static void caller_close(struct caller *caller)
{
    clReleaseCommandQueue(caller->queue);
    clReleaseContext(caller->context);
}

static clattn_status caller_share(const struct caller *caller, cl_command_queue queue, clattn_context **context,
                                  char detail[2048])
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.cl_context = caller->context;
    desc.cl_device = caller->device;
    desc.cl_queue = queue;
    desc.error = detail;
    desc.error_bytes = 2048;
    return clattn_context_create(&desc, context);
}

static cl_int event_state(cl_event event)
{
    cl_int state = -1;
    assert_int_equal(clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state, &state, NULL),
                     CL_SUCCESS);
    return state;
}

/* An event that holds back the work until the caller opens it. Oclgrind's clFlush waits for the work: open
 * there. */
static bool gate_is_held(void)
{
    return !platform_is("Oclgrind");
}

static cl_event gate_new(const struct caller *caller)
{
    cl_int code;
    cl_event gate = clCreateUserEvent(caller->context, &code);
    assert_int_equal(code, CL_SUCCESS);
    if (!gate_is_held()) assert_int_equal(clSetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
    return gate;
}

/* Nothing ran and nothing blocked. */
static void gate_check(cl_event done)
{
    if (gate_is_held()) assert_true(event_state(done) > CL_COMPLETE);
}

static void gate_open(cl_event gate)
{
    if (gate_is_held()) assert_int_equal(clSetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
}

/* Two calls of many dependent commands each, behind an event that only the caller completes. */
static void enqueue_behind_event(cl_command_queue_properties properties, bool own_queue)
{
    enum { COUNT = 64, TIMES = 25 };
    struct caller caller;
    clattn_context *context = NULL;
    char detail[2048];
    uint32_t x[COUNT], want[COUNT];
    cl_int code;
    caller_open(&caller, properties);
    assert_int_equal(caller_share(&caller, own_queue ? caller.queue : NULL, &context, detail), CLATTN_SUCCESS);
    for (uint32_t i = 0; i < COUNT; i++) {
        x[i] = want[i] = i;
        for (int j = 0; j < 2 * TIMES; j++)
            want[i] = 3 * want[i] + (j < TIMES ? 1 : 5);
    }
    cl_mem mem = clCreateBuffer(caller.context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, sizeof x, x, &code);
    assert_int_equal(code, CL_SUCCESS);
    cl_event gate = gate_new(&caller), done = NULL;
    for (int part = 0; part < 2; part++) {
        clattn_sync sync = CLATTN_SYNC_INIT;
        sync.queue = own_queue ? NULL : caller.queue;
        sync.wait_count = part == 0;
        sync.wait_list = part == 0 ? (void *const *)&gate : NULL;
        sync.event = part == 1 ? (void **)&done : NULL;
        struct opencl_launch launch;
        opencl_launch_begin(context, &sync, &launch);
        opencl_launch_kernel(&launch, "runtime.cl", "advance", part ? "-DSTEP=5" : "-DSTEP=1");
        opencl_arg_mem(&launch, mem);
        opencl_arg_int(&launch, COUNT);
        for (int j = 0; j < TIMES; j++)
            opencl_launch_run(&launch, 1, (size_t[]){COUNT}, (size_t[]){16});
        assert_success(context, opencl_launch_end(&launch));
    }
    assert_non_null(done);
    gate_check(done);
    clattn_context_release(context); /* before the work is done: the driver keeps what it needs */
    gate_open(gate);
    assert_int_equal(clWaitForEvents(1, &done), CL_SUCCESS);
    assert_int_equal(event_state(done), CL_COMPLETE);
    assert_int_equal(clEnqueueReadBuffer(caller.queue, mem, CL_TRUE, 0, sizeof x, x, 0, NULL, NULL),
                     CL_SUCCESS);
    assert_memory_equal(x, want, sizeof x);
    clReleaseEvent(done);
    clReleaseEvent(gate);
    clReleaseMemObject(mem);
    caller_close(&caller);
}

static void test_in_order(void **state)
{
    (void)state;
    enqueue_behind_event(0, false);
    enqueue_behind_event(CL_QUEUE_PROFILING_ENABLE, true);
}

static void test_out_of_order(void **state)
{
    (void)state;
    enqueue_behind_event(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, false);
    enqueue_behind_event(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE | CL_QUEUE_PROFILING_ENABLE, true);
}

/* A call with nothing to compute: its event still comes after the wait list. */
static void enqueue_nothing(cl_command_queue_properties properties)
{
    struct caller caller;
    clattn_context *context = NULL;
    char detail[2048];
    caller_open(&caller, properties);
    assert_int_equal(caller_share(&caller, caller.queue, &context, detail), CLATTN_SUCCESS);
    cl_event gate = gate_new(&caller), done = NULL;
    clattn_sync sync = {sizeof sync, NULL, 1, (void *const *)&gate, (void **)&done};
    struct opencl_launch launch;
    opencl_launch_begin(context, &sync, &launch);
    opencl_launch_kernel(&launch, "runtime.cl", "advance", "");
    opencl_launch_run(&launch, 2, (size_t[]){16, 0}, (size_t[]){16, 1});
    assert_success(context, opencl_launch_end(&launch));
    assert_non_null(done);
    gate_check(done);
    gate_open(gate);
    assert_int_equal(clWaitForEvents(1, &done), CL_SUCCESS);
    clReleaseEvent(done);
    clReleaseEvent(gate);
    clattn_context_release(context);
    caller_close(&caller);
}

static void test_empty_in_order(void **state)
{
    (void)state;
    enqueue_nothing(0);
}

static void test_empty_out_of_order(void **state)
{
    (void)state;
    enqueue_nothing(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
}

/* A list with padded rows that is selected anew while work that reads it is enqueued: that work still gets the
 * old one. Every value is 1, and so is every row of the result that has a list. */
static void test_list_in_use(void **state)
{
    (void)state;
    enum { LEN = 20, DIM = 16, ELEMENTS = LEN * DIM };
    static const int32_t used[] = {3};
    struct caller caller;
    clattn_context *context = NULL;
    char detail[2048];
    float ones[ELEMENTS], result[ELEMENTS];
    unsetenv("CLATTN_KERNEL_DIR"); /* the library's own kernels */
    caller_open(&caller, 0);
    /* Rusticl of Mesa 22.3 does not show a queue what another one has written. */
    cl_command_queue queue = platform_is("rusticl") ? caller.queue : NULL;
    assert_int_equal(caller_share(&caller, queue, &context, detail), CLATTN_SUCCESS);
    for (int i = 0; i < ELEMENTS; i++)
        ones[i] = 1;
    clattn_tensor host = clattn_tensor_bthd(ones, CLATTN_FLOAT32, 1, LEN, 1, DIM), x, out;
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, LEN, 1, DIM, &x));
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, LEN, 1, DIM, &out));
    assert_success(context, clattn_tensor_upload(context, &host, &x));
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    select.selector = CLATTN_SELECT_FLAT_LSE;
    select.leaf = 16;
    clattn_blocks *blocks = NULL;
    assert_success(context, clattn_select(context, &attention, &select, &x, &x, NULL, &blocks, NULL));

    cl_event gate = gate_new(&caller);
    clattn_sync sync = CLATTN_SYNC_INIT, next = CLATTN_SYNC_INIT;
    sync.queue = next.queue = caller.queue;
    sync.wait_count = 1;
    sync.wait_list = (void *const *)&gate;
    assert_success(context,
                   clattn_attention_forward(context, &attention, &x, &x, &x, blocks, &out, NULL, &sync));
    attention.seqused_q = used;
    assert_success(context, clattn_select(context, &attention, &select, &x, &x, NULL, &blocks, &next));
    gate_open(gate);
    assert_int_equal(clFinish(caller.queue), CL_SUCCESS);
    host.data = result;
    assert_success(context, clattn_tensor_download(context, &out, &host));
    for (int i = 0; i < ELEMENTS; i++)
        assert_true(result[i] > 0.999f && result[i] < 1.001f);
    int32_t counts[LEN];
    assert_success(context, clattn_blocks_read(context, blocks, NULL, counts));
    for (int i = 0; i < LEN; i++)
        assert_int_equal(counts[i] > 0, i < used[0]);
    clattn_blocks_release(context, blocks);
    clattn_tensor_release(context, &x);
    clattn_tensor_release(context, &out);
    clReleaseEvent(gate);
    clattn_context_release(context);
    caller_close(&caller);
    use_test_kernels();
}

/* Products of CLBlast need a queue in order. Out of order the library's own kernels take their place, and the
 * call must not wait for what the caller holds back: it would wait for ever. */
static void test_no_products(void **state)
{
    (void)state;
    enum { LEN = 20, DIM = 16, PATIENCE = 300 };
    struct caller caller;
    clattn_context *context = NULL;
    char detail[2048];
    caller_open(&caller, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
    unsetenv("CLATTN_KERNEL_DIR");
    setenv("CLATTN_DENSE", "clblast", 1);
    assert_int_equal(caller_share(&caller, NULL, &context, detail), CLATTN_SUCCESS);
    clattn_tensor x, out;
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, LEN, 1, DIM, &x));
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, LEN, 1, DIM, &out));
    cl_event gate = gate_new(&caller), done[2] = {NULL};
    clattn_sync sync = {sizeof sync, caller.queue, 1, (void *const *)&gate, (void **)&done[0]};
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_blocks *blocks = NULL;
    select.selector = CLATTN_SELECT_FLAT_MEAN;
    select.leaf = 16;
    alarm(PATIENCE);
    assert_success(context, clattn_attention_forward(context, NULL, &x, &x, &x, NULL, &out, NULL, &sync));
    sync.event = (void **)&done[1];
    assert_success(context, clattn_select(context, NULL, &select, &x, &x, NULL, &blocks, &sync));
    alarm(0);
    for (int i = 0; i < 2; i++)
        gate_check(done[i]);
    gate_open(gate);
    assert_int_equal(clWaitForEvents(2, done), CL_SUCCESS);
    clReleaseEvent(done[0]);
    clReleaseEvent(done[1]);
    clReleaseEvent(gate);
    clattn_blocks_release(context, blocks);
    clattn_tensor_release(context, &x);
    clattn_tensor_release(context, &out);
    clattn_context_release(context);
    caller_close(&caller);
    unsetenv("CLATTN_DENSE");
    use_test_kernels();
}

static void test_foreign_objects(void **state)
{
    (void)state;
    struct caller one, two;
    clattn_context *context = NULL;
    char detail[2048];
    cl_int code;
    struct opencl_launch launch;
    caller_open(&one, 0);
    caller_open(&two, 0);
    assert_int_equal(caller_share(&one, two.queue, &context, detail), CLATTN_INVALID_ARGUMENT);
    assert_non_null(strstr(detail, "cl_queue"));
    assert_int_equal(caller_share(&one, one.queue, &context, detail), CLATTN_SUCCESS);

    clattn_sync sync = CLATTN_SYNC_INIT;
    sync.queue = two.queue;
    opencl_launch_begin(context, &sync, &launch);
    assert_status(context, opencl_launch_end(&launch), CLATTN_INVALID_ARGUMENT);
    assert_non_null(strstr(last_error(context), "sync.queue"));

    float data[16];
    clattn_tensor host = clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, 4, 1, 4), device = host;
    device.memory = CLATTN_MEMORY_CL_MEM;
    device.data = clCreateBuffer(two.context, CL_MEM_READ_WRITE, sizeof data, NULL, &code);
    assert_int_equal(code, CL_SUCCESS);
    assert_status(context, clattn_tensor_upload(context, &host, &device), CLATTN_INVALID_MEMORY);
    clReleaseMemObject(device.data);
    device.data = clCreateBuffer(one.context, CL_MEM_READ_WRITE, sizeof data, NULL, &code);
    assert_int_equal(code, CL_SUCCESS);
    assert_success(context, clattn_tensor_upload(context, &host, &device));
    device.offset = 1;
    assert_status(context, clattn_tensor_upload(context, &host, &device), CLATTN_INVALID_SHAPE);
    assert_non_null(strstr(last_error(context), "68")); /* the byte that it would reach */
    clReleaseMemObject(device.data);
    clattn_context_release(context);
    caller_close(&one);
    caller_close(&two);
}

int main(void)
{
    char folder[4096];
    if (!has_device()) {
        puts("skipped: no OpenCL device");
        return 77;
    }
    use_test_kernels();
    cache_empty("interop", folder);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_in_order),        cmocka_unit_test(test_out_of_order),
        cmocka_unit_test(test_empty_in_order),  cmocka_unit_test(test_empty_out_of_order),
        cmocka_unit_test(test_foreign_objects), cmocka_unit_test(test_list_in_use),
        cmocka_unit_test(test_no_products),
    };
    return cmocka_run_group_tests_name("opencl_interop", tests, NULL, NULL);
}
