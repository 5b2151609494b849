/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_H
#define CLATTN_CPU_H

/* The CPU backends: drivers that share work among threads, and one table of kernels a variant.
 *
 * A driver (cpu_*.c) walks over sequences, heads and rows under OpenMP and hands single rows to the kernel of
 * the variant. Kernels (<operation>_<variant>.c) know nothing of threads. The table is filled with the
 * reference first and then overridden by what the machine has; CLATTN_CPU=ref|c|avx2|avx512|avx512vnni ends the overriding
 * early. */

#include "internal.h"

#include "cpu_threads.h"
#include "half.h"

/* The mean of `count` keys of one leaf. keys: first key, dtype elements, len_stride elements apart. mean [dim].
 */
typedef void pyramid_leaf_function(const void *keys, clattn_dtype dtype, int64_t len_stride, int64_t count,
                                   int32_t dim, float *mean);

/* The mean of two neighbours; right NULL: left is alone. mean [dim]. */
typedef void pyramid_join_function(const float *left, const float *right, int32_t dim, float *mean);

/* Where the lists of consecutive query rows of one key head go: list n at indices + n * index_step, its length
 * at counts + n * count_step. */
struct select_lists {
    int32_t *indices, *counts;
    int64_t index_step, count_step;
};

/* Lists of the query rows i .. i + rows - 1 of a sequence, for one key head. A list has topk entries, ascending
 * leaves padded by -1. rows: at most select_rows_max. scratch: select_scratch bytes of this thread for as many
 * rows, 64-byte aligned. A list does not depend on the rows that it is selected together with. */
typedef void select_rows_function(const struct select_job *job, int64_t sequence, int32_t kv_head, int64_t i,
                                  int32_t rows, void *scratch, const struct select_lists *lists);

/* Logits that the selection of one list computed of whole leaves, for the attention that follows: it needs the
 * same ones. Only of groups that are one lane group (dot_simd.h), when there is room. */
struct kept_logits {
    float *logits;   /* [capacity][leaf][lanes]; lanes at most KEPT_LANES_MAX */
    int64_t *leaves; /* [count] ascending */
    int64_t count, capacity;
};

enum { TILE_LISTS_MAX = 16, KEPT_LANES_MAX = 32 };

/* Query rows and heads that share the keys of one key head: rows row .. row + rows - 1 of a sequence, heads
 * head .. head + heads - 1 of q. They have one list, or neighbouring list rows one each: row i of the tile has
 * list i / list_rows. */
struct forward_tile {
    const struct sequence *sequence;
    int64_t row;
    int32_t rows, head, heads;
    int32_t lists;          /* 1 .. TILE_LISTS_MAX; 1 with an element mask */
    int32_t list_rows;      /* query rows of a list */
    const int32_t *indices; /* ascending blocks of list n from n * list_step on; NULL: all keys */
    const int32_t *counts;  /* their number at n * count_step */
    int64_t list_step, count_step;
    const unsigned char *cut;       /* blocks that need the element mask, as indices; NULL: the list has none */
    const struct kept_logits *kept; /* of the selection that made the only list; NULL: none */
    const struct forward_tile *next; /* that this thread probably takes after this one; NULL: not known */
};

/* Attention of one tile: writes out and lse. scratch: forward_scratch bytes of this thread, 64-byte aligned. */
typedef void forward_tile_function(const struct forward_job *job, const struct forward_tile *tile,
                                   void *scratch);

/* Gradient of the queries of one tile. delta [q_len][q_heads]: D of the tile's sequence. */
typedef void backward_query_function(const struct backward_job *job, const struct forward_tile *tile,
                                     const float *delta, void *scratch);

/* What the listed rows give to one key block, added to tile->dk and dv. See backward.h. */
struct key_tile;
typedef void backward_key_function(const struct backward_job *job, const struct key_tile *tile, void *scratch);

