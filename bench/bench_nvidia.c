/* SPDX-License-Identifier: MIT */
/* Speed of the matrix tier on an NVIDIA card, through the public interface: bench/bench_nvidia [PART OF A ROW'S
 * NAME].
 *
 * Every row is checked on sampled rows in double precision first (bench_nvidia_check.c); a wrong one has no
 * time. Times are medians of event times: a long fill keeps the card busy while the call's commands are
 * enqueued, so that only the card's own time counts, from the end of the fill to the end of the call. */

#include "bench_nvidia.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REPEATS = 9 };
static const size_t BUSY_BYTES = (size_t)4 << 30; /* about a millisecond */

static const char fill_source[] =
    "uint mix32(uint x) { x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; return x ^ x >> 16; "
    "}\n"
    "float normal(uint seed, ulong n) {\n"
    "    uint a = mix32((uint)n * 0x9e3779b9u + seed + (uint)(n >> 32) * 77u), b = mix32(a + 0x1234567u);\n"
    "    return ((float)(a & 0xffff) + (float)(a >> 16) + (float)(b & 0xffff) + (float)(b >> 16) - 131070.0f) "
    "*\n"
    "           (1.7320508f / 65536.0f); }\n"
    /* noise, and shared noise of stretches of 64, 512 and 4096 tokens: neighbours are alike */
    "__kernel void fill(__global ushort *x, uint seed, uint heads, uint dim, float shared_part) {\n"
    "    ulong n = get_global_id(0), d = n % dim, i = n / dim / heads;\n"
    "    float v = normal(seed, n);\n"
    "    if (shared_part != 0.0f) v += shared_part * (normal(7u, i / 64 * dim + d) + normal(8u, i / 512 * dim "
    "+ d) +\n"
    "                                                 normal(9u, i / 4096 * dim + d));\n"
    "    uint u = as_uint(v);\n"
    "    x[n] = (ushort)((u + 0x7fffu + (u >> 16 & 1u)) >> 16); }\n";

static struct bench bench;

void bench_fail(const char *what, int code)
{
    char text[2048] = "";
    if (bench.context) clattn_context_error(bench.context, text, sizeof text);
    fprintf(stderr, "%s: %d %s\n", what, code, text);
    exit(EXIT_FAILURE);
}

/* ---- set-up ---- */

static void bench_open(void)
{
    cl_platform_id platforms[16];
    cl_uint count = 0, units = 0;
    cl_int code;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    const char *source = fill_source;
    clGetPlatformIDs(16, platforms, &count);
    for (cl_uint i = 0; i < count && !bench.device; i++) {
        char vendor[128] = "";
        clGetPlatformInfo(platforms[i], CL_PLATFORM_VENDOR, sizeof vendor, vendor, NULL);
        if (strstr(vendor, "NVIDIA")) clGetDeviceIDs(platforms[i], CL_DEVICE_TYPE_GPU, 1, &bench.device, NULL);
    }
    if (!bench.device) {
        fprintf(stderr, "no NVIDIA card\n");
        exit(77);
    }
    bench.cl = clCreateContext(NULL, 1, &bench.device, NULL, NULL, &code);
    check_code("clCreateContext", code);
    bench.queue = clCreateCommandQueue(bench.cl, bench.device, CL_QUEUE_PROFILING_ENABLE, &code);
    check_code("clCreateCommandQueue", code);
    cl_program program = clCreateProgramWithSource(bench.cl, 1, &source, NULL, &code);
    check_code("clCreateProgramWithSource", code);
    check_code("clBuildProgram", clBuildProgram(program, 1, &bench.device, "", NULL, NULL));
    bench.fill = clCreateKernel(program, "fill", &code);
    check_code("clCreateKernel", code);
    clReleaseProgram(program);
    bench.busy = clCreateBuffer(bench.cl, CL_MEM_READ_WRITE, BUSY_BYTES, NULL, &code);
    check_code("clCreateBuffer", code);
    desc.backend = CLATTN_BACKEND_OPENCL;
    desc.cl_context = bench.cl;
    desc.cl_device = bench.device;
    desc.cl_queue = bench.queue;
    check_code("clattn_context_create", clattn_context_create(&desc, &bench.context));
    clattn_device_info info = {.size = sizeof info};
    clattn_context_device(bench.context, &info);
    clGetDeviceInfo(bench.device, CL_DEVICE_MAX_COMPUTE_UNITS, sizeof units, &units, NULL);
    printf("%s, driver %s, tier %s\n", info.name, info.driver, info.variant);
}

