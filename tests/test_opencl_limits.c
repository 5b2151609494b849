/* SPDX-License-Identifier: MIT */
/* Sizes that no machine at hand has, on an OpenCL that computes nothing: limits are refused by name, launches
 * are cut into parts that cover everything once, and offsets beyond 32 bits reach the kernels whole. */

#include "config.h"

#include "fake_opencl.h"
#include "lib/opencl_tile.h" /* before CMocka, whose `fail` is a macro */

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static clattn_context *context_new(void)
{
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_OPENCL;
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
    return context;
}

static const char *error_of(clattn_context *context)
{
    static char text[2048];
    clattn_context_error(context, text, sizeof text);
    return text;
}

/* A tensor in a buffer of the caller that takes no memory. */
static clattn_tensor tensor_far(clattn_context *context, clattn_dtype dtype, int64_t batch, int64_t len,
                                int64_t heads, int64_t dim, int64_t batch_stride, int64_t offset)
{
    cl_int code;
    clattn_tensor tensor = clattn_tensor_bthd(NULL, dtype, batch, len, heads, dim);
    tensor.memory = CLATTN_MEMORY_CL_MEM;
    tensor.batch_stride = batch_stride;
    tensor.offset = offset;
    size_t bytes = (size_t)opencl_tensor_end(&tensor) * dtype_bytes(dtype);
    tensor.data = clCreateBuffer(opencl_of(context)->context, CL_MEM_READ_WRITE, bytes, NULL, &code);
    assert_int_equal(code, CL_SUCCESS);
    return tensor;
}

/* ---- launches ---- */

enum { UNIT_FIRST_FORWARD = 9 };

static uint64_t launches, next_unit, global_most, items;
static int64_t table[2][OPENCL_SEQUENCE_FIELDS], k_len_stride;
static bool in_order;

static void on_forward(const struct fake_launch *launch)
{
    uint64_t first;
    if (strcmp(launch->kernel, "attention_forward")) return;
    memcpy(&first, launch->arguments[UNIT_FIRST_FORWARD].value, sizeof first);
    in_order = in_order && first == next_unit && launch->global % launch->local == 0;
    next_unit += launch->global / launch->local;
    items = launch->local;
    if (launch->global > global_most) global_most = launch->global;
    if (launches++ == 0) {
        cl_mem buffer;
        memcpy(&buffer, launch->arguments[7].value, sizeof buffer);
        memcpy(table, fake_buffer_data(buffer), sizeof table);
        memcpy(&k_len_stride, launch->arguments[UNIT_FIRST_FORWARD + 3].value, sizeof k_len_stride);
    }
}

static void test_far_offsets(void **state)
{
    (void)state;
    enum { LEN = 1 << 18, HEADS = 8, DIM = 128 };
    const int64_t offset = (INT64_C(1) << 40) + 3, batch_stride = (INT64_C(1) << 33) + 64;
    clattn_context *context = context_new();
    clattn_tensor q = tensor_far(context, CLATTN_FLOAT16, 2, LEN, HEADS, DIM, batch_stride, offset);
    clattn_tensor k = tensor_far(context, CLATTN_FLOAT16, 2, LEN, HEADS, DIM, batch_stride + 128, offset + 1);
    clattn_tensor v = tensor_far(context, CLATTN_FLOAT16, 2, LEN, HEADS, DIM, batch_stride + 256, offset + 2);
    clattn_tensor out = tensor_far(context, CLATTN_FLOAT16, 2, LEN, HEADS, DIM, batch_stride + 512, offset + 4);
    clattn_tensor lse = tensor_far(context, CLATTN_FLOAT32, 2, LEN, HEADS, 1, batch_stride + 1024, offset + 5);
    fake.on_launch = on_forward;
    launches = next_unit = global_most = 0;
    in_order = true;
    assert_int_equal(clattn_attention_forward(context, NULL, &q, &k, &v, NULL, &out, &lse, NULL),
                     CLATTN_SUCCESS);
    fake.on_launch = NULL;

    const clattn_tensor *const tensors[] = {&q, &k, &v, &out, &lse};
    for (int s = 0; s < 2; s++)
        for (int t = 0; t < 5; t++)
            assert_true(table[s][t] == tensors[t]->offset + s * tensors[t]->batch_stride);
    assert_true(k_len_stride == k.len_stride);

    /* Each unit once, in launches that no driver has a reason to kill. A unit is a tile of at most 32 rows;
     * with 256 Ki keys a tile is 2 * (128 + 128) * 32 * 256 Ki operations, and a launch at most 4e9 of them a
     * compute unit. */
    assert_true(in_order && launches > 1);
    assert_true(next_unit >= 2ull * LEN * HEADS / 32 && next_unit <= 2ull * LEN * HEADS);
    assert_true(global_most < 1ull << 31);
    double unit_flops = 2.0 * (DIM + DIM) * ((double)2 * LEN * HEADS / (double)next_unit) * LEN;
    double launch_flops = (double)(global_most / items) * unit_flops;
    assert_true(global_most / items > 1 && launch_flops <= 4e9 * fake.compute_units * 1.01);

    clattn_tensor *all[] = {&q, &k, &v, &out, &lse};
    for (int i = 0; i < 5; i++)
        clReleaseMemObject(all[i]->data);
    clattn_context_release(context);
}

