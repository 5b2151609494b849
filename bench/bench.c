/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "bench.h"

#include "device.h"
#include "options.h"
#include "program.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROW_SECONDS 1.0
#define QUICK_SECONDS 0.05

enum { LENS_MAX = 16, DEVICES_MAX = 16 };

static const char *const dtype_words[] = {"f32", "f16", "bf16", NULL};
static const char *const leaf_words[] = {"16", "32", "64", "128", NULL};
static const char *const bench_backends[] = {"auto", "reference", "cpu", "opencl", "all", NULL};
enum { BACKEND_ALL = 4 };

static const struct command_help help = {
    "bench [OPTION...]",
    "Measures the operations of the library on the devices of this machine. Every configuration is compared\n"
    "with the reference on sampled rows before it is timed; a wrong one is told, never timed.",
    "Suites: pyramid, select, forward, backward, decode, patterns, dense; by default these. And neighborhood\n"
    "(minutes on a CPU), selection-scaling (the pyramid against flat scoring, 4096 to 262144 keys), and\n"
    "selection-quality (what each selector keeps of exact attention, on queries and keys of files).\n"
    "roofline is the share of what the measured ceilings of the same device allow; x dense the speed-up over "
    "dense\n"
    "attention of this library on the same device, whose rate is measured on the last queries.\n"
    "Ctrl-C ends the measurement and prints what is done.\n"
    "\n"
    "Exit status: 0 done, 1 a result was wrong or failed, 2 wrong usage, 77 no such device, 130 interrupted.\n"
    "\n"
    "Example:\n"
    "  clattn bench --suite forward,backward --len 4096,16384 --device all --json > results.json"};

struct bench_run {
    struct device_choice choice;
    const char *suites, *lens_text;
    int backend, dtype, leaf;
    int64_t q_heads, kv_heads, dim, topk, threads;
    double budget, begin;
    bool quick, json, csv;
    struct bench_files files;
    int64_t lens[LENS_MAX];
    struct bench_sizes sizes;
    struct bench_case *cases;
    int case_count;
    struct bench_device devices[DEVICES_MAX];
    int device_count;
    clattn_context *reference;
    struct bench_row *rows;
    int row_count;
};

static bool parse_options(struct bench_run *run, int argc, char **argv, int *status)
{
    const struct option_spec specs[] = {
        {"suite", OPTION_TEXT, &run->suites, "LIST", "what to measure, see below", 0, 0, NULL},
        {"len", OPTION_TEXT, &run->lens_text, "LIST", "lengths (default 4096,16384)", 0, 0, NULL},
        {"q-heads", OPTION_INTEGER, &run->q_heads, "N", "query heads (default 4)", 1, 1024, NULL},
        {"kv-heads", OPTION_INTEGER, &run->kv_heads, "N", "key heads (default 1)", 1, 1024, NULL},
        {"dim", OPTION_INTEGER, &run->dim, "N", "numbers of a head (default 64)", 1, 256, NULL},
        {"topk", OPTION_INTEGER, &run->topk, "K", "leaves of a list (default 8)", 1, CLATTN_TOPK_MAX, NULL},
        {"leaf", OPTION_CHOICE, &run->leaf, NULL, "tokens in a leaf (default 64)", 0, 0, leaf_words},
        {"dtype", OPTION_CHOICE, &run->dtype, NULL, "element type (default f32)", 0, 0, dtype_words},
        {"backend", OPTION_CHOICE, &run->backend, NULL,
         "what computes (default auto: an OpenCL GPU, else the CPU);\nall: everything but the reference", 0, 0,
         bench_backends},
        {"device", OPTION_TEXT, &run->choice.device, "NAME|INDEX|all",
         "OpenCL device: a part of its or its platform's name, or its\nindex in 'clattn info'; all: as "
         "--backend all",
         0, 0, NULL},
        {"threads", OPTION_INTEGER, &run->threads, "N",
         "of the CPU backend; with 1, times are the processor's (default:\nas OpenMP decides)", 1, 1024, NULL},
        {"budget", OPTION_SECONDS, &run->budget, "TIME", "what does not fit is left out: 90s, 5m (default 60s)",
         0, 0, NULL},
        {"q", OPTION_TEXT, &run->files.q_name, "FILE",
         "queries of selection-quality, .npy or .safetensors:NAME (default:\nthe bundled sample)", 0, 0, NULL},
        {"k", OPTION_TEXT, &run->files.k_name, "FILE", "its keys", 0, 0, NULL},
        {"positions", OPTION_TEXT, &run->files.positions, "FILE",
         "the positions that are judged, int32 (default: 64 of all)", 0, 0, NULL},
        {"answers", OPTION_TEXT, &run->files.answers, "FILE",
         "positions at which something must be found, int32 ...", 0, 0, NULL},
        {"needles", OPTION_TEXT, &run->files.needles, "FILE", "... and the positions where it stands", 0, 0,
         NULL},
        {"from", OPTION_INTEGER, &run->files.from, "N",
         "positions before this one are not judged (default 1024)", 0, 1 << 30, NULL},
        {"quick", OPTION_FLAG, &run->quick, NULL, "small sizes: whether it works, not how fast it is", 0, 0,
         NULL},
        {"json", OPTION_FLAG, &run->json, NULL, "print JSON", 0, 0, NULL},
        {"csv", OPTION_FLAG, &run->csv, NULL, "print comma-separated values", 0, 0, NULL},
        {0}};
    return options_parse(specs, &help, argc, argv, status);
}

