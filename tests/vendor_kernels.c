/* SPDX-License-Identifier: MIT */
/* Writes the programs that the library builds on a GPU into a folder, for compilers of devices that are not
 * here: `NN-kernel.cl` and `NN-kernel.options`, a pair for every kernel and set of options. Called by
 * tests/vendors.sh:
 *
 *   vendor_kernels --hopper FILE    the PTX of a file as Hopper cards get it: lib/opencl_hopper.c
 *   vendor_kernels FOLDER VENDOR KIND LANES MATRIX [OPTIONS]
 *       VENDOR: its PCI number, 0 any; KIND and LANES: SG_KIND and SG of cl/subgroup.cl; MATRIX: the form of
 * the matrix tier (cl/mma_portable.cl), with build options of its own
 *
 * Every kernel of cl/ has to occur. */

#include "config.h"

#include "fake_opencl.h"
#include "lib/kernel_sources.h"
#include "lib/opencl_nvidia.h"
#include "lib/opencl_subgroup.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROGRAMS_MAX = 512 };

static const char *folder;
static char *seen[PROGRAMS_MAX]; /* kernel, a newline, options */
static char *sources[PROGRAMS_MAX];
static int seen_count, program_count, failures;

static void write_text(int number, const char *kernel, const char *end, const char *text)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%02d-%s.%s", folder, number, kernel, end);
    FILE *file = fopen(path, "w");
    if (!file || fputs(text, file) < 0 || fclose(file)) {
        perror(path);
        exit(1);
    }
}

static void keep(const char *kernel, const char *source, const char *options)
{
    char key[2048];
    bool is_known = false; /* as a program, by another kernel of it */
    snprintf(key, sizeof key, "%s\n%s", kernel, options);
    for (int i = 0; i < seen_count; i++) {
        if (strcmp(seen[i], key) == 0) return;
        is_known |= strcmp(strchr(seen[i], '\n') + 1, options) == 0 && strcmp(sources[i], source) == 0;
    }
    if (seen_count == PROGRAMS_MAX || !(seen[seen_count] = strdup(key)) ||
        !(sources[seen_count] = strdup(source)))
        exit(1);
    seen_count++;
    if (is_known) return;
    write_text(program_count, kernel, "cl", source);
    write_text(program_count, kernel, "options", options);
    program_count++;
}

/* What OpenCL contexts do not have is no failure. */
static void expect(clattn_context *context, const char *what, clattn_status status)
{
    char text[512];
    if (!status) return;
    clattn_context_error(context, text, sizeof text);
    if (strstr(text, "CPU context") || strstr(text, "does not know")) return;
    fprintf(stderr, "%s: %s: %s\n", what, clattn_strerror(status), text);
    failures++;
}

/* ---- attention ---- */

struct shape {
    const char *name;
    clattn_dtype dtype;
    int q_len, kv_len, q_heads, kv_heads, dim, dim_v;
};

struct problem_tensors {
    clattn_tensor q, k, v, out, lse;
};

static void tensors_make(clattn_context *context, const struct shape *s, struct problem_tensors *t)
{
    clattn_dtype dtype = s->dtype == CLATTN_INT8 ? CLATTN_FLOAT16 : s->dtype;
    expect(context, s->name, clattn_tensor_create(context, dtype, 1, s->q_len, s->q_heads, s->dim, &t->q));
    expect(context, s->name, clattn_tensor_create(context, s->dtype, 1, s->kv_len, s->kv_heads, s->dim, &t->k));
    expect(context, s->name,
           clattn_tensor_create(context, s->dtype, 1, s->kv_len, s->kv_heads, s->dim_v, &t->v));
    expect(context, s->name, clattn_tensor_create(context, dtype, 1, s->q_len, s->q_heads, s->dim_v, &t->out));
    expect(context, s->name,
           clattn_tensor_create(context, CLATTN_FLOAT32, 1, s->q_len, s->q_heads, 1, &t->lse));
}

