/* SPDX-License-Identifier: MIT */
/* A layer of attention learns associative recall through the library's forward and backward pass.
 *
 * A sequence shows PAIRS pairs of a key and a value, one a token, then QUERIES tokens with a key only; the
 * answer is the value that was shown with it. Keys of a sequence are all different, values are random, so that
 * only attention can tell the answer:
 *
 *     x = key_embedding + value_embedding,   q, k, v = x Wq, x Wk, x Wv
 *     logits = attention(q, k, v) Wo,        loss = mean cross entropy of the queries' logits
 *
 * Queries list the blocks of the pairs, pairs list their own block. Everything but attention is written here in
 * plain C; Adam, a fresh batch each step, a fixed seed. Guessing gives ln 8 = 2.08; the loss must fall below
 * 0.05. */

#include "harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 8, PAIRS = 32, QUERIES = 16, TOKENS = PAIRS + QUERIES, KEYS = 32, VALUES = 8 };
enum { WIDTH = 32, HEADS = 2, DIM = 16, ATTENTION = HEADS * DIM, BLOCK = 16, TOPK = PAIRS / BLOCK };
enum { ROWS = BATCH * TOKENS, STEPS = 250, LAST = 10 };
static const float RATE = 0.01f;
static const double GUESS_LOSS = 2.0794415, GOOD_LOSS = 0.05;

/* ---- parameters ---- */

/* Row-major matrices, one after another in one array, so that Adam sees a single vector. */
struct weights {
    float key_embedding[KEYS * WIDTH], value_embedding[(VALUES + 1) * WIDTH]; /* the last: no value */
    float q[WIDTH * ATTENTION], k[WIDTH * DIM], v[WIDTH * DIM], out[ATTENTION * VALUES];
};

enum { WEIGHTS = sizeof(struct weights) / sizeof(float) };

struct model {
    struct weights weights, gradient, mean, square;
    int step;
};

static void weights_init(struct weights *w, struct random *random)
{
    float *all = (float *)w;
    for (int i = 0; i < WEIGHTS; i++)
        all[i] = (float)(random_normal(random) / sqrt(WIDTH));
}

static void adam(struct model *m)
{
    float *w = (float *)&m->weights, *g = (float *)&m->gradient, *mean = (float *)&m->mean,
          *square = (float *)&m->square;
    m->step++;
    float mean_scale = 1 / (1 - powf(0.9f, (float)m->step)),
          square_scale = 1 / (1 - powf(0.99f, (float)m->step));
    for (int i = 0; i < WEIGHTS; i++) {
        mean[i] = 0.9f * mean[i] + 0.1f * g[i];
        square[i] = 0.99f * square[i] + 0.01f * g[i] * g[i];
        w[i] -= RATE * mean[i] * mean_scale / (sqrtf(square[i] * square_scale) + 1e-8f);
    }
}

/* ---- matrices ---- */

/* c [m][n] += a [m][p] b [p][n] */
static void multiply(const float *a, const float *b, float *c, int m, int n, int p)
{
    for (int i = 0; i < m; i++)
        for (int l = 0; l < p; l++)
            for (int j = 0; j < n; j++)
                c[i * n + j] += a[i * p + l] * b[l * n + j];
}

/* c [m][n] += a^T b,  a [p][m], b [p][n] */
static void multiply_left(const float *a, const float *b, float *c, int m, int n, int p)
{
    for (int l = 0; l < p; l++)
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j++)
                c[i * n + j] += a[l * m + i] * b[l * n + j];
}

/* c [m][n] += a b^T,  a [m][p], b [n][p] */
static void multiply_right(const float *a, const float *b, float *c, int m, int n, int p)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            for (int l = 0; l < p; l++)
                c[i * n + j] += a[i * p + l] * b[j * p + l];
}

/* ---- task ---- */

struct batch {
    int key[ROWS], value[ROWS], answer[ROWS]; /* answer -1: none is asked for */
};

