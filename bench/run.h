/* SPDX-License-Identifier: MIT
 *
 * `clattn run` in parts: options and flow (run.c), the tensors in files (run_files.c), what is told about it
 * (run_report.c). */
#ifndef CLATTN_BENCH_RUN_H
#define CLATTN_BENCH_RUN_H

#include "device.h"
#include "job.h"
#include "npy_write.h"
#include "tensor_file.h"

enum run_input { RUN_Q, RUN_K, RUN_V, RUN_INPUTS };
enum run_output { RUN_OUT, RUN_LSE, RUN_BLOCKS, RUN_OUTPUTS };

struct run {
    /* Options. */
    const char *input_names[RUN_INPUTS], *output_names[RUN_OUTPUTS];
    struct device_choice choice;
    bool causal, json;
    double scale;              /* NAN: the default */
    const char *selector_text; /* a selector, a pattern, or a selector + a pattern */
    clattn_pattern *pattern;   /* NULL: none */
    bool join;                 /* the selector's lists and the pattern's */
    int leaf, selector, layout, request;
    int64_t topk;
    const char *forced;
    int32_t forced_first, forced_last;

    struct tensor_file files[RUN_INPUTS];
    struct tensor_values values[RUN_INPUTS];
    struct npy_writer writers[RUN_OUTPUTS];
    int64_t batch, q_len, kv_len, q_heads, kv_heads, dim, dim_v;
    clattn_dtype dtype;
    clattn_device_info device;
    struct job job;
};

extern const char *const run_selectors[], *const run_layouts[], *const run_dtypes[], *const run_leaves[];

/* Opens the three files, checks that they fit together and sets job.q, k and v. Returns an exit status. */
int run_open_inputs(struct run *run);

/* Counts NaN and infinite values, and warns about them. */
void run_count_values(struct run *run);

/* Opens the files for the results that were asked for; nothing is replaced before run_write_outputs() has them
 * all. */
int run_open_outputs(struct run *run);
int run_write_outputs(struct run *run);

void run_close(struct run *run);

/* Prints what was done and how long it took, as text or JSON. */
int run_report(const struct run *run);

#endif
