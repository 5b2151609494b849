/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_H
#define CLATTN_H

/* clattn - block-sparse attention on any OpenCL device and on plain CPUs.
 *
 * Keys are cut into leaves of 64 tokens (16, 32 and 128 are possible). A selector chooses, for each query and each key
 * head, at most `topk` leaves; attention then runs over the chosen leaves only:
 *
 *     selector  ->  block list  ->  attention
 *
 * Three steps, each a function, and one call that does them all:
 *
 *     clattn_pyramid_build      means of the keys, leaf by leaf and level by level
 *     clattn_select             walks the pyramid and writes a block list per query token
 *     clattn_attention_forward  attention over a block list, from any source
 *     clattn_attention          the three of them
 *
 * A minimal program (host memory, best backend of the machine):
 *
 *     clattn_context *context;
 *     clattn_context_create(NULL, &context);
 *     clattn_tensor q = clattn_tensor_bthd(q_data, CLATTN_FLOAT32, batch, q_len, q_heads, dim);
 *     ... k, v, out alike ...
 *     clattn_status status = clattn_attention(context, NULL, NULL, &q, &k, &v, &out, NULL, NULL);
 *     clattn_context_release(context);
 *
 * Conventions. Shapes are written [batch][len][heads][dim]; strides and offsets are in elements; sizes are in bytes only
 * where the name says so. `q_heads = group * kv_heads`: query head h reads key head h / group. With causal attention query
 * row i stands at position t = i + kv_len - q_len and sees keys 0..t. Every function returns CLATTN_SUCCESS (0) or a
 * negative status; on an error of the arguments the outputs are untouched. The library keeps no global state, never
 * prints and never ends the process.
 *
 * Sources: "Block Sparse Attention with Log-Linear Complexity" (PISA; Tang, Qin, Pan, Li, Liu, 2026). */

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define CLATTN_API
#elif defined(__GNUC__)
#define CLATTN_API __attribute__((visibility("default")))
#else
#define CLATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- version -------------------------------------------------------------------------------------------------------- */

#define CLATTN_VERSION_MAJOR 0
#define CLATTN_VERSION_MINOR 1
#define CLATTN_VERSION_PATCH 0

/* Version of the library in use, as "major.minor.patch". */
CLATTN_API const char *clattn_version(void);

/* ---- errors --------------------------------------------------------------------------------------------------------- */

/* Result of every call. OpenCL's own codes (-1 to -1999) pass through unchanged; clattn's begin at -3001. */
typedef enum clattn_status {
    CLATTN_SUCCESS = 0,
    CLATTN_INVALID_ARGUMENT = -3001, /* NULL, or a value outside of its range */
    CLATTN_INVALID_SHAPE = -3002,    /* sizes that are not positive or do not fit each other */
    CLATTN_INVALID_STRIDE = -3003,   /* strides that are negative, or let an output overlap itself */
    CLATTN_INVALID_DTYPE = -3004,    /* element type not allowed for this tensor, or types that differ */
    CLATTN_INVALID_BLOCKS = -3005,   /* block index out of range, list of another shape */
    CLATTN_INVALID_SEQLENS = -3006,  /* cu_seqlens do not start at 0, descend, or do not end at the length */
    CLATTN_INVALID_MEMORY = -3007,   /* kind of memory that this context cannot use */
    CLATTN_SIZE_OVERFLOW = -3008,    /* a size or offset exceeds 63 bits */
    CLATTN_OUT_OF_MEMORY = -3009,
    CLATTN_NO_DEVICE = -3010,        /* the asked-for backend or device is not there */
    CLATTN_DEVICE_LIMIT = -3011,     /* the device cannot hold or run this size */
    CLATTN_FORKED = -3012,           /* an OpenCL context was used in a child process */
    CLATTN_INTERNAL = -3013,         /* a defect of the library or of a driver; the detail says more */
    CLATTN_OUT_OF_PAGES = -3014      /* a cache has no room for the tokens */
} clattn_status;

/* A short English text for a status, OpenCL's codes included; never NULL, never freed. */
CLATTN_API const char *clattn_strerror(clattn_status status);

/* ---- context -------------------------------------------------------------------------------------------------------- */

/* A backend on a device, with its programs, queue and threads. May be used from several threads at once. */
typedef struct clattn_context clattn_context;

typedef enum clattn_backend {
    CLATTN_BACKEND_AUTO = 0,      /* an OpenCL GPU that passes its self-test, else the CPU */
    CLATTN_BACKEND_REFERENCE = 1, /* double precision, slow, the oracle */
    CLATTN_BACKEND_CPU = 2,       /* OpenMP; plain C, AVX2 or AVX-512, chosen at run time */
    CLATTN_BACKEND_OPENCL = 3
} clattn_backend;

typedef enum clattn_log_level {
    CLATTN_LOG_NONE = 0,
    CLATTN_LOG_ERROR = 1,
    CLATTN_LOG_WARNING = 2,
    CLATTN_LOG_INFO = 3,
    CLATTN_LOG_DEBUG = 4
} clattn_log_level;

/* Receives one line without a newline. Called from any thread that uses the context, never concurrently. It must not
 * call a function with that context, which is locked meanwhile. */
typedef void (*clattn_log_function)(void *user, clattn_log_level level, const char *message);

/* What clattn_context_create makes. Set by CLATTN_CONTEXT_DESC_INIT; change only what differs. */
typedef struct clattn_context_desc {
    size_t size;            /* sizeof(clattn_context_desc), set by the initialiser */
    clattn_backend backend; /* default AUTO */
    const char *device;     /* OpenCL: index in decimal (as clattn_device_get counts OpenCL devices), or a part of the
                               device's or platform's name in any case; NULL: the first GPU, else the first device */
    const char *variant;    /* "c", "avx2", "avx512", "avx512vnni", "neon" (CPU), "portable", "subgroup", "mma",
                               "hopper" (OpenCL tier); NULL: the best that works. The variables CLATTN_CPU and
                               CLATTN_TIER limit the choice in the same words */
    int threads;            /* CPU: number of threads; 0: what OpenMP was told, else one a core; see clattn(7) */
    void *cl_context;       /* the caller's own cl_context, cl_device_id and cl_command_queue, or NULL; retained */
    void *cl_device;        /* needed with cl_context */
    void *cl_queue;         /* optional with cl_context; an in-order or out-of-order queue of that device */
    clattn_log_function log; /* NULL: no log, but the variable CLATTN_LOG=LEVEL sends it to standard error */
    void *log_user;
    clattn_log_level log_level; /* messages above are dropped; default WARNING */
    char *error;                /* optional buffer for the detail when creation fails, always terminated */
    size_t error_bytes;
    const char *tuning; /* OpenCL: the text of tuning records (clattn-tune(1)) that are used instead of all others; "":
                           none. NULL: see clattn_tuning */
} clattn_context_desc;

#define CLATTN_CONTEXT_DESC_INIT                                                                                     \
    {                                                                                                                \
        sizeof(clattn_context_desc), CLATTN_BACKEND_AUTO, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL,               \
            CLATTN_LOG_WARNING, NULL, 0, NULL                                                                        \
    }

/* Makes a context. desc NULL means CLATTN_CONTEXT_DESC_INIT.
 * Errors: INVALID_ARGUMENT, NO_DEVICE (the asked-for backend, device or variant is not there), OUT_OF_MEMORY, OpenCL's. */
CLATTN_API clattn_status clattn_context_create(const clattn_context_desc *desc, clattn_context **context);

/* Releases a context; NULL is allowed. Pyramids, block lists and tensors made with it must be released before. */
CLATTN_API void clattn_context_release(clattn_context *context);

/* Copies the detail of the context's last error (which argument, which value, what was expected; build logs) into
 * `text`, at most `bytes` with the terminating zero. Returns the full length without it; 0 when nothing failed yet. */
CLATTN_API size_t clattn_context_error(clattn_context *context, char *text, size_t bytes);

