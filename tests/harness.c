/* SPDX-License-Identifier: MIT */
/* Targets of the tests, random numbers and fills. */

#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- environment ---- */

static uint64_t seed(void)
{
    const char *text = getenv("CLATTN_TEST_SEED");
    return text ? strtoull(text, NULL, 10) : 1;
}

static bool size_is(const char *name)
{
    const char *text = getenv("CLATTN_TEST_SIZE");
    return text && strcmp(text, name) == 0;
}

/* ---- targets ---- */

struct target targets[TARGETS_MAX];
int target_count;

static int runs[TARGETS_MAX], left_out[TARGETS_MAX];

/* Interpreters and checkers: minutes where others take seconds. */
static bool is_slow(const clattn_device_info *info)
{
    static const char *const names[] = {"oclgrind", "rusticl", "clover", "llvmpipe"};
    char text[sizeof info->platform + sizeof info->name];
    int n = snprintf(text, sizeof text, "%s%s", info->platform, info->name);
    for (int i = 0; i < n; i++)
        if (text[i] >= 'A' && text[i] <= 'Z') text[i] += 'a' - 'A';
    for (int i = 0; i < COUNT(names); i++)
        if (strstr(text, names[i])) return true;
    return false;
}

/* The CPU backend's variant "ref" has the kernels of the reference backend. */
static enum test_size limit_of(const clattn_device_info *info, const char *variant)
{
    if (size_is("full")) return SIZE_CPU;
    if (size_is("tiny") || is_slow(info)) return SIZE_TINY;
    if (info->backend == CLATTN_BACKEND_CPU && strcmp(variant, "ref") == 0) return SIZE_TINY;
    return info->backend == CLATTN_BACKEND_OPENCL ? SIZE_NORMAL : SIZE_CPU;
}

static clattn_status open_context(const clattn_device_info *info, const char *variant, clattn_context **context,
                                  char *error, size_t bytes)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    char index[16];
    snprintf(index, sizeof index, "%d", info->index);
    desc.backend = info->backend;
    desc.device = info->backend == CLATTN_BACKEND_OPENCL ? index : NULL;
    desc.variant = variant;
    desc.error = error;
    desc.error_bytes = bytes;
    return clattn_context_create(&desc, context);
}

clattn_context *target_context_new(const struct target *target)
{
    clattn_context *context = NULL;
    char error[1024] = "";
    if (open_context(&target->info, target->info.variant, &context, error, sizeof error))
        fail_msg("%s: a second context failed: %s", target->label, error);
    return context;
}

/* A machine's list says what it can run, so each variant that it names must open. */
static int open_target(const clattn_device_info *info, const char *variant)
{
    static const char *const backends[] = {"auto", "reference", "cpu", "opencl"};
    struct target *target = &targets[target_count];
    char error[1024] = "";
    if (target_count == TARGETS_MAX) return 0;
    *target = (struct target){.info = *info, .limit = limit_of(info, variant)};
    snprintf(target->label, sizeof target->label, "%s/%s%s%.40s", backends[info->backend], variant,
             info->platform[0] ? " " : "", info->platform);
    if (open_context(info, variant, &target->context, error, sizeof error)) {
        print_error("%s: cannot be opened: %s\n", target->label, error);
        return -1;
    }
    target->info.size = sizeof target->info;
    if (clattn_context_device(target->context, &target->info) || strcmp(target->info.variant, variant)) {
        print_error("%s: opened as '%s'\n", target->label, target->info.variant);
        return -1;
    }
    print_message("target %s: %s, %s\n", target->label, target->info.name,
                  target->limit == SIZE_TINY     ? "the tiny cases"
                  : target->limit == SIZE_NORMAL ? "cases for OpenCL"
                                                 : "all cases");
    target_count++;
    return 0;
}

