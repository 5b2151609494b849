/* SPDX-License-Identifier: MIT */
/* The rows of decode against a prefill: attention over all tokens in one call, with the same selector. */

#include "config.h"

#include "decode.h"

#include "program.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What a prefill gives. */
struct prefill {
    float *out;     /* [batch][tokens - base][q_heads][dim_v] */
    int32_t *lists; /* [batch][tokens - base][kv_heads][topk]; NULL: dense */
};

static size_t out_count(const struct decode *d)
{
    return (size_t)(d->run.batch * (d->tokens - d->base) * d->run.q_heads * d->run.dim_v);
}

static size_t list_count(const struct decode *d)
{
    return (size_t)(d->run.batch * (d->tokens - d->base) * d->run.kv_heads * d->run.topk);
}

/* Selection and attention over the files' own tensors. */
static int attend(struct decode *d, struct prefill *prefill)
{
    clattn_tensor q = d->run.job.q, k = d->run.job.k, v = d->run.job.v;
    q.len = d->tokens - d->base;
    k.len = v.len = d->tokens;
    clattn_tensor out = clattn_tensor_bthd(prefill->out, CLATTN_FLOAT32, q.batch, q.len, q.heads, d->run.dim_v);
    clattn_blocks *blocks = NULL;
    clattn_status status = CLATTN_SUCCESS;
    if (d->lists) {
        status = clattn_select(d->context, &d->attention, &d->select, &q, &k, NULL, &blocks, NULL);
        if (!status) status = clattn_blocks_read(d->context, blocks, prefill->lists, NULL);
    }
    if (!status)
        status = clattn_attention_forward(d->context, &d->attention, &q, &k, &v, blocks, &out, NULL, NULL);
    clattn_blocks_release(d->context, blocks);
    if (status) device_error(d->context, status, "the prefill");
    return status ? STATUS_FAILED : STATUS_OK;
}

/* An int8 prefill: another cache, filled in chunks of another size. The rows of the first one are kept
 * meanwhile. */
static int refill(struct decode *d, struct prefill *prefill)
{
    clattn_cache *cache = NULL;
    float *out = d->out;
    int32_t *lists = d->lists;
    int status = decode_cache(d, CLATTN_INT8, &cache);
    d->out = prefill->out;
    d->lists = prefill->lists;
    for (int64_t at = 0, len; at < d->tokens && status == STATUS_OK; at += len) {
        len = decode_next(d, at, d->chunk, d->tokens);
        status = decode_call(d, cache, at, len, NULL);
    }
    d->out = out;
    d->lists = lists;
    clattn_cache_release(d->context, cache);
    return status;
}

/* Greatest magnitude of the values: errors of out are in proportion to it. */
static double greatest(const float *out, size_t count)
{
    double most = 0;
    for (size_t n = 0; n < count; n++)
        most = fabs((double)out[n]) > most ? fabs((double)out[n]) : most;
    return most;
}

/* NaN in both is no difference; an infinity is one when the other is not the same. */
static double distance(float a, float b)
{
    if (a == b || (isnan(a) && isnan(b))) return 0;
    double error = fabs((double)a - (double)b);
    return isnan(error) ? INFINITY : error;
}

static void compare_row(struct decode *d, const struct prefill *prefill, int64_t row)
{
    const struct run *run = &d->run;
    int64_t group = run->q_heads / run->kv_heads, out_row = run->q_heads * run->dim_v;
    for (int64_t h = 0; h < run->kv_heads; h++) {
        int64_t list = (row * run->kv_heads + h) * run->topk, first = row * out_row + h * group * run->dim_v;
        d->check.lists += d->lists != NULL;
        if (d->lists &&
            memcmp(d->lists + list, prefill->lists + list, (size_t)run->topk * sizeof *d->lists) != 0) {
            d->check.lists_differ++;
            continue;
        }
        for (int64_t n = first; n < first + group * run->dim_v; n++)
            d->check.error = fmax(d->check.error, distance(d->out[n], prefill->out[n]));
    }
    d->check.rows++;
}

static int compare(struct decode *d, struct prefill *prefill)
{
    int status = d->is_int8 ? refill(d, prefill) : attend(d, prefill);
    if (status != STATUS_OK) return status;
    for (int64_t row = 0; row < d->run.batch * (d->tokens - d->base); row++)
        if (row % (d->tokens - d->base) >= d->prefill - d->base) compare_row(d, prefill, row);
    /* Both are float32 sums over the same keys in another order. */
    d->check.tolerated = 64 * (double)FLT_EPSILON * greatest(prefill->out, out_count(d));
    if (d->is_int8 && (status = attend(d, prefill)) == STATUS_OK)
        for (size_t n = 0; n < out_count(d); n++)
            d->check.quantised = fmax(d->check.quantised, distance(d->out[n], prefill->out[n]));
    /* Equal scores but for rounding may fall either way, which is rare. */
    bool agrees = d->check.error <= d->check.tolerated && d->check.lists_differ * 1000 <= d->check.lists;
    if (status == STATUS_OK && !agrees) {
        program_error("decoding differs from the prefill: error %g of %g, %lld of %lld lists", d->check.error,
                      d->check.tolerated, (long long)d->check.lists_differ, (long long)d->check.lists);
        status = STATUS_FAILED;
    }
    return status;
}

int decode_compare(struct decode *d)
{
    struct prefill prefill = {.out = malloc(out_count(d) * sizeof(float))};
    if (d->lists) prefill.lists = malloc(list_count(d) * sizeof(int32_t));
    int status = STATUS_FAILED;
    if (!prefill.out || (d->lists && !prefill.lists))
        program_error("out of memory for the prefill");
    else
        status = compare(d, &prefill);
    free(prefill.out);
    free(prefill.lists);
    return status;
}
