/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "report.h"

#include "program.h"

#include <jansson.h>
#include <stdio.h>

bool report_available(void)
{
    return true;
}

report *report_object(void)
{
    return json_object();
}

/* The parent owns the child; the pointer stays valid as long as the parent. */
static report *adopt(report *parent, const char *name, json_t *child)
{
    json_object_set_new(parent, name, child);
    return child;
}

static json_t *text_value(const char *text)
{
    char ascii[512];
    size_t length = 0;
    json_t *value = text ? json_string(text) : json_null();
    if (value) return value;
    for (; text[length] && length + 1 < sizeof ascii; length++)
        ascii[length] = (char)((text[length] & 0x80) ? '?' : text[length]);
    ascii[length] = 0;
    return json_string(ascii);
}

report *report_child(report *parent, const char *name)
{
    return adopt(parent, name, json_object());
}
report *report_list(report *parent, const char *name)
{
    return adopt(parent, name, json_array());
}

void report_text(report *object, const char *name, const char *text)
{
    json_object_set_new(object, name, text_value(text));
}

void report_integer(report *object, const char *name, int64_t value)
{
    json_object_set_new(object, name, json_integer(value));
}

void report_real(report *object, const char *name, double value)
{
    json_t *real = json_real(value);
    json_object_set_new(object, name, real ? real : json_null());
}

void report_flag(report *object, const char *name, bool value)
{
    json_object_set_new(object, name, json_boolean(value));
}

report *report_entry(report *list)
{
    json_t *object = json_object();
    json_array_append_new(list, object);
    return object;
}

void report_entry_text(report *list, const char *text)
{
    json_array_append_new(list, text_value(text));
}
void report_entry_integer(report *list, int64_t value)
{
    json_array_append_new(list, json_integer(value));
}

int report_print(const report *object)
{
    /* jansson writes a decimal point in every locale. */
    int result = object ? json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) : -1;
    if (result != 0) {
        if (!ferror(stdout)) program_error("out of memory");
        return STATUS_FAILED;
    }
    putchar('\n');
    return STATUS_OK;
}

void report_release(report *object)
{
    json_decref(object);
}
