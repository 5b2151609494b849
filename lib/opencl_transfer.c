/* SPDX-License-Identifier: MIT */
/* Transfers of tensors between host and device memory, whatever their strides.
 *
 * Only the elements of the tensor are written: what lies between its rows may belong to others. Ordered by
 * their strides on the device, the dimensions fall into
 *
 *     a run     rows that are contiguous there: all of a tensor that clattn_tensor_create made
 *     a rect    runs at equal distances, moved by one command
 *     the rest  a loop
 *
 * Rows are gathered into (scattered from) a small buffer in the device's order, unless the host has the same
 * order. */

#include "config.h"

#include "opencl.h"

#include <stdlib.h>
#include <string.h>

enum { BOUNCE_BYTES = 4 << 20 };

/* A dimension: its size, and the strides in elements. */
struct axis {
    int64_t size, device, host;
};

struct transfer {
    clattn_context *context;
    bool upload;
    cl_mem mem;
    char *host;          /* element 0 of the host tensor */
    size_t element;      /* bytes */
    size_t row;          /* bytes */
    struct axis axes[3]; /* ascending by device stride; the first `merged` make up a run */
    int merged;
    int64_t run_rows;
    bool is_direct; /* a run is contiguous on the host too, in the same order */
    char *bounce;
    int64_t bounce_rows;
};

static int compare_axes(const void *a, const void *b)
{
    const struct axis *x = a, *y = b;
    return (x->device > y->device) - (x->device < y->device);
}

static void transfer_plan(struct transfer *t, const clattn_tensor *host, const clattn_tensor *device)
{
    t->axes[0] = (struct axis){host->batch, device->batch_stride, host->batch_stride};
    t->axes[1] = (struct axis){host->len, device->len_stride, host->len_stride};
    t->axes[2] = (struct axis){host->heads, device->head_stride, host->head_stride};
    for (int i = 0; i < 3; i++)
        if (t->axes[i].size == 1) t->axes[i].device = 0; /* its stride means nothing: sort it first */
    qsort(t->axes, 3, sizeof *t->axes, compare_axes);
    t->run_rows = 1;
    t->is_direct = true;
    for (t->merged = 0; t->merged < 3; t->merged++) {
        const struct axis *axis = &t->axes[t->merged];
        if (axis->size == 1) continue;
        if (axis->device != t->run_rows * host->dim) break;
        t->is_direct = t->is_direct && axis->host == axis->device;
        t->run_rows *= axis->size;
    }
}

/* Host position, in elements, of a row of a run. */
static int64_t host_of_row(const struct transfer *t, int64_t row)
{
    int64_t position = 0;
    for (int i = 0; i < t->merged; i++) {
        position += row % t->axes[i].size * t->axes[i].host;
        row /= t->axes[i].size;
    }
    return position;
}

/* Gathers (upload) or scatters rows first .. first + count - 1 of a run that begins at element `base` of the
 * host. */
static void rows_move(const struct transfer *t, int64_t base, int64_t first, int64_t count, char *packed)
{
    for (int64_t row = first; row < first + count; row++, packed += t->row) {
        char *at = t->host + (size_t)(base + host_of_row(t, row)) * t->element;
        if (t->upload)
            memcpy(packed, at, t->row);
        else
            memcpy(at, packed, t->row);
    }
}

/* Rows of one run: blocks. */
static clattn_status move_rows(const struct transfer *t, int64_t device, int64_t host, int64_t first,
                               int64_t count)
{
    cl_command_queue queue = opencl_of(t->context)->queue;
    size_t offset = (size_t)device * t->element + (size_t)first * t->row, bytes = (size_t)count * t->row;
    char *from = t->is_direct ? t->host + (size_t)host * t->element + (size_t)first * t->row : t->bounce;
    if (t->upload && !t->is_direct) rows_move(t, host, first, count, from);
    cl_int code = t->upload ? clEnqueueWriteBuffer(queue, t->mem, CL_TRUE, offset, bytes, from, 0, NULL, NULL)
                            : clEnqueueReadBuffer(queue, t->mem, CL_TRUE, offset, bytes, from, 0, NULL, NULL);
    if (code) return opencl_fail(t->context, code, t->upload ? "clEnqueueWriteBuffer" : "clEnqueueReadBuffer");
    if (!t->upload && !t->is_direct) rows_move(t, host, first, count, from);
    return CLATTN_SUCCESS;
}

/* `count` whole runs along `axis`: blocks. */
static clattn_status move_runs(const struct transfer *t, const struct axis *axis, int64_t device, int64_t host,
                               int64_t count)
{
    cl_command_queue queue = opencl_of(t->context)->queue;
    size_t run = (size_t)t->run_rows * t->row, pitch = (size_t)axis->device * t->element;
    size_t offset = (size_t)device * t->element;
    const size_t origin[] = {offset % pitch, offset / pitch, 0}, zero[] = {0, 0, 0};
    const size_t region[] = {run, (size_t)count, 1};
    for (int64_t i = 0; t->upload && i < count; i++)
        rows_move(t, host + i * axis->host, 0, t->run_rows, t->bounce + (size_t)i * run);
    cl_int code = t->upload ? clEnqueueWriteBufferRect(queue, t->mem, CL_TRUE, origin, zero, region, pitch, 0,
                                                       run, 0, t->bounce, 0, NULL, NULL)
                            : clEnqueueReadBufferRect(queue, t->mem, CL_TRUE, origin, zero, region, pitch, 0,
                                                      run, 0, t->bounce, 0, NULL, NULL);
    if (code)
        return opencl_fail(t->context, code,
                           t->upload ? "clEnqueueWriteBufferRect" : "clEnqueueReadBufferRect");
    for (int64_t i = 0; !t->upload && i < count; i++)
        rows_move(t, host + i * axis->host, 0, t->run_rows, t->bounce + (size_t)i * run);
    return CLATTN_SUCCESS;
}

