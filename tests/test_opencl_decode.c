/* SPDX-License-Identifier: MIT */
/* The decode cache of OpenCL contexts beside that of the CPU: the same operations on both, the same lengths,
 * pyramid bits, lists, and results within rounding; options, int8, ragged batches, the caller's memory, queues
 * and events.
 *
 * Keys are small integers, so that their sums are exact and the means equal, bit for bit, whatever the order of
 * addition and its type. */

#include "lib/cache.h" /* before CMocka, whose `fail` is a macro */

#include "opencl_fixture.h"

#include "harness.h"

#include <math.h>

enum { SEQUENCES = 3, KV_HEADS = 2, GROUP = 2, DIM = 20, DIM_V = 12, TOKENS = 300, LEAF = 16, TOPK = 4 };

struct setting {
    const char *name;
    clattn_dtype dtype, cache_dtype;
    int32_t page_size;
    clattn_selector selector;
    float softcap;
    int64_t window;
    bool sink, all_keys;
};

static const struct setting settings[] = {
    {"contiguous", CLATTN_FLOAT32, CLATTN_FLOAT32, 0, CLATTN_SELECT_PISA, 0, 0, false, false},
    {"pages", CLATTN_FLOAT32, CLATTN_FLOAT32, 24, CLATTN_SELECT_PISA, 0, 0, false, false},
    {"dense", CLATTN_FLOAT32, CLATTN_FLOAT32, 24, CLATTN_SELECT_DENSE, 0, 0, true, false},
    {"int8", CLATTN_FLOAT16, CLATTN_INT8, 24, CLATTN_SELECT_PISA, 0, 0, false, false},
    {"int8, dense", CLATTN_FLOAT32, CLATTN_INT8, 0, CLATTN_SELECT_DENSE, 0, 0, false, false},
    {"options", CLATTN_BFLOAT16, CLATTN_BFLOAT16, 40, CLATTN_SELECT_PISA, 8, 70, true, false},
    {"every key", CLATTN_FLOAT32, CLATTN_FLOAT32, 16, CLATTN_SELECT_FLAT_MEAN, 0, 0, false, true},
};

/* The CPU's cache and that of a device. */
struct pair {
    const struct setting *setting;
    clattn_context *contexts[2];
    clattn_cache *caches[2];
    struct random random;
};

static clattn_context *cpu;

static void check(clattn_context *context, clattn_status status, const char *what, const char *name)
{
    char error[1024] = "";
    if (!status) return;
    clattn_context_error(context, error, sizeof error);
    fail_msg("%s: %s: %s: %s", name, what, clattn_strerror(status), error);
}

static clattn_cache_desc desc_of(const struct setting *s)
{
    clattn_cache_desc desc = CLATTN_CACHE_DESC_INIT;
    desc.sequences = SEQUENCES;
    desc.tokens = TOKENS;
    desc.kv_heads = KV_HEADS;
    desc.dim = DIM;
    desc.dim_v = DIM_V;
    desc.dtype = s->cache_dtype;
    desc.leaf = LEAF;
    desc.page_size = s->page_size;
    return desc;
}

static struct pair pair_new(clattn_context *device, const struct setting *s, uint64_t seed)
{
    struct pair pair = {.setting = s, .contexts = {cpu, device}, .random = random_seeded(seed)};
    clattn_cache_desc desc = desc_of(s);
    for (int n = 0; n < 2; n++)
        check(pair.contexts[n], clattn_cache_create(pair.contexts[n], &desc, &pair.caches[n]), "create",
              s->name);
    return pair;
}

static void pair_free(struct pair *pair)
{
    for (int n = 0; n < 2; n++)
        clattn_cache_release(pair->contexts[n], pair->caches[n]);
}

/* ---- comparisons ---- */

