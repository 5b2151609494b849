/* SPDX-License-Identifier: MIT */
#ifndef BENCH_CPU_H
#define BENCH_CPU_H

/* What the parts of bench_cpu share. */

#include "clattn.h"

#include <stdbool.h>

enum { DIM = 128, HEADS = 16, BLOCK = 64, TOPK = 8, REPEATS = 5, LONG = 65536 };

extern clattn_context *context, *reference;
extern double peak;      /* FLOP/s of one core */
extern double bandwidth; /* bytes/s that all threads read from memory together; 0: not measured yet */
extern int threads;
extern const char *part; /* of the names to run */

double now(void); /* processor time with one thread: other programs on the machine disturb it less */
void check(clattn_status status, const char *what);
uint64_t random_bits(void);

/* [1][len][heads][dim] in huge pages where the system gives them; random when `fill`, else zero. */
clattn_tensor tensor(clattn_dtype dtype, int64_t len, int64_t heads, int64_t dim, bool fill);

/* The last `rows` rows of a tensor: they stand at the same positions. */
clattn_tensor tail(const clattn_tensor *t, int64_t rows);

/* Seconds in which all threads read the bytes once; the best of several times. */
double read_seconds(const void *data, int64_t bytes);

void bench_selection(void); /* bench_cpu_select.c */
void bench_pyramid(void);
void bench_steps(void); /* bench_cpu_steps.c: backward and decode */

#endif
