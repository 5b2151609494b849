/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "cache_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEFAULT_MIB = 256 };

const char *cache_folder_path(char text[CACHE_PATH_BYTES])
{
    const char *own = getenv("CLATTN_CACHE_DIR"), *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int length = 0;
    if (own)
        length = snprintf(text, CACHE_PATH_BYTES, "%s", own);
    else if (xdg && *xdg == '/')
        length = snprintf(text, CACHE_PATH_BYTES, "%s/clattn", xdg);
    else if (home && *home == '/')
        length = snprintf(text, CACHE_PATH_BYTES, "%s/.cache/clattn", home);
    return length > 0 && length < CACHE_PATH_BYTES ? text : NULL;
}

static int64_t limit_of_environment(void)
{
    const char *text = getenv("CLATTN_CACHE_SIZE");
    char *end = NULL;
    unsigned long long mib = text ? strtoull(text, &end, 10) : DEFAULT_MIB;
    if (text && (end == text || *end || mib > INT64_MAX >> 20)) mib = DEFAULT_MIB;
    return (int64_t)mib << 20;
}

static void count_entries(struct cache_folder *folder)
{
    struct stat status;
    DIR *directory = opendir(folder->path);
    if (!directory) return;
    for (struct dirent *item; (item = readdir(directory));) {
        size_t length = strlen(item->d_name);
        if (length != 36 || strcmp(item->d_name + 32, ".bin") ||
            fstatat(dirfd(directory), item->d_name, &status, AT_SYMLINK_NOFOLLOW))
            continue;
        folder->entries++;
        folder->bytes += status.st_size;
    }
    closedir(directory);
}

/* Could the folder be made? The nearest one above it that exists decides. */
static bool can_be_made(const char *path)
{
    char above[CACHE_PATH_BYTES];
    snprintf(above, sizeof above, "%s", path);
    for (char *slash; (slash = strrchr(above, '/'));) {
        *slash = 0;
        if (access(*above ? above : "/", F_OK) == 0) return access(*above ? above : "/", W_OK | X_OK) == 0;
        if (!*above) return false;
    }
    return access(".", W_OK | X_OK) == 0;
}

static const char *reason_of(struct cache_folder *folder)
{
    struct stat status;
#ifndef HAVE_XXHASH
    return "this build has no program cache: it lacks xxHash";
#endif
    if (folder->limit_bytes == 0) return "CLATTN_CACHE_SIZE is 0";
    if (!*folder->path) return "neither CLATTN_CACHE_DIR nor XDG_CACHE_HOME nor HOME names a folder";
    if (getuid() != geteuid() || getgid() != getegid())
        return "the program runs with the rights of another user";
    if (stat(folder->path, &status)) {
        if (errno != ENOENT) return "it cannot be reached";
        return can_be_made(folder->path) ? NULL : "it is not there and cannot be made";
    }
    folder->exists = true;
    folder->mode = status.st_mode & 07777;
    const struct passwd *user = getpwuid(status.st_uid);
    if (user)
        snprintf(folder->owner, sizeof folder->owner, "%s", user->pw_name);
    else
        snprintf(folder->owner, sizeof folder->owner, "%lu", (unsigned long)status.st_uid);
    if (!S_ISDIR(status.st_mode)) return "it is no folder";
    count_entries(folder);
    if (status.st_uid != geteuid()) return "it belongs to another user";
    if (status.st_mode & (S_IWGRP | S_IWOTH)) return "others may write to it";
    if (access(folder->path, W_OK | X_OK)) return "it cannot be written";
    return NULL;
}

void cache_folder_read(struct cache_folder *folder)
{
    memset(folder, 0, sizeof *folder);
    if (!cache_folder_path(folder->path)) folder->path[0] = 0;
    folder->limit_bytes = limit_of_environment();
    folder->reason = reason_of(folder);
    folder->used = folder->reason == NULL;
}
