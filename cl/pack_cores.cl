/* SPDX-License-Identifier: MIT */
/* Keys and values as the Hopper kernels copy them: a block is one contiguous piece of core matrices.
 *
 *   core [kv_heads][n_blocks] of
 *     keys   [8 key octets][K_CHUNKS][8 keys][16 bytes]; the numbers of each stretch of 32 are permuted so that
 *            lane c's 8 consecutive numbers of a query row are its share of two k-steps (mma_nvidia.cl)
 *     values [DIM_V octets][8 key octets][8 columns][8 keys]   (transposed)
 *
 * One work-group a block and head. Read and written once: kv_len * (DIM + DIM_V) elements. Macros: those of
 * attention_tile.cl.
 */
static inline void pack_key_core(__global const ushort *k, ulong k_len_stride, __global uint4 *core, uint valid, uint t)
{
    for (uint n = t; n < LEAF * K_CHUNKS; n += 256) {
        const uint key = n / (8 * K_CHUNKS) * 8 + n % 8, chunk = n / 8 % K_CHUNKS;
        const uint first = chunk / 4 * 32 + chunk % 4 * 2;
        uint w[4];
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            const uint d = first + 8 * c;
            const uint low = key < valid && d < DIM ? k[key * k_len_stride + d] : 0;
            const uint high = key < valid && d + 1 < DIM ? k[key * k_len_stride + d + 1] : 0;
            w[c] = low | high << 16;
        }
        core[n] = (uint4)(w[0], w[1], w[2], w[3]);
    }
}

/* The keys alone, for selection. */
__kernel
__attribute__((reqd_work_group_size(256, 1, 1))) void pack_key_cores(__global const ushort *k, ulong k_base,
                                                                     ulong k_len_stride, ulong k_head_stride,
                                                                     __global uint4 *core, uint kv_len)
{
    const uint block = (uint)get_group_id(0), head = (uint)get_group_id(1), n_blocks = (uint)get_num_groups(0);
    pack_key_core(k + k_base + (ulong)block * LEAF * k_len_stride + head * k_head_stride, k_len_stride,
                  core + ((ulong)head * n_blocks + block) * (LEAF * K_CHUNKS), kv_len - block * LEAF,
                  (uint)get_local_id(0));
}

__kernel
__attribute__((reqd_work_group_size(256, 1, 1))) void pack_cores(__global const ushort *k, ulong k_base,
                                                                 ulong k_len_stride, ulong k_head_stride,
                                                                 __global const ushort *v, ulong v_base,
                                                                 ulong v_len_stride, ulong v_head_stride,
                                                                 __global uint4 *core, uint kv_len)
{
    const uint t = (uint)get_local_id(0), block = (uint)get_group_id(0), head = (uint)get_group_id(1);
    const uint n_blocks = (uint)get_num_groups(0);
    k += k_base + (ulong)block * LEAF * k_len_stride + head * k_head_stride;
    v += v_base + (ulong)block * LEAF * v_len_stride + head * v_head_stride;
    core += ((ulong)head * n_blocks + block) * (LEAF * (K_CHUNKS + V_CHUNKS));
    const uint valid = kv_len - block * LEAF;
    pack_key_core(k, k_len_stride, core, valid, t);
    for (uint n = t; n < LEAF * V_CHUNKS; n += 256) {
        const uint d = n / 64 * 8 + n % 8, key = n / 8 % 8 * 8;
        uint w[4];
#pragma unroll
        for (uint u = 0; u < 4; u++) {
            const uint y = key + 2 * u;
            const uint low = d < DIM_V && y < valid ? v[y * v_len_stride + d] : 0;
            const uint high = d < DIM_V && y + 1 < valid ? v[(y + 1) * v_len_stride + d] : 0;
            w[u] = low | high << 16;
        }
        core[LEAF * K_CHUNKS + n] = (uint4)(w[0], w[1], w[2], w[3]);
    }
}
