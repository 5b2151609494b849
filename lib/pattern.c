/* SPDX-License-Identifier: MIT */
/* Static patterns as objects: their parts, patterns of single heads, the last error. */

#include "pattern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- parts ---- */

static void parts_release(struct pattern_parts *parts)
{
    for (int32_t i = 0; i < parts->count; i++)
        free(parts->list[i].values);
    free(parts->list);
    *parts = (struct pattern_parts){0};
}

/* Appends a copy of `count` parts; false leaves everything as it was. */
static bool parts_append(struct pattern_parts *parts, const struct pattern_part *more, int32_t count)
{
    if (count == 0) return true;
    if (count > 1000000 - parts->count) return false;
    size_t bytes = (size_t)(parts->count + count) * sizeof *parts->list;
    struct pattern_part *list = realloc(parts->list, bytes);
    if (!list) return false;
    parts->list = list;
    for (int32_t i = 0; i < count; i++) {
        struct pattern_part *part = &list[parts->count + i];
        *part = more[i];
        size_t value_bytes = (size_t)part->value_count * sizeof *part->values;
        part->values = value_bytes ? malloc(value_bytes) : NULL;
        if (value_bytes && !part->values) {
            while (i-- > 0)
                free(list[parts->count + i].values);
            return false;
        }
        if (value_bytes) memcpy(part->values, more[i].values, value_bytes);
    }
    parts->count += count;
    return true;
}

static clattn_status add_parts(clattn_pattern *pattern, const struct pattern_part *parts, int32_t count)
{
    if (parts_append(&pattern->parts, parts, count)) return CLATTN_SUCCESS;
    return pattern_fail(pattern, CLATTN_OUT_OF_MEMORY, "no memory for %d parts of a pattern", count);
}

/* ---- the object ---- */

clattn_status clattn_pattern_create(clattn_pattern **pattern)
{
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    clattn_pattern *made = calloc(1, sizeof *made);
    if (!made) return CLATTN_OUT_OF_MEMORY;
    if (pthread_mutex_init(&made->lock, NULL)) {
        free(made);
        return CLATTN_OUT_OF_MEMORY;
    }
    *pattern = made;
    return CLATTN_SUCCESS;
}

void clattn_pattern_release(clattn_pattern *pattern)
{
    if (!pattern) return;
    parts_release(&pattern->parts);
    for (int32_t i = 0; i < pattern->own_count; i++)
        parts_release(&pattern->own[i].parts);
    free(pattern->own);
    pthread_mutex_destroy(&pattern->lock);
    free(pattern);
}

clattn_status pattern_fail(const clattn_pattern *pattern, clattn_status status, const char *format, ...)
{
    clattn_pattern *writable = (clattn_pattern *)pattern; /* every pattern comes from calloc; see pattern.h */
    va_list list;
    va_start(list, format);
    pthread_mutex_lock(&writable->lock);
    vsnprintf(writable->error, sizeof writable->error, format, list);
    pthread_mutex_unlock(&writable->lock);
    va_end(list);
    return status;
}

size_t clattn_pattern_error(const clattn_pattern *pattern, char *text, size_t bytes)
{
    if (!pattern) return 0;
    clattn_pattern *writable = (clattn_pattern *)pattern;
    pthread_mutex_lock(&writable->lock);
    size_t length = strlen(writable->error);
    if (text && bytes) snprintf(text, bytes, "%s", writable->error);
    pthread_mutex_unlock(&writable->lock);
    return length;
}

static clattn_status check_least(clattn_pattern *pattern, const char *name, int32_t value, int32_t least)
{
    if (value >= least) return CLATTN_SUCCESS;
    return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT, "%s is %d; %d or more is needed", name, value, least);
}

clattn_status clattn_pattern_add_local(clattn_pattern *pattern, int32_t window)
{
    return clattn_pattern_add_dilated(pattern, window, 1);
}

clattn_status clattn_pattern_add_dilated(clattn_pattern *pattern, int32_t window, int32_t stride)
{
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    clattn_status status = check_least(pattern, "window", window, 0);
    if (!status) status = check_least(pattern, "stride", stride, 1);
    struct pattern_part part = {.kind = PATTERN_LOCAL, .window = window, .stride = stride};
    return status ? status : add_parts(pattern, &part, 1);
}

clattn_status clattn_pattern_add_strided(clattn_pattern *pattern, int32_t stride)
{
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    clattn_status status = check_least(pattern, "stride", stride, 1);
    struct pattern_part part = {.kind = PATTERN_STRIDED, .stride = stride};
    return status ? status : add_parts(pattern, &part, 1);
}

clattn_status clattn_pattern_add_log_stride(clattn_pattern *pattern, clattn_log_stride form,
                                            const int32_t *offsets, int32_t heads, int32_t levels)
{
    int64_t count = (int64_t)heads * levels;
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    if (form != CLATTN_LOG_STRIDE_BLOCKS && form != CLATTN_LOG_STRIDE_TOKENS)
        return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT, "form is %d; 0 (blocks) or 1 (tokens) is needed",
                            form);
    if (offsets ? heads < 1 || levels < 1 || count > INT32_MAX : heads != 0 || levels != 0)
        return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT, "offsets is %s but heads is %d and levels %d",
                            offsets ? "given" : "NULL", heads, levels);
    struct pattern_part part = {.kind = PATTERN_LOG_STRIDE,
                                .tokens = form == CLATTN_LOG_STRIDE_TOKENS,
                                .heads = heads,
                                .levels = levels,
                                .values = (int32_t *)offsets,
                                .value_count = (int32_t)count};
    return add_parts(pattern, &part, 1);
}

