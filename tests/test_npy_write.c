/* SPDX-License-Identifier: MIT
 *
 * The .npy files that the program writes, and what stays when it fails. */
#include "config.h"

#include "bench/npy_write.h"
#include "bench/tensor_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char folder[] = "/tmp/clattn-test-XXXXXX";

static const char *in_folder(const char *name)
{
    static char path[4][256];
    static unsigned turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

static int files_in_folder(void)
{
    char command[300];
    int count = -1;
    snprintf(command, sizeof command, "ls '%s' | wc -l", folder);
    FILE *list = popen(command, "r");
    assert_non_null(list);
    assert_int_equal(fscanf(list, "%d", &count), 1);
    pclose(list);
    return count;
}

static void writes_npy(void **state)
{
    (void)state;
    static const float values[] = {1, 2, 3, 4, 5, 6};
    static const int64_t shapes[][3] = {{6}, {2, 3}, {1, 2, 3}};
    const char *path = in_folder("written.npy");
    for (int rank = 1; rank <= 3; rank++) {
        struct npy_writer writer;
        struct tensor_file file;
        assert_int_equal(npy_writer_open(&writer, path, ELEMENT_FLOAT32, rank, shapes[rank - 1]), 0);
        assert_int_equal(npy_writer_write(&writer, values, 8), 0);
        assert_int_equal(npy_writer_write(&writer, values + 2, 16), 0);
        assert_int_equal(npy_writer_close(&writer), 0);
        npy_writer_abandon(&writer);
        assert_int_equal(tensor_file_open(&file, path, REQUEST_FLOAT32), 0);
        assert_int_equal(file.rank, rank);
        assert_memory_equal(file.shape, shapes[rank - 1], (size_t)rank * sizeof(int64_t));
        assert_memory_equal(file.data, values, sizeof values);
        assert_true((uintptr_t)file.data % 64 == 0);
        tensor_file_close(&file);
    }
}

/* Whatever goes wrong, the old file stays and no temporary does. */
static void keeps_old_file(void **state)
{
    (void)state;
    static const float values[4] = {7, 7, 7, 7};
    static const int64_t shape[] = {4}, nothing[] = {0}, huge[] = {INT64_MAX};
    const char *path = in_folder("old.npy"), *missing = in_folder("no/such/folder.npy");
    struct npy_writer writer;
    struct tensor_file file;
    assert_int_equal(npy_writer_open(&writer, path, ELEMENT_INT32, 1, shape), 0);
    assert_int_equal(npy_writer_write(&writer, values, 16), 0);
    assert_int_equal(npy_writer_close(&writer), 0);
    assert_int_equal(chmod(path, 0640), 0);
    int before = files_in_folder();

    assert_int_equal(npy_writer_open(&writer, path, ELEMENT_FLOAT32, 1, shape), 0);
    assert_int_equal(npy_writer_write(&writer, values, 8), 0);
    assert_int_equal(npy_writer_close(&writer), -1);
    assert_non_null(strstr(writer.error, "8 bytes of elements are missing"));
    assert_int_equal(npy_writer_open(&writer, path, ELEMENT_FLOAT32, 1, shape), 0);
    assert_int_equal(npy_writer_write(&writer, values, 17), -1);
    assert_int_equal(npy_writer_open(&writer, path, ELEMENT_FLOAT32, 1, shape), 0);
    npy_writer_abandon(&writer);
    assert_int_equal(npy_writer_open(&writer, path, ELEMENT_FLOAT32, 1, nothing), -1);
    assert_int_equal(npy_writer_open(&writer, path, ELEMENT_FLOAT32, 1, huge), -1);
    assert_int_equal(npy_writer_open(&writer, missing, ELEMENT_FLOAT32, 1, shape), -1);
    assert_int_equal(npy_writer_open(&writer, folder, ELEMENT_FLOAT32, 1, shape), -1);
    assert_int_equal(npy_writer_open(&writer, "", ELEMENT_FLOAT32, 1, shape), -1);
    assert_int_equal(files_in_folder(), before);
    assert_int_equal(tensor_file_open(&file, path, REQUEST_ANY), 0);
    assert_int_equal(file.type, ELEMENT_INT32);
    tensor_file_close(&file);

    /* A replaced file keeps its mode. */
    struct stat status;
    assert_int_equal(npy_writer_open(&writer, path, ELEMENT_FLOAT32, 1, shape), 0);
    assert_int_equal(npy_writer_write(&writer, values, 16), 0);
    assert_int_equal(npy_writer_close(&writer), 0);
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0640);
    assert_int_equal(files_in_folder(), before);
}

static void follows_links_and_devices(void **state)
{
    (void)state;
    static const float values[4] = {1, 2, 3, 4};
    static const int64_t shape[] = {4};
    const char *target = in_folder("target.npy"), *link = in_folder("link.npy");
    struct npy_writer writer;
    struct stat status;
    FILE *old = fopen(target, "w");
    assert_non_null(old);
    assert_int_equal(fclose(old), 0);
    assert_int_equal(symlink("target.npy", link), 0);
    assert_int_equal(npy_writer_open(&writer, link, ELEMENT_FLOAT32, 1, shape), 0);
    assert_int_equal(npy_writer_write(&writer, values, 16), 0);
    assert_int_equal(npy_writer_close(&writer), 0);
    assert_int_equal(lstat(link, &status), 0);
    assert_true(S_ISLNK(status.st_mode));
    assert_int_equal(stat(target, &status), 0);
    assert_int_equal(status.st_size, 128 + 16);

    assert_int_equal(npy_writer_open(&writer, "/dev/null", ELEMENT_FLOAT32, 1, shape), 0);
    assert_int_equal(npy_writer_write(&writer, values, 16), 0);
    assert_int_equal(npy_writer_close(&writer), 0);
    if (access("/dev/full", W_OK) == 0) {
        assert_int_equal(npy_writer_open(&writer, "/dev/full", ELEMENT_FLOAT32, 1, shape), -1);
        assert_non_null(strstr(writer.error, "No space left"));
    }
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(writes_npy),
        cmocka_unit_test(keeps_old_file),
        cmocka_unit_test(follows_links_and_devices),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
