/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_LIB_NEIGHBORHOOD_H
#define CLATTN_LIB_NEIGHBORHOOD_H

/* The plan of neighborhood attention over one layout.
 *
 * Tokens are permuted so that a tile of queries and a tile of keys are contiguous: residue classes (of all
 * dilated axes together) one after another, in a class its tiles in row-major order, in a tile its coordinates
 * in row-major order. Tiles that reach over the end of a class are filled up with rows that no query sees. A
 * class is a sequence, a query tile is a list row, a key tile is a block; only blocks that a window cuts need
 * the element mask. */

#include "internal.h"

#include "window.h"

enum { AXES = 3 };

/* Tokens in the order of tiles of one shape. */
struct tile_order {
    int32_t tile[AXES]; /* shape; 1 beyond the layout's axes */
    int32_t tile_tokens;
    int64_t rows;        /* of all classes, with the filled-up ones */
    int64_t *class_row;  /* [classes + 1] first row of a class */
    int64_t *token;      /* [rows] token of a row, -1: filled up */
    int32_t *coordinate; /* [rows][AXES] class coordinates, -1: filled up */
};

struct clattn_neighborhood {
    clattn_neighborhood_desc desc; /* with every axis and tile filled in */
    struct window_axis axis[AXES];
    int64_t tokens, classes;
    int64_t extra_len;
    struct tile_order q, kv;
    clattn_blocks *blocks;     /* rows: query tiles of all classes; NULL in the reference, which needs none */
    struct storage q_index;    /* [q.rows] int64: token of a permuted query row */
    struct storage q_inverse;  /* [tokens] int64: permuted row of a token */
    struct storage kv_index;   /* [kv rows with extra keys] int64: token, or tokens + n for extra key n */
    struct storage kv_inverse; /* [tokens] */
    struct storage extra_inverse; /* [extra_len][classes]: permuted rows of an extra key */
    struct storage concat_index;  /* [tokens + extra_len] 0, 1 ...; reference only */
    int64_t kv_rows;              /* rows of permuted keys: kv.rows + classes * extra_len */
};

clattn_status neighborhood_check(clattn_context *context, const clattn_neighborhood_desc *desc,
                                 clattn_neighborhood_desc *full);
clattn_status tile_order_make(clattn_context *context, const clattn_neighborhood *plan, const int32_t *tile,
                              struct tile_order *order);
void tile_order_free(struct tile_order *order);
clattn_status neighborhood_blocks(clattn_context *context, clattn_neighborhood *plan);

/* See struct gather_job. */
clattn_status gather_rows(clattn_context *context, const clattn_tensor *from, const clattn_tensor *more,
                          const clattn_tensor *to, const struct storage *index, int64_t terms,
                          const clattn_sync *sync);

/* Class c's residue along an axis; the last axis varies fastest. */
static inline void class_residues(const clattn_neighborhood *plan, int64_t c, int32_t residue[AXES])
{
    for (int a = AXES - 1; a >= 0; a--) {
        residue[a] = (int32_t)(c % plan->axis[a].dilation);
        c /= plan->axis[a].dilation;
    }
}

#endif
