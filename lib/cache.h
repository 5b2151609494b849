/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CACHE_H
#define CLATTN_CACHE_H

/* The decode cache: what its memory holds and which pages its sequences have.
 *
 * Everything the host decides (lengths, block table, references) is in host memory and final when a call
 * returns; what a backend computes lies in one piece of its memory, region after region:
 *
 *     keys, values   [page][kv_head][token of the page][dim or dim_v]   cache dtype
 *     key_scales,    [page][kv_head][token of the page]                 float32; INT8 only
 *     value_scales
 *     means          [sequence][kv_head][node][dim]                     float32
 *     bounds         [sequence][kv_head][node][2][dim]                  float32 minimum, maximum; with
 * desc.bounds only parts          [sequence][kv_head][leaf][LEAF_PARTS][3][dim]      float32 mean, minimum,
 * maximum; likewise sums           [sequence][kv_head][2][dim]                        8 bytes an element, of
 * the backend's own format: sum of the keys of the last leaf, and of its last quarter, as long as these are not
 * complete
 *
 * Token j of a sequence is row j % page_size of page table[j / page_size]; a contiguous sequence is one page.
 * Nodes lie where they would for desc.tokens keys, level 1 first: appending never moves anything. A node has
 * the bits that clattn_pyramid_build gives it for the keys so far. */

#include "internal.h"

enum { CACHE_LEVELS_MAX = 48, CACHE_ALIGNMENT = 4096 };

struct cache_layout {
    size_t keys, values, key_scales, value_scales, means, bounds, parts, sums; /* byte offsets */
    size_t bytes;
};

struct clattn_cache {
    clattn_cache_desc desc; /* checked */
    struct cache_layout layout;
    struct storage memory;
    bool owns_memory;
    int64_t page_size, pages;
    int64_t table_entries;                 /* of a sequence */
    int64_t nodes, leaves;                 /* of a sequence and key head */
    int64_t level_first[CACHE_LEVELS_MAX]; /* first node of level l at index l, 1 .. */

    int64_t *length; /* [sequences] */
    int32_t *table;  /* [sequences][table_entries] */
    int32_t *refs;   /* [pages] sequences that have the page */
    int32_t *free;   /* [free_count] pages without any */
    int64_t free_count;
    int64_t *changed; /* [sequences] table entries from here on have changed since a backend that keeps a copy
                         of the table last reset this to INT64_MAX; fewer of them is no change */
    unsigned char *marked; /* [sequences] of the batch that is being checked; else 0 */

    clattn_blocks *blocks; /* of the last step, when the caller did not want them */
    uint64_t tokens_appended, nodes_updated, rows_summed;
    double select_seconds, attend_seconds;
    void *device; /* of the backend, released by cache_release; NULL at first */
};

/* Tokens of one sequence in a batch. */
struct cache_span {
    int32_t sequence;
    int32_t copied_from; /* its last page before another one had to take its place; -1: none */
    int64_t first, len;  /* position of the first token, number of tokens */
    int64_t row;         /* of the first token in the tensors of the call */
};

static inline const int32_t *cache_table(const clattn_cache *cache, int32_t sequence)
{
    return cache->table + sequence * cache->table_entries;
}

/* Index of (page, key head, token of the page) among the rows of keys, values and scales. */
static inline int64_t cache_row(const clattn_cache *cache, int64_t page, int32_t kv_head, int64_t token)
{
    return (page * cache->desc.kv_heads + kv_head) * cache->page_size + token;
}

/* Index of a sequence's key head among all of them: of sums; times nodes or leaves it is the first of these. */
static inline int64_t cache_head(const clattn_cache *cache, int32_t sequence, int32_t kv_head)
{
    return (int64_t)sequence * cache->desc.kv_heads + kv_head;
}

static inline void *cache_memory(const clattn_cache *cache, size_t offset)
{
    return (char *)cache->memory.host + offset;
}

/* ---- jobs ---- */

/* Pages are there, the table is final; cache->length is still that of before. */
struct cache_append_job {
    clattn_cache *cache;
    const struct cache_span *spans; /* [count] */
    int64_t count;
    const clattn_tensor *k, *v;
    const clattn_sync *sync;
};

/* Bytes of cache->memory that are copied; no two copies overlap. */
struct cache_copy {
    size_t from, to, bytes;
};

/* Everything is appended. problem: a sequence a span, with its pages. */
struct decode_job {
    const struct problem *problem;
    const clattn_select_desc *select;
    clattn_cache *cache;
    const struct cache_span *spans; /* [problem->count] */
    const clattn_tensor *q;
    clattn_blocks *blocks; /* NULL: all keys */
    const clattn_tensor *out, *lse;
    const clattn_sync *sync;
};

/* ---- cache.c ---- */

/* Keys and values, and the scales of INT8, as tensors: batch entries are pages, rows their tokens. */
enum cache_region { CACHE_KEYS, CACHE_VALUES, CACHE_KEY_SCALES, CACHE_VALUE_SCALES };
clattn_tensor cache_tensor(const clattn_cache *cache, enum cache_region region);

/* ---- cache_pages.c ---- */

/* Takes the pages that the spans need and copies those that are shared; OUT_OF_PAGES: nothing has happened. */
clattn_status cache_take_pages(clattn_context *context, clattn_cache *cache, struct cache_span *spans,
                               int64_t count, const clattn_sync *sync);
/* Gives them back; the sequences are as before. */
void cache_return_pages(clattn_cache *cache, const struct cache_span *spans, int64_t count);

/* ---- cache_append.c ---- */

clattn_status cache_check_batch(clattn_context *context, const clattn_cache *cache, int64_t count,
                                const int32_t *sequences, const int32_t *lens);
clattn_status cache_check_rows(clattn_context *context, const clattn_cache *cache, const clattn_tensor *k,
                               const clattn_tensor *v, int64_t rows);
/* Checks sequences and lens and fills spans [count]; *rows: their sum. */
clattn_status cache_spans(clattn_context *context, const clattn_cache *cache, int64_t count,
                          const int32_t *sequences, const int32_t *lens, struct cache_span *spans,
                          int64_t *rows);
clattn_status cache_append_run(clattn_context *context, clattn_cache *cache, struct cache_span *spans,
                               int64_t count, const clattn_tensor *k, const clattn_tensor *v,
                               const clattn_sync *sync);
/* Cuts the sequences to what they had before the spans. */
void cache_append_undo(clattn_context *context, clattn_cache *cache, const struct cache_span *spans,
                       int64_t count, const clattn_sync *sync);

#endif
