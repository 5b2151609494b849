/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "decode.h"

#include "program.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DENSE_STEPS = 5 };

/* ---- rows in and out ---- */

static size_t row_bytes(const struct decode *d, int64_t heads, int64_t dim)
{
    return (size_t)(heads * dim) * element_size(d->run.files[RUN_Q].type);
}

/* Rows first .. first + len - 1 of every batch entry, one after the other. */
static clattn_tensor pack(const struct decode *d, const clattn_tensor *from, char *to, int64_t first,
                          int64_t len)
{
    size_t element = element_size(d->run.files[RUN_Q].type), head = (size_t)from->dim * element;
    clattn_tensor packed = clattn_tensor_bthd(to, from->dtype, 1, from->batch * len, from->heads, from->dim);
    for (int64_t b = 0; b < from->batch; b++)
        for (int64_t i = first; i < first + len; i++)
            for (int64_t h = 0; h < from->heads; h++, to += head)
                memcpy(to,
                       (const char *)from->data +
                           (size_t)(b * from->batch_stride + i * from->len_stride + h * from->head_stride) *
                               element,
                       head);
    return packed;
}

/* Results of a call to their place in out and lists. */
static int unpack(struct decode *d, int64_t first, int64_t len)
{
    const struct run *run = &d->run;
    size_t row = (size_t)(run->q_heads * run->dim_v), list = (size_t)(run->kv_heads * run->topk);
    for (int64_t b = 0; b < run->batch; b++)
        memcpy(d->out + (size_t)(b * (d->tokens - d->base) + first - d->base) * row,
               d->rows + (size_t)(b * len) * row, (size_t)len * row * sizeof *d->out);
    if (!d->lists) return STATUS_OK;
    int32_t *lists = malloc((size_t)(run->batch * len) * list * sizeof *lists);
    clattn_status status =
        lists ? clattn_blocks_read(d->context, d->blocks, lists, NULL) : CLATTN_OUT_OF_MEMORY;
    for (int64_t b = 0; b < run->batch && !status; b++)
        memcpy(d->lists + (size_t)(b * (d->tokens - d->base) + first - d->base) * list,
               lists + (size_t)(b * len) * list, (size_t)len * list * sizeof *lists);
    free(lists);
    if (status) device_error(d->context, status, "reading the block lists");
    return status ? STATUS_FAILED : STATUS_OK;
}

int64_t decode_next(const struct decode *d, int64_t at, int64_t most, int64_t end)
{
    if (at < d->base && d->base < end) end = d->base;
    return most < end - at ? most : end - at;
}

/* Tokens that have no query. */
static int append(struct decode *d, clattn_cache *cache, int64_t first, int64_t len, double *seconds)
{
    const struct run *run = &d->run;
    clattn_tensor k = pack(d, &run->job.k, d->k, first, len), v = pack(d, &run->job.v, d->v, first, len);
    for (int64_t b = 0; b < run->batch; b++)
        d->lens[b] = (int32_t)len;
    double start = program_seconds();
    clattn_status status =
        clattn_cache_append(d->context, cache, run->batch, d->sequences, d->lens, &k, &v, NULL);
    if (seconds) *seconds = program_seconds() - start;
    if (status) device_error(d->context, status, "appending");
    return status ? STATUS_FAILED : STATUS_OK;
}

int decode_call(struct decode *d, clattn_cache *cache, int64_t first, int64_t len, double *seconds)
{
    const struct run *run = &d->run;
    if (first < d->base) return append(d, cache, first, len, seconds);
    clattn_tensor q = pack(d, &run->job.q, d->q, first - d->base, len);
    clattn_tensor k = pack(d, &run->job.k, d->k, first, len);
    clattn_tensor v = pack(d, &run->job.v, d->v, first, len);
    clattn_tensor out =
        clattn_tensor_bthd(d->rows, CLATTN_FLOAT32, 1, run->batch * len, run->q_heads, run->dim_v);
    for (int64_t b = 0; b < run->batch; b++)
        d->lens[b] = (int32_t)len;
    clattn_blocks_desc have = {.size = sizeof have};
    if (d->blocks &&
        (clattn_blocks_describe(d->blocks, &have) != CLATTN_SUCCESS || have.rows != run->batch * len)) {
        clattn_blocks_release(d->context, d->blocks);
        d->blocks = NULL;
    }
    double start = program_seconds();
    clattn_status status = clattn_decode(d->context, cache, &d->attention, &d->select, run->batch, d->sequences,
                                         d->lens, &q, &k, &v, &out, NULL, d->lists ? &d->blocks : NULL, NULL);
    if (seconds) *seconds = program_seconds() - start;
    if (status) {
        device_error(d->context, status, "decoding");
        return STATUS_FAILED;
    }
    return unpack(d, first, len);
}

