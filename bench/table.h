/* SPDX-License-Identifier: MIT
 *
 * Tables for people: columns as wide as their longest cell, two spaces between. */
#ifndef CLATTN_BENCH_TABLE_H
#define CLATTN_BENCH_TABLE_H

#include <stddef.h>

#define TABLE_MAX_COLUMNS 12

struct table {
    int columns;
    const char *align; /* a letter a column: 'l' or 'r' */
    size_t cells_used, capacity;
    char **cells; /* row by row */
    int failed;   /* memory ran out */
};

/* The first row added is the heading. */
void table_begin(struct table *table, const char *align);

/* Adds the next cell, row by row. */
void table_add(struct table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints to standard output and releases the cells. */
void table_end(struct table *table);

/* Releases the cells. */
void table_discard(struct table *table);

#endif
