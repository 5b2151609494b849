/* SPDX-License-Identifier: MIT */
/* The decode cache on the CPU: writes what is appended and keeps the pyramid.
 *
 * A leaf's sum runs on in double, key after key, and its mean is rounded from it after each append, as
 * pyramid_ref.c does for all keys at once: the same bits. Then its ancestors are joined anew. Nothing else is
 * touched, so a token costs dim * (1 + levels) additions a key head. */

#include "config.h"

#include "cache.h"
#include "cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS_FOR_THREADS = 64 }; /* a few rows are written before a thread wakes up */

/* Statistics of one key head of a sequence. */
struct head {
    const clattn_cache *cache;
    const struct cpu_kernels *kernels;
    int32_t dim, leaf;
    bool bounds;
    float *means;     /* [nodes][dim] */
    float *bound;     /* [nodes][2][dim] */
    float *parts;     /* [leaves][LEAF_PARTS][3][dim] */
    double *leaf_sum; /* [dim] of the last leaf and of its last quarter */
    double *part_sum;
    uint64_t nodes_updated, rows_summed;
};

static struct head head_of(clattn_context *context, const clattn_cache *cache, int32_t sequence,
                           int32_t kv_head)
{
    const struct cache_layout *layout = &cache->layout;
    int64_t index = cache_head(cache, sequence, kv_head), dim = cache->desc.dim;
    struct head head = {.cache = cache,
                        .kernels = cpu_kernels_of(context),
                        .dim = cache->desc.dim,
                        .leaf = cache->desc.leaf,
                        .bounds = cache->desc.bounds != 0};
    head.means = (float *)cache_memory(cache, layout->means) + index * cache->nodes * dim;
    head.bound = (float *)cache_memory(cache, layout->bounds) + index * cache->nodes * 2 * dim;
    head.parts = (float *)cache_memory(cache, layout->parts) + index * cache->leaves * LEAF_PARTS * 3 * dim;
    head.leaf_sum = (double *)cache_memory(cache, layout->sums) + index * 2 * dim;
    head.part_sum = head.leaf_sum + dim;
    return head;
}

/* ---- keys join their leaf ---- */

static void sum_begin(double *sum, int64_t position, int32_t unit, int32_t dim)
{
    if (position % unit == 0) memset(sum, 0, (size_t)dim * sizeof *sum);
}

/* A first key is the minimum and the maximum of nothing and itself; NaN keys are passed over. */
static void bounds_add(float *least, float *most, const float *key, bool is_first, int32_t dim)
{
    for (int32_t d = 0; d < dim; d++) {
        float low = is_first ? INFINITY : least[d], high = is_first ? -INFINITY : most[d];
        least[d] = key[d] < low ? key[d] : low;
        most[d] = key[d] > high ? key[d] : high;
    }
}

/* The key of token `position`. */
static void key_add(struct head *head, int64_t position, const float *key)
{
    int32_t dim = head->dim, quarter = head->leaf / LEAF_PARTS;
    sum_begin(head->leaf_sum, position, head->leaf, dim);
    for (int32_t d = 0; d < dim; d++)
        head->leaf_sum[d] += (double)key[d];
    head->rows_summed++;
    if (!head->bounds) return;
    float *bound = head->bound + position / head->leaf * 2 * dim;
    float *part = head->parts + position / quarter * 3 * dim;
    sum_begin(head->part_sum, position, quarter, dim);
    double count = (double)(position % quarter + 1);
    for (int32_t d = 0; d < dim; d++) {
        head->part_sum[d] += (double)key[d];
        part[d] = (float)(head->part_sum[d] / count);
    }
    bounds_add(part + dim, part + 2 * dim, key, position % quarter == 0, dim);
    bounds_add(bound, bound + dim, key, position % head->leaf == 0, dim);
}

static void leaf_close(struct head *head, int64_t leaf, int64_t keys)
{
    float *mean = head->means + leaf * head->dim;
    for (int32_t d = 0; d < head->dim; d++)
        mean[d] = (float)(head->leaf_sum[d] / (double)keys);
    head->nodes_updated++;
}

/* ---- ancestors ---- */

