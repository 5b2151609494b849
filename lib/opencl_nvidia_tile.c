/* SPDX-License-Identifier: MIT */
/* Forward attention on NVIDIA cards where a list serves many rows: tiles of 128 rows (query blocks with a list,
 * all keys, or the union of neighbouring tokens' lists; cl/attention_tile_wgmma.cl), and a warp a query
 * (cl/attention_token_mma.cl). */

#include "config.h"

#include "opencl_nvidia.h"

enum { WARPGROUPS = 2, ROWS = 64 * WARPGROUPS, DENSE_QUERIES = 128, WARPS = 4 };

/* ---- memory ---- */

static cl_mem keys_begin(struct opencl_launch *launch, const struct problem *problem, int32_t columns)
{
    int64_t blocks = nvidia_blocks(problem->kv_len_max);
    return opencl_launch_temporary(launch, (size_t)(problem->kv_heads * blocks * NVIDIA_LEAF * columns * 2));
}

void nvidia_pack_cores(struct opencl_launch *launch, const struct forward_job *job,
                       const struct nvidia_shape *shape, const struct sequence *sequence, cl_mem core)
{
    struct opencl_options options = {""};
    opencl_option(&options, "DIM", shape->dim);
    opencl_option(&options, "DIM_V", shape->dim_v);
    opencl_launch_kernel(launch, NVIDIA_BLOCK_FILES "pack_cores.cl", "pack_cores", options.text);
    nvidia_arg_rows(launch, job->k, sequence->batch, sequence->k_row);
    nvidia_arg_rows(launch, job->v, sequence->batch, sequence->k_row);
    opencl_arg_mem(launch, core);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    nvidia_run(launch, nvidia_blocks(sequence->kv_len), job->problem->kv_heads, 1, 256);
}

/* ---- lists ---- */

static void run_all(struct opencl_launch *launch, const struct problem *problem,
                    const struct sequence *sequence, struct nvidia_tile_lists *lists)
{
    lists->length = nvidia_blocks(sequence->kv_len);
    lists->head_stride = lists->length;
    opencl_launch_kernel(launch, "mma_nvidia.cl+list_invert.cl", "list_all", "");
    opencl_arg_mem(launch, lists->list);
    opencl_arg_int(launch, (int32_t)lists->length);
    nvidia_run(launch, ceil_div(lists->length, 128), problem->kv_heads, 1, 128);
}

/* Lists of blocks of 128 keys as lists of blocks of 64. */
static void run_halves(struct opencl_launch *launch, const clattn_blocks *blocks,
                       const struct sequence *sequence, const struct nvidia_tile_lists *lists)
{
    int64_t entries = lists->count * blocks->heads * blocks->topk;
    opencl_launch_kernel(launch, "mma_nvidia.cl+list_invert.cl", "list_halve", "");
    opencl_arg_storage(launch, &blocks->indices);
    opencl_arg_long(launch, sequence->list_row * blocks->heads * blocks->topk);
    opencl_arg_mem(launch, lists->list);
    opencl_arg_long(launch, entries);
    opencl_arg_int(launch, (int32_t)nvidia_blocks(sequence->kv_len));
    nvidia_run(launch, ceil_div(entries, 128), 1, 1, 128);
}

static void run_union(struct opencl_launch *launch, const clattn_blocks *blocks,
                      const struct sequence *sequence, const struct nvidia_tile_lists *lists)
{
    opencl_launch_kernel(launch, "mma_nvidia.cl+list_union.cl", "list_union", "");
    opencl_arg_storage(launch, &blocks->indices);
    opencl_arg_long(launch, sequence->list_row * blocks->heads * blocks->topk);
    opencl_arg_mem(launch, lists->list);
    opencl_arg_mem(launch, lists->mask);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, blocks->topk);
    opencl_arg_int(launch, (int32_t)lists->q_block);
    nvidia_run(launch, lists->count, blocks->heads, 1, 128);
}

