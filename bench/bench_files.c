/* SPDX-License-Identifier: MIT
 *
 * Queries and keys of files for the suite selection-quality, and how good the lists are that were chosen for
 * them. */
#include "config.h"

#include "bench.h"

#include "demo.h"
#include "program.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS_JUDGED = 64 }; /* without --positions, evenly spread: each costs a pass over all keys */

/* ---- opening ---- */

static int open_tensor(struct tensor_file *file, const char *name)
{
    char text[200];
    if (tensor_file_open(file, name, REQUEST_ANY) != 0) {
        program_error("%s", file->error);
        return STATUS_FAILED;
    }
    bool is_one = file->rank == 3 || (file->rank == 4 && file->shape[0] == 1);
    if (is_one && file->type != ELEMENT_INT32) return STATUS_OK;
    program_error("%s: %s %s; [len][heads][dim] of a floating-point type was expected", name,
                  element_name(file->type), tensor_shape_text(file->rank, file->shape, text, sizeof text));
    return STATUS_FAILED;
}

static int check_tensors(struct bench_files *files)
{
    const int64_t *q = files->q.shape + files->q.rank - 3, *k = files->k.shape + files->k.rank - 3;
    if (files->q.type != files->k.type || q[2] != k[2] || q[1] % k[1] != 0 || q[0] > k[0] || q[2] > 256) {
        program_error(
            "%s and %s do not fit: the same type and dim (at most 256), query heads that are a multiple of the "
            "key heads, and no more queries than keys are needed",
            files->q_name, files->k_name);
        return STATUS_FAILED;
    }
    files->q_len = q[0], files->kv_len = k[0];
    files->q_heads = (int32_t)q[1], files->kv_heads = (int32_t)k[1], files->dim = (int32_t)q[2];
    files->dtype = files->q.type == ELEMENT_FLOAT32   ? CLATTN_FLOAT32
                   : files->q.type == ELEMENT_FLOAT16 ? CLATTN_FLOAT16
                                                      : CLATTN_BFLOAT16;
    return STATUS_OK;
}

/* The bundled sample, when no files are named. */
static int use_sample(struct bench_files *files)
{
    struct sample sample;
    int status = sample_open(&sample, NULL);
    static const char *const names[] = {"q", "k", "pos", "answer_pos", "needle_pos"};
    const char **const to[] = {&files->q_name, &files->k_name, &files->positions, &files->answers,
                               &files->needles};
    for (int n = 0; n < 5 && status == STATUS_OK; n++) {
        snprintf(files->sample_names[n], sizeof files->sample_names[n], "%s/%s.npy", sample.directory,
                 names[n]);
        *to[n] = files->sample_names[n];
    }
    sample_close(&sample);
    return status;
}

/* Every n-th of the rows, so that few are left. */
static void thin_out(struct bench_files *files)
{
    struct quality_files *rows = &files->rows;
    int64_t kept = 0;
    if (files->positions || rows->row_count <= ROWS_JUDGED) return;
    for (int64_t n = 0; n < ROWS_JUDGED; n++)
        rows->rows[kept++] = rows->rows[(2 * n + 1) * rows->row_count / (2 * ROWS_JUDGED)];
    rows->row_count = kept;
}

int bench_files_open(struct bench_files *files, int32_t leaf)
{
    int status = STATUS_OK;
    if (!files->q_name != !files->k_name) return program_usage("--q and --k go together");
    if (!files->q_name && (files->positions || files->answers || files->needles))
        return program_usage("--positions, --answers and --needles need --q and --k");
    if (!files->q_name) status = use_sample(files);
    if (status == STATUS_OK) status = open_tensor(&files->q, files->q_name);
    if (status == STATUS_OK) status = open_tensor(&files->k, files->k_name);
    if (status == STATUS_OK) status = check_tensors(files);
    if (status == STATUS_OK)
        status = quality_files_open(&files->rows, files->positions, files->answers, files->needles, files->from,
                                    files->q_len, files->kv_len, leaf);
    if (status == STATUS_OK) thin_out(files);
    files->is_open = status == STATUS_OK;
    return status;
}

void bench_files_close(struct bench_files *files)
{
    tensor_file_close(&files->q);
    tensor_file_close(&files->k);
    quality_files_close(&files->rows);
}

/* ---- quality ---- */

bool bench_judge(const struct bench_problem *problem, struct quality *quality)
{
    const struct bench_case *s = problem->shape;
    const struct quality_files *rows = &s->files->rows;
    const struct quality_problem input = {.q = problem->q,
                                          .k = problem->k,
                                          .causal = s->causal,
                                          .scale = CLATTN_SCALE_DEFAULT,
                                          .leaf = s->leaf,
                                          .topk = s->topk,
                                          .rows = rows->rows,
                                          .row_count = rows->row_count,
                                          .answer_rows = rows->answer_rows,
                                          .answer_leaves = rows->answer_leaves,
                                          .answer_count = rows->answer_count};
    const struct quality_lists lists = {problem->indices, problem->list.topk, problem->list.heads,
                                        problem->list.q_block};
    *quality = (struct quality){0};
    return quality_measure(&input, &lists, 1, quality);
}
