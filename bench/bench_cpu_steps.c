/* SPDX-License-Identifier: MIT */
/* Speed of the backward pass, and of a dense decode step against the bandwidth of the memory: see bench_cpu.c.
 */

#include "bench_cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- backward ---- */

struct job {
    const char *name;
    int64_t q_len, kv_len;
    int q_block; /* 0: dense, causal */
    bool shared; /* the same list for all rows */
};

enum { Q, K, V, OUT, LSE, DOUT, DQ, DK, DV, TENSORS };

static void attend(clattn_context *where, const struct job *job, clattn_tensor *t, const clattn_blocks *blocks,
                   double *seconds)
{
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    attention.causal = !job->q_block;
    gradients.dout = &t[DOUT];
    gradients.dq = &t[DQ];
    gradients.dk = &t[DK];
    gradients.dv = &t[DV];
    if (!seconds)
        check(clattn_attention_forward(where, &attention, &t[Q], &t[K], &t[V], blocks, &t[OUT], &t[LSE], NULL),
              "forward");
    double start = now();
    check(clattn_attention_backward(where, &attention, &t[Q], &t[K], &t[V], blocks, &t[OUT], &t[LSE],
                                    &gradients, NULL),
          "backward");
    if (seconds && now() - start < *seconds) *seconds = now() - start;
}

static clattn_blocks *lists(clattn_context *where, const struct job *job, const int32_t *indices, int64_t rows)
{
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_blocks *blocks = NULL;
    desc.q_block = job->q_block;
    desc.rows = rows;
    desc.topk = TOPK;
    if (job->q_block) check(clattn_blocks_create(where, &desc, indices, &blocks), "blocks");
    return blocks;
}

/* The gradient of the last rows' queries, which depends on no other rows. */
static bool queries_agree(const struct job *job, clattn_tensor *t, const int32_t *indices, int64_t rows)
{
    int64_t few = job->q_block ? job->q_block : 2;
    clattn_tensor part_of[TENSORS], got = tail(&t[DQ], few);
    for (int n = 0; n < TENSORS; n++)
        part_of[n] = n == K || n == V || n == DK || n == DV ? t[n] : tail(&t[n], few);
    part_of[DQ] = tensor(CLATTN_FLOAT32, few, HEADS, DIM, false);
    part_of[DK] = tensor(CLATTN_FLOAT32, job->kv_len, 1, DIM, false);
    part_of[DV] = tensor(CLATTN_FLOAT32, job->kv_len, 1, DIM, false);
    clattn_blocks *blocks = lists(reference, job, indices + (rows - 1) * TOPK, 1);
    attend(reference, job, part_of, blocks, NULL);
    bool agrees = true;
    for (int64_t i = 0; i < few * HEADS * DIM; i++)
        if (!(fabs((double)((float *)part_of[DQ].data)[i] - (double)((float *)got.data)[got.offset + i]) <
              1e-5))
            agrees = false;
    clattn_blocks_release(reference, blocks);
    for (int n = DQ; n <= DV; n++)
        free(part_of[n].data);
    return agrees;
}

static void bench_backward(const struct job *job)
{
    if (!strstr(job->name, part)) return;
    int64_t rows = job->q_block ? job->q_len / job->q_block : 1, blocks_all = job->kv_len / BLOCK;
    clattn_tensor t[TENSORS];
    int32_t *indices = malloc((size_t)(rows * TOPK) * sizeof *indices);
    double seconds = 1e9, pairs = (double)job->q_len * TOPK * BLOCK;
    for (int n = 0; n < TENSORS; n++) {
        bool of_keys = n == K || n == V || n == DK || n == DV;
        t[n] = tensor(CLATTN_FLOAT32, of_keys ? job->kv_len : job->q_len, of_keys ? 1 : HEADS,
                      n == LSE ? 1 : DIM, n <= V || n == DOUT);
    }
    for (int64_t n = 0; n < rows * TOPK; n++)
        indices[n] = (int32_t)(n % TOPK * (blocks_all / TOPK) +
                               (job->shared ? 0 : (int64_t)(random_bits() % (uint64_t)(blocks_all / TOPK))));
    if (!job->q_block) pairs = (double)job->q_len * ((double)job->kv_len - (double)(job->q_len - 1) / 2);
    clattn_blocks *blocks = lists(context, job, indices, rows);
    attend(context, job, t, blocks, NULL);
    for (int r = 0; r < REPEATS; r++)
        attend(context, job, t, blocks, &seconds);
    double flops = 5 * 2 * pairs * HEADS * DIM; /* q.k, dout.v, dq, dk and dv */
    if (!queries_agree(job, t, indices, rows))
        printf("%-34s WRONG\n", job->name);
    else
        printf("%-34s %7.1f GFLOP/s  %5.1f %% of peak\n", job->name, flops / seconds * 1e-9,
               100 * flops / seconds / peak / threads);
    clattn_blocks_release(context, blocks);
    for (int n = 0; n < TENSORS; n++)
        free(t[n].data);
    free(indices);
}

