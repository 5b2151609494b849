/* SPDX-License-Identifier: MIT */
/* Launches: the commands of one call in order, between the caller's wait list and the caller's event.
 *
 *   in-order queue       the first command takes the wait list; the queue does the rest
 *   out-of-order queue   a barrier over everything before (an earlier call may have made what this one reads),
 * then each command waits for the one before it */

#include "config.h"

#include "opencl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void launch_fail(struct opencl_launch *launch, cl_int code, const char *what)
{
    char text[160];
    if (!code || launch->status) return;
    snprintf(text, sizeof text, "%s(%s)", what, launch->name);
    launch->status = opencl_fail(launch->context, code, text);
}

static void launch_replace_last(struct opencl_launch *launch, cl_event event)
{
    if (launch->last) clReleaseEvent(launch->last);
    launch->last = event;
}

/* ---- one thread at a time ---- */

/* In a forked child the lock may belong to a thread that is not there; the child may not use the queue anyway.
 */
static bool queue_is_locked(const struct opencl *state)
{
    return (state->device.quirks & OPENCL_QUIRK_ONE_THREAD) && state->pid == getpid();
}

bool opencl_queue_lock(clattn_context *context)
{
    struct opencl *state = opencl_of(context);
    if (!queue_is_locked(state)) return false;
    pthread_mutex_lock(&state->queue_lock);
    return true;
}

void opencl_queue_unlock(clattn_context *context)
{
    struct opencl *state = opencl_of(context);
    if (queue_is_locked(state)) pthread_mutex_unlock(&state->queue_lock);
}

/* ---- begin ---- */

static clattn_status queue_check(struct opencl_launch *launch)
{
    const struct opencl *state = opencl_of(launch->context);
    cl_context context = NULL;
    cl_device_id device = NULL;
    cl_command_queue_properties properties = 0;
    cl_int code = clGetCommandQueueInfo(launch->queue, CL_QUEUE_CONTEXT, sizeof context, &context, NULL);
    if (!code) code = clGetCommandQueueInfo(launch->queue, CL_QUEUE_DEVICE, sizeof device, &device, NULL);
    if (!code)
        code = clGetCommandQueueInfo(launch->queue, CL_QUEUE_PROPERTIES, sizeof properties, &properties, NULL);
    if (code) return opencl_fail(launch->context, code, "clGetCommandQueueInfo(sync.queue)");
    if (context != state->context || device != state->device.id)
        return fail(launch->context, CLATTN_INVALID_ARGUMENT, "sync.queue belongs to another OpenCL %s",
                    context != state->context ? "context" : "device");
    launch->out_of_order = (properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE) != 0;
    return CLATTN_SUCCESS;
}

void opencl_launch_begin(clattn_context *context, const clattn_sync *sync, struct opencl_launch *launch)
{
    struct opencl *state = opencl_of(context);
    *launch = (struct opencl_launch){.context = context, .sync = sync};
    launch->status = opencl_check_process(context);
    if (launch->status) return;
    launch->queue = sync && sync->queue ? sync->queue : state->queue;
    launch->is_locked = opencl_queue_lock(context);
    launch->status = queue_check(launch);
    if (launch->status || !launch->out_of_order) return;
    cl_event event = NULL;
    if (sync && sync->wait_count > 0)
        launch_fail(launch,
                    clEnqueueBarrierWithWaitList(launch->queue, sync->wait_count,
                                                 (const cl_event *)sync->wait_list, NULL),
                    "clEnqueueBarrierWithWaitList");
    if (!launch->status)
        launch_fail(launch, clEnqueueBarrierWithWaitList(launch->queue, 0, NULL, &event),
                    "clEnqueueBarrierWithWaitList");
    if (!launch->status) launch_replace_last(launch, event);
}

void opencl_launch_kernel(struct opencl_launch *launch, const char *file, const char *name, const char *options)
{
    if (launch->status) return;
    if (launch->kernel) clReleaseKernel(launch->kernel);
    launch->kernel = NULL;
    launch->has_run = false;
    launch->arg = 0;
    snprintf(launch->name, sizeof launch->name, "%s", name);
    launch->status = opencl_kernel(launch->context, file, name, options, &launch->kernel);
}

/* ---- memory of the launch ---- */