/* One backend on one device. */
typedef struct clattn_device_info {
    size_t size; /* sizeof(clattn_device_info), set by the caller */
    clattn_backend backend;
    int index;               /* among the devices of its backend */
    int is_gpu;
    char name[128];          /* processor or device */
    char platform[128];      /* OpenCL platform; empty otherwise */
    char driver[128];        /* OpenCL driver and version; empty otherwise */
    char variants[64];       /* what this machine can run, best last: "ref c avx2 avx512", "portable mma" */
    char variant[32];        /* what this context uses; empty from clattn_device_get */
    uint64_t memory_bytes;   /* of the device */
    uint64_t max_alloc_bytes;
    uint64_t local_bytes;    /* OpenCL local memory */
    int compute_units;       /* OpenCL compute units or processors */
    char quirks[512];        /* sections of the quirk table that apply, with their reasons; clattn(7) */
} clattn_device_info;

/* Describes device `number` = 0, 1 ...: the reference, the CPU, then every OpenCL device. A CPU without OpenCL has two.
 * Returns NO_DEVICE past the last one. Broken or absent OpenCL drivers only shorten the list.
 * CLATTN_PLATFORMS: comma-separated parts of platform names; only these platforms are used, "-part" leaves one out. */
CLATTN_API clattn_status clattn_device_get(int number, clattn_device_info *info);

/* The device that a context uses. */
CLATTN_API clattn_status clattn_context_device(clattn_context *context, clattn_device_info *info);

/* Where an OpenCL kernel's tile comes from: the library's rule for the kind of device, or a tuning record for this
 * device, kernel, dim and dtype. The first file that has one counts: that which the variable CLATTN_TUNING names ("none":
 * no records at all), the user's (clattn/tuning.json in XDG_DATA_HOME, else in ~/.local/share), the system's, those in
 * the library. Records change how fast something is computed, not what. */
typedef enum clattn_tuning {
    CLATTN_TUNING_DEFAULT = 0, /* the rule */
    CLATTN_TUNING_SHIPPED = 1, /* a record in the library */
    CLATTN_TUNING_SYSTEM = 2,
    CLATTN_TUNING_USER = 3,
    CLATTN_TUNING_ENVIRONMENT = 4,
    CLATTN_TUNING_CALLER = 5   /* clattn_context_desc.tuning */
} clattn_tuning;

/* Times and counts since the context was made. */
typedef struct clattn_stats {
    size_t size;                /* sizeof(clattn_stats), set by the caller */
    double build_seconds;       /* in OpenCL's compiler, or loading programs from the cache */
    double transfer_seconds;    /* copying between host and device */
    uint64_t programs_built;    /* compiled from source */
    uint64_t programs_loaded;   /* taken from the program cache */
    uint64_t kernels_enqueued;
    uint64_t tiles_by_tuning[6]; /* tiles chosen, by the clattn_tuning that they came from */
} clattn_stats;

CLATTN_API clattn_status clattn_context_stats(clattn_context *context, clattn_stats *stats);

/* ---- tensors -------------------------------------------------------------------------------------------------------- */

typedef enum clattn_dtype {
    CLATTN_FLOAT32 = 1,
    CLATTN_FLOAT16 = 2,
    CLATTN_BFLOAT16 = 3,
    CLATTN_INT8 = 4 /* k and v only, with clattn_attention_desc.k_scale and v_scale */
} clattn_dtype;

typedef enum clattn_memory {
    CLATTN_MEMORY_HOST = 0,   /* data is a pointer; OpenCL contexts copy to and from the device and block */
    CLATTN_MEMORY_CL_MEM = 1, /* data is a cl_mem of the context's cl_context */
    CLATTN_MEMORY_SVM = 2     /* data is a coarse- or fine-grained SVM pointer */
} clattn_memory;

/* A view of memory as [batch][len][heads][dim]. Element (b, i, h, d) is at
 *     offset + b*batch_stride + i*len_stride + h*head_stride + d      (elements; the innermost dimension is contiguous)
 * so [batch][heads][len][dim] is the same tensor with other strides. lse is a tensor with dim = 1. The view does not own
 * its memory. Inputs may have strides of 0 (broadcast). Packed sequences of different lengths lie one after another in
 * `len` with batch = 1 (clattn_attention_desc.cu_seqlens_q). */
typedef struct clattn_tensor {
    void *data;
    clattn_memory memory;
    clattn_dtype dtype;
    int64_t offset;
    int64_t batch, len, heads, dim;
    int64_t batch_stride, len_stride, head_stride;
} clattn_tensor;

/* Views of contiguous host memory laid out as [batch][len][heads][dim], or as [batch][heads][len][dim]. */
CLATTN_API clattn_tensor clattn_tensor_bthd(void *data, clattn_dtype dtype, int64_t batch, int64_t len, int64_t heads,
                                            int64_t dim);
CLATTN_API clattn_tensor clattn_tensor_bhtd(void *data, clattn_dtype dtype, int64_t batch, int64_t heads, int64_t len,
                                            int64_t dim);

/* Device memory without OpenCL calls of one's own. clattn_tensor_create gives contiguous [batch][len][heads][dim]
 * memory where the context computes (a cl_mem, or host memory on the CPU backends), with undefined content; release it
 * with clattn_tensor_release, which also clears the view. Upload and download copy between a host tensor and a tensor
 * of the context with the same shape and dtype, whatever their strides, and block.
 * Errors: INVALID_ARGUMENT, INVALID_SHAPE, INVALID_DTYPE, INVALID_MEMORY, OUT_OF_MEMORY, OpenCL's. */
CLATTN_API clattn_status clattn_tensor_create(clattn_context *context, clattn_dtype dtype, int64_t batch, int64_t len,
                                              int64_t heads, int64_t dim, clattn_tensor *tensor);
CLATTN_API clattn_status clattn_tensor_upload(clattn_context *context, const clattn_tensor *host, clattn_tensor *device);
CLATTN_API clattn_status clattn_tensor_download(clattn_context *context, const clattn_tensor *device, clattn_tensor *host);
CLATTN_API void clattn_tensor_release(clattn_context *context, clattn_tensor *tensor);

/* ---- descriptors ---------------------------------------------------------------------------------------------------- */

/* Take part in the caller's OpenCL queue. NULL in place of a clattn_sync: the call returns when its work is done.
 * With a clattn_sync and all tensors in OpenCL memory the call only enqueues. CPU backends: must be NULL. */
typedef struct clattn_sync {
    size_t size;            /* sizeof(clattn_sync), set by the initialiser */
    void *queue;            /* cl_command_queue of the context's device; NULL: the context's own */
    uint32_t wait_count;    /* events that must be complete before the first command */
    void *const *wait_list; /* [wait_count] cl_event */
    void **event;           /* cl_event of the last command, to be released by the caller; NULL: not asked for */
} clattn_sync;

#define CLATTN_SYNC_INIT {sizeof(clattn_sync), NULL, 0, NULL, NULL}

/* Softmax scale 1/sqrt(dim). Any finite scale may be given instead; 0 is 0. */
#define CLATTN_SCALE_DEFAULT ((float)1e39)

/* What attention means, for selection and attention alike.
 *
 *   z[i][j] = capped(scale * q[i].k[j]) + bias[h][j / block],   capped(x) = softcap * tanh(x / softcap), or x
 *
 * over the visible keys j: all of them, or j <= t (causal); with a window only t - window < j, and j < t + window when
 * not causal. Selection looks at scale, causal and the sequences only. */
