/* SPDX-License-Identifier: MIT */
/* Real queries, keys and values of a language model, with the results of an independent computation in double
 * precision. The bundled sample always; the full recording, when it lies next to the source tree, at a stride
 * of its positions. */

#include "fixture.h"
#include "npy.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOPK = 8, LEAF = 64, HEADS = 16, DIM = 64 };

struct data {
    char folder[3072];
    int64_t stride; /* of the positions that are checked */
    bool for_opencl;
    struct npy q, k, v, pos;
    int64_t first; /* position of query row 0 */
};

static bool data_folder(struct data *data, const char *path)
{
    const char *srcdir = getenv("srcdir");
    snprintf(data->folder, sizeof data->folder, "%s/%s", srcdir ? srcdir : "..", path);
    return npy_exists(data->folder, "q");
}

static void data_read(struct data *data)
{
    data->q = npy_read(data->folder, "q", "f2");
    data->k = npy_read(data->folder, "k", "f2");
    data->v = npy_read(data->folder, "v", "f2");
    data->pos = npy_read(data->folder, "pos", "i4");
    assert_int_equal(data->q.shape[2], HEADS);
    assert_int_equal(data->q.shape[3], DIM);
    data->first = data->k.shape[1] - data->q.shape[1];
}

static void data_free(struct data *data)
{
    npy_free(&data->q);
    npy_free(&data->k);
    npy_free(&data->v);
    npy_free(&data->pos);
}

/* The query row at `position`, with the keys up to it: as a decode step, so a few positions of the recording
 * need only their own work. */
struct step {
    clattn_tensor q, k, v;
};

static struct step step_of(const struct data *data, int64_t position)
{
    int64_t keys = data->k.shape[1];
    clattn_tensor q = clattn_tensor_bthd(data->q.data, CLATTN_FLOAT16, 1, data->q.shape[1], HEADS, DIM);
    clattn_tensor k = clattn_tensor_bthd(data->k.data, CLATTN_FLOAT16, 1, keys, 1, DIM);
    clattn_tensor v = clattn_tensor_bthd(data->v.data, CLATTN_FLOAT16, 1, keys, 1, DIM);
    return (struct step){tensor_rows(&q, position - data->first, position - data->first + 1),
                         tensor_rows(&k, 0, position + 1), tensor_rows(&v, 0, position + 1)};
}

static const char *const selectors[] = {"pisa", "pisa1", "pisa2", "flat_mean", "flat_lse"};

/* ---- selection ---- */

struct selected {
    int64_t compared, undecided;
};

static void check_list(const struct target *target, const int32_t *got, const int32_t *want,
                       const char *selector, int64_t position)
{
    for (int n = 0; n < TOPK; n++)
        if (got[n] != want[n])
            fail_msg("%s: %s: position %lld, entry %d is leaf %d; %d is right", target->label, selector,
                     (long long)position, n, got[n], want[n]);
}

static void check_selector(const struct target *target, const struct data *data, int selector,
                           struct selected *selected)
{
    char name[32];
    snprintf(name, sizeof name, "sel_%s", selectors[selector]);
    struct npy sel = npy_read(data->folder, name, "i4");
    snprintf(name, sizeof name, "gap_%s", selectors[selector]);
    struct npy gap = npy_read(data->folder, name, "f4");
    clattn_select_desc select = select_desc(selector, TOPK, LEAF);
    for (int64_t n = 0; n < data->pos.count; n += data->stride) {
        int64_t position = ((const int32_t *)data->pos.data)[n];
        struct step step = step_of(data, position);
        clattn_blocks *blocks = NULL;
        int32_t got[TOPK], count;
        check_success(target,
                      clattn_select(target->context, NULL, &select, &step.q, &step.k, NULL, &blocks, NULL),
                      selectors[selector]);
        check_success(target, clattn_blocks_read(target->context, blocks, got, &count), "blocks_read");
        clattn_blocks_release(target->context, blocks);
        if (((const float *)gap.data)[n] > 1e-3f)
            check_list(target, got, (const int32_t *)sel.data + n * TOPK, selectors[selector], position);
        else
            selected->undecided++;
        selected->compared++;
    }
    npy_free(&sel);
    npy_free(&gap);
}

/* ---- attention ---- */

