/* SPDX-License-Identifier: MIT
 *
 * The folder of compiled OpenCL programs, as the library finds it: clattn(7), FILES. */
#ifndef CLATTN_BENCH_CACHE_FOLDER_H
#define CLATTN_BENCH_CACHE_FOLDER_H

#include <stdbool.h>
#include <stdint.h>

enum { CACHE_PATH_BYTES = 4096 };

struct cache_folder {
    char path[CACHE_PATH_BYTES]; /* empty: none is named */
    bool exists;
    char owner[64]; /* user name, or number; empty without a folder */
    unsigned mode;  /* permission bits */
    int64_t entries, bytes;
    int64_t limit_bytes;
    bool used;          /* the library keeps programs there */
    const char *reason; /* why not; NULL when it does */
};

/* The folder's path; NULL when the environment names none. */
const char *cache_folder_path(char text[CACHE_PATH_BYTES]);

void cache_folder_read(struct cache_folder *folder);

#endif
