/* SPDX-License-Identifier: MIT
 *
 * What the subcommands of clattn share: the exit statuses, and messages of one line each. */
#ifndef CLATTN_BENCH_PROGRAM_H
#define CLATTN_BENCH_PROGRAM_H

#include <stdbool.h>

enum exit_status {
    STATUS_OK = 0,
    STATUS_FAILED = 1,
    STATUS_USAGE = 2,
    STATUS_REGRESSION = 3, /* of clattn compare */
    STATUS_NO_DEVICE = 77 /* the device that was asked for is not there */
};

/* argv[0] is the subcommand's name. */
int info_main(int argc, char **argv);
int doctor_main(int argc, char **argv);
int run_main(int argc, char **argv);
int check_main(int argc, char **argv);
int decode_main(int argc, char **argv);
int demo_main(int argc, char **argv);
int pattern_main(int argc, char **argv);
int bench_main(int argc, char **argv);
int compare_main(int argc, char **argv);
int simulate_main(int argc, char **argv);
int tune_main(int argc, char **argv);

/* The exit status after Ctrl-C. */
#define STATUS_INTERRUPTED 130

/* "clattn SUBCOMMAND: message" on standard error, control characters replaced. */
void program_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
void program_warning(const char *format, ...) __attribute__((format(printf, 1, 2)));
void program_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* As program_error(), and returns STATUS_USAGE. */
int program_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Seconds of a clock that only goes forward. */
double program_seconds(void);

#endif