int targets_open(void **state)
{
    (void)state;
    clattn_device_info info = {.size = sizeof info};
    const char *only = getenv("CLATTN_TEST_BACKEND"); /* "opencl": that and the reference */
    bool no_cpu = only && strcmp(only, "opencl") == 0;
    print_message("seed %llu\n", (unsigned long long)seed());
    for (int number = 0; clattn_device_get(number, &info) == CLATTN_SUCCESS; number++) {
        char variants[sizeof info.variants], *rest = NULL;
        if (no_cpu && info.backend == CLATTN_BACKEND_CPU) continue;
        memcpy(variants, info.variants, sizeof variants);
        for (char *name = strtok_r(variants, " ", &rest); name; name = strtok_r(NULL, " ", &rest))
            if (open_target(&info, name)) return -1;
        info = (clattn_device_info){.size = sizeof info};
    }
    return target_count >= 2 ? 0 : -1; /* the reference and the CPU are always there, what is asked for must be */
}

int targets_close(void **state)
{
    (void)state;
    while (target_count > 0)
        clattn_context_release(targets[--target_count].context);
    return 0;
}

bool target_runs(const struct target *target, enum test_size size)
{
    bool does = size <= target->limit;
    (does ? runs : left_out)[target - targets]++;
    return does;
}

void target_report(const char *test)
{
    FOR_EACH_TARGET (target) {
        int i = (int)(target - targets);
        if (runs[i] + left_out[i])
            print_message("%s on %s: %d cases, %d left out (CLATTN_TEST_SIZE=full runs them)\n", test,
                          target->label, runs[i], left_out[i]);
        runs[i] = left_out[i] = 0;
    }
}

void check_success(const struct target *target, clattn_status status, const char *call)
{
    char error[1024] = "";
    if (!status) return;
    clattn_context_error(target->context, error, sizeof error);
    fail_msg("%s: %s: %s: %s", target->label, call, clattn_strerror(status), error);
}

/* ---- random numbers: splitmix64 ---- */

struct random random_seeded(uint64_t stream)
{
    return (struct random){seed() * UINT64_C(0x9e3779b97f4a7c15) + stream * UINT64_C(0xd1342543de82ef95)};
}

uint64_t random_bits(struct random *random)
{
    uint64_t z = random->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

double random_uniform(struct random *random)
{
    return (double)(random_bits(random) >> 11) * 0x1p-53;
}

double random_normal(struct random *random)
{
    double radius = sqrt(-2 * log(1 - random_uniform(random)));
    return radius * cos(6.283185307179586 * random_uniform(random));
}

int64_t random_below(struct random *random, int64_t n)
{
    return (int64_t)(random_bits(random) % (uint64_t)n);
}

/* ---- fills ---- */

const char *fill_name(enum fill fill)
{
    static const char *const names[] = {"normal",   "constant",    "zero",   "huge",
                                        "denormal", "alternating", "integer"};
    return names[fill];
}

static double fill_value(enum fill fill, clattn_dtype dtype, int64_t row, int64_t d, struct random *random)
{
    switch (fill) {
    case FILL_NORMAL:
        return random_normal(random);
    case FILL_CONSTANT:
        return 0.5;
    case FILL_ZERO:
        return 0;
    case FILL_HUGE:
        return (double)(random_below(random, 7) - 3) * (dtype == CLATTN_FLOAT16 ? 0x1p8 : 0x1p30);
    case FILL_DENORMAL:
        return (random_uniform(random) - 0.5) * (dtype == CLATTN_FLOAT16 ? 0x1p-14 : 0x1p-126);
    case FILL_ALTERNATING:
        return (row + d) % 2 ? -1 : 1;
    case FILL_INTEGER:
        return (double)(random_below(random, 7) - 3);
    }
    return NAN;
}

void array_fill(struct array *array, enum fill fill, struct random *random)
{
    const clattn_tensor *t = &array->view;
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t i = 0; i < t->len; i++)
            for (int64_t h = 0; h < t->heads; h++)
                for (int64_t d = 0; d < t->dim; d++)
                    tensor_set(t, b, i, h, d, fill_value(fill, t->dtype, i, d, random));
}

void array_fill_constant(struct array *array, double value)
{
    const clattn_tensor *t = &array->view;
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t i = 0; i < t->len; i++)
            for (int64_t h = 0; h < t->heads; h++)
                for (int64_t d = 0; d < t->dim; d++)
                    tensor_set(t, b, i, h, d, value);
}
