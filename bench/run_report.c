/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "run.h"

#include "program.h"

#include <inttypes.h>
#include <stdio.h>
#include <sys/resource.h>

static int64_t peak_memory(void)
{
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
#ifdef __APPLE__
    return usage.ru_maxrss;
#else
    return (int64_t)usage.ru_maxrss * 1024;
#endif
}

static double scale_used(const struct run *run)
{
    return run->scale == run->scale ? run->scale : 1 / __builtin_sqrt((double)run->dim);
}

static void report_sizes(report *parent, const struct run *run)
{
    report *sizes = report_child(parent, "sizes");
    report_integer(sizes, "batch", run->batch);
    report_integer(sizes, "q_len", run->q_len);
    report_integer(sizes, "kv_len", run->kv_len);
    report_integer(sizes, "q_heads", run->q_heads);
    report_integer(sizes, "kv_heads", run->kv_heads);
    report_integer(sizes, "dim", run->dim);
    report_integer(sizes, "dim_v", run->dim_v);
}

static void report_selection(report *parent, const struct run *run)
{
    const clattn_select_desc *desc = &run->job.select;
    report *selection = report_child(parent, "selection");
    char text[128];
    report_text(selection, "selector",
                run->pattern ? run->selector_text : selector_text(desc, text, sizeof text));
    if (run->select.selector == CLATTN_SELECT_DENSE && !run->pattern) return;
    report_integer(selection, "leaf", desc->leaf);
    report_integer(selection, "leaves", (run->kv_len + desc->leaf - 1) / desc->leaf);
    if (run->pattern && !run->join) return;
    report_integer(selection, "topk", desc->topk);
    report_integer(selection, "forced_first", run->causal ? desc->forced_first : 0);
    report_integer(selection, "forced_last", run->causal ? desc->forced_last : 0);
}

static void report_inputs(report *parent, const struct run *run)
{
    static const char *const names[RUN_INPUTS] = {"q", "k", "v"};
    report *inputs = report_child(parent, "inputs");
    for (int i = 0; i < RUN_INPUTS; i++) {
        report *input = report_child(inputs, names[i]);
        report_text(input, "file", run->input_names[i]);
        report_integer(input, "nan", (int64_t)run->values[i].nan);
        report_integer(input, "infinite", (int64_t)run->values[i].infinite);
    }
}

static void report_axes(report *parent, const char *name, const int32_t *numbers, int axes)
{
    report *list = report_list(parent, name);
    for (int a = 0; a < axes; a++)
        report_entry_integer(list, numbers[a]);
}

static void report_neighborhood(report *parent, const struct run *run)
{
    const clattn_neighborhood_desc *desc = &run->neighborhood;
    report *object = report_child(parent, "neighborhood");
    report_axes(object, "layout", desc->length, desc->axes);
    report_axes(object, "window", desc->window, desc->axes);
    report_axes(object, "stride", desc->stride, desc->axes);
    report_axes(object, "dilation", desc->dilation, desc->axes);
    report_axes(object, "causal", desc->causal, desc->axes);
    report_integer(object, "extra_len", run->job.extra_k.len);
}

static void report_attention(report *root, const struct run *run)
{
    report_real(root, "scale", scale_used(run));
    if (run->is_neighborhood) {
        report_neighborhood(root, run);
        return;
    }
    report_flag(root, "causal", run->causal);
    report_real(root, "softcap", run->softcap);
    report_integer(root, "window_tokens", run->window_tokens);
    report_integer(root, "sequences", run->sequences);
    report_text(root, "sink", run->extra_names[RUN_SINK]);
    report_text(root, "bias", run->extra_names[RUN_BIAS]);
    report_selection(root, run);
}