static void compare_pyramids(struct pair *pair, int32_t sequence, const char *after)
{
    static float means[2][TOKENS * DIM];
    int64_t nodes[2];
    assert_int_equal(clattn_cache_length(pair->caches[0], sequence),
                     clattn_cache_length(pair->caches[1], sequence));
    if (clattn_cache_length(pair->caches[0], sequence) == 0) return;
    for (int64_t h = 0; h < KV_HEADS; h++)
        for (int level = 1, status = 0; !status; level++) {
            status = clattn_cache_read(cpu, pair->caches[0], sequence, h, level, means[0], &nodes[0]);
            if (status) break;
            check(
                pair->contexts[1],
                clattn_cache_read(pair->contexts[1], pair->caches[1], sequence, h, level, means[1], &nodes[1]),
                "read", after);
            assert_int_equal(nodes[0], nodes[1]);
            /* Scales of codes are no integers: a leaf that was cut is summed in float here, in double there. */
            float most = pair->setting->cache_dtype == CLATTN_INT8 ? 2e-6f : 0;
            for (int64_t i = 0; i < nodes[0] * DIM; i++)
                if (!(fabsf(means[0][i] - means[1][i]) <= most))
                    fail_msg(
                        "%s: after %s: sequence %d, head %lld, level %d, element %lld is %.9g; %.9g is right",
                        pair->setting->name, after, sequence, (long long)h, level, (long long)i,
                        (double)means[1][i], (double)means[0][i]);
        }
}

static void compare_values(const struct pair *pair, const struct array *want, const struct array *have,
                           const char *name)
{
    const clattn_tensor *t = &want->view;
    double epsilon = t->dtype == CLATTN_FLOAT32 ? 2e-5 : 4 * dtype_epsilon(t->dtype);
    for (int64_t i = 0; i < t->len; i++)
        for (int64_t h = 0; h < t->heads; h++)
            for (int64_t d = 0; d < t->dim; d++) {
                double a = tensor_get(&want->view, 0, i, h, d), b = tensor_get(&have->view, 0, i, h, d);
                if (!(a == b || fabs(a - b) <= epsilon * (1 + fabs(a))))
                    fail_msg("%s: %s[%lld][%lld][%lld] is %.9g; %.9g is right", pair->setting->name, name,
                             (long long)i, (long long)h, (long long)d, b, a);
            }
}

static void compare_lists(const struct pair *pair, clattn_blocks *const *blocks, int64_t rows)
{
    size_t entries = (size_t)rows * KV_HEADS * TOPK;
    int32_t *lists[2];
    for (int n = 0; n < 2; n++) {
        lists[n] = malloc(entries * sizeof **lists);
        assert_non_null(lists[n]);
        check(pair->contexts[n], clattn_blocks_read(pair->contexts[n], blocks[n], lists[n], NULL), "blocks",
              pair->setting->name);
    }
    assert_memory_equal(lists[0], lists[1], entries * sizeof **lists);
    free(lists[0]);
    free(lists[1]);
}

/* ---- operations ---- */

/* Appends and decodes a batch in both. given_k: k and v are appended. */
static void step(struct pair *pair, int count, const int32_t *sequences, const int32_t *lens, bool given_k)
{
    const struct setting *s = pair->setting;
    int64_t rows = 0;
    for (int i = 0; i < count; i++)
        rows += lens[i];
    if (rows == 0) return;
    struct array q = array_new(s->dtype, 1, rows, KV_HEADS * GROUP, DIM, LAYOUT_PADDED);
    struct array k = array_new(s->dtype, 1, rows, KV_HEADS, DIM, LAYOUT_BHTD);
    struct array v = array_new(s->dtype, 1, rows, KV_HEADS, DIM_V, LAYOUT_PADDED);
    struct array sink = array_new(CLATTN_FLOAT32, 1, 1, KV_HEADS * GROUP, 1, LAYOUT_BTHD);
    struct array out[2], lse[2];
    clattn_blocks *blocks[2] = {NULL, NULL};
    clattn_attention_desc attention = CLATTN_ATTENTION_DESC_INIT;
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    array_fill(&q, FILL_NORMAL, &pair->random);
    array_fill(&k, FILL_INTEGER, &pair->random);
    array_fill(&v, FILL_NORMAL, &pair->random);
    array_fill(&sink, FILL_NORMAL, &pair->random);
    attention.softcap = s->softcap;
    attention.window = s->window;
    attention.causal = !s->all_keys;
    if (s->sink) attention.sink = &sink.view;
    select.selector = s->selector;
    select.leaf = LEAF;
    select.topk = TOPK;
    for (int n = 0; n < 2; n++) {
        out[n] = array_new(s->dtype, 1, rows, KV_HEADS * GROUP, DIM_V, LAYOUT_PADDED);
        lse[n] = array_new(CLATTN_FLOAT32, 1, rows, KV_HEADS * GROUP, 1, LAYOUT_BTHD);
        check(pair->contexts[n],
              clattn_decode(pair->contexts[n], pair->caches[n], &attention, &select, count, sequences, lens,
                            &q.view, given_k ? &k.view : NULL, given_k ? &v.view : NULL, &out[n].view,
                            &lse[n].view, s->selector == CLATTN_SELECT_DENSE ? NULL : &blocks[n], NULL),
              "decode", s->name);
    }
    if (blocks[0]) compare_lists(pair, blocks, rows);
    compare_values(pair, &out[0], &out[1], "out");
    compare_values(pair, &lse[0], &lse[1], "lse");
    array_check_guards(&out[1], "OpenCL", s->name);
    for (int n = 0; n < 2; n++) {
        clattn_blocks_release(pair->contexts[n], blocks[n]);
        array_free(&out[n]);
        array_free(&lse[n]);
    }
    array_free(&q);
    array_free(&k);
    array_free(&v);
    array_free(&sink);
    for (int i = 0; i < count; i++)
        compare_pyramids(pair, sequences[i], "a step");
}

