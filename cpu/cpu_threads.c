/* SPDX-License-Identifier: MIT */
/* How many threads a call uses when its caller does not say, and where they run: one a core, of those cores
 * that the calling thread may run on and the process has time for. Calls that the caller's own threads make at
 * the same time, in one context or in several, share them: each has its part of the cores, as many as are at
 * work when it begins. */

#include "config.h"

#include "cpu_threads.h"

#include "cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* ---- how many ---- */

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
    /* A number that the caller gave to OpenMP is no default any more: 0. Without it OpenMP has as many threads
     * as there were processors when the program began; the caller may have bound this thread since. */
    int quota = group_quota(), threads = omp_get_max_threads();
    bool is_default = threads == omp_get_num_procs() || threads == machine->processors;
    if (getenv("OMP_NUM_THREADS") || !is_default) return 0;
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

/* ---- where ---- */

enum cpu_placement cpu_placement_wanted(clattn_context *context)
{
    static const char *const own[] = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"};
    static const char *const names[] = {"auto", "none", "close", "spread"};
    const char *wanted = getenv("CLATTN_BIND");
    for (size_t n = 0; n < sizeof own / sizeof *own; n++)
        if (getenv(own[n])) return CPU_PLACE_NONE;
    for (int n = 0; wanted && n <= CPU_PLACE_SPREAD; n++)
        if (strcmp(wanted, names[n]) == 0) return (enum cpu_placement)n;
    if (wanted && *wanted)
        log_line(context, CLATTN_LOG_WARNING, "CLATTN_BIND is '%s', which is not known", wanted);
    return CPU_PLACE_AUTO;
}

int cpu_place_of(enum cpu_placement placement, int cores, int threads, int thread)
{
    if (placement == CPU_PLACE_NONE || threads < 2 || threads > cores) return -1;
    if (placement == CPU_PLACE_AUTO && threads < cores) return -1;
    if (placement == CPU_PLACE_CLOSE) return thread;
    return (int)((int64_t)thread * cores / threads);
}

struct cpu_team cpu_team(const clattn_context *context)
{
    struct cpu_team team = {1, CPU_PLACE_NONE, NULL};
#ifdef _OPENMP
    const struct cpu_state *state = context->state;
    const struct cpu_machine *machine = &state->machine;
    int most = omp_get_max_threads(), others = __atomic_load_n(&calls, __ATOMIC_RELAXED);
    team.threads = context->threads ? context->threads : most;
    if (omp_in_parallel()) { /* the caller's threads are at work already */
        team.threads = context->threads ? context->threads : 1;
        return team;
    }
    /* OpenMP that binds its threads has bound this one too: that says nothing about the others. */
    int here = omp_get_proc_bind() == omp_proc_bind_false ? cpu_cores_here(machine) : machine->cores;
    if (!context->threads && state->threads) {
        team.threads = MIN(state->threads, most);
        if (here) team.threads = MIN(team.threads, here);
        team.threads = MAX(team.threads / MAX(others, 1), 1);
    }
    if (others > 1 || here < machine->cores || cpu_place_of(state->placement, here, team.threads, 0) < 0)
        return team;
    team.placement = state->placement;
    team.machine = machine;
#else
    (void)context;
#endif
    return team;
}

int cpu_threads(const clattn_context *context)
{
    return cpu_team(context).threads;
}

struct cpu_binding *cpu_team_enter(const struct cpu_team *team)
{
#ifdef _OPENMP
    int threads = omp_get_num_threads(), core;
    if (!team->machine) return NULL;
    core = cpu_place_of(team->placement, team->machine->cores, threads, omp_get_thread_num());
    return core < 0 ? NULL : cpu_thread_bind(team->machine, core);
#else
    (void)team;
    return NULL;
#endif
}

void cpu_team_leave(const struct cpu_team *team, struct cpu_binding *before)
{
    if (before) cpu_thread_restore(team->machine, before);
}
