/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TEST_NPY_H
#define CLATTN_TEST_NPY_H

/* Reads whole .npy files of the sample: float16, float32, int32; C order. */

#include <stdbool.h>
#include <stdint.h>

struct npy {
    char type[4]; /* "f2", "f4", "i4" */
    int64_t shape[4];
    int rank;
    int64_t count; /* elements */
    void *data;
};

bool npy_exists(const char *folder, const char *name);
struct npy npy_read(const char *folder, const char *name, const char *type); /* fails the test when it cannot */
void npy_free(struct npy *npy);

#endif