typedef struct clattn_attention_desc {
    size_t size;      /* sizeof(clattn_attention_desc), set by the initialiser */
    float scale;      /* default CLATTN_SCALE_DEFAULT */
    int causal;       /* 1 (default): query row i sees keys 0 .. i + kv_len - q_len; 0: all keys */
    int64_t sequences; /* 0 (default): every batch entry is a sequence. Otherwise batch = 1 and `sequences` sequences */
    const int32_t *cu_seqlens_q; /* [sequences + 1] host: sequence s has query rows cu_seqlens_q[s] .. [s + 1] - 1; */
    const int32_t *cu_seqlens_k; /* starts at 0, never descends, ends at len; empty sequences are allowed */
    const int32_t *seqused_q;    /* key padding, with sequences = 0: [batch] host, the rows of q and the keys that batch */
    const int32_t *seqused_k;    /* entry b really has, 0 .. len; NULL: all. Rows of out and lse beyond are not written */
    float softcap;               /* 0 (default): none; else a positive bound on the logits */
    int64_t window;              /* sliding window in tokens, at least 1; 0 (default): none */
    const clattn_tensor *sink;   /* [1][1][q_heads][1] FLOAT32: a logit per head that joins the denominator, and so lse,
                                    without a value; NULL: none */
    const clattn_tensor *bias;   /* [batch or 1][blocks][q_heads][1] FLOAT32: added to the logits of a key block; of the
                                    list's blocks (64 keys without a list), at least as many as there are; NULL: none */
    const clattn_tensor *k_scale; /* [batch][leaves][kv_heads][1] FLOAT32, for INT8 keys and values: k[j] is stored as
                                     round(k / k_scale[j / scale_block]); leaves = ceil(kv_len / scale_block) */
    const clattn_tensor *v_scale;
    int32_t scale_block;          /* keys per scale, default 64 */
} clattn_attention_desc;

#define CLATTN_ATTENTION_DESC_INIT                                                                                   \
    {                                                                                                                \
        sizeof(clattn_attention_desc), CLATTN_SCALE_DEFAULT, 1, 0, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL,   \
            NULL, 64                                                                                                 \
    }

/* How leaves are chosen. The score of a node is taken over its children c (the keys themselves at level 1), for each
 * query head of the group, then summed over the group. Source: PISA sec. 3. */
typedef enum clattn_selector {
    CLATTN_SELECT_PISA = 0,      /* logsumexp_c of scale q.mean_c, walking the pyramid from the top (O(log N)) */
    CLATTN_SELECT_PISA1 = 1,     /* mean over the children's logits */
    CLATTN_SELECT_PISA2 = 2,     /* mean plus half the population variance */
    CLATTN_SELECT_FLAT_MEAN = 3, /* every leaf by q.mean (BSA; O(N)) */
    CLATTN_SELECT_FLAT_LSE = 4,  /* every leaf by its exact logsumexp (O(N), exact) */
    CLATTN_SELECT_DENSE = 5,     /* clattn_attention only: all keys, no list */
    CLATTN_SELECT_ROBUST = 6     /* the pyramid with bounds, a beam and a vote, for models that were not trained with a
                                    pyramid; see clattn_select_desc.beam */
} clattn_selector;

/* Scores of inner nodes for CLATTN_SELECT_ROBUST, per head. bound(n) = sum_d max(scale q_d min_d, scale q_d max_d) over
 * the element-wise minimum and maximum of the node's keys is at least the logit of each of them. */
typedef enum clattn_node_score {
    CLATTN_SCORE_LSE = 0,   /* logsumexp over the children's means, as PISA */
    CLATTN_SCORE_BOUND = 1, /* bound */
    CLATTN_SCORE_BLEND = 2, /* half of the two */
    CLATTN_SCORE_AHEAD = 3  /* logsumexp over the children c of (scale q.mean_c + bound(c)) / 2 */
} clattn_node_score;

typedef struct clattn_select_desc {
    size_t size;              /* sizeof(clattn_select_desc), set by the initialiser */
    clattn_selector selector; /* default PISA */
    int32_t topk;             /* leaves per list, 1 .. CLATTN_TOPK_MAX; default 8 */
    int32_t leaf;             /* tokens per leaf: 16, 32, 64 (default) or 128 */
    int32_t forced_first;     /* causal: the first leaves are always chosen (default 1) ... */
    int32_t forced_last;      /* ... and the last ones up to the query's own (default 2: previous and current); they count
                                 inside topk: when it is too small the query's own leaf wins, then the one before it,
                                 then the first. Not causal: nothing is forced */
    /* CLATTN_SELECT_ROBUST only. At level 1, `prefilter` leaves with the best logsumexp over their `parts` pieces p of
     * (scale q.mean_p + bound(p)) / 2 are kept, then the best topk by their exact logsumexp. */
    int32_t beam;            /* nodes kept at the levels above the leaves, topk when that is more; default 32 */
    clattn_node_score score; /* of these levels; default AHEAD */
    int32_t vote;            /* 1 (default): sum over the heads of the softmax of their scores over the level's candidates,
                                so that every head has one vote; 0: sum of the scores */
    int32_t prefilter;       /* default 32; 0: all leaves that the beam reaches are scored exactly */
    int32_t parts;           /* 1 or 4 (default) */
} clattn_select_desc;

#define CLATTN_TOPK_MAX 512
#define CLATTN_SELECT_DESC_INIT                                                                                      \
    {                                                                                                                \
        sizeof(clattn_select_desc), CLATTN_SELECT_PISA, 8, 64, 1, 2, 32, CLATTN_SCORE_AHEAD, 1, 32, 4                \
    }

/* ---- the simple call ------------------------------------------------------------------------------------------------ */

/* Block-sparse attention: builds the pyramid, selects, attends.
 *
 *   out[i] = sum_j p[i][j] v[j],   p[i] = softmax over the keys j of the chosen leaves of scale * q[i].k[j]
 *
 * attention, select  NULL: the defaults (causal, scale 1/sqrt(dim); PISA, 8 leaves of 64 tokens)
 * q    [batch][q_len][q_heads][dim]          FLOAT32, FLOAT16 or BFLOAT16; dim 1 .. 256
 * k    [batch][kv_len][kv_heads][dim]        same dtype; q_heads is a multiple of kv_heads
 * v    [batch][kv_len][kv_heads][dim_v]      same dtype; dim_v 1 .. 256
 * out  [batch][q_len][q_heads][dim_v]        same dtype, or FLOAT32
 * lse  [batch][q_len][q_heads][1] FLOAT32    natural log of the softmax denominator; may be NULL
 * sync               see clattn_sync; NULL: returns when out is complete
 * A row that sees no key gives out = 0, lse = -INFINITY.
 * Errors: every INVALID_ one, SIZE_OVERFLOW, OUT_OF_MEMORY, DEVICE_LIMIT, OpenCL's. Source: PISA sec. 3. */
CLATTN_API clattn_status clattn_attention(clattn_context *context, const clattn_attention_desc *attention,
                                          const clattn_select_desc *select, const clattn_tensor *q,
                                          const clattn_tensor *k, const clattn_tensor *v, clattn_tensor *out,
                                          clattn_tensor *lse, const clattn_sync *sync);

/* ---- key pyramid ---------------------------------------------------------------------------------------------------- */

/* Means of the keys of every (sequence, key head): level 1 over leaves of `leaf` tokens, each further level over two
 * neighbours, up to one node. float32. Building twice, or from a longer tensor with the same first keys, gives the same
 * bits for every node that is complete in both. */
typedef struct clattn_pyramid clattn_pyramid;

/* Builds the pyramid of k [batch][kv_len][kv_heads][dim]. Only the sequences of `attention` (NULL: the defaults) matter.
 * *pyramid NULL: a new one is made; otherwise it is rebuilt in place and must have been made for the same shape.
 * leaf 16, 32, 64 or 128. Errors: as clattn_attention. Source: PISA sec. 3.1. */
CLATTN_API clattn_status clattn_pyramid_build(clattn_context *context, const clattn_attention_desc *attention,
                                              int32_t leaf, const clattn_tensor *k, clattn_pyramid **pyramid,
                                              const clattn_sync *sync);

/* Builds what the selection of `select` needs (NULL: the defaults): the means over its leaf, and for ROBUST the minima and
 * maxima of every node and the means and bounds of the quarters of every leaf: in all nine times the memory of the means. */
CLATTN_API clattn_status clattn_pyramid_build_for(clattn_context *context, const clattn_attention_desc *attention,
                                                  const clattn_select_desc *select, const clattn_tensor *k,
                                                  clattn_pyramid **pyramid, const clattn_sync *sync);

/* Copies level `level` (1, 2 ...) of one sequence and key head to host memory: means [nodes][dim] float32; `nodes`
 * receives the number of nodes of that level. means may be NULL (only the count). Blocks. Past the top: INVALID_ARGUMENT. */
