/* SPDX-License-Identifier: MIT */
/* The quirk table and the user's file that is read after it, on an OpenCL that computes nothing: platform
 * "fake", device "fake GPU", driver "1", version "OpenCL 1.2". */

#include "config.h"

#include "fake_opencl.h"
#include "lib/opencl.h" /* before CMocka, whose `fail` is a macro */

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* Below the folder of caches, which is there. */
static const char path[] = "tests/cache/clattn/quirks.conf";

static void file_write(const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static struct opencl_device device_with(const char *text)
{
    struct opencl_device device;
    file_write(text);
    setenv("CLATTN_QUIRKS", path, 1);
    assert_true(opencl_device_at(0, &device));
    return device;
}

static void test_sections(void **state)
{
    (void)state;
    struct opencl_device plain = device_with("");
    assert_int_equal(plain.quirks, 0);
    assert_int_equal(plain.tier_limit, OPENCL_TIERS - 1);
    assert_string_equal(plain.quirk_text, "");

    struct opencl_device device =
        device_with("# a comment\n\n[first]\n platform = FAKE\n\tquirks=group-report,one-thread \r\n"
                    "[other]\nplatform = rusticl\nquirks = fp16-hidden\n"
                    "[second]\ndevice = fake gpu\ndriver = 1\nversion = 1.2\n"
                    "quirks = -group-report local-doubled\ntier = portable\nlocal = 8192\n"
                    "items = 64\n[third]\ndevice = fake\ndriver = 2\ntier = portable\n");
    assert_int_equal(device.quirks, OPENCL_QUIRK_ONE_THREAD | OPENCL_QUIRK_LOCAL_DOUBLED);
    assert_int_equal(device.tier_limit, 0);
    assert_int_equal(device.local_bytes, 8192);
    assert_int_equal(device.group_max, 64);
    assert_string_equal(
        device.quirk_text,
        "first (platform = FAKE): quirks = group-report,one-thread; second (device = fake gpu, driver = 1, "
        "version = 1.2): quirks = -group-report local-doubled, tier = portable, local = 8192, items = 64");
    assert_string_equal(device.quirk_errors, "");

    device = device_with("[more than there is]\nlocal = 99999999\nitems = 99999999\n");
    assert_int_equal(device.local_bytes, plain.local_bytes);
    assert_int_equal(device.group_max, plain.group_max);
}

/* Lines that mean nothing do nothing, and are named. */
static void test_errors(void **state)
{
    static const char *const wrong[] = {
        "platform = fake\n",  "[a]\nno line\n",    "[a]\nquirk = one-thread\n", "[a]\nquirks = two-threads\n",
        "[a]\ntier = best\n", "[a]\nlocal = -1\n", "[a]\nitems = 0\n",          "[a]\nitems = 64k\n",
        "[a\nitems = 64\n"};
    (void)state;
    struct opencl_device plain = device_with("");
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct opencl_device device = device_with(wrong[i]);
        if (!strstr(device.quirk_errors, path)) fail_msg("nothing is said of: %s", wrong[i]);
        assert_int_equal(device.quirks, plain.quirks);
        assert_int_equal(device.local_bytes, plain.local_bytes);
        assert_int_equal(device.group_max, plain.group_max);
        assert_int_equal(device.tier_limit, plain.tier_limit);
    }
}

/* The variable's file, else the user's folder; an empty name is none. */
static void test_places(void **state)
{
    (void)state;
    char folder[4096];
    const char *mine = "mine (any device): quirks = one-thread";
    struct opencl_device device = device_with("[mine]\nquirks = one-thread\n");
    assert_string_equal(device.quirk_text, mine);
    setenv("CLATTN_QUIRKS", "", 1);
    assert_true(opencl_device_at(0, &device));
    assert_string_equal(device.quirk_text, "");
    unsetenv("CLATTN_QUIRKS");
    const char *here = getenv("PWD");
    assert_non_null(here);
    snprintf(folder, sizeof folder, "%s/tests/cache", here);
    setenv("XDG_CONFIG_HOME", folder, 1);
    assert_true(opencl_device_at(0, &device));
    assert_string_equal(device.quirk_text, mine);
    setenv("XDG_CONFIG_HOME", "/dev/null/no", 1);
    assert_true(opencl_device_at(0, &device));
    assert_string_equal(device.quirk_text, "");
    setenv("CLATTN_QUIRKS", path, 1);
}

