/* SPDX-License-Identifier: MIT
 *
 * In place of tune_records.c in a build without jansson: nothing can be opened, so nothing else is called. */
#include "config.h"

#include "tune.h"

#include "program.h"

struct tune_records *tune_records_open(const char *file)
{
    (void)file;
    program_error("this clattn was built without JSON (jansson)");
    return 0;
}

void tune_records_close(struct tune_records *records)
{
    (void)records;
}

bool tune_records_find(const struct tune_records *records, struct tune_search *search)
{
    (void)records, (void)search;
    return false;
}

int tune_records_put(struct tune_records *records, const struct tune_search *search)
{
    (void)records, (void)search;
    return STATUS_FAILED;
}

int tune_records_save(const struct tune_records *records, const char *file)
{
    (void)records, (void)file;
    return STATUS_FAILED;
}

int tune_records_merge(struct tune_records *records, const struct tune_records *more)
{
    (void)records, (void)more;
    return STATUS_FAILED;
}

char *tune_point_record(const struct tune_search *search, const struct tune_point *point)
{
    (void)search, (void)point;
    return 0;
}
