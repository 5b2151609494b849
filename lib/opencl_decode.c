/* SPDX-License-Identifier: MIT */
/* The memory of a decode cache on OpenCL: appending, cutting, copying; see cl/decode_append.cl. */

#include "config.h"

#include "opencl_decode.h"

#include <stdlib.h>

enum { ITEMS_MIN = 64, ITEMS_MAX = 256, COPY_GROUPS_MAX = 256 };

static const char BOUNDS_FILES[] = "common.cl+decode_append.cl+decode_bounds.cl";

/* As in cl/decode_append.cl. */
enum span_field { SPAN_FIRST, SPAN_LEN, SPAN_ROW, SPAN_SEQUENCE, SPAN_PAGES, SPAN_UNIT, SPAN_FIELDS };

/* clattn_cache.device */
struct device_table {
    struct storage table;
};

/* ---- the block table ---- */

/* Is the caller's memory what the cache needs? Then memory for the table. */
static struct device_table *table_new(struct opencl_launch *launch, clattn_cache *cache)
{
    clattn_tensor all =
        clattn_tensor_bthd(cache->memory.mem, CLATTN_INT8, 1, (int64_t)cache->layout.bytes, 1, 1);
    size_t entries = (size_t)cache->desc.sequences * (size_t)cache->table_entries;
    all.memory = CLATTN_MEMORY_CL_MEM;
    launch->status = opencl_check_tensor(launch->context, &all);
    if (launch->status) return NULL;
    struct device_table *made = calloc(1, sizeof *made);
    if (!made)
        launch->status = fail(launch->context, CLATTN_OUT_OF_MEMORY, "no memory for a block table");
    else
        launch->status = opencl_storage_create(launch->context, entries * sizeof(cl_int), &made->table);
    if (!launch->status) return made;
    free(made);
    return NULL;
}

/* Entries that are in use when a sequence has so many tokens. */
static int64_t entries_end(const clattn_cache *cache, const struct cache_span *span, bool grows)
{
    int64_t tokens = grows ? span->first + span->len : cache->length[span->sequence];
    return ceil_div(tokens, cache->page_size);
}

/* [.][2]: place in the table, page. Returns how many; with `to` NULL it only counts. */
static int64_t changes_fill(const clattn_cache *cache, const struct cache_span *spans, int64_t count,
                            bool grows, cl_long *to)
{
    int64_t changes = 0;
    for (int64_t s = 0; s < count; s++) {
        int32_t sequence = spans[s].sequence;
        int64_t first = sequence * cache->table_entries, end = entries_end(cache, &spans[s], grows);
        for (int64_t entry = cache->changed[sequence]; entry < end; entry++, changes++)
            if (to) {
                to[2 * changes] = first + entry;
                to[2 * changes + 1] = cache->table[first + entry];
            }
    }
    return changes;
}

