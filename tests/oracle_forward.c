/* SPDX-License-Identifier: MIT */
/* Attention over block lists by the definition, and the comparison with its tolerances. */

#include "oracle.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct spans spans_of(const clattn_attention_desc *attention, const clattn_tensor *q, const clattn_tensor *k,
                      int32_t q_block)
{
    struct spans spans = {.count = (int)(attention->sequences ? attention->sequences : k->batch)};
    assert_true(spans.count <= SPANS_MAX);
    for (int s = 0; s < spans.count; s++) {
        struct span *span = &spans.at[s];
        int64_t q_rows = q->len; /* with padding */
        *span = (struct span){s, 0, q->len, 0, k->len, spans.list_rows};
        if (attention->seqused_q) span->q_len = attention->seqused_q[s];
        if (attention->seqused_k) span->kv_len = attention->seqused_k[s];
        if (attention->sequences) {
            const int32_t *cu_q = attention->cu_seqlens_q, *cu_k = attention->cu_seqlens_k;
            *span = (struct span){
                0, cu_q[s], cu_q[s + 1] - cu_q[s], cu_k[s], cu_k[s + 1] - cu_k[s], spans.list_rows};
            q_rows = span->q_len;
        }
        spans.list_rows += (q_rows + q_block - 1) / q_block;
    }
    return spans;
}

double scale_of(const clattn_attention_desc *attention, const clattn_tensor *k)
{
    return attention->scale == CLATTN_SCALE_DEFAULT ? 1 / sqrt((double)k->dim) : (double)attention->scale;
}

/* ---- lists ---- */

static struct lists lists_new(int64_t rows, int32_t block, int32_t q_block, int32_t heads, int32_t topk)
{
    struct lists lists = {.desc = CLATTN_BLOCKS_DESC_INIT};
    lists.desc.block = block;
    lists.desc.q_block = q_block;
    lists.desc.rows = rows;
    lists.desc.heads = heads;
    lists.desc.topk = topk;
    size_t entries = (size_t)(rows * heads * topk);
    lists.indices = malloc((entries + 1) * sizeof *lists.indices);
    assert_non_null(lists.indices);
    memset(lists.indices, 0xff, (entries + 1) * sizeof *lists.indices); /* -1 */
    return lists;
}

/* Blocks of a sequence: equal ones, or those whose starts lie in its keys. */
static int64_t span_blocks(const clattn_blocks_desc *desc, const struct span *span)
{
    int64_t count = 0;
    if (!desc->starts) return (span->kv_len + desc->block - 1) / desc->block;
    for (int64_t n = 0; n < desc->start_count; n++)
        count += desc->starts[n] >= span->k_row && desc->starts[n] < span->k_row + span->kv_len;
    return count;
}

/* The block of key j: with starts, the last one that begins at or before it. */
static int64_t block_of(const struct lists *lists, const struct span *span, int64_t j)
{
    const clattn_blocks_desc *desc = lists ? &lists->desc : NULL;
    int64_t block = -1;
    if (!desc) return j / 64;
    if (!desc->starts) return j / desc->block;
    for (int64_t n = 0; n < desc->start_count && desc->starts[n] <= span->k_row + j; n++)
        block += desc->starts[n] >= span->k_row;
    return block;
}

static void lists_fill(struct lists *lists, struct random *random, const struct spans *spans, double density)
{
    int64_t entries = (int64_t)lists->desc.heads * lists->desc.topk;
    for (int s = 0; s < spans->count; s++) {
        int64_t blocks = span_blocks(&lists->desc, &spans->at[s]);
        int64_t rows = (spans->at[s].q_len + lists->desc.q_block - 1) / lists->desc.q_block;
        for (int64_t n = 0; n < rows * entries && blocks; n++)
            if (random_uniform(random) < density)
                lists->indices[spans->at[s].list_row * entries + n] = (int32_t)random_below(random, blocks);
    }
}

struct lists lists_random(struct random *random, const struct spans *spans, int32_t block, int32_t q_block,
                          int32_t heads, int32_t topk, double density)
{
    struct lists lists = lists_new(spans->list_rows, block, q_block, heads, topk);
    lists_fill(&lists, random, spans, density);
    return lists;
}

