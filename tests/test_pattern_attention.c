/* SPDX-License-Identifier: MIT */
/* Attention over static patterns on every backend: rows sum to 1, the caller's block boundaries, unions. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clattn.h"
#include "pattern_oracle.h"

#include <math.h>

static clattn_pattern *parsed(const char *text)
{
    char error[200];
    clattn_pattern *pattern = NULL;
    if (clattn_pattern_parse(text, &pattern, error, sizeof error)) fail_msg("'%s': %s", text, error);
    return pattern;
}

/* Device `number`, or NULL. A driver that does not open is not this test's business, but the two CPU backends
 * are. */
static clattn_context *open_device(int number, clattn_device_info *info)
{
    char index[16], detail[512] = "";
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    snprintf(index, sizeof index, "%d", info->index);
    desc.backend = info->backend;
    if (info->backend == CLATTN_BACKEND_OPENCL) desc.device = index;
    desc.error = detail;
    desc.error_bytes = sizeof detail;
    if (clattn_context_create(&desc, &context)) {
        print_message("device %d (%s) left out: %s\n", number, info->name, detail);
        assert_int_equal(info->backend, CLATTN_BACKEND_OPENCL);
        return NULL;
    }
    return context;
}

#define FOR_EACH_DEVICE(number, info)                                                                          \
    for (int number = 0;                                                                                       \
         (info) = (clattn_device_info){.size = sizeof(info)}, clattn_device_get(number, &(info)) == 0;         \
         number++)

static void fill(float *data, size_t count, uint32_t seed)
{
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525 + 1013904223;
        data[i] = (float)(seed >> 8) / 4194304 - 2;
    }
}

static float *numbers(size_t count, uint32_t seed)
{
    float *data = malloc((count + 1) * sizeof *data);
    assert_non_null(data);
    fill(data, count, seed);
    return data;
}

/* ---- v = 1 ---- */

enum { ONES_LEN = 4096, ONES_DIM = 32 };

/* Every row of local 1, log stride and three anchors sees something, and its weights sum to 1. */
static void check_ones(clattn_context *context, const clattn_device_info *info, int causal)
{
    const size_t count = (size_t)ONES_LEN * ONES_DIM;
    clattn_pattern *pattern = parsed("local:1+log-stride+anchors:first,middle,last");
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_pattern_shape shape = CLATTN_PATTERN_SHAPE_INIT;
    clattn_blocks *blocks = NULL;
    float *q_data = numbers(count, 1), *k_data = numbers(count, 2), *v_data = numbers(count, 3),
          *result = numbers(count, 4);
    for (size_t i = 0; i < count; i++)
        v_data[i] = 1;
    clattn_tensor q = clattn_tensor_bthd(q_data, CLATTN_FLOAT32, 1, ONES_LEN, 1, ONES_DIM), k = q, v = q,
                  out = q;
    k.data = k_data;
    v.data = v_data;
    out.data = result;
    attention.causal = causal;
    shape.block = shape.q_block = 32;
    shape.q_len = shape.kv_len = ONES_LEN;
    assert_int_equal(clattn_pattern_blocks(context, pattern, &attention, &shape, &blocks), CLATTN_SUCCESS);
    assert_int_equal(clattn_attention_forward(context, &attention, &q, &k, &v, blocks, &out, NULL, NULL),
                     CLATTN_SUCCESS);
    for (size_t i = 0; i < count; i++)
        if (!(fabsf(result[i] - 1) <= 1e-5f))
            fail_msg("%s %s: row %zu is %.9g", info->name, info->variant, i / ONES_DIM, (double)result[i]);
    free(q_data);
    free(k_data);
    free(v_data);
    free(result);
    clattn_blocks_release(context, blocks);
    clattn_pattern_release(pattern);
}

static void test_ones(void **state)
{
    clattn_device_info info;
    (void)state;
    FOR_EACH_DEVICE(number, info)
    {
        clattn_context *context = open_device(number, &info);
        for (int causal = 0; context && causal < 2; causal++)
            check_ones(context, &info, causal);
        clattn_context_release(context);
    }
}

/* ---- against attention over pairs of tokens ---- */

enum { DIM = 16, Q_HEADS = 4, KV_HEADS = 2 };

struct data {
    float *q, *k, *v, *out, *lse;
    int64_t batch, q_len, kv_len;
};

static struct data data_new(const struct oracle_shape *shape)
{
    struct data d = {.batch = shape->sequences ? 1 : shape->batch,
                     .q_len = shape->sequences ? shape->cu_q[shape->sequences] : shape->q_len,
                     .kv_len = shape->sequences ? shape->cu_k[shape->sequences] : shape->kv_len};
    size_t q = (size_t)(d.batch * d.q_len), k = (size_t)(d.batch * d.kv_len);
    d.q = numbers(q * Q_HEADS * DIM, 5);
    d.k = numbers(k * KV_HEADS * DIM, 6);
    d.v = numbers(k * KV_HEADS * DIM, 7);
    d.out = numbers(q * Q_HEADS * DIM, 8);
    d.lse = numbers(q * Q_HEADS, 9);
    return d;
}

