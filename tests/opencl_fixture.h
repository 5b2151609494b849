/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TESTS_OPENCL_FIXTURE_H
#define CLATTN_TESTS_OPENCL_FIXTURE_H

/* What the tests of the OpenCL runtime share: an empty cache of their own, kernels from tests/cl, contexts. */

#include "config.h"

#include "lib/opencl.h" /* before CMocka, whose `fail` is a macro */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

/* Calls `visit` for every file of a folder; returns how many there were. */
static inline int folder_files(const char *folder, void (*visit)(const char *path, void *user), void *user)
{
    char path[4096];
    int count = 0;
    DIR *directory = opendir(folder);
    if (!directory) return 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (snprintf(path, sizeof path, "%s/%s", folder, entry->d_name) >= (int)sizeof path) abort();
        if (visit) visit(path, user);
        count++;
    }
    closedir(directory);
    return count;
}

static inline void file_unlink(const char *path, void *user)
{
    (void)user;
    if (unlink(path)) rmdir(path);
}

/* An empty cache folder below the build's, in CLATTN_CACHE_DIR, and in use; its path goes to `folder`. */
static inline void cache_empty(const char *name, char folder[4096])
{
    static char base[2048]; /* what the environment said before the first test */
    if (!base[0])
        snprintf(base, sizeof base, "%s", getenv("CLATTN_CACHE_DIR") ? getenv("CLATTN_CACHE_DIR") : ".");
    mkdir(base, 0700);
    if (snprintf(folder, 4096, "%s/%s", base, name) >= 4096) abort();
    chmod(folder, 0700);
    folder_files(folder, file_unlink, NULL);
    rmdir(folder);
    setenv("CLATTN_CACHE_DIR", folder, 1);
    unsetenv("CLATTN_CACHE_SIZE");
}

static inline void use_test_kernels(void)
{
    char path[4096];
    const char *srcdir = getenv("srcdir");
    if (snprintf(path, sizeof path, "%s/tests/cl", srcdir ? srcdir : ".") >= (int)sizeof path) abort();
    setenv("CLATTN_KERNEL_DIR", path, 1);
}

/* A context on the first OpenCL device; fails the test with the detail. */
static inline clattn_context *context_open(void)
{
    char detail[2048] = "";
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_OPENCL;
    desc.error = detail;
    desc.error_bytes = sizeof detail;
    clattn_status status = clattn_context_create(&desc, &context);
    if (status) fail_msg("%s: %s", clattn_strerror(status), detail);
    return context;
}

static inline const char *last_error(clattn_context *context)
{
    static char text[4096];
    clattn_context_error(context, text, sizeof text);
    return text;
}

#define assert_status(context, have, want)                                                                     \
    do {                                                                                                       \
        clattn_status have_status = (have);                                                                    \
        if (have_status != (want))                                                                             \
            fail_msg("%s:%d: status %d (%s), wanted %d: %s", __FILE__, __LINE__, have_status,                  \
                     clattn_strerror(have_status), (want), last_error(context));                               \
    } while (0)

#define assert_success(context, have) assert_status(context, have, CLATTN_SUCCESS)

/* Is this in the name of the first device's platform? Some have limits of their own:
 *   Oclgrind  clFlush waits for the queue to be empty; it is not made for threads
 *   rusticl   ends the process when it is given a binary that is not its own */
static inline int platform_is(const char *part)
{
    clattn_device_info info = {.size = sizeof info};
    for (int i = 0; clattn_device_get(i, &info) == CLATTN_SUCCESS; i++)
        if (info.backend == CLATTN_BACKEND_OPENCL) return strstr(info.platform, part) != NULL;
    return 0;
}

/* Is there an OpenCL device at all? */
static inline int has_device(void)
{
    clattn_device_info info = {.size = sizeof info};
    for (int i = 0; clattn_device_get(i, &info) == CLATTN_SUCCESS; i++)
        if (info.backend == CLATTN_BACKEND_OPENCL) return 1;
    return 0;
}

#endif
