/* SPDX-License-Identifier: MIT */
/* Comparison of gradients. */

#include "gradients.h"

#include <math.h>
#include <stdlib.h>

static void compare_rows(const char *label, const char *problem, const char *gradient, const clattn_tensor *t,
                         const double *a, const double *b, double mean, double tolerance)
{
    for (int64_t row = 0; row < t->batch * t->len * t->heads; row++) {
        double error = 0, size = 0;
        for (int64_t n = row * t->dim; n < (row + 1) * t->dim; n++) {
            error += (a[n] - b[n]) * (a[n] - b[n]);
            size += a[n] * a[n];
        }
        if (!(sqrt(error) <= 4 * tolerance * fmax(sqrt(size), mean) + 1e-30))
            fail_msg("%s: %s, %s row %lld differs by %g, its size is %g", label, problem, gradient,
                     (long long)row, sqrt(error), sqrt(size));
    }
}

void gradients_compare(const char *label, const char *problem, const char *gradient,
                       const struct array *expected, const struct array *have, double tolerance)
{
    const clattn_tensor *t = &expected->view;
    double *a = tensor_doubles(t), *b = tensor_doubles(&have->view), error = 0, size = 0;
    int64_t rows = t->batch * t->len * t->heads;
    for (int64_t n = 0; n < rows * t->dim; n++) {
        error += (a[n] - b[n]) * (a[n] - b[n]);
        size += a[n] * a[n];
    }
    print_message("%s: %s, %s relative RMS %.1e\n", label, problem, gradient, sqrt(error / (size + 1e-300)));
    if (!(sqrt(error) <= tolerance * sqrt(size) + 1e-30))
        fail_msg("%s: %s, %s is wrong", label, problem, gradient);
    compare_rows(label, problem, gradient, t, a, b, sqrt(size / (double)rows), tolerance);
    array_check_guards(have, label, gradient);
    free(a);
    free(b);
}
