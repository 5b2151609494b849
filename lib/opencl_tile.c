/* SPDX-License-Identifier: MIT */
/* Shapes of tiles, build options, the table of sequences, launches in parts: see opencl_tile.h. */

#include "config.h"

#include "opencl_tile.h"

#include <stdio.h>
#include <string.h>

/* ---- shapes ---- */

enum { ITEMS_MULTIPLE = 8, CPU_LANES = 16, INTEL_VENDOR = 0x8086 };

static struct opencl_taste default_taste(const struct opencl_device *device, clattn_dtype dtype)
{
    bool is_cpu = (device->type & CL_DEVICE_TYPE_CPU) && !(device->type & CL_DEVICE_TYPE_GPU) &&
                  !(device->quirks & OPENCL_QUIRK_SHORT_VECTORS);
    struct opencl_taste taste = {.items = (int)MIN(device->group_max, 256)};
    if (is_cpu) { /* a vector of rows is a vector register; local memory is cache */
        taste.lanes = CPU_LANES;
        taste.item_keys = 8;
        taste.item_dims = 32;
        taste.sums = 16 * 64;
        taste.load = 16;
        taste.local_bytes = (size_t)MIN(device->local_bytes, 64 * 1024);
    } else { /* loads of 16 bytes; several work-groups on a compute unit */
        taste.lanes = 4;
        taste.item_keys = 4;
        taste.item_dims = 16;
        /* A lane of a subgroup of 8 has 128 registers on Intel's GPUs and about 256 elsewhere (make
         * check-vendors). */
        taste.sums = device->vendor_id == INTEL_VENDOR ? 32 : 64;
        taste.load = dtype == CLATTN_FLOAT32 ? 4 : 8;
        taste.pad = 4;
        taste.local_bytes = (size_t)MIN(device->local_bytes, 32 * 1024);
    }
    return taste;
}

static void overlay(int *value, int tuned)
{
    if (tuned >= 0) *value = tuned;
}

struct opencl_taste opencl_taste_of(clattn_context *context, enum tuning_kernel kernel, int32_t dim,
                                    clattn_dtype dtype)
{
    const struct opencl_device *device = &opencl_of(context)->device;
    const struct tuning_record *tuned = opencl_tuning_find(context, kernel, dim, dtype);
    struct opencl_taste taste = default_taste(device, dtype);
    if (!tuned) return taste;
    overlay(&taste.lanes, tuned->value[TUNING_LANES]);
    overlay(&taste.item_keys, tuned->value[TUNING_ITEM_KEYS]);
    overlay(&taste.item_dims, tuned->value[TUNING_ITEM_DIMS]);
    overlay(&taste.load, tuned->value[TUNING_LOAD]);
    overlay(&taste.pad, tuned->value[TUNING_PAD]);
    overlay(&taste.items, tuned->value[TUNING_ITEMS]);
    overlay(&taste.rows, tuned->value[TUNING_ROWS]);
    overlay(&taste.keys, tuned->value[TUNING_KEYS]);
    taste.items = (int)MIN(device->group_max, (size_t)taste.items);
    if (tuned->value[TUNING_LOCAL_KIB] >= 0)
        taste.local_bytes = (size_t)MIN(device->local_bytes, (cl_ulong)tuned->value[TUNING_LOCAL_KIB] * 1024);
    return taste;
}

struct opencl_tile opencl_tile_of(const struct opencl_taste *taste, int rows, int keys)
{
    /* PoCL 3.1 on LLVM 15 gives all keys of a tile of single rows the same logit. */
    const int least = taste->lanes >= CPU_LANES ? 2 : 1;
    struct opencl_tile tile = {.lanes = least, .keys = keys, .item_keys = MIN(taste->item_keys, keys)};
    while (tile.lanes < taste->lanes && tile.lanes < rows)
        tile.lanes *= 2;
    tile.rows = (rows + tile.lanes - 1) / tile.lanes * tile.lanes;
    /* rusticl of Mesa 22.3 loses writes of work-groups that do not fill its vectors. */
    while (opencl_tile_items(&tile) % ITEMS_MULTIPLE && tile.item_keys > 2)
        tile.item_keys /= 2;
    while (opencl_tile_items(&tile) % ITEMS_MULTIPLE && tile.lanes > least)
        tile.lanes /= 2;
    return tile;
}

void opencl_tile_limit(struct opencl_tile *tile, const struct opencl_taste *taste)
{
    enum { LANES_MAX = 16 };
    while (opencl_tile_items(tile) > taste->items) {
        if (2 * tile->item_keys <= tile->keys) {
            tile->item_keys *= 2;
        } else if (2 * tile->lanes <= LANES_MAX) {
            tile->lanes *= 2;
            tile->rows = (tile->rows + tile->lanes - 1) / tile->lanes * tile->lanes;
        } else {
            return;
        }
    }
}

