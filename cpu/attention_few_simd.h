/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_ATTENTION_FEW_SIMD_H
#define CLATTN_ATTENTION_FEW_SIMD_H

/* A piece of keys and values for a tile of so few rows that most lanes of dot_simd.h would be idle, as in
 * decoding with few heads a key head: what counts is that memory is read as a plain read would. Included by
 * attention_forward_simd.h.
 *
 *   z [row][key] = scale * k . q    elements of a key stand in lanes; WIDTH sums at a time
 *   out [row]    = out * correction + sum over keys of exp(z - row_max) v
 *
 * Each key and value is loaded once for all rows, in the order of addresses, while those some rows further on
 * are prefetched, evenly. */

enum {
    FEW_AHEAD_BYTES = 8192,         /* that are asked for ahead, but ... */
    FEW_AHEAD_ROWS = 32,            /* ... at most so many rows */
    FEW_SUMS = WIDTH >= 16 ? 16 : 8 /* of values: half the registers */
};

/* How far ahead rows are asked for; a single query leaves time for half as many. */
static inline int64_t few_rows_ahead(const struct rows *rows, int queries)
{
    int64_t bytes = rows->dim * element_bytes(rows->dtype);
    return MAX(1, MIN(queries == 1 ? FEW_AHEAD_ROWS / 2 : FEW_AHEAD_ROWS, FEW_AHEAD_BYTES / bytes));
}

/* Row j + distance of what is read: at the end those of the next piece (NULL: none). */
static inline const char *few_ahead(const struct rows *rows, const struct rows *next, int64_t j,
                                    int64_t distance)
{
    j += distance;
    if (j < rows->count) return rows->data + j * stride_bytes(rows);
    return next ? next->data + (j - rows->count) * stride_bytes(next) : rows->data;
}

/* Keys whose products with `rows` queries fill WIDTH sums. */
#define FEW_KEYS(ROWS) (WIDTH / ((ROWS) == 3 ? 4 : (ROWS)))

/* Logits of FEW_KEYS(rows) keys from j on, not scaled: [row][key]. */
ALWAYS_INLINE void few_products(const float *q, const struct rows *keys, clattn_dtype dtype, int64_t j,
                                const char *const *ahead, float *products, const int rows)
{
    const int count = FEW_KEYS(rows);
    int64_t stride = stride_bytes(keys), bytes = element_bytes(dtype);
    const char *key = keys->data + j * stride;
    vec sum[WIDTH];
    UNROLL for (int n = 0; n < WIDTH; n++) sum[n] = vec_zero();
    for (int32_t d = 0; d < keys->dim; d += WIDTH) {
        vec query[FEW_ROWS];
        UNROLL for (int r = 0; r < rows; r++) query[r] = vec_load(q + r * keys->dim + d);
        if (d * bytes % LINE == 0)
            for (int n = 0; n < count; n++)
                prefetch_line(ahead[n] + d * bytes);
        UNROLL for (int n = 0; n < count; n++)
        {
            vec elements = vec_load_as(key + n * stride, dtype, d);
            UNROLL for (int r = 0; r < rows; r++) sum[r * count + n] =
                vec_fma(elements, query[r], sum[r * count + n]);
        }
    }
    vec_transpose(sum);
    for (int step = WIDTH / 2; step > 0; step /= 2)
        for (int n = 0; n < step; n++)
            sum[n] = vec_add(sum[n], sum[n + step]);
    vec_store(products, sum[0]);
}

ALWAYS_INLINE void few_keys_of(const float *q, const struct rows *keys, clattn_dtype dtype,
                               const struct rows *next, float scale, float *z, const int rows)
{
    const int count = FEW_KEYS(rows);
    int64_t distance = few_rows_ahead(keys, rows);
    for (int64_t j = 0; j < keys->count; j += count) {
        const char *ahead[WIDTH];
        float products[WIDTH];
        for (int n = 0; n < count; n++)
            ahead[n] = few_ahead(keys, next, j + n, distance);
        few_products(q, keys, dtype, j, ahead, products, rows);
        for (int r = 0; r < rows; r++)
            memcpy(z + r * keys->count + j, products + r * count, (size_t)count * sizeof *z);
    }
    for (int64_t n = 0; n < rows * keys->count; n += WIDTH) {
        vec logit = vec_mul(vec_load(z + n), vec_set(scale));
        if (keys->scale) logit = vec_mul(logit, vec_load(keys->scale + n % keys->count));
        vec_store(z + n, logit);
    }
}

