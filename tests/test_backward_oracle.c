/* SPDX-License-Identifier: MIT */
/* The reference's forward and backward pass with every option against a loss written down here in double
 * precision, by central finite differences. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "clattn.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct shape {
    const char *name;
    int q_len, kv_len, kv_heads, group, dim, dim_v;
    int block, q_block, topk, list_heads; /* topk 0: dense */
    int causal, window;
    float softcap;
    bool sink, bias, dlse;
};

static const struct shape shapes[] = {
    {"dense causal", 9, 9, 1, 1, 5, 5, 16, 1, 0, 1, 1, 0, 0, false, false, false},
    {"dense, groups, dim_v", 7, 11, 2, 3, 6, 4, 16, 1, 0, 1, 0, 0, 0, false, false, true},
    {"lists per token", 37, 70, 1, 2, 4, 3, 16, 1, 2, 1, 1, 0, 0, false, false, true},
    {"lists per block, heads", 40, 40, 2, 2, 4, 4, 16, 16, 2, 4, 1, 0, 0, false, false, false},
    {"soft cap", 20, 33, 1, 2, 4, 4, 16, 1, 2, 1, 1, 0, 1.5f, false, false, true},
    {"sink", 20, 33, 1, 2, 4, 4, 16, 1, 2, 1, 1, 0, 0, true, false, true},
    {"bias", 20, 50, 2, 1, 4, 4, 16, 1, 3, 2, 1, 0, 0, false, true, false},
    {"window causal", 40, 40, 1, 1, 4, 4, 16, 1, 2, 1, 1, 9, 0, false, false, false},
    {"window both sides", 40, 40, 1, 1, 4, 4, 16, 8, 2, 1, 0, 9, 0, true, false, false},
    {"everything", 35, 60, 2, 2, 5, 3, 16, 4, 3, 2, 1, 21, 2.0f, true, true, true},
    {"more queries than keys", 30, 11, 1, 2, 4, 4, 16, 1, 1, 1, 1, 0, 0, true, false, true},
};

/* Inputs in double, all exact in float32; lists. */
struct input {
    struct shape shape;
    int q_heads, rows, blocks;
    double *q, *k, *v, *sink, *bias, *dout, *dlse;
    int32_t *list;
};

static uint64_t random_state;

static double random_value(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (double)(int32_t)(random_state >> 40) / 8388608.0 - 1.0;
}

static double *random_array(size_t count)
{
    double *array = malloc((count + 1) * sizeof *array);
    for (size_t i = 0; i < count; i++)
        array[i] = (double)(float)(random_value() * 1.5);
    return array;
}

static int row_list(const struct input *in, int row, int head, const int32_t **list)
{
    const struct shape *s = &in->shape;
    int list_head = head * s->list_heads / in->q_heads;
    *list =
        in->list + ((size_t)(row / s->q_block) * (size_t)s->list_heads + (size_t)list_head) * (size_t)s->topk;
    return s->topk;
}

static bool connected(const struct input *in, int row, int head, int key)
{
    const struct shape *s = &in->shape;
    const int32_t *list;
    int t = row + s->kv_len - s->q_len;
    if (s->causal && key > t) return false;
    if (s->window && (key <= t - s->window || (!s->causal && key >= t + s->window))) return false;
    if (!s->topk) return true;
    for (int n = row_list(in, row, head, &list) - 1; n >= 0; n--)
        if (list[n] == key / s->block) return true;
    return false;
}

/* One row: its lse and, when out is not NULL, its values. */
static double row_forward(const struct input *in, int row, int head, double *out)
{
    const struct shape *s = &in->shape;
    int kv_head = head / s->group;
    double sum = 0, *weight = calloc((size_t)s->kv_len, sizeof *weight);
    for (int j = 0; j < s->kv_len; j++) {
        if (!connected(in, row, head, j)) continue;
        double x = 0;
        for (int d = 0; d < s->dim; d++)
            x += in->q[(row * in->q_heads + head) * s->dim + d] *
                 in->k[(j * s->kv_heads + kv_head) * s->dim + d];
        x /= sqrt(s->dim);
        if (s->softcap > 0) x = (double)s->softcap * tanh(x / (double)s->softcap);
        if (s->bias) x += in->bias[j / (s->topk ? s->block : 64) * in->q_heads + head];
        weight[j] = exp(x);
        sum += weight[j];
    }
    if (sum > 0 && s->sink) sum += exp(in->sink[head]);
    for (int d = 0; out && d < s->dim_v; d++) {
        out[d] = 0;
        for (int j = 0; j < s->kv_len; j++)
            if (weight[j] > 0) out[d] += weight[j] / sum * in->v[(j * s->kv_heads + kv_head) * s->dim_v + d];
    }
    free(weight);
    return log(sum);
}

