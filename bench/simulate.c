/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "simulate.h"

#include "layout.h"
#include "options.h"
#include "program.h"
#include "report.h"
#include "table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct command_help help = {
    "simulate --layout-dims AxBxC --window AxBxC [OPTION...]",
    "Predicts what tiles make of neighborhood attention: how sparse it is, how many pairs of tiles are\n"
    "visited, and how much faster than dense attention it can be. Nothing is computed on a device.",
    "Numbers are joined by x, one for each axis; a single one stands for all axes.\n"
    "ideal is the speed-up if only attending pairs were computed, bound the one with whole tiles. A perfect\n"
    "configuration cuts no tile, so no mask is needed.\n"
    "\n"
    "Example:\n"
    "  clattn simulate --layout-dims 30x48x80 --window 18x24x24 --stride 16x8x8 --q-tile 4x8x8 --kv-tile "
    "2x8x8"};

struct simulate_run {
    struct layout_text text;
    const char *svg;
    int64_t strides, cells;
    bool json;
    clattn_neighborhood_desc desc;
    clattn_neighborhood_analysis analysis, best; /* with the given tiles, and with the best ones */
    struct stride_ranking ranking;
};

static bool parse_options(struct simulate_run *run, int argc, char **argv, int *status)
{
    struct layout_text *text = &run->text;
    const struct option_spec specs[] = {
        {"layout-dims", OPTION_TEXT, &text->layout, LAYOUT_ARGUMENT, LAYOUT_DIMS_HELP, 0, 0, NULL},
        {"window", OPTION_TEXT, &text->window, LAYOUT_ARGUMENT, "keys of a query along each axis", 0, 0, NULL},
        {"stride", OPTION_TEXT, &text->stride, LAYOUT_ARGUMENT, LAYOUT_STRIDE_HELP, 0, 0, NULL},
        {"dilation", OPTION_TEXT, &text->dilation, LAYOUT_ARGUMENT, LAYOUT_DILATION_HELP, 0, 0, NULL},
        {"causal-axes", OPTION_TEXT, &text->causal, LAYOUT_ARGUMENT, LAYOUT_CAUSAL_HELP, 0, 0, NULL},
        {"q-tile", OPTION_TEXT, &text->q_tile, LAYOUT_ARGUMENT,
         "shape of a query tile, at most 256 tokens (default: the best\ntiles of 64 tokens are searched)", 0, 0,
         NULL},
        {"kv-tile", OPTION_TEXT, &text->kv_tile, LAYOUT_ARGUMENT,
         "shape of a key tile, 16, 32, 64 or 128 tokens", 0, 0, NULL},
        {"strides", OPTION_INTEGER, &run->strides, "N", "strides in the ranking (default 10)", 0, 1000, NULL},
        {"svg", OPTION_TEXT, &run->svg, "FILE", "draw which tiles are visited, as SVG", 0, 0, NULL},
        {"cells", OPTION_INTEGER, &run->cells, "N", "cells of the drawing each way, at most (default 256)", 1,
         1000, NULL},
        {"json", OPTION_FLAG, &run->json, NULL, "print everything as JSON", 0, 0, NULL},
        {0}};
    return options_parse(specs, &help, argc, argv, status);
}

static bool dense_wins(const struct simulate_run *run)
{
    return run->analysis.bound_speedup <= 1 || simulate_cost(&run->desc, &run->analysis) >= 1;
}

/* ---- output ---- */

static void report_axes(report *parent, const char *name, const int32_t *numbers, int axes)
{
    report *list = report_list(parent, name);
    for (int a = 0; a < axes; a++)
        report_entry_integer(list, numbers[a]);
}

static void report_analysis(report *object, const clattn_neighborhood_analysis *analysis, int axes)
{
    report_axes(object, "q_tile", analysis->q_tile, axes);
    report_axes(object, "kv_tile", analysis->kv_tile, axes);
    report_real(object, "ideal_speedup", analysis->ideal_speedup);
    report_real(object, "tile_pairs", analysis->tile_pairs);
    report_real(object, "bound_speedup", analysis->bound_speedup);
    report_real(object, "waste", analysis->waste);
    report_flag(object, "perfect", analysis->perfect);
}

static int print_json(const struct simulate_run *run)
{
    const clattn_neighborhood_desc *desc = &run->desc;
    int axes = desc->axes;
    report *root = report_object();
    report_text(root, "version", clattn_version());
    report_axes(root, "layout", desc->length, axes);
    report_axes(root, "window", desc->window, axes);
    report_axes(root, "stride", desc->stride, axes);
    report_axes(root, "dilation", desc->dilation, axes);
    report_axes(root, "causal", desc->causal, axes);
    report_real(root, "tokens", run->analysis.tokens);
    report_real(root, "connections", run->analysis.connections);
    report_real(root, "sparsity", run->analysis.sparsity);
    report_analysis(root, &run->analysis, axes);
    report_flag(root, "dense_wins", dense_wins(run));
    report_analysis(report_child(root, "best_tiles"), &run->best, axes);
    report_flag(root, "all_strides", run->ranking.all);
    report_integer(root, "strides_examined", run->ranking.examined);
    report *list = report_list(root, "strides");
    for (int n = 0; n < run->ranking.count; n++) {
        report *entry = report_entry(list);
        report_axes(entry, "stride", run->ranking.ranks[n].stride, axes);
        report_analysis(entry, &run->ranking.ranks[n].analysis, axes);
    }
    report_text(root, "svg", run->svg);
    int status = report_print(root);
    report_release(root);
    return status;
}