static void fill_tensor(clattn_tensor *tensor, unsigned seed, float shared_part)
{
    cl_mem mem = tensor->data;
    cl_uint heads = (cl_uint)tensor->heads, dim = (cl_uint)tensor->dim, number = seed;
    size_t items = (size_t)(tensor->len * tensor->heads * tensor->dim);
    clSetKernelArg(bench.fill, 0, sizeof mem, &mem);
    clSetKernelArg(bench.fill, 1, sizeof number, &number);
    clSetKernelArg(bench.fill, 2, sizeof heads, &heads);
    clSetKernelArg(bench.fill, 3, sizeof dim, &dim);
    clSetKernelArg(bench.fill, 4, sizeof shared_part, &shared_part);
    check_code("fill", clEnqueueNDRangeKernel(bench.queue, bench.fill, 1, NULL, &items, NULL, 0, NULL, NULL));
}

static clattn_tensor make(int64_t len, int heads, int dim, unsigned seed, float shared_part)
{
    clattn_tensor tensor;
    clattn_dtype dtype = dim == 1 ? CLATTN_FLOAT32 : CLATTN_BFLOAT16;
    check_code("clattn_tensor_create", clattn_tensor_create(bench.context, dtype, 1, len, heads, dim, &tensor));
    if (seed) fill_tensor(&tensor, seed, shared_part);
    return tensor;
}

static struct case_data case_new(int64_t len, int kv_heads, int group, int dim, float shared_part)
{
    struct case_data c = {
        .len = len, .kv_heads = kv_heads, .group = group, .dim = dim, .attention = CLATTN_ATTENTION_DESC_INIT};
    int heads = kv_heads * group;
    c.q = make(len, heads, dim, 1, shared_part);
    c.k = make(len, kv_heads, dim, 2, shared_part);
    c.v = make(len, kv_heads, dim, 3, 0);
    c.out = make(len, heads, dim, 0, 0);
    c.lse = make(len, heads, 1, 0, 0);
    return c;
}

static void case_free(struct case_data *c)
{
    clattn_tensor *const tensors[] = {&c->q,  &c->k,  &c->v,  &c->out,  &c->lse,  &c->dout,
                                      &c->dq, &c->dk, &c->dv, &c->sink, &c->dsink};
    for (int i = 0; i < 11; i++)
        if (tensors[i]->data) clattn_tensor_release(bench.context, tensors[i]);
    clattn_blocks_release(bench.context, c->blocks);
    clattn_pyramid_release(bench.context, c->pyramid);
    clattn_cache_release(bench.context, c->cache);
    free(c->lists);
}

/* A logit for each head, about the size of the others' largest. */
static void sink_make(struct case_data *c)
{
    int heads = c->kv_heads * c->group;
    float logits[256];
    for (int h = 0; h < heads; h++)
        logits[h] = 2 + 0.125f * (float)(h % 16);
    clattn_tensor host = clattn_tensor_bthd(logits, CLATTN_FLOAT32, 1, 1, heads, 1);
    c->sink = make(1, heads, 1, 0, 0);
    check_code("clattn_tensor_upload", clattn_tensor_upload(bench.context, &host, &c->sink));
    c->attention.sink = &c->sink;
}

