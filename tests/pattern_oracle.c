/* SPDX-License-Identifier: MIT */
#include "pattern_oracle.h"

#include <stdlib.h>
#include <string.h>

/* ---- predicates ---- */

static int64_t distance(const struct oracle_pair *p)
{
    return llabs(p->c - p->b);
}

static bool local(const struct oracle_pair *p, int64_t window)
{
    return distance(p) <= window;
}

static bool log_stride(const struct oracle_pair *p)
{
    int64_t d = distance(p);
    return d > 0 && (d & (d - 1)) == 0;
}

static bool local_0(const struct oracle_pair *p)
{
    return p->c == p->b;
}

static bool local_3(const struct oracle_pair *p)
{
    return local(p, 3);
}

static bool shifted_log_stride(const struct oracle_pair *p)
{
    static const int64_t offsets[] = {0, 1, -3, 2};
    for (int64_t j = 0, d = 1; d <= p->blocks; j++, d *= 2)
        if (d + (j < 4 ? offsets[j] : 0) == distance(p) && distance(p) > 0) return true;
    return false;
}

/* Equal blocks: whole blocks in the distance. Others: walk from the nearest edge of block c, token by token. */
static bool tokens_apart(const struct oracle_pair *p, int64_t d)
{
    if (p->block) return d > 0 && d / p->block == distance(p) && distance(p) > 0;
    int64_t key = p->b < p->c ? p->edges[p->c + 1] - 1 - d : p->edges[p->c] + d;
    return p->b != p->c && d > 0 && key >= p->edges[p->b] && key < p->edges[p->b + 1];
}

static bool token_log_stride(const struct oracle_pair *p)
{
    for (int64_t d = 1; d <= p->keys; d *= 2)
        if (tokens_apart(p, d)) return true;
    return false;
}

static bool shifted_token_log_stride(const struct oracle_pair *p)
{
    static const int64_t offsets[] = {40, 0, 77, 200, -3, -40, -1, 31, 16};
    for (int64_t j = 0, d = 1; d <= p->keys; j++, d *= 2)
        if (tokens_apart(p, d + (j < 9 ? offsets[j] : 0))) return true;
    return false;
}

static bool is_first_middle_last(const struct oracle_pair *p, int64_t b)
{
    return b == 0 || b == p->blocks / 2 || b == p->blocks - 1;
}

static bool anchors(const struct oracle_pair *p)
{
    return is_first_middle_last(p, p->b);
}

static bool anchor_queries(const struct oracle_pair *p)
{
    return local_0(p) || is_first_middle_last(p, p->c);
}

static bool global(const struct oracle_pair *p)
{
    int64_t last_but_one = p->blocks - 2;
    return p->b == 1 || p->b == last_but_one || p->c == 1 || p->c == last_but_one;
}

static bool usual(const struct oracle_pair *p)
{
    return local(p, 1) || log_stride(p) || anchors(p);
}

static bool strided_3(const struct oracle_pair *p)
{
    return distance(p) % 3 == 0;
}

static bool dilated_2_3(const struct oracle_pair *p)
{
    return distance(p) % 3 == 0 && distance(p) <= 6;
}

static bool everything(const struct oracle_pair *p)
{
    (void)p;
    return true;
}

/* ---- random ---- */

static uint64_t split_mix(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = *state;
    z ^= z >> 30;
    z *= 0xbf58476d1ce4e5b9u;
    z ^= z >> 27;
    z *= 0x94d049bb133111ebu;
    z ^= z >> 31;
    return z;
}

static uint64_t split_mix_of(uint64_t value)
{
    return split_mix(&value);
}

