/* SPDX-License-Identifier: MIT */
/* A decode step on NVIDIA cards: selection and attention of all rows in one launch; see cl/decode_step_mma.cl.
 * Its self-test stands here too. */

#include "config.h"

#include "opencl_decode.h"
#include "opencl_nvidia_selftest.h"
#include "select.h"

#include <stdlib.h>

enum { GROUP_MAX = 16, WARPS = 8 };
enum { TOPK_MAX = 16, DIM_MAX = 64, TOPK_MAX_WIDE = 8, DIM_MAX_WIDE = 128 }; /* without spills, either pair */

/* As in cl/decode_step_mma.cl. */
enum step_field { STEP_ROW, STEP_LEN, STEP_TOKENS, STEP_SEQUENCE, STEP_PAGES, STEP_FIELDS };

static bool takes(const clattn_context *context, const struct decode_job *job)
{
    const struct problem *problem = job->problem;
    const clattn_select_desc *select = job->select;
    const clattn_cache_desc *desc = &job->cache->desc;
    int32_t dim = MAX(problem->dim, problem->dim_v);
    if (!job->blocks || select->selector != CLATTN_SELECT_PISA || !problem->causal) return false;
    if (!nvidia_takes_forward(context, problem, job->q->dtype) || job->out->dtype != job->q->dtype) return false;
    if (!(select->topk <= TOPK_MAX && dim <= DIM_MAX) &&
        !(select->topk <= TOPK_MAX_WIDE && dim <= DIM_MAX_WIDE))
        return false;
    /* What the kernel forces: the first leaf, the query's own and the one before it. Leaves do not cross pages.
     */
    return desc->dtype == job->q->dtype && desc->leaf == NVIDIA_LEAF && desc->page_size % NVIDIA_LEAF == 0 &&
           problem->group <= GROUP_MAX && select->forced_first == 1 && select->forced_last == 2;
}

clattn_status nvidia_decode(clattn_context *context, const struct decode_job *job,
                            const struct opencl_pages *pages, bool *done)
{
    const struct problem *problem = job->problem;
    *done = false;
    if (!takes(context, job)) return CLATTN_SUCCESS;
    struct nvidia_shape shape = {.dtype = job->q->dtype,
                                 .dim = problem->dim,
                                 .dim_v = problem->dim_v,
                                 .group = problem->group,
                                 .topk = job->select->topk,
                                 .causal = true,
                                 .aligned = nvidia_is_aligned(job->q),
                                 .window = nvidia_has_window(problem),
                                 .softcap = problem->options.softcap > 0,
                                 .sink = problem->options.sink != NULL};
    *done = nvidia_has(context, NVIDIA_DECODE, &shape) && nvidia_works(context, NVIDIA_DECODE, &shape);
    if (!*done) return CLATTN_SUCCESS;
    log_line(context, CLATTN_LOG_DEBUG, "decode step by path %s", nvidia_path_name(NVIDIA_DECODE));
    return nvidia_decode_run(context, job, pages, &shape);
}

/* ---- launch ---- */

static void arg_output(struct opencl_launch *launch, const clattn_tensor *tensor)
{
    opencl_arg_tensor(launch, tensor);
    opencl_arg_long(launch, tensor ? tensor->offset : 0);
    opencl_arg_long(launch, tensor ? tensor->len_stride : 0);
    opencl_arg_long(launch, tensor ? tensor->head_stride : 0);
}

static void spans_fill(const struct decode_job *job, cl_long *table)
{
    for (int64_t s = 0; s < job->problem->count; s++, table += STEP_FIELDS) {
        const struct sequence *sequence = &job->problem->sequences[s];
        table[STEP_ROW] = sequence->q_row;
        table[STEP_LEN] = sequence->q_len;
        table[STEP_TOKENS] = sequence->kv_len;
        table[STEP_SEQUENCE] = job->spans[s].sequence;
        table[STEP_PAGES] = job->spans[s].sequence * job->cache->table_entries;
    }
}

