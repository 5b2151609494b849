/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "quality.h"

#include "sixteen.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- numbers ---- */

static float element(const clattn_tensor *tensor, int64_t place)
{
    switch (tensor->dtype) {
    case CLATTN_FLOAT16:
        return half_to_float(((const uint16_t *)tensor->data)[place]);
    case CLATTN_BFLOAT16:
        return bfloat16_to_float(((const uint16_t *)tensor->data)[place]);
    default:
        return ((const float *)tensor->data)[place];
    }
}

/* Row `row` of head `head` as float32. */
static void read_row(const clattn_tensor *tensor, int64_t row, int64_t head, float *to)
{
    int64_t place = tensor->offset + row * tensor->len_stride + head * tensor->head_stride;
    for (int64_t d = 0; d < tensor->dim; d++)
        to[d] = element(tensor, place + d);
}

/* All keys, [kv_heads][kv_len][dim]. */
static float *read_keys(const clattn_tensor *k)
{
    float *keys = malloc((size_t)(k->len * k->heads * k->dim) * sizeof *keys);
    for (int64_t h = 0; keys && h < k->heads; h++)
        for (int64_t n = 0; n < k->len; n++)
            read_row(k, n, h, keys + (h * k->len + n) * k->dim);
    return keys;
}

/* Eight sums, so that a compiler may use vectors without changing what is computed. */
static double dot(const float *a, const float *b, int64_t dim)
{
    float sum[8] = {0};
    int64_t d = 0;
    for (; d + 8 <= dim; d += 8)
        for (int i = 0; i < 8; i++)
            sum[i] += a[d + i] * b[d + i];
    double rest = 0;
    for (; d < dim; d++)
        rest += (double)a[d] * b[d];
    return rest + ((double)sum[0] + sum[1]) + ((double)sum[2] + sum[3]) + ((double)sum[4] + sum[5]) +
           ((double)sum[6] + sum[7]);
}

/* ---- masses ---- */

/* What one query row is judged with; a thread has one. */
struct judge {
    const struct quality_problem *problem;
    const float *keys; /* [kv_heads][kv_len][dim] */
    double scale;
    int64_t leaves, begin, end; /* of all keys; the row sees keys begin .. end - 1 */
    float *query;               /* [dim] */
    double *logits;             /* [kv_len] */
    double *head_mass, *mass;   /* [leaves] of one head, of the mean over a group */
    int32_t *best;              /* [topk] leaves of greatest mass */
    int32_t best_count;
};

static bool judge_begin(struct judge *judge, const struct quality_problem *problem, const float *keys)
{
    bool is_default = problem->scale == CLATTN_SCALE_DEFAULT;
    *judge = (struct judge){.problem = problem, .keys = keys};
    judge->scale = is_default ? 1 / sqrt((double)problem->q.dim) : (double)problem->scale;
    judge->leaves = (problem->k.len + problem->leaf - 1) / problem->leaf;
    judge->query = malloc((size_t)problem->q.dim * sizeof *judge->query);
    judge->logits = malloc((size_t)problem->k.len * sizeof *judge->logits);
    judge->head_mass = malloc((size_t)judge->leaves * sizeof *judge->head_mass);
    judge->mass = malloc((size_t)judge->leaves * sizeof *judge->mass);
    judge->best = malloc((size_t)problem->topk * sizeof *judge->best);
    return judge->query && judge->logits && judge->head_mass && judge->mass && judge->best;
}

static void judge_end(struct judge *judge)
{
    free(judge->query);
    free(judge->logits);
    free(judge->head_mass);
    free(judge->mass);
    free(judge->best);
}

static void look(struct judge *judge, int64_t row)
{
    const struct quality_problem *problem = judge->problem;
    int64_t len = problem->k.len, position = row + len - problem->q.len;
    judge->begin = 0;
    judge->end = problem->causal ? position + 1 : len;
    if (problem->window > 0) {
        if (position - problem->window + 1 > 0) judge->begin = position - problem->window + 1;
        if (position + problem->window < judge->end) judge->end = position + problem->window;
    }
    if (judge->end > len) judge->end = len;
    if (judge->end < judge->begin) judge->end = judge->begin;
}

/* Fills head_mass for one query head. */
static void weigh_head(struct judge *judge, int64_t row, int64_t head)
{
    const struct quality_problem *problem = judge->problem;
    int64_t group = problem->q.heads / problem->k.heads, dim = problem->q.dim;
    const float *keys = judge->keys + head / group * problem->k.len * dim;
    double most = -INFINITY, sum = 0, cap = (double)problem->softcap;
    read_row(&problem->q, row, head, judge->query);
    for (int64_t n = judge->begin; n < judge->end; n++) {
        double z = judge->scale * dot(judge->query, keys + n * dim, dim);
        if (cap > 0) z = cap * tanh(z / cap);
        judge->logits[n] = z;
        if (z > most) most = z;
    }
    for (int64_t i = 0; i < judge->leaves; i++)
        judge->head_mass[i] = 0;
    for (int64_t n = judge->begin; n < judge->end; n++) {
        double p = exp(judge->logits[n] - most);
        judge->head_mass[n / problem->leaf] += p;
        sum += p;
    }
    for (int64_t i = 0; i < judge->leaves && sum > 0; i++)
        judge->head_mass[i] /= sum;
}

