/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_THREADS_H
#define CLATTN_CPU_THREADS_H

#include "cpu_machine.h"

#include "internal.h"

/* ---- how many ---- */

/* Threads of a context whose caller names no number: cores of the process's binding, at most what its control
 * group has time for. 0: the caller has told OpenMP a number (OMP_NUM_THREADS, omp_set_num_threads), which
 * holds. */
int cpu_threads_default(const struct cpu_machine *machine);

/* Processors that a control group's quota amounts to, rounded up, from the text of cpu.max: "quota period" in
 * microseconds; 0: no limit. */
int cpu_quota_of(const char *text);

/* Around every call that computes: the cores are divided among those at work. */
void cpu_call_begin(void);
void cpu_call_end(void);

/* ---- where ---- */

/* Which cores the threads of a call are bound to while it computes. AUTO: all of them, when there are as many
 * threads as cores; else the system places the threads, because it knows what else runs. CLOSE: the first ones,
 * which share caches and nodes. SPREAD: evenly over the machine. */
enum cpu_placement { CPU_PLACE_AUTO, CPU_PLACE_NONE, CPU_PLACE_CLOSE, CPU_PLACE_SPREAD };

/* Of a context: by CLATTN_BIND, but NONE where the caller has told OpenMP where its threads are to run. */
enum cpu_placement cpu_placement_wanted(clattn_context *context);

/* The core of a thread, cores numbered as hwloc does, neighbours first; -1: it is not bound. Threads of a call
 * have different cores. */
int cpu_place_of(enum cpu_placement placement, int cores, int threads, int thread);

/* The threads of a call. */
struct cpu_team {
    int threads;
    enum cpu_placement placement;
    const struct cpu_machine *machine; /* NULL: no thread is bound */
};

struct cpu_team cpu_team(const clattn_context *context);

/* Around what a thread does in a parallel region of the team: it is bound, and free again as it was before. */
struct cpu_binding *cpu_team_enter(const struct cpu_team *team);
void cpu_team_leave(const struct cpu_team *team, struct cpu_binding *before);

#endif
