/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "check.h"

#include "device.h"
#include "program.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The keys of one head of the row at `place`. */
static struct row_keys row_keys(const struct check_problem *problem, struct query_place place,
                                const int32_t *list, int64_t kv_head)
{
    const struct check_case *s = problem->shape;
    int64_t visible = place.keys;
    if (s->causal && place.position + 1 < visible) visible = place.position + 1;
    return (struct row_keys){problem->k + (place.key_base * s->kv_heads + kv_head) * s->dim,
                             (int64_t)s->kv_heads * s->dim,
                             visible < 0 ? 0 : visible,
                             list,
                             s->leaf,
                             s->topk,
                             s->dim};
}

/* A list that rounding decided still has as many leaves, ascending, none that the sequence does not have. */
static bool is_list(const struct check_problem *problem, struct query_place place, const int32_t *list,
                    const int32_t *reference)
{
    const struct check_case *s = problem->shape;
    for (int32_t n = 0; n < s->topk; n++) {
        if ((list[n] < 0) != (reference[n] < 0)) return false;
        if (list[n] >= 0 && (int64_t)list[n] * s->leaf >= place.keys) return false;
        if (list[n] >= 0 && n > 0 && list[n] <= list[n - 1]) return false;
    }
    return true;
}

static void compare_lists(const struct check_problem *problem, const int32_t *lists,
                          struct check_result *result)
{
    const struct check_case *s = problem->shape;
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t i = 0; i < s->q_len; i++)
            for (int64_t g = 0; g < s->kv_heads; g++) {
                size_t at = (size_t)(((b * s->q_len + i) * s->kv_heads + g) * s->topk);
                if (memcmp(lists + at, problem->lists + at, (size_t)s->topk * sizeof *lists) == 0) continue;
                struct select_gap decided = select_gap(problem, b, i, g);
                /* Scores without rounding: the lower index wins. */
                bool exact = s->kind == INPUT_ZERO_Q;
                if (exact || decided.gap > decided.error ||
                    !is_list(problem, check_problem_place(problem, b, i), lists + at, problem->lists + at))
                    result->lists_wrong++;
                else
                    result->lists_tied++;
            }
}

static void compare_numbers(const struct check_problem *problem, const struct job *job,
                            struct comparison *comparison)
{
    const struct check_case *s = problem->shape;
    const int32_t group = s->q_heads / s->kv_heads;
    const double scale = 1 / sqrt((double)s->dim);
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t i = 0; i < s->q_len; i++) {
            struct query_place place = check_problem_place(problem, b, i);
            for (int64_t h = 0; h < s->q_heads; h++) {
                int64_t row = (b * s->q_len + i) * s->q_heads + h;
                int64_t list = ((b * s->q_len + i) * s->kv_heads + h / group) * s->topk;
                struct row_keys keys =
                    row_keys(problem, place, problem->lists ? problem->lists + list : NULL, h / group);
                struct oracle_row oracle = {problem->reference.out + row * s->dim_v,
                                            problem->abs_out + row * s->dim_v, problem->reference.lse[row],
                                            row_count(&keys),
                                            row_condition(&keys, problem->q + row * s->dim, scale)};
                compare_row(comparison, &oracle, problem->dtype, s->dim_v, job->out + row * s->dim_v,
                            job->lse[row]);
            }
        }
}

/* Where lists differ, attention is compared over the reference's. */
static int attend_again(const struct check_problem *problem, struct job *job)
{
    const struct check_case *s = problem->shape;
    clattn_context *context = job->context;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    desc.block = s->leaf;
    desc.rows = (int64_t)s->batch * s->q_len;
    desc.heads = s->kv_heads;
    desc.topk = s->topk;
    job_release(job);
    free(job->out);
    free(job->lse);
    if (!check_problem_job(problem, context, job)) return STATUS_FAILED;
    clattn_status status = clattn_blocks_create(context, &desc, problem->lists, &job->blocks);
    if (status == CLATTN_SUCCESS) return job_run(job);
    device_error(context, status, "block lists");
    return STATUS_FAILED;
}

static int check_lists(const struct check_problem *problem, struct job *job, struct check_result *result)
{
    const struct check_case *s = problem->shape;
    if (!problem->lists) return STATUS_OK;
    size_t entries = (size_t)s->batch * (size_t)s->q_len * (size_t)s->kv_heads * (size_t)s->topk;
    int32_t *lists = malloc(entries * sizeof *lists);
    if (!lists) return STATUS_FAILED;
    clattn_status status = clattn_blocks_read(job->context, job->blocks, lists, NULL);
    if (status == CLATTN_SUCCESS)
        compare_lists(problem, lists, result);
    else
        device_error(job->context, status, "reading the block lists");
    free(lists);
    if (status != CLATTN_SUCCESS) return STATUS_FAILED;
    return result->lists_wrong + result->lists_tied > 0 ? attend_again(problem, job) : STATUS_OK;
}

int check_problem_compare(const struct check_problem *problem, clattn_context *context,
                          struct check_result *result)
{
    struct job job;
    memset(result, 0, sizeof *result);
    int status = check_problem_job(problem, context, &job) ? job_run(&job) : STATUS_FAILED;
    if (status == STATUS_OK) status = check_lists(problem, &job, result);
    if (status == STATUS_OK) compare_numbers(problem, &job, &result->numbers);
    job_release(&job);
    free(job.out);
    free(job.lse);
    return status;
}
