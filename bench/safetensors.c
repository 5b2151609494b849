/* SPDX-License-Identifier: MIT
 *
 * The safetensors format, https://huggingface.co/docs/safetensors:
 *
 *   header length (8 bytes, little-endian)   header (JSON)   elements
 *
 *   {"NAME": {"dtype": "F16", "shape": [1, 16384, 16, 64], "data_offsets": [begin, end]}, ..., "__metadata__":
 * {}}
 *
 * Offsets count from the end of the header. */
#include "config.h"

#include "tensor_format.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

/* The limit that the format's own library sets. */
#define HEADER_MAX 100000000u

static const char metadata_key[] = "__metadata__";

/* Names the tensors of a file, as far as they fit, for whoever asked for one that is not there. */
static int refuse_name(const json_t *header, const char *name, char *error)
{
    char list[TENSOR_ERROR_SIZE / 2] = "";
    size_t used = 0;
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)header, key, value)
    {
        if (strcmp(key, metadata_key) == 0) continue;
        size_t length = strlen(key);
        if (used + length + 6 > sizeof list) {
            strcpy(list + used, ", ...");
            break;
        }
        used += (size_t)sprintf(list + used, "%s%s", used ? ", " : "", key);
    }
    if (!used) return tensor_error(error, "holds no tensors");
    if (!name || !*name)
        return tensor_error(error, "needs a tensor's name, file.safetensors:NAME; it holds %s", list);
    return tensor_error(error, "has no tensor '%.100s'; it holds %s", name, list);
}

static int read_type(const json_t *entry, const char *name, enum element_type *type, char *error)
{
    static const struct {
        const char *name;
        enum element_type type;
    } known[] = {{"F32", ELEMENT_FLOAT32}, {"F16", ELEMENT_FLOAT16}, {"BF16", ELEMENT_BFLOAT16}};
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!dtype) return tensor_error(error, "corrupt safetensors header: '%.100s' has no dtype", name);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(dtype, known[i].name) == 0) {
            *type = known[i].type;
            return 0;
        }
    return tensor_error(error, "'%.100s' has element type %.20s; known are F32, F16 and BF16", name, dtype);
}

static int read_shape(const json_t *entry, const char *name, struct tensor_layout *layout, char *error)
{
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape))
        return tensor_error(error, "corrupt safetensors header: '%.100s' has no shape", name);
    size_t rank = json_array_size(shape);
    if (rank > TENSOR_MAX_RANK)
        return tensor_error(error, "the shape of '%.100s' has more than %d dimensions", name, TENSOR_MAX_RANK);
    if (rank == 0) return tensor_error(error, "'%.100s' is a single number, not a tensor", name);
    layout->rank = (int)rank;
    for (size_t i = 0; i < rank; i++) {
        const json_t *size = json_array_get(shape, i);
        if (!json_is_integer(size))
            return tensor_error(
                error, "corrupt safetensors header: the shape of '%.100s' is not a list of integers", name);
        layout->shape[i] = json_integer_value(size);
    }
    return 0;
}

static int read_offsets(const json_t *entry, const char *name, uint64_t available, uint64_t offsets[2],
                        char *error)
{
    const json_t *pair = json_object_get(entry, "data_offsets");
    const json_t *begin = json_array_get(pair, 0), *end = json_array_get(pair, 1);
    if (json_array_size(pair) != 2 || !json_is_integer(begin) || !json_is_integer(end))
        return tensor_error(error, "corrupt safetensors header: '%.100s' has no data_offsets", name);
    if (json_integer_value(begin) < 0 || json_integer_value(end) < json_integer_value(begin))
        return tensor_error(error, "corrupt safetensors header: data_offsets of '%.100s' are not a range",
                            name);
    offsets[0] = (uint64_t)json_integer_value(begin);
    offsets[1] = (uint64_t)json_integer_value(end);
    if (offsets[1] > available)
        return tensor_error(
            error, "is truncated: '%.100s' ends at byte %" PRIu64 " of the data, %" PRIu64 " are there", name,
            offsets[1], available);
    return 0;
}

/* Every tensor must lie in the file, and the last one must end where the file ends. */
static int check_extent(const json_t *header, uint64_t available, char *error)
{
    uint64_t used = 0, offsets[2];
    const char *key;
    json_t *entry;
    json_object_foreach((json_t *)header, key, entry)
    {
        if (strcmp(key, metadata_key) == 0) continue;
        if (read_offsets(entry, key, available, offsets, error) != 0) return -1;
        if (offsets[1] > used) used = offsets[1];
    }
    if (used < available)
        return tensor_error(error, "has %" PRIu64 " bytes too many at the end", available - used);
    return 0;
}

static int read_entry(const json_t *header, const char *name, uint64_t start, uint64_t size,
                      struct tensor_layout *layout, char *error)
{
    uint64_t byte_size, offsets[2];
    const json_t *entry = name && strcmp(name, metadata_key) != 0 ? json_object_get(header, name) : NULL;
    if (!entry) return refuse_name(header, name, error);
    if (check_extent(header, size - start, error) != 0 || read_type(entry, name, &layout->type, error) != 0 ||
        read_shape(entry, name, layout, error) != 0 ||
        read_offsets(entry, name, size - start, offsets, error) != 0 ||
        tensor_layout_measure(layout, &byte_size, error) != 0)
        return -1;
    if (offsets[1] - offsets[0] != byte_size)
        return tensor_error(
            error, "corrupt safetensors header: '%.100s' has %" PRIu64 " bytes, its shape needs %" PRIu64, name,
            offsets[1] - offsets[0], byte_size);
    layout->offset = start + offsets[0];
    return 0;
}

int safetensors_parse(const unsigned char *bytes, uint64_t size, const char *name, struct tensor_layout *layout,
                      char *error)
{
    uint64_t length = 0;
    json_error_t why;
    if (size < 8) return tensor_error(error, "is truncated: %" PRIu64 " bytes are no safetensors header", size);
    for (int i = 0; i < 8; i++)
        length |= (uint64_t)bytes[i] << (8 * i);
    if (length > HEADER_MAX)
        return tensor_error(error, "is not a safetensors file: a header of %" PRIu64 " bytes", length);
    if (length > size - 8)
        return tensor_error(error,
                            "is truncated: the header should have %" PRIu64 " bytes, %" PRIu64 " are there",
                            length, size - 8);

    json_t *header = json_loadb((const char *)bytes + 8, (size_t)length, JSON_REJECT_DUPLICATES, &why);
    if (!header)
        return tensor_error(error, "corrupt safetensors header: %.120s at byte %d", why.text, why.position);
    int result = json_is_object(header) ? read_entry(header, name, 8 + length, size, layout, error)
                                        : tensor_error(error, "corrupt safetensors header: not a JSON object");
    json_decref(header);
    return result;
}
