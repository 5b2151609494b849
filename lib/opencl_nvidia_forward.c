/* SPDX-License-Identifier: MIT */
/* Forward attention on NVIDIA cards: which path serves a job, and attention over inverted lists (a block at a
 * time, partial results merged; cl/attention_inverted_*.cl). */

#include "config.h"

#include "opencl_nvidia.h"

enum { ROWS = 512, ITEMS = 128 };

/* ---- choice ---- */

/* What inverted lists keep: a partial result and a logarithm of every row and listed block. */
static double partial_bytes(const struct problem *problem, int32_t topk)
{
    double rows = (double)problem->q_len_max * problem->q_heads * topk;
    return rows * ((problem->dim_v + 31) / 32 * 32) * 2;
}

static bool inverted_fits(const clattn_context *context, const struct forward_job *job)
{
    const struct opencl_device *device = &opencl_of(context)->device;
    const struct problem *problem = job->problem;
    double bytes = partial_bytes(problem, job->blocks->topk);
    return bytes <= (double)device->alloc_max && bytes <= (double)device->memory_bytes / 3 &&
           (double)problem->q_len_max * job->blocks->topk * problem->group < INT32_MAX;
}

/* Tiles of neighbouring queries: 128 rows of a list, whose masks have 32 bits. */
static bool union_fits(const struct forward_job *job)
{
    int32_t group = job->problem->group, queries = MAX(MIN(128 / group, 32), 1);
    return group <= 128 && queries * job->blocks->topk <= 512;
}

/* Are union tiles faster than inverted lists? At 64K tokens, 16 heads, dim 128 a union of u blocks costs 0.47 +
 * 0.031 u ms and lists of k blocks 0.21 k ms; both scale alike with everything else. Lists of the caller are
 * sampled when they are made; those of clattn_select stay on the device: queries beside each other choose alike
 * (10 blocks in the union of 8 on real keys, 39 on random ones, where both ways take the same time), unless a
 * tile holds many. */
static bool union_wins(const struct forward_job *job)
{
    const clattn_blocks *blocks = job->blocks;
    int32_t queries = MAX(MIN(128 / job->problem->group, 32), 1);
    if (!blocks->row_max) return queries <= 16;
    float size = blocks->union_blocks[queries <= 4 ? 0 : queries <= 8 ? 1 : queries <= 16 ? 2 : 3];
    return 0.47f + 0.031f * size < 0.21f * (float)blocks->topk;
}

enum { CHOICES_MAX = 4 };

/* Paths that could serve the job, the best first; returns their number. */
static int choices_of(const clattn_context *context, const struct forward_job *job, enum nvidia_path *choices)
{
    const clattn_blocks *blocks = job->blocks;
    const struct problem *problem = job->problem;
    int count = 0;
    if (!blocks || blocks->q_block > 1) {
        bool own_lists = !blocks || blocks->heads == problem->kv_heads;
        choices[count++] = NVIDIA_TILE;
        if (own_lists) choices[count++] = NVIDIA_TOKEN;
        return count;
    }
    bool fits = union_fits(job);
    if (fits && union_wins(job)) choices[count++] = NVIDIA_UNION;
    if (inverted_fits(context, job)) {
        choices[count++] = NVIDIA_INVERTED_HOPPER;
        choices[count++] = NVIDIA_INVERTED;
    } else if (fits && count == 0) {
        choices[count++] = NVIDIA_UNION;
    }
    if (count < CHOICES_MAX) choices[count++] = NVIDIA_TOKEN;
    return count;
}

static bool takes(const clattn_context *context, const struct forward_job *job)
{
    const struct problem *problem = job->problem;
    const clattn_blocks *blocks = job->blocks;
    if (!nvidia_takes_forward(context, problem, job->q->dtype) || job->k->dtype != job->q->dtype ||
        job->out->dtype != job->q->dtype || job->neighborhood)
        return false;
    if (!blocks) return true;
    bool has_halves = blocks->block == 2 * NVIDIA_LEAF && blocks->q_block > 1; /* which are cut in two */
    if ((blocks->block != NVIDIA_LEAF && !has_halves) || blocks->mask || blocks->starts) return false;
    if ((int64_t)problem->q_len_max * blocks->topk >= INT32_MAX / 2) return false;
    /* One list for all heads: only where the kernel's stride of heads can be 0. */
    return blocks->heads == problem->kv_heads || (blocks->heads == 1 && blocks->q_block > 1);
}