static void truncate_both(struct pair *pair, int32_t sequence, int64_t length)
{
    for (int n = 0; n < 2; n++)
        check(pair->contexts[n],
              clattn_cache_truncate(pair->contexts[n], pair->caches[n], sequence, length, NULL), "truncate",
              pair->setting->name);
    compare_pyramids(pair, sequence, "truncating");
}

static void share_both(struct pair *pair, int32_t from, int32_t to, int64_t length)
{
    for (int n = 0; n < 2; n++)
        check(pair->contexts[n], clattn_cache_share(pair->contexts[n], pair->caches[n], from, to, length, NULL),
              "share", pair->setting->name);
    compare_pyramids(pair, to, "sharing");
}

/* ---- tests ---- */

static bool is_device(const struct target *target)
{
    return target->info.backend == CLATTN_BACKEND_OPENCL;
}

/* One history: a prefill, steps of a ragged batch, sharing, writing behind the shared part, going back. Of int8
 * the sums of a leaf that is cut are those of the codes, the same in both. */
static void check_history(struct pair *pair)
{
    const int32_t all[] = {2, 0, 1}, prefill[] = {70, 33, 16}, one[] = {1, 1, 1}, ragged[] = {3, 0, 18};
    const int32_t first = 0, second = 1, three = 3;
    step(pair, 3, all, prefill, true);
    step(pair, 3, all, one, true);
    step(pair, 3, all, ragged, true);
    truncate_both(pair, 1, 0);
    share_both(pair, 2, 1, 41);
    step(pair, 1, &second, &three, true);
    step(pair, 1, &first, &three, true);
    truncate_both(pair, 2, 32);
    step(pair, 3, all, one, true);
    step(pair, 3, all, ragged, false);
}

static void test_history(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target)
        for (int n = 0; n < COUNT(settings); n++) {
            if (!is_device(target) || !target_runs(target, n == 1 ? SIZE_TINY : SIZE_NORMAL)) continue;
            struct pair pair = pair_new(target->context, &settings[n], 70);
            check_history(&pair);
            pair_free(&pair);
        }
    target_report("a history of the cache");
}

static void random_operation(struct pair *pair)
{
    int32_t sequence = (int32_t)random_below(&pair->random, SEQUENCES), lens[SEQUENCES], order[SEQUENCES];
    int64_t length = clattn_cache_length(pair->caches[0], sequence);
    int count = 0;
    switch (random_below(&pair->random, 6)) {
    case 0:
        truncate_both(pair, sequence, random_below(&pair->random, length + 1));
        return;
    case 1:
        if (clattn_cache_length(pair->caches[0], 2) == 0 && length > 0 && sequence != 2)
            share_both(pair, sequence, 2, random_below(&pair->random, length) + 1);
        else
            truncate_both(pair, 2, 0);
        return;
    default:
        for (int32_t s = 0; s < SEQUENCES; s++) {
            int64_t room = TOKENS - clattn_cache_length(pair->caches[0], s);
            if (random_below(&pair->random, 3) == 0 || room < 40) continue;
            order[count] = s;
            lens[count++] = random_below(&pair->random, 3) ? 1 : (int32_t)random_below(&pair->random, 40);
        }
        if (count) step(pair, count, order, lens, true);
    }
}

