/* SPDX-License-Identifier: MIT */
/* The decode cache against a plain model of it: random operations, and after each of them every sequence that
 * it touched has the model's length, pages, keys, values and statistics, bit for bit. Steps are compared with
 * attention over the listed leaves in double precision. 10^5 operations on the CPU and on the reference
 * together. */

#include "cache.h" /* before CMocka's macros */

#include "cache_model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 2, Q_HEADS = GROUP * MODEL_HEADS, BATCH_TOKENS_MAX = 64 };

struct run {
    const struct target *target;
    clattn_context *context; /* of one thread */
    struct model *model;
    clattn_cache *cache;
    struct random random;
    clattn_dtype given; /* dtype of what is appended */
    int64_t operation;
    int64_t steps, refused; /* to see that they happen */
};

struct batch {
    int32_t count, sequences[MODEL_SEQUENCES], lens[MODEL_SEQUENCES];
    int64_t rows;
    struct model_token tokens[BATCH_TOKENS_MAX];
    float q[BATCH_TOKENS_MAX][Q_HEADS][MODEL_DIM];
};

static void check(const struct run *run, bool right, const char *what, int sequence)
{
    if (!right)
        fail_msg("%s: operation %lld: %s of sequence %d differ", run->target->label, (long long)run->operation,
                 what, sequence);
}

/* ---- what the cache holds ---- */

static void read_floats(const struct run *run, size_t offset, int64_t index, float *to, int64_t count)
{
    clattn_context *context = run->context;
    check_success(run->target,
                  context->backend->storage_read(context, &run->cache->memory,
                                                 offset + (size_t)index * sizeof *to, to,
                                                 (size_t)count * sizeof *to),
                  "storage_read");
}

/* One row of keys or values as attention sees it. */
static void read_row(const struct run *run, size_t at, size_t scales, int64_t row, float *to)
{
    clattn_context *context = run->context;
    clattn_dtype dtype = run->cache->desc.dtype;
    unsigned char bytes[MODEL_DIM * sizeof(float)];
    float scale = 1;
    size_t row_bytes = MODEL_DIM * element_bytes(dtype);
    check_success(run->target,
                  context->backend->storage_read(context, &run->cache->memory, at + (size_t)row * row_bytes,
                                                 bytes, row_bytes),
                  "storage_read");
    if (dtype == CLATTN_INT8) read_floats(run, scales, row, &scale, 1);
    clattn_tensor view = clattn_tensor_bthd(bytes, dtype, 1, 1, 1, MODEL_DIM);
    for (int d = 0; d < MODEL_DIM; d++)
        to[d] = scale * (float)tensor_get(&view, 0, 0, 0, d);
}

static void check_tokens(const struct run *run, int s, int64_t first)
{
    const struct cache_layout *layout = &run->cache->layout;
    const struct model_sequence *want = &run->model->at[s];
    for (int64_t j = first; j < want->length; j++)
        for (int32_t h = 0; h < MODEL_HEADS; h++) {
            float key[MODEL_DIM], value[MODEL_DIM];
            int64_t page = cache_table(run->cache, s)[j / run->cache->page_size];
            int64_t row = cache_row(run->cache, page, h, j % run->cache->page_size);
            read_row(run, layout->keys, layout->key_scales, row, key);
            read_row(run, layout->values, layout->value_scales, row, value);
            check(run, memcmp(key, want->token[j].stored_key[h], sizeof key) == 0, "keys", s);
            check(run, memcmp(value, want->token[j].stored_value[h], sizeof value) == 0, "values", s);
        }
}

static void check_level(const struct run *run, int s, int32_t h, int level, int first,
                        const struct model_pyramid *p)
{
    float got[MODEL_NODES][2][MODEL_DIM];
    int64_t node = cache_head(run->cache, s, h) * run->cache->nodes + run->cache->level_first[level];
    read_floats(run, run->cache->layout.means, node * MODEL_DIM, &got[0][0][0], p->nodes[level] * MODEL_DIM);
    check(run, memcmp(got, p->mean[first], (size_t)p->nodes[level] * sizeof *p->mean) == 0, "means", s);
    if (!run->cache->desc.bounds) return;
    read_floats(run, run->cache->layout.bounds, node * 2 * MODEL_DIM, &got[0][0][0],
                p->nodes[level] * 2 * MODEL_DIM);
    for (int n = 0; n < p->nodes[level]; n++) {
        check(run, memcmp(got[n][0], p->least[first + n], sizeof got[n][0]) == 0, "minima", s);
        check(run, memcmp(got[n][1], p->most[first + n], sizeof got[n][1]) == 0, "maxima", s);
    }
}