static char said[4096];

static void log_keep(void *user, clattn_log_level level, const char *message)
{
    (void)user, (void)level;
    strncat(said, message, sizeof said - strlen(said) - 1);
}

/* A context says what applies, and a limited tier is a decision with a reason. */
static void test_log(void **state)
{
    (void)state;
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    file_write("[of this test]\nplatform = fake\nquirks = one-thread nonsense\nitems = 64\n");
    desc.backend = CLATTN_BACKEND_OPENCL;
    desc.log = log_keep;
    desc.log_level = CLATTN_LOG_INFO;
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
    assert_non_null(strstr(said, "of this test (platform = fake): quirks = one-thread nonsense, items = 64"));
    assert_non_null(strstr(said, "there is no quirk 'nonsense'"));
    clattn_device_info info = {.size = sizeof info}; /* what `clattn doctor` shows */
    assert_int_equal(clattn_context_device(context, &info), CLATTN_SUCCESS);
    assert_non_null(strstr(info.quirks, "of this test (platform = fake): quirks = one-thread nonsense"));
    assert_non_null(
        strstr(info.quirks, "not understood: tests/cache/clattn/quirks.conf:3: there is no quirk 'nonsense'"));
    clattn_context_release(context);
}

/* A tier that the device lists and that computes wrongly, as this OpenCL does, is not used, and the log says
 * why. */
static void test_failing_tier(void **state)
{
    (void)state;
    char error[1024] = "";
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_device_info info = {.size = sizeof info};
    fake.extensions = "cl_khr_fp64 cl_intel_subgroups cl_intel_required_subgroup_size";
    file_write("");
    desc.backend = CLATTN_BACKEND_OPENCL;
    desc.log = log_keep;
    desc.log_level = CLATTN_LOG_WARNING;
    desc.error = error;
    desc.error_bytes = sizeof error;
    said[0] = 0;
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
    assert_int_equal(clattn_context_device(context, &info), CLATTN_SUCCESS);
    assert_string_equal(info.variants, "portable subgroup");
    assert_string_equal(info.variant, "portable");
    assert_non_null(strstr(said, "tier subgroup is not used"));
    assert_non_null(strstr(said, "canary_subgroup with 16 lanes: element 0 is 0, must be 16"));
    clattn_context_release(context);

    desc.variant = "subgroup"; /* nothing else will do */
    assert_int_equal(clattn_context_create(&desc, &context), CLATTN_NO_DEVICE);
    assert_non_null(strstr(error, "subgroup"));

    static const char *const quirks[] = {"[a]\nquirks = no-subgroups\n", "[a]\ntier = portable\n"};
    desc.variant = NULL;
    for (int i = 0; i < 2; i++) {
        file_write(quirks[i]);
        said[0] = 0;
        assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
        assert_int_equal(clattn_context_device(context, &info), CLATTN_SUCCESS);
        assert_string_equal(info.variants, "portable");
        assert_null(strstr(said, "subgroup"));
        clattn_context_release(context);
    }
    fake.extensions = NULL;
}

#ifdef HAVE_XXHASH
static const char *deadly_kernel;

static void die(const char *kernel, const char *source, const char *options)
{
    (void)source, (void)options;
    if (strcmp(kernel, deadly_kernel) == 0) _exit(3); /* what a crash of the compiler does */
}

static int hanging[2]; /* a pipe on which the child says that it hangs */

static void hang(const char *kernel, const char *source, const char *options)
{
    (void)source, (void)options;
    if (strcmp(kernel, deadly_kernel)) return;
    if (write(hanging[1], "", 1) == 1)
        for (;;)
            pause();
}

