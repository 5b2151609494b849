/* SPDX-License-Identifier: MIT */
/* Attention by the simple call: causal, over the 8 leaves of 64 keys that PISA chooses for each query. */

#include <clattn.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 1, LEN = 1024, Q_HEADS = 4, KV_HEADS = 1, DIM = 64 };

static float q_data[BATCH * LEN * Q_HEADS * DIM], out_data[BATCH * LEN * Q_HEADS * DIM];
static float k_data[BATCH * LEN * KV_HEADS * DIM], v_data[BATCH * LEN * KV_HEADS * DIM];

static void fill(float *data, size_t count)
{
    for (size_t i = 0; i < count; i++)
        data[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

int main(void)
{
    char detail[512] = "";
    clattn_context *context = NULL;
    clattn_status status = clattn_context_create(NULL, &context); /* the best backend of this machine */

    fill(q_data, sizeof q_data / sizeof *q_data);
    fill(k_data, sizeof k_data / sizeof *k_data);
    fill(v_data, sizeof v_data / sizeof *v_data);
    clattn_tensor q = clattn_tensor_bthd(q_data, CLATTN_FLOAT32, BATCH, LEN, Q_HEADS, DIM);
    clattn_tensor k = clattn_tensor_bthd(k_data, CLATTN_FLOAT32, BATCH, LEN, KV_HEADS, DIM);
    clattn_tensor v = clattn_tensor_bthd(v_data, CLATTN_FLOAT32, BATCH, LEN, KV_HEADS, DIM);
    clattn_tensor out = clattn_tensor_bthd(out_data, CLATTN_FLOAT32, BATCH, LEN, Q_HEADS, DIM);

    if (status == CLATTN_SUCCESS) status = clattn_attention(context, NULL, NULL, &q, &k, &v, &out, NULL, NULL);
    if (status != CLATTN_SUCCESS) {
        clattn_context_error(context, detail, sizeof detail);
        fprintf(stderr, "%s: %s\n", clattn_strerror(status), detail);
    } else {
        printf("the last query's first numbers: %g %g %g\n", out_data[(LEN - 1) * Q_HEADS * DIM],
               out_data[(LEN - 1) * Q_HEADS * DIM + 1], out_data[(LEN - 1) * Q_HEADS * DIM + 2]);
    }
    clattn_context_release(context);
    return status != CLATTN_SUCCESS;
}
