/* SPDX-License-Identifier: MIT */
/* Bounds of a pyramid for robust selection: minima and maxima of every node, means and bounds of the quarters
 * of a leaf. Minimum and maximum do not round, so every variant has the same bits. NaN keys are passed over. */

#include "config.h"

#include "cpu.h"

#include <math.h>

static void bounds_clear(float *least, float *most, int32_t dim)
{
    for (int32_t d = 0; d < dim; d++) {
        least[d] = INFINITY;
        most[d] = -INFINITY;
    }
}

static void bounds_join(float *least, float *most, const float *other_least, const float *other_most,
                        int32_t dim)
{
    for (int32_t d = 0; d < dim; d++) {
        least[d] = other_least[d] < least[d] ? other_least[d] : least[d];
        most[d] = other_most[d] > most[d] ? other_most[d] : most[d];
    }
}

/* One quarter: part [3][dim] mean, minimum, maximum of `count` keys. */
static void part_build(const struct cpu_kernels *kernels, const void *keys, clattn_dtype dtype, int64_t stride,
                       int64_t count, int32_t dim, float *part)
{
    float *least = part + dim, *most = least + dim;
    kernels->pyramid_leaf(keys, dtype, stride, count, dim, part);
    bounds_clear(least, most, dim);
    for (int64_t j = 0; j < count; j++)
        for (int32_t d = 0; d < dim; d++) {
            float x = load_element(keys, dtype, j * stride + d);
            least[d] = x < least[d] ? x : least[d];
            most[d] = x > most[d] ? x : most[d];
        }
}

static void leaf_build(const struct cpu_kernels *kernels, const struct pyramid_job *job,
                       const struct sequence *sequence, int32_t kv_head, int64_t leaf, float *bounds,
                       float *parts)
{
    const clattn_pyramid *pyramid = job->pyramid;
    int32_t dim = pyramid->dim, size = pyramid->leaf / LEAF_PARTS;
    bounds_clear(bounds, bounds + dim, dim);
    for (int32_t p = 0; p < LEAF_PARTS; p++) {
        int64_t first = leaf * pyramid->leaf + p * size, count = MIN(size, sequence->kv_len - first);
        float *part = parts + (int64_t)p * 3 * dim;
        if (count <= 0) break;
        part_build(kernels, tensor_row(job->k, sequence->batch, sequence->k_row + first, kv_head),
                   job->k->dtype, job->k->len_stride, count, dim, part);
        bounds_join(bounds, bounds + dim, part + dim, part + 2 * dim, dim);
    }
}

void cpu_bounds_build(const struct cpu_kernels *kernels, const struct pyramid_job *job, int64_t s,
                      int32_t kv_head, int threads)
{
    const struct sequence *sequence = &job->problem->sequences[s];
    const clattn_pyramid *pyramid = job->pyramid;
    int64_t leaves = level_nodes(sequence->kv_len, pyramid->leaf, 1), row = 2 * (int64_t)pyramid->dim;
    float *bounds = (float *)pyramid_bounds_head(pyramid, s, kv_head);
    float *parts = (float *)pyramid_parts_head(pyramid, s, kv_head);
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < leaves; i++)
        leaf_build(kernels, job, sequence, kv_head, i, bounds + i * row,
                   parts + i * LEAF_PARTS * 3 * pyramid->dim);
    int64_t below = 0, children = leaves;
    while (children > 1) {
        int64_t nodes = ceil_div(children, 2), first = below + children;
        for (int64_t i = 0; i < nodes; i++) {
            float *own = bounds + (first + i) * row;
            bounds_clear(own, own + pyramid->dim, pyramid->dim);
            for (int64_t c = 2 * i; c < MIN(2 * i + 2, children); c++) {
                const float *child = bounds + (below + c) * row;
                bounds_join(own, own + pyramid->dim, child, child + pyramid->dim, pyramid->dim);
            }
        }
        below = first;
        children = nodes;
    }
}