/* ---- the cache ---- */

int decode_cache(struct decode *d, clattn_dtype dtype, clattn_cache **cache)
{
    clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
    desc.sequences = (int32_t)d->run.batch;
    desc.tokens = d->tokens;
    desc.kv_heads = (int32_t)d->run.kv_heads;
    desc.dim = (int32_t)d->run.dim;
    desc.dim_v = (int32_t)d->run.dim_v;
    desc.dtype = dtype;
    desc.leaf = d->select.leaf;
    desc.page_size = (int32_t)d->page_size;
    desc.bounds = d->select.selector == CLATTN_SELECT_ROBUST;
    clattn_status status = clattn_cache_create(d->context, &desc, cache);
    if (status) device_error(d->context, status, "making the cache");
    return status == CLATTN_NO_DEVICE ? STATUS_NO_DEVICE : status ? STATUS_FAILED : STATUS_OK;
}

static int take_memory(struct decode *d)
{
    const struct run *run = &d->run;
    int64_t most = d->chunk > d->step ? d->chunk : d->step;
    size_t rows = (size_t)(run->batch * most), all = (size_t)(run->batch * (d->tokens - d->base));
    d->sequences = malloc((size_t)run->batch * sizeof *d->sequences);
    d->lens = malloc((size_t)run->batch * sizeof *d->lens);
    d->q = malloc(rows * row_bytes(d, run->q_heads, run->dim));
    d->k = malloc(rows * row_bytes(d, run->kv_heads, run->dim));
    d->v = malloc(rows * row_bytes(d, run->kv_heads, run->dim_v));
    d->rows = malloc(rows * (size_t)(run->q_heads * run->dim_v) * sizeof *d->rows);
    d->out = malloc(all * (size_t)(run->q_heads * run->dim_v) * sizeof *d->out);
    d->step_seconds = malloc((size_t)d->tokens * sizeof *d->step_seconds);
    bool has_lists = d->select.selector != CLATTN_SELECT_DENSE;
    if (has_lists) d->lists = malloc(all * (size_t)(run->kv_heads * run->topk) * sizeof *d->lists);
    if (!d->sequences || !d->lens || !d->q || !d->k || !d->v || !d->rows || !d->out || !d->step_seconds ||
        (has_lists && !d->lists)) {
        program_error("out of memory for %lld tokens", (long long)(run->batch * d->tokens));
        return STATUS_FAILED;
    }
    for (int64_t b = 0; b < run->batch; b++)
        d->sequences[b] = (int32_t)b;
    return STATUS_OK;
}

/* ---- flow ---- */

static int do_prefill(struct decode *d)
{
    int status = STATUS_OK;
    double seconds = 0;
    for (int64_t at = 0, len; at < d->prefill && status == STATUS_OK; at += len) {
        len = decode_next(d, at, d->chunk, d->prefill);
        status = decode_call(d, d->cache, at, len, &seconds);
        d->prefill_seconds += seconds;
    }
    return status;
}