CLATTN_API clattn_status clattn_pyramid_read(clattn_context *context, const clattn_pyramid *pyramid, int64_t sequence,
                                             int64_t kv_head, int level, float *means, int64_t *nodes);

/* Releases a pyramid; NULL is allowed. Enqueued work that uses it may still be running. */
CLATTN_API void clattn_pyramid_release(clattn_context *context, clattn_pyramid *pyramid);

/* ---- block lists ---------------------------------------------------------------------------------------------------- */

/* For every list row and list head: at most topk block indices, ascending, -1 on the right. A list row stands for
 * q_block consecutive query rows of one sequence (1 for the selectors); sequence s begins at list row
 * sum over earlier sequences of ceil(q_len / q_block). Heads: 1 (shared by all), kv_heads or q_heads. */
typedef struct clattn_blocks clattn_blocks;

typedef struct clattn_blocks_desc {
    size_t size;            /* sizeof(clattn_blocks_desc), set by the initialiser */
    int32_t block;          /* keys per block: 16, 32, 64 (default) or 128 */
    int32_t q_block;        /* query rows per list row, 1 (default) or more */
    int64_t rows;           /* list rows in all */
    int32_t heads;          /* list heads */
    int32_t topk;           /* entries per list, padding included, at least 1 */
    const int64_t *starts;  /* [start_count] block boundaries of the caller, for example of documents or functions; NULL
                               (default): equal blocks. Block b begins at key starts[b] and ends where the next begins
                               or the sequence ends; `block` is ignored (0 when described). Ascending, from 0, in rows
                               of k's len dimension: all batch entries are cut alike; of packed sequences each begins a
                               block, and its blocks are numbered from there. Starts past the last key are ignored.
                               Copied; clattn_blocks_describe gives the list's own array */
    int64_t start_count;
} clattn_blocks_desc;

#define CLATTN_BLOCKS_DESC_INIT {sizeof(clattn_blocks_desc), 64, 1, 0, 1, 0, NULL, 0}

/* Makes a block list from the caller's indices [rows][heads][topk] in host memory, which is copied. Entries may stand in
 * any order; -1 entries are skipped; duplicates are removed; the stored list is ascending. Indices that no sequence can
 * have are found when the list is used: INVALID_BLOCKS, nothing is computed.
 * Errors: INVALID_ARGUMENT, INVALID_SHAPE, INVALID_BLOCKS (an index below -1), SIZE_OVERFLOW, OUT_OF_MEMORY, OpenCL's. */
CLATTN_API clattn_status clattn_blocks_create(clattn_context *context, const clattn_blocks_desc *desc,
                                              const int32_t *indices, clattn_blocks **blocks);

/* Chooses leaves for every query token and key head.
 * pyramid: of the same k, sequences and leaf; NULL: built for this call (not needed by FLAT_LSE).
 * *blocks NULL: a new list is made ([q rows][kv_heads][topk]); otherwise it is overwritten and must have that shape.
 * Order: higher score first; equal scores, lower index first; a NaN score ranks as -infinity. The result of a query does
 * not depend on later keys. Errors: as clattn_attention. Source: PISA sec. 3.2. */
CLATTN_API clattn_status clattn_select(clattn_context *context, const clattn_attention_desc *attention,
                                       const clattn_select_desc *select, const clattn_tensor *q, const clattn_tensor *k,
                                       const clattn_pyramid *pyramid, clattn_blocks **blocks, const clattn_sync *sync);

/* The shape of a list. desc->size must be set. */
CLATTN_API clattn_status clattn_blocks_describe(const clattn_blocks *blocks, clattn_blocks_desc *desc);

/* Copies indices [rows][heads][topk] and counts [rows][heads] to host memory; either may be NULL. Blocks. */
CLATTN_API clattn_status clattn_blocks_read(clattn_context *context, const clattn_blocks *blocks, int32_t *indices,
                                            int32_t *counts);

/* Lists of either a or b: for every query row and head the blocks that at least one of them has.
 *
 * a, b may differ in query rows per list row (the result has their greatest common divisor: a list per token with one per
 * 64 tokens gives one per token), in heads (1 with kv_heads or q_heads gives the greater; both counts must divide) and in
 * topk (the result has the longest list that occurs, at least 1). Their blocks must be the same: equal `block`, equal
 * `starts`.
 * attention, batch, q_len  the sequences that both were made for: their rows cannot be told from q_block alone. attention
 *                          NULL: batch sequences of q_len query rows; packed sequences: batch and q_len are ignored
 * A list for tiles (16 query rows and more) with one for few rows is also kept as two disjoint parts. Where the device is
 * faster so (doc/nvidia.md), attention computes each part with its own kernels and merges the results; they then differ
 * from those over an equal list of clattn_blocks_create by one more rounding to out's type.
 * Blocks until the lists are on the host. A selection (clattn_select) with a static pattern of block = leaf is the usual
 * pair. Errors: INVALID_ARGUMENT, INVALID_BLOCKS (blocks, heads or rows do not fit), SIZE_OVERFLOW, OUT_OF_MEMORY, OpenCL's. */
CLATTN_API clattn_status clattn_blocks_union(clattn_context *context, const clattn_attention_desc *attention,
                                             int64_t batch, int64_t q_len, const clattn_blocks *a,
                                             const clattn_blocks *b, clattn_blocks **result);

/* Releases a block list; NULL is allowed. Enqueued work that uses it may still be running. */
CLATTN_API void clattn_blocks_release(clattn_context *context, clattn_blocks *blocks);

/* ---- static patterns ------------------------------------------------------------------------------------------------ */

/* Block lists that do not depend on the data. A pattern is the union of parts; each part says which key blocks a query
 * that stands in key block c is connected to. With M key blocks 0 .. M-1 of a sequence, h the list head:
 *
 *   local w              |b - c| <= w
 *   log stride           b = c - D or b = c + D, for the distances D of the levels j = 0, 1 ...
 *     in blocks          D = 2^j + offset[h][j],                       j <= log2 M;  left out when D < 1
 *     in tokens          D = floor((2^j + offset[h][j]) / block),      j <= log2 N (N keys);  left out when D < 1
 *   anchors              b is in the list (as keys); every b when c is in the list (as queries)
 *   strided s            b - c is a multiple of s
 *   dilated w, s         b = c + e s, |e| <= w
 *   random r             r distinct blocks, see clattn_pattern_add_random
 *   big bird             local w, the first g blocks as keys and as queries, random r
 *
 * Blocks outside of 0 .. M-1 do not exist. Causal: only b <= c is kept, and M above may count blocks that row c cannot
 * see. Query row i stands at position t = i + kv_len - q_len, in the key block that holds key t. (Not causal: a negative
 * t counts as 0. Causal: such a row sees nothing and stands nowhere.)
 *
 * A list row is q_block query rows; they may stand in several key blocks when q_block > block, or when kv_len - q_len is
 * no multiple of block. Its list is the union over these key blocks c. So list rows with q_block = block and
 * q_len = kv_len have c = list row, and with q_block = 1 every token has exactly its own block's list.
 *
 * A pattern needs no context. Functions that take it as const may run at the same time in several threads.
 * Sources: fixed local / log-stride / anchor pattern; sparse transformers (strided); Longformer (dilated); BigBird. */
typedef struct clattn_pattern clattn_pattern;

/* Makes an empty pattern: every list is empty. Errors: INVALID_ARGUMENT, OUT_OF_MEMORY. */
CLATTN_API clattn_status clattn_pattern_create(clattn_pattern **pattern);

/* Releases a pattern; NULL is allowed. Lists made from it stay. */
CLATTN_API void clattn_pattern_release(clattn_pattern *pattern);

/* Copies the detail of the last error of this pattern's functions into `text`, at most `bytes` with the terminating
 * zero. Returns the full length without it; 0 when nothing failed yet. */
CLATTN_API size_t clattn_pattern_error(const clattn_pattern *pattern, char *text, size_t bytes);

