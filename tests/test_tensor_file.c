/* SPDX-License-Identifier: MIT
 *
 * The program's file formats: what must be read, and what must be refused and with which words. */
#include "config.h"

#include "bench/tensor_file.h"
#include "bench/tensor_format.h"

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

#define ANY REQUEST_ANY
#define F32 REQUEST_FLOAT32
#define F16 REQUEST_FLOAT16
#define BF16 REQUEST_BFLOAT16

static char folder[] = "/tmp/clattn-test-XXXXXX";

static const char *in_folder(const char *name)
{
    static char path[2][256];
    static int turn;
    turn = !turn;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

static void write_file(const char *path, const void *bytes, size_t size)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

/* A .npy file: magic, version, length of the header (-1: the right one), header, `elements` bytes 0, 1, 2 ...
 */
static size_t make_npy(unsigned char *bytes, int version, long length, const char *header, size_t elements)
{
    size_t text = strlen(header), start = version == 1 ? 10 : 12;
    if (length < 0) length = (long)text;
    memcpy(bytes, "\x93NUMPY", 6);
    bytes[6] = (unsigned char)version;
    bytes[7] = 0;
    for (size_t i = 8; i < start; i++)
        bytes[i] = (unsigned char)((unsigned long)length >> (8 * (i - 8)));
    memcpy(bytes + start, header, text);
    for (size_t i = 0; i < elements; i++)
        bytes[start + text + i] = (unsigned char)i;
    return start + text + elements;
}

static size_t make_safetensors(unsigned char *bytes, long long length, const char *header, size_t elements)
{
    size_t text = strlen(header);
    if (length < 0) length = (long long)text;
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)((unsigned long long)length >> (8 * i));
    memcpy(bytes + 8, header, text);
    for (size_t i = 0; i < elements; i++)
        bytes[8 + text + i] = (unsigned char)i;
    return 8 + text + elements;
}

static const struct {
    int version;
    const char *header;
    enum element_request request;
    enum element_type type;
    int rank;
    int64_t shape[4];
} good_npy[] = {
    {1,
     "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 4), }   \n",
     ANY,
     ELEMENT_FLOAT32,
     3,
     {2, 3, 4}},
    {1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 4), }\n", F32, ELEMENT_FLOAT32, 3, {2, 3, 4}},
    {2,
     "{'descr': '<f2', 'fortran_order': False, 'shape': (1, 2, 3, 4), }\n",
     ANY,
     ELEMENT_FLOAT16,
     4,
     {1, 2, 3, 4}},
    {3, "{\"descr\": \"<f2\", \"shape\": (5,), \"fortran_order\": False}", F16, ELEMENT_FLOAT16, 1, {5}},
    {1, "{'shape':(2,2),'fortran_order':False,'descr':'<u2'}", BF16, ELEMENT_BFLOAT16, 2, {2, 2}},
    {1, "{'shape':(2,2),'fortran_order':False,'descr':'<V2'}", BF16, ELEMENT_BFLOAT16, 2, {2, 2}},
    {1, "{'descr': '<i4', 'fortran_order': False, 'shape': (7L, 1L)}", ANY, ELEMENT_INT32, 2, {7, 1}},
    /* One dimension has no order. */
    {1, "{'descr': '<f4', 'fortran_order': True, 'shape': (3,), }", ANY, ELEMENT_FLOAT32, 1, {3}},
};

/* The file's elements are little-endian, those in memory the machine's. */
static void assert_elements(const struct tensor_file *file, const unsigned char *bytes)
{
    const uint16_t *halves = file->data;
    const uint32_t *words = file->data;
    for (uint64_t i = 0; i < file->elements; i++, bytes += element_size(file->type)) {
        uint32_t want = bytes[0] | (uint32_t)bytes[1] << 8;
        if (element_size(file->type) == 4) want |= (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
        assert_int_equal(element_size(file->type) == 4 ? words[i] : halves[i], want);
    }
}

static void reads_npy(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof good_npy / sizeof *good_npy; i++) {
        unsigned char bytes[512];
        struct tensor_file file;
        uint64_t elements = 1;
        for (int d = 0; d < good_npy[i].rank; d++)
            elements *= (uint64_t)good_npy[i].shape[d];
        size_t data = (size_t)elements * element_size(good_npy[i].type);
        size_t size = make_npy(bytes, good_npy[i].version, -1, good_npy[i].header, data);
        write_file(in_folder("good.npy"), bytes, size);
        if (tensor_file_open(&file, in_folder("good.npy"), good_npy[i].request) != 0)
            fail_msg("%s: %s", good_npy[i].header, file.error);
        assert_int_equal(file.type, good_npy[i].type);
        assert_int_equal(file.rank, good_npy[i].rank);
        assert_memory_equal(file.shape, good_npy[i].shape, (size_t)file.rank * sizeof *file.shape);
        assert_true(file.elements == elements);
        assert_elements(&file, bytes + size - data);
        assert_true((uintptr_t)file.data % element_size(file.type) == 0);
        tensor_file_close(&file);
    }
}

