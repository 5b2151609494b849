/* SPDX-License-Identifier: MIT */
/* The decode cache as an object: checking its description, laying out its memory, creation, queries. */

#include "cache.h"

#include <stdlib.h>
#include <string.h>

enum { DIM_MAX = 256, PAGE_MIN = 16, PAGE_MAX = 256 };
#define BYTES_MAX (INT64_C(1) << 60)

static clattn_status check_desc(clattn_context *context, const clattn_cache_desc *desc,
                                clattn_cache_desc *checked)
{
    *checked = (clattn_cache_desc)CLATTN_CACHE_DESC_INIT;
    if (!desc) return fail(context, CLATTN_INVALID_ARGUMENT, "desc is NULL; sizes are needed");
    clattn_status status = desc_copy(context, "desc", checked, sizeof *checked, desc);
    if (!status) status = check_leaf(context, "desc.leaf", checked->leaf);
    if (status) return status;
    if (!context->backend->decode) return fail(context, CLATTN_NO_DEVICE, "this backend has no decode cache");
    if (checked->sequences < 1 || checked->tokens < 1 || checked->kv_heads < 1)
        return fail(context, CLATTN_INVALID_SHAPE,
                    "desc has sequences %d, tokens %lld, kv_heads %d; each is at least 1", checked->sequences,
                    (long long)checked->tokens, checked->kv_heads);
    if (checked->dim < 1 || checked->dim > DIM_MAX || checked->dim_v < 1 || checked->dim_v > DIM_MAX)
        return fail(context, CLATTN_INVALID_SHAPE, "desc has dim %d, dim_v %d; 1 to %d is needed", checked->dim,
                    checked->dim_v, DIM_MAX);
    if (!dtype_bytes(checked->dtype))
        return fail(context, CLATTN_INVALID_DTYPE,
                    "desc.dtype is %d; FLOAT32, FLOAT16, BFLOAT16 or INT8 is needed", checked->dtype);
    if (checked->page_size && (checked->page_size < PAGE_MIN || checked->page_size > PAGE_MAX))
        return fail(context, CLATTN_INVALID_ARGUMENT, "desc.page_size is %d; 0 or %d to %d is needed",
                    checked->page_size, PAGE_MIN, PAGE_MAX);
    if (checked->pages < 0 || (checked->pages && !checked->page_size))
        return fail(context, CLATTN_INVALID_ARGUMENT, "desc.pages is %lld with page_size %d",
                    (long long)checked->pages, checked->page_size);
    return CLATTN_SUCCESS;
}

/* ---- layout ---- */

/* Adds a region of count rows with row_bytes; false when it exceeds 60 bits. */
static bool region(size_t *at, size_t *total, int64_t count, int64_t row_bytes)
{
    int64_t bytes, end;
    if (!multiply(count, row_bytes, &bytes) || bytes > BYTES_MAX) return false;
    *at = *total;
    if (__builtin_add_overflow((int64_t)*total, ceil_div(bytes, CACHE_ALIGNMENT) * CACHE_ALIGNMENT, &end) ||
        end > BYTES_MAX)
        return false;
    *total = (size_t)end;
    return true;
}

static bool layout_fill(clattn_cache *cache)
{
    const clattn_cache_desc *desc = &cache->desc;
    struct cache_layout *layout = &cache->layout;
    int64_t rows, heads = (int64_t)desc->sequences * desc->kv_heads, nodes, leaves;
    int64_t element = (int64_t)dtype_bytes(desc->dtype), dim = desc->dim, bounds = desc->bounds ? 1 : 0;
    int64_t scale = desc->dtype == CLATTN_INT8 ? (int64_t)sizeof(float) : 0, number = sizeof(float);
    if (!multiply(cache->pages, cache->page_size, &rows) || !multiply(rows, desc->kv_heads, &rows) ||
        !multiply(heads, cache->nodes, &nodes) || !multiply(heads, cache->leaves, &leaves))
        return false;
    return region(&layout->keys, &layout->bytes, rows, dim * element) &&
           region(&layout->values, &layout->bytes, rows, desc->dim_v * element) &&
           region(&layout->key_scales, &layout->bytes, rows, scale) &&
           region(&layout->value_scales, &layout->bytes, rows, scale) &&
           region(&layout->means, &layout->bytes, nodes, dim * number) &&
           region(&layout->bounds, &layout->bytes, nodes, bounds * 2 * dim * number) &&
           region(&layout->parts, &layout->bytes, leaves, bounds * LEAF_PARTS * 3 * dim * number) &&
           region(&layout->sums, &layout->bytes, heads, 2 * dim * (int64_t)sizeof(double));
}

