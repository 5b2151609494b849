/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "bench.h"

#include "check.h"
#include "tolerance.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What one query row sees, cut out so that the reference has just that to do: no later key is given to it. */
struct seen {
    int64_t keys;
    const void *k, *v, *v_abs; /* elements, [keys][kv_heads][dim] */
    const float *k_values;
    void *gathered[4]; /* memory of the four, where they had to be copied */
};

static size_t element_bytes(const struct bench_case *s)
{
    return s->dtype == CLATTN_FLOAT32 ? 4 : 2;
}

static bool gather(const struct bench_problem *problem, int64_t row, struct seen *seen)
{
    const struct bench_case *s = problem->shape;
    const void *const from[] = {problem->k_data, problem->v_data, problem->v_abs_data, problem->k_values};
    size_t width = (size_t)(s->kv_heads * s->dim);
    const size_t bytes[] = {width * element_bytes(s), width * element_bytes(s), width * element_bytes(s),
                            width * sizeof(float)};
    int64_t *token = bench_neighbors(&s->neighborhood, row, &seen->keys);
    bool good = token != NULL;
    for (int i = 0; i < 4 && good; i++) {
        char *to = seen->gathered[i] = malloc((size_t)seen->keys * bytes[i]);
        good = to != NULL;
        for (int64_t n = 0; n < seen->keys && good; n++)
            memcpy(to + (size_t)n * bytes[i], (const char *)from[i] + (size_t)token[n] * bytes[i], bytes[i]);
    }
    free(token);
    seen->k = seen->gathered[0];
    seen->v = seen->gathered[1];
    seen->v_abs = seen->gathered[2];
    seen->k_values = seen->gathered[3];
    return good;
}

static bool look(const struct bench_problem *problem, int64_t row, struct seen *seen)
{
    const struct bench_case *s = problem->shape;
    *seen = (struct seen){.k = problem->k_data,
                          .v = problem->v_data,
                          .v_abs = problem->v_abs_data,
                          .k_values = problem->k_values,
                          .keys = s->causal ? row + s->kv_len - s->q_len + 1 : s->kv_len};
    return s->operation == BENCH_NEIGHBORHOOD ? gather(problem, row, seen) : true;
}

static void unlook(struct seen *seen)
{
    for (int i = 0; i < 4; i++)
        free(seen->gathered[i]);
}

void bench_list(const struct bench_problem *problem, int64_t row, int32_t head, int64_t blocks, int32_t *list)
{
    const clattn_blocks_desc *desc = &problem->list;
    const int32_t *from = problem->indices + (row / desc->q_block * desc->heads + head) * desc->topk;
    int32_t n = 0;
    for (int32_t i = 0; i < desc->topk && from[i] >= 0; i++)
        if (from[i] < blocks) list[n++] = from[i];
    while (n < desc->topk)
        list[n++] = -1;
}

/* The lists of one row, [heads][topk]; NULL: dense, or no memory (*failed). */
static int32_t *row_lists(const struct bench_problem *problem, int64_t row, int64_t keys, bool *failed)
{
    const clattn_blocks_desc *desc = &problem->list;
    *failed = false;
    if (!problem->indices) return NULL;
    int32_t *lists = malloc((size_t)desc->heads * (size_t)desc->topk * sizeof *lists);
    *failed = lists == NULL;
    for (int32_t h = 0; h < desc->heads && lists; h++)
        bench_list(problem, row, h, (keys + desc->block - 1) / desc->block, lists + h * desc->topk);
    return lists;
}

static clattn_status make_blocks(const struct bench_problem *problem, clattn_context *reference,
                                 const int32_t *lists, clattn_blocks **blocks)
{
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    if (!lists) return CLATTN_SUCCESS;
    desc.block = problem->list.block;
    desc.rows = 1;
    desc.heads = problem->list.heads;
    desc.topk = problem->list.topk;
    return clattn_blocks_create(reference, &desc, lists, blocks);
}

static clattn_tensor view(const void *data, const struct bench_case *s, int64_t len, int32_t heads)
{
    return clattn_tensor_bthd((void *)(uintptr_t)data, s->dtype, 1, len, heads, s->dim);
}

static clattn_tensor query(const struct bench_problem *problem, int64_t row)
{
    const struct bench_case *s = problem->shape;
    return view((char *)problem->q_data + (size_t)(row * s->q_heads * s->dim) * element_bytes(s), s, 1,
                s->q_heads);
}

