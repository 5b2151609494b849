/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "inputs.h"

#include "sixteen.h"

#include <stdlib.h>

uint64_t inputs_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

float inputs_normal(uint64_t *state)
{
    uint64_t bits = inputs_random(state);
    double sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (double)((bits >> (16 * i)) & 0xffff) / 65536 - 0.5;
    return (float)(sum * 1.7320508075688772);
}

void *inputs_encode(float *values, size_t count, clattn_dtype dtype)
{
    size_t size = dtype == CLATTN_FLOAT32 ? 4 : 2;
    void *data = aligned_alloc(64, (count * size + 63) / 64 * 64);
    if (!data) return NULL;
    for (size_t i = 0; i < count; i++)
        if (dtype == CLATTN_FLOAT32)
            ((float *)data)[i] = values[i];
        else if (dtype == CLATTN_FLOAT16)
            values[i] = half_to_float(((uint16_t *)data)[i] = float_to_half(values[i]));
        else
            values[i] = bfloat16_to_float(((uint16_t *)data)[i] = float_to_bfloat16(values[i]));
    return data;
}