/* Sizes of a cache, without its memory. */
static clattn_status cache_plan(clattn_context *context, const clattn_cache_desc *desc, clattn_cache *cache)
{
    *cache = (clattn_cache){0};
    clattn_status status = check_desc(context, desc, &cache->desc);
    if (status) return status;
    desc = &cache->desc;
    const int64_t tokens_max = (int64_t)INT32_MAX * 16; /* leaves are counted in 32 bits */
    cache->page_size = desc->page_size ? desc->page_size : desc->tokens;
    cache->table_entries = ceil_div(MIN(desc->tokens, tokens_max), cache->page_size);
    if (desc->tokens > tokens_max ||
        (!desc->pages && !multiply(desc->sequences, cache->table_entries, &cache->pages)))
        return fail(context, CLATTN_SIZE_OVERFLOW, "desc.tokens is %lld, too many", (long long)desc->tokens);
    if (desc->pages) cache->pages = desc->pages;
    cache->nodes = pyramid_nodes(desc->tokens, desc->leaf);
    cache->leaves = level_nodes(desc->tokens, desc->leaf, 1);
    for (int l = 1; l < CACHE_LEVELS_MAX; l++)
        cache->level_first[l] = level_first(desc->tokens, desc->leaf, l);
    if (cache->pages > INT32_MAX || !layout_fill(cache))
        return fail(context, CLATTN_SIZE_OVERFLOW, "the cache has %lld pages of %lld tokens, too many",
                    (long long)cache->pages, (long long)cache->page_size);
    return CLATTN_SUCCESS;
}

clattn_status clattn_cache_bytes(clattn_context *context, const clattn_cache_desc *desc, size_t *bytes)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!bytes) return fail(context, CLATTN_INVALID_ARGUMENT, "bytes is NULL");
    clattn_cache cache;
    clattn_status status = cache_plan(context, desc, &cache);
    if (!status) *bytes = cache.layout.bytes;
    return status;
}

/* ---- creation ---- */

static clattn_status memory_take(clattn_context *context, clattn_cache *cache)
{
    const clattn_cache_desc *desc = &cache->desc;
    if (!desc->storage) {
        cache->owns_memory = true;
        return context->backend->storage_create(context, cache->layout.bytes, &cache->memory);
    }
    if (desc->storage_bytes < cache->layout.bytes)
        return fail(context, CLATTN_INVALID_ARGUMENT, "desc.storage_bytes is %zu; %zu are needed",
                    desc->storage_bytes, cache->layout.bytes);
    if (context->backend->host_memory && (uintptr_t)desc->storage % 64)
        return fail(context, CLATTN_INVALID_ARGUMENT, "desc.storage is %p; a multiple of 64 is needed",
                    desc->storage);
    cache->memory.bytes = desc->storage_bytes;
    *(context->backend->host_memory ? &cache->memory.host : &cache->memory.mem) = desc->storage;
    return CLATTN_SUCCESS;
}

static clattn_status books_open(clattn_context *context, clattn_cache *cache)
{
    size_t sequences = (size_t)cache->desc.sequences, pages = (size_t)cache->pages;
    int64_t entries;
    if (!multiply((int64_t)sequences, cache->table_entries, &entries) || entries > BYTES_MAX)
        return fail(context, CLATTN_SIZE_OVERFLOW, "the block table has %zu rows of %lld entries", sequences,
                    (long long)cache->table_entries);
    cache->length = calloc(sequences, sizeof *cache->length);
    cache->table = calloc((size_t)entries, sizeof *cache->table);
    cache->refs = calloc(pages, sizeof *cache->refs);
    cache->free = malloc(pages * sizeof *cache->free);
    cache->changed = calloc(sequences, sizeof *cache->changed);
    cache->marked = calloc(sequences, sizeof *cache->marked);
    if (!cache->length || !cache->table || !cache->refs || !cache->free || !cache->changed || !cache->marked)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for the books of %zu pages", pages);
    for (size_t s = 0; s < sequences; s++)
        cache->changed[s] = INT64_MAX;
    while (cache->free_count < cache->pages) { /* the lowest is taken first */
        cache->free[cache->free_count] = (int32_t)(cache->pages - 1 - cache->free_count);
        cache->free_count++;
    }
    return CLATTN_SUCCESS;
}

