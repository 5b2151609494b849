/* SPDX-License-Identifier: MIT */
/* Backward driver.
 *
 * D for every row and head; then, through the inverse of the block lists, one key block after the other for dk
 * and dv, and for dq in turns (backward_turns.h); where turns are not possible dq comes from tiles of query
 * rows. A block that very many rows list is cut into segments with accumulators of their own, which are added
 * in order. Cuts do not depend on the number of threads, so neither do the bits. */

#include "config.h"

#include "backward.h"
#include "backward_once.h"
#include "backward_turns.h"
#include "compensation.h"
#include "cpu_tiles.h"
#include "inverse.h"
#include "reference.h"
#include "turns.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One piece of work of the second half. */
struct item {
    int64_t sequence, block;
    int64_t key, keys; /* first key of the piece, and their number */
    int32_t kv_head;
    int32_t part_count;
    int64_t first_part; /* index into parts */
    int32_t segment;    /* index of this piece among those of the block ... */
    int32_t segments;   /* ... and their number; results of more than one go through `partial` */
    int64_t partial;    /* index of the accumulator, when segments > 1 */
};

struct plan {
    const struct backward_job *job;
    struct inverse inverse;
    int64_t *delta_base; /* [sequences] first element of a sequence's [q_len][q_heads] */
    float *delta;
    struct item *items;
    struct key_part *parts;
    int64_t item_count, part_count, partial_count;
    float *partial;
    double *dbias;                /* [items][group]; NULL: not wanted */
    int64_t *turns;               /* [sequences][q_len][q_heads] like delta; NULL: dq has a walk of its own */
    int64_t next;                 /* item */
    int64_t dk_floats, dv_floats; /* of one accumulator */
    int32_t pack;                 /* rows x heads */
    struct compensation compensation;
};

static void plan_free(struct plan *plan)
{
    inverse_free(&plan->inverse);
    free(plan->delta_base);
    free(plan->delta);
    free(plan->items);
    free(plan->parts);
    free(plan->partial);
    free(plan->dbias);
    free(plan->turns);
    compensation_free(&plan->compensation);
}

void gradient_row_write(const struct backward_job *job, const clattn_tensor *tensor, int64_t batch, int64_t row,
                        int32_t head, const float *values)
{
    void *place = tensor_row(tensor, batch, row, head);
    if (tensor->dtype == CLATTN_FLOAT32 && !job->accumulate) {
        memcpy(place, values, (size_t)tensor->dim * sizeof *values);
        return;
    }
    for (int64_t d = 0; d < tensor->dim; d++)
        store_element(place, tensor->dtype, d,
                      job->accumulate ? load_element(place, tensor->dtype, d) + values[d] : values[d]);
}

/* ---- D ---- */

/* Four sums, so that additions need not wait for each other. */
static double dot_floats(const float *a, const float *b, int32_t count)
{
    double sum[4] = {0, 0, 0, 0};
    int32_t d = 0;
    for (; d + 4 <= count; d += 4)
        for (int n = 0; n < 4; n++)
            sum[n] += (double)a[d + n] * (double)b[d + n];
    for (; d < count; d++)
        sum[0] += (double)a[d] * (double)b[d];
    return sum[0] + sum[1] + (sum[2] + sum[3]);
}

static float row_delta(const struct backward_job *job, const struct sequence *sequence, int64_t i, int32_t head)
{
    int64_t row = sequence->q_row + i;
    const void *dout = tensor_row(job->dout, sequence->batch, row, head),
               *out = tensor_row(job->out, sequence->batch, row, head);
    bool are_floats = job->dout->dtype == CLATTN_FLOAT32 && job->out->dtype == CLATTN_FLOAT32;
    double sum = are_floats ? dot_floats(dout, out, job->problem->dim_v) : 0;
    for (int32_t d = 0; d < job->problem->dim_v && !are_floats; d++)
        sum += (double)load_element(dout, job->dout->dtype, d) * (double)load_element(out, job->out->dtype, d);
    if (job->dlse)
        sum -= (double)load_element(tensor_row(job->dlse, sequence->batch, row, head), CLATTN_FLOAT32, 0);
    return (float)sum;
}

