/* SPDX-License-Identifier: MIT */
/* OpenCL programs: sources, builds, the table of programs of a context, kernels. */

#include "config.h"

#include "kernel_sources.h"
#include "opencl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One program of the context; the whole table is under opencl.lock. */
struct opencl_program {
    struct opencl_program *next;
    cl_program program; /* NULL: it does not build on this device */
    cl_int refused; /* why its work-groups do not run on this device although it builds; CL_SUCCESS: they do */
    char key[];         /* file, a space, options */
};

/* ---- sources ---- */

/* The content of a file of CLATTN_KERNEL_DIR, with a zero behind it; NULL when it is not there. */
static char *source_of_directory(const char *name)
{
    char path[4096], *text = NULL;
    const char *directory = getenv("CLATTN_KERNEL_DIR");
    if (!directory || snprintf(path, sizeof path, "%s/%s", directory, name) >= (int)sizeof path) return NULL;
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    long bytes = fseek(file, 0, SEEK_END) ? -1 : ftell(file);
    if (bytes >= 0 && !fseek(file, 0, SEEK_SET)) text = calloc((size_t)bytes + 1, 1);
    if (text && fread(text, 1, (size_t)bytes, file) != (size_t)bytes) {
        free(text);
        text = NULL;
    }
    fclose(file);
    return text;
}

static bool text_append(char **text, const char *piece, size_t bytes)
{
    size_t used = *text ? strlen(*text) : 0;
    char *longer = realloc(*text, used + bytes + 1);
    if (!longer) return false;
    memcpy(longer + used, piece, bytes);
    longer[used + bytes] = 0;
    *text = longer;
    return true;
}

/* Lets compiler messages name the file. */
static bool line_append(char **text, int line, const char *name)
{
    char directive[128];
    snprintf(directive, sizeof directive, "#line %d \"%.80s\"\n", line, name);
    return text_append(text, directive, strlen(directive));
}

/* Appends a source. A line #include "NAME" becomes that source. false: there is no such source. */
static bool source_append(char **text, const char *name)
{
    char *own = source_of_directory(name), other[64];
    const char *rest = own;
    for (unsigned i = 0; !rest && i < kernel_source_count; i++)
        if (strcmp(kernel_sources[i].name, name) == 0) rest = kernel_sources[i].text;
    bool found = rest && line_append(text, 1, name);
    for (int line = 1; found && *rest; line++) {
        size_t bytes = strcspn(rest, "\n");
        bytes += rest[bytes] == '\n';
        if (sscanf(rest, "#include \"%63[^\"\n]\"", other) == 1)
            found = source_append(text, other) && line_append(text, line + 1, name);
        else
            found = text_append(text, rest, bytes);
        rest += bytes;
    }
    free(own);
    return found && text_append(text, "\n", 1);
}

/* common.cl and the file, or the files of a list "a.cl+b.cl" as they stand there. */
static clattn_status source_read(clattn_context *context, const char *files, char **text)
{
    char name[64];
    bool found = true;
    *text = NULL;
    if (!strchr(files, '+')) found = source_append(text, "common.cl");
    for (const char *at = files; found && *at; at += *at == '+') {
        size_t bytes = strcspn(at, "+");
        snprintf(name, sizeof name, "%.*s", (int)MIN(bytes, sizeof name), at);
        found = source_append(text, name);
        at += bytes;
    }
    if (found) return CLATTN_SUCCESS;
    free(*text);
    *text = NULL;
    return fail(context, CLATTN_INTERNAL, "a kernel source is missing: common.cl or one of %s", files);
}

/* ---- builds ---- */

/* A failure that callers answer with a smaller tile: the detail is kept, but nothing is logged as an error. */
__attribute__((format(printf, 3, 4))) static clattn_status
refuse(clattn_context *context, clattn_log_level level, const char *format, ...)
{
    char text[sizeof context->error];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&context->lock);
    memcpy(context->error, text, sizeof text);
    pthread_mutex_unlock(&context->lock);
    log_line(context, level, "%.1000s", text);
    return CLATTN_DEVICE_LIMIT;
}

static clattn_status limit_exceeded(clattn_context *context, const char *kernel, const char *what,
                                    unsigned long long need, unsigned long long have)
{
    return refuse(context, CLATTN_LOG_DEBUG, "kernel %s needs %s %llu; '%.100s' has %llu", kernel, what, need,
                  opencl_of(context)->device.name, have);
}

static char *build_log(const struct opencl *state, cl_program program)
{
    size_t bytes = 0;
    if (clGetProgramBuildInfo(program, state->device.id, CL_PROGRAM_BUILD_LOG, 0, NULL, &bytes)) return NULL;
    char *text = calloc(bytes + 1, 1);
    if (text && clGetProgramBuildInfo(program, state->device.id, CL_PROGRAM_BUILD_LOG, bytes, text, NULL))
        text[0] = 0;
    return text;
}

