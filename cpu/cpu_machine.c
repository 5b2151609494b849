/* SPDX-License-Identifier: MIT */
/* Cores, caches and NUMA nodes, by hwloc; nothing of it is known without hwloc. */

#include "config.h"

#include "cpu_machine.h"

#include "cpu.h"

#include <stdlib.h>

#ifdef HAVE_HWLOC
#include <hwloc.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { SPREAD_BYTES = 1 << 20 }; /* less lies on too few pages */

struct cpu_map {
    hwloc_topology_t topology;
    hwloc_bitmap_t allowed; /* processors of all cores */
    hwloc_bitmap_t nodes;
    hwloc_bitmap_t *cores; /* of each core */
};

struct cpu_binding {
    hwloc_bitmap_t processors;
};

/* ---- the machine ---- */

/* Where OpenMP has bound its threads to places, the process's binding is that of one thread: the places count.
 */
static bool add_places(hwloc_bitmap_t bound)
{
#ifdef _OPENMP
    if (omp_get_proc_bind() == omp_proc_bind_false) return false;
    for (int place = 0; place < omp_get_num_places(); place++) {
        int count = omp_get_place_num_procs(place), *processors = calloc((size_t)count + 1, sizeof *processors);
        if (processors) omp_get_place_proc_ids(place, processors);
        for (int n = 0; n < count && processors; n++)
            hwloc_bitmap_set(bound, (unsigned)processors[n]);
        free(processors);
    }
#endif
    return !hwloc_bitmap_iszero(bound);
}

/* What the level-2 cache gives to each core that shares it; 0: not known. */
static int64_t cache_share(hwloc_topology_t topology, hwloc_obj_t core)
{
    hwloc_obj_t cache = hwloc_get_ancestor_obj_by_type(topology, HWLOC_OBJ_L2CACHE, core);
    int cores = cache ? hwloc_get_nbobjs_inside_cpuset_by_type(topology, cache->cpuset, HWLOC_OBJ_CORE) : 0;
    return cores > 0 ? (int64_t)cache->attr->cache.size / cores : 0;
}

/* Adds the cores that have a processor of the map's `allowed`; false: no memory. */
static bool add_cores(struct cpu_machine *machine, struct cpu_map *map)
{
    int most = hwloc_get_nbobjs_by_type(map->topology, HWLOC_OBJ_CORE);
    map->cores = calloc((size_t)(most > 0 ? most : 0) + 1, sizeof *map->cores);
    if (!map->cores) return false;
    for (hwloc_obj_t core = NULL;
         (core = hwloc_get_next_obj_by_type(map->topology, HWLOC_OBJ_CORE, core)) != NULL;) {
        if (!hwloc_bitmap_intersects(core->cpuset, map->allowed)) continue;
        int64_t cache = cache_share(map->topology, core);
        hwloc_bitmap_t own = hwloc_bitmap_dup(core->cpuset);
        if (!own) return false;
        hwloc_bitmap_and(own, own, map->allowed);
        hwloc_bitmap_or(map->nodes, map->nodes, core->nodeset);
        map->cores[machine->cores++] = own;
        if (cache && (!machine->cache_bytes || cache < machine->cache_bytes)) machine->cache_bytes = cache;
    }
    machine->nodes = hwloc_bitmap_weight(map->nodes);
    machine->processors = hwloc_get_nbobjs_by_type(map->topology, HWLOC_OBJ_PU);
    return true;
}

struct cpu_machine cpu_machine_read(void)
{
    struct cpu_machine machine = {0};
    struct cpu_map *map = calloc(1, sizeof *map);
    if (!map || hwloc_topology_init(&map->topology) != 0) {
        free(map);
        return machine;
    }
    machine.map = map;
    map->allowed = hwloc_bitmap_alloc();
    map->nodes = hwloc_bitmap_alloc();
    bool known = map->allowed && map->nodes && hwloc_topology_load(map->topology) == 0 &&
                 (add_places(map->allowed) ||
                  hwloc_get_cpubind(map->topology, map->allowed, HWLOC_CPUBIND_PROCESS) == 0);
    if (!known || !add_cores(&machine, map)) cpu_machine_free(&machine);
    return machine;
}

