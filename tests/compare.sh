#!/bin/sh
# SPDX-License-Identifier: MIT
# clattn compare: the table, regressions against a baseline and their exit status, JSON, charts, usage errors. The
# results are made here, so that every number is known.
set -u
program=$PWD/clattn
json_value=$PWD/tests/json_value
[ -x "$json_value" ] || { echo 'this build has no JSON'; exit 77; }
work=$PWD/tests/compare.work
rm -rf "$work"
mkdir -p "$work"
cd "$work" || exit 1
failures=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

# row SUITE NAME OPERATION KEYS MEDIAN [STATE] : p5 and p95 are 0.9 and 1.2 of the median
row() {
    printf '%s{"suite": "%s", "name": "%s", "operation": "%s", "dtype": "float32", "selector": "pisa", "causal": 1,' \
        "$comma" "$1" "$2" "$3"
    printf '"q_len": 64, "kv_len": %s, "q_heads": 4, "kv_heads": 1, "dim": 64, "topk": 8, "leaf": 64,' "$4"
    printf '"state": "%s", "message": null, "median_seconds": %s, "p5_seconds": %s, "p95_seconds": %s,' "${6-good}" "$5" \
        "$(echo "$5" | awk '{print 0.9 * $1}')" "$(echo "$5" | awk '{print 1.2 * $1}')"
    printf '"flops": 1e9, "bytes": 1e7, "ceiling_flops_per_second": 1e11, "ceiling_bytes_per_second": 1e10,'
    printf '"roofline_share": 0.5, "speedup_over_dense": 3, "backend": "%s", "device": "%s", "platform": null,' "$backend" \
        "$device"
    printf '"driver": null, "tier": "avx2", "tuning": "built in", "library": "%s"}\n' "$library"
    comma=,
}
# file NAME BACKEND DEVICE LIBRARY FACTOR [STATE] : rows of forward, and of selections that cross at 8192 keys
file() {
    backend=$2 device=$3 library=$4 comma=''
    {
        echo '{"schema": "clattn-bench", "schema_version": 1, "rows": ['
        row forward 'forward pisa' forward 1024 "$(echo "$5" | awk '{print 0.010 * $1}')" "${6-good}"
        row forward 'forward pisa' forward 4096 0.040
        row selection-scaling pyramid select 4096 0.002
        row selection-scaling flat select 4096 0.001
        row selection-scaling pyramid select 16384 0.002
        row selection-scaling flat select 16384 0.004
        echo ']}'
    } > "$1"
}
file old.json cpu 'A "b" it'\''s' 1.0 1 2> /dev/null
sed -i 's/"A "b" it/"A \\"b\\" it/' old.json
file cpu.json cpu Alpha 1.0 1
file again.json cpu Alpha 1.1 1.05
file slow.json cpu Alpha 1.1 1.3
file fast.json cpu Alpha 1.1 0.5
file wrong.json cpu Alpha 1.1 1 wrong
file other.json opencl 'Beta <GPU> & co' 1.0 0.25

# ---- the table
"$program" compare cpu.json other.json > table 2> stderr || fail "exit status $?: $(cat stderr)"
grep -q '^A  cpu: Alpha (avx2), clattn 1.0; cpu.json$' table || fail "$(cat table)"
grep -q '^B  opencl: Beta <GPU> & co (avx2)' table || fail "$(cat table)"
grep -q '^forward pisa  *1024  float32 4/1 x 64  *10.00 ms  *2.50 ms  4.00x$' table || fail "$(cat table)"
grep -q '^forward pisa  *4096  .* 40.00 ms  *40.00 ms  1.00x$' table || fail "$(cat table)"
grep -q '^A: selection by the pyramid is faster than flat from about 8192 keys on$' table || fail "$(cat table)"
"$program" compare old.json cpu.json again.json wrong.json > table 2> stderr || fail "$(cat stderr)"
grep -q '^A  cpu: A "b" it.s (avx2), ' table || fail "$(cat table)"
grep -q '^B  cpu: Alpha (avx2), 1.0, ' table || fail "versions do not tell sources apart: $(cat table)"
grep -q '^forward pisa  *1024 .* wrong$' table || fail "$(cat table)"

# What was measured in pieces is one source.
backend=cpu device=Alpha library=1.0 comma=''
{
    echo '{"schema": "clattn-bench", "schema_version": 1, "rows": ['
    row forward 'forward pisa' forward 1024 0.010
    row selection-scaling flat select 16384 0 skipped
    echo ']}'
} > part1.json
comma=''
{
    echo '{"schema": "clattn-bench", "schema_version": 1, "rows": ['
    row selection-scaling flat select 16384 0.004
    echo ']}'
} > part2.json
"$program" compare part1.json part2.json > table 2> stderr || fail "pieces: $(cat stderr)"
grep -q '^B ' table && fail "pieces are two sources: $(cat table)"
grep -q '^flat selection  *16384 .* 4.00 ms$' table || fail "pieces: $(cat table)"

