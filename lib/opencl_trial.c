/* SPDX-License-Identifier: MIT */
/* Trials of tiers and devices, whose results are remembered.
 *
 * A compiler or driver that crashes takes the process with it, and one that hangs never lets it go on. So a
 * trial leaves a mark in the disk cache before it begins: "trying PROCESS TIME ATTEMPT". Who finds the mark of
 * a process that is gone, or that has been at it for too long, knows what happened. One such end may be the
 * user's (control-C during a long build); after the second the trial has failed for good: until the driver, the
 * library or the cache is another. */

#include "config.h"

#include "opencl.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Compilers of some drivers take a minute for a program, and a trial has a few of them. */
enum { ATTEMPTS = 2, SECONDS_MAX = 900 };

static const char passed[] = "passed", trying[] = "trying ";

/* A mark that was found. */
struct mark {
    long process, begun;
    int attempt;
};

static bool mark_read(const char *text, struct mark *mark)
{
    return sscanf(text, "trying %ld %ld %d", &mark->process, &mark->begun, &mark->attempt) == 3;
}

/* Is its process still at work, as far as one can know? */
static bool mark_lives(const struct mark *mark)
{
    long age = (long)time(NULL) - mark->begun;
    return age >= 0 && age < SECONDS_MAX && mark->process > 0 &&
           (kill((pid_t)mark->process, 0) == 0 || errno == EPERM);
}

static void mark_write(const char *key, int attempt)
{
    char text[96];
    int bytes = snprintf(text, sizeof text, "%s%ld %ld %d", trying, (long)getpid(), (long)time(NULL), attempt);
    opencl_cache_store(key, text, (size_t)bytes);
}

/* NULL where results are not kept: without a cache, and when the sources may change (CLATTN_KERNEL_DIR). */
static char *trial_key(clattn_context *context, const char *what)
{
    char *sources = getenv("CLATTN_KERNEL_DIR") ? NULL : opencl_all_sources();
    char *key = sources ? opencl_cache_key(&opencl_of(context)->device, "self-test", what, sources) : NULL;
    free(sources);
    return key;
}

clattn_status opencl_trial_begin(clattn_context *context, const char *what, struct opencl_trial *trial)
{
    size_t bytes = 0;
    struct mark mark = {0};
    clattn_status status = CLATTN_SUCCESS;
    *trial = (struct opencl_trial){.key = trial_key(context, what)};
    char *text = trial->key ? opencl_cache_load(trial->key, &bytes) : NULL;
    trial->has_passed = text && strcmp(text, passed) == 0;
    bool is_mark = text && mark_read(text, &mark);
    if (is_mark && mark_lives(&mark)) {
        ; /* another process tries it too: who ends first tells */
    } else if (is_mark && mark.attempt >= ATTEMPTS) {
        status = fail(context, CLATTN_NO_DEVICE,
                      "%d processes, the last one %ld, ended or hung while they tried %s on '%s'", ATTEMPTS,
                      mark.process, what, opencl_of(context)->device.name);
    } else if (text && !is_mark && !trial->has_passed) {
        status = fail(context, CLATTN_NO_DEVICE, "%s, earlier: %.1000s", what, text);
    } else if (trial->key && !trial->has_passed) {
        mark_write(trial->key, is_mark ? mark.attempt + 1 : 1);
    }
    free(text);
    if (status) { /* it stays as it is */
        free(trial->key);
        trial->key = NULL;
    }
    return status;
}

void opencl_trial_end(clattn_context *context, struct opencl_trial *trial, clattn_status status)
{
    if (trial->key && !status && !trial->has_passed)
        opencl_cache_store(trial->key, passed, strlen(passed));
    else if (trial->key && (status == CLATTN_NO_DEVICE || status == CLATTN_INTERNAL))
        opencl_cache_store(trial->key, context->error, strlen(context->error));
    else if (trial->key && status) /* what may be otherwise the next time, as a lack of memory */
        opencl_cache_drop(trial->key);
    free(trial->key);
    trial->key = NULL;
}
