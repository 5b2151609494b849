/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "decode.h"

#include "program.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

static double token_seconds(const struct decode *d)
{
    return d->decode_seconds / (double)(d->tokens - d->prefill);
}

/* Of the sorted steps, in seconds a token of each sequence. */
static double quantile(const struct decode *d, double share)
{
    return d->step_seconds[(int64_t)(share * (double)(d->steps - 1))] / (double)d->step;
}

static int print_json(const struct decode *d)
{
    const struct run *run = &d->run;
    char text[128];
    report *root = report_object(), *sizes, *times, *memory, *check;
    report_text(root, "version", clattn_version());
    device_report(report_child(root, "device"), &run->device);
    sizes = report_child(root, "sizes");
    report_integer(sizes, "sequences", run->batch);
    report_integer(sizes, "prefill", d->prefill);
    report_integer(sizes, "tokens", d->tokens);
    report_integer(sizes, "q_heads", run->q_heads);
    report_integer(sizes, "kv_heads", run->kv_heads);
    report_integer(sizes, "dim", run->dim);
    report_integer(sizes, "dim_v", run->dim_v);
    report_text(root, "dtype", d->is_int8 ? "int8" : element_name(run->files[RUN_Q].type));
    report_text(root, "selector", selector_text(&d->select, text, sizeof text));
    report_integer(root, "leaf", d->select.leaf);
    report_integer(root, "topk", d->select.topk);
    report_integer(root, "page_size", d->page_size);
    report_integer(root, "step", d->step);
    times = report_child(root, "seconds");
    report_real(times, "prefill", d->prefill_seconds);
    report_real(times, "decode", d->decode_seconds);
    report_real(times, "token", token_seconds(d));
    report_real(times, "token_median", quantile(d, 0.5));
    report_real(times, "token_p99", quantile(d, 0.99));
    report_real(times, "token_dense", d->dense_seconds);
    report_real(root, "select_share", d->select_share);
    report_real(root, "chosen_keys", d->chosen);
    memory = report_child(root, "memory");
    report_integer(memory, "bytes", (int64_t)d->info.bytes);
    report_integer(memory, "key_value_bytes", (int64_t)d->info.key_value_bytes);
    report_integer(memory, "statistics_bytes", (int64_t)d->info.statistics_bytes);
    report_integer(memory, "pages", d->info.pages);
    report_integer(memory, "pages_free", d->info.pages_free);
    check = report_child(root, "check");
    report_integer(check, "rows", d->check.rows);
    report_integer(check, "lists", d->check.lists);
    report_integer(check, "lists_differ", d->check.lists_differ);
    report_real(check, "error", d->check.error);
    report_real(check, "tolerated", d->check.tolerated);
    report_real(check, "quantisation", d->is_int8 ? d->check.quantised : NAN);
    int status = report_print(root);
    report_release(root);
    return status;
}

static void print_text(const struct decode *d)
{
    const struct run *run = &d->run;
    char text[128];
    printf("device     %s: %s (%s)\n", backend_words[run->device.backend], run->device.name,
           run->device.variant);
    printf("sizes      %" PRId64 " sequences, %" PRId64 " tokens prefilled, %" PRId64 " decoded, %" PRId64
           " query heads, %" PRId64 " key heads, dim %" PRId64 ", dim_v %" PRId64 "\n",
           run->batch, d->prefill, d->tokens - d->prefill, run->q_heads, run->kv_heads, run->dim, run->dim_v);
    printf("selection  %s", selector_text(&d->select, text, sizeof text));
    if (d->lists)
        printf(", at most %" PRId32 " of %" PRId64 " leaves of %" PRId32 " tokens", d->select.topk,
               (d->tokens + d->select.leaf - 1) / d->select.leaf, d->select.leaf);
    printf("; %.2f %% of the keys\n", 100 * d->chosen);
    printf("prefill    %.3f s, %.1f us a token\n", d->prefill_seconds,
           d->prefill > 0 ? 1e6 * d->prefill_seconds / (double)d->prefill : 0);
    printf("token      %.1f us, median %.1f, 99 %% within %.1f; %" PRId64 " steps\n", 1e6 * token_seconds(d),
           1e6 * quantile(d, 0.5), 1e6 * quantile(d, 0.99), d->steps);
    if (!isnan(d->select_share)) printf("share      %.0f %% of that is selection\n", 100 * d->select_share);
    if (!isnan(d->dense_seconds))
        printf("dense      %.1f us a token, %.1f times the median\n", 1e6 * d->dense_seconds,
               d->dense_seconds / quantile(d, 0.5));
    printf("memory     %.2f MiB, of that keys and values %.2f (%s), pyramid %.2f\n",
           (double)d->info.bytes / 1048576, (double)d->info.key_value_bytes / 1048576,
           d->is_int8 ? "int8" : element_name(run->files[RUN_Q].type),
           (double)d->info.statistics_bytes / 1048576);
    printf("check      %" PRId64 " rows as the prefill: error %.3g, tolerated %.3g; %" PRId64 " of %" PRId64
           " lists differ\n",
           d->check.rows, d->check.error, d->check.tolerated, d->check.lists_differ, d->check.lists);
    if (d->is_int8)
        printf("int8       moves the result by %.3g at most, other leaves included\n", d->check.quantised);
}

int decode_report(const struct decode *d)
{
    if (d->run.json) return print_json(d);
    print_text(d);
    return STATUS_OK;
}
