/* SPDX-License-Identifier: MIT */
/* The layer over subgroups: SG items that exchange values without local memory. A work-group of the subgroup tier is one
 * subgroup, so that an item's lane is its local number and barriers cost little.
 *
 *   sg_size()          lanes that the device runs together; must be SG
 *   sg_from(x, lane)   x of a lane, which may differ from item to item
 *   sg_xor(x, mask)    x of the lane whose number differs by `mask`
 *   sg_sum, sg_most    over all lanes, the same bits in each; sg_most passes over NaN
 *
 * All lanes have to take part. Macros: SG 8, 16, 32 or 64; SG_KIND 1 KHR (cl_khr_subgroup_shuffle), 2 Intel
 * (cl_intel_subgroups), 3 AMD (ds_bpermute), 4 NVIDIA (shfl.sync). */

#if SG_KIND == 1
#pragma OPENCL EXTENSION cl_khr_subgroups : enable
#pragma OPENCL EXTENSION cl_khr_subgroup_shuffle : enable
#define SG_KERNEL
#define sg_size() get_sub_group_size()
#define sg_from(x, lane) sub_group_shuffle(x, lane)
#define sg_xor(x, mask) sub_group_shuffle_xor(x, mask)
#elif SG_KIND == 2
#pragma OPENCL EXTENSION cl_intel_subgroups : enable
#pragma OPENCL EXTENSION cl_intel_required_subgroup_size : enable
#define SG_KERNEL __attribute__((intel_reqd_sub_group_size(SG)))
#define sg_size() get_sub_group_size()
#define sg_from(x, lane) intel_sub_group_shuffle(x, lane)
#define sg_xor(x, mask) intel_sub_group_shuffle_xor(x, mask)
#elif SG_KIND == 3
#define SG_KERNEL
#define sg_size() __builtin_amdgcn_wavefrontsize()
static inline float sg_from(float x, uint lane)
{
    return as_float(__builtin_amdgcn_ds_bpermute((int)(lane * 4), as_int(x)));
}
#define sg_xor(x, mask) sg_from(x, (uint)get_local_id(0) ^ (mask))
#else
#define SG_KERNEL
#define sg_size() 32u
static inline float sg_from(float x, uint lane)
{
    float r;
    __asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(r) : "f"(x), "r"(lane));
    return r;
}
static inline float sg_xor(float x, uint mask)
{
    float r;
    __asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(r) : "f"(x), "r"(mask));
    return r;
}
#endif

static inline float sg_sum(float x)
{
#pragma unroll
    for (uint mask = SG / 2; mask > 0; mask /= 2)
        x += sg_xor(x, mask);
    return x;
}

static inline float sg_most(float x)
{
    x = x == x ? x : -INFINITY;
#pragma unroll
    for (uint mask = SG / 2; mask > 0; mask /= 2) {
        float other = sg_xor(x, mask);
        x = other > x ? other : x;
    }
    return x;
}

/* Vectors from local memory, as LOAD(N) from global memory. */
static inline float get1(__local const float *p)
{
    return *p;
}
#define get2(p) vload2(0, p)
#define get4(p) vload4(0, p)
#define get8(p) vload8(0, p)
#define get16(p) vload16(0, p)
#define GET(N) JOIN(get, N)
