# SPDX-License-Identifier: MIT
# Sourced before each test, in the build folder.
CLATTN_CACHE_DIR=$PWD/tests/cache/clattn
POCL_CACHE_DIR=$PWD/tests/cache/pocl
XDG_CACHE_HOME=$PWD/tests/cache
CLATTN_TUNING=none
mkdir -p "$CLATTN_CACHE_DIR" "$POCL_CACHE_DIR"
chmod 700 "$CLATTN_CACHE_DIR"
export CLATTN_CACHE_DIR POCL_CACHE_DIR XDG_CACHE_HOME CLATTN_TUNING

# The library's own cache of programs is off but where it is tested: a binary costs PoCL, which has a cache of its own, a
# second compilation of every kernel.
CLATTN_CACHE_SIZE=0
export CLATTN_CACHE_SIZE

# A user's quirk table is not asked.
CLATTN_QUIRKS=
export CLATTN_QUIRKS

# Waiting threads sleep: tests run side by side, and spinning ones would steal each other's cores.
OMP_WAIT_POLICY=passive
export OMP_WAIT_POLICY

# What drivers and OpenMP keep for the life of the process is not our leak.
case $srcdir in
/*) suppressions=$srcdir/tests/leaks.supp ;;
*) suppressions=$PWD/$srcdir/tests/leaks.supp ;;
esac
LSAN_OPTIONS=suppressions=$suppressions:print_suppressions=0
ASAN_OPTIONS=${ASAN_OPTIONS-detect_leaks=1}
UBSAN_OPTIONS=print_stacktrace=1
export LSAN_OPTIONS ASAN_OPTIONS UBSAN_OPTIONS
