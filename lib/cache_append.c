/* SPDX-License-Identifier: MIT */
/* Appending to the decode cache: everything is checked, then pages are taken, then the backend writes. */

#include "cache.h"
#include "stage.h"

#include <stdlib.h>

clattn_status cache_spans(clattn_context *context, const clattn_cache *cache, int64_t count,
                          const int32_t *sequences, const int32_t *lens, struct cache_span *spans,
                          int64_t *rows)
{
    clattn_status status = CLATTN_SUCCESS;
    int64_t done = 0;
    *rows = 0;
    for (; done < count && !status; done++) {
        int32_t sequence = sequences[done], len = lens[done];
        if (sequence < 0 || sequence >= cache->desc.sequences)
            status = fail(context, CLATTN_INVALID_ARGUMENT, "sequences[%lld] is %d; the cache has %d",
                          (long long)done, sequence, cache->desc.sequences);
        else if (cache->marked[sequence])
            status = fail(context, CLATTN_INVALID_ARGUMENT, "sequences[%lld] is %d, which is there already",
                          (long long)done, sequence);
        else if (len < 0)
            status = fail(context, CLATTN_INVALID_ARGUMENT, "lens[%lld] is %d; 0 or more is needed",
                          (long long)done, len);
        if (status) break;
        cache->marked[sequence] = 1;
        spans[done] = (struct cache_span){sequence, -1, cache->length[sequence], len, *rows};
        *rows += len;
    }
    while (done-- > 0)
        cache->marked[sequences[done]] = 0;
    return status;
}

static clattn_status check_room(clattn_context *context, const clattn_cache *cache,
                                const struct cache_span *spans, int64_t count)
{
    for (int64_t s = 0; s < count; s++)
        if (spans[s].len > cache->desc.tokens - spans[s].first)
            return fail(context, CLATTN_OUT_OF_PAGES,
                        "sequence %d has %lld tokens and gets %lld more; it has room for %lld",
                        spans[s].sequence, (long long)spans[s].first, (long long)spans[s].len,
                        (long long)cache->desc.tokens);
    return CLATTN_SUCCESS;
}

void cache_append_undo(clattn_context *context, clattn_cache *cache, const struct cache_span *spans,
                       int64_t count, const clattn_sync *sync)
{
    cache_return_pages(cache, spans, count);
    for (int64_t s = 0; s < count; s++) {
        cache->length[spans[s].sequence] = spans[s].first;
        if (spans[s].len && spans[s].first)
            context->backend->cache_cut(context, cache, spans[s].sequence, sync);
    }
}

clattn_status cache_append_run(clattn_context *context, clattn_cache *cache, struct cache_span *spans,
                               int64_t count, const clattn_tensor *k, const clattn_tensor *v,
                               const clattn_sync *sync)
{
    clattn_sync steps;
    const clattn_sync *before = sync_without_event(sync, &steps);
    clattn_status status = check_room(context, cache, spans, count);
    if (!status) status = cache_take_pages(context, cache, spans, count, before);
    if (status) return status;
    struct cache_append_job job = {cache, spans, count, k, v, sync};
    status = context->backend->cache_append(context, &job);
    if (status) {
        cache_append_undo(context, cache, spans, count, before);
        return status;
    }
    for (int64_t s = 0; s < count; s++) {
        cache->length[spans[s].sequence] += spans[s].len;
        cache->tokens_appended += (uint64_t)spans[s].len;
    }
    return CLATTN_SUCCESS;
}

static clattn_status check_rows(clattn_context *context, const clattn_cache *cache, const char *name,
                                const clattn_tensor *tensor, int64_t rows, int64_t dim)
{
    clattn_status status = check_tensor(context, name, tensor, false);
    if (status) return status;
    if (tensor->batch != 1 || tensor->len != rows || tensor->heads != cache->desc.kv_heads ||
        tensor->dim != dim)
        return fail(context, CLATTN_INVALID_SHAPE,
                    "%s is [%lld][%lld][%lld][%lld]; [1][%lld][%d][%lld] is needed", name,
                    (long long)tensor->batch, (long long)tensor->len, (long long)tensor->heads,
                    (long long)tensor->dim, (long long)rows, cache->desc.kv_heads, (long long)dim);
    bool fits =
        cache->desc.dtype == CLATTN_INT8 ? tensor->dtype != CLATTN_INT8 : tensor->dtype == cache->desc.dtype;
    if (!fits)
        return fail(context, CLATTN_INVALID_DTYPE, "%s.dtype is %s; the cache takes %s", name,
                    dtype_name(tensor->dtype),
                    cache->desc.dtype == CLATTN_INT8 ? "floating types" : dtype_name(cache->desc.dtype));
    return CLATTN_SUCCESS;
}

clattn_status cache_check_rows(clattn_context *context, const clattn_cache *cache, const clattn_tensor *k,
                               const clattn_tensor *v, int64_t rows)
{
    clattn_status status = check_rows(context, cache, "k", k, rows, cache->desc.dim);
    if (!status) status = check_rows(context, cache, "v", v, rows, cache->desc.dim_v);
    if (!status && k->dtype != v->dtype)
        status = fail(context, CLATTN_INVALID_DTYPE, "v.dtype is %s; k.dtype is %s and they must be equal",
                      dtype_name(v->dtype), dtype_name(k->dtype));
    return status;
}

clattn_status cache_check_batch(clattn_context *context, const clattn_cache *cache, int64_t count,
                                const int32_t *sequences, const int32_t *lens)
{
    const char *missing = !cache ? "cache" : !sequences ? "sequences" : !lens ? "lens" : NULL;
    if (missing) return fail(context, CLATTN_INVALID_ARGUMENT, "%s is NULL", missing);
    if (count < 1 || count > cache->desc.sequences)
        return fail(context, CLATTN_INVALID_ARGUMENT, "count is %lld; 1 to %d is needed", (long long)count,
                    cache->desc.sequences);
    return CLATTN_SUCCESS;
}

clattn_status clattn_cache_append(clattn_context *context, clattn_cache *cache, int64_t count,
                                  const int32_t *sequences, const int32_t *lens, const clattn_tensor *k,
                                  const clattn_tensor *v, const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    clattn_sync sync_copy;
    int64_t rows;
    struct staged keys = {0}, values = {0};
    clattn_status status = cache_check_batch(context, cache, count, sequences, lens);
    if (!status) status = check_sync(context, sync, &sync_copy);
    if (status) return status;
    struct cache_span *spans = malloc((size_t)count * sizeof *spans);
    if (!spans) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %lld sequences", (long long)count);
    status = cache_spans(context, cache, count, sequences, lens, spans, &rows);
    if (!status) status = cache_check_rows(context, cache, k, v, rows);
    if (!status) status = stage_in(context, k, &keys);
    if (!status) status = stage_in(context, v, &values);
    if (!status)
        status = cache_append_run(context, cache, spans, count, &keys.device, &values.device,
                                  sync ? &sync_copy : NULL);
    stage_release(context, &keys);
    stage_release(context, &values);
    free(spans);
    return status;
}
