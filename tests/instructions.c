/* SPDX-License-Identifier: MIT */
/* One operation of the CPU backend in one thread, for tests/instructions.sh, which counts its instructions.
 *
 *     instructions OPERATION     prints the number of units that the operation computes
 *
 * A unit: forward and backward, a listed pair of query head and key; select, a pair of query head and key of a leaf
 * that a query scores; pyramid, an element of the keys. Exit status 77: this build says nothing about speed. */

#include "clattn.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = 128, HEADS = 16, BLOCK = 64, TOPK = 8, ROWS = 32, KEYS = 4096, SCORED = 2 * TOPK - 3 };

static clattn_context *context;

static void check(clattn_status status)
{
    if (!status) return;
    fprintf(stderr, "instructions: %s\n", clattn_strerror(status));
    exit(1);
}

static clattn_tensor tensor(int64_t len, int64_t heads, int64_t dim)
{
    static uint32_t state = 1;
    float *data = malloc((size_t)(len * heads * dim) * sizeof *data);
    if (!data) exit(1);
    for (int64_t i = 0; i < len * heads * dim; i++) {
        state = state * UINT32_C(1664525) + UINT32_C(1013904223);
        data[i] = (float)(state >> 16) / 16384 - 2;
    }
    return clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, len, heads, dim);
}

static void attend(bool backward)
{
    clattn_tensor q = tensor(ROWS, HEADS, DIM), k = tensor(KEYS, 1, DIM), v = tensor(KEYS, 1, DIM);
    clattn_tensor out = tensor(ROWS, HEADS, DIM), lse = tensor(ROWS, HEADS, 1), dout = tensor(ROWS, HEADS, DIM);
    clattn_tensor dq = tensor(ROWS, HEADS, DIM), dk = tensor(KEYS, 1, DIM), dv = tensor(KEYS, 1, DIM);
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_blocks *blocks = NULL;
    int32_t indices[ROWS * TOPK];
    for (int i = 0; i < ROWS * TOPK; i++)
        indices[i] = i % TOPK * (KEYS / BLOCK / TOPK) + i / TOPK % 5;
    attention.causal = 0;
    desc.rows = ROWS;
    desc.topk = TOPK;
    check(clattn_blocks_create(context, &desc, indices, &blocks));
    check(clattn_attention_forward(context, &attention, &q, &k, &v, blocks, &out, &lse, NULL));
    gradients.dout = &dout;
    gradients.dq = &dq;
    gradients.dk = &dk;
    gradients.dv = &dv;
    if (backward)
        check(clattn_attention_backward(context, &attention, &q, &k, &v, blocks, &out, &lse, &gradients, NULL));
    printf("%d\n", ROWS * TOPK * BLOCK * HEADS);
}

static void build_and_select(bool select)
{
    clattn_tensor q = tensor(ROWS, HEADS, DIM), k = tensor(KEYS, 1, DIM);
    clattn_pyramid *pyramid = NULL;
    clattn_blocks *blocks = NULL;
    check(clattn_pyramid_build(context, NULL, BLOCK, &k, &pyramid, NULL));
    if (select) check(clattn_select(context, NULL, NULL, &q, &k, pyramid, &blocks, NULL));
    printf("%d\n", select ? ROWS * SCORED * BLOCK * HEADS : KEYS * DIM);
}

int main(int argc, char **argv)
{
    const char *operation = argc > 1 ? argv[1] : "";
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
#if !defined(__OPTIMIZE__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 77;
#endif
    desc.backend = CLATTN_BACKEND_CPU;
    desc.threads = 1;
    if (clattn_context_create(&desc, &context)) return 77; /* not this variant here */
    if (strcmp(operation, "forward") == 0 || strcmp(operation, "backward") == 0)
        attend(strcmp(operation, "backward") == 0);
    else
        build_and_select(strcmp(operation, "select") == 0);
    return 0;
}
