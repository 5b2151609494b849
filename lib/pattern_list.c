/* SPDX-License-Identifier: MIT */
/* The list of one list row: the union of P(c) over the key blocks c that its query rows stand in.
 *
 * Blocks are collected as bits and read back in ascending order, so that parts may name them in any order and
 * twice. */

#include "pattern.h"

#include <stdlib.h>
#include <string.h>

/* Where the parts of one key block c write: blocks 0 .. limit - 1 of `keys` exist for it. */
struct target {
    uint64_t *bits, *taken; /* taken: draws of one part, all zero between parts */
    const struct key_blocks *keys;
    int64_t c, limit;
    int32_t head;
};

static void connect(const struct target *target, int64_t b)
{
    if (b >= 0 && b < target->limit) target->bits[b / 64] |= UINT64_C(1) << b % 64;
}

static void connect_range(const struct target *target, int64_t first, int64_t end)
{
    end = MIN(end, target->limit);
    for (int64_t b = MAX(first, 0); b < end; b++)
        connect(target, b);
}

static void connect_local(const struct target *target, const struct pattern_part *part)
{
    int64_t reach = MIN(part->window, target->keys->count / part->stride) * part->stride;
    for (int64_t b = target->c - reach; b <= target->c + reach && b < target->limit; b += part->stride)
        connect(target, b);
}

static void connect_strided(const struct target *target, const struct pattern_part *part)
{
    for (int64_t b = target->c % part->stride; b < target->limit; b += part->stride)
        connect(target, b);
}

/* ---- log stride ---- */

/* Distances in tokens where blocks differ in size: 2^j + offset before the last token of c and after the first.
 */
static void connect_tokens(const struct target *target, int64_t distance)
{
    const struct key_blocks *keys = target->keys;
    int64_t before = key_block_end(keys, target->c) - 1 - distance;
    int64_t after = key_block_first(keys, target->c) + distance;
    if (distance < 1) return;
    if (before >= 0 && before < key_block_first(keys, target->c)) connect(target, key_block_at(keys, before));
    if (after < keys->kv_len && after >= key_block_end(keys, target->c))
        connect(target, key_block_at(keys, after));
}

static void connect_log_stride(const struct target *target, const struct pattern_part *part)
{
    int64_t length = part->tokens ? target->keys->kv_len : target->keys->count;
    const int32_t *offsets = part->values;
    if (part->heads > 1) offsets += (int64_t)target->head * part->levels;
    for (int j = 0; INT64_C(1) << j <= length; j++) {
        int64_t distance = (INT64_C(1) << j) + (j < part->levels ? offsets[j] : 0);
        if (part->tokens && target->keys->starts) {
            connect_tokens(target, distance);
            continue;
        }
        if (part->tokens) distance /= target->keys->block; /* negative ones stay below 1 */
        if (distance < 1) continue;
        connect(target, target->c - distance);
        connect(target, target->c + distance);
    }
}

/* ---- anchors ---- */

static int64_t anchor_block(int32_t anchor, int64_t count)
{
    if (anchor == CLATTN_ANCHOR_MIDDLE) return count / 2;
    return anchor < 0 ? count + anchor : anchor;
}

static void connect_anchors(const struct target *target, const struct pattern_part *part)
{
    for (int32_t i = 0; i < part->value_count; i++) {
        int64_t b = anchor_block(part->values[i], target->keys->count);
        if (part->as_keys) connect(target, b);
        if (part->as_queries && b == target->c) connect_range(target, 0, target->limit);
    }
}

/* ---- random ---- */

