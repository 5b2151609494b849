/* SPDX-License-Identifier: MIT */
/* Scores of robust selection, vectorised: all heads of the group at once, as lanes. bound needs the positive
 * and the negative part of the query apart:
 *
 *   bound = scale * (max(q, 0) . most + min(q, 0) . least)    (a negative scale swaps the two)
 *
 * Per node and head the scores stand in head_score [head][node]; then every head votes, or they are summed.
 *
 * Included by select_simd.h; mirrors select_robust_ref.c. */

struct robust_state {
    float *positive, *negative; /* [lane group][dim][lanes] */
    float *bound;               /* [lane group][RUN_ROWS][lanes] */
    float *head;                /* [group][head_stride] */
    int64_t head_stride;
};

static int64_t robust_nodes_max(const struct select_job *job)
{
    return round_up(2 * (int64_t)MAX(job->select->beam, job->select->topk), WIDTH);
}

static size_t robust_bytes(const struct select_job *job)
{
    int64_t lanes = round_up(job->problem->group, LANES_MAX), dim = job->problem->dim;
    if (job->select->selector != CLATTN_SELECT_ROBUST) return 0;
    return (size_t)(lanes * (2 * dim + RUN_ROWS) + job->problem->group * robust_nodes_max(job)) * sizeof(float);
}

static struct robust_state robust_state_of(const struct walk *walk)
{
    const struct problem *problem = walk->job->problem;
    int64_t lanes = round_up(problem->group, LANES_MAX);
    struct robust_state state = {.positive = (float *)((char *)walk->score_scratch + score_bytes(walk->job)),
                                 .head_stride = robust_nodes_max(walk->job)};
    state.negative = state.positive + lanes * problem->dim;
    state.bound = state.negative + lanes * problem->dim;
    state.head = state.bound + lanes * RUN_ROWS;
    return state;
}

static void robust_begin(const struct walk *walk)
{
    const struct problem *problem = walk->job->problem;
    struct score_state base = score_state_of(walk);
    struct robust_state state = robust_state_of(walk);
    bool swap = problem->scale < 0;
    for (int64_t n = 0; n < round_up(problem->group, LANES_MAX) * problem->dim; n++) {
        float x = base.q[n], above = x > 0 ? x : 0, below = x < 0 ? x : 0;
        state.positive[n] = swap ? below : above;
        state.negative[n] = swap ? above : below;
    }
}

/* logits += or = scale * q . rows, in the layout of dot_keys. */
static void add_logits(const struct walk *walk, const struct rows *rows, const struct robust_state *state,
                       float *to)
{
    const struct problem *problem = walk->job->problem;
    for (int64_t first = 0; first < problem->group; first += LANES_MAX) {
        int64_t floats = rows->count * lane_vectors(problem->group - first) * WIDTH;
        for (int64_t n = 0; n < floats; n += WIDTH)
            vec_store(to + first * RUN_ROWS + n, vec_add(vec_load(to + first * RUN_ROWS + n),
                                                         vec_load(state->bound + first * RUN_ROWS + n)));
    }
}

/* Rows of float32 statistics. */
static struct rows statistic(const struct walk *walk, const float *first, int64_t stride, int64_t count)
{
    int32_t dim = walk->job->problem->dim;
    return (struct rows){
        .data = (const char *)first, .dtype = CLATTN_FLOAT32, .stride = stride, .count = count, .dim = dim};
}

/* logits [row] = what * scale * (mean + bound) or one of them alone; mean or least NULL: without. */
static void row_logits(const struct walk *walk, const float *mean, int64_t mean_stride, const float *least,
                       const float *most, int64_t bound_stride, int64_t count, float factor)
{
    const struct problem *problem = walk->job->problem;
    struct score_state base = score_state_of(walk);
    struct robust_state state = robust_state_of(walk);
    struct rows rows;
    float scale = problem->scale * factor;
    if (mean) {
        rows = statistic(walk, mean, mean_stride, count);
        dot_keys(base.q, problem->group, &rows, scale, base.logits, RUN_ROWS, base.key, NULL);
    }
    if (!least) return;
    rows = statistic(walk, most, bound_stride, count);
    dot_keys(state.positive, problem->group, &rows, scale, mean ? state.bound : base.logits, RUN_ROWS, base.key,
             NULL);
    if (mean) add_logits(walk, &rows, &state, base.logits);
    rows = statistic(walk, least, bound_stride, count);
    dot_keys(state.negative, problem->group, &rows, scale, state.bound, RUN_ROWS, base.key, NULL);
    add_logits(walk, &rows, &state, base.logits);
}

/* head [h][at + n] = weight * logsumexp over the `width` logits of node n, added when `add`. */
static void heads_lse(const struct walk *walk, int64_t width, int64_t rows, int64_t nodes, float weight,
                      bool add, int64_t at)
{
    const struct problem *problem = walk->job->problem;
    struct score_state base = score_state_of(walk);
    struct robust_state state = robust_state_of(walk);
    float lane[LANES_MAX];
    for (int64_t n = 0; n < nodes; n++)
        for (int32_t first = 0; first < problem->group; first += LANES_MAX) {
            int64_t heads = MIN(problem->group - first, LANES_MAX), count = MIN(width, rows - n * width);
            int vectors = lane_vectors(heads);
            const float *z = base.logits + first * RUN_ROWS + n * width * vectors * WIDTH;
            head_lse(z, count, vectors, lane);
            for (int64_t h = 0; h < heads; h++) {
                float *place = state.head + (first + h) * state.head_stride + at + n;
                *place = weight * lane[h] + (add ? *place : 0);
            }
        }
}