struct lists lists_random_starts(struct random *random, const struct spans *spans, const int64_t *starts,
                                 int64_t start_count, int32_t q_block, int32_t heads, int32_t topk,
                                 double density)
{
    struct lists lists = lists_new(spans->list_rows, 0, q_block, heads, topk);
    lists.desc.starts = starts;
    lists.desc.start_count = start_count;
    lists_fill(&lists, random, spans, density);
    return lists;
}

struct lists lists_all(const struct spans *spans, int32_t block, int32_t heads)
{
    int64_t most = 1;
    for (int s = 0; s < spans->count; s++) {
        int64_t blocks = (spans->at[s].kv_len + block - 1) / block;
        if (blocks > most) most = blocks;
    }
    struct lists lists = lists_new(spans->list_rows, block, 1, heads, (int32_t)most);
    for (int s = 0; s < spans->count; s++)
        for (int64_t n = 0; n < spans->at[s].q_len * heads; n++)
            for (int64_t i = 0; i < (spans->at[s].kv_len + block - 1) / block; i++)
                lists.indices[(spans->at[s].list_row * heads + n) * most + i] = (int32_t)i;
    return lists;
}

void lists_free(struct lists *lists)
{
    free(lists->indices);
    *lists = (struct lists){0};
}

/* Is key j of the sequence in the list of query row i? */
static bool is_listed(const struct lists *lists, const struct span *span, int64_t i, int64_t h, int64_t q_heads,
                      int64_t j)
{
    if (!lists) return true;
    const clattn_blocks_desc *desc = &lists->desc;
    int64_t list_head = h * desc->heads / q_heads;
    const int32_t *list =
        lists->indices + ((span->list_row + i / desc->q_block) * desc->heads + list_head) * desc->topk;
    for (int32_t n = 0; n < desc->topk; n++)
        if (list[n] == block_of(lists, span, j)) return true;
    return false;
}

/* ---- forward ---- */

/* q, k and v as [batch][len][heads][dim]. */
struct values {
    double *q, *k, *v;
};

/* Element [row][head] of a small tensor of the options. */
static double option_value(const clattn_tensor *tensor, int64_t batch, int64_t row, int64_t head)
{
    return tensor_get(tensor, tensor->batch == 1 ? 0 : batch, row, head, 0);
}

/* Scale of a stored key or value. */
static double stored_scale(const struct forward *f, const clattn_tensor *scales, const struct span *span,
                           int64_t j, int64_t kv_head)
{
    return scales ? option_value(scales, span->batch, (span->k_row + j) / f->attention.scale_block, kv_head)
                  : 1;
}

/* The logit of a key whose scaled product is x. error [epsilons]: of x in, of the logit out. */
static double logit(const struct forward *f, const struct span *span, int64_t j, int64_t h, double x,
                    double *error)
{
    double softcap = (double)f->attention.softcap, z = x;
    if (softcap > 0) {
        z = softcap * tanh(x / softcap);
        *error += 8 * fabs(z); /* OpenCL's tanh is good to 5 units in the last place */
    }
    if (f->attention.bias) {
        z += option_value(f->attention.bias, span->batch, block_of(f->lists, span, j), h);
        *error += isfinite(z) ? fabs(z) : 0;
    }
    return z;
}

/* Does query row i see key j, lists aside? */
static bool is_seen(const struct forward *f, const struct span *span, int64_t i, int64_t j)
{
    int64_t t = i + span->kv_len - span->q_len, window = f->attention.window;
    if (f->attention.causal && j > t) return false;
    return !window || (t - window < j && j < t + window);
}

/* Keys of one query row and head, and their logits. */
struct row {
    int64_t *key, count;
    double *z, most, condition;
};

