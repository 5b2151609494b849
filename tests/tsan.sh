#!/bin/sh
# SPDX-License-Identifier: MIT
# The tests that use threads under ThreadSanitizer: one context in several threads, contexts on all devices at once; then
# the CPU backend's own threads. Called by `make check-tsan` in the build folder; builds in tsan/ below it, without OpenMP,
# whose library it does not know, and in tsan/openmp with Clang (or OMP_CC), whose OpenMP library tells it what it does.
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
failures=0

# run PROGRAM... : in the current folder
run() {
    mkdir -p tests/cache/clattn
    for program; do
        if "$program" > "$program.tsan" 2>&1; then
            echo "PASS $program"
        else
            echo "FAIL $program"
            grep -m 60 -A 30 -e 'WARNING: ThreadSanitizer' -e FAILED "$program.tsan"
            failures=$((failures + 1))
        fi
    done
}

# Drivers were not built with it, and lock in ways that it does not see.
TSAN_OPTIONS="ignore_noninstrumented_modules=1 ${TSAN_OPTIONS-}"
export TSAN_OPTIONS
run $programs

# Threads of OpenMP: only with a compiler for which a barrier is no race.
mkdir -p openmp
cd openmp || exit 1
cat > probe.c << 'PROBE'
int main(void)
{
    int x[2] = {0, 0}, y[2] = {0, 0};
    for (int round = 0; round < 100; round++) {
#pragma omp parallel for num_threads(2) schedule(static, 1)
        for (int n = 0; n < 2; n++)
            x[n] += y[n];
#pragma omp parallel for num_threads(2) schedule(static, 1)
        for (int n = 0; n < 2; n++)
            y[n] = x[1 - n];
    }
    return x[0];
}
PROBE
omp_cc=
for cc in ${OMP_CC-} clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14; do
    command -v "$cc" > /dev/null && "$cc" -g -fopenmp -fsanitize=thread probe.c -o probe > probe.said 2>&1 &&
        ./probe > probe.said 2>&1 && omp_cc=$cc && break
done
if [ -z "$omp_cc" ]; then
    echo 'no Clang whose OpenMP library ThreadSanitizer knows: the threads of the CPU backend are not looked at'
    [ "$failures" = 0 ]
    exit
fi
programs='tests/test_backward tests/test_cpu_places tests/test_cpu_threads tests/test_cpu_tiles tests/test_cpu_variants'
[ -e Makefile ] || "$srcdir/configure" -q --enable-sanitizers=thread --disable-shared --without-opencl --without-clblast \
    CC="$omp_cc" CFLAGS='-g -O1' > log 2>&1 || { tail log && exit 1; }
$MAKE -s $programs >> log 2>&1 || { tail log && exit 1; }
OMP_NUM_THREADS=4 CLATTN_TEST_SIZE=${CLATTN_TEST_SIZE-tiny}
export OMP_NUM_THREADS CLATTN_TEST_SIZE
run $programs
[ "$failures" = 0 ]
