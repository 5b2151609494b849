/* SPDX-License-Identifier: MIT */
/* OpenCL contexts: opening on a device of our choice or on the caller's objects, closing, the backend table. */

#include "config.h"

#include "opencl_nvidia.h"
#include "opencl_subgroup.h"

#ifdef HAVE_DLFCN_H
#include <dlfcn.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- errors ---- */

clattn_status opencl_fail(clattn_context *context, cl_int code, const char *what)
{
    return fail(context, (clattn_status)code, "%s: %s (%d)", what, clattn_strerror((clattn_status)code), code);
}

clattn_status opencl_check_process(clattn_context *context)
{
    const struct opencl *state = opencl_of(context);
    if (state->pid == getpid()) return CLATTN_SUCCESS;
    return fail(
        context, CLATTN_FORKED,
        "the context was made in process %ld, this is %ld; drivers do not survive a fork: make the context "
        "in the child",
        (long)state->pid, (long)getpid());
}

/* ---- entry points newer than OpenCL 1.2 ---- */

/* CL_DEVICE_SVM_CAPABILITIES, which headers of OpenCL 1.2 do not name. */
enum { DEVICE_SVM_CAPABILITIES = 0x1053 };

static void *entry_point(const struct opencl_device *device, const char *name)
{
    void *function = NULL;
#if defined(HAVE_DLFCN_H) && defined(RTLD_DEFAULT)
    function = dlsym(RTLD_DEFAULT, name);
#endif
    return function ? function : clGetExtensionFunctionAddressForPlatform(device->platform, name);
}

static void svm_find(const struct opencl_device *device, struct opencl_svm *svm)
{
    cl_bitfield capabilities = 0;
    struct opencl_svm found = {0};
    if (device->cl_version < 200 ||
        clGetDeviceInfo(device->id, DEVICE_SVM_CAPABILITIES, sizeof capabilities, &capabilities, NULL) ||
        capabilities == 0)
        return;
    /* POSIX lets a function pointer be read from the object pointer that dlsym gives. */
    *(void **)&found.set_arg = entry_point(device, "clSetKernelArgSVMPointer");
    *(void **)&found.map = entry_point(device, "clEnqueueSVMMap");
    *(void **)&found.unmap = entry_point(device, "clEnqueueSVMUnmap");
    if (found.set_arg && found.map && found.unmap) *svm = found;
}

/* ---- opening ---- */

/* Our own context on the device that the caller or the environment names. */
static clattn_status open_device(clattn_context *context, const clattn_context_desc *desc)
{
    struct opencl *state = opencl_of(context);
    cl_int code;
    clattn_status status = opencl_device_find(context, desc->device, &state->device);
    if (status) return status;
    const cl_context_properties properties[] = {CL_CONTEXT_PLATFORM,
                                                (cl_context_properties)state->device.platform, 0};
    state->context = clCreateContext(properties, 1, &state->device.id, NULL, NULL, &code);
    if (!code) return CLATTN_SUCCESS;
    state->context = NULL;
    return opencl_fail(context, code, "clCreateContext");
}

/* The caller's context, device and queue must belong together. */
static clattn_status open_shared(clattn_context *context, const clattn_context_desc *desc)
{
    struct opencl *state = opencl_of(context);
    cl_device_id devices[64];
    cl_platform_id platform = NULL;
    size_t bytes = 0;
    bool found = false;
    cl_int code = clGetContextInfo(desc->cl_context, CL_CONTEXT_DEVICES, sizeof devices, devices, &bytes);
    if (code) return opencl_fail(context, code, "clGetContextInfo(desc.cl_context)");
    for (size_t i = 0; i < bytes / sizeof *devices; i++)
        found = found || devices[i] == desc->cl_device;
    if (!found)
        return fail(context, CLATTN_INVALID_ARGUMENT, "desc.cl_device is not a device of desc.cl_context");
    code = clGetDeviceInfo(desc->cl_device, CL_DEVICE_PLATFORM, sizeof platform, &platform, NULL);
    if (code) return opencl_fail(context, code, "clGetDeviceInfo(desc.cl_device)");
    if (!opencl_device_read(platform, desc->cl_device, &state->device))
        return fail(context, CLATTN_NO_DEVICE, "desc.cl_device has no compiler or less than OpenCL 1.2");
    if ((code = clRetainContext(desc->cl_context))) return opencl_fail(context, code, "clRetainContext");
    state->context = desc->cl_context;
    return CLATTN_SUCCESS;
}