/* Of the lanes, in halves: a chain of all of them would take several times as long. */
static inline float few_greatest(vec a)
{
    float lanes[WIDTH];
    vec_store(lanes, a);
    UNROLL for (int step = WIDTH / 2; step > 0; step /= 2)
    {
        UNROLL for (int n = 0; n < step; n++) lanes[n] =
            lanes[n + step] > lanes[n] ? lanes[n + step] : lanes[n];
    }
    return lanes[0];
}

static inline float few_sum(vec a)
{
    float lanes[WIDTH];
    vec_store(lanes, a);
    UNROLL for (int step = WIDTH / 2; step > 0; step /= 2)
    {
        UNROLL for (int n = 0; n < step; n++) lanes[n] += lanes[n + step];
    }
    return lanes[0];
}

/* The online softmax of one row: z -> weights, times value_scale (NULL: 1). Returns the correction. */
static float few_softmax(float *z, int64_t count, const float *value_scale, float *row_max, float *row_sum)
{
    float lanes[WIDTH], old_max = *row_max;
    vec most = vec_set(old_max), sum = vec_zero();
    for (int64_t j = 0; j < count; j += WIDTH)
        most = vec_max(vec_load(z + j), most);
    float new_max = few_greatest(most);
    vec shift = vec_set(new_max == -INFINITY ? 0 : new_max);
    for (int64_t j = 0; j < count; j += WIDTH) {
        vec weight = vec_exp_below(vec_sub(vec_load(z + j), shift));
        sum = vec_add(sum, weight);
        vec_store(z + j, value_scale ? vec_mul(weight, vec_load(value_scale + j)) : weight);
    }
    vec_store(lanes, vec_exp_below(vec_sub(vec_set(old_max), shift)));
    *row_max = new_max;
    *row_sum = *row_sum * lanes[0] + few_sum(sum);
    return lanes[0];
}