/* ---- forward ---- */

static void compare_heads(const struct bench_problem *problem, int64_t row, const struct seen *seen,
                          const int32_t *lists, const float *out, const float *abs_out, const float *lse,
                          struct comparison *worst)
{
    const struct bench_case *s = problem->shape;
    int32_t group = s->q_heads / s->kv_heads, topk = problem->list.topk;
    for (int32_t h = 0; h < s->q_heads; h++) {
        int32_t list_head = lists ? h * problem->list.heads / s->q_heads : 0;
        struct row_keys keys = {seen->k_values + h / group * s->dim,
                                (int64_t)s->kv_heads * s->dim,
                                seen->keys,
                                lists ? lists + list_head * topk : NULL,
                                problem->list.block,
                                topk,
                                s->dim};
        int64_t at = row * s->q_heads + h;
        struct oracle_row oracle = {
            out + h * s->dim, abs_out + h * s->dim, lse[h], row_count(&keys),
            row_condition(&keys, problem->q_values + at * s->dim, 1 / sqrt((double)s->dim))};
        compare_row(worst, &oracle, s->dtype, s->dim, problem->out + at * s->dim, problem->lse[at]);
    }
}

/* The reference twice: over v, and over |v| for the scale of rounding errors. */
static clattn_status verify_row(const struct bench_problem *problem, clattn_context *reference, int64_t row,
                                struct comparison *worst)
{
    const struct bench_case *s = problem->shape;
    struct seen seen;
    bool failed = false;
    size_t width = (size_t)(s->q_heads * s->dim);
    clattn_blocks *blocks = NULL;
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    float *out = malloc((2 * width + 2 * (size_t)s->q_heads) * sizeof *out);
    bool good = look(problem, row, &seen) && out;
    int32_t *lists = good ? row_lists(problem, row, seen.keys, &failed) : NULL;
    clattn_status status =
        good && !failed ? make_blocks(problem, reference, lists, &blocks) : CLATTN_OUT_OF_MEMORY;
    attention.causal = 0;
    for (int i = 0; i < 2 && !status; i++) {
        clattn_tensor q = query(problem, row), k = view(seen.k, s, seen.keys, s->kv_heads),
                      v = view(i ? seen.v_abs : seen.v, s, seen.keys, s->kv_heads);
        clattn_tensor o = clattn_tensor_bthd(out + (size_t)i * width, CLATTN_FLOAT32, 1, 1, s->q_heads, s->dim),
                      l = clattn_tensor_bthd(out + 2 * width + i * s->q_heads, CLATTN_FLOAT32, 1, 1, s->q_heads,
                                             1);
        status = clattn_attention_forward(reference, &attention, &q, &k, &v, blocks, &o, &l, NULL);
    }
    if (!status) compare_heads(problem, row, &seen, lists, out, out + width, out + 2 * width, worst);
    clattn_blocks_release(reference, blocks);
    unlook(&seen);
    free(lists);
    free(out);
    return status;
}

static clattn_status verify_forward(struct bench_problem *problem, clattn_context *reference,
                                    struct bench_verdict *verdict)
{
    struct comparison worst = {0};
    clattn_status status = CLATTN_SUCCESS;
    for (int n = 0; n < problem->sampled_count && !status; n++, verdict->rows++)
        status = verify_row(problem, reference, problem->sampled[n], &worst);
    verdict->error = worst.out_error;
    verdict->tolerated = fmax(worst.out_ratio, worst.lse_ratio);
    return status;
}

/* ---- selection and pyramid ---- */

/* Does a list that differs from the reference's do so where rounding may decide? */
static bool is_tie(const struct bench_problem *problem, int64_t row, int64_t keys, int32_t kv_head)
{
    const struct bench_case *s = problem->shape;
    struct check_case shape = {.selector = s->selector,
                               .causal = s->causal,
                               .batch = 1,
                               .q_len = 1,
                               .kv_len = (int32_t)keys,
                               .q_heads = s->q_heads,
                               .kv_heads = s->kv_heads,
                               .dim = s->dim,
                               .dim_v = s->dim,
                               .leaf = s->leaf,
                               .topk = s->topk};
    struct check_problem one = {.shape = &shape,
                                .dtype = s->dtype,
                                .k = problem->k_values,
                                .q = problem->q_values + row * s->q_heads * s->dim};
    struct select_gap decided = select_gap(&one, 0, 0, kv_head);
    return decided.gap <= decided.error;
}

