/* SPDX-License-Identifier: MIT */
/* Binaries of OpenCL programs on disk, so that only the first start compiles.
 *
 *   folder   CLATTN_CACHE_DIR, else XDG_CACHE_HOME/clattn, else HOME/.cache/clattn; made with mode 0700; used
 * only if it belongs to this user and nobody else may write file     <hash of the key>.bin: header, the whole
 * key, payload; written to a temporary and renamed size     CLATTN_CACHE_SIZE in MiB, default 256; 0: no cache.
 * The entries unused for longest go first
 *
 * Whatever goes wrong means "no entry"; nothing is reported. Files are never trusted: size, key and checksum
 * have to agree, or the file is unlinked. */

#include "config.h"

#include "opencl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef HAVE_XXHASH

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

enum {
    FORMAT = 1,
    PATH_BYTES = 4096,
    NAME_BYTES = 64,
    SIZE_MIB = 256,
    STALE_SECONDS = 3600,
    KEY_BYTES_MAX = 1 << 16
};

struct header {
    char magic[8];
    uint32_t format; /* in the byte order of the writer: a foreign one does not match */
    uint32_t key_bytes;
    uint64_t payload_bytes;
    uint64_t checksum[2]; /* of key and payload */
};

static const char magic[8] = {'c', 'l', 'a', 't', 't', 'n', 'P', '\n'};

/* ---- folder ---- */

/* Makes a folder and those above it. */
static void make_folders(char *path)
{
    for (char *slash = path + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    mkdir(path, 0700);
}

/* The cache's folder, opened; -1: there is none. */
static int folder_open(bool create)
{
    char path[PATH_BYTES];
    const char *own = getenv("CLATTN_CACHE_DIR"), *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int length = -1;
    struct stat status;
    /* A privileged program must not be led by its caller's environment. */
    if (getuid() != geteuid() || getgid() != getegid()) return -1;
    if (own)
        length = snprintf(path, sizeof path, "%s", own);
    else if (xdg && xdg[0] == '/')
        length = snprintf(path, sizeof path, "%s/clattn", xdg);
    else if (home && home[0] == '/')
        length = snprintf(path, sizeof path, "%s/.cache/clattn", home);
    if (length <= 0 || length >= (int)sizeof path) return -1;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0 && create && errno == ENOENT) {
        make_folders(path);
        folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    if (folder < 0) return -1;
    if (fstat(folder, &status) || status.st_uid != geteuid() || (status.st_mode & (S_IWGRP | S_IWOTH))) {
        close(folder);
        return -1;
    }
    return folder;
}

static uint64_t size_limit(void)
{
    const char *text = getenv("CLATTN_CACHE_SIZE");
    char *end;
    unsigned long long mib = text ? strtoull(text, &end, 10) : SIZE_MIB;
    if (text && (end == text || *end || mib > UINT64_MAX >> 20)) mib = SIZE_MIB;
    return (uint64_t)mib << 20;
}

static void entry_name(const char *key, char name[NAME_BYTES])
{
    XXH128_hash_t hash = XXH3_128bits(key, strlen(key));
    snprintf(name, NAME_BYTES, "%016llx%016llx.bin", (unsigned long long)hash.high64,
             (unsigned long long)hash.low64);
}

static void checksum(const char *key, const void *payload, size_t bytes, uint64_t sum[2])
{
    XXH128_hash_t seed = XXH3_128bits(key, strlen(key));
    XXH128_hash_t hash = XXH3_128bits_withSeed(payload, bytes, seed.low64 ^ seed.high64);
    sum[0] = hash.low64;
    sum[1] = hash.high64;
}

/* ---- reading ---- */

static bool read_all(int file, void *data, size_t bytes)
{
    for (char *at = data; bytes > 0;) {
        ssize_t got = read(file, at, bytes);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += got;
        bytes -= (size_t)got;
    }
    return true;
}

/* The payload of an opened entry, or NULL when anything is not as it was written. */
static void *entry_read(int file, const char *key, size_t *bytes)
{
    struct stat status;
    struct header header;
    uint64_t sum[2];
    size_t key_bytes = strlen(key);
    if (fstat(file, &status) || !S_ISREG(status.st_mode) || status.st_uid != geteuid()) return NULL;
    if (!read_all(file, &header, sizeof header) || memcmp(header.magic, magic, sizeof magic) ||
        header.format != FORMAT || header.key_bytes != key_bytes || header.payload_bytes > SIZE_MAX / 2 ||
        (uint64_t)status.st_size != sizeof header + key_bytes + header.payload_bytes)
        return NULL;
    char *have_key = malloc(key_bytes + 1);
    char *payload = malloc((size_t)header.payload_bytes + 1);
    bool good = have_key && payload && read_all(file, have_key, key_bytes) &&
                memcmp(have_key, key, key_bytes) == 0 && read_all(file, payload, (size_t)header.payload_bytes);
    free(have_key);
    if (good) {
        checksum(key, payload, (size_t)header.payload_bytes, sum);
        good = memcmp(sum, header.checksum, sizeof sum) == 0;
    }
    if (!good) {
        free(payload);
        return NULL;
    }
    payload[header.payload_bytes] = 0; /* so that text may be read as a string */
    *bytes = (size_t)header.payload_bytes;
    return payload;
}

void *opencl_cache_load(const char *key, size_t *bytes)
{
    char name[NAME_BYTES];
    void *payload = NULL;
    int folder = size_limit() ? folder_open(false) : -1;
    if (folder < 0) return NULL;
    entry_name(key, name);
    int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file >= 0) {
        payload = entry_read(file, key, bytes);
        if (payload) futimens(file, NULL); /* eviction goes by last use */
        close(file);
    }
    if (!payload && (file >= 0 || errno == ELOOP)) unlinkat(folder, name, 0);
    close(folder);
    return payload;
}