#define HEAD "{'descr': '<f4', 'fortran_order': False, 'shape': "

/* Elements: bytes after the header. Words: must be in the message. */
static const struct {
    int version;
    long length;
    const char *header;
    size_t elements;
    enum element_request request;
    const char *words;
} bad_npy[] = {
    {1, -1, HEAD "(2, 3), }", 23, ANY, "truncated"},
    {1, -1, HEAD "(2, 3), }", 0, ANY, "truncated"},
    {1, -1, HEAD "(2, 3), }", 25, ANY, "1 bytes too many"},
    {1, 2000, HEAD "(2, 3), }", 24, ANY, "truncated: the header"},
    {2, 0x7fffffff, HEAD "(2, 3), }", 24, ANY, "truncated: the header"},
    {2, 0xffffffff, HEAD "(2, 3), }", 24, ANY, "truncated: the header"},
    {1, 20, HEAD "(2, 3), }", 24, ANY, "corrupt .npy header"},
    {1, 0, HEAD "(2, 3), }", 24, ANY, "corrupt .npy header"},
    {4, -1, HEAD "(2, 3), }", 24, ANY, "version 4.0"},
    {0, -1, HEAD "(2, 3), }", 24, ANY, "version 0.0"},
    {1, -1, HEAD "(0, 3), }", 0, ANY, "dimension 0 of the shape is 0"},
    {1, -1, HEAD "(2, -3), }", 24, ANY, "negative"},
    {1, -1, HEAD "(), }", 4, ANY, "single number"},
    {1, -1, HEAD "(6), }", 24, ANY, "not a tuple"},
    {1, -1, HEAD "6, }", 24, ANY, "'('"},
    {1, -1, HEAD "(2 3), }", 24, ANY, "','"},
    {1, -1, HEAD "(2, 3", 24, ANY, "corrupt .npy header"},
    {1, -1, HEAD "(2, 3)", 24, ANY, "corrupt .npy header"},
    {1, -1, HEAD "(2.0, 3), }", 24, ANY, "corrupt .npy header"},
    {1, -1, HEAD "(0x2, 3), }", 24, ANY, "corrupt .npy header"},
    {1, -1, HEAD "(,), }", 24, ANY, "not a tuple"},
    {1, -1, HEAD "(1,1,1,1,1,1,1,1,1), }", 4, ANY, "more than 8 dimensions"},
    {1, -1, HEAD "(4611686018427387904, 4), }", 24, ANY, "too large"},
    {1, -1, HEAD "(9223372036854775807,), }", 24, ANY, "too large"},
    {1, -1, HEAD "(99999999999999999999999999,), }", 24, ANY, "too large"},
    {1, -1, HEAD "(4294967296, 4294967296, 4294967296), }", 24, ANY, "too large"},
    {1, -1, HEAD "(1099511627776,), }", 24, ANY, "truncated"},
    {1, -1, HEAD "(2, 3), } {}", 24, ANY, "after the dictionary"},
    {1, -1, HEAD "(2, 3), 'x': 1}", 24, ANY, "unknown key 'x'"},
    {1, -1, HEAD "(2, 3), 'shape': (2, 3)}", 24, ANY, "'shape' is there twice"},
    {1, -1, "{'descr': '<f4', 'fortran_order': False}", 24, ANY, "'shape' is missing"},
    {1, -1, "{'shape': (2, 3), 'fortran_order': False}", 24, ANY, "'descr' is missing"},
    {1, -1, "{'descr': '<f4', 'shape': (2, 3)}", 24, ANY, "'fortran_order' is missing"},
    {1, -1, "{}", 24, ANY, "missing"},
    {1, -1, "", 24, ANY, "corrupt .npy header"},
    {1, -1, "[1]", 24, ANY, "corrupt .npy header"},
    {1, -1, "{'descr: '<f4'}", 24, ANY, "corrupt .npy header"},
    {1, -1, "{'descr': '<f4", 24, ANY, "string"},
    {1, -1, "{'de\\x73cr': '<f4'}", 24, ANY, "string"},
    {1, -1, "{'descr': '<f4', 'fortran_order': 0, 'shape': (2, 3), }", 24, ANY, "neither True nor False"},
    {1, -1, "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }", 24, ANY, "Fortran order"},
    {1, -1, "{'descr': '>f4', 'fortran_order': False, 'shape': (2, 3), }", 24, ANY, "big-endian"},
    {1, -1, "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }", 48, ANY, "double precision"},
    {1, -1, "{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }", 48, ANY, "Python objects"},
    {1, -1, "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 3), }", 24, ANY, "records"},
    {1, -1, "{'descr': '', 'fortran_order': False, 'shape': (2, 3), }", 24, ANY, "not supported"},
    {1, -1, "{'descr': '<f4<f4<f4<f4<f4<f4', 'fortran_order': False, 'shape': (2, 3), }", 24, ANY, "string"},
    {1, -1, "{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), }", 12, ANY, "--dtype bf16"},
    {1, -1, "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }", 12, BF16, "--dtype"},
    {1, -1, "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }", 12, F32, "--dtype"},
    {1, -1, "{'descr': '\033[31m', 'fortran_order': False, 'shape': (2, 3), }", 12, ANY, "'?[31m'"},
};

