/* SPDX-License-Identifier: MIT */
/* The matrix tier of NVIDIA cards: which tier there is, which paths work, what their launches share.
 *
 * The card's generation says what to try; that it works is found out. Each tier has a canary, a program of a
 * few lines that multiplies small integers with the tier's instructions. */

#include "config.h"

#include "opencl_nvidia.h"

#include "half.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- canaries ---- */

static const struct canary {
    const char *name, *files, *kernel, *options;
    int rows, columns, depth, items;
    bool is_core; /* operands in core matrices: 8 rows x 16 bytes */
} canaries[] = {
    [NVIDIA_MMA] = {"mma", "mma_nvidia.cl+canary_mma.cl", "canary_mma", "", 16, 8, 16, 32, false},
    [NVIDIA_HOPPER] = {"hopper", NVIDIA_HOPPER_FILES "canary_wgmma.cl", "canary_wgmma", "-DDIM=64 -DDIM_V=64",
                       64, 64, 64, 128, true},
};

enum { CANARY_ROWS = 64, CANARY_DEPTH = 64 };

static int canary_value(int side, int row, int k)
{
    return (row * (3 + side) + k * 5) % 7 - 3;
}

static void canary_fill(const struct canary *canary, int side, int rows, uint16_t *halves)
{
    for (int row = 0; row < rows; row++)
        for (int k = 0; k < canary->depth; k++) {
            int at = canary->is_core ? (row / 8 * (canary->depth / 8) + k / 8) * 64 + row % 8 * 8 + k % 8
                                     : row * canary->depth + k;
            halves[at] = bfloat16_of_float((float)canary_value(side, row, k));
        }
}

static clattn_status canary_compare(clattn_context *context, const struct canary *canary, const float *out)
{
    for (int i = 0; i < canary->rows * canary->columns; i++) {
        int want = 0;
        for (int k = 0; k < canary->depth; k++)
            want += canary_value(0, i / canary->columns, k) * canary_value(1, i % canary->columns, k);
        if (out[i] != (float)want)
            return fail(context, CLATTN_INTERNAL, "%s: element %d is %g, must be %d", canary->kernel, i,
                        (double)out[i], want);
    }
    return CLATTN_SUCCESS;
}

static clattn_status canary_run(clattn_context *context, const struct canary *canary)
{
    uint16_t in[2 * CANARY_ROWS * CANARY_DEPTH];
    float out[CANARY_ROWS * CANARY_ROWS];
    struct storage result = {0};
    struct opencl_launch launch;
    size_t a = (size_t)(canary->rows * canary->depth), b = (size_t)(canary->columns * canary->depth);
    canary_fill(canary, 0, canary->rows, in);
    canary_fill(canary, 1, canary->columns, in + a);
    clattn_status status = opencl_storage_create(context, sizeof out, &result);
    if (status) return status;
    opencl_launch_begin(context, NULL, &launch);
    opencl_launch_kernel(&launch, canary->files, canary->kernel, canary->options);
    opencl_arg_mem(&launch, opencl_launch_table(&launch, in, (canary->is_core ? a + b : a) * sizeof *in));
    if (!canary->is_core) opencl_arg_mem(&launch, opencl_launch_table(&launch, in + a, b * sizeof *in));
    opencl_arg_storage(&launch, &result);
    nvidia_run(&launch, 1, 1, 1, canary->items);
    status = opencl_launch_end(&launch);
    if (!status)
        status = opencl_storage_read(context, &result, 0, out,
                                     (size_t)(canary->rows * canary->columns) * sizeof *out);
    if (!status) status = canary_compare(context, canary, out);
    opencl_storage_release(context, &result);
    return status;
}

static bool canary_lives(clattn_context *context, enum nvidia_tier tier)
{
    const struct canary *canary = &canaries[tier];
    struct opencl_trial trial;
    clattn_status status = opencl_trial_begin(context, canary->kernel, &trial);
    if (!status && !trial.has_passed) status = canary_run(context, canary);
    opencl_trial_end(context, &trial, status);
    if (status)
        log_line(context, CLATTN_LOG_WARNING, "tier %s is not used: %.600s", canary->name, context->error);
    return !status;
}

/* ---- tiers ---- */

enum nvidia_tier nvidia_generation(const struct opencl_device *device)
{
    cl_uint major = 0; /* CL_DEVICE_COMPUTE_CAPABILITY_MAJOR_NV of cl_nv_device_attribute_query */
    if (device->vendor_id != NVIDIA_VENDOR || !(device->type & CL_DEVICE_TYPE_GPU) ||
        clGetDeviceInfo(device->id, 0x4000, sizeof major, &major, NULL))
        return NVIDIA_NONE;
    return major == 9 ? NVIDIA_HOPPER : major >= 8 ? NVIDIA_MMA : NVIDIA_NONE;
}