static void batch_make(struct batch *batch, struct random *random)
{
    for (int b = 0; b < BATCH; b++) {
        int *key = batch->key + b * TOKENS, *value = batch->value + b * TOKENS, order[KEYS];
        for (int i = 0; i < KEYS; i++)
            order[i] = i;
        for (int i = 0; i < PAIRS; i++) {
            int other = i + (int)random_below(random, KEYS - i), swap = order[i];
            order[i] = order[other];
            order[other] = swap;
            key[i] = order[i];
            value[i] = (int)random_below(random, VALUES);
            batch->answer[b * TOKENS + i] = -1;
        }
        for (int i = PAIRS; i < TOKENS; i++) {
            int pair = (int)random_below(random, PAIRS);
            key[i] = key[pair];
            value[i] = VALUES;
            batch->answer[b * TOKENS + i] = value[pair];
        }
    }
}

static clattn_blocks *lists_make(clattn_context *context)
{
    static int32_t indices[ROWS * TOPK];
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    clattn_blocks *blocks = NULL;
    for (int row = 0; row < ROWS; row++)
        for (int n = 0; n < TOPK; n++)
            indices[row * TOPK + n] = row % TOKENS < PAIRS ? (n == 0 ? row % TOKENS / BLOCK : -1) : n;
    desc.block = BLOCK;
    desc.rows = ROWS;
    desc.topk = TOPK;
    assert_int_equal(clattn_blocks_create(context, &desc, indices, &blocks), CLATTN_SUCCESS);
    return blocks;
}

/* ---- one step ---- */

struct activations {
    float x[ROWS * WIDTH], q[ROWS * ATTENTION], k[ROWS * DIM], v[ROWS * DIM], out[ROWS * ATTENTION],
        lse[ROWS * HEADS];
    float logits[ROWS * VALUES];
};

static clattn_tensor view(float *data, int heads, int dim)
{
    return clattn_tensor_bthd(data, CLATTN_FLOAT32, BATCH, TOKENS, heads, dim);
}

static void forward(const struct target *target, const struct weights *w, const struct batch *batch,
                    const clattn_blocks *blocks, struct activations *a)
{
    memset(a, 0, sizeof *a);
    for (int row = 0; row < ROWS; row++)
        for (int d = 0; d < WIDTH; d++)
            a->x[row * WIDTH + d] = w->key_embedding[batch->key[row] * WIDTH + d] +
                                    w->value_embedding[batch->value[row] * WIDTH + d];
    multiply(a->x, w->q, a->q, ROWS, ATTENTION, WIDTH);
    multiply(a->x, w->k, a->k, ROWS, DIM, WIDTH);
    multiply(a->x, w->v, a->v, ROWS, DIM, WIDTH);
    clattn_tensor q = view(a->q, HEADS, DIM), k = view(a->k, 1, DIM), v = view(a->v, 1, DIM);
    clattn_tensor out = view(a->out, HEADS, DIM), lse = view(a->lse, HEADS, 1);
    check_success(target, clattn_attention_forward(target->context, NULL, &q, &k, &v, blocks, &out, &lse, NULL),
                  "forward");
    multiply(a->out, w->out, a->logits, ROWS, VALUES, ATTENTION);
}

/* Mean loss of the queries; logits become its gradient. */
static double cross_entropy(const struct batch *batch, float *logits)
{
    double loss = 0;
    for (int row = 0; row < ROWS; row++) {
        float *logit = logits + row * VALUES, most = logit[0];
        double sum = 0;
        for (int c = 1; c < VALUES; c++)
            most = fmaxf(most, logit[c]);
        for (int c = 0; c < VALUES; c++)
            sum += exp((double)(logit[c] - most));
        int answer = batch->answer[row];
        if (answer >= 0) loss += log(sum) - (double)(logit[answer] - most);
        for (int c = 0; c < VALUES; c++) {
            double p = exp((double)(logit[c] - most)) / sum;
            logit[c] = answer < 0 ? 0 : (float)((p - (c == answer)) / (BATCH * QUERIES));
        }
    }
    return loss / (BATCH * QUERIES);
}

