/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "tune.h"

#include "device.h"
#include "options.h"
#include "program.h"
#include "table.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DIMS_MAX = 16, DEVICES_MAX = 16, SEARCHES_MAX = 256 };

static const struct command_help help = {
    "tune [OPTION...] [FILE...]",
    "Searches the tiles that are fastest for the OpenCL devices of this machine, kernel by kernel, and "
    "records\n"
    "them where the library finds them. Each candidate is compared with the reference before it is timed, in\n"
    "turns with the default; a wrong or impossible one is never used, and the default stays unless something\n"
    "is faster by more than the noise.",
    "Kernels: forward-token (lists of single queries), forward-block (lists of query blocks, and dense), "
    "select,\n"
    "backward-q, backward-kv. Parameters: rows, keys, lanes, item_keys, item_dims, local_kib, items, load, "
    "pad.\n"
    "The CPU backend and the matrix tier of NVIDIA cards have nothing to tune.\n"
    "After Ctrl-C, or when the budget is spent, the same command goes on where it was.\n"
    "--merge puts the records of all FILEs together, on standard output or in --output.\n"
    "\n"
    "Exit status: 0 done, 1 failed, 2 wrong usage, 77 no such device, 130 interrupted.\n"
    "\n"
    "Example:\n"
    "  clattn tune --device all --dim 64,128\n"
    "  clattn tune --merge laptop.json server.json --output tuning.json"};

struct tune {
    struct device_choice choice;
    const char *kernels_text, *parameters_text, *dims_text, *dtypes_text, *lens_text, *output;
    int64_t q_heads, kv_heads, topk;
    double budget, noise, seconds;
    bool again, merge, quick;
    char **files;
    int file_count;
    char path[4096]; /* of the user's records */
    struct tune_settings settings;
    struct tune_search searches[SEARCHES_MAX];
    bool applies[SEARCHES_MAX];
    int search_count, current;
    struct tune_records *records;
    clattn_context *reference;
};

static bool parse_options(struct tune *tune, int argc, char **argv, int *status)
{
    const struct option_spec specs[] = {
        {"device", OPTION_TEXT, &tune->choice.device, "NAME|INDEX|all",
         "OpenCL device: a part of its or its platform's name, or its\nindex in 'clattn info' (default: the "
         "first GPU, "
         "else the first)",
         0, 0, NULL},
        {"kernel", OPTION_TEXT, &tune->kernels_text, "LIST", "of kernels, see below (default: all)", 0, 0,
         NULL},
        {"parameter", OPTION_TEXT, &tune->parameters_text, "LIST", "what is varied, see below (default: all)",
         0, 0, NULL},
        {"dim", OPTION_TEXT, &tune->dims_text, "LIST", "numbers of a head (default 64,128)", 0, 0, NULL},
        {"dtype", OPTION_TEXT, &tune->dtypes_text, "LIST", "of f32, f16, bf16 (default f32,f16)", 0, 0, NULL},
        {"len", OPTION_TEXT, &tune->lens_text, "LIST",
         "numbers of keys and queries; a tile must be good for all\n(default 2048, and 16384 on GPUs)", 0, 0,
         NULL},
        {"q-heads", OPTION_INTEGER, &tune->q_heads, "N", "query heads (default 4)", 1, 1024, NULL},
        {"kv-heads", OPTION_INTEGER, &tune->kv_heads, "N", "key heads (default 1)", 1, 1024, NULL},
        {"topk", OPTION_INTEGER, &tune->topk, "K", "leaves of a list (default 8)", 1, CLATTN_TOPK_MAX, NULL},
        {"budget", OPTION_SECONDS, &tune->budget, "TIME",
         "then stop; run it again to go on: 90s, 1h (default 10m)", 0, 0, NULL},
        {"noise", OPTION_REAL, &tune->noise, "PERCENT", "what a gain must exceed (default 3)", 0, 0, NULL},
        {"again", OPTION_FLAG, &tune->again, NULL, "do what is recorded already once more", 0, 0, NULL},
        {"output", OPTION_TEXT, &tune->output, "FILE", "record there instead of in the user's file", 0, 0,
         NULL},
        {"merge", OPTION_FLAG, &tune->merge, NULL, "put the records of FILEs together", 0, 0, NULL},
        {"quick", OPTION_FLAG, &tune->quick, NULL, "small sizes: whether it works, not what is fastest", 0, 0,
         NULL},
        {0}};
    return options_parse_files(specs, &help, argc, argv, &tune->files, &tune->file_count, status);
}

