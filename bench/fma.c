/* SPDX-License-Identifier: MIT */
#include "fma.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

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
#endif

typedef float vec4 __attribute__((vector_size(16)));

static float fma_c(int rounds)
{
    vec4 sum[FMA_CHAINS], x = {0.999f, 0.999f, 0.999f, 0.999f};
    for (int c = 0; c < FMA_CHAINS; c++)
        sum[c] = x * (float)c;
    for (int i = 0; i < rounds; i++)
        for (int c = 0; c < FMA_CHAINS; c++)
            sum[c] = sum[c] * x + x;
    float total = 0;
    for (int c = 0; c < FMA_CHAINS; c++)
        total += sum[c][0];
    return total;
}

double fma_run(const char *variant, int rounds, float *sum)
{
    float (*work)(int) = fma_c;
    int width = 4;
#if defined(__x86_64__)
    if (strcmp(variant, "avx512") == 0) work = fma_avx512, width = 16;
    if (strcmp(variant, "avx2") == 0) work = fma_avx2, width = 8;
#endif
    (void)variant; /* other processors have fma_c alone */
    *sum = work(rounds);
    return 2.0 * width * FMA_CHAINS * (double)rounds;
}
