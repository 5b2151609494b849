/* SPDX-License-Identifier: MIT */
/* Lists of query blocks against lists of query tokens: time a listed pair, on the CPU or an OpenCL device.
 *
 *     bench_blocks [cpu|opencl [THREADS [TOKENS]]]
 *
 * Blocks of 64 keys, 8 a list, dim 64, float32, not causal; 1 and 16 query heads on a key head. Three kinds of
 * lists with as many (query token, key) pairs each:
 *
 *     tokens   a random list a token
 *     equal    a list a token, but the same one for all tokens of a query block of 64: tiles of neighbouring
 *              tokens share what they read
 *     N        a random list for each block of N query tokens
 *
 * Everything is compared with the reference on its last rows before it counts. The best of several runs, in
 * turns; processor time of all threads, which other programs disturb less than the clock on the wall. */

#include "clattn.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DIM = 64, HEADS = 16, BLOCK = 64, TOPK = 8, REPEATS = 5, TOKENS_DEFAULT = 4096, CHECK_ROWS = 128 };

static clattn_context *context, *reference;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check(clattn_context *where, clattn_status status, const char *what)
{
    char text[512] = "";
    if (!status) return;
    if (where) clattn_context_error(where, text, sizeof text);
    fprintf(stderr, "bench_blocks: %s: %s (%s)\n", what, clattn_strerror(status), text);
    exit(status == CLATTN_NO_DEVICE ? 77 : 1);
}

static uint64_t random_state = 1;

static uint32_t random_bits(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(random_state >> 33);
}

static clattn_tensor tensor(int64_t len, int64_t heads, bool fill)
{
    size_t count = (size_t)(len * heads * DIM);
    float *data = calloc(count, sizeof *data);
    if (!data) exit(1);
    for (size_t i = 0; fill && i < count; i++)
        data[i] = ((float)(random_bits() & 0xffff) - 32767.5f) / 16384;
    return clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, len, heads, DIM);
}

/* One kind of lists. */
struct kind {
    const char *name;
    int q_block; /* tokens of a list */
    int shared;  /* tokens that have the same one */
    int32_t *indices;
    clattn_blocks *blocks;
    double seconds;
};

/* One block of each eighth of the keys, so that none is listed twice. */
static void kind_make(struct kind *kind, int64_t tokens)
{
    int64_t eighth = tokens / BLOCK / TOPK, rows = tokens / kind->q_block;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    kind->indices = malloc((size_t)(rows * TOPK) * sizeof *kind->indices);
    if (!kind->indices) exit(1);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t n = 0; n < TOPK; n++) {
            bool follows = row * kind->q_block % kind->shared != 0;
            kind->indices[row * TOPK + n] = follows ? kind->indices[(row - 1) * TOPK + n]
                                                    : (int32_t)(n * eighth + random_bits() % (uint32_t)eighth);
        }
    desc.q_block = kind->q_block;
    desc.rows = rows;
    desc.topk = TOPK;
    check(context, clattn_blocks_create(context, &desc, kind->indices, &kind->blocks), "blocks");
    kind->seconds = 1e9;
}

/* The last CHECK_ROWS rows against the reference. */
static void verify(const struct kind *kind, const clattn_tensor t[4], const clattn_tensor *out)
{
    int64_t rows = CHECK_ROWS / kind->q_block, heads = t[0].heads,
            first = (t[0].len - CHECK_ROWS) * heads * DIM;
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_blocks *blocks = NULL;
    clattn_tensor q = t[0], expected = tensor(CHECK_ROWS, heads, false);
    q.offset = first;
    q.len = CHECK_ROWS;
    attention.causal = 0;
    desc.q_block = kind->q_block;
    desc.rows = rows;
    desc.topk = TOPK;
    const int32_t *lists = kind->indices + (t[0].len / kind->q_block - rows) * TOPK;
    check(reference, clattn_blocks_create(reference, &desc, lists, &blocks), "blocks");
    check(reference,
          clattn_attention_forward(reference, &attention, &q, &t[1], &t[2], blocks, &expected, NULL, NULL),
          "reference");
    for (int64_t i = 0; i < CHECK_ROWS * heads * DIM; i++)
        if (!(fabs((double)((float *)expected.data)[i] - (double)((float *)out->data)[first + i]) < 1e-5)) {
            printf("%s: WRONG\n", kind->name);
            exit(1);
        }
    clattn_blocks_release(reference, blocks);
    free(expected.data);
}

