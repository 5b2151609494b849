/* SPDX-License-Identifier: MIT */
/* Rough scores of inner levels, as those of leaves: select_rough_simd.h. The means are converted once a batch,
 * each with a step of its own, when that is little against what the rows save.
 *
 * Included by select_levels_simd.h. */

#if defined(SIMD_WORD_DOTS)

static void rough_decide(struct walk *walk, int level)
{
    if (walk->scored_count <= RANK_MAX)
        rank_decide(walk, walk_room(walk, level));
    else
        walk_decide(walk, level);
}

/* The center, which is the mean of all keys, and the means of levels 1 .. top - 1 in words; those of level l
 * from batch->mean_first[l] on. */
static void rough_means(struct batch *batch, int top)
{
    enum { MEANS_A_ROW = 16 }; /* that may be converted for each row */
    int64_t kv_len = batch->sequence->kv_len, total = 0;
    int32_t dim = batch->job->problem->dim, leaf = batch->job->select->leaf;
    const struct walk *walk = batch->walk;
    if (batch->rough) {
        int64_t root = walk->means ? level_first(walk->room, leaf, level_count(kv_len, leaf)) : 0;
        word_center_set(&batch->center, walk->means ? walk->means + root * dim : NULL, dim);
    }
    batch->rough_levels = batch->rough && top > 1 && !batch->flat &&
                          level_first(kv_len, leaf, top) <= (int64_t)batch->rows * MEANS_A_ROW;
    for (int level = 1; level < top && batch->rough_levels; level++) {
        const float *means = walk->means + level_first(walk->room, leaf, level) * dim;
        batch->mean_first[level] = total;
        int64_t nodes = level_nodes(kv_len, leaf, level);
        for (int64_t n = 0, count; n < nodes; n += count, total += count) {
            count = MIN(nodes - n, WIDTH);
            struct word_leaf *mean = batch->mean + total;
            if (!word_keys((struct float_rows){means + n * dim, dim}, &batch->center, count, dim, true,
                           batch->mean_words + total * word_stride(dim), mean))
                *mean = (struct word_leaf){NAN, NAN, NAN};
            for (int64_t i = 1; i < count; i++)
                mean[i] = mean[0];
        }
    }
}

/* Brings the words nearer that will be scored at `level`; false: there are none. */
static bool rough_prefetch(const struct batch *batch, const struct walk *walk, int level)
{
    int64_t pair = 2 * word_stride(batch->job->problem->dim), line = LINE / (int64_t)sizeof(int16_t);
    if (!batch->rough_levels || level == 1) return batch->rough_levels;
    const int16_t *first = batch->mean_words + batch->mean_first[level - 1] * pair / 2;
    for (int64_t n = 0; n < walk->scored_count; n++)
        for (int64_t i = 0; i < pair; i += line)
            _mm_prefetch((const char *)(first + walk->scored[n] * pair + i), _MM_HINT_T0);
    return true;
}

/* As pairs_add_scores for rough scores of at most PAIRS_MAX nodes, whose logits are small: totals and products
 * in float32, of WIDTH nodes at once. */
static void rough_pairs_add(const int64_t *nodes, int64_t count, int64_t children, const float *z,
                            int64_t heads, double *score)
{
    __mmask16 lanes = (__mmask16)((1u << heads) - 1);
    int64_t full = count - (2 * nodes[count - 1] + 1 == children);
    for (int64_t first = 0; first < full; first += WIDTH) {
        __m512 most[WIDTH], both[WIDTH];
        for (int64_t n = 0; n < WIDTH; n++) {
            most[n] = vec_zero();
            both[n] = vec_set(1);
            if (first + n >= full) continue;
            vec one = vec_load(z + 2 * (first + n) * WIDTH),
                other = vec_load(z + (2 * (first + n) + 1) * WIDTH);
            vec below = _mm512_or_ps(vec_sub(one, other), vec_set(-0.0f)); /* -|one - other| */
            most[n] = _mm512_maskz_max_ps(lanes, one, other);
            both[n] = _mm512_mask_add_ps(both[n], lanes, both[n], vec_exp2_below(below));
        }
        __m512 totals = word_join(most, vec_add), products = word_join(both, vec_mul);
        for (int64_t n = first; n < MIN(first + WIDTH, full); n += DOUBLES) {
            doubles total = _mm512_cvtps_pd(n == first ? _mm512_castps512_ps256(totals)
                                                       : _mm512_extractf32x8_ps(totals, 1));
            doubles product = _mm512_cvtps_pd(n == first ? _mm512_castps512_ps256(products)
                                                         : _mm512_extractf32x8_ps(products, 1));
            __mmask8 some = (__mmask8)((1u << MIN(full - n, DOUBLES)) - 1);
            doubles before = _mm512_maskz_loadu_pd(some, score + n);
            _mm512_mask_storeu_pd(score + n, some, before + total * LN2 + doubles_log(product));
        }
    }
    if (full < count) score[full] += vector_score(CLATTN_SELECT_PISA, z + 2 * full * WIDTH, 1, heads);
}