static void deltas(struct plan *plan, const struct cpu_team *team)
{
    const struct problem *problem = plan->job->problem;
#pragma omp parallel num_threads(team->threads)
    {
        struct cpu_binding *binding = cpu_team_enter(team);
        for (int64_t s = 0; s < problem->count; s++) {
            const struct sequence *sequence = &problem->sequences[s];
            float *delta = plan->delta + plan->delta_base[s];
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < sequence->q_len; i++)
                for (int32_t head = 0; head < problem->q_heads; head++)
                    delta[i * problem->q_heads + head] = row_delta(plan->job, sequence, i, head);
        }
        cpu_team_leave(team, binding);
    }
}

/* ---- plan of the second half ---- */

/* Pairs of (query row, block) that one accumulator may take: it costs at most 8 bytes a pair. */
static int64_t segment_pairs(const struct plan *plan)
{
    return MAX(4096, (plan->dk_floats + plan->dv_floats) * (int64_t)sizeof(float) / 4);
}

/* Query rows of a sequence that see any of the keys first .. end - 1. */
static struct key_part seeing_rows(const struct problem *problem, const struct sequence *sequence,
                                   int32_t kv_head, int64_t first, int64_t end)
{
    int64_t shift = sequence->kv_len - sequence->q_len, window = problem->options.window;
    int64_t from = problem->causal ? first : window ? first - window + 1 : shift; /* positions of rows */
    int64_t to = window ? end - 1 + window : sequence->kv_len;
    from = MAX(from - shift, 0);
    to = MIN(to - shift, sequence->q_len);
    return (struct key_part){kv_head * problem->group, problem->group, NULL, from, MAX(to - from, 0)};
}

/* The rows that list a block, by list head; returns how many parts there are. */
static int32_t block_parts(const struct plan *plan, const struct item *item, struct key_part *parts)
{
    int64_t s = item->sequence;
    int32_t kv_head = item->kv_head;
    const struct backward_job *job = plan->job;
    const struct problem *problem = job->problem;
    const clattn_blocks *blocks = job->blocks;
    if (!blocks) {
        parts[0] = seeing_rows(problem, &problem->sequences[s], kv_head, item->key, item->key + item->keys);
        return 1;
    }
    bool per_query_head = blocks->heads == problem->q_heads;
    int32_t heads = per_query_head ? 1 : problem->group, count = problem->group / heads;
    for (int32_t n = 0; n < count; n++) {
        int32_t head = kv_head * problem->group + n * heads;
        int32_t list_head = (int32_t)((int64_t)head * blocks->heads / problem->q_heads);
        int64_t bin = inverse_bin(&plan->inverse, problem, blocks, s, list_head, item->block);
        int64_t first = plan->inverse.first[bin];
        parts[n] =
            (struct key_part){head, heads, plan->inverse.rows + first, 0, plan->inverse.first[bin + 1] - first};
    }
    return count;
}

/* Cuts the rows of one piece into items; place false: only counts. */
static void piece_items(struct plan *plan, struct item item, struct key_part *parts, bool place)
{
    int32_t count = block_parts(plan, &item, parts), segments = 0;
    int64_t q_block = plan->job->problem->q_block, most = MAX(segment_pairs(plan) / q_block, 1), total = 0;
    for (int32_t n = 0; n < count; n++) {
        total += parts[n].count;
        segments += (int32_t)ceil_div(parts[n].count, most);
    }
    item.segments = total <= most ? 1 : segments;
    if (item.segments == 1) { /* every part in one piece */
        item.part_count = count;
        item.first_part = plan->part_count;
        if (place) {
            memcpy(plan->parts + plan->part_count, parts, (size_t)count * sizeof *parts);
            plan->items[plan->item_count] = item;
        }
        plan->part_count += count;
        plan->item_count++;
        return;
    }
    item.part_count = 1;
    for (int32_t n = 0; n < count; n++)
        for (int64_t first = 0; first < parts[n].count; first += most, item.segment++) {
            struct key_part part = parts[n];
            if (part.rows) part.rows += first;
            part.first_row += first;
            part.count = MIN(most, parts[n].count - first);
            item.first_part = plan->part_count;
            item.partial = plan->partial_count;
            if (place) {
                plan->parts[plan->part_count] = part;
                plan->items[plan->item_count] = item;
            }
            plan->part_count++;
            plan->item_count++;
            plan->partial_count++;
        }
}

