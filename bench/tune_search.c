/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "tune.h"

#include "program.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What changes most comes first. */
const struct tune_parameter tune_parameters[TUNE_PARAMETERS] = {{"rows", {8, 16, 32, 64, -1}},
                                                                {"keys", {16, 32, 64, -1}},
                                                                {"lanes", {4, 8, 16, -1}},
                                                                {"item_keys", {2, 4, 8, 16, -1}},
                                                                {"item_dims", {8, 16, 32, 64, -1}},
                                                                {"local_kib", {16, 32, 64, 128, -1}},
                                                                {"items", {64, 128, 256, 512, -1}},
                                                                {"load", {4, 8, 16, -1}},
                                                                {"pad", {0, 4, 8, -1}}};

const char *const tune_kernels[TUNE_KERNELS + 1] = {"forward-token", "forward-block", "select",
                                                    "backward-q",    "backward-kv",   NULL};

bool tune_point_is_default(const struct tune_point *point)
{
    for (int p = 0; p < TUNE_PARAMETERS; p++)
        if (point->value[p] >= 0) return false;
    return true;
}

const char *tune_point_text(const struct tune_point *point, char *text, size_t bytes)
{
    size_t used = 0;
    snprintf(text, bytes, "default");
    for (int p = 0; p < TUNE_PARAMETERS; p++)
        if (point->value[p] >= 0 && used < bytes)
            used += (size_t)snprintf(text + used, bytes - used, "%s%s %d", used ? ", " : "",
                                     tune_parameters[p].name, point->value[p]);
    return text;
}

static const struct tune_trial *find_trial(const struct tune_search *search, const struct tune_point *point)
{
    for (int t = 0; t < search->trial_count; t++)
        if (memcmp(&search->trials[t].point, point, sizeof *point) == 0) return &search->trials[t];
    return NULL;
}

struct walk {
    struct tune_search *search;
    struct tune_base base;
    int (*save)(void *user);
    void *user;
};

static bool is_over(const struct walk *walk)
{
    return bench_interrupted || program_seconds() >= walk->base.settings->end;
}

/* A hair is no progress: the confirmation would not find it again. */
static void consider(struct tune_search *search, const struct tune_trial *trial)
{
    if (trial->state != TUNE_GOOD || !(trial->ratio < 0.99 * search->best_ratio)) return;
    search->best = trial->point;
    search->best_ratio = trial->ratio;
}

/* Tries a point; what an earlier run tried is taken from there, so that the walk goes the same way. */
static int try_point(struct walk *walk, const struct tune_point *point)
{
    struct tune_search *search = walk->search;
    const struct tune_trial *known = find_trial(search, point);
    if (known) consider(search, known);
    if (known || search->trial_count == TUNE_TRIALS_MAX) return STATUS_OK;
    struct tune_trial *trial = &search->trials[search->trial_count];
    int status = tune_measure(&walk->base, search, point, walk->base.settings->seconds, trial);
    if (status != STATUS_OK || bench_interrupted) return status; /* an interrupted trial is not kept */
    search->trial_count++;
    consider(search, trial);
    return walk->save(walk->user);
}

/* One parameter after the other, from the best so far. */
static int descend(struct walk *walk)
{
    int status = STATUS_OK;
    for (int p = 0; p < TUNE_PARAMETERS; p++) {
        struct tune_point from = walk->search->best;
        if (!walk->base.settings->varies[p]) continue;
        for (int v = 0; tune_parameters[p].values[v] >= 0; v++) {
            struct tune_point point = from;
            if (point.value[p] == tune_parameters[p].values[v]) continue;
            point.value[p] = tune_parameters[p].values[v];
            if (status != STATUS_OK || is_over(walk)) return status;
            status = try_point(walk, &point);
        }
    }
    return status;
}

/* The best against the default once more, for longer: only what is faster by more than the noise is kept. */
static int confirm(struct walk *walk)
{
    struct tune_search *search = walk->search;
    struct tune_trial trial;
    bool is_faster = false;
    int status = STATUS_OK;
    search->default_seconds = 0;
    if (!tune_point_is_default(&search->best)) {
        status = tune_measure(&walk->base, search, &search->best, 3 * walk->base.settings->seconds, &trial);
        if (status != STATUS_OK || bench_interrupted) return status;
        is_faster = trial.state == TUNE_GOOD && trial.ratio < 1 - walk->base.settings->noise;
        search->default_seconds = walk->base.medians[0];
        search->tuned_seconds = walk->base.medians[1];
    } else if (walk->base.medians[0] > 0) {
        search->default_seconds = walk->base.medians[0];
    }
    if (!is_faster) {
        for (int p = 0; p < TUNE_PARAMETERS; p++)
            search->best.value[p] = -1;
        search->best_ratio = 1;
        search->tuned_seconds = search->default_seconds;
    } else {
        search->best_ratio = trial.ratio;
    }
    search->is_complete = true;
    return walk->save(walk->user);
}

int tune_search(struct tune_search *search, const struct tune_settings *settings, clattn_context *reference,
                int (*save)(void *user), void *user, bool *applies)
{
    struct walk walk = {.search = search, .save = save, .user = user};
    int status = tune_base_open(&walk.base, search, settings, reference, applies);
    search->best_ratio = 1;
    for (int p = 0; p < TUNE_PARAMETERS; p++)
        search->best.value[p] = -1;
    if (status == STATUS_OK && *applies) {
        status = descend(&walk);
        if (status == STATUS_OK && !is_over(&walk)) status = confirm(&walk);
    }
    tune_base_close(&walk.base);
    return status;
}