static void tensors_release(clattn_context *context, struct problem_tensors *t)
{
    clattn_tensor *all[] = {&t->q, &t->k, &t->v, &t->out, &t->lse};
    for (int i = 0; i < 5; i++)
        clattn_tensor_release(context, all[i]);
}

/* Lists of the first blocks; q_block query rows share one. */
static clattn_blocks *lists_make(clattn_context *context, const struct shape *s, int q_block,
                                 const int64_t *starts, int start_count)
{
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_blocks *blocks = NULL;
    desc.q_block = q_block;
    desc.rows = (s->q_len + q_block - 1) / q_block;
    desc.heads = s->kv_heads;
    desc.topk = 2;
    desc.starts = starts;
    desc.start_count = start_count;
    size_t count = (size_t)desc.rows * (size_t)desc.heads * 2;
    int32_t *indices = malloc(count * sizeof *indices);
    if (!indices) exit(1);
    for (size_t i = 0; i < count; i++)
        indices[i] = (int32_t)(i % 2);
    expect(context, s->name, clattn_blocks_create(context, &desc, indices, &blocks));
    free(indices);
    return blocks;
}

static void attend(clattn_context *context, const struct shape *s, const clattn_attention_desc *attention,
                   const clattn_blocks *blocks)
{
    struct problem_tensors t, d;
    tensors_make(context, s, &t);
    expect(context, s->name,
           clattn_attention_forward(context, attention, &t.q, &t.k, &t.v, blocks, &t.out, &t.lse, NULL));
    tensors_make(context, s, &d);
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    gradients.dout = &d.out;
    gradients.dq = &d.q;
    gradients.dk = &d.k;
    gradients.dv = &d.v;
    /* Their gradients have the shapes of the options themselves, and nothing is computed. */
    clattn_tensor dsink = {0}, dbias = {0};
    if (attention && attention->sink) {
        dsink = *attention->sink;
        gradients.dsink = &dsink;
    }
    if (attention && attention->bias) {
        dbias = *attention->bias;
        gradients.dbias = &dbias;
    }
    if (s->dtype != CLATTN_INT8 && s->q_len > 1)
        expect(context, s->name,
               clattn_attention_backward(context, attention, &t.q, &t.k, &t.v, blocks, &t.out, &t.lse,
                                         &gradients, NULL));
    tensors_release(context, &t);
    tensors_release(context, &d);
}

static void attend_all(clattn_context *context)
{
    static const struct shape shapes[] = {
        {"one head", CLATTN_FLOAT16, 512, 2048, 8, 8, 64, 64},
        {"group of 4", CLATTN_FLOAT16, 512, 2048, 32, 8, 128, 128},
        {"group of 16", CLATTN_BFLOAT16, 512, 2048, 16, 1, 128, 128},
        {"group of 5", CLATTN_BFLOAT16, 512, 2048, 5, 1, 80, 80},
        {"float32", CLATTN_FLOAT32, 512, 2048, 8, 2, 128, 128},
        {"wide", CLATTN_FLOAT16, 512, 2048, 8, 2, 256, 256},
        {"wide float32", CLATTN_FLOAT32, 512, 2048, 8, 2, 256, 256},
        {"unequal dims", CLATTN_FLOAT16, 512, 2048, 8, 2, 192, 128},
        {"odd dims", CLATTN_FLOAT16, 512, 2048, 4, 2, 33, 7},
        {"decode", CLATTN_FLOAT16, 1, 4096, 32, 4, 128, 128},
    };
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        clattn_blocks *blocks = lists_make(context, &shapes[i], 1, NULL, 0);
        attend(context, &shapes[i], &attention, blocks);
        clattn_blocks_release(context, blocks);
        if (i >= 3) continue; /* all keys, and tiles that share a list */
        blocks = lists_make(context, &shapes[i], 64, NULL, 0);
        attend(context, &shapes[i], &attention, blocks);
        attend(context, &shapes[i], &attention, NULL);
        clattn_blocks_release(context, blocks);
    }
}

