/* SPDX-License-Identifier: MIT */
/* Gradients with the options of attention on every target, against the reference, which
 * test_backward_oracle.c verifies by finite differences. Shapes share dims, so that OpenCL builds few kernels.
 */

#include "gradients.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { KV_HEADS = 2, GROUP = 2, Q_HEADS = KV_HEADS * GROUP, DIM = 16, DIM_V = 12 };

struct shape {
    const char *name;
    enum test_size size;
    int64_t batch, q_len, kv_len;
    int32_t block, q_block, topk, list_heads; /* topk 0: all keys */
    int causal;
    int64_t window;
    float softcap;
    int sink, bias_batch; /* 0: none */
    const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
    int64_t sequences;
    int same_block;        /* every list has block 0 */
    const int64_t *starts; /* boundaries of the blocks */
    int64_t start_count;
};

static const int32_t cu_q[] = {0, 0, 17, 20, 33, 34}, cu_k[] = {0, 9, 40, 40, 41, 80};
static const int32_t used_q[] = {20, 0, 7}, used_k[] = {3, 40, 33};

/* Every sequence of cu_k begins with a block; a block of more keys than a tile takes, and one of a single key.
 */
static const int64_t starts[] = {0, 1, 7, 60, 77}, packed_starts[] = {0, 4, 9, 30, 40, 41, 43, 76};

static const struct shape shapes[] = {
    {"window, sink", SIZE_TINY, 1, 24, 40, .block = 16, .q_block = 4, .topk = 2, .list_heads = 1, .causal = 1,
     .window = 9, .sink = 1},
    {"window on both sides", SIZE_NORMAL, 1, 70, 70, .block = 16, .q_block = 4, .topk = 3, .list_heads = 1,
     .window = 13},
    {"key padding", SIZE_NORMAL, 3, 20, 40, .block = 16, .q_block = 4, .topk = 2, .list_heads = 1, .causal = 1,
     .sink = 1, .seqused_q = used_q, .seqused_k = used_k},
    {"everything", SIZE_TINY, 2, 20, 35, .block = 16, .q_block = 4, .topk = 2, .list_heads = 1, .causal = 1,
     .window = 15, .softcap = 2.0f, .sink = 1, .bias_batch = 2},
    {"packed, one bias", SIZE_NORMAL, 1, 34, 80, .block = 16, .q_block = 2, .topk = 2, .list_heads = 1,
     .causal = 1, .softcap = 1.5f, .sink = 1, .bias_batch = 1, .cu_seqlens_q = cu_q, .cu_seqlens_k = cu_k,
     .sequences = 5},
    {"block in pieces", SIZE_NORMAL, 1, 2700, 40, .block = 16, .q_block = 2, .topk = 1, .list_heads = 1,
     .softcap = 1.5f, .sink = 1, .bias_batch = 1, .same_block = 1},
    {"lists by query head", SIZE_NORMAL, 1, 50, 90, .block = 16, .q_block = 2, .topk = 3, .list_heads = Q_HEADS,
     .causal = 1, .softcap = 1, .bias_batch = 1},
    {"lists by head, in pieces", SIZE_NORMAL, 1, 1400, 90, .block = 16, .q_block = 1, .topk = 1,
     .list_heads = Q_HEADS, .softcap = 2, .bias_batch = 1, .same_block = 1},
    {"all keys, in pieces", SIZE_NORMAL, 1, 2500, 70, .q_block = 1, .sink = 1, .bias_batch = 1},
    {"all keys, causal", SIZE_NORMAL, 1, 75, 70, .q_block = 1, .causal = 1, .window = 20, .sink = 1,
     .bias_batch = 1},
    {"starts", SIZE_TINY, 2, 30, 90, .q_block = 4, .topk = 3, .list_heads = 1, .causal = 1, .starts = starts,
     .start_count = 5},
    {"starts, packed, by query head", SIZE_NORMAL, 1, 34, 80, .q_block = 2, .topk = 2, .list_heads = Q_HEADS,
     .window = 11, .softcap = 1.5f, .sink = 1, .bias_batch = 1, .cu_seqlens_q = cu_q, .cu_seqlens_k = cu_k,
     .sequences = 5, .starts = packed_starts, .start_count = 8},
    {"one walk", SIZE_CPU, 2, 700, 90, .block = 16, .q_block = 3, .topk = 6, .list_heads = 1, .causal = 1,
     .softcap = 1.5f, .sink = 1},
    {"one walk, by query head", SIZE_CPU, 2, 650, 90, .block = 16, .q_block = 1, .topk = 6,
     .list_heads = Q_HEADS, .window = 9, .sink = 1},
};

