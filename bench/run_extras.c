/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "run.h"

#include "options.h"
#include "program.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static int open_file(struct tensor_file *file, const char *name, int request)
{
    if (tensor_file_open(file, name, (enum element_request)request) == 0) return STATUS_OK;
    program_error("%s", file->error);
    return STATUS_FAILED;
}

static int refuse_shape(const struct tensor_file *file, const char *name, const char *expected)
{
    char text[256];
    program_error("%s: %s of shape %s; expected is %s", name, element_name(file->type),
                  tensor_shape_text(file->rank, file->shape, text, sizeof text), expected);
    return STATUS_FAILED;
}

/* ---- packed sequences ---- */

static int32_t *parse_list(const char *text, int64_t *count)
{
    char *copy = strdup(text), *rest = copy, *word;
    int32_t *numbers = malloc((strlen(text) + 1) * sizeof *numbers);
    bool good = copy && numbers;
    *count = 0;
    while (good && (word = strsep(&rest, ",")) != NULL) {
        int64_t number = 0;
        good = parse_integer(word, 0, INT32_MAX, &number);
        numbers[(*count)++] = (int32_t)number;
    }
    free(copy);
    if (good) return numbers;
    free(numbers);
    return NULL;
}

/* The numbers of one of the two options. */
static int read_cu(struct run *run, int which, int64_t *count)
{
    const char *name = run->cu_names[which];
    struct tensor_file file = {0};
    if (strspn(name, "0123456789,") == strlen(name)) {
        run->cu_seqlens[which] = parse_list(name, count);
        return run->cu_seqlens[which]
                   ? STATUS_OK
                   : program_usage("--cu-seqlens-%c: '%s' is not a list of numbers from 0 to 2^31 - 1",
                                   "qk"[which], name);
    }
    int status = open_file(&file, name, REQUEST_ANY);
    if (status == STATUS_OK && (file.type != ELEMENT_INT32 || file.rank != 1))
        status = refuse_shape(&file, name, "int32 of one dimension");
    if (status == STATUS_OK) {
        size_t bytes = (size_t)file.elements * sizeof(int32_t);
        *count = (int64_t)file.elements;
        run->cu_seqlens[which] = malloc(bytes);
        if (run->cu_seqlens[which])
            memcpy(run->cu_seqlens[which], file.data, bytes);
        else
            status = STATUS_FAILED, program_error("%s: out of memory", name);
    }
    tensor_file_close(&file);
    return status;
}

static int check_cu(const struct run *run, int which, int64_t count, int64_t len)
{
    const int32_t *cu = run->cu_seqlens[which];
    for (int64_t i = 0; i < count; i++)
        if (cu[i] < (i ? cu[i - 1] : 0) || (i == 0 && cu[i] != 0)) {
            program_error("--cu-seqlens-%c: entry %" PRId64 " is %" PRId32
                          "; they begin with 0 and never descend",
                          "qk"[which], i, cu[i]);
            return STATUS_FAILED;
        }
    if (cu[count - 1] == len) return STATUS_OK;
    program_error("--cu-seqlens-%c ends at %" PRId32 ", but %s has length %" PRId64, "qk"[which], cu[count - 1],
                  run -> input_names[which == 0 ? RUN_Q : RUN_K], len);
    return STATUS_FAILED;
}

static int open_sequences(struct run *run)
{
    int64_t count[2];
    int status;
    if (!run->cu_names[0]) return STATUS_OK;
    if ((status = read_cu(run, 0, &count[0])) != STATUS_OK ||
        (status = read_cu(run, 1, &count[1])) != STATUS_OK ||
        (status = check_cu(run, 0, count[0], run->q_len)) != STATUS_OK ||
        (status = check_cu(run, 1, count[1], run->kv_len)) != STATUS_OK)
        return status;
    if (count[0] != count[1]) {
        program_error("--cu-seqlens-q has %" PRId64 " numbers but --cu-seqlens-k has %" PRId64, count[0],
                      count[1]);
        return STATUS_FAILED;
    }
    if (count[0] < 2 || run->batch != 1) {
        program_error(count[0] < 2 ? "--cu-seqlens-q: at least two numbers are needed"
                                   : "--cu-seqlens-q: packed sequences need batch 1");
        return STATUS_FAILED;
    }
    run->sequences = run->job.attention.sequences = count[0] - 1;
    run->job.attention.cu_seqlens_q = run->cu_seqlens[0];
    run->job.attention.cu_seqlens_k = run->cu_seqlens[1];
    return STATUS_OK;
}

/* ---- sink and bias ---- */