/* ---- decode ---- */

/* One query over all keys reads each key and value once. */
static void bench_decode(const char *name, clattn_dtype dtype, int64_t kv_len, int64_t heads)
{
    if (!strstr(name, part)) return;
    clattn_tensor q = tensor(dtype, 1, heads, DIM, true), k = tensor(dtype, kv_len, 1, DIM, true),
                  v = tensor(dtype, kv_len, 1, DIM, true), out = tensor(CLATTN_FLOAT32, 1, heads, DIM, false),
                  expected = tensor(CLATTN_FLOAT32, 1, heads, DIM, false);
    int64_t bytes = kv_len * DIM * (dtype == CLATTN_FLOAT32 ? 4 : 2);
    double seconds = 1e9, read = 1e9;
    bool agrees = true;
    for (int r = 0; r < 2; r++) {
        double taken = read_seconds(k.data, bytes) + read_seconds(v.data, bytes);
        if (taken < read) read = taken;
        for (int n = 0; n < REPEATS; n++) {
            double start = now();
            check(clattn_attention_forward(context, NULL, &q, &k, &v, NULL, &out, NULL, NULL), "decode");
            if (now() - start < seconds) seconds = now() - start;
        }
    }
    check(clattn_attention_forward(reference, NULL, &q, &k, &v, NULL, &expected, NULL, NULL), "reference");
    for (int64_t i = 0; i < heads * DIM; i++)
        if (!(fabs((double)((float *)expected.data)[i] - (double)((float *)out.data)[i]) < 1e-5))
            agrees = false;
    bandwidth = 2 * (double)bytes / read;
    if (!agrees)
        printf("%-34s WRONG\n", name);
    else
        printf("%-34s %7.1f GB/s, %.1f %% of a plain read (%.1f GB/s), %.1f %% of peak\n", name,
               2 * (double)bytes / seconds * 1e-9, 100 * read / seconds, bandwidth * 1e-9,
               100 * 4 * (double)(kv_len * heads * DIM) / seconds / peak / threads);
    clattn_tensor all[] = {q, k, v, out, expected};
    for (int n = 0; n < 5; n++)
        free(all[n].data);
}

void bench_steps(void)
{
    static const struct job jobs[] = {
        {"backward, random blocks", 1024, LONG, 1, false},
        {"backward, shared blocks", 1024, LONG, 1, true},
        {"backward, 64 queries a list", 2048, LONG, 64, false},
        {"backward, dense causal, 2048 keys", 2048, 2048, 0, false},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++)
        bench_backward(&jobs[i]);
    bench_decode("decode dense, float32, 16 heads", CLATTN_FLOAT32, 8 * LONG, HEADS);
    bench_decode("decode dense, float16, 16 heads", CLATTN_FLOAT16, 8 * LONG, HEADS);
    bench_decode("decode dense, float32, 4 heads", CLATTN_FLOAT32, 8 * LONG, 4);
    bench_decode("decode dense, float16, 4 heads", CLATTN_FLOAT16, 8 * LONG, 4);
    bench_decode("decode dense, float32, 1 head", CLATTN_FLOAT32, 8 * LONG, 1);
    bench_decode("decode dense, float16, 1 head", CLATTN_FLOAT16, 8 * LONG, 1);
}
