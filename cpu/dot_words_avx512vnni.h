/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_DOT_WORDS_AVX512VNNI_H
#define CLATTN_DOT_WORDS_AVX512VNNI_H

/* Rough logits by products of 16-bit words: AVX-512 VNNI. One instruction does the work of two multiply-adds.
 * What the words are, and how far a logit may be off, is said in words_avx512vnni.h.
 *
 *     queries [vector][pair][lane][2]   each vector where its pointer says
 *     keys    [row][pair][2]            broadcast
 *     logits  [vector][capacity][lane] */

#include "words_avx512vnni.h"

/* ---- logits ---- */

/* sum [lane] += products of two words each, from a register and broadcast from memory. Not by the intrinsic,
 * around which GCC 12 copies and spills the sums. */
typedef int32_t word_codes __attribute__((may_alias, aligned(2)));

ALWAYS_INLINE void add_words(__m512i *sum, __m512i words, __m512i codes)
{
    __asm__("vpdpwssd %2, %1, %0" : "+v"(*sum) : "v"(words), "v"(codes));
}

ALWAYS_INLINE void add_words_from(__m512i *sum, __m512i words, const word_codes *codes)
{
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(*sum) : "v"(words), "m"(*codes));
}

/* Tiles as in dot_vectors_simd.h: each of `vectors` vectors of queries where its pointer says, with its factor,
 * which turns sums into logits. */
struct word_vectors {
    const int32_t *q[VECTORS_MAX];
    vec factor[VECTORS_MAX];
    int64_t steps;
};

/* What is prefetched meanwhile: the vectors that come next, and the next leaf's keys. */
struct word_ahead {
    const int32_t *vector[VECTORS_MAX];
    int32_t vectors;
    struct line_walk keys;
    struct ahead
        at[2]; /* in the current tile, every two steps: of a vector and of keys, when these are in one piece */
};

/* rows pair[n] and pair[n] + stride, each with its step, or rows `stride` apart from key on */
struct word_rows {
    const int16_t *key;
    int64_t stride;
    const int16_t *const *pair;
    const float *step;
};

ALWAYS_INLINE void words_tile(const struct word_vectors *from, struct word_rows key, float *logits,
                              int64_t capacity, struct word_ahead *ahead, const bool pairs, const int rows,
                              const int vectors)
{
    __m512i sum[16][VECTORS_MAX];
    const int16_t *base[8];
    const int32_t *at[VECTORS_MAX];
    const int together = pairs ? 2 : 3; /* rows that are reached from one pointer by the stride */
    int64_t stride = key.stride;
    struct ahead vector = {0}, keys = {0};
    if (!pairs) {
        vector = ahead->at[0];
        keys = ahead->at[1];
    }
    UNROLL for (int n = 0; n < vectors; n++) at[n] = from->q[n];
    UNROLL for (int a = 0; a < rows; a++)
    {
        if (a % together == 0) base[a / together] = pairs ? key.pair[a / 2] : key.key + a * stride;
        UNROLL for (int n = 0; n < vectors; n++) sum[a][n] = _mm512_setzero_si512();
    }
    for (int64_t step = 0; step < from->steps; step += 2) {
        if (!pairs) {
            prefetch_line(vector.at);
            prefetch_line(keys.at);
            vector.at += vector.stride;
            keys.at += keys.stride;
        }
        UNROLL for (int64_t s = step; s < step + 2; s++)
        {
            __m512i query[VECTORS_MAX];
            UNROLL for (int n = 0; n < vectors; n++) query[n] = _mm512_loadu_si512(at[n] + s * WIDTH);
            UNROLL for (int a = 0; a < rows; a++)
            {
                const word_codes *codes =
                    (const word_codes *)(base[a / together] + a % together * stride + 2 * s);
                if (vectors == 1) {
                    add_words_from(&sum[a][0], query[0], codes);
                    continue;
                }
                __m512i element = _mm512_set1_epi32(*codes);
                UNROLL for (int n = 0; n < vectors; n++) add_words(&sum[a][n], query[n], element);
            }
        }
    }
    UNROLL for (int a = 0; a < rows; a++)
    {
        UNROLL for (int n = 0; n < vectors; n++)
        {
            vec z = vec_mul(_mm512_cvtepi32_ps(sum[a][n]), from->factor[n]);
            vec_store(logits + (n * capacity + a) * WIDTH, pairs ? vec_mul(z, vec_set(key.step[a])) : z);
        }
    }
}

#define WORDS_TILE(NAME, ROWS, VECTORS)                                                                        \
    static void NAME(const struct word_vectors *from, const int16_t *key, int64_t stride, float *logits,       \
                     int64_t capacity, struct word_ahead *ahead)                                               \
    {                                                                                                          \
        struct word_rows rows = {key, stride, NULL, NULL};                                                     \
        words_tile(from, rows, logits, capacity, ahead, false, ROWS, VECTORS);                                 \
    }

WORDS_TILE(words_tile_1, TILE_ROWS_1, 1)
WORDS_TILE(words_tile_2, TILE_ROWS_2, 2)
WORDS_TILE(words_tile_3, TILE_ROWS_3, 3)
WORDS_TILE(words_four_1, 4, 1)
WORDS_TILE(words_four_2, 4, 2)
WORDS_TILE(words_single_1, 1, 1)
WORDS_TILE(words_single_2, 1, 2)
WORDS_TILE(words_single_3, 1, 3)

#undef WORDS_TILE

typedef void words_tile_function(const struct word_vectors *from, const int16_t *key, int64_t stride,
                                 float *logits, int64_t capacity, struct word_ahead *ahead);