/* What a kernel was launched with. */
struct tally {
    char kernel[64];
    uint64_t launches, groups, global_most, groups_most;
};
enum { TALLIES = 32 };
static struct tally tallies[TALLIES];

static void on_any(const struct fake_launch *launch)
{
    struct tally *tally = tallies;
    uint64_t groups = launch->global / launch->local;
    while (tally < tallies + TALLIES - 1 && tally->kernel[0] && strcmp(tally->kernel, launch->kernel))
        tally++;
    snprintf(tally->kernel, sizeof tally->kernel, "%s", launch->kernel);
    tally->launches++;
    tally->groups += groups;
    if (launch->global > tally->global_most) tally->global_most = launch->global;
    if (groups > tally->groups_most) tally->groups_most = groups;
}

static const struct tally *tally_of(const char *kernel)
{
    for (int i = 0; i < TALLIES; i++)
        if (strcmp(tallies[i].kernel, kernel) == 0) return &tallies[i];
    fail_msg("%s was not launched", kernel);
    return NULL;
}

/* Every kernel whose work grows with the problem is cut: on a device of one slow unit none may run at once, and
 * no launch is longer than the limit for which forward attention is tested above. */
static void test_all_kernels_are_cut(void **state)
{
    (void)state;
    enum { LEN = 1 << 20, HEADS = 8, DIM = 128 };
    static const char *const cut[] = {"pyramid_leaf",         "select_leaves", "attention_forward",
                                      "attention_backward_q", "inverse_count", "inverse_place",
                                      "attention_backward_kv"};
    const cl_uint units = fake.compute_units;
    fake.compute_units = 1;
    clattn_context *context = context_new();
    clattn_blocks *blocks = NULL;
    clattn_tensor q = tensor_far(context, CLATTN_FLOAT16, 1, LEN, HEADS, DIM, INT64_C(1) << 40, 0), grad[3],
                  out = q, dout = q;
    clattn_tensor lse = tensor_far(context, CLATTN_FLOAT32, 1, LEN, HEADS, 1, INT64_C(1) << 40, 0);
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    for (int i = 0; i < 3; i++)
        grad[i] = tensor_far(context, CLATTN_FLOAT16, 1, LEN, HEADS, DIM, INT64_C(1) << 40, 0);
    gradients.dout = &dout;
    gradients.dq = &grad[0];
    gradients.dk = &grad[1];
    gradients.dv = &grad[2];
    memset(tallies, 0, sizeof tallies);
    fake.on_launch = on_any;
    clattn_pyramid *pyramid = NULL;
    clattn_tensor many = tensor_far(context, CLATTN_FLOAT16, 1, 16 * LEN, HEADS, DIM, INT64_C(1) << 40, 0);
    assert_int_equal(clattn_pyramid_build(context, NULL, 64, &many, &pyramid, NULL), CLATTN_SUCCESS);
    clattn_pyramid_release(context, pyramid);
    clReleaseMemObject(many.data);
    assert_int_equal(clattn_select(context, NULL, NULL, &q, &q, NULL, &blocks, NULL), CLATTN_SUCCESS);
    assert_int_equal(clattn_attention_forward(context, NULL, &q, &q, &q, blocks, &out, &lse, NULL),
                     CLATTN_SUCCESS);
    assert_int_equal(clattn_attention_backward(context, NULL, &q, &q, &q, blocks, &out, &lse, &gradients, NULL),
                     CLATTN_SUCCESS);
    fake.on_launch = NULL;
    fake.compute_units = units;
    for (int i = 0; i < TALLIES && tallies[i].kernel[0]; i++) {
        print_message("%-24s %6llu launches, at most %llu work-groups of %llu\n", tallies[i].kernel,
                      (unsigned long long)tallies[i].launches, (unsigned long long)tallies[i].groups_most,
                      (unsigned long long)tallies[i].groups);
        assert_true(tallies[i].global_most < 1ull << 31);
    }
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++)
        assert_true(tally_of(cut[i])->launches > 1);
    for (int i = 0; i < 3; i++)
        clReleaseMemObject(grad[i].data);
    clReleaseMemObject(q.data);
    clReleaseMemObject(lse.data);
    clattn_blocks_release(context, blocks);
    clattn_context_release(context);
}

