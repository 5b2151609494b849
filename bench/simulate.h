/* SPDX-License-Identifier: MIT
 *
 * `clattn simulate` in parts: options and output (simulate.c), the ranking of strides (simulate_rank.c), the
 * map of tiles (simulate_map.c). */
#ifndef CLATTN_BENCH_SIMULATE_H
#define CLATTN_BENCH_SIMULATE_H

#include <clattn.h>
#include <stdbool.h>

/* One stride with what tiles make of it. */
struct stride_rank {
    int32_t stride[3];
    clattn_neighborhood_analysis analysis;
};

struct stride_ranking {
    struct stride_rank
        *ranks; /* best first: by tile-bound speed-up, then perfect, then less waste, then finer */
    int count, examined;
    bool all; /* every stride was examined; else 1, the divisors of the window and the powers of two */
};

/* Keeps the best `most` strides; tiles as in desc. Returns an exit status. */
int simulate_rank(const clattn_neighborhood_desc *desc, int most, struct stride_ranking *ranking);

/* Pairs that the visited tiles compute, over those of dense attention; 1 and more: dense is not slower. */
double simulate_cost(const clattn_neighborhood_desc *desc, const clattn_neighborhood_analysis *analysis);

/* Draws the tiles of the analysis: query tiles down, key tiles across. Returns an exit status. */
int simulate_draw(const clattn_neighborhood_desc *desc, const clattn_neighborhood_analysis *analysis, int cells,
                  const char *title, const char *path);

#endif