/* A log line a line, since a compiler's message may be longer than any. */
static void log_text(clattn_context *context, clattn_log_level level, const char *text)
{
    for (int lines = 0; *text && lines < 200; lines++) {
        int bytes = (int)strcspn(text, "\n");
        if (bytes > 0) log_line(context, level, "  %.*s", MIN(bytes, 1000), text);
        text += bytes + (text[bytes] == '\n');
    }
}

/* Is it for want of registers or local memory that a program does not build? Drivers that give a kernel both
 * while they build it say so in their own words: NVIDIA's ptxas, LLVM for AMD, Intel's compiler, Mesa. */
static bool is_too_large(cl_int code, const char *message)
{
    static const char *const words[] = {"too much shared data", "ran out of registers", "out of resources",
                                        "local memory", "register allocation"};
    if (code == CL_OUT_OF_RESOURCES) return true;
    for (size_t i = 0; message && i < sizeof words / sizeof *words; i++)
        if (opencl_text_contains(message, words[i], strlen(words[i]))) return true;
    return false;
}

static clattn_status build_from_source(clattn_context *context, const char *key, const char *options,
                                       const char *text, cl_program *program)
{
    struct opencl *state = opencl_of(context);
    cl_int code;
    *program = clCreateProgramWithSource(state->context, 1, &text, NULL, &code);
    if (code) return opencl_fail(context, code, "clCreateProgramWithSource");
    code = clBuildProgram(*program, 1, &state->device.id, options, NULL, NULL);
    if (!code) return CLATTN_SUCCESS;
    char *message = build_log(state, *program);
    clattn_status status =
        is_too_large(code, message)
            ? refuse(context, CLATTN_LOG_INFO, "%.400s is too large for '%.100s' (%d): %.1200s", key,
                     state->device.name, code, message ? message : "")
            : fail(context, CLATTN_INTERNAL, "%s does not build on '%s' (%d): %.1600s", key, state->device.name,
                   code, message ? message : "");
    if (message) log_text(context, CLATTN_LOG_DEBUG, message);
    free(message);
    clReleaseProgram(*program);
    *program = NULL;
    return status;
}

/* The program's binary for our device, with a zero behind it; NULL when the driver gives none. The caller's context may
 * hold several devices. */
static unsigned char *binary_of(const struct opencl *state, cl_program program, size_t *bytes)
{
    cl_uint count = 0;
    cl_device_id devices[64];
    size_t sizes[64] = {0};
    unsigned char *binaries[64] = {0}, *own = NULL;
    if (clGetProgramInfo(program, CL_PROGRAM_NUM_DEVICES, sizeof count, &count, NULL) || count < 1 ||
        count > 64)
        return NULL;
    if (clGetProgramInfo(program, CL_PROGRAM_DEVICES, count * sizeof *devices, devices, NULL)) return NULL;
    if (clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, count * sizeof *sizes, sizes, NULL)) return NULL;
    bool complete = true;
    for (cl_uint i = 0; i < count; i++)
        if (sizes[i] > 0) complete = (binaries[i] = calloc(sizes[i] + 1, 1)) != NULL && complete;
    if (!complete || clGetProgramInfo(program, CL_PROGRAM_BINARIES, count * sizeof *binaries, binaries, NULL))
        complete = false;
    for (cl_uint i = 0; i < count; i++) {
        if (complete && !own && devices[i] == state->device.id && sizes[i] > 0) {
            own = binaries[i];
            *bytes = sizes[i];
        } else {
            free(binaries[i]);
        }
    }
    return own;
}

/* Replaces a program by the one whose text has the Hopper instructions in it; see opencl_hopper.c. */
static clattn_status build_for_hopper(clattn_context *context, const char *key, cl_program *program)
{
    struct opencl *state = opencl_of(context);
    size_t bytes = 0;
    cl_int code = CL_INVALID_BINARY, binary_status = CL_SUCCESS;
    char *message = NULL, *text = (char *)binary_of(state, *program, &bytes);
    char *changed = text ? opencl_hopper_text(text) : NULL;
    clReleaseProgram(*program);
    *program = NULL;
    if (changed) {
        bytes = strlen(changed);
        *program = clCreateProgramWithBinary(state->context, 1, &state->device.id, &bytes,
                                             (const unsigned char **)(void *)&changed, &binary_status, &code);
        if (!code) code = binary_status;
        if (!code) code = clBuildProgram(*program, 1, &state->device.id, "", NULL, NULL);
        if (code && *program) message = build_log(state, *program);
    }
    free(text);
    free(changed);
    if (!code) return CLATTN_SUCCESS;
    if (*program) clReleaseProgram(*program);
    *program = NULL;
    clattn_status status = fail(context, CLATTN_INTERNAL, "%s does not build for sm_90a on '%s' (%d): %.1600s", key,
                                state->device.name, code, message ? message : "");
    free(message);
    return status;
}