/* The oracle's result is float32: half a unit of its last place more. */
static void check_output(const struct target *target, const struct data *data)
{
    struct npy o = npy_read(data->folder, "o_pisa", "f4"), l = npy_read(data->folder, "lse_pisa", "f4");
    struct npy sel = npy_read(data->folder, "sel_pisa", "i4");
    struct array out = array_new(CLATTN_FLOAT32, 1, 1, HEADS, DIM, LAYOUT_BTHD);
    struct array lse = array_new(CLATTN_FLOAT32, 1, 1, HEADS, 1, LAYOUT_BTHD);
    struct lists lists = {CLATTN_BLOCKS_DESC_INIT, NULL};
    lists.desc.rows = 1;
    lists.desc.topk = TOPK;
    for (int64_t n = 0; n < data->pos.count; n += data->stride) {
        int64_t position = ((const int32_t *)data->pos.data)[n];
        struct step step = step_of(data, position);
        lists.indices = (int32_t *)sel.data + n * TOPK;
        clattn_blocks *blocks = lists_upload(target, &lists);
        array_poison(&out);
        array_poison(&lse);
        check_success(target,
                      clattn_attention_forward(target->context, NULL, &step.q, &step.k, &step.v, blocks,
                                               &out.view, &lse.view, NULL),
                      "attention_forward");
        clattn_blocks_release(target->context, blocks);
        struct forward problem = {CLATTN_ATTENTION_DESC_INIT, step.q, step.k, step.v, &lists, false};
        struct expected expected = expected_forward(&problem);
        for (int64_t m = 0; m < HEADS * DIM; m++) /* the file replaces what this program computed itself */
            expected.out[m] = (double)((const float *)o.data)[n * HEADS * DIM + m];
        for (int64_t h = 0; h < HEADS; h++)
            expected.lse[h] = (double)((const float *)l.data)[n * HEADS + h];
        expected_compare(&expected, &problem, &out.view, &lse.view, target->label, "o_pisa, lse_pisa");
        expected_free(&expected);
    }
    array_free(&out);
    array_free(&lse);
    npy_free(&o);
    npy_free(&l);
    npy_free(&sel);
}

static void check_data(struct data *data, enum test_size size)
{
    data_read(data);
    FOR_EACH_TARGET (target) {
        if (!target_runs(target, size)) continue;
        struct selected selected = {0};
        for (int selector = 0; selector < COUNT(selectors); selector++)
            check_selector(target, data, selector, &selected);
        check_output(target, data);
        print_message("%s: %lld lists compared, %lld more undecided\n", target->label,
                      (long long)(selected.compared - selected.undecided), (long long)selected.undecided);
        assert_true(selected.compared - selected.undecided > selected.compared / 2);
    }
    data_free(data);
}

static void test_sample(void **state)
{
    (void)state;
    struct data data = {.stride = 2};
    assert_true(data_folder(&data, "tests/data/retrieval16k"));
    check_data(&data, SIZE_NORMAL);
    target_report("sample");
}

static void test_recording(void **state)
{
    (void)state;
    struct data data = {.stride = 31};
    if (!data_folder(&data, "../shared/data/retrieval16k")) {
        print_message("the full recording is not there\n");
        skip();
    }
    check_data(&data, SIZE_CPU);
    target_report("recording");
}

/* All 512 queries of the sample in one call: the leaf with the planted fact is among the chosen for every
 * answer with flat_lse, and the lists at `pos` are the right ones. */
static void test_answers(void **state)
{
    (void)state;
    struct data data = {.stride = 1};
    assert_true(data_folder(&data, "tests/data/retrieval16k"));
    data_read(&data);
    struct npy answer = npy_read(data.folder, "answer_pos", "i4"),
               needle = npy_read(data.folder, "needle_pos", "i4");
    clattn_select_desc select = select_desc(CLATTN_SELECT_FLAT_LSE, TOPK, LEAF);
    clattn_tensor q = clattn_tensor_bthd(data.q.data, CLATTN_FLOAT16, 1, data.q.shape[1], HEADS, DIM);
    clattn_tensor k = clattn_tensor_bthd(data.k.data, CLATTN_FLOAT16, 1, data.k.shape[1], 1, DIM);
    int32_t *lists = malloc((size_t)data.q.shape[1] * TOPK * sizeof *lists);
    FOR_EACH_TARGET (target) {
        clattn_blocks *blocks = NULL;
        if (target->info.backend == CLATTN_BACKEND_REFERENCE || strcmp(target->info.variant, "ref") == 0)
            continue;
        if (!target_runs(target, SIZE_NORMAL)) continue;
        check_success(target, clattn_select(target->context, NULL, &select, &q, &k, NULL, &blocks, NULL),
                      "select");
        check_success(target, clattn_blocks_read(target->context, blocks, lists, NULL), "blocks_read");
        clattn_blocks_release(target->context, blocks);
        for (int64_t n = 0; n < answer.count; n++) {
            int64_t row = ((const int32_t *)answer.data)[n] - data.first;
            int32_t leaf = ((const int32_t *)needle.data)[n] / LEAF;
            bool found = false;
            for (int i = 0; i < TOPK; i++)
                found = found || lists[row * TOPK + i] == leaf;
            if (!found) fail_msg("%s: answer %lld does not see leaf %d", target->label, (long long)n, leaf);
        }
    }
    free(lists);
    npy_free(&answer);
    npy_free(&needle);
    data_free(&data);
    target_report("answers");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sample),
        cmocka_unit_test(test_recording),
        cmocka_unit_test(test_answers),
    };
    return cmocka_run_group_tests_name("retrieval", tests, targets_open, targets_close);
}
