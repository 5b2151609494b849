/* SPDX-License-Identifier: MIT */
/* Selection by the definition. The library's scores are rounded, so a node may be `sure` to be kept, or only
 * possible: both sets are carried down the levels. With every gap above the bound they are the same and the
 * answer is unique. */

#include "oracle.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

int64_t nodes_of(int64_t kv_len, int32_t leaf, int level)
{
    int64_t nodes = (kv_len + leaf - 1) / leaf;
    for (int l = 1; l < level; l++)
        nodes = (nodes + 1) / 2;
    return level == 0 ? kv_len : nodes;
}

struct means means_new(const clattn_tensor *k, const struct span *span, int64_t kv_head, int32_t leaf)
{
    struct means means = {.dim = k->dim};
    for (int level = 0; level == 0 || level == 1 || nodes_of(span->kv_len, leaf, level - 1) > 1; level++) {
        int64_t count = nodes_of(span->kv_len, leaf, level), below = nodes_of(span->kv_len, leaf, level - 1);
        int64_t width = level == 1 ? leaf : 2;
        assert_true(level < LEVELS_MAX);
        means.nodes[level] = count;
        means.at[level] = calloc((size_t)(count * k->dim + 1), sizeof(double));
        assert_non_null(means.at[level]);
        for (int64_t n = 0; n < count * k->dim; n++) {
            int64_t node = n / k->dim, d = n % k->dim, c = node * width;
            double sum = 0;
            for (; level && c < (node + 1) * width && c < below; c++)
                sum += means.at[level - 1][c * k->dim + d];
            means.at[level][n] = level ? sum / (double)(c - node * width)
                                       : tensor_get(k, span->batch, span->k_row + node, kv_head, d);
        }
        means.levels = level;
    }
    return means;
}

void means_free(struct means *means)
{
    for (int level = 0; level < LEVELS_MAX; level++)
        free(means->at[level]);
    *means = (struct means){0};
}

struct query {
    const struct selection *selection;
    const struct span *span;
    const struct means *means;
    const double *values; /* q as [batch][len][heads][dim] */
    int64_t row, kv_head;
};

struct node {
    int64_t index;
    bool forced, sure; /* sure: certainly a candidate */
    double score, error;
};

/* ---- scores ---- */

/* Mean, half variance or logsumexp of the logits; `error` of a logit becomes the error of the score. */
static double score_of(clattn_selector selector, const double *z, int64_t n, double *error)
{
    double most = -INFINITY, mean = 0, variance = 0, sum = 0, spread = 0;
    for (int64_t c = 0; c < n; c++) {
        most = fmax(most, z[c]);
        mean += z[c] / (double)n;
    }
    for (int64_t c = 0; c < n; c++) {
        sum += exp(z[c] - most);
        variance += (z[c] - mean) * (z[c] - mean) / (double)n;
        spread += fabs(z[c] - mean) / (double)n;
    }
    if (selector == CLATTN_SELECT_PISA1 || selector == CLATTN_SELECT_FLAT_MEAN) return mean;
    if (selector == CLATTN_SELECT_PISA2) {
        *error += *error * 2 * spread + 8 * FLT_EPSILON * variance;
        return mean + variance / 2;
    }
    *error += FLT_EPSILON * (4 + fabs(most + log(sum)));
    return most + log(sum);
}

/* Group score of a node, and the bound of a float32 computation's error: a rounding in each product and
 * addition of a dot product (a sum over d in any order is off by at most dim/2 units of the sum of magnitudes,
 * in practice by its root), in the mean over the leaf and over each level above. */
static void node_score(const struct query *query, int level, struct node *node)
{
    const struct selection *s = query->selection;
    const struct means *means = query->means;
    const clattn_tensor *q = &s->q, *k = &s->k;
    int64_t group = q->heads / k->heads;
    bool own_mean = s->select.selector == CLATTN_SELECT_FLAT_MEAN;
    int child = own_mean ? level : level - 1;
    int64_t width = own_mean ? 1 : level == 1 ? s->select.leaf : 2, first = node->index * width;
    int64_t count = means->nodes[child] - first;
    double scale = own_mean ? 1 : scale_of(&s->attention, k), z[128];
    if (count > width) count = width;
    node->score = node->error = 0;
    for (int64_t g = 0; g < group; g++) {
        const double *values =
            query->values + ((query->span->batch * q->len + query->span->q_row + query->row) * q->heads +
                             query->kv_head * group + g) *
                                q->dim;
        double largest = 0, error;
        for (int64_t c = 0; c < count; c++) {
            const double *child_mean = means->at[child] + (first + c) * q->dim;
            double dot = 0, size = 0;
            for (int64_t d = 0; d < q->dim; d++) {
                dot += values[d] * child_mean[d];
                size += fabs(values[d] * child_mean[d]);
            }
            z[c] = scale * dot;
            largest = fmax(largest, fabs(scale) * size);
        }
        error = FLT_EPSILON * largest * (4 + sqrt((double)q->dim) + sqrt((double)s->select.leaf) + level);
        node->score += score_of(s->select.selector, z, count, &error);
        node->error += error;
    }
    node->error += FLT_EPSILON * fabs(node->score);
    if (isnan(node->score)) node->score = -INFINITY;
    if (isinf(node->score)) node->error = 0;
}

