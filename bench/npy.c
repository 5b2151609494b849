/* SPDX-License-Identifier: MIT
 *
 * The NumPy format, https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html:
 *
 *   "\x93NUMPY" major minor   header length (2 bytes in version 1, 4 in 2 and 3, little-endian)   header
 * elements
 *
 * The header is a Python literal, {'descr': '<f2', 'fortran_order': False, 'shape': (1, 16384, 16, 64), }. The
 * parser below takes exactly such dictionaries: these three keys, each once, in any order. */
#include "config.h"

#include "tensor_format.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct cursor {
    const char *at, *end;
    char *error;
};

struct header {
    char descr[16];
    bool fortran_order;
    int rank;
    int64_t shape[TENSOR_MAX_RANK];
    bool has_descr, has_order, has_shape;
};

static void skip_space(struct cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\t' || *c->at == '\r'))
        c->at++;
}

static bool accept(struct cursor *c, char wanted)
{
    skip_space(c);
    if (c->at == c->end || *c->at != wanted) return false;
    c->at++;
    return true;
}

static int expect(struct cursor *c, char wanted)
{
    if (accept(c, wanted)) return 0;
    if (c->at == c->end)
        return tensor_error(c->error, "corrupt .npy header: it ends where '%c' was expected", wanted);
    return tensor_error(c->error, "corrupt .npy header: '%c' where '%c' was expected", *c->at, wanted);
}

/* A quoted string without escapes; longer ones than fit are an error. */
static int parse_string(struct cursor *c, char *text, size_t size)
{
    char quote = accept(c, '\'') ? '\'' : '"';
    if (quote == '"' && !accept(c, '"'))
        return tensor_error(c->error, "corrupt .npy header: a string was expected");
    size_t length = 0;
    for (; c->at < c->end && *c->at != quote; c->at++) {
        if (*c->at == '\\' || *c->at == '\n' || *c->at == 0 || length + 1 >= size)
            return tensor_error(c->error, "corrupt .npy header: a string that cannot be right");
        text[length++] = *c->at;
    }
    text[length] = 0;
    if (c->at == c->end) return tensor_error(c->error, "corrupt .npy header: a string without end");
    c->at++;
    return 0;
}

static int parse_word(struct cursor *c, bool *value)
{
    skip_space(c);
    size_t left = (size_t)(c->end - c->at);
    if (left >= 4 && memcmp(c->at, "True", 4) == 0) {
        *value = true;
        c->at += 4;
        return 0;
    }
    if (left >= 5 && memcmp(c->at, "False", 5) == 0) {
        *value = false;
        c->at += 5;
        return 0;
    }
    return tensor_error(c->error, "corrupt .npy header: fortran_order is neither True nor False");
}

static int parse_integer(struct cursor *c, int64_t *value)
{
    skip_space(c);
    if (c->at < c->end && *c->at == '-') return tensor_error(c->error, "a dimension of the shape is negative");
    if (c->at == c->end || *c->at < '0' || *c->at > '9')
        return tensor_error(c->error, "corrupt .npy header: the shape is not a tuple of integers");
    *value = 0;
    for (; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++)
        if (__builtin_mul_overflow(*value, 10, value) || __builtin_add_overflow(*value, *c->at - '0', value))
            return tensor_error(c->error, "the shape is too large");
    if (c->at < c->end && *c->at == 'L') c->at++; /* written by Python 2 */
    return 0;
}

static int parse_shape(struct cursor *c, struct header *header)
{
    bool comma = false;
    if (expect(c, '(') != 0) return -1;
    while (!accept(c, ')')) {
        if (header->rank > 0 && !comma) return expect(c, ',');
        if (header->rank == TENSOR_MAX_RANK)
            return tensor_error(c->error, "the shape has more than %d dimensions", TENSOR_MAX_RANK);
        if (parse_integer(c, &header->shape[header->rank]) != 0) return -1;
        header->rank++;
        comma = accept(c, ',');
    }
    if (header->rank == 0) return tensor_error(c->error, "is a single number, not a tensor");
    if (header->rank == 1 && !comma)
        return tensor_error(c->error, "corrupt .npy header: the shape is not a tuple of integers");
    return 0;
}

static int parse_entry(struct cursor *c, struct header *header)
{
    char key[16];
    bool *seen;
    int result;
    if (parse_string(c, key, sizeof key) != 0 || expect(c, ':') != 0) return -1;
    if (strcmp(key, "descr") == 0) {
        seen = &header->has_descr;
        skip_space(c);
        if (c->at < c->end && *c->at == '[')
            return tensor_error(c->error, "holds records (a structured type), not plain numbers");
        result = *seen ? 0 : parse_string(c, header->descr, sizeof header->descr);
    } else if (strcmp(key, "fortran_order") == 0) {
        seen = &header->has_order;
        result = *seen ? 0 : parse_word(c, &header->fortran_order);
    } else if (strcmp(key, "shape") == 0) {
        seen = &header->has_shape;
        result = *seen ? 0 : parse_shape(c, header);
    } else
        return tensor_error(c->error, "corrupt .npy header: unknown key '%s'", key);
    if (*seen) return tensor_error(c->error, "corrupt .npy header: '%s' is there twice", key);
    *seen = true;
    return result;
}