void opencl_cache_drop(const char *key)
{
    char name[NAME_BYTES];
    int folder = folder_open(false);
    if (folder < 0) return;
    entry_name(key, name);
    unlinkat(folder, name, 0);
    close(folder);
}

/* ---- eviction ---- */

struct entry {
    char name[NAME_BYTES];
    struct timespec used;
    uint64_t bytes;
};

static int compare_entries(const void *a, const void *b)
{
    const struct timespec *x = &((const struct entry *)a)->used, *y = &((const struct entry *)b)->used;
    if (x->tv_sec != y->tv_sec) return (x->tv_sec > y->tv_sec) - (x->tv_sec < y->tv_sec);
    return (x->tv_nsec > y->tv_nsec) - (x->tv_nsec < y->tv_nsec);
}

/* All entries, and temporaries of writers that died are removed. Returns how many; *list is to be freed. */
static size_t entries_list(int folder, struct entry **list)
{
    size_t count = 0, room = 0;
    struct stat status;
    *list = NULL;
    int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = copy < 0 ? NULL : fdopendir(copy);
    if (!directory) {
        if (copy >= 0) close(copy);
        return 0;
    }
    for (struct dirent *item; (item = readdir(directory));) {
        size_t length = strlen(item->d_name);
        bool is_temporary = strncmp(item->d_name, ".tmp-", 5) == 0;
        bool is_entry = length == 36 && strcmp(item->d_name + 32, ".bin") == 0;
        if ((!is_temporary && !is_entry) || fstatat(folder, item->d_name, &status, AT_SYMLINK_NOFOLLOW))
            continue;
        if (is_temporary) {
            if (time(NULL) - status.st_mtime > STALE_SECONDS) unlinkat(folder, item->d_name, 0);
            continue;
        }
        if (count == room) {
            struct entry *longer = realloc(*list, (room = 2 * room + 64) * sizeof **list);
            if (!longer) break;
            *list = longer;
        }
        struct entry *entry = &(*list)[count++];
        snprintf(entry->name, sizeof entry->name, "%.36s", item->d_name);
        entry->used = status.st_mtim;
        entry->bytes = (uint64_t)status.st_size;
    }
    closedir(directory);
    return count;
}