/* ---- options ---- */

static int find_user_file(struct tune *tune)
{
    const char *xdg = getenv("XDG_DATA_HOME"), *home = getenv("HOME");
    if (tune->output) return STATUS_OK;
    if (xdg && xdg[0] == '/')
        snprintf(tune->path, sizeof tune->path, "%s/clattn/tuning.json", xdg);
    else if (home && home[0] == '/')
        snprintf(tune->path, sizeof tune->path, "%s/.local/share/clattn/tuning.json", home);
    else
        return program_usage("neither XDG_DATA_HOME nor HOME names a folder; --output FILE is needed");
    tune->output = tune->path;
    return STATUS_OK;
}

/* The next word of a comma-separated list; NULL: there is none. */
static char *next_word(char **rest)
{
    return *rest ? strsep(rest, ",") : NULL;
}

static bool has_word(const char *list, const char *word)
{
    char copy[256], *rest = copy, *entry;
    snprintf(copy, sizeof copy, "%s", list);
    while ((entry = next_word(&rest)) != NULL)
        if (strcmp(entry, word) == 0) return true;
    return false;
}

/* Every word of `list` must be one of `words`. */
static int check_words(const char *option, const char *list, const char *const *words)
{
    char copy[256], *rest = copy, *entry;
    if (strlen(list) >= sizeof copy) return program_usage("--%s: '%s' is too long", option, list);
    strcpy(copy, list);
    while ((entry = next_word(&rest)) != NULL) {
        int n = 0;
        while (words[n] && strcmp(words[n], entry) != 0)
            n++;
        if (!words[n]) return program_usage("--%s: '%s' is not known; see 'clattn tune --help'", option, entry);
    }
    return STATUS_OK;
}

/* Lengths of the option, or those that suit the device: tiles that keep a large GPU busy with few queries may
 * be the slower ones with many. */
static int set_lens(struct tune *tune, bool is_gpu)
{
    char copy[256], *rest = copy, *word;
    const char *text = tune->lens_text ? tune->lens_text : tune->quick ? "256" : is_gpu ? "2048,16384" : "2048";
    struct tune_settings *settings = &tune->settings;
    if (strlen(text) >= sizeof copy) return program_usage("--len: '%s' is too long", text);
    strcpy(copy, text);
    for (settings->len_count = 0; (word = next_word(&rest)) != NULL; settings->len_count++)
        if (settings->len_count == TUNE_LENS_MAX ||
            !parse_integer(word, 64, 1 << 20, &settings->lens[settings->len_count]))
            return program_usage("--len: '%s' is not a list of up to %d whole numbers from 64 to 2^20", text,
                                 TUNE_LENS_MAX);
    return STATUS_OK;
}

static int check_options(struct tune *tune)
{
    const char *words[TUNE_PARAMETERS + 1] = {NULL};
    if (tune->file_count > 0 && !tune->merge)
        return program_usage("unexpected argument '%s'; files go with --merge", tune->files[0]);
    if (tune->merge && tune->file_count == 0) return program_usage("--merge: a FILE is missing");
    if (tune->noise < 0 || tune->noise >= 100)
        return program_usage("--noise: a percentage from 0 to 100 is needed");
    if (tune->q_heads % tune->kv_heads != 0)
        return program_usage("--q-heads %" PRId64 " is not a multiple of --kv-heads %" PRId64, tune->q_heads,
                             tune->kv_heads);
    tune->settings = (struct tune_settings){.q_heads = (int32_t)tune->q_heads,
                                            .kv_heads = (int32_t)tune->kv_heads,
                                            .topk = (int32_t)tune->topk,
                                            .seconds = tune->quick ? 0.02 : 0.5,
                                            .noise = tune->noise / 100,
                                            .end = program_seconds() + tune->budget};
    for (int p = 0; p < TUNE_PARAMETERS; p++) {
        words[p] = tune_parameters[p].name;
        tune->settings.varies[p] = !tune->parameters_text || has_word(tune->parameters_text, words[p]);
    }
    int status = tune->parameters_text ? check_words("parameter", tune->parameters_text, words) : STATUS_OK;
    if (status != STATUS_OK) return status;
    status = set_lens(tune, false);
    return status != STATUS_OK || tune->merge ? status : find_user_file(tune);
}

