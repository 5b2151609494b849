/* SPDX-License-Identifier: MIT */
/* Key pyramid, reference: means in double, rounded once to float32. */

#include "reference.h"

void pyramid_leaf_ref(const void *keys, clattn_dtype dtype, int64_t len_stride, int64_t count, int32_t dim,
                      float *mean)
{
    for (int32_t d = 0; d < dim; d++) {
        double sum = 0;
        for (int64_t j = 0; j < count; j++)
            sum += load_element(keys, dtype, j * len_stride + d);
        mean[d] = (float)(sum / (double)count);
    }
}

void pyramid_join_ref(const float *left, const float *right, int32_t dim, float *mean)
{
    for (int32_t d = 0; d < dim; d++)
        mean[d] = right ? (float)(((double)left[d] + (double)right[d]) / 2) : left[d];
}