static void data_free(struct data *d)
{
    free(d->q);
    free(d->k);
    free(d->v);
    free(d->out);
    free(d->lse);
}

/* One row: softmax over the joined keys, in double. */
static void check_row(const struct data *d, const unsigned char *joined, int64_t q_row, int64_t k_row,
                      int64_t kv_len, int head, const char *name)
{
    const float *q = d->q + (q_row * Q_HEADS + head) * DIM, *out = d->out + (q_row * Q_HEADS + head) * DIM;
    double sum = 0, value[DIM] = {0}, size[DIM] = {0};
    for (int64_t j = 0; j < kv_len; j++) {
        const float *k = d->k + ((k_row + j) * KV_HEADS + head / 2) * DIM;
        const float *v = d->v + ((k_row + j) * KV_HEADS + head / 2) * DIM;
        double dot = 0;
        if (!joined[j]) continue;
        for (int n = 0; n < DIM; n++)
            dot += (double)q[n] * (double)k[n];
        double weight = exp(dot / 4);
        sum += weight;
        for (int n = 0; n < DIM; n++) {
            value[n] += weight * (double)v[n];
            size[n] += weight * fabs((double)v[n]);
        }
    }
    double lse = d->lse[q_row * Q_HEADS + head];
    bool good = sum == 0 ? lse == -INFINITY : fabs(lse - log(sum)) <= 1e-5 * (1 + fabs(log(sum)));
    for (int n = 0; n < DIM; n++) {
        double expected = sum == 0 ? 0 : value[n] / sum, bound = sum == 0 ? 0 : 1e-5 * size[n] / sum;
        good = good && fabs((double)out[n] - expected) <= bound;
    }
    if (!good) fail_msg("%s: row %lld, head %d", name, (long long)q_row, head);
}

static clattn_status attend(clattn_context *context, const struct oracle_shape *shape,
                            const clattn_blocks *blocks, struct data *d)
{
    clattn_attention_desc attention = oracle_attention(shape);
    clattn_tensor q = clattn_tensor_bthd(d->q, CLATTN_FLOAT32, d->batch, d->q_len, Q_HEADS, DIM);
    clattn_tensor k = clattn_tensor_bthd(d->k, CLATTN_FLOAT32, d->batch, d->kv_len, KV_HEADS, DIM);
    clattn_tensor v = clattn_tensor_bthd(d->v, CLATTN_FLOAT32, d->batch, d->kv_len, KV_HEADS, DIM);
    clattn_tensor out = clattn_tensor_bthd(d->out, CLATTN_FLOAT32, d->batch, d->q_len, Q_HEADS, DIM);
    clattn_tensor lse = clattn_tensor_bthd(d->lse, CLATTN_FLOAT32, d->batch, d->q_len, Q_HEADS, 1);
    return clattn_attention_forward(context, &attention, &q, &k, &v, blocks, &out, &lse, NULL);
}

static const int32_t cu_q[] = {0, 0, 76, 110, 110, 256}, cu_k[] = {0, 40, 140, 174, 174, 420},
                     used_q[] = {70, 0, 45}, used_k[] = {200, 90, 0};
static const int64_t starts[] = {0, 1, 40, 41, 90, 100, 117, 140, 141, 174, 200, 290, 301, 302, 400, 5000};

#define LENGTHS(b, q, k) .batch = b, .q_len = q, .kv_len = k
#define CUT(keys, rows, lists) .block = keys, .q_block = rows, .heads = lists
#define PACKED .sequences = 5, .cu_q = cu_q, .cu_k = cu_k
#define STARTS .starts = starts, .start_count = sizeof starts / sizeof *starts