static bool launch_has_room(struct opencl_launch *launch, int count)
{
    if (launch->status) return false;
    if (count < OPENCL_TEMPORARIES) return true;
    launch->status =
        fail(launch->context, CLATTN_INTERNAL, "a launch has more than %d temporaries", OPENCL_TEMPORARIES);
    return false;
}

cl_mem opencl_launch_temporary(struct opencl_launch *launch, size_t bytes)
{
    struct storage storage = {0};
    if (!launch_has_room(launch, launch->temporary_count)) return NULL;
    launch->status = opencl_workspace_take(launch->context, launch->queue, MAX(bytes, 1), &storage);
    if (launch->status) return NULL;
    launch->temporaries[launch->temporary_count++] = storage;
    return storage.mem;
}

cl_mem opencl_launch_table(struct opencl_launch *launch, const void *data, size_t bytes)
{
    struct storage storage = {0};
    if (!launch_has_room(launch, launch->table_count)) return NULL;
    launch->status = opencl_storage_copy(launch->context, data, bytes, &storage);
    if (launch->status) return NULL;
    launch->tables[launch->table_count++] = storage;
    return storage.mem;
}

/* ---- arguments ---- */

static void arg_set(struct opencl_launch *launch, size_t bytes, const void *value)
{
    char what[64];
    if (launch->status) return;
    snprintf(what, sizeof what, "clSetKernelArg %u ", (unsigned)launch->arg);
    launch_fail(launch, clSetKernelArg(launch->kernel, launch->arg, bytes, value), what);
    launch->arg++;
}

void opencl_arg_mem(struct opencl_launch *launch, cl_mem mem)
{
    arg_set(launch, sizeof mem, &mem);
}

void opencl_arg_storage(struct opencl_launch *launch, const struct storage *storage)
{
    opencl_arg_mem(launch, storage ? storage->mem : NULL);
}

void opencl_arg_tensor(struct opencl_launch *launch, const clattn_tensor *tensor)
{
    if (!tensor || !tensor->data) {
        opencl_arg_mem(launch, NULL);
        return;
    }
    if (launch->status) return;
    launch->status = opencl_check_tensor(launch->context, tensor);
    if (launch->status) return;
    if (tensor->memory == CLATTN_MEMORY_SVM) {
        const struct opencl_svm *svm = &opencl_of(launch->context)->svm;
        launch_fail(launch, svm->set_arg(launch->kernel, launch->arg, tensor->data),
                    "clSetKernelArgSVMPointer");
        launch->arg++;
    } else {
        opencl_arg_mem(launch, tensor->data);
    }
}

void opencl_arg_strides(struct opencl_launch *launch, const clattn_tensor *tensor)
{
    opencl_arg_long(launch, tensor ? tensor->offset : 0);
    opencl_arg_long(launch, tensor ? tensor->batch_stride : 0);
    opencl_arg_long(launch, tensor ? tensor->len_stride : 0);
    opencl_arg_long(launch, tensor ? tensor->head_stride : 0);
}

void opencl_arg_local(struct opencl_launch *launch, size_t bytes)
{
    arg_set(launch, bytes, NULL);
}

void opencl_arg_int(struct opencl_launch *launch, int32_t value)
{
    cl_int number = value;
    arg_set(launch, sizeof number, &number);
}

void opencl_arg_long(struct opencl_launch *launch, int64_t value)
{
    cl_long number = value;
    arg_set(launch, sizeof number, &number);
}

void opencl_arg_float(struct opencl_launch *launch, float value)
{
    cl_float number = value;
    arg_set(launch, sizeof number, &number);
}

void opencl_arg_from(struct opencl_launch *launch, cl_uint index)
{
    launch->arg = index;
}

/* ---- run and end ---- */

/* What the next command has to wait for. */
static cl_uint launch_waits(const struct opencl_launch *launch, const cl_event **list)
{
    *list = NULL;
    if (launch->last) {
        if (!launch->out_of_order) return 0;
        *list = &launch->last;
        return 1;
    }
    if (!launch->sync || launch->sync->wait_count == 0) return 0;
    *list = (const cl_event *)launch->sync->wait_list;
    return launch->sync->wait_count;
}

