/* SPDX-License-Identifier: MIT */
/* Texts for statuses: clattn's own and OpenCL's codes. */

#include "clattn.h"

#include <stddef.h>

static const struct {
    int code;
    const char *text;
} texts[] = {
    {CLATTN_SUCCESS, "success"},
    {CLATTN_INVALID_ARGUMENT, "invalid argument"},
    {CLATTN_INVALID_SHAPE, "invalid shape"},
    {CLATTN_INVALID_STRIDE, "invalid stride"},
    {CLATTN_INVALID_DTYPE, "invalid element type"},
    {CLATTN_INVALID_BLOCKS, "invalid block list"},
    {CLATTN_INVALID_SEQLENS, "invalid sequence lengths"},
    {CLATTN_INVALID_MEMORY, "memory of a kind that the context cannot use"},
    {CLATTN_SIZE_OVERFLOW, "size overflow"},
    {CLATTN_OUT_OF_MEMORY, "out of host memory"},
    {CLATTN_NO_DEVICE, "no such backend or device"},
    {CLATTN_DEVICE_LIMIT, "limit of the device exceeded"},
    {CLATTN_FORKED, "OpenCL context used in a child process"},
    {CLATTN_INTERNAL, "internal error"},
    {CLATTN_OUT_OF_PAGES, "out of pages of the cache"},
    {-1, "OpenCL: device not found"},
    {-2, "OpenCL: device not available"},
    {-3, "OpenCL: compiler not available"},
    {-4, "OpenCL: memory object allocation failure"},
    {-5, "OpenCL: out of resources"},
    {-6, "OpenCL: out of host memory"},
    {-7, "OpenCL: profiling information not available"},
    {-8, "OpenCL: memory copy overlap"},
    {-11, "OpenCL: build program failure"},
    {-12, "OpenCL: map failure"},
    {-13, "OpenCL: misaligned sub-buffer offset"},
    {-14, "OpenCL: error status for an event in the wait list"},
    {-15, "OpenCL: compile program failure"},
    {-16, "OpenCL: linker not available"},
    {-17, "OpenCL: link program failure"},
    {-30, "OpenCL: invalid value"},
    {-31, "OpenCL: invalid device type"},
    {-32, "OpenCL: invalid platform"},
    {-33, "OpenCL: invalid device"},
    {-34, "OpenCL: invalid context"},
    {-35, "OpenCL: invalid queue properties"},
    {-36, "OpenCL: invalid command queue"},
    {-37, "OpenCL: invalid host pointer"},
    {-38, "OpenCL: invalid memory object"},
    {-42, "OpenCL: invalid binary"},
    {-43, "OpenCL: invalid build options"},
    {-44, "OpenCL: invalid program"},
    {-45, "OpenCL: invalid program executable"},
    {-46, "OpenCL: invalid kernel name"},
    {-47, "OpenCL: invalid kernel definition"},
    {-48, "OpenCL: invalid kernel"},
    {-49, "OpenCL: invalid argument index"},
    {-50, "OpenCL: invalid argument value"},
    {-51, "OpenCL: invalid argument size"},
    {-52, "OpenCL: invalid kernel arguments"},
    {-53, "OpenCL: invalid work dimension"},
    {-54, "OpenCL: invalid work-group size"},
    {-55, "OpenCL: invalid work-item size"},
    {-56, "OpenCL: invalid global offset"},
    {-57, "OpenCL: invalid event wait list"},
    {-58, "OpenCL: invalid event"},
    {-59, "OpenCL: invalid operation"},
    {-61, "OpenCL: invalid buffer size"},
    {-63, "OpenCL: invalid global work size"},
    {-1001, "OpenCL: no platform found by the loader"},
};

const char *clattn_strerror(clattn_status status)
{
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].code == (int)status) return texts[i].text;
    return (int)status > -2000 ? "OpenCL: other error" : "unknown status";
}
