/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "npy_write.h"

#include "tensor_format.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* write() is given this much at once, so that an interrupted one is noticed soon. */
#define PIECE ((uint64_t)1 << 20)

#define SLOTS 8
static const char *volatile temporaries[SLOTS];

static void remove_and_die(int signal_number)
{
    static const char cut_off[] = "clattn: an input file became shorter while it was in use\n";
    for (int i = 0; i < SLOTS; i++)
        if (temporaries[i]) unlink(temporaries[i]);
    if (signal_number == SIGBUS) {
        ssize_t ignored = write(STDERR_FILENO, cut_off, sizeof cut_off - 1);
        (void)ignored;
        _exit(1);
    }
    /* SA_RESETHAND: the second time it has its default effect. */
    raise(signal_number);
}

void npy_writer_handle_signals(void)
{
    static const int signals[] = {SIGHUP, SIGINT, SIGTERM, SIGPIPE, SIGBUS, SIGXCPU, SIGXFSZ};
    struct sigaction old, action = {.sa_handler = remove_and_die, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        if (sigaction(signals[i], NULL, &old) == 0 && old.sa_handler == SIG_DFL)
            sigaction(signals[i], &action, NULL);
}

static int fail(struct npy_writer *writer)
{
    npy_writer_abandon(writer);
    return -1;
}

static int write_all(struct npy_writer *writer, const char *bytes, uint64_t size)
{
    while (size > 0) {
        ssize_t n = write(writer->fd, bytes, size < PIECE ? (size_t)size : (size_t)PIECE);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            tensor_error(writer->error, "%s: %s", writer->target, strerror(errno));
            return fail(writer);
        }
        bytes += n;
        size -= (uint64_t)n;
    }
    return 0;
}

/* Elements are of 4 bytes, and a call writes whole ones. */
static int write_turned(struct npy_writer *writer, const char *elements, uint64_t bytes)
{
    uint32_t words[1024];
    for (uint64_t at = 0, size; at < bytes; at += size) {
        size = bytes - at < sizeof words ? bytes - at : sizeof words;
        memcpy(words, elements + at, size);
        elements_turn(words, size / sizeof *words, sizeof *words);
        if (write_all(writer, (const char *)words, size) != 0) return -1;
    }
    return 0;
}

/* The mode of the file that will be replaced, or what open() would give a new one. */
static mode_t target_mode(const char *target, const struct stat *status)
{
    if (status && access(target, F_OK) == 0) return status->st_mode & 0777;
    mode_t mask = umask(0);
    umask(mask);
    return 0666 & ~mask;
}

static int open_temporary(struct npy_writer *writer, const struct stat *status)
{
    static const char suffix[] = ".XXXXXX";
    size_t length = strlen(writer->target);
    writer->temporary = malloc(length + sizeof suffix);
    if (!writer->temporary) return tensor_error(writer->error, "out of memory");
    memcpy(writer->temporary, writer->target, length);
    memcpy(writer->temporary + length, suffix, sizeof suffix);
    writer->fd = mkstemp(writer->temporary);
    if (writer->fd < 0) {
        tensor_error(writer->error, "%s: cannot be created: %s", writer->target, strerror(errno));
        free(writer->temporary);
        writer->temporary = NULL;
        return -1;
    }
    for (int i = 0; i < SLOTS && writer->slot < 0; i++)
        if (!temporaries[i]) {
            temporaries[i] = writer->temporary;
            writer->slot = i;
        }
    fcntl(writer->fd, F_SETFD, FD_CLOEXEC);
    fchmod(writer->fd, target_mode(writer->target, status));
    return 0;
}