static uint32_t next_random(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

/* topk distinct random blocks up to the row's own for every token and key head. */
static void lists_random(struct case_data *c, int topk)
{
    c->topk = topk;
    c->q_block = 1;
    c->list_heads = c->kv_heads;
    c->lists = malloc((size_t)(c->len * c->kv_heads * topk) * sizeof *c->lists);
    for (int64_t row = 0; row < c->len * c->kv_heads; row++) {
        int32_t *list = c->lists + row * topk, blocks = (int32_t)(row / c->kv_heads / 64) + 1;
        for (int n = 0; n < topk;) {
            bool is_new = true;
            int32_t block =
                blocks <= topk ? (n < blocks ? n : -1) : (int32_t)(next_random() % (uint32_t)blocks);
            for (int j = 0; j < n && block >= 0; j++)
                is_new = is_new && list[j] != block;
            if (is_new) list[n++] = block;
        }
    }
}

/* Query blocks of 128: the own block and those 2^j blocks before, as log-stride patterns have them. */
static void lists_log_stride(struct case_data *c)
{
    c->topk = 40;
    c->q_block = 128;
    c->list_heads = 1;
    int64_t rows = c->len / 128;
    c->lists = malloc((size_t)(rows * c->topk) * sizeof *c->lists);
    memset(c->lists, 0xff, (size_t)(rows * c->topk) * sizeof *c->lists);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t b = 0, n = 0; b <= row; b++)
            if (b == 0 || b == row || ((row - b) & (row - b - 1)) == 0) {
                c->lists[row * c->topk + n++] = (int32_t)(2 * b);
                c->lists[row * c->topk + n++] = (int32_t)(2 * b + 1);
            }
}

static void lists_upload(struct case_data *c)
{
    clattn_blocks_desc desc = CLATTN_BLOCKS_DESC_INIT;
    desc.q_block = c->q_block;
    desc.rows = c->len / c->q_block;
    desc.heads = c->list_heads;
    desc.topk = c->topk;
    check_code("clattn_blocks_create", clattn_blocks_create(bench.context, &desc, c->lists, &c->blocks));
}

/* ---- what is timed ---- */

static clattn_status run_forward(struct case_data *c, const clattn_sync *sync)
{
    return clattn_attention_forward(bench.context, &c->attention, &c->q, &c->k, &c->v, c->blocks, &c->out,
                                    &c->lse, sync);
}

static clattn_status run_select(struct case_data *c, const clattn_sync *sync)
{
    clattn_select_desc select = CLATTN_SELECT_DESC_INIT;
    clattn_sync first = *sync;
    first.event = NULL;
    select.topk = c->topk;
    select.selector = c->selector;
    clattn_status status = clattn_pyramid_build(bench.context, NULL, 64, &c->k, &c->pyramid, &first);
    return status ? status
                  : clattn_select(bench.context, NULL, &select, &c->q, &c->k, c->pyramid, &c->blocks, sync);
}

static clattn_status run_all(struct case_data *c, const clattn_sync *sync)
{
    clattn_sync first = *sync;
    first.event = NULL;
    clattn_status status = run_select(c, &first);
    return status ? status : run_forward(c, sync);
}

static clattn_status run_backward(struct case_data *c, const clattn_sync *sync)
{
    clattn_gradients gradients = CLATTN_GRADIENTS_INIT;
    gradients.dout = &c->dout;
    gradients.dq = &c->dq;
    gradients.dk = &c->dk;
    gradients.dv = &c->dv;
    gradients.dsink = c->attention.sink ? &c->dsink : NULL;
    return clattn_attention_backward(bench.context, &c->attention, &c->q, &c->k, &c->v, c->blocks, &c->out,
                                     &c->lse, &gradients, sync);
}

static clattn_status run_decode(struct case_data *c, const clattn_sync *sync)
{
    return decode_step(&bench, c, sync);
}

static double event_end(cl_event event)
{
    cl_ulong time = 0;
    check_code("profile", clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_END, sizeof time, &time, NULL));
    clReleaseEvent(event);
    return 1e-6 * (double)time;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double time_of(struct case_data *c, clattn_status (*run)(struct case_data *, const clattn_sync *))
{
    double times[REPEATS];
    for (int n = 0; n < REPEATS; n++) {
        cl_uint zero = 0;
        cl_event start, end = NULL;
        clattn_sync sync = CLATTN_SYNC_INIT;
        void *place = NULL;
        sync.queue = bench.queue;
        sync.event = &place;
        check_code("busy", clEnqueueFillBuffer(bench.queue, bench.busy, &zero, sizeof zero, 0, BUSY_BYTES, 0,
                                               NULL, &start));
        check_code("run", run(c, &sync));
        end = place;
        check_code("clFinish", clFinish(bench.queue));
        double from = event_end(start);
        times[n] = event_end(end) - from;
    }
    qsort(times, REPEATS, sizeof *times, compare_doubles);
    return times[REPEATS / 2];
}

