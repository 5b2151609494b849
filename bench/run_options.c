/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "run.h"

#include "options.h"
#include "program.h"

#include <math.h>
#include <string.h>

/* In the order of enum element_request, and the leaf sizes that the library takes. */
const char *const run_layouts[] = {"bthd", "bhtd", NULL};
const char *const run_dtypes[] = {"auto", "f32", "f16", "bf16", NULL};
const char *const run_leaves[] = {"16", "32", "64", "128", NULL};

static const struct command_help help = {
    "run --q FILE --k FILE --v FILE [OPTION...]",
    "Computes block-sparse attention: for every query a selector chooses a few leaves of keys, and\n"
    "attention runs over these only.",
    "Files are .npy (float16 or float32, little-endian, C order) or FILE.safetensors:NAME (F16, BF16,\n"
    "F32), all three of the same element type; without the batch where there is one sequence:\n"
    "  q  [batch][q_len][q_heads][dim]     q_heads is a multiple of kv_heads\n"
    "  k  [batch][kv_len][kv_heads][dim]   the queries are the last q_len of the kv_len tokens\n"
    "  v  [batch][kv_len][kv_heads][dim_v]\n"
    "Results are .npy; a file is replaced only by a complete one:\n"
    "  out     float32 [batch][q_len][q_heads][dim_v]\n"
    "  lse     float32 [batch][q_len][q_heads]\n"
    "  blocks  int32 [batch][q_len][kv_heads][K], ascending, -1 on the right\n"
    "With --layout-dims and --window, attention is to a neighborhood in a layout of one to three axes,\n"
    "q_len = kv_len is the product of the lengths, and there is no selector.\n"
    "\n"
    "Exit status: 0 done, 1 failed, 2 wrong usage, 77 the device that was asked for is not there.\n"
    "\n"
    "Example:\n"
    "  clattn run --q q.npy --k kv.safetensors:layer.0.k --v kv.safetensors:layer.0.v --out out.npy\n"
    "  clattn run --q q.npy --k k.npy --v v.npy --out out.npy \\\n"
    "      --layout-dims 30x48x80 --window 18x24x24 --stride 16x8x8"};

/* A count after a colon, "first:2"; 1 without one. */
static bool parse_count(const char *word, const char *name, int32_t *count)
{
    size_t length = strlen(name);
    int64_t value = 1;
    if (strncmp(word, name, length) != 0) return false;
    if (word[length] && (word[length] != ':' || !parse_integer(word + length + 1, 0, 512, &value)))
        return false;
    *count = (int32_t)value;
    return true;
}

static int parse_forced(struct run *run)
{
    bool current = false, previous = false;
    char text[64], *rest = text, *word;
    if (!run->forced) return STATUS_OK;
    if (strlen(run->forced) >= sizeof text) return program_usage("--forced: '%s' is too long", run->forced);
    strcpy(text, run->forced);
    run->forced_first = run->forced_last = 0;
    if (strcmp(text, "none") == 0) return STATUS_OK;
    while ((word = strsep(&rest, ",")) != NULL) {
        if (strcmp(word, "current") == 0)
            current = true;
        else if (strcmp(word, "previous") == 0)
            previous = true;
        else if (!parse_count(word, "first", &run->forced_first) &&
                 !parse_count(word, "last", &run->forced_last))
            return program_usage("--forced: '%s' is not one of first, first:N, previous, current, last:N, none",
                                 word);
    }
    if (previous && !current) return program_usage("--forced: previous needs current");
    if (current && run->forced_last < 1 + previous) run->forced_last = 1 + previous;
    return STATUS_OK;
}