static const struct {
    int full, less; /* rows of the three functions: full, less, 1 */
    words_tile_function *tile, *rest, *single;
} words_tiles[VECTORS_MAX] = {
    {TILE_ROWS_1, 4, words_tile_1, words_four_1, words_single_1},
    {TILE_ROWS_2, 4, words_tile_2, words_four_2, words_single_2},
    {TILE_ROWS_3, TILE_ROWS_3, words_tile_3, words_tile_3, words_single_3},
};

/* What tile `n` of `tiles` prefetches: its part of the vectors, and of the `share` of lines of keys, which go
 * at once where they are not in one piece. */
static inline void word_ahead_tile(struct word_ahead *ahead, int64_t steps, int32_t n, int32_t tiles,
                                   int32_t share)
{
    int32_t each = ahead->vectors ? (tiles + ahead->vectors - 1) / ahead->vectors : 1, vector = n / each;
    int32_t bytes = (int32_t)steps * LINE / each, lines = (share + tiles - 1) / tiles;
    struct line_walk *keys = &ahead->keys;
    ahead->at[0] = ahead->at[1] = (struct ahead){(const char *)ahead, 0};
    if (vector < ahead->vectors)
        ahead->at[0] = (struct ahead){(const char *)ahead->vector[vector] + n % each * bytes,
                                      (bytes + (int32_t)steps / 2 - 1) / ((int32_t)steps / 2)};
    lines = (int32_t)MIN(lines, keys->all);
    keys->all -= lines;
    if (keys->skip == 0 && lines) {
        ahead->at[1] = (struct ahead){keys->at, (lines * LINE + (int32_t)steps / 2 - 1) / ((int32_t)steps / 2)};
        keys->at += lines * LINE;
        return;
    }
    for (; lines > 0; lines--) {
        prefetch_line(keys->at);
        keys->at += LINE;
        if (--keys->left > 0) continue;
        keys->at += keys->skip;
        keys->left = keys->lines;
    }
}

/* As dot_vectors: logits [vector][capacity][WIDTH] of `count` rows. */
static inline void dot_words(const struct word_vectors *from, int vectors, const int16_t *key, int64_t stride,
                             int64_t count, float *logits, int64_t capacity, struct word_ahead *ahead,
                             int64_t passes)
{
    int full = words_tiles[vectors - 1].full, less = words_tiles[vectors - 1].less;
    int32_t share = (int32_t)ceil_div(ahead->keys.all, passes), tiles = MAX((int32_t)count / full, 1), n = 0;
    for (int64_t done = 0, rows; done < count; done += rows, n++) {
        words_tile_function *tile = words_tiles[vectors - 1].tile;
        rows = full;
        if (count - done < full) {
            tile = count - done >= less ? words_tiles[vectors - 1].rest : words_tiles[vectors - 1].single;
            rows = count - done >= less ? less : 1;
        }
        word_ahead_tile(ahead, from->steps, n, tiles, n < tiles ? share : 0);
        tile(from, key + done * stride, stride, logits + done * WIDTH, capacity, ahead);
    }
}

/* ---- pairs of rows ---- */

#define WORDS_PAIRS(PAIRS)                                                                                     \
    case PAIRS:                                                                                                \
        if (vectors == 1)                                                                                      \
            words_tile(from, rows, to, capacity, NULL, true, 2 * PAIRS, 1);                                    \
        else                                                                                                   \
            words_tile(from, rows, to, capacity, NULL, true, 2 * PAIRS, 2);                                    \
        break;

/* As dot_pairs. step [2 * count]: of the rows, which lie `stride` apart. */
static void dot_word_pairs(const struct word_vectors *from, int vectors, const int16_t *const *pair,
                           const float *step, int64_t stride, int64_t count, float *logits, int64_t capacity)
{
    int64_t most = vectors == 2 ? TILE_ROWS_2 / 2 : TILE_ROWS_1 / 2, tiles = ceil_div(count, most);
    for (int64_t done = 0, pairs; done < count; done += pairs, tiles--) {
        struct word_rows rows = {NULL, stride, pair + done, step + 2 * done};
        float *to = logits + 2 * done * WIDTH;
        pairs = ceil_div(count - done, tiles);
        switch (pairs) {
            WORDS_PAIRS(1)
            WORDS_PAIRS(2)
            WORDS_PAIRS(3)
            WORDS_PAIRS(4)
            WORDS_PAIRS(5)
            WORDS_PAIRS(6)
        case 7:
            words_tile(from, rows, to, capacity, NULL, true, 14, 1);
            break;
        case 8:
            words_tile(from, rows, to, capacity, NULL, true, 16, 1);
            break;
        }
    }
}

#undef WORDS_PAIRS

/* Sum of 2^z for |z| <= 60, within 8e-5 of itself. Between two integers a polynomial of least relative error;
 * sums side by side would otherwise wait for each other. */
static inline vec word_exp2(vec z)
{
    vec r = vec_fraction(z), p = vec_set(0.0780245215f);
    p = vec_fma(p, r, vec_set(0.2260671556f));
    p = vec_fma(p, r, vec_set(0.6958335638f));
    p = vec_fma(p, r, vec_set(0.9999251962f));
    return vec_scale_floor(p, z);
}

static inline vec word_sum(const float *z, int64_t count)
{
    enum { SIDE = 4 };
    vec side[SIDE] = {vec_zero(), vec_zero(), vec_zero(), vec_zero()};
    int64_t c = 0;
    for (; c + SIDE <= count; c += SIDE) {
        UNROLL for (int n = 0; n < SIDE; n++) side[n] =
            vec_add(side[n], word_exp2(vec_load(z + (c + n) * WIDTH)));
    }
    for (; c < count; c++)
        side[0] = vec_add(side[0], word_exp2(vec_load(z + c * WIDTH)));
    return vec_add(vec_add(side[0], side[1]), vec_add(side[2], side[3]));
}

#endif
