/* SPDX-License-Identifier: MIT
 *
 * What --json prints, as a tree: objects of named values and lists. A thin layer over jansson, so that the
 * program also builds without it; report_object() is NULL then, and every function takes NULL and does nothing.
 */
#ifndef CLATTN_BENCH_REPORT_H
#define CLATTN_BENCH_REPORT_H

#include <stdbool.h>
#include <stdint.h>

struct json_t;
typedef struct json_t report;

/* True if this program can print JSON; otherwise says so in one line. */
bool report_available(void);

report *report_object(void);

/* Add to an object. The child belongs to its parent. */
report *report_child(report *parent, const char *name);
report *report_list(report *parent, const char *name);
void report_text(report *object, const char *name, const char *text); /* not UTF-8: becomes '?'; NULL: null */
void report_integer(report *object, const char *name, int64_t value);
void report_real(report *object, const char *name, double value); /* not finite: null */
void report_flag(report *object, const char *name, bool value);

/* Add to a list. */
report *report_entry(report *list);
void report_entry_text(report *list, const char *text);
void report_entry_integer(report *list, int64_t value);

/* Prints to standard output. Returns an exit status. */
int report_print(const report *object);

/* Releases a tree. */
void report_release(report *object);

#endif
