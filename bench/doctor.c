/* SPDX-License-Identifier: MIT */
#include "config.h"

#include "doctor.h"

#include "options.h"
#include "program.h"
#include "report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct command_help help = {
    "doctor [OPTION...]",
    "Says whether this machine is fit for clattn: loads every OpenCL driver alone, in a process of its\n"
    "own with a time limit, computes a small attention on every device and compares it with the\n"
    "reference; then looks at the loader, the program cache and the automatic choice.",
    "A driver that crashes, hangs or computes wrongly is named. No driver at all is healthy: clattn\n"
    "computes on the CPU then.\n"
    "\n"
    "Exit status: 0 healthy, 1 not, 2 wrong usage."};

static void say_progress(const char *what)
{
    if (isatty(STDERR_FILENO)) program_note("trying %s", what);
}

static struct probe *try_driver(const struct doctor *doctor, const struct driver *driver)
{
    char folder[1024];
    struct patient patient = {driver, folder, doctor->quick};
    say_progress(driver->file);
    if (!driver_alone(driver, folder, sizeof folder)) {
        program_error("no folder for '%s' can be made below TMPDIR or /tmp", driver->file);
        return NULL;
    }
    struct probe *probe = probe_run(patient_driver, &patient, (double)doctor->timeout);
    driver_alone_end(folder);
    return probe;
}

static void examine(struct doctor *doctor)
{
    const struct patient patient = {.quick = doctor->quick};
#ifdef HAVE_OPENCL
    doctor->driver_count = drivers_find(doctor->drivers, doctor->where, sizeof doctor->where);
#endif
    for (int i = 0; i < doctor->driver_count; i++)
        doctor->probes[i] = try_driver(doctor, &doctor->drivers[i]);
    say_progress("the CPU");
    doctor->cpu = probe_run(patient_cpu, &patient, (double)doctor->timeout);
    say_progress("the automatic choice");
    doctor->automatic = probe_run(patient_automatic, &patient, (double)doctor->timeout);
    cache_folder_read(&doctor->cache);
}

int doctor_main(int argc, char **argv)
{
    int status;
    static struct doctor doctor = {.timeout = 120};
    const struct option_spec specs[] = {
        {"quick", OPTION_FLAG, &doctor.quick, NULL, "only list the devices, do not compute on them", 0, 0,
         NULL},
        {"timeout", OPTION_INTEGER, &doctor.timeout, "SECONDS",
         "what a driver may take (default 120); compilers of some need\n"
         "a minute",
         1, 86400, NULL},
        {"json", OPTION_FLAG, &doctor.json, NULL, "print the same as JSON", 0, 0, NULL},
        {0}};
    if (!options_parse(specs, &help, argc, argv, &status)) return status;
    if (doctor.json && !report_available()) return STATUS_USAGE;
    examine(&doctor);
    doctor_conclude(&doctor);
    status = doctor_report(&doctor);
    for (int i = 0; i < doctor.driver_count; i++)
        probe_release(doctor.probes[i]);
    probe_release(doctor.cpu);
    probe_release(doctor.automatic);
    return doctor.problems ? STATUS_FAILED : status;
}