/* Each of these joins a part to the pattern. window, global, random >= 0; stride >= 1.
 * Errors: INVALID_ARGUMENT, OUT_OF_MEMORY; on an error the pattern is unchanged. */
CLATTN_API clattn_status clattn_pattern_add_local(clattn_pattern *pattern, int32_t window);
CLATTN_API clattn_status clattn_pattern_add_strided(clattn_pattern *pattern, int32_t stride);
CLATTN_API clattn_status clattn_pattern_add_dilated(clattn_pattern *pattern, int32_t window, int32_t stride);

typedef enum clattn_log_stride {
    CLATTN_LOG_STRIDE_BLOCKS = 0, /* distances of 2^j blocks */
    CLATTN_LOG_STRIDE_TOKENS = 1  /* distances of 2^j tokens; those below one block are left out */
} clattn_log_stride;

/* Log stride. offsets [heads][levels] in blocks or tokens, as the form; copied. NULL (heads and levels 0): none. Levels
 * that the array does not have are not shifted. heads is 1 (all alike) or the number of list heads.
 * With block boundaries of the caller, `in tokens` means the block that holds the token 2^j + offset before (after) the
 * last (first) token of block c; with equal blocks that is the same as the formula above. */
CLATTN_API clattn_status clattn_pattern_add_log_stride(clattn_pattern *pattern, clattn_log_stride form,
                                                       const int32_t *offsets, int32_t heads, int32_t levels);

#define CLATTN_ANCHOR_FIRST 0          /* block 0 */
#define CLATTN_ANCHOR_LAST (-1)        /* block M - 1; -2 is the one before, and so on */
#define CLATTN_ANCHOR_MIDDLE INT32_MIN /* block M / 2 */

#define CLATTN_ANCHOR_KEYS 1    /* every query sees the anchors */
#define CLATTN_ANCHOR_QUERIES 2 /* the queries in the anchors see everything (causal: everything up to themselves) */

/* Anchors [count]: block numbers, negative ones counted from the end, or the constants above; copied. Those that a
 * sequence does not have are left out. roles: CLATTN_ANCHOR_KEYS, CLATTN_ANCHOR_QUERIES or both (global blocks).
 * Anchors as queries make lists of M entries, and every list has room for the longest: rows * heads * M numbers. */
CLATTN_API clattn_status clattn_pattern_add_anchors(clattn_pattern *pattern, const int32_t *anchors, int32_t count,
                                                    int roles);

/* random distinct blocks for every (h, c), drawn from 0 .. L-1 (L = c + 1 when causal, else M), all of them when there
 * are fewer. The same on every machine:
 *   next(x)   SplitMix64 (Steele, Lea, Flood 2014): x += 0x9e3779b97f4a7c15; z = x; z = (z ^ z >> 30) *
 *             0xbf58476d1ce4e5b9; z = (z ^ z >> 27) * 0x94d049bb133111eb; returns z ^ z >> 31
 *   state     x = next(next(seed) ^ h) ^ c, where next() is applied to a copy of its argument
 *   below(n)  p = (next(x) >> 32) * n, drawn again while p mod 2^32 < 2^32 mod n; returns p >> 32 (Lemire 2019)
 *   draws     for j = L - random .. L - 1: t = below(j + 1); take t, or j when t was taken already (Floyd 1987) */
CLATTN_API clattn_status clattn_pattern_add_random(clattn_pattern *pattern, int32_t random, uint64_t seed);

/* local `window`, the first `global` blocks as keys and as queries, and `random` blocks as above, but drawn from those
 * that are neither in the local window nor global: the k-th of them, counted from 0, where a draw gives k. */
CLATTN_API clattn_status clattn_pattern_add_bigbird(clattn_pattern *pattern, int32_t window, int32_t global,
                                                    int32_t random, uint64_t seed);

/* Joins all parts of `other` (copied), not its patterns of single heads. */
CLATTN_API clattn_status clattn_pattern_add(clattn_pattern *pattern, const clattn_pattern *other);

/* Gives list head `head` a pattern of its own, in place of the parts above: all parts of `own` (copied). */
CLATTN_API clattn_status clattn_pattern_set_head(clattn_pattern *pattern, int32_t head, const clattn_pattern *own);

/* Makes a pattern from text:
 *
 *   text     = pattern { ";" heads "=" pattern }      patterns of single heads after the one of all others
 *   heads    = number [ "-" number ]
 *   pattern  = part { "+" part }
 *   part     = "local" [ ":" w ]                      w 1 when not given
 *            | "log-stride" [ ":" form ] [ ":" offset { "," offset } ]    form: blocks (default) or tokens
 *            | "anchors:" anchor { "," anchor }       as keys
 *            | "anchor-queries:" anchor { "," anchor }
 *            | "global:" anchor { "," anchor }        as keys and queries
 *            | "strided:" s  | "dilated:" w "," s  | "random:" r [ "," seed ]
 *            | "bigbird:" w "," g "," r [ "," seed ]  seed 0 when not given
 *            | "dense"                                everything
 *   anchor   = "first" | "middle" | "last" | number (negative: from the end)
 *
 * Blanks around the signs are allowed. Example: local:1+log-stride+anchors:first,middle,last
 * error [error_bytes], may be NULL: receives what is wrong and at which column, always terminated.
 * Errors: INVALID_ARGUMENT, OUT_OF_MEMORY. */
CLATTN_API clattn_status clattn_pattern_parse(const char *text, clattn_pattern **pattern, char *error,
                                              size_t error_bytes);

/* What a pattern is applied to. */
typedef struct clattn_pattern_shape {
    size_t size;                  /* sizeof(clattn_pattern_shape), set by the initialiser */
    int64_t batch, q_len, kv_len; /* sequences, query rows and keys of each (batch default 1), padding included; ignored
                                     with packed sequences, which attention->cu_seqlens_q and _k describe */
    int32_t heads;                /* list heads: 1 (default), kv_heads or q_heads */
    int32_t block;                /* keys per block: 16, 32, 64 (default) or 128 */
    int32_t q_block;              /* query rows per list row, default 64 */
    const int64_t *starts;        /* block boundaries of the caller, see clattn_blocks_desc; NULL: equal blocks */
    int64_t start_count;
} clattn_pattern_shape;

#define CLATTN_PATTERN_SHAPE_INIT {sizeof(clattn_pattern_shape), 1, 0, 0, 1, 64, 64, NULL, 0}

/* Makes the block list of a pattern: topk is the longest list (at least 1), see clattn_blocks.
 * attention NULL: causal. Of attention only causal, the sequences and seqused_q, seqused_k matter; list rows of padding
 * are empty, and a window, bias and so on come on top when the list is used.
 * Errors: INVALID_ARGUMENT, INVALID_SHAPE (also: the pattern has a head that shape.heads does not), INVALID_SEQLENS,
 * INVALID_BLOCKS (starts), SIZE_OVERFLOW, OUT_OF_MEMORY, OpenCL's. The detail is the context's. */
CLATTN_API clattn_status clattn_pattern_blocks(clattn_context *context, const clattn_pattern *pattern,
                                               const clattn_attention_desc *attention,
                                               const clattn_pattern_shape *shape, clattn_blocks **blocks);

/* One list without a context: ascending blocks of list row `row` (counted over all sequences) and list head `head`.
 * count receives their number; indices [capacity] the first `capacity` of them, NULL: none. Errors: as above. */
CLATTN_API clattn_status clattn_pattern_list(const clattn_pattern *pattern, const clattn_attention_desc *attention,
                                             const clattn_pattern_shape *shape, int64_t row, int32_t head,
                                             int32_t *indices, int64_t capacity, int64_t *count);

/* Sums over all sequences and list heads. */
typedef struct clattn_pattern_stats {
    size_t size;         /* sizeof(clattn_pattern_stats), set by the caller */
    int64_t lists;       /* list rows times list heads */
    int64_t blocks;      /* entries of all lists */
    int64_t blocks_min;  /* entries of the shortest and of the longest list */
    int64_t blocks_max;
    double blocks_mean;
    int64_t blocks_all;  /* entries that listing every block a list row can see would have */
    int64_t connections; /* pairs of a query row and a key that attention over the lists joins */
    int64_t pairs;       /* such pairs in dense attention */
    double density;      /* connections / pairs; 0 when there are none */
    int64_t unconnected; /* query rows that see keys in dense attention but none here */
} clattn_pattern_stats;

