/* SPDX-License-Identifier: MIT */
/* The order in which key blocks give to the rows of dq: see backward_turns.h. */

#include "config.h"

#include "backward_turns.h"
#include "key_blocks.h"

#include <string.h>

enum { ITEMS_LEAST = 16 };

bool backward_turns_wanted(const struct backward_job *job, int64_t items)
{
    if (!job->dq || job->dq->dtype != CLATTN_FLOAT32 || items < ITEMS_LEAST) return false;
    return !job->blocks || (!job->blocks->starts && !job->blocks->mask);
}

int64_t backward_turn(const struct backward_job *job, const struct key_tile *tile, int64_t i, int32_t head)
{
    const struct problem *problem = job->problem;
    const clattn_blocks *blocks = job->blocks;
    const struct sequence *sequence = tile->sequence;
    struct key_blocks keys = key_blocks_listed(blocks, sequence);
    int64_t first = key_block_at(&keys, first_visible_key(problem, sequence, i)), turn = 0;
    if (!blocks) return tile->block - first;
    int64_t list_head = (int64_t)head * blocks->heads / problem->q_heads;
    int64_t list = (sequence->list_row + i / blocks->q_block) * blocks->heads + list_head;
    const int32_t *indices = (const int32_t *)blocks->indices.host + list * blocks->topk;
    for (int32_t n = 0; n < blocks->topk && indices[n] != tile->block; n++)
        turn += indices[n] >= first;
    return turn;
}

void backward_clear_row(const struct backward_job *job, const struct sequence *sequence, int64_t i)
{
    const clattn_tensor *dq = job->dq;
    for (int32_t head = 0; head < job->problem->q_heads; head++)
        memset(tensor_row(dq, sequence->batch, sequence->q_row + i, head), 0, (size_t)dq->dim * sizeof(float));
}
