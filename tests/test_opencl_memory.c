/* SPDX-License-Identifier: MIT */
/* Memory of OpenCL contexts: transfers between any strides, kernel arguments with offsets, SVM. */

#include "opencl_fixture.h"

#include <dlfcn.h>

enum { BATCH = 2, LEN = 5, HEADS = 3, DIM = 4, ELEMENTS = BATCH * LEN * HEADS * DIM };

/* Strides and offsets that a tensor [2][5][3][4] may have. */
static const struct layout {
    int64_t offset, batch, len, heads;
} layouts[] = {
    {0, 60, 12, 4},   /* [batch][len][heads][dim] */
    {7, 60, 4, 20},   /* [batch][heads][len][dim] */
    {3, 12, 24, 4},   /* [len][batch][heads][dim] */
    {1, 100, 20, 5},  /* gaps between rows, tokens and batches */
    {0, 64, 12, 4},   /* gaps between batches only */
    {2, 400, 8, 40},  /* gaps, heads outside of tokens */
    {5, 20, 40, 201}, /* nothing is in order */
};

enum { LAYOUTS = sizeof layouts / sizeof *layouts, SPAN = 1000 };

static clattn_tensor tensor_of(void *data, clattn_memory memory, clattn_dtype dtype,
                               const struct layout *layout)
{
    return (clattn_tensor){data,  memory, dtype,         layout->offset, BATCH,        LEN,
                           HEADS, DIM,    layout->batch, layout->len,    layout->heads};
}

static size_t position(const clattn_tensor *t, int i)
{
    int d = i % DIM, h = i / DIM % HEADS, row = i / (DIM * HEADS) % LEN, b = i / (DIM * HEADS * LEN);
    return (size_t)(t->offset + b * t->batch_stride + row * t->len_stride + h * t->head_stride + d);
}

/* Uploads from one layout into another and back into a third; what lies between the elements must stay. */
static void transfer(clattn_context *context, void *memory, clattn_memory kind, clattn_dtype dtype, int on_host,
                     int on_device)
{
    size_t element = dtype == CLATTN_FLOAT32 ? 4 : 2;
    unsigned char host[SPAN * 4], image[SPAN * 4], want[SPAN * 4];
    clattn_tensor from = tensor_of(host, CLATTN_MEMORY_HOST, dtype, &layouts[on_host]);
    clattn_tensor device = tensor_of(memory, kind, dtype, &layouts[on_device]);
    for (size_t i = 0; i < sizeof host; i++)
        host[i] = (unsigned char)(i * 31 % 251);
    clattn_tensor flat = {memory, kind, dtype, 0, 1, SPAN, 1, 1, SPAN, 1, 1};
    clattn_tensor flat_host = clattn_tensor_bthd(image, dtype, 1, SPAN, 1, 1);
    memset(image, 0xee, sizeof image);
    memcpy(want, image, sizeof image);
    assert_success(context, clattn_tensor_upload(context, &flat_host, &flat));
    assert_success(context, clattn_tensor_upload(context, &from, &device));
    assert_success(context, clattn_tensor_download(context, &flat, &flat_host));
    for (int i = 0; i < ELEMENTS; i++)
        memcpy(want + position(&device, i) * element, host + position(&from, i) * element, element);
    assert_memory_equal(image, want, SPAN * element);

    unsigned char back[SPAN * 4], expected[SPAN * 4];
    clattn_tensor to = tensor_of(back, CLATTN_MEMORY_HOST, dtype, &layouts[(on_host + 1) % LAYOUTS]);
    memset(back, 0x55, sizeof back);
    memset(expected, 0x55, sizeof expected);
    for (int i = 0; i < ELEMENTS; i++)
        memcpy(expected + position(&to, i) * element, host + position(&from, i) * element, element);
    assert_success(context, clattn_tensor_download(context, &device, &to));
    assert_memory_equal(back, expected, sizeof back);
}

static void test_transfers(void **state)
{
    (void)state;
    clattn_tensor memory;
    clattn_context *context = context_open();
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, SPAN, 1, 1, &memory));
    for (int h = 0; h < LAYOUTS; h++)
        for (int d = 0; d < LAYOUTS; d++) {
            transfer(context, memory.data, CLATTN_MEMORY_CL_MEM, CLATTN_FLOAT32, h, d);
            transfer(context, memory.data, CLATTN_MEMORY_CL_MEM, CLATTN_BFLOAT16, h, d);
        }
    /* A broadcast: all heads are one on the device. */
    float row[LEN * DIM], wide[LEN * HEADS * DIM];
    clattn_tensor one = clattn_tensor_bthd(row, CLATTN_FLOAT32, 1, LEN, 1, DIM);
    clattn_tensor all = clattn_tensor_bthd(wide, CLATTN_FLOAT32, 1, LEN, HEADS, DIM);
    clattn_tensor shared = one;
    shared.data = memory.data;
    shared.memory = CLATTN_MEMORY_CL_MEM;
    for (int i = 0; i < LEN * DIM; i++)
        row[i] = (float)i;
    assert_success(context, clattn_tensor_upload(context, &one, &shared));
    shared.heads = HEADS;
    shared.head_stride = 0;
    assert_success(context, clattn_tensor_download(context, &shared, &all));
    for (int i = 0; i < LEN * HEADS * DIM; i++)
        assert_true(wide[i] == row[i / (HEADS * DIM) * DIM + i % DIM]);
    clattn_tensor_release(context, &memory);
    clattn_context_release(context);
}