/* ---- limits ---- */

static void test_limits_are_named(void **state)
{
    (void)state;
    clattn_context *context = context_new();
    clattn_tensor tensor;
    clattn_pyramid *pyramid = NULL;
    clattn_blocks *blocks = NULL;
    char limit[32];
    snprintf(limit, sizeof limit, "%llu", (unsigned long long)fake.alloc_max);
    assert_int_equal(clattn_tensor_create(context, CLATTN_FLOAT32, 1, (int64_t)1 << 24, 8, 128, &tensor),
                     CLATTN_DEVICE_LIMIT);
    assert_non_null(strstr(error_of(context), "CL_DEVICE_MAX_MEM_ALLOC_SIZE"));
    assert_non_null(strstr(error_of(context), limit));

    /* Lists of 8 Mi rows and 8 heads with 512 entries. */
    clattn_tensor q = tensor_far(context, CLATTN_FLOAT16, 1, 1 << 23, 8, 64, 1 << 30, 0);
    clattn_tensor k = tensor_far(context, CLATTN_FLOAT16, 1, 1 << 23, 8, 64, 1 << 30, 0);
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    select.topk = CLATTN_TOPK_MAX;
    assert_int_equal(clattn_select(context, NULL, &select, &q, &k, NULL, &blocks, NULL), CLATTN_DEVICE_LIMIT);
    assert_null(blocks);
    assert_non_null(strstr(error_of(context), limit));

    /* The means of 16 Mi keys of 64 heads. */
    clattn_tensor many = tensor_far(context, CLATTN_FLOAT16, 1, 1 << 24, 64, 64, INT64_C(1) << 40, 0);
    assert_int_equal(clattn_pyramid_build(context, NULL, 16, &many, &pyramid, NULL), CLATTN_DEVICE_LIMIT);
    assert_null(pyramid);
    assert_non_null(strstr(error_of(context), limit));

    /* More tokens than the kernels' row numbers. */
    clattn_tensor longest = tensor_far(context, CLATTN_FLOAT16, 1, INT64_C(1) << 31, 1, 4, INT64_C(1) << 40, 0);
    clattn_tensor one = tensor_far(context, CLATTN_FLOAT16, 1, 1, 1, 4, 4, 0);
    assert_int_equal(clattn_attention_forward(context, NULL, &one, &longest, &longest, NULL, &one, NULL, NULL),
                     CLATTN_DEVICE_LIMIT);
    assert_non_null(strstr(error_of(context), "2147483648 tokens"));
    clattn_tensor *all[] = {&q, &k, &many, &longest, &one};
    for (int i = 0; i < 5; i++)
        clReleaseMemObject(all[i]->data);
    clattn_context_release(context);
}

static int kernels_checked;

/* -DNAME=INTEGER and the language's version, nothing else: no number with a decimal point, which a locale could
 * turn into a comma, no fast-math, which would make NaN of masks. */
