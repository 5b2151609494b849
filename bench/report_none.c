/* SPDX-License-Identifier: MIT
 *
 * In place of report.c in a build without jansson. */
#include "config.h"

#include "program.h"
#include "report.h"

bool report_available(void)
{
    program_error("--json: this clattn was built without JSON (jansson)");
    return false;
}

report *report_object(void)
{
    return 0;
}
report *report_child(report *parent, const char *name)
{
    return (void)name, parent;
}
report *report_list(report *parent, const char *name)
{
    return (void)name, parent;
}
void report_text(report *object, const char *name, const char *text)
{
    (void)object, (void)name, (void)text;
}
void report_integer(report *object, const char *name, int64_t value)
{
    (void)object, (void)name, (void)value;
}
void report_real(report *object, const char *name, double value)
{
    (void)object, (void)name, (void)value;
}
void report_flag(report *object, const char *name, bool value)
{
    (void)object, (void)name, (void)value;
}
report *report_entry(report *list)
{
    return list;
}
void report_entry_text(report *list, const char *text)
{
    (void)list, (void)text;
}
void report_entry_integer(report *list, int64_t value)
{
    (void)list, (void)value;
}

int report_print(const report *object)
{
    (void)object;
    return STATUS_FAILED;
}

void report_release(report *object)
{
    (void)object;
}
