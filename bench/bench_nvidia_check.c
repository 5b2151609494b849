/* SPDX-License-Identifier: MIT */
/* Sampled rows of bench_nvidia's results against the definition, in double precision. */

#include "bench_nvidia.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 24, KEYS = 4 };

static float widen(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A tensor's content on the host; free it. */
static void *content(const struct bench *bench, const clattn_tensor *tensor)
{
    size_t elements = (size_t)(tensor->len * tensor->heads * tensor->dim);
    void *data = malloc(elements * (tensor->dtype == CLATTN_FLOAT32 ? 4 : 2));
    clattn_tensor host = clattn_tensor_bthd(data, tensor->dtype, 1, tensor->len, tensor->heads, tensor->dim);
    check_code("clattn_tensor_download", clattn_tensor_download(bench->context, tensor, &host));
    return data;
}

static double dot(const uint16_t *a, const uint16_t *b, int dim)
{
    double sum = 0;
    for (int d = 0; d < dim; d++)
        sum += (double)widen(a[d]) * (double)widen(b[d]);
    return sum;
}

/* A row in the middle of each of ROWS equal parts, at both ends too; its head. */
static int64_t sample(int64_t len, int n, int heads, int *head)
{
    *head = n * 7 % heads;
    return n == 0 ? 0 : n == ROWS - 1 ? len - 1 : ((2 * n + 1) * len / (2 * ROWS) + n) % len;
}

/* Is a block of 64 keys connected to a row? */
static bool has_block(const struct case_data *c, int64_t row, int kv_head, int64_t block)
{
    if (!c->lists) return true;
    int head = c->list_heads == 1 ? 0 : kv_head;
    const int32_t *list = c->lists + (row / c->q_block * c->list_heads + head) * c->topk;
    for (int j = 0; j < c->topk && list[j] >= 0; j++)
        if (list[j] == block) return true;
    return false;
}

/* Is key x <= i within the row's window? */
static bool sees(const struct case_data *c, int64_t i, int64_t x)
{
    return !c->attention.window || x > i - c->attention.window;
}

/* ---- lists ---- */

/* The lists of the last rows against those that the CPU chooses; keeps all lists in c->lists. */
bool check_lists(const struct bench *bench, struct case_data *c, char *verdict, size_t bytes)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_context *cpu = NULL;
    clattn_blocks *blocks = NULL;
    size_t row = (size_t)(c->kv_heads * c->topk), heads = (size_t)(c->kv_heads * c->group);
    if (!c->lists) {
        c->lists = malloc((size_t)c->len * row * sizeof *c->lists);
        check_code("clattn_blocks_read", clattn_blocks_read(bench->context, c->blocks, c->lists, NULL));
    }
    uint16_t *q = content(bench, &c->q), *k = content(bench, &c->k);
    uint16_t *last = q + (size_t)(c->len - LAST_ROWS) * heads * (size_t)c->dim;
    clattn_tensor host_q = clattn_tensor_bthd(last, CLATTN_BFLOAT16, 1, LAST_ROWS, (int64_t)heads, c->dim);
    clattn_tensor host_k = clattn_tensor_bthd(k, CLATTN_BFLOAT16, 1, c->len, c->kv_heads, c->dim);
    int32_t *want = malloc(LAST_ROWS * row * sizeof *want);
    desc.backend = CLATTN_BACKEND_CPU;
    select.topk = c->topk;
    select.selector = c->selector;
    check_code("clattn_context_create", clattn_context_create(&desc, &cpu));
    check_code("clattn_select", clattn_select(cpu, NULL, &select, &host_q, &host_k, NULL, &blocks, NULL));
    check_code("clattn_blocks_read", clattn_blocks_read(cpu, blocks, want, NULL));
    int equal = 0;
    for (size_t i = 0; i < LAST_ROWS; i++)
        equal +=
            memcmp(want + i * row, c->lists + ((size_t)c->len - LAST_ROWS + i) * row, row * sizeof *want) == 0;
    clattn_blocks_release(cpu, blocks);
    clattn_context_release(cpu);
    free(want);
    free(q);
    free(k);
    bool good = equal >= LAST_ROWS - 1; /* one may be a near tie */
    snprintf(verdict, bytes, "%s%d of %d lists as the CPU's", good ? "" : "WRONG: ", equal, LAST_ROWS);
    return good;
}

/* ---- attention ---- */

struct host {
    uint16_t *q, *k, *v, *out;
    float *lse, *sink; /* sink may be NULL */
};

/* The definition for one row and head into acc [dim]; returns lse. */
static double forward_row(const struct case_data *c, const struct host *h, int64_t i, int head, double *acc)
{
    int kv_head = head / c->group, heads = c->kv_heads * c->group;
    const uint16_t *q = h->q + (i * heads + head) * c->dim;
    double *z = malloc((size_t)(i + 1) * sizeof *z), most = h->sink ? (double)h->sink[head] : -INFINITY,
           sum = 0;
    double cap = (double)c->attention.softcap;
    memset(acc, 0, (size_t)c->dim * sizeof *acc);
    for (int64_t block = 0; block <= i / 64; block++) {
        bool is_listed = has_block(c, i, kv_head, block);
        for (int64_t x = block * 64; x <= i && x < block * 64 + 64; x++) {
            bool is_seen = is_listed && sees(c, i, x);
            z[x] = is_seen ? dot(q, h->k + (x * c->kv_heads + kv_head) * c->dim, c->dim) / sqrt(c->dim)
                           : -INFINITY;
            if (is_seen && cap > 0) z[x] = cap * tanh(z[x] / cap);
            most = fmax(most, z[x]);
        }
    }
    if (h->sink) sum = exp((double)h->sink[head] - most);
    for (int64_t x = 0; x <= i; x++) {
        if (z[x] == -INFINITY) continue;
        double p = exp(z[x] - most);
        sum += p;
        for (int d = 0; d < c->dim; d++)
            acc[d] += p * (double)widen(h->v[(x * c->kv_heads + kv_head) * c->dim + d]);
    }
    for (int d = 0; d < c->dim; d++)
        acc[d] /= sum;
    free(z);
    return most + log(sum);
}