/* ---- one level ---- */

static bool is_flat(const struct selection *s)
{
    return s->select.selector == CLATTN_SELECT_FLAT_MEAN || s->select.selector == CLATTN_SELECT_FLAT_LSE;
}

/* The forced leaves in the order of their priority, at most topk. */
static int forced_leaves(const struct selection *s, int64_t seen, int64_t *forced)
{
    int64_t current = (seen - 1) / s->select.leaf;
    int n = 0;
    if (!s->attention.causal) return 0;
    for (int64_t back = 0; back < s->select.forced_last && back <= current && n < s->select.topk; back++)
        forced[n++] = current - back;
    for (int64_t i = 0;
         i < s->select.forced_first && i <= current - s->select.forced_last && n < s->select.topk; i++)
        forced[n++] = i;
    return n;
}

/* a certainly before b, or possibly: equal exact scores go to the lower index only when nothing was rounded. */
static bool beats(const struct node *a, const struct node *b, bool surely)
{
    double margin = a->error + b->error;
    if (a->score == b->score && margin == 0) return a->index < b->index;
    if (a->score == b->score) return !surely;
    return surely ? a->score - b->score > margin : a->score - b->score >= -margin;
}

/* Keeps forced and best nodes: returns how many remain; `sure` now says that the node is certainly kept. */
static int keep(const struct query *query, int level, struct node *nodes, int count)
{
    const struct selection *s = query->selection;
    int forced = 0, sure_candidates = 0, kept = 0;
    for (int n = 0; n < count; n++) {
        forced += nodes[n].forced;
        sure_candidates += nodes[n].sure;
    }
    int room = s->select.topk - forced;
    if (count <= s->select.topk) return count;
    for (int n = 0; n < count; n++)
        if (!nodes[n].forced) node_score(query, level, &nodes[n]);
    size_t bytes = count > 0 ? (size_t)count : 0; /* always positive, which not every compiler can see */
    bool *sure = malloc(bytes), *possible = malloc(bytes);
    assert_true(sure && possible);
    for (int n = 0; n < count; n++) {
        int may_beat = 0, must_beat = 0;
        for (int m = 0; m < count; m++) {
            if (m == n || nodes[m].forced) continue;
            may_beat += beats(&nodes[m], &nodes[n], false);
            must_beat += nodes[m].sure && beats(&nodes[m], &nodes[n], true);
        }
        sure[n] = nodes[n].sure && (nodes[n].forced || may_beat < room);
        possible[n] = nodes[n].forced || must_beat < room || sure_candidates <= s->select.topk;
    }
    for (int n = 0; n < count; n++)
        if (possible[n]) {
            nodes[kept] = nodes[n];
            nodes[kept++].sure = sure[n];
        }
    free(sure);
    free(possible);
    return kept;
}

/* ---- the walk ---- */

static int candidates_of(const struct selection *s, int level, int64_t seen, const int64_t *forced,
                         int forced_count, const struct node *parents, int parent_count, struct node *nodes)
{
    int64_t span = (int64_t)s->select.leaf << (level - 1), existing = nodes_of(seen, s->select.leaf, level);
    int count = 0;
    for (int p = 0; p < (parents ? parent_count : (int)existing); p++)
        for (int64_t i = parents ? 2 * parents[p].index : p; i <= (parents ? 2 * parents[p].index + 1 : p);
             i++) {
            struct node node = {.index = i, .sure = parents ? parents[p].sure : true};
            for (int f = 0; f < forced_count; f++)
                node.forced |= forced[f] >> (level - 1) == i;
            bool eligible = !s->attention.causal || (i + 1) * span <= seen;
            if (i < existing && (node.forced || eligible)) nodes[count++] = node;
        }
    return count;
}