static void print_ranking(const struct simulate_run *run)
{
    char text[64];
    struct table table;
    int axes = run->desc.axes;
    if (run->ranking.count == 0) return;
    printf("\nStrides by bound, %s%d examined:\n", run->ranking.all ? "all " : "", run->ranking.examined);
    table_begin(&table, "lrrrlll");
    const char *const heads[] = {"stride", "bound", "ideal", "waste", "perfect", "q tile", "kv tile"};
    for (int c = 0; c < 7; c++)
        table_add(&table, "%s", heads[c]);
    for (int n = 0; n < run->ranking.count; n++) {
        const struct stride_rank *rank = &run->ranking.ranks[n];
        table_add(&table, "%s", layout_join(rank->stride, axes, text, sizeof text));
        table_add(&table, "%.2f", rank->analysis.bound_speedup);
        table_add(&table, "%.2f", rank->analysis.ideal_speedup);
        table_add(&table, "%.1f %%", 100 * rank->analysis.waste);
        table_add(&table, "%s", rank->analysis.perfect ? "yes" : "no");
        table_add(&table, "%s", layout_join(rank->analysis.q_tile, axes, text, sizeof text));
        table_add(&table, "%s", layout_join(rank->analysis.kv_tile, axes, text, sizeof text));
    }
    table_end(&table);
}

static void print_tiles(const char *name, const clattn_neighborhood_analysis *analysis, int axes)
{
    char q_tile[64], kv_tile[64];
    printf("%-13sq %s, kv %s: bound %.2f, waste %.1f %%, %s\n", name,
           layout_join(analysis->q_tile, axes, q_tile, sizeof q_tile),
           layout_join(analysis->kv_tile, axes, kv_tile, sizeof kv_tile), analysis->bound_speedup,
           100 * analysis->waste, analysis->perfect ? "perfect" : "cut tiles need a mask");
}

static void print_text(const struct simulate_run *run)
{
    const clattn_neighborhood_desc *desc = &run->desc;
    const clattn_neighborhood_analysis *analysis = &run->analysis;
    char text[4][64];
    int axes = desc->axes;
    printf("layout       %s, %.0f tokens\n", layout_join(desc->length, axes, text[0], sizeof text[0]),
           analysis->tokens);
    printf("window       %s, stride %s, dilation %s, causal %s\n",
           layout_join(desc->window, axes, text[0], sizeof text[0]),
           layout_join(desc->stride, axes, text[1], sizeof text[1]),
           layout_join(desc->dilation, axes, text[2], sizeof text[2]),
           layout_join(desc->causal, axes, text[3], sizeof text[3]));
    printf("pairs        %.0f of %.0f attend, sparsity %.2f %%\n", analysis->connections,
           analysis->tokens * analysis->tokens, 100 * analysis->sparsity);
    printf("ideal        %.2f times dense\n", analysis->ideal_speedup);
    printf("bound        %.2f times dense, %.0f pairs of tiles\n", analysis->bound_speedup,
           analysis->tile_pairs);
    printf("waste        %.2f %% of the computed pairs\n", 100 * analysis->waste);
    printf("perfect      %s\n", analysis->perfect ? "yes: no tile is cut" : "no: cut tiles need a mask");
    print_tiles("tiles", analysis, axes);
    print_tiles("best tiles", &run->best, axes);
    if (run->svg) printf("wrote        %s\n", run->svg);
    print_ranking(run);
}

static int simulate(struct simulate_run *run)
{
    char title[256], layout[64], window[64], stride[64];
    clattn_neighborhood_desc free_tiles = run->desc;
    int axes = run->desc.axes, status = STATUS_OK;
    memset(free_tiles.q_tile, 0, sizeof free_tiles.q_tile);
    memset(free_tiles.kv_tile, 0, sizeof free_tiles.kv_tile);
    run->analysis.size = run->best.size = sizeof run->best;
    clattn_status result = clattn_neighborhood_analyse(&run->desc, &run->analysis);
    if (result == CLATTN_SUCCESS) result = clattn_neighborhood_analyse(&free_tiles, &run->best);
    if (result != CLATTN_SUCCESS) return program_usage("%s", clattn_strerror(result));
    if (run->strides > 0) status = simulate_rank(&run->desc, (int)run->strides, &run->ranking);
    if (status == STATUS_OK && run->svg) {
        snprintf(title, sizeof title, "layout %s, window %s, stride %s",
                 layout_join(run->desc.length, axes, layout, sizeof layout),
                 layout_join(run->desc.window, axes, window, sizeof window),
                 layout_join(run->desc.stride, axes, stride, sizeof stride));
        status = simulate_draw(&run->desc, &run->analysis, (int)run->cells, title, run->svg);
    }
    if (status != STATUS_OK) return status;
    if (dense_wins(run))
        program_warning(
            "dense attention is predicted to be as fast or faster: tiles compute %.2f times its pairs",
            simulate_cost(&run->desc, &run->analysis));
    if (run->json) return print_json(run);
    print_text(run);
    return STATUS_OK;
}

int simulate_main(int argc, char **argv)
{
    int status;
    struct simulate_run run = {.strides = 10, .cells = 256};
    if (!parse_options(&run, argc, argv, &status)) return status;
    if (run.json && !report_available()) return STATUS_USAGE;
    status = layout_parse(&run.text, &run.desc);
    if (status == STATUS_OK) status = simulate(&run);
    free(run.ranking.ranks);
    return status;
}