clattn_status clattn_pattern_add_anchors(clattn_pattern *pattern, const int32_t *anchors, int32_t count,
                                         int roles)
{
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    if (count < 1 || !anchors)
        return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT,
                            "anchors is %s and count %d; at least one is needed", anchors ? "given" : "NULL",
                            count);
    if (roles < 1 || roles > (CLATTN_ANCHOR_KEYS | CLATTN_ANCHOR_QUERIES))
        return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT,
                            "roles is %d; CLATTN_ANCHOR_KEYS, CLATTN_ANCHOR_QUERIES or both are needed", roles);
    struct pattern_part part = {.kind = PATTERN_ANCHORS,
                                .as_keys = roles & CLATTN_ANCHOR_KEYS,
                                .as_queries = roles & CLATTN_ANCHOR_QUERIES,
                                .values = (int32_t *)anchors,
                                .value_count = count};
    return add_parts(pattern, &part, 1);
}

clattn_status clattn_pattern_add_random(clattn_pattern *pattern, int32_t random, uint64_t seed)
{
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    clattn_status status = check_least(pattern, "random", random, 0);
    struct pattern_part part = {.kind = PATTERN_RANDOM, .window = -1, .random = random, .seed = seed};
    return status ? status : add_parts(pattern, &part, 1);
}

clattn_status clattn_pattern_add_bigbird(clattn_pattern *pattern, int32_t window, int32_t global,
                                         int32_t random, uint64_t seed)
{
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    clattn_status status = check_least(pattern, "window", window, 0);
    if (!status) status = check_least(pattern, "global", global, 0);
    if (!status) status = check_least(pattern, "random", random, 0);
    if (status) return status;
    int32_t *first = malloc((size_t)MAX(global, 1) * sizeof *first);
    if (!first) return pattern_fail(pattern, CLATTN_OUT_OF_MEMORY, "no memory for %d global blocks", global);
    for (int32_t b = 0; b < global; b++)
        first[b] = b;
    const struct pattern_part parts[] = {
        {.kind = PATTERN_LOCAL, .window = window, .stride = 1},
        {.kind = PATTERN_ANCHORS, .as_keys = true, .as_queries = true, .values = first, .value_count = global},
        {.kind = PATTERN_RANDOM, .window = window, .global = global, .random = random, .seed = seed},
    };
    status = add_parts(pattern, parts, 3);
    free(first);
    return status;
}

clattn_status clattn_pattern_add(clattn_pattern *pattern, const clattn_pattern *other)
{
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    if (!other) return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT, "other is NULL");
    if (other == pattern) return CLATTN_SUCCESS; /* a union with itself */
    return add_parts(pattern, other->parts.list, other->parts.count);
}

clattn_status clattn_pattern_set_head(clattn_pattern *pattern, int32_t head, const clattn_pattern *own)
{
    if (!pattern) return CLATTN_INVALID_ARGUMENT;
    if (!own) return pattern_fail(pattern, CLATTN_INVALID_ARGUMENT, "own is NULL");
    clattn_status status = check_least(pattern, "head", head, 0);
    if (status) return status;
    struct pattern_parts copy = {0};
    if (!parts_append(&copy, own->parts.list, own->parts.count)) goto no_memory;
    for (int32_t i = 0; i < pattern->own_count; i++)
        if (pattern->own[i].head == head) {
            parts_release(&pattern->own[i].parts);
            pattern->own[i].parts = copy;
            return CLATTN_SUCCESS;
        }
    struct pattern_head *heads = realloc(pattern->own, (size_t)(pattern->own_count + 1) * sizeof *heads);
    if (!heads) goto no_memory;
    pattern->own = heads;
    heads[pattern->own_count++] = (struct pattern_head){head, copy};
    return CLATTN_SUCCESS;
no_memory:
    parts_release(&copy);
    return pattern_fail(pattern, CLATTN_OUT_OF_MEMORY, "no memory for the pattern of head %d", head);
}

/* ---- questions ---- */

const struct pattern_parts *pattern_of_head(const clattn_pattern *pattern, int32_t head)
{
    for (int32_t i = 0; i < pattern->own_count; i++)
        if (pattern->own[i].head == head) return &pattern->own[i].parts;
    return &pattern->parts;
}

bool pattern_has_heads(const clattn_pattern *pattern)
{
    if (pattern->own_count) return true;
    for (int32_t i = 0; i < pattern->parts.count; i++) {
        const struct pattern_part *part = &pattern->parts.list[i];
        if (part->kind == PATTERN_RANDOM || part->heads > 1) return true;
    }
    return false;
}

/* Anchors from the middle or the end move. So do levels beyond the length that a negative offset brings back.
 */
static bool part_has_ends(const struct pattern_part *part)
{
    if (part->kind != PATTERN_ANCHORS && part->kind != PATTERN_LOG_STRIDE) return false;
    for (int32_t i = 0; i < part->value_count; i++)
        if (part->values[i] < 0) return true;
    return false;
}

bool pattern_has_ends(const clattn_pattern *pattern)
{
    for (int32_t h = -1; h < pattern->own_count; h++) {
        const struct pattern_parts *parts = h < 0 ? &pattern->parts : &pattern->own[h].parts;
        for (int32_t i = 0; i < parts->count; i++)
            if (part_has_ends(&parts->list[i])) return true;
    }
    return false;
}
