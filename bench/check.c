/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "check.h"

#include "device.h"
#include "options.h"
#include "program.h"
#include "report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VARIANTS_MAX 32

static const char *const selector_words[] = {"pisa", "pisa1", "pisa2", "flat-mean", "flat-lse", "dense"};
static const char *const dtype_words[] = {
    [CLATTN_FLOAT32] = "f32", [CLATTN_FLOAT16] = "f16", [CLATTN_BFLOAT16] = "bf16"};
static const char *const input_words[] = {"random", "large", "constant", "zero-q"};

static const struct command_help help = {
    "check [OPTION...]",
    "Compares every backend of this machine, each in every variant that it has (instruction sets of\n"
    "the CPU, tiers of OpenCL), with the reference: block lists, attention and the log of the softmax\n"
    "denominator, over a table of shapes, selectors and element types.",
    "A line a comparison: PASS or FAIL, the case, and the greatest difference as a fraction of what\n"
    "rounding explains (above 1 is wrong). Lists may differ where the deciding scores are equal\n"
    "within rounding.\n"
    "\n"
    "Exit status: 0 all passed, 1 something failed, 2 wrong usage, 77 the device that was asked for\n"
    "is not there."};

struct variant {
    clattn_context *context;
    clattn_device_info device;
    char name[64]; /* "cpu avx2", "opencl:0 portable" */
    int64_t passed, failed;
    double worst;
};

struct check {
    struct device_choice choice;
    bool quick, json, failures_only;
    int64_t seed;
    clattn_context *reference;
    struct variant variants[VARIANTS_MAX];
    int count;
    bool broken;  /* a device could not be used */
    bool stopped; /* the reference failed */
    report *failures;
};

static void add_variant(struct check *check, const clattn_device_info *device, const char *variant)
{
    char index[16];
    struct variant *v = &check->variants[check->count];
    struct device_choice choice = {(int)device->backend, NULL, variant};
    const char *words = variant ? variant : "";
    snprintf(index, sizeof index, "%d", device->index);
    if (device->backend == CLATTN_BACKEND_OPENCL) choice.device = index;
    if (check->count == VARIANTS_MAX || device_open(&choice, &v->context) != STATUS_OK) {
        check->broken = true;
        return;
    }
    if (device->backend == CLATTN_BACKEND_OPENCL)
        snprintf(v->name, sizeof v->name, "opencl:%d %s", device->index, words);
    else
        snprintf(v->name, sizeof v->name, "%s %s", backend_words[device->backend], words);
    v->device = *device;
    check->count++;
}

/* Every variant of a device has a context of its own. */
static void add_device(struct check *check, const clattn_device_info *device)
{
    char variants[sizeof device->variants], *rest = variants, *variant;
    memcpy(variants, device->variants, sizeof variants);
    if (!*variants) add_variant(check, device, NULL);
    while ((variant = strsep(&rest, " ")) != NULL)
        if (*variant) add_variant(check, device, variant);
}

/* --device is resolved by the library, so that it means the same as in `clattn run`. */
static int find_asked_device(struct check *check, int *index)
{
    clattn_context *context;
    clattn_device_info info = {.size = sizeof info};
    *index = -1;
    if (!check->choice.device) return STATUS_OK;
    int status = device_open(&check->choice, &context);
    if (status != STATUS_OK) return status;
    clattn_context_device(context, &info);
    clattn_context_release(context);
    *index = info.index;
    return STATUS_OK;
}

static int add_devices(struct check *check)
{
    int asked, status = find_asked_device(check, &asked);
    if (status != STATUS_OK) return status;
    clattn_device_info info = {.size = sizeof info};
    for (int n = 0; clattn_device_get(n, &info) == CLATTN_SUCCESS; n++) {
        clattn_backend wanted = (clattn_backend)check->choice.backend;
        if (info.backend == CLATTN_BACKEND_REFERENCE) continue;
        if (wanted != CLATTN_BACKEND_AUTO && info.backend != wanted) continue;
        if (asked >= 0 && info.index != asked) continue;
        add_device(check, &info);
    }
    if (check->count == 0 && !check->broken) {
        program_error("backend %s: no such device here", backend_words[check->choice.backend]);
        return STATUS_NO_DEVICE;
    }
    return STATUS_OK;
}

static void describe(const struct check_problem *problem, char *text, size_t size)
{
    const struct check_case *s = problem->shape;
    snprintf(text, size,
             "%-4s %-9s %-10s %" PRId32 "x%" PRId32 "/%" PRId32 "%s heads %" PRId32 "/%" PRId32 " dim %" PRId32
             "/%" PRId32 " leaf %" PRId32 " topk %" PRId32 "%s%s",
             dtype_words[problem->dtype], selector_words[s->selector], s->causal ? "causal" : "not-causal",
             s->batch, s->q_len, s->kv_len, s->sequences ? " packed" : "", s->q_heads, s->kv_heads, s->dim,
             s->dim_v, s->leaf, s->topk, s->kind ? " " : "", s->kind ? input_words[s->kind] : "");
}

static void report_failure(struct check *check, const struct variant *variant, const char *what,
                           const struct check_result *result)
{
    report *failure = report_entry(check->failures);
    report_text(failure, "variant", variant->name);
    report_text(failure, "case", what);
    report_integer(failure, "lists_wrong", result->lists_wrong);
    report_real(failure, "out_ratio", result->numbers.out_ratio);
    report_real(failure, "lse_ratio", result->numbers.lse_ratio);
}