static void all_items(struct plan *plan, struct key_part *parts, bool place)
{
    const struct problem *problem = plan->job->problem;
    plan->item_count = plan->part_count = plan->partial_count = 0;
    for (int64_t s = 0; s < problem->count; s++) {
        struct key_blocks keys = key_blocks_listed(plan->job->blocks, &problem->sequences[s]);
        for (int32_t h = 0; h < problem->kv_heads; h++)
            for (int64_t b = 0; b < keys.count; b++) {
                int64_t most = backward_block(plan->job), end = key_block_end(&keys, b);
                for (int64_t key = key_block_first(&keys, b); key < end; key += most)
                    piece_items(plan, (struct item){s, b, key, MIN(most, end - key), h, 0, 0, 0, 0, 0}, parts,
                                place);
            }
    }
}

static clattn_status plan_items(clattn_context *context, struct plan *plan, int64_t delta_count)
{
    const struct problem *problem = plan->job->problem;
    struct key_part *parts = malloc((size_t)problem->group * sizeof *parts);
    if (parts) {
        all_items(plan, parts, false);
        plan->items = malloc((size_t)(plan->item_count + 1) * sizeof *plan->items);
        plan->parts = malloc((size_t)(plan->part_count + 1) * sizeof *plan->parts);
        size_t floats = (size_t)(plan->partial_count * (plan->dk_floats + plan->dv_floats));
        plan->partial = malloc((floats + 1) * sizeof *plan->partial);
        if (plan->job->dbias)
            plan->dbias = calloc((size_t)(plan->item_count * problem->group + 1), sizeof(double));
    }
    if (!plan->items || !plan->parts || !plan->partial || !plan->dbias != !plan->job->dbias) {
        free(parts);
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %lld key blocks",
                    (long long)plan->item_count);
    }
    all_items(plan, parts, true);
    free(parts);
    if (!backward_turns_wanted(plan->job, plan->item_count)) return CLATTN_SUCCESS;
    plan->turns = malloc((size_t)(delta_count + 1) * sizeof *plan->turns);
    return plan->turns ? CLATTN_SUCCESS : fail(context, CLATTN_OUT_OF_MEMORY, "no memory for turns");
}

/* once: for backward_once, which needs no items. */
static clattn_status plan_make(clattn_context *context, const struct backward_job *job, bool once,
                               struct plan *plan)
{
    const struct problem *problem = job->problem;
    int64_t rows = 0;
    *plan = (struct plan){.job = job,
                          .dk_floats = backward_block(job) * gradient_stride(problem->dim),
                          .dv_floats = backward_block(job) * gradient_stride(problem->dim_v),
                          .delta_base = malloc((size_t)(problem->count + 1) * sizeof *plan->delta_base)};
    if (!plan->delta_base)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %lld sequences", (long long)problem->count);
    for (int64_t s = 0; s < problem->count; s++) {
        plan->delta_base[s] = rows * problem->q_heads;
        rows += problem->sequences[s].q_len;
    }
    plan->delta = malloc((size_t)(rows * problem->q_heads + 1) * sizeof *plan->delta);
    if (!plan->delta)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %lld query rows", (long long)rows);
    if (job->blocks) {
        clattn_status status = inverse_make(context, problem, job->blocks, job->blocks->indices.host,
                                            job->blocks->counts.host, &plan->inverse);
        if (status) return status;
    }
    return once ? CLATTN_SUCCESS : plan_items(context, plan, rows * problem->q_heads);
}

/* ---- work ---- */

static int run_queries(const struct cpu_state *state, const struct plan *plan, const struct cpu_team *team)
{
    const struct cpu_kernels *kernels = &state->kernels;
    const struct backward_job *job = plan->job;
    const struct problem *problem = job->problem;
    struct tiling tiling = tiling_of(state, problem, job->blocks);
    size_t bytes = kernels->backward_query_scratch(job, tiling.rows_most, tiling.heads);
    int failed = 0;
#pragma omp parallel num_threads(team->threads)
    {
        struct cpu_binding *binding = cpu_team_enter(team);
        void *scratch = cpu_scratch(bytes);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
        for (int64_t s = 0; s < problem->count; s++) {
            int64_t tiles = tiling_tiles(&tiling, problem, job->blocks, s);
#pragma omp for schedule(dynamic, 4) nowait
            for (int64_t n = 0; n < tiles; n++) {
                struct forward_tile tile;
                if (scratch && tile_of(problem, job->blocks, &tiling, s, n, &tile))
                    kernels->backward_query(job, &tile, plan->delta + plan->delta_base[s], scratch);
            }
        }
        free(scratch);
        cpu_team_leave(team, binding);
    }
    return failed;
}

