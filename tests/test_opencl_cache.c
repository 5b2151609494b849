/* SPDX-License-Identifier: MIT */
/* The program cache on disk: cold, warm, damaged, foreign, unwritable, too large, many writers. No device
 * needed. */

#include "opencl_fixture.h"

#ifdef HAVE_XXHASH

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

enum { HEADER_BYTES = 40 };

static char folder[4096];

static char *key_of(const char *what)
{
    struct opencl_device device = {.name = "device", .platform_name = "platform", .driver = "1"};
    char *key = opencl_cache_key(&device, "program", what, "text");
    assert_non_null(key);
    return key;
}

/* Is there an entry with this payload? */
static int has_payload(const char *key, const void *payload, size_t bytes)
{
    size_t have_bytes = 0;
    char *have = opencl_cache_load(key, &have_bytes);
    int same = have && have_bytes == bytes && memcmp(have, payload, bytes) == 0;
    free(have);
    return same;
}

static void remember_path(const char *path, void *user)
{
    if (snprintf(user, 4096, "%s", path) >= 4096) abort();
}

/* The path of the only entry. */
static void only_entry(char path[4096])
{
    assert_int_equal(folder_files(folder, remember_path, path), 1);
}

static void test_cold_and_warm(void **state)
{
    (void)state;
    char path[4096];
    struct stat status;
    cache_empty("warm", folder);
    char *key = key_of("a"), *other = key_of("b");
    assert_string_not_equal(key, other);
    assert_false(has_payload(key, "payload", 7));
    assert_int_not_equal(access(folder, F_OK), 0); /* looking does not make a folder */
    opencl_cache_store(key, "payload", 7);
    assert_true(has_payload(key, "payload", 7));
    assert_false(has_payload(other, "payload", 7));
    opencl_cache_store(key, "newer", 5);
    assert_true(has_payload(key, "newer", 5));
    only_entry(path);
    assert_int_equal(stat(folder, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0700);
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    opencl_cache_drop(key);
    assert_false(has_payload(key, "newer", 5));
    opencl_cache_store(key, "", 0);
    assert_true(has_payload(key, "", 0));
    free(key);
    free(other);
}

/* What is in a key makes it another entry: each field of the device, the kind, the text. */
static void test_keys_differ(void **state)
{
    (void)state;
    struct opencl_device base = {.name = "d", .platform_name = "p", .driver = "1", .version = "OpenCL 1.2"};
    struct opencl_device devices[6];
    char *keys[9];
    for (int i = 0; i < 6; i++)
        devices[i] = base;
    strcpy(devices[0].name, "e");
    strcpy(devices[1].platform_name, "q");
    strcpy(devices[2].platform_version, "2");
    strcpy(devices[3].driver, "2");
    strcpy(devices[4].version, "OpenCL 3.0");
    devices[5].vendor_id = 1;
    for (int i = 0; i < 6; i++)
        keys[i] = opencl_cache_key(&devices[i], "program", "-DX=1", "text");
    keys[6] = opencl_cache_key(&base, "other", "-DX=1", "text");
    keys[7] = opencl_cache_key(&base, "program", "-DX=2", "text");
    keys[8] = opencl_cache_key(&base, "program", "-DX=1", "texu");
    for (int i = 0; i < 9; i++)
        for (int j = 0; j < i; j++)
            assert_string_not_equal(keys[i], keys[j]);
    for (int i = 0; i < 9; i++)
        free(keys[i]);
}

static void test_truncated(void **state)
{
    (void)state;
    char path[4096];
    cache_empty("truncated", folder);
    char *key = key_of("a");
    opencl_cache_store(key, "payload", 7);
    only_entry(path);
    struct stat status;
    assert_int_equal(stat(path, &status), 0);
    for (off_t length = 0; length < status.st_size; length++) {
        opencl_cache_store(key, "payload", 7);
        assert_true(has_payload(key, "payload", 7));
        assert_int_equal(truncate(path, length), 0);
        assert_false(has_payload(key, "payload", 7));
        assert_int_not_equal(access(path, F_OK), 0); /* unlinked, so the next store is not in vain */
    }
    opencl_cache_store(key, "payload", 7);
    assert_int_equal(truncate(path, status.st_size + 1), 0);
    assert_false(has_payload(key, "payload", 7));
    free(key);
}

static void test_bit_flipped(void **state)
{
    (void)state;
    char path[4096];
    cache_empty("flipped", folder);
    char *key = key_of("a");
    opencl_cache_store(key, "payload", 7);
    only_entry(path);
    size_t bytes = HEADER_BYTES + strlen(key) + 7;
    for (size_t i = 0; i < bytes; i++) {
        unsigned char byte;
        opencl_cache_store(key, "payload", 7);
        int file = open(path, O_RDWR);
        assert_true(file >= 0);
        assert_int_equal(pread(file, &byte, 1, (off_t)i), 1);
        byte ^= (unsigned char)(1 << i % 8);
        assert_int_equal(pwrite(file, &byte, 1, (off_t)i), 1);
        close(file);
        assert_false(has_payload(key, "payload", 7));
        assert_int_not_equal(access(path, F_OK), 0);
    }
    free(key);
}

/* Another program's entry under our name, other kinds of files, and files of others in the folder. */
static void test_foreign(void **state)
{
    (void)state;
    char path[4096], mine[8192];
    cache_empty("foreign", folder);
    char *key = key_of("a"), *other = key_of("b");
    opencl_cache_store(key, "payload", 7);
    only_entry(path);
    opencl_cache_drop(key);
    opencl_cache_store(other, "payload", 7);
    only_entry(mine);
    assert_int_equal(rename(mine, path), 0);
    assert_false(has_payload(key, "payload", 7));
    assert_int_not_equal(access(path, F_OK), 0);

    assert_int_equal(mkfifo(path, 0600), 0);
    assert_false(has_payload(key, "payload", 7)); /* and does not wait for a writer */
    assert_int_equal(symlink("/etc/passwd", path), 0);
    assert_false(has_payload(key, "payload", 7));
    opencl_cache_store(key, "payload", 7);
    assert_true(has_payload(key, "payload", 7));

    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    opencl_cache_store(key, "payload", 7);
    assert_false(has_payload(key, "payload", 7));
    assert_int_equal(folder_files(folder, NULL, NULL), 1); /* no temporary is left */
    free(key);
    free(other);
}

static void test_unusable_folders(void **state)
{
    (void)state;
    char deep[8192];
    char *key = key_of("a");
    cache_empty("unusable", folder);
    snprintf(deep, sizeof deep, "%s/one/two", folder);
    setenv("CLATTN_CACHE_DIR", deep, 1);
    opencl_cache_store(key, "payload", 7); /* missing folders are made */
    assert_true(has_payload(key, "payload", 7));
    assert_true(opencl_cache_writable());
    assert_int_equal(chmod(deep, 0722), 0); /* others could put programs there */
    assert_false(has_payload(key, "payload", 7));
    assert_false(opencl_cache_writable());
    chmod(deep, 0700);
    setenv("CLATTN_CACHE_SIZE", "0", 1);
    assert_false(opencl_cache_writable());
    unsetenv("CLATTN_CACHE_SIZE");
    assert_true(has_payload(key, "payload", 7));
    opencl_cache_drop(key);
    rmdir(deep);
    snprintf(deep, sizeof deep, "%s/one", folder);
    rmdir(deep);

    const char *const impossible[] = {"/proc/no/such/folder", "/dev/null/folder", ""};
    for (int i = 0; i < 3; i++) {
        setenv("CLATTN_CACHE_DIR", impossible[i], 1);
        opencl_cache_store(key, "payload", 7);
        assert_false(has_payload(key, "payload", 7));
        assert_false(opencl_cache_writable());
    }
    char *home = getenv("HOME") ? strdup(getenv("HOME")) : NULL;
    char *xdg = getenv("XDG_CACHE_HOME") ? strdup(getenv("XDG_CACHE_HOME")) : NULL;
    unsetenv("CLATTN_CACHE_DIR");
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    opencl_cache_store(key, "payload", 7);
    assert_false(has_payload(key, "payload", 7));
    setenv("HOME", folder, 1);
    opencl_cache_store(key, "payload", 7);
    assert_true(has_payload(key, "payload", 7));
    snprintf(deep, sizeof deep, "%s/.cache/clattn", folder);
    assert_int_equal(folder_files(deep, file_unlink, NULL), 1);
    rmdir(deep);
    snprintf(deep, sizeof deep, "%s/.cache", folder);
    rmdir(deep);
    if (home) setenv("HOME", home, 1);
    if (xdg) setenv("XDG_CACHE_HOME", xdg, 1);
    free(home);
    free(xdg);
    free(key);
}

/* In a child, because root may write everywhere: it becomes another user. */
static void test_read_only(void **state)
{
    (void)state;
    cache_empty("read_only", folder);
    char *key = key_of("a"), *other = key_of("b");
    opencl_cache_store(key, "payload", 7);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        char path[4096];
        if (geteuid() == 0) {
            /* The path to here may be closed to that user; the current folder stays reachable. */
            only_entry(path);
            if (chown(folder, 65534, 65534) || chown(path, 65534, 65534) || chdir(folder)) _exit(2);
            setenv("CLATTN_CACHE_DIR", ".", 1);
            if (setgid(65534) || setuid(65534)) _exit(2);
        }
        const char *here = getenv("CLATTN_CACHE_DIR");
        if (chmod(here, 0500)) _exit(2);
        if (opencl_cache_writable()) _exit(3);
        opencl_cache_store(other, "payload", 7);
        _exit(has_payload(key, "payload", 7) && !has_payload(other, "payload", 7) ? 0 : 1);
    }
    int result = -1;
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_true(WIFEXITED(result));
    assert_int_equal(WEXITSTATUS(result), 0);
    assert_int_equal(chmod(folder, 0700), 0);
    /* A folder of somebody else is not used. */
    if (geteuid() == 0) assert_false(has_payload(key, "payload", 7));
    free(key);
    free(other);
}