static void check_parts(const struct run *run, int s, int32_t h)
{
    int64_t quarter = run->cache->desc.leaf / 4, length = run->model->at[s].length;
    int64_t first = cache_head(run->cache, s, h) * run->cache->leaves * 4;
    for (int64_t at = 0; at < length; at += quarter) {
        float want[3][MODEL_DIM], got[3][MODEL_DIM];
        model_part(run->model, s, h, at, at + quarter < length ? at + quarter : length, want);
        read_floats(run, run->cache->layout.parts, (first + at / quarter) * 3 * MODEL_DIM, &got[0][0],
                    3 * MODEL_DIM);
        check(run, memcmp(got, want, sizeof got) == 0, "quarters", s);
    }
}

/* first: the tokens from here on are looked at, too. */
static void check_sequence(const struct run *run, int s, int64_t first)
{
    struct model_pyramid pyramid;
    check(run, clattn_cache_length(run->cache, s) == run->model->at[s].length, "lengths", s);
    check_tokens(run, s, first);
    for (int32_t h = 0; h < MODEL_HEADS; h++) {
        model_pyramid(run->model, s, h, &pyramid);
        for (int level = 1, node = 0; level <= pyramid.levels; node += pyramid.nodes[level++])
            check_level(run, s, h, level, node, &pyramid);
        if (run->cache->desc.bounds) check_parts(run, s, h);
    }
}

static void check_pages(const struct run *run)
{
    clattn_cache_info info = {.size = sizeof info};
    check_success(run->target, clattn_cache_describe(run->cache, &info), "cache_describe");
    check(run, info.pages_free == model_pages_free(run->model), "free pages", 0);
}

/* ---- operations ---- */

static float random_element(struct run *run)
{
    double x = random_below(&run->random, 40) ? random_normal(&run->random) : 0;
    unsigned char bytes[4];
    clattn_tensor one = clattn_tensor_bthd(bytes, run->given, 1, 1, 1, 1);
    tensor_set(&one, 0, 0, 0, 0, x);
    return (float)tensor_get(&one, 0, 0, 0, 0);
}

static void batch_fill(struct run *run, struct batch *batch)
{
    int32_t sequences = run->model->desc.sequences, first = (int32_t)random_below(&run->random, sequences);
    batch->count = 1 + (int32_t)random_below(&run->random, sequences);
    batch->rows = 0;
    for (int32_t n = 0; n < batch->count; n++) {
        int64_t most = random_below(&run->random, 8) ? 3 : BATCH_TOKENS_MAX / sequences;
        batch->sequences[n] = (first + n) % sequences;
        batch->lens[n] = (int32_t)random_below(&run->random, most + 1);
        batch->rows += batch->lens[n];
    }
    for (int64_t i = 0; i < batch->rows; i++) {
        for (int h = 0; h < MODEL_HEADS; h++)
            for (int d = 0; d < MODEL_DIM; d++) {
                batch->tokens[i].key[h][d] = random_element(run);
                batch->tokens[i].value[h][d] = random_element(run);
            }
        for (int h = 0; h < Q_HEADS; h++)
            for (int d = 0; d < MODEL_DIM; d++)
                batch->q[i][h][d] = random_element(run);
    }
}

static clattn_tensor tensor_of(const struct run *run, void *data, int64_t rows, int64_t heads)
{
    return clattn_tensor_bthd(data, run->given, 1, rows, heads, MODEL_DIM);
}

static void batch_encode(const struct batch *batch, clattn_tensor *q, clattn_tensor *k, clattn_tensor *v)
{
    for (int64_t i = 0; i < batch->rows; i++)
        for (int d = 0; d < MODEL_DIM; d++) {
            for (int h = 0; h < MODEL_HEADS; h++) {
                tensor_set(k, 0, i, h, d, (double)batch->tokens[i].key[h][d]);
                tensor_set(v, 0, i, h, d, (double)batch->tokens[i].value[h][d]);
            }
            for (int h = 0; h < Q_HEADS; h++)
                tensor_set(q, 0, i, h, d, (double)batch->q[i][h][d]);
        }
}

/* One row of a step against attention over its list. */
static void check_row(const struct run *run, const struct batch *batch, int s, int64_t position, int64_t i,
                      int head, const int32_t *list, int32_t topk, const float *out, float lse)
{
    const struct model_sequence *sequence = &run->model->at[s];
    double sum = 0, most = -INFINITY, value[MODEL_DIM] = {0}, z[MODEL_TOKENS];
    int32_t leaf = run->model->desc.leaf;
    for (int32_t n = 0; n < topk && list[n] >= 0; n++)
        for (int64_t j = (int64_t)list[n] * leaf; j < (list[n] + 1) * (int64_t)leaf && j <= position; j++) {
            z[j] = 0;
            for (int d = 0; d < MODEL_DIM; d++)
                z[j] += (double)batch->q[i][head][d] * (double)sequence->token[j].stored_key[head / GROUP][d];
            z[j] /= sqrt(MODEL_DIM);
            most = fmax(most, z[j]);
        }
    for (int32_t n = 0; n < topk && list[n] >= 0; n++)
        for (int64_t j = (int64_t)list[n] * leaf; j < (list[n] + 1) * (int64_t)leaf && j <= position; j++) {
            sum += exp(z[j] - most);
            for (int d = 0; d < MODEL_DIM; d++)
                value[d] += exp(z[j] - most) * (double)sequence->token[j].stored_value[head / GROUP][d];
        }
    check(run, list[0] >= 0 && list[0] <= position / leaf, "lists", s);
    check(run, fabs(lse - (most + log(sum))) <= 1e-5 * (1 + fabs(most)), "lse", s);
    for (int d = 0; d < MODEL_DIM; d++)
        check(run, fabs(out[d] - value[d] / sum) <= 2e-5, "outs", s);
}

