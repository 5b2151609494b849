/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_INTERNAL_H
#define CLATTN_INTERNAL_H

/* What the parts of the library share: the context, checked problems, jobs for the backends, and the backend
 * table.
 *
 * A public call goes  check (check.c)  ->  problem + job  ->  stage host tensors (stage.h)  ->
 * backend->operation. */

#include "clattn.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b > 0);
}

/* ---- context ---- */

struct clattn_context {
    const struct backend *backend;
    void *state;          /* of the backend */
    pthread_mutex_t lock; /* log, error, stats */
    clattn_log_function log;
    void *log_user;
    clattn_log_level log_level;
    int threads;
    char error[2048];
    clattn_stats stats;
};

/* Records the detail of an error (context NULL: nowhere) and returns `status`: `return fail(context,
 * CLATTN_INVALID_SHAPE, "q.dim is %d
 * ...")`. */
clattn_status fail(clattn_context *context, clattn_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

void log_line(clattn_context *context, clattn_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

double seconds_now(void); /* monotonic */
void stats_add_build(clattn_context *context, double seconds, bool from_cache);
void stats_add_transfer(clattn_context *context, double seconds);
void stats_add_launch(clattn_context *context);
void stats_add_tuned(clattn_context *context, clattn_tuning source);

/* ---- memory ---- */

/* Memory where the backend computes: host memory (64-byte aligned) or a cl_mem. */
struct storage {
    void *host;
    void *mem;
    size_t bytes;
};

size_t dtype_bytes(clattn_dtype dtype);
const char *dtype_name(clattn_dtype dtype);

/* ---- problems ---- */

/* One sequence of a batch: rows of the tensors that belong together. */
struct sequence {
    int64_t batch;         /* index into the tensors' batch dimension */
    int64_t q_row, q_len;  /* first row in len, number of query rows */
    int64_t k_row, kv_len; /* likewise for k and v */
    int64_t list_row;      /* its first list row */
    const int32_t
        *pages;        /* of a decode cache: key j is row j % page_size of batch entry pages[j / page_size] */
    int64_t page_size; /* of k and v; pages NULL: row k_row + j of `batch` */
};

/* What changes the logits and the denominator beyond scale and causality. */
struct options {
    float softcap;                          /* 0: none */
    int64_t window;                         /* 0: none */
    const clattn_tensor *sink;              /* [1][1][q_heads][1]; NULL: none. So for the others */
    const clattn_tensor *bias;              /* [batch or 1][blocks][q_heads][1] */
    const clattn_tensor *k_scale, *v_scale; /* [batch][leaves][kv_heads][1] with INT8 keys and values */
    int32_t scale_block;                    /* keys per scale */
};

static inline bool has_options(const struct options *options)
{
    return options->softcap != 0 || options->window || options->sink || options->bias || options->k_scale;
}

/* What all operations share, checked. */
struct problem {
    struct sequence *sequences; /* [count] */
    int64_t count;
    int64_t q_len_max, kv_len_max;
    int64_t list_rows; /* of all sequences */
    int32_t q_block;   /* query rows per list row */
    int32_t q_heads, kv_heads, group;
    int32_t dim, dim_v;
    float scale;
    bool causal;
    struct options options;
};

/* Position of query row i: it sees keys 0 .. position. Negative: it sees nothing. */
static inline int64_t query_position(const struct sequence *sequence, int64_t i)
{
    return i + sequence->kv_len - sequence->q_len;
}

/* End of the keys that query row i sees (their number without a window). */
static inline int64_t visible_keys(const struct problem *problem, const struct sequence *sequence, int64_t i)
{
    int64_t position = query_position(sequence, i);
    int64_t window = problem->options.window, end = sequence->kv_len;
    if (problem->causal)
        end = position + 1;
    else if (window)
        end = MIN(end, position + window);
    return MAX(end, 0);
}

/* First key that query row i sees: 0, or where its window begins. */
static inline int64_t first_visible_key(const struct problem *problem, const struct sequence *sequence,
                                        int64_t i)
{
    int64_t window = problem->options.window;
    return window ? MAX(query_position(sequence, i) - window + 1, 0) : 0;
}

/* Tensors of a call; those that an operation does not have are NULL. */
struct tensors {
    const clattn_tensor *q, *k, *v, *out, *lse;
};

/* Checks descriptor and tensors against each other and fills `problem` (release with problem_release). q_block:
 * query rows per list row. */
clattn_status problem_init(clattn_context *context, const clattn_attention_desc *attention,
                           const struct tensors *tensors, int32_t q_block, struct problem *problem);
void problem_release(struct problem *problem);

bool all_rows_used(const struct problem *problem, const clattn_tensor *q); /* every row of q is of a sequence */

/* Copies a size-prefixed descriptor of the caller over defaults. */
clattn_status desc_copy(clattn_context *context, const char *name, void *copy, size_t copy_bytes,
                        const void *desc);
clattn_status check_gradients(clattn_context *context, const struct problem *problem,
                              const struct tensors *tensors, const clattn_gradients *gradients);
clattn_status check_select(clattn_context *context, const clattn_select_desc *desc,
                           clattn_select_desc *checked);
clattn_status check_leaf(clattn_context *context, const char *name, int64_t leaf);
clattn_status check_tensor(clattn_context *context, const char *name, const clattn_tensor *tensor,
                           bool is_output);
/* The tensors that attention cannot do without. */
clattn_status check_present(clattn_context *context, const struct tensors *t);
clattn_status check_sync(clattn_context *context, const clattn_sync *sync, clattn_sync *copy);

/* Of every step of a call but the last, whose event the caller asks for; NULL: none. */
static inline const clattn_sync *sync_without_event(const clattn_sync *sync, clattn_sync *copy)
{
    if (!sync) return NULL;
    *copy = *sync;
    copy->event = NULL;
    return copy;
}

/* Size arithmetic that refuses to overflow: *product = a * b, false when it exceeds 63 bits. */
static inline bool multiply(int64_t a, int64_t b, int64_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

/* ---- pyramid ---- */

struct clattn_pyramid {
    int32_t leaf, dim, kv_heads;
    int64_t count;        /* sequences */
    int64_t *kv_len;      /* [count] */
    int64_t room;         /* of a decode cache: nodes lie where they would for so many keys; 0: for kv_len */
    int64_t *first;       /* [count] first node of key head 0; head h begins h * pyramid_nodes() later */
    int64_t nodes;        /* of all sequences and heads */
    struct storage means; /* [nodes][dim] float32; a sequence's head holds level 1, then level 2 ... */
    /* For robust selection; no storage: not built. Minima and maxima are exact, whatever the order. */
    struct storage bounds; /* [nodes][2][dim] float32: minimum, maximum */
    struct storage parts;  /* [leaves][LEAF_PARTS][3][dim] float32: mean, minimum, maximum of a quarter leaf */
    int64_t *first_leaf;   /* [count] leaves before key head 0; head h begins h * level_nodes(1) later */
    int64_t leaves;        /* of all sequences and heads */
};

enum { LEAF_PARTS = 4 };

int64_t level_nodes(int64_t kv_len, int32_t leaf, int level); /* M_level; 0 above the top */
int64_t level_first(int64_t kv_len, int32_t leaf, int level); /* nodes of the levels below `level` */
int level_count(int64_t kv_len, int32_t leaf);                /* 0 for an empty sequence */
int64_t pyramid_nodes(int64_t kv_len, int32_t leaf);          /* of all levels */
bool pyramid_has_bounds(const clattn_pyramid *pyramid);

/* Keys that decide where the nodes of a sequence lie. */
static inline int64_t pyramid_room(const clattn_pyramid *pyramid, int64_t sequence)
{
    return pyramid->room ? pyramid->room : pyramid->kv_len[sequence];
}

clattn_status pyramid_new(clattn_context *context, const struct problem *problem, int32_t leaf, bool has_bounds,
                          clattn_pyramid **result);
bool pyramid_fits(const clattn_pyramid *pyramid, const struct problem *problem, int32_t leaf);

/* ---- block lists ---- */

enum { DENSE_BLOCK = 64 }; /* keys that share a bias when there is no list */

/* Which elements of cut blocks are connected: on every axis, the key's coordinate lies in the query's window.
 * Tables are indexed by the tensors' rows. */
struct element_mask {
    struct storage cut;        /* [list rows][topk] uint8: 1 where the block needs the mask */
    struct storage window;     /* [q rows][3][2] int32 lo, hi */
    struct storage coordinate; /* [kv rows][3] int32; -1 is in no window */
    int32_t kv_tile[3]; /* a cut block is a box of coordinates of this shape, the last axis fastest; those
                           past the layout's end are in no window */
};

enum { BLOCKS_UNIONS = 4 };

struct clattn_blocks {
    int32_t block, q_block, heads, topk;
    int64_t rows;
    struct storage indices;            /* [rows][heads][topk] int32 */
    struct storage counts;             /* [rows][heads] int32 */
    float union_blocks[BLOCKS_UNIONS]; /* lists of the caller, per token: blocks in the union of 4, 8, 16 and 32
                                          neighbouring rows, on average; see blocks_sample */
    int32_t *row_max;          /* [rows] greatest index, for lists of the caller; NULL: made by a selector */
    struct element_mask *mask; /* NULL: every listed element is connected. Needs heads = 1 */
    int64_t *starts; /* [start_count] the caller's block boundaries, then block is 0; NULL: equal blocks */
    int64_t start_count;
    clattn_blocks *coarse, *rest; /* of a union: the list of whole query tiles, and what the other one has beside
                                     it; NULL: no such parts */
    float parts_saved;            /* by how much a list of `rest` is shorter than one of the union, on average */
};

clattn_status blocks_new(clattn_context *context, const clattn_blocks_desc *desc, clattn_blocks **blocks);

/* Does the list (NULL: all keys) fit the problem: rows, heads, and no index past the keys of its sequence? */
clattn_status blocks_check(clattn_context *context, const clattn_blocks *blocks, const struct problem *problem);

/* Writes lists [rows][heads][topk], ascending and padded, with their counts [rows][heads], into a new block
 * list. */
clattn_status blocks_from_lists(clattn_context *context, const clattn_blocks_desc *desc, const int32_t *indices,
                                const int32_t *counts, clattn_blocks **result);
/* A selector has written the list: it is no longer that of the caller or a union. */
void blocks_selected(clattn_context *context, clattn_blocks *blocks);
void blocks_sample(clattn_blocks *blocks,
                   const int32_t *indices); /* fills union_blocks from [rows][heads][topk] */
const char *starts_error(const int64_t *starts, int64_t count); /* what is wrong with them, or NULL */

/* ---- jobs: what a backend gets, all checked ---- */

struct pyramid_job {
    const struct problem *problem;
    const clattn_tensor *k;
    clattn_pyramid *pyramid;
    const clattn_sync *sync; /* NULL: complete on return */
};

struct select_job {
    const struct problem *problem;
    const clattn_select_desc *select;
    const clattn_tensor *q, *k;
    const clattn_pyramid *pyramid; /* NULL with FLAT_LSE only */
    clattn_blocks *blocks;
    const clattn_sync *sync;
    struct kept_logits *kept; /* of the CPU; NULL: none */
    int64_t cache_bytes;      /* likewise: what a core has near itself; 0: not known */
};

struct forward_job {
    const struct problem *problem;
    const clattn_tensor *q, *k, *v;
    const clattn_blocks *blocks;    /* NULL: all keys */
    const clattn_tensor *out, *lse; /* lse may be NULL */
    const clattn_neighborhood
        *neighborhood; /* reference only: k is [layout's tokens, extra keys]; NULL: blocks */
    const clattn_sync *sync;
};

bool attends_in_parts(const clattn_context *context, const struct forward_job *job);
/* job->problem is made for `attention`; its list rows may be the union's. */
clattn_status forward_in_parts(clattn_context *context, const clattn_attention_desc *attention,
                               const struct forward_job *job);

/* Rows moved: to[b][n] = sum over terms t of rows index[n][t] of `from`, of `more` (NULL: none) when the index
 * is from->len or above, or of nothing when it is -1. Terms are added in order, in float32. */
struct gather_job {
    const clattn_tensor *from, *more, *to;
    const struct storage *index; /* [to->len][terms] int64 */
    int32_t terms;
    const clattn_sync *sync;
};

struct merge_job {
    const clattn_tensor *out0, *lse0, *out1, *lse1;
    const clattn_tensor *out, *lse; /* may be inputs; lse may be NULL */
    const clattn_sync *sync;
};

/* Leaves far_begin .. far_end - 1 are cut into groups of far_group; the others are groups of their own. */
struct quantize_job {
    const clattn_tensor *x, *codes, *scales;
    int32_t scale_block, far_group;
    int64_t leaves, far_begin, far_end;
    const clattn_sync *sync;
};

static inline int64_t quantize_groups(const struct quantize_job *job)
{
    return job->leaves - (job->far_end - job->far_begin) +
           ceil_div(job->far_end - job->far_begin, job->far_group);
}

/* Leaves first .. end - 1 of a group. */
static inline void quantize_leaves(const struct quantize_job *job, int64_t group, int64_t *first, int64_t *end)
{
    int64_t far_groups = ceil_div(job->far_end - job->far_begin, job->far_group), far = group - job->far_begin;
    *first = far < 0            ? group
             : far < far_groups ? job->far_begin + far * job->far_group
                                : job->far_end + far - far_groups;
    *end = far < 0 || far >= far_groups ? *first + 1 : MIN(*first + job->far_group, job->far_end);
}

struct backward_job {
    const struct problem *problem;
    const clattn_tensor *q, *k, *v;
    const clattn_blocks *blocks; /* NULL: all keys */
    const clattn_tensor *out, *lse;
    const clattn_tensor *dout, *dlse;   /* dlse may be NULL */
    const clattn_tensor *dq, *dk, *dv;  /* outputs: dq or dk and dv may be NULL */
    const clattn_tensor *dsink, *dbias; /* may be NULL */
    bool accumulate;
    float compensation;
    const clattn_neighborhood *neighborhood; /* as in struct forward_job */
    const clattn_sync *sync;
};

struct cache_append_job; /* these three: cache.h */
struct cache_copy;
struct decode_job;

/* ---- backends ---- */

struct backend {
    clattn_backend id;
    bool host_memory;         /* computes on host tensors directly */
    bool knows_neighborhoods; /* forward and backward take them as they are, without tiles */
    clattn_status (*open)(clattn_context *context, const clattn_context_desc *desc);
    void (*close)(clattn_context *context);
    clattn_status (*describe)(clattn_context *context, clattn_device_info *info);
    clattn_status (*storage_create)(clattn_context *context, size_t bytes, struct storage *storage);
    void (*storage_release)(clattn_context *context, struct storage *storage);
    clattn_status (*storage_write)(clattn_context *context, struct storage *storage, const void *data,
                                   size_t bytes);
    clattn_status (*storage_read)(clattn_context *context, const struct storage *storage, size_t offset,
                                  void *data, size_t bytes);
    /* `words` words, in the order of the queue of `sync` */
    clattn_status (*storage_fill)(clattn_context *context, struct storage *storage, int32_t value, size_t words,
                                  const clattn_sync *sync);
    /* Of memory that is not the host's: is it the context's, and large enough? NULL: there is only the host's. */
    clattn_status (*tensor_check)(clattn_context *context, const clattn_tensor *tensor);
    clattn_status (*tensor_upload)(clattn_context *context, const clattn_tensor *host,
                                   const clattn_tensor *device);
    clattn_status (*tensor_download)(clattn_context *context, const clattn_tensor *device,
                                     const clattn_tensor *host);
    clattn_status (*finish)(clattn_context *context,
                            const clattn_sync *sync); /* waits for the queue of `sync` */
    clattn_status (*pyramid_build)(clattn_context *context, const struct pyramid_job *job);
    clattn_status (*select)(clattn_context *context, const struct select_job *job);
    clattn_status (*forward)(clattn_context *context, const struct forward_job *job);
    /* Is a union that has parts quicker to attend to part by part? NULL: never. */
    bool (*prefers_parts)(const clattn_context *context, const struct forward_job *job);
    clattn_status (*gather)(clattn_context *context, const struct gather_job *job);
    clattn_status (*merge)(clattn_context *context, const struct merge_job *job);
    clattn_status (*quantize)(clattn_context *context, const struct quantize_job *job);
    clattn_status (*backward)(clattn_context *context, const struct backward_job *job);
    /* The decode cache; decode NULL: there is none. */
    clattn_status (*cache_append)(clattn_context *context, const struct cache_append_job *job);
    clattn_status (*cache_copy)(clattn_context *context, clattn_cache *cache, const struct cache_copy *copies,
                                int64_t count, const clattn_sync *sync);
    clattn_status (*cache_cut)(
        clattn_context *context, clattn_cache *cache, int32_t sequence,
        const clattn_sync *sync); /* a prefix was taken: the last leaf and its ancestors */
    clattn_status (*decode)(clattn_context *context, const struct decode_job *job);
    void (*cache_release)(clattn_context *context, clattn_cache *cache); /* what it keeps; may be NULL */
};

extern const struct backend backend_reference;
extern const struct backend backend_cpu;
extern const struct backend backend_opencl; /* only with HAVE_OPENCL */

/* Devices of a backend for clattn_device_get; false past the last. */
bool cpu_device(clattn_backend backend, clattn_device_info *info);
bool opencl_device(int index, clattn_device_info *info);

#endif
