/* SPDX-License-Identifier: MIT */
/* Elements behind the 2^31st one, on a device that computes in the host's memory: the buffers are address space
 * of which only the pages of a few rows exist. What kernels compute there they compute as in small tensors, to
 * the bit. */

#include "opencl_fixture.h"

#include <sys/mman.h>
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

enum { KV_LEN = 34, Q_LEN = 5, DIM = 64, ELEMENTS = KV_LEN * DIM };
static const int64_t ROW = (INT64_C(1) << 26) + 8; /* 33 of them are more than 2^31 elements */
static const size_t BYTES = (size_t)KV_LEN * (((size_t)1 << 26) + 64) * sizeof(uint16_t);

struct far {
    uint16_t *memory;
    clattn_tensor tensor;
};

/* Rows `stride` apart from element `offset` on; false: the device or the system does not give so much address
 * space. */
static bool far_make(clattn_context *context, int64_t offset, int64_t len, int64_t stride, struct far *far)
{
    cl_int code = CL_MEM_OBJECT_ALLOCATION_FAILURE;
    far->memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (far->memory == MAP_FAILED) return false;
    far->tensor = clattn_tensor_bthd(NULL, CLATTN_FLOAT16, 1, len, 1, DIM);
    far->tensor.memory = CLATTN_MEMORY_CL_MEM;
    far->tensor.offset = offset;
    far->tensor.len_stride = far->tensor.batch_stride = stride;
    far->tensor.data = clCreateBuffer(opencl_of(context)->context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR,
                                      BYTES, far->memory, &code);
    if (!code) return true;
    munmap(far->memory, BYTES);
    return false;
}

static void far_free(struct far *far)
{
    clReleaseMemObject(far->tensor.data);
    munmap(far->memory, BYTES);
}

static uint16_t *far_row(const struct far *far, int64_t row)
{
    return far->memory + far->tensor.offset + row * far->tensor.len_stride;
}

static void test_far_rows(void **state)
{
    (void)state;
    static uint16_t q_data[Q_LEN * DIM], k_data[ELEMENTS], out_data[Q_LEN * DIM];
    clattn_context *context = context_open();
    const struct opencl_device *device = &opencl_of(context)->device;
    struct far k, q, out;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    select.leaf = 16;
    select.topk = 2;
    if (!(device->type & CL_DEVICE_TYPE_CPU) || device->alloc_max < BYTES || platform_is("rusticl") ||
        platform_is("Oclgrind") || !far_make(context, 0, KV_LEN, ROW, &k)) {
        print_message("'%s' does not compute in the host's memory, or gives no buffer of %zu bytes\n",
                      device->name, BYTES);
        clattn_context_release(context);
        skip();
    }
    assert_true(far_make(context, (INT64_C(1) << 31) + 24, Q_LEN, DIM + 8, &q));
    assert_true(far_make(context, (INT64_C(1) << 31) + 56, Q_LEN, DIM + 16, &out));
    for (int i = 0; i < ELEMENTS; i++) /* 1.0 to 1.99, either sign */
        k_data[i] = (uint16_t)(0x3c00 | (i * 37 % 1021) | (i % 3 ? 0x8000 : 0));
    for (int i = 0; i < KV_LEN; i++)
        memcpy(far_row(&k, i), k_data + i * DIM, DIM * sizeof *k_data);
    for (int i = 0; i < Q_LEN; i++) {
        memcpy(q_data + i * DIM, k_data + (7 * i + 3) * DIM, DIM * sizeof *q_data);
        memcpy(far_row(&q, i), q_data + i * DIM, DIM * sizeof *q_data);
    }
    clattn_tensor near_q = clattn_tensor_bthd(q_data, CLATTN_FLOAT16, 1, Q_LEN, 1, DIM);
    clattn_tensor near_k = clattn_tensor_bthd(k_data, CLATTN_FLOAT16, 1, KV_LEN, 1, DIM);
    clattn_tensor near_out = clattn_tensor_bthd(out_data, CLATTN_FLOAT16, 1, Q_LEN, 1, DIM);
    assert_success(context,
                   clattn_attention(context, NULL, &select, &near_q, &near_k, &near_k, &near_out, NULL, NULL));
    assert_success(context, clattn_attention(context, NULL, &select, &q.tensor, &k.tensor, &k.tensor,
                                             &out.tensor, NULL, NULL));
    for (int i = 0; i < Q_LEN; i++)
        assert_memory_equal(far_row(&out, i), out_data + i * DIM, DIM * sizeof *out_data);
    assert_true(out.memory[(INT64_C(1) << 31) + 55] == 0 && out_data[0] != 0);
    far_free(&k);
    far_free(&q);
    far_free(&out);
    clattn_context_release(context);
}

