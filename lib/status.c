/* SPDX-License-Identifier: MIT */
#include "clattn.h"

static const struct {
    int status;
    const char *text;
} texts[] = {
    {CLATTN_SUCCESS, "success"},
    {CLATTN_INVALID_ARGUMENT, "invalid argument"},
    {CLATTN_INVALID_SHAPE, "shapes are not positive or do not fit each other"},
    {CLATTN_INVALID_STRIDE, "invalid stride"},
    {CLATTN_INVALID_DTYPE, "element type not allowed here"},
    {CLATTN_INVALID_BLOCKS, "block list does not fit"},
    {CLATTN_INVALID_SEQLENS, "invalid cumulative sequence lengths"},
    {CLATTN_INVALID_MEMORY, "kind of memory that this context cannot use"},
    {CLATTN_SIZE_OVERFLOW, "size exceeds 63 bits"},
    {CLATTN_OUT_OF_MEMORY, "out of memory"},
    {CLATTN_NO_DEVICE, "no such device"},
    {CLATTN_DEVICE_LIMIT, "beyond the limits of the device"},
    {CLATTN_FORKED, "OpenCL context used in a child process"},
    {CLATTN_INTERNAL, "internal error"},
};

const char *clattn_strerror(clattn_status status)
{
    for (unsigned i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        if (texts[i].status == (int)status) return texts[i].text;
    return (int)status < 0 && (int)status > -2000 ? "OpenCL error" : "unknown status";
}
