/* SPDX-License-Identifier: MIT */
/* Pages of the decode cache: taking and giving back, copy on write, truncating, sharing. */

#include "cache.h"

#include <stdlib.h>

/* ---- pages ---- */

static int32_t page_take(clattn_cache *cache)
{
    int32_t page = cache->free[--cache->free_count];
    cache->refs[page] = 1;
    return page;
}

static void page_drop(clattn_cache *cache, int32_t page)
{
    if (--cache->refs[page] == 0) cache->free[cache->free_count++] = page;
}

static void table_set(clattn_cache *cache, int32_t sequence, int64_t entry, int32_t page)
{
    cache->table[sequence * cache->table_entries + entry] = page;
    cache->changed[sequence] = MIN(cache->changed[sequence], entry);
}

static int64_t pages_of(const clattn_cache *cache, int64_t tokens)
{
    return ceil_div(tokens, cache->page_size);
}

/* ---- for a batch ---- */

/* Takes the pages of one span; false when there are too few, then none is taken. */
static bool span_take(clattn_cache *cache, struct cache_span *span)
{
    int64_t have = pages_of(cache, span->first), want = pages_of(cache, span->first + span->len);
    int32_t last = have ? cache_table(cache, span->sequence)[have - 1] : 0;
    bool writes_last = span->len > 0 && span->first % cache->page_size;
    bool copies = writes_last && cache->refs[last] > 1;
    span->copied_from = -1;
    if (want - have + copies > cache->free_count) return false;
    if (copies) {
        span->copied_from = last;
        table_set(cache, span->sequence, have - 1, page_take(cache));
        cache->refs[last]--;
    }
    for (int64_t entry = have; entry < want; entry++)
        table_set(cache, span->sequence, entry, page_take(cache));
    return true;
}

static void span_return(clattn_cache *cache, const struct cache_span *span)
{
    const int32_t *table = cache_table(cache, span->sequence);
    int64_t have = pages_of(cache, span->first), want = pages_of(cache, span->first + span->len);
    for (int64_t entry = want; entry-- > have;)
        page_drop(cache, table[entry]);
    if (span->copied_from < 0) return;
    page_drop(cache, table[have - 1]);
    cache->refs[span->copied_from]++;
    table_set(cache, span->sequence, have - 1, span->copied_from);
}

void cache_return_pages(clattn_cache *cache, const struct cache_span *spans, int64_t count)
{
    while (count-- > 0) /* in reverse: the list of free pages is as it was */
        span_return(cache, &spans[count]);
}

/* The tokens of the shared page that the sequence has, for every region and head. */
static int32_t span_copies(const clattn_cache *cache, const struct cache_span *span, struct cache_copy *copies)
{
    const clattn_cache_desc *desc = &cache->desc;
    const struct cache_layout *layout = &cache->layout;
    size_t element = dtype_bytes(desc->dtype), scale = desc->dtype == CLATTN_INT8 ? sizeof(float) : 0;
    struct {
        size_t at, row_bytes;
    } regions[] = {{layout->keys, (size_t)desc->dim * element},
                   {layout->values, (size_t)desc->dim_v * element},
                   {layout->key_scales, scale},
                   {layout->value_scales, scale}};
    size_t tokens = (size_t)(span->first % cache->page_size);
    int32_t page = cache_table(cache, span->sequence)[span->first / cache->page_size], count = 0;
    for (int n = 0; n < 4; n++)
        for (int32_t h = 0; h < desc->kv_heads && regions[n].row_bytes; h++) {
            size_t from = (size_t)cache_row(cache, span->copied_from, h, 0);
            size_t to = (size_t)cache_row(cache, page, h, 0), bytes = regions[n].row_bytes;
            copies[count++] =
                (struct cache_copy){regions[n].at + from * bytes, regions[n].at + to * bytes, tokens * bytes};
        }
    return count;
}

static clattn_status copy_shared(clattn_context *context, clattn_cache *cache, const struct cache_span *spans,
                                 int64_t count, const clattn_sync *sync)
{
    clattn_status status = CLATTN_SUCCESS;
    struct cache_copy *copies = NULL;
    for (int64_t s = 0; s < count && !status; s++) {
        if (spans[s].copied_from < 0) continue;
        if (!copies) copies = malloc(4 * (size_t)cache->desc.kv_heads * sizeof *copies);
        if (!copies) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory to copy a page");
        int32_t ranges = span_copies(cache, &spans[s], copies);
        status = context->backend->cache_copy(context, cache, copies, ranges, sync);
    }
    free(copies);
    return status;
}

clattn_status cache_take_pages(clattn_context *context, clattn_cache *cache, struct cache_span *spans,
                               int64_t count, const clattn_sync *sync)
{
    clattn_status status = CLATTN_SUCCESS;
    int64_t taken = 0;
    while (taken < count && span_take(cache, &spans[taken]))
        taken++;
    if (taken < count) {
        const struct cache_span *span = &spans[taken];
        status = fail(context, CLATTN_OUT_OF_PAGES,
                      "sequence %d has %lld tokens and gets %lld more; %lld pages of %lld tokens are free",
                      span->sequence, (long long)span->first, (long long)span->len,
                      (long long)cache->free_count, (long long)cache->page_size);
    }
    if (!status) status = copy_shared(context, cache, spans, count, sync);
    if (status) cache_return_pages(cache, spans, taken);
    return status;
}

/* ---- truncating and sharing ---- */

