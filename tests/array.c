/* SPDX-License-Identifier: MIT */
/* Arrays of the tests: guarded host memory, element access, 16-bit conversions. */

#include "harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 64, POISON = 0xff };

/* ---- element types ---- */

size_t element_bytes(clattn_dtype dtype)
{
    return dtype == CLATTN_FLOAT32 ? 4 : dtype == CLATTN_INT8 ? 1 : 2;
}

static int fraction_bits(clattn_dtype dtype)
{
    return dtype == CLATTN_FLOAT32 ? 23 : dtype == CLATTN_FLOAT16 ? 10 : 7;
}

double dtype_epsilon(clattn_dtype dtype)
{
    return ldexp(1, -fraction_bits(dtype));
}

const char *dtype_text(clattn_dtype dtype)
{
    return dtype == CLATTN_FLOAT32 ? "float32" : dtype == CLATTN_FLOAT16 ? "float16" : "bfloat16";
}

/* By arithmetic on the value, where the library works on bits: scale so that the last kept bit is 1, round to
 * even. */
uint16_t narrow16(clattn_dtype dtype, double value)
{
    int bits = fraction_bits(dtype), exponent, bias = dtype == CLATTN_FLOAT16 ? 15 : 127;
    unsigned sign = signbit(value) ? 0x8000u : 0, infinity = (unsigned)(2 * bias + 1) << bits;
    double magnitude = fabs(value);
    if (isnan(value)) return (uint16_t)(sign | infinity | 1u << (bits - 1));
    if (isinf(value)) return (uint16_t)(sign | infinity);
    if (magnitude == 0) return (uint16_t)sign;
    frexp(magnitude, &exponent); /* magnitude = f * 2^exponent, 0.5 <= f < 1 */
    if (exponent < 2 - bias) exponent = 2 - bias;
    double units =
        nearbyint(ldexp(magnitude, bits + 1 - exponent)); /* below 2^(bits + 1), or that after a carry */
    unsigned code = (unsigned)units + ((unsigned)(exponent - 2 + bias) << bits);
    return (uint16_t)(sign | (code > infinity ? infinity : code));
}

double widen16(clattn_dtype dtype, uint16_t code)
{
    int bits = fraction_bits(dtype), bias = dtype == CLATTN_FLOAT16 ? 15 : 127;
    int exponent = (code & 0x7fff) >> bits, fraction = code & ((1 << bits) - 1);
    double sign = code & 0x8000 ? -1 : 1;
    if (exponent == 2 * bias + 1) return fraction ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0) return sign * ldexp(fraction, 1 - bias - bits);
    return sign * ldexp(fraction + (1 << bits), exponent - bias - bits);
}

static size_t element_index(const clattn_tensor *t, int64_t b, int64_t i, int64_t h, int64_t d)
{
    return (size_t)(t->offset + b * t->batch_stride + i * t->len_stride + h * t->head_stride + d);
}

double tensor_get(const clattn_tensor *t, int64_t b, int64_t i, int64_t h, int64_t d)
{
    size_t index = element_index(t, b, i, h, d);
    if (t->dtype == CLATTN_FLOAT32) return (double)((const float *)t->data)[index];
    if (t->dtype == CLATTN_INT8) return ((const int8_t *)t->data)[index];
    return widen16(t->dtype, ((const uint16_t *)t->data)[index]);
}

double *tensor_doubles(const clattn_tensor *t)
{
    int64_t rows = t->batch * t->len * t->heads;
    double *values = malloc((size_t)(rows * t->dim + 1) * sizeof *values);
    assert_non_null(values);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < t->dim; d++)
            values[row * t->dim + d] =
                tensor_get(t, row / t->heads / t->len, row / t->heads % t->len, row % t->heads, d);
    return values;
}

