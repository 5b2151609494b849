/* SPDX-License-Identifier: MIT */
/* Causal attention over the 8 blocks of 64 keys that PISA chooses for each query. */
#include <clattn.h>
#include <stdio.h>
#include <stdlib.h>

enum { LEN = 1024, HEADS = 4, DIM = 64, COUNT = LEN * HEADS * DIM };
static float data[4][COUNT]; /* queries, keys, values and the result, each [1][LEN][HEADS][DIM] */

int main(void)
{
    clattn_tensor t[4];
    clattn_context *context = NULL;
    clattn_status status = clattn_context_create(NULL, &context); /* the best device of this machine */
    for (int n = 0; n < 4; n++) {
        for (int i = 0; i < COUNT; i++)
            data[n][i] = (float)rand() / (float)RAND_MAX - 0.5f;
        t[n] = clattn_tensor_bthd(data[n], CLATTN_FLOAT32, 1, LEN, HEADS, DIM);
    }
    if (!status) status = clattn_attention(context, NULL, NULL, &t[0], &t[1], &t[2], &t[3], NULL, NULL);
    printf("%s; the last number is %g\n", clattn_strerror(status), (double)data[3][COUNT - 1]);
    clattn_context_release(context);
    return status != CLATTN_SUCCESS;
}
