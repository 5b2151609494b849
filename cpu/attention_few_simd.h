/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_ATTENTION_FEW_SIMD_H
#define CLATTN_ATTENTION_FEW_SIMD_H

/* A piece of keys and values for a tile of so few rows that most lanes of dot_simd.h would be idle, as in
 * decoding with few heads a key head: what counts is that memory is read as a plain read would. Included by
 * attention_forward_simd.h.
 *
 *   z [row][key] = scale * k . q    elements of a key stand in lanes; WIDTH keys at a time
 *   out [row]    = out * correction + sum over keys of exp(z - row_max) v
 *
 * Each key and value is read in the order of addresses, while those FEW_AHEAD rows further on are prefetched.
 */

enum { FEW_AHEAD = 16, FEW_VECTORS = 8 };

/* Row j of what is read, FEW_AHEAD rows on: at the end those of the next piece (NULL: none). */
static inline const char *few_ahead(const struct rows *rows, const struct rows *next, int64_t j)
{
    j += FEW_AHEAD;
    if (j < rows->count) return rows->data + j * stride_bytes(rows);
    return next ? next->data + (j - rows->count) * stride_bytes(next) : rows->data;
}

/* Products of WIDTH keys with one query, lane by lane; ahead (NULL: nothing) [WIDTH] is prefetched. */
ALWAYS_INLINE void few_products(const float *q, const char *key, clattn_dtype dtype, int64_t stride,
                                int32_t dim, const char *const *ahead, vec sum[WIDTH])
{
    int64_t bytes = element_bytes(dtype);
    UNROLL for (int n = 0; n < WIDTH; n++) sum[n] = vec_zero();
    for (int32_t d = 0; d < dim; d += WIDTH) {
        vec query = vec_load(q + d);
        if (ahead && d * bytes % LINE == 0)
            for (int n = 0; n < WIDTH; n++)
                prefetch_line(ahead[n] + d * bytes);
        UNROLL for (int n = 0; n < WIDTH; n++) sum[n] =
            vec_fma(vec_load_as(key + n * stride, dtype, d), query, sum[n]);
    }
}

static vec few_logits(const float *q, const struct rows *keys, int64_t j, const char *const *ahead)
{
    vec sum[WIDTH];
    int64_t stride = stride_bytes(keys);
    const char *key = keys->data + j * stride;
    if (keys->dtype == CLATTN_FLOAT16)
        few_products(q, key, CLATTN_FLOAT16, stride, keys->dim, ahead, sum);
    else if (keys->dtype == CLATTN_BFLOAT16)
        few_products(q, key, CLATTN_BFLOAT16, stride, keys->dim, ahead, sum);
    else if (keys->dtype == CLATTN_INT8)
        few_products(q, key, CLATTN_INT8, stride, keys->dim, ahead, sum);
    else
        few_products(q, key, CLATTN_FLOAT32, stride, keys->dim, ahead, sum);
    vec_transpose(sum);
    for (int step = WIDTH / 2; step > 0; step /= 2)
        for (int n = 0; n < step; n++)
            sum[n] = vec_add(sum[n], sum[n + step]);
    return sum[0];
}

/* Logits of all rows: z [row][count]. */
static void few_keys(const float *q, int64_t rows, const struct rows *keys, const struct rows *next,
                     float scale, float *z)
{
    for (int64_t j = 0; j < keys->count; j += WIDTH) {
        const char *ahead[WIDTH];
        for (int n = 0; n < WIDTH; n++)
            ahead[n] = few_ahead(keys, next, j + n);
        for (int64_t r = 0; r < rows; r++) {
            vec logit = vec_mul(few_logits(q + r * keys->dim, keys, j, r ? NULL : ahead), vec_set(scale));
            if (keys->scale) logit = vec_mul(logit, vec_load(keys->scale + j));
            vec_store(z + r * keys->count + j, logit);
        }
    }
}