struct cpu_kernels {
    const char *variant;
    pyramid_leaf_function *pyramid_leaf;
    pyramid_join_function *pyramid_join;
    select_rows_function *select_rows;
    size_t (*select_scratch)(const struct select_job *job, int32_t rows);
    int32_t (*select_rows_max)(const struct select_job *job); /* rows that are best selected together */
    forward_tile_function *forward_tile;
    size_t (*forward_scratch)(const struct forward_job *job, int32_t rows,
                              int32_t heads); /* of the largest tile */
    backward_query_function *backward_query;  /* NULL: the reference computes gradients */
    size_t (*backward_query_scratch)(const struct backward_job *job, int32_t rows, int32_t heads);
    backward_key_function *backward_key;
    size_t (*backward_key_scratch)(const struct backward_job *job);
    int32_t forward_rows; /* query rows x heads of a tile that suits the kernel, for dense attention and query
                             blocks; caches may make it twice or half as many */
    int32_t union_rows;   /* query rows x heads of a tile that joins several short lists; 1: none does */
};

/* One installer a variant, in order. Each overrides what it has. */
void cpu_install_ref(struct cpu_kernels *kernels);
void cpu_install_c(struct cpu_kernels *kernels);
void cpu_install_avx2(struct cpu_kernels *kernels);   /* with HAVE_CPU_AVX2 */
void cpu_install_avx512(struct cpu_kernels *kernels); /* with HAVE_CPU_AVX512 */
void cpu_install_avx512vnni(struct cpu_kernels *kernels); /* with HAVE_CPU_AVX512VNNI */
void cpu_install_neon(struct cpu_kernels *kernels);       /* with HAVE_CPU_NEON */

/* State of a CPU context. */
enum { KEPT_SCRATCH = 16 };
struct cpu_state {
    struct cpu_kernels kernels;
    clattn_backend id;
    struct cpu_machine machine;
    int threads; /* when the caller names none; 0: as OpenMP says */
    enum cpu_placement placement;
    size_t *kept[KEPT_SCRATCH]; /* memory of former calls: see cpu_scratch_take */
};

static inline const struct cpu_kernels *cpu_kernels_of(const clattn_context *context)
{
    return &((const struct cpu_state *)context->state)->kernels;
}

/* Drivers, common to reference and cpu. */
clattn_status cpu_pyramid_build(clattn_context *context, const struct pyramid_job *job);
void cpu_bounds_build(const struct cpu_kernels *kernels, const struct pyramid_job *job, int64_t s,
                      int32_t kv_head, int threads); /* of one sequence and key head */
clattn_status cpu_select(clattn_context *context, const struct select_job *job);
clattn_status cpu_forward(clattn_context *context, const struct forward_job *job);

clattn_status cpu_gather(clattn_context *context, const struct gather_job *job);
clattn_status cpu_merge(clattn_context *context, const struct merge_job *job);
clattn_status cpu_quantize(clattn_context *context, const struct quantize_job *job);
clattn_status cpu_backward(clattn_context *context, const struct backward_job *job);
clattn_status cpu_cache_append(clattn_context *context, const struct cache_append_job *job);
clattn_status cpu_cache_copy(clattn_context *context, clattn_cache *cache, const struct cache_copy *copies,
                             int64_t count, const clattn_sync *sync);
clattn_status cpu_cache_cut(clattn_context *context, clattn_cache *cache, int32_t sequence,
                            const clattn_sync *sync);
clattn_status cpu_decode(clattn_context *context, const struct decode_job *job);

int cpu_threads(const clattn_context *context); /* that a parallel region of this context uses */
void *cpu_scratch(size_t bytes);                /* 64-byte aligned, released by free */

/* Likewise, but of a context, which keeps for later calls what is given back to it. */
void *cpu_scratch_take(const clattn_context *context, size_t bytes);
void cpu_scratch_give(const clattn_context *context, void *scratch);
void cpu_scratch_release(struct cpu_state *state);

