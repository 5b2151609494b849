/* SPDX-License-Identifier: MIT
 *
 * `clattn bench` in parts: options and flow (bench.c), what is measured (bench_suites.c), the inputs and one
 * call of each operation (bench_problem.c), comparing sampled rows with the reference (bench_verify.c,
 * bench_gradients.c), counting work (bench_work.c), timing (bench_time.c), devices and their ceilings
 * (bench_device.c, bench_opencl.c), output (bench_report.c). */
#ifndef CLATTN_BENCH_BENCH_H
#define CLATTN_BENCH_BENCH_H

#include "bench_opencl.h"
#include "quality.h"
#include "report.h"

#include <clattn.h>
#include <stdbool.h>
#include <stdint.h>

#define BENCH_SCHEMA_VERSION 1

enum bench_operation {
    BENCH_PYRAMID,
    BENCH_SELECT,
    BENCH_FORWARD,
    BENCH_BACKWARD,
    BENCH_NEIGHBORHOOD,
    BENCH_DECODE /* a step of one query, whose key is appended to those before it */
};

/* One configuration. */
struct bench_case {
    const char *suite;
    char name[64];
    enum bench_operation operation;
    clattn_dtype dtype;
    clattn_selector selector; /* of the lists; DENSE: none */
    const char *pattern;      /* NULL: lists of `selector` */
    bool causal;
    int64_t q_len, kv_len; /* the queries are the last of the keys */
    int32_t q_heads, kv_heads, dim, topk, leaf;
    clattn_neighborhood_desc neighborhood; /* of BENCH_NEIGHBORHOOD */
    const struct bench_files *files;       /* NULL: numbers at random */
};

/* ---- queries and keys of files ---- */

struct bench_files {
    const char *q_name, *k_name, *positions, *answers,
        *needles; /* NULL: not given; all NULL: the bundled sample */
    int64_t from; /* the first position that is judged */
    bool is_open;
    char sample_names[5][1200];
    struct tensor_file q, k;
    clattn_dtype dtype;
    int64_t q_len, kv_len;
    int32_t q_heads, kv_heads, dim;
    struct quality_files rows;
};

/* Returns an exit status; call bench_files_close() in any case. */
int bench_files_open(struct bench_files *files, int32_t leaf);
void bench_files_close(struct bench_files *files);

/* ---- suites ---- */

struct bench_sizes {
    const int64_t *lens;
    int len_count;
    clattn_dtype dtype;
    int32_t q_heads, kv_heads, dim, topk, leaf;
    bool quick;
    const struct bench_files *files; /* of selection-quality */
};

extern const char *const bench_suite_words[];
bool bench_suite_has_files(int suite);

/* Makes the cases of one suite; the caller frees them. NULL: out of memory. */
struct bench_case *bench_suite_make(int suite, const struct bench_sizes *sizes, int *count);

/* ---- devices ---- */

struct bench_device {
    clattn_device_info info;
    clattn_context *context;
    struct bench_opencl *opencl; /* NULL: times are wall clock */
    double row_seconds;          /* of steady state a row */
    int threads;                 /* of a CPU context; 0: as OpenMP decides */
    double fma_rate, copy_rate;  /* FLOP/s of multiply-adds, bytes/s read and written; 0: not measured */
    double matrix_rate;          /* FLOP/s of matrix units in 16-bit types; 0: none, or not measured */
    /* The last dense rate and what it was measured for. */
    struct bench_case dense_case;
    double dense_rate; /* FLOP/s; 0: none */
};

/* Opens the device that `info` describes. tuning: clattn_context_desc.tuning. Returns an exit status. */
int bench_device_open(struct bench_device *device, const clattn_device_info *info, int threads,
                      const char *tuning);

/* Is the tier one of NVIDIA's matrix units? */
bool bench_has_matrix(const clattn_device_info *info);

/* Measures the device's ceilings. */
void bench_device_measure(struct bench_device *device);

/* Seconds of the clock that times of the device are read from. */
double bench_seconds(const struct bench_device *device);
void bench_device_close(struct bench_device *device);

/* ---- one problem ---- */

struct bench_problem {
    const struct bench_case *shape;
    struct bench_device *device;
    float *q_values, *k_values; /* what the elements stand for */
    void *q_data, *k_data, *v_data, *v_abs_data, *dout_data;
    float *out, *lse; /* host results */
    clattn_attention_desc attention;
    clattn_select_desc select;
    clattn_tensor q, k, v, dout;                                        /* host views */
    clattn_tensor device_q, device_k, device_v, device_out, device_lse; /* host views or device copies */
    clattn_tensor device_dout, device_dq, device_dk, device_dv;         /* of BENCH_BACKWARD */
    bool is_staged;
    clattn_pyramid *pyramid;
    clattn_blocks *blocks;
    clattn_neighborhood *plan;
    clattn_cache *cache;     /* of BENCH_DECODE */
    clattn_blocks_desc list; /* shape of `blocks` */
    int32_t *indices;        /* [rows][heads][topk] of them */
    int64_t sampled[8];      /* query rows that are verified, ascending */
    int sampled_count;
};

