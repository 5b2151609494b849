/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "doctor.h"

#include "device.h"
#include "program.h"
#include "report.h"
#include "table.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- what is wrong ---- */

static void add(char list[DOCTOR_DRIVERS][512], int *count, const char *format, va_list arguments)
{
    if (*count < DOCTOR_DRIVERS) vsnprintf(list[(*count)++], 512, format, arguments);
}

__attribute__((format(printf, 2, 3))) static void problem(struct doctor *doctor, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    add(doctor->problem, &doctor->problems, format, arguments);
    va_end(arguments);
}

__attribute__((format(printf, 2, 3))) static void hint(struct doctor *doctor, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    add(doctor->hint, &doctor->hints, format, arguments);
    va_end(arguments);
}

static bool any_wrong(const struct probe *probe)
{
    for (int i = 0; i < probe->count; i++)
        if (*probe->devices[i].wrong) return true;
    return false;
}

const char *probe_state(const struct probe *probe)
{
    if (!probe) return "failed";
    if (probe->crashed) return "crashed";
    if (probe->hung) return "hangs";
    if (*probe->failure) return "not loaded";
    if (any_wrong(probe)) return "wrong";
    return probe->count ? "works" : "no device";
}

static bool is_ill(const struct probe *probe)
{
    return !probe || probe->crashed || probe->hung || *probe->failure || any_wrong(probe);
}

/* One problem a cause. */
static void judge(struct doctor *doctor, const char *who, const struct probe *probe)
{
    if (!probe) {
        problem(doctor, "%s could not be tried", who);
        return;
    }
    if (probe->crashed || probe->hung)
        problem(doctor, "%s %s while %s: %s%s%s", who, probe_state(probe), probe->doing, probe->ended,
                *probe->said ? "; it said: " : "", probe->said);
    else if (*probe->failure)
        problem(doctor, "%s: %s", who, probe->failure);
    for (int i = 0; i < probe->count; i++) {
        const struct probe_device *device = &probe->devices[i];
        if (*device->wrong)
            problem(doctor, "%s: '%s'%s%s: %s", who, device->info.name, *device->variant ? " as " : "",
                    device->variant, device->wrong);
    }
}

static void judge_drivers(struct doctor *doctor)
{
    int devices = 0;
    for (int i = 0; i < doctor->driver_count; i++) {
        const struct probe *probe = doctor->probes[i];
        judge(doctor, doctor->drivers[i].file, probe);
        devices += probe ? probe->count : 0;
        if (probe && !is_ill(probe) && probe->count == 0)
            hint(doctor, "%s offers no device that clattn can use", doctor->drivers[i].file);
    }
#ifdef HAVE_OPENCL
    if (doctor->driver_count == 0)
        hint(doctor, "no OpenCL driver in %s; one such as PoCL or the GPU vendor's would add devices",
             doctor->where);
    else if (devices == 0 && access("/dev/dri/renderD128", F_OK) == 0 &&
             access("/dev/dri/renderD128", R_OK | W_OK))
        hint(doctor, "/dev/dri/renderD128 is closed to this user: GPU drivers want the user in its group");
#else
    (void)devices;
    hint(doctor, "this build has no OpenCL");
#endif
}

/* All drivers in one process may fail where each alone does not. */
static void judge_automatic(struct doctor *doctor)
{
    int known = doctor->problems;
    judge(doctor, "the automatic choice", doctor->automatic);
    if (doctor->automatic && (doctor->automatic->crashed || doctor->automatic->hung) && known)
        hint(doctor,
             "every program that uses OpenCL loads all drivers: remove the .icd file of the one above, or name "
             "a folder with the good ones in OCL_ICD_VENDORS");
}

void doctor_conclude(struct doctor *doctor)
{
    judge_drivers(doctor);
    judge(doctor, "the CPU", doctor->cpu);
    judge_automatic(doctor);
    if (!doctor->cache.used) hint(doctor, "programs are compiled every time: %s", doctor->cache.reason);
}

/* Why the automatic choice is what it is, in words. */
static const char *reason_of_choice(const struct probe *probe)
{
    const char *asked = getenv("CLATTN_DEVICE");
    bool has_gpu = false;
    for (int i = 0; i < probe->count; i++)
        has_gpu |= probe->devices[i].info.is_gpu;
    if (asked && *asked) return "CLATTN_DEVICE names it, so there is no self-test";
    if (probe->chosen.backend == CLATTN_BACKEND_OPENCL) return "the first GPU that passes its self-test";
    return has_gpu ? "no GPU passes its self-test" : "there is no GPU";
}

