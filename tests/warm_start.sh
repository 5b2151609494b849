#!/bin/sh
# SPDX-License-Identifier: MIT
# The second `clattn run` on an OpenCL device compiles nothing: all programs come from the cache. With a folder that cannot
# be written both compile, and say nothing.
set -u
: "${srcdir:?}"
program=$PWD/clattn
json_value=$PWD/tests/json_value
sample=$srcdir/tests/data/retrieval16k
case $sample in /*) ;; *) sample=$PWD/$sample ;; esac
work=$PWD/tests/warm_start.work
rm -rf "$work"
mkdir -p "$work"
cd "$work" || exit 1
[ -x "$json_value" ] || { echo 'skipped: built without JSON' && exit 77; }
"$program" info > info
grep -q '^opencl ' info || { echo 'skipped: no OpenCL device' && exit 77; }
grep -q '^built in.* xxhash' info || { echo 'skipped: built without xxHash, so there is no program cache' && exit 77; }

# npy FILE SHAPE BYTES : the first BYTES of a sample's elements
npy() {
    printf '\223NUMPY\001\000\166\000%-117s\n' "{'descr': '<f2', 'fortran_order': False, 'shape': ($2), }" > "$1"
    tail -c +129 "$sample/$1" | head -c "$3" >> "$1"
}
npy q.npy '1, 8, 2, 64' 2048
npy k.npy '1, 100, 1, 64' 12800
npy v.npy '1, 100, 1, 64' 12800

# run_once NAME BUILT LOADED : the numbers of programs, patterns of `case`
run_once() {
    "$program" run --backend opencl --q q.npy --k k.npy --v v.npy --topk 2 --json > "$1" 2> said < /dev/null || {
        echo "FAIL: $1: $(cat said)"
        exit 1
    }
    [ ! -s said ] || { echo "FAIL: $1: $(cat said)" && exit 1; }
    set -- "$1" "$2" "$3" $("$json_value" programs_built programs_loaded seconds.build < "$1")
    echo "$1: $4 built, $5 loaded, $6 s"
    case $4 in $2) ;; *) echo "FAIL: $1: $4 programs were built" && exit 1 ;; esac
    case $5 in $3) ;; *) echo "FAIL: $1: $5 programs were loaded" && exit 1 ;; esac
}
CLATTN_CACHE_DIR=$work/cache
export CLATTN_CACHE_DIR
unset CLATTN_CACHE_SIZE
run_once cold '[1-9]*' 0
run_once warm 0 '[1-9]*'
CLATTN_CACHE_DIR=/dev/null/no
run_once 'no-cache' '[1-9]*' 0
cd / && rm -rf "$work"