void opencl_tile_narrow(struct opencl_tile *tile, const struct opencl_taste *taste, int dims)
{
    while (tile->lanes > 1 && tile->lanes * dims > taste->sums && 2 * opencl_tile_items(tile) <= taste->items)
        tile->lanes /= 2;
}

int opencl_load_width(const struct opencl_taste *taste, int dim)
{
    int width = 1;
    while (width < taste->load && dim % (2 * width) == 0)
        width *= 2;
    return width;
}

/* ---- build options ---- */

void opencl_option(struct opencl_options *options, const char *name, int value)
{
    size_t used = strlen(options->text);
    snprintf(options->text + used, sizeof options->text - used, "%s-D%s=%d", used ? " " : "", name, value);
}

void opencl_tile_option(struct opencl_options *options, const struct opencl_tile *tile)
{
    opencl_option(options, "LANES", tile->lanes);
    opencl_option(options, "ROWS", tile->rows);
    opencl_option(options, "KEYS", tile->keys);
    opencl_option(options, "ITEM_KEYS", tile->item_keys);
}

/* ---- table of sequences ---- */

static int64_t first_element(const clattn_tensor *tensor, int64_t batch, int64_t row)
{
    return tensor ? tensor->offset + batch * tensor->batch_stride + row * tensor->len_stride : 0;
}

void opencl_table_fill(const struct problem *problem, const struct tensors *t, const clattn_pyramid *pyramid,
                       cl_long *table)
{
    for (int64_t s = 0; s < problem->count; s++, table += OPENCL_SEQUENCE_FIELDS) {
        const struct sequence *sequence = &problem->sequences[s];
        table[OPENCL_SEQUENCE_Q] = first_element(t->q, sequence->batch, sequence->q_row);
        table[OPENCL_SEQUENCE_K] = first_element(t->k, sequence->batch, sequence->k_row);
        table[OPENCL_SEQUENCE_V] = first_element(t->v, sequence->batch, sequence->k_row);
        table[OPENCL_SEQUENCE_OUT] = first_element(t->out, sequence->batch, sequence->q_row);
        table[OPENCL_SEQUENCE_LSE] = first_element(t->lse, sequence->batch, sequence->q_row);
        table[OPENCL_SEQUENCE_Q_LEN] = sequence->q_len;
        table[OPENCL_SEQUENCE_KV_LEN] = sequence->kv_len;
        table[OPENCL_SEQUENCE_LIST_ROW] = sequence->list_row;
        table[OPENCL_SEQUENCE_NODE] = pyramid ? pyramid->first[s] : 0;
        table[OPENCL_SEQUENCE_NODES] = pyramid ? pyramid_nodes(pyramid_room(pyramid, s), pyramid->leaf) : 0;
        table[OPENCL_SEQUENCE_UNIT] = 0;
        table[OPENCL_SEQUENCE_LEAF] = pyramid ? pyramid->first_leaf[s] : 0;
        table[OPENCL_SEQUENCE_PAGES] = 0; /* opencl_table_pages */
    }
}

/* ---- launches in parts ---- */

clattn_status opencl_check_lengths(clattn_context *context, const struct problem *problem)
{
    int64_t most = MAX(problem->q_len_max, problem->kv_len_max);
    if (most <= INT32_MAX / 2) return CLATTN_SUCCESS;
    return fail(context, CLATTN_DEVICE_LIMIT, "a sequence has %lld tokens; OpenCL kernels take %d",
                (long long)most, INT32_MAX / 2);
}

/* Work of one launch. A compute unit of a slow GPU (integrated, a few years old) does about 4 GFLOP in a second
 * with these kernels, and displays reset GPUs after 2 s at the earliest. */
static const double UNIT_FLOPS_MAX = 4e9, LAUNCH_FLOPS_MIN = 16e9;
static const int64_t LAUNCH_UNITS_MAX = 1 << 22; /* keeps global sizes below 2^31 */

void opencl_run_units(struct opencl_launch *launch, cl_uint first_arg, int64_t units, double unit_flops,
                      int items)
{
    opencl_run_units_most(launch, first_arg, units, LAUNCH_UNITS_MAX, unit_flops, items);
}

void opencl_run_units_most(struct opencl_launch *launch, cl_uint first_arg, int64_t units, int64_t most,
                           double unit_flops, int items)
{
    double flops = MAX(UNIT_FLOPS_MAX * opencl_of(launch->context)->device.compute_units, LAUNCH_FLOPS_MIN);
    double fit = flops / MAX(unit_flops, 1);
    int64_t limit = MIN(most, LAUNCH_UNITS_MAX), part = fit < (double)limit ? MAX((int64_t)fit, 1) : limit;
    for (int64_t first = 0; first < units; first += part) {
        size_t global = (size_t)MIN(part, units - first) * (size_t)items, local = (size_t)items;
        opencl_arg_from(launch, first_arg);
        opencl_arg_long(launch, first);
        opencl_launch_run(launch, 1, &global, &local);
    }
}
