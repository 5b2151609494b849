/* SPDX-License-Identifier: MIT */
/* What a pattern is applied to: sequences, their list rows and key blocks. */

#include "pattern.h"

#include <stdlib.h>
#include <string.h>

#define LENGTH_MAX ((int64_t)INT32_MAX * 16) /* as for tensors: block indices are 32-bit */

/* Copies a size-prefixed descriptor over its defaults; false when it says something this library does not know.
 */
static bool copy_known(void *copy, size_t copy_bytes, const void *desc)
{
    size_t size;
    memcpy(&size, desc, sizeof size);
    if (size < sizeof size) return false;
    for (size_t i = copy_bytes; i < size; i++)
        if (((const unsigned char *)desc)[i]) return false;
    memcpy(copy, desc, MIN(size, copy_bytes));
    return true;
}

static clattn_status check_shape(const clattn_pattern *pattern, const clattn_pattern_shape *shape, bool packed)
{
    if (shape->block != 16 && shape->block != 32 && shape->block != 64 && shape->block != 128 && !shape->starts)
        return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT, "shape.block is %d; 16, 32, 64 or 128 is needed",
                            shape->block);
    if (shape->q_block < 1 || shape->heads < 1)
        return pattern_fail(pattern, CLATTN_INVALID_SHAPE,
                            "shape has q_block %d and heads %d; 1 or more is needed", shape->q_block,
                            shape->heads);
    if (!packed && (shape->batch < 1 || shape->batch > INT32_MAX || shape->q_len < 0 || shape->kv_len < 0))
        return pattern_fail(
            pattern, CLATTN_INVALID_SHAPE,
            "shape has batch %lld, q_len %lld, kv_len %lld; batch >= 1 and lengths >= 0 are needed",
            (long long)shape->batch, (long long)shape->q_len, (long long)shape->kv_len);
    if (!packed && (shape->q_len > LENGTH_MAX || shape->kv_len > LENGTH_MAX))
        return pattern_fail(pattern, CLATTN_SIZE_OVERFLOW, "shape has q_len %lld, kv_len %lld; at most %lld",
                            (long long)shape->q_len, (long long)shape->kv_len, (long long)LENGTH_MAX);
    const char *wrong = shape->starts ? starts_error(shape->starts, shape->start_count) : NULL;
    return wrong ? pattern_fail(pattern, CLATTN_INVALID_BLOCKS, "shape.starts %s", wrong) : CLATTN_SUCCESS;
}

static clattn_status check_heads(const clattn_pattern *pattern, int32_t heads)
{
    for (int32_t h = -1; h < pattern->own_count; h++) {
        const struct pattern_parts *parts = h < 0 ? &pattern->parts : &pattern->own[h].parts;
        if (h >= 0 && pattern->own[h].head >= heads)
            return pattern_fail(pattern, CLATTN_INVALID_SHAPE,
                                "shape.heads is %d; the pattern has one for head %d, counted from 0", heads,
                                pattern->own[h].head);
        for (int32_t i = 0; i < parts->count; i++)
            if (parts->list[i].heads > 1 && parts->list[i].heads != heads)
                return pattern_fail(pattern, CLATTN_INVALID_SHAPE,
                                    "shape.heads is %d; the pattern has log-stride offsets for %d heads", heads,
                                    parts->list[i].heads);
    }
    return CLATTN_SUCCESS;
}

static clattn_status check_seqlens(const clattn_pattern *pattern, const char *name, const int32_t *cu,
                                   int64_t count)
{
    if (!cu) return pattern_fail(pattern, CLATTN_INVALID_SEQLENS, "attention.%s is NULL", name);
    if (cu[0] != 0)
        return pattern_fail(pattern, CLATTN_INVALID_SEQLENS, "attention.%s[0] is %d; it must be 0", name,
                            cu[0]);
    for (int64_t s = 0; s < count; s++)
        if (cu[s + 1] < cu[s])
            return pattern_fail(pattern, CLATTN_INVALID_SEQLENS,
                                "attention.%s[%lld] is %d, less than the %d before it", name, (long long)s + 1,
                                cu[s + 1], cu[s]);
    return CLATTN_SUCCESS;
}

static clattn_status check_used(const clattn_pattern *pattern, const char *name, const int32_t *used,
                                int64_t batch, int64_t len)
{
    for (int64_t b = 0; used && b < batch; b++)
        if (used[b] < 0 || used[b] > len)
            return pattern_fail(pattern, CLATTN_INVALID_SEQLENS,
                                "attention.%s[%lld] is %d; 0 to %lld is needed", name, (long long)b, used[b],
                                (long long)len);
    return CLATTN_SUCCESS;
}

/* Checks the lengths of the sequences and keeps where they are. */
static clattn_status lengths_init(const clattn_pattern *pattern, const clattn_attention_desc *desc,
                                  struct pattern_problem *problem)
{
    const clattn_pattern_shape *shape = &problem->shape;
    clattn_status status;
    if (desc->sequences) {
        if (desc->seqused_q || desc->seqused_k)
            return pattern_fail(pattern, CLATTN_INVALID_SEQLENS,
                                "attention.seqused_q and seqused_k go with sequences = 0");
        status = check_seqlens(pattern, "cu_seqlens_q", desc->cu_seqlens_q, desc->sequences);
        if (!status) status = check_seqlens(pattern, "cu_seqlens_k", desc->cu_seqlens_k, desc->sequences);
        problem->cu_q = desc->cu_seqlens_q;
        problem->cu_k = desc->cu_seqlens_k;
        problem->count = desc->sequences;
    } else {
        status = check_used(pattern, "seqused_q", desc->seqused_q, shape->batch, shape->q_len);
        if (!status) status = check_used(pattern, "seqused_k", desc->seqused_k, shape->batch, shape->kv_len);
        problem->used_q = desc->seqused_q;
        problem->used_k = desc->seqused_k;
        problem->count = shape->batch;
    }
    return status;
}

