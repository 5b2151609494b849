/* SPDX-License-Identifier: MIT */
/* The backward pass in the caller's queue: with OpenCL memory it only enqueues, and gives the same bits as the
 * call that waits. The sizes are those of the first case of test_backward.c, whose programs it shares. */

#include "opencl_fixture.h"

enum { TOKENS = 20, HEADS = 2, DIM = 16, TOPK = 2, BLOCK = 16 };
enum { Q, K, V, DOUT, OUT, LSE, DQ, DK, DV, TENSORS };

static const int heads_of[TENSORS] = {HEADS, 1, 1, HEADS, HEADS, HEADS, HEADS, 1, 1};

static int elements(int which)
{
    return TOKENS * heads_of[which] * (which == LSE ? 1 : DIM);
}

struct layer {
    clattn_context *context;
    clattn_tensor t[TENSORS];
    clattn_blocks *blocks;
};

static clattn_tensor host_view(float *data, int which)
{
    return clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, TOKENS, heads_of[which], which == LSE ? 1 : DIM);
}

static void layer_make(clattn_context *context, struct layer *p)
{
    float data[TOKENS * HEADS * DIM];
    int32_t indices[TOKENS * TOPK];
    uint32_t bits = 1;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    p->context = context;
    for (int which = 0; which < TENSORS; which++) {
        clattn_tensor host = host_view(data, which);
        assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, TOKENS, heads_of[which],
                                                     which == LSE ? 1 : DIM, &p->t[which]));
        for (int i = 0; i < elements(which); i++) {
            bits = bits * 1664525u + 1013904223u;
            data[i] = (float)(bits >> 8) / 8388608.0f - 1.0f;
        }
        assert_success(context, clattn_tensor_upload(context, &host, &p->t[which]));
    }
    for (int row = 0; row < TOKENS; row++) {
        indices[row * TOPK] = 0;
        indices[row * TOPK + 1] = row % 3 ? row / BLOCK : -1;
    }
    desc.block = BLOCK;
    desc.rows = TOKENS;
    desc.topk = TOPK;
    assert_success(context, clattn_blocks_create(context, &desc, indices, &p->blocks));
    assert_success(context, clattn_attention_forward(context, NULL, &p->t[Q], &p->t[K], &p->t[V], p->blocks,
                                                     &p->t[OUT], &p->t[LSE], NULL));
}

static clattn_status backward(struct layer *p, const clattn_sync *sync)
{
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    gradients.dout = &p->t[DOUT];
    gradients.dq = &p->t[DQ];
    gradients.dk = &p->t[DK];
    gradients.dv = &p->t[DV];
    return clattn_attention_backward(p->context, NULL, &p->t[Q], &p->t[K], &p->t[V], p->blocks, &p->t[OUT],
                                     &p->t[LSE], &gradients, sync);
}

static void results_read(struct layer *p, float results[3][TOKENS * HEADS * DIM])
{
    for (int which = DQ; which < TENSORS; which++) {
        clattn_tensor host = host_view(results[which - DQ], which);
        assert_success(p->context, clattn_tensor_download(p->context, &p->t[which], &host));
    }
}

/* Writes something else over the results. */
static void results_spoil(struct layer *p)
{
    float ones[TOKENS * HEADS * DIM];
    for (int i = 0; i < TOKENS * HEADS * DIM; i++)
        ones[i] = 1;
    for (int which = DQ; which < TENSORS; which++) {
        clattn_tensor host = host_view(ones, which);
        assert_success(p->context, clattn_tensor_upload(p->context, &host, &p->t[which]));
    }
}

static cl_int event_state(cl_event event)
{
    cl_int state = 0;
    assert_int_equal(clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state, &state, NULL),
                     CL_SUCCESS);
    return state;
}

static void enqueue(cl_command_queue_properties properties)
{
    static float want[3][TOKENS * HEADS * DIM], have[3][TOKENS * HEADS * DIM];
    struct layer p;
    clattn_context *context = context_open();
    struct opencl *state = opencl_of(context);
    cl_int code;
    cl_command_queue queue = clCreateCommandQueue(state->context, state->device.id, properties, &code);
    if (code == CL_INVALID_QUEUE_PROPERTIES) {
        print_message("the device has no out-of-order queues\n");
        clattn_context_release(context);
        skip();
    }
    assert_int_equal(code, CL_SUCCESS);
    layer_make(context, &p);
    assert_success(context, backward(&p, NULL));
    results_read(&p, want);
    results_spoil(&p);

    bool is_held = !platform_is("Oclgrind"); /* its clFlush waits */
    cl_event gate = clCreateUserEvent(state->context, &code), done = NULL;
    assert_int_equal(code, CL_SUCCESS);
    if (!is_held) assert_int_equal(clSetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
    clattn_sync sync = CLATTN_SYNC_INIT;
    sync.queue = queue;
    sync.wait_count = 1;
    sync.wait_list = (void *const *)&gate;
    sync.event = (void **)&done;
    assert_success(context, backward(&p, &sync));
    assert_non_null(done);
    if (is_held) { /* it returned although nothing could run */
        assert_true(event_state(done) > CL_COMPLETE);
        assert_int_equal(clSetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
    }
    assert_int_equal(clWaitForEvents(1, &done), CL_SUCCESS);
    results_read(&p, have);
    for (int which = DQ; which < TENSORS; which++)
        assert_memory_equal(want[which - DQ], have[which - DQ], (size_t)elements(which) * sizeof(float));

    clReleaseEvent(done);
    clReleaseEvent(gate);
    clReleaseCommandQueue(queue);
    clattn_blocks_release(context, p.blocks);
    for (int which = 0; which < TENSORS; which++)
        clattn_tensor_release(context, &p.t[which]);
    clattn_context_release(context);
}

static void test_in_order(void **state)
{
    (void)state;
    enqueue(0);
}

static void test_out_of_order(void **state)
{
    (void)state;
    enqueue(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_in_order), cmocka_unit_test(test_out_of_order)};
    if (!has_device()) {
        print_message("no OpenCL device\n");
        return 77;
    }
    return cmocka_run_group_tests_name("backward in a queue", tests, NULL, NULL);
}
