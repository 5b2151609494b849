/* SPDX-License-Identifier: MIT
 *
 * Options of the subcommands: a table says which there are, where their values go and what --help says. */
#ifndef CLATTN_BENCH_OPTIONS_H
#define CLATTN_BENCH_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum option_kind {
    OPTION_FLAG,    /* bool: becomes true */
    OPTION_NO_FLAG, /* bool: becomes false */
    OPTION_SET,     /* int: becomes `minimum` */
    OPTION_TEXT,    /* const char * */
    OPTION_INTEGER, /* int64_t, minimum..maximum */
    OPTION_REAL,    /* double, finite */
    OPTION_SECONDS, /* double above 0: "90", "90s", "1.5m" or "1h" */
    OPTION_CHOICE   /* int: the position in `choices` */
};

struct option_spec {
    const char *name; /* without the dashes; NULL ends the table */
    enum option_kind kind;
    void *value;
    const char *argument; /* for --help: "FILE" */
    const char *help;     /* lines broken by \n */
    int64_t minimum, maximum;
    const char *const *choices; /* ended by NULL */
};

struct command_help {
    const char *usage; /* what follows "Usage: clattn " */
    const char *text;  /* what the command does, lines broken by \n */
    const char *notes; /* after the options; may be NULL */
};

/* Parses argv[1..]; argv[0] is the subcommand. Returns true to go on. Otherwise *status is the exit status: 0
 * after
 * --help, STATUS_USAGE after an error, which was printed. */
bool options_parse(const struct option_spec *specs, const struct command_help *help, int argc, char **argv,
                   int *status);

/* The same for subcommands that take files: argv's other words, [*count], in *files. */
bool options_parse_files(const struct option_spec *specs, const struct command_help *help, int argc,
                         char **argv, char ***files, int *count, int *status);

/* The whole text as a number, decimal point in every locale. */
bool parse_integer(const char *text, int64_t minimum, int64_t maximum, int64_t *value);
bool parse_real(const char *text, double *value);

#endif
