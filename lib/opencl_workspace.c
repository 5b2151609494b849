/* SPDX-License-Identifier: MIT */
/* Memory of launches, kept for the next one: creating and freeing buffers of gigabytes costs more than many
 * kernels.
 *
 * A buffer belongs to one in-order queue. While a launch enqueues its commands it has the buffer alone;
 * afterwards the next launch on that queue may take it, because its commands come later. Out of order nothing
 * is kept. Idle buffers take at most a quarter of the device's memory; the one that was idle longest goes
 * first. */

#include "config.h"

#include "opencl.h"

/* Takes an entry out of the table. */
static struct opencl_workspace_entry entry_remove(struct opencl *state, int i)
{
    struct opencl_workspace *workspace = &state->workspace;
    struct opencl_workspace_entry entry = workspace->entries[i];
    workspace->idle_bytes -= entry.bytes;
    for (workspace->count--; i < workspace->count; i++)
        workspace->entries[i] = workspace->entries[i + 1];
    clReleaseCommandQueue(entry.queue);
    return entry;
}

/* The smallest that holds `bytes`, but none of more than twice as many; -1: none. */
static int entry_find(const struct opencl_workspace *workspace, cl_command_queue queue, size_t bytes)
{
    int best = -1;
    for (int i = 0; i < workspace->count; i++) {
        const struct opencl_workspace_entry *entry = &workspace->entries[i];
        if (entry->queue == queue && entry->bytes >= bytes && entry->bytes <= 2 * bytes + 4096 &&
            (best < 0 || entry->bytes < workspace->entries[best].bytes))
            best = i;
    }
    return best;
}

clattn_status opencl_workspace_take(clattn_context *context, cl_command_queue queue, size_t bytes,
                                    struct storage *storage)
{
    struct opencl *state = opencl_of(context);
    bool found;
    pthread_mutex_lock(&state->workspace_lock);
    int i = entry_find(&state->workspace, queue, bytes);
    if ((found = i >= 0)) {
        struct opencl_workspace_entry entry = entry_remove(state, i);
        *storage = (struct storage){.mem = entry.mem, .bytes = entry.bytes};
    }
    pthread_mutex_unlock(&state->workspace_lock);
    return found ? CLATTN_SUCCESS : opencl_storage_create(context, bytes, storage);
}

void opencl_workspace_give(clattn_context *context, cl_command_queue queue, bool out_of_order,
                           struct storage *storage)
{
    struct opencl *state = opencl_of(context);
    struct opencl_workspace *workspace = &state->workspace;
    size_t limit = (size_t)(state->device.memory_bytes / 4);
    /* The entry keeps the queue, so that no other queue gets its address. */
    if (out_of_order || storage->bytes > limit || clRetainCommandQueue(queue)) {
        clReleaseMemObject(storage->mem);
        return;
    }
    pthread_mutex_lock(&state->workspace_lock);
    while (workspace->count == OPENCL_WORKSPACE_ENTRIES ||
           (workspace->count > 0 && workspace->idle_bytes + storage->bytes > limit))
        clReleaseMemObject(entry_remove(state, 0).mem);
    workspace->entries[workspace->count++] =
        (struct opencl_workspace_entry){storage->mem, storage->bytes, queue};
    workspace->idle_bytes += storage->bytes;
    pthread_mutex_unlock(&state->workspace_lock);
}

void opencl_workspace_release(struct opencl *state)
{
    while (state->workspace.count > 0)
        clReleaseMemObject(entry_remove(state, 0).mem);
}
