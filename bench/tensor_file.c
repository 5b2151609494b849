/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "tensor_file.h"

#include "tensor_format.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

size_t element_size(enum element_type type)
{
    return type == ELEMENT_FLOAT32 || type == ELEMENT_INT32 ? 4 : 2;
}

const char *element_name(enum element_type type)
{
    switch (type) {
    case ELEMENT_FLOAT32:
        return "float32";
    case ELEMENT_FLOAT16:
        return "float16";
    case ELEMENT_BFLOAT16:
        return "bfloat16";
    case ELEMENT_INT32:
        return "int32";
    }
    return "?";
}

void elements_turn(void *elements, uint64_t count, size_t size)
{
    uint16_t *halves = elements;
    uint32_t *words = elements;
    for (uint64_t i = 0; i < count; i++)
        if (size == 4)
            words[i] = __builtin_bswap32(words[i]);
        else
            halves[i] = __builtin_bswap16(halves[i]);
}

int tensor_error(char *error, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, TENSOR_ERROR_SIZE, format, arguments);
    va_end(arguments);
    /* Names come from files: a line break or an escape sequence in one must not reach the terminal. */
    for (char *c = error; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    return -1;
}

int tensor_layout_measure(struct tensor_layout *layout, uint64_t *byte_size, char *error)
{
    uint64_t elements = 1;
    for (int i = 0; i < layout->rank; i++) {
        if (layout->shape[i] < 1)
            return tensor_error(error, "dimension %d of the shape is %" PRId64, i, layout->shape[i]);
        if (__builtin_mul_overflow(elements, (uint64_t)layout->shape[i], &elements))
            return tensor_error(error, "the shape is too large");
    }
    /* Offsets into the tensor are signed 64-bit numbers of elements and bytes. */
    if (__builtin_mul_overflow(elements, element_size(layout->type), byte_size) || *byte_size > INT64_MAX / 2)
        return tensor_error(error, "the shape is too large");
    layout->elements = elements;
    return 0;
}

const char *tensor_shape_text(int rank, const int64_t *shape, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < rank && used < size; i++) {
        int n = snprintf(text + used, size - used, "%s%" PRId64, i ? " x " : "", shape[i]);
        used += (size_t)n;
    }
    return text;
}

/* Opens a regular file; O_NONBLOCK so that a pipe is refused and not waited for. */
static int open_regular(const char *path, uint64_t *size, char *error)
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return tensor_error(error, "%s: %s", path, strerror(errno));
    if (fstat(fd, &status) != 0)
        tensor_error(error, "%s: %s", path, strerror(errno));
    else if (S_ISDIR(status.st_mode))
        tensor_error(error, "%s: is a directory", path);
    else if (!S_ISREG(status.st_mode))
        tensor_error(error, "%s: is not a regular file (it is read by memory map)", path);
    else if (status.st_size == 0)
        tensor_error(error, "%s: is empty", path);
    else if ((uint64_t)status.st_size > SIZE_MAX)
        tensor_error(error, "%s: is too large for this machine", path);
    else {
        *size = (uint64_t)status.st_size;
        return fd;
    }
    close(fd);
    return -1;
}

/* A tensor that cannot be used where it lies is read, not mapped, so that it is in memory once. */
static int read_copy(struct tensor_file *file, int fd, const char *path, uint64_t offset, size_t size)
{
    file->copy = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!file->copy) return tensor_error(file->error, "%s: out of memory (%zu bytes)", path, size);
    size_t done = 0;
    while (done < size) {
        ssize_t n = pread(fd, (char *)file->copy + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return tensor_error(file->error, "%s: %s", path, strerror(errno));
        if (n == 0) return tensor_error(file->error, "%s: became shorter while it was read", path);
        done += (size_t)n;
    }
    munmap(file->map, file->map_size);
    file->map = NULL;
    file->data = file->copy;
    return 0;
}

/* `spec` = path[:name]; the name is only looked for after ".safetensors", so other colons are part of the path.
 */