static clattn_status check_sequence(clattn_context *context, const clattn_cache *cache, const char *name,
                                    int32_t sequence)
{
    if (!cache) return fail(context, CLATTN_INVALID_ARGUMENT, "cache is NULL");
    if (sequence >= 0 && sequence < cache->desc.sequences) return CLATTN_SUCCESS;
    return fail(context, CLATTN_INVALID_ARGUMENT, "%s is %d; the cache has %d sequences", name, sequence,
                cache->desc.sequences);
}

static clattn_status check_length(clattn_context *context, const clattn_cache *cache, int32_t sequence,
                                  int64_t length)
{
    if (length >= 0 && length <= cache->length[sequence]) return CLATTN_SUCCESS;
    return fail(context, CLATTN_INVALID_ARGUMENT, "length is %lld; sequence %d has %lld tokens",
                (long long)length, sequence, (long long)cache->length[sequence]);
}

/* Nothing to enqueue: the event still has to come after the wait list. */
static clattn_status copy_nothing(clattn_context *context, clattn_cache *cache, const clattn_sync *sync)
{
    return sync ? context->backend->cache_copy(context, cache, NULL, 0, sync) : CLATTN_SUCCESS;
}

clattn_status clattn_cache_truncate(clattn_context *context, clattn_cache *cache, int32_t sequence,
                                    int64_t length, const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    clattn_sync sync_copy;
    clattn_status status = check_sequence(context, cache, "sequence", sequence);
    if (!status) status = check_length(context, cache, sequence, length);
    if (!status) status = check_sync(context, sync, &sync_copy);
    if (status) return status;
    int64_t before = cache->length[sequence];
    const int32_t *table = cache_table(cache, sequence);
    for (int64_t entry = pages_of(cache, before); entry-- > pages_of(cache, length);)
        page_drop(cache, table[entry]);
    cache->length[sequence] = length;
    sync = sync ? &sync_copy : NULL;
    return length == 0 || length == before ? copy_nothing(context, cache, sync)
                                           : context->backend->cache_cut(context, cache, sequence, sync);
}

/* Rows of a region of statistics that `to` takes over from `from`: of every head, `rows` from row `first` on.
 */
static void head_copies(const clattn_cache *cache, int32_t from, int32_t to, size_t at, int64_t head_rows,
                        int64_t first, int64_t rows, size_t row_bytes, struct cache_copy *copies,
                        int32_t *count)
{
    for (int32_t h = 0; h < cache->desc.kv_heads && row_bytes && rows > 0; h++) {
        size_t source = (size_t)(cache_head(cache, from, h) * head_rows + first);
        size_t target = (size_t)(cache_head(cache, to, h) * head_rows + first);
        copies[(*count)++] =
            (struct cache_copy){at + source * row_bytes, at + target * row_bytes, (size_t)rows * row_bytes};
    }
}

static clattn_status copy_statistics(clattn_context *context, clattn_cache *cache, int32_t from, int32_t to,
                                     int64_t length, const clattn_sync *sync)
{
    const clattn_cache_desc *desc = &cache->desc;
    const struct cache_layout *layout = &cache->layout;
    int levels = level_count(length, desc->leaf);
    size_t row = (size_t)desc->dim * sizeof(float), bounds = desc->bounds ? 2 * row : 0;
    int32_t count = 0;
    struct cache_copy *copies = malloc((size_t)(2 * levels + 2) * (size_t)desc->kv_heads * sizeof *copies);
    if (!copies) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory to share a sequence");
    for (int l = 1; l <= levels; l++) {
        int64_t first = cache->level_first[l], nodes = level_nodes(length, desc->leaf, l);
        head_copies(cache, from, to, layout->means, cache->nodes, first, nodes, row, copies, &count);
        head_copies(cache, from, to, layout->bounds, cache->nodes, first, nodes, bounds, copies, &count);
    }
    head_copies(cache, from, to, layout->parts, cache->leaves, 0, level_nodes(length, desc->leaf, 1),
                bounds ? LEAF_PARTS * 3 * row : 0, copies, &count);
    head_copies(cache, from, to, layout->sums, 1, 0, 1, 2 * (size_t)desc->dim * sizeof(double), copies, &count);
    clattn_status status = context->backend->cache_copy(context, cache, copies, count, sync);
    free(copies);
    return status;
}

clattn_status clattn_cache_share(clattn_context *context, clattn_cache *cache, int32_t from, int32_t to,
                                 int64_t length, const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    clattn_sync sync_copy, steps;
    clattn_status status = check_sequence(context, cache, "from", from);
    if (!status) status = check_sequence(context, cache, "to", to);
    if (!status) status = check_length(context, cache, from, length);
    if (!status && cache->length[to])
        status = fail(context, CLATTN_INVALID_ARGUMENT, "to is %d, which has %lld tokens; it must be empty", to,
                      (long long)cache->length[to]);
    if (!status) status = check_sync(context, sync, &sync_copy);
    if (status) return status;
    sync = sync ? &sync_copy : NULL;
    if (length == 0) return copy_nothing(context, cache, sync);
    bool cuts = length < cache->length[from];
    status =
        copy_statistics(context, cache, from, to, length, cuts ? sync_without_event(sync, &steps) : sync);
    if (status) return status;
    for (int64_t entry = 0; entry < pages_of(cache, length); entry++) {
        int32_t page = cache_table(cache, from)[entry];
        table_set(cache, to, entry, page);
        cache->refs[page]++;
    }
    cache->length[to] = length;
    if (cuts) status = context->backend->cache_cut(context, cache, to, sync);
    if (status) clattn_cache_truncate(context, cache, to, 0, NULL);
    return status;
}
