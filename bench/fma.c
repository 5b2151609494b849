/* SPDX-License-Identifier: MIT */
#include "fma.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Lines that are asked for ahead of the one that is read. */
#define AHEAD 4096

#define FMA_CHAINS 12 /* more than latency x units */

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static float fma_avx512(int rounds)
{
    __m512 sum[FMA_CHAINS], x = _mm512_set1_ps(0.999f);
    for (int c = 0; c < FMA_CHAINS; c++)
        sum[c] = _mm512_set1_ps((float)c);
    for (int i = 0; i < rounds; i++)
        for (int c = 0; c < FMA_CHAINS; c++)
            sum[c] = _mm512_fmadd_ps(sum[c], x, x);
    float total = 0;
    for (int c = 0; c < FMA_CHAINS; c++)
        total += _mm512_reduce_add_ps(sum[c]);
    return total;
}

__attribute__((target("avx2,fma"))) static float fma_avx2(int rounds)
{
    __m256 sum[FMA_CHAINS], x = _mm256_set1_ps(0.999f);
    for (int c = 0; c < FMA_CHAINS; c++)
        sum[c] = _mm256_set1_ps((float)c);
    for (int i = 0; i < rounds; i++)
        for (int c = 0; c < FMA_CHAINS; c++)
            sum[c] = _mm256_fmadd_ps(sum[c], x, x);
    float total = 0;
    for (int c = 0; c < FMA_CHAINS; c++)
        total += _mm256_cvtss_f32(sum[c]);
    return total;
}

__attribute__((target("avx512f"))) static float read_avx512(const float *data, int64_t count)
{
    __m512 sum[8] = {_mm512_setzero_ps()};
    for (int c = 1; c < 8; c++)
        sum[c] = sum[0];
    for (int64_t i = 0; i + 128 <= count; i += 128) {
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++) {
            _mm_prefetch((const char *)(data + i + 16 * c) + AHEAD, _MM_HINT_T0);
            sum[c] = _mm512_add_ps(sum[c], _mm512_loadu_ps(data + i + 16 * c));
        }
    }
    for (int c = 1; c < 8; c++)
        sum[0] = _mm512_add_ps(sum[0], sum[c]);
    return _mm512_reduce_add_ps(sum[0]);
}
#endif

typedef float vec4 __attribute__((vector_size(16)));

#if defined(__aarch64__)
#define VEC4_CHAINS 24 /* four units and 32 registers */
#else
#define VEC4_CHAINS FMA_CHAINS
#endif

static float fma_c(int rounds)
{
    vec4 sum[VEC4_CHAINS], x = {0.999f, 0.999f, 0.999f, 0.999f};
    for (int c = 0; c < VEC4_CHAINS; c++)
        sum[c] = x * (float)c;
    for (int i = 0; i < rounds; i++)
        for (int c = 0; c < VEC4_CHAINS; c++)
            sum[c] = sum[c] * x + x;
    float total = 0;
    for (int c = 0; c < VEC4_CHAINS; c++)
        total += sum[c][0];
    return total;
}

static float read_c(const float *data, int64_t count)
{
    vec4 sum[8] = {{0}}, next;
    float total = 0;
    for (int64_t i = 0; i + 32 <= count; i += 32)
        for (int c = 0; c < 8; c++) {
            if (c % 4 == 0) __builtin_prefetch((const char *)(data + i + 4 * c) + AHEAD);
            memcpy(&next, data + i + 4 * c, sizeof next);
            sum[c] += next;
        }
    for (int c = 0; c < 8; c++)
        total += sum[c][0] + sum[c][1] + sum[c][2] + sum[c][3];
    return total;
}

float read_run(const char *variant, const float *data, int64_t count)
{
#if defined(__x86_64__)
    if (strncmp(variant, "avx512", 6) == 0) return read_avx512(data, count);
#endif
    (void)variant;
    return read_c(data, count);
}

double fma_run(const char *variant, int rounds, float *sum)
{
    float (*work)(int) = fma_c;
    int width = 4, chains = VEC4_CHAINS;
#if defined(__x86_64__)
    if (strncmp(variant, "avx512", 6) == 0) work = fma_avx512, width = 16, chains = FMA_CHAINS;
    if (strcmp(variant, "avx2") == 0) work = fma_avx2, width = 8, chains = FMA_CHAINS;
#endif
    (void)variant; /* other processors have fma_c alone */
    *sum = work(rounds);
    return 2.0 * width * chains * (double)rounds;
}
