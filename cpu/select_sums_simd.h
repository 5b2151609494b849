/* SPDX-License-Identifier: MIT */
/* From the logits of a node's children, [child][lanes], to its score. Lanes are heads.
 *
 *   logsumexp over children:  ln 2 * (most + log2 sum_c 2^(x_c - most)),  x = logit / ln 2
 *
 * The logits come multiplied by 1 / ln 2 already (score_scale). The sum over heads of the logarithms is the
 * logarithm of a product, taken in double: a sum is at most 128, so the product of 16 lanes, or of fewer than
 * 48 heads that stand side by side, stays below 2^336.
 *
 * Included by select_levels_simd.h. */

#include "doubles_simd.h"
#include "exp_simd.h"

#define LN2 0.69314718055994530942

/* Per lane: the greatest x and the sum of 2^(x - most); PISA2: most is the score itself and sum is 1. */
struct lane_sums {
    float most[VECTORS_MAX * WIDTH], sum[VECTORS_MAX * WIDTH];
};

static float score_scale(clattn_selector selector, float scale)
{
    return selector == CLATTN_SELECT_PISA2 ? scale : scale * 1.44269504088896341f;
}

/* Several sums side by side: a single one would wait for its own additions. */
static void logarithm_sums(const float *z, int64_t count, vec *most, vec *sum)
{
    enum { SIDE = 4 };
    vec side[SIDE], row_max = vec_load(z);
    int64_t c = 0;
    UNROLL for (int n = 0; n < SIDE; n++) side[n] = row_max;
    for (; c + SIDE <= count; c += SIDE) {
        UNROLL for (int n = 0; n < SIDE; n++) side[n] = vec_max(vec_load(z + (c + n) * WIDTH), side[n]);
    }
    for (; c < count; c++)
        side[0] = vec_max(vec_load(z + c * WIDTH), side[0]);
    row_max = vec_max(vec_max(side[0], side[1]), vec_max(side[2], side[3]));
    UNROLL for (int n = 0; n < SIDE; n++) side[n] = vec_zero();
    for (c = 0; c + SIDE <= count; c += SIDE) {
        UNROLL for (int n = 0; n < SIDE; n++) side[n] =
            vec_add(side[n], vec_exp2_below(vec_sub(vec_load(z + (c + n) * WIDTH), row_max)));
    }
    for (; c < count; c++)
        side[0] = vec_add(side[0], vec_exp2_below(vec_sub(vec_load(z + c * WIDTH), row_max)));
    *most = row_max;
    *sum = vec_add(vec_add(side[0], side[1]), vec_add(side[2], side[3]));
}

/* The mean plus half the population variance. */
static void moment_sums(const float *z, int64_t count, vec *most, vec *sum)
{
    vec mean = vec_zero(), variance = vec_zero(), share = vec_set(1.0f / (float)count);
    for (int64_t c = 0; c < count; c++)
        mean = vec_add(mean, vec_load(z + c * WIDTH));
    mean = vec_mul(mean, share);
    for (int64_t c = 0; c < count; c++) {
        vec difference = vec_sub(vec_load(z + c * WIDTH), mean);
        variance = vec_fma(difference, difference, variance);
    }
    *most = vec_fma(vec_mul(variance, share), vec_set(0.5f), mean);
    *sum = vec_set(1);
}

static void vector_sums(clattn_selector selector, const float *z, int64_t count, vec *most, vec *sum)
{
    if (selector == CLATTN_SELECT_PISA2)
        moment_sums(z, count, most, sum);
    else
        logarithm_sums(z, count, most, sum);
}

/* log x within 1e-11 for 1 <= x < 2^1023; NaN for NaN.
 *
 *   x = 2^n m,  sqrt(1/2) <= m < sqrt 2,   log m = 2 artanh s,  s = (m - 1) / (m + 1) */
static inline double product_log(double x)
{
    const int64_t root = 0x3fe6a09e667f3bcd; /* sqrt(1/2) */
    int64_t bits, n;
    double m;
    memcpy(&bits, &x, sizeof bits);
    n = (bits - root) >> 52;
    bits -= n * (INT64_C(1) << 52);
    memcpy(&m, &bits, sizeof m);
    double s = (m - 1) / (m + 1), square = s * s;
    double p = 0.23618582;
    p = p * square + 0.28534912;
    p = p * square + 0.40000387;
    p = p * square + 0.66666665;
    p = p * square + 2;
    return (double)n * LN2 + s * p + (x - x);
}

