/* SPDX-License-Identifier: MIT */
/* Does not compile: the build log has to reach the caller. */
__kernel void broken(__global int *x)
{
    x[0] = no_such_name;
}
