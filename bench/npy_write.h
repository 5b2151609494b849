/* SPDX-License-Identifier: MIT
 *
 * Writing .npy files in streams. The elements go to a temporary file beside the target, which takes the
 * target's place only when all of them are there: after any error the target is what it was before. Pipes and
 * devices are written directly. Temporaries are also removed when a signal ends the program. */
#ifndef CLATTN_BENCH_NPY_WRITE_H
#define CLATTN_BENCH_NPY_WRITE_H

#include "tensor_file.h"

struct npy_writer {
    int fd;
    int slot;         /* of the temporary in the list that the signal handler cleans, or -1 */
    char *target;     /* NULL: not open */
    char *temporary;  /* NULL: the target is written directly */
    uint64_t missing; /* bytes of elements still to come */
    char error[TENSOR_ERROR_SIZE];
};

/* Opens `path` for rank dimensions of float32 or int32 elements and writes the header. 0, or -1 with
 * writer->error set and nothing left behind; so for all of these. */
int npy_writer_open(struct npy_writer *writer, const char *path, enum element_type type, int rank,
                    const int64_t *shape);
int npy_writer_write(struct npy_writer *writer, const void *elements, uint64_t bytes);

/* Puts the file into its place; fails when elements are missing. */
int npy_writer_close(struct npy_writer *writer);

/* Removes the temporary; harmless on a zeroed struct and after a close. */
void npy_writer_abandon(struct npy_writer *writer);

/* Cleans up temporaries when a signal ends the program, and says so in one line when a mapped input file was
 * cut off while it was in use (SIGBUS). */
void npy_writer_handle_signals(void);

#endif