static clattn_tensor small_tensor(clattn_context *context, int len, int heads)
{
    clattn_tensor tensor = {0};
    expect(context, "an option", clattn_tensor_create(context, CLATTN_FLOAT32, 1, len, heads, 1, &tensor));
    return tensor;
}

/* Options of attention, each alone and all together, and unequal blocks. */
static void attend_options(clattn_context *context)
{
    const struct shape shape = {"options", CLATTN_FLOAT16, 512, 2048, 32, 8, 128, 128};
    const struct shape quantised = {"int8", CLATTN_INT8, 512, 2048, 32, 8, 128, 128};
    const int64_t starts[] = {0, 100, 700};
    clattn_tensor sink = small_tensor(context, 1, 32), bias = small_tensor(context, 32, 32);
    clattn_tensor scale = small_tensor(context, 32, 8);
    clattn_blocks *unequal = lists_make(context, &shape, 1, starts, 3);
    clattn_blocks *blocks = lists_make(context, &shape, 1, NULL, 0);
    for (int which = 0; which <= 5; which++) {
        clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
        bool all = which == 5;
        if (which == 0 || all) attention.softcap = 30;
        if (which == 1 || all) attention.window = 300;
        if (which == 2 || all) attention.sink = &sink;
        if (which == 3 || all) attention.bias = &bias;
        attend(context, &shape, &attention, blocks);
        attention.k_scale = attention.v_scale = &scale;
        if (which >= 4) attend(context, &quantised, &attention, blocks);
    }
    attend(context, &shape, NULL, unequal);
    clattn_blocks_release(context, unequal);
    clattn_blocks_release(context, blocks);
    clattn_tensor_release(context, &sink);
    clattn_tensor_release(context, &bias);
    clattn_tensor_release(context, &scale);
}

static void attend_neighborhood(clattn_context *context)
{
    const struct shape shape = {"neighborhood", CLATTN_FLOAT16, 1024, 1024, 4, 4, 64, 64};
    clattn_neighborhood_desc desc = CLATTN_NEIGHBORHOOD_DESC_INIT;
    clattn_neighborhood *neighborhood = NULL;
    struct problem_tensors t;
    desc.axes = 2;
    desc.length[0] = desc.length[1] = 32;
    desc.window[0] = desc.window[1] = 9;
    tensors_make(context, &shape, &t);
    expect(context, shape.name, clattn_neighborhood_create(context, &desc, 0, &neighborhood));
    if (neighborhood)
        expect(context, shape.name,
               clattn_neighborhood_forward(context, neighborhood, CLATTN_SCALE_DEFAULT, &t.q, &t.k, &t.v, NULL,
                                           NULL, &t.out, &t.lse, NULL));
    clattn_neighborhood_release(context, neighborhood);
    tensors_release(context, &t);
}

/* ---- decode ---- */

/* Steps of a cache: few rows, whose keys work-groups share, and many; what changes it otherwise. */
static void decode_case(clattn_context *context, const struct shape *s, int32_t page_size,
                        clattn_selector selector, const clattn_attention_desc *attention)
{
    static const int32_t sequences[] = {0, 1}, lens[] = {1, 1}, other = 2;
    clattn_dtype dtype = s->dtype == CLATTN_INT8 ? CLATTN_FLOAT16 : s->dtype;
    clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_cache *cache = NULL;
    desc.sequences = 3;
    desc.tokens = s->kv_len;
    desc.kv_heads = s->kv_heads;
    desc.dim = s->dim;
    desc.dim_v = s->dim_v;
    desc.dtype = s->dtype;
    desc.page_size = page_size;
    desc.bounds = selector == CLATTN_SELECT_ROBUST;
    select.selector = selector;
    expect(context, s->name, clattn_cache_create(context, &desc, &cache));
    for (int step = 0; cache && step < 2; step++) {
        const int32_t len = s->q_len;
        int rows = step ? 2 : len;
        clattn_tensor q, k, v, out;
        expect(context, s->name, clattn_tensor_create(context, dtype, 1, rows, s->q_heads, s->dim, &q));
        expect(context, s->name, clattn_tensor_create(context, dtype, 1, rows, s->kv_heads, s->dim, &k));
        expect(context, s->name, clattn_tensor_create(context, dtype, 1, rows, s->kv_heads, s->dim_v, &v));
        expect(context, s->name, clattn_tensor_create(context, dtype, 1, rows, s->q_heads, s->dim_v, &out));
        expect(context, s->name,
               clattn_decode(context, cache, attention, &select, step ? 2 : 1, sequences, step ? lens : &len, &q, &k,
                             &v, &out, NULL, NULL, NULL));
        clattn_tensor_release(context, &q);
        clattn_tensor_release(context, &k);
        clattn_tensor_release(context, &v);
        clattn_tensor_release(context, &out);
    }
    expect(context, s->name, clattn_cache_share(context, cache, 0, other, 100, NULL));
    expect(context, s->name, clattn_cache_truncate(context, cache, 0, 90, NULL));
    clattn_cache_release(context, cache);
}