/* Writes the gradients of one piece's keys and values: dk, then dv. */
static void write_block(const struct plan *plan, const struct item *item, float *sums)
{
    const struct backward_job *job = plan->job;
    const float *dk = sums, *dv = sums + plan->dk_floats;
    if (plan->compensation.sums)
        compensation_add(&plan->compensation, job, item->sequence, item->kv_head, item->block, sums);
    const struct problem *problem = job->problem;
    const struct sequence *sequence = &problem->sequences[item->sequence];
    for (int64_t j = 0; j < item->keys; j++) {
        int64_t row = sequence->k_row + item->key + j;
        gradient_row_write(job, job->dk, sequence->batch, row, item->kv_head,
                           dk + j * gradient_stride(problem->dim));
        gradient_row_write(job, job->dv, sequence->batch, row, item->kv_head,
                           dv + j * gradient_stride(problem->dim_v));
    }
}

static struct key_tile item_tile(const struct plan *plan, const struct item *item, float *own)
{
    int64_t floats = plan->dk_floats + plan->dv_floats;
    struct key_tile tile = {
        .sequence = &plan->job->problem->sequences[item->sequence],
        .kv_head = item->kv_head,
        .block = item->block,
        .first = item->key,
        .count = item->keys,
        .q_block = plan->job->problem->q_block,
        .pack = plan->pack,
        .parts = plan->parts + item->first_part,
        .part_count = item->part_count,
        .delta = plan->delta + plan->delta_base[item->sequence],
        .dk = item->segments == 1 ? own : plan->partial + item->partial * floats,
        .has_dq = plan->turns != NULL,
        .turns = plan->turns ? plan->turns + plan->delta_base[item->sequence] : NULL,
        .dbias = plan->dbias ? plan->dbias + (item - plan->items) * plan->job->problem->group : NULL};
    tile.dv = tile.dk + plan->dk_floats;
    return tile;
}

static void run_item(const struct cpu_kernels *kernels, const struct plan *plan, const struct item *item,
                     float *own, void *scratch)
{
    size_t floats = (size_t)(plan->dk_floats + plan->dv_floats);
    struct key_tile tile = item_tile(plan, item, own), next;
    int64_t n = __atomic_load_n(&plan->next, __ATOMIC_RELAXED); /* another thread may take it */
    if (n < plan->item_count) {
        next = item_tile(plan, &plan->items[n], own);
        tile.next = &next;
    }
    memset(tile.dk, 0, floats * sizeof *own);
    if (key_tile_rows(&tile) > 0) kernels->backward_key(plan->job, &tile, scratch);
    if (item->segments == 1 && plan->job->dk) write_block(plan, item, own);
}

/* Adds up the segments of the block whose first one is `item`. */
static void merge_item(const struct plan *plan, const struct item *item)
{
    int64_t floats = plan->dk_floats + plan->dv_floats;
    float *sum = plan->partial + item->partial * floats;
    for (int32_t segment = 1; segment < item->segments; segment++)
        for (int64_t n = 0; n < floats; n++)
            sum[n] += sum[segment * floats + n];
    if (plan->job->dk) write_block(plan, item, sum);
}

/* Of the gradient of the queries, and their turns: first written by the threads that work on them. */
static void clear_queries(const struct plan *plan)
{
    const struct problem *problem = plan->job->problem;
    for (int64_t s = 0; s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
#pragma omp for schedule(static)
        for (int64_t i = 0; i < sequence->q_len; i++) {
            int64_t *turns = plan->turns + plan->delta_base[s] + i * problem->q_heads;
            memset(turns, 0, (size_t)problem->q_heads * sizeof *turns);
            if (!plan->job->accumulate) backward_clear_row(plan->job, sequence, i);
        }
    }
}