/* The error is one line about `path` that has `words` in it. */
static void assert_refused(const char *spec, enum element_request request, const char *words, const char *what)
{
    struct tensor_file file;
    if (tensor_file_open(&file, spec, request) == 0) fail_msg("taken: %s", what);
    if (!strstr(file.error, words)) fail_msg("%s: '%s' is not in: %s", what, words, file.error);
    if (strpbrk(file.error, "\n\r\033")) fail_msg("%s: not one plain line: %s", what, file.error);
    assert_null(file.map);
    assert_null(file.data);
    tensor_file_close(&file);
}

static void refuses_npy(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_npy / sizeof *bad_npy; i++) {
        unsigned char bytes[512];
        size_t size =
            make_npy(bytes, bad_npy[i].version, bad_npy[i].length, bad_npy[i].header, bad_npy[i].elements);
        write_file(in_folder("bad.npy"), bytes, size);
        assert_refused(in_folder("bad.npy"), bad_npy[i].request, bad_npy[i].words, bad_npy[i].header);
    }
}

/* Every cut of a good file is refused, and each byte flipped is read or refused but never a crash. */
static void survives_cuts_and_flips(void **state)
{
    (void)state;
    static const char *const headers[] = {
        HEAD "(2, 3), }\n", "{\"x\": {\"dtype\": \"F32\", \"shape\": [2, 3], \"data_offsets\": [0, 24]}}"};
    for (int format = 0; format < 2; format++) {
        unsigned char good[512], bytes[512];
        struct tensor_layout layout;
        char error[TENSOR_ERROR_SIZE];
        size_t size =
            format ? make_safetensors(good, -1, headers[1], 24) : make_npy(good, 1, -1, headers[0], 24);
        for (size_t cut = 0; cut < size; cut++) {
            unsigned char *exact = malloc(cut + 1); /* so that a sanitizer sees reads beyond the end */
            memcpy(exact, good, cut);
            memset(&layout, 0, sizeof layout);
            int taken = format ? safetensors_parse(exact, cut, "x", &layout, error)
                               : npy_parse(exact, cut, ANY, &layout, error);
            free(exact);
            if (taken == 0) fail_msg("taken: the first %zu bytes", cut);
        }
        for (size_t at = 0; at < size - 24; at++)
            for (int bit = 0; bit < 8; bit++) {
                memcpy(bytes, good, size);
                bytes[at] ^= (unsigned char)(1 << bit);
                memset(&layout, 0, sizeof layout);
                int taken = format ? safetensors_parse(bytes, size, "x", &layout, error)
                                   : npy_parse(bytes, size, ANY, &layout, error);
                if (taken == 0)
                    assert_true(layout.offset <= size && layout.elements * 2 <= size - layout.offset);
            }
    }
}

