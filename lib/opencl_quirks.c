/* SPDX-License-Identifier: MIT */
/* The quirk table: cl/quirks.conf, which is built in, then the user's file. Both have the same form, described
 * there. */

#include "config.h"

#include "kernel_sources.h"
#include "opencl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *word;
    enum opencl_quirk quirk;
} words[] = {
    {"group-report", OPENCL_QUIRK_GROUP_REPORT},       {"local-doubled", OPENCL_QUIRK_LOCAL_DOUBLED},
    {"local-unlimited", OPENCL_QUIRK_LOCAL_UNLIMITED}, {"fp16-hidden", OPENCL_QUIRK_FP16_HIDDEN},
    {"one-thread", OPENCL_QUIRK_ONE_THREAD},           {"no-subgroups", OPENCL_QUIRK_NO_SUBGROUPS},
    {"short-vectors", OPENCL_QUIRK_SHORT_VECTORS},
};

/* Where a file is being read. */
struct reader {
    struct opencl_device *device;
    const char *file;
    int line;
    bool in_section, matches; /* of the section */
    char section[64];
    char reason[128], effect[128]; /* its lines, by which it is about the device and what it says of it */
};

static void text_add(char *text, size_t room, const char *separator, const char *more)
{
    size_t used = strlen(text);
    snprintf(text + used, room - used, "%s%s", used ? separator : "", more);
}

/* A wrong line is passed over and told about at context creation: drivers must not become unusable by it. */
static void complain(struct reader *reader, const char *what, const char *text)
{
    enum { FILE_MAX = 200 };
    char note[400];
    size_t bytes = strlen(reader->file);
    const char *file = reader->file + (bytes > FILE_MAX ? bytes - FILE_MAX : 0); /* the end of a long path */
    snprintf(note, sizeof note, "%s:%d: %s '%.40s'", file, reader->line, what, text);
    text_add(reader->device->quirk_errors, sizeof reader->device->quirk_errors, "; ", note);
}

/* Describes the section that ends here, where it had an effect: "rusticl (platform = rusticl): quirks =
 * one-thread". */
static void section_end(struct reader *reader)
{
    struct opencl_device *device = reader->device;
    char text[400];
    snprintf(text, sizeof text, "%s (%s): %s", reader->section, *reader->reason ? reader->reason : "any device",
             reader->effect);
    if (reader->matches && *reader->effect) text_add(device->quirk_text, sizeof device->quirk_text, "; ", text);
}

static void section_begin(struct reader *reader, const char *name)
{
    section_end(reader);
    snprintf(reader->section, sizeof reader->section, "%.60s", name);
    reader->in_section = reader->matches = true;
    reader->reason[0] = reader->effect[0] = 0;
}

/* ---- one line ---- */

static void quirk_word(struct reader *reader, const char *word)
{
    bool takes_back = word[0] == '-';
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(word + takes_back, words[i].word) == 0) {
            if (takes_back)
                reader->device->quirks &= ~(unsigned)words[i].quirk;
            else
                reader->device->quirks |= words[i].quirk;
            return;
        }
    complain(reader, "there is no quirk", word);
}

static void quirk_words(struct reader *reader, const char *text)
{
    char word[64];
    for (size_t bytes; *(text += strspn(text, " \t,")); text += bytes) {
        bytes = strcspn(text, " \t,");
        snprintf(word, sizeof word, "%.*s", (int)MIN(bytes, sizeof word - 1), text);
        quirk_word(reader, word);
    }
}

static unsigned long long number_of(struct reader *reader, const char *text)
{
    char *end;
    unsigned long long number = strtoull(text, &end, 10);
    if (end != text && *end == 0 && *text != '-' && number > 0) return number;
    complain(reader, "this is no number above 0:", text);
    return ~0ull;
}

/* Acts on the device, when the section is about it. */
static void apply(struct reader *reader, const char *key, const char *value)
{
    struct opencl_device *device = reader->device;
    if (strcmp(key, "quirks") == 0) {
        quirk_words(reader, value);
    } else if (strcmp(key, "tier") == 0) {
        int tier = opencl_tier_number(value);
        if (tier < 0)
            complain(reader, "there is no tier", value);
        else
            device->tier_limit = tier;
    } else if (strcmp(key, "local") == 0) {
        device->local_bytes = (cl_ulong)MIN(number_of(reader, value), device->local_bytes);
    } else {
        device->group_max = (size_t)MIN(number_of(reader, value), device->group_max);
    }
}

