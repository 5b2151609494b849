/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "bench.h"

#include "layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum suite {
    PYRAMID,
    SELECT,
    FORWARD,
    BACKWARD,
    DECODE,
    PATTERNS,
    DENSE,
    NEIGHBORHOOD,
    SELECTION_SCALING,
    SELECTION_QUALITY
};
const char *const bench_suite_words[] = {
    "pyramid", "select",       "forward",           "backward",          "decode", "patterns",
    "dense",   "neighborhood", "selection-scaling", "selection-quality", NULL};

bool bench_suite_has_files(int suite)
{
    return suite == SELECTION_QUALITY;
}

enum { CASES_MAX = 256, SELECT_QUERIES = 1024, SCALING_QUERIES = 64 };

struct maker {
    const struct bench_sizes *sizes;
    struct bench_case *cases;
    int count;
    const char *suite;
};

static struct bench_case *add(struct maker *maker, const char *name, enum bench_operation operation,
                              int64_t q_len, int64_t kv_len)
{
    const struct bench_sizes *sizes = maker->sizes;
    static struct bench_case dropped;
    struct bench_case *made = maker->count < CASES_MAX ? &maker->cases[maker->count++] : &dropped;
    *made = (struct bench_case){.suite = maker->suite,
                                .operation = operation,
                                .dtype = sizes->dtype,
                                .selector = CLATTN_SELECT_PISA,
                                .causal = true,
                                .q_len = q_len,
                                .kv_len = kv_len,
                                .q_heads = sizes->q_heads,
                                .kv_heads = sizes->kv_heads,
                                .dim = sizes->dim,
                                .topk = sizes->topk,
                                .leaf = sizes->leaf};
    snprintf(made->name, sizeof made->name, "%s", name);
    return made;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void add_selectors(struct maker *maker, int64_t len, int64_t queries)
{
    static const struct {
        const char *name;
        clattn_selector selector;
    } selectors[] = {{"select pisa", CLATTN_SELECT_PISA},
                     {"select flat-mean", CLATTN_SELECT_FLAT_MEAN},
                     {"select flat-lse", CLATTN_SELECT_FLAT_LSE}};
    for (size_t i = 0; i < sizeof selectors / sizeof *selectors; i++)
        add(maker, selectors[i].name, BENCH_SELECT, least(len, queries), len)->selector = selectors[i].selector;
}

static void add_patterns(struct maker *maker, int64_t len)
{
    static const char *const patterns[] = {"local:1+log-stride+anchors:first,middle,last", "bigbird:1,1,2",
                                           "strided:8"};
    static const char *const names[] = {"local+log-stride", "bigbird", "strided"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        add(maker, names[i], BENCH_FORWARD, len, len)->pattern = patterns[i];
}

/* Videos and an image of published models, where heads are one and few numbers wide so that minutes suffice. */
static void add_neighborhoods(struct maker *maker)
{
    static const struct {
        const char *layout, *window, *stride;
        bool quick;
    } shapes[] = {{"30x48x80", "18x24x24", "1x1x1", false},  {"30x48x80", "18x24x24", "1x8x8", false},
                  {"30x48x80", "18x24x24", "16x8x8", false}, {"16x44x80", "16x24x16", "1x8x16", false},
                  {"256x256", "80x80", "16x16", false},      {"8x16x16", "4x8x8", "1x1x1", true},
                  {"8x16x16", "4x8x8", "1x4x4", true},       {"8x16x16", "4x8x8", "2x8x8", true}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct layout_text text = {
            .layout = shapes[i].layout, .window = shapes[i].window, .stride = shapes[i].stride};
        char name[64];
        clattn_neighborhood_desc desc;
        if (shapes[i].quick != maker->sizes->quick || layout_parse(&text, &desc) != 0) continue;
        snprintf(name, sizeof name, "%s w %s s %s", text.layout, text.window, text.stride);
        int64_t tokens = 1;
        for (int a = 0; a < desc.axes; a++)
            tokens *= desc.length[a];
        struct bench_case *made = add(maker, name, BENCH_NEIGHBORHOOD, tokens, tokens);
        made->neighborhood = desc;
        made->causal = false;
        made->selector = CLATTN_SELECT_DENSE;
        made->q_heads = made->kv_heads = 1;
        made->dim = 32;
    }
}

/* Every selector on the queries and keys of the files. */
static void add_quality(struct maker *maker)
{
    static const struct {
        const char *name;
        clattn_selector selector;
    } selectors[] = {
        {"quality pisa", CLATTN_SELECT_PISA},           {"quality pisa1", CLATTN_SELECT_PISA1},
        {"quality pisa2", CLATTN_SELECT_PISA2},         {"quality robust", CLATTN_SELECT_ROBUST},
        {"quality flat-mean", CLATTN_SELECT_FLAT_MEAN}, {"quality flat-lse", CLATTN_SELECT_FLAT_LSE}};
    const struct bench_files *files = maker->sizes->files;
    for (size_t i = 0; i < sizeof selectors / sizeof *selectors; i++) {
        struct bench_case *made = add(maker, selectors[i].name, BENCH_SELECT, files->q_len, files->kv_len);
        made->selector = selectors[i].selector;
        made->files = files;
        made->dtype = files->dtype;
        made->q_heads = files->q_heads;
        made->kv_heads = files->kv_heads;
        made->dim = files->dim;
    }
}

static void add_len(struct maker *maker, int suite, int64_t len)
{
    switch (suite) {
    case PYRAMID:
        add(maker, "pyramid", BENCH_PYRAMID, 1, len);
        break;
    case SELECT:
        add_selectors(maker, len, SELECT_QUERIES);
        break;
    case FORWARD:
        add(maker, "forward pisa", BENCH_FORWARD, len, len);
        break;
    case BACKWARD:
        add(maker, "backward pisa", BENCH_BACKWARD, len, len);
        break;
    case DECODE:
        add(maker, "decode pisa", BENCH_DECODE, 1, len);
        add(maker, "decode dense", BENCH_DECODE, 1, len)->selector = CLATTN_SELECT_DENSE;
        break;
    case PATTERNS:
        add_patterns(maker, len);
        break;
    case DENSE:
        add(maker, "dense", BENCH_FORWARD, len, len)->selector = CLATTN_SELECT_DENSE;
        break;
    default:
        break;
    }
}

struct bench_case *bench_suite_make(int suite, const struct bench_sizes *sizes, int *count)
{
    struct maker maker = {sizes, calloc(CASES_MAX, sizeof *maker.cases), 0, bench_suite_words[suite]};
    if (!maker.cases) return NULL;
    for (int i = 0; i < sizes->len_count; i++)
        add_len(&maker, suite, sizes->lens[i]);
    if (suite == NEIGHBORHOOD) add_neighborhoods(&maker);
    if (suite == SELECTION_QUALITY) add_quality(&maker);
    for (int64_t len = sizes->quick ? 256 : 4096;
         suite == SELECTION_SCALING && len <= (sizes->quick ? 1024 : 262144); len *= 2) {
        add(&maker, "pyramid", BENCH_SELECT, SCALING_QUERIES, len);
        add(&maker, "flat", BENCH_SELECT, SCALING_QUERIES, len)->selector = CLATTN_SELECT_FLAT_MEAN;
    }
    *count = maker.count;
    return maker.cases;
}