static void refuses_other_files(void **state)
{
    (void)state;
    assert_refused("", ANY, "empty file name", "no name");
    assert_refused(in_folder("missing.npy"), ANY, "No such file", "missing");
    assert_refused(folder, ANY, "is a directory", "directory");
    assert_refused("/dev/null", ANY, "not a regular file", "device");
    write_file(in_folder("other"), "", 0);
    assert_refused(in_folder("other"), ANY, "is empty", "empty");
    write_file(in_folder("other"), "PK\3\4....", 8);
    assert_refused(in_folder("other"), ANY, "archive", "zip");
    write_file(in_folder("other"), "hello, world", 12);
    assert_refused(in_folder("other"), ANY, "not a .npy file", "text");
    write_file(in_folder("other"), "\x93NUM", 4);
    assert_refused(in_folder("other"), ANY, "truncated", "start of the magic");
    write_file(in_folder("other"), "\x93NUMPY\2\0\1\0", 10);
    assert_refused(in_folder("other"), ANY, "truncated", "start of version 2");
    assert_int_equal(mkfifo(in_folder("pipe"), 0600), 0);
    assert_refused(in_folder("pipe"), ANY, "not a regular file", "pipe");
    assert_refused(in_folder("line\nbreak.npy"), ANY, "line?break.npy", "line break in the name");
}

#ifdef HAVE_JANSSON

#define ENTRY(type, shape, begin, end)                                                                         \
    "{\"x\": {\"dtype\": \"" type "\", \"shape\": " shape ", \"data_offsets\": [" begin ", " end "]}}"

static const struct {
    const char *name, *header;
    long long length;
    size_t elements;
    const char *words;
} bad_safetensors[] = {
    {"x", ENTRY("F32", "[2, 3]", "0", "24"), -1, 23, "truncated"},
    {"x", ENTRY("F32", "[2, 3]", "0", "24"), -1, 25, "1 bytes too many"},
    {"x", ENTRY("F32", "[2, 3]", "0", "24"), 1000, 24, "truncated: the header"},
    {"x", ENTRY("F32", "[2, 3]", "0", "24"), 0x7fffffffffffffff, 24, "not a safetensors file"},
    {"x", ENTRY("F32", "[2, 3]", "0", "24"), 20, 24, "corrupt safetensors header"},
    {"x", ENTRY("F32", "[2, 3]", "0", "24"), 0, 24, "corrupt safetensors header"},
    {"x", ENTRY("F32", "[2, 3]", "0", "20"), -1, 20, "20 bytes, its shape needs 24"},
    {"x", ENTRY("F32", "[2, 3]", "-4", "20"), -1, 24, "not a range"},
    {"x", ENTRY("F32", "[2, 3]", "24", "0"), -1, 24, "not a range"},
    {"x", ENTRY("F32", "[2, 3]", "0", "9223372036854775807"), -1, 24, "truncated"},
    {"x", ENTRY("F32", "[2, 3]", "0", "92233720368547758070"), -1, 24, "corrupt"},
    {"x", ENTRY("F32", "[2, 3]", "0.0", "24.0"), -1, 24, "no data_offsets"},
    {"x", ENTRY("F32", "[2, 0]", "0", "0"), -1, 0, "dimension 1 of the shape is 0"},
    {"x", ENTRY("F32", "[2, -3]", "0", "24"), -1, 24, "dimension 1 of the shape is -3"},
    {"x", ENTRY("F32", "[]", "0", "4"), -1, 4, "single number"},
    {"x", ENTRY("F32", "[2.5, 3]", "0", "24"), -1, 24, "list of integers"},
    {"x", ENTRY("F32", "\"2, 3\"", "0", "24"), -1, 24, "no shape"},
    {"x", ENTRY("F32", "[4294967296, 4294967296, 4294967296]", "0", "24"), -1, 24, "too large"},
    {"x", ENTRY("F32", "[1,1,1,1,1,1,1,1,6]", "0", "24"), -1, 24, "more than 8"},
    {"x", ENTRY("F64", "[2, 3]", "0", "48"), -1, 48, "element type F64"},
    {"y", ENTRY("F32", "[2, 3]", "0", "24"), -1, 24, "has no tensor 'y'; it holds x"},
    {"", ENTRY("F32", "[2, 3]", "0", "24"), -1, 24, "needs a tensor's name"},
    {NULL, ENTRY("F32", "[2, 3]", "0", "24"), -1, 24, "needs a tensor's name"},
    {"__metadata__", "{\"__metadata__\": {}}", -1, 0, "holds no tensors"},
    {"x", "{}", -1, 0, "holds no tensors"},
    {"x", "[]", -1, 0, "not a JSON object"},
    {"x", "{\"x\": 1}", -1, 0, "no data_offsets"},
    {"x", "{\"x\": {\"shape\": [2], \"data_offsets\": [0, 8]}}", -1, 8, "no dtype"},
    {"x", "{\"x\": {}, \"x\": {}}", -1, 0, "duplicate"},
    {"x", "{\"x\": ", -1, 0, "corrupt safetensors header"},
    {"x",
     "{\"x\": {\"dtype\": \"F32\", \"shape\": [2], \"data_offsets\": [0, 8]}, "
     "\"y\": {\"dtype\": \"F32\", \"shape\": [2], \"data_offsets\": [8, 16]}}",
     -1, 8, "truncated: 'y'"},
};