static void compare_variant(struct check *check, const struct check_problem *problem, struct variant *variant)
{
    struct check_result result;
    char what[192], lists[48] = "";
    describe(problem, what, sizeof what);
    bool ran = check_problem_compare(problem, variant->context, &result) == STATUS_OK;
    double ratio = fmax(result.numbers.out_ratio, result.numbers.lse_ratio);
    bool good = ran && result.lists_wrong == 0 && ratio <= 1;
    if (good)
        variant->passed++;
    else
        variant->failed++;
    if (ran && !(ratio <= variant->worst)) variant->worst = ratio;
    if (!good) report_failure(check, variant, what, &result);
    if (check->json || (good && check->failures_only)) return;

    if (result.lists_wrong > 0)
        snprintf(lists, sizeof lists, "  %" PRId64 " lists wrong", result.lists_wrong);
    else if (result.lists_tied > 0)
        snprintf(lists, sizeof lists, "  %" PRId64 " ties", result.lists_tied);
    printf("%s  %-18s %s  ", good ? "PASS" : "FAIL", variant->name, what);
    if (ran)
        printf("out %.3f lse %.3f%s\n", result.numbers.out_ratio, result.numbers.lse_ratio, lists);
    else
        puts("did not run");
    fflush(stdout);
}

static void check_all(struct check *check)
{
    static const clattn_dtype dtypes[] = {CLATTN_FLOAT32, CLATTN_FLOAT16, CLATTN_BFLOAT16};
    for (size_t c = 0; c < check_case_count && !check->stopped; c++)
        for (size_t d = 0; d < 3 && !check->stopped; d++) {
            struct check_problem problem;
            /* --quick: each case with one element type. */
            if (check->quick && (!check_cases[c].quick || c % 3 != d)) continue;
            if (check_problem_make(&problem, &check_cases[c], dtypes[d], (uint64_t)check->seed + c,
                                   check->reference) != STATUS_OK)
                check->stopped = true;
            for (int v = 0; v < check->count && !check->stopped; v++)
                compare_variant(check, &problem, &check->variants[v]);
            check_problem_release(&problem);
        }
}

static int print_json(const struct check *check, report *root)
{
    report *list = report_list(root, "variants");
    for (int v = 0; v < check->count; v++) {
        const struct variant *variant = &check->variants[v];
        report *entry = report_entry(list);
        report_text(entry, "name", variant->name);
        device_report(report_child(entry, "device"), &variant->device);
        report_integer(entry, "passed", variant->passed);
        report_integer(entry, "failed", variant->failed);
        report_real(entry, "worst_ratio", variant->worst);
    }
    return report_print(root);
}

static int conclude(const struct check *check, report *root)
{
    int64_t passed = 0, failed = 0;
    for (int v = 0; v < check->count; v++) {
        const struct variant *variant = &check->variants[v];
        passed += variant->passed;
        failed += variant->failed;
        if (!check->json)
            printf("%-18s %s: %" PRId64 " passed, %" PRId64 " failed, worst %.3f of the tolerance\n",
                   variant->name, variant->device.name, variant->passed, variant->failed, variant->worst);
    }
    int status = check->json ? print_json(check, root) : STATUS_OK;
    if (!check->json)
        printf("%s: %" PRId64 " passed, %" PRId64 " failed (seed %" PRId64 ")\n", failed ? "FAIL" : "PASS",
               passed, failed, check->seed);
    /* Nothing compared is nothing proven. */
    return check->stopped || check->broken || failed > 0 || passed == 0 ? STATUS_FAILED : status;
}

static bool parse_options(struct check *check, int argc, char **argv, int *status)
{
    const struct option_spec specs[] = {
        {"quick", OPTION_FLAG, &check->quick, NULL, "half of the shapes, each with one element type", 0, 0,
         NULL},
        {"backend", OPTION_CHOICE, &check->choice.backend, NULL,
         "check this one only (default auto: all there are)", 0, 0, backend_words},
        {"device", OPTION_TEXT, &check->choice.device, "NAME|INDEX",
         "check this OpenCL device only: a part of its or its platform's\n"
         "name, or its index in 'clattn info'",
         0, 0, NULL},
        {"seed", OPTION_INTEGER, &check->seed, "N", "of the random inputs (default 1)", 0, INT64_MAX / 2, NULL},
        {"failures", OPTION_FLAG, &check->failures_only, NULL, "print a line for failures only", 0, 0, NULL},
        {"json", OPTION_FLAG, &check->json, NULL, "print counts and failures as JSON", 0, 0, NULL},
        {0}};
    if (!options_parse(specs, &help, argc, argv, status)) return false;
    *status = check->json && !report_available() ? STATUS_USAGE : device_choice_check(&check->choice);
    if (*status == STATUS_OK && check->choice.backend == CLATTN_BACKEND_REFERENCE)
        *status = program_usage("--backend reference: the reference is what the others are compared with");
    return *status == STATUS_OK;
}

int check_main(int argc, char **argv)
{
    int status;
    struct check check = {.seed = 1};
    const struct device_choice reference = {CLATTN_BACKEND_REFERENCE, NULL, NULL};
    if (!parse_options(&check, argc, argv, &status)) return status;
    report *root = check.json ? report_object() : NULL;
    report_text(root, "version", clattn_version());
    report_integer(root, "seed", check.seed);
    check.failures = report_list(root, "failures");
    status = device_open(&reference, &check.reference);
    if (status == STATUS_OK) status = add_devices(&check);
    if (status == STATUS_OK) {
        check_all(&check);
        status = conclude(&check, root);
    }
    for (int v = 0; v < check.count; v++)
        clattn_context_release(check.variants[v].context);
    clattn_context_release(check.reference);
    report_release(root);
    return status;
}
