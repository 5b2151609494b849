/* SPDX-License-Identifier: MIT */
/* Rough scores of leaves, where the machine multiplies words faster than floats: most of them already decide
 * what is kept, and the exact way is gone only where they do not. A rough score comes with a bound of its
 * distance from the exact one (words_avx512vnni.h), so that the lists stay the same to the bit.
 *
 * Included by select_levels_simd.h. */

#if defined(SIMD_WORD_DOTS)

enum {
    ROUGH_VISITS = 2,  /* of a leaf, for which converting its keys pays, ... */
    ROUGH_MEASURE = 12 /* ... and measuring what rounding leaves of them */
};

/* A leaf in words, and what is prefetched meanwhile. */
struct rough_leaf {
    const struct batch *batch;
    struct word_leaf key;
    struct word_vectors from;
    int64_t keys;
    float factor; /* of sums, together with the step of a row */
    double unit;  /* greatest logit to base 2 of a query of norm 1 */
    struct word_ahead ahead;
    int64_t passes; /* over the leaf that remain */
};

static float *visit_error(const struct batch *batch, const struct visit *visit)
{
    return (float *)((char *)batch->walk[0].error + visit->row * batch->walk_bytes) + visit->slot;
}

static void rough_dots(struct rough_leaf *leaf, int vectors)
{
    dot_words(&leaf->from, vectors, leaf->batch->leaf_words, word_stride(leaf->batch->job->problem->dim),
              leaf->keys, leaf->batch->logits, RUN_ROWS, &leaf->ahead, leaf->passes--);
}

/* Heads of `count` rows side by side, as join_rows. */
static int rough_join(const struct batch *batch, const struct visit *visit, int64_t count, float factor,
                      struct word_vectors *from)
{
    int32_t group = batch->job->problem->group;
    int64_t lanes = count * group, vectors = ceil_div(lanes, WIDTH), size = from->steps * WIDTH;
    for (int64_t lane = 0; lane < vectors * WIDTH; lane++) {
        int32_t *to = batch->joined_words + lane / WIDTH * size + lane % WIDTH;
        int64_t h = lane % group, v = lane < lanes ? visit[lane / group].row * batch->vectors + h / WIDTH : 0;
        const int32_t *words = batch->words + v * size + h % WIDTH;
        batch->joined_step[lane] = lane < lanes ? batch->word_step[v * WIDTH + h % WIDTH] : 0;
        for (int64_t s = 0; s < from->steps; s++)
            to[s * WIDTH] = lane < lanes ? words[s * WIDTH] : 0;
    }
    for (int v = 0; v < vectors; v++) {
        from->q[v] = batch->joined_words + v * size;
        from->factor[v] = vec_mul(vec_load(batch->joined_step + v * WIDTH), vec_set(factor));
    }
    return (int)vectors;
}

/* Score of the first `heads` lanes from z [count][WIDTH], whose magnitudes are at most `most`. */
static double rough_score(const float *z, int64_t count, int64_t heads, double most)
{
    double total, product;
    if (most > 56) return vector_score(CLATTN_SELECT_PISA, z, count, heads);
    vector_join(vec_zero(), word_sum(z, count), heads, &total, &product);
    return product_log(product);
}

/* Vector `n` of the visits: which visit's it is, and which of its row. */
struct visit_vector {
    const struct visit *visit;
    int64_t vector;
};

static struct visit_vector visit_vector(const struct batch *batch, const struct visit *visit, int64_t n)
{
    if (batch->vectors == 1) return (struct visit_vector){visit + n, 0};
    return (struct visit_vector){visit + n / batch->vectors, n % batch->vectors};
}

/* Its words among those of all rows. */
static int64_t row_vector(const struct batch *batch, struct visit_vector own)
{
    return own.visit->row * batch->vectors + own.vector;
}

