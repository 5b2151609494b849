#!/bin/sh
# SPDX-License-Identifier: MIT
# The installed program and library on machines unlike the builder's: without any OpenCL driver, with a HOME that cannot
# be written or none, in locales with a decimal comma; and what else is installed: manual pages, completion, sample.
set -u
unset MAKEFLAGS MFLAGS MAKELEVEL # not a part of the make that runs the tests
: "${srcdir:?}" "${prefix:?}"
work=$PWD/tests/installed.work
rm -rf "$work"
mkdir -p "$work/empty" "$work/locale"
root=$work/root
failures=0
missing=''

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

$MAKE install DESTDIR="$root" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
program=$(find "$root" -path '*/bin/clattn')
share=$(dirname "$(find "$root" -type d -name man | head -n 1)")
libdir=$(dirname "$(find "$root" -name 'libclattn.*' ! -name '*.la' ! -name '*.3' | head -n 1)")
sample=$(dirname "$(find "$root" -name q.npy)")
[ -x "$program" ] && [ -e "$share/man/man1/clattn.1" ] && [ -d "$sample" ] || { fail 'the installation'; exit 1; }

# bare WORD... : runs it with next to no environment
bare() {
    env -i PATH="$PATH" LD_LIBRARY_PATH="$libdir" ASAN_OPTIONS="${ASAN_OPTIONS-}" LSAN_OPTIONS="${LSAN_OPTIONS-}" \
        OMP_WAIT_POLICY=passive POCL_CACHE_DIR="$POCL_CACHE_DIR" "$@"
}

# ---- no OpenCL driver, no HOME, a HOME that nobody can write
none="OCL_ICD_VENDORS=$work/empty OCL_ICD_FILENAMES= OPENCL_VENDOR_PATH=$work/empty"
for home in -u\ HOME HOME=/dev/null/none HOME=/proc; do
    case $home in -u*) set -- $none ;; *) set -- "$home" $none ;; esac
    bare "$@" "$program" info > "$work/info" 2> "$work/stderr" || fail "clattn info ($home): $(cat "$work/stderr")"
    grep -q -i reference "$work/info" && [ ! -s "$work/stderr" ] || fail "clattn info ($home): $(cat "$work/stderr")"
done
bare HOME=/proc $none "$program" run --q "$sample/q.npy" --k "$sample/k.npy" --v "$sample/v.npy" --topk 2 \
    --out "$work/out.npy" > "$work/said" 2>&1 || fail "clattn run: $(cat "$work/said")"
[ -s "$work/out.npy" ] || fail 'clattn run wrote nothing'
status=0
bare $none "$program" check --quick --backend opencl > "$work/said" 2>&1 || status=$?
[ $status = 77 ] || fail "clattn check --backend opencl without a driver: status $status instead of 77: $(cat "$work/said")"

# ---- locales: the same numbers, byte for byte, where the decimal point is a comma
cat > "$work/program.c" <<'PROGRAM'
#include <clattn.h>
#include <locale.h>
#include <stdio.h>
#include <string.h>
#define LEN 256
static float q[LEN * 64], k[LEN * 64], v[LEN * 64], out[LEN * 64];
int main(int argc, char **argv)
{
    clattn_context_desc desc = CLATTN_CONTEXT_DESC_INIT;
    clattn_context *context = NULL;
    if (!setlocale(LC_ALL, "") || argc < 3) return 3;
    if (strcmp(localeconv()->decimal_point, argv[1]) != 0) return 4; /* not the locale that is to be tested */
    desc.backend = strcmp(argv[2], "cpu") == 0 ? CLATTN_BACKEND_CPU : CLATTN_BACKEND_OPENCL;
    for (int i = 0; i < LEN * 64; i++) {
        q[i] = (float)(i * 37 % 101) / 101;
        k[i] = (float)(i * 53 % 97) / 97;
        v[i] = (float)(i * 71 % 89) / 89;
    }
    clattn_tensor qt = clattn_tensor_bthd(q, CLATTN_FLOAT32, 1, LEN, 1, 64);
    clattn_tensor kt = clattn_tensor_bthd(k, CLATTN_FLOAT32, 1, LEN, 1, 64);
    clattn_tensor vt = clattn_tensor_bthd(v, CLATTN_FLOAT32, 1, LEN, 1, 64);
    clattn_tensor ot = clattn_tensor_bthd(out, CLATTN_FLOAT32, 1, LEN, 1, 64);
    clattn_status status = clattn_context_create(&desc, &context);
    if (status == CLATTN_NO_DEVICE) return 77;
    if (!status) status = clattn_attention(context, NULL, NULL, &qt, &kt, &vt, &ot, NULL, NULL);
    if (status) return fprintf(stderr, "%s\n", clattn_strerror(status)), 1;
    for (int i = 0; i < LEN * 64; i++) {
        unsigned bits;
        memcpy(&bits, &out[i], sizeof bits);
        printf("%08x\n", bits);
    }
    clattn_context_release(context);
    return 0;
}
PROGRAM
library=$libdir/libclattn.so
[ -e "$library" ] || library=''
# The compiler and the flags are several words.
if [ -n "$library" ]; then
    $CC $USER_CFLAGS -I"$(dirname "$(find "$root" -name clattn.h)")" -o "$work/program" "$work/program.c" "$library" ||
        fail 'the program for locales'
