#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds and checks every combination of the optional parts, each in configs/NAME below the current folder.
# Usage: srcdir=... check_configs.sh [NAME...]; CC and JOBS are taken from the environment, and CHECK, the target that runs
# the tests: check, all of them, or check-package, a choice.
set -u
: "${srcdir:?}" "${MAKE:=make}" "${CHECK:=check}"
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN 2> /dev/null || echo 2)}
top=$PWD
failed=''

combination() {
    name=$1
    shift
    if [ -n "$wanted" ]; then
        case " $wanted " in *" $name "*) ;; *) return ;; esac
    fi
    mkdir -p "$top/configs/$name"
    cd "$top/configs/$name" || exit 1
    if "$srcdir/configure" -q --enable-werror "$@" > log 2>&1 && $MAKE -j"$jobs" >> log 2>&1 &&
        $MAKE -j"$jobs" "$CHECK" VERBOSE=1 >> log 2>&1; then
        echo "$name: $(sh "$srcdir/tests/summary.sh" $(ls tests/*.trs | sed 's/trs$/log/'))"
        cd "$top" && rm -rf "configs/$name"
    else
        echo "$name: FAILED, see configs/$name/log"
        failed="$failed $name"
    fi
    cd "$top" || exit 1
}

wanted=$*
for opencl in opencl-clblast opencl none; do
    case $opencl in
    opencl-clblast) o='--with-opencl --with-clblast' ;;
    opencl) o='--with-opencl --without-clblast' ;;
    none) o='--without-opencl --without-clblast' ;;
    esac
    for hwloc in with without; do
        for openmp in enable disable; do
            combination "$opencl-$hwloc-hwloc-$openmp-openmp" $o "--$hwloc-hwloc" "--$openmp-openmp"
        done
    done
done
combination nothing --without-opencl --without-clblast --without-hwloc --without-jansson --without-xxhash --disable-openmp
combination static --disable-shared
combination shared --disable-static
combination sanitizers --enable-sanitizers --disable-shared

if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