static void decode_all(clattn_context *context)
{
    static const struct shape shapes[] = {
        {"cache", CLATTN_FLOAT16, 512, 8192, 32, 8, 128, 128},
        {"int8 cache", CLATTN_INT8, 512, 8192, 16, 1, 128, 128},
        {"float32 cache", CLATTN_FLOAT32, 512, 8192, 4, 1, 256, 256},
        {"odd cache", CLATTN_BFLOAT16, 512, 8192, 5, 1, 33, 7},
    };
    clattn_tensor sink = small_tensor(context, 1, 32);
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        decode_case(context, &shapes[i], i % 2 ? 48 : 0, CLATTN_SELECT_PISA, NULL);
    for (size_t i = 0; i < 2; i++)
        decode_case(context, &shapes[i], 48, CLATTN_SELECT_ROBUST, NULL);
    attention.softcap = 30;
    attention.window = 300;
    attention.sink = &sink;
    decode_case(context, &shapes[0], 16, CLATTN_SELECT_DENSE, &attention);
    clattn_tensor_release(context, &sink);
}

/* ---- selection ---- */

static void select_all(clattn_context *context)
{
    static const struct shape shapes[] = {
        {"select", CLATTN_FLOAT16, 512, 8192, 32, 8, 128, 128},
        {"select float32", CLATTN_FLOAT32, 512, 8192, 8, 8, 64, 64},
        {"select, group of 16", CLATTN_BFLOAT16, 512, 8192, 16, 1, 128, 128},
        {"select, wide", CLATTN_FLOAT32, 512, 8192, 4, 1, 256, 256},
    };
    static const int topks[] = {8, 64, 512};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int selector = CLATTN_SELECT_PISA; selector <= CLATTN_SELECT_FLAT_LSE; selector++) {
            struct problem_tensors t;
            if (i > 0 && selector != CLATTN_SELECT_PISA && selector != CLATTN_SELECT_FLAT_LSE) continue;
            clattn_select_desc desc = CLATTN_SELECT_DESC_INIT;
            clattn_blocks *blocks = NULL;
            desc.selector = (clattn_selector)selector;
            desc.topk = topks[(i + (size_t)selector) % 3];
            desc.leaf = selector % 2 ? 64 : 16;
            tensors_make(context, &shapes[i], &t);
            expect(context, shapes[i].name,
                   clattn_select(context, NULL, &desc, &t.q, &t.k, NULL, &blocks, NULL));
            clattn_blocks_release(context, blocks);
            tensors_release(context, &t);
        }
}

