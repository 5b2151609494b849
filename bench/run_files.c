/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "run.h"

#include "program.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The sizes of a file, whatever the order of its dimensions. */
struct sizes {
    int64_t batch, len, heads, dim;
};

static int read_sizes(const struct run *run, int input, struct sizes *sizes)
{
    const struct tensor_file *file = &run->files[input];
    const char *name = run->input_names[input];
    char text[256];
    if (file->type == ELEMENT_INT32) {
        program_error("%s: holds int32, not a floating-point type", name);
        return STATUS_FAILED;
    }
    if (file->rank != 3 && file->rank != 4) {
        program_error("%s: the shape is %s; 3 or 4 dimensions were expected", name,
                      tensor_shape_text(file->rank, file->shape, text, sizeof text));
        return STATUS_FAILED;
    }
    const int64_t *shape = file->shape + file->rank - 3;
    bool heads_first = run->layout == 1;
    sizes->batch = file->rank == 4 ? file->shape[0] : 1;
    sizes->len = shape[heads_first ? 1 : 0];
    sizes->heads = shape[heads_first ? 0 : 1];
    sizes->dim = shape[2];
    return STATUS_OK;
}

/* Names both files and both numbers. */
static int refuse(const struct run *run, int a, int b, const char *what, int64_t size_a, int64_t size_b)
{
    program_error("%s has %s %" PRId64 " but %s has %" PRId64, run->input_names[a], what, size_a,
                  run->input_names[b], size_b);
    return STATUS_FAILED;
}

static int check_sizes(struct run *run)
{
    struct sizes s[RUN_INPUTS], *q = &s[RUN_Q], *k = &s[RUN_K], *v = &s[RUN_V];
    for (int i = 0; i < RUN_INPUTS; i++) {
        int status = read_sizes(run, i, &s[i]);
        if (status != STATUS_OK) return status;
        if (run->files[i].type != run->files[RUN_Q].type) {
            program_error("%s holds %s but %s holds %s; the types must be the same", run->input_names[i],
                          element_name(run->files[i].type), run->input_names[RUN_Q],
                          element_name(run->files[RUN_Q].type));
            return STATUS_FAILED;
        }
    }
    if (k->batch != q->batch) return refuse(run, RUN_K, RUN_Q, "batch", k->batch, q->batch);
    if (v->batch != q->batch) return refuse(run, RUN_V, RUN_Q, "batch", v->batch, q->batch);
    if (v->len != k->len) return refuse(run, RUN_V, RUN_K, "length", v->len, k->len);
    if (v->heads != k->heads) return refuse(run, RUN_V, RUN_K, "heads", v->heads, k->heads);
    if (k->dim != q->dim) return refuse(run, RUN_K, RUN_Q, "dim", k->dim, q->dim);
    if (q->heads % k->heads != 0) {
        program_error("%s has %" PRId64 " heads, which is not a multiple of the %" PRId64 " heads of %s",
                      run->input_names[RUN_Q], q->heads, k->heads, run->input_names[RUN_K]);
        return STATUS_FAILED;
    }
    run->batch = q->batch, run->q_len = q->len, run->q_heads = q->heads, run->dim = q->dim;
    run->kv_len = k->len, run->kv_heads = k->heads, run->dim_v = v->dim;
    return STATUS_OK;
}

clattn_tensor run_view(const struct run *run, const struct tensor_file *file, int64_t len, int64_t heads,
                       int64_t dim)
{
    /* The library does not write to inputs, though its views are not const. */
    void *data = (void *)(uintptr_t)file->data;
    return run->layout == 1 ? clattn_tensor_bhtd(data, run->dtype, run->batch, heads, len, dim)
                            : clattn_tensor_bthd(data, run->dtype, run->batch, len, heads, dim);
}

int run_open_inputs(struct run *run)
{
    static const clattn_dtype dtypes[] = {[ELEMENT_FLOAT32] = CLATTN_FLOAT32,
                                          [ELEMENT_FLOAT16] = CLATTN_FLOAT16,
                                          [ELEMENT_BFLOAT16] = CLATTN_BFLOAT16};
    for (int i = 0; i < RUN_INPUTS; i++)
        if (tensor_file_open(&run->files[i], run->input_names[i], (enum element_request)run->request) != 0) {
            program_error("%s", run->files[i].error);
            return STATUS_FAILED;
        }
    int status = check_sizes(run);
    if (status != STATUS_OK) return status;
    run->dtype = dtypes[run->files[RUN_Q].type];
    run->job.q = run_view(run, &run->files[RUN_Q], run->q_len, run->q_heads, run->dim);
    run->job.k = run_view(run, &run->files[RUN_K], run->kv_len, run->kv_heads, run->dim);
    run->job.v = run_view(run, &run->files[RUN_V], run->kv_len, run->kv_heads, run->dim_v);
    return STATUS_OK;
}

