/* SPDX-License-Identifier: MIT */
/* The key pyramid, and its split copy for the matrix unit.
 *
 *   pyramid [kv_heads][nodes][DIM] float32   from node first_node; level 1, then level 2 ...
 *   split   [kv_heads][nodes][2][ROW] 16-bit the same numbers as high + low parts (high = x rounded to 16 bits, low = the
 *           rest rounded), rows padded with zeros to ROW = a multiple of 32: two multiplications come close to float32
 *
 * pyramid_leaves: one item two columns of one leaf; keys are added in order, then divided by their number.
 * pyramid_upper: a work-group takes 32 nodes of `level` and builds their ancestors up to five levels in local
 * memory; launched for level 1, 6, 11 ... until one node is left. A parent is the mean of the children that
 * exist.
 * pyramid_split: one item two columns of one node of one head.
 * Read once: the keys. Written: 4 bytes a node and column, and as much by the split. Mirrors cpu/pyramid_ref.c.
 * Macros: DIM, DTYPE, ALIGNED 1 if rows of keys start on 16 bytes.
 */
#ifndef ALIGNED
#define ALIGNED 1
#endif
#ifndef DIM
#define DIM 128
#endif
#define ROW ((DIM + 31) / 32 * 32)

#include "quotient.cl"

__kernel
__attribute__((reqd_work_group_size(256, 1, 1))) void
pyramid_leaves(__global const ushort *k, ulong k_base, ulong k_len_stride, ulong k_head_stride,
               __global float *pyramid, ulong first_node, uint kv_len, uint nodes, uint n_leaves)
{
    const uint item = (uint)get_group_id(0) * 256 + (uint)get_local_id(0), head = (uint)get_group_id(1);
    const uint leaf = item / (ROW / 2), d = item % (ROW / 2) * 2;
    if (leaf >= n_leaves || d >= DIM) return;
    const uint n = min(64u, kv_len - leaf * 64);
    pyramid += (first_node + (ulong)head * nodes + leaf) * DIM + d;
    k += k_base + (ulong)leaf * 64 * k_len_stride + head * k_head_stride + d;
    float low = 0, high = 0;
    for (uint j = 0; j < n; j += 16) {
        uint w[16];
#pragma unroll
        for (uint u = 0; u < 16; u++) {
            __global const ushort *p = k + (j + u < n ? (j + u) * k_len_stride : 0);
#if DIM % 2 == 0 && ALIGNED
            w[u] = *(__global const uint *)p;
#else
            w[u] = p[0] | (d + 1 < DIM ? (uint)p[1] << 16 : 0);
#endif
        }
#pragma unroll
        for (uint u = 0; u < 16; u++)
            if (j + u < n) {
                low += unpack_low(w[u]);
                high += unpack_high(w[u]);
            }
    }
    pyramid[0] = quotient(low, (float)n);
    if (d + 1 < DIM) pyramid[1] = quotient(high, (float)n);
}

__kernel
__attribute__((reqd_work_group_size(256, 1, 1))) void
pyramid_upper(__global float *pyramid, ulong first_node, uint level, uint n_leaves, uint nodes)
{
    __local float node[32 * ROW];
    const uint t = (uint)get_local_id(0), head = (uint)get_group_id(1);
    uint first = (uint)get_group_id(0) * 32, count = (n_leaves + (1u << (level - 1)) - 1) >> (level - 1);
    uint offset = 0; /* nodes of the levels below */
    for (uint l = 0; l + 1 < level; l++)
        offset += (n_leaves + (1u << l) - 1) >> l;
    pyramid += (first_node + (ulong)head * nodes) * DIM;
    for (uint n = t; n < 32 * ROW; n += 256) {
        const uint i = first + n / ROW, d = n % ROW;
        node[n] = i < count && d < DIM ? pyramid[(ulong)(offset + i) * DIM + d] : 0;
    }
    for (uint width = 16; width > 0 && count > 1; width /= 2) {
        const uint children = count;
        offset += children;
        first /= 2;
        count = (count + 1) / 2;
        barrier(CLK_LOCAL_MEM_FENCE);
        float x[(16 * ROW + 255) / 256];
#pragma unroll
        for (uint u = 0; u < (16 * ROW + 255) / 256; u++) {
            const uint n = u * 256 + t, i = first + n / ROW, d = n % ROW;
            if (n < width * ROW) {
                const float a = node[2 * (n / ROW) * ROW + d], b = node[(2 * (n / ROW) + 1) * ROW + d];
                x[u] = 2 * i + 1 < children ? (a + b) * 0.5f : a;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll
        for (uint u = 0; u < (16 * ROW + 255) / 256; u++) {
            const uint n = u * 256 + t, i = first + n / ROW, d = n % ROW;
            if (n < width * ROW) {
                node[n] = x[u];
                if (i < count && d < DIM) pyramid[(ulong)(offset + i) * DIM + d] = x[u];
            }
        }
    }
}

__kernel
__attribute__((reqd_work_group_size(256, 1, 1))) void
pyramid_split(__global const float *pyramid, ulong first_node, __global uint *split, uint nodes)
{
    const uint item = (uint)get_group_id(0) * 256 + (uint)get_local_id(0), head = (uint)get_group_id(1);
    const uint node = item / (ROW / 2), d = item % (ROW / 2) * 2;
    if (node >= nodes) return;
    pyramid += (first_node + (ulong)head * nodes + node) * DIM;
    split += ((ulong)head * nodes + node) * ROW + d / 2; /* pairs of numbers */
    const float x = d < DIM ? pyramid[d] : 0.0f, y = d + 1 < DIM ? pyramid[d + 1] : 0.0f;
    const uint high = pack2(x, y);
    split[0] = high;
    const float low_x = x == unpack_low(high) ? 0.0f : x - unpack_low(high); /* infinite ones have no rest */
    const float low_y = y == unpack_high(high) ? 0.0f : y - unpack_high(high);
    split[ROW / 2] = pack2(low_x, low_y);
}