static void check_step(const struct run *run, const struct batch *batch, clattn_blocks *blocks,
                       float out[][Q_HEADS][MODEL_DIM], float lse[][Q_HEADS])
{
    enum { TOPK = 8 };
    int32_t lists[BATCH_TOKENS_MAX][MODEL_HEADS][TOPK];
    check_success(run->target, clattn_blocks_read(run->context, blocks, &lists[0][0][0], NULL), "blocks_read");
    for (int64_t n = 0, row = 0; n < batch->count; n++)
        for (int64_t i = 0; i < batch->lens[n]; i++, row++)
            for (int h = 0; h < Q_HEADS; h++)
                check_row(run, batch, batch->sequences[n],
                          run->model->at[batch->sequences[n]].length - batch->lens[n] + i, row, h,
                          lists[row][h / GROUP], TOPK, out[row][h], lse[row][h]);
}

/* Appends, or decodes; the model first, on a copy, so that a refusal leaves both as they were. */
static void do_append(struct run *run, bool is_step)
{
    static unsigned char data[3][BATCH_TOKENS_MAX * Q_HEADS * MODEL_DIM * sizeof(float)];
    static float out_data[BATCH_TOKENS_MAX][Q_HEADS][MODEL_DIM], lse_data[BATCH_TOKENS_MAX][Q_HEADS];
    static struct batch batch;
    static struct model before;
    batch_fill(run, &batch);
    clattn_tensor q = tensor_of(run, data[0], batch.rows, Q_HEADS),
                  k = tensor_of(run, data[1], batch.rows, MODEL_HEADS);
    clattn_tensor v = tensor_of(run, data[2], batch.rows, MODEL_HEADS);
    clattn_tensor out = clattn_tensor_bthd(out_data, CLATTN_FLOAT32, 1, batch.rows, Q_HEADS, MODEL_DIM);
    clattn_tensor lse = clattn_tensor_bthd(lse_data, CLATTN_FLOAT32, 1, batch.rows, Q_HEADS, 1);
    batch_encode(&batch, &q, &k, &v);
    before = *run->model;
    bool fits = true;
    for (int64_t n = 0, row = 0; n < batch.count && fits; row += batch.lens[n++])
        fits = model_append(run->model, batch.sequences[n], batch.tokens + row, batch.lens[n]);
    if (!fits) *run->model = before;

    clattn_context *context = run->context;
    clattn_blocks *blocks = NULL;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    select.leaf = run->model->desc.leaf;
    clattn_status status =
        is_step
            ? clattn_decode(context, run->cache, NULL, &select, batch.count, batch.sequences, batch.lens, &q,
                            &k, &v, &out, &lse, &blocks, NULL)
            : clattn_cache_append(context, run->cache, batch.count, batch.sequences, batch.lens, &k, &v, NULL);
    if (fits) check_success(run->target, status, is_step ? "decode" : "cache_append");
    check(run, status == (fits ? CLATTN_SUCCESS : CLATTN_OUT_OF_PAGES), "statuses", batch.sequences[0]);
    run->refused += !fits;
    run->steps += fits && is_step;
    if (fits && is_step) check_step(run, &batch, blocks, out_data, lse_data);
    clattn_blocks_release(context, blocks);
    for (int32_t n = 0; n < batch.count; n++) {
        int64_t length = run->model->at[batch.sequences[n]].length, added = fits ? batch.lens[n] : 0;
        check_sequence(run, batch.sequences[n], length - added);
    }
}

static void do_truncate(struct run *run)
{
    int s = (int)random_below(&run->random, run->model->desc.sequences);
    int64_t length = run->model->at[s].length, less = random_below(&run->random, 4) ? 5 : length + 1;
    int64_t to = length - random_below(&run->random, less);
    if (to < 0 || random_below(&run->random, 10) == 0) to = 0;
    check_success(run->target, clattn_cache_truncate(run->context, run->cache, s, to, NULL), "truncate");
    model_truncate(run->model, s, to);
    check_sequence(run, s, to);
}

