/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TESTS_CPU_CASES_H
#define CLATTN_TESTS_CPU_CASES_H

/* Random tensors between guard regions, and contexts of all CPU variants, for the tests of the CPU kernels. */

#include "half.h"
#include "internal.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* CMocka needs the headers above. */
#include <cmocka.h>

/* ---- random numbers: splitmix64, the seed is printed ---- */

static uint64_t random_state;

static inline uint64_t random_bits(void)
{
    uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static inline int64_t random_below(int64_t n)
{
    return (int64_t)(random_bits() % (uint64_t)n);
}

/* Nearly normal, variance 1. */
static inline float random_normal(void)
{
    double sum = 0;
    for (int i = 0; i < 12; i++)
        sum += (double)(random_bits() >> 11) * 0x1p-53;
    return (float)(sum - 6);
}

static inline void random_seed(void)
{
    const char *wanted = getenv("CLATTN_TEST_SEED");
    random_state = wanted ? strtoull(wanted, NULL, 10) : 20261129;
    printf("CLATTN_TEST_SEED=%llu\n", (unsigned long long)random_state);
}

/* ---- tensors ---- */

enum { GUARD = 64, POISON = 0xa5 }; /* bytes before and after, their content */

static inline float tensor_get(const clattn_tensor *t, int64_t b, int64_t i, int64_t h, int64_t d)
{
    int64_t at = t->offset + b * t->batch_stride + i * t->len_stride + h * t->head_stride + d;
    if (t->dtype == CLATTN_FLOAT16) return float_of_float16(((const uint16_t *)t->data)[at]);
    if (t->dtype == CLATTN_BFLOAT16) return float_of_bfloat16(((const uint16_t *)t->data)[at]);
    return ((const float *)t->data)[at];
}

static inline void tensor_set(const clattn_tensor *t, int64_t b, int64_t i, int64_t h, int64_t d, float value)
{
    int64_t at = t->offset + b * t->batch_stride + i * t->len_stride + h * t->head_stride + d;
    if (t->dtype == CLATTN_FLOAT16)
        ((uint16_t *)t->data)[at] = float16_of_float(value);
    else if (t->dtype == CLATTN_BFLOAT16)
        ((uint16_t *)t->data)[at] = bfloat16_of_float(value);
    else
        ((float *)t->data)[at] = value;
}

/* Layouts: [batch][len][heads][dim], [batch][heads][len][dim], and rows with gaps. All bytes are poison. */
static inline clattn_tensor tensor_make(int layout, clattn_dtype dtype, int64_t batch, int64_t len,
                                        int64_t heads, int64_t dim)
{
    int64_t gap = layout == 2 ? 3 : 0;
    clattn_tensor t = layout == 1 ? clattn_tensor_bhtd(NULL, dtype, batch, heads, len, dim)
                                  : clattn_tensor_bthd(NULL, dtype, batch, len, heads, dim + gap);
    t.dim = dim;
    size_t bytes = (size_t)(batch * len * heads * (dim + gap)) * dtype_bytes(dtype);
    char *memory = malloc(bytes + 2 * GUARD);
    assert_non_null(memory);
    memset(memory, POISON, bytes + 2 * GUARD);
    t.data = memory + GUARD;
    return t;
}

static inline void tensor_free(clattn_tensor *t)
{
    if (t->data) free((char *)t->data - GUARD);
    t->data = NULL;
}

static inline void tensor_fill(const clattn_tensor *t, float factor)
{
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t i = 0; i < t->len; i++)
            for (int64_t h = 0; h < t->heads; h++)
                for (int64_t d = 0; d < t->dim; d++)
                    tensor_set(t, b, i, h, d, factor * random_normal());
}

/* Every byte that is no element still holds poison. */
static inline bool tensor_guards_hold(const clattn_tensor *t)
{
    size_t unit = dtype_bytes(t->dtype), row = (size_t)t->dim * unit;
    size_t bytes = (size_t)(t->batch * t->batch_stride) * unit + 2 * GUARD;
    unsigned char *copy = malloc(bytes);
    bool hold = true;
    memcpy(copy, (char *)t->data - GUARD, bytes);
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t i = 0; i < t->len; i++)
            for (int64_t h = 0; h < t->heads; h++) {
                int64_t at = b * t->batch_stride + i * t->len_stride + h * t->head_stride;
                memset(copy + GUARD + (size_t)at * unit, POISON, row);
            }
    for (size_t i = 0; i < bytes; i++)
        hold = hold && copy[i] == POISON;
    free(copy);
    return hold;
}

/* ---- contexts ---- */

static clattn_context *reference;

static struct {
    char name[16];
    clattn_context *context;
} variants[5];

static int variant_count;

static inline void contexts_open(void)
{
    clattn_device_info info = {.size = sizeof info};
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    assert_int_equal(clattn_context_create(&desc, &reference), CLATTN_SUCCESS);
    assert_int_equal(clattn_device_get(1, &info), CLATTN_SUCCESS);
    desc.backend = CLATTN_BACKEND_CPU;
    for (char *name = strtok(info.variants, " "); name; name = strtok(NULL, " ")) {
        if (strcmp(name, "ref") == 0) continue;
        snprintf(variants[variant_count].name, sizeof variants->name, "%s", name);
        desc.variant = name;
        assert_int_equal(clattn_context_create(&desc, &variants[variant_count].context), CLATTN_SUCCESS);
        variant_count++;
    }
    assert_true(variant_count >= 1);
}

static inline void contexts_close(void)
{
    clattn_context_release(reference);
    while (variant_count > 0)
        clattn_context_release(variants[--variant_count].context);
}

#endif