struct nvidia_tile_lists nvidia_tile_lists_begin(struct opencl_launch *launch, const struct problem *problem,
                                                 const clattn_blocks *blocks, enum nvidia_path path)
{
    struct nvidia_tile_lists lists = {0};
    if (path == NVIDIA_UNION) {
        lists.q_block = MAX(MIN(ROWS / problem->group, 32), 1);
        size_t bytes = (size_t)(ceil_div(problem->q_len_max, lists.q_block) * problem->kv_heads *
                                lists.q_block * blocks->topk) *
                       sizeof(cl_int);
        lists.list = opencl_launch_temporary(launch, bytes);
        lists.mask = opencl_launch_temporary(launch, bytes);
    } else if (blocks && blocks->block == 2 * NVIDIA_LEAF) {
        size_t rows = (size_t)ceil_div(problem->q_len_max, blocks->q_block);
        size_t entries = rows * (size_t)blocks->heads * (size_t)blocks->topk;
        lists.list = opencl_launch_temporary(launch, 2 * entries * sizeof(cl_int));
    } else if (blocks) {
        lists.list = blocks->indices.mem;
    } else {
        size_t length = (size_t)nvidia_blocks(problem->kv_len_max);
        lists.list = opencl_launch_temporary(launch, (size_t)problem->kv_heads * length * sizeof(cl_int));
    }
    if (!lists.mask) lists.mask = lists.list; /* not read */
    return lists;
}

void nvidia_tile_lists_run(struct opencl_launch *launch, const struct problem *problem,
                           const clattn_blocks *blocks, const struct sequence *sequence, enum nvidia_path path,
                           struct nvidia_tile_lists *lists)
{
    if (path == NVIDIA_UNION) {
        lists->length = lists->q_block * blocks->topk;
        lists->head_stride = lists->length;
        lists->stride = lists->length * problem->kv_heads;
        lists->count = ceil_div(sequence->q_len, lists->q_block);
        run_union(launch, blocks, sequence, lists);
    } else if (blocks) {
        bool has_halves = blocks->block == 2 * NVIDIA_LEAF;
        lists->length = blocks->topk * (has_halves ? 2 : 1);
        lists->base = has_halves ? 0 : sequence->list_row * blocks->heads * blocks->topk;
        lists->stride = blocks->heads * lists->length;
        lists->head_stride = blocks->heads == 1 ? 0 : lists->length;
        lists->q_block = MIN(blocks->q_block, sequence->q_len);
        lists->count = ceil_div(sequence->q_len, lists->q_block);
        if (has_halves) run_halves(launch, blocks, sequence, lists);
    } else { /* one list for all queries; tiles take 128 of them, single queries find it whatever they are */
        run_all(launch, problem, sequence, lists);
        lists->q_block = path == NVIDIA_TOKEN ? sequence->q_len : MIN(DENSE_QUERIES, sequence->q_len);
    }
    lists->count = ceil_div(sequence->q_len, lists->q_block);
}

/* ---- attention ---- */

static void run_tiles(struct opencl_launch *launch, const struct forward_job *job,
                      const struct nvidia_shape *shape, const struct sequence *sequence,
                      const struct nvidia_tile_lists *lists, cl_mem core)
{
    const struct problem *problem = job->problem;
    struct opencl_options options = nvidia_options(shape);
    int64_t tiles_per_list = ceil_div(lists->q_block * problem->group, ROWS);
    opencl_option(&options, "MASKED", lists->mask != lists->list);
    opencl_launch_kernel(launch, NVIDIA_HOPPER_FILES "attention_tile_wgmma.cl", "attention_tile", options.text);
    nvidia_arg_rows(launch, job->q, sequence->batch, sequence->q_row);
    opencl_arg_mem(launch, core);
    opencl_arg_mem(launch, lists->list);
    opencl_arg_mem(launch, lists->mask);
    opencl_arg_long(launch, lists->base);
    opencl_arg_int(launch, (int32_t)lists->stride);
    opencl_arg_int(launch, (int32_t)lists->head_stride);
    nvidia_arg_rows(launch, job->out, sequence->batch, sequence->q_row);
    nvidia_arg_rows(launch, job->lse, sequence->batch, sequence->q_row);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, (int32_t)lists->length);
    opencl_arg_int(launch, (int32_t)nvidia_blocks(sequence->kv_len));
    opencl_arg_int(launch, (int32_t)lists->q_block);
    opencl_arg_int(launch, (int32_t)tiles_per_list);
    nvidia_arg_scale(launch, problem);
    nvidia_arg_sink(launch, problem);
    nvidia_run(launch, lists->count * tiles_per_list, problem->kv_heads, 1, 128 * WARPGROUPS);
}