static int parse_dims(const char *text, int32_t dims[DIMS_MAX], int *count)
{
    char copy[256], *rest = copy, *word;
    int64_t dim;
    if (strlen(text) >= sizeof copy) return program_usage("--dim: '%s' is too long", text);
    strcpy(copy, text);
    for (*count = 0; (word = next_word(&rest)) != NULL; dims[(*count)++] = (int32_t)dim)
        if (*count == DIMS_MAX || !parse_integer(word, 1, 256, &dim))
            return program_usage("--dim: '%s' is not a list of whole numbers from 1 to 256", text);
    return STATUS_OK;
}

/* ---- what is searched ---- */

static void add_searches(struct tune *tune, const clattn_device_info *info, const int32_t *dims, int dim_count)
{
    static const char *const dtypes[] = {"f32", "f16", "bf16"};
    for (int k = 0; k < TUNE_KERNELS; k++)
        for (int t = 0; t < 3; t++)
            for (int d = 0; d < dim_count; d++) {
                if (!has_word(tune->dtypes_text, dtypes[t]) || tune->search_count == SEARCHES_MAX) continue;
                if (tune->kernels_text && !has_word(tune->kernels_text, tune_kernels[k])) continue;
                struct tune_search *search = &tune->searches[tune->search_count++];
                *search = (struct tune_search){.device = *info, .kernel = k, .dim = dims[d]};
                search->dtype = t == 0 ? CLATTN_FLOAT32 : t == 1 ? CLATTN_FLOAT16 : CLATTN_BFLOAT16;
            }
}

static int list_searches(struct tune *tune)
{
    static const char *const dtypes[] = {"f32", "f16", "bf16", NULL};
    const struct device_choice reference = {.backend = CLATTN_BACKEND_REFERENCE};
    int32_t dims[DIMS_MAX];
    int dim_count = 0, status = parse_dims(tune->dims_text, dims, &dim_count);
    if (status == STATUS_OK) status = check_words("dtype", tune->dtypes_text, dtypes);
    if (status == STATUS_OK && tune->kernels_text)
        status = check_words("kernel", tune->kernels_text, tune_kernels);
    if (status == STATUS_OK) status = device_open(&reference, &tune->reference);
    if (status != STATUS_OK) return status;
    bool all = tune->choice.device && strcmp(tune->choice.device, "all") == 0;
    clattn_device_info info = {.size = sizeof info}, wanted = {.size = sizeof wanted};
    tune->choice.backend = CLATTN_BACKEND_OPENCL;
    if (!all) {
        clattn_context *context = NULL;
        status = device_open(&tune->choice, &context);
        if (status == STATUS_OK) clattn_context_device(context, &wanted);
        clattn_context_release(context);
        if (status != STATUS_OK) return status;
    }
    for (int n = 0; clattn_device_get(n, &info) == CLATTN_SUCCESS; n++)
        if (info.backend == CLATTN_BACKEND_OPENCL && (all || info.index == wanted.index))
            add_searches(tune, &info, dims, dim_count);
    if (tune->search_count > 0) return STATUS_OK;
    program_error("there is no OpenCL device");
    return STATUS_NO_DEVICE;
}

/* ---- flow ---- */

static int save(void *user)
{
    struct tune *tune = user;
    int status = tune_records_put(tune->records, &tune->searches[tune->current]);
    return status == STATUS_OK ? tune_records_save(tune->records, tune->output) : status;
}

static void show_progress(const struct tune *tune, int n)
{
    const struct tune_search *search = &tune->searches[n];
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r%-78s\rclattn tune: %d of %d: %.30s, %s, dim %d", "", n + 1, tune->search_count,
                search->device.name, tune_kernels[search->kernel], (int)search->dim);
}

