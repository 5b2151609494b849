/* SPDX-License-Identifier: MIT */
/* Do the functions of subgroup.cl do what they say? One subgroup; out [5][SG]. */

SG_KERNEL __kernel __attribute__((reqd_work_group_size(SG, 1, 1))) void canary_subgroup(__global float *out)
{
    const uint lane = (uint)get_local_id(0);
    const float x = (float)(lane * lane % 13u) + 1.0f;
    out[lane] = (float)sg_size();
    out[SG + lane] = sg_from(x, (lane * 5u + 3u) % SG);
    out[2 * SG + lane] = sg_xor(x, 1u) + 100.0f * sg_xor(x, SG / 2);
    out[3 * SG + lane] = sg_sum(x);
    out[4 * SG + lane] = sg_most(lane == 1u ? NAN : x);
}
