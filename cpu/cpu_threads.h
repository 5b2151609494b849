/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_THREADS_H
#define CLATTN_CPU_THREADS_H

#include <stdint.h>

/* The cores of the process's binding and what each of them has of a level-2 cache (the least); 0: not known,
 * without hwloc. Two hardware threads of a core share its multipliers and count once. */
struct cpu_machine {
    int cores;
    int64_t cache_bytes;
};

struct cpu_machine cpu_machine_read(void);

/* Threads of a context whose caller names no number: cores of the process's binding, at most what its control
 * group has time for. 0: the caller has told OpenMP a number (OMP_NUM_THREADS, omp_set_num_threads), which
 * holds. */
int cpu_threads_default(const struct cpu_machine *machine);

/* Processors that a control group's quota amounts to, rounded up, from the text of cpu.max: "quota period" in
 * microseconds; 0: no limit. */
int cpu_quota_of(const char *text);

/* Around every call that computes: cpu_threads divides the cores among those at work. */
void cpu_call_begin(void);
void cpu_call_end(void);

#endif