/* Counts without making lists: N = 2^20 takes well under a second, O(number of connected pairs of blocks) and O(M)
 * memory. Errors: as clattn_pattern_blocks, but without a context; the detail is clattn_pattern_error's. */
CLATTN_API clattn_status clattn_pattern_count(const clattn_pattern *pattern, const clattn_attention_desc *attention,
                                              const clattn_pattern_shape *shape, clattn_pattern_stats *stats);

/* Which list rows must be computed again after sequences grew (or were cut)?
 *
 * `after` describes the sequences as they are now, `before` as they were: as many, of the same heads, block and q_block,
 * with the same kv_len - q_len, both causal or both not. changed [list rows of `after`] (may be NULL) receives 1 where a
 * list row has query rows that were not there before, or where one of its old query rows, in any head, now sees other
 * keys than before; 0 where every query row sees exactly the same keys. count (may be NULL) receives the number of ones.
 * The outputs of rows marked 0 stay valid as long as their keys and values do.
 * A causal pattern without anchors counted from the middle or the end changes only from the last list row on.
 * Errors: as clattn_pattern_count. */
CLATTN_API clattn_status clattn_pattern_changed(const clattn_pattern *pattern,
                                                const clattn_attention_desc *attention_before,
                                                const clattn_pattern_shape *before,
                                                const clattn_attention_desc *attention_after,
                                                const clattn_pattern_shape *after, uint8_t *changed, int64_t *count);

/* ---- attention over a block list ------------------------------------------------------------------------------------ */

/* Attention over listed blocks, forward.
 *
 *   out[i] = sum_j p[i][j] v[j],   p = softmax over the listed keys j (j <= t when causal) of scale * q[i].k[j]
 *   lse[i] = log sum_j exp(scale * q[i].k[j])
 *
 * blocks  NULL: all keys (dense attention). Otherwise a list whose rows and heads fit q and k
 * q, k, v, out, lse, sync: as clattn_attention; any strides, innermost contiguous
 * A row with no key gives out = 0, lse = -INFINITY.
 * Errors: as clattn_attention, and INVALID_BLOCKS. Source: PISA sec. 3.3. */
CLATTN_API clattn_status clattn_attention_forward(clattn_context *context, const clattn_attention_desc *attention,
                                                  const clattn_tensor *q, const clattn_tensor *k, const clattn_tensor *v,
                                                  const clattn_blocks *blocks, clattn_tensor *out, clattn_tensor *lse,
                                                  const clattn_sync *sync);

/* Merges the results of attention over two disjoint sets of keys into the result over both.
 *
 *   lse = log(exp lse0 + exp lse1),   out = out0 exp(lse0 - lse) + out1 exp(lse1 - lse)
 *
 * out0, out1 [batch][len][heads][dim]   of one floating dtype; out: the same, or FLOAT32; dim 1 or more
 * lse0, lse1, lse [batch][len][heads][1] FLOAT32; lse may be NULL
 * A part whose lse is -INFINITY is empty and its out is not looked at; two empty parts give out = 0, lse = -INFINITY.
 * out and lse may be inputs: the same view, not one that overlaps otherwise. sync: as clattn_attention.
 * With a sink, only one of the parts may have it, or it counts twice; in rows where that part has no key it is left out.
 * Errors: as clattn_attention. */
CLATTN_API clattn_status clattn_attention_merge(clattn_context *context, const clattn_tensor *out0,
                                                const clattn_tensor *lse0, const clattn_tensor *out1,
                                                const clattn_tensor *lse1, clattn_tensor *out, clattn_tensor *lse,
                                                const clattn_sync *sync);

/* How keys or values become int8. */
typedef struct clattn_quantize_desc {
    size_t size;         /* sizeof(clattn_quantize_desc), set by the initialiser */
    int32_t scale_block; /* rows per leaf, each with an entry of scales; default 64 */
    int32_t far_group;   /* far leaves that share one scale, which all of them hold; default 1: none do */
    int32_t near_first;  /* leaves at the begin (default 1) and at the end (default 2) that are not far: they keep */
    int32_t near_last;   /* scales of their own */
} clattn_quantize_desc;

#define CLATTN_QUANTIZE_DESC_INIT {sizeof(clattn_quantize_desc), 64, 1, 1, 2}

/* Quantises keys or values for clattn_attention_desc.k_scale and v_scale.
 *
 *   scale = max |x| / 127 over the leaf (or its group),   codes = x / scale, rounded to an integer of -127 .. 127
 *
 * desc   NULL: CLATTN_QUANTIZE_DESC_INIT
 * x      [batch][len][heads][dim] FLOAT32, FLOAT16 or BFLOAT16
 * codes  [batch][len][heads][dim] INT8
 * scales [batch][ceil(len / scale_block)][heads][1] FLOAT32
 * |x - scale * code| <= scale / 2, but for float32's rounding. So a logit moves by at most |softmax scale| * k_scale / 2 *
 * sum_d |q_d|, and an average of values by at most v_scale / 2. NaN becomes 0, infinity the greatest code.
 * Errors: as clattn_attention. */
CLATTN_API clattn_status clattn_quantize(clattn_context *context, const clattn_quantize_desc *desc,
                                         const clattn_tensor *x, clattn_tensor *codes, clattn_tensor *scales,
                                         const clattn_sync *sync);

/* ---- gradients ------------------------------------------------------------------------------------------------------ */

/* What clattn_attention_backward reads besides the forward pass and what it writes. */
typedef struct clattn_gradients {
    size_t size;               /* sizeof(clattn_gradients), set by the initialiser */
    const clattn_tensor *dout; /* [batch][q_len][q_heads][dim_v]; dtype of q or FLOAT32 */
    const clattn_tensor *dlse; /* [batch][q_len][q_heads][1] FLOAT32, gradient that arrives at lse; NULL: none */
    clattn_tensor *dq;         /* shapes of q, k and v; dtype of q or FLOAT32; NULL: not computed. dk and dv are */
    clattn_tensor *dk;         /* computed together: both or none */
    clattn_tensor *dv;
    clattn_tensor *dsink;      /* shape of sink, NULL: not computed */
    clattn_tensor *dbias;      /* shape of bias, NULL: not computed */
    int accumulate;            /* 0 (default): gradients are overwritten; 1: added to what is there */
    float compensation;        /* 0 (default): exact gradients. c > 0: for every query row, a key block that is visible but
                                  not listed receives c times what the row gives to the nearest listed block on its left,
                                  key by key, in dk and dv: a heuristic of log-stride training (c = 0.3) that is not the
                                  gradient of any loss */
} clattn_gradients;

#define CLATTN_GRADIENTS_INIT {sizeof(clattn_gradients), NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0}

/* Attention over listed blocks, backward. The list is constant.
 *
 *   P = exp(z - lse),  D = sum_d dout*out - dlse,  dS = P (dout.v_j - D),  dx = dS * d capped(x) / dx
 *   dv_j = sum P dout,  dq = scale * sum dx k_j,  dk_j = scale * sum dx q     sums over the heads of the group
 *   dbias = sum dS over the block's keys,  dsink = - sum exp(sink - lse) D
 *
 * q, k, v, blocks, out, lse: as in the forward call and its results; lse is needed
 * Keys that no query lists get zero; rows without keys get dq = 0. Deterministic: the same bits on every run and for any
 * number of threads. INT8 keys have no gradient: INVALID_DTYPE.
 * Extra memory: at most 12 bytes a listed (query row, block) pair and one float32 a (query row, head); with compensation
 * on the CPU also that of dk and dv in float32.
 * Errors: as clattn_attention_forward. Source: PISA sec. 3.3. */