/* A selector; or a pattern; or a selector, +, and a pattern. */
static int parse_selector(struct run *run)
{
    char error[256];
    const char *text = run->selector_text;
    if (!text) return STATUS_OK;
    int length = selector_parse(text, &run->select, error, sizeof error);
    if (length < 0) return program_usage("--selector: %s", error);
    if (length > 0 && (text[length] == 0 || run->select.selector != CLATTN_SELECT_DENSE)) {
        if (text[length] == 0) return STATUS_OK;
        run->join = true;
        length += (int)strspn(text + length, " ");
        if (text[length] != '+') return program_usage("--selector: '+' is missing in '%s'", text);
        length++;
    } else {
        run->select.selector = CLATTN_SELECT_PISA;
        length = 0;
    }
    if (clattn_pattern_parse(text + length, &run->pattern, error, sizeof error) != CLATTN_SUCCESS)
        return program_usage("--selector: '%s' is not one of " SELECTOR_NAMES ", nor a pattern: %s",
                             text + length, error);
    if (run->output_names[RUN_BLOCKS])
        return program_usage("--blocks: not with a pattern, whose lists are of no fixed length");
    return STATUS_OK;
}

/* What is refused beside --layout-dims: all of it would have no effect. */
static int check_neighborhood(struct run *run)
{
    const struct {
        const char *name;
        bool given;
    } others[] = {{"selector", run->selector_text != NULL},
                  {"blocks", run->output_names[RUN_BLOCKS] != NULL},
                  {"causal (there is --causal-axes)", run->causal_option == 1},
                  {"no-causal (there is --causal-axes)", run->causal_option == 0},
                  {"forced", run->forced != NULL},
                  {"topk", run->topk != 8},
                  {"leaf", run->leaf != 2},
                  {"softcap", !isnan(run->softcap)},
                  {"window-tokens", run->window_tokens != 0},
                  {"sink", run->extra_names[RUN_SINK] != NULL},
                  {"bias", run->extra_names[RUN_BIAS] != NULL},
                  {"cu-seqlens-q", run->cu_names[0] != NULL},
                  {"cu-seqlens-k", run->cu_names[1] != NULL}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i].given) return program_usage("--layout-dims does not go with --%s", others[i].name);
    if (!run->extra_names[RUN_EXTRA_K] != !run->extra_names[RUN_EXTRA_V])
        return program_usage("--extra-k and --extra-v go together");
    run->is_neighborhood = true;
    run->causal = false;
    run->select.selector = CLATTN_SELECT_DENSE;
    return layout_parse(&run->layout_text, &run->neighborhood);
}

/* Options of neighborhoods alone make none; and those of lists have their rules. */
static int check_lists(struct run *run)
{
    const struct layout_text *text = &run->layout_text;
    if (text->window || text->stride || text->dilation || text->causal || text->q_tile || text->kv_tile)
        return program_usage("--layout-dims %s is missing%s", LAYOUT_ARGUMENT,
                             text->window ? "; a sliding window is --window-tokens" : "");
    if (run->extra_names[RUN_EXTRA_K] || run->extra_names[RUN_EXTRA_V])
        return program_usage("--extra-k and --extra-v need --layout-dims");
    if (!run->cu_names[0] != !run->cu_names[1])
        return program_usage("--cu-seqlens-q and --cu-seqlens-k go together");
    if (!isnan(run->softcap) && (run->softcap <= 0 || run->softcap > 3e38))
        return program_usage("--softcap: a positive number within float32 is needed");
    run->causal = run->causal_option != 0;
    return parse_selector(run);
}

static int check_options(struct run *run)
{
    static const char names[RUN_INPUTS] = {'q', 'k', 'v'};
    for (int i = 0; i < RUN_INPUTS; i++)
        if (!run->input_names[i])
            return program_usage("--%c FILE is missing; see 'clattn run --help'", names[i]);
    int status = run->layout_text.layout ? check_neighborhood(run) : check_lists(run);
    if (status == STATUS_OK) status = run_check_quality(run);
    if (status != STATUS_OK) return status;
    if (run->select.selector == CLATTN_SELECT_DENSE && run->output_names[RUN_BLOCKS])
        return program_usage("--blocks: the dense selector makes no block lists");
    if (!isnan(run->scale) && fabs(run->scale) > 3e38) return program_usage("--scale is beyond float32");
    if (run->json && !report_available()) return STATUS_USAGE;
    status = parse_forced(run);
    return status == STATUS_OK ? device_choice_check(&run->choice) : status;
}