static void check_options(const char *kernel, const char *source, const char *options)
{
    (void)source;
    kernels_checked++;
    for (const char *at = options; *at; at += strspn(at, " ")) {
        size_t name, digits;
        if (strncmp(at, "-cl-std=CL", 10) == 0) {
            at += strcspn(at, " ");
            continue;
        }
        name = strncmp(at, "-D", 2) ? 0 : strspn(at + 2, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789");
        at += 2 + name + 1;
        digits = name && at[-1] == '=' ? strspn(at + (*at == '-'), "0123456789") : 0;
        if (digits == 0) fail_msg("%s: build options '%s'", kernel, options);
        at += (*at == '-') + digits;
        if (*at != ' ' && *at != 0) fail_msg("%s: build options '%s'", kernel, options);
    }
}

static void test_build_options(void **state)
{
    (void)state;
    clattn_context *context = context_new();
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_tensor q = tensor_far(context, CLATTN_FLOAT16, 1, 512, 4, 64, 1 << 20, 0);
    clattn_tensor lse = tensor_far(context, CLATTN_FLOAT32, 1, 512, 4, 1, 1 << 20, 0);
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    attention.scale = 0.37f;
    attention.softcap = 12.5f;
    gradients.dout = gradients.dq = gradients.dk = gradients.dv = &q;
    kernels_checked = 0;
    fake.on_kernel = check_options;
    assert_int_equal(clattn_attention(context, &attention, &select, &q, &q, &q, &q, NULL, NULL),
                     CLATTN_SUCCESS);
    select.selector = CLATTN_SELECT_ROBUST;
    assert_int_equal(clattn_attention(context, &attention, &select, &q, &q, &q, &q, NULL, NULL),
                     CLATTN_SUCCESS);
    clattn_attention_backward(context, &attention, &q, &q, &q, NULL, &q, &lse, &gradients, NULL);
    fake.on_kernel = NULL;
    assert_true(kernels_checked >= 5);
    clReleaseMemObject(q.data);
    clReleaseMemObject(lse.data);
    clattn_context_release(context);
}

/* A device with less than the portable tier asks for still gets a tile, smaller each time. */
static void test_small_local_memory(void **state)
{
    (void)state;
    const cl_ulong before = fake.local_bytes;
    for (fake.local_bytes = 32 << 10; fake.local_bytes >= 8 << 10; fake.local_bytes /= 2) {
        clattn_context *context = context_new();
        clattn_tensor q = tensor_far(context, CLATTN_FLOAT16, 1, 512, 4, 64, 1 << 20, 0);
        assert_int_equal(clattn_attention(context, NULL, NULL, &q, &q, &q, &q, NULL, NULL), CLATTN_SUCCESS);
        clReleaseMemObject(q.data);
        clattn_context_release(context);
    }
    fake.local_bytes = before;
}

/* Lists with boundaries of the caller have blocks of no length, which nothing may be divided by. */
static void test_backward_of_unequal_blocks(void **state)
{
    (void)state;
    clattn_context *context = context_new();
    const int64_t starts[] = {0, 10, 30};
    const int32_t indices[64] = {0};
    clattn_blocks *blocks = NULL;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    desc.rows = 64;
    desc.topk = 1;
    desc.starts = starts;
    desc.start_count = 3;
    assert_int_equal(clattn_blocks_create(context, &desc, indices, &blocks), CLATTN_SUCCESS);
    clattn_tensor q = tensor_far(context, CLATTN_FLOAT32, 1, 64, 2, 32, 1 << 20, 0), grad[3] = {q, q, q},
                  out = q, dout = q;
    clattn_tensor lse = tensor_far(context, CLATTN_FLOAT32, 1, 64, 2, 1, 1 << 20, 0);
    cl_int code;
    for (int i = 0; i < 3; i++)
        grad[i].data = clCreateBuffer(opencl_of(context)->context, CL_MEM_READ_WRITE, 1 << 22, NULL, &code);
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    gradients.dout = &dout;
    gradients.dq = &grad[0];
    gradients.dk = &grad[1];
    gradients.dv = &grad[2];
    clattn_status status =
        clattn_attention_backward(context, NULL, &q, &q, &q, blocks, &out, &lse, &gradients, NULL);
    assert_int_equal(status, CLATTN_SUCCESS);
    for (int i = 0; i < 3; i++)
        clReleaseMemObject(grad[i].data);
    clReleaseMemObject(q.data);
    clReleaseMemObject(lse.data);
    clattn_blocks_release(context, blocks);
    clattn_context_release(context);
}

int main(void)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_context *context = NULL;
    desc.backend = CLATTN_BACKEND_OPENCL;
    if (clattn_context_create(&desc, &context) == CLATTN_NO_DEVICE) {
        puts("skipped: no OpenCL device");
        return 77;
    }
    clattn_context_release(context);
    setenv("CLATTN_DENSE", "tiles", 1);
    setenv("CLATTN_CACHE_SIZE", "0", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_far_offsets),        cmocka_unit_test(test_all_kernels_are_cut),
        cmocka_unit_test(test_limits_are_named),   cmocka_unit_test(test_build_options),
        cmocka_unit_test(test_small_local_memory), cmocka_unit_test(test_backward_of_unequal_blocks),
    };
    return cmocka_run_group_tests_name("opencl_limits", tests, NULL, NULL);
}