static struct nvidia_shape shape_of(const struct forward_job *job)
{
    const struct problem *problem = job->problem;
    return (struct nvidia_shape){.dtype = job->q->dtype,
                                 .dim = problem->dim,
                                 .dim_v = problem->dim_v,
                                 .group = problem->group,
                                 .causal = problem->causal,
                                 .aligned = nvidia_is_aligned(job->q) && nvidia_is_aligned(job->k) &&
                                            nvidia_is_aligned(job->v) && nvidia_is_aligned(job->out),
                                 .window = nvidia_has_window(problem),
                                 .softcap = problem->options.softcap > 0,
                                 .sink = problem->options.sink != NULL};
}

/* At 64K tokens, 16 heads, dim 128 tiles cost about 0.05 ms for each block of a coarse list where inverted
 * lists cost 0.21 ms, and the merge and one more start of everything 1 ms. Measured: with 10 blocks saved 0.96
 * to 1.04 of the time of the union, with 20 1.14 for groups of 1 and 1.38 of 4. Tiles of the union are better
 * for groups of more heads. */
bool nvidia_prefers_parts(const clattn_context *context, const struct forward_job *job)
{
    enum { TILE_ROWS = 64, GROUP_MAX = 4, SAVED_MIN = 16 };
    const struct nvidia *nvidia = opencl_of(context)->nvidia;
    const clattn_blocks *blocks = job->blocks;
    return nvidia && nvidia->tier == NVIDIA_HOPPER && job->out->dtype == job->q->dtype &&
           nvidia_takes(context, job->problem, job->q->dtype) && job->problem->group <= GROUP_MAX &&
           blocks->block == 64 && blocks->coarse->q_block >= TILE_ROWS && blocks->parts_saved >= SAVED_MIN;
}

clattn_status nvidia_forward(clattn_context *context, const struct forward_job *job, bool *done)
{
    enum nvidia_path choices[CHOICES_MAX];
    *done = false;
    if (!takes(context, job)) return CLATTN_SUCCESS;
    int count = choices_of(context, job, choices);
    for (int i = 0; i < count && !*done; i++) {
        struct nvidia_shape shape = shape_of(job);
        /* Only this path's programs are built for one list length. */
        if (choices[i] == NVIDIA_INVERTED_HOPPER) shape.topk = job->blocks->topk;
        *done = nvidia_has(context, choices[i], &shape) && nvidia_works(context, choices[i], &shape);
        if (!*done) continue;
        log_line(context, CLATTN_LOG_DEBUG, "attention by path %s", nvidia_path_name(choices[i]));
        return nvidia_forward_run(context, job, &shape, choices[i]);
    }
    return CLATTN_SUCCESS;
}

/* ---- inverted lists ---- */

struct partial {
    cl_mem out, lse, core;
};

static struct partial partial_begin(struct opencl_launch *launch, const struct forward_job *job, bool hopper)
{
    const struct problem *problem = job->problem;
    size_t rows = (size_t)problem->q_len_max * (size_t)problem->q_heads * (size_t)job->blocks->topk;
    size_t blocks = (size_t)nvidia_blocks(problem->kv_len_max);
    struct partial partial = {0};
    partial.out = opencl_launch_temporary(launch, rows * (size_t)((problem->dim_v + 31) / 32 * 32) * 2);
    partial.lse = opencl_launch_temporary(launch, rows * sizeof(float));
    if (hopper) {
        size_t columns = (size_t)((problem->dim + 31) / 32 * 32 + (problem->dim_v + 15) / 16 * 16);
        partial.core =
            opencl_launch_temporary(launch, (size_t)problem->kv_heads * blocks * NVIDIA_LEAF * columns * 2);
    }
    return partial;
}