/* Makes inputs, copies them to the device (*transfer seconds) and makes what the operation needs. */
clattn_status bench_problem_make(struct bench_problem *problem, const struct bench_case *shape,
                                 struct bench_device *device, double *transfer);
clattn_status bench_problem_run(struct bench_problem *problem, const clattn_sync *sync);

/* Copies results and lists to the host. */
clattn_status bench_problem_fetch(struct bench_problem *problem);

/* Gradients arrive at every row from now on, no longer only at the sampled ones. */
clattn_status bench_problem_densify(struct bench_problem *problem);
void bench_problem_release(struct bench_problem *problem);

/* ---- verification ---- */

struct bench_verdict {
    int64_t rows;     /* that were compared */
    double error;     /* greatest absolute difference */
    double tolerated; /* greatest difference over its tolerance; above 1 is wrong */
    int64_t lists_wrong;
};

/* Compares the sampled rows of the fetched results. */
clattn_status bench_verify(struct bench_problem *problem, clattn_context *reference,
                           struct bench_verdict *verdict);

/* Two parts of it: gradients, and the keys that a row of a neighborhood sees. */
clattn_status bench_verify_gradients(struct bench_problem *problem, clattn_context *reference,
                                     struct bench_verdict *verdict);

/* Key tokens of query `row`, [*count]; the caller frees them. NULL: out of memory. */
int64_t *bench_neighbors(const clattn_neighborhood_desc *desc, int64_t row, int64_t *count);

/* The list of the query row's list head `head` as entries below `blocks`, -1 on the right: [list.topk]. */
void bench_list(const struct bench_problem *problem, int64_t row, int32_t head, int64_t blocks, int32_t *list);

/* What the chosen lists keep of exact attention, of a problem of files. False: out of memory. */
bool bench_judge(const struct bench_problem *problem, struct quality *quality);

/* ---- work and time ---- */

struct bench_work {
    double flops, dense_flops; /* of the listed pairs, of all visible ones; 0: not counted */
    double bytes;              /* inputs and results, each once; 0: not counted */
    double bound, ideal;       /* of a neighborhood: speed-up over dense by tiles, by pairs; 0: none */
};
struct bench_work bench_work_count(const struct bench_problem *problem);

/* The device's clock where it has one; processor time where one thread computes, as other programs hardly
 * disturb it; else wall clock. */
enum bench_clock { BENCH_WALL, BENCH_DEVICE, BENCH_PROCESSOR };
extern const char *const bench_clock_words[];

struct bench_timing {
    double median, p5, p95; /* seconds */
    double wall;            /* median by the wall clock, whatever the clock of the others */
    int samples;
    enum bench_clock clock;
};

extern volatile int bench_interrupted; /* set by Ctrl-C */

/* Calls the operation until `seconds` are over, at least once. `first`: what the first call took. */
clattn_status bench_time(struct bench_problem *problem, double seconds, double first,
                         struct bench_timing *timing);

/* The time of one call. */
clattn_status bench_sample(struct bench_problem *problem, double *seconds);

/* FLOP/s of dense attention on the same shapes, over as many of the last queries as fit into a second or so. */
clattn_status bench_dense_rate(struct bench_device *device, const struct bench_case *shape,
                               clattn_context *reference, double *rate);

enum bench_state { BENCH_GOOD, BENCH_WRONG, BENCH_FAILED, BENCH_SKIPPED };
extern const char *const bench_state_words[];

struct bench_row {
    struct bench_case shape;
    clattn_device_info device;
    int threads; /* 0: as OpenMP decides, or not a CPU */
    double fma_rate, copy_rate;
    enum bench_state state;
    char message[256];
    struct bench_verdict verdict;
    struct bench_work work;
    struct bench_timing timing;
    double transfer, compile, first, wall;
    clattn_tuning tuning; /* the strongest source of its tiles */
    double dense_rate;    /* FLOP/s; 0: not measured */
    struct quality quality;
};

/* Shares of what the row reached; NAN where something was not measured. */
double bench_row_roofline(const struct bench_row *row);
double bench_row_speedup(const struct bench_row *row);

void bench_print_table(const struct bench_row *rows, int count);
void bench_print_csv(const struct bench_row *rows, int count);
int bench_print_json(const struct bench_row *rows, int count, const struct bench_device *devices,
                     int device_count, bool is_complete);

#endif