/* ---- rows ---- */

static const struct row {
    const char *name;
    double must, aim;
    int64_t len;
    int kv_heads, group, dim, topk;
    float shared_part;
    enum {
        RANDOM,
        SELECTED,
        SELECTION,
        EVERYTHING,
        GRADIENTS,
        STRIDES,
        DENSE,
        FLAT_MEANS,
        FLAT_EXACT,
        DECODE,
        STRIDE_GRADIENTS,
        DENSE_GRADIENTS
    } kind;
} rows[] = {
    {"attention, random lists, 64K", 2.1, 1.5, 65536, 1, 16, 128, 8, 0, RANDOM},
    {"attention, PISA lists, correlated, 64K", 1.3, 0.6, 65536, 1, 16, 128, 8, 0.5f, SELECTED},
    {"attention, PISA lists, random keys, 64K", 0, 0, 65536, 1, 16, 128, 8, 0, SELECTED},
    {"attention, random lists, dim 64, 64K", 1.0, 0.6, 65536, 1, 16, 64, 8, 0, RANDOM},
    {"groups of 4, K 16, random lists, 64K", 9, 5, 65536, 4, 4, 128, 16, 0, RANDOM},
    {"groups of 1, K 16, random lists, 64K", 20, 10, 65536, 16, 1, 128, 16, 0, RANDOM},
    {"backward, random lists, 64K", 10, 4, 65536, 1, 16, 128, 8, 0, GRADIENTS},
    {"backward, log-stride, blocks of 128, 64K", 0, 0, 65536, 1, 16, 128, 0, 0, STRIDE_GRADIENTS},
    {"backward, dense causal, 16K", 0, 0, 16384, 1, 16, 128, 0, 0, DENSE_GRADIENTS},
    {"pyramid + PISA, correlated, 64K", 3, 1.5, 65536, 1, 16, 128, 8, 0.5f, SELECTION},
    {"pyramid + PISA, random, 64K", 3, 1.5, 65536, 1, 16, 128, 8, 0, SELECTION},
    {"pyramid + PISA, correlated, 256K", 11.5, 7, 262144, 1, 16, 128, 8, 0.5f, SELECTION},
    {"pyramid + PISA, random, 256K", 11.5, 7, 262144, 1, 16, 128, 8, 0, SELECTION},
    {"pyramid + PISA, random, 16K", 0, 0, 16384, 1, 16, 128, 8, 0, SELECTION},
    {"pyramid + PISA, random, 8K", 0, 0, 8192, 1, 16, 128, 8, 0, SELECTION},
    {"pyramid + PISA, random, 4K", 0, 0, 4096, 1, 16, 128, 8, 0, SELECTION},
    {"pyramid + flat means, random, 16K", 0, 0, 16384, 1, 16, 128, 8, 0, FLAT_MEANS},
    {"pyramid + flat means, random, 8K", 0, 0, 8192, 1, 16, 128, 8, 0, FLAT_MEANS},
    {"pyramid + flat means, random, 4K", 0, 0, 4096, 1, 16, 128, 8, 0, FLAT_MEANS},
    {"pyramid + flat exact, random, 64K", 0, 0, 65536, 1, 16, 128, 8, 0, FLAT_EXACT},
    {"pyramid + flat exact, random, 16K", 0, 0, 16384, 1, 16, 128, 8, 0, FLAT_EXACT},
    {"pyramid + flat exact, random, 8K", 0, 0, 8192, 1, 16, 128, 8, 0, FLAT_EXACT},
    {"pyramid + flat exact, random, 4K", 0, 0, 4096, 1, 16, 128, 8, 0, FLAT_EXACT},
    {"build + select + attend, correlated, 64K", 5, 2.5, 65536, 1, 16, 128, 8, 0.5f, EVERYTHING},
    {"build + select + attend, random, 64K", 5, 2.5, 65536, 1, 16, 128, 8, 0, EVERYTHING},
    {"build + select + attend, correlated, 256K", 22, 11, 262144, 1, 16, 128, 8, 0.5f, EVERYTHING},
    {"build + select + attend, random, 256K", 22, 11, 262144, 1, 16, 128, 8, 0, EVERYTHING},
    {"static log-stride, blocks of 128, 64K", 1.8, 1.1, 65536, 1, 16, 128, 0, 0, STRIDES},
    {"dense causal, 16K", 3.0, 1.9, 16384, 1, 16, 128, 0, 0, DENSE},
    {"decode step, 16K", 0, 0, 16384, 1, 16, 128, 8, 0, DECODE},
    {"decode step, 64K", 0, 0, 65536, 1, 16, 128, 8, 0, DECODE},
    {"decode step, 256K", 0.1, 0.05, 262144, 1, 16, 128, 8, 0, DECODE},
    {"decode step, 256K, correlated", 0.1, 0.05, 262144, 1, 16, 128, 8, 0.5f, DECODE},
};

