/* SPDX-License-Identifier: MIT */
/* What attention means beyond scaled products: options, keys as they are stored, block lists. Kernels include
 * this file.
 *
 * Options, integers 0 (default) or 1 that cost nothing at 0: SOFTCAP, WINDOW, SINK, BIAS (see
 * clattn_attention_desc); INT8 keys and values with scales; STARTS, blocks of unequal length, where BLOCK means
 * nothing; MASK, cut blocks with a window and a coordinate for each query and key (struct element_mask). With
 * any of them, OPTIONS, a kernel has OPTION_ARGUMENTS behind its own. BIAS_BLOCK: keys that share a bias when
 * there are no lists. BLOCK: keys of a block, otherwise. */

#include "key_rows.cl"

#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef SINK
#define SINK 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef STARTS
#define STARTS 0
#endif
#ifndef MASK
#define MASK 0
#endif
#define OPTIONS (SOFTCAP || WINDOW || SINK || BIAS || INT8 || STARTS || MASK)

#if OPTIONS
#define OPTION_ARGUMENTS                                                                                       \
    , __global const long *restrict option_table, float softcap, ulong window,                                 \
        __global const float *restrict sink, long sink_first, long sink_stride,                                \
        __global const float *restrict bias, long bias_block_stride, long bias_head_stride,                    \
        __global const float *restrict k_scale, long k_scale_stride, long k_scale_head_stride,                 \
        __global const float *restrict v_scale, long v_scale_stride, long v_scale_head_stride,                 \
        uint scale_block, __global const long *restrict starts, __global const uchar *restrict cut,            \
        __global const int *restrict row_windows, __global const int *restrict key_coordinates
#else
#define OPTION_ARGUMENTS
#endif

/* option_table: OPTION_FIELDS numbers a sequence. */
#define OPTION_BIAS 0    /* element of block 0, head 0 */
#define OPTION_K_SCALE 1 /* element of leaf 0 of the tensor, head 0; likewise of v_scale */
#define OPTION_V_SCALE 2
#define OPTION_Q_ROW 3 /* the sequence's first row of q, counted in len */
#define OPTION_K_ROW 4
#define OPTION_START 5  /* entry of `starts` that its first block has */
#define OPTION_BLOCKS 6 /* its blocks */
#define OPTION_FIELDS 7

#define NO_BLOCK 0x7fffffff

/* ---- blocks ---- */

/* The lists of a tile's tokens. */
struct list {
    __global const int *indices, *counts;
    __global const long *starts; /* of the sequence's blocks; with STARTS */
    long k_row;
    uint blocks;
    ulong first; /* list of the sequence's first token */
    uint heads, q_block, topk, seen_least, seen_most, has_lists;
#if CACHE
    int end; /* entries from here on belong to other work-groups */
#endif
};

/* First key of a block, counted from the sequence's first, and the key after its last one. */
inline uint block_first_key(const struct list *list, int block)
{
#if STARTS
    return (uint)(list->starts[block] - list->k_row);
#else
    return (uint)block * BLOCK;
#endif
}

inline uint block_end_key(const struct list *list, int block, uint kv_len)
{
#if STARTS
    return (uint)block + 1 < list->blocks ? block_first_key(list, block + 1) : kv_len;
#else
    return min(kv_len, (uint)block * BLOCK + BLOCK);
#endif
}

/* Entry `at` of a token's list; NO_BLOCK past its end or past the keys. Lists ascend. */
inline int list_entry(const struct list *list, uint token, int at)
{
    int block = at;
#if CACHE
    if (at >= list->end) return NO_BLOCK;
#endif
    if (list->has_lists) {
        ulong row = list->first + (ulong)(token / list->q_block) * list->heads;
        block = at < min(list->counts[row], (int)list->topk) ? list->indices[row * list->topk + at] : -1;
    }
#if STARTS
    return block >= 0 && (uint)block < list->blocks && block_first_key(list, block) < list->seen_most
               ? block
               : NO_BLOCK;
#else
    return block >= 0 && (ulong)block * BLOCK < list->seen_most ? block : NO_BLOCK;
#endif
}

/* The first entry from *at on whose block a row of the tile may see; *at becomes its place. */
inline int list_next(const struct list *list, uint token, int *at, uint kv_len)
{
    int block = list_entry(list, token, *at);
#if WINDOW
    while (block != NO_BLOCK && block_end_key(list, block, kv_len) <= list->seen_least)
        block = list_entry(list, token, ++*at);
#endif
    return block;
}

/* Keys that token `token` sees: first .. end - 1 of them. */
inline int2 keys_seen(long position, uint kv_len, int causal, ulong window)
{
    long first = 0, end = causal ? position + 1 : (long)kv_len;
#if WINDOW
    first = max(position - (long)window + 1, 0L);
    if (!causal) end = min(end, position + (long)window);
#endif
    return (int2)((int)first, (int)max(end, 0L));
}