static const struct oracle_shape shapes[] = {
    {.name = "one block a row", LENGTHS(1, 300, 300), CUT(32, 32, 1)},
    {.name = "not causal", LENGTHS(2, 100, 203), CUT(16, 48, Q_HEADS), .all_keys = true},
    {.name = "packed", CUT(16, 32, KV_HEADS), PACKED},
    {.name = "padding", LENGTHS(3, 80, 210), CUT(16, 32, 1), .used_q = used_q, .used_k = used_k},
    {.name = "starts", LENGTHS(2, 300, 333), CUT(0, 32, Q_HEADS), STARTS},
    {.name = "starts, token rows, not causal", LENGTHS(1, 60, 333), CUT(0, 1, 1), .all_keys = true, STARTS},
    {.name = "starts, packed", CUT(0, 16, KV_HEADS), PACKED, STARTS},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static void check_shape(clattn_context *context, const clattn_device_info *info,
                        const struct oracle_pattern *oracle, const struct oracle_shape *shape)
{
    static struct oracle_sequence sequence;
    char name[256];
    clattn_pattern *pattern = parsed(oracle->text);
    clattn_attention_desc attention = oracle_attention(shape);
    clattn_pattern_shape desc = oracle_pattern_shape(shape);
    clattn_blocks *blocks = NULL;
    struct data data = data_new(shape);
    snprintf(name, sizeof name, "%s: %s, %s", info->name, oracle->text, shape->name);
    assert_int_equal(clattn_pattern_blocks(context, pattern, &attention, &desc, &blocks), CLATTN_SUCCESS);
    clattn_status status = attend(context, shape, blocks, &data);
    assert_int_equal(status, CLATTN_SUCCESS);
    for (int64_t s = 0; s < oracle_sequences(shape); s++) {
        oracle_sequence(shape, s, &sequence);
        int64_t batch = shape->sequences ? 0 : s;
        for (int head = 0; head < Q_HEADS; head++) {
            unsigned char *joined = oracle_joined(oracle, shape, &sequence, head * shape->heads / Q_HEADS);
            for (int64_t i = 0; i < sequence.q_len; i++)
                check_row(&data, joined + i * sequence.kv_len, batch * data.q_len + sequence.q_row + i,
                          batch * data.kv_len + sequence.k_row, sequence.kv_len, head, name);
            free(joined);
        }
    }
    clattn_blocks_release(context, blocks);
    clattn_pattern_release(pattern);
    data_free(&data);
}

static void test_attention(void **state)
{
    clattn_device_info info;
    (void)state;
    FOR_EACH_DEVICE(number, info)
    {
        clattn_context *context = open_device(number, &info);
        for (int p = 0; context && p < oracle_pattern_count; p++)
            for (int s = 0; s < SHAPES; s++)
                if (oracle_patterns[p].heads <= shapes[s].heads)
                    check_shape(context, &info, &oracle_patterns[p], &shapes[s]);
        clattn_context_release(context);
    }
}

/* Starts equal to multiples of the block are the same as equal blocks. Wrong ones are refused. */
static void test_starts(void **state)
{
    static const int64_t equal[] = {0, 16, 32, 48, 64, 80, 96, 112}, short_ones[] = {0, 16, 32};
    static const struct oracle_shape plain = {LENGTHS(1, 100, 100), CUT(16, 16, 1)};
    static const int32_t indices[7] = {0, 1, 2, 3, 3, 5, 2}, too_far[7] = {0, 1, 2, 3, 3, 5, 7};
    struct data a = data_new(&plain), b = data_new(&plain);
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT, described = {.size = sizeof described};
    clattn_blocks *blocks = NULL;
    desc.block = desc.q_block = 16;
    desc.rows = 7;
    desc.topk = 1;
    assert_int_equal(clattn_blocks_create(*state, &desc, indices, &blocks), CLATTN_SUCCESS);
    assert_int_equal(attend(*state, &plain, blocks, &a), CLATTN_SUCCESS);
    clattn_blocks_release(*state, blocks);
    desc.starts = equal;
    desc.start_count = 8;
    desc.block = 5; /* ignored */
    assert_int_equal(clattn_blocks_create(*state, &desc, indices, &blocks), CLATTN_SUCCESS);
    assert_int_equal(clattn_blocks_describe(blocks, &described), CLATTN_SUCCESS);
    assert_int_equal(described.block, 0);
    assert_int_equal(described.start_count, 8);
    assert_memory_equal(described.starts, equal, sizeof equal);
    assert_int_equal(attend(*state, &plain, blocks, &b), CLATTN_SUCCESS);
    clattn_blocks_release(*state, blocks);
    assert_memory_equal(a.out, b.out, 100 * Q_HEADS * DIM * sizeof(float));
    assert_int_equal(clattn_blocks_create(*state, &desc, too_far, &blocks), CLATTN_SUCCESS);
    assert_int_equal(attend(*state, &plain, blocks, &b), CLATTN_INVALID_BLOCKS);
    clattn_blocks_release(*state, blocks);
    desc.starts = short_ones; /* the last block reaches to the end */
    desc.start_count = 3;
    assert_int_equal(clattn_blocks_create(*state, &desc, indices, &blocks), CLATTN_SUCCESS);
    assert_int_equal(attend(*state, &plain, blocks, &b), CLATTN_INVALID_BLOCKS);
    clattn_blocks_release(*state, blocks);
    desc.starts = equal + 1;
    blocks = NULL;
    assert_int_equal(clattn_blocks_create(*state, &desc, indices, &blocks), CLATTN_INVALID_BLOCKS);
    desc.starts = equal;
    desc.start_count = 0;
    assert_int_equal(clattn_blocks_create(*state, &desc, indices, &blocks), CLATTN_INVALID_BLOCKS);
    assert_null(blocks);
    data_free(&a);
    data_free(&b);
}

static int open_reference(void **state)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    return clattn_context_create(&desc, (clattn_context **)state);
}

static int close_reference(void **state)
{
    clattn_context_release(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ones),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_starts),
    };
    return cmocka_run_group_tests_name("pattern attention", tests, open_reference, close_reference);
}
