/* SPDX-License-Identifier: MIT */
/* Loaded before OpenCL by tests/portability.sh when the device is oclgrind.
 *
 * Oclgrind 21.10 keeps what it knows about a buffer's bytes after the buffer is released, and gives the buffer's number to
 * the next one: when that is larger, all beyond the end of the former counts as uninitialised, whatever is stored there.
 * Buffers that are never released have numbers of their own. Test cases are small. */

#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>

cl_int clReleaseMemObject(cl_mem mem)
{
    (void)mem;
    return CL_SUCCESS;
}