/* A full disk, as far as a process can make one for itself: files may not grow. No entry, no remains, no word.
 */
static void test_full(void **state)
{
    enum { BYTES = 50000 };
    (void)state;
    cache_empty("full", folder);
    char *key = key_of("a"), *payload = calloc(BYTES, 1);
    assert_non_null(payload);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        const struct rlimit little = {1000, 1000};
        signal(SIGXFSZ, SIG_IGN);
        if (setrlimit(RLIMIT_FSIZE, &little)) _exit(2);
        opencl_cache_store(key, payload, BYTES);
        _exit(has_payload(key, payload, BYTES));
    }
    int result = -1;
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_true(WIFEXITED(result));
    assert_int_equal(WEXITSTATUS(result), 0);
    assert_int_equal(folder_files(folder, NULL, NULL), 0);
    opencl_cache_store(key, payload, BYTES);
    assert_true(has_payload(key, payload, BYTES));
    free(payload);
    free(key);
}

static void test_size_limit(void **state)
{
    (void)state;
    enum { ENTRIES = 6, BYTES = 300 << 10 };
    char *keys[ENTRIES], *payload = calloc(BYTES, 1), what[2] = "a", path[8192];
    struct timespec pause = {0, 20000000};
    assert_non_null(payload);
    cache_empty("limit", folder);
    setenv("CLATTN_CACHE_SIZE", "1", 1);
    for (int i = 0; i < ENTRIES; i++, what[0]++) {
        keys[i] = key_of(what);
        opencl_cache_store(keys[i], payload, BYTES);
        nanosleep(&pause, NULL);
        assert_true(has_payload(keys[0], payload, BYTES)); /* in use, so it stays */
        nanosleep(&pause, NULL);
    }
    assert_int_equal(folder_files(folder, NULL, NULL), 3);
    assert_true(has_payload(keys[ENTRIES - 1], payload, BYTES));
    assert_false(has_payload(keys[1], payload, BYTES));

    /* What a writer that died left behind goes after an hour; files of others stay. */
    const struct timespec old[2] = {{time(NULL) - 7200, 0}, {time(NULL) - 7200, 0}};
    const char *const names[] = {".tmp-1-2-3", ".tmp-4-5-6", "notes.txt"};
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        close(open(path, O_CREAT | O_WRONLY, 0600));
        if (i != 1) utimensat(AT_FDCWD, path, old, 0);
    }
    opencl_cache_store(keys[1], payload, BYTES);
    assert_int_equal(folder_files(folder, NULL, NULL), 3 + 2);

    char *large = calloc(2 << 20, 1);
    assert_non_null(large);
    opencl_cache_store(keys[2], large, 2 << 20); /* more than all of the cache: not kept */
    assert_int_equal(folder_files(folder, NULL, NULL), 3 + 2);
    setenv("CLATTN_CACHE_SIZE", "0", 1);
    assert_false(has_payload(keys[1], payload, BYTES));
    unsetenv("CLATTN_CACHE_SIZE");
    assert_true(has_payload(keys[1], payload, BYTES));
    for (int i = 0; i < ENTRIES; i++)
        free(keys[i]);
    free(large);
    free(payload);
}