/* The visible leaves of greatest mass, by insertion. */
static void find_best(struct judge *judge)
{
    const struct quality_problem *problem = judge->problem;
    judge->best_count = 0;
    for (int64_t i = judge->begin / problem->leaf; i * problem->leaf < judge->end; i++) {
        int32_t place = judge->best_count;
        while (place > 0 && judge->mass[i] > judge->mass[judge->best[place - 1]])
            place--;
        if (place == problem->topk) continue;
        if (judge->best_count < problem->topk) judge->best_count++;
        memmove(judge->best + place + 1, judge->best + place,
                (size_t)(judge->best_count - 1 - place) * sizeof *judge->best);
        judge->best[place] = (int32_t)i;
    }
}

/* Fills mass and best for the query heads first .. end - 1. */
static void weigh(struct judge *judge, int64_t row, int64_t first, int64_t end)
{
    for (int64_t i = 0; i < judge->leaves; i++)
        judge->mass[i] = 0;
    for (int64_t h = first; h < end; h++) {
        weigh_head(judge, row, h);
        for (int64_t i = 0; i < judge->leaves; i++)
            judge->mass[i] += judge->head_mass[i] / (double)(end - first);
    }
    find_best(judge);
}

/* ---- lists ---- */

static const int32_t *list_of(const struct quality_lists *lists, int64_t row, int64_t head)
{
    return lists->indices + (row / lists->q_block * lists->heads + head) * lists->entries;
}

static bool list_has(const int32_t *list, int64_t entries, int64_t leaf)
{
    for (int64_t n = 0; n < entries && list[n] >= 0; n++)
        if (list[n] == leaf) return true;
    return false;
}

static void judge_list(const struct judge *judge, const int32_t *list, int64_t entries, struct quality *result)
{
    double mass = 0, best = 0;
    int32_t recalled = 0;
    for (int64_t n = 0; n < entries && list[n] >= 0; n++)
        if (list[n] < judge->leaves) mass += judge->mass[list[n]];
    for (int32_t n = 0; n < judge->best_count; n++) {
        best += judge->mass[judge->best[n]];
        recalled += list_has(list, entries, judge->best[n]);
    }
    result->lists++;
    result->recall += (double)recalled / judge->best_count;
    result->mass += mass;
    result->share += mass / best;
}

static bool heads_differ(const struct quality_problem *problem, const struct quality_lists *lists)
{
    return lists->heads == problem->q.heads && problem->q.heads != problem->k.heads && problem->q.heads > 1;
}

/* Adds query row `row`: a judgement a key head, or a query head where these have their own lists. */
static void judge_row(struct judge *judge, int64_t row, const struct quality_lists *lists, int count,
                      struct quality *results)
{
    const struct quality_problem *problem = judge->problem;
    int64_t kv_heads = problem->k.heads, q_heads = problem->q.heads;
    look(judge, row);
    if (judge->begin == judge->end) return; /* an empty row */
    for (int own = 0; own < 2; own++) {
        int64_t heads = own ? q_heads : kv_heads, wanted = 0;
        for (int s = 0; s < count; s++)
            wanted += own == heads_differ(problem, &lists[s]);
        for (int64_t h = 0; h < heads && wanted; h++) {
            weigh(judge, row, h * q_heads / heads, (h + 1) * q_heads / heads);
            for (int s = 0; s < count; s++)
                if (own == heads_differ(problem, &lists[s]))
                    judge_list(judge, list_of(&lists[s], row, h * lists[s].heads / heads), lists[s].entries,
                               &results[s]);
        }
    }
}

static void judge_answers(const struct quality_problem *problem, const struct quality_lists *lists,
                          struct quality *result)
{
    for (int64_t n = 0; n < problem->answer_count; n++) {
        bool found = false;
        for (int32_t h = 0; h < lists->heads && !found; h++)
            found =
                list_has(list_of(lists, problem->answer_rows[n], h), lists->entries, problem->answer_leaves[n]);
        result->answers++;
        result->found += found;
    }
}

bool quality_measure(const struct quality_problem *problem, const struct quality_lists *lists, int count,
                     struct quality *results)
{
    int64_t rows = problem->rows ? problem->row_count : problem->q.len;
    float *keys = read_keys(&problem->k);
    bool good = keys != NULL;
#ifdef _OPENMP
#pragma omp parallel if (good)
#endif
    {
        struct judge judge;
        struct quality *own = calloc((size_t)count, sizeof *own);
        bool ready = judge_begin(&judge, problem, keys) && own && keys;
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 4)
#endif
        for (int64_t n = 0; n < rows; n++)
            if (ready) judge_row(&judge, problem->rows ? problem->rows[n] : n, lists, count, own);
#ifdef _OPENMP
#pragma omp critical
#endif
        {
            good = good && ready;
            for (int s = 0; s < count && ready; s++) {
                results[s].lists += own[s].lists;
                results[s].recall += own[s].recall;
                results[s].mass += own[s].mass;
                results[s].share += own[s].share;
            }
        }
        free(own);
        judge_end(&judge);
    }
    for (int s = 0; s < count && good; s++)
        judge_answers(problem, &lists[s], &results[s]);
    free(keys);
    return good;
}

/* ---- means ---- */

double quality_recall(const struct quality *quality)
{
    return quality->lists > 0 ? quality->recall / (double)quality->lists : NAN;
}

double quality_mass(const struct quality *quality)
{
    return quality->lists > 0 ? quality->mass / (double)quality->lists : NAN;
}

double quality_share(const struct quality *quality)
{
    return quality->lists > 0 ? quality->share / (double)quality->lists : NAN;
}