static void read_pair(struct reader *reader, const char *key, const char *value)
{
    const struct opencl_device *device = reader->device;
    const char *const keys[] = {"platform", "device", "driver", "version"};
    const char *const texts[] = {device->platform_name, device->name, device->driver, device->version};
    static const char *const actions[] = {"quirks", "tier", "local", "items"};
    char pair[128];
    snprintf(pair, sizeof pair, "%s = %.100s", key, value);
    for (int i = 0; i < 4; i++) {
        if (strcmp(key, keys[i]) == 0) {
            reader->matches = reader->matches && opencl_text_contains(texts[i], value, strlen(value));
            text_add(reader->reason, sizeof reader->reason, ", ", pair);
            return;
        }
        if (strcmp(key, actions[i]) == 0) {
            if (!reader->matches) return;
            text_add(reader->effect, sizeof reader->effect, ", ", pair);
            apply(reader, key, value);
            return;
        }
    }
    complain(reader, "nothing is called", key);
}

static void strip(char **text)
{
    *text += strspn(*text, " \t\r");
    size_t bytes = strlen(*text);
    while (bytes > 0 && strchr(" \t\r", (*text)[bytes - 1]))
        (*text)[--bytes] = 0;
}

static void read_line(struct reader *reader, char *line)
{
    char *value, *end;
    reader->line++;
    strip(&line);
    if (*line == 0 || *line == '#') return;
    if (*line == '[' && (end = strchr(line, ']')) && end[1] == 0) {
        *end = 0;
        section_begin(reader, line + 1);
        return;
    }
    value = strchr(line, '=');
    if (!value || !reader->in_section) {
        complain(reader, "this is no [section] and no line of one:", line);
        return;
    }
    *value++ = 0;
    strip(&line);
    strip(&value);
    read_pair(reader, line, value);
}

/* ---- both tables ---- */

static void read_text(struct opencl_device *device, const char *name, const char *text)
{
    struct reader reader = {.device = device, .file = name};
    char line[512];
    for (size_t bytes; *text; text += bytes + (text[bytes] == '\n')) {
        bytes = strcspn(text, "\n");
        snprintf(line, sizeof line, "%.*s", (int)MIN(bytes, sizeof line - 1), text);
        read_line(&reader, line);
    }
    section_end(&reader);
}

static void read_file(struct opencl_device *device, const char *path)
{
    struct reader reader = {.device = device, .file = path};
    char line[512];
    FILE *file = fopen(path, "r");
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        read_line(&reader, line);
    }
    section_end(&reader);
    fclose(file);
}

/* The user's file, as the XDG base directories have it; "" when there is no place for one. */
static void user_path(char *path, size_t room)
{
    const char *named = getenv("CLATTN_QUIRKS"), *config = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    int bytes = 0;
    if (named)
        bytes = snprintf(path, room, "%s", named);
    else if (config && config[0] == '/')
        bytes = snprintf(path, room, "%s/clattn/quirks.conf", config);
    else if (home && *home)
        bytes = snprintf(path, room, "%s/.config/clattn/quirks.conf", home);
    else
        *path = 0;
    if (bytes >= (int)room) *path = 0;
}

void opencl_quirks_tell(const struct opencl_device *device, char *text, size_t room)
{
    *text = 0;
    text_add(text, room, "", device->quirk_text);
    if (!*device->quirk_errors) return;
    text_add(text, room, "; ", "not understood: ");
    text_add(text, room, "", device->quirk_errors);
}

void opencl_quirks_read(struct opencl_device *device)
{
    char path[4096];
    device->tier_limit = OPENCL_TIERS - 1;
    for (unsigned i = 0; i < kernel_source_count; i++)
        if (strcmp(kernel_sources[i].name, "quirks.conf") == 0)
            read_text(device, "quirks.conf", kernel_sources[i].text);
    user_path(path, sizeof path);
    if (*path) read_file(device, path);
}