static void evict(int folder, uint64_t limit)
{
    struct entry *list;
    uint64_t total = 0;
    size_t count = entries_list(folder, &list);
    for (size_t i = 0; i < count; i++)
        total += list[i].bytes;
    if (total > limit) {
        qsort(list, count, sizeof *list, compare_entries);
        for (size_t i = 0; i < count && total > limit; i++) {
            unlinkat(folder, list[i].name, 0);
            total -= list[i].bytes;
        }
    }
    free(list);
}

/* ---- writing ---- */

static bool write_all(int file, const void *data, size_t bytes)
{
    for (const char *at = data; bytes > 0;) {
        ssize_t done = write(file, at, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        at += done;
        bytes -= (size_t)done;
    }
    return true;
}

/* A file that no other thread or process has; its name goes to `name`. */
static int temporary_open(int folder, char name[NAME_BYTES])
{
    int file = -1;
    for (int attempt = 0; attempt < 100 && file < 0; attempt++) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        snprintf(name, NAME_BYTES, ".tmp-%lx-%lx-%x", (unsigned long)getpid(), (unsigned long)now.tv_nsec,
                 attempt);
        file = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (file < 0 && errno != EEXIST) break;
    }
    return file;
}

bool opencl_cache_writable(void)
{
    int folder = size_limit() ? folder_open(true) : -1;
    if (folder < 0) return false;
    bool writable = faccessat(folder, ".", W_OK | X_OK, AT_EACCESS) == 0;
    close(folder);
    return writable;
}

void opencl_cache_store(const char *key, const void *payload, size_t bytes)
{
    char name[NAME_BYTES], temporary[NAME_BYTES];
    uint64_t limit = size_limit();
    struct header header = {.format = FORMAT, .key_bytes = (uint32_t)strlen(key), .payload_bytes = bytes};
    if (strlen(key) > KEY_BYTES_MAX || bytes + sizeof header + strlen(key) > limit) return;
    int folder = folder_open(true);
    if (folder < 0) return;
    int file = temporary_open(folder, temporary);
    if (file >= 0) {
        entry_name(key, name);
        memcpy(header.magic, magic, sizeof magic);
        checksum(key, payload, bytes, header.checksum);
        bool good = write_all(file, &header, sizeof header) && write_all(file, key, strlen(key)) &&
                    write_all(file, payload, bytes);
        good = close(file) == 0 && good;
        if (!good || renameat(folder, temporary, folder, name))
            unlinkat(folder, temporary, 0);
        else
            evict(folder, limit);
    }
    close(folder);
}

/* ---- keys ---- */

char *opencl_cache_key(const struct opencl_device *device, const char *kind, const char *what, const char *text)
{
    XXH128_hash_t hash = XXH3_128bits(text, strlen(text));
    char *key = NULL;
    for (int length = 0, pass = 0; pass < 2; pass++) {
        length = snprintf(key, (size_t)length,
                          "clattn cache %d\nkind %s\nlibrary %s, %zu-bit\nplatform %s\nplatform version %s\n"
                          "device %s\nvendor %08x\ndriver %s\ndevice version %s\nwhat %s\n"
                          "text %zu bytes %016llx%016llx\n",
                          FORMAT, kind, PACKAGE_VERSION, 8 * sizeof(void *), device->platform_name,
                          device->platform_version, device->name, (unsigned)device->vendor_id, device->driver,
                          device->version, what, strlen(text), (unsigned long long)hash.high64,
                          (unsigned long long)hash.low64) +
                 1;
        if (pass == 0 && !(key = malloc((size_t)length))) return NULL;
    }
    return key;
}

#else /* without xxHash there is no disk cache */

void *opencl_cache_load(const char *key, size_t *bytes)
{
    (void)key;
    (void)bytes;
    return NULL;
}

bool opencl_cache_writable(void)
{
    return false;
}

void opencl_cache_store(const char *key, const void *payload, size_t bytes)
{
    (void)key;
    (void)payload;
    (void)bytes;
}

void opencl_cache_drop(const char *key)
{
    (void)key;
}

char *opencl_cache_key(const struct opencl_device *device, const char *kind, const char *what, const char *text)
{
    (void)device;
    (void)kind;
    (void)what;
    (void)text;
    return NULL;
}

#endif