/* Shapes of so much work that CPU contexts visit every pair only once: the last ones. */
enum { ONE_WALK = COUNT(shapes) - 2, ONE_WALK_BY_HEAD };

enum { DQ, DK, DV, DSINK, DBIAS, GRADIENTS };
static const char *const gradient_names[GRADIENTS] = {"dq", "dk", "dv", "dsink", "dbias"};

struct arrays {
    const struct shape *shape;
    struct array q, k, v, out, lse, dout, dlse, sink, bias;
    int32_t *indices;
    int64_t rows;
};

static int64_t list_rows(const struct shape *s)
{
    int64_t rows = 0;
    if (!s->sequences) return s->batch * ((s->q_len + s->q_block - 1) / s->q_block);
    for (int64_t n = 0; n < s->sequences; n++)
        rows += (s->cu_seqlens_q[n + 1] - s->cu_seqlens_q[n] + s->q_block - 1) / s->q_block;
    return rows;
}

/* Blocks of the sequence that a list row belongs to. */
static int64_t blocks_of_row(const struct shape *s, int64_t row)
{
    int64_t rows = 0, per_batch = (s->q_len + s->q_block - 1) / s->q_block, keys = s->kv_len;
    int64_t first = 0;
    if (s->seqused_k) keys = s->seqused_k[row / per_batch];
    for (int64_t n = s->sequences - 1; n >= 0; n--) { /* the first sequence whose rows end after `row` */
        rows = 0;
        for (int64_t m = 0; m <= n; m++)
            rows += (s->cu_seqlens_q[m + 1] - s->cu_seqlens_q[m] + s->q_block - 1) / s->q_block;
        if (row >= rows) continue;
        first = s->cu_seqlens_k[n];
        keys = s->cu_seqlens_k[n + 1] - first;
    }
    int64_t count = 0;
    for (int64_t n = 0; n < s->start_count; n++)
        count += s->starts[n] >= first && s->starts[n] < first + keys;
    if (s->starts) return count;
    return (keys + s->block - 1) / s->block;
}

static clattn_attention_desc attention_of(const struct arrays *a)
{
    const struct shape *s = a->shape;
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    attention.causal = s->causal;
    attention.window = s->window;
    attention.softcap = s->softcap;
    attention.sink = s->sink ? &a->sink.view : NULL;
    attention.bias = s->bias_batch ? &a->bias.view : NULL;
    attention.sequences = s->sequences;
    attention.cu_seqlens_q = s->cu_seqlens_q;
    attention.cu_seqlens_k = s->cu_seqlens_k;
    attention.seqused_q = s->seqused_q;
    attention.seqused_k = s->seqused_k;
    return attention;
}

static clattn_blocks *lists_of(clattn_context *context, const struct arrays *a)
{
    const struct shape *s = a->shape;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_blocks *blocks = NULL;
    if (!s->topk) return NULL;
    desc.block = s->block;
    desc.starts = s->starts;
    desc.start_count = s->start_count;
    desc.q_block = s->q_block;
    desc.rows = a->rows;
    desc.heads = s->list_heads;
    desc.topk = s->topk;
    assert_int_equal(clattn_blocks_create(context, &desc, a->indices, &blocks), CLATTN_SUCCESS);
    return blocks;
}

/* out and lse, which gradients start from. */
static void arrays_attend(clattn_context *reference, struct arrays *a)
{
    clattn_attention_desc attention = attention_of(a);
    clattn_blocks *lists = lists_of(reference, a);
    assert_int_equal(clattn_attention_forward(reference, &attention, &a->q.view, &a->k.view, &a->v.view, lists,
                                              &a->out.view, &a->lse.view, NULL),
                     CLATTN_SUCCESS);
    clattn_blocks_release(reference, lists);
}

