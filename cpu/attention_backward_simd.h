/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_ATTENTION_BACKWARD_SIMD_H
#define CLATTN_ATTENTION_BACKWARD_SIMD_H

/* Gradients of attention over a block list, vectorised: what the two halves share.
 *
 *   P = exp(z - lse),  dS = P (dout . v_j - D),  dx = scale dS slope
 *   dv_j = sum P dout,  dq = sum dx k_j,  dk_j = sum dx q,  dbias = sum dS
 *
 * slope is that of the soft cap, or 1. Mirrors attention_backward_ref.c. */

#include "dot_simd.h"
#include "tile_view_simd.h"
#include "weighted_sum_simd.h"

#include "backward.h"

/* Cuts memory into parts of whole cache lines. */
static float *part(char **memory, int64_t floats)
{
    float *start = (float *)*memory;
    *memory += round_up(floats * (int64_t)sizeof(float), 64);
    return start;
}

/* z -> P, dp -> dx for one vector; returns dS. What is not seen has z = -infinity and gives nothing, whatever
 * lse and dp are. slope NULL: 1. */
static inline vec gradients_of_logits(float *z, float *dp, vec lse, vec delta, const float *slope, float scale)
{
    vec logit = vec_load(z), none = vec_set(-FLT_MAX), p = vec_exp(vec_sub(logit, lse));
    vec ds = vec_mul(p, vec_sub(vec_load(dp), delta));
    p = vec_where_less(logit, none, vec_zero(), p);
    ds = vec_where_less(logit, none, vec_zero(), ds);
    vec dx = vec_mul(ds, vec_set(scale));
    vec_store(z, p);
    vec_store(dp, slope ? vec_mul(dx, vec_load(slope)) : dx);
    return ds;
}

/* out [rows][stride] += sum over `count` of p [count][lanes] * value [count][dim]; in tiles of PV_ROWS rows and
 * two vectors. */
static void add_weighted(const float *p, int64_t lanes, struct float_rows value, int64_t count, int32_t dim,
                         float *out, int64_t stride, int64_t rows)
{
    static const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    for (int64_t d = 0; d < dim; d += 2 * WIDTH) {
        int vectors = dim - d > WIDTH ? 2 : 1;
        struct float_rows panel = {value.data + d, value.stride};
        for (int64_t r = 0; r < rows; r += PV_ROWS)
            weighted_sum(p + r, lanes, panel, count, ones, out + r * stride + d, stride,
                         (int)MIN(PV_ROWS, rows - r), vectors);
    }
}

#endif
