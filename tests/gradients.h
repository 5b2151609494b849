/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TEST_GRADIENTS_H
#define CLATTN_TEST_GRADIENTS_H

#include "harness.h"

/* Relative RMS of the tensor, and of each row relative to the larger of its own and the mean row's size: one
 * wrong row is seen. Checks the guards of `have`, too. */
void gradients_compare(const char *label, const char *problem, const char *gradient,
                       const struct array *expected, const struct array *have, double tolerance);

#endif
