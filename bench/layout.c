/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "layout.h"

#include "options.h"
#include "program.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

const char *layout_join(const int32_t *numbers, int axes, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    for (int a = 0; a < axes && used < size; a++)
        used += (size_t)snprintf(text + used, size - used, "%s%" PRId32, a ? "x" : "", numbers[a]);
    return text;
}

/* Numbers joined by x; returns how many, or 0 when the text is something else. */
static int split(const char *text, int64_t minimum, int32_t numbers[LAYOUT_AXES])
{
    char copy[64], *rest = copy, *word;
    int count = 0;
    if (strlen(text) >= sizeof copy) return 0;
    strcpy(copy, text);
    while ((word = strsep(&rest, "x")) != NULL) {
        int64_t number;
        if (count == LAYOUT_AXES || !parse_integer(word, minimum, INT32_MAX, &number)) return 0;
        numbers[count++] = (int32_t)number;
    }
    return count;
}

/* An option of as many numbers as the layout has axes, or of one for all. */
static int parse_axes(const char *option, const char *text, int64_t minimum, int axes,
                      int32_t numbers[LAYOUT_AXES])
{
    if (!text) return STATUS_OK;
    int count = split(text, minimum, numbers);
    if (count == 0)
        return program_usage("--%s: '%s' is not one to three whole numbers from %" PRId64 " joined by x",
                             option, text, minimum);
    if (count != axes && count != 1)
        return program_usage("--%s: '%s' has %d numbers, but --layout-dims has %d", option, text, count, axes);
    for (int a = count; a < axes; a++)
        numbers[a] = numbers[0];
    return STATUS_OK;
}

static int check_rules(const clattn_neighborhood_desc *desc)
{
    double tokens = 1;
    for (int a = 0; a < desc->axes; a++) {
        int32_t length = desc->length[a], window = desc->window[a], stride = desc->stride[a];
        tokens *= length;
        if ((int64_t)window * desc->dilation[a] > length)
            return program_usage("axis %d: window %" PRId32 " * dilation %" PRId32
                                 " is beyond the length %" PRId32,
                                 a, window, desc->dilation[a], length);
        if (stride > window)
            return program_usage("axis %d: stride %" PRId32 " is beyond the window %" PRId32, a, stride,
                                 window);
        if (desc->causal[a] > 1)
            return program_usage("--causal-axes: %" PRId32 " is neither 0 nor 1", desc->causal[a]);
    }
    if (tokens > 0x1p35) return program_usage("--layout-dims: %.0f tokens; at most 2^35 are possible", tokens);
    return STATUS_OK;
}

static int check_tile(const char *option, const int32_t *tile, int axes, bool is_kv)
{
    int64_t tokens = 1;
    for (int a = 0; a < axes; a++)
        tokens = tile[a] > 256 || tokens > 256 ? 257 : tokens * tile[a];
    if (tokens > 256) return program_usage("--%s: a tile has at most 256 tokens", option);
    if (is_kv && tokens != 16 && tokens != 32 && tokens != 64 && tokens != 128)
        return program_usage("--%s: %" PRId64 " tokens; a key tile has 16, 32, 64 or 128", option, tokens);
    return STATUS_OK;
}

int layout_parse(const struct layout_text *text, clattn_neighborhood_desc *desc)
{
    int status;
    *desc = (clattn_neighborhood_desc)CLATTN_NEIGHBORHOOD_DESC_INIT;
    if (!text->layout) return program_usage("--layout-dims %s is missing", LAYOUT_ARGUMENT);
    if (!text->window) return program_usage("--window %s is missing", LAYOUT_ARGUMENT);
    if (!text->q_tile != !text->kv_tile) return program_usage("--q-tile and --kv-tile go together");
    desc->axes = split(text->layout, 2, desc->length);
    if (desc->axes == 0)
        return program_usage("--layout-dims: '%s' is not one to three whole numbers from 2 joined by x",
                             text->layout);
    if ((status = parse_axes("window", text->window, 2, desc->axes, desc->window)) != STATUS_OK ||
        (status = parse_axes("stride", text->stride, 1, desc->axes, desc->stride)) != STATUS_OK ||
        (status = parse_axes("dilation", text->dilation, 1, desc->axes, desc->dilation)) != STATUS_OK ||
        (status = parse_axes("causal-axes", text->causal, 0, desc->axes, desc->causal)) != STATUS_OK ||
        (status = parse_axes("q-tile", text->q_tile, 1, desc->axes, desc->q_tile)) != STATUS_OK ||
        (status = parse_axes("kv-tile", text->kv_tile, 1, desc->axes, desc->kv_tile)) != STATUS_OK ||
        (status = check_rules(desc)) != STATUS_OK || !text->q_tile)
        return status;
    status = check_tile("q-tile", desc->q_tile, desc->axes, false);
    return status == STATUS_OK ? check_tile("kv-tile", desc->kv_tile, desc->axes, true) : status;
}