/* Larger than the buffer that rows are gathered in. */
static void test_large_transfer(void **state)
{
    (void)state;
    enum { ROWS = 40000, WIDTH = 33 };
    clattn_tensor device;
    clattn_context *context = context_open();
    float *data = malloc(2 * sizeof(float) * ROWS * 2 * WIDTH), *back = data + ROWS * 2 * WIDTH;
    assert_non_null(data);
    for (int i = 0; i < ROWS * 2 * WIDTH; i++)
        data[i] = (float)i;
    clattn_tensor host = clattn_tensor_bhtd(data, CLATTN_FLOAT32, 1, 2, ROWS, WIDTH);
    clattn_tensor result = clattn_tensor_bhtd(back, CLATTN_FLOAT32, 1, 2, ROWS, WIDTH);
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, ROWS, 2, WIDTH, &device));
    assert_success(context, clattn_tensor_upload(context, &host, &device));
    assert_success(context, clattn_tensor_download(context, &device, &result));
    assert_memory_equal(data, back, sizeof(float) * ROWS * 2 * WIDTH);
    clattn_tensor_release(context, &device);
    clattn_context_release(context);
    free(data);
}

/* ---- kernel arguments ---- */

static void check_gather(clattn_context *context, const clattn_tensor *in, const float *data)
{
    float out[ELEMENTS];
    struct opencl_launch launch;
    struct storage storage = {0};
    assert_success(context, opencl_storage_create(context, sizeof out, &storage));
    opencl_launch_begin(context, NULL, &launch);
    opencl_launch_kernel(&launch, "runtime.cl", "gather", "-DLEN=5 -DHEADS=3 -DDIM=4");
    opencl_arg_tensor(&launch, in);
    opencl_arg_strides(&launch, in);
    opencl_arg_tensor(&launch, NULL);
    opencl_arg_storage(&launch, &storage);
    opencl_arg_int(&launch, ELEMENTS);
    opencl_arg_float(&launch, 0.5f);
    opencl_arg_local(&launch, 12 * sizeof(float));
    opencl_launch_run(&launch, 1, (size_t[]){ELEMENTS}, (size_t[]){12});
    assert_success(context, opencl_launch_end(&launch));
    assert_success(context, opencl_storage_read(context, &storage, 0, out, sizeof out));
    for (int i = 0; i < ELEMENTS; i++)
        if (out[i] != 0.5f * data[position(in, i)])
            fail_msg("out[%d] is %g, must be %g", i, (double)out[i], (double)(0.5f * data[position(in, i)]));
    opencl_storage_release(context, &storage);
}

static void fill_floats(float *data)
{
    for (int i = 0; i < SPAN; i++)
        data[i] = (float)(i * 7 % 997);
}

static void test_arguments(void **state)
{
    (void)state;
    float data[SPAN];
    clattn_tensor memory;
    clattn_context *context = context_open();
    fill_floats(data);
    clattn_tensor host = clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, SPAN, 1, 1);
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, SPAN, 1, 1, &memory));
    assert_success(context, clattn_tensor_upload(context, &host, &memory));
    for (int i = 0; i < LAYOUTS; i++) {
        clattn_tensor view = tensor_of(memory.data, CLATTN_MEMORY_CL_MEM, CLATTN_FLOAT32, &layouts[i]);
        check_gather(context, &view, data);
    }
    clattn_tensor_release(context, &memory);
    clattn_context_release(context);
}

/* The entry points of OpenCL 2.0 that a caller with SVM has. */
static void *entry_point(cl_platform_id platform, const char *name)
{
    void *function = dlsym(RTLD_DEFAULT, name);
    return function ? function : clGetExtensionFunctionAddressForPlatform(platform, name);
}

static void test_svm(void **state)
{
    (void)state;
    float data[SPAN];
    clattn_context *context = context_open();
    const struct opencl *opencl = opencl_of(context);
    clattn_tensor view = tensor_of(data, CLATTN_MEMORY_SVM, CLATTN_FLOAT32, &layouts[3]);
    fill_floats(data);
    if (!opencl->svm.set_arg) {
        clattn_tensor host = tensor_of(data, CLATTN_MEMORY_HOST, CLATTN_FLOAT32, &layouts[3]);
        assert_status(context, clattn_tensor_upload(context, &host, &view), CLATTN_INVALID_MEMORY);
        clattn_context_release(context);
        return;
    }
    void *(CL_API_CALL * allocate)(cl_context, cl_bitfield, size_t, cl_uint);
    void(CL_API_CALL * release)(cl_context, void *);
    *(void **)&allocate = entry_point(opencl->device.platform, "clSVMAlloc");
    *(void **)&release = entry_point(opencl->device.platform, "clSVMFree");
    assert_true(allocate && release);
    void *memory = allocate(opencl->context, CL_MEM_READ_WRITE, 4 * SPAN, 0);
    assert_non_null(memory);
    for (int h = 0; h < LAYOUTS; h++)
        for (int d = 0; d < LAYOUTS; d++)
            transfer(context, memory, CLATTN_MEMORY_SVM, CLATTN_FLOAT32, h, d);
    clattn_tensor host = clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, SPAN, 1, 1), flat = host;
    flat.memory = CLATTN_MEMORY_SVM;
    flat.data = view.data = memory;
    assert_success(context, clattn_tensor_upload(context, &host, &flat));
    check_gather(context, &view, data);
    release(opencl->context, memory);
    clattn_context_release(context);
}

