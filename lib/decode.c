/* SPDX-License-Identifier: MIT */
/* One step of a batch: append, select, attend. */

#include "cache.h"
#include "select.h"
#include "stage.h"

#include <stdlib.h>

/* What a call holds until it ends. */
struct step {
    clattn_cache *cache;
    struct cache_span *spans; /* [count] */
    int64_t count, rows;
    int32_t *starts; /* [count + 1] rows of the sequences */
    struct problem problem;
    clattn_select_desc select;
    clattn_attention_desc attention;
    clattn_tensor scales[2]; /* of INT8 */
    struct stage stage;
    clattn_blocks **place, *made; /* the list of the step; made: not yet in its place */
};

static clattn_status check_attention(clattn_context *context, const clattn_attention_desc *desc,
                                     clattn_attention_desc *copy)
{
    *copy = (clattn_attention_desc)CLATTN_ATTENTION_DESC_INIT;
    clattn_status status = desc ? desc_copy(context, "attention", copy, sizeof *copy, desc) : CLATTN_SUCCESS;
    if (status) return status;
    if (copy->sequences || copy->cu_seqlens_q || copy->cu_seqlens_k || copy->seqused_q || copy->seqused_k)
        return fail(context, CLATTN_INVALID_SEQLENS,
                    "attention has sequence lengths; those of the cache count, the fields must be 0 or NULL");
    if (copy->bias || copy->k_scale || copy->v_scale)
        return fail(context, CLATTN_INVALID_ARGUMENT, "attention.%s is given; it must be NULL with a cache",
                    copy->bias ? "bias" : "k_scale or v_scale");
    return CLATTN_SUCCESS;
}

static clattn_status check_selection(clattn_context *context, const clattn_cache *cache,
                                     const clattn_select_desc *select, clattn_blocks **blocks,
                                     clattn_select_desc *checked)
{
    clattn_status status = check_select(context, select, checked);
    if (status) return status;
    if (!select) checked->leaf = cache->desc.leaf;
    if (checked->leaf != cache->desc.leaf)
        return fail(context, CLATTN_INVALID_ARGUMENT, "select.leaf is %d; the cache has leaves of %d",
                    checked->leaf, cache->desc.leaf);
    if (checked->selector == CLATTN_SELECT_ROBUST && !cache->desc.bounds)
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "select.selector is ROBUST; the cache was made without desc.bounds");
    if (checked->selector == CLATTN_SELECT_DENSE && blocks)
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "select.selector is DENSE, which has no list; pass blocks NULL");
    return CLATTN_SUCCESS;
}

/* Queries without keys and values of the call: the cache says what they have to be. */
static clattn_status check_queries(clattn_context *context, const clattn_cache_desc *cache,
                                   const clattn_tensor *q)
{
    bool fits = cache->dtype == CLATTN_INT8 ? q->dtype != CLATTN_INT8 : q->dtype == cache->dtype;
    if (q->batch != 1)
        return fail(context, CLATTN_INVALID_SHAPE, "q.batch is %lld; 1 is needed", (long long)q->batch);
    if (q->dim != cache->dim)
        return fail(context, CLATTN_INVALID_SHAPE, "q.dim is %lld; the cache has %d", (long long)q->dim,
                    cache->dim);
    if (q->heads % cache->kv_heads)
        return fail(context, CLATTN_INVALID_SHAPE, "q.heads is %lld; a multiple of the cache's %d is needed",
                    (long long)q->heads, cache->kv_heads);
    if (!fits)
        return fail(context, CLATTN_INVALID_DTYPE, "q.dtype is %s; the cache takes %s", dtype_name(q->dtype),
                    cache->dtype == CLATTN_INT8 ? "floating types" : dtype_name(cache->dtype));
    return CLATTN_SUCCESS;
}