static void refuses_safetensors(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_safetensors / sizeof *bad_safetensors; i++) {
        unsigned char bytes[512];
        char spec[512];
        write_file(in_folder("bad.safetensors"), bytes,
                   make_safetensors(bytes, bad_safetensors[i].length, bad_safetensors[i].header,
                                    bad_safetensors[i].elements));
        snprintf(spec, sizeof spec, "%s%s%s", in_folder("bad.safetensors"), bad_safetensors[i].name ? ":" : "",
                 bad_safetensors[i].name ? bad_safetensors[i].name : "");
        assert_refused(spec, ANY, bad_safetensors[i].words, bad_safetensors[i].header);
    }
    write_file(in_folder("bad.safetensors"), "\1\0\0", 3);
    assert_refused(in_folder("bad.safetensors:x"), ANY, "truncated", "three bytes");
}

/* Both tensors, whatever the alignment of the header. */
static void reads_safetensors(void **state)
{
    (void)state;
    for (int padding = 0; padding < 8; padding++) {
        unsigned char bytes[512], expected[24];
        char header[300];
        struct tensor_file file;
        snprintf(header, sizeof header,
                 "{\"__metadata__\": {\"format\": \"pt\"},"
                 " \"a:b\": {\"dtype\": \"BF16\", \"shape\": [3], \"data_offsets\": [0, 6]},"
                 " \"x\": {\"dtype\": \"F32\", \"shape\": [2, 3], \"data_offsets\": [6, 30]}}%*s",
                 padding, "");
        write_file(in_folder("good.safetensors"), bytes, make_safetensors(bytes, -1, header, 30));
        assert_int_equal(tensor_file_open(&file, in_folder("good.safetensors:x"), ANY), 0);
        assert_int_equal(file.type, ELEMENT_FLOAT32);
        assert_int_equal(file.rank, 2);
        assert_true(file.shape[0] == 2 && file.shape[1] == 3);
        assert_true((uintptr_t)file.data % 4 == 0);
        for (int i = 0; i < 24; i++)
            expected[i] = (unsigned char)(6 + i);
        assert_elements(&file, expected);
        tensor_file_close(&file);
        assert_int_equal(tensor_file_open(&file, in_folder("good.safetensors:a:b"), ANY), 0);
        assert_int_equal(file.type, ELEMENT_BFLOAT16);
        assert_true(file.elements == 3);
        tensor_file_close(&file);
    }
}

#endif

static void counts_values(void **state)
{
    (void)state;
    static const float f32[] = {0, 1, -__builtin_inff(), __builtin_nanf(""), -__builtin_nanf("")};
    static const uint16_t f16[] = {0x3c00, 0x7c00, 0xfc00, 0x7c01, 0xfe00, 0x7bff};
    static const uint16_t bf16[] = {0x3f80, 0x7f80, 0xff81, 0x7fc0, 0x7f7f};
    struct tensor_file file = {.data = f32, .elements = 5, .type = ELEMENT_FLOAT32};
    struct tensor_values count = tensor_file_count(&file);
    assert_true(count.nan == 2 && count.infinite == 1);
    file = (struct tensor_file){.data = f16, .elements = 6, .type = ELEMENT_FLOAT16};
    count = tensor_file_count(&file);
    assert_true(count.nan == 2 && count.infinite == 2);
    file = (struct tensor_file){.data = bf16, .elements = 5, .type = ELEMENT_BFLOAT16};
    count = tensor_file_count(&file);
    assert_true(count.nan == 2 && count.infinite == 1);
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
        cmocka_unit_test(reads_npy),
        cmocka_unit_test(refuses_npy),
        cmocka_unit_test(survives_cuts_and_flips),
        cmocka_unit_test(refuses_other_files),
#ifdef HAVE_JANSSON
        cmocka_unit_test(refuses_safetensors),
        cmocka_unit_test(reads_safetensors),
#endif
        cmocka_unit_test(counts_values),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