/* The online softmax of one row: z -> weights, times value_scale (NULL: 1). Returns the correction. */
static float few_softmax(float *z, int64_t count, const float *value_scale, float *row_max, float *row_sum)
{
    float lanes[WIDTH], total = 0, old_max = *row_max, new_max = old_max;
    vec most = vec_set(old_max), sum = vec_zero();
    for (int64_t j = 0; j < count; j += WIDTH)
        most = vec_max(vec_load(z + j), most);
    vec_store(lanes, most);
    for (int n = 0; n < WIDTH; n++)
        new_max = lanes[n] > new_max ? lanes[n] : new_max;
    vec shift = vec_set(new_max == -INFINITY ? 0 : new_max);
    for (int64_t j = 0; j < count; j += WIDTH) {
        vec weight = vec_exp_below(vec_sub(vec_load(z + j), shift));
        sum = vec_add(sum, weight);
        vec_store(z + j, value_scale ? vec_mul(weight, vec_load(value_scale + j)) : weight);
    }
    vec_store(lanes, sum);
    for (int n = 0; n < WIDTH; n++)
        total += lanes[n];
    vec_store(lanes, vec_exp_below(vec_sub(vec_set(old_max), shift)));
    *row_max = new_max;
    *row_sum = *row_sum * lanes[0] + total;
    return lanes[0];
}

/* Columns d .. d + vectors * WIDTH - 1 of one row of out. */
ALWAYS_INLINE void few_columns(const float *p, const struct rows *values, clattn_dtype dtype,
                               const struct rows *next, bool fetch, int32_t d, float correction, float *out,
                               const int vectors)
{
    vec sum[FEW_VECTORS];
    int64_t stride = stride_bytes(values), bytes = element_bytes(dtype), width = vectors * WIDTH * bytes;
    const char *value = values->data;
    UNROLL for (int n = 0; n < vectors; n++) sum[n] =
        vec_mul(vec_load(out + d + n * WIDTH), vec_set(correction));
    for (int64_t j = 0; j < values->count; j++, value += stride) {
        vec weight = vec_set(p[j]);
        if (fetch) {
            const char *ahead = few_ahead(values, next, j) + d * bytes;
            for (int64_t at = 0; at < width; at += LINE)
                prefetch_line(ahead + at);
        }
        UNROLL for (int n = 0; n < vectors; n++) sum[n] =
            vec_fma(weight, vec_load_as(value, dtype, d + n * WIDTH), sum[n]);
    }
    UNROLL for (int n = 0; n < vectors; n++) vec_store(out + d + n * WIDTH, sum[n]);
}

ALWAYS_INLINE void few_row(const float *p, const struct rows *values, clattn_dtype dtype,
                           const struct rows *next, bool fetch, float correction, float *out)
{
    int32_t d = 0;
    for (; d + FEW_VECTORS * WIDTH <= values->dim; d += FEW_VECTORS * WIDTH)
        few_columns(p, values, dtype, next, fetch, d, correction, out, FEW_VECTORS);
    for (; d + 2 * WIDTH <= values->dim; d += 2 * WIDTH)
        few_columns(p, values, dtype, next, fetch, d, correction, out, 2);
    for (; d < values->dim; d += WIDTH)
        few_columns(p, values, dtype, next, fetch, d, correction, out, 1);
}

static void few_values(const float *p, const struct rows *values, const struct rows *next, bool fetch,
                       float correction, float *out)
{
    if (values->dtype == CLATTN_FLOAT16)
        few_row(p, values, CLATTN_FLOAT16, next, fetch, correction, out);
    else if (values->dtype == CLATTN_BFLOAT16)
        few_row(p, values, CLATTN_BFLOAT16, next, fetch, correction, out);
    else if (values->dtype == CLATTN_INT8)
        few_row(p, values, CLATTN_INT8, next, fetch, correction, out);
    else
        few_row(p, values, CLATTN_FLOAT32, next, fetch, correction, out);
}

#endif
