/* SPDX-License-Identifier: MIT */
/* A plain model of the decode cache. */

#include "cache_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct model *model_new(const clattn_cache_desc *desc)
{
    struct model *model = calloc(1, sizeof *model);
    assert_non_null(model);
    model->desc = *desc;
    model->page_size = desc->page_size ? desc->page_size : desc->tokens;
    int64_t each = (desc->tokens + model->page_size - 1) / model->page_size;
    model->pages = desc->pages ? desc->pages : desc->sequences * each;
    assert_true(each <= MODEL_PAGES_MAX && desc->tokens <= MODEL_TOKENS && desc->sequences <= MODEL_SEQUENCES);
    return model;
}

/* ---- pages ---- */

static int64_t pages_of(const struct model *model, int sequence)
{
    return (model->at[sequence].length + model->page_size - 1) / model->page_size;
}

static bool is_shared(const struct model *model, int sequence, int page)
{
    for (int s = 0; s < model->desc.sequences; s++)
        for (int64_t n = 0; n < pages_of(model, s); n++)
            if (s != sequence && model->at[s].page[n] == page) return true;
    return false;
}

int64_t model_pages_free(const struct model *model)
{
    int64_t used = 0;
    for (int s = 0; s < model->desc.sequences; s++)
        for (int64_t n = 0; n < pages_of(model, s); n++) {
            bool seen = false; /* in a sequence before this one: within one no name is there twice */
            for (int other = 0; other < s; other++)
                for (int64_t m = 0; m < pages_of(model, other); m++)
                    seen = seen || model->at[other].page[m] == model->at[s].page[n];
            used += !seen;
        }
    return model->pages - used;
}

/* ---- tokens ---- */

static void store_row(const struct model *model, const float *x, float *stored)
{
    float most = 0;
    memcpy(stored, x, MODEL_DIM * sizeof *x);
    if (model->desc.dtype != CLATTN_INT8) return;
    for (int d = 0; d < MODEL_DIM; d++)
        most = fmaxf(most, fabsf(x[d]));
    float scale = most / 127;
    for (int d = 0; d < MODEL_DIM; d++)
        stored[d] = scale > 0 ? scale * rintf(x[d] / scale) + 0 : 0; /* a code has no -0 */
}

void model_store(const struct model *model, struct model_token *token)
{
    for (int h = 0; h < MODEL_HEADS; h++) {
        store_row(model, token->key[h], token->stored_key[h]);
        store_row(model, token->value[h], token->stored_value[h]);
        memcpy(token->summed[h], token->key[h], sizeof token->key[h]);
    }
}

bool model_append(struct model *model, int sequence, const struct model_token *tokens, int64_t count)
{
    struct model_sequence *s = &model->at[sequence];
    if (count > model->desc.tokens - s->length) return false;
    for (int64_t n = 0; n < count; n++) {
        int64_t entry = s->length / model->page_size;
        bool is_first = s->length % model->page_size == 0;
        if (is_first || is_shared(model, sequence, s->page[entry])) {
            if (model_pages_free(model) == 0) return false;
            s->page[entry] = model->next_page++;
        }
        s->token[s->length] = tokens[n];
        model_store(model, &s->token[s->length++]);
    }
    return true;
}

/* The last leaf of a cut sequence is summed from what is stored. */
static void cut(struct model *model, int sequence)
{
    struct model_sequence *s = &model->at[sequence];
    for (int64_t j = s->length / model->desc.leaf * model->desc.leaf; j < s->length; j++)
        memcpy(s->token[j].summed, s->token[j].stored_key, sizeof s->token[j].summed);
}

void model_truncate(struct model *model, int sequence, int64_t length)
{
    bool changes = length != model->at[sequence].length;
    model->at[sequence].length = length;
    if (changes) cut(model, sequence);
}

void model_share(struct model *model, int from, int to, int64_t length)
{
    model->at[to] = model->at[from];
    model_truncate(model, to, length);
}

/* ---- statistics ---- */

void model_part(const struct model *model, int sequence, int head, int64_t first, int64_t end,
                float part[3][MODEL_DIM])
{
    for (int d = 0; d < MODEL_DIM; d++) {
        double sum = 0;
        part[1][d] = INFINITY;
        part[2][d] = -INFINITY;
        for (int64_t j = first; j < end; j++) {
            float x = model->at[sequence].token[j].summed[head][d];
            sum += (double)x;
            if (x < part[1][d]) part[1][d] = x;
            if (x > part[2][d]) part[2][d] = x;
        }
        part[0][d] = (float)(sum / (double)(end - first));
    }
}

static void join(struct model_pyramid *p, int node, int left, bool both)
{
    for (int d = 0; d < MODEL_DIM; d++) {
        p->mean[node][d] = p->mean[left][d];
        p->least[node][d] = p->least[left][d];
        p->most[node][d] = p->most[left][d];
        if (!both) continue;
        p->mean[node][d] = (float)(((double)p->mean[left][d] + (double)p->mean[left + 1][d]) / 2);
        if (p->least[left + 1][d] < p->least[node][d]) p->least[node][d] = p->least[left + 1][d];
        if (p->most[left + 1][d] > p->most[node][d]) p->most[node][d] = p->most[left + 1][d];
    }
}

void model_pyramid(const struct model *model, int sequence, int head, struct model_pyramid *p)
{
    int64_t length = model->at[sequence].length, leaf = model->desc.leaf;
    int count = 0, below = 0;
    memset(p, 0, sizeof *p);
    for (int64_t first = 0; first < length; first += leaf, count++) {
        float part[3][MODEL_DIM];
        model_part(model, sequence, head, first, first + leaf < length ? first + leaf : length, part);
        memcpy(p->mean[count], part[0], sizeof part[0]);
        memcpy(p->least[count], part[1], sizeof part[1]);
        memcpy(p->most[count], part[2], sizeof part[2]);
    }
    for (int nodes = count; nodes > 0;) {
        p->nodes[++p->levels] = nodes;
        if (nodes == 1) break;
        for (int n = 0; n < (nodes + 1) / 2; n++)
            join(p, count + n, below + 2 * n, 2 * n + 1 < nodes);
        below = count;
        nodes = (nodes + 1) / 2;
        count += nodes;
    }
}