static struct tensor_values count_values(const struct tensor_file *file, const char *name)
{
    struct tensor_values count = tensor_file_count(file);
    if (count.nan > 0)
        program_warning("%s: %" PRIu64 " of %" PRIu64 " values are NaN", name, count.nan, file->elements);
    if (count.infinite > 0)
        program_warning("%s: %" PRIu64 " of %" PRIu64 " values are infinite", name, count.infinite,
                        file->elements);
    return count;
}

void run_count_values(struct run *run)
{
    for (int i = 0; i < RUN_INPUTS; i++)
        run->values[i] = count_values(&run->files[i], run->input_names[i]);
    for (int i = 0; i < RUN_EXTRAS; i++)
        if (run->extra_names[i]) count_values(&run->extra_files[i], run->extra_names[i]);
}

int run_open_outputs(struct run *run)
{
    const int64_t shapes[RUN_OUTPUTS][4] = {{run->batch, run->q_len, run->q_heads, run->dim_v},
                                            {run->batch, run->q_len, run->q_heads, 1},
                                            {run->batch, run->q_len, run->kv_heads, run->topk}};
    const int ranks[RUN_OUTPUTS] = {4, 3, 4};
    for (int i = 0; i < RUN_OUTPUTS; i++) {
        struct npy_writer *writer = &run->writers[i];
        if (!run->output_names[i]) continue;
        if (npy_writer_open(writer, run->output_names[i], i == RUN_BLOCKS ? ELEMENT_INT32 : ELEMENT_FLOAT32,
                            ranks[i], shapes[i]) != 0) {
            program_error("%s", writer->error);
            return STATUS_FAILED;
        }
        for (int j = 0; j < i; j++)
            if (run->writers[j].temporary && writer->temporary &&
                strcmp(run->writers[j].target, writer->target) == 0) {
                program_error("%s: two results cannot go to the same file", run->output_names[i]);
                return STATUS_USAGE;
            }
    }
    return STATUS_OK;
}

static int write_blocks(struct run *run)
{
    struct npy_writer *writer = &run->writers[RUN_BLOCKS];
    uint64_t bytes = writer->missing;
    int32_t *indices = malloc((size_t)bytes);
    if (!indices) {
        program_error("%s: out of memory", run->output_names[RUN_BLOCKS]);
        return STATUS_FAILED;
    }
    clattn_status status = clattn_blocks_read(run->job.context, run->job.blocks, indices, NULL);
    if (status != CLATTN_SUCCESS)
        device_error(run->job.context, status, "reading the block lists");
    else if (npy_writer_write(writer, indices, bytes) != 0)
        program_error("%s", writer->error);
    free(indices);
    return status == CLATTN_SUCCESS && writer->missing == 0 && writer->target ? STATUS_OK : STATUS_FAILED;
}

int run_write_outputs(struct run *run)
{
    const void *results[] = {run->job.out, run->job.lse};
    for (int i = RUN_OUT; i <= RUN_LSE; i++) {
        struct npy_writer *writer = &run->writers[i];
        if (writer->target && npy_writer_write(writer, results[i], writer->missing) != 0) {
            program_error("%s", writer->error);
            return STATUS_FAILED;
        }
    }
    if (run->writers[RUN_BLOCKS].target && write_blocks(run) != STATUS_OK) return STATUS_FAILED;
    /* All are complete: only now does each take its place. */
    for (int i = 0; i < RUN_OUTPUTS; i++)
        if (run->writers[i].target && npy_writer_close(&run->writers[i]) != 0) {
            program_error("%s", run->writers[i].error);
            return STATUS_FAILED;
        }
    return STATUS_OK;
}

void run_close(struct run *run)
{
    job_release(&run->job);
    clattn_context_release(run->job.context);
    clattn_pattern_release(run->pattern);
    free(run->job.out);
    free(run->job.lse);
    for (int i = 0; i < RUN_OUTPUTS; i++)
        npy_writer_abandon(&run->writers[i]);
    for (int i = 0; i < RUN_INPUTS; i++)
        tensor_file_close(&run->files[i]);
    run_close_extras(run);
    quality_files_close(&run->quality_files);
}