static struct row row_logits(const struct forward *f, const struct values *values, const struct span *span,
                             int64_t i, int64_t h)
{
    const clattn_tensor *q = &f->q, *k = &f->k;
    const double *query = values->q + ((span->batch * q->len + span->q_row + i) * q->heads + h) * q->dim;
    int64_t first_key = span->batch * k->len + span->k_row, kv_head = h / (q->heads / k->heads);
    struct row row = {malloc((size_t)(span->kv_len + 1) * sizeof *row.key), 0,
                      malloc((size_t)(span->kv_len + 1) * sizeof *row.z), -INFINITY, 0};
    double scale = scale_of(&f->attention, k);
    assert_true(row.key && row.z);
    for (int64_t j = 0; j < span->kv_len; j++) {
        if (!is_seen(f, span, i, j) || !is_listed(f->lists, span, i, h, q->heads, j)) continue;
        double dot = 0, size = 0, stored = stored_scale(f, f->attention.k_scale, span, j, kv_head);
        const double *other = values->k + ((first_key + j) * k->heads + kv_head) * k->dim;
        for (int64_t d = 0; d < q->dim; d++) {
            dot += query[d] * other[d] * stored;
            size += fabs(query[d] * other[d] * stored);
        }
        double error = isfinite(size) ? fabs(scale) * size : 0;
        if (f->attention.k_scale) error *= 2; /* the product with the scale is rounded too */
        row.key[row.count] = j;
        row.z[row.count] = logit(f, span, j, h, scale * dot, &error);
        row.most = fmax(row.most, row.z[row.count++]);
        row.condition = fmax(row.condition, error);
    }
    return row;
}

static void expected_row(const struct forward *f, const struct values *values, const struct span *span,
                         int64_t i, int64_t h, struct expected *e, int64_t at)
{
    const clattn_tensor *v = &f->v, *sink = f->attention.sink;
    int64_t first_key = span->batch * v->len + span->k_row, kv_head = h / (f->q.heads / v->heads);
    struct row row = row_logits(f, values, span, i, h);
    double joined = sink && row.count ? option_value(sink, 0, 0, h) : -INFINITY, most = fmax(row.most, joined);
    double sum = most > -INFINITY ? exp(joined - most) : 0;
    for (int64_t m = 0; m < row.count && most > -INFINITY; m++)
        sum += exp(row.z[m] - most);
    e->lse[at] = most > -INFINITY ? most + log(sum) : -INFINITY;
    e->condition[at] = f->exact_logits ? 0 : row.condition + (f->attention.v_scale ? 1 : 0);
    e->keys[at] = row.count;
    for (int64_t m = 0; m < row.count && most > -INFINITY; m++) {
        double p = exp(row.z[m] - most) / sum;
        double stored = stored_scale(f, f->attention.v_scale, span, row.key[m], kv_head);
        const double *value = values->v + ((first_key + row.key[m]) * v->heads + kv_head) * v->dim;
        for (int64_t d = 0; d < v->dim && p > 0; d++) {
            e->out[at * v->dim + d] += p * value[d] * stored;
            e->magnitude[at * v->dim + d] += p * fabs(value[d] * stored);
        }
    }
    free(row.key);
    free(row.z);
}

struct expected expected_forward(const struct forward *f)
{
    int64_t rows = f->q.batch * f->q.len * f->q.heads;
    struct expected e = {.out = calloc((size_t)(rows * f->v.dim + 1), sizeof(double)),
                         .magnitude = calloc((size_t)(rows * f->v.dim + 1), sizeof(double)),
                         .lse = calloc((size_t)rows + 1, sizeof(double)),
                         .condition = calloc((size_t)rows + 1, sizeof(double)),
                         .keys = calloc((size_t)rows + 1, sizeof(int64_t))};
    assert_true(e.out && e.magnitude && e.lse && e.condition && e.keys);
    for (int64_t row = 0; row < rows; row++)
        e.keys[row] = -1;
    struct spans spans = spans_of(&f->attention, &f->q, &f->k, f->lists ? f->lists->desc.q_block : 1);
    struct values values = {tensor_doubles(&f->q), tensor_doubles(&f->k), tensor_doubles(&f->v)};
    for (int s = 0; s < spans.count; s++)
        for (int64_t i = 0; i < spans.at[s].q_len; i++)
            for (int64_t h = 0; h < f->q.heads; h++)
                expected_row(f, &values, &spans.at[s], i, h, &e,
                             (spans.at[s].batch * f->q.len + spans.at[s].q_row + i) * f->q.heads + h);
    free(values.q);
    free(values.k);
    free(values.v);
    return e;
}