/* A process whose compiler crashes or hangs; the latter is ended by the user. */
static void lose_process(clattn_backend backend, bool hangs)
{
    clattn_context *context = NULL;
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    int result = -1;
    desc.backend = backend;
    assert_int_equal(pipe(hanging), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        fake.on_kernel = hangs ? hang : die;
        clattn_context_create(&desc, &context);
        _exit(0);
    }
    if (hangs) {
        char byte;
        close(hanging[1]);
        assert_int_equal(read(hanging[0], &byte, 1), 1); /* 0: it came to its end */
        kill(child, SIGKILL);
    } else {
        close(hanging[1]);
    }
    close(hanging[0]);
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_true(hangs ? WIFSIGNALED(result) : WIFEXITED(result) && WEXITSTATUS(result) == 3);
}

/* What two processes did not survive is left alone by those after them; one may have been ended for other
 * reasons. */
static void test_crashing_tier(void **state)
{
    static const struct {
        clattn_backend backend;
        const char *extensions, *kernel, *message, *variant; /* that is used instead; NULL: the CPU */
        cl_uint vendor_id, nvidia_generation;
        bool hangs;
    } cases[] = {
        {CLATTN_BACKEND_OPENCL, "cl_intel_subgroups cl_intel_required_subgroup_size", "canary_subgroup",
         "tier subgroup is not used", "portable", 0, 0, false},
        {CLATTN_BACKEND_OPENCL, "cl_intel_subgroups cl_intel_required_subgroup_size", "canary_subgroup",
         "tier subgroup is not used", "portable", 0, 0, true},
        {CLATTN_BACKEND_OPENCL, NULL, "canary_mma", "tier mma is not used", "portable", 0x10de, 8, false},
        {CLATTN_BACKEND_AUTO, NULL, "attention_forward",
         "ended or hung while they tried self-test of tier portable", NULL, 0, 0, false},
    };
    char folder[64];
    (void)state;
    unsetenv("CLATTN_CACHE_SIZE");
    assert_int_equal(system("rm -rf tests/cache/trial?"), 0); /* what a failure left */
    file_write("");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        clattn_context *context = NULL;
        clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
        clattn_device_info info = {.size = sizeof info};
        snprintf(folder, sizeof folder, "tests/cache/trial%d", (int)i);
        mkdir(folder, 0700);
        setenv("CLATTN_CACHE_DIR", folder, 1);
        fake.extensions = cases[i].extensions;
        fake.vendor_id = cases[i].vendor_id;
        fake.nvidia_generation = cases[i].nvidia_generation;
        deadly_kernel = cases[i].kernel;
        lose_process(cases[i].backend, cases[i].hangs);
        lose_process(cases[i].backend, cases[i].hangs); /* tried again, once */
        desc.backend = cases[i].backend;
        desc.log = log_keep;
        desc.log_level = CLATTN_LOG_WARNING;
        fake.on_kernel = die; /* so it is not even tried */
        for (int round = 0; round < 2; round++) {
            said[0] = 0;
            assert_int_equal(clattn_context_create(&desc, &context), CLATTN_SUCCESS);
            assert_int_equal(clattn_context_device(context, &info), CLATTN_SUCCESS);
            if (cases[i].variant)
                assert_string_equal(info.variant, cases[i].variant);
            else
                assert_int_equal(info.backend, CLATTN_BACKEND_CPU);
            assert_non_null(strstr(said, cases[i].message));
            assert_non_null(strstr(said, "ended or hung while they tried"));
            clattn_context_release(context);
        }
        fake.on_kernel = NULL;
    }
    fake.extensions = NULL;
    fake.vendor_id = fake.nvidia_generation = 0;
    setenv("CLATTN_CACHE_SIZE", "0", 1);
    assert_int_equal(system("rm -rf tests/cache/trial?"), 0);
}
#endif

int main(void)
{
    setenv("CLATTN_CACHE_SIZE", "0", 1);
    unsetenv("CLATTN_TIER");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sections),      cmocka_unit_test(test_errors),
        cmocka_unit_test(test_places),        cmocka_unit_test(test_log),
        cmocka_unit_test(test_failing_tier),
#ifdef HAVE_XXHASH
        cmocka_unit_test(test_crashing_tier),
#endif
    };
    int failures = cmocka_run_group_tests_name("opencl_quirks", tests, NULL, NULL);
    unlink(path);
    return failures;
}