clattn_status nvidia_open(clattn_context *context, enum nvidia_tier highest)
{
    struct opencl *state = opencl_of(context);
    enum nvidia_tier tier = MIN(highest, nvidia_generation(&state->device)), found = NVIDIA_NONE;
    clattn_stats before = context->stats;
    if (tier >= NVIDIA_MMA && canary_lives(context, NVIDIA_MMA)) found = NVIDIA_MMA;
    if (tier >= NVIDIA_HOPPER && found && canary_lives(context, NVIDIA_HOPPER)) found = NVIDIA_HOPPER;
    context->stats = before; /* what the caller's own work costs */
    if (found == NVIDIA_NONE) return CLATTN_SUCCESS;
    state->nvidia = calloc(1, sizeof *state->nvidia);
    if (!state->nvidia) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a context");
    pthread_mutex_init(&state->nvidia->lock, NULL);
    state->nvidia->tier = found;
    state->tier = canaries[found].name;
    return CLATTN_SUCCESS;
}

void nvidia_close(struct opencl *state)
{
    if (!state->nvidia) return;
    while (state->nvidia->verdicts) {
        struct nvidia_verdict *verdict = state->nvidia->verdicts;
        state->nvidia->verdicts = verdict->next;
        free(verdict);
    }
    pthread_mutex_destroy(&state->nvidia->lock);
    free(state->nvidia);
    state->nvidia = NULL;
}

/* ---- paths ---- */

const char *nvidia_path_name(enum nvidia_path path)
{
    static const char *const names[NVIDIA_PATHS] = {
        "inverted", "inverted-hopper", "union",    "tile",          "token", "pyramid", "select",
        "flat",     "flat-hopper",     "backward", "backward-tile", "decode"};
    return names[path];
}

static bool same_shape(const struct nvidia_shape *a, const struct nvidia_shape *b)
{
    return a->dtype == b->dtype && a->dim == b->dim && a->dim_v == b->dim_v && a->group == b->group &&
           a->topk == b->topk && a->causal == b->causal && a->aligned == b->aligned && a->window == b->window &&
           a->softcap == b->softcap && a->sink == b->sink;
}

static const struct nvidia_verdict *verdict_find(struct nvidia *nvidia, enum nvidia_path path,
                                                 const struct nvidia_shape *shape)
{
    pthread_mutex_lock(&nvidia->lock);
    const struct nvidia_verdict *verdict = nvidia->verdicts;
    while (verdict && !(verdict->path == path && same_shape(&verdict->shape, shape)))
        verdict = verdict->next;
    pthread_mutex_unlock(&nvidia->lock);
    return verdict;
}

static void verdict_add(struct nvidia *nvidia, enum nvidia_path path, const struct nvidia_shape *shape,
                        bool works)
{
    struct nvidia_verdict *verdict = malloc(sizeof *verdict);
    if (!verdict) return;
    pthread_mutex_lock(&nvidia->lock);
    *verdict = (struct nvidia_verdict){nvidia->verdicts, path, *shape, works};
    nvidia->verdicts = verdict;
    pthread_mutex_unlock(&nvidia->lock);
}

/* Two threads may test the same at the same time; the results are the same. */
bool nvidia_works(clattn_context *context, enum nvidia_path path, const struct nvidia_shape *shape)
{
    struct nvidia *nvidia = opencl_of(context)->nvidia;
    const struct nvidia_verdict *verdict = verdict_find(nvidia, path, shape);
    if (verdict) return verdict->works;
    if (opencl_check_process(context)) return false;
    char what[200];
    snprintf(what, sizeof what, "%s %s dim %d by %d group %d topk %d causal %d aligned %d%s%s%s",
             nvidia_path_name(path), dtype_name(shape->dtype), shape->dim, shape->dim_v, shape->group,
             shape->topk, shape->causal, shape->aligned, shape->window ? " window" : "",
             shape->softcap ? " softcap" : "", shape->sink ? " sink" : "");
    struct opencl_trial trial;
    clattn_status status = opencl_trial_begin(context, what, &trial);
    if (!status && !trial.has_passed) {
        clattn_stats before = context->stats;
        status = nvidia_selftest(context, path, shape);
        pthread_mutex_lock(&context->lock); /* the test's launches are not the caller's; what was built is */
        context->stats.kernels_enqueued = before.kernels_enqueued;
        context->stats.transfer_seconds = before.transfer_seconds;
        pthread_mutex_unlock(&context->lock);
        if (!status) log_line(context, CLATTN_LOG_INFO, "self-test of %s: passed", what);
    }
    opencl_trial_end(context, &trial, status);
    if (status)
        log_line(context, CLATTN_LOG_WARNING, "self-test of %s: not used: %.600s", what, context->error);
    verdict_add(nvidia, path, shape, !status);
    return !status;
}

/* ---- what the launches share ---- */

