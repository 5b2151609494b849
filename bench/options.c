/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "options.h"

#include "program.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OPTIONS_MAX 40

bool parse_integer(const char *text, int64_t minimum, int64_t maximum, int64_t *value)
{
    char *end;
    /* strtoll() would take leading blanks and a plus sign. */
    if (text[0] != '-' && (text[0] < '0' || text[0] > '9')) return false;
    errno = 0;
    long long parsed = strtoll(text, &end, 10);
    if (errno || *end || end == text || parsed < minimum || parsed > maximum) return false;
    *value = parsed;
    return true;
}

bool parse_real(const char *text, double *value)
{
    char *end;
    /* No hexadecimal, infinite or NaN numbers; main() leaves the "C" locale alone. */
    if (!*text || strspn(text, "0123456789.eE+-") != strlen(text)) return false;
    double parsed = strtod(text, &end);
    if (*end || end == text || !isfinite(parsed)) return false;
    *value = parsed;
    return true;
}

static bool parse_seconds(const char *text, double *value)
{
    char number[64];
    size_t length = strlen(text);
    double unit = 1;
    if (length == 0 || length >= sizeof number) return false;
    strcpy(number, text);
    switch (number[length - 1]) {
    case 'h':
        unit = 3600;
        break;
    case 'm':
        unit = 60;
        break;
    case 's':
        break;
    default:
        length++; /* nothing to cut off */
    }
    number[length - 1] = 0;
    if (!parse_real(number, value) || !(*value > 0)) return false;
    *value *= unit;
    return true;
}

static void print_option(const char *left, const char *help)
{
    printf("  %-28s", left);
    if (strlen(left) > 27) printf("\n  %-28s", "");
    for (const char *c = help; *c; c++) {
        putchar(*c);
        if (*c == '\n') printf("  %-28s", "");
    }
    putchar('\n');
}

static void print_help(const struct option_spec *specs, const struct command_help *help)
{
    printf("Usage: clattn %s\n%s\n\nOptions:\n", help->usage, help->text);
    for (const struct option_spec *spec = specs; spec->name; spec++) {
        char left[160];
        int used = snprintf(left, sizeof left, "--%s", spec->name);
        if (spec->argument) {
            snprintf(left + used, sizeof left - (size_t)used, " %s", spec->argument);
        } else if (spec->choices) {
            for (int i = 0; spec->choices[i] && (size_t)used < sizeof left; i++)
                used +=
                    snprintf(left + used, sizeof left - (size_t)used, "%c%s", i ? '|' : ' ', spec->choices[i]);
        }
        print_option(left, spec->help);
    }
    print_option("--help", "show this text");
    if (help->notes) printf("\n%s\n", help->notes);
}

static int refuse_value(const struct option_spec *spec, const char *text)
{
    char list[256] = "";
    size_t used = 0;
    switch (spec->kind) {
    case OPTION_INTEGER:
        return program_usage("--%s: '%s' is not a whole number from %" PRId64 " to %" PRId64, spec->name, text,
                             spec->minimum, spec->maximum);
    case OPTION_REAL:
        return program_usage("--%s: '%s' is not a number", spec->name, text);
    case OPTION_SECONDS:
        return program_usage(
            "--%s: '%s' is no time; a positive number of seconds is needed, or one with s, m or h", spec->name,
            text);
    default:
        for (int i = 0; spec->choices[i] && used < sizeof list; i++)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", spec->choices[i]);
        return program_usage("--%s: '%s' is not one of %s", spec->name, text, list);
    }
}

static bool store_value(const struct option_spec *spec, const char *text)
{
    switch (spec->kind) {
    case OPTION_FLAG:
        *(bool *)spec->value = true;
        return true;
    case OPTION_NO_FLAG:
        *(bool *)spec->value = false;
        return true;
    case OPTION_SET:
        *(int *)spec->value = (int)spec->minimum;
        return true;
    case OPTION_TEXT:
        *(const char **)spec->value = text;
        return true;
    case OPTION_INTEGER:
        return parse_integer(text, spec->minimum, spec->maximum, spec->value);
    case OPTION_REAL:
        return parse_real(text, spec->value);
    case OPTION_SECONDS:
        return parse_seconds(text, spec->value);
    case OPTION_CHOICE:
        for (int i = 0; spec->choices[i]; i++)
            if (strcmp(text, spec->choices[i]) == 0) {
                *(int *)spec->value = i;
                return true;
            }
        return false;
    }
    return false;
}

static bool takes_value(const struct option_spec *spec)
{
    return spec->kind != OPTION_FLAG && spec->kind != OPTION_NO_FLAG && spec->kind != OPTION_SET;
}

bool options_parse_files(const struct option_spec *specs, const struct command_help *help, int argc,
                         char **argv, char ***files, int *count_of_files, int *status)
{
    struct option table[OPTIONS_MAX + 2] = {{0}};
    int count = 0, found;
    for (; specs[count].name && count < OPTIONS_MAX; count++) {
        table[count].name = specs[count].name;
        table[count].has_arg = takes_value(&specs[count]) ? required_argument : no_argument;
        table[count].val = 256 + count;
    }
    table[count] = (struct option){"help", no_argument, NULL, 'h'};

    *status = STATUS_USAGE;
    opterr = 0;
    optind = 1;
    while ((found = getopt_long(argc, argv, ":h", table, NULL)) != -1) {
        if (found == 'h') {
            print_help(specs, help);
            *status = STATUS_OK;
            return false;
        }
        if (found == ':') {
            program_usage("option '%s' needs a value", argv[optind - 1]);
            return false;
        }
        if (found < 256 && optopt >= 256) {
            program_usage("option '--%s' takes no value", specs[optopt - 256].name);
            return false;
        }
        if (found < 256) {
            program_usage("unknown option '%s'; see 'clattn %s --help'", argv[optind - 1], argv[0]);
            return false;
        }
        if (!store_value(&specs[found - 256], optarg)) {
            refuse_value(&specs[found - 256], optarg);
            return false;
        }
    }
    /* getopt_long() has moved what is no option behind the options. */
    *files = argv + optind;
    *count_of_files = argc - optind;
    *status = STATUS_OK;
    return true;
}

bool options_parse(const struct option_spec *specs, const struct command_help *help, int argc, char **argv,
                   int *status)
{
    char **files;
    int count;
    if (!options_parse_files(specs, help, argc, argv, &files, &count, status)) return false;
    if (count == 0) return true;
    *status = program_usage("unexpected argument '%s'; see 'clattn %s --help'", files[0], argv[0]);
    return false;
}
