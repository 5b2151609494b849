/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "tolerance.h"
#include "demo.h"
#include "device.h"
#include "job.h"
#include "options.h"
#include "program.h"
#include "report.h"
#include "table.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct command_help help = {
    "demo [OPTION...]",
    "Runs attention on the bundled sample, real keys, values and queries of a language model that was\n"
    "trained to find facts in 16384 tokens, with every backend of this machine, and compares the\n"
    "results with an independent computation.",
    "Columns: the seconds of selection and attention; the expected block lists that were chosen\n"
    "(those that rounding may decide count as right); the greatest difference of the attention from\n"
    "the oracle, and as a fraction of the tolerance; and at how many of the answers the block with\n"
    "the planted fact was among the 8 of 256 chosen. The reference only runs pisa, because it is\n"
    "slow.\n"
    "\n"
    "Exit status: 0 all agree, 1 something failed, 2 wrong usage."};

/* PISA is the default, exact flat scoring finds all answers at the cost of reading all keys. */
static const struct demo_selector {
    clattn_selector selector;
    const char *name, *file;
} selectors[] = {{CLATTN_SELECT_PISA, "pisa", "pisa"}, {CLATTN_SELECT_FLAT_LSE, "flat-lse", "flat_lse"}};
#define SELECTORS 2

struct demo {
    const char *directory;
    bool json;
    struct sample sample;
    struct oracle oracles[SELECTORS];
    struct table table;
    report *rows;
};

/* What one backend made of one selector. */
struct outcome {
    int64_t lists_right, answers;
    struct comparison numbers;
    double seconds, build;
};

static void judge(const struct demo *demo, int which, const struct job *job, const int32_t *lists,
                  struct outcome *outcome)
{
    const struct sample *sample = &demo->sample;
    const struct oracle *oracle = &demo->oracles[which];
    for (int64_t i = 0; i < sample->positions; i++) {
        int64_t row = sample->position[i] - sample->first_position;
        const int32_t *list = lists + row * SAMPLE_TOPK, *expected = oracle->lists + i * SAMPLE_TOPK;
        bool same = memcmp(list, expected, SAMPLE_TOPK * sizeof *list) == 0;
        outcome->lists_right += same || oracle->gap[i] < SAMPLE_CLEAR_GAP;
        for (int64_t h = 0; same && h < sample->q_heads; h++) {
            int64_t at = i * sample->q_heads + h, mine = row * sample->q_heads + h;
            struct oracle_row expected_row = {oracle->out + at * sample->dim_v,
                                              oracle->abs_out + at * sample->dim_v, oracle->lse[at],
                                              oracle->keys[i], oracle->condition[at]};
            compare_row(&outcome->numbers, &expected_row, sample->dtype, sample->dim_v,
                        job->out + mine * sample->dim_v, job->lse[mine]);
        }
    }
    for (int64_t i = 0; i < sample->answers; i++) {
        const int32_t *list = lists + (sample->answer[i] - sample->first_position) * SAMPLE_TOPK;
        for (int k = 0; k < SAMPLE_TOPK; k++)
            outcome->answers += list[k] == sample->needle[i] / SAMPLE_LEAF;
    }
}

static void add_row(struct demo *demo, const clattn_device_info *device, const char *selector,
                    const struct outcome *outcome, bool good)
{
    const struct sample *sample = &demo->sample;
    double ratio = fmax(outcome->numbers.out_ratio, outcome->numbers.lse_ratio);
    report *row = report_entry(demo->rows);
    device_report(report_child(row, "device"), device);
    report_text(row, "selector", selector);
    report_real(row, "seconds", outcome->seconds);
    report_real(row, "build_seconds", outcome->build);
    report_integer(row, "lists_right", outcome->lists_right);
    report_real(row, "error", outcome->numbers.out_error);
    report_real(row, "error_ratio", ratio);
    report_integer(row, "answers_found", outcome->answers);
    report_flag(row, "good", good);

    table_add(&demo->table, "%s", backend_words[device->backend]);
    table_add(&demo->table, "%.40s%s%s", device->name, *device->variant ? ", " : "", device->variant);
    table_add(&demo->table, "%s", selector);
    table_add(&demo->table, "%.3f s", outcome->seconds);
    table_add(&demo->table, "%" PRId64 " of %" PRId64, outcome->lists_right, sample->positions);
    table_add(&demo->table, "%.1e", outcome->numbers.out_error);
    table_add(&demo->table, "%.2f", ratio);
    table_add(&demo->table, "%" PRId64 " of %" PRId64, outcome->answers, sample->answers);
    table_add(&demo->table, "%s", good ? "good" : "WRONG");
}