/* The program of a cache entry, if it is there and the driver takes it and it has the kernel. */
static cl_program build_from_cache(struct opencl *state, const char *cache_key, const char *options,
                                   const char *kernel_name)
{
    size_t bytes = 0;
    cl_int code, binary_status = CL_SUCCESS;
    unsigned char *binary = opencl_cache_load(cache_key, &bytes);
    if (!binary) return NULL;
    cl_program program = clCreateProgramWithBinary(state->context, 1, &state->device.id, &bytes,
                                                   (const unsigned char **)&binary, &binary_status, &code);
    free(binary);
    if (!code) code = binary_status;
    if (!code) code = clBuildProgram(program, 1, &state->device.id, options, NULL, NULL);
    if (!code) {
        cl_kernel kernel = clCreateKernel(program, kernel_name, &code);
        if (!code) clReleaseKernel(kernel);
    }
    if (!code) return program;
    if (program) clReleaseProgram(program);
    opencl_cache_drop(cache_key);
    return NULL;
}

/* To ask PoCL for a binary costs a second compilation, of every kernel for work-groups of any size. */
static void build_store(struct opencl *state, const char *cache_key, cl_program program)
{
    size_t bytes = 0;
    if (!opencl_cache_writable()) return;
    unsigned char *binary = binary_of(state, program, &bytes);
    if (binary) opencl_cache_store(cache_key, binary, bytes);
    free(binary);
}

static clattn_status program_build(clattn_context *context, const char *key, const char *file, const char *name,
                                   const char *options, cl_program *program)
{
    struct opencl *state = opencl_of(context);
    double start = seconds_now();
    char all_options[1024], *text;
    const char *version = strstr(options, "-cl-std=") ? "" : "-cl-std=CL1.2 ";
    if (snprintf(all_options, sizeof all_options, "%s%s", version, options) >= (int)sizeof all_options)
        return fail(context, CLATTN_INTERNAL, "the build options of %s are too long", file);
    clattn_status status = source_read(context, file, &text);
    if (status) return status;
    bool is_hopper = opencl_hopper_wanted(text);
    char *cache_key = opencl_cache_key(&state->device, is_hopper ? "program for sm_90a" : "program", all_options, text);
    *program = cache_key ? build_from_cache(state, cache_key, all_options, name) : NULL;
    bool is_cached = *program != NULL;
    if (!is_cached) status = build_from_source(context, key, all_options, text, program);
    if (!is_cached && !status && is_hopper) status = build_for_hopper(context, key, program);
    if (!is_cached && !status && cache_key) build_store(state, cache_key, *program);
    free(cache_key);
    free(text);
    if (status) return status;
    double seconds = seconds_now() - start;
    stats_add_build(context, seconds, is_cached);
    log_line(context, CLATTN_LOG_INFO, "%s %s in %d ms", is_cached ? "loaded" : "built", key,
             (int)(1e3 * seconds));
    return CLATTN_SUCCESS;
}

/* The program from the table, or built into it. The lock is held throughout, so that threads do not build the
 * same program twice. A program whose source does not build is remembered too: the next call fails at once. */
static clattn_status program_get(clattn_context *context, const char *file, const char *name,
                                 const char *options, cl_program *program)
{
    struct opencl *state = opencl_of(context);
    size_t bytes = strlen(file) + strlen(options) + 2;
    clattn_status status = CLATTN_SUCCESS;
    struct opencl_program *entry = calloc(1, sizeof *entry + bytes);
    if (!entry) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a program");
    snprintf(entry->key, bytes, "%s %s", file, options);
    pthread_mutex_lock(&state->lock);
    struct opencl_program *have = state->programs;
    while (have && strcmp(have->key, entry->key))
        have = have->next;
    if (have) {
        free(entry);
        *program = have->program;
        if (have->refused)
            status = refuse(context, CLATTN_LOG_DEBUG, "%.400s does not run on '%.100s': %s (%d)", have->key,
                            state->device.name, clattn_strerror((clattn_status)have->refused), have->refused);
        else if (!have->program)
            status = fail(context, CLATTN_INTERNAL, "%s does not build on '%s'", have->key, state->device.name);
    } else {
        status = program_build(context, entry->key, file, name, options, &entry->program);
        *program = entry->program;
        if (status == CLATTN_DEVICE_LIMIT) entry->refused = CL_OUT_OF_RESOURCES;
        if (status && status != CLATTN_INTERNAL && status != CLATTN_DEVICE_LIMIT) {
            free(entry);
        } else {
            entry->next = state->programs;
            state->programs = entry;
        }
    }
    pthread_mutex_unlock(&state->lock);
    return status;
}