static void run_blocks(struct opencl_launch *launch, const struct forward_job *job,
                       const struct nvidia_shape *shape, const struct sequence *sequence,
                       const struct nvidia_inverse *inverse, const struct partial *partial)
{
    static const char hopper[] = NVIDIA_HOPPER_FILES "attention_inverted.cl+attention_inverted_wgmma.cl";
    static const char mma[] = NVIDIA_BLOCK_FILES "attention_inverted.cl+attention_inverted_mma.cl";
    const struct problem *problem = job->problem;
    struct nvidia_shape own = *shape;
    own.sink = false; /* joins in the merge */
    struct opencl_options options = nvidia_options(&own);
    opencl_option(&options, "ROWS", ROWS);
    if (partial->core) opencl_option(&options, "TOPK", shape->topk);
    opencl_launch_kernel(launch, partial->core ? hopper : mma, "attention_inverted", options.text);
    nvidia_arg_rows(launch, job->q, sequence->batch, sequence->q_row);
    if (partial->core) {
        opencl_arg_mem(launch, partial->core);
    } else {
        nvidia_arg_rows(launch, job->k, sequence->batch, sequence->k_row);
        nvidia_arg_rows(launch, job->v, sequence->batch, sequence->k_row);
    }
    opencl_arg_mem(launch, inverse->pairs);
    opencl_arg_mem(launch, inverse->offset);
    opencl_arg_mem(launch, inverse->tile_offset);
    opencl_arg_mem(launch, partial->out);
    opencl_arg_mem(launch, partial->lse);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, (int32_t)sequence->kv_len);
    opencl_arg_int(launch, job->blocks->topk);
    opencl_arg_int(launch, (int32_t)inverse->n_blocks);
    opencl_arg_int(launch, (int32_t)inverse->entries);
    nvidia_arg_scale(launch, problem);
    nvidia_run(launch, inverse->tiles, problem->kv_heads, 1, ITEMS);
}

static void run_merge(struct opencl_launch *launch, const struct forward_job *job,
                      const struct nvidia_shape *shape, const struct sequence *sequence,
                      const struct partial *partial)
{
    const struct problem *problem = job->problem;
    const clattn_blocks *blocks = job->blocks;
    struct nvidia_shape own = *shape;
    own.window = own.softcap = false; /* are in the parts */
    struct opencl_options options = nvidia_options(&own);
    opencl_launch_kernel(launch, NVIDIA_BLOCK_FILES "attention_merge.cl", "attention_merge", options.text);
    opencl_arg_mem(launch, partial->out);
    opencl_arg_mem(launch, partial->lse);
    opencl_arg_storage(launch, &blocks->indices);
    opencl_arg_long(launch, sequence->list_row * blocks->heads * blocks->topk);
    nvidia_arg_rows(launch, job->out, sequence->batch, sequence->q_row);
    nvidia_arg_rows(launch, job->lse, sequence->batch, sequence->q_row);
    opencl_arg_int(launch, (int32_t)sequence->q_len);
    opencl_arg_int(launch, problem->kv_heads);
    opencl_arg_int(launch, blocks->topk);
    nvidia_arg_sink(launch, problem);
    int64_t items = sequence->q_len * problem->q_heads * ((problem->dim_v + 31) / 32 * 4);
    nvidia_run(launch, ceil_div(items, 256), 1, 1, 256);
}

static clattn_status inverted_run(clattn_context *context, const struct forward_job *job,
                                  const struct nvidia_shape *shape, bool hopper)
{
    const struct problem *problem = job->problem;
    struct opencl_launch launch;
    struct nvidia_inverse inverse = {.rows = ROWS};
    opencl_launch_begin(context, job->sync, &launch);
    nvidia_inverse_begin(&launch, &inverse, problem, job->blocks->topk);
    struct partial partial = partial_begin(&launch, job, hopper);
    for (int64_t s = 0; s < problem->count && !launch.status; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        if (sequence->q_len == 0) continue;
        struct nvidia_token_lists lists = nvidia_token_lists_of(job->blocks, sequence);
        nvidia_inverse_run(&launch, &inverse, problem, sequence, &lists, shape);
        if (hopper) nvidia_pack_cores(&launch, job, shape, sequence, partial.core);
        run_blocks(&launch, job, shape, sequence, &inverse, &partial);
        run_merge(&launch, job, shape, sequence, &partial);
    }
    return opencl_launch_end(&launch);
}

clattn_status nvidia_forward_run(clattn_context *context, const struct forward_job *job,
                                 const struct nvidia_shape *shape, enum nvidia_path path)
{
    if (path == NVIDIA_INVERTED || path == NVIDIA_INVERTED_HOPPER)
        return inverted_run(context, job, shape, path == NVIDIA_INVERTED_HOPPER);
    return nvidia_tile_run(context, job, shape, path);
}