static clattn_status open_queue(clattn_context *context, const clattn_context_desc *desc)
{
    struct opencl *state = opencl_of(context);
    cl_int code;
    cl_context owner = NULL;
    cl_device_id device = NULL;
    cl_command_queue_properties properties = 0;
    if (!desc->cl_queue) {
        state->queue = clCreateCommandQueue(state->context, state->device.id, 0, &code);
        if (!code) return CLATTN_SUCCESS;
        state->queue = NULL;
        return opencl_fail(context, code, "clCreateCommandQueue");
    }
    code = clGetCommandQueueInfo(desc->cl_queue, CL_QUEUE_CONTEXT, sizeof owner, &owner, NULL);
    if (!code) code = clGetCommandQueueInfo(desc->cl_queue, CL_QUEUE_DEVICE, sizeof device, &device, NULL);
    if (!code)
        code = clGetCommandQueueInfo(desc->cl_queue, CL_QUEUE_PROPERTIES, sizeof properties, &properties, NULL);
    if (code) return opencl_fail(context, code, "clGetCommandQueueInfo(desc.cl_queue)");
    if (owner != state->context || device != state->device.id)
        return fail(context, CLATTN_INVALID_ARGUMENT, "desc.cl_queue belongs to another OpenCL %s",
                    owner != state->context ? "context" : "device");
    if ((code = clRetainCommandQueue(desc->cl_queue)))
        return opencl_fail(context, code, "clRetainCommandQueue");
    state->queue = desc->cl_queue;
    state->out_of_order = (properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE) != 0;
    return CLATTN_SUCCESS;
}

/* desc.variant asks for one tier; CLATTN_TIER names the highest that may be used. */
static clattn_status open_tier(clattn_context *context, const clattn_context_desc *desc)
{
    struct opencl *state = opencl_of(context);
    const char *limit = getenv("CLATTN_TIER");
    int highest = limit && *limit ? opencl_tier_number(limit) : OPENCL_TIERS - 1;
    int wanted = desc->variant ? opencl_tier_number(desc->variant) : highest;
    highest = MIN(highest, state->device.tier_limit);
    state->tier = opencl_tiers[0];
    if (highest < 0)
        return fail(context, CLATTN_NO_DEVICE,
                    "CLATTN_TIER is '%s'; portable, subgroup, mma or hopper are known", limit);
    if (limit && *limit) log_line(context, CLATTN_LOG_INFO, "tiers to %s: CLATTN_TIER asks for it", limit);
    highest = MIN(wanted, highest);
    clattn_status status = CLATTN_SUCCESS;
    if (highest >= OPENCL_MMA)
        status = nvidia_open(context, highest >= OPENCL_HOPPER ? NVIDIA_HOPPER : NVIDIA_MMA);
    bool is_subgroup = highest == OPENCL_SUBGROUP || subgroup_is_default(&state->device);
    if (!status && !state->nvidia && highest >= OPENCL_SUBGROUP) {
        if (is_subgroup)
            status = subgroup_open(context);
        else if (state->device.subgroup.kind)
            log_line(context, CLATTN_LOG_INFO,
                     "tier subgroup is there and not used: on CPUs and NVIDIA cards it has to be asked for");
    }
    if (!status && desc->variant && strcmp(desc->variant, state->tier))
        status = fail(context, CLATTN_NO_DEVICE, "the device has no tier '%s'; '%s' is there", desc->variant,
                      state->tier);
    return status;
}