static clattn_status verify_selection(struct bench_problem *problem, clattn_context *reference,
                                      struct bench_verdict *verdict)
{
    const struct bench_case *s = problem->shape;
    size_t entries = (size_t)s->kv_heads * (size_t)s->topk;
    int32_t *lists = malloc(entries * sizeof *lists);
    clattn_status status = lists ? CLATTN_SUCCESS : CLATTN_OUT_OF_MEMORY;
    for (int n = 0; n < problem->sampled_count && !status; n++, verdict->rows++) {
        int64_t row = problem->sampled[n], keys = row + s->kv_len - s->q_len + 1;
        clattn_tensor q = query(problem, row), k = view(problem->k_data, s, keys, s->kv_heads);
        clattn_blocks *blocks = NULL;
        status = clattn_select(reference, &problem->attention, &problem->select, &q, &k, NULL, &blocks, NULL);
        if (!status) status = clattn_blocks_read(reference, blocks, lists, NULL);
        for (int32_t g = 0; g < s->kv_heads && !status; g++) {
            const int32_t *got = problem->indices + (row * s->kv_heads + g) * s->topk;
            if (memcmp(got, lists + g * s->topk, (size_t)s->topk * sizeof *got) != 0 &&
                !is_tie(problem, row, keys, g))
                verdict->lists_wrong++;
        }
        clattn_blocks_release(reference, blocks);
    }
    free(lists);
    return status;
}

/* Every node of the lowest and of the highest level. */
static clattn_status verify_pyramid(struct bench_problem *problem, clattn_context *reference,
                                    struct bench_verdict *verdict)
{
    const struct bench_case *s = problem->shape;
    clattn_pyramid *pyramid = NULL;
    int64_t nodes = 1, expected = 0;
    clattn_status status =
        clattn_pyramid_build(reference, &problem->attention, s->leaf, &problem->k, &pyramid, NULL);
    int top = 1;
    for (int64_t n = (s->kv_len + s->leaf - 1) / s->leaf; n > 1; n = (n + 1) / 2)
        top++;
    for (int level = 1; level <= top && !status; level += top > 1 ? top - 1 : 1) {
        status = clattn_pyramid_read(reference, pyramid, 0, 0, level, NULL, &nodes);
        size_t count = (size_t)(nodes * s->dim);
        float *means = malloc(2 * count * sizeof *means);
        if (!means && !status) status = CLATTN_OUT_OF_MEMORY;
        if (!status) status = clattn_pyramid_read(reference, pyramid, 0, 0, level, means, &nodes);
        if (!status)
            status = clattn_pyramid_read(problem->device->context, problem->pyramid, 0, 0, level, means + count,
                                         &expected);
        if (!status && nodes != expected) status = CLATTN_INTERNAL;
        for (size_t i = 0; i < count && !status; i++) {
            double error = fabs((double)means[i] - means[count + i]);
            /* Numbers are below 4; a mean has at most as many roundings as a leaf has keys, and one a level. */
            double ratio = error / (4 * FLT_EPSILON * (s->leaf + top));
            if (!(error <= verdict->error)) verdict->error = error;
            if (!(ratio <= verdict->tolerated)) verdict->tolerated = ratio;
        }
        verdict->rows += nodes;
        free(means);
    }
    clattn_pyramid_release(reference, pyramid);
    return status;
}

clattn_status bench_verify(struct bench_problem *problem, clattn_context *reference,
                           struct bench_verdict *verdict)
{
    *verdict = (struct bench_verdict){0};
    switch (problem->shape->operation) {
    case BENCH_PYRAMID:
        return verify_pyramid(problem, reference, verdict);
    case BENCH_SELECT:
        return verify_selection(problem, reference, verdict);
    case BENCH_BACKWARD:
        return bench_verify_gradients(problem, reference, verdict);
    case BENCH_DECODE: { /* what it chose, and attention over that */
        struct bench_verdict chosen = {0};
        clattn_status status = CLATTN_SUCCESS;
        if (problem->indices) status = verify_selection(problem, reference, &chosen);
        if (!status) status = verify_forward(problem, reference, verdict);
        verdict->lists_wrong = chosen.lists_wrong;
        return status;
    }
    default:
        return verify_forward(problem, reference, verdict);
    }
}