static void test_random(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target) {
        if (!is_device(target) || !target_runs(target, SIZE_NORMAL)) continue;
        struct pair pair = pair_new(target->context, &settings[1], 71);
        for (int n = 0; n < 150; n++)
            random_operation(&pair);
        pair_free(&pair);
    }
    target_report("random operations");
}

/* A cl_mem of the caller, its queue, tensors on the device, events: nothing waits until the end. */
static void check_own_memory(const struct target *target)
{
    clattn_context *context = target->context;
    clattn_cache_desc desc = desc_of(&settings[1]);
    const int32_t sequence = 1, len = 21;
    clattn_cache *cache = NULL;
    clattn_tensor q, k, v, out;
    void *event = NULL;
    clattn_sync sync = CLATTN_SYNC_INIT;
    cl_int code;
    check(context, clattn_cache_bytes(context, &desc, &desc.storage_bytes), "bytes", target->label);
    struct opencl *opencl = opencl_of(context);
    cl_mem memory = clCreateBuffer(opencl->context, CL_MEM_READ_WRITE, desc.storage_bytes, NULL, &code);
    assert_int_equal(code, 0);
    desc.storage = memory;
    check(context, clattn_cache_create(context, &desc, &cache), "create", target->label);
    check(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, len, KV_HEADS * GROUP, DIM, &q), "q",
          target->label);
    check(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, len, KV_HEADS, DIM, &k), "k",
          target->label);
    check(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, len, KV_HEADS, DIM_V, &v), "v",
          target->label);
    check(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, len, KV_HEADS * GROUP, DIM_V, &out), "out",
          target->label);
    struct random random = random_seeded(72);
    struct array filled = array_new(CLATTN_FLOAT32, 1, len, KV_HEADS * GROUP, DIM, LAYOUT_BTHD);
    struct array ones = array_new(CLATTN_FLOAT32, 1, len, KV_HEADS, DIM_V, LAYOUT_BTHD);
    array_fill(&filled, FILL_NORMAL, &random);
    array_fill_constant(&ones, 1);
    check(context, clattn_tensor_upload(context, &filled.view, &q), "upload", target->label);
    clattn_tensor half = filled.view;
    half.heads = KV_HEADS;
    check(context, clattn_tensor_upload(context, &half, &k), "upload", target->label);
    check(context, clattn_tensor_upload(context, &ones.view, &v), "upload", target->label);
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    select.leaf = LEAF;
    sync.queue = opencl->queue;
    sync.event = &event;
    check(context,
          clattn_decode(context, cache, NULL, &select, 1, &sequence, &len, &q, &k, &v, &out, NULL, NULL, &sync),
          "decode", target->label);
    assert_non_null(event);
    cl_event done = event;
    assert_int_equal(clWaitForEvents(1, &done), 0);
    clReleaseEvent(done);
    struct array have = array_new(CLATTN_FLOAT32, 1, len, KV_HEADS * GROUP, DIM_V, LAYOUT_BTHD);
    check(context, clattn_tensor_download(context, &out, &have.view), "download", target->label);
    for (int64_t i = 0; i < len; i++) /* means of ones */
        for (int64_t d = 0; d < DIM_V; d++)
            assert_true(fabs(tensor_get(&have.view, 0, i, 3, d) - 1) < 1e-5);
    clattn_cache_release(context, cache);
    desc.storage_bytes--;
    cache = NULL;
    assert_int_equal(clattn_cache_create(context, &desc, &cache), CLATTN_INVALID_ARGUMENT);
    assert_null(cache);
    clattn_tensor *const tensors[] = {&q, &k, &v, &out};
    for (int n = 0; n < 4; n++)
        clattn_tensor_release(context, tensors[n]);
    array_free(&filled);
    array_free(&ones);
    array_free(&have);
    clReleaseMemObject(memory);
}

static void test_own_memory(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target)
        if (is_device(target) && target_runs(target, SIZE_NORMAL)) check_own_memory(target);
    target_report("the caller's memory");
}

/* ---- events ---- */

static int events_wanted; /* from the steps of a call */
static const struct backend *own;