static void arrays_make(clattn_context *reference, const struct shape *s, struct arrays *a)
{
    struct random random = random_seeded((uint64_t)(s - shapes) + 400);
    enum layout layout = (s - shapes) % 2 ? LAYOUT_PADDED : LAYOUT_BHTD;
    int64_t blocks = (s->kv_len + 15) / 16 + 1 + s->start_count; /* more biases than needed */
    a->shape = s;
    a->q = array_new(CLATTN_FLOAT32, s->batch, s->q_len, Q_HEADS, DIM, layout);
    a->k = array_new(CLATTN_FLOAT32, s->batch, s->kv_len, KV_HEADS, DIM, layout);
    a->v = array_new(CLATTN_FLOAT32, s->batch, s->kv_len, KV_HEADS, DIM_V, layout);
    a->dout = array_new(CLATTN_FLOAT32, s->batch, s->q_len, Q_HEADS, DIM_V, layout);
    a->out = array_new(CLATTN_FLOAT32, s->batch, s->q_len, Q_HEADS, DIM_V, layout);
    a->lse = array_new(CLATTN_FLOAT32, s->batch, s->q_len, Q_HEADS, 1, layout);
    a->dlse = array_new(CLATTN_FLOAT32, s->batch, s->q_len, Q_HEADS, 1, layout);
    a->sink = array_new(CLATTN_FLOAT32, 1, 1, Q_HEADS, 1, layout);
    a->bias = array_new(CLATTN_FLOAT32, s->bias_batch ? s->bias_batch : 1, blocks, Q_HEADS, 1, layout);
    struct array *const filled[] = {&a->q, &a->k, &a->v, &a->dout, &a->dlse, &a->sink, &a->bias};
    for (int n = 0; n < COUNT(filled); n++)
        array_fill(filled[n], FILL_NORMAL, &random);
    a->rows = list_rows(s);
    int64_t per_row = (int64_t)s->list_heads * s->topk;
    a->indices = malloc((size_t)(a->rows * per_row + 1) * sizeof *a->indices);
    for (int64_t n = 0; n < a->rows * per_row; n++)
        a->indices[n] =
            s->same_block ? 0 : (int32_t)random_below(&random, blocks_of_row(s, n / per_row) + 1) - 1;
    arrays_attend(reference, a);
}

/* The same with a query head a key head. */
static void arrays_ungroup(clattn_context *reference, struct arrays *a)
{
    clattn_tensor *const views[] = {&a->q.view,    &a->dout.view, &a->out.view, &a->lse.view,
                                    &a->dlse.view, &a->sink.view, &a->bias.view};
    for (int n = 0; n < COUNT(views); n++)
        views[n]->heads = KV_HEADS;
    arrays_attend(reference, a);
}

static void arrays_free(struct arrays *a)
{
    struct array *const all[] = {&a->q, &a->k, &a->v, &a->out, &a->lse, &a->dout, &a->dlse, &a->sink, &a->bias};
    for (int n = 0; n < COUNT(all); n++)
        array_free(all[n]);
    free(a->indices);
}

/* Which gradients are asked for: one bit each. */
enum { ALL = (1 << GRADIENTS) - 1 };

static void results_new(const struct arrays *a, struct array results[GRADIENTS])
{
    const struct array *of[GRADIENTS] = {&a->q, &a->k, &a->v, &a->sink, &a->bias};
    for (int n = 0; n < GRADIENTS; n++) {
        const clattn_tensor *t = &of[n]->view;
        results[n] = array_new(CLATTN_FLOAT32, t->batch, t->len, t->heads, t->dim, LAYOUT_PADDED);
    }
}

static clattn_status gradients_run(clattn_context *context, const struct arrays *a, unsigned wanted,
                                   float compensation, struct array results[GRADIENTS])
{
    clattn_attention_desc attention = attention_of(a);
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    clattn_blocks *blocks = lists_of(context, a);
    gradients.dout = &a->dout.view;
    gradients.dlse = &a->dlse.view;
    gradients.dq = wanted & 1 << DQ ? &results[DQ].view : NULL;
    gradients.dk = wanted & 1 << DK ? &results[DK].view : NULL;
    gradients.dv = wanted & 1 << DV ? &results[DV].view : NULL;
    gradients.dsink = a->shape->sink && wanted & 1 << DSINK ? &results[DSINK].view : NULL;
    gradients.dbias = a->shape->bias_batch && wanted & 1 << DBIAS ? &results[DBIAS].view : NULL;
    gradients.compensation = compensation;
    clattn_status status = clattn_attention_backward(context, &attention, &a->q.view, &a->k.view, &a->v.view,
                                                     blocks, &a->out.view, &a->lse.view, &gradients, NULL);
    clattn_blocks_release(context, blocks);
    return status;
}

/* Rows past seqused are not written: both stay poisoned, and become zero here so that the rest is compared. */
static void unused_clear(const struct shape *s, struct array *array, const int32_t *used)
{
    for (int64_t b = 0; used && b < s->batch; b++)
        for (int64_t i = used[b]; i < array->view.len; i++)
            for (int64_t h = 0; h < array->view.heads; h++)
                for (int64_t d = 0; d < array->view.dim; d++) {
                    assert_true(isnan(tensor_get(&array->view, b, i, h, d)));
                    tensor_set(&array->view, b, i, h, d, 0);
                }
}