static void opencl_close(clattn_context *context)
{
    struct opencl *state = opencl_of(context);
    /* In a forked child the driver's threads and locks are gone: leave its objects to the end of the process.
     */
    if (state->pid == getpid()) {
        opencl_dense_forget(state);
        opencl_workspace_release(state);
        opencl_programs_release(state);
        if (state->queue) clReleaseCommandQueue(state->queue);
        if (state->context) clReleaseContext(state->context);
    }
    nvidia_close(state);
    opencl_tuning_free(&state->tuning);
    pthread_mutex_destroy(&state->workspace_lock);
    pthread_mutex_destroy(&state->queue_lock);
    pthread_mutex_destroy(&state->lock);
    free(state);
    context->state = NULL;
}

static void log_quirks(clattn_context *context)
{
    const struct opencl_device *device = &opencl_of(context)->device;
    if (*device->quirk_errors) log_line(context, CLATTN_LOG_WARNING, "quirk table: %s", device->quirk_errors);
    if (*device->quirk_text)
        log_line(context, CLATTN_LOG_INFO,
                 "quirks of '%s': %s; so tiers to %s, local memory %llu, work-groups to %zu", device->name,
                 device->quirk_text, opencl_tiers[device->tier_limit], (unsigned long long)device->local_bytes,
                 device->group_max);
}

static clattn_status opencl_open(clattn_context *context, const clattn_context_desc *desc)
{
    struct opencl *state = calloc(1, sizeof *state);
    if (!state) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a context");
    state->pid = getpid();
    pthread_mutex_init(&state->lock, NULL);
    pthread_mutex_init(&state->workspace_lock, NULL);
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&state->queue_lock, &recursive);
    pthread_mutexattr_destroy(&recursive);
    context->state = state;
    clattn_status status = desc->cl_context ? open_shared(context, desc) : open_device(context, desc);
    if (!status) status = open_queue(context, desc);
    if (!status) log_quirks(context);
    if (!status) opencl_tuning_load(context, &state->device, desc->tuning, &state->tuning);
    if (!status) status = open_tier(context, desc);
    if (!status) svm_find(&state->device, &state->svm);
    if (!status && desc->backend == CLATTN_BACKEND_AUTO) status = opencl_selftest(context);
    if (status) {
        opencl_close(context);
        return status;
    }
    log_line(context, CLATTN_LOG_INFO, "OpenCL device '%s' of '%s', driver %s, tier %s", state->device.name,
             state->device.platform_name, state->device.driver, state->tier);
    return CLATTN_SUCCESS;
}

static clattn_status opencl_describe(clattn_context *context, clattn_device_info *info)
{
    const struct opencl *state = opencl_of(context);
    struct opencl_device other;
    clattn_status status = opencl_check_process(context);
    if (status) return status;
    opencl_device_info(&state->device, info);
    snprintf(info->variant, sizeof info->variant, "%s", state->tier);
    info->index = -1; /* the caller's device may be one that CLATTN_PLATFORMS leaves out */
    for (int i = 0; info->index < 0 && opencl_device_at(i, &other); i++)
        if (other.id == state->device.id) info->index = i;
    return CLATTN_SUCCESS;
}

const struct backend backend_opencl = {
    .id = CLATTN_BACKEND_OPENCL,
    .host_memory = false,
    .open = opencl_open,
    .close = opencl_close,
    .describe = opencl_describe,
    .storage_create = opencl_storage_create,
    .storage_release = opencl_storage_release,
    .storage_write = opencl_storage_write,
    .storage_read = opencl_storage_read,
    .storage_fill = opencl_storage_fill,
    .tensor_check = opencl_tensor_check,
    .tensor_upload = opencl_tensor_upload,
    .tensor_download = opencl_tensor_download,
    .finish = opencl_finish,
    .pyramid_build = opencl_pyramid_build,
    .select = opencl_select,
    .forward = opencl_forward,
    .prefers_parts = nvidia_prefers_parts,
    .backward = opencl_backward,
    .gather = opencl_gather,
    .merge = opencl_merge,
    .quantize = opencl_quantize,
    .cache_append = opencl_cache_append,
    .cache_copy = opencl_cache_copy,
    .cache_cut = opencl_cache_cut,
    .cache_release = opencl_cache_release,
    .decode = opencl_decode,
};