/* The tensors among themselves; then the lengths and pages of the cache take the place of the tensors'. */
static clattn_status step_problem(clattn_context *context, struct step *step, const struct tensors *tensors)
{
    clattn_cache *cache = step->cache;
    clattn_attention_desc desc = step->attention;
    bool appends = tensors->k != NULL;
    if (!tensors->q || !tensors->out)
        return fail(context, CLATTN_INVALID_ARGUMENT, "%s is NULL", tensors->q ? "out" : "q");
    clattn_tensor k = *tensors->q, v = k; /* stand for those of the cache where none are given */
    k.heads = v.heads = cache->desc.kv_heads;
    k.dim = cache->desc.dim;
    v.dim = cache->desc.dim_v;
    k.batch_stride = k.len_stride = k.head_stride = v.batch_stride = v.len_stride = v.head_stride = 0;
    struct tensors all = *tensors;
    if (!appends) all.k = &k, all.v = &v;
    clattn_status status = check_tensor(context, "q", tensors->q, false);
    if (!status && tensors->q->len != step->rows)
        status = fail(context, CLATTN_INVALID_SHAPE, "q.len is %lld; the sum of lens is %lld",
                      (long long)tensors->q->len, (long long)step->rows);
    if (!status)
        status = appends ? cache_check_rows(context, cache, all.k, all.v, step->rows)
                         : check_queries(context, &cache->desc, tensors->q);
    desc.sequences = step->count;
    desc.cu_seqlens_q = desc.cu_seqlens_k = step->starts;
    if (!status) status = problem_init(context, &desc, &all, 1, &step->problem);
    if (status) return status;
    struct problem *problem = &step->problem;
    for (int64_t s = 0; s < step->count; s++) {
        const struct cache_span *span = &step->spans[s];
        struct sequence *sequence = &problem->sequences[s];
        sequence->kv_len = span->first + (appends ? span->len : 0);
        sequence->k_row = 0;
        sequence->pages = cache_table(cache, span->sequence);
        sequence->page_size = cache->page_size;
        problem->kv_len_max = MAX(problem->kv_len_max, sequence->kv_len);
    }
    if (cache->desc.dtype == CLATTN_INT8) {
        step->scales[0] = cache_tensor(cache, CACHE_KEY_SCALES);
        step->scales[1] = cache_tensor(cache, CACHE_VALUE_SCALES);
        problem->options.k_scale = &step->scales[0];
        problem->options.v_scale = &step->scales[1];
        problem->options.scale_block = 1;
    }
    return CLATTN_SUCCESS;
}

/* The caller's list, or the cache's own of the last step when that has the shape. */
static clattn_status step_blocks(clattn_context *context, struct step *step, clattn_blocks **blocks)
{
    clattn_cache *cache = step->cache;
    if (step->select.selector == CLATTN_SELECT_DENSE) return CLATTN_SUCCESS;
    const clattn_blocks *kept = cache->blocks;
    if (!blocks && kept && (kept->rows != step->rows || kept->topk != step->select.topk)) {
        clattn_blocks_release(context, cache->blocks);
        cache->blocks = NULL;
    }
    step->place = blocks ? blocks : &cache->blocks;
    return blocks_place(context, &step->problem, &step->select, step->place, &step->made);
}

static clattn_status step_stage(clattn_context *context, struct step *step, const struct tensors *t)
{
    struct stage *stage = &step->stage;
    clattn_status status = stage_in(context, t->q, &stage->q);
    if (!status && t->k) status = stage_in(context, t->k, &stage->k);
    if (!status && t->v) status = stage_in(context, t->v, &stage->v);
    if (!status) status = stage_out(context, t->out, &stage->out);
    if (!status) status = stage_out(context, t->lse, &stage->lse);
    if (!status && step->problem.options.sink) {
        status = stage_in(context, step->problem.options.sink, &stage->sink);
        step->problem.options.sink = &stage->sink.device;
    }
    return status;
}