/* The table is NULL for one sequence. */
static void arg_spans(struct opencl_launch *launch, const struct decode_job *job, cl_mem table,
                      const cl_long *one)
{
    opencl_arg_mem(launch, table);
    opencl_arg_int(launch, (int32_t)job->problem->count);
    opencl_arg_int(launch, (int32_t)one[STEP_ROW]);
    opencl_arg_int(launch, (int32_t)one[STEP_LEN]);
    opencl_arg_int(launch, (int32_t)one[STEP_TOKENS]);
    opencl_arg_long(launch, one[STEP_SEQUENCE]);
    opencl_arg_long(launch, one[STEP_PAGES]);
}

static void arg_cache(struct opencl_launch *launch, const struct decode_job *job,
                      const struct opencl_pages *pages)
{
    const clattn_cache *cache = job->cache;
    clattn_tensor keys = cache_tensor(cache, CACHE_KEYS), values = cache_tensor(cache, CACHE_VALUES);
    int64_t page_leaves = cache->desc.page_size ? cache->page_size / NVIDIA_LEAF : INT32_MAX;
    opencl_arg_tensor(launch, &keys);
    opencl_arg_long(launch, keys.offset);
    opencl_arg_tensor(launch, &values);
    opencl_arg_long(launch, values.offset);
    opencl_arg_storage(launch, &cache->memory);
    opencl_arg_long(launch, (int64_t)(cache->layout.means / sizeof(float)));
    opencl_arg_int(launch, (int32_t)cache->nodes);
    opencl_arg_int(launch, (int32_t)cache->leaves);
    opencl_arg_mem(launch, pages->table);
    opencl_arg_long(launch, cache->desc.kv_heads * cache->page_size);
    opencl_arg_long(launch, cache->page_size);
    opencl_arg_int(launch, (int32_t)page_leaves);
}

clattn_status nvidia_decode_run(clattn_context *context, const struct decode_job *job,
                                const struct opencl_pages *pages, const struct nvidia_shape *shape)
{
    struct opencl_launch launch;
    struct opencl_options options = nvidia_options(shape);
    size_t bytes = (size_t)job->problem->count * STEP_FIELDS * sizeof(cl_long);
    cl_long *spans = malloc(bytes);
    if (!spans) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes", bytes);
    spans_fill(job, spans);
    opencl_option(&options, "TOPK", shape->topk);
    opencl_launch_begin(context, job->sync, &launch);
    if (job->q->len > 0) {
        opencl_launch_kernel(&launch, NVIDIA_BLOCK_FILES "select_rank.cl+decode_step_mma.cl", "decode_step",
                             options.text);
        arg_output(&launch, job->q);
        arg_cache(&launch, job, pages);
        arg_spans(&launch, job, job->problem->count > 1 ? opencl_launch_table(&launch, spans, bytes) : NULL,
                  spans);
        opencl_arg_storage(&launch, &job->blocks->indices);
        opencl_arg_storage(&launch, &job->blocks->counts);
        arg_output(&launch, job->out);
        arg_output(&launch, job->lse);
        opencl_arg_float(&launch, nvidia_scale(job->problem));
        nvidia_arg_scale(&launch, job->problem);
        nvidia_arg_sink(&launch, job->problem);
        nvidia_run(&launch, job->q->len, job->problem->kv_heads, 1, 32 * WARPS);
    }
    free(spans);
    return opencl_launch_end(&launch);
}

/* ---- self-test ---- */

enum { TEST_PAGE = 128 };

static clattn_status step_tensors(struct selftest *t)
{
    const struct nvidia_shape *shape = t->shape;
    clattn_status status = selftest_begin(t, SELECT_Q_LEN, SELECT_KV_LEN);
    if (!status)
        status = selftest_twin_new(t, &t->v, shape->dtype, SELECT_KV_LEN, t->kv_heads, shape->dim_v, 3);
    if (!status)
        status = selftest_twin_new(t, &t->out, shape->dtype, SELECT_Q_LEN, t->q_heads, shape->dim_v, 0);
    if (!status) status = selftest_twin_new(t, &t->lse, CLATTN_FLOAT32, SELECT_Q_LEN, t->q_heads, 1, 0);
    if (!status && shape->sink) status = selftest_sink_new(t);
    return status;
}