void expected_free(struct expected *e)
{
    free(e->out);
    free(e->magnitude);
    free(e->lse);
    free(e->condition);
    free(e->keys);
    *e = (struct expected){0};
}

/* ---- tolerances ----
 *
 * float32: |err| <= max(8 (1 + keys) eps |ref|, eps * sum_j p_j |v_j|), the second term times one more than the
 * logits' condition, because a rounding of q alone moves the result by that much. Numbers below FLT_MIN may be
 * flushed. 16-bit: a rounding of p to the type, and of the result. */
static double tolerance(const struct expected *e, const struct forward *f, int64_t row, int64_t d,
                        clattn_dtype out)
{
    double eps = FLT_EPSILON, ref = fabs(e->out[row * f->v.dim + d]), size = e->magnitude[row * f->v.dim + d];
    double allowed =
        fmax(8 * (1 + (double)e->keys[row]) * eps * ref, (1 + e->condition[row]) * eps * size) + FLT_MIN;
    if (f->q.dtype != CLATTN_FLOAT32) allowed += dtype_epsilon(f->q.dtype) / 2 * size;
    if (out != CLATTN_FLOAT32)
        allowed += dtype_epsilon(out) / 2 * (ref + allowed) + (out == CLATTN_FLOAT16 ? 0x1p-25 : 0);
    return allowed;
}

static bool is_close(double got, double want, double allowed)
{
    if (isnan(got) || isnan(want)) return false;
    if (isinf(want) || isinf(got)) return got == want;
    return fabs(got - want) <= allowed;
}

/* Rows of padding are still the NaN that the test put there. */
static void compare_padding(const struct forward *f, const clattn_tensor *out, const clattn_tensor *lse,
                            const int64_t at[3], const char *label, const char *name)
{
    bool is_whole = !lse || isnan(tensor_get(lse, at[0], at[1], at[2], 0));
    for (int64_t d = 0; d < f->v.dim; d++)
        is_whole = is_whole && isnan(tensor_get(out, at[0], at[1], at[2], d));
    if (!is_whole)
        fail_msg("%s: %s: row [%lld][%lld][%lld] is padding and was written", label, name, (long long)at[0],
                 (long long)at[1], (long long)at[2]);
}

static void compare_row(const struct expected *e, const struct forward *f, const clattn_tensor *out,
                        const clattn_tensor *lse, int64_t at[3], const char *label, const char *name)
{
    int64_t row = (at[0] * f->q.len + at[1]) * f->q.heads + at[2];
    if (e->keys[row] < 0) {
        compare_padding(f, out, lse, at, label, name);
        return;
    }
    for (int64_t d = 0; d < f->v.dim; d++) {
        double got = tensor_get(out, at[0], at[1], at[2], d), want = e->out[row * f->v.dim + d];
        double allowed = e->keys[row] ? tolerance(e, f, row, d, out->dtype) : 0;
        if (!is_close(got, want, allowed))
            fail_msg("%s: %s: out[%lld][%lld][%lld][%lld] is %.9g; %.9g +- %.2g is right (%lld keys)", label,
                     name, (long long)at[0], (long long)at[1], (long long)at[2], (long long)d, got, want,
                     allowed, (long long)e->keys[row]);
    }
    if (!lse) return;
    double got = tensor_get(lse, at[0], at[1], at[2], 0), want = e->lse[row];
    double allowed = FLT_EPSILON * (8 + 2 * fabs(want) + 2 * e->condition[row]);
    if (!is_close(got, want, allowed))
        fail_msg("%s: %s: lse[%lld][%lld][%lld] is %.9g; %.9g +- %.2g is right (%lld keys)", label, name,
                 (long long)at[0], (long long)at[1], (long long)at[2], got, want, allowed,
                 (long long)e->keys[row]);
}

void expected_compare(const struct expected *e, const struct forward *f, const clattn_tensor *out,
                      const clattn_tensor *lse, const char *label, const char *name)
{
    for (int64_t b = 0; b < f->q.batch; b++)
        for (int64_t i = 0; i < f->q.len; i++)
            for (int64_t h = 0; h < f->q.heads; h++)
                compare_row(e, f, out, lse, (int64_t[3]){b, i, h}, label, name);
}
