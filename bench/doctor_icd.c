/* SPDX-License-Identifier: MIT
 *
 * Where OpenCL loaders look for drivers: a folder of .icd files, each with the name of a library.
 * OCL_ICD_VENDORS names another folder, and with ocl-icd also one .icd file or one library; OPENCL_VENDOR_PATH
 * is an older name of it. */
#include "config.h"

#include "doctor.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define VENDORS "/etc/OpenCL/vendors"

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

static bool is_folder(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

/* The first line of an .icd file without blanks around it. */
static void driver_read(struct driver *driver, const char *path)
{
    snprintf(driver->file, sizeof driver->file, "%s", path);
    driver->library[0] = 0;
    FILE *file = fopen(path, "r");
    if (!file) return;
    char line[sizeof driver->library] = "";
    if (fgets(line, sizeof line, file)) {
        char *start = line + strspn(line, " \t");
        start[strcspn(start, "\r\n")] = 0;
        for (size_t length = strlen(start); length && strchr(" \t", start[length - 1]); length--)
            start[length - 1] = 0;
        memmove(driver->library, start, strlen(start) + 1);
    }
    fclose(file);
}

static int compare_drivers(const void *a, const void *b)
{
    return strcmp(((const struct driver *)a)->file, ((const struct driver *)b)->file);
}

static int folder_drivers(struct driver drivers[DOCTOR_DRIVERS], const char *folder)
{
    char path[sizeof drivers->file];
    int count = 0;
    DIR *directory = opendir(folder);
    if (!directory) return 0;
    for (struct dirent *item; count < DOCTOR_DRIVERS && (item = readdir(directory));)
        if (ends_with(item->d_name, ".icd") &&
            snprintf(path, sizeof path, "%s/%s", folder, item->d_name) < (int)sizeof path)
            driver_read(&drivers[count++], path);
    closedir(directory);
    qsort(drivers, (size_t)count, sizeof *drivers, compare_drivers);
    return count;
}

int drivers_find(struct driver drivers[DOCTOR_DRIVERS], char *where, size_t bytes)
{
    const char *vendors = getenv("OCL_ICD_VENDORS");
    char path[sizeof drivers->file];
    if (!vendors || !*vendors) vendors = getenv("OPENCL_VENDOR_PATH");
    if (!vendors || !*vendors) vendors = VENDORS;
    snprintf(where, bytes, "%s", vendors);
    /* A folder that is not there has no drivers. */
    if (is_folder(vendors) || (!ends_with(vendors, ".icd") && !strstr(vendors, ".so")))
        return folder_drivers(drivers, vendors);
    if (ends_with(vendors, ".icd")) {
        bool is_path = strchr(vendors, '/') != NULL;
        snprintf(path, sizeof path, "%s%s", is_path ? "" : VENDORS "/", vendors);
        driver_read(&drivers[0], path);
    } else {
        snprintf(drivers[0].file, sizeof drivers[0].file, "%s", vendors);
        snprintf(drivers[0].library, sizeof drivers[0].library, "%s", vendors);
    }
    return 1;
}

bool driver_alone(const struct driver *driver, char *folder, size_t bytes)
{
    char path[4096];
    const char *base = getenv("TMPDIR");
    int length = snprintf(folder, bytes, "%s/clattn-doctor-XXXXXX", base && *base ? base : "/tmp");
    if (length >= (int)bytes || !mkdtemp(folder)) {
        folder[0] = 0;
        return false;
    }
    snprintf(path, sizeof path, "%s/driver.icd", folder);
    FILE *file = fopen(path, "w");
    bool good = file && fprintf(file, "%s\n", driver->library) > 0;
    if (file && fclose(file)) good = false;
    if (!good) driver_alone_end(folder);
    return good;
}

void driver_alone_end(const char *folder)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/driver.icd", folder);
    unlink(path);
    rmdir(folder);
}
