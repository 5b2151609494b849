/* SPDX-License-Identifier: MIT */
/* One context used from several threads, and several contexts at once: the results of a quiet run, to the bit.
 */

#include "fixture.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define F32 CLATTN_FLOAT32

enum { THREADS = 4, ROUNDS = 3 };

/* The same shape for all, so that a device compiles once; each thread has its own content. */
static const struct shape shape = {"threads", SIZE_NORMAL, 1, 20, 300, 2, 4, 64, 64, F32, LAYOUT_BTHD, false};

struct job {
    pthread_t thread;
    clattn_context *context;
    struct fixture f;
    struct array out, lse; /* of the quiet run */
    int32_t *indices;      /* likewise */
    const char *failure;   /* NULL: fine. CMocka's own checks are for the main thread only */
};

static const size_t list_bytes = 20 * 2 * 4 * sizeof(int32_t);

/* Selects, attends and provokes an error; returns what went wrong. */
static const char *round_trip(struct job *job, int32_t *indices)
{
    clattn_select_desc select = select_desc(CLATTN_SELECT_PISA, 4, 64);
    clattn_blocks *blocks = NULL;
    clattn_context *context = job->context;
    struct fixture *f = &job->f;
    const char *failure = NULL;
    char text[512];
    clattn_tensor wrong = f->q.view;
    wrong.dim = 63;
    if (clattn_select(context, NULL, &select, &f->q.view, &f->k.view, NULL, &blocks, NULL))
        return "select failed";
    if (clattn_blocks_read(context, blocks, indices, NULL))
        failure = "blocks_read failed";
    else if (clattn_attention_forward(context, NULL, &f->q.view, &f->k.view, &f->v.view, blocks, &f->out.view,
                                      &f->lse.view, NULL))
        failure = "attention_forward failed";
    else if (clattn_attention_forward(context, NULL, &wrong, &f->k.view, &f->v.view, blocks, &f->out.view,
                                      &f->lse.view, NULL) != CLATTN_INVALID_SHAPE)
        failure = "a wrong shape was not refused";
    else if (clattn_context_error(context, text, sizeof text) == 0 || !strstr(text, "63"))
        failure = "the detail of the error is lost";
    clattn_blocks_release(context, blocks);
    return failure;
}

static void *thread_main(void *argument)
{
    struct job *job = argument;
    int32_t indices[20 * 2 * 4];
    for (int n = 0; n < ROUNDS && !job->failure; n++) {
        array_poison(&job->f.out);
        array_poison(&job->f.lse);
        job->failure = round_trip(job, indices);
        if (!job->failure && memcmp(indices, job->indices, list_bytes)) job->failure = "other lists than alone";
        if (!job->failure && !tensor_equal_bits(&job->f.out.view, &job->out.view))
            job->failure = "another out than alone";
        if (!job->failure && !tensor_equal_bits(&job->f.lse.view, &job->lse.view))
            job->failure = "another lse than alone";
    }
    return NULL;
}

static void jobs_open(const struct target *target, struct job *jobs, bool own_contexts)
{
    for (int n = 0; n < THREADS; n++) {
        struct random random = random_seeded((uint64_t)n);
        struct job *job = &jobs[n];
        *job = (struct job){.context = own_contexts ? target_context_new(target) : target->context};
        job->f = fixture_new(&shape, &random);
        job->indices = malloc(list_bytes);
        assert_non_null(job->indices);
        const char *failure = round_trip(job, job->indices);
        if (failure) fail_msg("%s: alone: %s", target->label, failure);
        job->out = job->f.out;
        job->lse = job->f.lse;
        job->f.out = array_new(F32, 1, 20, 8, 64, LAYOUT_BTHD);
        job->f.lse = array_new(F32, 1, 20, 8, 1, LAYOUT_BTHD);
    }
}

static void jobs_close(const struct target *target, struct job *jobs)
{
    for (int n = 0; n < THREADS; n++) {
        if (jobs[n].context != target->context) clattn_context_release(jobs[n].context);
        fixture_free(&jobs[n].f);
        array_free(&jobs[n].out);
        array_free(&jobs[n].lse);
        free(jobs[n].indices);
    }
}