static int run_selector(struct demo *demo, clattn_context *context, const clattn_device_info *device, int which)
{
    const struct sample *sample = &demo->sample;
    const int64_t rows = sample->q_len * sample->q_heads;
    struct job job = {
        .context = context, .attention = CLATTN_ATTENTION_DESC_INIT, .select = CLATTN_SELECT_DESC_INIT};
    struct outcome outcome = {0};
    job.select.selector = selectors[which].selector;
    job.q = sample_view(sample, SAMPLE_Q);
    job.k = sample_view(sample, SAMPLE_K);
    job.v = sample_view(sample, SAMPLE_V);
    job.out = malloc((size_t)(rows * sample->dim_v) * sizeof *job.out);
    job.lse = malloc((size_t)rows * sizeof *job.lse);
    int32_t *lists = malloc((size_t)(sample->q_len * SAMPLE_TOPK) * sizeof *lists);
    int status = job.out && job.lse && lists ? job_run(&job) : STATUS_FAILED;
    if (status == STATUS_OK) {
        clattn_status read = clattn_blocks_read(context, job.blocks, lists, NULL);
        if (read != CLATTN_SUCCESS) {
            device_error(context, read, "reading the block lists");
            status = STATUS_FAILED;
        }
    }
    if (status == STATUS_OK) {
        judge(demo, which, &job, lists, &outcome);
        outcome.seconds = job.seconds[JOB_PYRAMID] + job.seconds[JOB_SELECT] + job.seconds[JOB_ATTEND];
        outcome.build = job.build;
        bool good = outcome.lists_right == sample->positions && outcome.numbers.out_ratio <= 1 &&
                    outcome.numbers.lse_ratio <= 1;
        add_row(demo, device, selectors[which].name, &outcome, good);
        if (!good) status = STATUS_FAILED;
    }
    job_release(&job);
    free(job.out);
    free(job.lse);
    free(lists);
    return status;
}

static int run_device(struct demo *demo, const clattn_device_info *found)
{
    char index[16];
    struct device_choice choice = {(int)found->backend, NULL, NULL};
    clattn_context *context;
    clattn_device_info device = {.size = sizeof device};
    snprintf(index, sizeof index, "%d", found->index);
    if (found->backend == CLATTN_BACKEND_OPENCL) choice.device = index;
    int status = device_open(&choice, &context);
    if (status != STATUS_OK) return STATUS_FAILED;
    clattn_context_device(context, &device);
    /* Flat scoring in double precision takes half a minute. */
    int count = found->backend == CLATTN_BACKEND_REFERENCE ? 1 : SELECTORS;
    for (int which = 0; which < count; which++)
        if (run_selector(demo, context, &device, which) != STATUS_OK) status = STATUS_FAILED;
    clattn_context_release(context);
    return status;
}

static int run_devices(struct demo *demo)
{
    static const char *const heading[] = {"backend", "device",       "selector",      "time", "lists",
                                          "error",   "of tolerance", "answers found", ""};
    const struct device_choice choice = {CLATTN_BACKEND_REFERENCE, NULL, NULL};
    clattn_device_info info = {.size = sizeof info};
    clattn_context *reference;
    bool opencl = false;
    int status = device_open(&choice, &reference);
    if (status != STATUS_OK) return status;
    for (int i = 0; i < SELECTORS && status == STATUS_OK; i++)
        status = oracle_open(&demo->oracles[i], &demo->sample, selectors[i].file, reference);
    clattn_context_release(reference);
    if (status != STATUS_OK) return status;

    table_begin(&demo->table, "lllrrrrrl");
    for (size_t i = 0; i < sizeof heading / sizeof *heading; i++)
        table_add(&demo->table, "%s", heading[i]);
    for (int n = 0; clattn_device_get(n, &info) == CLATTN_SUCCESS; n++) {
        if (run_device(demo, &info) != STATUS_OK) status = STATUS_FAILED;
        opencl |= info.backend == CLATTN_BACKEND_OPENCL;
    }
    if (demo->json) {
        table_discard(&demo->table);
        return status;
    }
    printf("Attention of %" PRId64 " queries x %" PRId64 " heads over the 8 of %" PRId64
           " blocks of 64 keys that a selector chooses\n\n",
           demo->sample.q_len, demo->sample.q_heads, (demo->sample.kv_len + SAMPLE_LEAF - 1) / SAMPLE_LEAF);
    table_end(&demo->table);
    if (!opencl) puts("\nNo OpenCL device was found; the CPU does the same work.");
    puts(status == STATUS_OK ? "\nAll backends agree with the oracle."
                             : "\nNOT all backends agree with the oracle.");
    return status;
}

int demo_main(int argc, char **argv)
{
    int status;
    struct demo demo = {0};
    const struct option_spec specs[] = {
        {"data", OPTION_TEXT, &demo.directory, "DIR", "folder of the sample (default: the installed one)", 0, 0,
         NULL},
        {"json", OPTION_FLAG, &demo.json, NULL, "print the table as JSON", 0, 0, NULL},
        {0}};
    if (!options_parse(specs, &help, argc, argv, &status)) return status;
    if (demo.json && !report_available()) return STATUS_USAGE;
    report *root = demo.json ? report_object() : NULL;
    report_text(root, "version", clattn_version());
    demo.rows = report_list(root, "results");
    status = sample_open(&demo.sample, demo.directory);
    if (status == STATUS_OK) {
        status = run_devices(&demo);
        if (demo.json && report_print(root) != STATUS_OK) status = STATUS_FAILED;
    }
    for (int i = 0; i < SELECTORS; i++)
        oracle_close(&demo.oracles[i]);
    sample_close(&demo.sample);
    report_release(root);
    return status;
}