static int parse_header(struct cursor *c, struct header *header)
{
    if (expect(c, '{') != 0) return -1;
    while (!accept(c, '}')) {
        if (parse_entry(c, header) != 0) return -1;
        if (accept(c, ',')) continue;
        if (expect(c, '}') != 0) return -1;
        break;
    }
    skip_space(c);
    if (c->at != c->end) return tensor_error(c->error, "corrupt .npy header: text after the dictionary");
    if (!header->has_descr || !header->has_order || !header->has_shape)
        return tensor_error(c->error, "corrupt .npy header: '%s' is missing",
                            !header->has_descr   ? "descr"
                            : !header->has_order ? "fortran_order"
                                                 : "shape");
    return 0;
}

static int find_type(const char *descr, enum element_request request, enum element_type *type, char *error)
{
    static const struct {
        const char *descr;
        enum element_type type;
        enum element_request request; /* that this type answers */
    } known[] = {
        {"<f4", ELEMENT_FLOAT32, REQUEST_FLOAT32},   {"<f2", ELEMENT_FLOAT16, REQUEST_FLOAT16},
        {"<i4", ELEMENT_INT32, REQUEST_ANY},         {"<u2", ELEMENT_BFLOAT16, REQUEST_BFLOAT16},
        {"<V2", ELEMENT_BFLOAT16, REQUEST_BFLOAT16}, {"|V2", ELEMENT_BFLOAT16, REQUEST_BFLOAT16},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(descr, known[i].descr) != 0) continue;
        if (known[i].type == ELEMENT_BFLOAT16 && request != REQUEST_BFLOAT16)
            return tensor_error(error,
                                "element type '%s' is not a floating-point type (bfloat16 values stored as"
                                " uint16 need --dtype bf16)",
                                descr);
        if (request != REQUEST_ANY && request != known[i].request)
            return tensor_error(error, "element type '%s' is not what --dtype asks for", descr);
        *type = known[i].type;
        return 0;
    }
    const char *why = "";
    if (descr[0] == '>')
        why = "big-endian; ";
    else if (strchr(descr, 'O'))
        why = "Python objects; ";
    else if (strcmp(descr, "<f8") == 0)
        why = "double precision; ";
    return tensor_error(error,
                        "element type '%s' is not supported (%sknown are '<f4', '<f2' and, with --dtype bf16,"
                        " '<u2')",
                        descr, why);
}

static int check_magic(const unsigned char *bytes, uint64_t size, char *error)
{
    static const unsigned char magic[6] = {0x93, 'N', 'U', 'M', 'P', 'Y'};
    if (size >= 4 && memcmp(bytes, "PK\3\4", 4) == 0)
        return tensor_error(error, "is an archive (.npz or .pt); save each tensor as .npy or .safetensors");
    if (memcmp(bytes, magic, size < sizeof magic ? size : sizeof magic) != 0)
        return tensor_error(error, "is not a .npy file (nor named *.safetensors:NAME)");
    if (size < 10) return tensor_error(error, "is truncated: %" PRIu64 " bytes are no .npy header", size);
    if (bytes[6] < 1 || bytes[6] > 3 || bytes[7] != 0)
        return tensor_error(error, "unknown .npy version %u.%u", bytes[6], bytes[7]);
    return 0;
}

int npy_parse(const unsigned char *bytes, uint64_t size, enum element_request request,
              struct tensor_layout *layout, char *error)
{
    struct header header = {0};
    uint64_t byte_size, start, length;
    if (check_magic(bytes, size, error) != 0) return -1;

    if (bytes[6] == 1) {
        start = 10;
        length = bytes[8] | (uint64_t)bytes[9] << 8;
    } else {
        start = 12;
        if (size < start)
            return tensor_error(error, "is truncated: %" PRIu64 " bytes are no .npy header", size);
        length = bytes[8] | (uint64_t)bytes[9] << 8 | (uint64_t)bytes[10] << 16 | (uint64_t)bytes[11] << 24;
    }
    if (length > size - start)
        return tensor_error(error,
                            "is truncated: the header should have %" PRIu64 " bytes, %" PRIu64 " are there",
                            length, size - start);

    const char *text = (const char *)bytes + start;
    struct cursor cursor = {text, text + length, error};
    if (parse_header(&cursor, &header) != 0) return -1;
    if (find_type(header.descr, request, &layout->type, error) != 0) return -1;
    if (header.fortran_order && header.rank > 1)
        return tensor_error(error, "is in Fortran order; save it in C order (numpy.ascontiguousarray)");
    layout->rank = header.rank;
    memcpy(layout->shape, header.shape, sizeof layout->shape);
    layout->offset = start + length;
    if (tensor_layout_measure(layout, &byte_size, error) != 0) return -1;

    uint64_t there = size - layout->offset;
    if (there < byte_size)
        return tensor_error(
            error, "is truncated: the shape needs %" PRIu64 " bytes of elements, %" PRIu64 " are there",
            byte_size, there);
    if (there > byte_size)
        return tensor_error(error, "has %" PRIu64 " bytes too many at the end", there - byte_size);
    return 0;
}
