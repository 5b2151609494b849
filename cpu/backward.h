/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_BACKWARD_H
#define CLATTN_CPU_BACKWARD_H

/* What the driver of the backward pass (cpu_backward.c) and its kernels share. */

#include "cpu.h"

enum { PACK_ROWS_MAX = 96 }; /* rows x heads at a time: whole tiles of dot_rows of every variant */

/* Most keys of a piece: a block, or what a block of the caller's boundaries is cut into. */
static inline int64_t backward_block(const struct backward_job *job)
{
    return !job->blocks ? DENSE_BLOCK : job->blocks->starts ? 64 : job->blocks->block;
}

/* Floats of a row of an accumulator: whole vectors of every variant. */
static inline int64_t gradient_stride(int32_t dim)
{
    return (dim + 15) / 16 * 16;
}

/* List rows that give to one key block, by heads that share a list. */
struct key_part {
    int32_t head, heads; /* query heads */
    const int32_t *rows; /* [count] list rows of the sequence, ascending; NULL: first_row and those after it */
    int64_t first_row, count;
};

/* One key block of one key head or a piece of it, or a segment of the rows that list it. */
struct key_tile {
    const struct sequence *sequence;
    int32_t kv_head;
    int64_t block;        /* its number */
    int64_t first, count; /* keys of the sequence, at most backward_block() */
    int32_t pack;         /* rows x heads at a time, PACK_ROWS_MAX or a divisor of it */
    int64_t shift;        /* rows see the keys as if they stood so many further to the right */
    int32_t q_block;      /* query rows of a row of the parts */
    struct key_part *parts;
    int32_t part_count;
    const float *delta; /* [q_len][q_heads] D of the sequence */
    float *dk, *dv;     /* [block][gradient_stride(dim or dim_v)], to be added to; unused without job->dk */
    bool has_dq;        /* the rows of job->dq, float32, are added to as well ... */
    int64_t *turns;     /* [q_len][q_heads] ... in turns (backward_turns.h); NULL: they are this tile's alone */
    double *dbias;      /* [group] sums of dS, to be added to; NULL: not wanted */
    const struct key_tile *next; /* what the thread will probably do next, to be prefetched; NULL: not known */
};

/* Rows x heads that list the block, at most. */
static inline int64_t key_tile_rows(const struct key_tile *tile)
{
    int64_t rows = 0;
    for (int32_t n = 0; n < tile->part_count; n++)
        rows += tile->parts[n].count * tile->parts[n].heads * tile->q_block;
    return rows;
}

/* Walk over the query rows that list the block. */
struct row_walk {
    int32_t part;
    int64_t list; /* list row of the part */
    int32_t row;  /* query row of the list row */
};

/* The next query row; false past the last one. */
static inline bool row_walk_next(const struct key_tile *tile, struct row_walk *walk, int64_t *i,
                                 const struct key_part **part)
{
    for (; walk->part < tile->part_count; walk->part++, walk->list = walk->row = 0) {
        *part = &tile->parts[walk->part];
        for (; walk->list < (*part)->count; walk->list++, walk->row = 0) {
            int64_t list = (*part)->rows ? (*part)->rows[walk->list] : (*part)->first_row + walk->list;
            *i = list * tile->q_block + walk->row;
            if (walk->row++ < tile->q_block && *i < tile->sequence->q_len) return true;
        }
    }
    return false;
}

/* Gradient of one row: float32 values to the tensor's dtype, added when the job accumulates. */
void gradient_row_write(const struct backward_job *job, const clattn_tensor *tensor, int64_t batch, int64_t row,
                        int32_t head, const float *values);

#endif