static uint64_t next_random(uint64_t *x)
{
    uint64_t z = *x += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static uint64_t hash_random(uint64_t x)
{
    return next_random(&x);
}

/* Uniform in 0 .. n - 1, 1 <= n < 2^32. */
static uint32_t below(uint64_t *x, uint32_t n)
{
    uint32_t threshold = (uint32_t)-n % n; /* 2^32 mod n */
    uint64_t product;
    do {
        product = (next_random(x) >> 32) * n;
    } while ((uint32_t)product < threshold);
    return (uint32_t)(product >> 32);
}

/* Blocks that may be drawn, in order: those before the window and those behind it, without the first `global`
 * ones. */
struct drawable {
    int64_t first, before; /* first block, number of blocks ahead of the window */
    int64_t behind, count; /* first block behind the window, number of all */
};

static struct drawable drawable_of(const struct target *target, const struct pattern_part *part)
{
    struct drawable d = {.first = MIN(part->global, target->limit)};
    int64_t window = target->c - part->window, window_end = target->c + part->window + 1;
    if (part->window < 0) window = window_end = target->limit;
    d.before = MAX(MIN(window, target->limit) - d.first, 0);
    d.behind = MAX(window_end, d.first);
    d.count = d.before + MAX(target->limit - d.behind, 0);
    return d;
}

static int64_t drawn_block(const struct drawable *d, int64_t k)
{
    return k < d->before ? d->first + k : d->behind + k - d->before;
}

/* The draws must not depend on what other parts have connected, so the taken ones have bits of their own. */
static void connect_random(const struct target *target, const struct pattern_part *part)
{
    struct drawable drawable = drawable_of(target, part);
    if (part->random >= drawable.count) {
        connect_range(target, drawable.first, drawable.first + drawable.before);
        connect_range(target, drawable.behind, target->limit);
        return;
    }
    uint64_t x = hash_random(hash_random(part->seed) ^ (uint64_t)target->head) ^ (uint64_t)target->c;
    for (int64_t j = drawable.count - part->random; j < drawable.count; j++) {
        int64_t draw = below(&x, (uint32_t)(j + 1));
        if (target->taken[draw / 64] >> draw % 64 & 1) draw = j;
        target->taken[draw / 64] |= UINT64_C(1) << draw % 64;
        connect(target, drawn_block(&drawable, draw));
    }
    memset(target->taken, 0, (size_t)ceil_div(drawable.count, 64) * sizeof *target->taken);
}

/* ---- one list ---- */

static void connect_parts(const struct pattern_parts *parts, const struct target *target)
{
    for (int32_t i = 0; i < parts->count; i++) {
        const struct pattern_part *part = &parts->list[i];
        switch (part->kind) {
        case PATTERN_LOCAL:
            connect_local(target, part);
            break;
        case PATTERN_LOG_STRIDE:
            connect_log_stride(target, part);
            break;
        case PATTERN_ANCHORS:
            connect_anchors(target, part);
            break;
        case PATTERN_STRIDED:
            connect_strided(target, part);
            break;
        case PATTERN_RANDOM:
            connect_random(target, part);
        }
    }
}

/* Moves the bits below `limit` into the list and clears them. */
static bool collect(struct pattern_lister *lister, int64_t limit)
{
    lister->count = 0;
    for (int64_t word = 0; word < ceil_div(limit, 64); word++) {
        uint64_t bits = lister->bits[word];
        if (!bits) continue;
        if (lister->count + 64 > lister->capacity) {
            int64_t capacity = lister->capacity * 2 + 64;
            int32_t *list = realloc(lister->list, (size_t)capacity * sizeof *list);
            if (!list) return false;
            lister->list = list;
            lister->capacity = capacity;
        }
        for (; bits; bits &= bits - 1)
            lister->list[lister->count++] = (int32_t)(word * 64 + __builtin_ctzll(bits));
        lister->bits[word] = 0;
    }
    return true;
}

static bool same_keys(const struct key_blocks *a, const struct key_blocks *b)
{
    return a->block == b->block && a->starts == b->starts && a->count == b->count && a->kv_len == b->kv_len;
}

bool pattern_list(struct pattern_lister *lister, const struct key_blocks *keys, const struct pattern_row *row,
                  int32_t head)
{
    if (lister->made && lister->first == row->first && lister->last == row->last && lister->head == head &&
        same_keys(&lister->keys, keys))
        return true;
    const struct pattern_parts *parts = pattern_of_head(lister->pattern, head);
    for (int64_t c = row->first; c <= row->last; c++) {
        struct target target = {lister->bits, lister->taken, keys, c, lister->causal ? c + 1 : keys->count,
                                head};
        connect_parts(parts, &target);
    }
    if (!collect(lister, row->last < row->first ? 0 : lister->causal ? row->last + 1 : keys->count))
        return false;
    lister->keys = *keys;
    lister->first = row->first;
    lister->last = row->last;
    lister->head = head;
    lister->made = true;
    return true;
}

clattn_status pattern_lister_init(const clattn_pattern *pattern, const struct pattern_problem *problem,
                                  struct pattern_lister *lister)
{
    *lister = (struct pattern_lister){.pattern = pattern, .causal = problem->causal};
    size_t words = (size_t)problem->key_blocks / 64 + 1;
    lister->bits = calloc(2 * words, sizeof *lister->bits);
    lister->taken = lister->bits ? lister->bits + words : NULL;
    if (lister->bits) return CLATTN_SUCCESS;
    return pattern_fail(pattern, CLATTN_OUT_OF_MEMORY, "no memory for %lld key blocks",
                        (long long)problem->key_blocks);
}

void pattern_lister_release(struct pattern_lister *lister)
{
    free(lister->bits);
    free(lister->list);
    *lister = (struct pattern_lister){0};
}
