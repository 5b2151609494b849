/* SPDX-License-Identifier: MIT */
/* Speed of the CPU kernels against what the machine gives in the same run.
 *
 *     bench_cpu [VARIANT [THREADS [PART]]]
 *
 * PART: only the lines whose name contains it. Dim 128, 16 query heads on 1 key head, blocks of 64, K = 8.
 * Every configuration is compared with the reference on its last rows before it is timed; the best of several
 * runs counts. FLOPs are those of the listed (visible) keys only. Inputs lie in huge pages where the system
 * gives them. */

#include "bench_cpu.h"
#include "fma.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

clattn_context *context, *reference;
double peak, bandwidth;
int threads = 1;
const char *part = "";
static clattn_device_info info = {.size = sizeof info};

double now(void)
{
    struct timespec t;
    clock_gettime(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void check(clattn_status status, const char *what)
{
    char text[512];
    if (!status) return;
    clattn_context_error(context, text, sizeof text);
    fprintf(stderr, "bench_cpu: %s: %s (%s)\n", what, clattn_strerror(status), text);
    exit(1);
}

/* ---- what the machine can do ---- */

static void measure_peak(const char *variant)
{
    volatile float keep = 0;
    for (int r = 0; r < 3; r++) {
        float sum;
        double start = now(), flops = fma_run(variant, 20000000, &sum), rate = flops / (now() - start);
        keep = keep + sum;
        if (rate > peak) peak = rate;
    }
}

double read_seconds(const void *data, int64_t bytes)
{
    enum { PIECE = 1 << 18 }; /* floats */
    int64_t count = bytes / 4, pieces = (count + PIECE - 1) / PIECE;
    double best = 1e9;
    volatile float keep = 0;
    for (int r = 0; r < REPEATS; r++) {
        float total = 0;
        double start = now();
#pragma omp parallel for num_threads(threads) reduction(+ : total)
        for (int64_t n = 0; n < pieces; n++)
            total += read_run(info.variant, (const float *)data + n * PIECE,
                              count - n * PIECE < PIECE ? count - n * PIECE : PIECE);
        if (now() - start < best) best = now() - start;
        keep = keep + total;
    }
    return best;
}

/* ---- inputs ---- */

static uint64_t random_state = 1;

uint64_t random_bits(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return random_state >> 33;
}

static size_t element_bytes(clattn_dtype dtype)
{
    return dtype == CLATTN_FLOAT32 ? 4 : dtype == CLATTN_INT8 ? 1 : 2;
}

clattn_tensor tensor(clattn_dtype dtype, int64_t len, int64_t heads, int64_t dim, bool fill)
{
    size_t count = (size_t)(len * heads * dim), page = (size_t)2 << 20;
    size_t bytes = (count * element_bytes(dtype) + page - 1) / page * page;
    void *data = aligned_alloc(page, bytes);
    if (!data) exit(1);
#if defined(MADV_HUGEPAGE)
    madvise(data, bytes, MADV_HUGEPAGE);
#endif
    memset(data, 0, bytes);
    for (size_t i = 0; fill && i < count; i++) {
        uint64_t bits =
            random_bits(); /* -2 .. 2 in every type: a sign, an exponent of 0 or 1 below, a fraction */
        if (dtype == CLATTN_FLOAT32)
            ((float *)data)[i] = ((float)(bits & 0xffff) - 32767.5f) / 16384;
        else if (dtype == CLATTN_INT8)
            ((int8_t *)data)[i] = (int8_t)((int)(bits % 255) - 127);
        else if (dtype == CLATTN_FLOAT16)
            ((uint16_t *)data)[i] = (uint16_t)((bits & 0x83ff) | 0x3800 | (bits >> 16 & 0x400));
        else
            ((uint16_t *)data)[i] = (uint16_t)((bits & 0x807f) | 0x3f00 | (bits >> 16 & 0x80));
    }
    return clattn_tensor_bthd(data, dtype, 1, len, heads, dim);
}

clattn_tensor tail(const clattn_tensor *t, int64_t rows)
{
    clattn_tensor view = *t;
    view.offset += (t->len - rows) * t->len_stride;
    view.len = rows;
    return view;
}

/* ---- forward ---- */

struct job {
    const char *name;
    clattn_dtype dtype;
    int64_t q_len, kv_len;
    int q_block; /* 0: dense */
    bool causal, shared;
};

static float scales[LONG / BLOCK]; /* of int8 keys and values */

static int32_t *make_lists(const struct job *job, int64_t rows)
{
    int32_t *indices = malloc((size_t)(rows * TOPK) * sizeof *indices);
    int64_t blocks = job->kv_len / BLOCK;
    for (int64_t row = 0; row < rows; row++)
        for (int n = 0; n < TOPK; n++) /* one of each eighth, so that none is listed twice */
            indices[row * TOPK + n] =
                (int32_t)(job->shared
                              ? n
                              : n * (blocks / TOPK) + (int64_t)(random_bits() % (uint64_t)(blocks / TOPK)));
    return indices;
}

static void forward_once(clattn_context *where, const struct job *job, const clattn_tensor t[4],
                         const int32_t *indices, int64_t rows, double *seconds)
{
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_blocks *blocks = NULL;
    clattn_tensor out = t[3], scale = clattn_tensor_bthd(scales, CLATTN_FLOAT32, 1, LONG / BLOCK, 1, 1);
    attention.causal = job->causal;
    if (job->dtype == CLATTN_INT8) attention.k_scale = attention.v_scale = &scale;
    desc.q_block = job->q_block;
    desc.rows = rows;
    desc.topk = TOPK;
    if (indices) check(clattn_blocks_create(where, &desc, indices, &blocks), "blocks");
    double start = now();
    check(clattn_attention_forward(where, &attention, &t[0], &t[1], &t[2], blocks, &out, NULL, NULL),
          "forward");
    double taken = now() - start;
    if (seconds && taken < *seconds) *seconds = taken;
    clattn_blocks_release(where, blocks);
}

static bool tail_agrees(const struct job *job, const clattn_tensor t[4], const int32_t *indices, int64_t rows)
{
    int64_t check_rows = job->q_block ? job->q_block : 2;
    clattn_tensor expected = tensor(CLATTN_FLOAT32, check_rows, HEADS, DIM, false);
    clattn_tensor part[4] = {tail(&t[0], check_rows), t[1], t[2], expected}, got = tail(&t[3], check_rows);
    bool agrees = true;
    forward_once(reference, job, part, indices ? indices + (rows - 1) * TOPK : NULL, 1, NULL);
    for (int64_t i = 0; i < check_rows * HEADS * DIM; i++)
        if (!(fabs((double)((float *)expected.data)[i] - (double)((float *)got.data)[got.offset + i]) < 1e-5))
            agrees = false;
    free(expected.data);
    return agrees;
}

static void bench_forward(const struct job *job)
{
    if (!strstr(job->name, part)) return;
    int64_t rows = job->q_block ? job->q_len / job->q_block : 0;
    clattn_tensor t[4] = {
        tensor(job->dtype == CLATTN_INT8 ? CLATTN_FLOAT32 : job->dtype, job->q_len, HEADS, DIM, true),
        tensor(job->dtype, job->kv_len, 1, DIM, true), tensor(job->dtype, job->kv_len, 1, DIM, true),
        tensor(CLATTN_FLOAT32, job->q_len, HEADS, DIM, false)};
    int32_t *indices = job->q_block ? make_lists(job, rows) : NULL;
    double seconds = 1e9, pairs = (double)job->q_len * TOPK * BLOCK;
    if (!job->q_block)
        pairs = (double)job->q_len * ((double)job->kv_len - (job->causal ? (double)(job->q_len - 1) / 2 : 0));
    for (int r = 0; r < REPEATS; r++)
        forward_once(context, job, t, indices, rows, &seconds);
    if (!tail_agrees(job, t, indices, rows))
        printf("%-34s WRONG\n", job->name);
    else
        printf("%-34s %7.1f GFLOP/s  %5.1f %% of peak\n", job->name, 4 * pairs * HEADS * DIM / seconds * 1e-9,
               100 * 4 * pairs * HEADS * DIM / seconds / peak / threads);
    for (int i = 0; i < 4; i++)
        free(t[i].data);
    free(indices);
}

int main(int argc, char **argv)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    if (argc > 2) threads = atoi(argv[2]);
    if (argc > 3) part = argv[3];
    desc.backend = CLATTN_BACKEND_REFERENCE;
    check(clattn_context_create(&desc, &reference), "reference");
    desc.backend = CLATTN_BACKEND_CPU;
    desc.variant = argc > 1 ? argv[1] : NULL;
    desc.threads = threads;
    check(clattn_context_create(&desc, &context), "context");
    check(clattn_context_device(context, &info), "device");
    measure_peak(info.variant);
    for (int i = 0; i < LONG / BLOCK; i++)
        scales[i] = 1.0f / 64;
    printf("%s, variant %s, %d threads\n%-34s %7.1f GFLOP/s a core\n", info.name, info.variant, threads,
           "multiply-add peak", peak * 1e-9);

    static const struct job jobs[] = {
        {"shared blocks", CLATTN_FLOAT32, 1024, LONG, 1, false, true},
        {"random blocks, float32", CLATTN_FLOAT32, 1024, LONG, 1, false, false},
        {"random blocks, float16", CLATTN_FLOAT16, 1024, LONG, 1, false, false},
        {"random blocks, bfloat16", CLATTN_BFLOAT16, 1024, LONG, 1, false, false},
        {"random blocks, int8", CLATTN_INT8, 1024, LONG, 1, false, false},
        {"random blocks of 1048576, float32", CLATTN_FLOAT32, 1024, 16 * LONG, 1, false, false},
        {"random blocks of 1048576, float16", CLATTN_FLOAT16, 1024, 16 * LONG, 1, false, false},
        {"random blocks of 1048576, bfloat16", CLATTN_BFLOAT16, 1024, 16 * LONG, 1, false, false},
        {"random blocks, 64 queries a list", CLATTN_FLOAT32, 2048, LONG, 64, false, false},
        {"dense causal, 2048 keys", CLATTN_FLOAT32, 2048, 2048, 0, true, false},
        {"dense causal, 4096 keys", CLATTN_FLOAT32, 4096, 4096, 0, true, false},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++)
        bench_forward(&jobs[i]);
    bench_selection();
    bench_steps();
    bench_pyramid();
    clattn_context_release(context);
    clattn_context_release(reference);
    return 0;
}
