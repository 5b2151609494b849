/* SPDX-License-Identifier: MIT */
#include "clattn.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

const char *clattn_version(void)
{
    return TEXT(CLATTN_VERSION_MAJOR) "." TEXT(CLATTN_VERSION_MINOR) "." TEXT(CLATTN_VERSION_PATCH);
}
