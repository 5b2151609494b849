/* SPDX-License-Identifier: MIT */
/* Minima and maxima of the pyramid, which no public call reads: the same bits on every backend, right by their
 * definition, and no change to the means. */

#include "lib/internal.h" /* before CMocka, whose `fail` is a macro */

#include "fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LEAF = 16, PART = LEAF / LEAF_PARTS };

static const struct shape shapes[] = {
    {"float32", SIZE_TINY, 2, 1, 410, 2, 1, 20, 20, CLATTN_FLOAT32, LAYOUT_PADDED, false},
    {"float16", SIZE_NORMAL, 1, 1, 77, 1, 1, 64, 64, CLATTN_FLOAT16, LAYOUT_BHTD, false},
    {"bfloat16", SIZE_CPU, 1, 1, 16, 3, 1, 7, 7, CLATTN_BFLOAT16, LAYOUT_BTHD, false},
    {"one key", SIZE_CPU, 1, 1, 1, 1, 1, 33, 33, CLATTN_FLOAT32, LAYOUT_BTHD, false},
};

/* What a pyramid holds, on the host. */
struct copy {
    float *means, *bounds, *parts;
};

static float *storage_copy(clattn_context *context, const struct storage *storage, size_t floats)
{
    float *copy = calloc(floats + 1, sizeof *copy);
    assert_non_null(copy);
    assert_int_equal(context->backend->storage_read(context, storage, 0, copy, floats * sizeof *copy), 0);
    return copy;
}

static struct copy copy_of(const struct target *target, const clattn_tensor *k, bool bounded,
                           clattn_pyramid **kept)
{
    clattn_select_desc select = select_desc(bounded ? CLATTN_SELECT_ROBUST : CLATTN_SELECT_PISA, 2, LEAF);
    clattn_pyramid *pyramid = NULL;
    check_success(target, clattn_pyramid_build_for(target->context, NULL, &select, k, &pyramid, NULL), "build");
    assert_int_equal(pyramid_has_bounds(pyramid), bounded);
    size_t row = (size_t)pyramid->dim, nodes = (size_t)pyramid->nodes, leaves = (size_t)pyramid->leaves;
    struct copy copy = {.means = storage_copy(target->context, &pyramid->means, nodes * row)};
    if (bounded) {
        copy.bounds = storage_copy(target->context, &pyramid->bounds, nodes * 2 * row);
        copy.parts = storage_copy(target->context, &pyramid->parts, leaves * LEAF_PARTS * 3 * row);
    }
    *kept = pyramid;
    return copy;
}

static void copy_free(struct copy *copy)
{
    free(copy->means);
    free(copy->bounds);
    free(copy->parts);
}

/* Minimum or maximum of keys first .. end - 1, NaN passed over. */
static float extreme(const clattn_tensor *k, int64_t b, int64_t h, int64_t d, int64_t first, int64_t end,
                     bool greatest)
{
    float found = greatest ? -INFINITY : INFINITY;
    for (int64_t j = first; j < MIN(end, k->len); j++) {
        float x = (float)tensor_get(k, b, j, h, d);
        if (greatest ? x > found : x < found) found = x;
    }
    return found;
}

static void expect_float(const struct target *target, const char *what, int64_t at, float got, float right)
{
    if (memcmp(&got, &right, sizeof got) != 0)
        fail_msg("%s: %s %lld is %a; %a is right", target->label, what, (long long)at, (double)got,
                 (double)right);
}

static void check_bounds(const struct target *target, const clattn_tensor *k, const clattn_pyramid *pyramid,
                         const struct copy *copy)
{
    int64_t dim = k->dim, nodes = pyramid_nodes(k->len, LEAF), leaves = level_nodes(k->len, LEAF, 1), at = 0;
    for (int64_t head = 0; head < k->batch * k->heads; head++)
        for (int level = 1; level <= level_count(k->len, LEAF); level++)
            for (int64_t n = 0; n < level_nodes(k->len, LEAF, level); n++, at++)
                for (int64_t d = 0; d < dim; d++) {
                    int64_t span = (int64_t)LEAF << (level - 1), b = head / k->heads, h = head % k->heads;
                    const float *own = copy->bounds + at * 2 * dim + d;
                    expect_float(target, "minimum", at, own[0],
                                 extreme(k, b, h, d, n * span, (n + 1) * span, false));
                    expect_float(target, "maximum", at, own[dim],
                                 extreme(k, b, h, d, n * span, (n + 1) * span, true));
                }
    assert_int_equal(at, nodes * k->batch * k->heads);
    assert_int_equal(pyramid->leaves, leaves * k->batch * k->heads);
    for (int64_t p = 0; p < pyramid->leaves * LEAF_PARTS; p++)
        for (int64_t d = 0; d < dim; d++) {
            int64_t head = p / (leaves * LEAF_PARTS), first = p % (leaves * LEAF_PARTS) * PART,
                    b = head / k->heads;
            const float *part = copy->parts + p * 3 * dim + d;
            if (first >= k->len) continue;
            expect_float(target, "part's minimum", p, part[dim],
                         extreme(k, b, head % k->heads, d, first, first + PART, false));
            expect_float(target, "part's maximum", p, part[2 * dim],
                         extreme(k, b, head % k->heads, d, first, first + PART, true));
            double sum = 0, size = 0;
            for (int64_t j = first; j < MIN(first + PART, k->len); j++) {
                sum += tensor_get(k, b, j, head % k->heads, d);
                size += fabs(tensor_get(k, b, j, head % k->heads, d));
            }
            int64_t count = MIN(PART, k->len - first);
            if (!isfinite(sum)) continue;
            if (!(fabs((double)part[0] - sum / (double)count) <= 4 * 0x1p-23 * size))
                fail_msg("%s: part %lld has the mean %g; %g is right", target->label, (long long)p,
                         (double)part[0], sum / (double)count);
        }
}

static void test_bounds(void **state)
{
    (void)state;
    static const double specials[] = {NAN, INFINITY, -INFINITY, -0.0, 0.0};
    for (const struct shape *s = shapes; s < shapes + COUNT(shapes); s++) {
        struct random random = random_seeded((uint64_t)(s - shapes));
        struct array k = array_new(s->dtype, s->batch, s->kv_len, s->kv_heads, s->dim, s->layout);
        array_fill(&k, FILL_NORMAL, &random);
        for (int n = 0; n < 60 && s->kv_len > 1; n++)
            tensor_set(&k.view, random_below(&random, s->batch), random_below(&random, s->kv_len),
                       random_below(&random, s->kv_heads), random_below(&random, s->dim),
                       specials[n % COUNT(specials)]);
        FOR_EACH_TARGET (target) {
            clattn_pyramid *bounded, *plain;
            if (!target_runs(target, s->size)) continue;
            struct copy a = copy_of(target, &k.view, true, &bounded),
                        b = copy_of(target, &k.view, false, &plain);
            check_bounds(target, &k.view, bounded, &a);
            for (int64_t n = 0; n < plain->nodes * s->dim; n++)
                if (!isnan(b.means[n])) expect_float(target, "mean", n, a.means[n], b.means[n]);
            copy_free(&a);
            copy_free(&b);
            clattn_pyramid_release(target->context, bounded);
            clattn_pyramid_release(target->context, plain);
        }
        array_free(&k);
    }
    target_report("bounds");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bounds)};
    return cmocka_run_group_tests_name("pyramid_bounds", tests, targets_open, targets_close);
}