static int print_json(const struct run *run)
{
    static const char *const outputs[RUN_OUTPUTS] = {"out", "lse", "blocks"};
    const struct job *job = &run->job;
    report *root = report_object();
    report_text(root, "version", clattn_version());
    device_report(report_child(root, "device"), &run->device);
    report_inputs(root, run);
    report_text(root, "dtype", element_name(run->files[RUN_Q].type));
    report_text(root, "layout", run_layouts[run->layout]);
    report_sizes(root, run);
    report_attention(root, run);
    run_report_quality(root, run);
    report *seconds = report_child(root, "seconds");
    report_real(seconds, "build", job->build);
    for (int i = 0; i < JOB_STEPS; i++)
        report_real(seconds, job_step_names[i], job->seconds[i]);
    report_real(seconds, "total", job->total);
    report_integer(root, "programs_built", (int64_t)job->programs_built);
    report_integer(root, "programs_loaded", (int64_t)job->programs_loaded);
    report_integer(root, "peak_memory_bytes", peak_memory());
    report *files = report_child(root, "outputs");
    for (int i = 0; i < RUN_OUTPUTS; i++)
        report_text(files, outputs[i], run->output_names[i]);
    int status = report_print(root);
    report_release(root);
    return status;
}

static void print_neighborhood(const struct run *run)
{
    const clattn_neighborhood_desc *desc = &run->neighborhood;
    char text[5][64];
    int axes = desc->axes;
    printf("attention  layout %s, window %s, stride %s, dilation %s, causal %s, scale %g, %" PRId64
           " extra keys\n",
           layout_join(desc->length, axes, text[0], sizeof text[0]),
           layout_join(desc->window, axes, text[1], sizeof text[1]),
           layout_join(desc->stride, axes, text[2], sizeof text[2]),
           layout_join(desc->dilation, axes, text[3], sizeof text[3]),
           layout_join(desc->causal, axes, text[4], sizeof text[4]), scale_used(run), run->job.extra_k.len);
}

static void print_attention(const struct run *run)
{
    const clattn_select_desc *desc = &run->job.select;
    char text[128];
    printf("attention  %s, scale %g, ", run->causal ? "causal" : "not causal", scale_used(run));
    if (run->sequences > 0) printf("%" PRId64 " sequences, ", run->sequences);
    if (run->softcap == run->softcap) printf("softcap %g, ", run->softcap);
    if (run->window_tokens > 0) printf("window %" PRId64 ", ", run->window_tokens);
    if (run->extra_names[RUN_SINK]) printf("sink, ");
    if (run->extra_names[RUN_BIAS]) printf("bias, ");
    if (run->pattern)
        printf("%s, of %" PRId64 " leaves of %" PRId32 " tokens\n", run->selector_text,
               (run->kv_len + desc->leaf - 1) / desc->leaf, desc->leaf);
    else if (run->select.selector == CLATTN_SELECT_DENSE)
        puts("dense");
    else
        printf("%s, at most %" PRId32 " of %" PRId64 " leaves of %" PRId32 " tokens\n",
               selector_text(desc, text, sizeof text), desc->topk, (run->kv_len + desc->leaf - 1) / desc->leaf,
               desc->leaf);
}

static void print_text(const struct run *run)
{
    const struct job *job = &run->job;
    printf("device     %s: %s (%s)\n", backend_words[run->device.backend], run->device.name,
           run->device.variant);
    printf("sizes      batch %" PRId64 ", %" PRId64 " queries x %" PRId64 " heads, %" PRId64 " keys x %" PRId64
           " heads, dim %" PRId64 ", dim_v %" PRId64 ", %s\n",
           run->batch, run->q_len, run->q_heads, run->kv_len, run->kv_heads, run->dim, run->dim_v,
           element_name(run->files[RUN_Q].type));
    if (run->is_neighborhood)
        print_neighborhood(run);
    else
        print_attention(run);
    run_print_quality(run);
    printf("seconds    build %.3f", job->build);
    for (int i = 0; i < JOB_STEPS; i++)
        printf(", %s %.3f", job_step_names[i], job->seconds[i]);
    printf(", total %.3f\n", job->total);
    printf("memory     %.0f MiB at most\n", (double)peak_memory() / 1048576);
    for (int i = 0; i < RUN_OUTPUTS; i++)
        if (run->output_names[i]) printf("wrote      %s\n", run->output_names[i]);
}

int run_report(const struct run *run)
{
    if (run->json) return print_json(run);
    print_text(run);
    return STATUS_OK;
}
