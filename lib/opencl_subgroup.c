/* SPDX-License-Identifier: MIT */
/* The subgroup tier: whether a device has it, and whether it computes rightly there. */

#include "config.h"

#include "opencl_subgroup.h"

#include "opencl_nvidia.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { AMD_VENDOR = 0x1002, SIZE_MAX_LANES = 64, INTEL_SIZES_MAX = 16, HEADS_MAX = 4 };

/* Queries of extensions. */
enum { WAVEFRONT_WIDTH_AMD = 0x4043, SUB_GROUP_SIZES_INTEL = 0x4108 };

/* ---- what the device offers ---- */

/* 16 lanes where the device has them: half as many registers a lane as with 32; else the largest size below. */
static int intel_size(cl_device_id id)
{
    size_t sizes[INTEL_SIZES_MAX] = {0}, bytes = 0, best = 0;
    if (clGetDeviceInfo(id, SUB_GROUP_SIZES_INTEL, sizeof sizes, sizes, &bytes)) return 0;
    for (size_t i = 0; i < bytes / sizeof *sizes; i++)
        if (sizes[i] <= 16 && sizes[i] > best) best = sizes[i];
    return best >= 8 ? (int)best : 0;
}

struct subgroup subgroup_of_device(const struct opencl_device *device)
{
    cl_uint width = 0;
    bool is_gpu = (device->type & CL_DEVICE_TYPE_GPU) != 0;
    if (opencl_has_extension(device->id, "cl_intel_required_subgroup_size") &&
        opencl_has_extension(device->id, "cl_intel_subgroups") && intel_size(device->id))
        return (struct subgroup){SUBGROUP_INTEL, intel_size(device->id)};
    if (is_gpu && device->vendor_id == NVIDIA_VENDOR) return (struct subgroup){SUBGROUP_NVIDIA, 32};
    if (is_gpu && device->vendor_id == AMD_VENDOR &&
        !clGetDeviceInfo(device->id, WAVEFRONT_WIDTH_AMD, sizeof width, &width, NULL) &&
        (width == 32 || width == 64))
        return (struct subgroup){SUBGROUP_AMD, (int)width};
    if (opencl_has_extension(device->id, "cl_khr_subgroups") &&
        opencl_has_extension(device->id, "cl_khr_subgroup_shuffle"))
        return (struct subgroup){SUBGROUP_KHR, 0};
    return (struct subgroup){SUBGROUP_NONE, 0};
}

bool subgroup_is_default(const struct opencl_device *device)
{
    return (device->type & CL_DEVICE_TYPE_GPU) && device->subgroup.kind != SUBGROUP_NVIDIA;
}

/* ---- programs ---- */

void subgroup_options(struct opencl_options *options, const struct subgroup *subgroup)
{
    if (subgroup->kind == SUBGROUP_KHR) snprintf(options->text, sizeof options->text, "-cl-std=CL3.0");
    opencl_option(options, "SG_KIND", subgroup->kind);
    opencl_option(options, "SG", subgroup->size);
}

/* What a lane can hold: Intel's GPUs have 64 registers for each of 16 lanes, AMD's 128 and more. NVIDIA's
 * compiler rather spills than that it gives the lanes of a work-group of one warp more than 96 (make
 * check-vendors). */
static int registers(const struct subgroup *subgroup)
{
    return subgroup->kind == SUBGROUP_INTEL || subgroup->kind == SUBGROUP_NVIDIA ? 64 : 128;
}

int subgroup_heads(const struct subgroup *subgroup, int group, int dim_v)
{
    int heads = MIN(group, HEADS_MAX), lane_dims = (dim_v + subgroup->size - 1) / subgroup->size;
    if (lane_dims > registers(subgroup) / 8) return 0;
    while (heads > 1 && heads * lane_dims > registers(subgroup) / 4)
        heads--;
    int rounds = (group + heads - 1) / heads;
    return (group + rounds - 1) / rounds;
}

int subgroup_load(const struct subgroup *subgroup, int dim)
{
    int width = 1, most = registers(subgroup) / 16;
    while (width < most && dim % (2 * width) == 0)
        width *= 2;
    return width;
}

/* ---- canary ---- */

static float canary_value(int lane)
{
    return (float)(lane * lane % 13) + 1;
}

