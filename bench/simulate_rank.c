/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "simulate.h"

#include "layout.h"
#include "program.h"

#include <stdlib.h>
#include <string.h>

/* More than this many strides with given tiles, or any number with tiles to be searched, take seconds. */
#define ALL_STRIDES 40000

double simulate_cost(const clattn_neighborhood_desc *desc, const clattn_neighborhood_analysis *analysis)
{
    double computed = analysis->tile_pairs;
    for (int a = 0; a < desc->axes; a++)
        computed *= (double)analysis->q_tile[a] * analysis->kv_tile[a];
    return computed / (analysis->tokens * analysis->tokens);
}

static int compare_ranks(const void *a, const void *b)
{
    const struct stride_rank *x = a, *y = b;
    const clattn_neighborhood_analysis *m = &x->analysis, *n = &y->analysis;
    if (m->bound_speedup != n->bound_speedup) return m->bound_speedup > n->bound_speedup ? -1 : 1;
    if (m->perfect != n->perfect) return m->perfect ? -1 : 1;
    if (m->waste != n->waste) return m->waste < n->waste ? -1 : 1;
    for (int i = 0; i < LAYOUT_AXES; i++)
        if (x->stride[i] != y->stride[i]) return x->stride[i] < y->stride[i] ? -1 : 1;
    return 0;
}

static bool is_candidate(const clattn_neighborhood_desc *desc, int axis, int32_t stride, bool all)
{
    if (axis >= desc->axes) return stride == 1;
    return all || (stride & (stride - 1)) == 0 || desc->window[axis] % stride == 0;
}

static int32_t most_stride(const clattn_neighborhood_desc *desc, int axis)
{
    return axis < desc->axes ? desc->window[axis] : 1;
}

static clattn_status rank_one(const clattn_neighborhood_desc *desc, int32_t x, int32_t y, int32_t z, bool all,
                              struct stride_rank *rank, bool *used)
{
    const int32_t stride[LAYOUT_AXES] = {x, y, z};
    clattn_neighborhood_desc candidate = *desc;
    *used = is_candidate(desc, 0, x, all) && is_candidate(desc, 1, y, all) && is_candidate(desc, 2, z, all);
    if (!*used) return CLATTN_SUCCESS;
    memcpy(candidate.stride, stride, sizeof stride);
    memcpy(rank->stride, stride, sizeof stride);
    rank->analysis.size = sizeof rank->analysis;
    return clattn_neighborhood_analyse(&candidate, &rank->analysis);
}

int simulate_rank(const clattn_neighborhood_desc *desc, int most, struct stride_ranking *ranking)
{
    struct stride_rank *ranks = NULL;
    int count = 0, capacity = 0;
    int32_t end[LAYOUT_AXES];
    double strides = 1;
    for (int a = 0; a < LAYOUT_AXES; a++)
        strides *= end[a] = most_stride(desc, a);
    bool all = desc->q_tile[0] > 0 && strides <= ALL_STRIDES;
    for (int32_t x = 1; x <= end[0]; x++)
        for (int32_t y = 1; y <= end[1] && is_candidate(desc, 0, x, all); y++)
            for (int32_t z = 1; z <= end[2] && is_candidate(desc, 1, y, all); z++) {
                bool used;
                if (count == capacity) {
                    capacity = capacity ? 2 * capacity : 256;
                    struct stride_rank *more = realloc(ranks, (size_t)capacity * sizeof *ranks);
                    if (!more) goto fail;
                    ranks = more;
                }
                if (rank_one(desc, x, y, z, all, &ranks[count], &used) != CLATTN_SUCCESS) goto fail;
                count += used;
            }
    qsort(ranks, (size_t)count, sizeof *ranks, compare_ranks);
    *ranking = (struct stride_ranking){ranks, count < most ? count : most, count, all};
    return STATUS_OK;
fail:
    free(ranks);
    program_error("out of memory for the ranking of strides");
    return STATUS_FAILED;
}