bool nvidia_has(const clattn_context *context, enum nvidia_path path, const struct nvidia_shape *shape)
{
    static const int hopper_dims[] = {64, 80, 96, 128};
    bool has_dim = false, has_dim_v = false;
    for (int i = 0; i < 4; i++) {
        has_dim = has_dim || shape->dim == hopper_dims[i];
        has_dim_v = has_dim_v || shape->dim_v == hopper_dims[i];
    }
    switch (path) {
    case NVIDIA_INVERTED_HOPPER:
    case NVIDIA_UNION:
    case NVIDIA_TILE:
    case NVIDIA_FLAT_HOPPER:
    case NVIDIA_BACKWARD:
    case NVIDIA_BACKWARD_TILE:
        return opencl_of(context)->nvidia->tier >= NVIDIA_HOPPER && has_dim && has_dim_v;
    default:
        return opencl_of(context)->nvidia->tier >= NVIDIA_MMA;
    }
}

/* Each sequence is launched by itself. */
enum { SEQUENCES_MAX = 256, WINDOW_LEN_MAX = 1 << 29 };

bool nvidia_takes_forward(const clattn_context *context, const struct problem *problem, clattn_dtype dtype)
{
    const struct options *options = &problem->options;
    if (!opencl_of(context)->nvidia || (dtype != CLATTN_FLOAT16 && dtype != CLATTN_BFLOAT16)) return false;
    if (options->bias || options->k_scale || !(problem->scale >= 0) || problem->count > SEQUENCES_MAX)
        return false;
    if (options->window && problem->q_len_max + problem->kv_len_max > WINDOW_LEN_MAX) return false;
    return MAX(problem->q_len_max, problem->kv_len_max) * MAX(problem->q_heads, 1) < INT32_MAX;
}

bool nvidia_takes(const clattn_context *context, const struct problem *problem, clattn_dtype dtype)
{
    if (has_options(&problem->options) || !nvidia_takes_forward(context, problem, dtype)) return false;
    for (int64_t s = 0; s < problem->count; s++) /* rows without any key: the portable kernels know them */
        if (problem->sequences[s].kv_len == 0 && problem->sequences[s].q_len > 0) return false;
    return true;
}

bool nvidia_is_aligned(const clattn_tensor *tensor)
{
    if (!tensor) return true;
    int64_t strides = tensor->offset | tensor->batch_stride | tensor->len_stride | tensor->head_stride;
    if (tensor->memory == CLATTN_MEMORY_SVM && (uintptr_t)tensor->data % 16) return false;
    return strides % 8 == 0;
}

bool nvidia_is_plain_lse(const clattn_tensor *lse)
{
    return !lse || (lse->len_stride == lse->heads && (lse->head_stride == 1 || lse->heads == 1));
}

struct opencl_options nvidia_options(const struct nvidia_shape *shape)
{
    struct opencl_options options = {""};
    opencl_option(&options, "DTYPE", shape->dtype == CLATTN_FLOAT16);
    opencl_option(&options, "DIM", shape->dim);
    opencl_option(&options, "DIM_V", shape->dim_v);
    opencl_option(&options, "GROUP", shape->group);
    opencl_option(&options, "CAUSAL", shape->causal);
    opencl_option(&options, "ALIGNED", shape->aligned);
    if (shape->window) opencl_option(&options, "WINDOW", 1);
    if (shape->softcap) opencl_option(&options, "SOFTCAP", 1);
    if (shape->sink) opencl_option(&options, "SINK", 1);
    return options;
}

bool nvidia_has_window(const struct problem *problem)
{
    int64_t window = problem->options.window;
    return window && window < problem->kv_len_max + (problem->causal ? 0 : problem->q_len_max);
}

/* A scale of 0 would make NaN of the -inf of masked scores; so small a one makes all weights equal as well. */
float nvidia_scale(const struct problem *problem)
{
    return MAX(problem->scale, 1e-30f);
}

void nvidia_arg_rows(struct opencl_launch *launch, const clattn_tensor *tensor, int64_t batch, int64_t row)
{
    opencl_arg_tensor(launch, tensor);
    opencl_arg_long(launch, nvidia_first(tensor, batch, row));
    opencl_arg_long(launch, tensor ? tensor->len_stride : 0);
    opencl_arg_long(launch, tensor ? tensor->head_stride : 0);
}

void nvidia_arg_scale(struct opencl_launch *launch, const struct problem *problem)
{
    const struct options *options = &problem->options;
    float scale = nvidia_scale(problem), cap = options->softcap;
    opencl_arg_float(launch, cap > 0 ? cap : scale);
    opencl_arg_float(launch, cap > 0 ? 2 * scale / cap : 0);
    opencl_arg_int(launch, (int32_t)MIN(options->window, WINDOW_LEN_MAX));
}

void nvidia_arg_sink(struct opencl_launch *launch, const struct problem *problem)
{
    const clattn_tensor *sink = problem->options.sink;
    opencl_arg_tensor(launch, sink);
    opencl_arg_long(launch, sink ? sink->offset : 0);
    opencl_arg_long(launch, sink ? sink->head_stride : 0);
}

void nvidia_run(struct opencl_launch *launch, int64_t x, int64_t y, int64_t z, int items)
{
    size_t global[] = {(size_t)(x * items), (size_t)y, (size_t)z}, local[] = {(size_t)items, 1, 1};
    opencl_launch_run(launch, 3, global, local);
}