static int open_target(struct npy_writer *writer, const char *path)
{
    struct stat status;
    int there = *path ? stat(path, &status) : -1;
    if (!*path) return tensor_error(writer->error, "an empty file name");
    if (there == 0 && S_ISDIR(status.st_mode)) return tensor_error(writer->error, "%s: is a directory", path);
    /* Through a symbolic link the file is replaced, not the link. */
    writer->target = there == 0 ? realpath(path, NULL) : strdup(path);
    if (!writer->target) return tensor_error(writer->error, "%s: %s", path, strerror(errno));
    if (there != 0 || S_ISREG(status.st_mode)) return open_temporary(writer, there == 0 ? &status : NULL);
    writer->fd = open(path, O_WRONLY | O_CLOEXEC | O_NOCTTY);
    if (writer->fd < 0) return tensor_error(writer->error, "%s: %s", path, strerror(errno));
    return 0;
}

/* Version 1.0, padded with spaces so that the elements start at a multiple of 64. */
static int write_header(struct npy_writer *writer, enum element_type type, int rank, const int64_t *shape)
{
    char header[320] = "\x93NUMPY\x01\x00??";
    size_t used = 10;
    used += (size_t)snprintf(header + used, sizeof header - used,
                             "{'descr': '%s', 'fortran_order': False, 'shape': (",
                             type == ELEMENT_INT32 ? "<i4" : "<f4");
    for (int i = 0; i < rank; i++)
        used += (size_t)snprintf(header + used, sizeof header - used, "%" PRId64 "%s", shape[i],
                                 rank == 1      ? ","
                                 : i + 1 < rank ? ", "
                                                : "");
    used += (size_t)snprintf(header + used, sizeof header - used, "), }");
    while ((used + 1) % 64 != 0)
        header[used++] = ' ';
    header[used++] = '\n';
    header[8] = (char)((used - 10) & 0xff);
    header[9] = (char)((used - 10) >> 8);
    return write_all(writer, header, used);
}

int npy_writer_open(struct npy_writer *writer, const char *path, enum element_type type, int rank,
                    const int64_t *shape)
{
    struct tensor_layout layout = {.type = type, .rank = rank};
    memset(writer, 0, sizeof *writer);
    writer->fd = -1;
    writer->slot = -1;
    if (rank > TENSOR_MAX_RANK) return tensor_error(writer->error, "%s: too many dimensions", path);
    memcpy(layout.shape, shape, (size_t)rank * sizeof *shape);
    if (tensor_layout_measure(&layout, &writer->missing, writer->error) != 0) return -1;
    if (open_target(writer, path) != 0) return fail(writer);
    return write_header(writer, type, rank, shape);
}

int npy_writer_write(struct npy_writer *writer, const void *elements, uint64_t bytes)
{
    if (bytes > writer->missing) {
        tensor_error(writer->error, "%s: more elements than its shape has", writer->target);
        return fail(writer);
    }
    writer->missing -= bytes;
    return FILES_ARE_TURNED ? write_turned(writer, elements, bytes) : write_all(writer, elements, bytes);
}

int npy_writer_close(struct npy_writer *writer)
{
    if (writer->missing > 0) {
        tensor_error(writer->error, "%s: %" PRIu64 " bytes of elements are missing", writer->target,
                     writer->missing);
        return fail(writer);
    }
    int closed = close(writer->fd);
    writer->fd = -1;
    if (closed != 0 || (writer->temporary && rename(writer->temporary, writer->target) != 0)) {
        tensor_error(writer->error, "%s: %s", writer->target, strerror(errno));
        return fail(writer);
    }
    if (writer->slot >= 0) temporaries[writer->slot] = NULL;
    writer->slot = -1;
    free(writer->temporary);
    writer->temporary = NULL;
    npy_writer_abandon(writer);
    return 0;
}

void npy_writer_abandon(struct npy_writer *writer)
{
    if (!writer->target) return;
    if (writer->fd >= 0) close(writer->fd);
    if (writer->temporary) unlink(writer->temporary);
    if (writer->slot >= 0) temporaries[writer->slot] = NULL;
    free(writer->temporary);
    free(writer->target);
    writer->temporary = writer->target = NULL;
    writer->fd = writer->slot = -1;
}