static void bounds_join(float *to, const float *left, const float *right, int32_t dim)
{
    memcpy(to, left, 2 * (size_t)dim * sizeof *to);
    for (int32_t d = 0; d < dim && right; d++) {
        to[d] = right[d] < to[d] ? right[d] : to[d];
        to[dim + d] = right[dim + d] > to[dim + d] ? right[dim + d] : to[dim + d];
    }
}

/* Ancestors of leaves first .. last when there are `tokens` keys. */
static void ancestors_join(struct head *head, int64_t first, int64_t last, int64_t tokens)
{
    const int64_t *level_first = head->cache->level_first;
    int64_t children = level_nodes(tokens, head->leaf, 1), dim = head->dim;
    for (int level = 2; children > 1; level++, children = ceil_div(children, 2)) {
        first /= 2;
        last /= 2;
        for (int64_t n = first; n <= last; n++) {
            int64_t node = level_first[level] + n, child = level_first[level - 1] + 2 * n;
            bool both = 2 * n + 1 < children;
            const float *left = head->means + child * dim;
            head->kernels->pyramid_join(left, both ? left + dim : NULL, head->dim, head->means + node * dim);
            head->nodes_updated++;
            if (!head->bounds) continue;
            left = head->bound + child * 2 * dim;
            bounds_join(head->bound + node * 2 * dim, left, both ? left + 2 * dim : NULL, head->dim);
        }
    }
}

/* ---- rows of keys and values ---- */

static void row_float(const void *row, clattn_dtype dtype, int32_t dim, float *to)
{
    for (int32_t d = 0; d < dim; d++)
        to[d] = load_element(row, dtype, d);
}

/* Codes of one row; a NaN becomes 0, an infinity the greatest code. Returns the scale. */
static float row_quantise(const float *x, int32_t dim, int8_t *codes)
{
    float most = 0;
    for (int32_t d = 0; d < dim; d++)
        if (fabsf(x[d]) > most && fabsf(x[d]) < INFINITY) most = fabsf(x[d]);
    float scale = most / 127;
    for (int32_t d = 0; d < dim; d++) {
        float code = isnan(x[d]) || scale == 0 ? 0 : x[d] / scale;
        codes[d] = (int8_t)rintf(fminf(fmaxf(code, -127), 127));
    }
    return scale;
}

/* Row `position` of keys or values of a sequence. */
static void row_write(const clattn_cache *cache, int32_t sequence, int32_t kv_head, int64_t position,
                      enum cache_region region, const void *row, clattn_dtype dtype)
{
    clattn_tensor to = cache_tensor(cache, region);
    int64_t page = cache_table(cache, sequence)[position / cache->page_size];
    void *place = tensor_row(&to, page, position % cache->page_size, kv_head);
    if (to.dtype != CLATTN_INT8) {
        memcpy(place, row, (size_t)to.dim * dtype_bytes(dtype));
        return;
    }
    float x[256];
    clattn_tensor scales = cache_tensor(cache, region == CACHE_KEYS ? CACHE_KEY_SCALES : CACHE_VALUE_SCALES);
    row_float(row, dtype, (int32_t)to.dim, x);
    *(float *)tensor_row(&scales, page, position % cache->page_size, kv_head) =
        row_quantise(x, (int32_t)to.dim, place);
}

/* Tokens of one leaf, from position `first` on; they are the rows `row` ... of k. */
static void leaf_append(struct head *head, const struct cache_append_job *job, int32_t kv_head, int64_t first,
                        int64_t count, int64_t row)
{
    float key[256];
    if (count == head->leaf && !head->bounds) {
        head->kernels->pyramid_leaf(tensor_row(job->k, 0, row, kv_head), job->k->dtype, job->k->len_stride,
                                    count, head->dim, head->means + first / head->leaf * head->dim);
        head->rows_summed += (uint64_t)count;
        head->nodes_updated++;
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        row_float(tensor_row(job->k, 0, row + i, kv_head), job->k->dtype, head->dim, key);
        key_add(head, first + i, key);
    }
    leaf_close(head, first / head->leaf, (first + count - 1) % head->leaf + 1);
}

