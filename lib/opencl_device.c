/* SPDX-License-Identifier: MIT */
/* OpenCL platforms and devices: which there are, which one is meant, what it can do. */

#include "config.h"

#include "opencl_nvidia.h"
#include "opencl_subgroup.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PLATFORMS_MAX = 64, DEVICES_MAX = 64 };

/* ---- text ---- */

bool opencl_text_contains(const char *text, const char *part, size_t bytes)
{
    for (; *text; text++) {
        size_t i = 0;
        while (i < bytes && text[i] && tolower((unsigned char)text[i]) == tolower((unsigned char)part[i]))
            i++;
        if (i == bytes) return true;
    }
    return bytes == 0;
}

/* CLATTN_PLATFORMS: parts of names, comma-separated; "-part" leaves platforms out. */
static bool platform_wanted(const char *name)
{
    const char *list = getenv("CLATTN_PLATFORMS");
    bool named = false, has_names = false;
    while (list && *list) {
        size_t bytes = strcspn(list, ",");
        if (list[0] == '-') {
            if (bytes > 1 && opencl_text_contains(name, list + 1, bytes - 1)) return false;
        } else if (bytes > 0) {
            has_names = true;
            named = named || opencl_text_contains(name, list, bytes);
        }
        list += bytes + (list[bytes] == ',');
    }
    return named || !has_names;
}

/* "OpenCL 3.0 PoCL ..." -> 300; 0 when it is something else. */
static int version_number(const char *text)
{
    int major, minor;
    return sscanf(text, "OpenCL %d.%d", &major, &minor) == 2 ? 100 * major + 10 * minor : 0;
}

/* ---- one device ---- */

/* A text property, cut to `bytes`; empty when the driver does not answer. */
static void device_text(cl_device_id id, cl_device_info what, char *text, size_t bytes)
{
    char full[4096] = "";
    if (clGetDeviceInfo(id, what, sizeof full - 1, full, NULL)) full[0] = 0;
    const char *start = full + strspn(full, " ");
    snprintf(text, bytes, "%s", start);
}

static void platform_text(cl_platform_id id, cl_platform_info what, char *text, size_t bytes)
{
    char full[4096] = "";
    if (clGetPlatformInfo(id, what, sizeof full - 1, full, NULL)) full[0] = 0;
    snprintf(text, bytes, "%s", full);
}

bool opencl_has_extension(cl_device_id id, const char *name)
{
    size_t bytes = 0, length = strlen(name);
    bool found = false;
    if (clGetDeviceInfo(id, CL_DEVICE_EXTENSIONS, 0, NULL, &bytes) || bytes == 0) return false;
    char *list = calloc(bytes + 1, 1);
    if (list && !clGetDeviceInfo(id, CL_DEVICE_EXTENSIONS, bytes, list, NULL))
        for (const char *at = list; (at = strstr(at, name)) && !found; at += length)
            found = (at == list || at[-1] == ' ') && (at[length] == ' ' || at[length] == 0);
    free(list);
    return found;
}

bool opencl_device_read(cl_platform_id platform, cl_device_id id, struct opencl_device *device)
{
    cl_bool available = CL_FALSE, compiler = CL_FALSE;
    cl_device_local_mem_type local_type = CL_GLOBAL;
    *device = (struct opencl_device){.platform = platform, .id = id};
    platform_text(platform, CL_PLATFORM_NAME, device->platform_name, sizeof device->platform_name);
    platform_text(platform, CL_PLATFORM_VERSION, device->platform_version, sizeof device->platform_version);
    device_text(id, CL_DEVICE_NAME, device->name, sizeof device->name);
    device_text(id, CL_DRIVER_VERSION, device->driver, sizeof device->driver);
    device_text(id, CL_DEVICE_VERSION, device->version, sizeof device->version);
    device->cl_version = version_number(device->version);
    cl_int code = clGetDeviceInfo(id, CL_DEVICE_TYPE, sizeof device->type, &device->type, NULL);
    code |= clGetDeviceInfo(id, CL_DEVICE_AVAILABLE, sizeof available, &available, NULL);
    code |= clGetDeviceInfo(id, CL_DEVICE_COMPILER_AVAILABLE, sizeof compiler, &compiler, NULL);
    code |= clGetDeviceInfo(id, CL_DEVICE_VENDOR_ID, sizeof device->vendor_id, &device->vendor_id, NULL);
    code |=
        clGetDeviceInfo(id, CL_DEVICE_MAX_WORK_GROUP_SIZE, sizeof device->group_max, &device->group_max, NULL);
    code |=
        clGetDeviceInfo(id, CL_DEVICE_LOCAL_MEM_SIZE, sizeof device->local_bytes, &device->local_bytes, NULL);
    code |= clGetDeviceInfo(id, CL_DEVICE_LOCAL_MEM_TYPE, sizeof local_type, &local_type, NULL);
    code |= clGetDeviceInfo(id, CL_DEVICE_GLOBAL_MEM_SIZE, sizeof device->memory_bytes, &device->memory_bytes,
                            NULL);
    code |=
        clGetDeviceInfo(id, CL_DEVICE_MAX_MEM_ALLOC_SIZE, sizeof device->alloc_max, &device->alloc_max, NULL);
    code |= clGetDeviceInfo(id, CL_DEVICE_MAX_COMPUTE_UNITS, sizeof device->compute_units,
                            &device->compute_units, NULL);
    if (code || !available || !compiler || device->cl_version < 120) return false;

    /* More dimensions than three are allowed; the first three are used. */
    size_t sizes[16] = {0};
    if (clGetDeviceInfo(id, CL_DEVICE_MAX_WORK_ITEM_SIZES, sizeof sizes, sizes, NULL)) return false;
    memcpy(device->group_sizes, sizes, sizeof device->group_sizes);
    device->local_is_real = local_type == CL_LOCAL;
    device->has_fp16 = opencl_has_extension(id, "cl_khr_fp16");
    device->has_double = opencl_has_extension(id, "cl_khr_fp64");
    device->subgroup = subgroup_of_device(device);
    opencl_quirks_read(device);
    if (device->quirks & OPENCL_QUIRK_NO_SUBGROUPS) device->subgroup.kind = SUBGROUP_NONE;
    return true;
}

