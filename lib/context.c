/* SPDX-License-Identifier: MIT */
/* Contexts: choice of the backend, log, last error, statistics. */

#include "config.h"

#include "internal.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- log and errors ---- */

static const char *const level_names[] = {"none", "error", "warning", "info", "debug"};

/* Destination of the log when the caller gave none but asked for it by CLATTN_LOG. */
static void log_to_stderr(void *user, clattn_log_level level, const char *message)
{
    (void)user;
    fprintf(stderr, "clattn %s: %s\n", level_names[level], message);
}

static void log_setup(clattn_context *context, const clattn_context_desc *desc)
{
    const char *wanted = getenv("CLATTN_LOG");
    context->log = desc->log;
    context->log_user = desc->log_user;
    context->log_level = desc->log_level;
    if (!wanted) return;
    for (int level = CLATTN_LOG_NONE; level <= CLATTN_LOG_DEBUG; level++)
        if (strcmp(wanted, level_names[level]) == 0) {
            context->log_level = (clattn_log_level)level;
            if (!context->log) context->log = log_to_stderr;
        }
}

void log_line(clattn_context *context, clattn_log_level level, const char *format, ...)
{
    char text[2048];
    va_list list;
    if (!context->log || level > context->log_level) return;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    pthread_mutex_lock(&context->lock);
    context->log(context->log_user, level, text);
    pthread_mutex_unlock(&context->lock);
}

clattn_status fail(clattn_context *context, clattn_status status, const char *format, ...)
{
    char text[sizeof context->error];
    va_list list;
    if (!context) return status; /* pure arithmetic of a caller without a context */
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    pthread_mutex_lock(&context->lock);
    memcpy(context->error, text, sizeof text);
    pthread_mutex_unlock(&context->lock);
    log_line(context, CLATTN_LOG_ERROR, "%s: %s", clattn_strerror(status), text);
    return status;
}

size_t clattn_context_error(clattn_context *context, char *text, size_t bytes)
{
    if (!context) return 0;
    pthread_mutex_lock(&context->lock);
    size_t length = strlen(context->error);
    if (text && bytes > 0) {
        size_t copied = MIN(length, bytes - 1);
        memcpy(text, context->error, copied);
        text[copied] = 0;
    }
    pthread_mutex_unlock(&context->lock);
    return length;
}

/* ---- statistics ---- */

void stats_add_build(clattn_context *context, double seconds, bool from_cache)
{
    pthread_mutex_lock(&context->lock);
    context->stats.build_seconds += seconds;
    context->stats.programs_built += !from_cache;
    context->stats.programs_loaded += from_cache;
    pthread_mutex_unlock(&context->lock);
}

void stats_add_transfer(clattn_context *context, double seconds)
{
    pthread_mutex_lock(&context->lock);
    context->stats.transfer_seconds += seconds;
    pthread_mutex_unlock(&context->lock);
}

void stats_add_launch(clattn_context *context)
{
    pthread_mutex_lock(&context->lock);
    context->stats.kernels_enqueued++;
    pthread_mutex_unlock(&context->lock);
}

void stats_add_tuned(clattn_context *context, clattn_tuning source)
{
    pthread_mutex_lock(&context->lock);
    context->stats.tiles_by_tuning[source]++;
    pthread_mutex_unlock(&context->lock);
}

clattn_status clattn_context_stats(clattn_context *context, clattn_stats *stats)
{
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!stats || stats->size < sizeof(size_t))
        return fail(context, CLATTN_INVALID_ARGUMENT, "stats is NULL or its size is not set");
    size_t size = MIN(stats->size, sizeof *stats);
    pthread_mutex_lock(&context->lock);
    memcpy(stats, &context->stats, size);
    pthread_mutex_unlock(&context->lock);
    stats->size = size;
    return CLATTN_SUCCESS;
}

/* ---- creation ---- */

static clattn_status open_with(clattn_context *context, const clattn_context_desc *desc, clattn_backend id)
{
    const struct backend *const backends[] = {
        &backend_reference,
        &backend_cpu,
#ifdef HAVE_OPENCL
        &backend_opencl,
#endif
    };
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (backends[i]->id == id) {
            context->backend = backends[i];
            return context->backend->open(context, desc);
        }
    return fail(context, CLATTN_NO_DEVICE, "backend %d is not built in", id);
}

/* Automatic choice: the device that is asked for, else the first GPU that opens (its self-test is part of that), else
 * the CPU. */
static clattn_status open_auto(clattn_context *context, const clattn_context_desc *desc)
{
    const char *wanted = desc->device ? desc->device : getenv("CLATTN_DEVICE");
    clattn_device_info info = {.size = sizeof info};
    if (desc->cl_context || (wanted && *wanted)) {
        clattn_context_desc choice = *desc;
        choice.backend = CLATTN_BACKEND_OPENCL; /* who names a device gets it without a self-test */
        return open_with(context, &choice, CLATTN_BACKEND_OPENCL);
    }
    for (int i = 0; clattn_device_get(i, &info) == CLATTN_SUCCESS; i++) {
        char number[16];
        clattn_context_desc choice = *desc;
        if (info.backend != CLATTN_BACKEND_OPENCL || !info.is_gpu) continue;
        if (desc->variant && !strstr(info.variants, desc->variant)) continue;
        snprintf(number, sizeof number, "%d", info.index);
        choice.device = number;
        if (open_with(context, &choice, CLATTN_BACKEND_OPENCL) == CLATTN_SUCCESS) return CLATTN_SUCCESS;
        log_line(context, CLATTN_LOG_WARNING, "'%s' is not used: %s", info.name, context->error);
        context->error[0] = 0;
    }
    return open_with(context, desc, CLATTN_BACKEND_CPU);
}