static int compare_seconds(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int do_steps(struct decode *d)
{
    int status = STATUS_OK;
    clattn_cache_info before = {.size = sizeof before};
    clattn_cache_describe(d->cache, &before);
    for (int64_t at = d->prefill, len; at < d->tokens && status == STATUS_OK; at += len) {
        len = d->step < d->tokens - at ? d->step : d->tokens - at;
        status = decode_call(d, d->cache, at, len, &d->step_seconds[d->steps]);
        d->decode_seconds += d->step_seconds[d->steps++];
    }
    d->info.size = sizeof d->info;
    clattn_cache_describe(d->cache, &d->info);
    double select = d->info.select_seconds - before.select_seconds;
    double attend = d->info.attend_seconds - before.attend_seconds;
    d->select_share = select + attend > 0 ? select / (select + attend) : NAN;
    qsort(d->step_seconds, (size_t)d->steps, sizeof *d->step_seconds, compare_seconds);
    return status;
}

/* The last token of every sequence once more, with all keys. */
static int do_dense(struct decode *d)
{
    const struct run *run = &d->run;
    clattn_select_desc dense = d->select;
    clattn_tensor q = pack(d, &run->job.q, d->q, d->tokens - 1 - d->base, 1);
    clattn_tensor out = clattn_tensor_bthd(d->rows, CLATTN_FLOAT32, 1, run->batch, run->q_heads, run->dim_v);
    dense.selector = CLATTN_SELECT_DENSE;
    for (int64_t b = 0; b < run->batch; b++)
        d->lens[b] = 1;
    for (int n = 0; n < DENSE_STEPS; n++) {
        double start = program_seconds();
        clattn_status status = clattn_decode(d->context, d->cache, &d->attention, &dense, run->batch,
                                             d->sequences, d->lens, &q, NULL, NULL, &out, NULL, NULL, NULL);
        double seconds = program_seconds() - start;
        if (status) {
            device_error(d->context, status, "attending to all keys");
            return STATUS_FAILED;
        }
        if (!(d->dense_seconds < seconds)) d->dense_seconds = seconds;
    }
    return STATUS_OK;
}

/* What share of the keys that the decoded rows see their lists have. */
static void count_chosen(struct decode *d)
{
    const struct run *run = &d->run;
    double chosen = 0, seen = 0;
    int64_t leaf = d->select.leaf;
    for (int64_t b = 0; b < run->batch; b++)
        for (int64_t t = d->prefill; t < d->tokens; t++)
            for (int64_t n = 0; n < run->kv_heads * run->topk; n++) {
                int64_t first =
                    d->lists
                        ? d->lists[(b * (d->tokens - d->base) + t - d->base) * run->kv_heads * run->topk + n] *
                              leaf
                        : -1;
                if (first >= 0) chosen += (double)(first + leaf <= t + 1 ? leaf : t + 1 - first);
                if (n % run->topk == 0) seen += (double)(t + 1);
            }
    d->chosen = d->lists ? chosen / seen : 1;
}

static int run_all(struct decode *d)
{
    struct run *run = &d->run;
    int status = run_open_inputs(run);
    if (status != STATUS_OK) return status;
    if (run->q_len > run->kv_len) {
        program_error("%s has length %lld but %s has %lld; there are more queries than tokens",
                      run->input_names[RUN_Q], (long long)run->q_len, run->input_names[RUN_K],
                      (long long)run->kv_len);
        return STATUS_FAILED;
    }
    d->base = run->kv_len - run->q_len;
    if (d->prefill < 0) d->prefill = d->base > 0 ? d->base : run->kv_len / 2;
    if (d->prefill >= run->kv_len || d->prefill < d->base)
        return program_usage("--prefill: %lld to %lld is needed, from the first token with a query on",
                             (long long)d->base, (long long)run->kv_len - 1);
    d->tokens = d->limit < 0 || d->limit > run->kv_len - d->prefill ? run->kv_len : d->prefill + d->limit;
    d->attention = (clattn_attention_desc)CLATTN_ATTENTION_DESC_INIT;
    if (!isnan(run->scale)) d->attention.scale = (float)run->scale;
    if ((status = device_open(&run->choice, &d->context)) != STATUS_OK) return status;
    run->device.size = sizeof run->device;
    clattn_context_device(d->context, &run->device);
    run_count_values(run);
    if ((status = take_memory(d)) != STATUS_OK ||
        (status = decode_cache(d, d->is_int8 ? CLATTN_INT8 : run->dtype, &d->cache)) != STATUS_OK ||
        (status = do_prefill(d)) != STATUS_OK || (status = do_steps(d)) != STATUS_OK)
        return status;
    if (d->dense && (status = do_dense(d)) != STATUS_OK) return status;
    count_chosen(d);
    int compared = decode_compare(d);
    status = decode_report(d);
    return compared != STATUS_OK ? compared : status;
}

int decode_main(int argc, char **argv)
{
    int status = STATUS_OK;
    struct decode d = {.run = {.scale = NAN, .leaf = 2, .topk = 8},
                       .prefill = -1,
                       .chunk = 512,
                       .step = 1,
                       .limit = -1,
                       .dense_seconds = NAN};
    if (decode_parse_options(&d, argc, argv, &status)) status = run_all(&d);
    clattn_blocks_release(d.context, d.blocks);
    clattn_cache_release(d.context, d.cache);
    clattn_context_release(d.context);
    free(d.sequences);
    free(d.lens);
    free(d.q);
    free(d.k);
    free(d.v);
    free(d.rows);
    free(d.out);
    free(d.lists);
    free(d.step_seconds);
    run_close(&d.run);
    return status;
}