static struct host host_new(const struct bench *bench, const struct case_data *c)
{
    return (struct host){content(bench, &c->q),   content(bench, &c->k),
                         content(bench, &c->v),   content(bench, &c->out),
                         content(bench, &c->lse), c->sink.data ? content(bench, &c->sink) : NULL};
}

static void host_free(struct host *h)
{
    free(h->q);
    free(h->k);
    free(h->v);
    free(h->out);
    free(h->lse);
    free(h->sink);
}

bool check_forward(const struct bench *bench, struct case_data *c, char *verdict, size_t bytes)
{
    struct host h = host_new(bench, c);
    double error = 0, size = 0, lse_error = 0, acc[256];
    int heads = c->kv_heads * c->group;
    for (int n = 0; n < ROWS; n++) {
        int head;
        int64_t i = c->first_row + sample(c->len - c->first_row, n, heads, &head), at = i * heads + head;
        lse_error = fmax(lse_error, fabs(forward_row(c, &h, i, head, acc) - (double)h.lse[at]));
        for (int d = 0; d < c->dim; d++) {
            error += pow((double)widen(h.out[at * c->dim + d]) - acc[d], 2);
            size += acc[d] * acc[d];
        }
    }
    host_free(&h);
    bool good = sqrt(error / size) < 5e-3 && lse_error < 2e-3;
    size_t used = strlen(verdict);
    if (!good) used = 0;
    snprintf(verdict + used, bytes - used, "%s%sout %.1e lse %.1e", good ? "" : "WRONG: ", used ? ", " : "",
             sqrt(error / size), lse_error);
    return good;
}

/* ---- gradients ---- */

struct gradient_sums {
    double error, size;
};

static void compare_row(struct gradient_sums *sums, const uint16_t *have, const double *want, int dim)
{
    for (int d = 0; d < dim; d++) {
        sums->error += pow((double)widen(have[d]) - want[d], 2);
        sums->size += want[d] * want[d];
    }
}

/* P and dS of a row and key. */
static double weight(const struct case_data *c, const struct host *h, const uint16_t *dout, int64_t i, int head,
                     int64_t x, double *ds)
{
    int heads = c->kv_heads * c->group;
    int64_t at = i * heads + head, key = x * c->kv_heads + head / c->group;
    double p = exp(dot(h->q + at * c->dim, h->k + key * c->dim, c->dim) / sqrt(c->dim) - (double)h->lse[at]);
    *ds = p * (dot(dout + at * c->dim, h->v + key * c->dim, c->dim) -
               dot(dout + at * c->dim, h->out + at * c->dim, c->dim));
    return p;
}

static void add(double *acc, double factor, const uint16_t *row, int dim)
{
    for (int d = 0; d < dim; d++)
        acc[d] += factor * (double)widen(row[d]);
}

bool check_backward(const struct bench *bench, struct case_data *c, char *verdict, size_t bytes)
{
    struct host h = host_new(bench, c);
    uint16_t *dout = content(bench, &c->dout), *dq = content(bench, &c->dq), *dk = content(bench, &c->dk),
             *dv = content(bench, &c->dv);
    struct gradient_sums q = {0}, k = {0}, v = {0};
    double ds, a[256], b[256], scale = 1 / sqrt(c->dim);
    int heads = c->kv_heads * c->group;
    for (int n = 0; n < ROWS; n++) {
        int head;
        int64_t i = sample(c->len, n, heads, &head);
        memset(a, 0, sizeof a);
        for (int64_t x = 0; x <= i; x++)
            if (sees(c, i, x) && has_block(c, i, head / c->group, x / 64)) {
                weight(c, &h, dout, i, head, x, &ds);
                add(a, scale * ds, h.k + (x * c->kv_heads + head / c->group) * c->dim, c->dim);
            }
        compare_row(&q, dq + (i * heads + head) * c->dim, a, c->dim);
    }
    for (int n = 0; n < KEYS; n++) {
        int kv_head = n % c->kv_heads;
        int64_t x = (2 * n + 1) * c->len / (2 * KEYS) + n;
        memset(a, 0, sizeof a);
        memset(b, 0, sizeof b);
        for (int64_t i = x; i < c->len; i++)
            for (int head = kv_head * c->group;
                 sees(c, i, x) && has_block(c, i, kv_head, x / 64) && head < (kv_head + 1) * c->group; head++) {
                double p = weight(c, &h, dout, i, head, x, &ds);
                add(a, scale * ds, h.q + (i * heads + head) * c->dim, c->dim);
                add(b, p, dout + (i * heads + head) * c->dim, c->dim);
            }
        compare_row(&k, dk + (x * c->kv_heads + kv_head) * c->dim, a, c->dim);
        compare_row(&v, dv + (x * c->kv_heads + kv_head) * c->dim, b, c->dim);
    }
    double eq = sqrt(q.error / q.size), ek = sqrt(k.error / k.size), ev = sqrt(v.error / v.size);
    bool good = eq < 5e-3 && ek < 5e-3 && ev < 5e-3;
    snprintf(verdict, bytes, "%sdq %.1e dk %.1e dv %.1e", good ? "" : "WRONG: ", eq, ek, ev);
    free(dout);
    free(dq);
    free(dk);
    free(dv);
    host_free(&h);
    return good;
}
