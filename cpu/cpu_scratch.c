/* SPDX-License-Identifier: MIT */
/* Memory of the kernels. What a call needs much of is kept for the next one: the system clears every page that
 * it gives, and of 14 MB that is 2 % of the selection of 2048 queries. */

#include "config.h"

#include "cpu.h"

#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

enum {
    UNIT = 64,          /* alignment, and what stands before memory that may be kept */
    HUGE_UNIT = 2 << 20 /* of a huge page */
};

/* Much memory in huge pages, where the system has them: rows that are read in any order would miss the
 * translations of small ones. */
void *cpu_scratch(size_t bytes)
{
    size_t unit = bytes < 2 * (size_t)HUGE_UNIT ? UNIT : HUGE_UNIT;
    size_t size = (MAX(bytes, 1) + unit - 1) / unit * unit;
    void *memory = aligned_alloc(unit, size);
#if defined(MADV_HUGEPAGE)
    if (memory && unit == HUGE_UNIT) (void)madvise(memory, size, MADV_HUGEPAGE);
#endif
    return memory;
}

/* Each thread begins at a place of its own, so that it finds what it had. */
static int first_place(void)
{
#ifdef _OPENMP
    return omp_get_thread_num() % KEPT_SCRATCH;
#else
    return 0;
#endif
}

void *cpu_scratch_take(const clattn_context *context, size_t bytes)
{
    struct cpu_state *state = context->state;
    for (int n = 0, first = first_place(); n < KEPT_SCRATCH; n++) {
        size_t *kept = __atomic_exchange_n(&state->kept[(first + n) % KEPT_SCRATCH], NULL, __ATOMIC_ACQ_REL);
        if (kept && *kept >= bytes) return (char *)kept + UNIT;
        free(kept);
    }
    size_t *memory = bytes < SIZE_MAX / 2 ? cpu_scratch(UNIT + bytes) : NULL;
    if (!memory) return NULL;
    *memory = bytes;
    return (char *)memory + UNIT;
}

void cpu_scratch_give(const clattn_context *context, void *scratch)
{
    struct cpu_state *state = context->state;
    if (!scratch) return;
    size_t *memory = (size_t *)((char *)scratch - UNIT);
    for (int n = 0, first = first_place(); n < KEPT_SCRATCH && *memory >= HUGE_UNIT; n++) {
        size_t *none = NULL;
        if (__atomic_compare_exchange_n(&state->kept[(first + n) % KEPT_SCRATCH], &none, memory, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            return;
    }
    free(memory);
}

void cpu_scratch_release(struct cpu_state *state)
{
    for (int n = 0; n < KEPT_SCRATCH; n++)
        free(state->kept[n]);
}