static void span_append(struct head *head, const struct cache_append_job *job, const struct cache_span *span,
                        int32_t kv_head)
{
    for (int64_t i = 0; i < span->len; i++) {
        const void *k = tensor_row(job->k, 0, span->row + i, kv_head);
        const void *v = tensor_row(job->v, 0, span->row + i, kv_head);
        row_write(job->cache, span->sequence, kv_head, span->first + i, CACHE_KEYS, k, job->k->dtype);
        row_write(job->cache, span->sequence, kv_head, span->first + i, CACHE_VALUES, v, job->v->dtype);
    }
    int64_t end = span->first + span->len, next;
    for (int64_t at = span->first; at < end; at = next) {
        next = MIN((at / head->leaf + 1) * head->leaf, end);
        leaf_append(head, job, kv_head, at, next - at, span->row + at - span->first);
    }
    if (span->len) ancestors_join(head, span->first / head->leaf, (end - 1) / head->leaf, end);
}

clattn_status cpu_cache_append(clattn_context *context, const struct cache_append_job *job)
{
    int32_t kv_heads = job->cache->desc.kv_heads;
    int64_t units = job->count * kv_heads;
    uint64_t nodes = 0, rows = 0;
    int64_t tokens = 0;
    for (int64_t s = 0; s < job->count; s++)
        tokens += job->spans[s].len;
    bool is_small = tokens * kv_heads < ROWS_FOR_THREADS;
    int threads = is_small ? 1 : (int)MIN(cpu_threads(context), units);
    (void)threads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(+ : nodes, rows)
    for (int64_t n = 0; n < units; n++) {
        const struct cache_span *span = &job->spans[n / kv_heads];
        int32_t kv_head = (int32_t)(n % kv_heads);
        struct head head = head_of(context, job->cache, span->sequence, kv_head);
        span_append(&head, job, span, kv_head);
        nodes += head.nodes_updated;
        rows += head.rows_summed;
    }
    job->cache->nodes_updated += nodes;
    job->cache->rows_summed += rows;
    return CLATTN_SUCCESS;
}

clattn_status cpu_cache_copy(clattn_context *context, clattn_cache *cache, const struct cache_copy *copies,
                             int64_t count, const clattn_sync *sync)
{
    (void)context;
    (void)sync;
    for (int64_t n = 0; n < count; n++)
        memcpy(cache_memory(cache, copies[n].to), cache_memory(cache, copies[n].from), copies[n].bytes);
    return CLATTN_SUCCESS;
}

/* ---- a prefix was taken ---- */

static void key_read(const clattn_cache *cache, int32_t sequence, int32_t kv_head, int64_t position, float *key)
{
    clattn_tensor keys = cache_tensor(cache, CACHE_KEYS), scales = cache_tensor(cache, CACHE_KEY_SCALES);
    int64_t page = cache_table(cache, sequence)[position / cache->page_size];
    int64_t token = position % cache->page_size;
    row_float(tensor_row(&keys, page, token, kv_head), keys.dtype, cache->desc.dim, key);
    if (keys.dtype != CLATTN_INT8) return;
    float scale = *(const float *)tensor_row(&scales, page, token, kv_head);
    for (int32_t d = 0; d < cache->desc.dim; d++)
        key[d] *= scale;
}

clattn_status cpu_cache_cut(clattn_context *context, clattn_cache *cache, int32_t sequence,
                            const clattn_sync *sync)
{
    int64_t length = cache->length[sequence], last = (length - 1) / cache->desc.leaf;
    (void)sync;
    for (int32_t h = 0; h < cache->desc.kv_heads; h++) {
        struct head head = head_of(context, cache, sequence, h);
        float key[256];
        if (length % head.leaf) {
            for (int64_t j = last * head.leaf; j < length; j++) {
                key_read(cache, sequence, h, j, key);
                key_add(&head, j, key);
            }
            leaf_close(&head, last, length - last * head.leaf);
        }
        ancestors_join(&head, last, last, length);
        cache->nodes_updated += head.nodes_updated;
        cache->rows_summed += head.rows_summed;
    }
    return CLATTN_SUCCESS;
}