static int parse_lens(struct bench_run *run)
{
    char copy[256], *rest = copy, *word;
    const char *text = run->lens_text ? run->lens_text : run->quick ? "512" : "4096,16384";
    if (strlen(text) >= sizeof copy) return program_usage("--len: '%s' is too long", text);
    strcpy(copy, text);
    while ((word = strsep(&rest, ",")) != NULL) {
        if (run->sizes.len_count == LENS_MAX) return program_usage("--len: more than %d lengths", LENS_MAX);
        if (!parse_integer(word, 1, INT64_C(1) << 24, &run->lens[run->sizes.len_count++]))
            return program_usage("--len: '%s' is not a list of whole numbers from 1 to 2^24", text);
    }
    return STATUS_OK;
}

static int add_suite(struct bench_run *run, int suite)
{
    int count = 0;
    struct bench_case *cases = bench_suite_make(suite, &run->sizes, &count);
    struct bench_case *all = realloc(run->cases, (size_t)(run->case_count + count + 1) * sizeof *all);
    if (all) run->cases = all;
    if (all && cases) memcpy(all + run->case_count, cases, (size_t)count * sizeof *all);
    free(cases);
    if (!all || !cases) {
        program_error("out of memory");
        return STATUS_FAILED;
    }
    run->case_count += count;
    return STATUS_OK;
}

static int parse_suites(struct bench_run *run)
{
    char copy[256], *rest = copy, *word;
    const char *text = run->suites ? run->suites : "pyramid,select,forward,backward,decode,patterns,dense";
    int status = STATUS_OK;
    if (strlen(text) >= sizeof copy) return program_usage("--suite: '%s' is too long", text);
    strcpy(copy, text);
    while (status == STATUS_OK && (word = strsep(&rest, ",")) != NULL) {
        int suite = 0;
        while (bench_suite_words[suite] && strcmp(bench_suite_words[suite], word) != 0)
            suite++;
        if (!bench_suite_words[suite])
            return program_usage(
                "--suite: '%s' is not one of pyramid, select, forward, backward, decode, patterns, "
                "dense, neighborhood, selection-scaling, selection-quality",
                word);
        if (bench_suite_has_files(suite) && !run->files.is_open)
            status = bench_files_open(&run->files, run->sizes.leaf);
        run->sizes.files = &run->files;
        if (status == STATUS_OK) status = add_suite(run, suite);
    }
    return status;
}