/* ---- all devices ---- */

bool opencl_device_at(int index, struct opencl_device *device)
{
    cl_platform_id platforms[PLATFORMS_MAX];
    cl_uint platform_count = 0;
    char name[128];
    /* -1001 (no ICD at all) is as normal as a platform without devices. */
    if (index < 0 || clGetPlatformIDs(PLATFORMS_MAX, platforms, &platform_count)) return false;
    for (cl_uint p = 0; p < MIN(platform_count, PLATFORMS_MAX); p++) {
        cl_device_id ids[DEVICES_MAX];
        cl_uint count = 0;
        platform_text(platforms[p], CL_PLATFORM_NAME, name, sizeof name);
        if (!platform_wanted(name)) continue;
        if (clGetDeviceIDs(platforms[p], CL_DEVICE_TYPE_ALL, DEVICES_MAX, ids, &count)) continue;
        for (cl_uint d = 0; d < MIN(count, DEVICES_MAX); d++)
            if (opencl_device_read(platforms[p], ids[d], device) && index-- == 0) return true;
    }
    return false;
}

static bool is_index(const char *text)
{
    return *text && strspn(text, "0123456789") == strlen(text) && strlen(text) < 6;
}

static clattn_status none_found(clattn_context *context)
{
    if (getenv("CLATTN_PLATFORMS"))
        return fail(context, CLATTN_NO_DEVICE,
                    "no OpenCL device on the platforms that CLATTN_PLATFORMS=%s leaves",
                    getenv("CLATTN_PLATFORMS"));
    return fail(context, CLATTN_NO_DEVICE,
                "no OpenCL device: no driver (.icd file of the OpenCL loader) offers one with a compiler");
}

clattn_status opencl_device_find(clattn_context *context, const char *wanted, struct opencl_device *device)
{
    struct opencl_device other;
    if (!wanted || !*wanted) wanted = getenv("CLATTN_DEVICE");
    if (!opencl_device_at(0, device)) return none_found(context);
    if (wanted && *wanted) {
        for (int i = 0; opencl_device_at(i, device); i++)
            if (is_index(wanted) ? i == atoi(wanted)
                                 : opencl_text_contains(device->name, wanted, strlen(wanted)) ||
                                       opencl_text_contains(device->platform_name, wanted, strlen(wanted)))
                return CLATTN_SUCCESS;
        opencl_device_at(0, device);
        return fail(context, CLATTN_NO_DEVICE,
                    "no OpenCL device is number '%s' or has that in its name; the first is '%s' of '%s'",
                    wanted, device->name, device->platform_name);
    }
    for (int i = 0; opencl_device_at(i, &other); i++)
        if (other.type & CL_DEVICE_TYPE_GPU) {
            *device = other;
            break;
        }
    return CLATTN_SUCCESS;
}

const char *const opencl_tiers[OPENCL_TIERS] = {"portable", "subgroup", "mma", "hopper"};

int opencl_tier_number(const char *name)
{
    for (int i = 0; i < OPENCL_TIERS; i++)
        if (strcmp(name, opencl_tiers[i]) == 0) return i;
    return -1;
}

/* The tiers that the device should have, as far as CLATTN_TIER and the quirk table let them. */
static void device_tiers(const struct opencl_device *device, char *text, size_t bytes)
{
    const char *limit = getenv("CLATTN_TIER");
    int highest = limit && *limit ? opencl_tier_number(limit) : OPENCL_TIERS - 1;
    highest = MIN(highest, device->tier_limit);
    const enum nvidia_tier card = nvidia_generation(device);
    snprintf(text, bytes, "%s%s%s%s", opencl_tiers[0],
             highest >= OPENCL_SUBGROUP && device->subgroup.kind ? " subgroup" : "",
             highest >= OPENCL_MMA && card >= NVIDIA_MMA ? " mma" : "",
             highest >= OPENCL_HOPPER && card >= NVIDIA_HOPPER ? " hopper" : "");
}

void opencl_device_info(const struct opencl_device *device, clattn_device_info *info)
{
    info->backend = CLATTN_BACKEND_OPENCL;
    info->is_gpu = (device->type & CL_DEVICE_TYPE_GPU) != 0;
    snprintf(info->name, sizeof info->name, "%s", device->name);
    snprintf(info->platform, sizeof info->platform, "%s", device->platform_name);
    snprintf(info->driver, sizeof info->driver, "%.60s, %.60s", device->driver, device->version);
    device_tiers(device, info->variants, sizeof info->variants);
    info->memory_bytes = device->memory_bytes;
    info->max_alloc_bytes = device->alloc_max;
    info->local_bytes = device->local_bytes;
    info->compute_units = (int)device->compute_units;
    opencl_quirks_tell(device, info->quirks, sizeof info->quirks);
}

bool opencl_device(int index, clattn_device_info *info)
{
    struct opencl_device device;
    if (!opencl_device_at(index, &device)) return false;
    opencl_device_info(&device, info);
    info->index = index;
    return true;
}