static void check_threads(const struct target *target, bool own_contexts)
{
    struct job jobs[THREADS];
    jobs_open(target, jobs, own_contexts);
    for (int n = 0; n < THREADS; n++)
        assert_int_equal(pthread_create(&jobs[n].thread, NULL, thread_main, &jobs[n]), 0);
    for (int n = 0; n < THREADS; n++)
        assert_int_equal(pthread_join(jobs[n].thread, NULL), 0);
    for (int n = 0; n < THREADS; n++)
        if (jobs[n].failure) fail_msg("%s: thread %d: %s", target->label, n, jobs[n].failure);
    jobs_close(target, jobs);
}

static void test_one_context(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target)
        if (target_runs(target, SIZE_NORMAL)) check_threads(target, false);
    target_report("one context");
}

static void test_several_contexts(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target)
        if (target_runs(target, SIZE_NORMAL)) check_threads(target, true);
    target_report("several contexts");
}

/* Every backend, variant and device at the same time, a context and a thread each. */
static void test_all_devices(void **state)
{
    (void)state;
    struct job jobs[TARGETS_MAX][THREADS];
    bool runs[TARGETS_MAX] = {false};
    for (int t = 0; t < target_count; t++)
        if ((runs[t] = target_runs(&targets[t], SIZE_NORMAL))) jobs_open(&targets[t], jobs[t], true);
    for (int t = 0; t < target_count; t++)
        if (runs[t]) assert_int_equal(pthread_create(&jobs[t][0].thread, NULL, thread_main, &jobs[t][0]), 0);
    for (int t = 0; t < target_count; t++)
        if (runs[t]) assert_int_equal(pthread_join(jobs[t][0].thread, NULL), 0);
    for (int t = 0; t < target_count; t++) {
        if (runs[t] && jobs[t][0].failure) fail_msg("%s: %s", targets[t].label, jobs[t][0].failure);
        if (runs[t]) jobs_close(&targets[t], jobs[t]);
    }
    target_report("all devices");
}

/* Threads that make and release contexts at the same time: the first use of drivers and caches has no race. */
static void *open_and_close(void *argument)
{
    const struct target *target = argument;
    for (int n = 0; n < ROUNDS; n++)
        clattn_context_release(target_context_new(target));
    return NULL;
}

static void test_open_and_close(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target) {
        pthread_t threads[THREADS];
        if (!target_runs(target, SIZE_NORMAL)) continue;
        for (int n = 0; n < THREADS; n++)
            assert_int_equal(pthread_create(&threads[n], NULL, open_and_close, target), 0);
        for (int n = 0; n < THREADS; n++)
            assert_int_equal(pthread_join(threads[n], NULL), 0);
    }
    target_report("open and close");
}

/* The number of threads changes nothing but the time. */
static void test_thread_counts(void **state)
{
    static const int counts[] = {1, 2, 3, 7};
    (void)state;
    struct random random = random_seeded(10);
    struct fixture f = fixture_new(&shape, &random);
    struct array out = array_new(F32, 1, 20, 8, 64, LAYOUT_BTHD);
    FOR_EACH_TARGET (target) {
        if (target->info.backend == CLATTN_BACKEND_OPENCL) continue;
        fixture_forward(target, &f, NULL);
        for (int n = 0; n < COUNT(counts); n++) {
            clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
            clattn_context *context = NULL;
            desc.backend = target->info.backend;
            desc.variant = target->info.variant;
            desc.threads = counts[n];
            assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
            array_poison(&out);
            assert_int_equal(clattn_attention_forward(context, NULL, &f.q.view, &f.k.view, &f.v.view, NULL,
                                                      &out.view, NULL, NULL),
                             CLATTN_SUCCESS);
            clattn_context_release(context);
            if (!tensor_equal_bits(&out.view, &f.out.view))
                fail_msg("%s: %d threads give other bits", target->label, counts[n]);
        }
    }
    array_free(&out);
    fixture_free(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_context),   cmocka_unit_test(test_several_contexts),
        cmocka_unit_test(test_all_devices),   cmocka_unit_test(test_open_and_close),
        cmocka_unit_test(test_thread_counts),
    };
    return cmocka_run_group_tests_name("threads", tests, targets_open, targets_close);
}