cl_mem opencl_cache_table(struct opencl_launch *launch, clattn_cache *cache, const struct cache_span *spans,
                          int64_t count, bool grows)
{
    struct opencl_options options = {""};
    if (launch->status) return NULL;
    if (!cache->device) cache->device = table_new(launch, cache);
    if (launch->status) return NULL;
    struct device_table *state = cache->device;
    int64_t changes = changes_fill(cache, spans, count, grows, NULL);
    if (changes == 0) return state->table.mem;
    size_t bytes = 2 * (size_t)changes * sizeof(cl_long);
    cl_long *entries = malloc(bytes);
    if (!entries) {
        launch->status = fail(launch->context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes", bytes);
        return NULL;
    }
    changes_fill(cache, spans, count, grows, entries);
    opencl_option(&options, "ITEMS", ITEMS_MIN);
    opencl_launch_kernel(launch, "decode_pages.cl", "decode_table", options.text);
    opencl_arg_storage(launch, &state->table);
    opencl_arg_mem(launch, opencl_launch_table(launch, entries, bytes));
    opencl_arg_int(launch, (int32_t)changes);
    size_t local = ITEMS_MIN, global = (size_t)ceil_div(changes, ITEMS_MIN) * ITEMS_MIN;
    opencl_launch_run(launch, 1, &global, &local);
    free(entries);
    for (int64_t s = 0; s < count && !launch->status; s++)
        cache->changed[spans[s].sequence] = INT64_MAX;
    return launch->status ? NULL : state->table.mem;
}

void opencl_cache_release(clattn_context *context, clattn_cache *cache)
{
    struct device_table *state = cache->device;
    if (!state) return;
    opencl_storage_release(context, &state->table);
    free(state);
    cache->device = NULL;
}

void opencl_arg_pages(struct opencl_launch *launch, const struct opencl_pages *pages)
{
    const clattn_cache *cache = pages->cache;
    opencl_arg_mem(launch, pages->table);
    opencl_arg_long(launch, cache->desc.kv_heads * cache->page_size);
    opencl_arg_int(launch, (int32_t)MIN(cache->page_size, INT32_MAX));
}

void opencl_table_pages(const struct opencl_pages *pages, int64_t count, cl_long *table)
{
    for (int64_t s = 0; pages && s < count; s++)
        table[s * OPENCL_SEQUENCE_FIELDS + OPENCL_SEQUENCE_PAGES] =
            pages->spans[s].sequence * pages->cache->table_entries;
}

/* ---- arguments of cl/decode_append.cl ---- */

static int items_of(const clattn_context *context, const clattn_cache *cache)
{
    const struct opencl_device *device = &opencl_of(context)->device;
    int most = (int)MIN(device->group_max, ITEMS_MAX), items = MIN(ITEMS_MIN, most);
    while (device->type == CL_DEVICE_TYPE_GPU && items < MAX(cache->desc.dim, cache->desc.dim_v) &&
           2 * items <= most)
        items *= 2;
    return items;
}

static struct opencl_options options_of(const clattn_context *context, const clattn_cache *cache,
                                        clattn_dtype dtype)
{
    const clattn_cache_desc *desc = &cache->desc;
    struct opencl_options options = {""};
    opencl_option(&options, "CACHE", 1);
    opencl_option(&options, "DTYPE", (int)dtype);
    opencl_option(&options, "DIM", desc->dim);
    opencl_option(&options, "DIM_V", desc->dim_v);
    opencl_option(&options, "LEAF", desc->leaf);
    opencl_option(&options, "ITEMS", items_of(context, cache));
    if (desc->dtype == CLATTN_INT8) opencl_option(&options, "INT8", 1);
    return options;
}

static void arg_rows(struct opencl_launch *launch, const clattn_tensor *tensor)
{
    opencl_arg_tensor(launch, tensor);
    opencl_arg_long(launch, tensor->offset);
    opencl_arg_long(launch, tensor->len_stride);
    opencl_arg_long(launch, tensor->head_stride);
}

static void arg_statistics(struct opencl_launch *launch, const clattn_cache *cache)
{
    opencl_arg_storage(launch, &cache->memory);
    opencl_arg_long(launch, (int64_t)(cache->layout.means / sizeof(float)));
    opencl_arg_long(launch, (int64_t)(cache->layout.sums / sizeof(float)));
    opencl_arg_long(launch, cache->nodes);
    opencl_arg_int(launch, (int32_t)cache->leaves);
}

/* First element of keys or values. */
static void arg_stored(struct opencl_launch *launch, const clattn_cache *cache, size_t at)
{
    opencl_arg_storage(launch, &cache->memory);
    opencl_arg_long(launch, (int64_t)(at / dtype_bytes(cache->desc.dtype)));
}

static void run_heads(struct opencl_launch *launch, const clattn_cache *cache, int64_t groups)
{
    size_t items = (size_t)items_of(launch->context, cache);
    opencl_launch_run(launch, 2, (size_t[]){(size_t)groups * items, (size_t)cache->desc.kv_heads},
                      (size_t[]){items, 1});
}

/* ---- append ---- */

/* Leaves that a span touches. */
static int64_t span_leaves(const clattn_cache *cache, const struct cache_span *span)
{
    if (!span->len) return 0;
    return (span->first + span->len - 1) / cache->desc.leaf - span->first / cache->desc.leaf + 1;
}

/* [count][SPAN_FIELDS]; returns the leaves of all. */
static int64_t spans_fill(const struct cache_append_job *job, cl_long *table, bool *has_more)
{
    int64_t units = 0;
    *has_more = false;
    for (int64_t s = 0; s < job->count; s++, table += SPAN_FIELDS) {
        const struct cache_span *span = &job->spans[s];
        int64_t leaves = span_leaves(job->cache, span);
        table[SPAN_FIRST] = span->first;
        table[SPAN_LEN] = span->len;
        table[SPAN_ROW] = span->row;
        table[SPAN_SEQUENCE] = span->sequence;
        table[SPAN_PAGES] = span->sequence * job->cache->table_entries;
        table[SPAN_UNIT] = units;
        units += leaves;
        *has_more |= leaves > 1;
    }
    return units;
}

/* What the kernels will do, for clattn_cache_describe. first, last: leaves of a key head that change. */
static void count_nodes(clattn_cache *cache, int64_t first, int64_t last, int64_t rows, bool is_leaf_new)
{
    int64_t nodes = is_leaf_new ? last - first + 1 : 0;
    for (int64_t children = last + 1; children > 1; children = ceil_div(children, 2)) {
        first /= 2;
        last /= 2;
        nodes += last - first + 1;
    }
    cache->nodes_updated += (uint64_t)(nodes * cache->desc.kv_heads);
    cache->rows_summed += (uint64_t)(rows * cache->desc.kv_heads);
}

static void count_append(const struct cache_append_job *job)
{
    int32_t leaf = job->cache->desc.leaf;
    for (int64_t s = 0; s < job->count; s++) {
        const struct cache_span *span = &job->spans[s];
        int64_t end = span->first + span->len, first = span->first / leaf, last = (end - 1) / leaf;
        if (!span->len) continue;
        /* Of a last leaf among several the keys are added once more, for the sum that runs on. */
        count_nodes(job->cache, first, last, span->len + (first < last ? end - last * leaf : 0), true);
    }
}

/* SPAN_ARGUMENTS; `table` is NULL for one span. */
static void arg_spans(struct opencl_launch *launch, const struct cache_append_job *job, cl_mem table)
{
    const struct cache_span *one = job->spans;
    opencl_arg_mem(launch, table);
    opencl_arg_int(launch, (int32_t)job->count);
    opencl_arg_int(launch, (int32_t)one->first);
    opencl_arg_int(launch, (int32_t)one->len);
    opencl_arg_int(launch, (int32_t)one->row);
    opencl_arg_long(launch, one->sequence);
    opencl_arg_long(launch, one->sequence * job->cache->table_entries);
}

static void arg_bounds(struct opencl_launch *launch, const clattn_cache *cache)
{
    arg_statistics(launch, cache);
    opencl_arg_long(launch, (int64_t)(cache->layout.bounds / sizeof(float)));
    opencl_arg_long(launch, (int64_t)(cache->layout.parts / sizeof(float)));
}

/* Minima, maxima and quarters; see cl/decode_bounds.cl. */
static void run_bounds(struct opencl_launch *launch, const struct cache_append_job *job, cl_mem spans,
                       int64_t units, const char *options)
{
    const clattn_cache *cache = job->cache;
    opencl_launch_kernel(launch, BOUNDS_FILES, "bounds_append", options);
    arg_rows(launch, job->k);
    arg_bounds(launch, cache);
    opencl_arg_int(launch, cache->desc.kv_heads);
    arg_spans(launch, job, spans);
    run_heads(launch, cache, units);
    opencl_launch_kernel(launch, BOUNDS_FILES, "bounds_ancestors", options);
    arg_bounds(launch, cache);
    opencl_arg_int(launch, cache->desc.kv_heads);
    arg_spans(launch, job, spans);
    run_heads(launch, cache, job->count);
}

static void run_append(struct opencl_launch *launch, const struct cache_append_job *job, cl_mem page_table,
                       cl_mem spans, int64_t units, bool has_more)
{
    const clattn_cache *cache = job->cache;
    const struct cache_layout *layout = &cache->layout;
    const struct opencl_pages pages = {cache, page_table, job->spans};
    struct opencl_options options = options_of(launch->context, cache, job->k->dtype);
    opencl_launch_kernel(launch, "decode_append.cl", "decode_append", options.text);
    arg_rows(launch, job->k);
    arg_rows(launch, job->v);
    arg_statistics(launch, cache);
    arg_stored(launch, cache, layout->keys);
    arg_stored(launch, cache, layout->values);
    opencl_arg_long(launch, (int64_t)(layout->key_scales / sizeof(float)));
    opencl_arg_long(launch, (int64_t)(layout->value_scales / sizeof(float)));
    opencl_arg_int(launch, cache->desc.kv_heads);
    arg_spans(launch, job, spans);
    opencl_arg_pages(launch, &pages);
    run_heads(launch, cache, units);
    if (has_more) {
        opencl_launch_kernel(launch, "decode_append.cl", "decode_ancestors", options.text);
        arg_rows(launch, job->k);
        arg_statistics(launch, cache);
        opencl_arg_int(launch, cache->desc.kv_heads);
        arg_spans(launch, job, spans);
        run_heads(launch, cache, job->count);
    }
    if (cache->desc.bounds) run_bounds(launch, job, spans, units, options.text);
}

clattn_status opencl_cache_append(clattn_context *context, const struct cache_append_job *job)
{
    struct opencl_launch launch;
    bool has_more;
    size_t bytes = (size_t)job->count * SPAN_FIELDS * sizeof(cl_long);
    for (int64_t s = 0; s < job->count; s++)
        if (job->spans[s].first + job->spans[s].len > INT32_MAX / 2)
            return fail(context, CLATTN_DEVICE_LIMIT,
                        "sequence %d gets more tokens than %d, which OpenCL kernels take",
                        job->spans[s].sequence, INT32_MAX / 2);
    cl_long *spans = malloc(bytes);
    if (!spans) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes", bytes);
    int64_t units = spans_fill(job, spans, &has_more);
    opencl_launch_begin(context, job->sync, &launch);
    if (units > 0) {
        cl_mem page_table = opencl_cache_table(&launch, job->cache, job->spans, job->count, true);
        cl_mem table = job->count > 1 ? opencl_launch_table(&launch, spans, bytes) : NULL;
        run_append(&launch, job, page_table, table, units, has_more);
    }
    free(spans);
    if (!launch.status) count_append(job);
    return opencl_launch_end(&launch);
}

/* ---- a prefix was taken ---- */

static void run_bounds_cut(struct opencl_launch *launch, const clattn_cache *cache, int32_t sequence,
                           const struct opencl_pages *pages, const char *options)
{
    opencl_launch_kernel(launch, BOUNDS_FILES, "bounds_cut", options);
    arg_bounds(launch, cache);
    arg_stored(launch, cache, cache->layout.keys);
    opencl_arg_long(launch, (int64_t)(cache->layout.key_scales / sizeof(float)));
    opencl_arg_int(launch, cache->desc.kv_heads);
    opencl_arg_long(launch, sequence);
    opencl_arg_long(launch, sequence * cache->table_entries);
    opencl_arg_int(launch, (int32_t)cache->length[sequence]);
    opencl_arg_pages(launch, pages);
    run_heads(launch, cache, 1);
}

clattn_status opencl_cache_cut(clattn_context *context, clattn_cache *cache, int32_t sequence,
                               const clattn_sync *sync)
{
    struct opencl_launch launch;
    int32_t leaf = cache->desc.leaf;
    int64_t length = cache->length[sequence], last = (length - 1) / leaf;
    const struct cache_span span = {.sequence = sequence, .first = length};
    clattn_dtype dtype = cache->desc.dtype == CLATTN_INT8 ? CLATTN_FLOAT32 : cache->desc.dtype;
    struct opencl_options options = options_of(context, cache, dtype);
    opencl_launch_begin(context, sync, &launch);
    const struct opencl_pages pages = {cache, opencl_cache_table(&launch, cache, &span, 1, false), &span};
    opencl_launch_kernel(&launch, "decode_append.cl", "decode_cut", options.text);
    arg_statistics(&launch, cache);
    arg_stored(&launch, cache, cache->layout.keys);
    opencl_arg_long(&launch, (int64_t)(cache->layout.key_scales / sizeof(float)));
    opencl_arg_int(&launch, cache->desc.kv_heads);
    opencl_arg_long(&launch, sequence);
    opencl_arg_long(&launch, sequence * cache->table_entries);
    opencl_arg_int(&launch, (int32_t)length);
    opencl_arg_pages(&launch, &pages);
    run_heads(&launch, cache, 1);
    if (cache->desc.bounds) run_bounds_cut(&launch, cache, sequence, &pages, options.text);
    if (!launch.status) count_nodes(cache, last, last, length % leaf, length % leaf != 0);
    return opencl_launch_end(&launch);
}

/* ---- copies ---- */

/* The most bytes that all copies are multiples of, of those that the kernel moves at once. */
static size_t copy_unit(const struct cache_copy *copies, int64_t count)
{
    size_t bits = 0;
    for (int64_t n = 0; n < count; n++)
        bits |= copies[n].from | copies[n].to | copies[n].bytes;
    return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
}

clattn_status opencl_cache_copy(clattn_context *context, clattn_cache *cache, const struct cache_copy *copies,
                                int64_t count, const clattn_sync *sync)
{
    struct opencl_launch launch;
    struct opencl_options options = {""};
    size_t unit = copy_unit(copies, count), bytes = 3 * (size_t)count * sizeof(cl_long);
    cl_long *ranges = malloc(MAX(bytes, 1));
    if (!ranges) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes", bytes);
    int64_t most = 0;
    for (int64_t n = 0; n < count; n++) {
        ranges[3 * n] = (cl_long)(copies[n].from / unit);
        ranges[3 * n + 1] = (cl_long)(copies[n].to / unit);
        ranges[3 * n + 2] = (cl_long)(copies[n].bytes / unit);
        most = MAX(most, ranges[3 * n + 2]);
    }
    opencl_option(&options, "ITEMS", ITEMS_MIN);
    opencl_option(&options, "UNIT", (int)unit);
    opencl_launch_begin(context, sync, &launch);
    if (most > 0) {
        opencl_launch_kernel(&launch, "decode_pages.cl", "decode_copy", options.text);
        opencl_arg_storage(&launch, &cache->memory);
        opencl_arg_mem(&launch, opencl_launch_table(&launch, ranges, bytes));
        size_t groups = (size_t)MIN(ceil_div(most, ITEMS_MIN), COPY_GROUPS_MAX);
        opencl_launch_run(&launch, 2, (size_t[]){groups * ITEMS_MIN, (size_t)count}, (size_t[]){ITEMS_MIN, 1});
    }
    free(ranges);
    return opencl_launch_end(&launch);
}
