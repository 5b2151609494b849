/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_LIB_KERNEL_SOURCES_H
#define CLATTN_LIB_KERNEL_SOURCES_H

/* The OpenCL C files and the quirk table of cl/, embedded by the build (cl/embed.awk) in the order of cl/Makefile.inc.
 * The name is the file's own ("common.cl"), so that CLATTN_KERNEL_DIR can replace OpenCL C by the file of that name. */
struct kernel_source {
    const char *name;
    const char *text;
};

extern const struct kernel_source kernel_sources[]; /* ends with {NULL, NULL} */
extern const unsigned kernel_source_count;          /* without that end */

#endif
