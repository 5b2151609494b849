/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "svg.h"

#include "program.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

int svg_level(float share)
{
    if (share <= 0) return 0;
    int level = (int)(8 * share + 0.5f);
    return level < 1 ? 1 : level > 8 ? 8 : level;
}

static void put_text(FILE *file, const char *text)
{
    for (; *text; text++)
        switch (*text) {
        case '<':
            fputs("&lt;", file);
            break;
        case '>':
            fputs("&gt;", file);
            break;
        case '&':
            fputs("&amp;", file);
            break;
        default:
            if ((unsigned char)*text >= 0x20) fputc(*text, file);
        }
}

static void put_svg(FILE *file, const struct svg_grid *grid)
{
    static const char *const colours[] = {"#e8e8e8", "#c6d9ee", "#a9c6e5", "#8cb3dc", "#6f9fd3",
                                          "#528cca", "#3a78ba", "#2f6299", "#1f4468"};
    int largest = grid->width > grid->height ? grid->width : grid->height;
    int pixels = largest > 256 ? 2 : largest > 128 ? 4 : 8;
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
            "shape-rendering=\"crispEdges\">\n<title>",
            grid->width * pixels, grid->height * pixels, grid->width, grid->height);
    put_text(file, grid->title);
    fputs("</title>\n<desc>", file);
    put_text(file, grid->description);
    fputs("</desc>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n", file);
    /* Neighbours of the same shade join into one rectangle. */
    for (int y = 0; y < grid->height; y++)
        for (int x = 0, end; x < grid->width; x = end) {
            int level = grid->level(grid->data, x, y);
            for (end = x + 1; end < grid->width && grid->level(grid->data, end, y) == level;)
                end++;
            if (level >= 0)
                fprintf(file, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"1\" fill=\"%s\"/>\n", x, y,
                        end - x, colours[level]);
        }
    fputs("</svg>\n", file);
}

int svg_grid_write(const struct svg_grid *grid, const char *path)
{
    errno = 0;
    FILE *file = fopen(path, "w");
    if (!file) {
        program_error("%s: %s", path, strerror(errno));
        return STATUS_FAILED;
    }
    put_svg(file, grid);
    bool failed = ferror(file);
    if (fclose(file) != 0 || failed) {
        program_error("%s: %s", path, errno ? strerror(errno) : "write error");
        return STATUS_FAILED;
    }
    return STATUS_OK;
}