/* One writer and reader of three entries. Any payload that is found must be whole. */
static int hammer(int process)
{
    enum { BYTES = 50000 };
    char *payload = malloc(BYTES), what[2] = "a";
    int wrong = payload == NULL;
    for (int i = 0; i < 60 && !wrong; i++) {
        what[0] = (char)('a' + i % 3);
        char *key = key_of(what);
        size_t bytes = 0;
        unsigned char *have = opencl_cache_load(key, &bytes);
        if (have && bytes != BYTES) wrong = 1;
        for (size_t j = 0; have && !wrong && j < bytes; j++)
            wrong = have[j] != have[0];
        free(have);
        memset(payload, process * 16 + i % 16, BYTES);
        opencl_cache_store(key, payload, BYTES);
        if (i % 7 == 0) opencl_cache_drop(key);
        free(key);
    }
    free(payload);
    return wrong;
}

static void test_many_processes(void **state)
{
    (void)state;
    enum { PROCESSES = 16 };
    pid_t children[PROCESSES];
    cache_empty("processes", folder);
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) _exit(hammer(i));
    }
    for (int i = 0; i < PROCESSES; i++) {
        int result = -1;
        assert_int_equal(waitpid(children[i], &result, 0), children[i]);
        assert_true(WIFEXITED(result));
        assert_int_equal(WEXITSTATUS(result), 0);
    }
    assert_in_range(folder_files(folder, NULL, NULL), 0, 3); /* no temporary is left */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cold_and_warm),  cmocka_unit_test(test_keys_differ),
        cmocka_unit_test(test_truncated),      cmocka_unit_test(test_bit_flipped),
        cmocka_unit_test(test_foreign),        cmocka_unit_test(test_unusable_folders),
        cmocka_unit_test(test_read_only),      cmocka_unit_test(test_size_limit),
        cmocka_unit_test(test_many_processes), cmocka_unit_test(test_full),
    };
    return cmocka_run_group_tests_name("opencl_cache", tests, NULL, NULL);
}

#else

int main(void)
{
    puts("skipped: built without xxHash, so there is no program cache");
    return 77;
}

#endif