void tensor_set(const clattn_tensor *t, int64_t b, int64_t i, int64_t h, int64_t d, double value)
{
    size_t index = element_index(t, b, i, h, d);
    if (t->dtype == CLATTN_FLOAT32)
        ((float *)t->data)[index] = (float)value;
    else if (t->dtype == CLATTN_INT8)
        ((int8_t *)t->data)[index] = (int8_t)value;
    else
        ((uint16_t *)t->data)[index] = narrow16(t->dtype, value);
}

/* ---- arrays ---- */

static clattn_tensor view_of(clattn_dtype dtype, int64_t batch, int64_t len, int64_t heads, int64_t dim,
                             enum layout layout)
{
    int64_t gap = layout == LAYOUT_PADDED ? 3 : 0;
    clattn_tensor t = {.dtype = dtype, .batch = batch, .len = len, .heads = heads, .dim = dim, .offset = GUARD};
    if (layout == LAYOUT_BHTD) {
        t.len_stride = dim;
        t.head_stride = len * dim;
        t.batch_stride = heads * len * dim;
    } else {
        t.head_stride = dim + gap;
        t.len_stride = heads * t.head_stride + 2 * gap;
        t.batch_stride = len * t.len_stride + 5 * gap;
    }
    return t;
}

struct array array_new(clattn_dtype dtype, int64_t batch, int64_t len, int64_t heads, int64_t dim,
                       enum layout layout)
{
    struct array array = {.view = view_of(dtype, batch, len, heads, dim, layout)};
    array.raw_elements = (size_t)(2 * GUARD + batch * array.view.batch_stride);
    array.raw = malloc(array.raw_elements * element_bytes(dtype));
    assert_non_null(array.raw);
    array.view.data = array.raw;
    array_poison(&array);
    return array;
}

void array_free(struct array *array)
{
    free(array->raw);
    *array = (struct array){0};
}

void array_poison(struct array *array)
{
    memset(array->raw, POISON, array->raw_elements * element_bytes(array->view.dtype));
}

bool array_untouched(const struct array *array)
{
    for (size_t i = 0; i < array->raw_elements * element_bytes(array->view.dtype); i++)
        if (array->raw[i] != POISON) return false;
    return true;
}

void array_check_guards(const struct array *array, const char *label, const char *name)
{
    const clattn_tensor *t = &array->view;
    size_t bytes = element_bytes(t->dtype);
    unsigned char *inside = calloc(array->raw_elements, 1);
    assert_non_null(inside);
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t i = 0; i < t->len; i++)
            for (int64_t h = 0; h < t->heads; h++)
                memset(inside + element_index(t, b, i, h, 0), 1, (size_t)t->dim);
    size_t bad = array->raw_elements * bytes;
    for (size_t i = 0; i < array->raw_elements * bytes && bad == array->raw_elements * bytes; i++)
        if (!inside[i / bytes] && array->raw[i] != POISON) bad = i;
    free(inside);
    if (bad < array->raw_elements * bytes)
        fail_msg("%s: %s: element %lld outside of the tensor was written", label, name,
                 (long long)(bad / bytes) - (long long)t->offset);
}

clattn_tensor tensor_rows(const clattn_tensor *tensor, int64_t i0, int64_t i1)
{
    clattn_tensor t = *tensor;
    t.offset += i0 * t.len_stride;
    t.len = i1 - i0;
    return t;
}

clattn_tensor tensor_batch(const clattn_tensor *tensor, int64_t b)
{
    clattn_tensor t = *tensor;
    t.offset += b * t.batch_stride;
    t.batch = 1;
    return t;
}

bool tensor_equal_bits(const clattn_tensor *a, const clattn_tensor *b)
{
    size_t bytes = element_bytes(a->dtype);
    for (int64_t n = 0; n < a->batch; n++)
        for (int64_t i = 0; i < a->len; i++)
            for (int64_t h = 0; h < a->heads; h++)
                if (memcmp((const char *)a->data + element_index(a, n, i, h, 0) * bytes,
                           (const char *)b->data + element_index(b, n, i, h, 0) * bytes,
                           (size_t)a->dim * bytes))
                    return false;
    return true;
}
