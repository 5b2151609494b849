/* SPDX-License-Identifier: MIT */
/* Time of the backward pass over the forward pass, and of skewed over balanced lists, on the CPU.
 *
 *     bench_backward [VARIANT [THREADS]]
 *
 * 8192 tokens, 16 query heads on 1 key head, dim 64, blocks of 64, K = 8, causal, float32. Gradients are
 * compared with the reference on a shorter sequence of the same kind before anything is timed. The best of
 * several runs counts; forward and backward runs take turns, so that both meet the same machine. Goals:
 * backward at most 3.5 times forward, skewed lists at most 2 times balanced ones of as many pairs. */

#include "clattn.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TOKENS = 8192, CHECK_TOKENS = 512, HEADS = 16, DIM = 64, BLOCK = 64, TOPK = 8, REPEATS = 7 };

static clattn_context *context, *reference;

static int threads = 1;

/* With one thread the processor time, which other programs on the machine disturb less. */
static double now(void)
{
    struct timespec t;
    clock_gettime(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check(clattn_context *where, clattn_status status, const char *what)
{
    char text[512] = "";
    if (!status) return;
    if (where) clattn_context_error(where, text, sizeof text);
    fprintf(stderr, "bench_backward: %s: %s (%s)\n", what, clattn_strerror(status), text);
    exit(1);
}

static uint64_t random_state = 1;

static uint32_t random_bits(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(random_state >> 33);
}

static clattn_tensor tensor(int64_t len, int64_t heads, int64_t dim, bool fill)
{
    size_t count = (size_t)(len * heads * dim);
    float *data = calloc(count, sizeof *data);
    if (!data) exit(1);
    for (size_t i = 0; fill && i < count; i++)
        data[i] = ((float)(random_bits() & 0xffff) - 32767.5f) / 16384;
    return clattn_tensor_bthd(data, CLATTN_FLOAT32, 1, len, heads, dim);
}

/* ---- lists ---- */

enum lists { SELECTED, BALANCED, SKEWED };

/* Lists of K blocks among those at or before the row's own. Balanced: spread evenly. Skewed: nearly all rows
 * name the same first blocks. Early rows have fewer blocks to name in both. */
static clattn_blocks *lists_make(clattn_context *where, enum lists kind, int64_t tokens, const clattn_tensor *q,
                                 const clattn_tensor *k)
{
    clattn_blocks *blocks = NULL;
    if (kind == SELECTED) {
        clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
        select.topk = TOPK;
        check(where, clattn_select(where, NULL, &select, q, k, NULL, &blocks, NULL), "select");
        return blocks;
    }
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    int32_t *indices = malloc((size_t)(tokens * TOPK) * sizeof *indices);
    if (!indices) exit(1);
    for (int64_t row = 0; row < tokens; row++)
        for (int64_t n = 0; n < TOPK; n++) {
            int64_t before = row / BLOCK; /* blocks that are visible as a whole */
            int64_t spread = before >= TOPK ? (n * before + row % before) / TOPK : n;
            indices[row * TOPK + n] = (int32_t)(n >= before ? -1 : kind == SKEWED ? n : spread);
        }
    desc.rows = tokens;
    desc.topk = TOPK;
    desc.block = BLOCK;
    check(where, clattn_blocks_create(where, &desc, indices, &blocks), "blocks");
    free(indices);
    return blocks;
}

/* ---- one pass each ---- */

enum { Q, K, V, OUT, LSE, DOUT, DQ, DK, DV, TENSORS };

struct problem {
    clattn_tensor t[TENSORS];
};

static struct problem problem_make(int64_t tokens)
{
    struct problem p = {
        {tensor(tokens, HEADS, DIM, true), tensor(tokens, 1, DIM, true), tensor(tokens, 1, DIM, true),
         tensor(tokens, HEADS, DIM, false), tensor(tokens, HEADS, 1, false), tensor(tokens, HEADS, DIM, true),
         tensor(tokens, HEADS, DIM, false), tensor(tokens, 1, DIM, false), tensor(tokens, 1, DIM, false)}};
    return p;
}

static void problem_free(struct problem *p)
{
    for (int i = 0; i < TENSORS; i++)
        free(p->t[i].data);
}

static double forward(clattn_context *where, struct problem *p, const clattn_blocks *blocks)
{
    double start = now();
    check(where,
          clattn_attention_forward(where, NULL, &p->t[Q], &p->t[K], &p->t[V], blocks, &p->t[OUT], &p->t[LSE],
                                   NULL),
          "forward");
    return now() - start;
}

static double backward(clattn_context *where, struct problem *p, const clattn_blocks *blocks)
{
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    gradients.dout = &p->t[DOUT];
    gradients.dq = &p->t[DQ];
    gradients.dk = &p->t[DK];
    gradients.dv = &p->t[DV];
    double start = now();
    check(where,
          clattn_attention_backward(where, NULL, &p->t[Q], &p->t[K], &p->t[V], blocks, &p->t[OUT], &p->t[LSE],
                                    &gradients, NULL),
          "backward");
    return now() - start;
}

/* Relative RMS of the three gradients against the reference. */
static bool agrees(enum lists kind)
{
    struct problem p = problem_make(CHECK_TOKENS);
    clattn_tensor expected[TENSORS];
    bool good = true;
    for (int pass = 0; pass < 2; pass++) {
        clattn_context *where = pass ? context : reference;
        clattn_blocks *blocks = lists_make(where, kind, CHECK_TOKENS, &p.t[Q], &p.t[K]);
        forward(where, &p, blocks);
        backward(where, &p, blocks);
        clattn_blocks_release(where, blocks);
        for (int i = DQ; i <= DV; i++) {
            size_t count = (size_t)(p.t[i].len * p.t[i].heads * p.t[i].dim);
            const float *have = p.t[i].data;
            double error = 0, size = 0;
            if (pass == 0) {
                expected[i] = tensor(p.t[i].len, p.t[i].heads, p.t[i].dim, false);
                memcpy(expected[i].data, have, count * sizeof *have);
                continue;
            }
            for (size_t n = 0; n < count; n++) {
                double want = (double)((float *)expected[i].data)[n];
                error += (want - (double)have[n]) * (want - (double)have[n]);
                size += want * want;
            }
            good = good && sqrt(error) <= 1e-5 * sqrt(size);
            free(expected[i].data);
        }
    }
    problem_free(&p);
    return good;
}

static double bench(const char *name, enum lists kind)
{
    struct problem p = problem_make(TOKENS);
    double ahead = 1e9, back = 1e9;
    if (!agrees(kind)) {
        printf("%-22s WRONG\n", name);
        exit(1);
    }
    clattn_blocks *blocks = lists_make(context, kind, TOKENS, &p.t[Q], &p.t[K]);
    for (int r = 0; r < REPEATS; r++) {
        ahead = fmin(ahead, forward(context, &p, blocks));
        back = fmin(back, backward(context, &p, blocks));
    }
    printf("%-22s forward %7.1f ms   backward %7.1f ms   %.2f times\n", name, 1e3 * ahead, 1e3 * back,
           back / ahead);
    clattn_blocks_release(context, blocks);
    problem_free(&p);
    return back;
}

int main(int argc, char **argv)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_device_info info = {.size = sizeof info};
    desc.backend = CLATTN_BACKEND_REFERENCE;
    check(NULL, clattn_context_create(&desc, &reference), "reference");
    desc.backend = CLATTN_BACKEND_CPU;
    desc.variant = argc > 1 ? argv[1] : NULL;
    if (argc > 2) threads = atoi(argv[2]);
    desc.threads = threads;
    check(NULL, clattn_context_create(&desc, &context), "context");
    check(context, clattn_context_device(context, &info), "device");
    printf("%s, variant %s, %d threads\n", info.name, info.variant, threads);
    bench("selected by PISA", SELECTED);
    double balanced = bench("balanced lists", BALANCED), skewed = bench("skewed lists", SKEWED);
    printf("skewed over balanced: %.2f times\n", skewed / balanced);
    clattn_context_release(context);
    clattn_context_release(reference);
    return 0;
}