/* Robust selection: scores of the heads in local and in global memory, groups of several rounds. */
static void select_robust(clattn_context *context)
{
    static const struct shape shapes[] = {
        {"robust", CLATTN_FLOAT16, 512, 8192, 32, 8, 128, 128},
        {"robust float32", CLATTN_FLOAT32, 512, 8192, 8, 8, 64, 64},
        {"robust, group of 16", CLATTN_BFLOAT16, 512, 8192, 16, 1, 64, 64},
        {"robust, wide", CLATTN_FLOAT32, 512, 8192, 40, 1, 256, 256},
    };
    static const int beams[] = {32, 64, 16, 512};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct problem_tensors t;
        clattn_select_desc desc = CLATTN_SELECT_DESC_INIT;
        clattn_blocks *blocks = NULL;
        desc.selector = CLATTN_SELECT_ROBUST;
        desc.beam = beams[i];
        desc.leaf = i == 1 ? 16 : 64;
        tensors_make(context, &shapes[i], &t);
        expect(context, shapes[i].name, clattn_select(context, NULL, &desc, &t.q, &t.k, NULL, &blocks, NULL));
        clattn_blocks_release(context, blocks);
        tensors_release(context, &t);
    }
}

/* ---- the subgroup tier ---- */

static void subgroup_kernels(clattn_context *context, int kind, int lanes)
{
    struct opencl_options options = {""};
    cl_kernel kernel = NULL;
    struct opencl *state = opencl_of(context);
    state->subgroup = (struct subgroup){kind, lanes};
    subgroup_options(&options, &state->subgroup);
    expect(
        context, "canary",
        opencl_kernel(context, SUBGROUP_FILES "canary_subgroup.cl", "canary_subgroup", options.text, &kernel));
    if (kernel) clReleaseKernel(kernel);
    attend_all(context);
    select_all(context);
    state->subgroup = (struct subgroup){0};
}

/* The four verbs of a form of the matrix tier, for both types. */
static void matrix_kernels(clattn_context *context, const char *form, const char *more)
{
    char files[128], options[128];
    cl_kernel kernel = NULL;
    snprintf(files, sizeof files, "common.cl+%s+canary_matrix.cl", form);
    for (int half = 0; half < 2; half++) {
        snprintf(options, sizeof options, "-DHALF=%d -DDEPTH=64 %s", half, more);
        expect(context, form, opencl_kernel(context, files, "canary_matrix", options, &kernel));
        if (kernel) clReleaseKernel(kernel);
    }
}

/* What its paths take and the shapes of all tiers lack: selection with leaves of 64, blocks of 128. */
static void nvidia_shapes(clattn_context *context)
{
    static const struct shape shapes[] = {
        {"one head, 64", CLATTN_FLOAT16, 512, 8192, 8, 8, 64, 64},
        {"group of 4, 128", CLATTN_FLOAT16, 512, 8192, 32, 8, 128, 128},
        {"group of 16, 128", CLATTN_BFLOAT16, 512, 8192, 16, 1, 128, 128},
        {"group of 5, 96", CLATTN_BFLOAT16, 512, 8192, 5, 1, 96, 96},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct problem_tensors t;
        clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
        clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
        clattn_blocks *blocks = NULL;
        const int32_t indices[64] = {0};
        tensors_make(context, &shapes[i], &t);
        select.selector = CLATTN_SELECT_FLAT_LSE;
        expect(context, shapes[i].name, clattn_select(context, NULL, &select, &t.q, &t.k, NULL, &blocks, NULL));
        clattn_blocks_release(context, blocks);
        blocks = NULL;
        select.selector = CLATTN_SELECT_PISA;
        expect(context, shapes[i].name, clattn_select(context, NULL, &select, &t.q, &t.k, NULL, &blocks, NULL));
        attend(context, &shapes[i], NULL, blocks);
        clattn_blocks_release(context, blocks);
        desc.block = 128;
        desc.q_block = 64;
        desc.rows = 8;
        desc.heads = shapes[i].kv_heads;
        desc.topk = 1;
        expect(context, shapes[i].name, clattn_blocks_create(context, &desc, indices, &blocks));
        attend(context, &shapes[i], NULL, blocks);
        clattn_blocks_release(context, blocks);
        tensors_release(context, &t);
    }
}

