/* SPDX-License-Identifier: MIT */
/* Block lists turned around: for every key block the queries that list it; see cl/list_invert.cl. */

#include "config.h"

#include "opencl_nvidia.h"

enum { CHUNK = 256 };

/* Queries of a span: as many as make a tile of rows for each block, so that a pass's queries stay in the cache.
 */
static int64_t chunks_per_span(const struct nvidia_inverse *inverse, int64_t n_blocks, int64_t chunks,
                               int32_t topk, int32_t group)
{
    if (inverse->is_whole) return chunks;
    int64_t queries = inverse->rows * n_blocks / MAX((int64_t)topk * group, 1);
    return MIN(MAX(ceil_div(queries, CHUNK), 1), chunks);
}

static void plan(struct nvidia_inverse *inverse, int64_t q_len, int64_t kv_len, int32_t topk, int32_t group)
{
    inverse->n_blocks = nvidia_blocks(kv_len);
    inverse->chunks = ceil_div(q_len, CHUNK);
    inverse->chunks_per_span = chunks_per_span(inverse, inverse->n_blocks, inverse->chunks, topk, group);
    inverse->spans = ceil_div(inverse->chunks, inverse->chunks_per_span);
    inverse->entries = inverse->spans * inverse->n_blocks;
    inverse->tiles = inverse->entries + q_len * topk * group / inverse->rows;
}

/* At most so many (span, block) pairs in any sequence. */
int64_t nvidia_inverse_entries(const struct nvidia_inverse *inverse, const struct problem *problem,
                               int32_t topk)
{
    struct nvidia_inverse one = *inverse;
    int64_t most = 0;
    for (int64_t s = 0; s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        if (sequence->q_len == 0) continue;
        plan(&one, sequence->q_len, sequence->kv_len, topk, problem->group);
        most = MAX(most, one.entries);
    }
    return most;
}

void nvidia_inverse_begin(struct opencl_launch *launch, struct nvidia_inverse *inverse,
                          const struct problem *problem, int32_t topk)
{
    size_t heads = (size_t)problem->kv_heads, word = sizeof(cl_uint);
    size_t entries = (size_t)nvidia_inverse_entries(inverse, problem, topk);
    size_t blocks = (size_t)nvidia_blocks(problem->kv_len_max),
           chunks = (size_t)ceil_div(problem->q_len_max, CHUNK);
    inverse->counts = opencl_launch_temporary(launch, heads * chunks * blocks * word);
    inverse->totals = opencl_launch_temporary(launch, heads * entries * word);
    inverse->offset = opencl_launch_temporary(launch, heads * (entries + 1) * word);
    inverse->tile_offset = opencl_launch_temporary(launch, heads * (entries + 1) * word);
    inverse->pairs = opencl_launch_temporary(launch, heads * (size_t)problem->q_len_max * (size_t)topk * word);
}

void nvidia_inverse_run(struct opencl_launch *launch, struct nvidia_inverse *inverse,
                        const struct problem *problem, const struct sequence *sequence,
                        const struct nvidia_token_lists *lists, const struct nvidia_shape *shape)
{
    static const char files[] = "mma_nvidia.cl+list_invert.cl";
    struct opencl_options options = {""};
    opencl_option(&options, "DTYPE", shape->dtype == CLATTN_FLOAT16);
    opencl_option(&options, "GROUP", problem->group);
    opencl_option(&options, "ROWS", inverse->rows);
    plan(inverse, sequence->q_len, sequence->kv_len, lists->topk, problem->group);

    opencl_launch_kernel(launch, files, "list_count", options.text);
    opencl_arg_mem(launch, lists->list);
    opencl_arg_long(launch, lists->base);
    opencl_arg_mem(launch, inverse->counts);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, problem->kv_heads);
    opencl_arg_int(launch, lists->topk);
    opencl_arg_int(launch, (int32_t)inverse->n_blocks);
    nvidia_run(launch, inverse->chunks, problem->kv_heads, 1, CHUNK);

    opencl_launch_kernel(launch, files, "list_scan_chunks", options.text);
    opencl_arg_mem(launch, inverse->counts);
    opencl_arg_mem(launch, inverse->totals);
    opencl_arg_int(launch, (int32_t)inverse->chunks);
    opencl_arg_int(launch, (int32_t)inverse->chunks_per_span);
    opencl_arg_int(launch, (int32_t)inverse->n_blocks);
    nvidia_run(launch, ceil_div(inverse->n_blocks, 128), problem->kv_heads, inverse->spans, 128);

    opencl_launch_kernel(launch, files, "list_scan_blocks", options.text);
    opencl_arg_mem(launch, inverse->totals);
    opencl_arg_mem(launch, inverse->offset);
    opencl_arg_mem(launch, inverse->tile_offset);
    opencl_arg_int(launch, (int32_t)inverse->entries);
    nvidia_run(launch, problem->kv_heads, 1, 1, 256);

    opencl_launch_kernel(launch, files, "list_scatter", options.text);
    opencl_arg_mem(launch, lists->list);
    opencl_arg_long(launch, lists->base);
    opencl_arg_mem(launch, inverse->counts);
    opencl_arg_mem(launch, inverse->offset);
    opencl_arg_mem(launch, inverse->pairs);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, problem->kv_heads);
    opencl_arg_int(launch, lists->topk);
    opencl_arg_int(launch, (int32_t)inverse->n_blocks);
    opencl_arg_int(launch, (int32_t)inverse->chunks_per_span);
    opencl_arg_int(launch, (int32_t)inverse->entries);
    nvidia_run(launch, inverse->chunks, problem->kv_heads, 1, CHUNK);
}

struct nvidia_token_lists nvidia_token_lists_of(const clattn_blocks *blocks, const struct sequence *sequence)
{
    return (struct nvidia_token_lists){blocks->indices.mem, sequence->list_row * blocks->heads * blocks->topk,
                                       blocks->topk};
}

struct nvidia_token_lists nvidia_token_lists_run(struct opencl_launch *launch, const struct problem *problem,
                                                 const struct sequence *sequence,
                                                 const struct nvidia_tile_lists *lists, int64_t topk,
                                                 cl_mem list)
{
    int64_t entries = sequence->q_len * problem->kv_heads * topk;
    opencl_launch_kernel(launch, "mma_nvidia.cl+list_invert.cl", "list_expand", "");
    opencl_arg_mem(launch, lists ? lists->list : NULL);
    opencl_arg_long(launch, lists ? lists->base : 0);
    opencl_arg_int(launch, lists ? (int32_t)lists->stride : 0);
    opencl_arg_int(launch, lists ? (int32_t)lists->head_stride : 0);
    opencl_arg_mem(launch, list);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, problem->kv_heads);
    opencl_arg_int(launch, (int32_t)topk);
    opencl_arg_int(launch, lists ? (int32_t)lists->q_block : 1);
    opencl_arg_int(launch, problem->causal);
    opencl_arg_int(launch, nvidia_has_window(problem) ? (int32_t)problem->options.window : 0);
    nvidia_run(launch, ceil_div(entries, 128), 1, 1, 128);
    return (struct nvidia_token_lists){list, 0, (int32_t)topk};
}