/* ---- one tensor of a call whose memory is too small ---- */

static clattn_tensor floats_new(clattn_context *context, int64_t len, int64_t dim, int first)
{
    float data[2 * SPAN];
    clattn_tensor device, host = clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, len, 1, dim);
    for (int i = 0; i < 2 * SPAN; i++)
        data[i] = (float)((first + i * 37) % 101) / 100;
    assert_success(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, len, 1, dim, &device));
    assert_success(context, clattn_tensor_upload(context, &host, &device));
    return device;
}

/* Gradients: the results of the kernels before the one that needs it are untouched. */
static void check_small_gradient(clattn_context *context)
{
    enum { ROWS = 32, WIDTH = 16 };
    float before[ROWS * WIDTH], after[ROWS * WIDTH];
    clattn_tensor x = floats_new(context, ROWS, WIDTH, 1), lse = floats_new(context, ROWS, 1, 2);
    clattn_tensor dq = floats_new(context, ROWS, WIDTH, 3), dk = floats_new(context, ROWS, WIDTH, 4),
                  dv = floats_new(context, ROWS / 2, WIDTH, 5);
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    gradients.dout = &x;
    gradients.dq = &dq;
    gradients.dk = &dk;
    gradients.dv = &dv;
    dv.len = ROWS;
    clattn_tensor host = clattn_tensor_bthd(before, CLATTN_FLOAT32, 1, ROWS, 1, WIDTH);
    assert_success(context, clattn_tensor_download(context, &dq, &host));
    assert_status(context,
                  clattn_attention_backward(context, NULL, &x, &x, &x, NULL, &x, &lse, &gradients, NULL),
                  CLATTN_INVALID_SHAPE);
    host.data = after;
    assert_success(context, clattn_tensor_download(context, &dq, &host));
    assert_memory_equal(after, before, sizeof after);
    clattn_tensor *const all[] = {&x, &lse, &dq, &dk, &dv};
    for (int i = 0; i < 5; i++)
        clattn_tensor_release(context, all[i]);
}

/* A decode step: its tokens are not appended first. Taken back, they would leave an int8 cache with sums of
 * codes. */
static void check_small_result(clattn_context *context)
{
    enum { ROWS = 20, MORE = 4, WIDTH = 16 };
    const int32_t sequence = 0, len = ROWS, more = MORE;
    float before[2 * WIDTH], after[2 * WIDTH];
    clattn_tensor x = floats_new(context, ROWS, WIDTH, 6), some = x, out = floats_new(context, 1, WIDTH, 7);
    clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_cache *cache = NULL;
    desc.tokens = 64;
    desc.dim = desc.dim_v = WIDTH;
    desc.dtype = CLATTN_INT8;
    desc.leaf = select.leaf = 16;
    some.len = out.len = MORE;
    assert_success(context, clattn_cache_create(context, &desc, &cache));
    assert_success(context, clattn_cache_append(context, cache, 1, &sequence, &len, &x, &x, NULL));
    assert_success(context, clattn_cache_read(context, cache, 0, 0, 1, before, NULL));
    assert_status(context,
                  clattn_decode(context, cache, NULL, &select, 1, &sequence, &more, &some, &some, &some, &out,
                                NULL, NULL, NULL),
                  CLATTN_INVALID_SHAPE);
    assert_int_equal(clattn_cache_length(cache, 0), ROWS);
    assert_success(context, clattn_cache_read(context, cache, 0, 0, 1, after, NULL));
    assert_memory_equal(after, before, sizeof after);
    clattn_cache_release(context, cache);
    clattn_tensor_release(context, &x);
    clattn_tensor_release(context, &out);
}

static void test_small_memory(void **state)
{
    (void)state;
    unsetenv("CLATTN_KERNEL_DIR"); /* the library's own kernels */
    clattn_context *context = context_open();
    check_small_gradient(context);
    check_small_result(context);
    clattn_context_release(context);
    use_test_kernels();
}

int main(void)
{
    char folder[4096];
    if (!has_device()) {
        puts("skipped: no OpenCL device");
        return 77;
    }
    use_test_kernels();
    cache_empty("memory", folder);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_transfers),
        cmocka_unit_test(test_large_transfer),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_svm),
        cmocka_unit_test(test_small_memory),
    };
    return cmocka_run_group_tests_name("opencl_memory", tests, NULL, NULL);
}