/* The options that its paths take, alone and together, for lists of tokens and of query blocks. */
static void nvidia_options_all(clattn_context *context)
{
    static const struct shape shapes[] = {
        {"options, 128", CLATTN_FLOAT16, 512, 8192, 32, 8, 128, 128},
        {"options, 64", CLATTN_BFLOAT16, 512, 8192, 16, 1, 64, 64},
        {"options, wide", CLATTN_FLOAT16, 512, 8192, 8, 2, 256, 256},
    };
    enum { SOFTCAP = 1, WINDOW = 2, SINK = 4 };
    static const int options[] = {WINDOW | SOFTCAP, WINDOW | SOFTCAP | SINK, SOFTCAP, WINDOW, SINK};
    clattn_tensor sink = small_tensor(context, 1, 32);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int o = 0; o < (i == 0 ? 5 : 2); o++)
            for (int q_block = 1; q_block <= 64; q_block *= 64) {
                clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
                clattn_tensor own = sink;
                own.heads = shapes[i].q_heads;
                if (options[o] & SOFTCAP) attention.softcap = 30;
                if (options[o] & WINDOW) attention.window = 300;
                if (options[o] & SINK) attention.sink = &own;
                clattn_blocks *blocks = lists_make(context, &shapes[i], q_block, NULL, 0);
                attend(context, &shapes[i], &attention, blocks);
                clattn_blocks_release(context, blocks);
            }
    clattn_tensor_release(context, &sink);
}

/* The matrix tier of NVIDIA cards. Nothing is computed here, so that no path passes its self-test; but for that
 * each is built for each shape. In a second round all are said to have passed. */
static void nvidia_kernels(void)
{
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    cl_kernel kernel = NULL;
    desc.backend = CLATTN_BACKEND_OPENCL;
    fake.nvidia_generation = 9;
    if (clattn_context_create(&desc, &context)) exit(1); /* with the canary of mma.sync */
    expect(context, "canary",
           opencl_kernel(context, NVIDIA_HOPPER_FILES "canary_wgmma.cl", "canary_wgmma", "-DDIM=64 -DDIM_V=64",
                         &kernel));
    if (kernel) clReleaseKernel(kernel);
    struct nvidia *nvidia = calloc(1, sizeof *nvidia);
    if (!nvidia) exit(1);
    pthread_mutex_init(&nvidia->lock, NULL);
    nvidia->tier = NVIDIA_HOPPER;
    opencl_of(context)->nvidia = nvidia; /* the context releases it */
    for (int round = 0; round < 2; round++) {
        attend_all(context);
        select_all(context);
        nvidia_shapes(context);
        nvidia_options_all(context);
        decode_all(context);
        for (struct nvidia_verdict *verdict = nvidia->verdicts; verdict; verdict = verdict->next) {
            verdict->works = true;
            /* Chosen for lists that are much alike. */
            if (round == 0 && verdict->path == NVIDIA_INVERTED_HOPPER)
                nvidia_selftest(context, NVIDIA_UNION, &verdict->shape);
        }
    }
    clattn_context_release(context);
    fake.nvidia_generation = 0;
}

static int hopper_text(const char *path)
{
    FILE *file = fopen(path, "rb");
    long bytes = file && !fseek(file, 0, SEEK_END) ? ftell(file) : -1;
    char *text = bytes >= 0 ? calloc((size_t)bytes + 1, 1) : NULL;
    if (!text || fseek(file, 0, SEEK_SET) || fread(text, 1, (size_t)bytes, file) != (size_t)bytes) return 1;
    fclose(file);
    char *changed = opencl_hopper_text(text);
    if (changed) fputs(changed, stdout);
    free(text);
    free(changed);
    return !changed;
}

/* ---- all kernels ---- */

/* Element masks come from neighborhoods alone. */
static void masked_kernel(clattn_context *context)
{
    char options[2048] = "";
    cl_kernel kernel = NULL;
    for (int i = 0; i < seen_count && !*options; i++)
        if (strncmp(seen[i], "attention_forward\n", 18) == 0)
            snprintf(options, sizeof options, "%s -DMASK=1", strstr(seen[i], "-DDTYPE"));
    expect(context, "MASK",
           opencl_kernel(context, "attention_forward.cl", "attention_forward", options, &kernel));
    if (kernel) clReleaseKernel(kernel);
}

