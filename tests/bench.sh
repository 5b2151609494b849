#!/bin/sh
# SPDX-License-Identifier: MIT
# clattn bench: every suite at small sizes, the outputs, the budget, Ctrl-C, usage errors. No time is judged.
set -u
: "${srcdir:?}"
case $srcdir in /*) ;; *) srcdir=$PWD/$srcdir ;; esac
program=$PWD/clattn
json_value=$PWD/tests/json_value
[ -x "$json_value" ] || json_value=''
work=$PWD/tests/bench.work
rm -rf "$work"
mkdir -p "$work"
cd "$work" || exit 1
failures=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

# Every suite on the CPU; as CSV, so that this needs no jansson.
suites=pyramid,select,forward,backward,decode,patterns,dense,neighborhood,selection-scaling
"$program" bench --quick --backend cpu --len 300 --suite $suites --budget 600s --csv > rows.csv 2> stderr ||
    fail "exit status $?: $(cat stderr)"
[ ! -s stderr ] || fail "noise on standard error: $(cat stderr)"
[ "$(wc -l < rows.csv)" = 22 ] || fail "rows: $(cat rows.csv)"
[ "$(grep -c ',"good","",' rows.csv)" = 21 ] || fail "not good: $(grep -v ',"good",' rows.csv)"
for name in pyramid 'decode pisa' 'decode dense' 'select pisa' 'select flat-mean' 'select flat-lse' 'forward pisa' 'backward pisa' local+log-stride \
    bigbird strided dense '8x16x16 w 4x8x8 s 1x1x1' '8x16x16 w 4x8x8 s 1x4x4' '8x16x16 w 4x8x8 s 2x8x8' flat; do
    grep -q ",\"$name\"," rows.csv || fail "no row $name"
done
head -n 1 rows.csv | grep -q '^schema_version,suite,name,operation,.*,median_seconds,.*,library$' || fail "$(head -n 1 rows.csv)"
[ "$(sed -e 's/"[^"]*"//g' -e 's/[^,]//g' rows.csv | sort -u | wc -l)" = 1 ] || fail "columns: $(cat rows.csv)"
"$program" bench --quick --backend cpu --suite forward --dtype bf16 --len 200 > table 2> stderr || fail "$(cat stderr)"
grep -q '^cpu: ' table || fail "$(cat table)"
grep -q '^forward pisa  *200 .* good$' table || fail "$(cat table)"

# Selectors on files: the bundled sample, whose answers are known; and files of one's own.
data=$srcdir/tests/data/retrieval16k
"$program" bench --quick --backend cpu --suite selection-quality --budget 10m > table 2> stderr || fail "quality: $(cat stderr)"
grep -q '^pisa  *16384  *0\.[0-9]*  *0\.[0-9]*  *0\.[0-9]*  *2 of 16 .* good$' table || fail "quality: $(cat table)"
grep -q '^robust  *16384  *0\.8.*  *0\.[0-9]*  *0\.9[0-9]*  *16 of 16 .* good$' table || fail "quality: $(cat table)"
grep -q '^flat-lse  *16384 .* 16 of 16 .* good$' table || fail "quality: $(cat table)"
"$program" bench --quick --backend cpu --suite selection-quality --q "$data/q.npy" --k "$data/k.npy" --from 16300 --topk 4 \
    --budget 10m --csv > rows.csv 2> stderr || fail "quality: $(cat stderr)"
[ "$(grep -c '^1,"selection-quality","quality .*,"good",' rows.csv)" = 6 ] || fail "quality: $(cat rows.csv)"

# What does not fit into the budget is named.
"$program" bench --backend cpu --suite forward --budget 0.000001 --csv > rows.csv 2> stderr || fail "$(cat stderr)"
[ "$(grep -c ',"skipped","the budget is spent",' rows.csv)" = 2 ] || fail "budget: $(cat rows.csv)"

# Ctrl-C keeps what is done: 24 rows of a second each do not end by themselves before it comes.
"$program" bench --backend cpu --suite select --len 512,1024,1536,2048,2560,3072,3584,4096 --budget 600 --csv \
    > rows.csv 2> stderr &
child=$!
sleep 3
kill -INT $child
wait $child
got=$?
[ $got = 130 ] || fail "interrupted: exit status $got: $(cat stderr)"
[ "$(wc -l < rows.csv)" = 25 ] || fail "interrupted: $(cat rows.csv)"
[ "$(grep -c ',"skipped","interrupted",' rows.csv)" -gt 0 ] || fail "interrupted: $(cat rows.csv)"

if [ -n "$json_value" ]; then
    "$program" bench --quick --backend cpu --suite pyramid,forward --len 200 --json > out.json 2> stderr || fail "$(cat stderr)"
    "$json_value" schema schema_version complete devices.0.backend rows.0.name rows.0.state rows.1.kv_len rows.1.clock \
        rows.1.lists_wrong rows.1.tuning < out.json > values || fail 'JSON lacks something'
    [ "$(tr '\n' ' ' < values)" = 'clattn-bench 1 true cpu pyramid good 200 wall 0 built in ' ] || fail "JSON: $(cat values)"
    "$json_value" devices.0.ceiling_flops_per_second rows.1.roofline_share rows.1.speedup_over_dense rows.1.flops \
        rows.1.compile_seconds rows.1.first_seconds rows.1.transfer_seconds rows.1.wall_seconds rows.1.samples \
        rows.1.p5_seconds rows.1.p95_seconds rows.1.wall_median_seconds rows.1.recall rows.1.error rows.1.device rows.1.driver rows.1.tier rows.1.library \
        < out.json > values || fail 'JSON lacks something'
fi

# refused STATUS WORDS ARGUMENT...
refused() {
    wanted=$1 words=$2
    shift 2
    "$program" bench "$@" > stdout 2> stderr
    got=$?
    [ "$got" = "$wanted" ] || fail "$*: exit status $got instead of $wanted"
    [ ! -s stdout ] || fail "$*: something on standard output"
    grep -F -q -e "$words" stderr || fail "$*: '$words' is not in: $(cat stderr)"
}
refused 2 "'speed' is not one of pyramid, select" --suite forward,speed
refused 2 '--q and --k go together' --suite selection-quality --q "$data/q.npy"
refused 2 'need --q and --k' --suite selection-quality --positions "$data/pos.npy"
refused 2 '--answers and --needles go together' --suite selection-quality --q "$data/q.npy" --k "$data/k.npy" \
    --answers "$data/answer_pos.npy"
refused 1 'do not fit' --suite selection-quality --q "$data/k.npy" --k "$data/q.npy"
refused 1 'absent.npy' --suite selection-quality --q absent.npy --k "$data/k.npy"
refused 2 "--len: '10,x' is not a list" --len 10,x
refused 2 '--q-heads 3 is not a multiple of --kv-heads 2' --q-heads 3 --kv-heads 2
refused 2 'a positive number of seconds is needed' --budget 0
refused 2 "'60x' is no time" --budget 60x
"$program" bench --quick --backend cpu --suite dense --len 100 --threads 1 > table 2> stderr || fail "$(cat stderr)"
grep -q "processor time\$" table || fail "$(cat table)"
refused 2 'both want standard output' --json --csv
refused 2 '--device all does not go with --backend cpu' --device all --backend cpu
refused 2 'does not go with a single --device' --device 0 --backend all
refused 77 'no-such-device' --device no-such-device

[ "$failures" = 0 ] || exit 1
echo 'bench: all suites verified, outputs, budget and interruption as expected'
cd .. && rm -rf "$work"