/* The same with options of attention. */
static const struct option_row {
    struct row row;
    int64_t window;
    float softcap;
    bool sink;
} option_rows[] = {
    {{"all keys, window 4096, 64K", 0, 0, 65536, 1, 16, 128, 0, 0, DENSE}, 4096, 0, false},
    {{"window 128, sink, 64 heads on 8, dim 64, 64K", 0, 0, 65536, 8, 8, 64, 0, 0, DENSE}, 128, 0, true},
    {{"dense causal, softcap, 16K", 0, 0, 16384, 1, 16, 128, 0, 0, DENSE}, 0, 50, false},
    {{"dense causal, sink, 16K", 0, 0, 16384, 1, 16, 128, 0, 0, DENSE}, 0, 0, true},
    {{"random lists, sink, 64K", 0, 0, 65536, 1, 16, 128, 8, 0, RANDOM}, 0, 0, true},
    {{"random lists, window 16K, softcap, sink, 64K", 0, 0, 65536, 1, 16, 128, 8, 0, RANDOM}, 16384, 50, true},
    {{"PISA lists, correlated, sink, 64K", 0, 0, 65536, 1, 16, 128, 8, 0.5f, SELECTED}, 0, 0, true},
    {{"PISA lists, correlated, all options, 64K", 0, 0, 65536, 1, 16, 128, 8, 0.5f, SELECTED}, 16384, 50, true},
    {{"log-stride, blocks of 128, sink, 64K", 0, 0, 65536, 1, 16, 128, 0, 0, STRIDES}, 0, 0, true},
    {{"backward, all keys, window 4096, 64K", 0, 0, 65536, 1, 16, 128, 0, 0, DENSE_GRADIENTS}, 4096, 0, false},
    {{"backward, window 128, sink, 64 heads on 8, 64K", 0, 0, 65536, 8, 8, 64, 0, 0, DENSE_GRADIENTS},
     128,
     0,
     true},
    {{"log-stride, blocks of 128, window 16K, 64K", 0, 0, 65536, 1, 16, 128, 0, 0, STRIDES}, 16384, 0, false},
};

static bool is_selection(const struct row *row)
{
    return row->kind == SELECTION || row->kind == FLAT_MEANS || row->kind == FLAT_EXACT;
}

static bool has_gradients(const struct row *row)
{
    return row->kind == GRADIENTS || row->kind == STRIDE_GRADIENTS || row->kind == DENSE_GRADIENTS;
}

