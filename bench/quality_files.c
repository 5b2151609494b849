/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "quality.h"

#include "program.h"

#include <inttypes.h>
#include <stdlib.h>

static int open_positions(struct tensor_file *file, const char *name)
{
    if (tensor_file_open(file, name, REQUEST_ANY) != 0) {
        program_error("%s: %s", name, file->error);
        return STATUS_FAILED;
    }
    if (file->type != ELEMENT_INT32 || file->rank != 1) {
        program_error("%s: one row of int32 was expected", name);
        return STATUS_FAILED;
    }
    return STATUS_OK;
}

/* The judged rows: those that `positions` names, or all, from position `from` on. */
static bool make_rows(struct quality_files *files, int64_t from, int64_t q_len, int64_t kv_len)
{
    const int32_t *position = files->positions.data;
    int64_t count = position ? (int64_t)files->positions.elements : q_len;
    files->rows = malloc((size_t)count * sizeof *files->rows);
    for (int64_t n = 0; n < count && files->rows; n++) {
        int64_t row = position ? position[n] - (kv_len - q_len) : n;
        if (row >= 0 && row < q_len && row + kv_len - q_len >= from) files->rows[files->row_count++] = row;
    }
    return files->rows != NULL;
}

static bool make_answers(struct quality_files *files, int64_t q_len, int64_t kv_len, int32_t leaf)
{
    const int32_t *answer = files->answers.data, *needle = files->needles.data;
    int64_t count = (int64_t)files->answers.elements;
    files->answer_rows = malloc((size_t)count * sizeof *files->answer_rows);
    files->answer_leaves = malloc((size_t)count * sizeof *files->answer_leaves);
    if (!files->answer_rows || !files->answer_leaves) return false;
    for (int64_t n = 0; n < count; n++) {
        int64_t row = answer[n] - (kv_len - q_len);
        if (row < 0 || row >= q_len || needle[n] < 0) continue;
        files->answer_rows[files->answer_count] = row;
        files->answer_leaves[files->answer_count++] = needle[n] / leaf;
    }
    return true;
}

int quality_files_open(struct quality_files *files, const char *positions, const char *answers,
                       const char *needles, int64_t from, int64_t q_len, int64_t kv_len, int32_t leaf)
{
    int status = STATUS_OK;
    *files = (struct quality_files){0};
    if (!answers != !needles) return program_usage("--answers and --needles go together");
    if (positions) status = open_positions(&files->positions, positions);
    if (status == STATUS_OK && answers) status = open_positions(&files->answers, answers);
    if (status == STATUS_OK && needles) status = open_positions(&files->needles, needles);
    if (status != STATUS_OK) return status;
    if (files->answers.elements != files->needles.elements) {
        program_error("%s has %" PRIu64 " positions and %s %" PRIu64, answers, files->answers.elements, needles,
                      files->needles.elements);
        return STATUS_FAILED;
    }
    if (make_rows(files, from, q_len, kv_len) && (!answers || make_answers(files, q_len, kv_len, leaf)))
        return STATUS_OK;
    program_error("out of memory");
    return STATUS_FAILED;
}

void quality_files_close(struct quality_files *files)
{
    tensor_file_close(&files->positions);
    tensor_file_close(&files->answers);
    tensor_file_close(&files->needles);
    free(files->rows);
    free(files->answer_rows);
    free(files->answer_leaves);
    *files = (struct quality_files){0};
}