static void bench(int64_t tokens, int group)
{
    struct kind kinds[] = {{"tokens", 1, 1, NULL, NULL, 0}, {"equal", 1, 64, NULL, NULL, 0},
                           {"16", 16, 16, NULL, NULL, 0},   {"32", 32, 32, NULL, NULL, 0},
                           {"64", 64, 64, NULL, NULL, 0},   {"128", 128, 128, NULL, NULL, 0}};
    enum { KINDS = sizeof kinds / sizeof *kinds };
    clattn_tensor t[4] = {tensor(tokens, HEADS, true), tensor(tokens, HEADS / group, true),
                          tensor(tokens, HEADS / group, true), tensor(tokens, HEADS, false)},
                  device[4];
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    attention.causal = 0;
    for (int i = 0; i < 4; i++) {
        check(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, tokens, t[i].heads, DIM, &device[i]),
              "tensor");
        if (i < 3) check(context, clattn_tensor_upload(context, &t[i], &device[i]), "upload");
    }
    for (int n = 0; n < KINDS; n++)
        kind_make(&kinds[n], tokens);
    for (int r = 0; r < REPEATS; r++)
        for (int n = 0; n < KINDS; n++) {
            double start = now();
            check(context,
                  clattn_attention_forward(context, &attention, &device[0], &device[1], &device[2],
                                           kinds[n].blocks, &device[3], NULL, NULL),
                  "forward");
            kinds[n].seconds = fmin(kinds[n].seconds, now() - start);
            if (r > 0) continue;
            check(context, clattn_tensor_download(context, &device[3], &t[3]), "download");
            verify(&kinds[n], t, &t[3]);
        }
    printf("%d query heads a key head\n  lists      ns a pair   over tokens   over equal\n", group);
    for (int n = 0; n < KINDS; n++)
        printf("  %-8s %11.2f %13.2f %12.2f\n", kinds[n].name,
               1e9 * kinds[n].seconds / ((double)tokens * HEADS * TOPK * BLOCK),
               kinds[0].seconds / kinds[n].seconds, kinds[1].seconds / kinds[n].seconds);
    for (int n = 0; n < KINDS; n++) {
        clattn_blocks_release(context, kinds[n].blocks);
        free(kinds[n].indices);
    }
    for (int i = 0; i < 4; i++) {
        clattn_tensor_release(context, &device[i]);
        free(t[i].data);
    }
}

int main(int argc, char **argv)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_device_info info = {.size = sizeof info};
    int64_t tokens = argc > 3 ? atoll(argv[3]) : TOKENS_DEFAULT;
    desc.backend = CLATTN_BACKEND_REFERENCE;
    check(NULL, clattn_context_create(&desc, &reference), "reference");
    desc.backend = argc > 1 && !strcmp(argv[1], "opencl") ? CLATTN_BACKEND_OPENCL : CLATTN_BACKEND_CPU;
    desc.threads = argc > 2 ? atoi(argv[2]) : 1;
    check(NULL, clattn_context_create(&desc, &context), "context");
    check(context, clattn_context_device(context, &info), "device");
    if (tokens < BLOCK * TOPK || tokens % (BLOCK * TOPK)) tokens = TOKENS_DEFAULT;
    printf("%s, variant %s, %lld tokens, %d query heads\n", info.name, info.variant, (long long)tokens, HEADS);
    bench(tokens, 1);
    bench(tokens, 16);
    clattn_context_release(context);
    clattn_context_release(reference);
    return 0;
}