fi
# Three lines: the program's numbers as text and JSON, and whether the library sees a comma.
# numbers LOCALE NAME
json='pattern --pattern local:1 --len 4096 --json'
grep -q '^#define HAVE_JANSSON 1' config.h || json='pattern --pattern local:1 --len 4096'
numbers() {
    : > "$work/$2.program"
    for words in 'pattern --pattern local:1+random:2 --len 4096' "$json" 'simulate --layout-dims 16x16 --window 5x5' \
        'run --help'; do
        bare LC_ALL="$1" LOCPATH="${LOCPATH-}" "$program" $words >> "$work/$2.program" 2>&1 || fail "$1: clattn $words"
    done
    [ -n "$library" ] || return
    for backend in cpu opencl; do
        status=0
        bare LC_ALL="$1" LOCPATH="${LOCPATH-}" HOME=/proc "$work/program" "$3" $backend > "$work/$2.$backend" || status=$?
        case $status:$backend in 0:* | 77:opencl) ;; *) fail "$1: library, $backend: status $status" ;; esac
    done
}
numbers C c .
if command -v localedef > /dev/null && localedef -i de_DE -f UTF-8 "$work/locale/de_DE.UTF-8" > "$work/said" 2>&1; then
    LOCPATH=$work/locale
    numbers de_DE.UTF-8 comma ,
    for output in program ${library:+cpu opencl}; do
        cmp "$work/c.$output" "$work/comma.$output" || fail "a comma locale changes numbers: $output"
    done
    [ -s "$work/c.program" ] || fail 'no numbers'
    [ -z "$library" ] || [ "$(wc -l < "$work/c.cpu")" = 16384 ] || fail 'no numbers of the library'
    [ -z "$library" ] || [ -s "$work/c.opencl" ] || echo 'no OpenCL device: the locale was tested with the CPU'
else
    missing="$missing localedef"
fi

# ---- manual pages
pages=0
for page in "$share"/man/man*/*; do
    name=$(basename "$page")
    pages=$((pages + 1))
    target=$(sed -n '1s/^\.so //p' "$page")
    [ -z "$target" ] || [ -e "$share/man/$target" ] || fail "$name: $target is not there"
    if [ -n "${MANDOC-}" ] && [ -z "$target" ]; then "$MANDOC" -T lint -W warning "$page" || fail "$name"; fi
    if command -v man > /dev/null; then
        found=$(man -M "$share/man" -w "${name##*.}" "${name%.*}" 2>&1) || fail "man -w ${name##*.} ${name%.*}: $found"
        [ -e "$found" ] || fail "man -w ${name##*.} ${name%.*}: $found"
    fi
done
echo "$pages manual pages"
[ $pages -gt 10 ] || fail 'manual pages'
command -v man > /dev/null || missing="$missing man"

# ---- completion
completion=$share/bash-completion/completions/clattn
cmp "$completion" "$srcdir/packaging/bash/clattn" || fail "$completion"
if command -v bash > /dev/null; then
    bash -c '. "$1" && complete -p clattn' - "$completion" > "$work/said" 2>&1 || fail "completion: $(cat "$work/said")"
fi

[ "$failures" = 0 ] || exit 1
rm -rf "$work"
[ -z "$missing" ] || { echo "not there, so not all was tested:$missing"; exit 77; }
