/* SPDX-License-Identifier: MIT */
/* Re-packs keys and values into the order in which a warp's lanes read matrix fragments: 512 contiguous bytes
 * a load.
 *
 *   packed_k [kv_heads][n_blocks][8 key octets][K_STEPS][32 lanes]   lane 4g+c: key 8n+g, numbers 32 kk + 8c
 *   ..+7
 *   packed_v [kv_heads][n_blocks][4 key stretches of 16][V_TILES][32 lanes]   lane 4g+c, words (b0, b1 of
 *   column 16n+g;
 *            b0, b1 of column 16n+8+g), b0 keys 2c, 2c+1, b1 keys 2c+8, 2c+9
 * Keys beyond kv_len and columns beyond the dimension are zero. One work-group a block and head.
 * Read and written once: kv_len * (DIM + DIM_V) elements. Macros: those of attention_tile.cl.
 */
static inline void pack_key_block(__global const ushort *k, ulong len_stride, __global uint4 *packed, uint valid, uint t)
{
    for (uint n = t; n < LEAF / 8 * K_STEPS * 32; n += 256) {
        const uint lane = n & 31, kk = n / 32 % K_STEPS, key = n / 32 / K_STEPS * 8 + (lane >> 2);
        packed[n] =
            key < valid ? load8(k + key * len_stride, 32 * kk + 8 * (lane & 3), DIM) : (uint4)(0, 0, 0, 0);
    }
}

/* The keys alone, for selection. */
__kernel
__attribute__((reqd_work_group_size(256, 1, 1))) void pack_keys(__global const ushort *k, ulong k_base,
                                                                ulong k_len_stride, ulong k_head_stride,
                                                                __global uint4 *packed_k, uint kv_len)
{
    const uint block = (uint)get_group_id(0), head = (uint)get_group_id(1), n_blocks = (uint)get_num_groups(0);
    pack_key_block(k + k_base + (ulong)block * LEAF * k_len_stride + head * k_head_stride, k_len_stride,
                   packed_k + ((ulong)head * n_blocks + block) * (LEAF / 8 * K_STEPS * 32),
                   kv_len - block * LEAF, (uint)get_local_id(0));
}

__kernel
__attribute__((reqd_work_group_size(256, 1, 1))) void
pack_blocks(__global const ushort *k, ulong k_base, ulong k_len_stride, ulong k_head_stride,
            __global const ushort *v, ulong v_base, ulong v_len_stride, ulong v_head_stride,
            __global uint4 *packed_k, __global uint4 *packed_v, uint kv_len)
{
    const uint t = (uint)get_local_id(0), block = (uint)get_group_id(0), head = (uint)get_group_id(1);
    const uint n_blocks = (uint)get_num_groups(0);
    k += k_base + (ulong)block * LEAF * k_len_stride + head * k_head_stride;
    v += v_base + (ulong)block * LEAF * v_len_stride + head * v_head_stride;
    packed_k += ((ulong)head * n_blocks + block) * (LEAF / 8 * K_STEPS * 32);
    packed_v += ((ulong)head * n_blocks + block) * (LEAF / 16 * V_TILES * 32);
    const uint valid = kv_len - block * LEAF;
    pack_key_block(k, k_len_stride, packed_k, valid, t);
    for (uint n = t; n < LEAF / 16 * V_TILES * 32; n += 256) {
        const uint lane = n & 31, column = n / 32 % V_TILES * 16 + (lane >> 2);
        const uint key = n / 32 / V_TILES * 16 + 2 * (lane & 3);
        uint w[4];
#pragma unroll
        for (uint u = 0; u < 4; u++) {
            const uint x = column + (u >> 1) * 8, y = key + (u & 1) * 8;
            const uint low = x < DIM_V && y < valid ? v[y * v_len_stride + x] : 0;
            const uint high = x < DIM_V && y + 1 < valid ? v[(y + 1) * v_len_stride + x] : 0;
            w[u] = low | high << 16;
        }
        packed_v[n] = (uint4)(w[0], w[1], w[2], w[3]);
    }
}
