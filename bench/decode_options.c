/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "decode.h"

#include "options.h"
#include "program.h"

#include <math.h>

static const struct command_help help = {
    "decode --q FILE --k FILE --v FILE [OPTION...]",
    "Plays back the generation of text: fills a cache with the first tokens, decodes the rest step by step,\n"
    "each step selecting leaves for its tokens and attending to them, and compares the result with attention\n"
    "over all tokens at once.",
    "The files are those of 'clattn run'; each batch entry is a sequence of its own, and all take part in\n"
    "every step.\n"
    "\n"
    "Exit status: 0 done, and the results agree; 1 failed; 2 wrong usage; 77 the device that was asked for is\n"
    "not there.\n"
    "\n"
    "Example:\n"
    "  clattn decode --q q.npy --k k.npy --v v.npy --prefill 8192 --page-size 64 --int8"};

static int check_options(struct decode *d)
{
    static const char names[RUN_INPUTS] = {'q', 'k', 'v'};
    static const int32_t leaves[] = {16, 32, 64, 128};
    struct run *run = &d->run;
    char error[256];
    for (int i = 0; i < RUN_INPUTS; i++)
        if (!run->input_names[i])
            return program_usage("--%c FILE is missing; see 'clattn decode --help'", names[i]);
    if (!isnan(run->scale) && fabs(run->scale) > 3e38) return program_usage("--scale is beyond float32");
    if (d->page_size != 0 && d->page_size < 16) return program_usage("--page-size: 0 or 16 to 256 is needed");
    if (run->json && !report_available()) return STATUS_USAGE;
    d->select = (clattn_select_desc)CLATTN_SELECT_DESC_INIT;
    const char *text = run->selector_text;
    int length = text ? selector_parse(text, &d->select, error, sizeof error) : 0;
    if (length < 0) return program_usage("--selector: %s", error);
    if (text && (length == 0 || text[length]))
        return program_usage("--selector: '%s' is not one of " SELECTOR_NAMES, text);
    d->select.topk = (int32_t)run->topk;
    d->select.leaf = leaves[run->leaf];
    return device_choice_check(&run->choice);
}

bool decode_parse_options(struct decode *d, int argc, char **argv, int *status)
{
    struct run *run = &d->run;
    const struct option_spec specs[] = {
        {"q", OPTION_TEXT, &run->input_names[RUN_Q], "FILE", "queries, of the last q_len tokens", 0, 0, NULL},
        {"k", OPTION_TEXT, &run->input_names[RUN_K], "FILE", "keys", 0, 0, NULL},
        {"v", OPTION_TEXT, &run->input_names[RUN_V], "FILE", "values", 0, 0, NULL},
        {"prefill", OPTION_INTEGER, &d->prefill, "N",
         "tokens that are there before the first step (default: those\nwithout a query, else half)", 0,
         INT32_MAX, NULL},
        {"chunk", OPTION_INTEGER, &d->chunk, "N", "of these, how many at once (default 512)", 1, INT32_MAX,
         NULL},
        {"step", OPTION_INTEGER, &d->step, "N", "tokens of a step (default 1)", 1, INT32_MAX, NULL},
        {"tokens", OPTION_INTEGER, &d->limit, "N", "decode no more than N tokens of a sequence (default: all)",
         1, INT32_MAX, NULL},
        {"page-size", OPTION_INTEGER, &d->page_size, "N",
         "tokens of a page, 16 to 256 (default 0: sequences are\ncontiguous)", 0, 256, NULL},
        {"int8", OPTION_FLAG, &d->is_int8, NULL, "store keys and values as int8 (default: as the files)", 0, 0,
         NULL},
        {"dense", OPTION_FLAG, &d->dense, NULL, "time a token that attends to all keys, too", 0, 0, NULL},
        {"scale", OPTION_REAL, &run->scale, "S", "factor of q.k (default 1/sqrt(dim))", 0, 0, NULL},
        {"selector", OPTION_TEXT, &run->selector_text, "WHICH",
         "how leaves are chosen, as for 'clattn run', patterns excepted\n(default pisa)", 0, 0, NULL},
        {"leaf", OPTION_CHOICE, &run->leaf, NULL, "tokens in a leaf (default 64)", 0, 0, run_leaves},
        {"topk", OPTION_INTEGER, &run->topk, "K", "leaves for each query and key head (default 8)", 1,
         CLATTN_TOPK_MAX, NULL},
        {"backend", OPTION_CHOICE, &run->choice.backend, NULL,
         "what computes (default auto: an OpenCL GPU, else the CPU)", 0, 0, backend_words},
        {"device", OPTION_TEXT, &run->choice.device, "NAME|INDEX",
         "OpenCL device: a part of its or its platform's name, or its\nindex in 'clattn info'", 0, 0, NULL},
        {"layout", OPTION_CHOICE, &run->layout, NULL,
         "order of the files' dimensions (default bthd):\n"
         "[batch][len][heads][dim] or [batch][heads][len][dim]",
         0, 0, run_layouts},
        {"dtype", OPTION_CHOICE, &run->request, NULL,
         "element type that the .npy files must have; bf16 takes\n"
         "uint16 files as bfloat16 (default auto: as the file says)",
         0, 0, run_dtypes},
        {"json", OPTION_FLAG, &run->json, NULL, "print everything as JSON", 0, 0, NULL},
        {0}};
    if (!options_parse(specs, &help, argc, argv, status)) return false;
    *status = check_options(d);
    return *status == STATUS_OK;
}
