/* SPDX-License-Identifier: MIT */
/* Patterns from text; the grammar is in clattn.h. */

#include "pattern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct parser {
    const char *text, *at;
    char *error; /* [error_bytes], may be NULL */
    size_t error_bytes;
};

/* ---- signs, words, numbers ---- */

static clattn_status wrong(const struct parser *parser, const char *at, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static clattn_status wrong(const struct parser *parser, const char *at, const char *format, ...)
{
    char what[200];
    va_list list;
    va_start(list, format);
    vsnprintf(what, sizeof what, format, list);
    va_end(list);
    if (parser->error && parser->error_bytes)
        snprintf(parser->error, parser->error_bytes, "column %zu: %s", (size_t)(at - parser->text) + 1, what);
    return CLATTN_INVALID_ARGUMENT;
}

static void skip_blanks(struct parser *parser)
{
    parser->at += strspn(parser->at, " \t\n");
}

/* Steps over `sign` when it is next. */
static bool take(struct parser *parser, char sign)
{
    skip_blanks(parser);
    if (*parser->at != sign) return false;
    parser->at++;
    skip_blanks(parser);
    return true;
}

static bool is_word(const char *word, size_t length, const char *name)
{
    return strlen(name) == length && memcmp(word, name, length) == 0;
}

/* Length of the word (letters and inner hyphens) that is next. */
static size_t word_length(const struct parser *parser)
{
    return strspn(parser->at, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_");
}

/* What stands at a place, for messages: at most 24 characters up to the next sign. */
static int shown(const char *at)
{
    size_t length = strcspn(at, ":,+;= \t\n");
    return (int)MIN(length, 24);
}

static clattn_status expected(const struct parser *parser, const char *what)
{
    if (!*parser->at) return wrong(parser, parser->at, "the text ends where %s is expected", what);
    int length = shown(parser->at);
    return wrong(parser, parser->at, "'%.*s' where %s is expected", MAX(length, 1), parser->at, what);
}

static clattn_status take_digits(struct parser *parser, uint64_t most, const char *what, uint64_t *value)
{
    const char *start = parser->at;
    *value = 0;
    if (*start < '0' || *start > '9') return expected(parser, what);
    for (; *parser->at >= '0' && *parser->at <= '9'; parser->at++) {
        unsigned digit = (unsigned)(*parser->at - '0');
        if (*value > (most - digit) / 10)
            return wrong(parser, start, "'%.*s' is too large; at most %llu", shown(start), start,
                         (unsigned long long)most);
        *value = *value * 10 + digit;
    }
    return CLATTN_SUCCESS;
}

static clattn_status take_number(struct parser *parser, int32_t least, const char *what, int32_t *value)
{
    const char *start = parser->at;
    uint64_t digits;
    bool minus = least < 0 && *parser->at == '-';
    if (minus) parser->at++;
    clattn_status status = take_digits(parser, INT32_MAX, what, &digits);
    if (status) return status;
    *value = minus ? -(int32_t)digits : (int32_t)digits;
    if (*value < least) return wrong(parser, start, "%s is %d; %d or more is needed", what, *value, least);
    return CLATTN_SUCCESS;
}

/* "," number */
static clattn_status take_next(struct parser *parser, int32_t least, const char *what, int32_t *value)
{
    char comma[64];
    snprintf(comma, sizeof comma, "',' and %s", what);
    return take(parser, ',') ? take_number(parser, least, what, value) : expected(parser, comma);
}

/* ---- lists of numbers ---- */

static clattn_status take_anchor(struct parser *parser, const char *what, int32_t *value)
{
    size_t length = word_length(parser);
    static const struct {
        const char *name;
        int32_t value;
    } names[] = {
        {"first", CLATTN_ANCHOR_FIRST}, {"middle", CLATTN_ANCHOR_MIDDLE}, {"last", CLATTN_ANCHOR_LAST}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (is_word(parser->at, length, names[i].name)) {
            *value = names[i].value;
            parser->at += length;
            return CLATTN_SUCCESS;
        }
    return take_number(parser, -INT32_MAX, what, value);
}

static clattn_status take_offset(struct parser *parser, const char *what, int32_t *value)
{
    return take_number(parser, -INT32_MAX, what, value);
}

/* item { "," item }; *values is the caller's to free, also after an error. */
static clattn_status take_list(struct parser *parser, const char *what,
                               clattn_status (*take_item)(struct parser *, const char *, int32_t *),
                               int32_t **values, int32_t *count)
{
    clattn_status status = CLATTN_SUCCESS;
    size_t most = strlen(parser->at) / 2 + 1; /* an item and its comma take two characters */
    if (most > INT32_MAX) return wrong(parser, parser->at, "the list is too long");
    *count = 0;
    *values = malloc(most * sizeof **values);
    if (!*values) return CLATTN_OUT_OF_MEMORY;
    do
        status = take_item(parser, what, &(*values)[(*count)++]);
    while (!status && take(parser, ','));
    return status;
}

/* ---- parts ---- */

static clattn_status take_seed(struct parser *parser, uint64_t *seed)
{
    *seed = 0;
    return take(parser, ',') ? take_digits(parser, UINT64_MAX, "a seed", seed) : CLATTN_SUCCESS;
}

static clattn_status parse_local(struct parser *parser, clattn_pattern *pattern)
{
    int32_t window = 1;
    clattn_status status = take(parser, ':') ? take_number(parser, 0, "a window", &window) : CLATTN_SUCCESS;
    return status ? status : clattn_pattern_add_local(pattern, window);
}

static clattn_status parse_log_stride(struct parser *parser, clattn_pattern *pattern)
{
    clattn_log_stride form = CLATTN_LOG_STRIDE_BLOCKS;
    clattn_status status = CLATTN_SUCCESS;
    int32_t *offsets = NULL, count = 0;
    bool more = take(parser, ':');
    size_t length = word_length(parser);
    bool tokens = is_word(parser->at, length, "tokens");
    if (more && (tokens || is_word(parser->at, length, "blocks"))) {
        form = tokens ? CLATTN_LOG_STRIDE_TOKENS : CLATTN_LOG_STRIDE_BLOCKS;
        parser->at += length;
        more = take(parser, ':');
    }
    if (more) status = take_list(parser, "tokens, blocks or an offset", take_offset, &offsets, &count);
    if (!status) status = clattn_pattern_add_log_stride(pattern, form, offsets, count ? 1 : 0, count);
    free(offsets);
    return status;
}

static clattn_status parse_anchors(struct parser *parser, clattn_pattern *pattern, int roles)
{
    int32_t *anchors = NULL, count = 0;
    if (!take(parser, ':')) return expected(parser, "':' and a list of anchors");
    clattn_status status =
        take_list(parser, "first, middle, last or a block number", take_anchor, &anchors, &count);
    if (!status) status = clattn_pattern_add_anchors(pattern, anchors, count, roles);
    free(anchors);
    return status;
}

static clattn_status parse_anchor_keys(struct parser *parser, clattn_pattern *pattern)
{
    return parse_anchors(parser, pattern, CLATTN_ANCHOR_KEYS);
}

static clattn_status parse_anchor_queries(struct parser *parser, clattn_pattern *pattern)
{
    return parse_anchors(parser, pattern, CLATTN_ANCHOR_QUERIES);
}

static clattn_status parse_global(struct parser *parser, clattn_pattern *pattern)
{
    return parse_anchors(parser, pattern, CLATTN_ANCHOR_KEYS | CLATTN_ANCHOR_QUERIES);
}

static clattn_status parse_strided(struct parser *parser, clattn_pattern *pattern)
{
    int32_t stride;
    if (!take(parser, ':')) return expected(parser, "':' and a stride");
    clattn_status status = take_number(parser, 1, "a stride", &stride);
    return status ? status : clattn_pattern_add_strided(pattern, stride);
}

static clattn_status parse_dilated(struct parser *parser, clattn_pattern *pattern)
{
    int32_t window, stride;
    if (!take(parser, ':')) return expected(parser, "':' and a window");
    clattn_status status = take_number(parser, 0, "a window", &window);
    if (!status) status = take_next(parser, 1, "a stride", &stride);
    return status ? status : clattn_pattern_add_dilated(pattern, window, stride);
}

static clattn_status parse_random(struct parser *parser, clattn_pattern *pattern)
{
    int32_t random;
    uint64_t seed;
    if (!take(parser, ':')) return expected(parser, "':' and a number of blocks");
    clattn_status status = take_number(parser, 0, "a number of blocks", &random);
    if (!status) status = take_seed(parser, &seed);
    return status ? status : clattn_pattern_add_random(pattern, random, seed);
}

static clattn_status parse_bigbird(struct parser *parser, clattn_pattern *pattern)
{
    int32_t window, global, random;
    uint64_t seed;
    if (!take(parser, ':')) return expected(parser, "':' and a window");
    clattn_status status = take_number(parser, 0, "a window", &window);
    if (!status) status = take_next(parser, 0, "a number of global blocks", &global);
    if (!status) status = take_next(parser, 0, "a number of random blocks", &random);
    if (!status) status = take_seed(parser, &seed);
    return status ? status : clattn_pattern_add_bigbird(pattern, window, global, random, seed);
}

static clattn_status parse_dense(struct parser *parser, clattn_pattern *pattern)
{
    (void)parser;
    return clattn_pattern_add_strided(pattern, 1);
}

static const struct {
    const char *name;
    clattn_status (*parse)(struct parser *parser, clattn_pattern *pattern);
} parts[] = {
    {"local", parse_local},
    {"log-stride", parse_log_stride},
    {"anchors", parse_anchor_keys},
    {"global", parse_global},
    {"anchor-queries", parse_anchor_queries},
    {"strided", parse_strided},
    {"dilated", parse_dilated},
    {"random", parse_random},
    {"bigbird", parse_bigbird},
    {"dense", parse_dense},
};

static clattn_status parse_part(struct parser *parser, clattn_pattern *pattern)
{
    size_t length = word_length(parser);
    if (length == 0) return expected(parser, "the name of a pattern");
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (is_word(parser->at, length, parts[i].name)) {
            parser->at += length;
            return parts[i].parse(parser, pattern);
        }
    return wrong(
        parser, parser->at,
        "unknown pattern '%.*s'; local, log-stride, anchors, anchor-queries, global, strided, dilated, random, "
        "bigbird and dense are known",
        (int)MIN(length, 24), parser->at);
}

/* part { "+" part } */
static clattn_status parse_parts(struct parser *parser, clattn_pattern *pattern)
{
    clattn_status status;
    do {
        skip_blanks(parser);
        status = parse_part(parser, pattern);
    } while (!status && take(parser, '+'));
    return status;
}

/* number [ "-" number ] "=" pattern */
static clattn_status parse_heads(struct parser *parser, clattn_pattern *pattern)
{
    enum { HEADS_MAX = 65536 };
    const char *start = parser->at;
    int32_t first, last;
    clattn_status status = take_number(parser, 0, "a head", &first);
    if (status) return status;
    last = first;
    if (take(parser, '-') && (status = take_number(parser, 0, "a head", &last))) return status;
    if (last < first || last >= HEADS_MAX)
        return wrong(parser, start, "heads %d-%d; they must ascend and be below %d", first, last, HEADS_MAX);
    if (!take(parser, '=')) return expected(parser, "'=' and a pattern");
    clattn_pattern *own = NULL;
    status = clattn_pattern_create(&own);
    if (!status) status = parse_parts(parser, own);
    for (int32_t head = first; !status && head <= last; head++)
        status = clattn_pattern_set_head(pattern, head, own);
    clattn_pattern_release(own);
    return status;
}

clattn_status clattn_pattern_parse(const char *text, clattn_pattern **pattern, char *error, size_t error_bytes)
{
    struct parser parser = {text, text, error, error_bytes};
    clattn_pattern *made = NULL;
    if (error && error_bytes) *error = 0;
    if (!text || !pattern) {
        if (error && error_bytes) snprintf(error, error_bytes, "%s is NULL", text ? "pattern" : "text");
        return CLATTN_INVALID_ARGUMENT;
    }
    clattn_status status = clattn_pattern_create(&made);
    if (!status) status = parse_parts(&parser, made);
    while (!status && take(&parser, ';'))
        status = parse_heads(&parser, made);
    skip_blanks(&parser);
    if (!status && *parser.at) status = expected(&parser, "'+', ';' or the end");
    if (status == CLATTN_OUT_OF_MEMORY && error && error_bytes)
        snprintf(error, error_bytes, "no memory for a pattern");
    if (status)
        clattn_pattern_release(made);
    else
        *pattern = made;
    return status;
}
