/* SPDX-License-Identifier: MIT */
/* Speed of selection and of the key pyramid: see bench_cpu.c. */

#include "bench_cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void bench_select(const char *name, clattn_selector selector, int dim, int64_t kv_len)
{
    if (!strstr(name, part)) return;
    int64_t queries = 2048 * threads; /* so that every thread has whole batches */
    clattn_tensor q = tensor(CLATTN_FLOAT32, queries, HEADS, dim, true),
                  k = tensor(CLATTN_FLOAT32, kv_len, 1, dim, true);
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_pyramid *pyramid = NULL;
    clattn_blocks *blocks = NULL;
    double seconds = 1e9;
    select.selector = selector;
    check(clattn_pyramid_build(context, NULL, BLOCK, &k, &pyramid, NULL), "pyramid");
    for (int r = 0; r < REPEATS; r++) {
        double start = now();
        check(clattn_select(context, NULL, &select, &q, &k, pyramid, &blocks, NULL), "select");
        if (now() - start < seconds) seconds = now() - start;
    }
    printf("%-34s %7.2f us a query\n", name, seconds * 1e6 / (double)queries);
    clattn_blocks_release(context, blocks);
    clattn_pyramid_release(context, pyramid);
    free(q.data);
    free(k.data);
}

/* Robust selection against flat exact scoring of the same queries, in turns: others disturb both alike. */
static void bench_robust(const char *name, int32_t beam, int dim, int64_t kv_len)
{
    if (!strstr(name, part)) return;
    int64_t queries = 64;
    clattn_tensor q = tensor(CLATTN_FLOAT32, queries, HEADS, dim, true),
                  k = tensor(CLATTN_FLOAT32, kv_len, 1, dim, true);
    clattn_select_desc select[2] = {CLATTN_SELECT_DESC_INIT, CLATTN_SELECT_DESC_INIT};
    clattn_pyramid *pyramid = NULL;
    clattn_blocks *blocks[2] = {NULL, NULL};
    double seconds[2] = {1e9, 1e9};
    select[0].selector = CLATTN_SELECT_ROBUST;
    select[0].beam = beam;
    select[1].selector = CLATTN_SELECT_FLAT_LSE;
    check(clattn_pyramid_build_for(context, NULL, &select[0], &k, &pyramid, NULL), "pyramid");
    for (int r = 0; r < REPEATS; r++)
        for (int n = 0; n < 2; n++) {
            double start = now();
            check(clattn_select(context, NULL, &select[n], &q, &k, n ? NULL : pyramid, &blocks[n], NULL),
                  "select");
            if (now() - start < seconds[n]) seconds[n] = now() - start;
        }
    printf("%-34s %7.2f us a query, flat exact %.2f: 1/%.1f\n", name, seconds[0] * 1e6 / (double)queries,
           seconds[1] * 1e6 / (double)queries, seconds[1] / seconds[0]);
    for (int n = 0; n < 2; n++)
        clattn_blocks_release(context, blocks[n]);
    clattn_pyramid_release(context, pyramid);
    free(q.data);
    free(k.data);
}

/* The pyramid against flat exact scoring where it has little to save, in turns. With at most 2K leaves both do
 * the same: SPEC.md, section 3. */
static void bench_short(int64_t kv_len)
{
    char name[64];
    snprintf(name, sizeof name, "select PISA, %lld keys, over flat", (long long)kv_len);
    if (!strstr(name, part)) return;
    clattn_tensor q = tensor(CLATTN_FLOAT32, kv_len < 1024 ? kv_len : 1024, HEADS, DIM, true),
                  k = tensor(CLATTN_FLOAT32, kv_len, 1, DIM, true);
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_pyramid *pyramid = NULL;
    clattn_blocks *blocks = NULL;
    double seconds[2] = {1e9, 1e9};
    check(clattn_pyramid_build(context, NULL, BLOCK, &k, &pyramid, NULL), "pyramid");
    for (int r = 0; r < 2 * REPEATS; r++) {
        select.selector = r % 2 ? CLATTN_SELECT_FLAT_LSE : CLATTN_SELECT_PISA;
        double start = now();
        check(clattn_select(context, NULL, &select, &q, &k, r % 2 ? NULL : pyramid, &blocks, NULL), "select");
        if (now() - start < seconds[r % 2]) seconds[r % 2] = now() - start;
        clattn_blocks_release(context, blocks);
        blocks = NULL;
    }
    printf("%-34s %7.2f us a query, flat exact %.2f: %.2f\n", name, seconds[0] * 1e6 / (double)q.len,
           seconds[1] * 1e6 / (double)q.len, seconds[0] / seconds[1]);
    clattn_pyramid_release(context, pyramid);
    free(q.data);
    free(k.data);
}

void bench_selection(void)
{
    bench_select("select PISA, dim 128, 65536 keys", CLATTN_SELECT_PISA, 128, LONG);
    bench_select("select PISA, dim 128, 262144 keys", CLATTN_SELECT_PISA, 128, LONG * 4);
    bench_select("select PISA, dim 64, 65536 keys", CLATTN_SELECT_PISA, 64, LONG);
    bench_select("select PISA, dim 64, 262144 keys", CLATTN_SELECT_PISA, 64, LONG * 4);
    bench_select("select flat mean, dim 64, 65536 keys", CLATTN_SELECT_FLAT_MEAN, 64, LONG);
    bench_robust("select robust, beam 32, 16384 keys", 32, 64, LONG / 4);
    bench_robust("select robust, beam 16, 65536 keys", 16, 64, LONG);
    bench_robust("select robust, beam 32, 65536 keys", 32, 64, LONG);
    bench_robust("select robust, beam 64, 65536 keys", 64, 64, LONG);
    bench_robust("select robust, beam 32, 262144 keys", 32, 64, LONG * 4);
    bench_robust("select robust, beam 64, 262144 keys", 64, 64, LONG * 4);
    for (int64_t kv_len = 1024; kv_len <= 16384; kv_len *= 2)
        bench_short(kv_len);
}

void bench_pyramid(void)
{
    if (!strstr("pyramid", part)) return;
    clattn_tensor k = tensor(CLATTN_FLOAT32, LONG * 4, 1, DIM, true);
    clattn_pyramid *pyramid = NULL;
    double build = 1e9, bytes = (double)LONG * 4 * DIM * 4, read = read_seconds(k.data, (int64_t)bytes);
    for (int r = 0; r < REPEATS; r++) {
        double start = now();
        check(clattn_pyramid_build(context, NULL, BLOCK, &k, &pyramid, NULL), "pyramid");
        if (now() - start < build) build = now() - start;
    }
    double again = read_seconds(k.data, (int64_t)bytes);
    read = again < read ? again : read;
    printf("%-34s %7.1f GB/s, %.2f times a plain read (%.1f GB/s)\n", "pyramid, 262144 keys",
           bytes / build * 1e-9, build / read, bytes / read * 1e-9);
    clattn_pyramid_release(context, pyramid);
    free(k.data);
}