static int run_keys(const struct cpu_kernels *kernels, struct plan *plan, const struct cpu_team *team)
{
    size_t bytes = kernels->backward_key_scratch(plan->job);
    size_t own_bytes = (size_t)(plan->dk_floats + plan->dv_floats) * sizeof(float);
    int failed = 0;
#pragma omp parallel num_threads(team->threads)
    {
        struct cpu_binding *binding = cpu_team_enter(team);
        void *scratch = cpu_scratch(bytes);
        float *own = cpu_scratch(own_bytes);
        if (!scratch || !own) {
#pragma omp atomic write
            failed = 1;
        }
        if (plan->turns) clear_queries(plan);
        if (scratch && own)
            for (int64_t n; (n = turn_next(&plan->next)) < plan->item_count;)
                run_item(kernels, plan, &plan->items[n], own, scratch);
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < plan->item_count; n++)
            if (plan->items[n].segments > 1 && plan->items[n].segment == 0) merge_item(plan, &plan->items[n]);
        free(scratch);
        free(own);
        cpu_team_leave(team, binding);
    }
    return failed;
}

/* ---- gradients of the options ---- */

static void clear(const clattn_tensor *tensor)
{
    for (int64_t b = 0; b < tensor->batch; b++)
        for (int64_t i = 0; i < tensor->len; i++)
            for (int64_t h = 0; h < tensor->heads; h++)
                *(float *)tensor_row(tensor, b, i, h) = 0;
}

/* Sums of the items' shares, in their order. */
static void write_dbias(const struct plan *plan)
{
    const clattn_tensor *dbias = plan->job->dbias;
    const struct problem *problem = plan->job->problem;
    if (!plan->job->accumulate) clear(dbias);
    for (int64_t n = 0; n < plan->item_count; n++) {
        const struct item *item = &plan->items[n];
        int64_t batch = dbias->batch == 1 ? 0 : problem->sequences[item->sequence].batch;
        for (int32_t g = 0; g < problem->group; g++) {
            float *to = tensor_row(dbias, batch, item->block, item->kv_head * problem->group + g);
            *to = (float)((double)*to + plan->dbias[n * problem->group + g]);
        }
    }
}

/* dsink = - sum over rows of exp(sink - lse) D, head by head. */
static void write_dsink(const struct plan *plan, int threads)
{
    const struct backward_job *job = plan->job;
    const struct problem *problem = job->problem;
    (void)threads;
    if (!job->accumulate) clear(job->dsink);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int32_t head = 0; head < problem->q_heads; head++) {
        double sink = (double)*(float *)tensor_row(problem->options.sink, 0, 0, head), sum = 0;
        for (int64_t s = 0; s < problem->count; s++) {
            const struct sequence *sequence = &problem->sequences[s];
            const float *delta = plan->delta + plan->delta_base[s];
            for (int64_t i = 0; i < sequence->q_len; i++) {
                double lse = (double)*(float *)tensor_row(job->lse, sequence->batch, sequence->q_row + i, head);
                if (lse > -INFINITY) sum -= exp(sink - lse) * (double)delta[i * problem->q_heads + head];
            }
        }
        float *to = tensor_row(job->dsink, 0, 0, head);
        *to = (float)((double)*to + sum);
    }
}

clattn_status cpu_backward(clattn_context *context, const struct backward_job *job)
{
    const struct cpu_state *state = context->state;
    const struct cpu_kernels *kernels = &state->kernels;
    struct cpu_team team = cpu_team(context);
    int threads = team.threads, failed = 0;
    struct plan plan;
    if (!kernels->backward_key) return backward_ref(context, job);
    bool once = (job->dq || job->dk) && backward_once_wanted(kernels, job);
    clattn_status status = plan_make(context, job, once, &plan);
    plan.pack = pack_rows(state, job);
    if (!status) deltas(&plan, &team);
    if (!status && job->compensation != 0 && job->dk && job->blocks)
        status = compensation_make(context, job, &plan.inverse, plan.delta, plan.delta_base, plan.pack,
                                   &plan.compensation);
    if (!status) {
        if (once)
            failed = !backward_once(kernels, job, &plan.inverse, plan.delta, plan.delta_base, plan.pack, &team);
        if (job->dq && !once && !plan.turns) failed = run_queries(state, &plan, &team);
        if ((job->dk || job->dbias || plan.turns) && !once) failed |= run_keys(kernels, &plan, &team);
        if (job->dbias) write_dbias(&plan);
        if (job->dsink) write_dsink(&plan, threads);
        if (failed)
            status =
                fail(context, CLATTN_OUT_OF_MEMORY, "no memory for the scratch space of %d threads", threads);
    }
    plan_free(&plan);
    return status;
}