static int check_options(struct bench_run *run)
{
    static const clattn_dtype dtypes[] = {CLATTN_FLOAT32, CLATTN_FLOAT16, CLATTN_BFLOAT16};
    static const int32_t leaves[] = {16, 32, 64, 128};
    if (run->json && run->csv) return program_usage("--json and --csv both want standard output");
    if (run->json && !report_available()) return STATUS_USAGE;
    if (run->q_heads % run->kv_heads != 0)
        return program_usage("--q-heads %" PRId64 " is not a multiple of --kv-heads %" PRId64, run->q_heads,
                             run->kv_heads);
    if (run->choice.device && strcmp(run->choice.device, "all") == 0) {
        if (run->backend != CLATTN_BACKEND_AUTO && run->backend != BACKEND_ALL)
            return program_usage("--device all does not go with --backend %s", bench_backends[run->backend]);
        run->choice.device = NULL;
        run->backend = BACKEND_ALL;
    }
    if (run->backend == BACKEND_ALL && run->choice.device)
        return program_usage("--backend all does not go with a single --device");
    run->choice.backend = run->backend == BACKEND_ALL ? CLATTN_BACKEND_AUTO : run->backend;
    run->sizes = (struct bench_sizes){run->lens,
                                      0,
                                      dtypes[run->dtype],
                                      (int32_t)run->q_heads,
                                      (int32_t)run->kv_heads,
                                      (int32_t)run->dim,
                                      (int32_t)run->topk,
                                      leaves[run->leaf],
                                      run->quick,
                                      NULL};
    int status = device_choice_check(&run->choice);
    if (status == STATUS_OK) status = parse_lens(run);
    return status == STATUS_OK ? parse_suites(run) : status;
}

/* ---- devices ---- */

/* What a context of this choice would use. */
static int find_device(const struct bench_run *run, clattn_device_info *info)
{
    clattn_context *context = NULL;
    int status = device_open(&run->choice, &context);
    if (status == STATUS_OK) clattn_context_device(context, info);
    clattn_context_release(context);
    return status;
}

static int open_devices(struct bench_run *run)
{
    clattn_device_info info = {.size = sizeof info}, wanted = {.size = sizeof wanted};
    const struct device_choice reference = {.backend = CLATTN_BACKEND_REFERENCE};
    bool all = run->backend == BACKEND_ALL;
    int status = device_open(&reference, &run->reference);
    if (status == STATUS_OK && !all) status = find_device(run, &wanted);
    if (status != STATUS_OK) return status;
    for (int n = 0; clattn_device_get(n, &info) == CLATTN_SUCCESS && run->device_count < DEVICES_MAX; n++) {
        if (all ? info.backend == CLATTN_BACKEND_REFERENCE
                : info.backend != wanted.backend || info.index != wanted.index)
            continue;
        /* One broken driver does not keep the others from being measured. */
        status = bench_device_open(&run->devices[run->device_count], &info, (int)run->threads, NULL);
        run->devices[run->device_count].row_seconds = run->quick ? QUICK_SECONDS : ROW_SECONDS;
        if (status != STATUS_OK) continue;
        bench_device_measure(&run->devices[run->device_count++]);
    }
    return run->device_count > 0 ? STATUS_OK : status;
}

/* ---- rows ---- */

static double seconds_left(const struct bench_run *run)
{
    return run->begin + run->budget - program_seconds();
}

static void fail_row(struct bench_row *row, clattn_context *context, clattn_status status)
{
    char detail[160] = "";
    clattn_context_error(context, detail, sizeof detail);
    detail[strcspn(detail, "\n")] = 0;
    row->state = BENCH_FAILED;
    snprintf(row->message, sizeof row->message, "%s%s%s", clattn_strerror(status), *detail ? ": " : "", detail);
}

