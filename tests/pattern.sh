# SPDX-License-Identifier: MIT
# clattn pattern: counts, maps, usage errors.
set -eu
work=tests/pattern.work
rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT

fail() {
    echo "FAIL: $*" >&2
    exit 1
}

pattern='local:1+log-stride+anchors:first,middle,last'
./clattn pattern --pattern "$pattern" --len 4096 --block 32 > "$work/out"
grep -q '^blocks       1074 in 128 lists: 1 to 10, mean 8.39; all would be 8256$' "$work/out" || fail "$(cat "$work/out")"
grep -q '^connections  1036288 of 8390656 pairs, density 0.1235$' "$work/out" || fail "$(cat "$work/out")"
grep -q '^unconnected  0 rows$' "$work/out" || fail "$(cat "$work/out")"

# A map that can be counted by eye, as text and as SVG.
./clattn pattern --pattern 'local:0+anchors:first' --len 320 --block 64 --map --svg "$work/map.svg" > "$work/out"
sed -n '/^#/,$p' "$work/out" > "$work/map"
printf '%s\n' '#' '##' '#.#' '#..#' '#...#' | cmp - "$work/map" || fail "map: $(cat "$work/map")"
grep -q 'viewBox="0 0 5 5"' "$work/map.svg" || fail 'SVG of another size'
[ "$(grep -c '<rect x=' "$work/map.svg")" = 11 ] || fail "SVG: $(cat "$work/map.svg")"
[ "$(tail -n 1 "$work/map.svg")" = '</svg>' ] || fail 'SVG is cut off'
./clattn pattern --pattern 'local:0 ; 1 = dense' --heads 2 --head 1 --len 1000 --cells 2 --no-causal --map > "$work/out"
grep -q '^map          a cell is 8 lists x 8 blocks$' "$work/out" || fail "$(cat "$work/out")"
[ "$(tail -n 2 "$work/out" | tr '\n' ' ')" = '## ## ' ] || fail "$(cat "$work/out")"

# refused STATUS WORDS ARGUMENT...
refused() {
    wanted=$1 words=$2 status=0
    shift 2
    ./clattn pattern "$@" > "$work/out" 2> "$work/err" || status=$?
    [ "$status" = "$wanted" ] || fail "$*: exit status $status instead of $wanted"
    [ ! -s "$work/out" ] || fail "$*: something on standard output"
    grep -F -q -e "$words" "$work/err" || fail "$*: '$words' is not in: $(cat "$work/err")"
}

refused 2 '--pattern TEXT is missing'
refused 2 "column 9: unknown pattern 'lokal'" --pattern local:1+lokal
refused 2 'is not below --heads' --pattern local --head 1
refused 2 'the pattern has one for head 3' --pattern 'local;3=dense' --heads 2
refused 2 "--block: '48'" --pattern local --block 48
refused 2 'both want standard output' --pattern local --json --map
refused 1 'No such file' --pattern local --svg "$work/none/map.svg"
echo 'pattern: counts, maps and refusals as expected'
