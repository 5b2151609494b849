/* SPDX-License-Identifier: MIT
 *
 * `clattn decode` in parts: flow and steps (decode.c), options (decode_options.c), the comparison with a
 * prefill (decode_check.c), what is told about it (decode_report.c). */
#ifndef CLATTN_BENCH_DECODE_H
#define CLATTN_BENCH_DECODE_H

#include "run.h"

/* Rows of decode against those of a prefill. */
struct decode_check {
    int64_t rows, lists,
        lists_differ; /* compared; lists of rows and key heads, and those that are not the same */
    double error,
        tolerated;    /* greatest error of out where the lists agree, and the one that is allowed there */
    double quantised; /* INT8: greatest distance to the result without quantisation */
};

struct decode {
    /* Options. */
    struct run run;                                 /* files, device, selection and sizes */
    int64_t prefill, chunk, step, limit, page_size; /* -1: not given */
    bool is_int8, dense;

    /* What is done: sequences in one cache, each batch entry one. */
    clattn_context *context;
    clattn_cache *cache;
    clattn_attention_desc attention;
    clattn_select_desc select;
    int64_t base;              /* tokens at the begin that have no query */
    int64_t tokens;            /* of each sequence, prefill included */
    int32_t *sequences, *lens; /* [batch] */
    char *q, *k, *v;           /* rows of one call, packed */
    float *rows;               /* [batch][step or chunk][q_heads][dim_v] */
    float *out;                /* [batch][tokens - base][q_heads][dim_v] */
    int32_t *lists;            /* [batch][tokens - base][kv_heads][topk]; NULL: dense */
    clattn_blocks *blocks;     /* of the last call */

    /* What it took. */
    clattn_cache_info info;
    double prefill_seconds, decode_seconds, select_share; /* NAN: not known */
    double *step_seconds;                                 /* [steps], then sorted */
    int64_t steps;
    double dense_seconds; /* of a token with all keys; NAN: not asked for */
    double chosen;        /* share of the keys that the rows see which were in their lists */
    struct decode_check check;
};

/* Parses and checks the options. Returns true to go on, else *status is the exit status. */
bool decode_parse_options(struct decode *decode, int argc, char **argv, int *status);

/* Compares out and lists with those of a prefill. Returns an exit status. */
int decode_compare(struct decode *decode);

/* Tokens from `at` on that one call takes, at most `most` and none past `end`: with queries or without. */
int64_t decode_next(const struct decode *decode, int64_t at, int64_t most, int64_t end);

/* Appends tokens first .. first + len - 1 of every sequence to `cache` and attends: rows into decode->out and
 * lists. */
int decode_call(struct decode *decode, clattn_cache *cache, int64_t first, int64_t len, double *seconds);

/* A cache as the options want it; dtype: of keys and values. */
int decode_cache(struct decode *decode, clattn_dtype dtype, clattn_cache **cache);

int decode_report(const struct decode *decode);

#endif