void cpu_machine_free(struct cpu_machine *machine)
{
    struct cpu_map *map = machine->map;
    for (int n = 0; n < machine->cores; n++)
        hwloc_bitmap_free(map->cores[n]);
    if (map) {
        free(map->cores);
        hwloc_bitmap_free(map->allowed);
        hwloc_bitmap_free(map->nodes);
        hwloc_topology_destroy(map->topology);
    }
    free(map);
    *machine = (struct cpu_machine){0};
}

/* ---- threads ---- */

/* Where the calling thread may run; NULL: not known. */
static hwloc_bitmap_t processors_here(const struct cpu_map *map)
{
    hwloc_bitmap_t here = map ? hwloc_bitmap_alloc() : NULL;
    if (!here || hwloc_get_cpubind(map->topology, here, HWLOC_CPUBIND_THREAD) == 0) return here;
    hwloc_bitmap_free(here);
    return NULL;
}

int cpu_cores_here(const struct cpu_machine *machine)
{
    hwloc_bitmap_t here = processors_here(machine->map);
    int count = machine->cores;
    if (here && !hwloc_bitmap_isincluded(machine->map->allowed, here)) {
        count = 0;
        for (int n = 0; n < machine->cores; n++)
            count += hwloc_bitmap_intersects(machine->map->cores[n], here);
    }
    hwloc_bitmap_free(here);
    return count;
}

struct cpu_binding *cpu_thread_bind(const struct cpu_machine *machine, int core)
{
    hwloc_bitmap_t here = processors_here(machine->map);
    struct cpu_binding *before = malloc(sizeof *before);
    if (here && before && hwloc_bitmap_isincluded(machine->map->cores[core], here) &&
        hwloc_set_cpubind(machine->map->topology, machine->map->cores[core], HWLOC_CPUBIND_THREAD) == 0) {
        before->processors = here;
        return before;
    }
    hwloc_bitmap_free(here);
    free(before);
    return NULL;
}

void cpu_thread_restore(const struct cpu_machine *machine, struct cpu_binding *before)
{
    if (!before) return;
    hwloc_set_cpubind(machine->map->topology, before->processors, HWLOC_CPUBIND_THREAD);
    hwloc_bitmap_free(before->processors);
    free(before);
}

int cpu_thread_core(const struct cpu_machine *machine)
{
    hwloc_bitmap_t here = processors_here(machine->map);
    int core = -1;
    for (int n = 0; n < machine->cores && here; n++)
        if (hwloc_bitmap_isincluded(here, machine->map->cores[n])) core = n;
    hwloc_bitmap_free(here);
    return core;
}

/* ---- memory ---- */

static bool spreads(const struct cpu_machine *machine, size_t bytes)
{
    return machine->nodes > 1 && bytes >= SPREAD_BYTES && hwloc_topology_is_thissystem(machine->map->topology);
}

void *cpu_memory_new(const struct cpu_machine *machine, size_t bytes)
{
    if (!spreads(machine, bytes)) return cpu_scratch(bytes);
    return hwloc_alloc_membind(machine->map->topology, bytes, machine->map->nodes, HWLOC_MEMBIND_INTERLEAVE,
                               HWLOC_MEMBIND_BYNODESET);
}

void cpu_memory_free(const struct cpu_machine *machine, void *memory, size_t bytes)
{
    if (memory && spreads(machine, bytes))
        hwloc_free(machine->map->topology, memory, bytes);
    else
        free(memory);
}

#else

struct cpu_machine cpu_machine_read(void)
{
    return (struct cpu_machine){0};
}

void cpu_machine_free(struct cpu_machine *machine)
{
    (void)machine;
}

int cpu_cores_here(const struct cpu_machine *machine)
{
    return machine->cores;
}

struct cpu_binding *cpu_thread_bind(const struct cpu_machine *machine, int core)
{
    (void)machine;
    (void)core;
    return NULL;
}

void cpu_thread_restore(const struct cpu_machine *machine, struct cpu_binding *before)
{
    (void)machine;
    (void)before;
}

int cpu_thread_core(const struct cpu_machine *machine)
{
    (void)machine;
    return -1;
}

void *cpu_memory_new(const struct cpu_machine *machine, size_t bytes)
{
    (void)machine;
    return cpu_scratch(bytes);
}

void cpu_memory_free(const struct cpu_machine *machine, void *memory, size_t bytes)
{
    (void)machine;
    (void)bytes;
    free(memory);
}

#endif
