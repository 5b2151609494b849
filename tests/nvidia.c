/* SPDX-License-Identifier: MIT */
#include "nvidia.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- contexts that remember what they said ---- */

struct recorder recorder;
int tiers;

static void record(void *user, clattn_log_level level, const char *message)
{
    struct recorder *r = user;
    (void)level;
    int bytes = snprintf(r->text + r->used, sizeof r->text - r->used, "%s\n", message);
    if (bytes > 0 && r->used + (size_t)bytes < sizeof r->text) r->used += (size_t)bytes;
}

void record_clear(void)
{
    recorder.used = 0;
    recorder.text[0] = 0;
}

static int card = -1; /* its index */

static char folder[4096]; /* of spoiled kernels */

bool card_find(void)
{
    const char *base = getenv("CLATTN_CACHE_DIR");
    snprintf(folder, sizeof folder, "%.4000s/nvidia.kernels", base ? base : ".");
    mkdir(folder, 0700);
    unsetenv("CLATTN_CACHE_SIZE");
    unsetenv("CLATTN_LOG"); /* the tests read all of the log */
    clattn_device_info info = {.size = sizeof info};
    for (int i = 0; clattn_device_get(i, &info) == CLATTN_SUCCESS; i++) {
        if (info.backend != CLATTN_BACKEND_OPENCL || !strstr(info.variants, "mma")) continue;
        card = info.index;
        tiers = strstr(info.variants, "hopper") ? TIER_HOPPER : TIER_MMA;
        return true;
    }
    print_message("no NVIDIA card with matrix units\n");
    return false;
}

struct target card_open(const char *variant)
{
    struct target target = {.info = {.size = sizeof target.info}, .limit = SIZE_NORMAL};
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    char index[16], error[1024] = "";
    snprintf(index, sizeof index, "%d", card);
    desc.backend = CLATTN_BACKEND_OPENCL;
    desc.device = index;
    desc.variant = variant;
    desc.log = record;
    desc.log_user = &recorder;
    desc.log_level = CLATTN_LOG_DEBUG;
    desc.error = error;
    desc.error_bytes = sizeof error;
    record_clear();
    if (clattn_context_create(&desc, &target.context))
        fail_msg("%s: %s", variant ? variant : "best tier", error);
    assert_int_equal(clattn_context_device(target.context, &target.info), CLATTN_SUCCESS);
    snprintf(target.label, sizeof target.label, "%s", target.info.variant);
    return target;
}

void card_close(struct target *target)
{
    clattn_context_release(target->context);
}

/* ---- wrong kernels ---- */

void kernel_spoil(const char *name, const char *from, const char *to)
{
    char path[4400], line[4096];
    int changed = 0;
    const char *srcdir = getenv("srcdir");
    snprintf(path, sizeof path, "%s/cl/%s", srcdir ? srcdir : ".", name);
    FILE *in = fopen(path, "r");
    assert_non_null(in);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    while (fgets(line, sizeof line, in)) {
        char *at = strstr(line, from);
        changed += at != NULL;
        if (at)
            fprintf(out, "%.*s%s%s", (int)(at - line), line, to, at + strlen(from));
        else
            fputs(line, out);
    }
    fclose(in);
    assert_int_equal(fclose(out), 0);
    assert_true(changed > 0);
    setenv("CLATTN_KERNEL_DIR", folder, 1);
}

void kernel_restore(const char *name)
{
    char path[4400];
    unsetenv("CLATTN_KERNEL_DIR");
    snprintf(path, sizeof path, "%s/%s", folder, name);
    unlink(path);
}

/* ---- paths of attention ---- */

/* Every eight rows list the same blocks. */
static void lists_share(struct lists *lists)
{
    int64_t entries = (int64_t)lists->desc.heads * lists->desc.topk;
    for (int64_t row = 0; row < lists->desc.rows; row++)
        memcpy(lists->indices + row * entries, lists->indices + row / 8 * 8 * entries,
               (size_t)entries * sizeof *lists->indices);
}

static void expect_path(const char *path, const char *tier, const char *name)
{
    char line[80];
    snprintf(line, sizeof line, "by path %s\n", path ? path : "");
    bool found = strstr(recorder.text, path ? line : "attention by path") != NULL;
    if (found != (path != NULL))
        fail_msg("%s on %s: path %s expected; log:\n%s", name, tier, path, recorder.text);
}

void check_path(const struct target *target, const struct path_case *c, uint64_t seed)
{
    struct random random = random_seeded(seed);
    struct fixture f = fixture_new(&c->shape, &random);
    struct array sink = array_new(CLATTN_FLOAT32, 1, 1, c->shape.kv_heads * c->shape.group, 1, LAYOUT_BTHD);
    array_fill(&sink, FILL_NORMAL, &random);
    f.attention.window = c->window;
    f.attention.softcap = c->softcap;
    f.attention.sink = c->sink ? &sink.view : NULL;
    f.attention.seqused_q = c->seqused_q;
    f.attention.seqused_k = c->seqused_k;
    struct spans spans = fixture_spans(&f, c->q_block);
    struct lists lists =
        lists_random(&random, &spans, c->block ? c->block : 64, c->q_block, c->shape.kv_heads, c->topk, 0.9);
    const struct lists *used = c->kind == LIST_ALL_KEYS ? NULL : &lists;
    if (c->kind == LIST_SHARED) lists_share(&lists);
    struct forward problem = fixture_problem(&f, used);
    struct expected expected = expected_forward(&problem);
    record_clear();
    fixture_check_forward(target, &f, used, &expected);
    expect_path(strcmp(target->info.variant, "mma") ? c->hopper : c->mma, target->label, f.name);
    size_t bytes = f.out.raw_elements * element_bytes(f.out.view.dtype);
    unsigned char *first = malloc(bytes);
    assert_non_null(first);
    memcpy(first, f.out.raw, bytes);
    fixture_forward(target, &f, used); /* the same bits again */
    assert_memory_equal(first, f.out.raw, bytes);
    free(first);
    expected_free(&expected);
    lists_free(&lists);
    array_free(&sink);
    fixture_free(&f);
}
