/* SPDX-License-Identifier: MIT
 *
 * Tensors in files: reading .npy and .safetensors by memory map.
 *
 *   file.npy                NumPy format 1.0, 2.0 and 3.0, little-endian, C order
 *   file.safetensors:NAME   the tensor NAME of a safetensors file
 *
 * A file is checked completely before it is used: an element of `data` is never read beyond the file, whatever
 * the header says. Errors are one line of text, without the program's name. */
#ifndef CLATTN_BENCH_TENSOR_FILE_H
#define CLATTN_BENCH_TENSOR_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum element_type { ELEMENT_FLOAT32, ELEMENT_FLOAT16, ELEMENT_BFLOAT16, ELEMENT_INT32 };

#define TENSOR_MAX_RANK 8
#define TENSOR_ERROR_SIZE 512

/* The element types of a .npy file that the caller expects. NumPy has no bfloat16, so such tensors are stored
 * as uint16 (or as the two opaque bytes that ml_dtypes writes), and the caller has to say so. */
enum element_request { REQUEST_ANY, REQUEST_FLOAT32, REQUEST_FLOAT16, REQUEST_BFLOAT16 };

struct tensor_file {
    const void *data; /* row-major, aligned to the element */
    uint64_t elements;
    enum element_type type;
    int rank;
    int64_t shape[TENSOR_MAX_RANK]; /* each >= 1 */
    char error[TENSOR_ERROR_SIZE];
    void *map; /* the mapping, or NULL */
    size_t map_size;
    void *copy; /* set instead of the mapping where the file holds the elements unaligned or in the other byte order */
};

struct tensor_values {
    uint64_t nan, infinite;
};

size_t element_size(enum element_type type);
const char *element_name(enum element_type type);

/* Opens `spec` (see above). Returns 0, or -1 with file->error set and nothing left open. */
int tensor_file_open(struct tensor_file *file, const char *spec, enum element_request request);

/* Releases what tensor_file_open() took; harmless after a failure and on a zeroed struct. */
void tensor_file_close(struct tensor_file *file);

/* Counts the values that are not finite: one pass over the data. */
struct tensor_values tensor_file_count(const struct tensor_file *file);

/* "16384 x 16 x 64" */
const char *tensor_shape_text(int rank, const int64_t *shape, char *text, size_t size);

#endif
