/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_TEST_NVIDIA_H
#define CLATTN_TEST_NVIDIA_H

/* What the tests of the matrix tier of NVIDIA cards share: the card, its log, kernels that are made wrong. */

#include "fixture.h"

enum { TIER_MMA = 1, TIER_HOPPER = 2 };

/* What contexts said since record_clear(). */
struct recorder {
    char text[1 << 16];
    size_t used;
};
extern struct recorder recorder;
void record_clear(void);

extern int tiers; /* of the card: TIER_MMA or TIER_HOPPER */

/* To be called first. false: there is no card, and a message has said so. */
bool card_find(void);
struct target card_open(const char *variant); /* NULL: the best tier */
void card_close(struct target *target);

/* A kernel file whose text has `from` replaced by `to`, in CLATTN_KERNEL_DIR, for contexts opened from then on. */
void kernel_spoil(const char *name, const char *from, const char *to);
void kernel_restore(const char *name);

/* ---- paths of attention ---- */

enum list_kind { LIST_RANDOM, LIST_SHARED, LIST_ALL_KEYS };

struct path_case {
    struct shape shape;
    enum list_kind kind;
    int q_block, topk, block; /* block 0: 64 */
    const char *mma, *hopper; /* the path that must serve it; NULL: the portable kernel */
    int64_t window;           /* options; 0, false, NULL: off */
    float softcap;
    bool sink;
    const int32_t *seqused_q, *seqused_k;
};

/* Against the definition, by the path that is meant to serve it, twice with the same bits. */
void check_path(const struct target *target, const struct path_case *c, uint64_t seed);

#endif