/* Where tiles that were chosen since `before` came from. */
static clattn_tuning tuning_since(clattn_context *context, const clattn_stats *before)
{
    clattn_stats now = {.size = sizeof now};
    clattn_tuning source = CLATTN_TUNING_DEFAULT;
    clattn_context_stats(context, &now);
    for (int t = CLATTN_TUNING_SHIPPED; t <= CLATTN_TUNING_CALLER; t++)
        if (now.tiles_by_tuning[t] > before->tiles_by_tuning[t]) source = (clattn_tuning)t;
    return source;
}

static double build_seconds(clattn_context *context)
{
    clattn_stats stats = {.size = sizeof stats};
    clattn_context_stats(context, &stats);
    return stats.build_seconds;
}

/* Is there time for a call and a sample? Told from the dense rate, where the work is known beforehand. */
static bool fits(const struct bench_run *run, struct bench_row *row)
{
    const struct bench_case *s = &row->shape;
    clattn_neighborhood_analysis analysis = {.size = sizeof analysis};
    double left = seconds_left(run), dense = 4.0 * s->dim * (double)s->q_len * (double)s->kv_len * s->q_heads;
    double need = 0;
    if (row->dense_rate > 0 && s->operation == BENCH_FORWARD && !s->pattern &&
        s->selector == CLATTN_SELECT_DENSE)
        need = 2 * dense * (s->causal ? 0.5 : 1) / row->dense_rate;
    if (row->dense_rate > 0 && s->operation == BENCH_NEIGHBORHOOD &&
        clattn_neighborhood_analyse(&s->neighborhood, &analysis) == CLATTN_SUCCESS)
        need = 2 * dense / row->dense_rate / analysis.bound_speedup;
    if (left > need) return true;
    row->state = BENCH_SKIPPED;
    snprintf(row->message, sizeof row->message,
             need > 0 ? "the budget has %.0f s left, about %.0f s are needed" : "the budget is spent",
             left > 0 ? left : 0, need);
    return false;
}

static clattn_status measure(const struct bench_run *run, struct bench_device *device, struct bench_row *row,
                             struct bench_problem *problem)
{
    double build = build_seconds(device->context);
    clattn_status status = bench_problem_make(problem, &row->shape, device, &row->transfer);
    double before = build_seconds(device->context), start = program_seconds();
    if (!status) status = bench_problem_run(problem, NULL);
    double after = build_seconds(device->context);
    row->first = program_seconds() - start - (after - before);
    row->compile = after - build;
    if (!status) status = bench_problem_fetch(problem);
    if (status) return status;
    row->work = bench_work_count(problem);
    status = bench_verify(problem, run->reference, &row->verdict);
    if (status) return status;
    if (!(row->verdict.tolerated <= 1) || row->verdict.lists_wrong > 0) {
        row->state = BENCH_WRONG;
        snprintf(row->message, sizeof row->message, "%.3g times the tolerance, %" PRId64 " lists wrong",
                 row->verdict.tolerated, row->verdict.lists_wrong);
        return CLATTN_SUCCESS;
    }
    if (row->shape.files && !bench_judge(problem, &row->quality)) return CLATTN_OUT_OF_MEMORY;
    status = bench_problem_densify(problem);
    return status ? status
                  : bench_time(problem, fmin(device->row_seconds, seconds_left(run)), row->first, &row->timing);
}

