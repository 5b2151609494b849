#!/bin/sh
# SPDX-License-Identifier: MIT
# Other processors: builds with Debian's cross compilers and runs the plain C path under qemu-user. s390x is big-endian; a
# 32-bit one is refused by configure.
# Usage: cross.sh [ARCHITECTURE...], of arm64 riscv64 s390x i386; each in cross/ARCHITECTURE below the current folder.
# Environment: srcdir, MAKE, JOBS; CMOCKA_SOURCE, a folder with the sources of CMocka, from which it is compiled (else apt-get
# fetches those of Debian, without touching the state of the system); CROSS_TESTS, which to run; CROSS_CHECK=no leaves out
# clattn check, which takes minutes under qemu.
set -u
unset MAKEFLAGS MFLAGS MAKELEVEL
: "${srcdir:?}" "${MAKE:=make}" "${JOBS:=2}" "${CROSS_CHECK:=yes}"
: "${CROSS_TESTS=tests/test_version tests/test_half tests/test_pattern_text tests/test_npy_write tests/test_tensor_file
    tests/test_blocks_union tests/test_cpu_variants tests/test_cpu_exp tests/test_cpu_select tests/test_attention_api}"
top=$PWD/cross
mkdir -p "$top"
failed='' skipped=''

fetch_cmocka() {
    if [ -n "${CMOCKA_SOURCE-}" ]; then return; fi
    CMOCKA_SOURCE=$(find "$top/apt" -maxdepth 1 -name 'cmocka-*' -type d 2> /dev/null | head -n 1)
    if [ -n "$CMOCKA_SOURCE" ] || ! command -v apt-get > /dev/null; then return; fi
    mkdir -p "$top/apt/state/lists/partial" "$top/apt/cache/archives/partial"
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME-}")
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $codename main" \
        > "$top/apt/sources.list"
    set -- -q -o Dir::State="$top/apt/state" -o Dir::Cache="$top/apt/cache" -o APT::Sandbox::User=root \
        -o Dir::Etc::sourcelist="$top/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
    (cd "$top/apt" && apt-get "$@" update && apt-get "$@" source --download-only cmocka) > "$top/apt/log" 2>&1 ||
        { echo 'CMocka was not fetched; its tests are left out'; return; }
    (cd "$top/apt" && tar -xf cmocka_*.orig.tar.?z)
    CMOCKA_SOURCE=$(find "$top/apt" -maxdepth 1 -name 'cmocka-*' -type d | head -n 1)
}

# cmocka TRIPLET FOLDER : a static CMocka for it, and a file for pkg-config
cmocka() {
    mkdir -p "$2"
    {
        printf '#define HAVE_%s 1\n' INTTYPES_H STDINT_H STDLIB_H STRING_H STRINGS_H SIGNAL_H SETJMP_H STDIO_H UNISTD_H \
            TIME_H SYS_STAT_H SYS_TYPES_H MALLOC_H CALLOC EXIT FPRINTF SNPRINTF VSNPRINTF FREE LONGJMP SIGLONGJMP MALLOC \
            MEMCPY MEMSET PRINTF SETJMP SIGNAL STRSIGNAL STRCMP CLOCK_GETTIME CLOCK_REALTIME STRUCT_TIMESPEC \
            GCC_THREAD_LOCAL_STORAGE
    } > "$2/config.h"
    "$1-gcc" -O2 -w -DHAVE_CONFIG_H -I"$2" -I"$CMOCKA_SOURCE/include" -c "$CMOCKA_SOURCE/src/cmocka.c" \
        -o "$2/cmocka.o" && "$1-ar" cr "$2/libcmocka.a" "$2/cmocka.o" &&
        printf '%s\n' 'Name: cmocka' 'Description: CMocka' 'Version: 1.1.5' "Libs: -L$2 -lcmocka" \
            "Cflags: -I$CMOCKA_SOURCE/include" > "$2/cmocka.pc"
}

# configure TRIPLET OPTION... : in the current folder, without the build machine's libraries
configure() {
    triplet=$1
    shift
    PKG_CONFIG_LIBDIR=$PWD/pc "$srcdir/configure" -q --host="$triplet" --build="$("$srcdir/build-aux/config.guess")" \
        --disable-shared --enable-werror --without-opencl --without-hwloc --without-xxhash "$@"
}

# build_and_run TRIPLET QEMU : in the current folder
build_and_run() {
    configure "$1" && $MAKE -j"$JOBS" || return 1
    file=$("$1-readelf" -h clattn) || return 1
    echo "$file" | grep -E 'Data:|Machine:'
    qemu="$2 -L /usr/$1"
    OMP_WAIT_POLICY=passive
    export OMP_WAIT_POLICY
    $qemu ./clattn info || return 1
    $MAKE -j"$JOBS" examples/attention examples/blocks || return 1
    for program in examples/attention examples/blocks; do
        $qemu $program || return 1
    done
    tests=tests/symbols.sh
    if [ -e pc/cmocka.pc ]; then tests="$tests $CROSS_TESTS"; fi
    # What is built is what is run, so check's other programs are left out.
    $MAKE -j"$JOBS" $(echo " $tests" | sed 's/ [^ ]*\.sh//') &&
        CLATTN_TEST_SIZE=tiny $MAKE check check_PROGRAMS= TESTS="$tests" LOG_COMPILER="$qemu" VERBOSE=1 || return 1
    [ "$CROSS_CHECK" = no ] || $qemu ./clattn check --quick
}

architecture() {
    arch=$1 triplet=$2 qemu=$3
    for tool in "$triplet-gcc" ${qemu:+"$qemu"}; do
        command -v "$tool" > /dev/null || { echo "$arch: $tool is not there"; skipped="$skipped $arch"; return; }
    done
    rm -rf "${top:?}/$arch"
    mkdir -p "$top/$arch/pc"
    cd "$top/$arch" || exit 1
    if [ -z "$qemu" ]; then
        if configure "$triplet" > log 2>&1; then
            echo "$arch: configure did not refuse it"
            failed="$failed $arch"
        else
            grep -h '32-bit systems are not supported' log || failed="$failed $arch"
        fi
        return
    fi
    fetch_cmocka
    if [ -n "$CMOCKA_SOURCE" ]; then
        cmocka "$triplet" "$PWD/pc" > log.cmocka 2>&1 || { tail log.cmocka; failed="$failed $arch"; return; }
    fi
    if build_and_run "$triplet" "$qemu" > log 2>&1; then
        echo "$arch: $(sed -n 's/.*Data: *//p' log);$(grep '^# PASS:' log | tail -n 1 | sed 's/# PASS://') test programs;" \
            "clattn check: $(grep '^PASS: .* passed' log || echo 'left out')"
    else
        tail -n 30 log
        echo "$arch: FAILED, see cross/$arch/log"
        failed="$failed $arch"
    fi
}

[ $# -gt 0 ] || set -- arm64 riscv64 s390x i386
for wanted; do
    case $wanted in
    arm64) architecture arm64 aarch64-linux-gnu qemu-aarch64-static ;;
    riscv64) architecture riscv64 riscv64-linux-gnu qemu-riscv64-static ;;
    s390x) architecture s390x s390x-linux-gnu qemu-s390x-static ;;
    i386) architecture i386 i686-linux-gnu '' ;;
    *) echo "unknown architecture $wanted" >&2; exit 2 ;;
    esac
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
[ -z "$skipped" ] || { echo "left out:$skipped"; exit 77; }