/* Errors of the scores of nodes with children from mean[0] on: what is not usable is not known at all. */
static void rough_pairs_errors(const struct batch *batch, struct walk *walk, const struct word_leaf *mean,
                               int64_t children)
{
    const struct problem *problem = batch->job->problem;
    const struct word_row *row = &batch->word_row[walk - batch->walk];
    double unit = fabs((double)score_scale(CLATTN_SELECT_PISA, problem->scale)) * row->norm_max;
    for (int64_t n = 0; n < walk->scored_count; n++) {
        const struct word_leaf *one = &mean[2 * walk->scored[n]];
        const struct word_leaf *other = one + (2 * walk->scored[n] + 1 < children);
        struct word_leaf most = {0, MAX(one->norm, other->norm), MAX(one->rest, other->rest)};
        double error =
            word_error(row, &most, &batch->center, (double)problem->scale, problem->dim, problem->group, 1e-5);
        bool usable = isfinite(one->norm + other->norm) && unit * most.norm < ROUGH_LOGIT;
        if (!usable) walk->score[n] = 0;
        walk->error[n] = usable ? (float)error * 1.000001f : INFINITY;
    }
}

/* Where scores are equal or nearly so, no bound decides, and the rough way is a detour. */
static bool rough_fails(const struct batch *batch)
{
    enum { ENOUGH = 1000 };
    return batch->rough_nodes > ENOUGH && 2 * batch->rough_open > batch->rough_nodes;
}

/* Exact scores of the nodes that are open. */
static void score_open_pairs(struct batch *batch, struct walk *walk, const struct walk_children *children)
{
    int64_t nodes[PAIRS_MAX], entry[PAIRS_MAX], count = 0;
    double score[PAIRS_MAX];
    for (int64_t n = 0; n < walk->scored_count; n++) {
        nodes[count] = walk->scored[n];
        entry[count] = n;
        count += walk->open[n];
    }
    batch->rough_nodes += walk->scored_count;
    batch->rough_open += count;
    if (count == 0) return;
    score_pairs(batch, walk, children, nodes, count, score);
    for (int64_t n = 0; n < count; n++)
        walk->score[entry[n]] = score[n];
}

/* Rough scores, and exact ones where these decide; false: not here. */
static bool rough_pairs_score(struct batch *batch, struct walk *walk, const struct walk_children *children,
                              int level)
{
    const struct problem *problem = batch->job->problem;
    int64_t row = walk - batch->walk, stride = word_stride(problem->dim), count = walk->scored_count;
    const int16_t *pair[PAIRS_MAX];
    float step[2 * PAIRS_MAX], factor = score_scale(CLATTN_SELECT_PISA, problem->scale);
    if (!batch->rough_levels || !batch->word_row[row].usable || count >= PAIRS_MAX || rough_fails(batch))
        return false;
    int64_t first = batch->mean_first[level - 1];
    struct word_vectors from = {.steps = word_steps(problem->dim)};
    for (int64_t n = 0; n < count; n++) {
        int64_t child = first + 2 * walk->scored[n];
        pair[n] = batch->mean_words + child * stride;
        step[2 * n] = batch->mean[child].step;
        step[2 * n + 1] = batch->mean[child + 1].step;
        walk->score[n] = (double)problem->scale * batch->word_row[row].shift;
    }
    for (int v = 0, vectors; v < batch->vectors; v += vectors) {
        vectors = MIN(2, batch->vectors - v);
        for (int u = 0; u < vectors; u++) {
            int64_t own = row * batch->vectors + v + u;
            from.q[u] = batch->words + own * from.steps * WIDTH;
            from.factor[u] = vec_mul(vec_load(batch->word_step + own * WIDTH), vec_set(factor));
        }
        dot_word_pairs(&from, vectors, pair, step, stride, count, batch->logits, RUN_ROWS);
        for (int u = 0; u < vectors; u++)
            rough_pairs_add(walk->scored, count, children->rows, batch->logits + u * RUN_ROWS * WIDTH,
                            MIN(WIDTH, problem->group - (v + u) * WIDTH), walk->score);
    }
    rough_pairs_errors(batch, walk, batch->mean + first, children->rows);
    rough_decide(walk, level);
    score_open_pairs(batch, walk, children);
    return true;
}

#else

static void rough_means(struct batch *batch, int top)
{
    (void)batch;
    (void)top;
}

static bool rough_prefetch(const struct batch *batch, const struct walk *walk, int level)
{
    (void)batch;
    (void)walk;
    (void)level;
    return false;
}

static bool rough_pairs_score(struct batch *batch, struct walk *walk, const struct walk_children *children,
                              int level)
{
    (void)batch;
    (void)walk;
    (void)children;
    (void)level;
    return false;
}

#endif
