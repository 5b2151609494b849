/* SPDX-License-Identifier: MIT */
/* Neighborhood attention: rules, order of tokens in tiles, block lists and element masks. */

#include "neighborhood.h"

#include <stdlib.h>
#include <string.h>

static clattn_status check_axis(clattn_context *context, const clattn_neighborhood_desc *desc, int axis)
{
    int32_t length = desc->length[axis], window = desc->window[axis];
    int32_t stride = desc->stride[axis], dilation = desc->dilation[axis];
    if (length < 2 || window < 2 || stride < 1 || dilation < 1)
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "axis %d has length %d, window %d, stride %d, dilation %d; rule: length and window >= 2, "
                    "the others >= 1",
                    axis, length, window, stride, dilation);
    if ((int64_t)window * dilation > length)
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "axis %d has window %d, dilation %d, length %d; rule: window * dilation "
                    "<= length",
                    axis, window, dilation, length);
    if (stride > window)
        return fail(context, CLATTN_INVALID_ARGUMENT,
                    "axis %d has stride %d, window %d; rule: stride <= window", axis, stride, window);
    return CLATTN_SUCCESS;
}

static clattn_status check_tile(clattn_context *context, const char *name, const int32_t *tile, int32_t axes,
                                bool is_kv)
{
    int64_t tokens = 1;
    for (int a = 0; a < axes; a++) {
        if (tile[a] < 1 || tile[a] > 256)
            return fail(context, CLATTN_INVALID_ARGUMENT, "%s[%d] is %d; 1 to 256, or 0 on all axes", name, a,
                        tile[a]);
        tokens *= tile[a];
    }
    if (tokens > 256)
        return fail(context, CLATTN_INVALID_ARGUMENT, "%s has %lld tokens; at most 256", name,
                    (long long)tokens);
    return is_kv ? check_leaf(context, "tokens of kv_tile", tokens) : CLATTN_SUCCESS;
}

static bool all_zero(const int32_t *tile, int32_t axes)
{
    for (int a = 0; a < axes; a++)
        if (tile[a]) return false;
    return true;
}

clattn_status neighborhood_check(clattn_context *context, const clattn_neighborhood_desc *desc,
                                 clattn_neighborhood_desc *full)
{
    *full = (clattn_neighborhood_desc)CLATTN_NEIGHBORHOOD_DESC_INIT;
    if (!desc) return fail(context, CLATTN_INVALID_ARGUMENT, "desc is NULL");
    clattn_status status = desc_copy(context, "desc", full, sizeof *full, desc);
    if (status) return status;
    if (full->axes < 1 || full->axes > AXES)
        return fail(context, CLATTN_INVALID_ARGUMENT, "desc.axes is %d; 1, 2 or 3 is needed", full->axes);
    for (int a = 0; a < full->axes && !status; a++)
        status = check_axis(context, full, a);
    if (!status && !all_zero(full->q_tile, full->axes))
        status = check_tile(context, "q_tile", full->q_tile, full->axes, false);
    if (!status && !all_zero(full->kv_tile, full->axes))
        status = check_tile(context, "kv_tile", full->kv_tile, full->axes, true);
    if (status) return status;
    for (int a = full->axes; a < AXES;
         a++) { /* axes that the layout does not have: one coordinate that sees itself */
        full->length[a] = full->window[a] = full->stride[a] = full->dilation[a] = 1;
        full->causal[a] = 0;
        full->q_tile[a] = full->kv_tile[a] = 1;
    }
    double tokens = (double)full->length[0] * full->length[1] * full->length[2];
    if (tokens > (double)INT32_MAX * 16)
        return fail(context, CLATTN_SIZE_OVERFLOW, "the layout has %.0f tokens; at most 2^35", tokens);
    return CLATTN_SUCCESS;
}

/* ---- order of tokens ---- */

static void class_lengths(const clattn_neighborhood *plan, int64_t c, int32_t residue[AXES],
                          int32_t length[AXES])
{
    class_residues(plan, c, residue);
    for (int a = 0; a < AXES; a++)
        length[a] = class_length(&plan->axis[a], residue[a]);
}

/* Splits n into three digits of the given radices, the last fastest. */
static void digits(int64_t n, const int32_t radix[AXES], int32_t digit[AXES])
{
    for (int a = AXES - 1; a >= 0; a--) {
        digit[a] = (int32_t)(n % radix[a]);
        n /= radix[a];
    }
}

static void class_fill(const clattn_neighborhood *plan, struct tile_order *order, int64_t c)
{
    int32_t residue[AXES], length[AXES], tiles[AXES], tile[AXES], inside[AXES];
    class_lengths(plan, c, residue, length);
    for (int a = 0; a < AXES; a++)
        tiles[a] = (int32_t)ceil_div(length[a], order->tile[a]);
    for (int64_t row = order->class_row[c]; row < order->class_row[c + 1]; row++) {
        int64_t within = row - order->class_row[c], token = 0;
        bool exists = true;
        digits(within / order->tile_tokens, tiles, tile);
        digits(within % order->tile_tokens, order->tile, inside);
        for (int a = 0; a < AXES; a++) {
            int32_t i = tile[a] * order->tile[a] + inside[a];
            exists = exists && i < length[a];
            order->coordinate[row * AXES + a] = i;
            token = token * plan->axis[a].length + (int64_t)i * plan->axis[a].dilation + residue[a];
        }
        order->token[row] = exists ? token : -1;
        if (!exists) memset(order->coordinate + row * AXES, 0xff, AXES * sizeof *order->coordinate);
    }
}

clattn_status tile_order_make(clattn_context *context, const clattn_neighborhood *plan, const int32_t *tile,
                              struct tile_order *order)
{
    int32_t residue[AXES], length[AXES];
    memcpy(order->tile, tile, sizeof order->tile);
    order->tile_tokens = tile[0] * tile[1] * tile[2];
    order->class_row = malloc((size_t)(plan->classes + 1) * sizeof *order->class_row);
    if (!order->class_row)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %lld classes", (long long)plan->classes);
    for (int64_t c = 0; c < plan->classes; c++) {
        int64_t rows = order->tile_tokens;
        class_lengths(plan, c, residue, length);
        for (int a = 0; a < AXES; a++)
            rows *= ceil_div(length[a], tile[a]);
        order->class_row[c] = order->rows;
        order->rows += rows;
    }
    order->class_row[plan->classes] = order->rows;
    order->token = malloc((size_t)order->rows * sizeof *order->token);
    order->coordinate = malloc((size_t)order->rows * AXES * sizeof *order->coordinate);
    if (!order->token || !order->coordinate)
        return fail(context, CLATTN_OUT_OF_MEMORY, "no memory for %lld rows", (long long)order->rows);
    for (int64_t c = 0; c < plan->classes; c++)
        class_fill(plan, order, c);
    return CLATTN_SUCCESS;
}

void tile_order_free(struct tile_order *order)
{
    free(order->class_row);
    free(order->token);
    free(order->coordinate);
    *order = (struct tile_order){0};
}