/* ---- access to tensors in host memory ---- */

/* Row (batch, len, head) of a tensor: its first element. */
static inline void *tensor_row(const clattn_tensor *tensor, int64_t batch, int64_t row, int64_t head)
{
    int64_t element =
        tensor->offset + batch * tensor->batch_stride + row * tensor->len_stride + head * tensor->head_stride;
    int bytes = tensor->dtype == CLATTN_FLOAT32 ? 4 : tensor->dtype == CLATTN_INT8 ? 1 : 2;
    return (char *)tensor->data + element * bytes;
}

/* Row of key or value j of a sequence. */
static inline const void *sequence_row(const clattn_tensor *tensor, const struct sequence *sequence, int64_t j,
                                       int64_t head)
{
    if (!sequence->pages) return tensor_row(tensor, sequence->batch, sequence->k_row + j, head);
    return tensor_row(tensor, sequence->pages[j / sequence->page_size], j % sequence->page_size, head);
}

/* Rows that lie len_stride apart from key j on. */
static inline int64_t sequence_row_run(const struct sequence *sequence, int64_t j)
{
    return sequence->pages ? sequence->page_size - j % sequence->page_size : INT64_MAX;
}

/* Scale of INT8 key or value j. */
static inline float sequence_scale(const struct options *options, const clattn_tensor *scales,
                                   const struct sequence *sequence, int64_t j, int64_t head)
{
    if (sequence->pages) return *(const float *)sequence_row(scales, sequence, j, head);
    return *(const float *)tensor_row(scales, scales->batch == 1 ? 0 : sequence->batch,
                                      (sequence->k_row + j) / options->scale_block, head);
}

static inline float load_element(const void *row, clattn_dtype dtype, int64_t i)
{
    switch (dtype) {
    case CLATTN_FLOAT16:
        return float_of_float16(((const uint16_t *)row)[i]);
    case CLATTN_BFLOAT16:
        return float_of_bfloat16(((const uint16_t *)row)[i]);
    case CLATTN_INT8:
        return ((const int8_t *)row)[i]; /* to be multiplied by its scale */
    default:
        return ((const float *)row)[i];
    }
}

static inline void store_element(void *row, clattn_dtype dtype, int64_t i, float value)
{
    switch (dtype) {
    case CLATTN_FLOAT16:
        ((uint16_t *)row)[i] = float16_of_float(value);
        break;
    case CLATTN_BFLOAT16:
        ((uint16_t *)row)[i] = bfloat16_of_float(value);
        break;
    default:
        ((float *)row)[i] = value;
    }
}

/* Means of one sequence and key head: node n of level l is means[level_first(pyramid_room, l) + n]. */
static inline const float *pyramid_head(const clattn_pyramid *pyramid, int64_t sequence, int32_t kv_head)
{
    int64_t first =
        pyramid->first[sequence] + kv_head * pyramid_nodes(pyramid_room(pyramid, sequence), pyramid->leaf);
    return (const float *)pyramid->means.host + first * pyramid->dim;
}

/* Likewise its bounds, [node][2][dim], and the quarters of its leaves, [leaf][LEAF_PARTS][3][dim]. */
static inline const float *pyramid_bounds_head(const clattn_pyramid *pyramid, int64_t sequence, int32_t kv_head)
{
    int64_t first =
        pyramid->first[sequence] + kv_head * pyramid_nodes(pyramid_room(pyramid, sequence), pyramid->leaf);
    return (const float *)pyramid->bounds.host + first * 2 * pyramid->dim;
}

static inline const float *pyramid_parts_head(const clattn_pyramid *pyramid, int64_t sequence, int32_t kv_head)
{
    int64_t first = pyramid->first_leaf[sequence] +
                    kv_head * level_nodes(pyramid_room(pyramid, sequence), pyramid->leaf, 1);
    return (const float *)pyramid->parts.host + first * LEAF_PARTS * 3 * pyramid->dim;
}

#endif
