/* SPDX-License-Identifier: MIT */
/* The self-test of a device that is chosen automatically: a small attention case, with rows that see nothing, a
 * leaf that is not full and query heads that share keys, against the reference. The result is kept in the disk
 * cache, so that it costs its time once a driver. */

#include "config.h"

#include "kernel_sources.h"
#include "opencl.h"

#include "half.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Two sequences: 20 query rows over 15 keys, so that 5 rows see nothing, and 13 rows at the end of 135 keys, 8
 * leaves and 7 keys more. Small, because a simulator may be the device. */
enum { Q_LEN = 33, KV_LEN = 150, Q_HEADS = 4, KV_HEADS = 2, DIM = 64, DIM_V = 40, LEAF = 16, TOPK = 5 };
enum { Q = Q_LEN * Q_HEADS * DIM, K = KV_LEN * KV_HEADS * DIM, V = KV_LEN * KV_HEADS * DIM_V };
enum { OUT = Q_LEN * Q_HEADS * DIM_V, LSE = Q_LEN * Q_HEADS };

static const int32_t cu_q[] = {0, 20, Q_LEN}, cu_k[] = {0, 15, KV_LEN};

/* The inputs are exact in float16 and out is float32: what differs is the order of sums of at most 80 terms. */
static const float TOLERANCE = 1e-4f;

struct selftest_data {
    uint16_t q[Q], k[K], v[V];
    float out[2][OUT], lse[2][LSE]; /* of the reference, of the device */
};

/* Multiples of 1/64 in [-1, 1). */
static void fill(uint16_t *halves, int count, uint32_t seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        halves[i] = float16_of_float(((float)(seed >> 25) - 64) / 64);
    }
}

static clattn_status run(clattn_context *context, struct selftest_data *data, int side)
{
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    attention.sequences = 2;
    attention.cu_seqlens_q = cu_q;
    attention.cu_seqlens_k = cu_k;
    select.leaf = LEAF;
    select.topk = TOPK;
    clattn_tensor q = clattn_tensor_bthd(data->q, CLATTN_FLOAT16, 1, Q_LEN, Q_HEADS, DIM);
    clattn_tensor k = clattn_tensor_bthd(data->k, CLATTN_FLOAT16, 1, KV_LEN, KV_HEADS, DIM);
    clattn_tensor v = clattn_tensor_bthd(data->v, CLATTN_FLOAT16, 1, KV_LEN, KV_HEADS, DIM_V);
    clattn_tensor out = clattn_tensor_bthd(data->out[side], CLATTN_FLOAT32, 1, Q_LEN, Q_HEADS, DIM_V);
    clattn_tensor lse = clattn_tensor_bthd(data->lse[side], CLATTN_FLOAT32, 1, Q_LEN, Q_HEADS, 1);
    memset(data->out[side], 0xff, sizeof data->out[side]);
    memset(data->lse[side], 0xff, sizeof data->lse[side]);
    return clattn_attention(context, &attention, &select, &q, &k, &v, &out, &lse, NULL);
}

static bool is_close(float value, float expected)
{
    return value == expected || fabsf(value - expected) <= TOLERANCE * (1 + fabsf(expected));
}

static clattn_status compare(clattn_context *context, const char *name, const float *have, const float *want,
                             int count)
{
    for (int i = 0; i < count; i++)
        if (!is_close(have[i], want[i]))
            return fail(context, CLATTN_NO_DEVICE, "'%s' computes wrongly: %s[%d] is %g, must be %g",
                        opencl_of(context)->device.name, name, i, (double)have[i], (double)want[i]);
    return CLATTN_SUCCESS;
}

static clattn_status selftest_run(clattn_context *context)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_context *reference = NULL;
    struct selftest_data *data = malloc(sizeof *data);
    if (!data) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for the self-test");
    fill(data->q, Q, 1);
    fill(data->k, K, 2);
    fill(data->v, V, 3);
    desc.backend = CLATTN_BACKEND_REFERENCE;
    clattn_status status = clattn_context_create(&desc, &reference);
    if (!status) status = run(reference, data, 0);
    if (!status) status = run(context, data, 1);
    if (!status) status = compare(context, "out", data->out[1], data->out[0], OUT);
    if (!status) status = compare(context, "lse", data->lse[1], data->lse[0], LSE);
    clattn_context_release(reference);
    free(data);
    return status;
}

/* The result of a test holds for these kernels only. */
char *opencl_all_sources(void)
{
    size_t bytes = 1, used = 0;
    for (unsigned i = 0; i < kernel_source_count; i++)
        bytes += strlen(kernel_sources[i].text);
    char *text = malloc(bytes);
    for (unsigned i = 0; text && i < kernel_source_count; i++) {
        size_t length = strlen(kernel_sources[i].text);
        memcpy(text + used, kernel_sources[i].text, length);
        used += length;
    }
    if (text) text[used] = 0;
    return text;
}

clattn_status opencl_selftest(clattn_context *context)
{
    struct opencl *state = opencl_of(context);
    struct opencl_trial trial;
    char what[64];
    snprintf(what, sizeof what, "self-test of tier %s", state->tier);
    clattn_status status = opencl_trial_begin(context, what, &trial);
    if (!status && !trial.has_passed) {
        status = selftest_run(context);
        log_line(context, CLATTN_LOG_INFO, "self-test of '%s': %s", state->device.name,
                 status ? "failed" : "passed");
    }
    opencl_trial_end(context, &trial, status);
    return status;
}
