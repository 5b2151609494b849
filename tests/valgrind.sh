#!/bin/sh
# SPDX-License-Identifier: MIT
# Test programs under valgrind: no access to what is not ours, nothing lost that is ours. Called by `make check-valgrind` in
# the build folder. Valgrind is slow, so the programs are few: those of the runtime, on an OpenCL that computes nothing, on
# the first device, and on the CPU.
#
#   PROGRAMS  of test programs; by default the ones below
#
# Exit status: 0 clean, 1 not, 77 there is no valgrind.
set -u
: "${srcdir:?}" "${MAKE:=make}"
. "$srcdir/tests/environment.sh"
command -v valgrind > /dev/null || { echo 'there is no valgrind' && exit 77; }
: "${PROGRAMS:=test_version test_pattern_text test_opencl_limits test_opencl_quirks test_opencl_memory test_opencl_interop}"
work=$PWD/tests/valgrind.work
mkdir -p "$work/clattn" "$work/pocl"
chmod 700 "$work/clattn"
# Programs that a driver compiled for the processor itself hold instructions that valgrind does not know.
CLATTN_CACHE_DIR=$work/clattn POCL_CACHE_DIR=$work/pocl CLATTN_CPU=${CLATTN_CPU-avx2}
CLATTN_TEST_SIZE=tiny
export CLATTN_CACHE_DIR POCL_CACHE_DIR CLATTN_CPU CLATTN_TEST_SIZE
failures=0
for program in $PROGRAMS; do
    log=$work/$program.log
    $MAKE -s "tests/$program" > "$log" 2>&1 || { cat "$log" && exit 1; }
    ./libtool --mode=execute valgrind -q --error-exitcode=99 --leak-check=full --show-leak-kinds=definite,indirect \
        --errors-for-leak-kinds=definite,indirect --num-callers=30 --suppressions="$srcdir/tests/valgrind.supp" \
        "tests/$program" > "$log" 2>&1
    case $? in
    0) echo "PASS $program" ;;
    77) echo "SKIP $program" ;;
    *)
        echo "FAIL $program, see $log"
        grep -m 40 -e '^==' "$log"
        failures=$((failures + 1))
        ;;
    esac
done
[ "$failures" = 0 ]
