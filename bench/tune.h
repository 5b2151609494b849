/* SPDX-License-Identifier: MIT
 *
 * `clattn tune` in parts: options, devices, order (tune.c), one search (tune_search.c), one measurement of a
 * candidate against the default (tune_measure.c), records in files (tune_records.c). */
#ifndef CLATTN_BENCH_TUNE_H
#define CLATTN_BENCH_TUNE_H

#include "bench.h"

enum { TUNE_PARAMETERS = 9, TUNE_VALUES_MAX = 6, TUNE_KERNELS = 5, TUNE_LENS_MAX = 4 };

/* As in the records; and the values that are tried, ended by -1. */
struct tune_parameter {
    const char *name;
    int values[TUNE_VALUES_MAX];
};
extern const struct tune_parameter tune_parameters[TUNE_PARAMETERS];
extern const char *const tune_kernels[TUNE_KERNELS + 1];

/* A choice of parameters; -1: the default. */
struct tune_point {
    int value[TUNE_PARAMETERS];
};

enum tune_state { TUNE_GOOD, TUNE_WRONG, TUNE_IMPOSSIBLE };

struct tune_trial {
    struct tune_point point;
    enum tune_state state;
    double ratio; /* time over that of the default: the geometric mean over all lengths; where one of them is
                     slower by more than the noise, that one's */
};

enum { TUNE_TRIALS_MAX = 64 };

/* The search for one device, kernel, dim and dtype; as a record in a file. */
struct tune_search {
    clattn_device_info device;
    int kernel;
    int32_t dim;
    clattn_dtype dtype;
    bool is_complete;
    struct tune_point best;
    double best_ratio;                     /* of the search; 1: the default */
    double default_seconds, tuned_seconds; /* of the last comparison */
    struct tune_trial trials[TUNE_TRIALS_MAX];
    int trial_count;
};

/* ---- measuring ---- */

struct tune_settings {
    int64_t lens[TUNE_LENS_MAX];
    int len_count;
    int32_t q_heads, kv_heads, topk;
    bool varies[TUNE_PARAMETERS];
    double seconds; /* of a comparison */
    double noise;   /* a share */
    double end;     /* of the budget, on program_seconds()'s clock */
};

/* The default, ready to be timed. */
struct tune_base {
    const struct tune_settings *settings;
    clattn_context *reference;
    struct bench_case shapes[TUNE_LENS_MAX];
    struct bench_device device;
    struct bench_problem problems[TUNE_LENS_MAX];
    int problem_count;
    bool is_open;
    double medians[2]; /* seconds of the last comparison: the default, the candidate; all lengths together */
};

/* Returns an exit status. *applies: false when another tier computes this on the device, so that there is
 * nothing to tune. */
int tune_base_open(struct tune_base *base, const struct tune_search *search,
                   const struct tune_settings *settings, clattn_context *reference, bool *applies);
void tune_base_close(struct tune_base *base);

/* Verifies a point against the reference and times it in turns with the default: for `seconds`, or until it is
 * clear that it is slower. Returns an exit status for failures that are not the point's. */
int tune_measure(struct tune_base *base, const struct tune_search *search, const struct tune_point *point,
                 double seconds, struct tune_trial *trial);

/* ---- searching ---- */

/* Goes on where the search stands, until it is complete, the budget is spent or Ctrl-C came. saved: called
 * after each trial. Returns an exit status. */
int tune_search(struct tune_search *search, const struct tune_settings *settings, clattn_context *reference,
                int (*save)(void *user), void *user, bool *applies);

/* "rows 32, keys 16"; "default". */
const char *tune_point_text(const struct tune_point *point, char *text, size_t bytes);
bool tune_point_is_default(const struct tune_point *point);

/* ---- records ---- */

struct tune_records; /* a file's content */

/* The file's records; an empty list when it is not there. NULL: the reason was printed. */
struct tune_records *tune_records_open(const char *file);
void tune_records_close(struct tune_records *records);

/* The search as it was left by the same version and driver; false: there is none. */
bool tune_records_find(const struct tune_records *records, struct tune_search *search);
int tune_records_put(struct tune_records *records, const struct tune_search *search);

/* Writes the file, completely or not at all; its folders are made. NULL: standard output. */
int tune_records_save(const struct tune_records *records, const char *file);

/* Adds those of `more`: of two for the same device, driver, kernel, dim and dtype the complete one, then the
 * newer. */
int tune_records_merge(struct tune_records *records, const struct tune_records *more);

/* The text that clattn_context_desc.tuning takes, for one point; free it. */
char *tune_point_record(const struct tune_search *search, const struct tune_point *point);

#endif