static bool is_seen(const char *kernel, size_t bytes)
{
    for (int i = 0; i < seen_count; i++)
        if (strncmp(seen[i], kernel, bytes) == 0 && seen[i][bytes] == '\n') return true;
    return false;
}

/* Kernels around the products of CLBlast, which would have to be a fake too, and those of a step. */
static void small_kernels(clattn_context *context)
{
    static const char *const names[][3] = {
        {"dense.cl", "dense_widen", "-DDTYPE=2"},
        {"dense.cl", "dense_store", "-DDTYPE=2"},
        {"dense.cl", "dense_softmax", "-DDTYPE=2"},
        {"flat.cl", "flat_sum", "-DDTYPE=2"},
        {"flat.cl", "flat_best", "-DTOPK=64"},
        {"merge.cl", "merge", "-DDTYPE=2 -DOUT_DTYPE=2 -DITEMS=64"},
        {"quantize.cl", "quantize", "-DDTYPE=2 -DITEMS=64"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        cl_kernel kernel = NULL;
        expect(context, names[i][1], opencl_kernel(context, names[i][0], names[i][1], names[i][2], &kernel));
        if (kernel) clReleaseKernel(kernel);
    }
}

/* `__kernel ... name(` of every source, attributes between them or not. On other cards than NVIDIA's not those
 * of their matrix tier, which stand on a line of their own. */
static void check_complete(void)
{
    for (unsigned i = 0; i < kernel_source_count; i++)
        for (const char *at = kernel_sources[i].text; (at = strstr(at, "__kernel"));) {
            at += strlen("__kernel");
            const bool all = fake.vendor_id == NVIDIA_VENDOR;
            for (const char *open; (*at == ' ' || (all && *at == '\n')) && (open = strchr(at, '(')); at++) {
                const char *name = open;
                while (name > at && (name[-1] == '_' || (name[-1] >= '0' && name[-1] <= '9') ||
                                     (name[-1] >= 'a' && name[-1] <= 'z')))
                    name--;
                size_t bytes = (size_t)(open - name);
                if (bytes == strlen("__attribute__") && strncmp(name, "__attribute__", bytes) == 0) {
                    at = strstr(open, "))") + 1;
                    while (at[1] == ')' || at[1] == '\n')
                        at++;
                    continue;
                }
                if (!is_seen(name, bytes)) {
                    fprintf(stderr, "%s: the kernel %.*s is never built here\n", kernel_sources[i].name,
                            (int)bytes, name);
                    failures++;
                }
                break;
            }
        }
}

int main(int count, char **arguments)
{
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    if (count == 3 && strcmp(arguments[1], "--hopper") == 0) return hopper_text(arguments[2]);
    if (count < 6) return 2;
    folder = arguments[1];
    fake.vendor_id = (cl_uint)strtoul(arguments[2], NULL, 0);
    setenv("CLATTN_DENSE", "tiles", 1);
    setenv("CLATTN_CACHE_SIZE", "0", 1);
    fake.on_kernel = keep;
    fake.local_bytes = 64 << 10;
    desc.backend = CLATTN_BACKEND_OPENCL;
    if (clattn_context_create(&desc, &context)) return 1;
    attend_all(context);
    attend_options(context);
    attend_neighborhood(context);
    select_all(context);
    select_robust(context);
    decode_all(context);
    small_kernels(context);
    masked_kernel(context);
    subgroup_kernels(context, atoi(arguments[3]), atoi(arguments[4]));
    matrix_kernels(context, arguments[5], count > 6 ? arguments[6] : "");
    if (fake.vendor_id == NVIDIA_VENDOR) nvidia_kernels();
    check_complete();
    clattn_context_release(context);
    for (int i = 0; i < seen_count; i++) {
        free(seen[i]);
        free(sources[i]);
    }
    printf("%d programs, %d kernels\n", program_count, seen_count);
    return failures != 0;
}