static char *split_spec(const char *spec, const char **name, bool *safetensors)
{
    static const char extension[] = ".safetensors";
    const size_t length = sizeof extension - 1;
    char *path = strdup(spec);
    *name = NULL;
    *safetensors = false;
    if (!path) return NULL;
    for (char *at = strstr(path, extension); at; at = strstr(at + 1, extension)) {
        if (at[length] == ':') {
            at[length] = 0;
            *name = spec + (at - path) + length + 1;
        }
        if (!at[length]) {
            *safetensors = true;
            break;
        }
    }
    return path;
}

static int open_path(struct tensor_file *file, const char *path, bool safetensors, const char *name,
                     enum element_request request)
{
    struct tensor_layout layout = {0};
    char reason[TENSOR_ERROR_SIZE];
    uint64_t size = 0, byte_size = 0;
    int fd = open_regular(path, &size, file->error);
    if (fd < 0) return -1;

    file->map_size = (size_t)size;
    file->map = mmap(NULL, file->map_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (file->map == MAP_FAILED) {
        file->map = NULL;
        tensor_error(file->error, "%s: cannot be mapped: %s", path, strerror(errno));
        goto fail;
    }
    int parsed = safetensors ? safetensors_parse(file->map, size, name, &layout, reason)
                             : npy_parse(file->map, size, request, &layout, reason);
    if (parsed != 0 || tensor_layout_measure(&layout, &byte_size, reason) != 0) {
        tensor_error(file->error, "%s: %s", path, reason);
        goto fail;
    }
    file->type = layout.type;
    file->rank = layout.rank;
    memcpy(file->shape, layout.shape, sizeof file->shape);
    file->elements = layout.elements;
    file->data = (const char *)file->map + layout.offset;
    bool aligned = layout.offset % element_size(layout.type) == 0; /* safetensors does not see to that */
    if ((!aligned || FILES_ARE_TURNED) && read_copy(file, fd, path, layout.offset, (size_t)byte_size) != 0)
        goto fail;
    if (FILES_ARE_TURNED) elements_turn(file->copy, file->elements, element_size(file->type));
    close(fd);
    return 0;

fail:
    close(fd);
    return -1;
}

int tensor_file_open(struct tensor_file *file, const char *spec, enum element_request request)
{
    const char *name;
    bool safetensors;
    memset(file, 0, sizeof *file);
    if (!*spec) return tensor_error(file->error, "an empty file name");
    char *path = split_spec(spec, &name, &safetensors);
    if (!path) return tensor_error(file->error, "out of memory");
    int result = open_path(file, path, safetensors, name, request);
    free(path);
    if (result != 0) tensor_file_close(file);
    return result;
}

void tensor_file_close(struct tensor_file *file)
{
    if (file->map) munmap(file->map, file->map_size);
    free(file->copy);
    file->map = NULL;
    file->copy = NULL;
    file->data = NULL;
}

/* Exponent bits all ones: infinite without mantissa bits, NaN with some. */
#define COUNT(word, mask, exponent)                                                                            \
    do {                                                                                                       \
        const word *bits = file->data;                                                                         \
        for (uint64_t i = 0; i < file->elements; i++) {                                                        \
            word magnitude = bits[i] & (mask);                                                                 \
            count.nan += magnitude > (exponent);                                                               \
            count.infinite += magnitude == (exponent);                                                         \
        }                                                                                                      \
    } while (0)

struct tensor_values tensor_file_count(const struct tensor_file *file)
{
    struct tensor_values count = {0, 0};
    switch (file->type) {
    case ELEMENT_FLOAT32:
        COUNT(uint32_t, 0x7fffffffu, 0x7f800000u);
        break;
    case ELEMENT_FLOAT16:
        COUNT(uint16_t, 0x7fffu, 0x7c00u);
        break;
    case ELEMENT_BFLOAT16:
        COUNT(uint16_t, 0x7fffu, 0x7f80u);
        break;
    case ELEMENT_INT32:
        break;
    }
    return count;
}