/* Rows with vectors of their own, as score_leaf_vectors. `after` visits of other leaves follow. */
static void rough_vectors(struct rough_leaf *leaf, const struct visit *visit, int64_t visits, int64_t after)
{
    const struct batch *batch = leaf->batch;
    int64_t all = visits * batch->vectors, end = (visits + after) * batch->vectors;
    int64_t size = leaf->from.steps * WIDTH;
    leaf->passes = ceil_div(all, VECTORS_MAX);
    for (int64_t n = 0, vectors; n < all; n += vectors) {
        struct visit_vector own[VECTORS_MAX];
        vectors = all - n > VECTORS_MAX + 1 ? VECTORS_MAX : ceil_div(all - n, leaf->passes);
        leaf->ahead.vectors = 0;
        for (int64_t v = 0; v < vectors; v++) {
            own[v] = visit_vector(batch, visit, n + v);
            int64_t at = row_vector(batch, own[v]), next = n + vectors + v;
            leaf->from.q[v] = batch->words + at * size;
            leaf->from.factor[v] = vec_mul(vec_load(batch->word_step + at * WIDTH), vec_set(leaf->factor));
            if (next >= end) continue;
            at = row_vector(batch, visit_vector(batch, visit, next));
            leaf->ahead.vector[leaf->ahead.vectors++] = batch->words + at * size;
        }
        rough_dots(leaf, (int)vectors);
        for (int64_t v = 0; v < vectors; v++) {
            int64_t first = own[v].vector * WIDTH;
            double *score = visit_score(batch, own[v].visit);
            *score =
                (first ? *score : 0) + rough_score(batch->logits + v * RUN_ROWS * WIDTH, leaf->keys,
                                                   MIN(WIDTH, batch->job->problem->group - first),
                                                   leaf->unit * batch->word_row[own[v].visit->row].norm_max);
        }
    }
}

/* Rows that share the lanes, as in score_leaf. */
static void rough_joined(struct rough_leaf *leaf, const struct visit *visit, int64_t visits)
{
    int64_t together = leaf->batch->together;
    leaf->passes = ceil_div(visits, together);
    for (int64_t count; visits > 0; visit += count, visits -= count) {
        count = MIN(together, visits);
        rough_dots(leaf, rough_join(leaf->batch, visit, count, leaf->factor, &leaf->from));
        joined_scores(leaf->batch, visit, count, leaf->keys);
    }
}

/* Sets the errors of scores; those without a usable bound are not known at all. */
static void rough_errors(const struct rough_leaf *leaf, const struct visit *visit, int64_t visits)
{
    const struct problem *problem = leaf->batch->job->problem;
    for (int64_t n = 0; n < visits; n++) {
        const struct word_row *row = &leaf->batch->word_row[visit[n].row];
        double error = word_error(row, &leaf->key, &leaf->batch->center, (double)problem->scale, problem->dim,
                                  problem->group, 1e-4);
        bool usable = row->usable && leaf->unit * row->norm_max < ROUGH_LOGIT;
        double *score = visit_score(leaf->batch, &visit[n]);
        *score = usable ? *score + (double)problem->scale * row->shift : 0;
        *visit_error(leaf->batch, &visit[n]) = usable ? (float)error * 1.000001f : INFINITY;
    }
}

