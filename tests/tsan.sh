#!/bin/sh
# SPDX-License-Identifier: MIT
# The tests that use threads under ThreadSanitizer: one context in several threads, contexts on all devices at once. Called
# by `make check-tsan` in the build folder; builds in tsan/ below it, without OpenMP, whose library it does not know.
#
# Exit status: 0 clean, 1 not, 77 the compiler has no ThreadSanitizer.
set -u
: "${srcdir:?}" "${MAKE:=make}"
. "$srcdir/tests/environment.sh"
mkdir -p tsan
cd tsan || exit 1
printf 'int main(void) { return 0; }\n' > probe.c
${CC:-cc} -fsanitize=thread probe.c -o probe > probe.said 2>&1 && ./probe || { echo 'no ThreadSanitizer' && exit 77; }
[ -e Makefile ] || "$srcdir/configure" -q --enable-sanitizers=thread --disable-openmp --disable-shared CC="${CC:-cc}" \
    CFLAGS='-g -O1' > log 2>&1 || { tail log && exit 1; }
programs='tests/test_threads tests/test_opencl_limits tests/test_opencl_quirks'
$MAKE -s $programs >> log 2>&1 || { tail log && exit 1; }
# Drivers were not built with it, and lock in ways that it does not see.
TSAN_OPTIONS="ignore_noninstrumented_modules=1 ${TSAN_OPTIONS-}"
export TSAN_OPTIONS
mkdir -p tests/cache/clattn
failures=0
for program in $programs; do
    if "$program" > "$program.tsan" 2>&1; then
        echo "PASS $program"
    else
        echo "FAIL $program"
        grep -m 60 -A 30 -e 'WARNING: ThreadSanitizer' -e FAILED "$program.tsan"
        failures=$((failures + 1))
    fi
done
[ "$failures" = 0 ]