CLATTN_API clattn_status clattn_attention_backward(clattn_context *context, const clattn_attention_desc *attention,
                                                   const clattn_tensor *q, const clattn_tensor *k, const clattn_tensor *v,
                                                   const clattn_blocks *blocks, const clattn_tensor *out,
                                                   const clattn_tensor *lse, const clattn_gradients *gradients,
                                                   const clattn_sync *sync);

/* ---- decoding ------------------------------------------------------------------------------------------------------- */

/* Keys, values and the key pyramid of several sequences that grow. A decode step is append, select, attend:
 *
 *     clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
 *     desc.sequences = 4, desc.tokens = 65536, desc.kv_heads = 8, desc.dim = desc.dim_v = 128;
 *     clattn_cache *cache;
 *     clattn_cache_create(context, &desc, &cache);
 *     ... prefill: clattn_decode with many tokens a sequence, then one token a step and sequence:
 *     const int32_t sequences[2] = {0, 3}, lens[2] = {1, 1};
 *     clattn_decode(context, cache, NULL, NULL, 2, sequences, lens, &q, &k, &v, &out, NULL, NULL, NULL);
 *
 * What a sequence holds does not depend on how its tokens arrived: one by one or many at a time gives the same bits in
 * keys, values and pyramid, and so do truncating to any length and appending again, and sharing a prefix. Appending a
 * token touches its leaf and the leaf's ancestors, O(dim log N) additions. A token that is decoded selects what the
 * same row of a prefill selects.
 *
 * INT8: clattn quantises what is appended, each token with a scale of its own for every key head, max |x| / 127. So the
 * codes of a token depend on no other token. The pyramid sums the keys as they were given, before they were quantised; when
 * truncating or sharing cuts a leaf in two, its sums are taken again from the codes, because nothing else is left.
 *
 * A cache may be used by one call at a time. Calls for different caches of a context may run at the same time. */
typedef struct clattn_cache clattn_cache;

typedef struct clattn_cache_desc {
    size_t size;           /* sizeof(clattn_cache_desc), set by the initialiser */
    int32_t sequences;     /* that the cache has room for, all empty at first; default 1 */
    int64_t tokens;        /* that one sequence can have, at least 1 */
    int32_t kv_heads, dim, dim_v; /* of keys and values; dim and dim_v 1 .. 256 */
    clattn_dtype dtype;    /* of keys and values: FLOAT16 (default), BFLOAT16, FLOAT32 or INT8 */
    int32_t leaf;          /* tokens per leaf: 16, 32, 64 (default) or 128 */
    int32_t page_size;     /* 0 (default): every sequence has room for all its tokens in one piece. 16 .. 256: tokens lie in
                              pages of that size, taken from `pages` as sequences grow; any size goes with any leaf */
    int64_t pages;         /* of all sequences together; 0 (default): enough for `tokens` tokens in each of them */
    int32_t bounds;        /* 1: minima and maxima for CLATTN_SELECT_ROBUST too; default 0 */
    void *storage;         /* memory of the caller, at least clattn_cache_bytes() of it, which has to outlive the cache: a
                              pointer (CPU contexts; a multiple of 64) or a cl_mem; NULL (default): the library's own */
    size_t storage_bytes;
} clattn_cache_desc;

#define CLATTN_CACHE_DESC_INIT {sizeof(clattn_cache_desc), 1, 0, 1, 0, 0, CLATTN_FLOAT16, 64, 0, 0, 0, NULL, 0}

/* Bytes of memory that a cache needs where the context computes; desc->storage is not looked at. Host memory of a few
 * bytes a page and sequence comes on top. Errors: as clattn_cache_create. */
CLATTN_API clattn_status clattn_cache_bytes(clattn_context *context, const clattn_cache_desc *desc, size_t *bytes);

/* Makes a cache of empty sequences 0 .. desc->sequences - 1.
 * Errors: INVALID_ARGUMENT, INVALID_SHAPE, INVALID_DTYPE, SIZE_OVERFLOW, OUT_OF_MEMORY, OpenCL's. */
CLATTN_API clattn_status clattn_cache_create(clattn_context *context, const clattn_cache_desc *desc,
                                             clattn_cache **cache);

/* Releases a cache; NULL is allowed. Enqueued work that uses it may still be running, unless its storage is the caller's. */
CLATTN_API void clattn_cache_release(clattn_context *context, clattn_cache *cache);

/* Tokens of a sequence; -1 when there is no such sequence. */
CLATTN_API int64_t clattn_cache_length(const clattn_cache *cache, int32_t sequence);

/* What a cache has and uses. */
typedef struct clattn_cache_info {
    size_t size;               /* sizeof(clattn_cache_info), set by the caller */
    uint64_t bytes;            /* clattn_cache_bytes(), of which ... */
    uint64_t key_value_bytes;  /* keys and values, with the scales of INT8, */
    uint64_t statistics_bytes; /* and the pyramid */
    int64_t page_size;         /* tokens of a page; contiguous sequences: desc.tokens, each is one page */
    int64_t pages, pages_free;
    uint64_t tokens_appended;  /* since the cache was made ... */
    uint64_t nodes_updated;    /* ... pyramid nodes that were written for a key head, at all levels, ... */
    uint64_t rows_summed;      /* ... and keys of a head that were added to one */
    double select_seconds, attend_seconds; /* of clattn_decode's threads, CPU contexts only; else 0 */
} clattn_cache_info;

CLATTN_API clattn_status clattn_cache_describe(const clattn_cache *cache, clattn_cache_info *info);

/* Appends lens[s] tokens to sequence sequences[s], for s = 0 .. count - 1.
 *
 * sequences, lens [count] host; no sequence twice; a length may be 0
 * k [1][rows][kv_heads][dim], v [1][rows][kv_heads][dim_v]: rows = sum of lens, sequence after sequence; any strides.
 *      dtype of the cache; any floating one when that is INT8
 * sync: as clattn_attention; several calls for one cache need an order (one in-order queue, or events).
 * When pages or tokens do not suffice: CLATTN_OUT_OF_PAGES, and nothing is appended to any sequence.
 * Errors: as clattn_attention, OUT_OF_PAGES; the cache is unchanged. */
CLATTN_API clattn_status clattn_cache_append(clattn_context *context, clattn_cache *cache, int64_t count,
                                             const int32_t *sequences, const int32_t *lens, const clattn_tensor *k,
                                             const clattn_tensor *v, const clattn_sync *sync);

/* One step of a batch: appends, selects for the new tokens and attends with them.
 *
 *   out[i] = sum_j p[i][j] v[j],   p[i] = softmax over the keys j of the chosen leaves of scale * q[i].k[j]
 *
 * attention  scale, causal, window, softcap and sink as in clattn_attention; its other fields must be 0 or NULL. With the
 *            causal rule the query row of a token sees that token and those before it, new ones included. NULL: the defaults
 * select     any selector, DENSE included (all keys, no list); leaf is the cache's. NULL: the defaults with that leaf
 * sequences, lens, k, v: as clattn_cache_append. k and v NULL: nothing is appended, the rows of q are the last lens[s]
 *            tokens of each sequence; rows past its begin see nothing
 * q          [1][rows][q_heads][dim]     dtype of k and v; any floating one with INT8 and k NULL
 * out        [1][rows][q_heads][dim_v]   same dtype, or FLOAT32
 * lse        [1][rows][q_heads][1] FLOAT32; may be NULL
 * blocks     NULL, or receives the lists [rows][kv_heads][topk], as in clattn_select: *blocks NULL: a new one is made
 * A row that sees no key gives out = 0, lse = -INFINITY. Work per token: O(log N) for PISA, PISA1, PISA2 and ROBUST.
 * Errors: as clattn_cache_append and clattn_attention; the cache is unchanged. Source: PISA sec. 3. */
CLATTN_API clattn_status clattn_decode(clattn_context *context, clattn_cache *cache,
                                       const clattn_attention_desc *attention, const clattn_select_desc *select,
                                       int64_t count, const int32_t *sequences, const int32_t *lens,
                                       const clattn_tensor *q, const clattn_tensor *k, const clattn_tensor *v,
                                       clattn_tensor *out, clattn_tensor *lse, clattn_blocks **blocks,
                                       const clattn_sync *sync);