static void backward(const struct target *target, const struct weights *w, const struct batch *batch,
                     const clattn_blocks *blocks, struct activations *a, struct weights *g)
{
    static struct activations d;
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    memset(&d, 0, sizeof d);
    memset(g, 0, sizeof *g);
    multiply_left(a->out, a->logits, g->out, ATTENTION, VALUES, ROWS);
    multiply_right(a->logits, w->out, d.out, ROWS, ATTENTION, VALUES);
    clattn_tensor q = view(a->q, HEADS, DIM), k = view(a->k, 1, DIM), v = view(a->v, 1, DIM);
    clattn_tensor out = view(a->out, HEADS, DIM), lse = view(a->lse, HEADS, 1), dout = view(d.out, HEADS, DIM);
    clattn_tensor dq = view(d.q, HEADS, DIM), dk = view(d.k, 1, DIM), dv = view(d.v, 1, DIM);
    gradients.dout = &dout;
    gradients.dq = &dq;
    gradients.dk = &dk;
    gradients.dv = &dv;
    check_success(
        target,
        clattn_attention_backward(target->context, NULL, &q, &k, &v, blocks, &out, &lse, &gradients, NULL),
        "backward");
    multiply_left(a->x, d.q, g->q, WIDTH, ATTENTION, ROWS);
    multiply_left(a->x, d.k, g->k, WIDTH, DIM, ROWS);
    multiply_left(a->x, d.v, g->v, WIDTH, DIM, ROWS);
    multiply_right(d.q, w->q, d.x, ROWS, WIDTH, ATTENTION);
    multiply_right(d.k, w->k, d.x, ROWS, WIDTH, DIM);
    multiply_right(d.v, w->v, d.x, ROWS, WIDTH, DIM);
    for (int row = 0; row < ROWS; row++)
        for (int n = 0; n < WIDTH; n++) {
            g->key_embedding[batch->key[row] * WIDTH + n] += d.x[row * WIDTH + n];
            g->value_embedding[batch->value[row] * WIDTH + n] += d.x[row * WIDTH + n];
        }
}

/* ---- tests ---- */

/* Trains from the same seed; gives the mean loss of the first step and of the last ones. */
static void train(const struct target *target, double *first, double *last)
{
    static struct activations a;
    struct model *model = calloc(1, sizeof *model);
    struct batch batch;
    struct random random = {20261129}; /* whatever CLATTN_TEST_SEED says */
    clattn_blocks *blocks = lists_make(target->context);
    weights_init(&model->weights, &random);
    *last = 0;
    for (int step = 0; step < STEPS; step++) {
        batch_make(&batch, &random);
        forward(target, &model->weights, &batch, blocks, &a);
        double loss = cross_entropy(&batch, a.logits);
        if (step == 0) *first = loss;
        if (step >= STEPS - LAST) *last += loss / LAST;
        if (step % 50 == 0) print_message("%s: step %d, loss %.4f\n", target->label, step, loss);
        backward(target, &model->weights, &batch, blocks, &a, &model->gradient);
        adam(model);
    }
    clattn_blocks_release(target->context, blocks);
    free(model);
}

static void test_recall(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target) {
        double first, last;
        if (!target_runs(target, SIZE_NORMAL)) continue;
        train(target, &first, &last);
        print_message("%s: loss %.4f before, %.4f after %d steps\n", target->label, first, last, STEPS);
        if (!(first > GUESS_LOSS - 0.3) || !(last < GOOD_LOSS))
            fail_msg("%s: the loss went from %.4f to %.4f; %.2f is needed", target->label, first, last,
                     GOOD_LOSS);
    }
    target_report("training");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_recall)};
    return cmocka_run_group_tests_name("training", tests, targets_open, targets_close);
}