/* Logits that are not finite: a NaN makes NaN, an infinite greatest logit is the logsumexp. */
static double careful_score(const float *z, int64_t count)
{
    double most = -INFINITY, sum = 0;
    for (int64_t c = 0; c < count; c++) {
        if (isnan(z[c * WIDTH])) return NAN;
        most = fmax(most, (double)z[c * WIDTH]);
    }
    if (isinf(most)) return most;
    for (int64_t c = 0; c < count; c++)
        sum += exp2((double)z[c * WIDTH] - most);
    return most + log2(sum);
}

static __attribute__((noinline)) double careful_heads(const float *z, int64_t capacity, int64_t count,
                                                      int64_t first, int64_t heads)
{
    double total = 0;
    for (int64_t h = first; h < first + heads; h++)
        total += careful_score(z + h / WIDTH * capacity * WIDTH + h % WIDTH, count);
    return LN2 * total;
}

/* Sum over the heads of ln 2 * most + log sum, from the sum of the former and the product of the latter; z
 * [vector] [capacity][WIDTH] are the logits, whose lanes first .. first + heads - 1 are meant. */
ALWAYS_INLINE double heads_score(double total, double product, const float *z, int64_t capacity, int64_t count,
                                 int64_t first, int64_t heads)
{
    if (__builtin_expect(!isfinite(total), 0)) return careful_heads(z, capacity, count, first, heads);
    return LN2 * total + product_log(product);
}

/* Sum of most and product of sum over the first `heads` lanes. */
ALWAYS_INLINE void vector_join(vec most, vec sum, int64_t heads, double *total, double *product)
{
    float lane_most[WIDTH], lane_sum[WIDTH];
    if (heads == WIDTH) {
        *total = vec_total(most);
        *product = vec_product(sum);
        return;
    }
    *total = 0;
    *product = 1;
    vec_store(lane_most, most);
    vec_store(lane_sum, sum);
    for (int64_t h = 0; h < heads; h++) {
        *total += (double)lane_most[h];
        *product *= (double)lane_sum[h];
    }
}

/* Score of the first `heads` lanes of one vector. */
static double vector_score(clattn_selector selector, const float *z, int64_t count, int64_t heads)
{
    vec most, sum;
    double total, product;
    vector_sums(selector, z, count, &most, &sum);
    vector_join(most, sum, heads, &total, &product);
    return selector == CLATTN_SELECT_PISA2 ? total : heads_score(total, product, z, 0, count, 0, heads);
}

/* Adds to the scores of at most DOUBLES nodes of two children each, by logsumexp: 2^(least - most) stands
 * beside a 1. z [2 * count][WIDTH]. */
static void pairs_add(const float *z, int64_t count, int64_t heads, double *score)
{
    static const float lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    doubles totals[DOUBLES], products[DOUBLES];
    double total[DOUBLES], sum[DOUBLES];
    vec limit = vec_set((float)heads), number = vec_load(lane);
    for (int64_t n = 0; n < count; n++) {
        vec one = vec_load(z + 2 * n * WIDTH), other = vec_load(z + (2 * n + 1) * WIDTH);
        vec below = vec_min(vec_sub(one, other), vec_sub(other, one)); /* NaN stays: see vec_min */
        vec most = vec_max(one, other), both = vec_add(vec_set(1), vec_exp2_below(below));
        if (heads < WIDTH) {
            most = vec_where_less(number, limit, most, vec_zero());
            both = vec_where_less(number, limit, both, vec_set(1));
        }
        totals[n] = doubles_sum(most);
        products[n] = doubles_product(both);
    }
    for (int64_t n = count; n < DOUBLES; n++)
        totals[n] = products[n] = (doubles){0};
    doubles all = doubles_join(totals, false), log_sum = doubles_log(doubles_join(products, true));
    memcpy(total, &all, sizeof total);
    all = all * LN2 + log_sum;
    memcpy(sum, &all, sizeof sum);
    for (int64_t n = 0; n < count; n++)
        score[n] += isfinite(total[n]) ? sum[n] : careful_heads(z + 2 * n * WIDTH, 0, 2, 0, heads);
}