/* Is it the kernel that the driver cannot run, at its first launch? Later ones fail for other reasons. */
static bool launch_is_refused(const struct opencl_launch *launch, cl_int code)
{
    return (code == CL_OUT_OF_RESOURCES || code == CL_INVALID_WORK_GROUP_SIZE ||
            code == CL_INVALID_WORK_ITEM_SIZE) &&
           !launch->has_run && !launch->is_final &&
           opencl_kernel_refuse(launch->context, launch->kernel, launch->name, code);
}

void opencl_launch_run(struct opencl_launch *launch, cl_uint dims, const size_t *global, const size_t *local)
{
    const cl_event *list;
    cl_event event = NULL;
    if (launch->status) return;
    for (cl_uint i = 0; i < dims; i++)
        if (global[i] == 0) return;
    cl_uint waits = launch_waits(launch, &list);
    cl_int code =
        clEnqueueNDRangeKernel(launch->queue, launch->kernel, dims, NULL, global, local, waits, list, &event);
    launch->is_refused = launch_is_refused(launch, code);
    if (launch->is_refused)
        launch->status = (clattn_status)code;
    else
        launch_fail(launch, code, "clEnqueueNDRangeKernel");
    if (launch->status) return;
    launch->has_run = true;
    launch_replace_last(launch, event);
    stats_add_launch(launch->context);
}

void opencl_launch_fill(struct opencl_launch *launch, cl_mem mem, int32_t value, size_t words)
{
    const cl_event *list;
    const cl_int pattern = value;
    cl_event event = NULL;
    if (launch->status || words == 0) return;
    cl_uint waits = launch_waits(launch, &list);
    launch_fail(launch,
                clEnqueueFillBuffer(launch->queue, mem, &pattern, sizeof pattern, 0, words * sizeof pattern,
                                    waits, list, &event),
                "clEnqueueFillBuffer");
    if (!launch->status) launch_replace_last(launch, event);
}

/* Waits for our own last command, which all others precede. */
static void launch_wait(struct opencl_launch *launch)
{
    cl_int result = CL_COMPLETE;
    cl_int code = clWaitForEvents(1, &launch->last);
    if (code == CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST &&
        !clGetEventInfo(launch->last, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof result, &result, NULL) &&
        result < 0)
        code = result;
    launch_fail(launch, code, "execution");
}

static void launch_end_queue(struct opencl_launch *launch)
{
    const cl_event *list;
    cl_event event = NULL;
    const clattn_sync *sync = launch->sync;
    /* Nothing to compute: the event still has to come after the wait list. */
    if (!launch->status && !launch->last && sync && sync->event) {
        cl_uint waits = launch_waits(launch, &list);
        launch_fail(launch, clEnqueueMarkerWithWaitList(launch->queue, waits, list, &event),
                    "clEnqueueMarkerWithWaitList");
        launch->last = event;
    }
    if (launch->last && (sync || launch->is_locked)) launch_fail(launch, clFlush(launch->queue), "clFlush");
    if (launch->is_locked) opencl_queue_unlock(launch->context);
    launch->is_locked = false;
    if (!launch->last) return;
    if (!sync) launch_wait(launch);
    if (!launch->status && sync && sync->event) {
        *sync->event = launch->last;
        launch->last = NULL;
    }
    launch_replace_last(launch, NULL);
}

clattn_status opencl_launch_end(struct opencl_launch *launch)
{
    if (launch->status != CLATTN_FORKED) launch_end_queue(launch);
    if (launch->kernel) clReleaseKernel(launch->kernel);
    for (int i = 0; i < launch->temporary_count; i++)
        opencl_workspace_give(launch->context, launch->queue, launch->out_of_order, &launch->temporaries[i]);
    for (int i = 0; i < launch->table_count; i++)
        clReleaseMemObject(launch->tables[i].mem);
    return launch->status;
}

clattn_status opencl_finish(clattn_context *context, const clattn_sync *sync)
{
    clattn_status status = opencl_check_process(context);
    if (status) return status;
    opencl_queue_lock(context);
    cl_int code = clFinish(sync && sync->queue ? sync->queue : opencl_of(context)->queue);
    opencl_queue_unlock(context);
    return code ? opencl_fail(context, code, "clFinish") : CLATTN_SUCCESS;
}
