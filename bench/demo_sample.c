/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "demo.h"

#include "tolerance.h"
#include "device.h"
#include "job.h"
#include "program.h"
#include "sixteen.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const file_names[SAMPLE_FILES] = {"q",          "k",          "v",      "pos",
                                                     "answer_pos", "needle_pos", "o_pisa", "lse_pisa"};

static bool has_sample(const char *directory)
{
    char path[1100];
    snprintf(path, sizeof path, "%s/q.npy", directory);
    return access(path, R_OK) == 0;
}

/* Beside the program, installed or in its build tree, so that both may be moved; else where it was to be
 * installed. */
static bool find_sample(char *directory, size_t size)
{
    static const char *const places[] = {
        "../share/clattn/retrieval16k",     "tests/data/retrieval16k",
        "../tests/data/retrieval16k",       "../../tests/data/retrieval16k",
        "../../../tests/data/retrieval16k", "../../../../tests/data/retrieval16k",
    };
    char program[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    program[length > 0 ? length : 0] = 0;
    char *slash = strrchr(program, '/');
    if (slash) *slash = 0;
    for (size_t i = 0; slash && i < sizeof places / sizeof *places; i++) {
        int n = snprintf(directory, size, "%s/%s", program, places[i]);
        if (n > 0 && (size_t)n < size && has_sample(directory)) return true;
    }
    snprintf(directory, size, "%s", SAMPLE_DIRECTORY);
    return has_sample(directory);
}

/* Opens directory/name.npy and checks type and shape; a size of 0 is any. */
static int open_file(struct tensor_file *file, const struct sample *sample, const char *name,
                     enum element_type type, int rank, const int64_t *shape)
{
    char path[1100], text[200];
    snprintf(path, sizeof path, "%s/%s.npy", sample->directory, name);
    if (tensor_file_open(file, path, REQUEST_ANY) != 0) {
        program_error("%s", file->error);
        return STATUS_FAILED;
    }
    bool fits = file->type == type && file->rank == rank;
    for (int i = 0; fits && i < rank; i++)
        fits = shape[i] == 0 || shape[i] == file->shape[i];
    if (fits) return STATUS_OK;
    program_error("%s: %s %s is not what the sample has", path, element_name(file->type),
                  tensor_shape_text(file->rank, file->shape, text, sizeof text));
    return STATUS_FAILED;
}

static int check_range(const struct sample *sample, enum sample_file which, int64_t first, int64_t end)
{
    const struct tensor_file *file = &sample->files[which];
    const int32_t *values = file->data;
    for (uint64_t i = 0; i < file->elements; i++)
        if (values[i] < first || values[i] >= end) {
            program_error("%s/%s.npy: %d is out of range", sample->directory, file_names[which], values[i]);
            return STATUS_FAILED;
        }
    return STATUS_OK;
}

static int open_files(struct sample *s)
{
    struct tensor_file *f = s->files;
    int status;
    if ((status = open_file(&f[SAMPLE_Q], s, "q", ELEMENT_FLOAT16, 4, (int64_t[]){1, 0, 0, 0})) != STATUS_OK)
        return status;
    s->q_len = f[SAMPLE_Q].shape[1], s->q_heads = f[SAMPLE_Q].shape[2], s->dim = f[SAMPLE_Q].shape[3];
    if ((status = open_file(&f[SAMPLE_K], s, "k", ELEMENT_FLOAT16, 4, (int64_t[]){1, 0, 1, s->dim})) !=
        STATUS_OK)
        return status;
    s->kv_len = f[SAMPLE_K].shape[1], s->kv_heads = 1;
    if ((status = open_file(&f[SAMPLE_V], s, "v", ELEMENT_FLOAT16, 4, (int64_t[]){1, s->kv_len, 1, 0})) !=
        STATUS_OK)
        return status;
    s->dim_v = f[SAMPLE_V].shape[3];
    s->first_position = s->kv_len - s->q_len;
    if ((status = open_file(&f[SAMPLE_POS], s, "pos", ELEMENT_INT32, 1, (int64_t[]){0})) != STATUS_OK)
        return status;
    s->positions = f[SAMPLE_POS].shape[0];
    if ((status = open_file(&f[SAMPLE_ANSWERS], s, "answer_pos", ELEMENT_INT32, 1, (int64_t[]){0})) !=
        STATUS_OK)
        return status;
    s->answers = f[SAMPLE_ANSWERS].shape[0];
    const int64_t out[] = {s->positions, s->q_heads, s->dim_v};
    if ((status = open_file(&f[SAMPLE_NEEDLES], s, "needle_pos", ELEMENT_INT32, 1, &s->answers)) != STATUS_OK ||
        (status = open_file(&f[SAMPLE_OUT], s, "o_pisa", ELEMENT_FLOAT32, 3, out)) != STATUS_OK ||
        (status = open_file(&f[SAMPLE_LSE], s, "lse_pisa", ELEMENT_FLOAT32, 2, out)) != STATUS_OK ||
        (status = check_range(s, SAMPLE_POS, s->first_position, s->kv_len)) != STATUS_OK ||
        (status = check_range(s, SAMPLE_ANSWERS, s->first_position, s->kv_len)) != STATUS_OK)
        return status;
    return check_range(s, SAMPLE_NEEDLES, 0, s->kv_len);
}

int sample_open(struct sample *sample, const char *directory)
{
    if (directory)
        snprintf(sample->directory, sizeof sample->directory, "%s", directory);
    else if (!find_sample(sample->directory, sizeof sample->directory)) {
        program_error("the sample is not in %s; name its folder by --data", sample->directory);
        return STATUS_FAILED;
    }
    int status = open_files(sample);
    sample->dtype = CLATTN_FLOAT16;
    sample->position = sample->files[SAMPLE_POS].data;
    sample->answer = sample->files[SAMPLE_ANSWERS].data;
    sample->needle = sample->files[SAMPLE_NEEDLES].data;
    return status;
}

void sample_close(struct sample *sample)
{
    for (int i = 0; i < SAMPLE_FILES; i++)
        tensor_file_close(&sample->files[i]);
}

clattn_tensor sample_view(const struct sample *sample, enum sample_file which)
{
    const int64_t *shape = sample->files[which].shape;
    return clattn_tensor_bthd((void *)(uintptr_t)sample->files[which].data, sample->dtype, 1, shape[1],
                              shape[2], shape[3]);
}

/* A list for every query row: the expected one where it is known, else none. */
static int make_blocks(const struct oracle *oracle, const struct sample *sample, clattn_context *context,
                       clattn_blocks **blocks)
{
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    desc.block = SAMPLE_LEAF;
    desc.rows = sample->q_len;
    desc.topk = SAMPLE_TOPK;
    size_t entries = (size_t)sample->q_len * SAMPLE_TOPK;
    int32_t *indices = malloc(entries * sizeof *indices);
    if (!indices) return STATUS_FAILED;
    for (size_t i = 0; i < entries; i++)
        indices[i] = -1;
    for (int64_t i = 0; i < sample->positions; i++)
        memcpy(indices + (sample->position[i] - sample->first_position) * SAMPLE_TOPK,
               oracle->lists + i * SAMPLE_TOPK, SAMPLE_TOPK * sizeof *indices);
    clattn_status status = clattn_blocks_create(context, &desc, indices, blocks);
    if (status != CLATTN_SUCCESS) device_error(context, status, "the sample's lists");
    free(indices);
    return status == CLATTN_SUCCESS ? STATUS_OK : STATUS_FAILED;
}

/* Attends to the expected lists with v, or with |v|; out and lse [q_len] rows, of which the known ones are
 * kept. */
static int attend(struct oracle *oracle, const struct sample *sample, clattn_context *context, void *v,
                  float *out, float *lse)
{
    struct job job = {
        .context = context, .attention = CLATTN_ATTENTION_DESC_INIT, .select = CLATTN_SELECT_DESC_INIT};
    const int64_t heads = sample->q_heads, dim_v = sample->dim_v;
    job.q = sample_view(sample, SAMPLE_Q);
    job.k = sample_view(sample, SAMPLE_K);
    job.v = sample_view(sample, SAMPLE_V);
    job.v.data = v;
    job.out = malloc((size_t)(sample->q_len * heads * dim_v) * sizeof *out);
    job.lse = malloc((size_t)(sample->q_len * heads) * sizeof *lse);
    int status = job.out && job.lse ? make_blocks(oracle, sample, context, &job.blocks) : STATUS_FAILED;
    if (status == STATUS_OK) status = job_run(&job);
    for (int64_t i = 0; status == STATUS_OK && i < sample->positions; i++) {
        int64_t row = sample->position[i] - sample->first_position;
        memcpy(out + i * heads * dim_v, job.out + row * heads * dim_v, (size_t)(heads * dim_v) * sizeof *out);
        memcpy(lse + i * heads, job.lse + row * heads, (size_t)heads * sizeof *lse);
    }
    job_release(&job);
    free(job.out);
    free(job.lse);
    return status;
}

static float *widen(const struct tensor_file *file)
{
    float *values = malloc((size_t)file->elements * sizeof *values);
    for (uint64_t i = 0; values && i < file->elements; i++)
        values[i] = half_to_float(((const uint16_t *)file->data)[i]);
    return values;
}

/* What the tolerance of each row depends on. */
static bool measure_rows(struct oracle *oracle, const struct sample *sample)
{
    float *q = widen(&sample->files[SAMPLE_Q]), *k = widen(&sample->files[SAMPLE_K]);
    for (int64_t i = 0; q && k && i < sample->positions; i++) {
        struct row_keys keys = {
            k,           sample->dim, sample->position[i] + 1, oracle->lists + i * SAMPLE_TOPK,
            SAMPLE_LEAF, SAMPLE_TOPK, (int32_t)sample->dim};
        int64_t row = (sample->position[i] - sample->first_position) * sample->q_heads;
        oracle->keys[i] = row_count(&keys);
        for (int64_t h = 0; h < sample->q_heads; h++)
            oracle->condition[i * sample->q_heads + h] =
                row_condition(&keys, q + (row + h) * sample->dim, 1 / sqrt((double)sample->dim));
    }
    bool done = q && k;
    free(q);
    free(k);
    return done;
}

static int fill_oracle(struct oracle *oracle, const struct sample *sample, bool known,
                       clattn_context *reference)
{
    const struct tensor_file *v = &sample->files[SAMPLE_V];
    uint16_t *abs_v = malloc((size_t)v->elements * sizeof *abs_v);
    if (!abs_v) return STATUS_FAILED;
    for (uint64_t i = 0; i < v->elements; i++)
        abs_v[i] = ((const uint16_t *)v->data)[i] & 0x7fff;
    int status = attend(oracle, sample, reference, abs_v, oracle->abs_out, oracle->lse);
    free(abs_v);
    if (status != STATUS_OK) return status;
    if (!known) return attend(oracle, sample, reference, (void *)(uintptr_t)v->data, oracle->out, oracle->lse);
    memcpy(oracle->out, sample->files[SAMPLE_OUT].data,
           (size_t)sample->files[SAMPLE_OUT].elements * sizeof(float));
    memcpy(oracle->lse, sample->files[SAMPLE_LSE].data,
           (size_t)sample->files[SAMPLE_LSE].elements * sizeof(float));
    return STATUS_OK;
}

int oracle_open(struct oracle *oracle, const struct sample *sample, const char *selector,
                clattn_context *reference)
{
    const int64_t shape[] = {sample->positions, SAMPLE_TOPK};
    const size_t rows = (size_t)(sample->positions * sample->q_heads);
    char name[32];
    int status;
    snprintf(name, sizeof name, "sel_%s", selector);
    if ((status = open_file(&oracle->lists_file, sample, name, ELEMENT_INT32, 2, shape)) != STATUS_OK)
        return status;
    snprintf(name, sizeof name, "gap_%s", selector);
    if ((status = open_file(&oracle->gap_file, sample, name, ELEMENT_FLOAT32, 1, shape)) != STATUS_OK)
        return status;
    oracle->lists = oracle->lists_file.data;
    oracle->gap = oracle->gap_file.data;
    oracle->out = malloc(rows * (size_t)sample->dim_v * sizeof *oracle->out);
    oracle->abs_out = malloc(rows * (size_t)sample->dim_v * sizeof *oracle->abs_out);
    oracle->lse = malloc(rows * sizeof *oracle->lse);
    oracle->keys = malloc((size_t)sample->positions * sizeof *oracle->keys);
    oracle->condition = malloc(rows * sizeof *oracle->condition);
    if (!oracle->out || !oracle->abs_out || !oracle->lse || !oracle->keys || !oracle->condition ||
        !measure_rows(oracle, sample)) {
        program_error("out of memory");
        return STATUS_FAILED;
    }
    return fill_oracle(oracle, sample, strcmp(selector, "pisa") == 0, reference);
}

void oracle_close(struct oracle *oracle)
{
    tensor_file_close(&oracle->lists_file);
    tensor_file_close(&oracle->gap_file);
    free(oracle->out);
    free(oracle->abs_out);
    free(oracle->lse);
    free(oracle->keys);
    free(oracle->condition);
}
