/* SPDX-License-Identifier: MIT */
/* Decode steps of bench_nvidia, through a cache. */

#include "bench_nvidia.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SPARE_TOKENS = 64, STEPS = 32 }; /* for the steps that are timed */

/* Rows first .. first + count - 1. */
static clattn_tensor rows_of(const clattn_tensor *tensor, int64_t first, int64_t count)
{
    clattn_tensor rows = *tensor;
    rows.offset += first * tensor->len_stride;
    rows.len = count;
    return rows;
}

static clattn_status step_at(const struct bench *bench, struct case_data *c, int64_t row,
                             clattn_blocks **blocks, const clattn_sync *sync)
{
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    const int32_t sequence = 0, len = 1;
    clattn_tensor q = rows_of(&c->q, row, 1), k = rows_of(&c->k, row, 1), v = rows_of(&c->v, row, 1);
    clattn_tensor out = rows_of(&c->out, row, 1), lse = rows_of(&c->lse, row, 1);
    select.topk = c->topk;
    return clattn_decode(bench->context, c->cache, NULL, &select, 1, &sequence, &len, &q, &k, &v, &out, &lse,
                         blocks, sync);
}

void decode_last(const struct bench *bench, struct case_data *c)
{
    clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
    const int32_t sequence = 0, prefill = (int32_t)(c->len - LAST_ROWS);
    size_t row = (size_t)(c->kv_heads * c->topk);
    desc.tokens = c->len + SPARE_TOKENS;
    desc.kv_heads = c->kv_heads;
    desc.dim = desc.dim_v = c->dim;
    desc.dtype = CLATTN_BFLOAT16;
    check_code("clattn_cache_create", clattn_cache_create(bench->context, &desc, &c->cache));
    clattn_tensor k = rows_of(&c->k, 0, prefill), v = rows_of(&c->v, 0, prefill);
    check_code("clattn_cache_append",
               clattn_cache_append(bench->context, c->cache, 1, &sequence, &prefill, &k, &v, NULL));
    c->first_row = prefill;
    c->lists = malloc((size_t)c->len * row * sizeof *c->lists);
    for (int64_t i = prefill; i < c->len; i++) {
        check_code("clattn_decode", step_at(bench, c, i, &c->blocks, NULL));
        check_code("clattn_blocks_read",
                   clattn_blocks_read(bench->context, c->blocks, c->lists + (size_t)i * row, NULL));
    }
}

clattn_status decode_step(const struct bench *bench, struct case_data *c, const clattn_sync *sync)
{
    return step_at(bench, c, c->len - 1, NULL, sync);
}

static double seconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* What a step takes when one follows the other, the host's work included. */
void decode_steps(const struct bench *bench, struct case_data *c, char *verdict, size_t bytes)
{
    clattn_sync sync = CLATTN_SYNC_INIT;
    sync.queue = bench->queue;
    check_code("clFinish", clFinish(bench->queue));
    double start = seconds();
    for (int n = 0; n < STEPS; n++)
        check_code("clattn_decode", decode_step(bench, c, &sync));
    double enqueued = seconds();
    check_code("clFinish", clFinish(bench->queue));
    size_t used = strlen(verdict);
    snprintf(verdict + used, bytes - used, ", %.3f ms a step in a row (%.3f of the host)",
             1e3 * (seconds() - start) / STEPS, 1e3 * (enqueued - start) / STEPS);
}