static clattn_status step_run(clattn_context *context, struct step *step, const struct tensors *t,
                              const clattn_sync *sync)
{
    struct stage *stage = &step->stage;
    clattn_sync first = sync ? *sync : (clattn_sync)CLATTN_SYNC_INIT;
    first.event = NULL;
    clattn_status status = CLATTN_SUCCESS;
    if (t->k)
        status = cache_append_run(context, step->cache, step->spans, step->count, &stage->k.device,
                                  &stage->v.device, sync ? &first : NULL);
    if (status) return status;
    struct decode_job job = {.problem = &step->problem,
                             .select = &step->select,
                             .cache = step->cache,
                             .spans = step->spans,
                             .q = &stage->q.device,
                             .blocks = step->made    ? step->made
                                       : step->place ? *step->place
                                                     : NULL,
                             .out = &stage->out.device,
                             .lse = t->lse ? &stage->lse.device : NULL,
                             .sync = sync};
    status = context->backend->decode(context, &job);
    if (!status && sync && (stage->out.host || stage->lse.host))
        status = context->backend->finish(context, sync);
    if (!status) status = stage_finish(context, &stage->out);
    if (!status) status = stage_finish(context, &stage->lse);
    if (status && t->k) cache_append_undo(context, step->cache, step->spans, step->count, sync ? &first : NULL);
    return status;
}

static clattn_status step_begin(clattn_context *context, struct step *step, const int32_t *sequences,
                                const int32_t *lens)
{
    size_t count = (size_t)step->count;
    step->spans = malloc(count * sizeof *step->spans);
    step->starts = malloc((count + 1) * sizeof *step->starts);
    if (!step->spans || !step->starts)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu sequences", count);
    clattn_status status =
        cache_spans(context, step->cache, step->count, sequences, lens, step->spans, &step->rows);
    if (status) return status;
    if (step->rows > INT32_MAX)
        return fail(context, CLATTN_SIZE_OVERFLOW, "the sum of lens is %lld, too many", (long long)step->rows);
    for (size_t s = 0; s < count; s++)
        step->starts[s] = (int32_t)step->spans[s].row;
    step->starts[count] = (int32_t)step->rows;
    return CLATTN_SUCCESS;
}

static void step_end(clattn_context *context, struct step *step)
{
    clattn_blocks_release(context, step->made);
    stage_all_release(context, &step->stage);
    problem_release(&step->problem);
    free(step->spans);
    free(step->starts);
}

clattn_status clattn_decode(clattn_context *context, clattn_cache *cache,
                            const clattn_attention_desc *attention, const clattn_select_desc *select,
                            int64_t count, const int32_t *sequences, const int32_t *lens,
                            const clattn_tensor *q, const clattn_tensor *k, const clattn_tensor *v,
                            clattn_tensor *out, clattn_tensor *lse, clattn_blocks **blocks,
                            const clattn_sync *sync)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    struct tensors tensors = {q, k, v, out, lse};
    struct step step = {.cache = cache, .count = count};
    clattn_sync sync_copy;
    clattn_status status = cache_check_batch(context, cache, count, sequences, lens);
    if (!status && (k == NULL) != (v == NULL))
        status = fail(context, CLATTN_INVALID_ARGUMENT, "%s is NULL; k and v go together", k ? "v" : "k");
    if (!status) status = check_sync(context, sync, &sync_copy);
    if (!status) status = check_attention(context, attention, &step.attention);
    if (!status) status = check_selection(context, cache, select, blocks, &step.select);
    if (!status) status = step_begin(context, &step, sequences, lens);
    if (!status) status = step_problem(context, &step, &tensors);
    if (!status) status = step_blocks(context, &step, blocks);
    if (!status) status = step_stage(context, &step, &tensors);
    if (!status) status = step_run(context, &step, &tensors, sync ? &sync_copy : NULL);
    if (!status && step.made) {
        *step.place = step.made;
        step.made = NULL;
    }
    if (!status && step.place) blocks_selected(context, *step.place);
    step_end(context, &step);
    return status;
}