/* One run of consecutive nodes: from node `node`, `count` of them, scores to head [h][at ...]. */
static void robust_run(const struct walk *walk, int level, bool prefilter, int64_t node, int64_t count,
                       int64_t at)
{
    const struct select_job *job = walk->job;
    int32_t dim = job->problem->dim;
    int64_t kv_len = walk->sequence->kv_len;
    const float *bounds = walk->bounds;
    if (prefilter && job->select->parts == LEAF_PARTS) {
        int64_t stride = 3 * (int64_t)dim;
        const float *part = walk->parts + node * LEAF_PARTS * stride;
        int64_t existing = ceil_div(kv_len, walk->leaf / LEAF_PARTS) - node * LEAF_PARTS;
        int64_t rows = MIN(count * LEAF_PARTS, existing);
        row_logits(walk, part, stride, part + dim, part + 2 * dim, stride, rows, 0.5f);
        heads_lse(walk, LEAF_PARTS, rows, count, 1, false, at);
        return;
    }
    if (!prefilter && level == 1) {
        struct walk_children children = {true, walk->leaf, kv_len, 0};
        struct node_run run = run_at(walk, &children, &node, 0, 1);
        run_logits(walk, &run, NULL, score_state_of(walk).logits);
        heads_lse(walk, walk->leaf, run.rows, 1, 1, false, at);
        return;
    }
    clattn_node_score kind = prefilter ? CLATTN_SCORE_BOUND : job->select->score;
    int64_t own = level_first(walk->room, walk->leaf, level) + node, stride = 2 * (int64_t)dim;
    const float *least = bounds + own * stride;
    if (kind != CLATTN_SCORE_BOUND) {
        int64_t below = level_first(walk->room, walk->leaf, level - 1) + 2 * node;
        int64_t rows = MIN(2 * count, level_nodes(kv_len, walk->leaf, level - 1) - 2 * node);
        const float *child = kind == CLATTN_SCORE_AHEAD ? bounds + below * stride : NULL;
        row_logits(walk, walk->means + below * dim, dim, child, child ? child + dim : NULL, stride, rows,
                   child ? 0.5f : 1);
        heads_lse(walk, 2, rows, count, kind == CLATTN_SCORE_BLEND ? 0.5f : 1, false, at);
    }
    if (prefilter) { /* one part: half of mean and bound */
        row_logits(walk, walk->means + own * dim, dim, least, least + dim, stride, count, 0.5f);
        heads_lse(walk, 1, count, count, 1, false, at);
    } else if (kind == CLATTN_SCORE_BOUND || kind == CLATTN_SCORE_BLEND) {
        row_logits(walk, NULL, 0, least, least + dim, stride, count, 1);
        heads_lse(walk, 1, count, count, kind == CLATTN_SCORE_BLEND ? 0.5f : 1, kind == CLATTN_SCORE_BLEND, at);
    }
}

/* One head's scores become its votes. Past `count` the row is filled up to whole vectors. */
static void head_vote(float *score, int64_t count)
{
    float most = -INFINITY, sum = 0;
    for (int64_t n = 0; n < count; n++)
        most = score[n] > most ? score[n] : most;
    if (isinf(most)) { /* one or more infinite scores share the vote; none at all: no vote */
        for (int64_t n = 0; n < count; n++)
            sum += score[n] = most > 0 && score[n] == most;
    } else {
        for (int64_t n = count; n < round_up(count, WIDTH); n++)
            score[n] = -INFINITY;
        for (int64_t n = 0; n < count; n += WIDTH)
            vec_store(score + n, vec_exp(vec_sub(vec_load(score + n), vec_set(most))));
        for (int64_t n = 0; n < count; n++)
            sum += score[n];
    }
    for (int64_t n = 0; n < count && sum > 0; n++)
        score[n] /= sum;
}

static void robust_scores(const struct walk *walk, int level, const int64_t *nodes, int64_t count,
                          double *score)
{
    struct robust_state state = robust_state_of(walk);
    bool prefilter = walk->stage == STAGE_PREFILTER;
    int64_t most = prefilter ? RUN_ROWS / LEAF_PARTS : level == 1 ? 1 : RUN_ROWS / 2;
    for (int64_t n = 0, run; n < count; n += run) {
        for (run = 1; n + run < count && run < most && nodes[n + run] == nodes[n] + run;)
            run++;
        robust_run(walk, level, prefilter, nodes[n], run, n);
    }
    for (int64_t n = 0; n < count; n++)
        score[n] = 0;
    for (int32_t h = 0; h < walk->job->problem->group; h++) {
        float *head = state.head + h * state.head_stride;
        for (int64_t n = 0; n < count; n++) {
            if (!isnan(head[n])) continue;
            if (prefilter || level > 1) head[n] = (float)robust_score_exact(walk, h, level, nodes[n]);
            if (isnan(head[n])) head[n] = -INFINITY;
        }
        if (walk->job->select->vote) head_vote(head, count);
        for (int64_t n = 0; n < count; n++)
            score[n] += (double)head[n];
    }
    for (int64_t n = 0; n < count; n++)
        if (isnan(score[n])) score[n] = -INFINITY;
}