void oracle_draws(uint64_t seed, int32_t head, int64_t c, int64_t count, int64_t random, int64_t *draws)
{
    uint64_t state = split_mix_of(split_mix_of(seed) ^ (uint64_t)head) ^ (uint64_t)c;
    for (int64_t i = 0; i < random; i++) {
        uint64_t n = (uint64_t)(count - random + i + 1), two32 = UINT64_C(1) << 32, product;
        do
            product = split_mix(&state) / two32 * n;
        while (product % two32 < two32 % n);
        draws[i] = (int64_t)(product / two32);
        for (int64_t k = 0; k < i; k++)
            if (draws[k] == draws[i]) {
                draws[i] = count - random + i;
                break;
            }
    }
}

/* Is b drawn among the blocks that are not within `window` of c and not below `global_blocks`? */
static bool drawn(const struct oracle_pair *p, int64_t window, int64_t global_blocks, int64_t random,
                  uint64_t seed)
{
    int64_t limit = p->causal ? p->c + 1 : p->blocks, count = 0, draws[16], place = -1;
    for (int64_t b = 0; b < limit; b++) {
        if (b < global_blocks || llabs(p->c - b) <= window) continue;
        if (b == p->b) place = count;
        count++;
    }
    if (place < 0 || random >= count) return place >= 0;
    oracle_draws(seed, p->head, p->c, count, random, draws);
    for (int64_t i = 0; i < random; i++)
        if (draws[i] == place) return true;
    return false;
}

static bool random_3(const struct oracle_pair *p)
{
    return drawn(p, -1, 0, 3, 7);
}

static bool bigbird(const struct oracle_pair *p)
{
    return local(p, 1) || p->b < 2 || p->c < 2 || drawn(p, 1, 2, 3, UINT64_C(18446744073709551615));
}

static bool by_head(const struct oracle_pair *p)
{
    if (p->head == 1 || p->head == 2) return strided_3(p);
    return p->head == 3 ? local(p, 2) || drawn(p, -1, 0, 2, 9) : log_stride(p) || local_0(p);
}

const struct oracle_pattern oracle_patterns[] = {
    {"local:1+log-stride+anchors:first,middle,last", usual, 0},
    {"local:0", local_0, 0},
    {" local : 3 + local:1 ", local_3, 0},
    {"log-stride:blocks", log_stride, 0},
    {"log-stride:0,1,-3,2", shifted_log_stride, 0},
    {"log-stride:tokens", token_log_stride, 0},
    {"log-stride:tokens:40,0,77,200,-3,-40,-1,31,16", shifted_token_log_stride, 0},
    {"anchors:first,middle,last,100000", anchors, 0},
    {"anchor-queries:last,0,middle+local:0", anchor_queries, 0},
    {"global:1,-2", global, 0},
    {"strided:3", strided_3, 0},
    {"dilated:2,3", dilated_2_3, 0},
    {"dense", everything, 0},
    {"random:3,7", random_3, 0},
    {"bigbird:1,2,3,18446744073709551615", bigbird, 0},
    {"log-stride+local:0; 1-2=strided:3 ; 3 = local:2+random:2,9", by_head, 4},
};
const int oracle_pattern_count = sizeof oracle_patterns / sizeof *oracle_patterns;

/* ---- shapes ---- */

clattn_attention_desc oracle_attention(const struct oracle_shape *shape)
{
    clattn_attention_desc desc = CLATTN_ATTENTION_DESC_INIT;
    desc.causal = !shape->all_keys;
    desc.sequences = shape->sequences;
    desc.cu_seqlens_q = shape->cu_q;
    desc.cu_seqlens_k = shape->cu_k;
    desc.seqused_q = shape->used_q;
    desc.seqused_k = shape->used_k;
    return desc;
}

clattn_pattern_shape oracle_pattern_shape(const struct oracle_shape *shape)
{
    clattn_pattern_shape result = CLATTN_PATTERN_SHAPE_INIT;
    result.batch = shape->batch;
    result.q_len = shape->q_len;
    result.kv_len = shape->kv_len;
    result.heads = shape->heads;
    result.block = shape->block;
    result.q_block = shape->q_block;
    result.starts = shape->starts;
    result.start_count = shape->start_count;
    return result;
}

