/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "device.h"

#include "program.h"

#include <string.h>

const char *const backend_words[] = {"auto", "reference", "cpu", "opencl", NULL};

int device_choice_check(struct device_choice *choice)
{
    if (!choice->device) return STATUS_OK;
    if (!*choice->device) return program_usage("--device: an empty name");
    if (choice->backend == CLATTN_BACKEND_AUTO) choice->backend = CLATTN_BACKEND_OPENCL;
    if (choice->backend != CLATTN_BACKEND_OPENCL)
        return program_usage("--device names an OpenCL device; it does not go with --backend %s",
                             backend_words[choice->backend]);
    return STATUS_OK;
}

int device_open(const struct device_choice *choice, clattn_context **context)
{
    char detail[1024] = "";
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = (clattn_backend)choice->backend;
    desc.device = choice->device;
    desc.variant = choice->variant;
    desc.error = detail;
    desc.error_bytes = sizeof detail;
    clattn_status status = clattn_context_create(&desc, context);
    if (status == CLATTN_SUCCESS) return STATUS_OK;
    /* A build log has many lines; the first says what is wrong. */
    detail[strcspn(detail, "\n")] = 0;
    if (choice->device)
        program_error("device '%s': %s%s%s", choice->device, clattn_strerror(status), *detail ? ": " : "",
                      detail);
    else
        program_error("backend %s: %s%s%s", backend_words[choice->backend], clattn_strerror(status),
                      *detail ? ": " : "", detail);
    return status == CLATTN_NO_DEVICE ? STATUS_NO_DEVICE : STATUS_FAILED;
}

void device_error(clattn_context *context, clattn_status status, const char *what)
{
    char detail[1024] = "";
    clattn_context_error(context, detail, sizeof detail);
    detail[strcspn(detail, "\n")] = 0;
    program_error("%s: %s%s%s", what, clattn_strerror(status), *detail ? ": " : "", detail);
}

void device_report(report *object, const clattn_device_info *info)
{
    report_text(object, "backend", backend_words[info->backend]);
    report_integer(object, "index", info->index);
    report_text(object, "name", info->name);
    if (info->backend == CLATTN_BACKEND_OPENCL) {
        report_text(object, "platform", info->platform);
        report_text(object, "driver", info->driver);
        report_flag(object, "gpu", info->is_gpu);
        report_integer(object, "max_alloc_bytes", (int64_t)info->max_alloc_bytes);
        report_integer(object, "local_bytes", (int64_t)info->local_bytes);
        report_text(object, "quirks", info->quirks);
    }
    report_text(object, "variants", info->variants);
    if (*info->variant) report_text(object, "variant", info->variant);
    report_integer(object, "memory_bytes", (int64_t)info->memory_bytes);
    report_integer(object, "compute_units", info->compute_units);
}