/* ---- JSON ---- */

static void report_devices(report *parent, const struct probe *probe)
{
    report *devices = report_list(parent, "devices");
    for (int i = 0; i < probe->count; i++) {
        const struct probe_device *device = &probe->devices[i];
        report *entry = report_entry(devices);
        device_report(entry, &device->info);
        if (*device->variant) report_text(entry, "variant", device->variant);
        report_flag(entry, "computed", device->computed);
        report_text(entry, "wrong", *device->wrong ? device->wrong : NULL);
    }
}

static void report_notes(report *entry, const struct probe *probe)
{
    report *notes = report_list(entry, "notes");
    for (int i = 0; i < probe->note_count; i++)
        report_entry_text(notes, probe->notes[i]);
}

static void report_probe(report *entry, const struct probe *probe)
{
    report_text(entry, "state", probe_state(probe));
    if (!probe) return;
    if (probe->crashed || probe->hung) {
        report_text(entry, "while", probe->doing);
        report_text(entry, "ended", probe->ended);
        report_text(entry, "said", probe->said);
    }
    if (*probe->failure) report_text(entry, "failure", probe->failure);
    report_devices(entry, probe);
    report_notes(entry, probe);
}

static void report_cache(report *parent, const struct cache_folder *cache)
{
    report *object = report_child(parent, "cache");
    report_text(object, "directory", *cache->path ? cache->path : NULL);
    report_flag(object, "exists", cache->exists);
    report_text(object, "owner", cache->exists ? cache->owner : NULL);
    report_integer(object, "mode", cache->mode);
    report_integer(object, "entries", cache->entries);
    report_integer(object, "bytes", cache->bytes);
    report_integer(object, "limit_bytes", cache->limit_bytes);
    report_flag(object, "used", cache->used);
    report_text(object, "reason", cache->reason);
}

static void report_automatic(report *parent, const struct probe *probe)
{
    report *object = report_child(parent, "automatic");
    bool chosen = probe && probe->done && !*probe->failure;
    report_text(object, "state",
                probe && (probe->crashed || probe->hung) ? probe_state(probe)
                : chosen                                 ? "works"
                                                         : "failed");
    if (!chosen) return;
    device_report(report_child(object, "device"), &probe->chosen);
    report_text(object, "reason", reason_of_choice(probe));
    report_notes(object, probe);
}

static int print_json(const struct doctor *doctor)
{
    report *root = report_object();
    report_text(root, "version", clattn_version());
    report_flag(root, "healthy", doctor->problems == 0);
    report *problems = report_list(root, "problems"), *hints = report_list(root, "hints");
    for (int i = 0; i < doctor->problems; i++)
        report_entry_text(problems, doctor->problem[i]);
    for (int i = 0; i < doctor->hints; i++)
        report_entry_text(hints, doctor->hint[i]);
    report *loader = report_child(root, "loader");
    const struct probe *automatic = doctor->automatic;
    report_text(loader, "library", automatic && *automatic->loader ? automatic->loader : NULL);
    report_text(loader, "version", automatic && *automatic->loader_version ? automatic->loader_version : NULL);
    report_text(loader, "drivers", *doctor->where ? doctor->where : NULL);
    report *drivers = report_list(root, "drivers");
    for (int i = 0; i < doctor->driver_count; i++) {
        report *entry = report_entry(drivers);
        report_text(entry, "file", doctor->drivers[i].file);
        report_text(entry, "library", doctor->drivers[i].library);
        report_probe(entry, doctor->probes[i]);
    }
    report_probe(report_child(root, "cpu"), doctor->cpu);
    report_automatic(root, automatic);
    report_cache(root, &doctor->cache);
    int status = report_print(root);
    report_release(root);
    return status;
}

/* ---- text ---- */

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static void print_drivers(const struct doctor *doctor)
{
    struct table table;
    if (doctor->driver_count == 0) return;
    putchar('\n');
    table_begin(&table, "lllr");
    table_add(&table, "driver");
    table_add(&table, "library");
    table_add(&table, "state");
    table_add(&table, "devices");
    for (int i = 0; i < doctor->driver_count; i++) {
        table_add(&table, "%s", base_name(doctor->drivers[i].file));
        table_add(&table, "%s", doctor->drivers[i].library);
        table_add(&table, "%s", probe_state(doctor->probes[i]));
        table_add(&table, "%d", doctor->probes[i] ? doctor->probes[i]->count : 0);
    }
    table_end(&table);
}

