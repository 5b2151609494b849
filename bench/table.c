/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "table.h"

#include "program.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void table_begin(struct table *table, const char *align)
{
    memset(table, 0, sizeof *table);
    table->align = align;
    table->columns = (int)strlen(align);
}

void table_add(struct table *table, const char *format, ...)
{
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';

    if (table->cells_used == table->capacity) {
        size_t capacity = table->capacity ? 2 * table->capacity : 64;
        char **cells = realloc(table->cells, capacity * sizeof *cells);
        if (!cells) {
            table->failed = 1;
            return;
        }
        table->cells = cells;
        table->capacity = capacity;
    }
    char *cell = strdup(text);
    if (cell)
        table->cells[table->cells_used++] = cell;
    else
        table->failed = 1;
}

/* The number of characters of UTF-8 text. */
static int text_width(const char *text)
{
    int width = 0;
    for (; *text; text++)
        width += ((unsigned char)*text & 0xc0) != 0x80;
    return width;
}

void table_end(struct table *table)
{
    int width[TABLE_MAX_COLUMNS] = {0};
    for (size_t i = 0; i < table->cells_used; i++) {
        int *column = &width[i % (size_t)table->columns], cell = text_width(table->cells[i]);
        if (cell > *column) *column = cell;
    }
    for (size_t i = 0; i < table->cells_used && !table->failed; i++) {
        int column = (int)(i % (size_t)table->columns);
        int padding = width[column] - text_width(table->cells[i]);
        bool last = column + 1 == table->columns;
        if (column > 0) fputs("  ", stdout);
        if (table->align[column] == 'r')
            printf("%*s%s", padding, "", table->cells[i]);
        else
            printf("%s%*s", table->cells[i], last ? 0 : padding, "");
        if (last) putchar('\n');
    }
    if (table->failed) program_error("out of memory");
    table_discard(table);
}

void table_discard(struct table *table)
{
    for (size_t i = 0; i < table->cells_used; i++)
        free(table->cells[i]);
    free(table->cells);
    memset(table, 0, sizeof *table);
}
