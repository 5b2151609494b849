/* SPDX-License-Identifier: MIT */
/* Instructions of Hopper cards that NVIDIA's OpenCL compiler refuses.
 *
 * The compiler emits PTX for sm_90, and wgmma belongs to sm_90a. But a program's binary is that PTX as text,
 * and the driver assembles whatever text it is given. So cl/wgmma_nvidia.cl writes such instructions as PTX
 * comments with their operands, and here the text is changed and loaded again:
 *
 *     //sm_90a wgmma...          ->  wgmma...
 *     .target sm_90, ...         ->  .target sm_90a, ...
 *     //groups_per_unit 3        ->  .minnctapersm 3, behind the kernel's .reqntid: registers for three
 * work-groups on a multiprocessor (the compiler has no option for it that works)
 *
 * A card or driver whose text looks otherwise gets a failed build, and the tier is not used there. */

#include "config.h"

#include "opencl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char MARK[] = "//sm_90a ", TARGET[] = ".target sm_90,", TARGET_A[] = ".target sm_90a,";
static const char GROUPS_MARK[] = "//groups_per_unit ", WORK_GROUP[] = ".reqntid";

bool opencl_hopper_wanted(const char *source)
{
    return strstr(source, MARK) != NULL;
}

/* The last work-group size before `end`: the one of the kernel that `end` is in. */
static char *last_work_group(char *text, const char *end)
{
    char *last = NULL;
    for (char *at = strstr(text, WORK_GROUP); at && at < end; at = strstr(at + 1, WORK_GROUP))
        last = at;
    return last;
}

/* Each mark becomes a directive of its kernel. `text` has room for 24 bytes a mark. */
static bool limit_registers(char *text)
{
    for (char *mark; (mark = strstr(text, GROUPS_MARK));) {
        char directive[24], *at = last_work_group(text, mark);
        int bytes = snprintf(directive, sizeof directive, "\n.minnctapersm %d",
                             atoi(mark + sizeof GROUPS_MARK - 1) & 31);
        mark[2] = '-'; /* done with this one */
        at = at ? strchr(at, '\n') : NULL;
        if (!at) return false;
        memmove(at + bytes, at, strlen(at) + 1);
        memcpy(at, directive, (size_t)bytes);
    }
    return true;
}

static size_t count_of(const char *text, const char *part)
{
    size_t count = 0;
    for (const char *at = text; (at = strstr(at, part)); at++)
        count++;
    return count;
}

char *opencl_hopper_text(const char *text)
{
    size_t room = strlen(text) + 24 * (count_of(text, GROUPS_MARK) + 1);
    char *result = malloc(room), *to = result;
    bool has_target = false;
    if (!result) return NULL;
    while (*text) {
        if (strncmp(text, MARK, sizeof MARK - 1) == 0) {
            text += sizeof MARK - 1;
        } else if (!has_target && strncmp(text, TARGET, sizeof TARGET - 1) == 0) {
            memcpy(to, TARGET_A, sizeof TARGET_A - 1);
            to += sizeof TARGET_A - 1;
            text += sizeof TARGET - 1;
            has_target = true;
        } else {
            *to++ = *text++;
        }
    }
    *to = 0;
    if (has_target && limit_registers(result)) return result;
    free(result);
    return NULL;
}
