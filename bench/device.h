/* SPDX-License-Identifier: MIT
 *
 * From --backend and --device to a context of the library. */
#ifndef CLATTN_BENCH_DEVICE_H
#define CLATTN_BENCH_DEVICE_H

#include "report.h"

#include <clattn.h>

/* The words of --backend, in the order of clattn_backend; ended by NULL. */
extern const char *const backend_words[];

struct device_choice {
    int backend;         /* clattn_backend */
    const char *device;  /* NULL: not given */
    const char *variant; /* NULL: the best */
};

/* Checks that --device and --backend go together: an OpenCL device with --backend auto asks for OpenCL.
 * Returns STATUS_OK or STATUS_USAGE. */
int device_choice_check(struct device_choice *choice);

/* Makes the context. Returns STATUS_OK; STATUS_NO_DEVICE when what was asked for is not there; else
 * STATUS_FAILED. The reason was printed. */
int device_open(const struct device_choice *choice, clattn_context **context);

/* "clattn SUB: WHAT: reason" for a failed call. */
void device_error(clattn_context *context, clattn_status status, const char *what);

void device_report(report *object, const clattn_device_info *info);

#endif
