/* SPDX-License-Identifier: MIT */
#include "npy.h"

#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE *npy_open(const char *folder, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.npy", folder, name);
    return fopen(path, "rb");
}

bool npy_exists(const char *folder, const char *name)
{
    FILE *file = npy_open(folder, name);
    if (file) fclose(file);
    return file != NULL;
}

/* The header is a Python dictionary in text: {'descr': '<f2', 'fortran_order': False, 'shape': (1, 512, 16,
 * 64), }. */
static bool parse(struct npy *npy, const char *header)
{
    const char *descr = strstr(header, "'descr': '"), *shape = strstr(header, "'shape': (");
    if (!descr || !shape || strstr(header, "'fortran_order': True")) return false;
    if (sscanf(descr + 10, "%*1[<|=]%2[a-z0-9]'", npy->type) != 1) return false;
    npy->count = 1;
    char *end;
    for (const char *at = shape + 10; npy->rank < 4 && *at != ')'; at = end) {
        npy->shape[npy->rank] = strtoll(at, &end, 10);
        if (end == at) return false;
        npy->count *= npy->shape[npy->rank++];
        while (*end == ',' || *end == ' ')
            end++;
    }
    return npy->count > 0;
}

struct npy npy_read(const char *folder, const char *name, const char *type)
{
    struct npy npy = {0};
    unsigned char head[10];
    FILE *file = npy_open(folder, name);
    if (!file) fail_msg("%s/%s.npy cannot be opened", folder, name);
    bool good = fread(head, 1, sizeof head, file) == sizeof head && memcmp(head, "\x93NUMPY\x01", 7) == 0;
    size_t length = head[8] + 256u * head[9];
    char *header = calloc(length + 1, 1);
    good = good && header && fread(header, 1, length, file) == length && parse(&npy, header);
    good = good && strcmp(npy.type, type) == 0;
    free(header);
    size_t bytes = good ? (size_t)npy.count * (size_t)(npy.type[1] - '0') : 1;
    npy.data = malloc(bytes);
    good = good && npy.data && fread(npy.data, 1, bytes, file) == bytes;
    fclose(file);
    if (!good) fail_msg("%s/%s.npy is not a whole array of %s", folder, name, type);
    return npy;
}

void npy_free(struct npy *npy)
{
    free(npy->data);
    *npy = (struct npy){0};
}
