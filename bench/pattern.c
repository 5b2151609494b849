/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "pattern.h"

#include "options.h"
#include "program.h"
#include "report.h"

#include <inttypes.h>
#include <string.h>

static const char *const blocks_words[] = {"16", "32", "64", "128", NULL};

static const struct command_help help = {
    "pattern --pattern TEXT [OPTION...]", "Counts what a static pattern connects, and draws it.",
    "A pattern is made of parts, joined by +, for key blocks at distances from the query's own:\n"
    "  local[:W]                  up to W blocks either side (default 1)\n"
    "  log-stride[:FORM][:LIST]   1, 2, 4 ... blocks away; FORM blocks or tokens, LIST of offsets\n"
    "  anchors:LIST               first, middle, last or block numbers, -1 the last; seen by all\n"
    "  anchor-queries:LIST        queries that see everything\n"
    "  global:LIST                both\n"
    "  strided:S                  every S blocks\n"
    "  dilated:W,S                up to W steps of S blocks either side\n"
    "  random:R[,SEED]            R blocks\n"
    "  bigbird:W,G,R[,SEED]       local W, the first G blocks global, R random ones\n"
    "  dense                      everything\n"
    "Heads with a pattern of their own follow: 'local:1; 0-3=strided:8; 7=dense'.\n"
    "\n"
    "Example:\n"
    "  clattn pattern --pattern 'local:1+log-stride+anchors:first,middle,last' --len 4096 --block 32 --map"};

struct pattern_run {
    const char *text, *svg;
    int64_t len, q_len, kv_len, q_block, heads, head, map_cells;
    int block;
    bool causal, map, json;
    clattn_attention_desc attention;
    clattn_pattern_shape shape;
    clattn_pattern_stats stats;
};

static bool parse_options(struct pattern_run *run, int argc, char **argv, int *status)
{
    const int64_t len_most = INT64_C(1) << 30;
    const struct option_spec specs[] = {
        {"pattern", OPTION_TEXT, &run->text, "TEXT", "the pattern, see below", 0, 0, NULL},
        {"len", OPTION_INTEGER, &run->len, "N", "queries and keys (default 4096)", 1, len_most, NULL},
        {"q-len", OPTION_INTEGER, &run->q_len, "N", "queries, the last of the keys (default: as --len)", 1,
         len_most, NULL},
        {"kv-len", OPTION_INTEGER, &run->kv_len, "N", "keys (default: as --len)", 1, len_most, NULL},
        {"block", OPTION_CHOICE, &run->block, NULL, "keys in a block (default 64)", 0, 0, blocks_words},
        {"q-block", OPTION_INTEGER, &run->q_block, "N", "queries that share a list (default: as --block)", 1,
         65536, NULL},
        {"heads", OPTION_INTEGER, &run->heads, "N", "heads with lists (default 1)", 1, 65536, NULL},
        {"causal", OPTION_FLAG, &run->causal, NULL, "a query sees itself and what is before it (default)", 0, 0,
         NULL},
        {"no-causal", OPTION_NO_FLAG, &run->causal, NULL, "a query sees all keys", 0, 0, NULL},
        {"map", OPTION_FLAG, &run->map, NULL,
         "draw it as text: rows of lists, columns of key blocks;\n"
         "# listed, + partly, . not, blank: cannot be seen",
         0, 0, NULL},
        {"svg", OPTION_TEXT, &run->svg, "FILE", "draw it as SVG", 0, 0, NULL},
        {"head", OPTION_INTEGER, &run->head, "H", "the head to draw, from 0 (default 0)", 0, 65535, NULL},
        {"cells", OPTION_INTEGER, &run->map_cells, "N",
         "cells of a drawing each way, at most (default 64 as text,\n"
         "512 as SVG)",
         1, 1000, NULL},
        {"json", OPTION_FLAG, &run->json, NULL, "print the counts as JSON", 0, 0, NULL},
        {0}};
    return options_parse(specs, &help, argc, argv, status);
}

static int check_options(struct pattern_run *run)
{
    static const int32_t blocks[] = {16, 32, 64, 128};
    if (!run->text) return program_usage("--pattern TEXT is missing; see 'clattn pattern --help'");
    if (run->head >= run->heads)
        return program_usage("--head: %" PRId64 " is not below --heads %" PRId64, run->head, run->heads);
    if (run->json && run->map) return program_usage("--json and --map both want standard output");
    if (run->json && !report_available()) return STATUS_USAGE;
    run->attention = (clattn_attention_desc)CLATTN_ATTENTION_DESC_INIT;
    run->attention.causal = run->causal;
    run->shape = (clattn_pattern_shape)CLATTN_PATTERN_SHAPE_INIT;
    run->shape.q_len = run->q_len ? run->q_len : run->len;
    run->shape.kv_len = run->kv_len ? run->kv_len : run->len;
    run->shape.heads = (int32_t)run->heads;
    run->shape.block = blocks[run->block];
    run->shape.q_block = run->q_block ? (int32_t)run->q_block : run->shape.block;
    return STATUS_OK;
}

