/* SPDX-License-Identifier: MIT */
/* Pyramid driver: leaves in parallel, then one level after the other. */

#include "config.h"

#include "cpu.h"

enum { NODES_SHARED = 256 }; /* of a level: fewer are joined sooner than threads begin */

/* Builds the levels of one sequence and key head. means [nodes][dim]. */
static void build_head(const struct cpu_kernels *kernels, const struct pyramid_job *job, int64_t s,
                       int32_t kv_head, const struct cpu_team *team)
{
    const struct sequence *sequence = &job->problem->sequences[s];
    const clattn_pyramid *pyramid = job->pyramid;
    const clattn_tensor *k = job->k;
    int32_t dim = pyramid->dim, leaf = pyramid->leaf;
    int64_t kv_len = sequence->kv_len, leaves = level_nodes(kv_len, leaf, 1);
    float *means = (float *)pyramid_head(pyramid, s, kv_head);
#pragma omp parallel num_threads(team->threads)
    {
        struct cpu_binding *binding = cpu_team_enter(team);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < leaves; i++) {
            int64_t first = i * leaf;
            kernels->pyramid_leaf(tensor_row(k, sequence->batch, sequence->k_row + first, kv_head), k->dtype,
                                  k->len_stride, MIN(leaf, kv_len - first), dim, means + i * dim);
        }
        cpu_team_leave(team, binding);
    }
    int64_t below = 0, children = leaves; /* first node and number of nodes of the level below */
    while (children > 1) {
        int64_t nodes = ceil_div(children, 2), first = below + children;
#pragma omp parallel for schedule(static) num_threads(team->threads) if (nodes >= NODES_SHARED)
        for (int64_t i = 0; i < nodes; i++) {
            const float *left = means + (below + 2 * i) * dim;
            kernels->pyramid_join(left, 2 * i + 1 < children ? left + dim : NULL, dim,
                                  means + (first + i) * dim);
        }
        below = first;
        children = nodes;
    }
}

clattn_status cpu_pyramid_build(clattn_context *context, const struct pyramid_job *job)
{
    const struct cpu_kernels *kernels = cpu_kernels_of(context);
    struct cpu_team team = cpu_team(context);
    for (int64_t s = 0; s < job->problem->count; s++)
        for (int32_t h = 0; h < job->problem->kv_heads; h++) {
            build_head(kernels, job, s, h, &team);
            if (pyramid_has_bounds(job->pyramid)) cpu_bounds_build(kernels, job, s, h, team.threads);
        }
    return CLATTN_SUCCESS;
}