static int open_sink(struct run *run)
{
    struct tensor_file *file = &run->extra_files[RUN_SINK];
    const char *name = run->extra_names[RUN_SINK];
    if (!name) return STATUS_OK;
    int status = open_file(file, name, REQUEST_ANY);
    if (status != STATUS_OK) return status;
    if (file->type != ELEMENT_FLOAT32 || file->rank != 1 || file->shape[0] != run->q_heads)
        return refuse_shape(file, name, "float32 [q_heads]");
    run->sink = clattn_tensor_bthd((void *)(uintptr_t)file->data, CLATTN_FLOAT32, 1, 1, run->q_heads, 1);
    run->job.attention.sink = &run->sink;
    return STATUS_OK;
}

static int open_bias(struct run *run)
{
    struct tensor_file *file = &run->extra_files[RUN_BIAS];
    const char *name = run->extra_names[RUN_BIAS];
    if (!name) return STATUS_OK;
    int status = open_file(file, name, REQUEST_ANY);
    if (status != STATUS_OK) return status;
    int64_t batch = file->rank == 3 ? file->shape[0] : 1;
    if (file->type != ELEMENT_FLOAT32 || (file->rank != 2 && file->rank != 3) ||
        file->shape[file->rank - 1] != run->q_heads || (batch != 1 && batch != run->batch))
        return refuse_shape(file, name, "float32 [leaves][q_heads] or [batch][leaves][q_heads]");
    run->bias = clattn_tensor_bthd((void *)(uintptr_t)file->data, CLATTN_FLOAT32, batch,
                                   file->shape[file->rank - 2], run->q_heads, 1);
    run->job.attention.bias = &run->bias;
    return STATUS_OK;
}

/* ---- neighborhoods ---- */

/* Extra keys or values: as k or v, but of any length. */
static int open_extra(struct run *run, enum run_extra which, int64_t dim, clattn_tensor *view)
{
    struct tensor_file *file = &run->extra_files[which];
    const char *name = run->extra_names[which];
    bool heads_first = run->layout == 1;
    int status = open_file(file, name, run->request);
    if (status != STATUS_OK) return status;
    int64_t batch = file->rank == 4 ? file->shape[0] : 1;
    const int64_t *shape = file->shape + (file->rank == 4);
    if (file->type != run->files[RUN_Q].type || (file->rank != 3 && file->rank != 4) || batch != run->batch ||
        shape[heads_first ? 0 : 1] != run->kv_heads || shape[2] != dim)
        return refuse_shape(file, name,
                            which == RUN_EXTRA_K ? "the type, batch, heads and dim of --k"
                                                 : "the type, batch, heads and dim of --v");
    *view = run_view(run, file, shape[heads_first ? 1 : 0], run->kv_heads, dim);
    return STATUS_OK;
}

static int open_neighborhood(struct run *run)
{
    int64_t tokens = 1;
    int status;
    for (int a = 0; a < run->neighborhood.axes; a++)
        tokens *= run->neighborhood.length[a];
    for (int i = RUN_Q; i <= RUN_K; i++) {
        int64_t len = i == RUN_Q ? run->q_len : run->kv_len;
        if (len == tokens) continue;
        program_error("%s has length %" PRId64 " but the layout %s has %" PRId64 " tokens", run->input_names[i],
                      len, run->layout_text.layout, tokens);
        return STATUS_FAILED;
    }
    if (!run->extra_names[RUN_EXTRA_K]) return STATUS_OK;
    if ((status = open_extra(run, RUN_EXTRA_K, run->dim, &run->job.extra_k)) != STATUS_OK ||
        (status = open_extra(run, RUN_EXTRA_V, run->dim_v, &run->job.extra_v)) != STATUS_OK)
        return status;
    if (run->job.extra_k.len == run->job.extra_v.len) return STATUS_OK;
    program_error("%s has length %" PRId64 " but %s has %" PRId64, run->extra_names[RUN_EXTRA_V],
                  run->job.extra_v.len, run->extra_names[RUN_EXTRA_K], run->job.extra_k.len);
    return STATUS_FAILED;
}

int run_open_extras(struct run *run)
{
    int status;
    if (run->is_neighborhood) return open_neighborhood(run);
    if ((status = open_sequences(run)) != STATUS_OK || (status = open_sink(run)) != STATUS_OK) return status;
    return open_bias(run);
}

void run_close_extras(struct run *run)
{
    for (int i = 0; i < RUN_EXTRAS; i++)
        tensor_file_close(&run->extra_files[i]);
    free(run->cu_seqlens[0]);
    free(run->cu_seqlens[1]);
}