struct pattern_sequence pattern_sequence_of(const struct pattern_problem *problem, int64_t s)
{
    const int32_t *cu_q = problem->cu_q, *cu_k = problem->cu_k;
    if (cu_q)
        return (struct pattern_sequence){cu_q[s + 1] - cu_q[s], cu_k[s + 1] - cu_k[s], cu_k[s],
                                         problem->list_row[s]};
    return (struct pattern_sequence){problem->used_q ? problem->used_q[s] : problem->shape.q_len,
                                     problem->used_k ? problem->used_k[s] : problem->shape.kv_len, 0,
                                     problem->list_row[s]};
}

struct key_blocks pattern_keys(const struct pattern_problem *problem, const struct pattern_sequence *sequence)
{
    return key_blocks_of(problem->shape.block, problem->shape.starts, problem->shape.start_count,
                         sequence->k_row, sequence->kv_len);
}

/* List rows of the sequences; every sequence must begin a block, and all pairs must be countable. */
static clattn_status sequences_fill(const clattn_pattern *pattern, struct pattern_problem *problem)
{
    int64_t pairs = 0, product;
    for (int64_t s = 0; s < problem->count; s++) {
        struct pattern_sequence sequence = pattern_sequence_of(problem, s);
        struct key_blocks keys = pattern_keys(problem, &sequence);
        if (!key_blocks_fit(&keys))
            return pattern_fail(pattern, CLATTN_INVALID_BLOCKS,
                                "sequence %lld begins at row %lld of k, which is not in shape.starts",
                                (long long)s, (long long)sequence.k_row);
        if (!multiply(sequence.q_len, MAX(sequence.kv_len, 1), &product) ||
            !multiply(product, problem->shape.heads, &product) ||
            __builtin_add_overflow(pairs, product, &pairs) || pairs > INT64_MAX / 4)
            return pattern_fail(pattern, CLATTN_SIZE_OVERFLOW, "more than 2^61 pairs of query rows and keys");
        problem->key_blocks = MAX(problem->key_blocks, keys.count);
        int64_t rows = problem->cu_q ? sequence.q_len : problem->shape.q_len; /* padding has list rows, too */
        problem->list_row[s + 1] = problem->list_row[s] + ceil_div(rows, problem->shape.q_block);
    }
    return CLATTN_SUCCESS;
}

clattn_status pattern_problem_init(const clattn_pattern *pattern, const clattn_attention_desc *attention,
                                   const clattn_pattern_shape *shape, struct pattern_problem *problem)
{
    clattn_attention_desc desc = CLATTN_ATTENTION_DESC_INIT;
    *problem = (struct pattern_problem){.shape = CLATTN_PATTERN_SHAPE_INIT};
    if (!shape) return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT, "shape is NULL");
    if (!copy_known(&problem->shape, sizeof problem->shape, shape) ||
        (attention && !copy_known(&desc, sizeof desc, attention)))
        return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT,
                            "the size of shape or attention is not set, or they use fields that this library "
                            "does not know");
    if (desc.sequences < 0)
        return pattern_fail(pattern, CLATTN_INVALID_SEQLENS, "attention.sequences is %lld",
                            (long long)desc.sequences);
    clattn_status status = check_shape(pattern, &problem->shape, desc.sequences > 0);
    if (!status) status = check_heads(pattern, problem->shape.heads);
    if (!status) status = lengths_init(pattern, &desc, problem);
    if (status) return status;
    problem->causal = desc.causal != 0;
    problem->list_row = calloc((size_t)problem->count + 1, sizeof *problem->list_row);
    if (!problem->list_row)
        return pattern_fail(pattern, CLATTN_OUT_OF_MEMORY, "no memory for %lld sequences",
                            (long long)problem->count);
    status = sequences_fill(pattern, problem);
    if (status) pattern_problem_release(problem);
    return status;
}

void pattern_problem_release(struct pattern_problem *problem)
{
    free(problem->list_row);
    problem->list_row = NULL;
}

struct pattern_row pattern_row_of(const struct pattern_problem *problem,
                                  const struct pattern_sequence *sequence, const struct key_blocks *keys,
                                  int64_t r)
{
    int64_t row = r * problem->shape.q_block,
            end = MAX(MIN(row + problem->shape.q_block, sequence->q_len), row);
    int64_t t = row + sequence->kv_len - sequence->q_len, t_last = t + end - row - 1;
    struct pattern_row result = {row, end, t, 0, -1};
    if (keys->count == 0 || row >= end || (problem->causal && t_last < 0)) return result;
    result.first = key_block_at(keys, MAX(t, 0));
    result.last = key_block_at(keys, MAX(t_last, 0));
    return result;
}