static int print_json(const struct pattern_run *run)
{
    const clattn_pattern_stats *stats = &run->stats;
    report *root = report_object();
    report_text(root, "version", clattn_version());
    report_text(root, "pattern", run->text);
    report_integer(root, "q_len", run->shape.q_len);
    report_integer(root, "kv_len", run->shape.kv_len);
    report_integer(root, "heads", run->shape.heads);
    report_integer(root, "block", run->shape.block);
    report_integer(root, "q_block", run->shape.q_block);
    report_flag(root, "causal", run->causal);
    report_integer(root, "lists", stats->lists);
    report_integer(root, "blocks", stats->blocks);
    report_integer(root, "blocks_min", stats->blocks_min);
    report_integer(root, "blocks_max", stats->blocks_max);
    report_real(root, "blocks_mean", stats->blocks_mean);
    report_integer(root, "blocks_all", stats->blocks_all);
    report_integer(root, "connections", stats->connections);
    report_integer(root, "pairs", stats->pairs);
    report_real(root, "density", stats->density);
    report_integer(root, "unconnected", stats->unconnected);
    report_text(root, "svg", run->svg);
    int status = report_print(root);
    report_release(root);
    return status;
}

static void print_text(const struct pattern_run *run)
{
    const clattn_pattern_stats *stats = &run->stats;
    printf("pattern      %s\n", run->text);
    printf("sizes        %" PRId64 " queries in lists of %" PRId32 ", %" PRId64 " keys in blocks of %" PRId32
           ", %" PRId32 " head%s, %s\n",
           run->shape.q_len, run->shape.q_block, run->shape.kv_len, run->shape.block, run->shape.heads,
           run->shape.heads == 1 ? "" : "s", run->causal ? "causal" : "not causal");
    printf("blocks       %" PRId64 " in %" PRId64 " lists: %" PRId64 " to %" PRId64
           ", mean %.2f; all would be %" PRId64 "\n",
           stats->blocks, stats->lists, stats->blocks_min, stats->blocks_max, stats->blocks_mean,
           stats->blocks_all);
    printf("connections  %" PRId64 " of %" PRId64 " pairs, density %.4g\n", stats->connections, stats->pairs,
           stats->density);
    printf("unconnected  %" PRId64 " rows\n", stats->unconnected);
    if (run->svg) printf("wrote        %s\n", run->svg);
}

static int draw(const struct pattern_run *run, const clattn_pattern *pattern)
{
    struct pattern_map map = {0};
    int cells = (int)run->map_cells, status = STATUS_OK;
    if (run->svg) {
        status = pattern_map_make(pattern, &run->attention, &run->shape, (int32_t)run->head,
                                  cells ? cells : 512, &map);
        if (status == STATUS_OK) status = pattern_map_write_svg(&map, run->text, run->svg);
        pattern_map_release(&map);
    }
    if (status != STATUS_OK) return status;
    if (run->json) return print_json(run);
    print_text(run);
    if (!run->map) return STATUS_OK;
    status =
        pattern_map_make(pattern, &run->attention, &run->shape, (int32_t)run->head, cells ? cells : 64, &map);
    if (status == STATUS_OK && (map.row_step > 1 || map.block_step > 1))
        printf("map          a cell is %" PRId64 " lists x %" PRId64 " blocks\n", map.row_step, map.block_step);
    if (status == STATUS_OK) pattern_map_print(&map);
    pattern_map_release(&map);
    return status;
}

int pattern_main(int argc, char **argv)
{
    int status;
    char error[256];
    clattn_pattern *pattern = NULL;
    struct pattern_run run = {
        .len = 4096, .heads = 1, .block = 2, .causal = true, .stats = {.size = sizeof run.stats}};
    if (!parse_options(&run, argc, argv, &status)) return status;
    if ((status = check_options(&run)) != STATUS_OK) return status;
    if (clattn_pattern_parse(run.text, &pattern, error, sizeof error) != CLATTN_SUCCESS)
        return program_usage("--pattern: %s", error);
    if (clattn_pattern_count(pattern, &run.attention, &run.shape, &run.stats) == CLATTN_SUCCESS) {
        status = draw(&run, pattern);
    } else {
        clattn_pattern_error(pattern, error, sizeof error);
        status = program_usage("%s", error);
    }
    clattn_pattern_release(pattern);
    return status;
}