/* Half the bytes: also where no buffer may have more than 4 GiB. */
static void test_far_int8_rows(void **state)
{
    (void)state;
    static uint16_t q_data[Q_LEN * DIM], out[2][Q_LEN * DIM];
    static int8_t k_data[ELEMENTS];
    float one = 1.0f / 32;
    clattn_context *context = context_open();
    const struct opencl_device *device = &opencl_of(context)->device;
    size_t bytes = (size_t)(KV_LEN * ROW);
    cl_int code = CL_SUCCESS;
    int8_t *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cl_mem mem = NULL;
    if ((device->type & CL_DEVICE_TYPE_CPU) && device->alloc_max >= bytes && memory != MAP_FAILED &&
        !platform_is("rusticl") && !platform_is("Oclgrind"))
        mem = clCreateBuffer(opencl_of(context)->context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, bytes,
                             memory, &code);
    if (!mem) {
        print_message("'%s' does not compute in the host's memory, or gives no buffer of %zu bytes\n",
                      device->name, bytes);
        clattn_context_release(context);
        skip();
    }
    for (int i = 0; i < ELEMENTS; i++)
        k_data[i] = (int8_t)(i * 37 % 251 - 125);
    for (int i = 0; i < KV_LEN; i++)
        memcpy(memory + i * ROW, k_data + i * DIM, DIM);
    for (int i = 0; i < Q_LEN * DIM; i++)
        q_data[i] = (uint16_t)(0x3c00 | (i * 37 % 1021) | (i % 3 ? 0x8000 : 0));
    clattn_tensor host_q = clattn_tensor_bthd(q_data, CLATTN_FLOAT16, 1, Q_LEN, 1, DIM), q;
    clattn_tensor host_k = clattn_tensor_bthd(k_data, CLATTN_INT8, 1, KV_LEN, 1, DIM), k[2];
    clattn_tensor host_scale = clattn_tensor_bthd(&one, CLATTN_FLOAT32, 1, 1, 1, 1), scale, result;
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT16, 1, Q_LEN, 1, DIM, &q));
    assert_success(context, clattn_tensor_create(context, CLATTN_INT8, 1, KV_LEN, 1, DIM, &k[0]));
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, 1, 1, 1, &scale));
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT16, 1, Q_LEN, 1, DIM, &result));
    assert_success(context, clattn_tensor_upload(context, &host_q, &q));
    assert_success(context, clattn_tensor_upload(context, &host_k, &k[0]));
    assert_success(context, clattn_tensor_upload(context, &host_scale, &scale));
    k[1] = k[0];
    k[1].data = mem;
    k[1].len_stride = k[1].batch_stride = ROW;
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    attention.k_scale = attention.v_scale = &scale;
    for (int i = 0; i < 2; i++) {
        clattn_tensor host = clattn_tensor_bthd(out[i], CLATTN_FLOAT16, 1, Q_LEN, 1, DIM);
        assert_success(context, clattn_attention_forward(context, &attention, &q, &k[i], &k[i], NULL, &result,
                                                         NULL, NULL));
        assert_success(context, clattn_tensor_download(context, &result, &host));
    }
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    assert_true(out[0][0] != 0);
    clattn_tensor *all[] = {&q, &k[0], &scale, &result};
    for (int i = 0; i < 4; i++)
        clattn_tensor_release(context, all[i]);
    clReleaseMemObject(mem);
    munmap(memory, bytes);
    clattn_context_release(context);
}

int main(void)
{
    if (!has_device()) {
        puts("skipped: no OpenCL device");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_far_rows), cmocka_unit_test(test_far_int8_rows)};
    return cmocka_run_group_tests_name("opencl_far", tests, NULL, NULL);
}
