/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_CPU_THREADS_H
#define CLATTN_CPU_THREADS_H

/* Threads of a context whose caller names no number: cores of the process's binding, at most what its control
 * group has time for. 0: the caller has told OpenMP a number (OMP_NUM_THREADS, omp_set_num_threads), which
 * holds. */
int cpu_threads_default(void);

/* Processors that a control group's quota amounts to, rounded up, from the text of cpu.max: "quota period" in
 * microseconds; 0: no limit. */
int cpu_quota_of(const char *text);

#endif