/* One run, in pieces of the bounce buffer. */
static clattn_status move_run(const struct transfer *t, int64_t device, int64_t host)
{
    int64_t step = t->is_direct ? t->run_rows : t->bounce_rows;
    clattn_status status = CLATTN_SUCCESS;
    for (int64_t row = 0; row < t->run_rows && !status; row += step)
        status = move_rows(t, device, host, row, MIN(step, t->run_rows - row));
    return status;
}

/* All runs. Those that overlap (strides of a broadcast) cannot be a rect. */
static clattn_status move_all(const struct transfer *t, int64_t device)
{
    const struct axis *axes = t->axes, *next = &axes[MIN(t->merged, 2)];
    int64_t at[3], step[3], runs = t->bounce_rows / t->run_rows;
    bool is_rect = t->merged < 3 && runs > 1 && next->device >= t->run_rows * (int64_t)(t->row / t->element);
    clattn_status status = CLATTN_SUCCESS;
    for (int i = 0; i < 3; i++)
        step[i] = i < t->merged ? axes[i].size : is_rect && i == t->merged ? runs : 1;
    for (at[2] = 0; at[2] < axes[2].size; at[2] += step[2])
        for (at[1] = 0; at[1] < axes[1].size; at[1] += step[1])
            for (at[0] = 0; at[0] < axes[0].size && !status; at[0] += step[0]) {
                int64_t on_device = device, on_host = 0;
                for (int i = 0; i < 3; i++) {
                    on_device += at[i] * axes[i].device;
                    on_host += at[i] * axes[i].host;
                }
                status = is_rect ? move_runs(t, next, on_device, on_host, MIN(runs, next->size - at[t->merged]))
                                 : move_run(t, on_device, on_host);
            }
    return status;
}

/* ---- shared virtual memory ---- */

static clattn_status move_svm(struct transfer *t, const clattn_tensor *device)
{
    const struct opencl *state = opencl_of(t->context);
    size_t bytes = (size_t)opencl_tensor_end(device) * t->element;
    cl_int code = state->svm.map(state->queue, CL_TRUE, t->upload ? CL_MAP_WRITE | CL_MAP_READ : CL_MAP_READ,
                                 device->data, bytes, 0, NULL, NULL);
    if (code) return opencl_fail(t->context, code, "clEnqueueSVMMap");
    for (int64_t a = 0; a < t->axes[0].size; a++)
        for (int64_t b = 0; b < t->axes[1].size; b++)
            for (int64_t c = 0; c < t->axes[2].size; c++) {
                const struct axis *axes = t->axes;
                int64_t on_device =
                    device->offset + a * axes[0].device + b * axes[1].device + c * axes[2].device;
                int64_t on_host = a * axes[0].host + b * axes[1].host + c * axes[2].host;
                char *x = (char *)device->data + (size_t)on_device * t->element;
                char *y = t->host + (size_t)on_host * t->element;
                memcpy(t->upload ? x : y, t->upload ? y : x, t->row);
            }
    code = state->svm.unmap(state->queue, device->data, 0, NULL, NULL);
    if (!code) code = clFinish(state->queue);
    return code ? opencl_fail(t->context, code, "clEnqueueSVMUnmap") : CLATTN_SUCCESS;
}

/* ---- both directions ---- */

static clattn_status transfer(clattn_context *context, bool upload, const clattn_tensor *host,
                              const clattn_tensor *device)
{
    double start = seconds_now();
    size_t element = dtype_bytes(host->dtype);
    struct transfer t = {.context = context, .upload = upload, .mem = device->data, .element = element};
    t.host = (char *)host->data + (size_t)host->offset * element;
    t.row = (size_t)host->dim * element;
    transfer_plan(&t, host, device);
    clattn_status status = opencl_transfer_begin(context);
    if (!status) status = opencl_check_tensor(context, device);
    if (status) return status;
    if (device->memory == CLATTN_MEMORY_SVM) {
        status = move_svm(&t, device);
    } else {
        t.bounce_rows = MAX(BOUNCE_BYTES / (int64_t)t.row, 1);
        t.bounce_rows = MIN(t.bounce_rows, host->batch * host->len * host->heads);
        t.bounce = malloc((size_t)t.bounce_rows * t.row);
        if (!t.bounce) return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for a transfer");
        status = move_all(&t, device->offset);
        free(t.bounce);
    }
    stats_add_transfer(context, seconds_now() - start);
    return status;
}

static clattn_status transfer_alone(clattn_context *context, bool upload, const clattn_tensor *host,
                                    const clattn_tensor *device)
{
    opencl_queue_lock(context);
    clattn_status status = transfer(context, upload, host, device);
    opencl_queue_unlock(context);
    return status;
}

clattn_status opencl_tensor_upload(clattn_context *context, const clattn_tensor *host,
                                   const clattn_tensor *device)
{
    return transfer_alone(context, true, host, device);
}

clattn_status opencl_tensor_download(clattn_context *context, const clattn_tensor *device,
                                     const clattn_tensor *host)
{
    return transfer_alone(context, false, host, device);
}