static void measure_row(const struct bench_run *run, struct bench_device *device, struct bench_row *row)
{
    struct bench_problem problem;
    double start = program_seconds();
    enum bench_operation operation = row->shape.operation;
    clattn_status status = CLATTN_SUCCESS;
    row->device = device->info;
    /* 16-bit types run on matrix units in the tiers above the subgroup tier. */
    bool has_matrix = device->matrix_rate > 0 && row->shape.dtype != CLATTN_FLOAT32 &&
                      bench_has_matrix(&device->info) &&
                      strcmp(device->info.variant, "subgroup") != 0;
    row->fma_rate = has_matrix ? device->matrix_rate : device->fma_rate;
    row->copy_rate = device->copy_rate;
    row->threads = device->info.backend == CLATTN_BACKEND_OPENCL ? 0 : device->threads;
    if (bench_interrupted) {
        row->state = BENCH_SKIPPED;
        snprintf(row->message, sizeof row->message, "interrupted");
        return;
    }
    if (seconds_left(run) > 0 && operation != BENCH_PYRAMID && operation != BENCH_SELECT)
        status = bench_dense_rate(device, &row->shape, run->reference, &row->dense_rate);
    if (!status && !fits(run, row)) return;
    clattn_stats stats = {.size = sizeof stats};
    clattn_context_stats(device->context, &stats);
    if (!status) {
        status = measure(run, device, row, &problem);
        bench_problem_release(&problem);
    }
    row->tuning = tuning_since(device->context, &stats);
    if (status) fail_row(row, device->context, status);
    /* What a backend does not have is no failure. */
    if (status == CLATTN_NO_DEVICE)
        row->state = BENCH_SKIPPED;
    row->wall = program_seconds() - start;
}

static void show_progress(const struct bench_run *run, int total, const struct bench_device *device,
                          const struct bench_row *row)
{
    char bar[21] = "....................";
    memset(bar, '#', (size_t)(20 * (run->row_count - 1) / total));
    fprintf(stderr, "\r%-78s\r[%s] %d of %d, %.0f s left: %.24s, %.20s", "", bar, run->row_count, total,
            fmax(seconds_left(run), 0), device->info.name, row->shape.name);
}

static void measure_all(struct bench_run *run)
{
    bool told = isatty(STDERR_FILENO);
    int total = run->device_count * run->case_count;
    for (int d = 0; d < run->device_count; d++)
        for (int c = 0; c < run->case_count; c++) {
            struct bench_row *row = &run->rows[run->row_count++];
            row->shape = run->cases[c];
            if (told) show_progress(run, total, &run->devices[d], row);
            measure_row(run, &run->devices[d], row);
        }
    if (told) fprintf(stderr, "\r%78s\r", "");
}

static int finish(const struct bench_run *run)
{
    bool is_complete = true;
    int status = STATUS_OK;
    for (int r = 0; r < run->row_count; r++) {
        is_complete = is_complete && run->rows[r].state != BENCH_SKIPPED;
        if (run->rows[r].state == BENCH_WRONG || run->rows[r].state == BENCH_FAILED) status = STATUS_FAILED;
    }
    if (run->json)
        status |= bench_print_json(run->rows, run->row_count, run->devices, run->device_count, is_complete);
    else if (run->csv)
        bench_print_csv(run->rows, run->row_count);
    else
        bench_print_table(run->rows, run->row_count);
    return bench_interrupted ? STATUS_INTERRUPTED : status;
}

static void interrupt(int signal_number)
{
    (void)signal_number;
    bench_interrupted = 1;
}

static int bench_all(struct bench_run *run)
{
    /* The second Ctrl-C ends the program at once. */
    struct sigaction action = {.sa_handler = interrupt, .sa_flags = SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    int status = open_devices(run);
    if (status != STATUS_OK) return status;
    run->rows = calloc((size_t)(run->device_count * run->case_count + 1), sizeof *run->rows);
    if (!run->rows) {
        program_error("out of memory");
        return STATUS_FAILED;
    }
    measure_all(run);
    return finish(run);
}

int bench_main(int argc, char **argv)
{
    int status;
    struct bench_run run = {.leaf = 2,
                            .q_heads = 4,
                            .kv_heads = 1,
                            .dim = 64,
                            .topk = 8,
                            .budget = 60,
                            .begin = program_seconds(),
                            .files = {.from = 1024}};
    if (!parse_options(&run, argc, argv, &status)) return status;
    status = check_options(&run);
    if (status == STATUS_OK) status = bench_all(&run);
    for (int d = 0; d < run.device_count; d++)
        bench_device_close(&run.devices[d]);
    clattn_context_release(run.reference);
    bench_files_close(&run.files);
    free(run.cases);
    free(run.rows);
    return status;
}
