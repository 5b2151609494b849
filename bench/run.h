/* SPDX-License-Identifier: MIT
 *
 * `clattn run` in parts: flow (run.c), options (run_options.c), queries, keys, values and results in files
 * (run_files.c), the files of single options (run_extras.c), how good the lists are (run_quality.c), what is
 * told about it (run_report.c). */
#ifndef CLATTN_BENCH_RUN_H
#define CLATTN_BENCH_RUN_H

#include "device.h"
#include "job.h"
#include "layout.h"
#include "npy_write.h"
#include "quality.h"
#include "report.h"
#include "selector.h"
#include "tensor_file.h"

enum run_input { RUN_Q, RUN_K, RUN_V, RUN_INPUTS };
enum run_extra { RUN_EXTRA_K, RUN_EXTRA_V, RUN_SINK, RUN_BIAS, RUN_EXTRAS }; /* given by options, or not */
enum run_output { RUN_OUT, RUN_LSE, RUN_BLOCKS, RUN_OUTPUTS };

struct run {
    /* Options. */
    const char *input_names[RUN_INPUTS], *output_names[RUN_OUTPUTS];
    struct device_choice choice;
    int causal_option; /* -1: not given */
    bool causal, json;
    double scale, softcap; /* NAN: the default, none */
    int64_t window_tokens; /* 0: none */
    struct layout_text layout_text;
    const char *extra_names[RUN_EXTRAS];
    const char *cu_names[2];   /* of queries and keys: a list of numbers, or a file */
    const char *selector_text; /* a selector, a pattern, or a selector + a pattern */
    clattn_pattern *pattern;   /* NULL: none */
    bool join;                 /* the selector's lists and the pattern's */
    clattn_select_desc select; /* the selector alone, without what other options say */
    int leaf, layout, request;
    int64_t topk;
    const char *forced;
    int32_t forced_first, forced_last;
    bool quality_wanted;
    const char *positions_name, *answers_name, *needles_name; /* of --quality; NULL: not given */
    int64_t from;                                             /* positions before it are not judged */

    bool is_neighborhood;
    clattn_neighborhood_desc neighborhood;
    struct tensor_file files[RUN_INPUTS], extra_files[RUN_EXTRAS];
    clattn_tensor sink, bias; /* what job.attention points to */
    int32_t *cu_seqlens[2];   /* [sequences + 1] */
    int64_t sequences;        /* 0: every batch entry is one */
    struct tensor_values values[RUN_INPUTS];
    struct npy_writer writers[RUN_OUTPUTS];
    int64_t batch, q_len, kv_len, q_heads, kv_heads, dim, dim_v;
    clattn_dtype dtype;
    clattn_device_info device;
    struct job job;
    struct quality_files quality_files;
    struct quality quality;
};

extern const char *const run_layouts[], *const run_dtypes[], *const run_leaves[];

/* Parses and checks the options. Returns true to go on, else *status is the exit status. */
bool run_parse_options(struct run *run, int argc, char **argv, int *status);

/* Opens the three files, checks that they fit together and sets job.q, k and v. Returns an exit status. */
int run_open_inputs(struct run *run);

/* Opens the files of options, checks that they fit the three, and puts them into the job. Returns an exit
 * status. */
int run_open_extras(struct run *run);
void run_close_extras(struct run *run);

/* A view of a file as [batch][len][heads][dim], its dimensions ordered as --layout says. */
clattn_tensor run_view(const struct run *run, const struct tensor_file *file, int64_t len, int64_t heads,
                       int64_t dim);

/* Counts NaN and infinite values, and warns about them. */
void run_count_values(struct run *run);

/* Opens the files for the results that were asked for; nothing is replaced before run_write_outputs() has them
 * all. */
int run_open_outputs(struct run *run);
int run_write_outputs(struct run *run);

/* --quality: checks the options, opens its files, and judges the lists of a job that is done. Return exit
 * statuses. */
int run_check_quality(const struct run *run);
int run_open_quality(struct run *run);
int run_judge(struct run *run);
void run_report_quality(report *parent, const struct run *run);
void run_print_quality(const struct run *run);

void run_close(struct run *run);

/* Prints what was done and how long it took, as text or JSON. */
int run_report(const struct run *run);

#endif
