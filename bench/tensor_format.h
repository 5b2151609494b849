/* SPDX-License-Identifier: MIT
 *
 * Between tensor_file.c and the two file formats. A parser looks at the bytes of a whole file and says where
 * the elements are; it reads no element and keeps nothing. */
#ifndef CLATTN_BENCH_TENSOR_FORMAT_H
#define CLATTN_BENCH_TENSOR_FORMAT_H

#include "tensor_file.h"

struct tensor_layout {
    enum element_type type;
    int rank;
    int64_t shape[TENSOR_MAX_RANK];
    uint64_t elements;
    uint64_t offset; /* of the first element, in bytes from the start of the file */
};

/* Both return 0, or -1 with one line in error[TENSOR_ERROR_SIZE]. */
int npy_parse(const unsigned char *bytes, uint64_t size, enum element_request request,
              struct tensor_layout *layout, char *error);
int safetensors_parse(const unsigned char *bytes, uint64_t size, const char *name, struct tensor_layout *layout,
                      char *error);

/* Both formats are little-endian: elsewhere elements are turned round between file and memory. */
enum { FILES_ARE_TURNED = __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ };
void elements_turn(void *elements, uint64_t count, size_t size); /* in place; size 2 or 4 */

/* Sets layout->elements from the shape and checks it: every dimension at least 1, no overflow. *byte_size is
 * the size of the elements. */
int tensor_layout_measure(struct tensor_layout *layout, uint64_t *byte_size, char *error);

/* Writes one line to error[TENSOR_ERROR_SIZE], control characters replaced; always -1. */
int tensor_error(char *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