static bool parse_options(struct run *run, int argc, char **argv, int *status)
{
    struct layout_text *text = &run->layout_text;
    const struct option_spec specs[] = {
        {"q", OPTION_TEXT, &run->input_names[RUN_Q], "FILE", "queries", 0, 0, NULL},
        {"k", OPTION_TEXT, &run->input_names[RUN_K], "FILE", "keys", 0, 0, NULL},
        {"v", OPTION_TEXT, &run->input_names[RUN_V], "FILE", "values", 0, 0, NULL},
        {"out", OPTION_TEXT, &run->output_names[RUN_OUT], "FILE", "write the attention's result", 0, 0, NULL},
        {"lse", OPTION_TEXT, &run->output_names[RUN_LSE], "FILE", "write the log of each softmax denominator",
         0, 0, NULL},
        {"blocks", OPTION_TEXT, &run->output_names[RUN_BLOCKS], "FILE", "write the chosen leaves", 0, 0, NULL},
        {"causal", OPTION_SET, &run->causal_option, NULL, "a query sees itself and what is before it (default)",
         1, 0, NULL},
        {"no-causal", OPTION_SET, &run->causal_option, NULL, "a query sees all keys", 0, 0, NULL},
        {"scale", OPTION_REAL, &run->scale, "S", "factor of q.k (default 1/sqrt(dim))", 0, 0, NULL},
        {"selector", OPTION_TEXT, &run->selector_text, "WHICH",
         "how leaves are chosen (default pisa): a walk down a pyramid of\n"
         "key means by logsumexp (pisa), by mean (pisa1) or by mean and\n"
         "half the variance (pisa2); every leaf by its mean (flat-mean)\n"
         "or exactly (flat-lse); all keys (dense); a pyramid with bounds,\n"
         "a beam and a vote (robust, or with its keys as\n"
         "robust:beam=64,score=blend,vote=0,prefilter=24,parts=1), for\n"
         "models that never saw a pyramid; a static pattern as\n"
         "'local:1+log-stride+anchors:first', see 'clattn pattern\n"
         "--help'; or both as 'pisa+local:1'",
         0, 0, NULL},
        {"leaf", OPTION_CHOICE, &run->leaf, NULL, "tokens in a leaf (default 64)", 0, 0, run_leaves},
        {"topk", OPTION_INTEGER, &run->topk, "K", "leaves for each query and key head (default 8)", 1,
         CLATTN_TOPK_MAX, NULL},
        {"forced", OPTION_TEXT, &run->forced, "LIST",
         "leaves that causal attention always takes, within K: a list\n"
         "of first, previous, current (the default is all three), or of\n"
         "first:N and last:N for more of them; or none",
         0, 0, NULL},
        {"quality", OPTION_FLAG, &run->quality_wanted, NULL,
         "tell what the lists keep of exact attention: recall of the K\n"
         "leaves of greatest attention mass, and the mass that is kept",
         0, 0, NULL},
        {"positions", OPTION_TEXT, &run->positions_name, "FILE",
         "positions of queries that are judged, int32 (default: 256 of\nall)", 0, 0, NULL},
        {"answers", OPTION_TEXT, &run->answers_name, "FILE",
         "positions at which something must be found, int32 ...", 0, 0, NULL},
        {"needles", OPTION_TEXT, &run->needles_name, "FILE", "... and the positions where it stands", 0, 0,
         NULL},
        {"from", OPTION_INTEGER, &run->from, "N", "positions before this one are not judged", 0, 1 << 30, NULL},
        {"softcap", OPTION_REAL, &run->softcap, "C", "bound each logit x to C tanh(x / C)", 0, 0, NULL},
        {"window-tokens", OPTION_INTEGER, &run->window_tokens, "N",
         "a query sees its own token and the N - 1 before it (and after\n"
         "it where not causal), of what is chosen",
         1, INT64_C(1) << 40, NULL},
        {"sink", OPTION_TEXT, &run->extra_names[RUN_SINK], "FILE",
         "a logit for each query head that joins the softmax without\n"
         "a value: float32 [q_heads]",
         0, 0, NULL},
        {"bias", OPTION_TEXT, &run->extra_names[RUN_BIAS], "FILE",
         "added to the logits of each leaf's keys: float32\n"
         "[leaves][q_heads] or [batch][leaves][q_heads]",
         0, 0, NULL},
        {"cu-seqlens-q", OPTION_TEXT, &run->cu_names[0], "LIST|FILE",
         "where packed sequences of queries begin, and the last ends:\n"
         "0,100,130 or a file of int32; batch is 1",
         0, 0, NULL},
        {"cu-seqlens-k", OPTION_TEXT, &run->cu_names[1], "LIST|FILE", "the same of keys", 0, 0, NULL},
        {"layout-dims", OPTION_TEXT, &text->layout, LAYOUT_ARGUMENT, LAYOUT_DIMS_HELP, 0, 0, NULL},
        {"window", OPTION_TEXT, &text->window, LAYOUT_ARGUMENT, "keys of a query along each axis", 0, 0, NULL},
        {"stride", OPTION_TEXT, &text->stride, LAYOUT_ARGUMENT, LAYOUT_STRIDE_HELP, 0, 0, NULL},
        {"dilation", OPTION_TEXT, &text->dilation, LAYOUT_ARGUMENT, LAYOUT_DILATION_HELP, 0, 0, NULL},
        {"causal-axes", OPTION_TEXT, &text->causal, LAYOUT_ARGUMENT, LAYOUT_CAUSAL_HELP, 0, 0, NULL},
        {"q-tile", OPTION_TEXT, &text->q_tile, LAYOUT_ARGUMENT,
         "shape of a query tile (default: the best is searched)", 0, 0, NULL},
        {"kv-tile", OPTION_TEXT, &text->kv_tile, LAYOUT_ARGUMENT, "shape of a key tile", 0, 0, NULL},
        {"extra-k", OPTION_TEXT, &run->extra_names[RUN_EXTRA_K], "FILE",
         "keys outside of the layout that every query sees", 0, 0, NULL},
        {"extra-v", OPTION_TEXT, &run->extra_names[RUN_EXTRA_V], "FILE", "their values", 0, 0, NULL},
        {"backend", OPTION_CHOICE, &run->choice.backend, NULL,
         "what computes (default auto: an OpenCL GPU, else the CPU)", 0, 0, backend_words},
        {"device", OPTION_TEXT, &run->choice.device, "NAME|INDEX",
         "OpenCL device: a part of its or its platform's name, or its\n"
         "index in 'clattn info'",
         0, 0, NULL},
        {"layout", OPTION_CHOICE, &run->layout, NULL,
         "order of the files' dimensions (default bthd):\n"
         "[batch][len][heads][dim] or [batch][heads][len][dim]",
         0, 0, run_layouts},
        {"dtype", OPTION_CHOICE, &run->request, NULL,
         "element type that the .npy files must have; bf16 takes\n"
         "uint16 files as bfloat16 (default auto: as the file says)",
         0, 0, run_dtypes},
        {"json", OPTION_FLAG, &run->json, NULL, "print device, sizes and times as JSON", 0, 0, NULL},
        {0}};
    return options_parse(specs, &help, argc, argv, status);
}

bool run_parse_options(struct run *run, int argc, char **argv, int *status)
{
    if (!parse_options(run, argc, argv, status)) return false;
    *status = check_options(run);
    return *status == STATUS_OK;
}
