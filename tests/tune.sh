#!/bin/sh
# SPDX-License-Identifier: MIT
# clattn tune: a search that meets a wrong and an impossible candidate, that it goes on where it stopped, what the library
# makes of the records, merging, usage errors. One parameter of one kernel: compiling takes most of the time.
set -u
: "${srcdir:?}"
program=$PWD/clattn
json_value=$PWD/tests/json_value
[ -x "$json_value" ] || { echo 'this build has no JSON'; exit 77; }
case $srcdir in /*) ;; *) srcdir=$PWD/$srcdir ;; esac
work=$PWD/tests/tune.work
rm -rf "$work"
mkdir -p "$work/kernels"
cd "$work" || exit 1
failures=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

# refused STATUS WORDS ARGUMENT...
refused() {
    wanted=$1 words=$2
    shift 2
    "$program" tune "$@" > stdout 2> stderr
    got=$?
    [ "$got" = "$wanted" ] || fail "$*: exit status $got instead of $wanted"
    [ ! -s stdout ] || fail "$*: something on standard output"
    grep -F -q -e "$words" stderr || fail "$*: '$words' is not in: $(cat stderr)"
}
echo '{"schema": "clattn-tuning", "schema_version": 2, "records": []}' > newer.json
refused 2 "--kernel: 'backwards' is not known" --output x.json --kernel select,backwards
refused 2 "--parameter: 'speed' is not known" --output x.json --parameter speed
refused 2 "--dim: '64,x' is not a list" --output x.json --dim 64,x
refused 2 "--len: '1,x' is not a list" --output x.json --len 1,x
refused 2 '--noise: a percentage' --noise 100
refused 2 "'-1' is no time" --budget -1
refused 2 'files go with --merge' x.json
refused 2 '--merge: a FILE is missing' --merge
refused 1 'absent.json: there is no such file' --merge absent.json
refused 1 'newer.json: these are no tuning records of version 1' --merge newer.json
refused 77 'no-such-device' --output x.json --device no-such-device

# ---- merging
# record DRIVER DIM DATE ROWS : one, complete where there are rows
record() {
    printf '%s{"platform": "P", "device": "D", "driver": "%s", "kernel": "select", "dim": %s, "dtype": "float32",' "$comma" "$1" "$2"
    printf '"measured": "%s"' "$3"
    if [ -n "$4" ]; then printf ', "parameters": {"rows": %s}' "$4"; fi
    echo '}'
    comma=,
}
records() {
    comma=''
    echo '{"schema": "clattn-tuning", "schema_version": 1, "records": ['
    while [ $# -gt 0 ]; do
        record "$1" "$2" "$3" "$4"
        shift 4
    done
    echo ']}'
}
records 1 64 2026-01-01T00:00:00Z 8 1 128 2026-03-01T00:00:00Z 8 1 32 2026-01-01T00:00:00Z 8 > a.json
records 1 64 2026-02-01T00:00:00Z 16 1 128 2026-02-01T00:00:00Z 16 1 32 2026-05-01T00:00:00Z '' 2 64 2026-01-01T00:00:00Z 64 > b.json
"$program" tune --merge a.json b.json > merged.json 2> stderr || fail "merge: $(cat stderr)"
"$json_value" records.0.parameters.rows records.1.parameters.rows records.2.parameters.rows records.3.parameters.rows \
    < merged.json > values || fail "merge: $(cat merged.json)"
[ "$(tr '\n' ' ' < values)" = '16 8 8 64 ' ] || fail "merge: $(cat values)"
"$program" tune --merge b.json a.json --output folder/merged.json > stdout 2> stderr || fail "merge to a file: $(cat stderr)"
"$json_value" records.0.parameters.rows records.2.parameters.rows < folder/merged.json > values
[ "$(tr '\n' ' ' < values)" = '16 8 ' ] || fail "merge the other way round: $(cat folder/merged.json)"

# ---- searching
if ! "$program" info | grep -q '^opencl '; then
    echo 'there is no OpenCL device: nothing was searched'
    [ "$failures" = 0 ] && exit 77
    exit 1
fi
# Tiles with a pad of 4 do not compile, those with a pad of 8 compute wrongly.
{
    echo '#if PAD == 4'
    echo '#error "no such tile"'
    echo '#elif PAD == 8'
    echo '#define BROKEN 0.9f *'
    echo '#else'
    echo '#define BROKEN'
    echo '#endif'
    sed 's/ exp(/ BROKEN exp(/g' "$srcdir/cl/attention_forward.cl"
} > kernels/attention_forward.cl
tune() {
    CLATTN_KERNEL_DIR=$work/kernels "$program" tune --quick --kernel forward-token --parameter pad --dim 16 --dtype f32 --len 128,300 \
        "$@" > table 2> stderr
}
XDG_DATA_HOME=$work/data tune --budget 0.001 || fail "budget: exit status $?: $(cat stderr)"
grep -q 'not done yet: run it again' table || fail "budget: $(cat table)"
XDG_DATA_HOME=$work/data tune --budget 10m || fail "exit status $?: $(cat stderr)"
records=$work/data/clattn/tuning.json
if grep -q 'another tier computes this' table; then
    echo 'another tier computes this here: nothing was searched'
    [ "$failures" = 0 ] && exit 77
    exit 1
fi
grep -q 'forward-token *16  f32  *3 ' table || fail "$(cat table)"
"$json_value" records.0.kernel records.0.dim records.0.dtype records.0.tried < "$records" > values ||
    fail "$(cat "$records")"
[ "$(tr '\n' ' ' < values)" = 'forward-token 16 float32 3 ' ] || fail "$(cat "$records")"
# A device's own pad may be one of the broken ones; then the default fails, and that is told.
"$json_value" records.0.wrong records.0.impossible records.0.device records.0.library records.0.measured \
    records.0.default_seconds < "$records" > values || fail "$(cat "$records")"
[ "$(head -n 2 values | tr '\n' ' ')" = '1 1 ' ] || fail "a wrong or an impossible candidate passed: $(cat "$records")"
# What is complete is not done again: nothing is compiled, and the file stays.
cp "$records" before.json
XDG_DATA_HOME=$work/data tune --budget 10m || fail "again: $(cat stderr)"
cmp "$records" before.json || fail 'a complete record was searched again'

# An incomplete search goes on: two of three candidates were tried, and are believed.
"$json_value" records.0.platform records.0.device records.0.driver records.0.library < "$records" > key
{
    printf '{"schema": "clattn-tuning", "schema_version": 1, "records": [{"platform": "%s", "device": "%s",' \
        "$(sed -n 1p key)" "$(sed -n 2p key)"
    printf '"driver": "%s", "library": "%s", "kernel": "forward-token", "dim": 16, "dtype": "float32",' \
        "$(sed -n 3p key)" "$(sed -n 4p key)"
    printf '"trials": [{"pad": 4, "state": "wrong"}, {"pad": 8, "state": "wrong"}]}]}'
} > half.json
tune --output half.json || fail "half: $(cat stderr)"
"$json_value" records.0.tried records.0.wrong records.0.impossible < half.json > values || fail "half: $(cat half.json)"
[ "$(tr '\n' ' ' < values)" = '3 2 0 ' ] || fail "it did not go on where it was: $(cat half.json)"

# ---- the library uses records
device_of() {
    "$program" bench --quick --backend opencl --suite forward --dim 16 --len 100 --json > out.json 2> stderr || fail "$(cat stderr)"
    "$json_value" rows.0.state rows.0.tuning < out.json | tr '\n' ' '
}
sed 's/"parameters": {[^}]*}/"parameters": {"rows": 8}/' "$records" > rows.json
[ "$(CLATTN_TUNING=none device_of)" = 'good built in ' ] || fail "none: $(cat out.json)"
[ "$(CLATTN_TUNING=$work/rows.json device_of)" = 'good environment ' ] || fail "environment: $(cat out.json)"
unset CLATTN_TUNING
[ "$(XDG_DATA_HOME=$work/data device_of)" = 'good user ' ] || fail "user: $(cat out.json)"

[ "$failures" = 0 ] || exit 1
echo 'tune: wrong and impossible candidates were rejected, searches go on, records are used and merged'
cd .. && rm -rf "$work"
