/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TEST_HARNESS_H
#define CLATTN_TEST_HARNESS_H

/* What the tests share: the contexts to test, host arrays with guards, seeded fills, and comparison.
 *
 * Environment: CLATTN_TEST_SIZE=tiny|normal|full, CLATTN_TEST_SEED=N (default 1). */

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "clattn.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* ---- targets: every backend, variant and device of this machine ---- */

/* Who runs a case. An OpenCL kernel is compiled for every dim, group and dtype, so OpenCL gets the middle class
 * only. */
enum test_size {
    SIZE_TINY,   /* every target, slow implementations included */
    SIZE_NORMAL, /* every target that is not slow */
    SIZE_CPU     /* reference and CPU; OpenCL only with CLATTN_TEST_SIZE=full */
};

struct target {
    clattn_context *context;
    clattn_device_info info;
    char label[96];       /* "cpu/avx2", "opencl/portable PLATFORM" */
    enum test_size limit; /* the largest class that it runs */
};

enum { TARGETS_MAX = 32 };
extern struct target targets[TARGETS_MAX];
extern int target_count;

/* Group set-up and tear-down: opens a context for each backend x variant x device, and prints the list. */
int targets_open(void **state);
int targets_close(void **state);
clattn_context *target_context_new(const struct target *target); /* one more context of the same kind */

#define FOR_EACH_TARGET(target) for (struct target *target = targets; target < targets + target_count; target++)

/* Does the target run cases of this class? Counted, and printed by target_report. */
bool target_runs(const struct target *target, enum test_size size);
void target_report(const char *test);

/* ---- random numbers ---- */

struct random {
    uint64_t state;
};

struct random random_seeded(uint64_t stream); /* of CLATTN_TEST_SEED and `stream` */
uint64_t random_bits(struct random *random);
double random_uniform(struct random *random); /* 0 <= x < 1 */
double random_normal(struct random *random);
int64_t random_below(struct random *random, int64_t n);

/* ---- arrays: tensors in guarded host memory ---- */

enum layout {
    LAYOUT_BTHD,
    LAYOUT_BHTD,
    LAYOUT_PADDED /* [batch][len][heads][dim] with an offset and gaps in every dimension */
};

/* All bytes that no one wrote are 0xff: a NaN in each floating type. */
struct array {
    clattn_tensor view;
    unsigned char *raw;
    size_t raw_elements;
};

size_t element_bytes(clattn_dtype dtype);
struct array array_new(clattn_dtype dtype, int64_t batch, int64_t len, int64_t heads, int64_t dim,
                       enum layout layout);
void array_free(struct array *array);
void array_poison(struct array *array);
bool array_untouched(const struct array *array); /* still poisoned everywhere */
void array_check_guards(const struct array *array, const char *label, const char *name);

double tensor_get(const clattn_tensor *tensor, int64_t b, int64_t i, int64_t h, int64_t d);
void tensor_set(const clattn_tensor *tensor, int64_t b, int64_t i, int64_t h, int64_t d, double value);

/* All elements as [batch][len][heads][dim]; the caller frees. */
double *tensor_doubles(const clattn_tensor *tensor);

/* Rows [i0, i1) as a view, and one batch entry. */
clattn_tensor tensor_rows(const clattn_tensor *tensor, int64_t i0, int64_t i1);
clattn_tensor tensor_batch(const clattn_tensor *tensor, int64_t b);

bool tensor_equal_bits(const clattn_tensor *a, const clattn_tensor *b);

/* ---- fills ---- */

enum fill {
    FILL_NORMAL,
    FILL_CONSTANT, /* 0.5 everywhere */
    FILL_ZERO,
    FILL_HUGE,     /* small integers times 2^30 (float32, bfloat16) or 2^8 (float16): dot products stay exact */
    FILL_DENORMAL, /* below the smallest normal number of the type */
    FILL_ALTERNATING, /* +1, -1 along each row and from row to row */
    FILL_INTEGER      /* -3 ... 3 */
};

const char *fill_name(enum fill fill);
void array_fill(struct array *array, enum fill fill, struct random *random);
void array_fill_constant(struct array *array, double value);

/* Narrowing to nearest even and exact widening, written apart from the library's. */
uint16_t narrow16(clattn_dtype dtype, double value);
double widen16(clattn_dtype dtype, uint16_t code);

/* One unit in the last place relative to 1, of a float32 or a 16-bit type. */
double dtype_epsilon(clattn_dtype dtype);
const char *dtype_text(clattn_dtype dtype);

/* ---- calls that must succeed ---- */

void check_success(const struct target *target, clattn_status status, const char *call);

#endif
