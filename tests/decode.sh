#!/bin/sh
# SPDX-License-Identifier: MIT
# clattn decode: agrees with the prefill for every storage, tells what it did, refuses what it cannot do.
set -u
: "${srcdir:?}"
sample=$srcdir/tests/data/retrieval16k
work=$PWD/tests/decode.work
rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
files="--q $sample/q.npy --k $sample/k.npy --v $sample/v.npy --backend cpu"
failures=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

# decode STATUS OPTION... : its output is in $work/out and $work/err. The options are words without blanks.
decode() {
    wanted=$1
    shift
    ./clattn decode $files "$@" > "$work/out" 2> "$work/err"
    got=$?
    [ "$got" = "$wanted" ] || fail "clattn decode $*: exit status $got instead of $wanted: $(cat "$work/err")"
}
told() {
    grep -q -E -e "$1" "$work/out" || fail "'$1' is not in: $(cat "$work/out")"
}
refused() {
    words=$1
    shift
    decode 2 "$@"
    [ ! -s "$work/out" ] || fail "$*: something on standard output"
    grep -F -q -e "$words" "$work/err" || fail "'$words' is not in: $(cat "$work/err")"
}

decode 0 --tokens 40
told '^sizes      1 sequences, 15872 tokens prefilled, 40 decoded, 16 query heads, 1 key heads, dim 64'
told '^token      [0-9.]+ us, median [0-9.]+, 99 % within [0-9.]+; 40 steps$'
told '^share      [0-9]+ % of that is selection$'
told '^memory     4.0[0-9] MiB, of that keys and values 3.8[0-9] \(float16\), pyramid 0.1[0-9]$'
told '^check      40 rows as the prefill: error [0-9.e-]+, tolerated [0-9.e-]+; 0 of 40 lists differ$'
[ ! -s "$work/err" ] || fail "it says: $(cat "$work/err")"
decode 0 --tokens 50 --step 7 --page-size 48 --prefill 16000 --chunk 90
told '50 decoded' && told '8 steps$' && told '^check      50 rows'
decode 0 --tokens 20 --int8 --page-size 64
told '\(int8\)' && told '^int8       moves the result by [0-9.e-]+ at most'
decode 0 --tokens 2 --selector dense --dense
told '^selection  dense; 100.00 % of the keys$' && told '^dense      [0-9.]+ us a token'
decode 0 --tokens 20 --selector flat-mean --leaf 128 --topk 3
told '^selection  flat-mean, at most 3 of 125 leaves of 128 tokens'

refused '--prefill: 15872 to 16383 is needed' --prefill 100
decode 0 --tokens 9 --selector robust:beam=16 --int8
told '^selection  robust:beam=16' && told '0 of 9 lists differ$'

refused '--page-size: 0 or 16 to 256 is needed' --page-size 7
refused "'9' is not one of" --leaf 9
refused "'local:1' is not one of" --selector local:1
files="--q $sample/q.npy --k $sample/k.npy"
refused '--v FILE is missing'
files="--q $sample/k.npy --k $sample/q.npy --v $sample/q.npy"
decode 1
files="--q $sample/q.npy --k $sample/k.npy --v $sample/v.npy --backend cpu"

if [ -x tests/json_value ]; then
    decode 0 --tokens 5 --json
    for value in sizes.tokens:15877 check.rows:5 check.lists_differ:0 topk:8 page_size:0 step:1; do
        got=$(tests/json_value "${value%:*}" < "$work/out")
        [ "$got" = "${value#*:}" ] || fail "${value%:*} is $got"
    done
fi
[ "$failures" = 0 ] || exit 1
echo 'decode: agrees with the prefill, and refuses what it cannot do'
