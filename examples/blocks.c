/* SPDX-License-Identifier: MIT */
/* Attention in pieces: a block list of one's own, together with the leaves that a selector chooses.
 *
 * Every 64 queries see the first block of keys and their own; besides, each query sees the 4 leaves that PISA
 * chooses for it. */

#include <clattn.h>
#include <stdio.h>
#include <stdlib.h>

enum { LEN = 1024, Q_HEADS = 4, KV_HEADS = 1, DIM = 64, BLOCK = 64, ROWS = LEN / BLOCK };

static float q_data[LEN * Q_HEADS * DIM], out_data[LEN * Q_HEADS * DIM], lse_data[LEN * Q_HEADS];
static float k_data[LEN * KV_HEADS * DIM], v_data[LEN * KV_HEADS * DIM];

static void fill(float *data, size_t count)
{
    for (size_t i = 0; i < count; i++)
        data[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

/* The caller's own list: 2 blocks for each list row of BLOCK queries, shared by all heads. */
static clattn_status list_own(clattn_context *context, clattn_blocks **own)
{
    int32_t indices[ROWS][1][2];
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    desc.block = desc.q_block = BLOCK;
    desc.rows = ROWS;
    desc.topk = 2;
    for (int32_t row = 0; row < ROWS; row++) {
        indices[row][0][0] = 0;
        indices[row][0][1] = row; /* the first row lists block 0 twice, which does no harm */
    }
    return clattn_blocks_create(context, &desc, &indices[0][0][0], own);
}

/* The selector's list: 4 leaves for each query and key head, none of them forced. */
static clattn_status list_chosen(clattn_context *context, const clattn_tensor *q, const clattn_tensor *k,
                                 clattn_blocks **chosen)
{
    clattn_pyramid *pyramid = NULL;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    select.topk = 4;
    select.leaf = BLOCK;
    select.forced_first = select.forced_last = 0;
    clattn_status status = clattn_pyramid_build(context, NULL, BLOCK, k, &pyramid, NULL);
    if (status == CLATTN_SUCCESS) status = clattn_select(context, NULL, &select, q, k, pyramid, chosen, NULL);
    clattn_pyramid_release(context, pyramid);
    return status;
}

static clattn_status attend(clattn_context *context)
{
    clattn_tensor q = clattn_tensor_bthd(q_data, CLATTN_FLOAT32, 1, LEN, Q_HEADS, DIM);
    clattn_tensor k = clattn_tensor_bthd(k_data, CLATTN_FLOAT32, 1, LEN, KV_HEADS, DIM);
    clattn_tensor v = clattn_tensor_bthd(v_data, CLATTN_FLOAT32, 1, LEN, KV_HEADS, DIM);
    clattn_tensor out = clattn_tensor_bthd(out_data, CLATTN_FLOAT32, 1, LEN, Q_HEADS, DIM);
    clattn_tensor lse = clattn_tensor_bthd(lse_data, CLATTN_FLOAT32, 1, LEN, Q_HEADS, 1);
    clattn_blocks *own = NULL, *chosen = NULL, *both = NULL;

    clattn_status status = list_own(context, &own);
    if (status == CLATTN_SUCCESS) status = list_chosen(context, &q, &k, &chosen);
    if (status == CLATTN_SUCCESS) status = clattn_blocks_union(context, NULL, 1, LEN, own, chosen, &both);
    if (status == CLATTN_SUCCESS)
        status = clattn_attention_forward(context, NULL, &q, &k, &v, both, &out, &lse, NULL);
    clattn_blocks_release(context, own);
    clattn_blocks_release(context, chosen);
    clattn_blocks_release(context, both);
    return status;
}

int main(void)
{
    char detail[512] = "";
    clattn_context *context = NULL;
    clattn_status status = clattn_context_create(NULL, &context);

    fill(q_data, sizeof q_data / sizeof *q_data);
    fill(k_data, sizeof k_data / sizeof *k_data);
    fill(v_data, sizeof v_data / sizeof *v_data);
    if (status == CLATTN_SUCCESS) status = attend(context);
    if (status != CLATTN_SUCCESS) {
        clattn_context_error(context, detail, sizeof detail);
        fprintf(stderr, "%s: %s\n", clattn_strerror(status), detail);
    } else {
        printf("the last query: out begins with %g, lse is %g\n", out_data[(LEN - 1) * Q_HEADS * DIM],
               lse_data[(LEN - 1) * Q_HEADS]);
    }
    clattn_context_release(context);
    return status != CLATTN_SUCCESS;
}
