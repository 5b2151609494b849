/* SPDX-License-Identifier: MIT */
#include "window.h"

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* A leader lies up to a stride behind i, which 32 bits need not hold. */
struct range window_keys(const struct window_axis *axis, int32_t r, int32_t i)
{
    int64_t last = class_length(axis, r) - 1, w = axis->window, s = axis->stride;
    if (axis->causal) {
        int64_t lead = min64(i / s * s + s - 1, last);
        return (struct range){(int32_t)max64(lead - w + 1, 0), i + 1};
    }
    int64_t lead = min64(i / s * s + s / 2, last);
    int64_t lo = min64(max64(lead - w / 2, 0), last + 1 - w);
    return (struct range){(int32_t)lo, (int32_t)(lo + w)};
}

/* lo and hi never descend as i grows, so the queries are an interval: its ends are found by bisection. */
struct range window_queries(const struct window_axis *axis, int32_t r, int32_t j)
{
    int32_t length = class_length(axis, r);
    struct range queries = {0, length};
    for (int32_t end = length; queries.lo < end;) { /* the first i whose hi is above j */
        int32_t middle = queries.lo + (end - queries.lo) / 2;
        if (window_keys(axis, r, middle).hi > j)
            end = middle;
        else
            queries.lo = middle + 1;
    }
    for (int32_t first = queries.lo; first < queries.hi;) { /* the first i whose lo is above j */
        int32_t middle = first + (queries.hi - first) / 2;
        if (window_keys(axis, r, middle).lo > j)
            queries.hi = middle;
        else
            first = middle + 1;
    }
    return queries;
}