/* All visits of a leaf, as score_leaf, which takes those for which words do not pay. */
static void rough_leaf(const struct batch *batch, const struct walk_children *children,
                       const struct visit *visit, int64_t visits, int64_t next, int64_t after)
{
    const struct problem *problem = batch->job->problem;
    struct rough_leaf leaf = {.batch = batch, .from.steps = word_steps(problem->dim)};
    bool usable = visits >= ROUGH_VISITS;
    leaf.keys = MIN(children->width, children->rows - visit->node * children->width);
    usable = usable && word_keys(leaf_keys(batch, children, visit->node, leaf.keys), &batch->center, leaf.keys,
                                 problem->dim, visits >= ROUGH_MEASURE, batch->leaf_words, &leaf.key);
    float scale = score_scale(CLATTN_SELECT_PISA, problem->scale);
    leaf.factor = scale * leaf.key.step;
    leaf.unit = 1.01 * fabs((double)scale) * leaf.key.norm;
    if (!usable || !isfinite(leaf.factor) || !isfinite(leaf.unit)) {
        for (int64_t n = 0; n < visits; n++)
            *visit_error(batch, &visit[n]) = 0;
        score_leaf(batch, children, visit, visits, next, after);
        return;
    }
    if (next >= 0) {
        struct rows ahead = leaf_piece(batch, children, next);
        leaf.ahead.keys = line_walk_of(&ahead);
    }
    if (batch->together == 1)
        rough_vectors(&leaf, visit, visits, after);
    else
        rough_joined(&leaf, visit, visits);
    rough_errors(&leaf, visit, visits);
}

/* Of several open scores of a row, leaves only the first one open: often its exact score decides the others,
 * too. A row's cursor says which it is; -1: none. false: in no row. */
static bool rough_ask_first(const struct batch *batch)
{
    bool any = false;
    for (int32_t r = 0; r < batch->rows; r++) {
        const struct walk *walk = &batch->walk[r];
        batch->cursor[r] = -1;
        for (int64_t n = 0; n < walk->scored_count; n++) {
            if (walk->open[n] && batch->cursor[r] < 0)
                batch->cursor[r] = n;
            else
                walk->open[n] = false;
        }
        any |= batch->cursor[r] >= 0;
    }
    return any;
}

static void rough_decide_again(const struct batch *batch)
{
    for (int32_t r = 0; r < batch->rows; r++) {
        if (batch->cursor[r] < 0) continue;
        batch->walk[r].error[batch->cursor[r]] = 0;
        rough_decide(&batch->walk[r], 1);
    }
}

/* The rough score of one row and one leaf, and the bound of its error, for tests: q [heads][dim], at most WIDTH
 * of them, k [count][dim], at most RUN_ROWS. false: not usable. */
static bool rough_score_of(const float *q, int32_t heads, const float *k, int64_t count, int32_t dim,
                           float scale, const float *center_at, double *score, double *error)
{
    static float padded[WIDTH][256 + WORD_BLOCK], step[WIDTH], logits[RUN_ROWS * WIDTH];
    static int32_t words[256 / 2 * WIDTH];
    static int16_t keys[RUN_ROWS * 256];
    const float *head[WIDTH];
    struct word_row row = {.usable = true};
    struct word_center center;
    struct word_leaf leaf;
    struct word_ahead ahead = {.vectors = 0};
    word_center_set(&center, center_at, dim);
    for (int h = 0; h < WIDTH; h++) {
        head[h] = padded[h];
        for (int32_t d = 0; d < 256; d++)
            padded[h][d] = h < heads && d < dim ? q[h * dim + d] : 0;
    }
    word_queries(head, &center, dim, words, step, &row);
    if (!row.usable || !word_keys((struct float_rows){k, dim}, &center, count, dim, true, keys, &leaf))
        return false;
    float factor = score_scale(CLATTN_SELECT_PISA, scale) * leaf.step;
    double most = 1.01 * fabs((double)score_scale(CLATTN_SELECT_PISA, scale)) * leaf.norm * row.norm_max;
    struct word_vectors from = {.q = {words}, .steps = word_steps(dim)};
    from.factor[0] = vec_mul(vec_load(step), vec_set(factor));
    dot_words(&from, 1, keys, word_stride(dim), count, logits, RUN_ROWS, &ahead, 1);
    *score = rough_score(logits, count, heads, most) + (double)scale * row.shift;
    *error = word_error(&row, &leaf, &center, (double)scale, dim, heads, 1e-4);
    return isfinite(factor) && most < ROUGH_LOGIT;
}

#endif
