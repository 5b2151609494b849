/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_KEY_BLOCKS_H
#define CLATTN_KEY_BLOCKS_H

/* How the keys of one sequence are cut into blocks: equal ones, or at the caller's starts. */

#include "internal.h"

struct key_blocks {
    int32_t block;         /* keys per block; 0 with starts */
    const int64_t *starts; /* [count] rows of k, or NULL */
    int64_t k_row, kv_len; /* of the sequence */
    int64_t count;
};

/* The first entry of ascending starts [count] that is at least `row`. */
static inline int64_t starts_find(const int64_t *starts, int64_t count, int64_t row)
{
    int64_t low = 0;
    while (low < count) {
        int64_t middle = low + (count - low) / 2;
        if (starts[middle] < row)
            low = middle + 1;
        else
            count = middle;
    }
    return low;
}

static inline struct key_blocks key_blocks_of(int32_t block, const int64_t *starts, int64_t start_count,
                                              int64_t k_row, int64_t kv_len)
{
    if (!starts) return (struct key_blocks){block, NULL, k_row, kv_len, ceil_div(kv_len, block)};
    int64_t first = starts_find(starts, start_count, k_row);
    int64_t end = starts_find(starts, start_count, k_row + kv_len);
    return (struct key_blocks){0, starts + first, k_row, kv_len, end - first};
}

/* Does the sequence begin with a block? */
static inline bool key_blocks_fit(const struct key_blocks *keys)
{
    return !keys->starts || keys->kv_len == 0 || (keys->count > 0 && keys->starts[0] == keys->k_row);
}

/* First key of block b, counted from the sequence's first; b = count gives kv_len or more. */
static inline int64_t key_block_first(const struct key_blocks *keys, int64_t b)
{
    if (!keys->starts) return b * keys->block;
    return b < keys->count ? keys->starts[b] - keys->k_row : keys->kv_len;
}

/* The key after the last one. */
static inline int64_t key_block_end(const struct key_blocks *keys, int64_t b)
{
    return MIN(key_block_first(keys, b + 1), keys->kv_len);
}

/* The block that holds key t of the sequence. */
static inline int64_t key_block_at(const struct key_blocks *keys, int64_t t)
{
    if (!keys->starts) return t / keys->block;
    return starts_find(keys->starts, keys->count, keys->k_row + t + 1) - 1;
}

/* Blocks of a sequence as a list (NULL: all keys) counts them. */
static inline struct key_blocks key_blocks_listed(const clattn_blocks *blocks, const struct sequence *sequence)
{
    if (!blocks) return key_blocks_of(DENSE_BLOCK, NULL, 0, sequence->k_row, sequence->kv_len);
    return key_blocks_of(blocks->block, blocks->starts, blocks->start_count, sequence->k_row, sequence->kv_len);
}

#endif
