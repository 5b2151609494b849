/* SPDX-License-Identifier: MIT */
#include "inverse.h"

#include <stdlib.h>

/* Calls for every listed pair in order of rows: counts (rows NULL) or places it. */
static void pairs_visit(const struct problem *problem, const clattn_blocks *blocks, const int32_t *indices,
                        const int32_t *counts, const struct inverse *inverse, int64_t *next, int32_t *rows)
{
    for (int64_t s = 0; s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        int64_t available = key_blocks_listed(blocks, sequence).count;
        for (int64_t row = 0; row < ceil_div(sequence->q_len, blocks->q_block); row++)
            for (int32_t head = 0; head < blocks->heads; head++) {
                int64_t list = (sequence->list_row + row) * blocks->heads + head;
                for (int32_t n = 0; n < counts[list]; n++) {
                    int32_t block = indices[list * blocks->topk + n];
                    if (block >= available) break; /* selected on more keys than these */
                    int64_t place = next[inverse_bin(inverse, problem, blocks, s, head, block)]++;
                    if (rows) rows[place] = (int32_t)row;
                }
            }
    }
}

clattn_status inverse_make(clattn_context *context, const struct problem *problem, const clattn_blocks *blocks,
                           const int32_t *indices, const int32_t *counts, struct inverse *inverse)
{
    int64_t bins = 0, entries = 0;
    *inverse = (struct inverse){.bins = malloc((size_t)(problem->count + 1) * sizeof *inverse->bins)};
    if (!inverse->bins) goto failed;
    for (int64_t s = 0; s < problem->count; s++) {
        inverse->bins[s] = bins;
        bins += key_blocks_listed(blocks, &problem->sequences[s]).count * blocks->heads;
    }
    inverse->bins[problem->count] = bins;
    inverse->first = calloc((size_t)bins + 2, sizeof *inverse->first);
    if (!inverse->first) goto failed;

    /* first[b + 1] counts bin b, then is where the next entry of bin b goes, and in the end where bin b + 1
     * begins. */
    int64_t *next = inverse->first + 1;
    pairs_visit(problem, blocks, indices, counts, inverse, next, NULL);
    for (int64_t b = 0; b < bins; b++) {
        int64_t count = next[b];
        next[b] = entries;
        entries += count;
    }
    inverse->rows = malloc((size_t)(entries + 1) * sizeof *inverse->rows);
    if (!inverse->rows) goto failed;
    pairs_visit(problem, blocks, indices, counts, inverse, next, inverse->rows);
    return CLATTN_SUCCESS;
failed:
    inverse_free(inverse);
    return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for the inverse of %lld lists",
                (long long)(blocks->rows * blocks->heads));
}

void inverse_free(struct inverse *inverse)
{
    free(inverse->bins);
    free(inverse->first);
    free(inverse->rows);
    *inverse = (struct inverse){0};
}