/* The cache of the device, filled. */
static clattn_status step_cache(struct selftest *t, clattn_cache **cache)
{
    clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
    const int32_t sequence = 1, len = SELECT_KV_LEN;
    desc.sequences = 2;
    desc.tokens = 2 * SELECT_KV_LEN; /* levels lie elsewhere than in a pyramid */
    desc.kv_heads = t->kv_heads;
    desc.dim = t->shape->dim;
    desc.dim_v = t->shape->dim_v;
    desc.dtype = t->shape->dtype;
    desc.page_size = TEST_PAGE;
    clattn_status status = clattn_cache_create(t->context, &desc, cache);
    if (status) return status;
    return clattn_cache_append(t->context, *cache, 1, &sequence, &len, &t->k.device, &t->v.device, NULL);
}

static clattn_status step_run(struct selftest *t, const clattn_select_desc *select, clattn_cache *cache,
                              clattn_blocks **blocks)
{
    struct problem problem;
    struct opencl_launch launch;
    const struct tensors tensors = {&t->q.device, &t->k.device, &t->v.device, &t->out.device, &t->lse.device};
    const struct cache_span span = {.sequence = 1, .first = SELECT_KV_LEN - SELECT_Q_LEN, .len = SELECT_Q_LEN};
    clattn_blocks *made = NULL;
    clattn_attention_desc attention = t->attention;
    if (attention.sink) attention.sink = &t->sink.device;
    clattn_status status = problem_init(t->context, &attention, &tensors, 1, &problem);
    if (status) return status;
    status = blocks_place(t->context, &problem, select, blocks, &made);
    *blocks = made;
    if (!status) {
        struct decode_job job = {.problem = &problem,
                                 .select = select,
                                 .cache = cache,
                                 .spans = &span,
                                 .q = tensors.q,
                                 .blocks = made,
                                 .out = tensors.out,
                                 .lse = tensors.lse};
        opencl_launch_begin(t->context, NULL, &launch);
        struct opencl_pages pages = {cache, opencl_cache_table(&launch, cache, &span, 1, false), &span};
        status = opencl_launch_end(&launch);
        if (!status) status = nvidia_decode_run(t->context, &job, &pages, t->shape);
    }
    problem_release(&problem);
    return status;
}

/* Attention of the reference over the lists of the device. */
static clattn_status step_compare(struct selftest *t, const clattn_blocks *have)
{
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_blocks *blocks = NULL;
    desc.rows = have->rows;
    desc.heads = have->heads;
    desc.topk = have->topk;
    int32_t *indices = malloc((size_t)(have->rows * have->heads * have->topk) * sizeof *indices);
    if (!indices) return fail(t->context, CLATTN_OUT_OF_MEMORY, "no memory for the self-test");
    clattn_status status = clattn_blocks_read(t->context, have, indices, NULL);
    if (!status) status = clattn_blocks_create(t->reference, &desc, indices, &blocks);
    if (!status)
        status = clattn_attention_forward(t->reference, &t->attention, &t->q.host, &t->k.host, &t->v.host,
                                          blocks, &t->out.host, &t->lse.host, NULL);
    if (!status) status = selftest_twin_compare(t, "out", &t->out, 1);
    if (!status) status = selftest_twin_compare(t, "lse", &t->lse, 1);
    clattn_blocks_release(t->reference, blocks);
    free(indices);
    return status;
}

clattn_status selftest_decode(struct selftest *t)
{
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_blocks *want = NULL, *have = NULL;
    clattn_cache *cache = NULL;
    select.topk = t->shape->topk;
    clattn_status status = step_tensors(t);
    clattn_attention_desc plain = t->attention; /* what selection knows */
    plain.softcap = 0;
    plain.window = 0;
    plain.sink = NULL;
    if (!status) status = step_cache(t, &cache);
    if (!status)
        status = clattn_select(t->reference, &plain, &select, &t->q.host, &t->k.host, NULL, &want, NULL);
    if (!status) status = step_run(t, &select, cache, &have);
    if (!status) status = selftest_compare_lists(t, want, have);
    if (!status) status = step_compare(t, have);
    clattn_blocks_release(t->reference, want);
    clattn_blocks_release(t->context, have);
    clattn_cache_release(t->context, cache);
    return status;
}
