/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "run.h"

#include "program.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS_JUDGED = 256 }; /* without --positions, evenly spread: each costs a pass over all keys */

int run_check_quality(const struct run *run)
{
    if (!run->quality_wanted) {
        if (run->positions_name || run->answers_name || run->needles_name || run->from)
            return program_usage("--positions, --answers, --needles and --from need --quality");
        return STATUS_OK;
    }
    if (run->is_neighborhood) return program_usage("--layout-dims does not go with --quality");
    if (run->select.selector == CLATTN_SELECT_DENSE && !run->pattern)
        return program_usage("--quality: the dense selector makes no block lists");
    if (run->cu_names[0]) return program_usage("--quality: not with packed sequences");
    if (run->extra_names[RUN_BIAS]) return program_usage("--quality: not with a bias, which it does not weigh");
    return STATUS_OK;
}

int run_open_quality(struct run *run)
{
    struct quality_files *files = &run->quality_files;
    static const int32_t leaves[] = {16, 32, 64, 128};
    int64_t kept = 0;
    if (!run->quality_wanted) return STATUS_OK;
    if (run->batch != 1) {
        program_error("--quality: %s has batch %" PRId64 "; one sequence was expected", run->input_names[RUN_Q],
                      run->batch);
        return STATUS_FAILED;
    }
    int status = quality_files_open(files, run->positions_name, run->answers_name, run->needles_name, run->from,
                                    run->q_len, run->kv_len, leaves[run->leaf]);
    if (status != STATUS_OK || run->positions_name || files->row_count <= ROWS_JUDGED) return status;
    for (int64_t n = 0; n < ROWS_JUDGED; n++)
        files->rows[kept++] = files->rows[(2 * n + 1) * files->row_count / (2 * ROWS_JUDGED)];
    files->row_count = kept;
    return STATUS_OK;
}

int run_judge(struct run *run)
{
    const struct job *job = &run->job;
    const struct quality_files *files = &run->quality_files;
    const struct quality_problem problem = {.q = job->q,
                                            .k = job->k,
                                            .causal = run->causal,
                                            .scale = job->attention.scale,
                                            .softcap = job->attention.softcap,
                                            .window = job->attention.window,
                                            .leaf = job->select.leaf,
                                            .topk = job->select.topk,
                                            .rows = files->rows,
                                            .row_count = files->row_count,
                                            .answer_rows = files->answer_rows,
                                            .answer_leaves = files->answer_leaves,
                                            .answer_count = files->answer_count};
    clattn_blocks_desc desc = {.size = sizeof desc};
    if (!run->quality_wanted) return STATUS_OK;
    clattn_status status = clattn_blocks_describe(job->blocks, &desc);
    size_t entries = status ? 0 : (size_t)desc.rows * (size_t)desc.heads * (size_t)desc.topk;
    int32_t *indices = malloc((entries + 1) * sizeof *indices);
    if (!status && indices) status = clattn_blocks_read(job->context, job->blocks, indices, NULL);
    const struct quality_lists lists = {indices, desc.topk, desc.heads, desc.q_block};
    bool good = indices && !status && quality_measure(&problem, &lists, 1, &run->quality);
    if (status)
        device_error(job->context, status, "reading the block lists");
    else if (!good)
        program_error("out of memory");
    free(indices);
    return good ? STATUS_OK : STATUS_FAILED;
}

void run_report_quality(report *parent, const struct run *run)
{
    const struct quality *quality = &run->quality;
    if (!run->quality_wanted) return;
    report *object = report_child(parent, "quality");
    report_integer(object, "lists", quality->lists);
    report_real(object, "recall", quality_recall(quality));
    report_real(object, "mass", quality_mass(quality));
    report_real(object, "of_best", quality_share(quality));
    report_integer(object, "answers", quality->answers);
    report_integer(object, "found", quality->found);
}

void run_print_quality(const struct run *run)
{
    const struct quality *quality = &run->quality;
    if (!run->quality_wanted) return;
    printf("quality    recall@%" PRId64 " %.3f, mass %.3f, of the best %.3f, in %" PRId64 " lists", run->topk,
           quality_recall(quality), quality_mass(quality), quality_share(quality), quality->lists);
    if (run->answers_name)
        printf("; %" PRId64 " of %" PRId64 " answers found", quality->found, quality->answers);
    puts("");
}
