/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_BENCH_NVIDIA_H
#define CLATTN_BENCH_NVIDIA_H

/* What bench_nvidia.c and its checks share. */

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#include <CL/cl.h>

#include "clattn.h"

#include <stdbool.h>

struct bench {
    cl_device_id device;
    cl_context cl;
    cl_command_queue queue;
    cl_kernel fill;
    cl_mem busy;
    clattn_context *context;
};

/* One problem, causal, q_len = kv_len = len, bfloat16; lists NULL: chosen on the card, or all keys. */
struct case_data {
    int64_t len, first_row; /* rows before first_row are not computed */
    int kv_heads, group, dim, topk, q_block, list_heads;
    clattn_selector selector; /* of lists that are chosen */
    int32_t *lists; /* [len / q_block][list_heads][topk] */
    clattn_attention_desc attention; /* its options: window, softcap, sink */
    clattn_tensor q, k, v, out, lse, dout, dq, dk, dv, sink, dsink;
    clattn_blocks *blocks;
    clattn_pyramid *pyramid;
    clattn_cache *cache; /* with len tokens, after the steps of decode_last */
};

enum { LAST_ROWS = 32 }; /* that check_lists compares */

/* Compare sampled rows in double precision; write what was found to `verdict`, "WRONG ..." and false when it
 * differs. */
bool check_lists(const struct bench *bench, struct case_data *c, char *verdict, size_t bytes);
bool check_forward(const struct bench *bench, struct case_data *c, char *verdict, size_t bytes);
bool check_backward(const struct bench *bench, struct case_data *c, char *verdict, size_t bytes);

/* Decoding: fills a cache with all but the last LAST_ROWS tokens and decodes these one by one, which gives their lists,
 * out and lse. A step more. bench_nvidia_decode.c */
void decode_last(const struct bench *bench, struct case_data *c);
void decode_steps(const struct bench *bench, struct case_data *c, char *verdict, size_t bytes);
clattn_status decode_step(const struct bench *bench, struct case_data *c, const clattn_sync *sync);

void bench_fail(const char *what, int code);

static inline void check_code(const char *what, int code)
{
    if (code) bench_fail(what, code);
}

#endif