static void check_row(const struct row *row, struct case_data *c, char *verdict, size_t bytes)
{
    if (row->kind == DECODE) {
        c->topk = row->topk;
        c->q_block = 1;
        c->list_heads = c->kv_heads;
        decode_last(&bench, c);
        if (check_lists(&bench, c, verdict, bytes)) check_forward(&bench, c, verdict, bytes);
        return;
    }
    if (is_selection(row) || row->kind == EVERYTHING || row->kind == SELECTED) {
        c->topk = row->topk;
        c->q_block = 1;
        c->list_heads = c->kv_heads;
        clattn_sync sync = CLATTN_SYNC_INIT;
        check_code("selection", run_select(c, &sync));
        check_code("clFinish", clFinish(bench.queue));
        if (!check_lists(&bench, c, verdict, bytes)) return;
    }
    if (is_selection(row)) return;
    check_code("forward", run_forward(c, NULL));
    if (!check_forward(&bench, c, verdict, bytes) || !has_gradients(row)) return;
    clattn_sync sync = CLATTN_SYNC_INIT;
    clattn_status status = run_backward(c, &sync);
    if (status) {
        snprintf(verdict, bytes, "WRONG: %s", clattn_strerror(status));
        return;
    }
    check_code("clFinish", clFinish(bench.queue));
    check_backward(&bench, c, verdict, bytes);
}

static void run_row(const struct row *row, const struct option_row *options)
{
    char verdict[256] = "";
    clattn_status (*const runs[])(struct case_data *, const clattn_sync *) = {
        run_forward, run_forward, run_select, run_all,    run_backward, run_forward,
        run_forward, run_select,  run_select, run_decode, run_backward, run_backward};
    struct case_data c = case_new(row->len, row->kv_heads, row->group, row->dim, row->shared_part);
    c.selector = row->kind == FLAT_MEANS   ? CLATTN_SELECT_FLAT_MEAN
                 : row->kind == FLAT_EXACT ? CLATTN_SELECT_FLAT_LSE
                                           : CLATTN_SELECT_PISA;
    if (options) {
        c.attention.window = options->window;
        c.attention.softcap = options->softcap;
        if (options->sink) sink_make(&c);
    }
    if (row->kind == RANDOM || row->kind == GRADIENTS) lists_random(&c, row->topk);
    if (row->kind == STRIDES || row->kind == STRIDE_GRADIENTS) lists_log_stride(&c);
    if (c.lists) lists_upload(&c);
    if (has_gradients(row)) {
        c.dout = make(c.len, c.kv_heads * c.group, c.dim, 5, 0);
        c.dq = make(c.len, c.kv_heads * c.group, c.dim, 0, 0);
        c.dk = make(c.len, c.kv_heads, c.dim, 0, 0);
        c.dv = make(c.len, c.kv_heads, c.dim, 0, 0);
        c.dsink = make(1, c.kv_heads * c.group, 1, 0, 0);
    }
    check_row(row, &c, verdict, sizeof verdict);
    printf("%-45s ", row->name);
    if (strncmp(verdict, "WRONG", 5) == 0) {
        printf("      -");
    } else {
        double time = time_of(&c, runs[row->kind]);
        if (row->kind == DECODE) decode_steps(&bench, &c, verdict, sizeof verdict);
        printf("%7.3f ms", time);
        if (row->must > 0)
            printf("  must %5.4g %-4s aim %4.3g %-4s", row->must, time <= row->must ? "met" : "-", row->aim,
                   time <= row->aim ? "met" : "-");
    }
    printf("  %s\n", verdict);
    fflush(stdout);
    case_free(&c);
}

int main(int argc, char **argv)
{
    bench_open();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (argc < 2 || strstr(rows[i].name, argv[1])) run_row(&rows[i], NULL);
    for (size_t i = 0; i < sizeof option_rows / sizeof *option_rows; i++)
        if (argc < 2 || strstr(option_rows[i].row.name, argv[1])) run_row(&option_rows[i].row, &option_rows[i]);
    clattn_stats stats = {.size = sizeof stats};
    clattn_context_stats(bench.context, &stats);
    printf("%llu programs built, %llu loaded, in %.2f s\n", (unsigned long long)stats.programs_built,
           (unsigned long long)stats.programs_loaded, stats.build_seconds);
    clattn_context_release(bench.context);
    clReleaseMemObject(bench.busy);
    clReleaseKernel(bench.fill);
    clReleaseCommandQueue(bench.queue);
    clReleaseContext(bench.cl);
    return 0;
}
