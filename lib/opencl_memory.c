/* SPDX-License-Identifier: MIT */
/* OpenCL memory: buffers of the library, and checks of the caller's. Transfers of tensors: opencl_transfer.c.
 */

#include "config.h"

#include "opencl.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

clattn_status opencl_storage_copy(clattn_context *context, const void *data, size_t bytes,
                                  struct storage *storage)
{
    const struct opencl *state = opencl_of(context);
    cl_int code;
    clattn_status status = opencl_check_process(context);
    *storage = (struct storage){0};
    if (status) return status;
    if (bytes > state->device.alloc_max)
        return fail(context, CLATTN_DEVICE_LIMIT,
                    "a buffer of %zu bytes is needed; CL_DEVICE_MAX_MEM_ALLOC_SIZE of '%s' is %llu", bytes,
                    state->device.name, (unsigned long long)state->device.alloc_max);
    /* With CL_MEM_COPY_HOST_PTR the copy is made now; the driver does not write through the pointer. */
    cl_mem_flags flags = CL_MEM_READ_WRITE | (data && bytes ? CL_MEM_COPY_HOST_PTR : 0);
    cl_mem mem = clCreateBuffer(state->context, flags, MAX(bytes, 1), bytes ? (void *)data : NULL, &code);
    if (code) {
        char what[64];
        snprintf(what, sizeof what, "clCreateBuffer(%zu bytes)", bytes);
        return opencl_fail(context, code, what);
    }
    *storage = (struct storage){.mem = mem, .bytes = bytes};
    return CLATTN_SUCCESS;
}

clattn_status opencl_storage_create(clattn_context *context, size_t bytes, struct storage *storage)
{
    return opencl_storage_copy(context, NULL, bytes, storage);
}

void opencl_storage_release(clattn_context *context, struct storage *storage)
{
    /* Commands in flight keep the buffer alive; in a forked child nothing of the driver may be touched. */
    if (storage->mem && opencl_of(context)->pid == getpid()) clReleaseMemObject(storage->mem);
    *storage = (struct storage){0};
}

clattn_status opencl_transfer_begin(clattn_context *context)
{
    const struct opencl *state = opencl_of(context);
    clattn_status status = opencl_check_process(context);
    if (status || !state->out_of_order) return status;
    cl_int code = clEnqueueBarrierWithWaitList(state->queue, 0, NULL, NULL);
    return code ? opencl_fail(context, code, "clEnqueueBarrierWithWaitList") : CLATTN_SUCCESS;
}

/* `to` or `from` the storage; the other one is NULL. */
static clattn_status storage_move(clattn_context *context, const struct storage *storage, size_t offset,
                                  void *to, const void *from, size_t bytes)
{
    double start = seconds_now();
    cl_command_queue queue = opencl_of(context)->queue;
    cl_int code = CL_SUCCESS;
    opencl_queue_lock(context);
    clattn_status status = opencl_transfer_begin(context);
    if (!status && bytes > 0)
        code = to ? clEnqueueReadBuffer(queue, storage->mem, CL_TRUE, offset, bytes, to, 0, NULL, NULL)
                  : clEnqueueWriteBuffer(queue, storage->mem, CL_TRUE, offset, bytes, from, 0, NULL, NULL);
    opencl_queue_unlock(context);
    if (code) status = opencl_fail(context, code, to ? "clEnqueueReadBuffer" : "clEnqueueWriteBuffer");
    if (!status && bytes > 0) stats_add_transfer(context, seconds_now() - start);
    return status;
}

clattn_status opencl_storage_write(clattn_context *context, struct storage *storage, const void *data,
                                   size_t bytes)
{
    return storage_move(context, storage, 0, NULL, data, bytes);
}

clattn_status opencl_storage_read(clattn_context *context, const struct storage *storage, size_t offset,
                                  void *data, size_t bytes)
{
    return storage_move(context, storage, offset, data, NULL, bytes);
}

clattn_status opencl_storage_fill(clattn_context *context, struct storage *storage, int32_t value, size_t words,
                                  const clattn_sync *sync)
{
    struct opencl_launch launch;
    opencl_launch_begin(context, sync, &launch);
    opencl_launch_fill(&launch, storage->mem, value, words);
    return opencl_launch_end(&launch);
}

/* ---- the caller's memory ---- */

int64_t opencl_tensor_end(const clattn_tensor *tensor)
{
    if (tensor->len == 0) return 0;
    return tensor->offset + (tensor->batch - 1) * tensor->batch_stride +
           (tensor->len - 1) * tensor->len_stride + (tensor->heads - 1) * tensor->head_stride + tensor->dim;
}

clattn_status opencl_check_tensor(clattn_context *context, const clattn_tensor *tensor)
{
    const struct opencl *state = opencl_of(context);
    cl_mem_object_type type = 0;
    cl_context owner = NULL;
    size_t bytes = 0, need = (size_t)opencl_tensor_end(tensor) * dtype_bytes(tensor->dtype);
    if (tensor->memory == CLATTN_MEMORY_HOST)
        return fail(context, CLATTN_INVALID_MEMORY, "a tensor in host memory where cl_mem or SVM is needed");
    if (tensor->memory == CLATTN_MEMORY_SVM) {
        if (state->svm.set_arg) return CLATTN_SUCCESS;
        return fail(context, CLATTN_INVALID_MEMORY, "'%s' has no shared virtual memory; use cl_mem",
                    state->device.name);
    }
    cl_int code = clGetMemObjectInfo(tensor->data, CL_MEM_TYPE, sizeof type, &type, NULL);
    if (!code) code = clGetMemObjectInfo(tensor->data, CL_MEM_CONTEXT, sizeof owner, &owner, NULL);
    if (!code) code = clGetMemObjectInfo(tensor->data, CL_MEM_SIZE, sizeof bytes, &bytes, NULL);
    if (code) return opencl_fail(context, code, "clGetMemObjectInfo");
    if (type != CL_MEM_OBJECT_BUFFER)
        return fail(context, CLATTN_INVALID_MEMORY,
                    "a tensor's cl_mem is an image or pipe; a buffer is needed");
    if (owner != state->context)
        return fail(context, CLATTN_INVALID_MEMORY, "a tensor's cl_mem belongs to another cl_context");
    if (need > bytes)
        return fail(context, CLATTN_INVALID_SHAPE,
                    "tensor [%lld][%lld][%lld][%lld] of %s at offset %lld ends at byte %zu; its cl_mem has %zu",
                    (long long)tensor->batch, (long long)tensor->len, (long long)tensor->heads,
                    (long long)tensor->dim, dtype_name(tensor->dtype), (long long)tensor->offset, need, bytes);
    return CLATTN_SUCCESS;
}

clattn_status opencl_tensor_check(clattn_context *context, const clattn_tensor *tensor)
{
    clattn_status status = opencl_check_process(context);
    return status ? status : opencl_check_tensor(context, tensor);
}