static void do_share(struct run *run)
{
    int sequences = run->model->desc.sequences, from = (int)random_below(&run->random, sequences);
    int to = (int)((from + 1 + random_below(&run->random, sequences - 1)) % sequences);
    int64_t length = random_below(&run->random, run->model->at[from].length + 1);
    if (random_below(&run->random, 4) == 0) length = run->model->at[from].length;
    bool empty = run->model->at[to].length == 0;
    clattn_status status = clattn_cache_share(run->context, run->cache, from, to, length, NULL);
    check(run, status == (empty ? CLATTN_SUCCESS : CLATTN_INVALID_ARGUMENT), "statuses", to);
    if (empty) model_share(run->model, from, to, length);
    check_sequence(run, to, empty ? 0 : run->model->at[to].length);
}

static void do_operations(struct run *run, int64_t operations)
{
    for (run->operation = 0; run->operation < operations; run->operation++) {
        int64_t kind = random_below(&run->random, 100);
        if (kind < 45)
            do_append(run, false);
        else if (kind < 60)
            do_append(run, true);
        else if (kind < 85)
            do_truncate(run);
        else
            do_share(run);
        if (run->operation % 8 == 0) check_pages(run);
    }
    for (int s = 0; s < run->model->desc.sequences; s++)
        check_sequence(run, s, 0);
    check_pages(run);
}

/* ---- the cases ---- */

struct model_case {
    clattn_dtype dtype, given;
    int32_t page_size;
    int64_t pages;
    int32_t leaf;
    bool bounds;
};

static const struct model_case cases[] = {
    {CLATTN_FLOAT32, CLATTN_FLOAT32, 0, 0, 16, false},    {CLATTN_FLOAT32, CLATTN_FLOAT32, 16, 0, 16, false},
    {CLATTN_FLOAT16, CLATTN_FLOAT16, 16, 20, 32, true},   {CLATTN_BFLOAT16, CLATTN_BFLOAT16, 24, 12, 16, false},
    {CLATTN_INT8, CLATTN_FLOAT32, 16, 20, 16, false},     {CLATTN_INT8, CLATTN_BFLOAT16, 0, 0, 32, true},
    {CLATTN_INT8, CLATTN_FLOAT16, 40, 9, 16, true},       {CLATTN_FLOAT16, CLATTN_FLOAT16, 100, 6, 16, true},
    {CLATTN_BFLOAT16, CLATTN_BFLOAT16, 17, 25, 16, true}, {CLATTN_FLOAT32, CLATTN_FLOAT32, 40, 10, 16, true},
};

static void run_case(const struct target *target, const struct model_case *c, uint64_t seed, int64_t operations)
{
    clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
    desc.sequences = MODEL_SEQUENCES;
    desc.tokens = MODEL_TOKENS;
    desc.kv_heads = MODEL_HEADS;
    desc.dim = desc.dim_v = MODEL_DIM;
    desc.dtype = c->dtype;
    desc.leaf = c->leaf;
    desc.page_size = c->page_size;
    desc.pages = c->pages;
    desc.bounds = c->bounds;
    struct run run = {.target = target, .random = random_seeded(seed), .given = c->given};
    clattn_context_desc context = CLATTN_CONTEXT_DESC_INIT;
    context.backend = target->info.backend;
    context.variant = target->info.variant;
    context.threads = 1;
    check_success(target, clattn_context_create(&context, &run.context), "context_create");
    check_success(target, clattn_cache_create(run.context, &desc, &run.cache), "cache_create");
    run.model = model_new(&desc);
    do_operations(&run, operations);
    assert_true(run.steps > operations / 20 && (c->pages == 0 || run.refused > operations / 200));
    clattn_cache_release(run.context, run.cache);
    clattn_context_release(run.context);
    free(run.model);
}

static void test_operations(void **state)
{
    int64_t operations[] = {2000, 8100}, done = 0; /* of a case: on the reference, on the CPU */
    (void)state;
    FOR_EACH_TARGET (target) {
        bool is_reference = target->info.backend == CLATTN_BACKEND_REFERENCE;
        bool is_last = target + 1 == targets + target_count || target[1].info.backend != CLATTN_BACKEND_CPU;
        if (!is_reference && !(target->info.backend == CLATTN_BACKEND_CPU && is_last)) continue;
        for (int n = 0; n < COUNT(cases); n++) {
            run_case(target, &cases[n], 70 + (uint64_t)n, operations[!is_reference]);
            done += operations[!is_reference];
        }
    }
    printf("%lld operations\n", (long long)done);
    assert_true(done >= 100000 || getenv("CLATTN_TEST_BACKEND")); /* without CPUs the reference has fewer */
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_operations)};
    return cmocka_run_group_tests(tests, targets_open, targets_close);
}
