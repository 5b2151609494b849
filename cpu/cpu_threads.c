/* SPDX-License-Identifier: MIT */
/* How many threads a context uses when its caller does not say: one a core, of those cores that the process may
 * run on and has time for. Calls that the caller's own threads make at the same time, in one context or in
 * several, share them: each has its part of the cores, as many as are at work when it begins. */

#include "config.h"

#include "cpu_threads.h"

#include "cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef HAVE_HWLOC
#include <hwloc.h>
#endif

#ifdef HAVE_HWLOC
/* What the level-2 cache gives to each core that shares it; 0: not known. */
static int64_t cache_share(hwloc_topology_t topology, hwloc_obj_t core)
{
    hwloc_obj_t cache = hwloc_get_ancestor_obj_by_type(topology, HWLOC_OBJ_L2CACHE, core);
    int cores = cache ? hwloc_get_nbobjs_inside_cpuset_by_type(topology, cache->cpuset, HWLOC_OBJ_CORE) : 0;
    return cores > 0 ? (int64_t)cache->attr->cache.size / cores : 0;
}
#endif

struct cpu_machine cpu_machine_read(void)
{
    struct cpu_machine machine = {0, 0};
#ifdef HAVE_HWLOC
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology) != 0) return machine;
    hwloc_bitmap_t bound = hwloc_bitmap_alloc();
    if (bound && hwloc_topology_load(topology) == 0 &&
        hwloc_get_cpubind(topology, bound, HWLOC_CPUBIND_PROCESS) == 0)
        for (hwloc_obj_t core = NULL;
             (core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core)) != NULL;) {
            if (!hwloc_bitmap_intersects(core->cpuset, bound)) continue;
            int64_t cache = cache_share(topology, core);
            machine.cores++;
            if (cache && (!machine.cache_bytes || cache < machine.cache_bytes)) machine.cache_bytes = cache;
        }
    hwloc_bitmap_free(bound);
    hwloc_topology_destroy(topology);
#endif
    return machine;
}

int cpu_quota_of(const char *text)
{
    char *end;
    long quota = strtol(text, &end, 10), period = end == text ? 0 : strtol(end, NULL, 10);
    if (quota <= 0 || period <= 0) return 0; /* "max 100000", or -1 of version 1 */
    return (int)MIN((quota + period - 1) / period, 1 << 20);
}

/* The quota in a control group's folder, of version 2; 0: none. */
static int folder_quota(const char *folder)
{
    char name[1024], text[64] = "";
    snprintf(name, sizeof name, "/sys/fs/cgroup%s/cpu.max", folder);
    FILE *file = fopen(name, "r");
    if (!file) return 0;
    int quota = fgets(text, sizeof text, file) ? cpu_quota_of(text) : 0;
    fclose(file);
    return quota;
}

/* The least quota of the process's control group and those above it; 0: none. */
static int group_quota(void)
{
    char line[768], *folder = NULL;
    int least = 0;
    FILE *file = fopen("/proc/self/cgroup", "r");
    if (!file) return 0;
    while (!folder && fgets(line, sizeof line, file))
        if (strncmp(line, "0::", 3) == 0) folder = line + 3;
    fclose(file);
    if (!folder) return 0;
    folder[strcspn(folder, "\n")] = 0;
    for (;;) {
        int quota = folder_quota(folder);
        if (quota && (!least || quota < least)) least = quota;
        char *last = strrchr(folder, '/');
        if (!last || folder[0] == 0) return least;
        *last = 0;
    }
}

int cpu_threads_default(const struct cpu_machine *machine)
{
#ifdef _OPENMP
    /* A number that the caller gave to OpenMP is no default any more: 0. */
    if (getenv("OMP_NUM_THREADS") || omp_get_max_threads() != omp_get_num_procs()) return 0;
    int quota = group_quota(), threads = omp_get_max_threads();
    if (machine->cores) threads = MIN(threads, machine->cores);
    if (quota) threads = MIN(threads, quota);
    return threads;
#else
    (void)machine;
    (void)group_quota;
    return 1;
#endif
}

/* Calls of all contexts of the process that are at work. */
static int calls;

void cpu_call_begin(void)
{
    __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
}

void cpu_call_end(void)
{
    __atomic_sub_fetch(&calls, 1, __ATOMIC_RELAXED);
}

int cpu_threads(const clattn_context *context)
{
#ifdef _OPENMP
    const struct cpu_state *state = context->state;
    if (context->threads) return context->threads;
    if (omp_in_parallel()) return 1; /* the caller's threads are at work already */
    int most = omp_get_max_threads(), others = __atomic_load_n(&calls, __ATOMIC_RELAXED);
    return state->threads ? MAX(MIN(state->threads, most) / MAX(others, 1), 1) : most;
#else
    (void)context;
    return 1;
#endif
}
