/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "program.h"

#include "npy_write.h"
#include "options.h"

#include <clattn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static const char *current = NULL; /* the subcommand's name */

static const struct {
    const char *name;
    int (*main)(int argc, char **argv);
    const char *summary;
} subcommands[] = {
    {"info", info_main, "show devices, instruction sets, caches and what was built in"},
    {"doctor", doctor_main, "look for what is wrong with this machine's drivers and cache"},
    {"run", run_main, "compute block-sparse attention over tensors in files"},
    {"decode", decode_main, "play back decoding from files, and compare it with a prefill"},
    {"check", check_main, "compare every backend of this machine with the reference"},
    {"demo", demo_main, "run attention on the bundled sample with every backend"},
    {"pattern", pattern_main, "count and draw a static pattern"},
    {"bench", bench_main, "measure devices, operations and selectors"},
    {"compare", compare_main, "compare measurements across devices and versions, with charts"},
    {"simulate", simulate_main, "predict what tiles make of neighborhood attention"},
    {"tune", tune_main, "find the fastest tiles for a device"},
};
#define SUBCOMMANDS (sizeof subcommands / sizeof *subcommands)

static void print_line(const char *kind, const char *format, va_list arguments)
{
    char line[1024];
    vsnprintf(line, sizeof line, format, arguments);
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    fprintf(stderr, "clattn%s%s: %s%s\n", current ? " " : "", current ? current : "", kind, line);
}

#define PRINT_LINE(kind)                                                                                       \
    do {                                                                                                       \
        va_list arguments;                                                                                     \
        va_start(arguments, format);                                                                           \
        print_line(kind, format, arguments);                                                                   \
        va_end(arguments);                                                                                     \
    } while (0)

void program_error(const char *format, ...)
{
    PRINT_LINE("");
}
void program_warning(const char *format, ...)
{
    PRINT_LINE("warning: ");
}
void program_note(const char *format, ...)
{
    PRINT_LINE("note: ");
}

int program_usage(const char *format, ...)
{
    PRINT_LINE("");
    return STATUS_USAGE;
}

double program_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void print_help(FILE *file)
{
    fputs("Usage: clattn SUBCOMMAND [OPTION...]\n"
          "Block-sparse attention on OpenCL devices and CPUs.\n\nSubcommands:\n",
          file);
    for (size_t i = 0; i < SUBCOMMANDS; i++)
        fprintf(file, "  %-10s %s\n", subcommands[i].name, subcommands[i].summary);
    fputs("  help       show this text, or that of a subcommand: clattn help run\n\n"
          "Options:\n"
          "  --help     show this text\n"
          "  --version  show the version\n\n"
          "Exit status: 0 done, 1 failed, 2 wrong usage, 77 the device that was asked for is not there.\n"
          "Start with 'clattn check'. Every subcommand has --help.\n",
          file);
}

static int run_subcommand(int argc, char **argv)
{
    for (size_t i = 0; i < SUBCOMMANDS; i++)
        if (strcmp(argv[0], subcommands[i].name) == 0) {
            current = subcommands[i].name;
            return subcommands[i].main(argc, argv);
        }
    return program_usage(argv[0][0] == '-' ? "unknown option '%s'; see 'clattn help'"
                                           : "unknown subcommand '%s'; see 'clattn help'",
                         argv[0]);
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return STATUS_USAGE;
    }
    bool help = strcmp(argv[1], "help") == 0;
    if (help && argc > 2) {
        char option[] = "--help", *arguments[] = {argv[2], option, NULL};
        if (argc > 3) return program_usage("unexpected argument '%s'", argv[3]);
        return run_subcommand(2, arguments);
    }
    if (help || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        print_help(stdout);
        return STATUS_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("clattn %s\n", clattn_version());
        return STATUS_OK;
    }
    return run_subcommand(argc - 1, argv + 1);
}

/* setlocale() is not called: numbers are read and written with a decimal point whatever the user's locale. */
int main(int argc, char **argv)
{
    npy_writer_handle_signals();
    int status = dispatch(argc, argv);
    /* What could not be written, to a full disk for one, must not look like success. */
    errno = 0;
    bool failed = ferror(stdout);
    if (fclose(stdout) != 0 || failed) {
        program_error("standard output: %s", errno ? strerror(errno) : "write error");
        if (status == STATUS_OK) status = STATUS_FAILED;
    }
    return status;
}