static clattn_status copy_counted(clattn_context *context, clattn_cache *cache, const struct cache_copy *copies,
                                  int64_t count, const clattn_sync *sync)
{
    events_wanted += sync && sync->event;
    return own->cache_copy(context, cache, copies, count, sync);
}

static clattn_status cut_counted(clattn_context *context, clattn_cache *cache, int32_t sequence,
                                 const clattn_sync *sync)
{
    events_wanted += sync && sync->event;
    return own->cache_cut(context, cache, sequence, sync);
}

static clattn_status append_counted(clattn_context *context, const struct cache_append_job *job)
{
    events_wanted += job->sync && job->sync->event;
    return own->cache_append(context, job);
}

/* After a call: it gave one event, which is that of its last step. More would never be released. */
static void check_event(const struct target *target, clattn_status status, const char *what, void **event)
{
    cl_event done = *event;
    check(target->context, status, what, target->label);
    if (!done || events_wanted != 1)
        fail_msg("%s: %s gave event %p, asked for %d times", target->label, what, (void *)done, events_wanted);
    assert_int_equal(clWaitForEvents(1, &done), 0);
    clReleaseEvent(done);
    *event = NULL;
    events_wanted = 0;
}

static void check_events(const struct target *target)
{
    clattn_context *context = target->context;
    clattn_cache_desc desc = desc_of(&settings[1]);
    const int32_t one = 1, len = 21, more = 3, none = 0;
    clattn_cache *cache = NULL;
    clattn_tensor k, v;
    void *event = NULL;
    clattn_sync sync = CLATTN_SYNC_INIT;
    sync.event = &event;
    check(context, clattn_cache_create(context, &desc, &cache), "create", target->label);
    check(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, len, KV_HEADS, DIM, &k), "k",
          target->label);
    check(context, clattn_tensor_create(context, CLATTN_FLOAT32, 1, len, KV_HEADS, DIM_V, &v), "v",
          target->label);
    clattn_tensor some_k = k, some_v = v, no_k = k, no_v = v;
    some_k.len = some_v.len = more;
    no_k.len = no_v.len = 0;
#define APPEND(LEN, K, V) clattn_cache_append(context, cache, 1, &one, LEN, K, V, &sync)
#define TRUNCATE(LENGTH) clattn_cache_truncate(context, cache, one, LENGTH, &sync)
#define SHARE(LENGTH) clattn_cache_share(context, cache, one, 0, LENGTH, &sync)
    check_event(target, APPEND(&len, &k, &v), "appending", &event);
    check_event(target, APPEND(&none, &no_k, &no_v), "appending nothing", &event);
    check_event(target, SHARE(0), "sharing nothing", &event);
    check_event(target, SHARE(len - 2), "sharing a part", &event);
    check_event(target, APPEND(&more, &some_k, &some_v), "appending to a shared page", &event);
    check(context, clattn_cache_truncate(context, cache, 0, 0, NULL), "truncate", target->label);
    check_event(target, SHARE(len + more), "sharing everything", &event);
    check_event(target, TRUNCATE(len + more), "cutting nothing", &event);
    check_event(target, TRUNCATE(5), "cutting", &event);
    check_event(target, TRUNCATE(0), "freeing", &event);
    clattn_tensor_release(context, &k);
    clattn_tensor_release(context, &v);
    clattn_cache_release(context, cache);
}

static void test_events(void **state)
{
    (void)state;
    FOR_EACH_TARGET (target) {
        if (!is_device(target) || !target_runs(target, SIZE_NORMAL)) continue;
        own = target->context->backend;
        struct backend counting = *own;
        counting.cache_copy = copy_counted;
        counting.cache_cut = cut_counted;
        counting.cache_append = append_counted;
        target->context->backend = &counting;
        check_events(target);
        target->context->backend = own;
    }
    target_report("events of a cache's calls");
}

static int set_up(void **state)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    desc.backend = CLATTN_BACKEND_CPU;
    if (targets_open(state) || clattn_context_create(&desc, &cpu)) return -1;
    return 0;
}

static int tear_down(void **state)
{
    clattn_context_release(cpu);
    return targets_close(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_history), cmocka_unit_test(test_random),
                                       cmocka_unit_test(test_own_memory), cmocka_unit_test(test_events)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
