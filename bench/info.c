/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "cache_folder.h"
#include "device.h"
#include "options.h"
#include "program.h"
#include "report.h"
#include "table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef HAVE_HWLOC
#include <hwloc.h>
#endif
#ifdef HAVE_OPENMP
#include <omp.h>
#endif

static const struct command_help help = {
    "info [OPTION...]",
    "Shows the devices that clattn can use and in which variants, the machine's caches and threads,\n"
    "what this build contains, and where compiled OpenCL programs are kept.",
    "An index is what --device of the other subcommands takes. CLATTN_PLATFORMS limits the OpenCL\n"
    "platforms, CLATTN_CPU and CLATTN_TIER the variants, CLATTN_CACHE_DIR names the folder of\n"
    "compiled programs.\n"
    "\n"
    "Exit status: 0 done (also without any OpenCL device), 1 failed, 2 wrong usage."};

#define DATA_CACHES 5 /* levels that hwloc knows */

struct machine {
    int64_t cache_bytes[DATA_CACHES]; /* per level, of one cache; 0: unknown */
    int cores, threads;
};

static struct machine read_machine(void)
{
    struct machine machine = {.threads = 1};
#ifdef HAVE_OPENMP
    machine.threads = omp_get_max_threads();
#endif
#ifdef HAVE_HWLOC
    static const hwloc_obj_type_t levels[DATA_CACHES] = {
        HWLOC_OBJ_L1CACHE, HWLOC_OBJ_L2CACHE, HWLOC_OBJ_L3CACHE, HWLOC_OBJ_L4CACHE, HWLOC_OBJ_L5CACHE};
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology) != 0) return machine;
    if (hwloc_topology_load(topology) == 0) {
        machine.cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
        for (int i = 0; i < DATA_CACHES; i++) {
            hwloc_obj_t cache = hwloc_get_obj_by_type(topology, levels[i], 0);
            if (cache) machine.cache_bytes[i] = (int64_t)cache->attr->cache.size;
        }
    }
    hwloc_topology_destroy(topology);
#endif
    return machine;
}

static const struct {
    const char *name;
    bool built_in;
} features[] = {
#ifdef HAVE_OPENCL
    {"opencl", true},
#else
    {"opencl", false},
#endif
#ifdef HAVE_CLBLAST
    {"clblast", true},
#else
    {"clblast", false},
#endif
#ifdef HAVE_OPENMP
    {"openmp", true},
#else
    {"openmp", false},
#endif
#ifdef HAVE_HWLOC
    {"hwloc", true},
#else
    {"hwloc", false},
#endif
#ifdef HAVE_XXHASH
    {"xxhash", true},
#else
    {"xxhash", false},
#endif
#ifdef HAVE_JANSSON
    {"jansson", true},
#else
    {"jansson", false},
#endif
#ifdef HAVE_CPU_AVX2
    {"avx2", true},
#else
    {"avx2", false},
#endif
#ifdef HAVE_CPU_AVX512
    {"avx512", true},
#else
    {"avx512", false},
#endif
#ifdef HAVE_CPU_AVX512VNNI
    {"avx512vnni", true},
#else
    {"avx512vnni", false},
#endif
#ifdef HAVE_CPU_NEON
    {"neon", true},
#else
    {"neon", false},
#endif
};
#define FEATURES (sizeof features / sizeof *features)

static int print_json(void)
{
    char directory[CACHE_PATH_BYTES];
    struct machine machine = read_machine();
    clattn_device_info info = {.size = sizeof info};
    report *root = report_object();
    report_text(root, "version", clattn_version());
    report *devices = report_list(root, "devices");
    for (int n = 0; clattn_device_get(n, &info) == CLATTN_SUCCESS; n++)
        device_report(report_entry(devices), &info);
    report_integer(root, "threads", machine.threads);
    if (machine.cores > 0) report_integer(root, "cores", machine.cores);
    report *caches = report_list(root, "caches");
    for (int i = 0; i < DATA_CACHES; i++) {
        if (machine.cache_bytes[i] == 0) continue;
        report *cache = report_entry(caches);
        report_integer(cache, "level", i + 1);
        report_integer(cache, "bytes", machine.cache_bytes[i]);
    }
    report *built_in = report_child(root, "built_in");
    for (size_t i = 0; i < FEATURES; i++)
        report_flag(built_in, features[i].name, features[i].built_in);
    report_text(root, "cache_directory", cache_folder_path(directory));
    int status = report_print(root);
    report_release(root);
    return status;
}

static void print_devices(void)
{
    static const char *const heading[] = {"backend", "index",    "device",   "units",
                                          "memory",  "variants", "platform", "driver"};
    struct table table;
    clattn_device_info info = {.size = sizeof info};
    bool opencl = false;
    table_begin(&table, "lrlrrlll");
    for (size_t i = 0; i < sizeof heading / sizeof *heading; i++)
        table_add(&table, "%s", heading[i]);
    for (int n = 0; clattn_device_get(n, &info) == CLATTN_SUCCESS; n++) {
        bool is_opencl = info.backend == CLATTN_BACKEND_OPENCL;
        opencl |= is_opencl;
        table_add(&table, "%s", backend_words[info.backend]);
        if (is_opencl)
            table_add(&table, "%d", info.index);
        else
            table_add(&table, "-");
        table_add(&table, "%s%s", info.name, info.is_gpu ? " (GPU)" : "");
        table_add(&table, "%d", info.compute_units);
        table_add(&table, "%.1f GiB", (double)info.memory_bytes / 1073741824);
        table_add(&table, "%s", info.variants);
        table_add(&table, "%s", *info.platform ? info.platform : "-");
        table_add(&table, "%s", *info.driver ? info.driver : "-");
    }
    table_end(&table);
    if (!opencl) puts("no OpenCL device was found; a driver such as PoCL or the GPU vendor's would add one");
}

static void print_text(void)
{
    char directory[CACHE_PATH_BYTES];
    struct machine machine = read_machine();
    printf("clattn %s\n\n", clattn_version());
    print_devices();
    printf("\nthreads    %d", machine.threads);
    if (machine.cores > 0) printf(" on %d cores", machine.cores);
    printf("\ncaches    ");
    bool known = false;
    for (int i = 0; i < DATA_CACHES; i++)
        if (machine.cache_bytes[i] > 0) {
            printf(" L%d %" PRId64 " KiB", i + 1, machine.cache_bytes[i] / 1024);
            known = true;
        }
    puts(known ? "" : " unknown");
    printf("built in  ");
    for (size_t i = 0; i < FEATURES; i++)
        if (features[i].built_in) printf(" %s", features[i].name);
    printf("\nwithout   ");
    for (size_t i = 0; i < FEATURES; i++)
        if (!features[i].built_in) printf(" %s", features[i].name);
    const char *found = cache_folder_path(directory);
    printf("\nprograms   %s\n", found ? found : "are not kept: there is no HOME");
}

int info_main(int argc, char **argv)
{
    int status;
    bool json = false;
    const struct option_spec specs[] = {
        {"json", OPTION_FLAG, &json, NULL, "print the same as JSON", 0, 0, NULL}, {0}};
    if (!options_parse(specs, &help, argc, argv, &status)) return status;
    if (json) return report_available() ? print_json() : STATUS_USAGE;
    print_text();
    return STATUS_OK;
}
