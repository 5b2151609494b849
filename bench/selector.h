/* SPDX-License-Identifier: MIT
 *
 * Selectors as text:
 *
 *   pisa | pisa1 | pisa2 | flat-mean | flat-lse | dense | robust[:KEY=VALUE,...]
 *
 * The keys of robust are fields of clattn_select_desc: beam=N, score=lse|bound|blend|ahead, vote=0|1 (or
 * sum|softmax), prefilter=N, parts=1|4. */
#ifndef CLATTN_BENCH_SELECTOR_H
#define CLATTN_BENCH_SELECTOR_H

#include <clattn.h>
#include <stdbool.h>
#include <stddef.h>

#define SELECTOR_NAMES "pisa, pisa1, pisa2, flat-mean, flat-lse, dense, robust"

/* "pisa" ...; NULL past the last. In the order of clattn_selector. */
extern const char *const selector_names[];

/* Reads the selector at the begin of `text`, up to its end, a '+' or a space, into desc->selector and the
 * fields of robust. The characters read; 0: it is no selector's name; -1: its keys are wrong, as `error` says. */
int selector_parse(const char *text, clattn_select_desc *desc, char *error, size_t error_bytes);

/* The selector as text, for robust with all its keys. */
const char *selector_text(const clattn_select_desc *desc, char *text, size_t bytes);

#endif
