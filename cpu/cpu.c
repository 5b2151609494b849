/* SPDX-License-Identifier: MIT */
/* The CPU backends: choice of the variant, memory, and the two backend tables. */

#include "config.h"

#include "cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef HAVE_CPU_AVX2
#include <cpuid.h>
#endif
#include <unistd.h>

/* ---- variants ---- */

static bool has_always(void)
{
    return true;
}

#ifdef HAVE_CPU_AVX2
/* Not every compiler's __builtin_cpu_supports knows F16C: bit 29 of ECX, leaf 1. */
static bool has_f16c(void)
{
    unsigned eax, ebx, ecx = 0, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && ecx >> 29 & 1;
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
#endif

#ifdef HAVE_CPU_AVX512
static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

#ifdef HAVE_CPU_AVX512VNNI
static bool has_avx512vnni(void)
{
    return has_avx512() && __builtin_cpu_supports("avx512vnni");
}
#endif

static const struct {
    const char *name;
    bool (*supported)(void);
    void (*install)(struct cpu_kernels *kernels);
} variants[] = {
    {"ref", has_always, cpu_install_ref},
    {"c", has_always, cpu_install_c},
#ifdef HAVE_CPU_AVX2
    {"avx2", has_avx2, cpu_install_avx2},
#endif
#ifdef HAVE_CPU_AVX512
    {"avx512", has_avx512, cpu_install_avx512},
#endif
#ifdef HAVE_CPU_AVX512VNNI
    {"avx512vnni", has_avx512vnni, cpu_install_avx512vnni},
#endif
#ifdef HAVE_CPU_NEON
    {"neon", has_always, cpu_install_neon},
#endif
};

enum { VARIANTS = sizeof variants / sizeof *variants };

static clattn_status install(clattn_context *context, struct cpu_kernels *kernels, const char *last)
{
    bool found = last == NULL;
    for (int i = 0; i < VARIANTS; i++) {
        if (!variants[i].supported()) continue;
        variants[i].install(kernels);
        kernels->variant = variants[i].name;
        if (last && strcmp(last, variants[i].name) == 0) {
            found = true;
            break;
        }
    }
    if (!found)
        return fail(context, CLATTN_NO_DEVICE,
                    "CPU variant '%s' is not known, not built in, or not supported here", last);
    return CLATTN_SUCCESS;
}

/* ---- context ---- */

static clattn_status cpu_open_variant(clattn_context *context, clattn_backend id, const char *variant)
{
    struct cpu_state *state = calloc(1, sizeof *state);
    if (!state) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a context");
    state->id = id;
    clattn_status status = install(context, &state->kernels, variant);
    if (status) {
        free(state);
        return status;
    }
    state->machine = cpu_machine_read();
    state->threads = context->threads ? 0 : cpu_threads_default(&state->machine);
    state->placement = cpu_placement_wanted(context);
    context->state = state;
    log_line(context, CLATTN_LOG_INFO, "CPU variant %s, %d threads", state->kernels.variant,
             cpu_threads(context));
    return CLATTN_SUCCESS;
}

static clattn_status cpu_open(clattn_context *context, const clattn_context_desc *desc)
{
    return cpu_open_variant(context, CLATTN_BACKEND_CPU, desc->variant ? desc->variant : getenv("CLATTN_CPU"));
}

static clattn_status reference_open(clattn_context *context, const clattn_context_desc *desc)
{
    if (desc->variant && strcmp(desc->variant, "ref"))
        return fail(context, CLATTN_NO_DEVICE, "the reference backend has no variant '%s'", desc->variant);
    return cpu_open_variant(context, CLATTN_BACKEND_REFERENCE, "ref");
}

static void cpu_close(clattn_context *context)
{
    struct cpu_state *state = context->state;
    if (state) {
        cpu_scratch_release(state);
        cpu_machine_free(&state->machine);
    }
    free(state);
    context->state = NULL;
}

/* ---- device ---- */

static void processor_name(char *name, size_t bytes)
{
    char line[256];
    snprintf(name, bytes, "CPU");
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (!file) return;
    while (fgets(line, sizeof line, file))
        if (strncmp(line, "model name", 10) == 0 && strchr(line, ':')) {
            snprintf(name, bytes, "%s", strchr(line, ':') + 2);
            name[strcspn(name, "\n")] = 0;
            break;
        }
    fclose(file);
}

bool cpu_device(clattn_backend backend, clattn_device_info *info)
{
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    info->backend = backend;
    processor_name(info->name, sizeof info->name);
    info->memory_bytes = pages > 0 && page_bytes > 0 ? (uint64_t)pages * (uint64_t)page_bytes : 0;
    info->max_alloc_bytes = info->memory_bytes;
    info->compute_units = (int)sysconf(_SC_NPROCESSORS_ONLN);
    for (int i = 0; i < VARIANTS; i++) {
        if (!variants[i].supported() || (backend == CLATTN_BACKEND_REFERENCE && i > 0)) continue;
        size_t used = strlen(info->variants);
        snprintf(info->variants + used, sizeof info->variants - used, "%s%s", used ? " " : "",
                 variants[i].name);
    }
    return true;
}

static clattn_status cpu_describe(clattn_context *context, clattn_device_info *info)
{
    const struct cpu_state *state = context->state;
    cpu_device(state->id, info);
    snprintf(info->variant, sizeof info->variant, "%s", state->kernels.variant);
    return CLATTN_SUCCESS;
}

/* ---- memory ---- */

static clattn_status cpu_storage_create(clattn_context *context, size_t bytes, struct storage *storage)
{
    const struct cpu_state *state = context->state;
    *storage = (struct storage){.bytes = bytes};
    if (bytes < SIZE_MAX / 2) storage->host = cpu_memory_new(&state->machine, bytes);
    if (!storage->host) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %zu bytes", bytes);
    return CLATTN_SUCCESS;
}

static void cpu_storage_release(clattn_context *context, struct storage *storage)
{
    const struct cpu_state *state = context->state;
    cpu_memory_free(&state->machine, storage->host, storage->bytes);
    *storage = (struct storage){0};
}

static clattn_status cpu_storage_write(clattn_context *context, struct storage *storage, const void *data,
                                       size_t bytes)
{
    (void)context;
    memcpy(storage->host, data, bytes);
    return CLATTN_SUCCESS;
}

static clattn_status cpu_storage_read(clattn_context *context, const struct storage *storage, size_t offset,
                                      void *data, size_t bytes)
{
    (void)context;
    memcpy(data, (const char *)storage->host + offset, bytes);
    return CLATTN_SUCCESS;
}

static clattn_status cpu_storage_fill(clattn_context *context, struct storage *storage, int32_t value,
                                      size_t words, const clattn_sync *sync)
{
    int32_t *to = storage->host;
    (void)context;
    (void)sync;
    for (size_t n = 0; n < words; n++)
        to[n] = value;
    return CLATTN_SUCCESS;
}

static clattn_status cpu_tensor_copy(clattn_context *context, const clattn_tensor *from,
                                     const clattn_tensor *to)
{
    (void)context;
    size_t bytes = (size_t)from->dim * dtype_bytes(from->dtype);
    for (int64_t b = 0; b < from->batch; b++)
        for (int64_t i = 0; i < from->len; i++)
            for (int64_t h = 0; h < from->heads; h++)
                memcpy(tensor_row(to, b, i, h), tensor_row(from, b, i, h), bytes);
    return CLATTN_SUCCESS;
}

static clattn_status cpu_finish(clattn_context *context, const clattn_sync *sync)
{
    (void)context;
    (void)sync;
    return CLATTN_SUCCESS;
}

/* ---- calls that compute: counted, so that those at work at the same time share the cores ---- */

#define COUNTED(NAME, JOB)                                                                                     \
    static clattn_status NAME##_counted(clattn_context *context, const struct JOB *job)                        \
    {                                                                                                          \
        cpu_call_begin();                                                                                      \
        clattn_status status = NAME(context, job);                                                             \
        cpu_call_end();                                                                                        \
        return status;                                                                                         \
    }

COUNTED(cpu_pyramid_build, pyramid_job)
COUNTED(cpu_select, select_job)
COUNTED(cpu_forward, forward_job)
COUNTED(cpu_gather, gather_job)
COUNTED(cpu_merge, merge_job)
COUNTED(cpu_quantize, quantize_job)
COUNTED(cpu_backward, backward_job)
COUNTED(cpu_cache_append, cache_append_job)
COUNTED(cpu_decode, decode_job)

#define CPU_BACKEND(ID, IS_REFERENCE, OPEN)                                                                    \
    {                                                                                                          \
        .id = ID, .host_memory = true, .knows_neighborhoods = IS_REFERENCE, .open = OPEN, .close = cpu_close,  \
        .describe = cpu_describe, .storage_create = cpu_storage_create,                                        \
        .storage_release = cpu_storage_release, .storage_write = cpu_storage_write,                            \
        .storage_read = cpu_storage_read, .storage_fill = cpu_storage_fill, .tensor_upload = cpu_tensor_copy,  \
        .tensor_download = cpu_tensor_copy, .finish = cpu_finish, .pyramid_build = cpu_pyramid_build_counted,  \
        .select = cpu_select_counted, .forward = cpu_forward_counted, .gather = cpu_gather_counted,            \
        .merge = cpu_merge_counted, .quantize = cpu_quantize_counted, .backward = cpu_backward_counted,        \
        .cache_append = cpu_cache_append_counted, .cache_copy = cpu_cache_copy, .cache_cut = cpu_cache_cut,    \
        .decode = cpu_decode_counted,                                                                          \
    }

const struct backend backend_reference = CPU_BACKEND(CLATTN_BACKEND_REFERENCE, true, reference_open);
const struct backend backend_cpu = CPU_BACKEND(CLATTN_BACKEND_CPU, false, cpu_open);
