/* SPDX-License-Identifier: MIT
 *
 * What the children of `clattn doctor` do with a driver. Before each step they write down what it is: a child
 * that dies leaves that behind. */
#include "config.h"

#include "doctor.h"

#include "check.h"
#include "device.h"
#include "program.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef HAVE_DLFCN_H
#include <dlfcn.h>
#endif

/* Rows that see nothing, a leaf that is not full, query heads that share keys. */
static const struct check_case small_case = {
    true, INPUT_RANDOM, CLATTN_SELECT_PISA, true, 1, 170, 150, 4, 2, 64, 40, 16, 5, 0, NULL, NULL};

/* ---- computing ---- */

/* The first line of an error. */
static void keep_error(char *text, size_t bytes, const char *what, clattn_status status, const char *detail)
{
    snprintf(text, bytes, "%s: %s%s%.*s", what, clattn_strerror(status), *detail ? ": " : "",
             (int)strcspn(detail, "\n"), detail);
}

/* What was decided, and why: warnings, tiers, self-tests. */
static void keep_line(void *user, clattn_log_level level, const char *message)
{
    if (level <= CLATTN_LOG_WARNING || strncmp(message, "self-test", 9) == 0 ||
        strncmp(message, "tier", 4) == 0)
        probe_note(user, "%s", message);
}

static void listen_to(struct probe *probe, clattn_context_desc *desc)
{
    unsetenv("CLATTN_LOG"); /* it would change the level */
    desc->log = keep_line;
    desc->log_user = probe;
    desc->log_level = CLATTN_LOG_INFO;
}

static clattn_context *open_variant(struct probe *probe, const clattn_device_info *info, const char *variant,
                                    char *wrong, size_t bytes)
{
    char detail[1024] = "", index[16];
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    snprintf(index, sizeof index, "%d", info->index);
    desc.backend = info->backend;
    desc.device = info->backend == CLATTN_BACKEND_OPENCL ? index : NULL;
    desc.variant = variant;
    desc.error = detail;
    desc.error_bytes = sizeof detail;
    if (info->backend == CLATTN_BACKEND_OPENCL) listen_to(probe, &desc);
    clattn_status status = clattn_context_create(&desc, &context);
    if (status) keep_error(wrong, bytes, "cannot be opened", status, detail);
    return context;
}

static void compute(struct probe *probe, struct probe_device *device, const char *variant)
{
    struct check_problem problem;
    struct check_result result;
    char none[16];
    clattn_device_info reference_info = {.backend = CLATTN_BACKEND_REFERENCE};
    clattn_context *reference = open_variant(probe, &reference_info, NULL, none, sizeof none);
    snprintf(probe->doing, sizeof probe->doing, "opening '%s'", device->info.name);
    clattn_context *context = open_variant(probe, &device->info, variant, device->wrong, sizeof device->wrong);
    clattn_device_info used = {.size = sizeof used};
    if (context && !clattn_context_device(context, &used))
        snprintf(device->variant, sizeof device->variant, "%s", used.variant);
    snprintf(probe->doing, sizeof probe->doing, "computing on '%s'%s%s", device->info.name,
             variant ? " as " : "", variant ? variant : "");
    int status = check_problem_make(&problem, &small_case, CLATTN_FLOAT16, 1, reference);
    if (status == STATUS_OK && context) {
        double ratio = INFINITY;
        status = check_problem_compare(&problem, context, &result);
        if (status == STATUS_OK) ratio = fmax(result.numbers.out_ratio, result.numbers.lse_ratio);
        if (status != STATUS_OK) {
            char detail[1024] = "";
            clattn_context_error(context, detail, sizeof detail);
            snprintf(device->wrong, sizeof device->wrong, "%.*s", (int)strcspn(detail, "\n"),
                     *detail ? detail : "it cannot compute a small attention");
        } else if (result.lists_wrong || !(ratio <= 1))
            snprintf(device->wrong, sizeof device->wrong,
                     "computes wrongly: %ld lists, the numbers %.3g times the tolerance",
                     (long)result.lists_wrong, ratio);
    } else if (status != STATUS_OK)
        snprintf(device->wrong, sizeof device->wrong, "the reference cannot compute a small attention");
    check_problem_release(&problem);
    clattn_context_release(context);
    clattn_context_release(reference);
    device->computed = true;
}

/* ---- children ---- */

