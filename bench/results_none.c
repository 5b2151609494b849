/* SPDX-License-Identifier: MIT
 *
 * In place of results.c in a build without jansson. */
#include "config.h"

#include "results.h"

#include "program.h"

int results_open(struct results *results, char *const *files, int count)
{
    (void)files, (void)count;
    *results = (struct results){0};
    program_error("this clattn was built without JSON (jansson)");
    return STATUS_FAILED;
}

void results_close(struct results *results)
{
    (void)results;
}