clattn_status clattn_cache_create(clattn_context *context, const clattn_cache_desc *desc, clattn_cache **cache)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!cache)
        return fail(context, CLATTN_INVALID_ARGUMENT, "cache is NULL; a place for the result is needed");
    clattn_cache plan, *made;
    clattn_status status = cache_plan(context, desc, &plan);
    if (status) return status;
    if (!(made = malloc(sizeof *made))) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a cache");
    *made = plan;
    status = books_open(context, made);
    if (!status) status = memory_take(context, made);
    if (status) {
        clattn_cache_release(context, made);
        return status;
    }
    *cache = made;
    return CLATTN_SUCCESS;
}

void clattn_cache_release(clattn_context *context, clattn_cache *cache)
{
    if (!context || !cache) return;
    if (context->backend->cache_release) context->backend->cache_release(context, cache);
    clattn_blocks_release(context, cache->blocks);
    if (cache->owns_memory) context->backend->storage_release(context, &cache->memory);
    free(cache->length);
    free(cache->table);
    free(cache->refs);
    free(cache->free);
    free(cache->changed);
    free(cache->marked);
    free(cache);
}

clattn_tensor cache_tensor(const clattn_cache *cache, enum cache_region which)
{
    const clattn_cache_desc *desc = &cache->desc;
    const struct cache_layout *layout = &cache->layout;
    const size_t at[] = {layout->keys, layout->values, layout->key_scales, layout->value_scales};
    const int32_t dims[] = {desc->dim, desc->dim_v, 1, 1};
    clattn_dtype dtype = which < CACHE_KEY_SCALES ? desc->dtype : CLATTN_FLOAT32;
    clattn_tensor tensor =
        clattn_tensor_bhtd(NULL, dtype, cache->pages, desc->kv_heads, cache->page_size, dims[which]);
    bool on_host = cache->memory.host != NULL;
    tensor.data = on_host ? cache->memory.host : cache->memory.mem;
    tensor.memory = on_host ? CLATTN_MEMORY_HOST : CLATTN_MEMORY_CL_MEM;
    tensor.offset = (int64_t)(at[which] / dtype_bytes(dtype));
    return tensor;
}

/* ---- queries ---- */

int64_t clattn_cache_length(const clattn_cache *cache, int32_t sequence)
{
    return cache && sequence >= 0 && sequence < cache->desc.sequences ? cache->length[sequence] : -1;
}

clattn_status clattn_cache_describe(const clattn_cache *cache, clattn_cache_info *info)
{
    if (!cache || !info || info->size < sizeof info->size) return CLATTN_INVALID_ARGUMENT;
    size_t size = info->size;
    const struct cache_layout *layout = &cache->layout;
    clattn_cache_info full = {.size = size,
                              .bytes = layout->bytes,
                              .key_value_bytes = layout->means,
                              .statistics_bytes = layout->bytes - layout->means,
                              .page_size = cache->page_size,
                              .pages = cache->pages,
                              .pages_free = cache->free_count,
                              .tokens_appended = cache->tokens_appended,
                              .nodes_updated = cache->nodes_updated,
                              .rows_summed = cache->rows_summed,
                              .select_seconds = cache->select_seconds,
                              .attend_seconds = cache->attend_seconds};
    memcpy(info, &full, MIN(size, sizeof full));
    return CLATTN_SUCCESS;
}

clattn_status clattn_cache_read(clattn_context *context, const clattn_cache *cache, int32_t sequence,
                                int64_t kv_head, int level, float *means, int64_t *nodes)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!cache) return fail(context, CLATTN_INVALID_ARGUMENT, "cache is NULL");
    const clattn_cache_desc *desc = &cache->desc;
    if (sequence < 0 || sequence >= desc->sequences)
        return fail(context, CLATTN_INVALID_ARGUMENT, "sequence is %d; the cache has %d", sequence,
                    desc->sequences);
    if (kv_head < 0 || kv_head >= desc->kv_heads)
        return fail(context, CLATTN_INVALID_ARGUMENT, "kv_head is %lld; the cache has %d", (long long)kv_head,
                    desc->kv_heads);
    int levels = level_count(cache->length[sequence], desc->leaf);
    if (level < 1 || level > levels)
        return fail(context, CLATTN_INVALID_ARGUMENT, "level is %d; this sequence has levels 1 to %d", level,
                    levels);
    int64_t count = level_nodes(cache->length[sequence], desc->leaf, level);
    if (nodes) *nodes = count;
    if (!means) return CLATTN_SUCCESS;
    int64_t node = cache_head(cache, sequence, (int32_t)kv_head) * cache->nodes + cache->level_first[level];
    size_t row = (size_t)desc->dim * sizeof(float);
    return context->backend->storage_read(context, &cache->memory, cache->layout.means + (size_t)node * row,
                                          means, (size_t)count * row);
}
