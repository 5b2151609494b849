/* SPDX-License-Identifier: MIT */
/* Options of attention on OpenCL: build options, the table of sequences' numbers, arguments. See
 * cl/attention.cl. */

#include "config.h"

#include "key_blocks.h"
#include "opencl_options.h"

#include <stdlib.h>

/* As in cl/attention.cl. */
enum option_field {
    OPTION_BIAS,
    OPTION_K_SCALE,
    OPTION_V_SCALE,
    OPTION_Q_ROW,
    OPTION_K_ROW,
    OPTION_START,
    OPTION_BLOCKS,
    OPTION_FIELDS
};

bool opencl_has_options(const struct problem *problem, const clattn_blocks *blocks)
{
    return has_options(&problem->options) || (blocks && (blocks->starts || blocks->mask));
}

void opencl_attention_options(struct opencl_options *options, const struct problem *problem,
                              const clattn_blocks *blocks, int keys)
{
    const struct options *o = &problem->options;
    opencl_option(options, "BLOCK", blocks && !blocks->starts ? blocks->block : keys);
    if (o->softcap != 0) opencl_option(options, "SOFTCAP", 1);
    if (o->window) opencl_option(options, "WINDOW", 1);
    if (o->sink) opencl_option(options, "SINK", 1);
    if (o->bias) opencl_option(options, "BIAS", 1);
    if (o->bias) opencl_option(options, "BIAS_BLOCK", DENSE_BLOCK);
    if (o->k_scale) opencl_option(options, "INT8", 1);
    if (blocks && blocks->starts) opencl_option(options, "STARTS", 1);
    if (blocks && blocks->mask) opencl_option(options, "MASK", 1);
}

/* Row 0 of a small tensor of the options for a sequence's batch entry. */
static int64_t first_of_batch(const clattn_tensor *tensor, const struct sequence *sequence)
{
    return tensor ? tensor->offset + (tensor->batch == 1 ? 0 : sequence->batch * tensor->batch_stride) : 0;
}

static cl_mem option_table(struct opencl_launch *launch, const struct problem *problem,
                           const clattn_blocks *blocks)
{
    const struct options *o = &problem->options;
    size_t bytes = (size_t)problem->count * OPTION_FIELDS * sizeof(cl_long);
    cl_long *table = malloc(MAX(bytes, 1));
    if (!table) {
        launch->status = fail(launch->context, CLATTN_OUT_OF_MEMORY, "no memory for a table of %lld sequences",
                              (long long)problem->count);
        return NULL;
    }
    for (int64_t s = 0; s < problem->count; s++) {
        const struct sequence *sequence = &problem->sequences[s];
        const struct key_blocks keys = key_blocks_listed(blocks, sequence);
        cl_long *row = table + s * OPTION_FIELDS;
        row[OPTION_BIAS] = first_of_batch(o->bias, sequence);
        row[OPTION_K_SCALE] = first_of_batch(o->k_scale, sequence);
        row[OPTION_V_SCALE] = first_of_batch(o->v_scale, sequence);
        row[OPTION_Q_ROW] = sequence->q_row;
        row[OPTION_K_ROW] = sequence->k_row;
        row[OPTION_START] = keys.starts ? keys.starts - blocks->starts : 0;
        row[OPTION_BLOCKS] = keys.count;
    }
    cl_mem mem = opencl_launch_table(launch, table, bytes);
    free(table);
    return mem;
}

static void arg_strides(struct opencl_launch *launch, const clattn_tensor *tensor)
{
    opencl_arg_long(launch, tensor ? tensor->len_stride : 0);
    opencl_arg_long(launch, tensor ? tensor->head_stride : 0);
}

void opencl_option_arguments(struct opencl_launch *launch, const struct problem *problem,
                             const clattn_blocks *blocks)
{
    const struct options *o = &problem->options;
    const struct element_mask *mask = blocks ? blocks->mask : NULL;
    if (launch->status || !opencl_has_options(problem, blocks)) return;
    opencl_arg_mem(launch, option_table(launch, problem, blocks));
    opencl_arg_float(launch, o->softcap);
    opencl_arg_long(launch, o->window);
    opencl_arg_tensor(launch, o->sink);
    opencl_arg_long(launch, o->sink ? o->sink->offset : 0);
    opencl_arg_long(launch, o->sink ? o->sink->head_stride : 0);
    opencl_arg_tensor(launch, o->bias);
    arg_strides(launch, o->bias);
    opencl_arg_tensor(launch, o->k_scale);
    arg_strides(launch, o->k_scale);
    opencl_arg_tensor(launch, o->v_scale);
    arg_strides(launch, o->v_scale);
    opencl_arg_int(launch, o->scale_block);
    opencl_arg_mem(launch, blocks && blocks->starts
                               ? opencl_launch_table(launch, blocks->starts,
                                                     (size_t)blocks->start_count * sizeof *blocks->starts)
                               : NULL);
    opencl_arg_storage(launch, mask ? &mask->cut : NULL);
    opencl_arg_storage(launch, mask ? &mask->window : NULL);
    opencl_arg_storage(launch, mask ? &mask->coordinate : NULL);
}