static void add_devices(struct table *table, const char *driver, const struct probe *probe)
{
    for (int i = 0; probe && i < probe->count; i++) {
        const struct probe_device *device = &probe->devices[i];
        const clattn_device_info *info = &device->info;
        table_add(table, "%s%s", info->name, info->is_gpu ? " (GPU)" : "");
        table_add(table, "%s", driver);
        table_add(table, "%s", *device->variant ? device->variant : info->variants);
        table_add(table, "%.1f GiB", (double)info->memory_bytes / 1073741824);
        if (info->backend == CLATTN_BACKEND_OPENCL) {
            table_add(table, "%.1f GiB", (double)info->max_alloc_bytes / 1073741824);
            table_add(table, "%" PRIu64 " KiB", info->local_bytes / 1024);
        } else {
            table_add(table, "-");
            table_add(table, "-");
        }
        table_add(table, "%s", *device->wrong ? "no" : device->computed ? "yes" : "-");
    }
}

static void print_devices(const struct doctor *doctor)
{
    static const char *const heading[] = {"device", "driver", "variant", "memory", "largest", "local", "right"};
    struct table table;
    putchar('\n');
    table_begin(&table, "lllrrrl");
    for (size_t i = 0; i < sizeof heading / sizeof *heading; i++)
        table_add(&table, "%s", heading[i]);
    add_devices(&table, "-", doctor->cpu);
    for (int i = 0; i < doctor->driver_count; i++)
        add_devices(&table, base_name(doctor->drivers[i].file), doctor->probes[i]);
    table_end(&table);
}

/* What of the quirk table is taken into account on a driver's devices, which tiers were chosen, and why. */
static void print_reasons_of(const char *driver, const struct probe *probe)
{
    for (int i = 0; probe && i < probe->count; i++)
        if (*probe->devices[i].info.quirks)
            printf("quirks     of %s: %s\n", probe->devices[i].info.name, probe->devices[i].info.quirks);
    for (int i = 0; probe && i < probe->note_count; i++)
        printf("note       %s: %s\n", driver, probe->notes[i]);
}

static void print_reasons(const struct doctor *doctor)
{
    for (int i = 0; i < doctor->driver_count; i++)
        print_reasons_of(base_name(doctor->drivers[i].file), doctor->probes[i]);
}

static void print_cache(const struct cache_folder *cache)
{
    printf("cache      %s", *cache->path ? cache->path : "none");
    if (cache->exists)
        printf(": %" PRId64 " entries, %.1f of %.0f MiB, owner %s, mode %04o", cache->entries,
               (double)cache->bytes / 1048576, (double)cache->limit_bytes / 1048576, cache->owner, cache->mode);
    else if (cache->used)
        printf(": not made yet");
    printf("%s\n", cache->used ? "" : "; not used");
}

static void print_automatic(const struct probe *probe)
{
    printf("automatic  ");
    if (probe && probe->done && !*probe->failure)
        printf("%s %s: %s (%s)\n", backend_words[probe->chosen.backend], probe->chosen.variant,
               probe->chosen.name, reason_of_choice(probe));
    else
        puts("none");
    for (int i = 0; probe && i < probe->note_count; i++)
        printf("           %s\n", probe->notes[i]);
}

static void print_text(const struct doctor *doctor)
{
    const struct probe *automatic = doctor->automatic;
    printf("clattn %s\n\n", clattn_version());
    printf("loader     %s%s%s\n", automatic && *automatic->loader ? automatic->loader : "none",
           automatic && *automatic->loader_version ? ", " : "", automatic ? automatic->loader_version : "");
    printf("drivers    %d in %s\n", doctor->driver_count, *doctor->where ? doctor->where : "no folder");
    print_drivers(doctor);
    print_devices(doctor);
    putchar('\n');
    print_automatic(automatic);
    print_reasons(doctor);
    print_cache(&doctor->cache);
    putchar('\n');
    for (int i = 0; i < doctor->problems; i++)
        printf("problem: %s\n", doctor->problem[i]);
    for (int i = 0; i < doctor->hints; i++)
        printf("hint: %s\n", doctor->hint[i]);
    puts(doctor->problems ? "not healthy" : "healthy");
}

int doctor_report(const struct doctor *doctor)
{
    if (doctor->json) return print_json(doctor);
    print_text(doctor);
    return STATUS_OK;
}
