/* SPDX-License-Identifier: MIT */
/* Tensors as views, and tensors in the context's memory. */

#include "internal.h"

#include <stdlib.h>

size_t dtype_bytes(clattn_dtype dtype)
{
    switch (dtype) {
    case CLATTN_FLOAT32:
        return 4;
    case CLATTN_FLOAT16:
    case CLATTN_BFLOAT16:
        return 2;
    case CLATTN_INT8:
        return 1;
    }
    return 0;
}

const char *dtype_name(clattn_dtype dtype)
{
    switch (dtype) {
    case CLATTN_FLOAT32:
        return "float32";
    case CLATTN_FLOAT16:
        return "float16";
    case CLATTN_BFLOAT16:
        return "bfloat16";
    case CLATTN_INT8:
        return "int8";
    }
    return "unknown";
}

clattn_tensor clattn_tensor_bthd(void *data, clattn_dtype dtype, int64_t batch, int64_t len, int64_t heads,
                                 int64_t dim)
{
    return (clattn_tensor){data,
                           CLATTN_MEMORY_HOST,
                           dtype,
                           0,
                           batch,
                           len,
                           heads,
                           dim,
                           /* batch_stride */ len * heads * dim,
                           /* len_stride */ heads * dim,
                           /* head_stride */ dim};
}

clattn_tensor clattn_tensor_bhtd(void *data, clattn_dtype dtype, int64_t batch, int64_t heads, int64_t len,
                                 int64_t dim)
{
    return (clattn_tensor){data,
                           CLATTN_MEMORY_HOST,
                           dtype,
                           0,
                           batch,
                           len,
                           heads,
                           dim,
                           /* batch_stride */ heads * len * dim,
                           /* len_stride */ dim,
                           /* head_stride */ len * dim};
}

clattn_status clattn_tensor_create(clattn_context *context, clattn_dtype dtype, int64_t batch, int64_t len,
                                   int64_t heads, int64_t dim, clattn_tensor *tensor)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!tensor) return fail(context, CLATTN_INVALID_ARGUMENT, "tensor is NULL");
    int64_t elements;
    if (!dtype_bytes(dtype))
        return fail(context, CLATTN_INVALID_DTYPE, "dtype is %d; FLOAT32, FLOAT16, BFLOAT16 or INT8 is needed",
                    dtype);
    if (batch < 1 || len < 0 || heads < 1 || dim < 1)
        return fail(context, CLATTN_INVALID_SHAPE,
                    "shape is [%lld][%lld][%lld][%lld]; positive sizes are needed", (long long)batch,
                    (long long)len, (long long)heads, (long long)dim);
    if (!multiply(batch, len, &elements) || !multiply(elements, heads, &elements) ||
        !multiply(elements, dim, &elements) || elements > INT64_C(1) << 58)
        return fail(context, CLATTN_SIZE_OVERFLOW, "shape [%lld][%lld][%lld][%lld] exceeds 2^58 elements",
                    (long long)batch, (long long)len, (long long)heads, (long long)dim);
    struct storage storage = {0};
    clattn_status status =
        context->backend->storage_create(context, (size_t)MAX(elements, 1) * dtype_bytes(dtype), &storage);
    if (status) return status;
    *tensor = clattn_tensor_bthd(storage.host ? storage.host : storage.mem, dtype, batch, len, heads, dim);
    if (!storage.host) tensor->memory = CLATTN_MEMORY_CL_MEM;
    return CLATTN_SUCCESS;
}

void clattn_tensor_release(clattn_context *context, clattn_tensor *tensor)
{
    if (!context || !tensor || !tensor->data) return;
    struct storage storage = {0};
    if (tensor->memory == CLATTN_MEMORY_HOST)
        storage.host = tensor->data;
    else
        storage.mem = tensor->data;
    context->backend->storage_release(context, &storage);
    *tensor = (clattn_tensor){0};
}

static clattn_status check_copy(clattn_context *context, const clattn_tensor *from, const clattn_tensor *to,
                                const clattn_tensor *host)
{
    clattn_status status = check_tensor(context, "source", from, false);
    if (!status) status = check_tensor(context, "destination", to, true);
    if (status) return status;
    if (host->memory != CLATTN_MEMORY_HOST)
        return fail(context, CLATTN_INVALID_MEMORY, "host.memory is %d; host memory (0) is needed",
                    host->memory);
    if (from->dtype != to->dtype)
        return fail(context, CLATTN_INVALID_DTYPE, "source is %s, destination %s; they must be equal",
                    dtype_name(from->dtype), dtype_name(to->dtype));
    if (from->batch != to->batch || from->len != to->len || from->heads != to->heads || from->dim != to->dim)
        return fail(context, CLATTN_INVALID_SHAPE, "source and destination differ in shape");
    return CLATTN_SUCCESS;
}

clattn_status clattn_tensor_upload(clattn_context *context, const clattn_tensor *host, clattn_tensor *device)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    clattn_status status = host && device ? check_copy(context, host, device, host)
                                          : fail(context, CLATTN_INVALID_ARGUMENT, "a tensor is NULL");
    if (status || host->len == 0) return status;
    return context->backend->tensor_upload(context, host, device);
}

clattn_status clattn_tensor_download(clattn_context *context, const clattn_tensor *device, clattn_tensor *host)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    clattn_status status = host && device ? check_copy(context, device, host, host)
                                          : fail(context, CLATTN_INVALID_ARGUMENT, "a tensor is NULL");
    if (status || host->len == 0) return status;
    return context->backend->tensor_download(context, device, host);
}