static double loss(const struct input *in)
{
    const struct shape *s = &in->shape;
    double total = 0, out[8];
    for (int row = 0; row < s->q_len; row++)
        for (int head = 0; head < in->q_heads; head++) {
            double lse = row_forward(in, row, head, out);
            for (int d = 0; d < s->dim_v; d++)
                total += in->dout[(row * in->q_heads + head) * s->dim_v + d] * out[d];
            if (s->dlse && isfinite(lse)) total += in->dlse[row * in->q_heads + head] * lse;
        }
    return total;
}

static void input_make(struct input *in, const struct shape *shape)
{
    const struct shape *s = &in->shape;
    in->shape = *shape;
    in->q_heads = s->group * s->kv_heads;
    in->rows = (s->q_len + s->q_block - 1) / s->q_block;
    in->blocks = (s->kv_len + s->block - 1) / s->block;
    in->q = random_array((size_t)(s->q_len * in->q_heads * s->dim));
    in->k = random_array((size_t)(s->kv_len * s->kv_heads * s->dim));
    in->v = random_array((size_t)(s->kv_len * s->kv_heads * s->dim_v));
    in->sink = random_array((size_t)in->q_heads);
    in->bias = random_array((size_t)(in->blocks * in->q_heads));
    in->dout = random_array((size_t)(s->q_len * in->q_heads * s->dim_v));
    in->dlse = random_array((size_t)(s->q_len * in->q_heads));
    size_t entries = (size_t)(in->rows * s->list_heads * s->topk);
    in->list = malloc((entries + 1) * sizeof *in->list);
    for (size_t i = 0; i < entries; i++) /* with padding, duplicates, rows without any block */
        in->list[i] = (int32_t)floor((random_value() + 1) * 0.5 * (in->blocks + 1)) - 1;
}

static void input_free(struct input *in)
{
    double *const arrays[] = {in->q, in->k, in->v, in->sink, in->bias, in->dout, in->dlse};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    free(in->list);
}

static clattn_tensor tensor_of(const double *values, int len, int heads, int dim)
{
    size_t count = (size_t)(len * heads * dim);
    float *data = malloc((count + 1) * sizeof *data);
    for (size_t i = 0; i < count; i++)
        data[i] = values ? (float)values[i] : NAN;
    return clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, len, heads, dim);
}

/* Largest difference between finite differences of the loss and a gradient, relative to the gradient's largest
 * value. */
static double gradient_error(struct input *in, double *variable, const clattn_tensor *gradient)
{
    const double step = 1e-5;
    size_t count = (size_t)(gradient->len * gradient->heads * gradient->dim);
    double error = 0, largest = 1e-3;
    for (size_t i = 0; i < count; i++) {
        double kept = variable[i];
        variable[i] = kept + step;
        double right = loss(in);
        variable[i] = kept - step;
        double left = loss(in);
        variable[i] = kept;
        double expected = (right - left) / (2 * step);
        double difference = fabs(expected - (double)((float *)gradient->data)[i]);
        if (!(difference <= error)) error = difference; /* a NaN stays */
        largest = fmax(largest, fabs(expected));
    }
    return error / largest;
}

static void check_forward(const struct input *in, const clattn_tensor *out, const clattn_tensor *lse)
{
    const struct shape *s = &in->shape;
    for (int row = 0; row < s->q_len; row++)
        for (int head = 0; head < in->q_heads; head++) {
            double expected[8], expected_lse = row_forward(in, row, head, expected);
            int n = row * in->q_heads + head;
            float have = ((float *)lse->data)[n];
            if (!isfinite(expected_lse))
                assert_true(isinf(have) && have < 0);
            else
                assert_true(fabs(expected_lse - (double)have) <= 1e-6 * (1 + fabs(expected_lse)));
            for (int d = 0; d < s->dim_v; d++)
                assert_true(fabs(expected[d] - (double)((float *)out->data)[n * s->dim_v + d]) <= 1e-6);
        }
}