/* Cuts a sequence to its first `length` tokens, 0 .. its length; pages without a token go back. 0 frees the sequence. */
CLATTN_API clattn_status clattn_cache_truncate(clattn_context *context, clattn_cache *cache, int32_t sequence,
                                               int64_t length, const clattn_sync *sync);

/* Makes the empty sequence `to` a copy of the first `length` tokens of `from`. Pages are shared until one of the two
 * writes into a page: it then takes a free page and copies this one. (A contiguous sequence is one page.)
 * Errors: INVALID_ARGUMENT (to is not empty; length is not 0 .. the length of from). */
CLATTN_API clattn_status clattn_cache_share(clattn_context *context, clattn_cache *cache, int32_t from, int32_t to,
                                            int64_t length, const clattn_sync *sync);

/* As clattn_pyramid_read: the means of one level of a sequence and key head. */
CLATTN_API clattn_status clattn_cache_read(clattn_context *context, const clattn_cache *cache, int32_t sequence,
                                           int64_t kv_head, int level, float *means, int64_t *nodes);

/* ---- neighborhood attention ----------------------------------------------------------------------------------------- */

/* Neighborhood attention over a layout of one, two or three axes: tokens are in row-major order, the first axis slowest,
 * so a tensor is [batch][product of lengths][heads][dim]. Along each axis, with r = x mod dilation, i = x / dilation and
 * Lr coordinates in the class of r:
 *
 *   not causal: lead = min(i/stride*stride + stride/2, Lr-1);     lo = clamp(lead - window/2, 0, Lr-window); hi = lo + window
 *   causal:     lead = min(i/stride*stride + stride - 1, Lr-1);   lo = max(lead - window + 1, 0);            hi = i + 1
 *
 * A query attends to a key iff on every axis both have the same r and lo <= i of the key < hi. Windows shift at the
 * borders and never shrink; window = length without causality is full attention.
 * Source: Generalized Neighborhood Attention (NATTEN). */
typedef struct clattn_neighborhood_desc {
    size_t size;           /* sizeof(clattn_neighborhood_desc), set by the initialiser */
    int32_t axes;          /* 1, 2 or 3 */
    int32_t length[3];     /* at least 2 */
    int32_t window[3];     /* at least 2, window * dilation <= length */
    int32_t stride[3];     /* 1 .. window; default 1 */
    int32_t dilation[3];   /* default 1 */
    int32_t causal[3];     /* default 0 */
    int32_t q_tile[3];     /* tile shapes; all 0 (default): the best shape is searched. Tokens of a key tile: 16, 32, 64 */
    int32_t kv_tile[3];    /* or 128; of a query tile: 1 to 256 */
} clattn_neighborhood_desc;

#define CLATTN_NEIGHBORHOOD_DESC_INIT                                                                                \
    {                                                                                                                \
        sizeof(clattn_neighborhood_desc), 1, {0, 0, 0}, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {0, 0, 0},       \
        {                                                                                                            \
            0, 0, 0                                                                                                  \
        }                                                                                                            \
    }

/* Which keys a query sees along one axis, and which queries see a key: coordinates first, first + dilation ... before
 * end. Pure arithmetic. Errors: INVALID_ARGUMENT (the desc breaks a rule, axis or coordinate out of range). */
CLATTN_API clattn_status clattn_neighborhood_keys(const clattn_neighborhood_desc *desc, int axis, int32_t query,
                                                  int32_t *first, int32_t *end);
CLATTN_API clattn_status clattn_neighborhood_queries(const clattn_neighborhood_desc *desc, int axis, int32_t key,
                                                     int32_t *first, int32_t *end);

/* What tiles make of a neighborhood. */
typedef struct clattn_neighborhood_analysis {
    size_t size;            /* sizeof(clattn_neighborhood_analysis), set by the caller */
    int32_t q_tile[3], kv_tile[3];
    double tokens;
    double connections;     /* (query, key) pairs that attend */
    double sparsity;        /* 1 - connections / tokens^2 */
    double ideal_speedup;   /* tokens^2 / connections */
    double tile_pairs;      /* tiles visited */
    double bound_speedup;   /* prod ceil(length/q_tile) * prod ceil(length/kv_tile) / tile_pairs */
    double waste;           /* share of the computed pairs that are masked out */
    int perfect;            /* block-sparse without any mask: every query of a tile has the same window, made of whole tiles */
} clattn_neighborhood_analysis;

/* Analyses a desc with its tiles; where they are 0, the best ones are searched (the fewest wasted pairs, then
 * perfect). Cost: microseconds a tile shape; the tokens are not visited. */
CLATTN_API clattn_status clattn_neighborhood_analyse(const clattn_neighborhood_desc *desc,
                                                     clattn_neighborhood_analysis *analysis);

/* A plan: permutation of tokens into tiles, block lists, element masks. May be used for any number of calls. */
typedef struct clattn_neighborhood clattn_neighborhood;

/* extra_len: keys besides those of the layout that every query sees, 0 for none.
 * Errors: INVALID_ARGUMENT (names the rule), OUT_OF_MEMORY, OpenCL's. */
CLATTN_API clattn_status clattn_neighborhood_create(clattn_context *context, const clattn_neighborhood_desc *desc,
                                                    int64_t extra_len, clattn_neighborhood **neighborhood);
CLATTN_API void clattn_neighborhood_release(clattn_context *context, clattn_neighborhood *neighborhood);

typedef enum clattn_tiles { CLATTN_TILES_Q = 0, CLATTN_TILES_KV = 1 } clattn_tiles;

/* Rows of a tensor in tile order; more than the tokens where tiles reach over an end. */
CLATTN_API int64_t clattn_neighborhood_rows(const clattn_neighborhood *neighborhood, clattn_tiles tiles);

/* Tokens [batch][tokens][heads][dim] into tile order [batch][rows][heads][dim] (rows without a token become zero), and
 * back, bit for bit. Same dtype, any strides. */
CLATTN_API clattn_status clattn_neighborhood_permute(clattn_context *context, const clattn_neighborhood *neighborhood,
                                                     clattn_tiles tiles, const clattn_tensor *from, clattn_tensor *to,
                                                     const clattn_sync *sync);
CLATTN_API clattn_status clattn_neighborhood_unpermute(clattn_context *context, const clattn_neighborhood *neighborhood,
                                                       clattn_tiles tiles, const clattn_tensor *from, clattn_tensor *to,
                                                       const clattn_sync *sync);

/* Attention of every token to its neighborhood and to the extra keys, one softmax over both.
 *
 * scale  CLATTN_SCALE_DEFAULT or a finite number
 * q, out, lse [batch][tokens][q_heads][...], k, v [batch][tokens][kv_heads][...]   as clattn_attention; lse may be NULL
 * extra_k, extra_v [batch][extra_len][kv_heads][...]                               NULL exactly when extra_len is 0 */
CLATTN_API clattn_status clattn_neighborhood_forward(clattn_context *context, const clattn_neighborhood *neighborhood,
                                                     float scale, const clattn_tensor *q, const clattn_tensor *k,
                                                     const clattn_tensor *v, const clattn_tensor *extra_k,
                                                     const clattn_tensor *extra_v, clattn_tensor *out,
                                                     clattn_tensor *lse, const clattn_sync *sync);

/* Its gradients. dextra_k, dextra_v: NULL exactly when extra_len is 0. gradients: dout, dlse, dq, dk, dv as in
 * clattn_attention_backward, all three results given; accumulate, compensation, dsink and dbias must be 0. */
CLATTN_API clattn_status clattn_neighborhood_backward(clattn_context *context, const clattn_neighborhood *neighborhood,
                                                      float scale, const clattn_tensor *q, const clattn_tensor *k,
                                                      const clattn_tensor *v, const clattn_tensor *extra_k,
                                                      const clattn_tensor *extra_v, const clattn_tensor *out,
                                                      const clattn_tensor *lse, const clattn_gradients *gradients,
                                                      clattn_tensor *dextra_k, clattn_tensor *dextra_v,
                                                      const clattn_sync *sync);

#ifdef __cplusplus
}
#endif

#endif
