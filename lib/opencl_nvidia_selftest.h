/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_OPENCL_NVIDIA_SELFTEST_H
#define CLATTN_OPENCL_NVIDIA_SELFTEST_H

/* What the self-tests of the NVIDIA tier share; see opencl_nvidia_selftest.c. */

#include "opencl_nvidia.h"

enum { SELECT_Q_LEN = 40, SELECT_KV_LEN = 1100 };

/* The same numbers for the reference (host) and for the device. */
struct twin {
    uint16_t *halves; /* of the host, with `shift` elements in front */
    clattn_tensor host, device, whole;
};

struct selftest {
    clattn_context *context, *reference;
    const struct nvidia_shape *shape;
    clattn_attention_desc attention;
    int kv_heads, q_heads;
    struct twin q, k, v, out, lse, sink, dout, dq, dk, dv;
};

/* Contexts, attention, q and k. */
clattn_status selftest_begin(struct selftest *t, int q_len, int kv_len);

/* A tensor of 16-bit numbers, or of float32 (dim 1), filled unless the seed is 0. Rows that must not be aligned
 * begin one element late. */
clattn_status selftest_twin_new(struct selftest *t, struct twin *twin, clattn_dtype dtype, int64_t len,
                                int heads, int dim, uint32_t seed);

/* A sink for each head, and in t->attention. */
clattn_status selftest_sink_new(struct selftest *t);

/* A wrong kernel is wrong by much; what is allowed are some roundings to the type, relative to `size`. */
clattn_status selftest_twin_compare(struct selftest *t, const char *name, struct twin *twin, float size);

/* Scores that nearly tie may be ordered otherwise: very few lists. */
clattn_status selftest_compare_lists(struct selftest *t, const clattn_blocks *want, const clattn_blocks *have);

/* A decode step; opencl_nvidia_decode.c. */
clattn_status selftest_decode(struct selftest *t);

#endif