void opencl_programs_release(struct opencl *state)
{
    while (state->programs) {
        struct opencl_program *entry = state->programs;
        state->programs = entry->next;
        if (entry->program) clReleaseProgram(entry->program);
        free(entry);
    }
}

/* ---- kernels ---- */

/* Does the device have what the built kernel needs? Asked after the build, because only then a driver knows. */
static clattn_status kernel_check(clattn_context *context, const char *name, cl_kernel kernel)
{
    const struct opencl_device *device = &opencl_of(context)->device;
    size_t required[3] = {0}, group = 0;
    cl_ulong local_bytes = 0;
    cl_int code = clGetKernelWorkGroupInfo(kernel, device->id, CL_KERNEL_COMPILE_WORK_GROUP_SIZE,
                                           sizeof required, required, NULL);
    code |= clGetKernelWorkGroupInfo(kernel, device->id, CL_KERNEL_WORK_GROUP_SIZE, sizeof group, &group, NULL);
    code |= clGetKernelWorkGroupInfo(kernel, device->id, CL_KERNEL_LOCAL_MEM_SIZE, sizeof local_bytes,
                                     &local_bytes, NULL);
    if (code) return CLATTN_SUCCESS; /* the launch will tell */
    size_t need = required[0] * required[1] * required[2];
    size_t have =
        device->quirks & OPENCL_QUIRK_GROUP_REPORT ? device->group_max : MIN(group, device->group_max);
    if (need > have) return limit_exceeded(context, name, "work-groups of", need, have);
    for (int i = 0; i < 3; i++)
        if (required[i] > device->group_sizes[i])
            return limit_exceeded(context, name, "a work-group side of", required[i], device->group_sizes[i]);
    if (device->quirks & OPENCL_QUIRK_LOCAL_DOUBLED) local_bytes /= 2;
    if (local_bytes > device->local_bytes && !(device->quirks & OPENCL_QUIRK_LOCAL_UNLIMITED))
        return limit_exceeded(context, name, "bytes of local memory:", local_bytes, device->local_bytes);
    return CLATTN_SUCCESS;
}

/* Remembers that a program does not run here; false when that was known already. */
static bool program_refuse(clattn_context *context, cl_program program, const char *name, cl_int code)
{
    struct opencl *state = opencl_of(context);
    pthread_mutex_lock(&state->lock);
    struct opencl_program *entry = state->programs;
    while (entry && entry->program != program)
        entry = entry->next;
    bool is_new = entry && !entry->refused;
    if (is_new) entry->refused = code;
    pthread_mutex_unlock(&state->lock);
    if (is_new)
        refuse(context, CLATTN_LOG_WARNING, "kernel %s builds on '%.100s' and does not run: %s (%d): %.400s",
               name, state->device.name, clattn_strerror((clattn_status)code), code, entry->key);
    return is_new;
}

bool opencl_kernel_refuse(clattn_context *context, cl_kernel kernel, const char *name, cl_int code)
{
    cl_program program = NULL;
    return !clGetKernelInfo(kernel, CL_KERNEL_PROGRAM, sizeof program, &program, NULL) &&
           program_refuse(context, program, name, code);
}

clattn_status opencl_kernel(clattn_context *context, const char *file, const char *name, const char *options,
                            cl_kernel *kernel)
{
    cl_program program = NULL;
    cl_int code;
    char what[128];
    *kernel = NULL;
    clattn_status status = opencl_check_process(context);
    if (!status) status = program_get(context, file, name, options, &program);
    if (status) return status;
    *kernel = clCreateKernel(program, name, &code);
    if (code) {
        *kernel = NULL;
        if (code == CL_OUT_OF_RESOURCES && program_refuse(context, program, name, code))
            return CLATTN_DEVICE_LIMIT;
        snprintf(what, sizeof what, "clCreateKernel(%.80s)", name);
        return opencl_fail(context, code, what);
    }
    status = kernel_check(context, name, *kernel);
    if (status) {
        clReleaseKernel(*kernel);
        *kernel = NULL;
    }
    return status;
}

clattn_status opencl_kernel_try(clattn_context *context, const char *file, const char *name,
                                const char *options)
{
    cl_kernel kernel = NULL;
    clattn_status status = opencl_kernel(context, file, name, options, &kernel);
    if (kernel) clReleaseKernel(kernel);
    return status;
}