static void results_settle(const struct shape *s, struct array results[GRADIENTS])
{
    unused_clear(s, &results[DQ], s->seqused_q);
    unused_clear(s, &results[DK], s->seqused_k);
    unused_clear(s, &results[DV], s->seqused_k);
}

static void results_free(struct array results[GRADIENTS])
{
    for (int n = 0; n < GRADIENTS; n++)
        array_free(&results[n]);
}

static bool has_gradient(const struct shape *s, int n)
{
    return n < DSINK || (n == DSINK && s->sink) || (n == DBIAS && s->bias_batch);
}

static clattn_context *reference(void)
{
    FOR_EACH_TARGET (target)
        if (target->info.backend == CLATTN_BACKEND_REFERENCE) return target->context;
    return NULL;
}

/* Every gradient as the reference has it, and twice the same. With compensation blocks that a row sees but does not list
 * receive a share, in dk and dv only. */
static void check_shape(const struct shape *s, bool is_grouped, float compensation)
{
    struct arrays a;
    struct array expected[GRADIENTS], have[GRADIENTS], again[GRADIENTS];
    arrays_make(reference(), s, &a);
    if (!is_grouped) arrays_ungroup(reference(), &a);
    results_new(&a, expected);
    assert_int_equal(gradients_run(reference(), &a, ALL, compensation, expected), CLATTN_SUCCESS);
    results_settle(s, expected);
    FOR_EACH_TARGET (target) {
        if (target->info.backend == CLATTN_BACKEND_REFERENCE || !target_runs(target, s->size)) continue;
        results_new(&a, have);
        results_new(&a, again);
        check_success(target, gradients_run(target->context, &a, ALL, compensation, have), "backward");
        check_success(target, gradients_run(target->context, &a, ALL, compensation, again), "backward");
        results_settle(s, have);
        results_settle(s, again);
        for (int n = 0; n < GRADIENTS; n++) {
            if (!has_gradient(s, n)) continue;
            gradients_compare(target->label, s->name, gradient_names[n], &expected[n], &have[n], 1e-5);
            if (!tensor_equal_bits(&have[n].view, &again[n].view))
                fail_msg("%s: %s, compensation %g, %s differs from run to run", target->label, s->name,
                         (double)compensation, gradient_names[n]);
        }
        results_free(have);
        results_free(again);
    }
    results_free(expected);
    arrays_free(&a);
}

static void test_shapes(void **state)
{
    (void)state;
    for (const struct shape *s = shapes; s < shapes + COUNT(shapes); s++)
        check_shape(s, true, 0);
    target_report("options");
}

/* Gradients asked for alone have the same bits as together; the others stay untouched. */
static void check_parts(const struct shape *s, enum test_size size)
{
    static const unsigned parts[] = {1 << DQ, 1 << DK | 1 << DV, 1 << DSINK, 1 << DBIAS};
    struct arrays a;
    arrays_make(reference(), s, &a);
    FOR_EACH_TARGET (target) {
        struct array all[GRADIENTS], part[GRADIENTS];
        if (!target_runs(target, size)) continue;
        results_new(&a, all);
        check_success(target, gradients_run(target->context, &a, ALL, 0, all), "backward");
        for (int p = 0; p < COUNT(parts); p++) {
            results_new(&a, part);
            check_success(target, gradients_run(target->context, &a, parts[p], 0, part), "backward, a part");
            for (int n = 0; n < GRADIENTS; n++)
                if (parts[p] >> n & 1 && has_gradient(s, n) ? !tensor_equal_bits(&all[n].view, &part[n].view)
                                                            : !array_untouched(&part[n]))
                    fail_msg("%s: %s differs when part %d is asked for", target->label, gradient_names[n], p);
            results_free(part);
        }
        results_free(all);
    }
    arrays_free(&a);
}

static void test_parts(void **state)
{
    (void)state;
    check_parts(&shapes[3], SIZE_NORMAL);
    check_parts(&shapes[ONE_WALK], SIZE_CPU);
    target_report("parts");
}

