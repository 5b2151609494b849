/* SPDX-License-Identifier: MIT */
#ifndef CLATTN_PATTERN_H
#define CLATTN_PATTERN_H

/* Static patterns in parts:
 *
 *   pattern.c          the object: parts, patterns of single heads, the last error
 *   pattern_parse.c    the object from text
 *   pattern_shape.c    what a pattern is applied to: sequences, list rows, key blocks
 *   pattern_list.c     the list of one list row and head
 *   pattern_blocks.c, pattern_stats.c, pattern_changed.c   what is done with the lists */

#include "key_blocks.h"

/* ---- the object ---- */

enum pattern_kind { PATTERN_LOCAL, PATTERN_LOG_STRIDE, PATTERN_ANCHORS, PATTERN_STRIDED, PATTERN_RANDOM };

struct pattern_part {
    enum pattern_kind kind;
    int32_t window; /* local: blocks either side, `stride` apart; random: not drawn around c, -1: drawn */
    int32_t stride; /* local, strided */
    int32_t random, global;   /* random: blocks drawn; first blocks that are not drawn */
    uint64_t seed;            /* random */
    bool tokens;              /* log stride: distances in tokens */
    int32_t heads, levels;    /* log stride: of the offsets */
    bool as_keys, as_queries; /* anchors */
    int32_t *values;          /* [value_count] anchors, or offsets [heads][levels] */
    int32_t value_count;
};

struct pattern_parts {
    struct pattern_part *list; /* [count] */
    int32_t count;
};

struct pattern_head {
    int32_t head;
    struct pattern_parts parts;
};

struct clattn_pattern {
    struct pattern_parts parts; /* of all heads that are not in `own` */
    struct pattern_head *own;   /* [own_count] */
    int32_t own_count;
    pthread_mutex_t lock; /* error */
    char error[512];
};

/* Records the detail of an error and returns `status`. The pattern is const to callers that only read it. */
clattn_status pattern_fail(const clattn_pattern *pattern, clattn_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

const struct pattern_parts *pattern_of_head(const clattn_pattern *pattern, int32_t head);

/* May lists differ from head to head? */
bool pattern_has_heads(const clattn_pattern *pattern);

/* May a causal list change for query rows that were there already, when a sequence grows? */
bool pattern_has_ends(const clattn_pattern *pattern);

/* ---- what it is applied to ---- */

struct pattern_sequence {
    int64_t q_len, kv_len, k_row;
    int64_t list_row; /* its first list row */
};

struct pattern_problem {
    clattn_pattern_shape shape; /* with everything checked */
    bool causal;
    int64_t count;                  /* sequences */
    const int32_t *cu_q, *cu_k;     /* [count + 1] packed sequences, or NULL */
    const int32_t *used_q, *used_k; /* [count] lengths without padding, or NULL */
    int64_t *list_row;              /* [count + 1] first list row of each sequence, at last their number */
    int64_t key_blocks;             /* of the longest sequence */
};

clattn_status pattern_problem_init(const clattn_pattern *pattern, const clattn_attention_desc *attention,
                                   const clattn_pattern_shape *shape, struct pattern_problem *problem);
void pattern_problem_release(struct pattern_problem *problem);
struct pattern_sequence pattern_sequence_of(const struct pattern_problem *problem, int64_t s);
struct key_blocks pattern_keys(const struct pattern_problem *problem, const struct pattern_sequence *sequence);

/* One list row: query rows [row, end) of a sequence (none: padding), the positions and key blocks they stand
 * in. */
struct pattern_row {
    int64_t row, end;
    int64_t t;           /* position of query row `row`; may be negative */
    int64_t first, last; /* key blocks c; first > last: none */
};

struct pattern_row pattern_row_of(const struct pattern_problem *problem,
                                  const struct pattern_sequence *sequence, const struct key_blocks *keys,
                                  int64_t r);

/* ---- lists ---- */

/* Makes one list after the other; neighbours that have the same key blocks share the work. */
struct pattern_lister {
    const clattn_pattern *pattern;
    bool causal;
    uint64_t *bits, *taken; /* one a key block of the longest sequence; all zero between lists */
    int32_t *list;          /* [count] ascending */
    int64_t count, capacity;
    /* What `list` was made for. */
    struct key_blocks keys;
    int64_t first, last;
    int32_t head;
    bool made;
};

clattn_status pattern_lister_init(const clattn_pattern *pattern, const struct pattern_problem *problem,
                                  struct pattern_lister *lister);
void pattern_lister_release(struct pattern_lister *lister);

/* list, count: the blocks of a list row and head. false: out of memory. */
bool pattern_list(struct pattern_lister *lister, const struct key_blocks *keys, const struct pattern_row *row,
                  int32_t head);

#endif