int64_t oracle_sequences(const struct oracle_shape *shape)
{
    return shape->sequences ? shape->sequences : shape->batch;
}

static void cut_keys(const struct oracle_shape *shape, struct oracle_sequence *sequence)
{
    sequence->blocks = 0;
    for (int64_t key = 0; key < sequence->kv_len; key++) {
        bool begins = !shape->starts && key % shape->block == 0;
        for (int64_t n = 0; n < shape->start_count; n++)
            if (shape->starts[n] == sequence->k_row + key) begins = true;
        if (begins) sequence->edges[sequence->blocks++] = key;
    }
    sequence->edges[sequence->blocks] = sequence->kv_len;
}

void oracle_sequence(const struct oracle_shape *shape, int64_t s, struct oracle_sequence *sequence)
{
    int64_t list_row = 0;
    for (int64_t n = 0; n <= s; n++) {
        int64_t rows = shape->q_len;
        sequence->q_row = sequence->k_row = 0;
        sequence->q_len = shape->used_q ? shape->used_q[n] : shape->q_len;
        sequence->kv_len = shape->used_k ? shape->used_k[n] : shape->kv_len;
        if (shape->sequences) {
            sequence->q_row = shape->cu_q[n];
            sequence->k_row = shape->cu_k[n];
            rows = sequence->q_len = shape->cu_q[n + 1] - shape->cu_q[n];
            sequence->kv_len = shape->cu_k[n + 1] - shape->cu_k[n];
        }
        sequence->list_row = list_row;
        sequence->list_rows = (rows + shape->q_block - 1) / shape->q_block;
        list_row += sequence->list_rows;
    }
    cut_keys(shape, sequence);
}

int64_t oracle_block_of(const struct oracle_sequence *sequence, int64_t key)
{
    for (int64_t b = 0; b < sequence->blocks; b++)
        if (key < sequence->edges[b + 1]) return b;
    abort();
}

/* Does some query row that shares a list row with i stand in a block that is connected to b? */
static bool listed(const struct oracle_pattern *pattern, const struct oracle_shape *shape,
                   const struct oracle_sequence *sequence, struct oracle_pair *pair, int64_t i)
{
    int64_t first = i / shape->q_block * shape->q_block, before = -1;
    for (int64_t row = first; row < first + shape->q_block && row < sequence->q_len; row++) {
        int64_t t = row + sequence->kv_len - sequence->q_len;
        if (t < 0 && pair->causal) continue;
        pair->c = oracle_block_of(sequence, t < 0 ? 0 : t);
        if (pair->c == before) continue;
        before = pair->c;
        if ((!pair->causal || pair->b <= pair->c) && pattern->connected(pair)) return true;
    }
    return false;
}

unsigned char *oracle_joined(const struct oracle_pattern *pattern, const struct oracle_shape *shape,
                             const struct oracle_sequence *sequence, int32_t head)
{
    unsigned char *joined = calloc((size_t)(sequence->q_len * sequence->kv_len) + 1, 1);
    if (!joined) abort();
    struct oracle_pair pair = {.blocks = sequence->blocks,
                               .keys = sequence->kv_len,
                               .block = shape->starts ? 0 : shape->block,
                               .head = head,
                               .causal = !shape->all_keys,
                               .edges = sequence->edges};
    for (int64_t i = 0; i < sequence->q_len; i++)
        for (pair.b = 0; pair.b < sequence->blocks; pair.b++) {
            bool same_list = i % shape->q_block != 0; /* the row above has the same list */
            int64_t edge = sequence->edges[pair.b], t = i + sequence->kv_len - sequence->q_len;
            bool is_listed = same_list && (shape->all_keys || edge <= t - 1)
                                 ? joined[(i - 1) * sequence->kv_len + edge]
                                 : listed(pattern, shape, sequence, &pair, i);
            for (int64_t j = edge; j < sequence->edges[pair.b + 1]; j++)
                joined[i * sequence->kv_len + j] = is_listed && (shape->all_keys || j <= t);
        }
    return joined;
}
