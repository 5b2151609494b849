/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "selector.h"

#include "options.h"

#include <stdio.h>
#include <string.h>

const char *const selector_names[] = {"pisa",     "pisa1", "pisa2",  "flat-mean",
                                      "flat-lse", "dense", "robust", NULL};

static const char *const score_words[] = {"lse", "bound", "blend", "ahead", NULL};

/* The keys of robust, each a number in a range, or one of some words that stand for 0, 1 ... */
struct key {
    const char *name;
    int64_t minimum, maximum;
    const char *const *words;
    const char *wanted; /* for messages */
};

static const char *const vote_words[] = {"sum", "softmax", NULL};
static const struct key keys[] = {{"beam", 1, CLATTN_TOPK_MAX, NULL, "a number from 1 to 512"},
                                  {"score", 1, 0, score_words, "one of lse, bound, blend, ahead"},
                                  {"vote", 0, 1, vote_words, "0 (sum) or 1 (softmax)"},
                                  {"prefilter", 0, CLATTN_TOPK_MAX, NULL, "a number from 0 to 512"},
                                  {"parts", 1, 4, NULL, "1 or 4"}};
enum { KEYS = sizeof keys / sizeof *keys };

static int word_number(const char *const *words, const char *text)
{
    for (int i = 0; words && words[i]; i++)
        if (strcmp(words[i], text) == 0) return i;
    return -1;
}

static void key_store(clattn_select_desc *desc, int key, int32_t value)
{
    int32_t *const places[KEYS] = {&desc->beam, NULL, &desc->vote, &desc->prefilter, &desc->parts};
    if (places[key])
        *places[key] = value;
    else
        desc->score = (clattn_node_score)value;
}

/* One "key=value". */
static bool parse_key(char *word, clattn_select_desc *desc, char *error, size_t error_bytes)
{
    char *value = strchr(word, '=');
    int64_t number;
    int key = 0;
    if (value) *value++ = 0;
    while (key < KEYS && strcmp(keys[key].name, word) != 0)
        key++;
    if (!value || key == KEYS) {
        snprintf(error, error_bytes, "'%.40s' is not one of beam=, score=, vote=, prefilter=, parts=", word);
        return false;
    }
    number = word_number(keys[key].words, value);
    bool is_number = number < 0 && parse_integer(value, keys[key].minimum, keys[key].maximum, &number);
    if (number < 0 || (is_number && strcmp(word, "parts") == 0 && number != 1 && number != 4)) {
        snprintf(error, error_bytes, "%s: '%.40s' is not %s", word, value, keys[key].wanted);
        return false;
    }
    key_store(desc, key, (int32_t)number);
    return true;
}

int selector_parse(const char *text, clattn_select_desc *desc, char *error, size_t error_bytes)
{
    char copy[128], *rest = copy, *word;
    size_t length = strcspn(text, "+ "), name = strcspn(text, ":+ ");
    int selector = 0;
    while (selector_names[selector] &&
           (strlen(selector_names[selector]) != name || strncmp(text, selector_names[selector], name) != 0))
        selector++;
    if (!selector_names[selector]) return 0;
    if (name < length && selector != CLATTN_SELECT_ROBUST) {
        snprintf(error, error_bytes, "%s takes no '%.40s'", selector_names[selector], text + name);
        return -1;
    }
    desc->selector = (clattn_selector)selector;
    if (name == length) return (int)length;
    if (length - name > sizeof copy) {
        snprintf(error, error_bytes, "'%.40s' is too long", text + name + 1);
        return -1;
    }
    memcpy(copy, text + name + 1, length - name - 1);
    copy[length - name - 1] = 0;
    while ((word = strsep(&rest, ",")) != NULL)
        if (!parse_key(word, desc, error, error_bytes)) return -1;
    return (int)length;
}

const char *selector_text(const clattn_select_desc *desc, char *text, size_t bytes)
{
    if (desc->selector != CLATTN_SELECT_ROBUST)
        snprintf(text, bytes, "%s", selector_names[desc->selector]);
    else
        snprintf(text, bytes, "robust:beam=%d,score=%s,vote=%d,prefilter=%d,parts=%d", desc->beam,
                 score_words[desc->score], desc->vote, desc->prefilter, desc->parts);
    return text;
}