/* Reports an error of clattn_context_create, which has no context that could keep the detail. */
static clattn_status create_failed(const clattn_context_desc *desc, clattn_context *context,
                                   clattn_status status)
{
    if (desc->error && desc->error_bytes > 0) {
        if (context)
            clattn_context_error(context, desc->error, desc->error_bytes);
        else
            snprintf(desc->error, desc->error_bytes, "%s", clattn_strerror(status));
    }
    if (context) pthread_mutex_destroy(&context->lock);
    free(context);
    return status;
}

/* Where the detail goes even if the desc cannot be used, or there is no memory to look at it: it may be one of a
 * later library. A size beyond any is that of a desc without initialiser, whose pointers mean nothing. */
static void error_place(const clattn_context_desc *given, clattn_context_desc *desc)
{
    enum { SIZE_MOST = 4096 };
    size_t least = offsetof(clattn_context_desc, error_bytes) + sizeof given->error_bytes;
    if (!given || given->size < least || given->size > SIZE_MOST) return;
    desc->error = given->error;
    desc->error_bytes = given->error_bytes;
}

clattn_status clattn_context_create(const clattn_context_desc *given, clattn_context **result)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    if (!result) return CLATTN_INVALID_ARGUMENT;
    error_place(given, &desc);
    clattn_context *context = calloc(1, sizeof *context);
    if (!context) return create_failed(&desc, NULL, CLATTN_OUT_OF_MEMORY);
    pthread_mutex_init(&context->lock, NULL);
    clattn_status status = given ? desc_copy(context, "desc", &desc, sizeof desc, given) : CLATTN_SUCCESS;
    if (status) return create_failed(&desc, context, status);
    log_setup(context, &desc);
    context->stats.size = sizeof context->stats;
    context->threads = desc.threads;
    if ((unsigned)desc.backend > CLATTN_BACKEND_OPENCL)
        status = fail(context, CLATTN_INVALID_ARGUMENT, "desc.backend is %d; 0 to %d are known", desc.backend,
                      CLATTN_BACKEND_OPENCL);
    else if (desc.threads < 0)
        status =
            fail(context, CLATTN_INVALID_ARGUMENT, "desc.threads is %d; 0 or more is needed", desc.threads);
    else if ((desc.cl_context != NULL) != (desc.cl_device != NULL) || (desc.cl_queue && !desc.cl_context))
        status = fail(context, CLATTN_INVALID_ARGUMENT,
                      "desc.cl_context, cl_device and cl_queue: a context and its "
                      "device go together, a queue goes with both");
    else if (desc.backend == CLATTN_BACKEND_AUTO)
        status = open_auto(context, &desc);
    else
        status = open_with(context, &desc, desc.backend);
    if (status) return create_failed(&desc, context, status);
    *result = context;
    return CLATTN_SUCCESS;
}

void clattn_context_release(clattn_context *context)
{
    if (!context) return;
    context->backend->close(context);
    pthread_mutex_destroy(&context->lock);
    free(context);
}

/* ---- devices ---- */

/* Fills at most info->size bytes, so that callers built against an older header stay safe. */
static void info_copy(clattn_device_info *info, const clattn_device_info *full)
{
    size_t size = MIN(info->size, sizeof *full);
    memcpy(info, full, size);
    info->size = size;
}

clattn_status clattn_device_get(int number, clattn_device_info *info)
{
    clattn_device_info full = {.size = sizeof full};
    if (!info || info->size < sizeof(size_t) || number < 0) return CLATTN_INVALID_ARGUMENT;
    bool found = false;
    if (number == 0)
        found = cpu_device(CLATTN_BACKEND_REFERENCE, &full);
    else if (number == 1)
        found = cpu_device(CLATTN_BACKEND_CPU, &full);
#ifdef HAVE_OPENCL
    else
        found = opencl_device(number - 2, &full);
#endif
    if (!found) return CLATTN_NO_DEVICE;
    info_copy(info, &full);
    return CLATTN_SUCCESS;
}

clattn_status clattn_context_device(clattn_context *context, clattn_device_info *info)
{
    clattn_device_info full = {.size = sizeof full};
    if (!context) return CLATTN_INVALID_ARGUMENT;
    if (!info || info->size < sizeof(size_t))
        return fail(context, CLATTN_INVALID_ARGUMENT, "info is NULL or its size is not set");
    clattn_status status = context->backend->describe(context, &full);
    if (!status) info_copy(info, &full);
    return status;
}
