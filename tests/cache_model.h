/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TEST_CACHE_MODEL_H
#define CLATTN_TEST_CACHE_MODEL_H

/* A plain model of the decode cache: every sequence is an array of tokens, pages are numbers, and the pyramid
 * is built anew from all tokens whenever it is asked for. Shares no code with the library. */

#include "harness.h"

enum {
    MODEL_SEQUENCES = 5,
    MODEL_TOKENS = 170,
    MODEL_HEADS = 2,
    MODEL_DIM = 3,
    MODEL_PAGES_MAX = 64,
    MODEL_NODES = 32
};

/* One token: what was appended, what the cache stores of it, and what the pyramid sums. */
struct model_token {
    float key[MODEL_HEADS][MODEL_DIM], value[MODEL_HEADS][MODEL_DIM]; /* as given, exact in the dtype */
    float stored_key[MODEL_HEADS][MODEL_DIM], stored_value[MODEL_HEADS][MODEL_DIM]; /* what attention sees */
    float summed[MODEL_HEADS][MODEL_DIM];
};

struct model_sequence {
    int64_t length;
    struct model_token token[MODEL_TOKENS];
    int page[MODEL_PAGES_MAX]; /* names of its pages; two sequences with the same name share one */
};

struct model {
    clattn_cache_desc desc;
    int64_t page_size, pages;
    int next_page; /* a name that no page has had */
    struct model_sequence at[MODEL_SEQUENCES];
};

struct model *model_new(const clattn_cache_desc *desc);
int64_t model_pages_free(const struct model *model);

/* One sequence of a batch gets tokens; false when pages or room do not suffice, then it may have got some. */
bool model_append(struct model *model, int sequence, const struct model_token *tokens, int64_t count);
void model_truncate(struct model *model, int sequence, int64_t length);
void model_share(struct model *model, int from, int to, int64_t length);

/* What the cache stores of a token that is appended. */
void model_store(const struct model *model, struct model_token *token);

/* Statistics of a key head, built from the tokens. Nodes of level 1, then of level 2 ... */
struct model_pyramid {
    int levels, nodes[16];
    float mean[MODEL_NODES][MODEL_DIM], least[MODEL_NODES][MODEL_DIM], most[MODEL_NODES][MODEL_DIM];
};

void model_pyramid(const struct model *model, int sequence, int head, struct model_pyramid *pyramid);

/* Mean, minimum and maximum of the tokens first .. end - 1. */
void model_part(const struct model *model, int sequence, int head, int64_t first, int64_t end,
                float part[3][MODEL_DIM]);

#endif