#if defined(HAVE_OPENCL) && defined(HAVE_DLFCN_H)
/* The library itself first: the loader keeps silent about one that it cannot load. */
static bool load_library(struct probe *probe, const struct driver *driver)
{
    snprintf(probe->doing, sizeof probe->doing, "loading %.200s", driver->library);
    if (dlopen(driver->library, RTLD_NOW | RTLD_LOCAL)) return true;
    const char *reason = dlerror();
    snprintf(probe->failure, sizeof probe->failure, "%s", reason ? reason : "it cannot be loaded");
    return false;
}
#else
static bool load_library(struct probe *probe, const struct driver *driver)
{
    (void)probe, (void)driver;
    return true;
}
#endif

static void list_devices(struct probe *probe)
{
    clattn_device_info info = {.size = sizeof info};
    snprintf(probe->doing, sizeof probe->doing, "listing platforms and devices");
    for (int n = 2; probe->count < DOCTOR_DEVICES && clattn_device_get(n, &info) == CLATTN_SUCCESS; n++)
        probe->devices[probe->count++].info = info;
}

void patient_driver(struct probe *probe, const void *user)
{
    const struct patient *patient = user;
    setenv("OCL_ICD_VENDORS", patient->folder, 1);
    unsetenv("OPENCL_VENDOR_PATH");
    unsetenv("OCL_ICD_FILENAMES");
    if (!*patient->driver->library) {
        snprintf(probe->failure, sizeof probe->failure, "the file names no library");
        return;
    }
    if (!load_library(probe, patient->driver)) return;
    list_devices(probe);
    for (int i = 0; i < probe->count && !patient->quick; i++)
        compute(probe, &probe->devices[i], NULL);
}

void patient_cpu(struct probe *probe, const void *user)
{
    const struct patient *patient = user;
    clattn_device_info info = {.size = sizeof info};
    snprintf(probe->doing, sizeof probe->doing, "describing the processor");
    if (clattn_device_get(1, &info)) {
        snprintf(probe->failure, sizeof probe->failure, "there is no CPU backend");
        return;
    }
    char variants[sizeof info.variants], *rest = NULL;
    memcpy(variants, info.variants, sizeof variants);
    for (char *name = strtok_r(variants, " ", &rest); name && probe->count < DOCTOR_DEVICES;
         name = strtok_r(NULL, " ", &rest)) {
        struct probe_device *device = &probe->devices[probe->count++];
        device->info = info;
        snprintf(device->variant, sizeof device->variant, "%s", name);
        if (!patient->quick) compute(probe, device, name);
    }
}

/* ---- the automatic choice ---- */

#if defined(HAVE_OPENCL) && defined(HAVE_DLFCN_H) && defined(RTLD_DEFAULT)
/* An entry point of the loader. POSIX lets a function pointer be read from the object pointer that dlsym gives.
 */
static void loader_function(const char *name, void *function)
{
    *(void **)function = dlsym(RTLD_DEFAULT, name);
}

/* ocl-icd and newer Khronos loaders tell their name and version, as an extension. */
static void describe_loader(struct probe *probe)
{
    enum { LOADER_VERSION = 2, LOADER_NAME = 3 };
    Dl_info where;
    void *(*extension)(const char *name) = NULL;
    int (*describe)(unsigned, size_t, void *, size_t *) = NULL;
    char name[64] = "", version[32] = "";
    void *any = dlsym(RTLD_DEFAULT, "clGetPlatformIDs");
    if (any && dladdr(any, &where) && where.dli_fname)
        snprintf(probe->loader, sizeof probe->loader, "%s", where.dli_fname);
    loader_function("clGetExtensionFunctionAddress", &extension);
    if (extension) *(void **)&describe = extension("clGetICDLoaderInfoOCLICD");
    if (!describe) return;
    if (describe(LOADER_NAME, sizeof name - 1, name, NULL)) name[0] = 0;
    if (describe(LOADER_VERSION, sizeof version - 1, version, NULL)) version[0] = 0;
    snprintf(probe->loader_version, sizeof probe->loader_version, "%s%s%s", name, *name ? " " : "", version);
}
#else
static void describe_loader(struct probe *probe)
{
    (void)probe;
}
#endif

void patient_automatic(struct probe *probe, const void *user)
{
    char detail[1024] = "";
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    (void)user;
    snprintf(probe->doing, sizeof probe->doing, "starting the loader");
    describe_loader(probe);
    list_devices(probe);
    snprintf(probe->doing, sizeof probe->doing, "choosing a device");
    listen_to(probe, &desc);
    desc.error = detail;
    desc.error_bytes = sizeof detail;
    clattn_status status = clattn_context_create(&desc, &context);
    probe->chosen.size = sizeof probe->chosen;
    if (!status) status = clattn_context_device(context, &probe->chosen);
    if (status) keep_error(probe->failure, sizeof probe->failure, "no context", status, detail);
    clattn_context_release(context);
}