# ---- regressions
# changed STATUS WORDS FILE OPTION...
changed() {
    wanted=$1 words=$2
    shift 2
    "$program" compare "$@" --baseline cpu.json > table 2> stderr
    got=$?
    [ "$got" = "$wanted" ] || fail "$*: exit status $got instead of $wanted: $(cat stderr)"
    grep -q -e "$words" table || fail "$*: '$words' is not in: $(cat table)"
}
changed 0 '0 slower, 0 broken, 0 faster, 6 as before, 0 not in it' again.json
changed 3 '1 slower, 0 broken, 0 faster, 5 as before, 0 not in it' slow.json
grep -q '^  slower  forward pisa, 1024 keys, cpu: Alpha (avx2): 10.00 ms -> 13.00 ms, +30 %$' table || fail "$(cat table)"
changed 0 'noise 50 %: 0 slower' slow.json --noise 50
changed 3 'noise 2 %: 1 slower' again.json --noise 2
changed 0 '0 slower, 0 broken, 1 faster' fast.json
changed 3 '0 slower, 1 broken' wrong.json
changed 0 '6 not in it' other.json
"$program" compare slow.json --baseline cpu.json --json > out.json 2> stderr
[ $? = 3 ] || fail "JSON: exit status: $(cat stderr)"
"$json_value" schema sources.0.device cases.0.times.0.median_seconds cases.5.kv_len changes.0.change changes.1.change \
    changes.0.before_seconds noise < out.json > values || fail 'JSON lacks something'
[ "$(tr '\n' ' ' < values)" = 'clattn-compare Alpha 0.013 16384 slower same 0.01 0.1 ' ] || fail "JSON: $(cat values)"

# What bench writes can be compared with itself.
"$program" bench --quick --backend cpu --suite forward,selection-scaling --len 200 --json > real.json 2> stderr ||
    fail "bench: $(cat stderr)"
"$program" compare real.json --baseline real.json > table 2> stderr || fail "real: $?: $(cat table stderr)"
grep -q ': 0 slower, 0 broken, 0 faster, 7 as before, 0 not in it$' table || fail "real: $(cat table)"

# ---- charts
mkdir empty
PATH=$PWD/empty "$program" compare cpu.json --charts none > stdout 2> stderr
[ $? = 1 ] || fail 'gnuplot is absent, exit status'
grep -q 'gnuplot is not installed: package gnuplot-nox' stderr || fail "gnuplot is absent: $(cat stderr)"
if command -v gnuplot > /dev/null; then
    "$program" compare old.json cpu.json other.json real.json --charts it --script it.gp > stdout 2> stderr ||
        fail "charts: $?: $(cat stderr)"
    [ ! -s stderr ] || fail "charts: noise: $(cat stderr)"
    for name in throughput roofline speedup crossover; do
        [ "$(od -An -c -N4 it-$name.png | tr -d ' ')" = '211PNG' ] || fail "it-$name.png is no PNG"
        head -c 300 it-$name.svg | grep -q '<svg' || fail "it-$name.svg is no SVG"
        tail -n 3 it-$name.svg | grep -q '</svg>' || fail "it-$name.svg is cut off"
        # Nothing is loaded from elsewhere: the only addresses are names of the language.
        grep -o 'https*://[^"]*' it-$name.svg | grep -v '^http://www.w3.org/' && fail "it-$name.svg needs other files"
        grep -q 'Beta &lt;GPU.* &amp; co' it-$name.svg || fail "it-$name.svg: no legend"
    done
    grep -q "it''s" it.gp || fail 'a quote in a name'
    rm it-*
    "$program" compare cpu.json --charts it --format svg > stdout 2> stderr || fail "$(cat stderr)"
    [ "$(ls it-* | tr '\n' ' ')" = 'it-crossover.svg it-roofline.svg it-speedup.svg it-throughput.svg ' ] ||
        fail "--format svg: $(ls)"
    "$program" compare cpu.json --charts absent/it > stdout 2> stderr
    [ $? = 1 ] || fail 'charts in a folder that is not there'
else
    echo 'gnuplot is not there: no chart was drawn'
fi

# refused STATUS WORDS ARGUMENT...
refused() {
    wanted=$1 words=$2
    shift 2
    "$program" compare "$@" > stdout 2> stderr
    got=$?
    [ "$got" = "$wanted" ] || fail "$*: exit status $got instead of $wanted"
    [ ! -s stdout ] || fail "$*: something on standard output"
    grep -F -q -e "$words" stderr || fail "$*: '$words' is not in: $(cat stderr)"
}
echo '{"schema": "clattn-bench", "schema_version": 99, "rows": []}' > newer.json
echo '{"schema": "something"}' > foreign.json
echo '{"schema": ' > broken.json
echo '{"schema": "clattn-bench", "schema_version": 1, "rows": []}' > none.json
refused 2 'a FILE is missing'
refused 2 '--noise: a percentage' cpu.json --noise -1
refused 2 '--script goes with --charts' cpu.json --script x
refused 1 'absent.json' absent.json
refused 1 "the schema's version is 99" newer.json
refused 1 "no result of 'clattn bench --json'" foreign.json
refused 1 'broken.json: line' broken.json
refused 1 'absent.json' cpu.json --baseline absent.json
"$program" compare none.json > table 2> stderr || fail "no rows: $(cat stderr)"
"$program" compare none.json --charts x > table 2> stderr
grep -q 'nothing to draw' stderr || fail "no rows: $(cat stderr)"

[ "$failures" = 0 ] || exit 1
echo 'compare: table, regressions, JSON and charts as expected'
cd .. && rm -rf "$work"