static void run_tokens(struct opencl_launch *launch, const struct forward_job *job,
                       const struct nvidia_shape *shape, const struct sequence *sequence,
                       const struct nvidia_tile_lists *lists, cl_mem packed_k, cl_mem packed_v)
{
    const struct problem *problem = job->problem;
    struct nvidia_shape plain = *shape;
    plain.window = plain.softcap = plain.sink = false;
    struct opencl_options options = nvidia_options(&plain);
    opencl_launch_kernel(launch, NVIDIA_BLOCK_FILES "pack_blocks.cl", "pack_blocks", options.text);
    nvidia_arg_rows(launch, job->k, sequence->batch, sequence->k_row);
    nvidia_arg_rows(launch, job->v, sequence->batch, sequence->k_row);
    opencl_arg_mem(launch, packed_k);
    opencl_arg_mem(launch, packed_v);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    nvidia_run(launch, nvidia_blocks(sequence->kv_len), problem->kv_heads, 1, 256);

    options = nvidia_options(shape);
    opencl_launch_kernel(launch, NVIDIA_BLOCK_FILES "attention_token_mma.cl", "attention_token", options.text);
    nvidia_arg_rows(launch, job->q, sequence->batch, sequence->q_row);
    opencl_arg_mem(launch, packed_k);
    opencl_arg_mem(launch, packed_v);
    opencl_arg_mem(launch, lists->list);
    opencl_arg_long(launch, lists->base);
    nvidia_arg_rows(launch, job->out, sequence->batch, sequence->q_row);
    nvidia_arg_rows(launch, job->lse, sequence->batch, sequence->q_row);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, (int32_t)lists->length);
    opencl_arg_int(launch, (int32_t)nvidia_blocks(sequence->kv_len));
    opencl_arg_int(launch, (int32_t)lists->q_block);
    nvidia_arg_scale(launch, problem);
    nvidia_arg_sink(launch, problem);
    nvidia_run(launch, ceil_div(sequence->q_len, WARPS), problem->kv_heads, ceil_div(problem->group, 16),
               32 * WARPS);
}

clattn_status nvidia_tile_run(clattn_context *context, const struct forward_job *job,
                              const struct nvidia_shape *shape, enum nvidia_path path)
{
    const struct problem *problem = job->problem;
    int32_t columns_k = (shape->dim + 31) / 32 * 32, columns_v = (shape->dim_v + 15) / 16 * 16;
    cl_mem core = NULL, packed_k = NULL, packed_v = NULL;
    struct opencl_launch launch;
    opencl_launch_begin(context, job->sync, &launch);
    struct nvidia_tile_lists lists = nvidia_tile_lists_begin(&launch, problem, job->blocks, path);
    if (path == NVIDIA_TOKEN) {
        packed_k = keys_begin(&launch, problem, columns_k);
        packed_v = keys_begin(&launch, problem, columns_v);
    } else {
        core = keys_begin(&launch, problem, columns_k + columns_v);
    }
    for (int64_t s = 0; s < problem->count && !launch.status; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        if (sequence->q_len == 0) continue;
        nvidia_tile_lists_run(&launch, problem, job->blocks, sequence, path, &lists);
        if (path == NVIDIA_TOKEN) {
            run_tokens(&launch, job, shape, sequence, &lists, packed_k, packed_v);
        } else {
            nvidia_pack_cores(&launch, job, shape, sequence, core);
            run_tiles(&launch, job, shape, sequence, &lists, core);
        }
    }
    return opencl_launch_end(&launch);
}
