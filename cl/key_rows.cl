/* SPDX-License-Identifier: MIT */
/* Keys and values as they are stored. Kernels include this file.
 *
 * INT8 1: codes with float32 scales, otherwise elements of DTYPE. CACHE 1: rows lie in the pages of a decode
 * cache (lib/cache.h), otherwise row j of a sequence lies j strides behind its first one; a kernel then has
 * CACHE_ARGUMENTS behind its own. Both default to 0. */

#ifndef INT8
#define INT8 0
#endif
#ifndef CACHE
#define CACHE 0
#endif

#if CACHE
#define CACHE_ARGUMENTS , __global const int *restrict page_table, ulong page_rows, uint page_size

/* Row j of a sequence: row j % size of the key head in page table[j / size]; rows: from page to page. */
struct pages {
    __global const int *table; /* of the sequence */
    ulong rows;
    uint size;
};

inline long page_row(const struct pages *pages, uint j)
{
    const uint page = j / pages->size;
    return (long)((ulong)(uint)pages->table[page] * pages->rows + (j - page * pages->size));
}
#else
#define CACHE_ARGUMENTS
#endif

/* How a sequence's keys or values are stored: their pages and their scales. Row i has the scale
 * of[(row + i) / block * stride], in a cache one of its own. */
struct scales {
#if CACHE
    struct pages pages;
#endif
#if INT8
    __global const float *of;
    long stride;
    uint row, block;
#endif
#if !CACHE && !INT8
    int none;
#endif
};

/* Row first + row of `all`. */
#if CACHE
#define STORED_ROW(all, stride, first, row, scales)                                                            \
    ((all) + page_row(&(scales).pages, (first) + (row)) * (stride))
#else
#define STORED_ROW(all, stride, first, row, scales) ((all) + (long)(first) * (stride) + (long)(row) * (stride))
#endif

#if INT8
#define DEFINE_LOAD_INT8(N)                                                                                    \
    inline float##N load_int8_##N(__global const char *p)                                                      \
    {                                                                                                          \
        return convert_float##N(vload##N(0, p));                                                               \
    }
DEFINE_LOAD_INT8(2)
DEFINE_LOAD_INT8(4)
DEFINE_LOAD_INT8(8)
DEFINE_LOAD_INT8(16)
inline float load_int8_1(__global const char *p)
{
    return (float)*p;
}
typedef char kv_element;
#define LOAD_KV(N) JOIN(load_int8_, N)
#if CACHE
#define SCALED(x, scales, index) ((x) * (scales).of[page_row(&(scales).pages, index)])
#else
#define SCALED(x, scales, index)                                                                               \
    ((x) * (scales).of[(long)(((scales).row + (index)) / (scales).block) * (scales).stride])
#endif
#else
typedef element kv_element;
#define LOAD_KV(N) LOAD(N)
#define SCALED(x, scales, index) (x)
#endif
