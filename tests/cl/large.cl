/* SPDX-License-Identifier: MIT */
/* A work-group that no device of the tests has. */
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void large(__global int *x)
{
    x[get_global_id(0)] = 1;
}
