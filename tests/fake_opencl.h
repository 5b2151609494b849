/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TESTS_FAKE_OPENCL_H
#define CLATTN_TESTS_FAKE_OPENCL_H

/* An OpenCL that computes nothing: one GPU whose limits a test sets, with buffers of any size that take no
 * memory. A program that links this calls it in place of the loader. It shows what the library would do on
 * machines that are not at hand: which programs it builds, which launches it makes, with which arguments. */

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#include <CL/cl.h>
#include <stdbool.h>
#include <stddef.h>

enum { FAKE_ARGUMENTS = 64, FAKE_ARGUMENT_BYTES = 16 };

struct fake_argument {
    size_t bytes;
    unsigned char value[FAKE_ARGUMENT_BYTES];
};

struct fake_launch {
    const char *kernel;
    size_t global, local; /* of all dimensions, multiplied */
    const struct fake_argument *arguments;
};

struct fake {
    cl_ulong memory_bytes, alloc_max, local_bytes;
    cl_uint compute_units, vendor_id;
    cl_uint nvidia_generation; /* the first number of an NVIDIA card's compute capability; 0: no such card */
    size_t group_max;
    const char *extensions; /* NULL: none */
    void (*on_kernel)(const char *kernel, const char *source,
                      const char *options); /* when one is made; NULL: nobody */
    void (*on_launch)(const struct fake_launch *launch);
};

extern struct fake fake; /* 16 GiB, 4 GiB an allocation, 64 KiB local, 32 units, work-groups of 1024 */

/* What was copied into a buffer when it was made; NULL: nothing. */
const void *fake_buffer_data(cl_mem buffer);

#endif