static void run_shape(clattn_context *context, const struct shape *shape)
{
    struct input in;
    input_make(&in, shape);
    const struct shape *s = &in.shape;
    clattn_tensor q = tensor_of(in.q, s->q_len, in.q_heads, s->dim),
                  k = tensor_of(in.k, s->kv_len, s->kv_heads, s->dim);
    clattn_tensor v = tensor_of(in.v, s->kv_len, s->kv_heads, s->dim_v);
    clattn_tensor out = tensor_of(NULL, s->q_len, in.q_heads, s->dim_v),
                  lse = tensor_of(NULL, s->q_len, in.q_heads, 1);
    clattn_tensor sink = tensor_of(in.sink, 1, in.q_heads, 1),
                  bias = tensor_of(in.bias, in.blocks, in.q_heads, 1);
    clattn_tensor dout = tensor_of(in.dout, s->q_len, in.q_heads, s->dim_v);
    clattn_tensor dlse = tensor_of(in.dlse, s->q_len, in.q_heads, 1);
    clattn_tensor dq = tensor_of(NULL, s->q_len, in.q_heads, s->dim),
                  dk = tensor_of(NULL, s->kv_len, s->kv_heads, s->dim);
    clattn_tensor dv = tensor_of(NULL, s->kv_len, s->kv_heads, s->dim_v),
                  dsink = tensor_of(NULL, 1, in.q_heads, 1);
    clattn_tensor dbias = tensor_of(NULL, in.blocks, in.q_heads, 1);
    clattn_tensor *const all[] = {&q,    &k,    &v,  &out, &lse, &sink,  &bias,
                                  &dout, &dlse, &dq, &dk,  &dv,  &dsink, &dbias};

    clattn_blocks *blocks = NULL;
    clattn_blocks_desc list = CLATTN_BLOCKS_DESC_INIT;
    list.block = s->block;
    list.q_block = s->q_block;
    list.rows = in.rows;
    list.heads = s->list_heads;
    list.topk = s->topk;
    if (s->topk) assert_int_equal(clattn_blocks_create(context, &list, in.list, &blocks), CLATTN_SUCCESS);
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    attention.causal = s->causal;
    attention.window = s->window;
    attention.softcap = s->softcap;
    attention.sink = s->sink ? &sink : NULL;
    attention.bias = s->bias ? &bias : NULL;
    assert_int_equal(clattn_attention_forward(context, &attention, &q, &k, &v, blocks, &out, &lse, NULL),
                     CLATTN_SUCCESS);
    check_forward(&in, &out, &lse);

    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    gradients.dout = &dout;
    gradients.dlse = s->dlse ? &dlse : NULL;
    gradients.dq = &dq;
    gradients.dk = &dk;
    gradients.dv = &dv;
    gradients.dsink = s->sink ? &dsink : NULL;
    gradients.dbias = s->bias ? &dbias : NULL;
    assert_int_equal(
        clattn_attention_backward(context, &attention, &q, &k, &v, blocks, &out, &lse, &gradients, NULL),
        CLATTN_SUCCESS);
    double error[5] = {gradient_error(&in, in.q, &dq), gradient_error(&in, in.k, &dk),
                       gradient_error(&in, in.v, &dv)};
    if (s->sink) error[3] = gradient_error(&in, in.sink, &dsink);
    if (s->bias) error[4] = gradient_error(&in, in.bias, &dbias);
    print_message("%-24s dq %.1e dk %.1e dv %.1e dsink %.1e dbias %.1e\n", s->name, error[0], error[1],
                  error[2], error[3], error[4]);
    for (int i = 0; i < 5; i++)
        assert_true(error[i] <= 5e-6);

    clattn_blocks_release(context, blocks);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]->data);
    input_free(&in);
}

static void test_finite_differences(void **state)
{
    (void)state;
    clattn_context *context;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
    random_state = 20261129;
    print_message("seed %llu\n", (unsigned long long)random_state);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        run_shape(context, &shapes[i]);
    clattn_context_release(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_finite_differences)};
    return cmocka_run_group_tests_name("backward_oracle", tests, NULL, NULL);
}
