/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_REFERENCE_H
#define CLATTN_REFERENCE_H

/* Kernels of the reference: double precision, one loop nest per formula. */

#include "cpu.h"

#include "key_blocks.h"

pyramid_leaf_function pyramid_leaf_ref;
pyramid_join_function pyramid_join_ref;
select_rows_function select_rows_ref;
size_t select_scratch_ref(const struct select_job *job, int32_t rows);
int32_t select_rows_max_ref(const struct select_job *job);
forward_tile_function forward_tile_ref;
size_t forward_scratch_ref(const struct forward_job *job, int32_t rows, int32_t heads);
clattn_status backward_ref(clattn_context *context, const struct backward_job *job);

/* One query row and head with its list. */
struct row_job {
    const struct problem *problem;
    const struct sequence *sequence;
    const clattn_tensor *q, *k;
    int64_t i;              /* query row */
    int32_t head;           /* query head */
    const int32_t *indices; /* [count] ascending blocks; NULL: all keys */
    int32_t count;
    struct key_blocks key_blocks;    /* of the sequence */
    const struct element_mask *mask; /* of the list; NULL: none */
    const unsigned char *cut;        /* [count] */
    const clattn_neighborhood
        *neighborhood; /* the keys are this one's, then the extra ones; NULL: the list's */
};

/* The keys that a row attends to. */
struct row_keys {
    int64_t *index; /* [count] */
    double *z;      /* [count] logits */
    double *slope;  /* [count] dz / d(scale * q . k) */
    int64_t count;
};

enum { ROW_KEY_BYTES = sizeof(int64_t) + 2 * sizeof(double) };

int64_t row_keys_max(const struct problem *problem,
                     const clattn_blocks *blocks); /* capacity that row_keys needs */
void row_scores(const struct row_job *job, struct row_keys *keys);
double row_lse(const struct row_job *job, const struct row_keys *keys); /* -INFINITY for an empty row */

/* Element d of key or value j of a sequence, dequantised when scales are given. */
double key_element(const struct problem *problem, const clattn_tensor *tensor, const clattn_tensor *scales,
                   const struct sequence *sequence, int64_t j, int32_t kv_head, int32_t d);

/* Element [row][head] of a small float32 tensor of the options. */
double option_element(const clattn_tensor *tensor, const struct sequence *sequence, int64_t row, int32_t head);

#endif
