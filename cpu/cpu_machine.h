/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_MACHINE_H
#define CLATTN_CPU_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What hwloc says of the machine, as far as the process may use it. Two hardware threads of a core share its
 * multipliers and count once. All is 0 where it is not known, and without hwloc. */
struct cpu_machine {
    int cores;      /* of the process's binding, or of the places that OpenMP has bound it to */
    int nodes;      /* NUMA nodes of those cores */
    int processors; /* hardware threads that the system gives the process at most, whatever their binding */
    int64_t cache_bytes; /* what each of them has of a level-2 cache, the least */
    struct cpu_map *map; /* the processors of each core */
};

struct cpu_machine cpu_machine_read(void);
void cpu_machine_free(struct cpu_machine *machine);

/* Cores that the calling thread may run on, of the machine's: fewer when the caller has bound the thread. */
int cpu_cores_here(const struct cpu_machine *machine);

/* Binds the calling thread to a core; returns what cpu_thread_restore undoes it with, NULL: the thread stays
 * where it was, because the caller has bound it to other processors or the system does not allow it. */
struct cpu_binding *cpu_thread_bind(const struct cpu_machine *machine, int core);
void cpu_thread_restore(const struct cpu_machine *machine, struct cpu_binding *before);

/* The core, of the machine's, that holds all processors on which the calling thread may run; -1: there is none.
 */
int cpu_thread_core(const struct cpu_machine *machine);

/* Memory that all threads read and any thread writes first: its pages take turns among the NUMA nodes, where
 * there is more than one. 64-byte aligned; NULL: there is none. */
void *cpu_memory_new(const struct cpu_machine *machine, size_t bytes);
void cpu_memory_free(const struct cpu_machine *machine, void *memory, size_t bytes);

#endif