/* Columns d .. d + vectors * WIDTH - 1 of all rows: p [row][count], out [row][stride]. */
ALWAYS_INLINE void few_columns(const float *p, const struct rows *values, clattn_dtype dtype,
                               const struct rows *next, int32_t d, const float *correction, float *out,
                               int64_t out_stride, const int rows, const int vectors)
{
    vec sum[FEW_ROWS][8];
    int64_t stride = stride_bytes(values), bytes = element_bytes(dtype), width = vectors * WIDTH * bytes;
    int64_t distance = few_rows_ahead(values, rows), count = values->count;
    const char *value = values->data;
    UNROLL for (int r = 0; r < rows; r++)
    {
        UNROLL for (int n = 0; n < vectors; n++) sum[r][n] =
            vec_mul(vec_load(out + r * out_stride + d + n * WIDTH), vec_set(correction[r]));
    }
    for (int64_t j = 0; j < count; j++, value += stride) {
        const char *ahead = few_ahead(values, next, j, distance) + d * bytes;
        for (int64_t at = 0; at < width; at += LINE)
            prefetch_line(ahead + at);
        UNROLL for (int n = 0; n < vectors; n++)
        {
            vec elements = vec_load_as(value, dtype, d + n * WIDTH);
            UNROLL for (int r = 0; r < rows; r++) sum[r][n] =
                vec_fma(vec_set(p[r * count + j]), elements, sum[r][n]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
    {
        UNROLL for (int n = 0; n < vectors; n++) vec_store(out + r * out_stride + d + n * WIDTH, sum[r][n]);
    }
}

ALWAYS_INLINE void few_values_of(const float *p, const struct rows *values, clattn_dtype dtype,
                                 const struct rows *next, const float *correction, float *out,
                                 int64_t out_stride, const int rows)
{
    const int most = rows * 8 <= FEW_SUMS ? 8 : rows * 4 <= FEW_SUMS ? 4 : 2;
    int32_t d = 0;
    for (; d + most * WIDTH <= values->dim; d += most * WIDTH)
        few_columns(p, values, dtype, next, d, correction, out, out_stride, rows, most);
    for (; d + 2 * WIDTH <= values->dim; d += 2 * WIDTH)
        few_columns(p, values, dtype, next, d, correction, out, out_stride, rows, 2);
    for (; d < values->dim; d += WIDTH)
        few_columns(p, values, dtype, next, d, correction, out, out_stride, rows, 1);
}

#define FEW(ROWS)                                                                                              \
    static void few_keys_##ROWS(const float *q, const struct rows *keys, const struct rows *next, float scale, \
                                float *z)                                                                      \
    {                                                                                                          \
        if (keys->dtype == CLATTN_FLOAT16)                                                                     \
            few_keys_of(q, keys, CLATTN_FLOAT16, next, scale, z, ROWS);                                        \
        else if (keys->dtype == CLATTN_BFLOAT16)                                                               \
            few_keys_of(q, keys, CLATTN_BFLOAT16, next, scale, z, ROWS);                                       \
        else if (keys->dtype == CLATTN_INT8)                                                                   \
            few_keys_of(q, keys, CLATTN_INT8, next, scale, z, ROWS);                                           \
        else                                                                                                   \
            few_keys_of(q, keys, CLATTN_FLOAT32, next, scale, z, ROWS);                                        \
    }                                                                                                          \
    static void few_values_##ROWS(const float *p, const struct rows *values, const struct rows *next,          \
                                  const float *correction, float *out, int64_t stride)                         \
    {                                                                                                          \
        if (values->dtype == CLATTN_FLOAT16)                                                                   \
            few_values_of(p, values, CLATTN_FLOAT16, next, correction, out, stride, ROWS);                     \
        else if (values->dtype == CLATTN_BFLOAT16)                                                             \
            few_values_of(p, values, CLATTN_BFLOAT16, next, correction, out, stride, ROWS);                    \
        else if (values->dtype == CLATTN_INT8)                                                                 \
            few_values_of(p, values, CLATTN_INT8, next, correction, out, stride, ROWS);                        \
        else                                                                                                   \
            few_values_of(p, values, CLATTN_FLOAT32, next, correction, out, stride, ROWS);                     \
    }

FEW(1)
#if defined(SIMD_FEW_2)
FEW(2)
#endif
#if defined(SIMD_FEW_4)
FEW(3)
FEW(4)
#endif

#undef FEW

/* Logits of all rows: z [row][count]. */
static void few_keys(const float *q, int64_t rows, const struct rows *keys, const struct rows *next,
                     float scale, float *z)
{
    switch (rows) {
    case 1:
        few_keys_1(q, keys, next, scale, z);
        break;
#if defined(SIMD_FEW_2)
    case 2:
        few_keys_2(q, keys, next, scale, z);
        break;
#endif
#if defined(SIMD_FEW_4)
    case 3:
        few_keys_3(q, keys, next, scale, z);
        break;
    case 4:
        few_keys_4(q, keys, next, scale, z);
        break;
#endif
    }
}

/* out [row][stride] = out * correction [row] + p [row][count] * values */
static void few_values(const float *p, int64_t rows, const struct rows *values, const struct rows *next,
                       const float *correction, float *out, int64_t stride)
{
    switch (rows) {
    case 1:
        few_values_1(p, values, next, correction, out, stride);
        break;
#if defined(SIMD_FEW_2)
    case 2:
        few_values_2(p, values, next, correction, out, stride);
        break;
#endif
#if defined(SIMD_FEW_4)
    case 3:
        few_values_3(p, values, next, correction, out, stride);
        break;
    case 4:
        few_values_4(p, values, next, correction, out, stride);
        break;
#endif
    }
}

#endif