static struct choice choice_of(const struct selection *s, const struct span *span, const struct means *means,
                               const double *values, int64_t row, int64_t kv_head)
{
    const struct query query = {s, span, means, values, row, kv_head};
    int64_t seen = s->attention.causal ? row + span->kv_len - span->q_len + 1 : span->kv_len;
    int64_t forced[CLATTN_TOPK_MAX], leaves = seen > 0 ? nodes_of(seen, s->select.leaf, 1) : 0;
    struct choice choice = {.sure = malloc((size_t)(leaves + 1) * sizeof(int32_t)),
                            .possible = malloc((size_t)(leaves + 1) * sizeof(int32_t))};
    struct node *nodes = malloc((size_t)(leaves + 1) * sizeof *nodes),
                *parents = malloc((size_t)(leaves + 1) * sizeof *nodes);
    assert_true(choice.sure && choice.possible && nodes && parents);
    int level = 1, count = 0;
    if (seen > 0) {
        int forced_count = forced_leaves(s, seen, forced);
        while (!is_flat(s) && nodes_of(seen, s->select.leaf, level) > s->select.topk)
            level++;
        for (bool first = true; level >= 1; level--, first = false) {
            memcpy(parents, nodes, (size_t)count * sizeof *nodes);
            count = candidates_of(s, level, seen, forced, forced_count, first ? NULL : parents, count, nodes);
            count = keep(&query, level, nodes, count);
        }
    }
    for (int n = 0; n < count; n++) {
        choice.possible[choice.possible_count++] = (int32_t)nodes[n].index;
        if (nodes[n].sure) choice.sure[choice.sure_count++] = (int32_t)nodes[n].index;
    }
    free(nodes);
    free(parents);
    return choice;
}

/* ---- comparison ---- */

static int position_in(const int32_t *list, int count, int32_t value)
{
    for (int n = 0; n < count; n++)
        if (list[n] == value) return n;
    return -1;
}

static const char *list_fault(const struct choice *choice, const int32_t *list, int32_t count, int32_t topk)
{
    int expected = choice->possible_count < topk ? choice->possible_count : topk;
    if (count < choice->sure_count || count > expected) return "wrong count";
    if (choice->sure_count == choice->possible_count && count != expected) return "wrong count";
    for (int32_t n = 0; n < topk; n++) {
        if (n >= count && list[n] != -1) return "no -1 right of the list";
        if (n < count && n > 0 && list[n] <= list[n - 1]) return "not ascending";
        if (n < count && position_in(choice->possible, choice->possible_count, list[n]) < 0)
            return "wrong leaf";
    }
    for (int n = 0; n < choice->sure_count; n++)
        if (position_in(list, count, choice->sure[n]) < 0) return "leaf missing";
    return NULL;
}

static void list_print(const char *what, const int32_t *list, int count)
{
    print_error("%s:", what);
    for (int n = 0; n < count; n++)
        print_error(" %d", list[n]);
    print_error("\n");
}

struct choices choices_of(const struct selection *s)
{
    struct spans spans = spans_of(&s->attention, &s->q, &s->k, 1);
    struct choices choices = {.count = spans.list_rows * s->k.heads};
    double *values = tensor_doubles(&s->q);
    choices.at = calloc((size_t)choices.count + 1, sizeof *choices.at);
    assert_non_null(choices.at);
    for (int n = 0; n < spans.count; n++)
        for (int64_t h = 0; h < s->k.heads; h++) {
            struct means means = means_new(&s->k, &spans.at[n], h, s->select.leaf);
            for (int64_t i = 0; i < spans.at[n].q_len; i++) {
                struct choice *choice = &choices.at[(spans.at[n].list_row + i) * s->k.heads + h];
                *choice = choice_of(s, &spans.at[n], &means, values, i, h);
                choices.unique += choice->sure_count == choice->possible_count;
            }
            means_free(&means);
        }
    free(values);
    return choices;
}

void choices_free(struct choices *choices)
{
    for (int64_t n = 0; n < choices->count; n++) {
        free(choices->at[n].sure);
        free(choices->at[n].possible);
    }
    free(choices->at);
    *choices = (struct choices){0};
}

void choices_compare(const struct choices *choices, const struct selection *s, const int32_t *indices,
                     const int32_t *counts, const char *label, const char *name)
{
    for (int64_t n = 0; n < choices->count; n++) {
        const struct choice *choice = &choices->at[n];
        const int32_t *list = indices + n * s->select.topk;
        const char *fault = list_fault(choice, list, counts[n], s->select.topk);
        if (!fault) continue;
        list_print("got", list, s->select.topk);
        list_print("sure", choice->sure, choice->sure_count);
        list_print("possible", choice->possible, choice->possible_count);
        fail_msg("%s: %s: list row %lld, kv head %lld: %s (count %d)", label, name, (long long)(n / s->k.heads),
                 (long long)(n % s->k.heads), fault, counts[n]);
    }
}