static void print_table(const struct tune *tune)
{
    static const char *const heads[] = {"device", "kernel",  "dim",   "type",
                                        "tried",  "default", "tuned", "parameters"};
    static const char *const dtypes[] = {"", "f32", "f16", "bf16"};
    struct table table;
    char text[160];
    table_begin(&table, "llrlrrrl");
    for (int c = 0; c < 8; c++)
        table_add(&table, "%s", heads[c]);
    for (int n = 0; n < tune->search_count; n++) {
        const struct tune_search *search = &tune->searches[n];
        table_add(&table, "%.30s", search->device.name);
        table_add(&table, "%s", tune_kernels[search->kernel]);
        table_add(&table, "%d", (int)search->dim);
        table_add(&table, "%s", dtypes[search->dtype]);
        table_add(&table, "%d", search->trial_count);
        if (search->is_complete && search->default_seconds > 0) {
            table_add(&table, "%.3f ms", 1e3 * search->default_seconds);
            table_add(&table, "%.3f ms", 1e3 * search->tuned_seconds);
        } else {
            table_add(&table, "-");
            table_add(&table, "-");
        }
        table_add(&table, "%s",
                  !tune->applies[n]      ? "another tier computes this"
                  : !search->is_complete ? "not done yet: run it again"
                                         : tune_point_text(&search->best, text, sizeof text));
    }
    table_end(&table);
    printf("records: %s\n", tune->output);
}

static void interrupt(int signal_number)
{
    (void)signal_number;
    bench_interrupted = 1;
}

static int tune_all(struct tune *tune)
{
    struct sigaction action = {.sa_handler = interrupt, .sa_flags = (int)SA_RESETHAND};
    tune->records = tune_records_open(tune->output);
    if (!tune->records) return STATUS_FAILED;
    int status = list_searches(tune), worst = STATUS_OK;
    if (status != STATUS_OK) return status;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    for (int n = 0; n < tune->search_count; n++) {
        struct tune_search *search = &tune->searches[n];
        tune->applies[n] = true;
        tune->current = n;
        if (!tune->again) tune_records_find(tune->records, search);
        if (search->is_complete || bench_interrupted || program_seconds() >= tune->settings.end) continue;
        show_progress(tune, n);
        set_lens(tune, search->device.is_gpu);
        status = tune_search(search, &tune->settings, tune->reference, save, tune, &tune->applies[n]);
        if (status != STATUS_OK) worst = status; /* one kernel that fails does not keep the others from it */
    }
    if (isatty(STDERR_FILENO)) fprintf(stderr, "\r%78s\r", "");
    print_table(tune);
    return bench_interrupted ? STATUS_INTERRUPTED : worst;
}

static int merge_all(struct tune *tune)
{
    int status = STATUS_OK;
    for (int f = 0; f < tune->file_count && status == STATUS_OK; f++) {
        struct tune_records *more = NULL;
        if (access(tune->files[f], F_OK) != 0) {
            program_error("%s: there is no such file", tune->files[f]);
            return STATUS_FAILED;
        }
        more = tune_records_open(tune->files[f]);
        if (!more) return STATUS_FAILED;
        if (!tune->records) {
            tune->records = more;
            continue;
        }
        status = tune_records_merge(tune->records, more);
        tune_records_close(more);
    }
    return status == STATUS_OK ? tune_records_save(tune->records, tune->output) : status;
}

int tune_main(int argc, char **argv)
{
    int status = STATUS_OK;
    struct tune *tune = calloc(1, sizeof *tune);
    if (!tune) {
        program_error("out of memory");
        return STATUS_FAILED;
    }
    *tune = (struct tune){.dims_text = "64,128",
                          .dtypes_text = "f32,f16",
                          .q_heads = 4,
                          .kv_heads = 1,
                          .topk = 8,
                          .budget = 600,
                          .noise = 3};
    if (parse_options(tune, argc, argv, &status)) {
        status = check_options(tune);
        if (status == STATUS_OK) status = tune->merge ? merge_all(tune) : tune_all(tune);
    }
    tune_records_close(tune->records);
    clattn_context_release(tune->reference);
    free(tune);
    return status;
}