/* What cl/canary_subgroup.cl must write. */
static float canary_wanted(int line, int lane, int size)
{
    float sum = 0, most = -INFINITY;
    for (int i = 0; i < size; i++) {
        sum += canary_value(i);
        most = i == 1 ? most : MAX(most, canary_value(i));
    }
    switch (line) {
    case 0:
        return (float)size;
    case 1:
        return canary_value((lane * 5 + 3) % size);
    case 2:
        return canary_value(lane ^ 1) + 100 * canary_value(lane ^ size / 2);
    case 3:
        return sum;
    default:
        return most;
    }
}

static clattn_status canary_run(clattn_context *context, const struct subgroup *subgroup, const char *options)
{
    enum { LINES = 5 };
    float out[LINES * SIZE_MAX_LANES];
    struct storage result = {0};
    struct opencl_launch launch;
    size_t size = (size_t)subgroup->size, bytes = LINES * size * sizeof *out;
    clattn_status status = opencl_storage_create(context, bytes, &result);
    if (status) return status;
    opencl_launch_begin(context, NULL, &launch);
    opencl_launch_kernel(&launch, SUBGROUP_FILES "canary_subgroup.cl", "canary_subgroup", options);
    opencl_arg_storage(&launch, &result);
    opencl_launch_run(&launch, 1, &size, &size);
    status = opencl_launch_end(&launch);
    if (!status) status = opencl_storage_read(context, &result, 0, out, bytes);
    opencl_storage_release(context, &result);
    for (int i = 0; !status && i < LINES * subgroup->size; i++) {
        float want = canary_wanted(i / subgroup->size, i % subgroup->size, subgroup->size);
        if (out[i] != want)
            status =
                fail(context, CLATTN_NO_DEVICE, "canary_subgroup with %d lanes: element %d is %g, must be %g",
                     subgroup->size, i, (double)out[i], (double)want);
    }
    return status;
}

/* With KHR only a built kernel tells how many lanes there are: one for 32 that is asked. */
static clattn_status khr_size(clattn_context *context, struct subgroup *subgroup)
{
    struct opencl_options options = {""};
    cl_kernel kernel = NULL;
    size_t lanes = 0;
    subgroup->size = 32;
    subgroup_options(&options, subgroup);
    clattn_status status =
        opencl_kernel(context, SUBGROUP_FILES "canary_subgroup.cl", "canary_subgroup", options.text, &kernel);
    if (status) return status;
    cl_int code =
        clGetKernelWorkGroupInfo(kernel, opencl_of(context)->device.id,
                                 CL_KERNEL_PREFERRED_WORK_GROUP_SIZE_MULTIPLE, sizeof lanes, &lanes, NULL);
    clReleaseKernel(kernel);
    if (code) return opencl_fail(context, code, "clGetKernelWorkGroupInfo");
    if (lanes != 8 && lanes != 16 && lanes != 32 && lanes != 64)
        return fail(context, CLATTN_NO_DEVICE, "subgroups of %zu lanes", lanes);
    subgroup->size = (int)lanes;
    return CLATTN_SUCCESS;
}

/* ---- opening ---- */

/* Builds and runs the canary, unless it did well before, and the self-test. */
static clattn_status try_out(clattn_context *context, bool has_passed, struct subgroup *subgroup)
{
    struct opencl *state = opencl_of(context);
    struct opencl_options options = {""};
    clattn_status status = subgroup->size ? CLATTN_SUCCESS : khr_size(context, subgroup);
    subgroup_options(&options, subgroup);
    if (!status && !has_passed) status = canary_run(context, subgroup, options.text);
    if (status) return status;
    state->subgroup = *subgroup;
    state->tier = opencl_tiers[OPENCL_SUBGROUP];
    return opencl_selftest(context);
}

clattn_status subgroup_open(clattn_context *context)
{
    struct opencl *state = opencl_of(context);
    struct subgroup subgroup = state->device.subgroup;
    struct opencl_trial trial;
    const char *tier = state->tier;
    clattn_stats before = context->stats;
    if (!subgroup.kind) return CLATTN_SUCCESS;
    clattn_status status = opencl_trial_begin(context, "trial of subgroups", &trial);
    if (!status) status = try_out(context, trial.has_passed, &subgroup);
    context->stats = before; /* what the caller's own work costs */
    opencl_trial_end(context, &trial, status);
    if (!status) {
        log_line(context, CLATTN_LOG_INFO, "tier subgroup is used, with %d lanes", subgroup.size);
        return CLATTN_SUCCESS;
    }
    state->subgroup = (struct subgroup){0};
    state->tier = tier;
    if (status == CLATTN_OUT_OF_MEMORY) return status;
    log_line(context, CLATTN_LOG_WARNING, "tier subgroup is not used: %.600s", context->error);
    return CLATTN_SUCCESS;
}