/* The bits do not depend on the number of threads. */
static void test_threads(void **state)
{
    (void)state;
    for (int n = ONE_WALK; n <= ONE_WALK_BY_HEAD; n++) {
        struct arrays a;
        struct array first[GRADIENTS], other[GRADIENTS];
        arrays_make(reference(), &shapes[n], &a);
        FOR_EACH_TARGET (target) {
            if (target->info.backend != CLATTN_BACKEND_CPU || !target_runs(target, SIZE_CPU)) continue;
            for (int threads = 1; threads <= 5; threads += 2) {
                clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
                clattn_context *context;
                desc.backend = CLATTN_BACKEND_CPU;
                desc.variant = target->info.variant;
                desc.threads = threads;
                assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
                results_new(&a, threads == 1 ? first : other);
                assert_int_equal(gradients_run(context, &a, ALL, 0, threads == 1 ? first : other),
                                 CLATTN_SUCCESS);
                for (int g = DQ; threads > 1 && g <= DV; g++)
                    assert_true(tensor_equal_bits(&first[g].view, &other[g].view));
                if (threads > 1) results_free(other);
                clattn_context_release(context);
            }
            results_free(first);
        }
        arrays_free(&a);
    }
    target_report("threads");
}

static void test_compensation(void **state)
{
    (void)state;
    for (const struct shape *s = shapes; s < shapes + COUNT(shapes); s++)
        if (!s->starts) check_shape(s, true, 0.3f); /* with starts: refused, see test_errors.c */
    target_report("compensation");
}

static void test_compensation_of_heads(void **state)
{
    (void)state;
    for (const struct shape *s = shapes; s < shapes + COUNT(shapes); s++)
        if (s->size == SIZE_TINY && s->bias_batch && s->list_heads == 1 && !s->starts)
            check_shape(s, false, 0.3f);
    target_report("compensation without groups");
}

/* NaN and infinity stay with the rows and keys that they belong to: finite gradients of the reference are
 * finite and right, the others are not finite. */
static void check_not_finite(const struct shape *s, enum test_size size)
{
    struct arrays a;
    struct array expected[GRADIENTS], have[GRADIENTS];
    int64_t row = s->q_len > s->kv_len ? s->q_len - 40 : 0;
    arrays_make(reference(), s, &a);
    tensor_set(&a.k.view, 0, 30, 0, 3, NAN);
    tensor_set(&a.v.view, 0, 33, 1, 2, INFINITY);
    tensor_set(&a.dout.view, 0, row + 5, 1, 0, NAN);
    tensor_set(&a.q.view, 0, row + 9, 2, 1, NAN);
    clattn_attention_desc attention = attention_of(&a);
    clattn_blocks *lists = lists_of(reference(), &a);
    assert_int_equal(clattn_attention_forward(reference(), &attention, &a.q.view, &a.k.view, &a.v.view, lists,
                                              &a.out.view, &a.lse.view, NULL),
                     CLATTN_SUCCESS);
    clattn_blocks_release(reference(), lists);
    results_new(&a, expected);
    assert_int_equal(gradients_run(reference(), &a, ALL, 0, expected), CLATTN_SUCCESS);
    FOR_EACH_TARGET (target) {
        if (target->info.backend == CLATTN_BACKEND_REFERENCE || !target_runs(target, size)) continue;
        results_new(&a, have);
        check_success(target, gradients_run(target->context, &a, ALL, 0, have), "backward");
        for (int n = DQ; n <= DV; n++) {
            const clattn_tensor *t = &have[n].view;
            int64_t finite = 0, odd = 0;
            for (int64_t i = 0; i < t->len; i++)
                for (int64_t h = 0; h < t->heads; h++)
                    for (int64_t d = 0; d < t->dim; d++) {
                        double want = tensor_get(&expected[n].view, 0, i, h, d), x = tensor_get(t, 0, i, h, d);
                        if (isfinite(want) ? !(fabs(x - want) < 1e-4) : isfinite(x))
                            fail_msg("%s: %s[%d][%d][%d] is %g, not %g", target->label, gradient_names[n],
                                     (int)i, (int)h, (int)d, x, want);
                        *(isfinite(want) ? &finite : &odd) += 1;
                    }
            assert_true(finite > 0 && odd > 0);
        }
        results_free(have);
    }
    results_free(expected);
    arrays_free(&a);
}

static void test_not_finite(void **state)
{
    (void)state;
    check_not_finite(&shapes[0], SIZE_TINY);
    check_not_finite(&shapes[ONE_WALK_BY_HEAD], SIZE_CPU);
    target_report("not finite");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shapes),
                                       cmocka_unit_test(test_parts),
                                       cmocka_unit_test(test_threads),
                                       cmocka_unit_test(test_compensation),
                                       cmocka_unit_test(test_compensation_of_heads),
                                       cmocka_unit_test(test_not_finite)};
    return cmocka_run_group_tests_name("backward options", tests, targets_open, targets_close);
}
