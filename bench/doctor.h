/* SPDX-License-Identifier: MIT
 *
 * `clattn doctor` in parts: flow and report (doctor.c, doctor_report.c), the drivers that the OpenCL loader
 * would load (doctor_icd.c), and child processes that use them (doctor_probe.c, doctor_patient.c). The parent
 * never calls OpenCL: whatever a driver does, it happens to a child. */
#ifndef CLATTN_BENCH_DOCTOR_H
#define CLATTN_BENCH_DOCTOR_H

#include "cache_folder.h"

#include <clattn.h>
#include <stdbool.h>

enum { DOCTOR_DRIVERS = 64, DOCTOR_DEVICES = 16, DOCTOR_NOTES = 8 };

/* ---- drivers: doctor_icd.c ---- */

struct driver {
    char file[1024];    /* the .icd file; or the library, when the environment names it */
    char library[1024]; /* what the file says; empty: nothing */
};

/* The drivers that the loader would load, in the order of its folder; `where` says where they were looked for.
 * Returns how many. */
int drivers_find(struct driver drivers[DOCTOR_DRIVERS], char *where, size_t bytes);

/* Makes the loader of this process load this driver alone, from a folder that drivers_end() removes. False: the
 * folder could not be made. */
bool driver_alone(const struct driver *driver, char *folder, size_t bytes);
void driver_alone_end(const char *folder);

/* ---- child processes: doctor_probe.c ---- */

struct probe_device {
    clattn_device_info info;
    char variant[32];
    bool computed;   /* a result was compared */
    char wrong[256]; /* what is wrong with it; empty: nothing */
};

/* What a child found. It lies in memory that both share, so that it outlives a crash of the child. */
struct probe {
    char doing[256];   /* what the child is at */
    bool done;         /* it came to its end */
    char failure[256]; /* it cannot go on: the reason */
    char loader[512], loader_version[128];
    int count;
    struct probe_device devices[DOCTOR_DEVICES];
    clattn_device_info chosen; /* by an automatic context */
    int note_count;
    char notes[DOCTOR_NOTES][256];
    /* Written by the parent when the child has ended: */
    bool crashed, hung;
    char ended[128]; /* "Aborted", "no end after 60 s" */
    char said[256];  /* its last line on standard error */
};

/* Runs `child` in a process of its own, at most `seconds`. Release the result with probe_release(); NULL: there
 * is no memory or process, which was printed. */
struct probe *probe_run(void (*child)(struct probe *probe, const void *user), const void *user, double seconds);
void probe_release(struct probe *probe);

void probe_note(struct probe *probe, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- what children do: doctor_patient.c ---- */

struct patient {
    const struct driver *driver; /* NULL: all drivers, or none */
    const char *folder;          /* of driver_alone() */
    bool quick;                  /* do not compute */
};

void patient_driver(struct probe *probe, const void *patient);    /* the driver's devices */
void patient_cpu(struct probe *probe, const void *patient);       /* the variants of the CPU */
void patient_automatic(struct probe *probe, const void *patient); /* the automatic choice */

/* ---- report: doctor_report.c ---- */

struct doctor {
    bool quick, json;
    int64_t timeout;
    char where[1200];
    int driver_count;
    struct driver drivers[DOCTOR_DRIVERS];
    struct probe *probes[DOCTOR_DRIVERS]; /* NULL: could not be made */
    struct probe *cpu, *automatic;
    struct cache_folder cache;
    int problems, hints;
    char problem[DOCTOR_DRIVERS][512], hint[DOCTOR_DRIVERS][512];
};

/* "works", "no device", "not loaded", "crashed", "hangs", "wrong" or "failed". */
const char *probe_state(const struct probe *probe);

/* Finds what is wrong: problems make the machine unhealthy, hints do not. */
void doctor_conclude(struct doctor *doctor);

/* Prints everything. Returns an exit status of the printing alone. */
int doctor_report(const struct doctor *doctor);

#endif
